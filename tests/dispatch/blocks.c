/* SPDX-License-Identifier: Apache-2.0 */
/* Rank-major tensors whose blocks are shorter than max_tokens. */
#include "tests/cases/fixture.h"

#define SHAPE                                                                            \
    "ranks=3 experts=7 top_k=3 hidden=48 max_tokens=6 spare_tokens=5 layout=rank-major " \
    "masked_percent=20 weighted=1 "

#define TAILS                                                                \
    "zero_tail=keep|zero|ids counted=0|0|0|1|1|1 scale_bytes=0|8 named=0|1 " \
    "all_weights=0|0|0|0|1|1 scale_order=by-column|by-row|by-row|by-row "
#define BlocksTest(name, changes) GridTest(dispatch_blocks, name, changes, SHAPE TAILS)
BlocksTest(one_rank, "ranks=1");
BlocksTest(three_ranks, "");
BlocksTest(no_tokens, "spread=none");
BlocksTest(full, "spread=full ranks=2");
BlocksTest(quantised, "quant=fp8 sum_quant=fp8 hidden=272");
BlocksTest(nodes, "ranks=4 nodes=0110");
CasesTest(dispatch_blocks, nodes_in_chunks, setenv("LIBEP_NODE_CHUNK", "2", 1);
          run_grid(SHAPE TAILS "ranks=4 nodes=0110"));

/* Blocks with fewer rows than T, or more than max_tokens, are refused. */
RefusalsTest(dispatch_blocks, limits, "blocks", "layout=rank-major max_tokens=6 spare_tokens=5");

/* Dispatch T tokens of each rank into blocks of `rows`, whole or in phases. Returns the outcome. */
static EpStatus dispatch(const EpBootstrap *bootstrap, EpMode mode, const char *more, int rows,
                         int phases) {
    Case c = case_of(SHAPE "ranks=2 weighted=0 index_type=int64 mode=%d %s", mode, more);
    Step step = open_step(bootstrap, &c);
    void *room = aligned_alloc(16, (size_t)(2 * rows) * case_row_bytes(&step.world->c));
    EpTensor index =
        ep_tensor_2d(step_mine(&step)->index, EP_TYPE_INT64, step_mine(&step)->rows, 3);
    EpTensor tokens = step_tokens(&step), recv = ep_tensor_3d(room, EP_TYPE_BF16, 2, rows, 48);
    EpStatus status;
    CHECK_OK(ep_prepare(step.handle, NULL, &index, NULL, NULL, NULL));
    if (phases) {
        CHECK_OK(ep_dispatch_send(step.handle, NULL, NULL, &tokens, NULL, NULL, NULL));
        status = ep_dispatch_wait(step.handle, NULL, &recv, NULL, NULL, NULL);
    } else {
        status = ep_dispatch(step.handle, NULL, NULL, &tokens, NULL, NULL, NULL, &recv, NULL, NULL,
                             NULL);
    }
    if (status == EP_OK && TESTS_ON_GPU) status = ep_group_status(step.group, NULL);
    if (phases && !bootstrap->rank)
        CHECK_REFUSED(status, EP_ERR_SHAPE, "room for 6 rows of each source", "room for 5");
    bootstrap->barrier(bootstrap->context, 60);
    close_step(&step);
    free(room);
    return status;
}

/* Ranks with tensors of different sizes fail the group. */
static void check_difference(const EpBootstrap *bootstrap, EpMode mode) {
    EpStatus status = dispatch(bootstrap, mode, "spread=full", 6 + bootstrap->rank, 0);
    CHECK(status == EP_ERR_ORDER || status == EP_ERR_MISMATCH, "%s", ep_status_string(status));
}

RankTest(dispatch_blocks, different_sizes, 2, check_difference(bootstrap, EP_MODE_THROUGHPUT));
LatencyTest(dispatch_blocks, different_sizes_in_latency_mode, 2,
            check_difference(bootstrap, EP_MODE_LATENCY));

/* In two phases a rank's receive tensors are its own, but must hold the tokens of its peers. */
ThreadTest(dispatch_blocks, too_short_for_a_peer, 2) {
    EpStatus status =
        dispatch(bootstrap, EP_MODE_LATENCY, "spread=alone", bootstrap->rank ? 7 : 5, 1);
    if (bootstrap->rank) CHECK_OK(status);
}
