/* SPDX-License-Identifier: Apache-2.0 */
/* Counters of calls: what they add in all layouts, modes and nodes, waits, wrong tensors. */
#include <sched.h>
#include <time.h>

#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"

/* All counters and every other one, in each layout and all of its modes; in latency mode also with
 * weights at combine. */
#define COUNTERS                                                                               \
    EACH_LAYOUT "counters=1,2,3 weighted=0|1|1 counted=0|1 scale_bytes=0|12|0 phases=0|0|1|1 " \
                "named=0|1|0|0|0 "
#define LATE "mode=latency weights_at_combine=1|0|0 "

static void run_counters(const char *text) {
    run_grid(COUNTERS "%s", text);
    if (TESTS_HAVE_LATENCY) run_grid(COUNTERS LATE "%s", text);
}

#define CountersTest(name, text) CasesTest(handles_counters, name, run_counters(text))
CountersTest(one_rank, "masked_percent=30 invalid_percent=0");
CountersTest(two_ranks, "ranks=2 top_k=4 hidden=1032 masked_percent=30 duplicates=1 biases=1");
CountersTest(lost_rows, "ranks=2 top_k=4 capacity=10 rows_per_expert=3 overflow=drop");
CountersTest(no_tokens, "ranks=2 spread=none");
CountersTest(many_ranks, GPU_RANKS(8) < 8 ? "ranks=4 experts=24 top_k=6 max_tokens=30"
                                          : "ranks=8 experts=24 top_k=6 max_tokens=30");
CountersTest(sums_of_fp8, "ranks=2 top_k=4 hidden=1200 sum_quant=fp8");
CountersTest(sums_by_entry, "ranks=2 top_k=4 hidden=1032 masked_percent=30 capacity=50 by_entry=1");
GridTest(handles_counters, rows_of_fp8, EACH_LAYOUT,
         "ranks=2 top_k=4 hidden=1200 quant=fp8 weighted=1 counters=1");
CasesTest(handles_counters, nodes, setenv("LIBEP_NODE_CHUNK", "3000", 1);
          run_counters("ranks=4 nodes=0110 experts=12 top_k=5 max_tokens=25"));
CountersTest(nodes_by_entry, "ranks=5 nodes=01011 experts=12 top_k=3 max_tokens=25 by_entry=1");
CountersTest(nodes_of_one_rank, "ranks=3 nodes=012 experts=12 top_k=5 max_tokens=25 by_entry=0|1");
CountersTest(unequal_nodes, "ranks=5 nodes=01011 experts=12 top_k=3 max_tokens=25");

/* ---- waits --------------------------------------------------------------------------------- */

/* What two ranks share: when each of them has entered a call. */
typedef struct Late {
    EpMode mode;
    _Atomic int entered[2];
} Late;

enum { LATE_MS = 40, LEAST_MS = 20, ATTEMPTS = 20 };

/* Rank 1 calls LATE_MS after rank 0 says that it does. Rank 0 may be held up in between, so it may
 * wait less; not every time. Returns the wait of rank 0 for rank 1 in a dispatch, in ns. */
static int64_t wait_for_late_rank(Fixture *f, Late *late, int attempt) {
    int64_t *wait = f->tensor[PEER_WAIT].data, *longest = f->tensor[LONGEST_WAIT].data;
    wait[0] = wait[1] = longest[0] = longest[1] = 0;
    f->arg[PEER_WAIT] = &f->tensor[PEER_WAIT], f->arg[LONGEST_WAIT] = &f->tensor[LONGEST_WAIT];
    late->entered[f->step.rank] = attempt;
    while (late->entered[0] < attempt)
        sched_yield();
    if (f->step.rank) nanosleep(&(struct timespec){0, LATE_MS * 1000000}, NULL);
    CHECK_OK(fixture_call(f, STEP_DISPATCH));
    CHECK(wait[f->step.rank] == 0, "a rank waited for itself");
    CHECK(wait[!f->step.rank] == longest[!f->step.rank], "two waits in one call");
    return wait[1];
}

static void late_body(const EpBootstrap *bootstrap, void *arg) {
    Late *late = arg;
    Fixture f;
    Case c = case_of("ranks=2 experts=4 spread=full weighted=1 scale_bytes=8");
    int64_t wait = 0;
    c.mode = late->mode, c = case_complete(c);
    fixture_open_on(&f, bootstrap, &c);
    f.arg[IN_COUNT] = NULL;
    CHECK_OK(fixture_call(&f, STEP_PREPARE));
    for (int attempt = 1; attempt <= ATTEMPTS; attempt++) {
        int64_t last = wait_for_late_rank(&f, late, attempt);
        if (last > wait) wait = last;
    }
    if (!f.step.rank) CHECK(wait >= LEAST_MS * 1000000LL, "waited %lld ns", (long long)wait);
    fixture_close_on(&f);
}

/* Waits for what comes over a network of GPUs are not counted. */
static void check_late(EpMode mode) {
    Late late = {.mode = mode};
    if (!TESTS_HAVE_LATENCY) return;
    THREADS_NEED(2);
    run_on_threads(2, late_body, &late);
}

Test(handles_counters, late_rank, .timeout = 60) {
    check_late(EP_MODE_THROUGHPUT);
    check_late(EP_MODE_LATENCY);
}

/* ---- wrong tensors ------------------------------------------------------------------------- */

RefusalsTest(handles_counters, wrong_tensors, "counters", "");
RefusalsTest(handles_counters, wrong_tensors_of_flat, "counters", "layout=flat");

static void check_prepare(const char *changes, EpStatus status, const char *sentence) {
    Fixture *f = fixture_new(changes);
    f->tensor[PEER_WAIT].type = EP_TYPE_INT32, f->arg[PEER_WAIT] = &f->tensor[PEER_WAIT];
    CHECK_REFUSED(fixture_call(f, STEP_PREPARE), status, "extras.peer_wait_ns", sentence);
    fixture_check_untouched(f);
    fixture_free(f);
}

/* In latency mode it waits for nobody. */
SoloTest(handles_counters, waits_of_prepare) {
    check_prepare("", EP_ERR_TYPE, "expected int64, got int32");
    if (TESTS_HAVE_LATENCY) check_prepare("mode=latency", EP_ERR_UNSUPPORTED, "has no use for it");
}

/* Each pair of counters in one place, or a part of it. */
FixtureTest(handles_counters, overlapping, "") {
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    static const StepCounter args[] = {EXPERT_TOKENS, PEER_ROWS, PEER_BYTES, PEER_WAIT,
                                       LONGEST_WAIT};
    for (int i = 1; i < 5; i++) {
        for (int j = 0; j < i; j++) {
            fixture_reset(f);
            f->arg[args[i]] = &f->tensor[args[i]], f->arg[args[j]] = &f->tensor[args[j]];
            f->tensor[args[i]].data = (int64_t *)f->tensor[args[j]].data + (j ? 0 : 3);
            CHECK_REFUSED(fixture_call(f, STEP_DISPATCH), EP_ERR_ADDRESS,
                          "expected memory of its own, got memory that overlaps extras.");
            fixture_check_untouched(f);
        }
    }
}
