/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/on_gpu.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "handles/handle.h"
#include "tests/gpu/has.h"
#include "tests/gpu/moved.h"

#undef ep_prepare
#undef ep_dispatch
#undef ep_dispatch_send
#undef ep_dispatch_wait
#undef ep_combine
#undef ep_combine_send
#undef ep_combine_wait
#undef ep_dispatch_backward
#undef ep_combine_backward
#undef ep_combine_with
#undef ep_combine_wait_with
#undef ep_dispatch_backward_with
#undef ep_quantise_rows
#undef ep_weight_gather
#undef ep_weight_reduce
#undef ep_weight_amax
#undef ep_handle_destroy
#undef ep_group_destroy

/* Between nodes of GPUs there is none. */
int gpu_has_latency(void) {
    return !getenv("LIBEP_TEST_NODES");
}

int gpu_has_quant(void) {
    return TESTS_HAVE_QUANT;
}

static EpStatus synchronize(EpStatus status) {
    cudaError_t error = status == EP_OK ? cudaDeviceSynchronize() : cudaSuccess;
    if (error == cudaSuccess) return status;
    return ep_set_last_error(EP_ERR_SYSTEM, cudaGetErrorString(error));
}

static EpStatus settle(Moved *m, EpStatus status) {
    status = synchronize(status);
    moved_home(m);
    moved_release(m);
    return status;
}

/* ---- life ---------------------------------------------------------------------------------- */

void gpu_handle_destroy(EpHandle *handle) {
    moved_forget(handle);
    ep_handle_destroy(handle);
}

void gpu_group_destroy(EpGroup *group) {
    moved_forget_all(group);
    ep_group_destroy(group);
}

/* ---- whole operations ---------------------------------------------------------------------- */

/* Returns `out`, or `moved` with copies of its vectors. */
static const EpPlanTensors *move_numbers(Moved *m, const EpPlanTensors *out, EpPlanTensors *moved) {
    if (!out || out->struct_size != sizeof(*out)) return out;
    *moved = *out;
    moved->expert_counts = moved_output(m, out->expert_counts);
    moved->expert_padded = moved_output(m, out->expert_padded);
    moved->expert_offsets = moved_output(m, out->expert_offsets);
    moved->totals = moved_output(m, out->totals);
    moved->source_counts = moved_output(m, out->source_counts);
    moved->recv_rows = moved_output(m, out->recv_rows);
    moved->needed_rows = moved_output(m, out->needed_rows);
    moved->dropped_slots = moved_output(m, out->dropped_slots);
    moved->source_rows = moved_output(m, out->source_rows);
    return moved;
}

EpStatus gpu_prepare(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                     const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *out) {
    Moved m = {.count = 0};
    EpPlanTensors moved;
    plan = moved_output(&m, plan);
    out = move_numbers(&m, out, &moved);
    topk_idx = moved_input(&m, topk_idx), num_tokens = moved_input(&m, num_tokens);
    EpStatus status = ep_prepare(handle, plan, topk_idx, num_tokens, stream, out);
    if (status != EP_OK || !ep_handle_is_latency(handle)) return settle(&m, status);
    moved_keep(handle, &m);
    return status;
}

EpStatus gpu_dispatch(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                      const EpTensor *tokens, const EpTensor *topk_weights, const EpTensor *scales,
                      EpStream stream, const EpTensor *recv_tokens,
                      const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                      const EpTensor *recv_topk_idx) {
    Moved m = {.count = 0};
    EpPlanTensors numbers;
    EpPrepare outputs;
    plan = moved_output(&m, plan);
    if (prepare && prepare->struct_size == sizeof(*prepare) && !prepare->topk_idx) {
        outputs = *prepare, outputs.out = move_numbers(&m, prepare->out, &numbers);
        prepare = &outputs;
    }
    tokens = moved_input(&m, tokens), topk_weights = moved_input(&m, topk_weights),
    scales = moved_input(&m, scales);
    recv_tokens = moved_output(&m, recv_tokens),
    recv_topk_weights = moved_output(&m, recv_topk_weights);
    recv_scales = moved_output(&m, recv_scales), recv_topk_idx = moved_output(&m, recv_topk_idx);
    moved_refresh(handle);
    EpStatus status =
        settle(&m, ep_dispatch(handle, plan, prepare, tokens, topk_weights, scales, stream,
                               recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx));
    if (status == EP_OK) moved_deliver(handle);
    return status;
}

EpStatus gpu_combine(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                     const EpTensor *slot_weights, const EpTensor *topk_weights, EpStream stream,
                     const EpTensor *out) {
    Moved m = {.count = 0};
    plan = moved_output(&m, plan);
    expert_out = moved_input(&m, expert_out), slot_weights = moved_input(&m, slot_weights);
    topk_weights = moved_input(&m, topk_weights), out = moved_output(&m, out);
    return settle(&m,
                  ep_combine(handle, plan, expert_out, slot_weights, topk_weights, stream, out));
}

EpStatus gpu_dispatch_backward(EpHandle *handle, const EpTensor *plan,
                               const EpTensor *grad_recv_tokens, const EpTensor *grad_slot_weights,
                               EpStream stream, const EpTensor *grad_tokens,
                               const EpTensor *grad_topk_weights) {
    Moved m = {.count = 0};
    plan = moved_output(&m, plan);
    grad_recv_tokens = moved_input(&m, grad_recv_tokens);
    grad_slot_weights = moved_input(&m, grad_slot_weights);
    grad_tokens = moved_output(&m, grad_tokens),
    grad_topk_weights = moved_output(&m, grad_topk_weights);
    return settle(&m, ep_dispatch_backward(handle, plan, grad_recv_tokens, grad_slot_weights,
                                           stream, grad_tokens, grad_topk_weights));
}

EpStatus gpu_combine_backward(EpHandle *handle, const EpTensor *plan, const EpTensor *grad_out,
                              const EpTensor *slot_weights, const EpTensor *expert_out,
                              EpStream stream, const EpTensor *grad_expert_out,
                              const EpTensor *grad_slot_weights) {
    Moved m = {.count = 0};
    plan = moved_output(&m, plan);
    grad_out = moved_input(&m, grad_out), slot_weights = moved_input(&m, slot_weights);
    expert_out = moved_input(&m, expert_out), grad_expert_out = moved_output(&m, grad_expert_out);
    grad_slot_weights = moved_output(&m, grad_slot_weights);
    return settle(&m, ep_combine_backward(handle, plan, grad_out, slot_weights, expert_out, stream,
                                          grad_expert_out, grad_slot_weights));
}

/* ---- phases -------------------------------------------------------------------------------- */

EpStatus gpu_dispatch_send(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                           const EpTensor *tokens, const EpTensor *topk_weights,
                           const EpTensor *scales, EpStream stream) {
    Moved m = {.count = 0};
    plan = moved_output(&m, plan);
    tokens = moved_input(&m, tokens), topk_weights = moved_input(&m, topk_weights);
    scales = moved_input(&m, scales);
    moved_refresh(handle);
    return settle(&m,
                  ep_dispatch_send(handle, plan, prepare, tokens, topk_weights, scales, stream));
}

EpStatus gpu_dispatch_wait(EpHandle *handle, EpStream stream, const EpTensor *recv_tokens,
                           const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                           const EpTensor *recv_topk_idx) {
    Moved m = {.count = 0};
    recv_tokens = moved_output(&m, recv_tokens);
    recv_topk_weights = moved_output(&m, recv_topk_weights);
    recv_scales = moved_output(&m, recv_scales), recv_topk_idx = moved_output(&m, recv_topk_idx);
    EpStatus status = settle(&m, ep_dispatch_wait(handle, stream, recv_tokens, recv_topk_weights,
                                                  recv_scales, recv_topk_idx));
    if (status == EP_OK) moved_deliver(handle);
    return status;
}

EpStatus gpu_combine_send(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                          const EpTensor *slot_weights, const EpTensor *topk_weights,
                          EpStream stream) {
    Moved m = {.count = 0};
    plan = moved_output(&m, plan);
    expert_out = moved_input(&m, expert_out), slot_weights = moved_input(&m, slot_weights);
    topk_weights = moved_input(&m, topk_weights);
    return settle(&m,
                  ep_combine_send(handle, plan, expert_out, slot_weights, topk_weights, stream));
}

EpStatus gpu_combine_wait(EpHandle *handle, EpStream stream, const EpTensor *out) {
    Moved m = {.count = 0};
    out = moved_output(&m, out);
    return settle(&m, ep_combine_wait(handle, stream, out));
}

/* ---- with extras --------------------------------------------------------------------------- */

/* Returns `extras`, or `moved` with copies of its tensors. */
static const EpExtras *move_extras(Moved *m, const EpExtras *extras, EpExtras *moved) {
    if (!extras || extras->struct_size != sizeof(*extras)) return extras;
    *moved = *extras;
    moved->bias0 = moved_input(m, extras->bias0);
    moved->bias1 = moved_input(m, extras->bias1);
    return moved;
}

EpStatus gpu_combine_with(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                          const EpTensor *slot_weights, const EpTensor *topk_weights,
                          EpStream stream, const EpTensor *out, const EpExtras *extras) {
    Moved m = {.count = 0};
    EpExtras moved;
    plan = moved_output(&m, plan);
    expert_out = moved_input(&m, expert_out), slot_weights = moved_input(&m, slot_weights);
    topk_weights = moved_input(&m, topk_weights), out = moved_output(&m, out);
    extras = move_extras(&m, extras, &moved);
    return settle(&m, ep_combine_with(handle, plan, expert_out, slot_weights, topk_weights, stream,
                                      out, extras));
}

EpStatus gpu_combine_wait_with(EpHandle *handle, EpStream stream, const EpTensor *out,
                               const EpExtras *extras) {
    Moved m = {.count = 0};
    EpExtras moved;
    out = moved_output(&m, out), extras = move_extras(&m, extras, &moved);
    return settle(&m, ep_combine_wait_with(handle, stream, out, extras));
}

EpStatus gpu_dispatch_backward_with(EpHandle *handle, const EpTensor *plan,
                                    const EpTensor *grad_recv_tokens,
                                    const EpTensor *grad_slot_weights, EpStream stream,
                                    const EpTensor *grad_tokens, const EpTensor *grad_topk_weights,
                                    const EpExtras *extras) {
    Moved m = {.count = 0};
    EpExtras moved;
    plan = moved_output(&m, plan);
    grad_recv_tokens = moved_input(&m, grad_recv_tokens);
    grad_slot_weights = moved_input(&m, grad_slot_weights);
    grad_tokens = moved_output(&m, grad_tokens),
    grad_topk_weights = moved_output(&m, grad_topk_weights);
    extras = move_extras(&m, extras, &moved);
    return settle(&m, ep_dispatch_backward_with(handle, plan, grad_recv_tokens, grad_slot_weights,
                                                stream, grad_tokens, grad_topk_weights, extras));
}

/* ---- sharded weights ----------------------------------------------------------------------- */

EpStatus gpu_weight_gather(EpWeight *weight, const EpWeightForm *form, const EpTensor *shard,
                           const EpTensor *workspace, EpStream stream, const EpTensor *out,
                           const EpTensor *scales) {
    Moved m = {.count = 0};
    shard = moved_input(&m, shard), workspace = moved_output(&m, workspace);
    out = moved_output(&m, out), scales = moved_output(&m, scales);
    return settle(&m, ep_weight_gather(weight, form, shard, workspace, stream, out, scales));
}

EpStatus gpu_weight_reduce(EpWeight *weight, const EpTensor *grad, int accumulate,
                           const EpTensor *workspace, EpStream stream, const EpTensor *out) {
    Moved m = {.count = 0};
    grad = moved_input(&m, grad), workspace = moved_output(&m, workspace);
    out = moved_output(&m, out);
    return settle(&m, ep_weight_reduce(weight, grad, accumulate, workspace, stream, out));
}

EpStatus gpu_weight_amax(EpWeight *weight, EpAmaxScope scope, EpStream stream,
                         const EpTensor *amax) {
    Moved m = {.count = 0};
    amax = moved_output(&m, amax);
    return settle(&m, ep_weight_amax(weight, scope, stream, amax));
}

/* ---- quantising ---------------------------------------------------------------------------- */

EpStatus gpu_quantise_rows(EpGroup *group, const EpRowsForm *form, const EpTensor *rows,
                           const EpTensor *num_rows, EpStream stream, const EpTensor *out,
                           const EpTensor *scales) {
    Moved m = {.count = 0};
    rows = moved_input(&m, rows), num_rows = moved_input(&m, num_rows);
    out = moved_output(&m, out), scales = moved_output(&m, scales);
    return settle(&m, ep_quantise_rows(group, form, rows, num_rows, stream, out, scales));
}
