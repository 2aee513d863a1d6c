/* SPDX-License-Identifier: Apache-2.0 */
/* Words of a plan that are overwritten between two calls: the call that reads it is refused or
 * gives wrong rows. Whatever it does, it stays within its tensors. */
#include "tests/cases/fixture.h"
#include "tests/harness/random.h"

TestSuite(handles_plan_words, .init = be_quiet);

/* A fixture whose calls name a plan, and what the plan holds before a word is overwritten. */
typedef struct Words {
    Fixture fixture;
    const EpBootstrap *bootstrap;
    Case c;
    bool owns; /* calls use the handle's own plan */
    EpTensor plan;
    uint8_t *saved;
    Random random;
} Words;

/* Call an operation with the plan as it was made. */
static bool call_whole(Words *w, StepOp op) {
    return CHECK_OK(fixture_call(&w->fixture, op));
}

/* Make the plan, and save it. Optional inputs alternate. */
static bool make_plan(Words *w, bool counted) {
    Fixture *f = &w->fixture;
    for (int output = OUT_COUNTS; output <= OUT_SOURCES; output++)
        f->arg[output] = NULL;
    if (!counted) f->arg[IN_COUNT] = NULL;
    if (!call_whole(w, STEP_PREPARE)) return false;
    if (w->c.mode == EP_MODE_LATENCY && !call_whole(w, STEP_DISPATCH)) return false;
    memcpy(w->saved, w->plan.data, (size_t)w->plan.shape[0]);
    return true;
}

static bool open_words(Words *w) {
    fixture_open_on(&w->fixture, w->bootstrap, &w->c);
    if (w->owns)
        CHECK_OK(ep_handle_plan(w->fixture.handle, &w->plan));
    else
        open_plan(w->fixture.group, &w->c, &w->plan), w->fixture.plan = &w->plan;
    w->saved = malloc((size_t)w->plan.shape[0]);
    return w->saved && w->plan.data;
}

static void close_words(Words *w) {
    fixture_close_on(&w->fixture);
    if (!w->owns) free(w->plan.data);
    free(w->saved);
}

static void restore(Words *w) {
    memcpy(w->plan.data, w->saved, (size_t)w->plan.shape[0]);
}

/* Overwrite a random word, or many. */
static void overwrite(Words *w) {
    const uint32_t values[] = {0, 1, ~0u, INT32_MAX, 1u << 31, 1u << 20};
    int64_t words = w->plan.shape[0] / 4;
    int count = random_percent(&w->random, 10) ? 40 : 1;
    for (int i = 0; i < count; i++) {
        int64_t at = random_below(&w->random, words), way = random_below(&w->random, 9);
        uint32_t *word = (uint32_t *)w->plan.data + at;
        *word = way < 6    ? values[way]
                : way == 6 ? *word + 1
                : way == 7 ? *word - 1
                           : (uint32_t)random_next(&w->random);
    }
}

/* Call an operation after words of the plan of rank 0 have changed. A call that is refused has
 * taken no part, so the same call with the plan as it was succeeds, unless other ranks saw a wrong
 * plan.
 */
static void call_overwritten(Words *w, StepOp op) {
    if (w->fixture.step.rank == 0) overwrite(w);
    EpStatus status = fixture_call(&w->fixture, op);
    fixture_check_guards(&w->fixture);
    restore(w);
    if (status == EP_OK || TESTS_ON_GPU || ep_group_status(w->fixture.group, NULL) != EP_OK) return;
    /* EP_ERR_SHAPE: the plan's T is no longer that of the tensors. */
    CHECK(status == EP_ERR_HANDLE_MEMORY || status == EP_ERR_FOREIGN ||
              status == EP_ERR_NOT_PREPARED || status == EP_ERR_SHAPE,
          "%d: %s", (int)status, ep_last_error());
    CHECK_OK(fixture_call(&w->fixture, op));
}

/* Returns whether the group of any rank has failed. */
static bool has_failed(const Words *w) {
    char own = ep_group_status(w->fixture.group, NULL) != EP_OK, all[8] = {0};
    CHECK_OK(w->bootstrap->allgather(w->bootstrap->context, &own, all, 1, 60));
    return memchr(all, 1, sizeof(all)) != NULL;
}

/* Call an operation with a plan that changes before it or, if it has two phases, before either. */
static bool try_operation(Words *w, StepOp op) {
    check_note("seed %llu, layout %d, operation %d", (unsigned long long)w->c.seed,
               (int)w->c.layout, (int)op);
    restore(w);
    if (op == STEP_DISPATCH_WAIT) call_whole(w, STEP_DISPATCH_SEND);
    if (op == STEP_COMBINE_WAIT) call_whole(w, STEP_COMBINE_SEND);
    call_overwritten(w, op);
    if (op == STEP_COMBINE_SEND && ep_group_status(w->fixture.group, NULL) == EP_OK)
        call_whole(w, STEP_COMBINE_WAIT);
    fixture_check_guards(&w->fixture);
    return !has_failed(w);
}

/* A group that has failed on one rank ends on all, so that none of them waits for the others to
 * destroy it, and is replaced. */
static void try_words(Words *w, const StepOp *ops, int num_ops, int times) {
    bool is_open = false;
    for (int i = 0; i < times; i++) {
        if (!is_open) REQUIRE(open_words(w) && make_plan(w, i % 2), "no plan");
        is_open = try_operation(w, ops[i % num_ops]);
        if (!is_open) (void)ep_group_abort(w->fixture.group, "a wrong plan"), close_words(w);
    }
    if (is_open) close_words(w);
}

/* Returns how often to try: LIBEP_TEST_CASES, or few on emulated GPUs, where a call takes longer
 * and ranks wait in vain for rows that a wrong plan names. */
static int count_times(int ranks) {
    return (int)environment_number("LIBEP_TEST_CASES", !TESTS_ON_GPU ? 300 : ranks == 1 ? 40 : 8);
}

static void run_words(const EpBootstrap *bootstrap, EpMode mode) {
    static const StepOp throughput[] = {STEP_DISPATCH, STEP_COMBINE, STEP_COMBINE_BACKWARD,
                                        STEP_DISPATCH_BACKWARD};
    static const StepOp latency[] = {STEP_COMBINE, STEP_DISPATCH_WAIT, STEP_COMBINE_SEND,
                                     STEP_COMBINE_WAIT};
    static const EpLayout layouts[] = {EP_LAYOUT_EXPERT_MAJOR, EP_LAYOUT_FLAT,
                                       EP_LAYOUT_BATCHED,      EP_LAYOUT_RANK_MAJOR,
                                       EP_LAYOUT_EXPERT_MAJOR, EP_LAYOUT_BATCHED};
    for (int variant = 0; variant < 4 * LENGTH(layouts); variant++) {
        /* Long chains of slots, and scales in columns of their slabs. */
        const char *more = variant % 2 ? "top_k=8 experts=8 capacity=16 quant=fp8 hidden=272 "
                                         "scale_order=by-column"
                                       : "rows_per_expert=16";
        /* The CPU cannot write to a handle's own plan on a GPU. */
        Words w = {.bootstrap = bootstrap, .owns = !TESTS_ON_GPU && variant % 4 > 1};
        w.c = case_of("ranks=%d experts=4 top_k=3 hidden=16 max_tokens=5 spread=full weighted=1 "
                      "alignment=2 scale_bytes=8 capacity=60 rows_per_expert=%d overflow=drop "
                      "mode=%d layout=%d named=%d zero_tail=zero by_entry=%d seed=%llu %s",
                      bootstrap->size, 2 * bootstrap->size, mode, layouts[variant / 4], !w.owns,
                      variant / 4 > EP_LAYOUT_RANK_MAJOR - 1,
                      (unsigned long long)environment_number("LIBEP_TEST_SEED", 1), more);
        if (TESTS_ON_GPU) w.c.timeout = 5; /* also to create a group */
        /* In phases a damaged T that is allowed would end the step. */
        if (variant % 2 && mode == EP_MODE_THROUGHPUT) w.c.spare_tokens = 3;
        w.c = case_complete(w.c);
        w.random = random_stream(w.c.seed, (uint64_t)mode, (uint64_t)variant);
        try_words(&w, mode == EP_MODE_LATENCY ? latency : throughput, 4,
                  count_times(bootstrap->size));
    }
}

RankTest(handles_plan_words, throughput_1, 1, run_words(bootstrap, EP_MODE_THROUGHPUT));
RankTest(handles_plan_words, throughput_2, 2, run_words(bootstrap, EP_MODE_THROUGHPUT));
RankTest(handles_plan_words, latency_1, 1, run_words(bootstrap, EP_MODE_LATENCY));
RankTest(handles_plan_words, latency_2, 2, run_words(bootstrap, EP_MODE_LATENCY));
