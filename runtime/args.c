/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/args.h"

static EpStatus check_shape(const EpCall *call, const char *argument, const EpTensor *t) {
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0)
            return ep_refuse(call, EP_ERR_RANGE, argument,
                             "expected sizes of at least 0, got %lld in dimension %d",
                             (long long)t->shape[i], i);
    }
    if (ep_size_of((int64_t)ep_type_bytes(t->type), t->shape, t->ndim) > EP_ARENA_MOST)
        return ep_refuse(call, EP_ERR_RANGE, argument,
                         "expected fewer than 2^62 bytes, a size of 0 counted as 1, got more");
    if (!t->data && !ep_tensor_is_empty(t))
        return ep_refuse(call, EP_ERR_NULL, argument, "expected data, got NULL");
    return EP_OK;
}

EpStatus ep_arg_tensor(const EpCall *call, const char *argument, const EpTensor *t, int32_t ndim) {
    if (!t) return ep_refuse(call, EP_ERR_NULL, argument, "expected a tensor, got NULL");
    EP_TRY(ep_check_struct(call, argument, t, sizeof(*t)));
    if (t->ndim != ndim)
        return ep_refuse(call, EP_ERR_NDIM, argument, "expected %d dimensions, got %d", ndim,
                         t->ndim);
    if (ep_type_bytes(t->type) == 0)
        return ep_refuse(call, EP_ERR_TYPE, argument, "expected an EpType, got %d", (int)t->type);
    return check_shape(call, argument, t);
}

EpStatus ep_arg_type(const EpCall *call, const char *argument, const EpTensor *t, EpType type) {
    if (t->type == type) return EP_OK;
    return ep_refuse(call, EP_ERR_TYPE, argument, "expected %s, got %s", ep_type_name(type),
                     ep_type_name(t->type));
}

EpStatus ep_arg_float(const EpCall *call, const char *argument, const EpTensor *t) {
    EP_TRY(ep_arg_type(call, argument, t, EP_TYPE_FP32));
    return ep_arg_alignment(call, argument, t, sizeof(float));
}

EpStatus ep_arg_index_type(const EpCall *call, const char *argument, const EpTensor *t) {
    if (ep_type_is_index(t->type))
        return ep_arg_alignment(call, argument, t, (int64_t)ep_type_bytes(t->type));
    return ep_refuse(call, EP_ERR_TYPE, argument, "expected int32 or int64, got %s",
                     ep_type_name(t->type));
}

EpStatus ep_refuse_global_scale(const EpCall *call, float got) {
    return ep_refuse(call, EP_ERR_RANGE, "extras.global_scale",
                     "expected a number from 2^-64 to 2^64, got %g", (double)got);
}

EpStatus ep_arg_quant(const EpCall *call, const char *argument, EpQuant quant) {
    if (quant == EP_QUANT_NONE || ep_quant_format(quant).bits) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, argument, "expected an EpQuant, got %d", (int)quant);
}

/* Returns the name of a format, as in "MXFP8". */
static const char *name_of(EpQuant quant) {
#define NAME(name, ...) [EP_QUANT_##name] = #name,
    static const char *const names[] = {EP_QUANT_MAP(NAME)};
#undef NAME
    return names[quant];
}

EpStatus ep_arg_form(const EpCall *call, EpBlocks blocks, EpQuantFormat format) {
    if (format.scaling == EP_SCALE_GLOBAL)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "form.quant",
                         "expected a format without a global scale, which dispatch alone takes, "
                         "got EP_QUANT_%s",
                         name_of(format.quant));
    if (blocks != EP_BLOCKS_TILES || format.uses & EP_FOR_TILES) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "form.blocks",
                     "expected EP_BLOCKS_ROWS with EP_QUANT_%s, got EP_BLOCKS_TILES",
                     name_of(format.quant));
}

EpStatus ep_arg_summable(const EpCall *call, const char *argument, const EpTensor *t) {
    if (ep_type_is_summable(t->type)) return EP_OK;
    return ep_refuse(call, EP_ERR_TYPE, argument, "expected bf16, fp16 or fp32, got %s",
                     ep_type_name(t->type));
}

EpStatus ep_arg_dim(const EpCall *call, const char *argument, const EpTensor *t, int dim,
                    int64_t expected, const char *what) {
    if (t->shape[dim] == expected) return EP_OK;
    return ep_refuse(call, EP_ERR_SHAPE, argument, "expected %s = %lld in dimension %d, got %lld",
                     what, (long long)expected, dim, (long long)t->shape[dim]);
}

EpStatus ep_arg_row_bytes(const EpCall *call, const char *argument, const EpTensor *t, int64_t unit,
                          int64_t most) {
    int64_t bytes = ep_tensor_row_bytes(t);
    if (bytes < unit || bytes > most || bytes % unit)
        return ep_refuse(call, EP_ERR_ROW_BYTES, argument,
                         "expected rows of a multiple of %lld in %lld .. %lld bytes, got %lld",
                         (long long)unit, (long long)unit, (long long)most, (long long)bytes);
    return ep_arg_alignment(call, argument, t, unit);
}

EpStatus ep_arg_alignment(const EpCall *call, const char *argument, const EpTensor *t,
                          int64_t unit) {
    if ((uintptr_t)t->data % (uintptr_t)unit == 0 || ep_tensor_is_empty(t)) return EP_OK;
    return ep_refuse(call, EP_ERR_ADDRESS, argument, "expected data on a multiple of %lld, got %p",
                     (long long)unit, t->data);
}
