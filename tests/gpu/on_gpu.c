/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/on_gpu.h"

#include <cuda_runtime_api.h>

#undef ep_prepare
#undef ep_dispatch
#undef ep_combine
#undef ep_dispatch_backward
#undef ep_combine_backward

/* The tensors of one call, as they are passed. */
typedef struct Moved {
    EpTensor tensor[8];
    void *home[8]; /* where an output belongs; NULL for inputs, which may be constants */
    int count;
} Moved;

static size_t tensor_bytes(const EpTensor *t) {
    size_t bytes = ep_type_bytes(t->type);
    if (t->struct_size != sizeof(*t) || t->ndim < 1 || t->ndim > EP_MAX_DIMS) return 0;
    for (int i = 0; i < t->ndim; i++)
        bytes *= t->shape[i] > 0 ? (size_t)t->shape[i] : 0;
    return bytes;
}

/* What is wrong on purpose is passed as it is. */
static const EpTensor *move(Moved *m, const EpTensor *t, int is_output) {
    size_t bytes = t ? tensor_bytes(t) : 0;
    if (!bytes || !t->data || gpu_owns(t->data) || (uintptr_t)t->data % 4) return t;
    void *data = gpu_allocate(64, bytes);
    if (!data) return t;
    EpTensor *moved = &m->tensor[m->count];
    *moved = *t;
    moved->data = memcpy(data, t->data, bytes);
    m->home[m->count++] = is_output ? t->data : NULL;
    return moved;
}

static EpStatus settle(Moved *m, EpStatus status) {
    cudaError_t error = status == EP_OK ? cudaDeviceSynchronize() : cudaSuccess;
    for (int i = 0; i < m->count; i++) {
        if (m->home[i]) memcpy(m->home[i], m->tensor[i].data, tensor_bytes(&m->tensor[i]));
        gpu_release(m->tensor[i].data);
    }
    if (error == cudaSuccess) return status;
    return ep_set_last_error(EP_ERR_SYSTEM, cudaGetErrorString(error));
}

EpStatus gpu_prepare(EpHandle *handle, const EpTensor *topk_idx, const EpTensor *num_tokens,
                     EpStream stream, const EpPlanTensors *out) {
    Moved m = {.count = 0};
    EpPlanTensors moved;
    if (out && out->struct_size == sizeof(*out)) {
        moved = *out;
        moved.expert_counts = move(&m, out->expert_counts, 1);
        moved.expert_padded = move(&m, out->expert_padded, 1);
        moved.expert_offsets = move(&m, out->expert_offsets, 1);
        moved.totals = move(&m, out->totals, 1);
        moved.source_counts = move(&m, out->source_counts, 1);
        out = &moved;
    }
    topk_idx = move(&m, topk_idx, 0), num_tokens = move(&m, num_tokens, 0);
    return settle(&m, ep_prepare(handle, topk_idx, num_tokens, stream, out));
}

EpStatus gpu_dispatch(EpHandle *handle, const EpTensor *tokens, const EpTensor *topk_weights,
                      const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                      const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                      const EpTensor *recv_topk_idx) {
    Moved m = {.count = 0};
    tokens = move(&m, tokens, 0), topk_weights = move(&m, topk_weights, 0),
    scales = move(&m, scales, 0);
    recv_tokens = move(&m, recv_tokens, 1), recv_topk_weights = move(&m, recv_topk_weights, 1);
    recv_scales = move(&m, recv_scales, 1), recv_topk_idx = move(&m, recv_topk_idx, 1);
    return settle(&m, ep_dispatch(handle, tokens, topk_weights, scales, stream, recv_tokens,
                                  recv_topk_weights, recv_scales, recv_topk_idx));
}

EpStatus gpu_combine(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                     EpStream stream, const EpTensor *out) {
    Moved m = {.count = 0};
    expert_out = move(&m, expert_out, 0), slot_weights = move(&m, slot_weights, 0),
    out = move(&m, out, 1);
    return settle(&m, ep_combine(handle, expert_out, slot_weights, stream, out));
}

EpStatus gpu_dispatch_backward(EpHandle *handle, const EpTensor *grad_recv_tokens,
                               const EpTensor *grad_slot_weights, EpStream stream,
                               const EpTensor *grad_tokens, const EpTensor *grad_topk_weights) {
    Moved m = {.count = 0};
    grad_recv_tokens = move(&m, grad_recv_tokens, 0);
    grad_slot_weights = move(&m, grad_slot_weights, 0);
    grad_tokens = move(&m, grad_tokens, 1), grad_topk_weights = move(&m, grad_topk_weights, 1);
    return settle(&m, ep_dispatch_backward(handle, grad_recv_tokens, grad_slot_weights, stream,
                                           grad_tokens, grad_topk_weights));
}

EpStatus gpu_combine_backward(EpHandle *handle, const EpTensor *grad_out,
                              const EpTensor *slot_weights, const EpTensor *expert_out,
                              EpStream stream, const EpTensor *grad_expert_out,
                              const EpTensor *grad_slot_weights) {
    Moved m = {.count = 0};
    grad_out = move(&m, grad_out, 0), slot_weights = move(&m, slot_weights, 0);
    expert_out = move(&m, expert_out, 0), grad_expert_out = move(&m, grad_expert_out, 1);
    grad_slot_weights = move(&m, grad_slot_weights, 1);
    return settle(&m, ep_combine_backward(handle, grad_out, slot_weights, expert_out, stream,
                                          grad_expert_out, grad_slot_weights));
}
