/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_ARGS_H
#define EP_RUNTIME_ARGS_H

/**
 * Checks of tensors that callers pass. Each refusal names the argument, what was expected and what
 * was given.
 */

#include "ep/ep_weight.h"
#include "runtime/dtype.h"
#include "runtime/layout.h"
#include "runtime/quant.h"
#include "runtime/status.h"

/**
 * Returns unit * shape[0] * .. * shape[ndim - 1], or INT64_MAX if that is larger, where a size of 0
 * counts as 1: so no product of some of the sizes is larger. Requires unit >= 1 and sizes >= 0. All
 * sizes that come from callers are multiplied here before they are used.
 */
static inline int64_t ep_size_of(int64_t unit, const int64_t *shape, int32_t ndim) {
    for (int32_t d = 0; d < ndim; d++) {
        int64_t size = ep_max(shape[d], 1);
        unit = (unit | size) >> 31 ? ep_saturated_product(unit, size) : unit * size;
    }
    return unit;
}

/** Check struct size, number of dimensions, sizes >= 0, that all bytes are fewer than 2^62, and
 *  that data is given unless empty. */
EpStatus ep_arg_tensor(const EpCall *call, const char *argument, const EpTensor *t, int32_t ndim);

/** Check for one type. */
EpStatus ep_arg_type(const EpCall *call, const char *argument, const EpTensor *t, EpType type);

/** Check for FP32, and data on a multiple of 4 bytes. For weights. */
EpStatus ep_arg_float(const EpCall *call, const char *argument, const EpTensor *t);

/** Check for INT32 or INT64, and data on a multiple of an element's bytes. */
EpStatus ep_arg_index_type(const EpCall *call, const char *argument, const EpTensor *t);

/** Check for BF16, FP16 or FP32. */
EpStatus ep_arg_summable(const EpCall *call, const char *argument, const EpTensor *t);

/** Check that dimension `dim` is `expected`; `what` names it, as in "H". */
EpStatus ep_arg_dim(const EpCall *call, const char *argument, const EpTensor *t, int dim,
                    int64_t expected, const char *what);

/** Check that a row (the last dimension) has `unit` .. `most` bytes, a multiple of `unit`, and that
 *  data is on a multiple of `unit` bytes. */
EpStatus ep_arg_row_bytes(const EpCall *call, const char *argument, const EpTensor *t, int64_t unit,
                          int64_t most);

/** Check that data, unless empty, is on a multiple of `unit` bytes. */
EpStatus ep_arg_alignment(const EpCall *call, const char *argument, const EpTensor *t,
                          int64_t unit);

/** Refuse a number that is no global scale (ep_is_global_scale). */
EpStatus ep_refuse_global_scale(const EpCall *call, float got);

/** Check for a value of EpQuant. */
EpStatus ep_arg_quant(const EpCall *call, const char *argument, EpQuant quant);

/** Check that a format serves weights and rows between GEMMs, whose calls have no global scale, and
 *  has tiles where `blocks`, the call's form.blocks, asks for them. */
EpStatus ep_arg_form(const EpCall *call, EpBlocks blocks, EpQuantFormat format);

static inline int ep_tensor_is_empty(const EpTensor *t) {
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return 1;
    return 0;
}

static inline int64_t ep_tensor_row_elements(const EpTensor *t) {
    return t->shape[t->ndim - 1];
}

static inline int64_t ep_tensor_row_bytes(const EpTensor *t) {
    return ep_tensor_row_elements(t) * (int64_t)ep_type_bytes(t->type);
}

#endif
