/* SPDX-License-Identifier: Apache-2.0 */
/* Every layout, over alignments, numbers of experts per token and numbers of ranks. Each case runs
 * all five operations against the oracle. */
#include "tests/cases/run.h"

static void run_alignments(EpLayout layout, int ranks, int top_k) {
    static const int alignments[] = {1, 16, 128};
    for (int a = 0; a < LENGTH(alignments); a++) {
        Case c = case_of("ranks=%d experts=%d top_k=%d alignment=%d weighted=%d scale_bytes=%d "
                         "masked_percent=10 spare_rows=3 global_ids=%d all_weights=%d seed=%d",
                         ranks, top_k > 8 ? 37 : 11, top_k, alignments[a], (ranks + a) % 2 == 0,
                         top_k == 2 ? 12 : 0, a % 2, a / 2 % 2, ranks * 1000 + top_k * 10 + a);
        c.layout = layout, c.row_type = c.sum_type = (EpType)(1 + (ranks + top_k + a) % 3);
        c.index_type = a % 2 ? EP_TYPE_INT64 : EP_TYPE_INT32;
        run_case_on_threads(&c);
    }
}

static void run_ks(EpLayout layout, int ranks) {
    static const int top_ks[] = {1, 2, 8, 32};
    for (int k = 0; k < LENGTH(top_ks); k++)
        run_alignments(layout, ranks, top_ks[k]);
}

#define GRID(name, layout)                                    \
    CasesTest(dispatch_layouts, name##_1, run_ks(layout, 1)); \
    CasesTest(dispatch_layouts, name##_2, run_ks(layout, 2)); \
    CasesTest(dispatch_layouts, name##_3, run_ks(layout, 3)); \
    CasesTest(dispatch_layouts, name##_4, run_ks(layout, 4)); \
    CasesTest(dispatch_layouts, name##_8, run_ks(layout, 8))
GRID(expert_major, EP_LAYOUT_EXPERT_MAJOR);
GRID(flat, EP_LAYOUT_FLAT);
GRID(batched, EP_LAYOUT_BATCHED);
GRID(rank_major, EP_LAYOUT_RANK_MAJOR);

LayoutsTest(dispatch_layouts, sixteen_ranks, "ranks=16 experts=35 top_k=6 weighted=1 alignment=8");
LayoutsTest(dispatch_layouts, sixty_four_ranks,
            "ranks=64 experts=130 top_k=4 max_tokens=3 weighted=1");
LayoutsTest(dispatch_layouts, one_expert_for_all,
            "ranks=3 experts=1 top_k=1 weighted=1 alignment=4");
LayoutsTest(dispatch_layouts, many_experts_on_one_rank,
            "ranks=2 experts=300 top_k=8 weighted=1 alignment=2");
LayoutsTest(dispatch_layouts, tail_is_zeroed_on_request,
            "ranks=3 experts=7 top_k=3 weighted=1 scale_bytes=8 alignment=4 spare_rows=11 "
            "zero_tail=zero");
LayoutsTest(dispatch_layouts, static_capacity,
            "ranks=3 experts=7 top_k=3 weighted=1 alignment=4 capacity=200 rows_per_expert=64 "
            "scale_bytes=4");
LayoutsTest(dispatch_layouts, static_capacity_with_zero_tail,
            "ranks=2 experts=5 top_k=2 weighted=1 alignment=8 capacity=150 "
            "rows_per_expert=40 "
            "scale_bytes=4 spare_rows=2 zero_tail=zero");

Test(dispatch_layouts, fewer_experts_than_ranks, .timeout = 120) {
    run_layouts(case_of("ranks=%d experts=3 top_k=2 weighted=1 alignment=16", GPU_RANKS(5)));
}

/* Padding keeps what was there, in every output of dispatch and combine backward. With a tail that
 * becomes zero, each kind of row is as its own field says. Some slabs have no slots at all. */
Test(dispatch_layouts, padding_is_kept_on_request, .timeout = 120) {
    static const char *const each[] = {
        "alignment=4 rows_per_expert=30", "alignment=4 rows_per_expert=30 weighted=1 scale_bytes=8",
        "alignment=128 rows_per_expert=200 zero_tail=zero quant=fp8",
        "alignment=128 rows_per_expert=200 zero_tail=zero weighted=1 scale_bytes=8"};
    for (int i = 0; i < LENGTH(each); i++)
        run_layouts(case_of("ranks=3 experts=23 top_k=3 spare_rows=11 padding=keep seed=%d %s", i,
                            each[i]));
}

/* The capacity ends within the padding of a slab, or within its slots. */
Test(dispatch_layouts, padding_is_kept_up_to_the_capacity, .timeout = 120) {
    for (int capacity = 20; capacity < 60; capacity += 13)
        run_layouts(case_of("ranks=2 experts=5 alignment=16 weighted=1 capacity=%d zero_tail=%d "
                            "rows_per_expert=21 spare_rows=6 overflow=drop padding=keep",
                            capacity, capacity % 2));
}
