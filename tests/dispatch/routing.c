/* SPDX-License-Identifier: Apache-2.0 */
/* Uncommon routings: no tokens, one rank without tokens, one expert for all tokens, and entries
 * that are masked, duplicate or invalid. Rows have weights and scales. */
#include "tests/cases/run.h"

#define RoutingTest(name, ...) \
    GridTest(dispatch_routing, name, EACH_LAYOUT "weighted=1 scale_bytes=8", __VA_ARGS__)
RoutingTest(no_tokens_at_all, "ranks=3 spread=none alignment=16");
RoutingTest(one_rank_without_tokens, "ranks=4 spread=hole alignment=2");
RoutingTest(one_rank_alone_with_tokens, "ranks=4 spread=alone alignment=2");
RoutingTest(every_token_to_one_expert,
            "ranks=3 experts=8 top_k=1 spread=full routing=one-expert target=5 alignment=16");
RoutingTest(every_entry_to_one_expert,
            "ranks=3 experts=8 top_k=5 spread=full routing=one-expert target=7 duplicates=1");
RoutingTest(every_token_to_one_rank,
            "ranks=4 experts=13 top_k=3 spread=full routing=one-rank target=3 alignment=4");
RoutingTest(many_experts_without_tokens, "ranks=3 experts=60 routing=skewed alignment=128");
RoutingTest(every_entry_masked, "ranks=3 spread=full routing=nobody");
RoutingTest(one_expert_on_each_rank, "ranks=4 experts=4 top_k=3 alignment=4");
RoutingTest(one_expert_and_ranks_without, "ranks=4 experts=1 top_k=3 spread=full duplicates=1",
            "ranks=4 experts=1 top_k=1 nodes=0011");

/* All entries of all tokens are on one rank, which has 32 experts or one. */
#define ONE_RANK "ranks=4 spread=full routing=one-rank target=2 max_tokens=5 "
#define ON_ONE_RANK(k)                                            \
    ONE_RANK "experts=128 index_type=int64 alignment=2 top_k=" k, \
        ONE_RANK "experts=4 duplicates=1 masked_percent=5 top_k=" k
RoutingTest(every_k_on_one_rank, ON_ONE_RANK("1"), ON_ONE_RANK("3"), ON_ONE_RANK("5"),
            ON_ONE_RANK("7"), ON_ONE_RANK("31"), ON_ONE_RANK("32"));

/* As padding that a router has read: NaN and infinities, which all entries send to expert 0. They
 * stay with their tokens. */
#define STRANGE "ranks=3 experts=7 top_k=8 spread=full duplicates=1 strange=1 max_tokens=20 "
RoutingTest(strange_tokens, STRANGE, STRANGE "row_type=fp32 sum_type=fp32 biases=2",
            STRANGE "sum_type=fp16 merged=1 counted=1 spread=random");
RoutingTest(strange_tokens_quantised, STRANGE "quant=fp8 sum_quant=fp8 hidden=272",
            STRANGE "quant=mxfp8 nodes=011 spread=random");
RoutingTest(masked_entries, "ranks=4 experts=10 top_k=6 masked_percent=50",
            "ranks=4 experts=10 top_k=6 masked_percent=50 index_type=int64");
RoutingTest(duplicate_entries,
            "ranks=4 experts=10 top_k=6 masked_percent=10 duplicates=1 alignment=8");

/* The lowest k keeps the slot. All entries of a token may name one expert. */
#define MERGED                                                                             \
    "ranks=4 experts=5 top_k=6 masked_percent=10 invalid_percent=5 duplicates=1 merged=1 " \
    "alignment=8 "
RoutingTest(merged_duplicates, MERGED, MERGED "index_type=int64",
            MERGED "index_type=int64 routing=one-expert target=3");

/* 4 bits hold 15 experts and "none". */
#define INVALID "ranks=3 top_k=4 invalid_percent=20 "
RoutingTest(indices_of_no_expert_are_reported_and_masked, INVALID "experts=10",
            INVALID "experts=10 index_type=int64", INVALID "experts=15 index_type=int64");
#define COUNTED "ranks=4 experts=10 top_k=3 counted=1 invalid_percent=5 "
RoutingTest(number_of_tokens_as_a_tensor, COUNTED, COUNTED "index_type=int64");
RoutingTest(number_of_tokens_zero, "ranks=2 counted=1 spread=none");
