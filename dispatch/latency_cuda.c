/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode's operations: describes each to its kernel, and launches it. */
#include "dispatch/latency_cuda.h"

#include "handles/handle_cuda.h"
#include "handles/ops.h"
#include "runtime/cuda_limits.h"

#define BLOCK_WARPS 16 /* of the kernels */

/* ---- order --------------------------------------------------------------------------------- */

/* First halves and whole operations keep the group's order. Second halves do not: they follow their
 * first half, and what the handle does next follows them. */
static EpStatus enter(const EpHandle *handle, EpHalf half, EpStream stream, EpCudaPlace *place) {
    const EpGroup *group = handle->group;
    EP_TRY(ep_cuda_place(group, stream, place));
    if (half != EP_WAIT_HALF) EP_TRY(ep_cuda_order_enter(group, &ep_cuda(group)->order, place));
    return ep_cuda_order_enter(group, &ep_cuda_latency(handle)->order, place);
}

static EpStatus leave(const EpHandle *handle, EpHalf half, const EpCudaPlace *place, int launched) {
    const EpGroup *group = handle->group;
    EpCudaOrder *own = &ep_cuda_latency(handle)->order;
    if (half != EP_WAIT_HALF)
        EP_TRY(ep_cuda_order_leave(group, &ep_cuda(group)->order, place, launched));
    if (half != EP_WHOLE) return ep_cuda_order_leave(group, own, place, launched);
    ep_cuda_order_forget(own, place); /* the group's order is enough */
    return EP_OK;
}

/* ---- dispatch ------------------------------------------------------------------------------ */

/* Of a hundred blocks those that send, while the others receive: found by trying. Stores to other
 * GPUs fill the way out of a multiprocessor, behind which its loads wait. A dispatch that quantises
 * needs all blocks to send, which then receive. */
enum { DISPATCH_SENDERS = 40, SUM_SENDERS = 50, FEW_SUM_SENDERS = 38, ALL_SEND = 100 };

/* Of how many slots a row that comes back is the sum: where these are few, fewer blocks keep up. */
static int combine_senders(const EpGroup *group, int64_t top_k) {
    return top_k < 3 * (int64_t)group->size ? FEW_SUM_SENDERS : SUM_SENDERS;
}

/* As many blocks as have something to send and as many that have something to receive, if all ranks
 * have as many tokens as this one; one besides that tells of the routing. */
static int choose_blocks(const EpGroup *group, EpHalf half, int64_t tokens, int64_t steps,
                         int percent, EpLatency *latency) {
    int64_t most = ep_cuda(group)->device.blocks, work = tokens * group->size * steps;
    int64_t blocks = 1 + 2 * ((work + BLOCK_WARPS - 1) / BLOCK_WARPS);
    blocks = ep_min(most, ep_max(3, blocks));
    int divided = half == EP_WHOLE && percent != ALL_SEND && group->size > 1;
    int32_t senders = (int32_t)(divided ? ep_max(1, blocks * percent / 100) : blocks);
    latency->receives = half != EP_SEND_HALF;
    latency->first_receiver = divided ? senders : 0;
    latency->senders = half == EP_WAIT_HALF ? 0 : senders;
    latency->ranks = ep_divisor(group->size);
    return (int)blocks;
}

static EpRecordShape shape_record(const EpHandle *handle, const EpScatter *s, int64_t top_k) {
    int64_t words = top_k * (s->carries_weights ? 2 : 1);
    EpRecordShape r = {.header_units = (int32_t)ep_units(4 * words),
                       .row_units = (int32_t)ep_units(s->row_bytes),
                       .scale_units = (int32_t)ep_units(s->scale_bytes)};
    while (1u << r.expert_bits <= (uint32_t)handle->shape.num_experts)
        r.expert_bits++;
    r.steps = (int32_t)ep_steps(r.header_units + r.row_units + r.scale_units);
    return r;
}

/* The routing of this dispatch, or, in its second half, of the first. */
static void describe_route(EpHandle *handle, const EpScatter *s) {
    EpPrepareArgs *route = &ep_cuda_latency(handle)->route;
    int64_t agreed[2 * EP_ROUND_FACTS];
    if (!s->routing) return;
    ep_cuda_describe_routing(handle, s->routing, route, agreed);
    const int64_t row[] = {s->row_bytes, s->type, s->scale_bytes, s->carries_weights, 0};
    memcpy(agreed + EP_ROUND_FACTS, row, sizeof(row));
    route->group.digest = ep_cuda_digest(handle, &ep_op_route, agreed, 2 * EP_ROUND_FACTS);
}

EpStatus ep_cuda_latency_scatter(EpHandle *handle, const EpScatter *s) {
    const EpGroup *group = handle->group;
    EpCudaLatency *latency = ep_cuda_latency(handle);
    describe_route(handle, s);
    EpLatencyScatterArgs args = {.route = latency->route,
                                 .latency = latency->device,
                                 .record = shape_record(handle, s, latency->route.top_k),
                                 .carries_weights = s->carries_weights,
                                 .quant = s->quant,
                                 .source_type = (int32_t)s->source_type,
                                 .source_row_bytes = (int32_t)s->source_row_bytes,
                                 .row_elements = (int32_t)s->row_elements,
                                 .row_bytes = (int32_t)s->row_bytes,
                                 .scale_bytes = (int32_t)s->scale_bytes,
                                 .rows = s->rows,
                                 .topk_weights = s->topk_weights,
                                 .scales = s->scales,
                                 .out_rows = s->out_rows,
                                 .out_weights = s->out_weights,
                                 .out_scales = s->out_scales,
                                 .scale_map = s->scale_map,
                                 .out_idx = {s->out_idx, s->idx_type == EP_TYPE_INT64},
                                 .out_capacity = s->out_capacity};
    int blocks =
        choose_blocks(group, s->half, latency->route.num_rows, args.record.steps,
                      s->quant > EP_QUANT_NONE ? ALL_SEND : DISPATCH_SENDERS, &args.latency);
    int fill = blocks - args.latency.first_receiver - 1;
    args.latency.received = ep_shares(latency->route.num_rows * group->size, args.record.steps,
                                      EP_FILLED_AT_ONCE, (int32_t)ep_max(1, fill) * BLOCK_WARPS);
    int64_t staged = s->quant > EP_QUANT_NONE ? s->row_bytes + ep_round_up(s->scale_bytes, 16) : 0;
    int64_t entries = (int64_t)latency->route.num_rows * latency->route.top_k;
    args.desk = ep_cuda_desk_layout(&handle->shape, entries, staged);
    args.first_expert = ep_owner_first(&args.route.owners, group->rank);
    while (1 << args.team_shift < latency->route.top_k)
        args.team_shift++;
    EpCudaPlace place;
    EP_TRY(enter(handle, s->half, s->stream, &place));
    int64_t seen = ep_cuda_steps_seen(handle);
    int launched = ep_cuda_launch_latency_scatter(&args, blocks, place.stream);
    EP_TRY(leave(handle, s->half, &place, launched));
    if (s->routing) ep_cuda_note_routing(handle, s->routing, place.captures, seen);
    return EP_OK;
}

/* ---- combine ------------------------------------------------------------------------------- */

EpStatus ep_cuda_latency_gather(EpHandle *handle, const EpGather *g) {
    const EpGroup *group = handle->group;
    const EpCudaHandle *state = handle->backend_state;
    int64_t units = ep_units(g->row_bytes);
    EpLatencyGatherArgs args = {.group = ep_cuda(group)->device,
                                .plan = ep_cuda_plan(handle),
                                .shape = handle->shape,
                                .latency = ep_cuda_latency(handle)->device,
                                .top_k = (int32_t)state->top_k,
                                .type = (int32_t)g->type,
                                .row_units = (int32_t)units,
                                .steps = (int32_t)ep_steps(units),
                                .row_bytes = g->row_bytes,
                                .rows = g->rows,
                                .weighs = g->weighs,
                                .slot_weights = g->slot_weights,
                                .out_rows = g->out_rows,
                                .out_num_rows = g->out_num_rows};
    const int64_t agreed[] = {state->top_k, g->row_bytes, g->type};
    args.group.digest = ep_cuda_digest(handle, g->op, agreed, 3);
    int blocks = choose_blocks(group, g->half, state->num_rows, args.steps,
                               combine_senders(group, state->top_k), &args.latency);
    int32_t kinds = group->size - args.latency.receives;
    args.kinds = ep_divisor((int32_t)ep_max(1, kinds));
    args.sent = ep_shares((int32_t)state->num_rows * kinds, args.steps, EP_SUMMED_STEPS,
                          (int32_t)ep_max(1, args.latency.senders) * BLOCK_WARPS);
    args.latency.received = ep_shares((int32_t)g->out_num_rows, args.steps, EP_REDUCED_AT_ONCE,
                                      (blocks - args.latency.first_receiver) * BLOCK_WARPS);
    EpCudaPlace place;
    EP_TRY(enter(handle, g->half, g->stream, &place));
    return leave(handle, g->half, &place,
                 ep_cuda_launch_latency_gather(&args, blocks, place.stream));
}
