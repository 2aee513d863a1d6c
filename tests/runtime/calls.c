/* SPDX-License-Identifier: Apache-2.0 */
/* After create, operations neither allocate nor read the environment. */
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"
#include "tests/harness/watch.h"

enum { RANKS = 3, ROOM = 1 << 16 };

/* Tensors for all five operations over plain memory. The functions of step.h would allocate. */
typedef struct Calls {
    const Step *step;
    EpTensor topk_idx, tokens, weights, rows, slots, sums, entries;
} Calls;

static _Thread_local _Alignas(16) char rows_room[ROOM], sums_room[ROOM], slots_room[ROOM],
    entries_room[ROOM];

static Calls calls_new(const Step *step) {
    const Case *c = &step->world->c;
    const RankWorld *me = &step->world->rank[step->rank];
    Calls calls = {.step = step, .tokens = step_tokens(step), .weights = step_weights(step)};
    calls.topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, c->top_k);
    calls.rows = step_rows(step, rows_room, c->row_type, c->hidden);
    calls.slots = step_slot_weights(step);
    calls.slots.data = slots_room;
    calls.sums = step_grad_out(step);
    calls.sums.data = sums_room;
    calls.entries = ep_tensor_2d(entries_room, EP_TYPE_FP32, me->rows, c->top_k);
    return calls;
}

static void call_all(const Calls *c) {
    EpTensor grad = step_grad_out(c->step), out = step_expert_out(c->step);
    EpTensor weights = step_slot_weights(c->step);
    EpHandle *handle = c->step->handle;
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    int latency = c->step->world->c.mode == EP_MODE_LATENCY;
    CHECK_OK(ep_prepare(handle, NULL, &c->topk_idx, NULL, NULL, NULL));
    if (!latency) CHECK_OK(ep_handle_info(handle, &info));
    CHECK_OK(ep_dispatch(handle, NULL, NULL, &c->tokens, &c->weights, NULL, NULL, &c->rows,
                         &c->slots, NULL, NULL));
    CHECK_OK(ep_handle_info(handle, &info));
    CHECK_OK(ep_combine(handle, NULL, &out, &weights, NULL, NULL, &c->sums));
    CHECK_OK(ep_group_status(c->step->group, NULL));
    if (latency) return;
    CHECK_OK(ep_combine_backward(handle, NULL, &grad, &weights, &out, NULL, &c->rows, &c->slots));
    CHECK_OK(ep_dispatch_backward(handle, NULL, &out, &weights, NULL, &c->sums, &c->entries));
    CHECK_OK(ep_group_status(c->step->group, NULL));
}

static void check_calls(const EpBootstrap *bootstrap, EpMode mode) {
    Case c = case_of("ranks=%d experts=7 top_k=3 max_tokens=20 mode=%d seed=5", RANKS, mode);
    Step step = open_step(bootstrap, &c);
    Calls calls = calls_new(&step);
    Watch before = watch_now();
    for (int i = 0; i < 3; i++)
        call_all(&calls);
    Watch after = watch_now();
    CHECK(after.allocations == before.allocations, "%d allocations",
          after.allocations - before.allocations);
    CHECK(after.look_ups == before.look_ups, "%d look-ups", after.look_ups - before.look_ups);
    close_step(&step);
}

ThreadTest(runtime_calls, nothing_is_asked_of_the_system, RANKS) {
    HOST_ONLY("what CUDA itself asks for on a launch is not the library's");
    if (TESTS_SANITIZED) return;
    check_calls(bootstrap, EP_MODE_THROUGHPUT);
    check_calls(bootstrap, EP_MODE_LATENCY);
}

/* With small stages, which need many rounds, the operations ask nothing either. */
ThreadTest(runtime_calls, nothing_is_asked_in_many_rounds, RANKS) {
    HOST_ONLY("what CUDA itself asks for on a launch is not the library's");
    if (TESTS_SANITIZED) return;
    set_on_ranks(bootstrap, "LIBEP_STAGE_BYTES", "1");
    check_calls(bootstrap, EP_MODE_THROUGHPUT);
    check_calls(bootstrap, EP_MODE_LATENCY);
}

/* The watch counts what happens. */
SoloTest(runtime_calls, watch_counts) {
    HOST_ONLY("memory of tests comes from a pinned buffer there");
    if (TESTS_SANITIZED) cr_skip_test("the watch is off in sanitizer builds");
    Watch before = watch_now();
    void *volatile memory = malloc(10);
    free(memory);
    const char *volatile value = getenv("PATH");
    Watch after = watch_now();
    CHECK(after.allocations == before.allocations + 1, "%d", after.allocations);
    CHECK(after.look_ups == before.look_ups + 1 && value, "%d", after.look_ups);
}
