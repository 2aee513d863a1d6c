/* SPDX-License-Identifier: Apache-2.0 */
/* Words of blocks of rows: what dispatch stores there, what combine waits for, wrong tensors. */
#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"

/* Run a shape with blocks of several sizes in each layout, in all of its modes. */
static void run_all_layouts(const char *shape) {
    static const int rows[] = {1, 4, 16, 3, 5, 7};
    for (int i = 0; i < 12; i++) {
        Case c = case_of("%s", shape);
        c.layout = (EpLayout)(1 + i % 4), c.alignment = 16;
        c.block_rows = rows[c.layout == EP_LAYOUT_EXPERT_MAJOR ? i / 4 : i / 4 + 3];
        c.weighted = i % 3 > 0, c.counted = i % 2, c.scale_bytes = i % 3 == 1 ? 12 : 0;
        c.zero_tail = i % 3, c.padding = (EpPadding)(1 + i / 2 % 2), c.spare_rows = 3;
        c.phases = i / 2 % 2, c.named = i % 5 == 1, c.seed = (uint64_t)i, c.num_sms = i % 7 ? 0 : 2;
        run_case_on_threads(&c);
    }
}

CasesTest(handles_blocks, one_rank, run_all_layouts("masked_percent=30"));
CasesTest(handles_blocks, two_ranks,
          run_all_layouts("ranks=2 top_k=4 hidden=1032 masked_percent=30 duplicates=1 biases=1"));
CasesTest(handles_blocks, lost_rows,
          run_all_layouts("ranks=2 top_k=4 capacity=37 rows_per_expert=3 overflow=drop"));
CasesTest(handles_blocks, no_tokens, run_all_layouts("ranks=2 spread=none counters=1"));
CasesTest(handles_blocks, many_ranks,
          run_all_layouts(GPU_RANKS(8) < 8 ? "ranks=4 experts=24 top_k=6 max_tokens=30"
                                           : "ranks=8 experts=24 top_k=6 max_tokens=30"));
CasesTest(handles_blocks, long_rows,
          run_all_layouts("ranks=2 top_k=3 hidden=9000 max_tokens=30 sum_type=fp32"));
CasesTest(handles_blocks, sums_of_fp8,
          run_all_layouts("ranks=2 top_k=4 hidden=1200 sum_quant=fp8"));
LayoutsTest(handles_blocks, rows_of_fp8,
            "ranks=2 top_k=4 hidden=1200 quant=fp8 weighted=1 block_rows=8 alignment=8");
LayoutsTest(handles_blocks, rows_of_nvfp4,
            "ranks=2 top_k=4 hidden=1216 quant=nvfp4 weighted=1 block_rows=8 alignment=8");
CasesTest(handles_blocks, nodes, setenv("LIBEP_NODE_CHUNK", "3000", 1);
          run_all_layouts("ranks=4 nodes=0110 experts=12 top_k=5 max_tokens=25"));

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
