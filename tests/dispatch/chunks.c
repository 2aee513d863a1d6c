/* SPDX-License-Identifier: Apache-2.0 */
/* Rows travel through staging memory in rounds. A tiny stage leads to many rounds of few rows, and
 * to sizes that are not a multiple of it. */
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

#define BASE                                                                                       \
    "ranks=3 experts=10 top_k=4 max_tokens=61 hidden=40 spread=hole masked_percent=10 weighted=1 " \
    "scale_bytes=12 alignment=8 "

static void run_with_stage(const char *bytes, const char *changes) {
    HOST_ONLY("no LIBEP_STAGE_BYTES on GPUs: beyond_the_default_stage exceeds the rings");
    setenv("LIBEP_STAGE_BYTES", bytes, 1);
    run_grid(EACH_LAYOUT BASE "%s", changes);
}

CasesTest(dispatch_chunks, smallest_stage, run_with_stage("1", ""));
CasesTest(dispatch_chunks, odd_stage, run_with_stage("1009", ""));
CasesTest(dispatch_chunks, stage_of_some_rows, run_with_stage("4K", ""));

/* Ranks with very different amounts to send leave the rounds at different times. */
Test(dispatch_chunks, uneven_senders, .timeout = 120) {
    run_with_stage("2K", "spread=alone");
    run_with_stage("2K", "spread=random routing=one-rank target=1");
}

CasesTest(dispatch_chunks, between_nodes, run_with_stage("2K", "ranks=4 nodes=0101"));

/* With exact sizing ranks repeat a step of some sizes, but not all of them in every chunk. */
ThreadTest(dispatch_chunks, repeated_between_nodes, 4) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "0,1,0,1");
    set_on_ranks(bootstrap, "LIBEP_NODE_CHUNK", "1000");
    Case c = case_of(BASE "ranks=4 nodes=0101 spread=random masked_percent=60");
    Step step = open_step(bootstrap, &c);
    for (int i = 0; step.handle && i < 4; i++)
        step_all(&step);
    close_step(&step);
}

/* Dispatch only: the oracle would take seconds for the sums, which other cases test. */
Test(dispatch_chunks, beyond_the_default_stage, .timeout = 120) {
    GPU_ROOM((size_t)768 << 20);
    run_dispatch(case_of("ranks=2 experts=4 hidden=4096 max_tokens=2500 spread=full"));
}
