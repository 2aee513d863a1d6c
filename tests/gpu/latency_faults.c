/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode with ranks that stop, make another call or have lost their memory. Every rank ends
 * soon, with an error that names the rank to blame. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/gpu/failing.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

/* Failed groups log a warning. */
static void silence_log(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

/* Waits that expire take seconds, so two suites of them run side by side. */
TestSuite(gpu_latency_faults, .init = silence_log);
TestSuite(gpu_late_dispatch, .init = silence_log);
TestSuite(gpu_late_combine, .init = silence_log);
TestSuite(gpu_late_weights, .init = silence_log);

static bool open_failing(FailingGroup *failing, const EpBootstrap *bootstrap, double seconds) {
    Case c = failing_case(bootstrap->size, EP_MODE_LATENCY);
    return failing_open(failing, bootstrap, &c, seconds);
}

/* Open a group whose combines get topk_weights. */
static bool open_weighing(FailingGroup *failing, const EpBootstrap *bootstrap, double seconds,
                          Routing routing) {
    Case c = failing_case(bootstrap->size, EP_MODE_LATENCY);
    c.weights_at_combine = 1, c.routing = routing, c.target = 1;
    c = case_complete(c);
    return failing_open(failing, bootstrap, &c, seconds);
}

static int is_absent(const FailingGroup *failing) {
    return failing->gpu.step.rank == failing->absent;
}

/* ---- a peer that stops --------------------------------------------------------------------- */

#define DISPATCH_PHASES (STEP_DISPATCH_SEND | STEP_DISPATCH_WAIT)
#define COMBINE_PHASES (STEP_COMBINE_SEND | STEP_COMBINE_WAIT)

static void check_blames(const FailingGroup *failing, const char *phase) {
    char peer[32], self[32];
    EpFinding found = EP_FINDING_INIT;
    snprintf(peer, sizeof(peer), "rank %d", failing->absent);
    snprintf(self, sizeof(self), "rank %d", failing->gpu.step.rank);
    CHECK_REFUSED(ep_group_status(failing->group, &found), EP_ERR_TIMEOUT, self, peer, phase);
    CHECK(found.status == EP_ERR_TIMEOUT && found.peer == failing->absent, "peer %d", found.peer);
    CHECK(found.rank == failing->gpu.step.rank, "rank %d", found.rank);
    CHECK(strcmp(found.phase, phase) == 0, "%s", found.phase);
    failing_check_refuses(failing, EP_ERR_TIMEOUT, peer);
}

/* The operations time out because the absent rank makes no call. Operations enqueued behind them do
 * nothing. */
static void check_times_out(const FailingGroup *failing, unsigned ops, const char *phase) {
    double begin = failing_now();
    failing_call(&failing->gpu, ops, EP_ERR_TIMEOUT);
    failing_call(&failing->gpu, STEP_DISPATCH | STEP_COMBINE, EP_ERR_TIMEOUT);
    CHECK(failing_now() - begin > 0.8 * FAILING_TIMEOUT, "gave up after %.2f s",
          failing_now() - begin);
    CHECK(failing_now() - begin < FAILING_LIMIT, "gave up after %.2f s", failing_now() - begin);
    check_blames(failing, phase);
}

/* The absent rank calls after the others timed out. Its first operations may find data sent before
 * that; then it fails, and its error names the rank that the others gave up on. */
static void check_latecomer(const FailingGroup *failing, unsigned ops) {
    EpFinding found = EP_FINDING_INIT;
    failing_call(&failing->gpu, ops, EP_ERR_PEER);
    failing_call(&failing->gpu, STEP_DISPATCH | STEP_COMBINE, EP_ERR_PEER);
    CHECK_REFUSED(ep_group_status(failing->group, &found), EP_ERR_PEER, "given up");
    CHECK(found.peer == failing->absent, "peer %d", found.peer);
}

static void stopped_peer(const EpBootstrap *bootstrap, unsigned ops, const char *phase) {
    FailingGroup failing;
    REQUIRE(open_failing(&failing, bootstrap, FAILING_TIMEOUT), "no group");
    if (!is_absent(&failing)) check_times_out(&failing, ops, phase);
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&failing)) check_latecomer(&failing, ops);
    failing_close(&failing);
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

#define STOPPED(suite, name, ranks, ops, phase) \
    ThreadTest(suite, name, ranks) {            \
        GPU_NEEDS_LATENCY();                    \
        stopped_peer(bootstrap, ops, phase);    \
    }
STOPPED(gpu_late_dispatch, whole_2, 2, STEP_DISPATCH, "dispatch")
STOPPED(gpu_late_dispatch, in_phases_4, 4, DISPATCH_PHASES, "dispatch")
STOPPED(gpu_late_combine, whole_4, 4, STEP_COMBINE, "combine")
STOPPED(gpu_late_combine, in_phases_2, 2, COMBINE_PHASES, "combine")

/* Send phases wait for no peer; the receive phase times out. */
static void wait_in_receive_phase(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    REQUIRE(open_failing(&failing, bootstrap, FAILING_TIMEOUT), "no group");
    if (!is_absent(&failing)) {
        failing_call(&failing.gpu, STEP_DISPATCH_SEND, EP_OK);
        CHECK_OK(ep_group_status(failing.group, NULL));
        check_times_out(&failing, STEP_DISPATCH_WAIT, "dispatch");
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&failing)) check_latecomer(&failing, DISPATCH_PHASES);
    failing_close(&failing);
}

ThreadTest(gpu_late_dispatch, receive_phase_waits_4, 4) {
    GPU_NEEDS_LATENCY();
    wait_in_receive_phase(bootstrap);
}

/* A rank that leaves out its receive phase has sent, so the others complete theirs. They miss it in
 * the next operation. */
static void left_out_receive_phase(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    REQUIRE(open_failing(&failing, bootstrap, FAILING_TIMEOUT), "no group");
    device_step_poison(&failing.gpu);
    device_step_issue(&failing.gpu, STEP_DISPATCH_SEND);
    if (!is_absent(&failing)) {
        device_step_issue(&failing.gpu, STEP_DISPATCH_WAIT);
        device_step_check(&failing.gpu);
        CHECK_OK(ep_group_status(failing.group, NULL));
        check_times_out(&failing, STEP_COMBINE, "combine");
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&failing)) {
        failing_call(&failing.gpu, STEP_DISPATCH_WAIT, EP_ERR_PEER);
        check_latecomer(&failing, STEP_COMBINE);
    }
    failing_close(&failing);
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_late_combine, left_out_receive_phase_4, 4) {
    GPU_NEEDS_LATENCY();
    left_out_receive_phase(bootstrap);
}

/* ---- weights that do not come -------------------------------------------------------------- */

/* The send phase waits for weights, and names the rank that does not send them. */
static void stopped_send_phase(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    REQUIRE(open_weighing(&failing, bootstrap, FAILING_TIMEOUT, ROUTING_UNIFORM), "no group");
    if (!is_absent(&failing)) check_times_out(&failing, STEP_COMBINE_SEND, "combine");
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&failing)) check_latecomer(&failing, COMBINE_PHASES);
    failing_close(&failing);
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_late_weights, send_phase_2, 2) {
    GPU_NEEDS_LATENCY();
    stopped_send_phase(bootstrap);
}

/* Whoever times out first, all blame the absent rank. */
static void check_blames_absent(const FailingGroup *failing) {
    EpFinding found = EP_FINDING_INIT;
    double begin = failing_now();
    CHECK_OK(device_step_try(&failing->gpu, STEP_COMBINE));
    CHECK_CUDA(cudaStreamSynchronize(failing->gpu.stream));
    CHECK(failing_now() - begin < FAILING_LIMIT, "gave up after %.2f s", failing_now() - begin);
    EpStatus status = ep_group_status(failing->group, &found);
    CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
          ep_last_error());
    CHECK(found.peer == failing->absent, "peer %d: %s", found.peer, ep_last_error());
    failing_check_refuses(failing, status, "rank");
}

/* Rank 1 comes later than the others. If all tokens go to it, rank 0 waits for its sums and times
 * out first, while rank 1 waits for the weights of the absent rank. */
static void stopped_weights(const EpBootstrap *bootstrap, Routing routing) {
    const struct timespec later = {.tv_sec = 2};
    FailingGroup failing;
    REQUIRE(open_weighing(&failing, bootstrap, FAILING_TIMEOUT, routing), "no group");
    if (bootstrap->rank == 1) nanosleep(&later, NULL);
    if (!is_absent(&failing)) check_blames_absent(&failing);
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&failing)) check_latecomer(&failing, STEP_COMBINE);
    failing_close(&failing);
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_late_weights, whole_4, 4) {
    GPU_NEEDS_LATENCY();
    stopped_weights(bootstrap, ROUTING_UNIFORM);
}
ThreadTest(gpu_late_weights, third_rank_is_absent_3, 3) {
    GPU_NEEDS_LATENCY();
    stopped_weights(bootstrap, ROUTING_ONE_RANK);
}

/* ---- other calls --------------------------------------------------------------------------- */

/* Every rank gets the error long before the timeout. */
static void check_disagree(const FailingGroup *failing, const DeviceStep *gpu, unsigned ops) {
    double begin = failing_now();
    EpStatus status = device_step_try(gpu, (StepOp)(ops & -ops));
    if (status == EP_OK && (ops & (ops - 1)))
        status = device_step_try(gpu, (StepOp)(ops & (ops - 1)));
    CHECK(status == EP_OK || status == EP_ERR_ORDER || status == EP_ERR_MISMATCH, "%d: %s",
          (int)status, ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    status = ep_group_status(failing->group, NULL);
    CHECK(status == EP_ERR_ORDER || status == EP_ERR_MISMATCH, "%d: %s", (int)status,
          ep_last_error());
    failing_check_refuses(failing, status, "rank");
}

static void other_operations(const EpBootstrap *bootstrap) {
    static const unsigned calls[][2] = {{STEP_DISPATCH, STEP_COMBINE},
                                        {STEP_COMBINE, STEP_DISPATCH},
                                        {DISPATCH_PHASES, COMBINE_PHASES}};
    for (int i = 0; i < LENGTH(calls); i++) {
        FailingGroup failing;
        check_note("pair %d", i);
        REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
        check_disagree(&failing, &failing.gpu, calls[i][is_absent(&failing)]);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_latency_faults, other_operations_2, 2) {
    GPU_NEEDS_LATENCY();
    other_operations(bootstrap);
}
ThreadTest(gpu_latency_faults, other_operations_4, 4) {
    GPU_NEEDS_LATENCY();
    other_operations(bootstrap);
}

/* Sums wait for the weights of a rank that has called something else. If all tokens go to rank 1,
 * others wait for its sums, and their send phases alone wait for nothing. */
static void others_than_weights(const EpBootstrap *bootstrap, Routing routing) {
    static const unsigned calls[][2] = {{STEP_COMBINE, STEP_DISPATCH},
                                        {STEP_DISPATCH, STEP_COMBINE},
                                        {COMBINE_PHASES, DISPATCH_PHASES},
                                        {STEP_COMBINE_SEND, STEP_DISPATCH}};
    for (int i = 0; i < LENGTH(calls) - (routing == ROUTING_ONE_RANK); i++) {
        FailingGroup failing;
        check_note("pair %d", i);
        REQUIRE(open_weighing(&failing, bootstrap, 2 * FAILING_LIMIT, routing), "no group");
        check_disagree(&failing, &failing.gpu, calls[i][is_absent(&failing)]);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_latency_faults, others_than_weights_2, 2) {
    GPU_NEEDS_LATENCY();
    others_than_weights(bootstrap, ROUTING_UNIFORM);
}
ThreadTest(gpu_latency_faults, others_than_weights_4, 4) {
    GPU_NEEDS_LATENCY();
    others_than_weights(bootstrap, ROUTING_ONE_RANK);
}

/* One rank makes the same calls on another handle of equal configuration. */
static void other_handles(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
    DeviceStep gpu = failing.gpu;
    Case c = gpu.c;
    c.id = 1 + is_absent(&failing);
    gpu.step.handle = device_step_handle(failing.group, &c);
    check_disagree(&failing, &gpu, STEP_PREPARE | STEP_DISPATCH);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
}

ThreadTest(gpu_latency_faults, other_handles_2, 2) {
    GPU_NEEDS_LATENCY();
    other_handles(bootstrap);
}
ThreadTest(gpu_latency_faults, other_handles_4, 4) {
    GPU_NEEDS_LATENCY();
    other_handles(bootstrap);
}

/* Open a device step of a handle in throughput mode, with a plan, in the same group. */
static void open_other_mode(const FailingGroup *failing, DeviceStep *gpu) {
    Case c = failing->gpu.c;
    c.mode = EP_MODE_THROUGHPUT, c = case_complete(c);
    World *world = world_new(&c);
    device_step_open(gpu, failing->group, device_step_handle(failing->group, &c), &c,
                     failing->gpu.step.rank, failing->gpu.stream, NULL);
    device_step_load(gpu, world);
    device_step_issue(gpu, STEP_PREPARE | STEP_DISPATCH);
    device_step_check(gpu);
    world_free(world);
}

/* Either the absent rank or all other ranks call an operation of a handle in throughput mode. */
static void other_modes(const EpBootstrap *bootstrap) {
    static const unsigned calls[][2] = {{STEP_DISPATCH, STEP_PREPARE},
                                        {STEP_DISPATCH, STEP_DISPATCH},
                                        {STEP_COMBINE, STEP_COMBINE},
                                        {STEP_COMBINE, STEP_DISPATCH_BACKWARD}};
    for (int i = 0; i < 2 * LENGTH(calls); i++) {
        FailingGroup failing;
        DeviceStep other;
        check_note("pair %d", i);
        REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
        open_other_mode(&failing, &other);
        bootstrap->barrier(bootstrap->context, 60);
        int deviates = is_absent(&failing) == i % 2;
        check_disagree(&failing, deviates ? &other : &failing.gpu, calls[i / 2][deviates]);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
        device_step_close(&other);
    }
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_latency_faults, other_modes_2, 2) {
    GPU_NEEDS_LATENCY();
    other_modes(bootstrap);
}
ThreadTest(gpu_latency_faults, other_modes_4, 4) {
    GPU_NEEDS_LATENCY();
    other_modes(bootstrap);
}

/* As other_modes, where combines wait for weights. Send phases find the disagreement, too. */
static void weights_in_other_modes(const EpBootstrap *bootstrap) {
    static const unsigned calls[][2] = {{STEP_COMBINE, STEP_PREPARE},
                                        {STEP_COMBINE, STEP_COMBINE},
                                        {STEP_COMBINE_SEND, STEP_PREPARE}};
    for (int i = 0; i < 2 * LENGTH(calls); i++) {
        FailingGroup failing;
        DeviceStep other;
        check_note("pair %d", i);
        REQUIRE(open_weighing(&failing, bootstrap, 2 * FAILING_LIMIT, ROUTING_UNIFORM), "no group");
        open_other_mode(&failing, &other);
        bootstrap->barrier(bootstrap->context, 60);
        int deviates = is_absent(&failing) == i % 2;
        check_disagree(&failing, deviates ? &other : &failing.gpu, calls[i / 2][deviates]);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
        device_step_close(&other);
    }
}

ThreadTest(gpu_latency_faults, weights_in_other_modes_2, 2) {
    GPU_NEEDS_LATENCY();
    weights_in_other_modes(bootstrap);
}

/* Both modes by turns, while each rank in turn keeps the others waiting. No rank is blamed. */
static void both_in_turn(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    DeviceStep other;
    const struct timespec late = {.tv_nsec = 700000000};
    REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
    open_other_mode(&failing, &other);
    for (int turn = 0; turn < 2 * bootstrap->size && !check_failure()[0]; turn++) {
        check_note("turn %d", turn);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        bootstrap->barrier(bootstrap->context, 60);
        if (bootstrap->rank == turn / 2) nanosleep(&late, NULL);
        device_step_issue(turn % 2 ? &failing.gpu : &other, turn % 2 ? STEP_COMBINE : STEP_PREPARE);
        device_step_issue(turn % 2 ? &other : &failing.gpu, turn % 2 ? STEP_PREPARE : STEP_COMBINE);
        device_step_issue(&failing.gpu, STEP_DISPATCH);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        CHECK_OK(ep_group_status(failing.group, NULL));
    }
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
    device_step_close(&other);
}

ThreadTest(gpu_latency_faults, both_in_turn_2, 2) {
    GPU_NEEDS_LATENCY();
    both_in_turn(bootstrap);
}
ThreadTest(gpu_latency_faults, both_in_turn_4, 4) {
    GPU_NEEDS_LATENCY();
    both_in_turn(bootstrap);
}

/* ---- other sizes --------------------------------------------------------------------------- */

/* Change one size that must be equal on all ranks. The changed case is valid by itself. */
static Case odd_case(Case c, int which) {
    switch (which) {
    case 0:
        c.top_k = 2;
        break;
    case 1:
        c.hidden = 64;
        break;
    case 2:
        c.row_type = EP_TYPE_FP16;
        break;
    default:
        c.sum_type = EP_TYPE_FP16;
    }
    return c;
}

static void call_odd(const FailingGroup *failing, const Case *c, unsigned ops) {
    DeviceStep odd;
    World *world = world_new(c);
    device_step_open(&odd, failing->group, failing->gpu.step.handle, c, failing->gpu.step.rank,
                     failing->gpu.stream, NULL);
    device_step_load(&odd, world);
    check_disagree(failing, &odd, ops);
    device_step_close(&odd);
    world_free(world);
}

static void other_sizes(const EpBootstrap *bootstrap) {
    for (int i = 0; i < 4; i++) {
        unsigned ops = i < 3 ? STEP_PREPARE | STEP_DISPATCH : STEP_COMBINE;
        FailingGroup failing;
        check_note("sizes %d", i);
        REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
        Case c = odd_case(failing.gpu.c, i);
        if (is_absent(&failing))
            call_odd(&failing, &c, ops);
        else
            check_disagree(&failing, &failing.gpu, ops);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
}

ThreadTest(gpu_latency_faults, other_sizes_2, 2) {
    GPU_NEEDS_LATENCY();
    other_sizes(bootstrap);
}
ThreadTest(gpu_latency_faults, other_sizes_4, 4) {
    GPU_NEEDS_LATENCY();
    other_sizes(bootstrap);
}

/* Either the absent rank or all other ranks give topk_weights, the others slot_weights. */
static void other_weights(const EpBootstrap *bootstrap) {
    static const unsigned ops[] = {STEP_COMBINE, COMBINE_PHASES};
    for (int i = 0; i < 2 * LENGTH(ops); i++) {
        FailingGroup failing;
        check_note("weights %d", i);
        REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
        Case c = failing.gpu.c;
        c.weights_at_combine = 1, c = case_complete(c);
        if (is_absent(&failing) == i % 2)
            call_odd(&failing, &c, ops[i / 2]);
        else
            check_disagree(&failing, &failing.gpu, ops[i / 2]);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
}

ThreadTest(gpu_latency_faults, other_weights_2, 2) {
    GPU_NEEDS_LATENCY();
    other_weights(bootstrap);
}
ThreadTest(gpu_latency_faults, other_weights_4, 4) {
    GPU_NEEDS_LATENCY();
    other_weights(bootstrap);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* The rank whose memory was overwritten gets the reason and writes nothing; the others do not wait
 * for it. */
static void check_overwritten(FailingGroup *failing, unsigned ops) {
    char blamed[48];
    EpStatus expected = is_absent(failing) ? EP_ERR_NOT_PREPARED : EP_ERR_PEER;
    double begin = failing_now();
    snprintf(blamed, sizeof(blamed), "rank %d", failing->absent);
    failing_call(&failing->gpu, ops, expected);
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    CHECK_REFUSED(ep_group_status(failing->group, NULL), expected, blamed,
                  is_absent(failing) ? "other bytes" : "given up");
    if (is_absent(failing)) device_step_check(&failing->gpu);
}

static void overwritten_memory(const EpBootstrap *bootstrap) {
    static const unsigned ops[] = {STEP_COMBINE, COMBINE_PHASES};
    for (int i = 0; i < LENGTH(ops); i++) {
        FailingGroup failing;
        check_note("operations %u", ops[i]);
        REQUIRE(open_failing(&failing, bootstrap, 2 * FAILING_LIMIT), "no group");
        (void)failing_overwrite(&failing);
        bootstrap->barrier(bootstrap->context, 60);
        check_overwritten(&failing, ops[i]);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

ThreadTest(gpu_latency_faults, overwritten_memory_2, 2) {
    GPU_NEEDS_LATENCY();
    overwritten_memory(bootstrap);
}
ThreadTest(gpu_latency_faults, overwritten_memory_4, 4) {
    GPU_NEEDS_LATENCY();
    overwritten_memory(bootstrap);
}
