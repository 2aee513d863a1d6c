/* SPDX-License-Identifier: Apache-2.0 */
/* Every layout, over alignments, numbers of experts per token and numbers of ranks. Each case runs
 * all five operations against the oracle. */
#include "tests/cases/run.h"

#define KS                                                                              \
    "top_k=1,2,8,32 alignment=1,16,128 experts=11|37 weighted=0|1|1 scale_bytes=0|12 "  \
    "row_type=bf16|fp16|fp32|fp32 sum_type=bf16|fp16|fp32|fp32 index_type=int32|int64 " \
    "masked_percent=10 spare_rows=3 global_ids=0|1 all_weights=0|0|1 "
#define RANKS_1_TO_8(name, layout)                               \
    GridTest(dispatch_layouts, name##_1, KS, "ranks=1 " layout); \
    GridTest(dispatch_layouts, name##_2, KS, "ranks=2 " layout); \
    GridTest(dispatch_layouts, name##_3, KS, "ranks=3 " layout); \
    GridTest(dispatch_layouts, name##_4, KS, "ranks=4 " layout); \
    GridTest(dispatch_layouts, name##_8, KS, "ranks=8 " layout)
RANKS_1_TO_8(expert_major, "layout=expert-major");
RANKS_1_TO_8(flat, "layout=flat");
RANKS_1_TO_8(batched, "layout=batched");
RANKS_1_TO_8(rank_major, "layout=rank-major");

#define EachLayout(name, text) GridTest(dispatch_layouts, name, EACH_LAYOUT "weighted=1", text)
EachLayout(sixteen_ranks, "ranks=16 experts=35 top_k=6 alignment=8");
EachLayout(sixty_four_ranks, "ranks=64 experts=130 top_k=4 max_tokens=3");
EachLayout(one_expert_for_all, "ranks=3 experts=1 top_k=1 alignment=4");
EachLayout(many_experts_on_one_rank, "ranks=2 experts=300 top_k=8 alignment=2");
EachLayout(tail_is_zeroed_on_request,
           "ranks=3 experts=7 top_k=3 scale_bytes=8 alignment=4 spare_rows=11 zero_tail=zero");
EachLayout(static_capacity,
           "ranks=3 experts=7 top_k=3 alignment=4 capacity=200 rows_per_expert=64 scale_bytes=4");
EachLayout(static_capacity_with_zero_tail,
           "ranks=2 experts=5 top_k=2 alignment=8 capacity=150 rows_per_expert=40 scale_bytes=4 "
           "spare_rows=2 zero_tail=zero");

CasesTest(dispatch_layouts, fewer_experts_than_ranks,
          run_grid(EACH_LAYOUT "ranks=%d experts=3 top_k=2 weighted=1 alignment=16", GPU_RANKS(5)));

/* Padding keeps what was there, in every output of dispatch and combine backward. With a tail that
 * becomes zero, each kind of row is as its own field says. Some slabs have no slots at all. */
GridTest(dispatch_layouts, padding_is_kept_on_request,
         EACH_LAYOUT "ranks=3 experts=23 top_k=3 spare_rows=11 padding=keep",
         "alignment=4 rows_per_expert=30",
         "alignment=4 rows_per_expert=30 weighted=1 scale_bytes=8",
         "alignment=128 rows_per_expert=200 zero_tail=zero quant=fp8",
         "alignment=128 rows_per_expert=200 zero_tail=zero weighted=1 scale_bytes=8");
/* The capacity ends within the padding of a slab, or within its slots. */
GridTest(dispatch_layouts, padding_is_kept_up_to_the_capacity,
         EACH_LAYOUT "ranks=2 experts=5 alignment=16 weighted=1 rows_per_expert=21",
         "capacity=20,33,46,59 zero_tail=keep|zero spare_rows=6 overflow=drop padding=keep");
