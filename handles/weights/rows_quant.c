/* SPDX-License-Identifier: Apache-2.0 */
/* ep_quantise_rows: check the arguments, describe the work, hand it to the backend. */
#include "handles/weights/rows_quant.h"

#include "handles/operation.h"

#define ALIGNMENT 16
#define SCALE_ALIGNMENT 4

/* ---- form ---------------------------------------------------------------------------------- */

static EpStatus read_form(const EpCall *call, const EpRowsForm *given, EpRowsQuant *q) {
    EpRowsForm *form = &q->form;
    *form = (EpRowsForm)EP_ROWS_FORM_INIT;
    EP_TRY(ep_read_struct(call, "form", given, EP_FIRST_SIZE(EpRowsForm, scale_order), form));
    q->format = ep_quant_format(form->quant);
    if (!q->format.bits)
        return ep_refuse(call, EP_ERR_RANGE, "form.quant",
                         "expected an EpQuant other than EP_QUANT_NONE, got %d", (int)form->quant);
    if (form->blocks != EP_BLOCKS_ROWS && form->blocks != EP_BLOCKS_TILES)
        return ep_refuse(call, EP_ERR_RANGE, "form.blocks", "expected an EpBlocks, got %d",
                         (int)form->blocks);
    if (form->transposed != 0 && form->transposed != 1)
        return ep_refuse(call, EP_ERR_RANGE, "form.transposed", "expected 0 or 1, got %d",
                         form->transposed);
    if (form->scale_order == EP_SCALES_SWIZZLED)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "form.scale_order",
                         "expected EP_SCALES_BY_ROW or EP_SCALES_BY_COLUMN, got "
                         "EP_SCALES_SWIZZLED, which dispatch alone writes");
    if (form->scale_order != EP_SCALES_BY_ROW && form->scale_order != EP_SCALES_BY_COLUMN)
        return ep_refuse(call, EP_ERR_RANGE, "form.scale_order", "expected an EpScaleOrder, got %d",
                         (int)form->scale_order);
    return ep_arg_form(call, form->blocks, q->format);
}

/* ---- shapes -------------------------------------------------------------------------------- */

static EpStatus check_rows(const EpCall *call, const EpTensor *rows, EpRowsQuant *q) {
    if (!rows) return ep_refuse(call, EP_ERR_NULL, "rows", "expected a tensor, got NULL");
    EP_TRY(ep_check_struct(call, "rows", rows, sizeof(*rows)));
    if (rows->ndim != 2 && rows->ndim != 3)
        return ep_refuse(call, EP_ERR_NDIM, "rows", "expected 2 or 3 dimensions, got %d",
                         rows->ndim);
    EP_TRY(ep_arg_tensor(call, "rows", rows, rows->ndim));
    EP_TRY(ep_arg_summable(call, "rows", rows));
    EP_TRY(ep_arg_alignment(call, "rows", rows, ALIGNMENT));
    int transposed = q->form.transposed;
    q->size[0] = rows->ndim == 3 ? rows->shape[0] : 1;
    q->size[transposed ? 2 : 1] = rows->shape[rows->ndim - 2];
    q->size[transposed ? 1 : 2] = rows->shape[rows->ndim - 1];
    q->type = rows->type, q->rows = rows->data;
    int64_t length = q->format.block;
    q->block[0] = 1, q->block[2] = length;
    q->block[1] = q->form.blocks == EP_BLOCKS_TILES ? length : 1;
    return EP_OK;
}

/* No block may have rows of two experts. */
static EpStatus check_slabs(const EpCall *call, const EpRowsQuant *q, const EpTensor *rows) {
    int64_t block = q->block[ep_rows_dim(q)];
    if (rows->ndim == 2 && q->group->config.alignment % block)
        return ep_refuse(call, EP_ERR_ALIGNMENT, "rows",
                         "expected the group's alignment to be a multiple of %lld where blocks run "
                         "over several rows, got %d",
                         (long long)block, q->group->config.alignment);
    if (rows->ndim == 3 && rows->shape[1] % block)
        return ep_refuse(call, EP_ERR_ALIGNMENT, "rows",
                         "expected a multiple of %lld in dimension 1 where blocks run over several "
                         "rows, got %lld",
                         (long long)block, (long long)rows->shape[1]);
    return EP_OK;
}

static EpStatus check_shaped(const EpCall *call, const char *argument, const EpTensor *t,
                             EpType type, int32_t ndim, const int64_t shape[3], int64_t unit) {
    EP_TRY(ep_arg_tensor(call, argument, t, ndim));
    EP_TRY(ep_arg_type(call, argument, t, type));
    for (int32_t d = 0; d < ndim; d++)
        EP_TRY(ep_arg_dim(call, argument, t, d, shape[3 - ndim + d], "size"));
    return ep_arg_alignment(call, argument, t, unit);
}

static EpStatus check_outputs(const EpCall *call, int32_t ndim, const EpTensor *out,
                              const EpTensor *scales, EpRowsQuant *q) {
    int by_column = q->form.scale_order == EP_SCALES_BY_COLUMN;
    int64_t down = ep_rows_blocks(q, 1), across = ep_rows_blocks(q, 2);
    int64_t shape[3] = {q->size[0], by_column ? across : down, by_column ? down : across};
    int64_t codes[3] = {q->size[0], q->size[1], ep_quant_width(q->format, q->size[2])};
    EP_TRY(check_shaped(call, "out", out, q->format.type, ndim, codes, ALIGNMENT));
    EP_TRY(check_shaped(call, "scales", scales, ep_quant_scale_type(q->format), ndim, shape,
                        SCALE_ALIGNMENT));
    q->out = out->data, q->scales = scales->data;
    q->scale_step[0] = down * across;
    q->scale_step[1] = by_column ? 1 : across;
    q->scale_step[2] = by_column ? down : 1;
    return EP_OK;
}

static EpStatus check_num_rows(const EpCall *call, const EpTensor *num_rows, EpRowsQuant *q) {
    if (!num_rows) return EP_OK;
    EP_TRY(ep_arg_tensor(call, "num_rows", num_rows, 1));
    EP_TRY(ep_arg_index_type(call, "num_rows", num_rows));
    EP_TRY(ep_arg_dim(call, "num_rows", num_rows, 0, q->size[0], "slabs"));
    q->num_rows = num_rows->data, q->num_rows_type = num_rows->type;
    return EP_OK;
}

EpStatus ep_quantise_rows(EpGroup *group, const EpRowsForm *form, const EpTensor *rows,
                          const EpTensor *num_rows, EpStream stream, const EpTensor *out,
                          const EpTensor *scales) {
    EpCall call = {"ep_quantise_rows", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    EpRowsQuant q = {.group = group, .stream = stream};
    EP_TRY(ep_group_usable(group));
    EP_TRY(read_form(&call, form, &q));
    EP_TRY(check_rows(&call, rows, &q));
    EP_TRY(check_slabs(&call, &q, rows));
    EP_TRY(check_outputs(&call, rows->ndim, out, scales, &q));
    EP_TRY(check_num_rows(&call, num_rows, &q));
    EP_TRY(ep_arg_memory(&call, group, "rows", rows));
    EP_TRY(ep_arg_memory(&call, group, "out", out));
    if (ep_tensor_is_empty(rows)) return EP_OK;
    int before = ep_group_enter(group, call.name);
    EpStatus status = group->backend->quantise_rows(&q);
    ep_group_leave(group, before);
    return status;
}
