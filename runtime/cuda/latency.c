/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode: how its buffers and its blocks are divided. */
#include "runtime/cuda/latency.h"

#include "runtime/backend.h"
#include "runtime/config.h"

unsigned ep_latency_offers(const EpNodeSizes *nodes) {
    return ep_backend_offers(&ep_backend_cuda, nodes);
}

/* ---- sizes --------------------------------------------------------------------------------- */

/* Locate what several nodes need. */
static void take_messages(const EpGroupConfig *config, const EpNodeSizes *nodes, int64_t sets,
                          EpArena *arena, EpBufferLayout *b) {
    int64_t others = nodes->nodes - 1, ranks = nodes->ranks;
    b->node_rows = ep_config_node_rows(config);
    b->message_heads = (int32_t)ranks * b->head_bytes;
    int64_t rows = b->node_rows, entries = b->entry_places * (int64_t)b->entry_bytes;
    b->message_bytes = EP_STEP_BYTES + b->message_heads +
                       ep_saturated_product(rows, ep_max(b->record_bytes, entries));
    int64_t all = ep_saturated_product(others, b->message_bytes);
    b->messages = ep_arena_offset(arena, ep_saturated_product(2 * sets, all));
    b->partials = ep_arena_offset(
        arena, ep_saturated_product(2 * sets * others * rows,
                                    entries ? entries : ranks * (int64_t)b->record_bytes));
    b->outgoing = ep_arena_offset(arena, all) + EP_STEP_BYTES;
    b->landing = ep_arena_offset(arena, all) + EP_STEP_BYTES;
    if (entries) return;
    b->weights_out = ep_arena_offset(arena, others * ep_weights_stride(b)) + EP_LINE_BYTES;
    b->weights_in = ep_arena_offset(arena, others * ep_weights_stride(b)) + EP_LINE_BYTES;
}

/* Locate everything in the window. Quantised rows fit: their scales take no more bytes than
 * quantising saves. */
EpBufferLayout ep_latency_layout(const EpGroupConfig *config, int32_t num_ranks,
                                 const EpNodeSizes *nodes) {
    EpPlacement placement = ep_config_placement(config, num_ranks);
    EpArena arena = {.unit = EP_STEP_BYTES};
    int64_t sets = ep_config_latency_sets(config, ep_latency_offers(nodes)),
            heads = 2 * sets * num_ranks, sources = 2 * sets * nodes->ranks,
            others = nodes->nodes - 1;
    int64_t words = EP_HEAD_COUNTS + ep_placement_most(&placement);
    int64_t units = ep_units(8 * (int64_t)config->max_top_k) + ep_units(config->max_row_bytes) +
                    ep_units(config->max_scale_bytes);
    int by_entry = config->sums == EP_SUMS_BY_ENTRY, k = config->max_top_k;
    int64_t sum_bytes = by_entry ? k * (int64_t)sizeof(float) : 2 * config->max_row_bytes;
    EpBufferLayout b = {.head_bytes = EP_STEP_BYTES * (int32_t)ep_steps(ep_units(4 * words)),
                        .record_bytes = EP_STEP_BYTES * (int32_t)ep_steps(units),
                        .weight_bytes = EP_LINE_BYTES * ep_weight_lines(config->max_top_k),
                        .sum_bytes = (int32_t)ep_round_up(sum_bytes, 128),
                        .max_tokens = config->max_tokens,
                        .num_heads = num_ranks};
    b.state = ep_arena_offset(&arena, sizeof(EpLatencyState));
    b.heads = ep_arena_offset(&arena, heads * b.head_bytes);
    b.records = ep_arena_offset(
        &arena, ep_saturated_product(sources * b.max_tokens, (int64_t)b.record_bytes));
    if (by_entry) {
        b.entry_places = k;
        b.entry_bytes = EP_STEP_BYTES * (int32_t)ep_entry_steps(ep_units(config->max_row_bytes));
        b.entries = ep_arena_offset(
            &arena, ep_saturated_product(2 * sets * k * b.max_tokens, (int64_t)b.entry_bytes));
    }
    b.weights = ep_arena_offset(
        &arena, by_entry ? 0 : ep_saturated_product(heads * b.max_tokens, (int64_t)b.weight_bytes));
    b.sums = ep_arena_offset(&arena, sets * b.max_tokens * (int64_t)b.sum_bytes);
    if (others > 0) take_messages(config, nodes, sets, &arena, &b);
    b.bytes = arena.bytes;
    return b;
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
    if (s->nodes.nodes > 1) {
        int64_t words = s->max_tokens * (int64_t)ep_need_words(s->nodes.nodes - 1);
        w.sources = (int32_t)ep_arena_offset(&arena, 4 * 3 * ranks);
        w.needs = (int32_t)ep_arena_offset(&arena, 4 * words);
        w.dropped = (int32_t)ep_arena_offset(&arena, 4 * ranks);
    }
    w.bytes = (int32_t)arena.bytes; /* handles with more entries than fit are refused */
    return w;
}

/* ---- blocks -------------------------------------------------------------------------------- */

int ep_latency_blocks(const EpCudaGroup *group, EpPhase phase, int64_t tokens, int64_t steps,
                      int percent, EpLatency *latency) {
    int64_t ranks = latency->nodes.num_others ? latency->layout.num_heads : group->size;
    int64_t most = group->blocks, work = tokens * ranks * steps;
    int64_t blocks = 1 + 2 * ((work + EP_LATENCY_WARPS - 1) / EP_LATENCY_WARPS);
    blocks = ep_min(most, ep_max(3, blocks));
    int divided = phase == EP_PHASE_BOTH && percent != EP_ALL_SEND && group->size > 1;
    int32_t senders = (int32_t)(divided ? ep_max(1, blocks * percent / 100) : blocks);
    latency->releases = group->blocks >= group->most_blocks;
    latency->receives = phase != EP_PHASE_SEND;
    latency->first_receiver = divided ? senders : 0;
    latency->senders = phase == EP_PHASE_RECEIVE ? 0 : senders;
    latency->ranks = ep_divisor((int32_t)ranks);
    return (int)blocks;
}
