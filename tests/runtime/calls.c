/* SPDX-License-Identifier: Apache-2.0 */
/* After create, operations neither allocate nor read the environment. */
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"
#include "tests/harness/watch.h"

enum { RANKS = 3, ROOM = 1 << 16 };

static _Thread_local _Alignas(16) char index_room[ROOM], room[STEP_OUTPUTS][ROOM];

/* Arrays in plain memory: the operations of step.h would allocate. */
static StepMemory plain_memory(const Step *step) {
    StepMemory memory = {.numbers_again = 0};
    for (StepInput i = 0; i < INPUTS; i++)
        memory.in[i] = step_input(step, i).data;
    step_fill(step, IN_INDEX, memory.in[IN_INDEX] = index_room);
    for (StepOutput i = OUT_TOKENS; i < STEP_OUTPUTS; i++)
        memory.out[i] = room[i];
    return memory;
}

static void call_all(const Step *step, const StepMemory *memory) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    int latency = step->world->c.mode == EP_MODE_LATENCY;
    unsigned last = latency ? STEP_COMBINE : STEP_DISPATCH_BACKWARD;
    for (unsigned op = STEP_PREPARE; op <= last; op <<= 1) {
        CHECK_OK(step_call(step, memory, (StepOp)op, NULL));
        if (op != STEP_PREPARE || !latency) CHECK_OK(ep_handle_info(step->handle, &info));
        CHECK_OK(ep_group_status(step->group, NULL));
    }
}

static void check_calls(const EpBootstrap *bootstrap, EpMode mode) {
    Case c =
        case_of("ranks=%d experts=7 top_k=3 max_tokens=20 weighted=1 mode=%d seed=5", RANKS, mode);
    Step step = open_step(bootstrap, &c);
    StepMemory memory = plain_memory(&step);
    Watch before = watch_now();
    CHECK(before.allocations && before.look_ups, "what creates a group is not watched");
    for (int i = 0; i < 3; i++)
        call_all(&step, &memory);
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
