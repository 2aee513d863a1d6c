/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that latency mode's combine gets at the tokens' ranks. The weights of entries without a
 * slot are NaN in all cases. */
#include <math.h>

#include "tests/cases/fixture.h"

/* Both layouts, whole and in phases. */
#define WEIGHTS "mode=latency weights_at_combine=1 layout=expert-major,batched phases=0,1 "
#define WeightsTest(name, ...) GridTest(combine_weights, name, WEIGHTS, __VA_ARGS__)

WeightsTest(few_terms, "ranks=2 hidden=104 max_tokens=37 sum_type=bf16,fp16,fp32");

/* K around the floats that one line of a GPU's buffers holds, up to EP_MAX_TOP_K. */
#define MANY "ranks=3 experts=64 hidden=16 max_tokens=19 masked_percent=5 "
WeightsTest(many_terms, MANY "top_k=1", MANY "top_k=7", MANY "top_k=27", MANY "top_k=28",
            MANY "top_k=29", MANY "top_k=32");

CasesTest(combine_weights, many_ranks,
          run_grid(WEIGHTS "ranks=%d experts=40 top_k=11 hidden=48", GPU_RANKS(9)));

/* Masked, invalid, repeated and lost entries, tokens beyond num_tokens. */
#define DEAD                                                                                 \
    "ranks=3 experts=7 top_k=5 hidden=32 max_tokens=21 masked_percent=20 invalid_percent=5 " \
    "duplicates=1 alignment=4 capacity=70 rows_per_expert=24 overflow=drop counted=1 "       \
    "spare_rows=3 "
WeightsTest(dead_entries, DEAD, DEAD "merged=1");

/* Ranks without tokens, without experts, and alone. */
WeightsTest(idle_ranks, "ranks=3 experts=2 spread=hole max_tokens=35",
            "ranks=3 experts=6 spread=alone max_tokens=35",
            "ranks=3 experts=2 spread=none max_tokens=35",
            "ranks=3 experts=6 spread=full max_tokens=35 routing=one-rank",
            "ranks=1 experts=5 top_k=3 max_tokens=40", "ranks=2 routing=nobody");

/* Stages so small that tokens travel in many rounds, and K floats take more of them than a row. */
Test(combine_weights, many_rounds, .timeout = 240) {
    HOST_ONLY("no LIBEP_STAGE_BYTES on GPUs");
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    run_grid(WEIGHTS "ranks=3 experts=64 top_k=32 hidden=16 max_tokens=50");
    run_grid(WEIGHTS "ranks=4 experts=9 top_k=3 hidden=200 max_tokens=50");
    run_grid(WEIGHTS "ranks=4 nodes=0110 experts=64 top_k=32 hidden=16 max_tokens=50");
}

RefusalsTest(combine_weights, wrong_tensors, "combine_weights",
             "mode=latency weights_at_combine=1");
RefusalsTest(combine_weights, wrong_tensors_by_entry, "combine_weights",
             "by_entry=1 mode=latency weights_at_combine=1");
RefusalsTest(combine_weights, wrong_tensors_of_batched, "combine_weights",
             "layout=batched mode=latency weights_at_combine=1");

/* Combines get topk_weights though the case does not: both calls refuse them, and a step goes
 * on without. */
static void check_refuses(const char *changes, bool with_slots, EpStatus status, const char *part) {
    Fixture *f = fixture_new(changes);
    step_prepare(&f->step);
    bool latency = f->world->c.mode == EP_MODE_LATENCY;
    if (latency) step_dispatch(&f->step);
    f->arg[IN_COMBINE_WEIGHTS] = &f->tensor[IN_COMBINE_WEIGHTS];
    if (!with_slots) f->arg[IN_SLOT_WEIGHTS] = NULL;
    CHECK_REFUSED(fixture_call(f, STEP_COMBINE), status, "rank 0: ep_combine: topk_weights",
                  "expected NULL", part, "got a tensor");
    if (latency)
        CHECK_REFUSED(fixture_call(f, STEP_COMBINE_SEND), status,
                      "rank 0: ep_combine_send: topk_weights", "expected NULL", part,
                      "got a tensor");
    fixture_check_untouched(f);
    step_all(&f->step);
    fixture_free(f);
}

SoloTest(combine_weights, not_by_entry) {
    static const char several[] = "in the flat and rank-major layouts";
    check_refuses("mode=throughput", false, EP_ERR_UNSUPPORTED, "in throughput mode");
    check_refuses("by_entry=1", true, EP_ERR_NULL, "since slot_weights is given");
    needs_latency();
    check_refuses("layout=batched mode=latency", true, EP_ERR_NULL, "since slot_weights is given");
    check_refuses("layout=flat mode=latency", false, EP_ERR_UNSUPPORTED, several);
    check_refuses("layout=rank-major mode=latency", false, EP_ERR_UNSUPPORTED, several);
}

/* A rank without tokens may pass no data. */
FixtureTest(combine_weights, no_tokens,
            "layout=batched mode=latency weights_at_combine=1 spread=none") {
    step_dispatch(&f->step);
    f->tensor[IN_COMBINE_WEIGHTS].data = NULL;
    CHECK_OK(fixture_call(f, STEP_COMBINE));
    CHECK_OK(fixture_call(f, STEP_COMBINE_SEND));
    CHECK_OK(fixture_call(f, STEP_COMBINE_WAIT));
}
