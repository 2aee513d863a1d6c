/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's arithmetic on GPUs apart from GEMMs: the kernels of kernels.cu. */

#include "tools/moe/cuda_state.h"

#if EP_WITH_CUDA

#include "tools/common/gpu.h"
#include "tools/moe/kernels.h"

bool cuda_convert(MoeDevice *d, const EpTensor *from, const EpTensor *to, int add) {
    ConvertArgs args = {from->data, to->data, from->type, to->type, tensor_elements(from), add};
    return cuda_ok(moe_launch_convert(&args, cuda_stream_of(d)), "converting");
}

bool cuda_choose(MoeDevice *d, const EpTensor *p, const EpTensor *idx, const EpTensor *weights) {
    ChooseArgs args = {p->data,
                       idx->data,
                       weights->data,
                       p->shape[0],
                       (int32_t)p->shape[1],
                       (int32_t)idx->shape[1]};
    return cuda_ok(moe_launch_choose(&args, cuda_stream_of(d)), "choosing experts");
}

bool cuda_choose_backward(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                          const EpTensor *grad_weights, const EpTensor *grad) {
    ChooseBackwardArgs args = {p->data,
                               grad_weights->data,
                               idx->data,
                               grad->data,
                               p->shape[0],
                               (int32_t)p->shape[1],
                               (int32_t)idx->shape[1]};
    return cuda_ok(moe_launch_choose_backward(&args, cuda_stream_of(d)), "the router's gradient");
}

bool cuda_add(MoeDevice *d, const EpTensor *in, const EpTensor *out) {
    return cuda_convert(d, in, out, 1);
}

/* Rows up to the end of the last slab, padding included: it is computed and not used. */
static int64_t rows_of(const Groups *groups) {
    const int32_t last = groups->num - 1;
    return last < 0 ? 0 : groups->first[last] + groups->count[last];
}

bool cuda_activate(MoeDevice *d, const Groups *groups, const EpTensor *z, const EpTensor *w,
                   const EpTensor *a) {
    ActivateArgs args = {.z = z->data,
                         .w = w ? w->data : NULL,
                         .a = a->data,
                         .rows = rows_of(groups),
                         .width = a->shape[1]};
    return cuda_ok(moe_launch_activate(a->type, &args, cuda_stream_of(d)), "the activation");
}

bool cuda_activate_backward(MoeDevice *d, const Groups *groups, const EpTensor *z,
                            const EpTensor *w, const EpTensor *grad_a, const EpTensor *grad_z,
                            const EpTensor *grad_w) {
    ActivateArgs args = {.z = z->data,
                         .w = w ? w->data : NULL,
                         .grad_a = grad_a->data,
                         .grad_z = grad_z->data,
                         .grad_w = grad_w ? grad_w->data : NULL,
                         .rows = rows_of(groups),
                         .width = grad_a->shape[1]};
    return cuda_ok(moe_launch_activate_backward(z->type, &args, cuda_stream_of(d)),
                   "the activation's gradient");
}

bool cuda_dequantise(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                     int64_t columns, const EpTensor *out) {
    DequantiseArgs args = {.q = q->data,
                           .scales = scales->data,
                           .out = out->data,
                           .count = tensor_elements(q),
                           .height = q->shape[1],
                           .width = q->shape[2],
                           .block_rows = rows,
                           .block_columns = columns,
                           .scales_per_matrix = scales->shape[1] * scales->shape[2],
                           .scales_per_row = scales->shape[2],
                           .bytes = scales->type == EP_TYPE_UINT8};
    return cuda_ok(moe_launch_dequantise(&args, cuda_stream_of(d)), "dequantising");
}

#endif
