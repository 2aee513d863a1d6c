/* SPDX-License-Identifier: Apache-2.0 */
/* Combine on GPUs, in latency mode: describes it to the kernel, launches it. */
#include "combine/cuda/latency_gather.h"

#include "combine/cuda/backend.h"
#include "handles/cuda/handle.h"

/* Percent of the blocks that send while the others receive; found by experiment. Each row sent is
 * the sum of some slots: where these are few, fewer blocks keep up. */
enum { SENDERS_PERCENT = 50, FEW_SENDERS_PERCENT = 38 };

static int percent_of_senders(const EpGroup *group, int64_t top_k) {
    return top_k < 3 * (int64_t)group->size ? FEW_SENDERS_PERCENT : SENDERS_PERCENT;
}

/* Divide the rows among the sending warps, and the tokens among the receiving warps. */
static void partition(const EpHandle *handle, int64_t num_rows, int blocks,
                      EpLatencyGatherArgs *args) {
    int32_t targets = handle->group->size - args->latency.receives;
    int32_t senders = (int32_t)ep_max(1, args->latency.senders);
    int32_t receivers = blocks - args->latency.first_receiver;
    args->targets = ep_divisor((int32_t)ep_max(1, targets));
    args->sent = ep_partition((int32_t)num_rows * targets, args->steps, EP_SENT_STEPS,
                              senders * EP_LATENCY_WARPS);
    args->latency.received = ep_partition((int32_t)args->t.out_num_rows, args->steps,
                                          EP_REDUCED_AT_ONCE, receivers * EP_LATENCY_WARPS);
}

EpStatus ep_cuda_latency_gather(EpHandle *handle, const EpGather *g) {
    const EpGroup *group = handle->group;
    const EpCudaHandle *state = handle->backend_state;
    EpCudaLatency *latency = ep_cuda_latency(handle);
    int64_t units = ep_units(g->t.row_bytes);
    EpLatencyGatherArgs args = {.group = ep_cuda_launch_group(handle),
                                .plan = ep_cuda_plan(handle),
                                .shape = handle->shape,
                                .latency = latency->device,
                                .t = g->t,
                                .top_k = (int32_t)state->top_k,
                                .row_units = (int32_t)units,
                                .steps = (int32_t)ep_steps(units)};
    const int64_t agreed[] = {state->top_k, g->t.row_bytes, g->t.type};
    args.group.digest = ep_cuda_digest(handle, g->op, agreed, 3);
    int blocks = ep_latency_blocks(&args.group, g->phase, state->num_rows, args.steps,
                                   percent_of_senders(group, state->top_k), &args.latency);
    partition(handle, state->num_rows, blocks, &args);
    return ep_cuda_launch(handle, &(EpCudaLaunch){.launch = ep_cuda_launch_latency_gather,
                                                  .args = &args,
                                                  .blocks = blocks,
                                                  .stream = g->stream,
                                                  .phase = g->phase,
                                                  .own = &latency->order});
}
