/* SPDX-License-Identifier: Apache-2.0 */
/* Uncommon routings: no tokens, one rank without tokens, one expert for all tokens, and entries
 * that are masked, duplicate or invalid. */
#include "tests/cases/run.h"

static void run_layouts(Case c) {
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
        c.layout = (EpLayout)layout;
        c.weighted = 1;
        c.scale_bytes = 8;
        run_case_on_threads(&c);
    }
}

Test(dispatch_routing, no_tokens_at_all, .timeout = 120) {
    run_layouts((Case){.ranks = 3, .spread = SPREAD_NONE, .alignment = 16});
}

Test(dispatch_routing, one_rank_without_tokens, .timeout = 120) {
    run_layouts((Case){.ranks = 4, .spread = SPREAD_HOLE, .alignment = 2});
}

Test(dispatch_routing, one_rank_alone_with_tokens, .timeout = 120) {
    run_layouts((Case){.ranks = 4, .spread = SPREAD_ALONE, .alignment = 2});
}

Test(dispatch_routing, every_token_to_one_expert, .timeout = 120) {
    run_layouts((Case){.ranks = 3,
                       .experts = 8,
                       .top_k = 1,
                       .spread = SPREAD_FULL,
                       .routing = ROUTING_ONE_EXPERT,
                       .target = 5,
                       .alignment = 16});
}

Test(dispatch_routing, every_entry_to_one_expert, .timeout = 120) {
    run_layouts((Case){.ranks = 3,
                       .experts = 8,
                       .top_k = 5,
                       .spread = SPREAD_FULL,
                       .routing = ROUTING_ONE_EXPERT,
                       .target = 7,
                       .duplicates = 1});
}

Test(dispatch_routing, every_token_to_one_rank, .timeout = 120) {
    run_layouts((Case){.ranks = 4,
                       .experts = 13,
                       .top_k = 3,
                       .spread = SPREAD_FULL,
                       .routing = ROUTING_ONE_RANK,
                       .target = 3,
                       .alignment = 4});
}

Test(dispatch_routing, many_experts_without_tokens, .timeout = 120) {
    run_layouts((Case){.ranks = 3, .experts = 60, .routing = ROUTING_SKEWED, .alignment = 128});
}

Test(dispatch_routing, every_entry_masked, .timeout = 120) {
    run_layouts((Case){.ranks = 3, .spread = SPREAD_FULL, .routing = ROUTING_NOBODY});
}

Test(dispatch_routing, masked_entries, .timeout = 120) {
    Case c = {.ranks = 4, .experts = 10, .top_k = 6, .masked_percent = 50, .seed = 7};
    run_layouts(c);
    c.index_type = EP_TYPE_INT64;
    run_layouts(c);
}

Test(dispatch_routing, duplicate_entries, .timeout = 120) {
    run_layouts((Case){.ranks = 4,
                       .experts = 10,
                       .top_k = 6,
                       .masked_percent = 10,
                       .duplicates = 1,
                       .alignment = 8});
}

/* Merged: the lowest k keeps the slot. All entries of a token may name one expert. */
Test(dispatch_routing, merged_duplicates, .timeout = 120) {
    Case c = {.ranks = 4,
              .experts = 5,
              .top_k = 6,
              .masked_percent = 10,
              .invalid_percent = 5,
              .duplicates = 1,
              .merged = 1,
              .alignment = 8};
    run_layouts(c);
    c.index_type = EP_TYPE_INT64;
    c.seed = 5;
    run_layouts(c);
    c.routing = ROUTING_ONE_EXPERT, c.target = 3;
    run_layouts(c);
}

Test(dispatch_routing, indices_of_no_expert_are_reported_and_masked, .timeout = 120) {
    Case c = {.ranks = 3, .experts = 10, .top_k = 4, .invalid_percent = 20, .seed = 11};
    run_layouts(c);
    c.index_type = EP_TYPE_INT64;
    run_layouts(c);
    c.experts = 15; /* 4 bits hold 15 experts and "none" */
    run_layouts(c);
}

Test(dispatch_routing, number_of_tokens_as_a_tensor, .timeout = 120) {
    Case c = {.ranks = 4, .experts = 10, .top_k = 3, .counted = 1, .invalid_percent = 5};
    run_layouts(c);
    c.index_type = EP_TYPE_INT64;
    c.seed = 3;
    run_layouts(c);
}

Test(dispatch_routing, number_of_tokens_zero, .timeout = 120) {
    run_layouts((Case){.ranks = 2, .counted = 1, .spread = SPREAD_NONE});
}
