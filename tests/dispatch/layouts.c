/* SPDX-License-Identifier: Apache-2.0 */
/* Every layout, over alignments, numbers of experts per token and numbers of ranks. Each case runs
 * all five operations against the oracle. */
#include "tests/cases/run.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

static const EpType sum_types[] = {EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32};

static void run_alignments(EpLayout layout, int ranks, int top_k) {
    static const int alignments[] = {1, 16, 128};
    for (int a = 0; a < LENGTH(alignments); a++) {
        EpType type = sum_types[(ranks + top_k + a) % 3];
        Case c = {.ranks = ranks,
                  .experts = top_k > 8 ? 37 : 11,
                  .top_k = top_k,
                  .layout = layout,
                  .alignment = alignments[a],
                  .row_type = type,
                  .sum_type = type,
                  .index_type = a % 2 ? EP_TYPE_INT64 : EP_TYPE_INT32,
                  .weighted = (ranks + a) % 2 == 0,
                  .scale_bytes = top_k == 2 ? 12 : 0,
                  .masked_percent = 10,
                  .spare_rows = 3,
                  .global_ids = a % 2,
                  .all_weights = a / 2 % 2,
                  .seed = (uint64_t)(ranks * 1000 + top_k * 10 + a)};
        run_case_on_threads(&c);
    }
}

static void run_grid(EpLayout layout, int ranks) {
    static const int top_ks[] = {1, 2, 8, 32};
    for (int k = 0; k < LENGTH(top_ks); k++)
        run_alignments(layout, ranks, top_ks[k]);
}

#define GRID(layout, value, ranks)                             \
    Test(dispatch_layouts, layout##_##ranks, .timeout = 120) { \
        run_grid(value, ranks);                                \
    }

GRID(expert_major, EP_LAYOUT_EXPERT_MAJOR, 1)
GRID(expert_major, EP_LAYOUT_EXPERT_MAJOR, 2)
GRID(expert_major, EP_LAYOUT_EXPERT_MAJOR, 3)
GRID(expert_major, EP_LAYOUT_EXPERT_MAJOR, 4)
GRID(expert_major, EP_LAYOUT_EXPERT_MAJOR, 8)
GRID(flat, EP_LAYOUT_FLAT, 1)
GRID(flat, EP_LAYOUT_FLAT, 2)
GRID(flat, EP_LAYOUT_FLAT, 3)
GRID(flat, EP_LAYOUT_FLAT, 4)
GRID(flat, EP_LAYOUT_FLAT, 8)
GRID(batched, EP_LAYOUT_BATCHED, 1)
GRID(batched, EP_LAYOUT_BATCHED, 2)
GRID(batched, EP_LAYOUT_BATCHED, 3)
GRID(batched, EP_LAYOUT_BATCHED, 4)
GRID(batched, EP_LAYOUT_BATCHED, 8)
GRID(rank_major, EP_LAYOUT_RANK_MAJOR, 1)
GRID(rank_major, EP_LAYOUT_RANK_MAJOR, 2)
GRID(rank_major, EP_LAYOUT_RANK_MAJOR, 3)
GRID(rank_major, EP_LAYOUT_RANK_MAJOR, 4)
GRID(rank_major, EP_LAYOUT_RANK_MAJOR, 8)

/* Run a case in every layout. */
static void run_layouts(Case c) {
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
        c.layout = (EpLayout)layout;
        run_case_on_threads(&c);
    }
}

Test(dispatch_layouts, sixteen_ranks, .timeout = 120) {
    run_layouts((Case){.ranks = 16, .experts = 35, .top_k = 6, .weighted = 1, .alignment = 8});
}

Test(dispatch_layouts, sixty_four_ranks, .timeout = 120) {
    run_layouts((Case){.ranks = 64, .experts = 130, .top_k = 4, .max_tokens = 3, .weighted = 1});
}

Test(dispatch_layouts, one_expert_for_all, .timeout = 120) {
    run_layouts((Case){.ranks = 3, .experts = 1, .top_k = 1, .weighted = 1, .alignment = 4});
}

Test(dispatch_layouts, fewer_experts_than_ranks, .timeout = 120) {
    run_layouts(
        (Case){.ranks = GPU_RANKS(5), .experts = 3, .top_k = 2, .weighted = 1, .alignment = 16});
}

Test(dispatch_layouts, many_experts_on_one_rank, .timeout = 120) {
    run_layouts((Case){.ranks = 2, .experts = 300, .top_k = 8, .weighted = 1, .alignment = 2});
}

Test(dispatch_layouts, tail_is_zeroed_on_request, .timeout = 120) {
    run_layouts((Case){.ranks = 3,
                       .experts = 7,
                       .top_k = 3,
                       .weighted = 1,
                       .scale_bytes = 8,
                       .alignment = 4,
                       .spare_rows = 11,
                       .zero_tail = 1});
}

/* Padding keeps what was there, in every output of dispatch and combine backward. With a tail that
 * becomes zero, each kind of row is as its own field says. Some slabs have no slots at all. */
Test(dispatch_layouts, padding_is_kept_on_request, .timeout = 120) {
    for (int i = 0; i < 4; i++)
        run_layouts((Case){.ranks = 3,
                           .experts = 23,
                           .top_k = 3,
                           .weighted = i % 2,
                           .scale_bytes = i % 2 ? 8 : 0,
                           .alignment = i < 2 ? 4 : 128,
                           .spare_rows = 11,
                           .rows_per_expert = i < 2 ? 30 : 200,
                           .zero_tail = i / 2,
                           .quant = i == 2 ? EP_QUANT_FP8 : EP_QUANT_NONE,
                           .padding = EP_PADDING_KEEP,
                           .seed = (uint64_t)i});
}

/* The capacity ends within the padding of a slab, or within its slots. */
Test(dispatch_layouts, padding_is_kept_up_to_the_capacity, .timeout = 120) {
    for (int capacity = 20; capacity < 60; capacity += 13)
        run_layouts((Case){.ranks = 2,
                           .experts = 5,
                           .top_k = 2,
                           .alignment = 16,
                           .weighted = 1,
                           .capacity = capacity,
                           .rows_per_expert = 21,
                           .zero_tail = capacity % 2,
                           .spare_rows = 6,
                           .overflow = EP_OVERFLOW_DROP,
                           .padding = EP_PADDING_KEEP});
}

Test(dispatch_layouts, static_capacity, .timeout = 120) {
    run_layouts((Case){.ranks = 3,
                       .experts = 7,
                       .top_k = 3,
                       .weighted = 1,
                       .alignment = 4,
                       .capacity = 200,
                       .rows_per_expert = 64,
                       .scale_bytes = 4});
}

Test(dispatch_layouts, static_capacity_with_zero_tail, .timeout = 120) {
    run_layouts((Case){.ranks = 2,
                       .experts = 5,
                       .top_k = 2,
                       .weighted = 1,
                       .alignment = 8,
                       .capacity = 150,
                       .rows_per_expert = 40,
                       .scale_bytes = 4,
                       .spare_rows = 2,
                       .zero_tail = 1});
}
