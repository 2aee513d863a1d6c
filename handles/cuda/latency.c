/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode: a handle's buffers, which are a window of their own, and the number of blocks. */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "handles/cuda/handle.h"

/* ---- sizes --------------------------------------------------------------------------------- */

/* Locate everything in a handle's window. Quantised rows fit: their scales take no more bytes than
 * quantising saves. */
static EpBufferLayout buffer_layout(const EpPlanShape *shape, const EpGroupConfig *config) {
    EpPlacement placement = ep_config_placement(config, shape->num_ranks);
    EpArena arena = {.unit = EP_STEP_BYTES};
    int64_t sources = 2 * (int64_t)shape->num_ranks;
    int64_t words = EP_HEAD_COUNTS + ep_placement_most(&placement);
    int64_t units = ep_units(8 * (int64_t)shape->max_top_k) + ep_units(config->max_row_bytes) +
                    ep_units(config->max_scale_bytes);
    EpBufferLayout b = {.head_bytes = EP_STEP_BYTES * (int32_t)ep_steps(ep_units(4 * words)),
                        .record_bytes = EP_STEP_BYTES * (int32_t)ep_steps(units),
                        .sum_bytes = (int32_t)ep_round_up(2 * config->max_row_bytes, 128),
                        .max_tokens = shape->max_tokens};
    b.state = ep_arena_offset(&arena, sizeof(EpLatencyState));
    b.heads = ep_arena_offset(&arena, sources * b.head_bytes);
    b.records = ep_arena_offset(&arena, sources * b.max_tokens * b.record_bytes);
    b.sums = ep_arena_offset(&arena, (int64_t)b.max_tokens * b.sum_bytes);
    b.bytes = arena.bytes;
    return b;
}

int64_t ep_cuda_buffer_bytes(const EpPlanShape *shape, const EpGroupConfig *config) {
    return buffer_layout(shape, config).bytes;
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
static EpStatus check_entries(const EpHandle *handle, const EpCall *call) {
    const EpPlanShape *s = &handle->shape;
    const EpGroupConfig *config = &handle->group->config;
    if (s->num_experts > INT16_MAX)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config",
                         "expected at most %d experts in latency mode, where an entry's expert has "
                         "two bytes, got %d",
                         INT16_MAX, s->num_experts);
    int64_t entries = (int64_t)s->max_tokens * s->max_top_k;
    int64_t room = ep_cuda(handle->group)->shared_bytes - EP_STATIC_SHARED_BYTES;
    int64_t staged = config->max_row_bytes + ep_round_up(config->max_scale_bytes, 16);
    if (s->quant <= EP_QUANT_NONE) staged = 0;
    int64_t most = (room - ep_workspace_layout(s, 0, staged).bytes) / (int64_t)sizeof(int16_t);
    if (entries <= most) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config",
                     "expected max_tokens * max_top_k of at most %lld in latency mode with %d "
                     "experts, got %d * %d",
                     (long long)ep_max(0, most), s->num_experts, s->max_tokens, s->max_top_k);
}

/* Allocate and describe a handle's buffers, all but the window. */
static EpStatus prepare_buffers(EpHandle *handle, const EpCall *call) {
    EP_TRY(check_entries(handle, call));
    EpCudaLatency *latency = calloc(1, sizeof(*latency));
    handle->buffer = latency;
    if (!latency) return ep_refuse(call, EP_ERR_NO_MEMORY, "buffers", "out of memory");
    latency->device.layout = buffer_layout(&handle->shape, &handle->group->config);
    latency->device.whole = ep_cuda(handle->group)->whole_lines;
    latency->window = (EpCudaWindow){.bytes = latency->device.layout.bytes, .owned = 1};
    return ep_cuda_order_open(handle->group, &latency->order);
}

EpStatus ep_cuda_open_buffers(EpHandle *handle, const EpCall *call, EpStatus mine) {
    EpGroup *group = handle->group;
    if (mine == EP_OK) mine = prepare_buffers(handle, call);
    EP_TRY(ep_group_agree(group, call, mine));
    EpCudaLatency *latency = ep_cuda_latency(handle);
    EP_TRY(ep_cuda_window_open(group, call, &latency->window, latency->device.window));
    latency->device.own = latency->device.window[group->rank];
    latency->device.state = (EpLatencyState *)(latency->device.own + latency->device.layout.state);
    return EP_OK;
}

/* Peers may store here until they have finished, so ranks agree before the window is freed. */
void ep_cuda_close_buffers(EpHandle *handle) {
    EpGroup *group = handle->group;
    EpCall call = {"ep_handle_destroy", group->rank};
    EpCudaLatency *latency = ep_cuda_latency(handle);
    if (!latency) return;
    if (latency->window.memory) {
        EpStatus finished = ep_cuda_finish(group);
        ep_cuda_poll(group);
        int usable = group->failed == EP_OK && !group->lost;
        int together = usable && ep_group_agree(group, &call, finished) == EP_OK;
        ep_cuda_window_close(group, &latency->window, together);
    }
    ep_cuda_order_close(&latency->order);
    free(latency);
    handle->buffer = NULL;
}

/* ---- blocks -------------------------------------------------------------------------------- */

int ep_latency_blocks(const EpCudaGroup *group, EpPhase phase, int64_t tokens, int64_t steps,
                      int percent, EpLatency *latency) {
    int64_t most = group->blocks, work = tokens * group->size * steps;
    int64_t blocks = 1 + 2 * ((work + EP_LATENCY_WARPS - 1) / EP_LATENCY_WARPS);
    blocks = ep_min(most, ep_max(3, blocks));
    int divided = phase == EP_PHASE_BOTH && percent != EP_ALL_SEND && group->size > 1;
    int32_t senders = (int32_t)(divided ? ep_max(1, blocks * percent / 100) : blocks);
    latency->receives = phase != EP_PHASE_SEND;
    latency->first_receiver = divided ? senders : 0;
    latency->senders = phase == EP_PHASE_RECEIVE ? 0 : senders;
    latency->ranks = ep_divisor(group->size);
    return (int)blocks;
}
