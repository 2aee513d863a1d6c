/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode: the group's buffers, which are a window of their own, and the number of blocks. */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/memory/cuda/cuda_memory.h"
#include "handles/cuda/handle.h"

/* ---- sizes --------------------------------------------------------------------------------- */

/* Locate everything in the window. Quantised rows fit: their scales take no more bytes than
 * quantising saves. */
static EpBufferLayout buffer_layout(const EpGroupConfig *config, int32_t num_ranks) {
    EpPlacement placement = ep_config_placement(config, num_ranks);
    EpArena arena = {.unit = EP_STEP_BYTES};
    int64_t sets = ep_config_latency_sets(config, EP_OFFERS_LATENCY),
            sources = 2 * sets * num_ranks;
    int64_t words = EP_HEAD_COUNTS + ep_placement_most(&placement);
    int64_t units = ep_units(8 * (int64_t)config->max_top_k) + ep_units(config->max_row_bytes) +
                    ep_units(config->max_scale_bytes);
    EpBufferLayout b = {.head_bytes = EP_STEP_BYTES * (int32_t)ep_steps(ep_units(4 * words)),
                        .record_bytes = EP_STEP_BYTES * (int32_t)ep_steps(units),
                        .weight_bytes = EP_LINE_BYTES * ep_weight_lines(config->max_top_k),
                        .sum_bytes = (int32_t)ep_round_up(2 * config->max_row_bytes, 128),
                        .max_tokens = config->max_tokens};
    b.state = ep_arena_offset(&arena, sizeof(EpLatencyState));
    b.heads = ep_arena_offset(&arena, sources * b.head_bytes);
    b.records = ep_arena_offset(
        &arena, ep_saturated_product(sources * b.max_tokens, (int64_t)b.record_bytes));
    b.weights = ep_arena_offset(
        &arena, ep_saturated_product(sources * b.max_tokens, (int64_t)b.weight_bytes));
    b.sums = ep_arena_offset(&arena, sets * b.max_tokens * (int64_t)b.sum_bytes);
    b.bytes = arena.bytes;
    return b;
}

int64_t ep_cuda_latency_bytes(const EpGroupConfig *config, int32_t num_ranks) {
    return ep_config_latency_sets(config, EP_OFFERS_LATENCY)
               ? buffer_layout(config, num_ranks).bytes
               : 0;
}

EpWorkspaceLayout ep_workspace_layout(const EpPlanShape *s, int64_t entries, int64_t staged_bytes) {
    int64_t ranks = s->num_ranks, local = s->num_local;
    int64_t counts = ep_max(s->num_experts, ranks * local);
    EpArena arena = {.bytes = ep_round_up(sizeof(EpWorkspace), 16), .unit = 16};
    EpWorkspaceLayout w = {.experts = (int32_t)ep_arena_offset(&arena, 2 * entries)};
    w.counts = (int32_t)ep_arena_offset(&arena, 4 * (counts + ranks));
    w.total = (int32_t)ep_arena_offset(&arena, 4 * local);
    w.offset = (int32_t)ep_arena_offset(&arena, 4 * local);
    w.staged = (int32_t)ep_arena_offset(&arena, staged_bytes);
    w.bytes = (int32_t)arena.bytes; /* handles with more entries than fit are refused */
    return w;
}

/* ---- opening ------------------------------------------------------------------------------- */

/* Refuse more entries than fit into a sending block's shared memory, which holds all of the rank's.
 * So a word of a record's header can hold both an expert and a number of entries. */
EpStatus ep_cuda_check_shape(const EpGroup *group, const EpCall *call, const EpPlanShape *s) {
    const EpGroupConfig *config = &group->config;
    if (s->mode != EP_MODE_LATENCY) return EP_OK;
    if (s->num_experts > INT16_MAX)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config",
                         "expected at most %d experts in latency mode, where an entry's expert has "
                         "two bytes, got %d",
                         INT16_MAX, s->num_experts);
    int64_t entries = (int64_t)s->max_tokens * s->max_top_k;
    int64_t room = ep_cuda(group)->shared_bytes - EP_STATIC_SHARED_BYTES;
    int64_t staged = config->max_row_bytes + ep_round_up(config->max_scale_bytes, 16);
    if (!ep_quant_format(s->quant).bits) staged = 0;
    int64_t most = (room - ep_workspace_layout(s, 0, staged).bytes) / (int64_t)sizeof(int16_t);
    if (entries <= most) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config",
                     "expected max_tokens * max_top_k of at most %lld in latency mode with %d "
                     "experts, got %d * %d",
                     (long long)ep_max(0, most), s->num_experts, s->max_tokens, s->max_top_k);
}

/* Allocate and describe the buffers, all but the window. */
static EpStatus prepare_buffers(EpGroup *group, const EpCall *call) {
    EpCudaLatency *latency = calloc(1, sizeof(*latency));
    ep_cuda(group)->latency = latency;
    if (!latency) return ep_refuse(call, EP_ERR_NO_MEMORY, "config", "out of memory");
    latency->device.layout = buffer_layout(&group->config, group->size);
    latency->device.whole = ep_cuda(group)->whole_lines;
    latency->device.sets = group->latency_sets;
    latency->window = (EpCudaWindow){.bytes = latency->device.layout.bytes, .owned = 1};
    for (int32_t i = 0; i < group->latency_sets; i++)
        EP_TRY(ep_cuda_order_open(group, &latency->order[i]));
    return EP_OK;
}

EpStatus ep_cuda_open_latency(EpGroup *group, const EpCall *call) {
    if (!group->latency_sets) return EP_OK;
    EP_TRY(ep_group_agree(group, call, prepare_buffers(group, call)));
    EpCudaLatency *latency = ep_cuda(group)->latency;
    EP_TRY(ep_cuda_window_open(group, call, &latency->window, latency->device.window));
    latency->device.own = latency->device.window[group->rank];
    latency->device.state = (EpLatencyState *)(latency->device.own + latency->device.layout.state);
    return EP_OK;
}

void ep_cuda_close_latency(EpGroup *group, int together) {
    EpCudaLatency *latency = ep_cuda(group)->latency;
    if (!latency) return;
    if (latency->window.memory) ep_cuda_window_close(group, &latency->window, together);
    for (int32_t i = 0; i < group->latency_sets; i++)
        ep_cuda_order_close(&latency->order[i]);
    free(latency);
    ep_cuda(group)->latency = NULL;
}

/* ---- blocks -------------------------------------------------------------------------------- */

int ep_latency_blocks(const EpCudaGroup *group, EpPhase phase, int64_t tokens, int64_t steps,
                      int percent, EpLatency *latency) {
    int64_t most = group->blocks, work = tokens * group->size * steps;
    int64_t blocks = 1 + 2 * ((work + EP_LATENCY_WARPS - 1) / EP_LATENCY_WARPS);
    blocks = ep_min(most, ep_max(3, blocks));
    int divided = phase == EP_PHASE_BOTH && percent != EP_ALL_SEND && group->size > 1;
    int32_t senders = (int32_t)(divided ? ep_max(1, blocks * percent / 100) : blocks);
    latency->releases = group->blocks >= group->most_blocks;
    latency->receives = phase != EP_PHASE_SEND;
    latency->first_receiver = divided ? senders : 0;
    latency->senders = phase == EP_PHASE_RECEIVE ? 0 : senders;
    latency->ranks = ep_divisor(group->size);
    return (int)blocks;
}
