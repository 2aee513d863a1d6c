/* SPDX-License-Identifier: Apache-2.0 */
/* Words of blocks of rows: what dispatch stores there, what combine waits for, wrong tensors. */
#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"

/* Blocks of several sizes in each layout, in all of its modes. Those of expert-major divide the
 * alignment. */
#define BLOCKS                                                                              \
    "layout=expert-major|flat|batched|rank-major alignment=16 spare_rows=3 weighted=0|1|1 " \
    "block_rows=1|3|3|3|4|5|5|5|16|7|7|7 counted=0|1 scale_bytes=0|12|0 "                   \
    "zero_tail=keep|zero|ids padding=zero|zero|keep|keep phases=0|0|1|1 named=0|1|0|0|0 "   \
    "num_sms=2|0|0|0|0|0|0 "
#define BlocksTest(name, text) GridTest(handles_blocks, name, BLOCKS, text)
BlocksTest(one_rank, "masked_percent=30");
BlocksTest(two_ranks, "ranks=2 top_k=4 hidden=1032 masked_percent=30 duplicates=1 biases=1");
BlocksTest(lost_rows, "ranks=2 top_k=4 capacity=37 rows_per_expert=3 overflow=drop");
BlocksTest(no_tokens, "ranks=2 spread=none counters=1");
CasesTest(handles_blocks, many_ranks,
          run_grid(BLOCKS "ranks=%d experts=24 top_k=6 max_tokens=30", GPU_RANKS(8) < 8 ? 4 : 8));
BlocksTest(long_rows, "ranks=2 top_k=3 hidden=9000 max_tokens=30 sum_type=fp32");
BlocksTest(sums_of_fp8, "ranks=2 top_k=4 hidden=1200 sum_quant=fp8");
GridTest(handles_blocks, quantised_rows, EACH_LAYOUT "ranks=2 top_k=4 weighted=1",
         "hidden=1200|1216 quant=fp8|nvfp4 block_rows=8 alignment=8");
CasesTest(handles_blocks, nodes, setenv("LIBEP_NODE_CHUNK", "3000", 1);
          run_grid(BLOCKS "ranks=4 nodes=0110 experts=12 top_k=5 max_tokens=25"));

RefusalsTest(handles_blocks, wrong_tensors, "row_words", "block_rows=4");
RefusalsTest(handles_blocks, wrong_tensors_of_flat, "row_words", "layout=flat block_rows=4");
RefusalsTest(handles_blocks, wrong_tensors_of_batched, "row_words", "layout=batched block_rows=4");
RefusalsTest(handles_blocks, wrong_tensors_of_slabs, "row_words_of_slabs", "block_rows=4");

/* A block that never becomes done: the host backend refuses the call, the other one fails the
 * group. */
static void check_never_done(const char *changes) {
    Fixture *f = fixture_new(changes);
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    CHECK_OK(fixture_call(f, STEP_DISPATCH));
    fixture_reset(f);
    memset(f->tensor[DONE_WORDS].data, 0, step_bytes(f->tensor[DONE_WORDS]));
    f->arg[DONE_WORDS] = &f->tensor[DONE_WORDS], f->step.expected = 3;
    CHECK_TIMEOUT(fixture_call(f, STEP_COMBINE) ?: ep_group_status(f->group, NULL), 1.5,
                  "extras.done", "block ", "was not done within 1.5 s",
                  "expected at least 3, seen 0");
    image_check_untouched(&f->image[OUT_SUMS], "out");
    fixture_free(f);
}

SoloTest(handles_blocks, never_done) {
    check_never_done("block_rows=4 timeout=1.5");
    check_never_done("block_rows=5 timeout=1.5 layout=flat sum_quant=fp8");
    if (TESTS_HAVE_LATENCY)
        check_never_done("block_rows=3 timeout=1.5 layout=batched mode=latency");
}

/* Rank 1, which has no rows, has completed combine when rank 0 gives up on its block, and waits in
 * the next operation. It is told there as well, perhaps by rank 2. */
static void told_body(const EpBootstrap *bootstrap, __attribute__((unused)) void *arg) {
    Fixture f;
    Case c = case_of(
        "ranks=3 nodes=000 spread=alone routing=one-rank alignment=16 block_rows=4 weighted=1");
    c.timeout = bootstrap->rank ? 60 : 3, c = case_complete(c);
    fixture_open_on(&f, bootstrap, &c);
    CHECK_OK(fixture_call(&f, STEP_PREPARE));
    CHECK_OK(fixture_call(&f, STEP_DISPATCH));
    fixture_reset(&f);
    memset(f.tensor[DONE_WORDS].data, 0, step_bytes(f.tensor[DONE_WORDS]));
    f.arg[DONE_WORDS] = &f.tensor[DONE_WORDS], f.step.expected = 3;
    double begin = seconds_now();
    CHECK_OK(fixture_call(&f, STEP_COMBINE));
    fixture_reset(&f);
    if (bootstrap->rank == 1) CHECK_OK(fixture_call(&f, STEP_PREPARE));
    CHECK_REFUSED(ep_group_status(f.group, NULL), bootstrap->rank ? EP_ERR_PEER : EP_ERR_TIMEOUT,
                  bootstrap->rank == 1 ? "prepare" : "combine",
                  bootstrap->rank ? "has given up on the group" : "was not done within", "rank 0");
    CHECK(seconds_now() - begin < 30, "it took %.1f s", seconds_now() - begin);
    bootstrap->barrier(bootstrap->context, 60);
    fixture_close_on(&f);
}

Test(handles_blocks, told_in_the_next_operation, .timeout = 120) {
    if (!TESTS_ON_GPU) return; /* the host backend refuses the call */
    THREADS_NEED(3);
    setenv("LIBEP_TOPOLOGY", "1", 1); /* on several nodes rank 1 waits for a rank of its node */
    run_on_threads(3, told_body, NULL);
}
