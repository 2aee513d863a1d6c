/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that stop, have lost their plan or need too much memory, in both modes. Calls on GPUs
 * return before they are done; ep_group_status reports their errors. In each case every rank ends
 * soon, with an error that names the rank to blame, and its GPU serves the next group. */
#include "handles/handle.h"
#include "runtime/cuda/cuda.h"
#include "tests/gpu/failing.h"

#define MOVES (STEP_DISPATCH | STEP_COMBINE | STEP_BACKWARD)

/* Waits that expire take seconds, so some suites of them run side by side. */
TestSuite(gpu_faults, .init = be_quiet);
TestSuite(gpu_late_dispatch, .init = be_quiet);
TestSuite(gpu_late_combine, .init = be_quiet);
TestSuite(gpu_late_weights, .init = be_quiet);

static int is_absent(const FailingGroup *failing) {
    return failing->gpu.step.rank == failing->absent;
}

/* ---- a peer that stops --------------------------------------------------------------------- */

/** Operations of a test in which the last rank stops. */
typedef struct Stop {
    const char *phase; /* that the others time out in */
    unsigned all;      /* that all ranks call before */
    unsigned others;   /* that the others complete then, without the last rank */
    unsigned ops;      /* that time out */
    unsigned late;     /* that the last rank calls before them, when the others have failed */
    unsigned rest;     /* and behind them */
    double later;      /* seconds that all ranks but rank 0 start late: less than the timeout */
} Stop;

/* Operations enqueued behind those that fail do nothing. */
static unsigned ops_behind(const FailingGroup *failing) {
    return failing->gpu.c.mode == EP_MODE_LATENCY ? STEP_DISPATCH | STEP_COMBINE : MOVES;
}

static void check_blames(const FailingGroup *failing, const char *phase) {
    char peer[32], self[32];
    EpFinding found = EP_FINDING_INIT;
    snprintf(peer, sizeof(peer), "rank %d", failing->absent);
    snprintf(self, sizeof(self), "rank %d", failing->gpu.step.rank);
    CHECK_REFUSED(ep_group_status(failing->group, &found), EP_ERR_TIMEOUT, self, peer, phase);
    CHECK(found.status == EP_ERR_TIMEOUT && found.peer == failing->absent, "peer %d", found.peer);
    CHECK(found.rank == failing->gpu.step.rank, "rank %d", found.rank);
    CHECK(strcmp(found.phase, phase) == 0, "%s", found.phase);
    CHECK(failing->gpu.c.mode == EP_MODE_LATENCY || !strstr(ep_last_error(), "row"),
          "an arrival concerns no row: %s", ep_last_error());
    failing_check_refuses(failing, EP_ERR_TIMEOUT, peer);
}

static void check_times_out(const FailingGroup *failing, const Stop *s) {
    if (failing->gpu.step.rank > 0) usleep((useconds_t)(1e6 * s->later));
    double begin = seconds_now();
    failing_call(&failing->gpu, s->ops, EP_ERR_TIMEOUT);
    failing_call(&failing->gpu, ops_behind(failing), EP_ERR_TIMEOUT);
    CHECK(seconds_now() - begin > 0.8 * FAILING_TIMEOUT, "gave up after %.2f s",
          seconds_now() - begin);
    failing_check_soon(begin);
    check_blames(failing, s->phase);
}

/* The absent rank calls after the others timed out. Its first operations may find data sent before
 * that; then it fails, and its error names the rank that the others gave up on. */
static void check_latecomer(const FailingGroup *failing, unsigned ops) {
    char blamed[48];
    EpFinding found = EP_FINDING_INIT;
    snprintf(blamed, sizeof(blamed), "because of rank %d", failing->absent);
    failing_call(&failing->gpu, ops, EP_ERR_PEER);
    failing_call(&failing->gpu, ops_behind(failing), EP_ERR_PEER);
    CHECK_REFUSED(ep_group_status(failing->group, &found), EP_ERR_PEER, "given up", blamed);
    CHECK(found.peer == failing->absent, "peer %d", found.peer);
}

static void stopped_peer(const EpBootstrap *bootstrap, Case c, Stop s) {
    FailingGroup failing;
    failing_open(&failing, bootstrap, &c, FAILING_TIMEOUT);
    if (s.all | s.others) device_step_poison(&failing.gpu);
    device_step_issue(&failing.gpu, s.all);
    if (!is_absent(&failing)) {
        device_step_issue(&failing.gpu, s.others);
        device_step_check(&failing.gpu);
        CHECK_OK(ep_group_status(failing.group, NULL));
        check_times_out(&failing, &s);
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&failing)) failing_call(&failing.gpu, s.late, EP_ERR_PEER);
    if (is_absent(&failing)) check_latecomer(&failing, s.ops | s.rest);
    failing_close(&failing);
    failing_check_next(bootstrap, c.mode);
}

#define STOPPED(mode, ...) \
    stopped_peer(bootstrap, failing_case(bootstrap->size, EP_MODE_##mode), (Stop){__VA_ARGS__})
RankTest(gpu_faults, stopped_peer_2, 2, STOPPED(THROUGHPUT, "dispatch", .ops = MOVES));
RankTest(gpu_faults, stopped_peer_4, 4, STOPPED(THROUGHPUT, "dispatch", .ops = MOVES));
/* Rank 0 times out first, before the others give up. It took part, so they must not blame it. */
RankTest(gpu_faults, stopped_peer_and_late_ones_4, 4,
         STOPPED(THROUGHPUT, "dispatch", .ops = MOVES, .later = FAILING_TIMEOUT / 3));
LatencyTest(gpu_late_dispatch, whole_2, 2, STOPPED(LATENCY, "dispatch", .ops = STEP_DISPATCH));
LatencyTest(gpu_late_dispatch, in_phases_4, 4,
            STOPPED(LATENCY, "dispatch", .ops = STEP_DISPATCH_PHASES));
LatencyTest(gpu_late_combine, whole_4, 4, STOPPED(LATENCY, "combine", .ops = STEP_COMBINE));
LatencyTest(gpu_late_combine, in_phases_2, 2,
            STOPPED(LATENCY, "combine", .ops = STEP_COMBINE_PHASES));
/* Send phases wait for no peer; the receive phase times out. */
LatencyTest(gpu_late_dispatch, receive_phase_waits_4, 4,
            STOPPED(LATENCY, "dispatch", .others = STEP_DISPATCH_SEND, .ops = STEP_DISPATCH_WAIT,
                    .late = STEP_DISPATCH_SEND));
/* A rank that leaves out its receive phase has sent, so the others complete theirs. They miss
 * it in the next operation. */
LatencyTest(gpu_late_combine, left_out_receive_phase_4, 4,
            STOPPED(LATENCY, "combine", .all = STEP_DISPATCH_SEND, .others = STEP_DISPATCH_WAIT,
                    .ops = STEP_COMBINE, .late = STEP_DISPATCH_WAIT));
/* The send phase waits for weights, and names the rank that does not send them. */
LatencyTest(gpu_late_weights, send_phase_2, 2,
            stopped_peer(bootstrap, failing_weighing_case(2, ROUTING_UNIFORM),
                         (Stop){"combine", .ops = STEP_COMBINE_SEND, .rest = STEP_COMBINE_WAIT}));

/* Whoever times out first, all blame the absent rank. */
static void check_blames_absent(const FailingGroup *failing) {
    EpFinding found = EP_FINDING_INIT;
    double begin = seconds_now();
    failing_call(&failing->gpu, STEP_COMBINE, EP_OK);
    failing_check_soon(begin);
    EpStatus status = ep_group_status(failing->group, &found);
    CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
          ep_last_error());
    CHECK(found.peer == failing->absent, "peer %d: %s", found.peer, ep_last_error());
    failing_check_refuses(failing, status, "rank");
}

/* Rank 1 comes later than the others. If all tokens go to it, rank 0 waits for its sums and times
 * out first, while rank 1 waits for the weights of the absent rank. */
static void stopped_weights(const EpBootstrap *bootstrap, Routing routing) {
    FailingGroup failing;
    Case c = failing_weighing_case(bootstrap->size, routing);
    failing_open(&failing, bootstrap, &c, FAILING_TIMEOUT);
    if (bootstrap->rank == 1) sleep(2);
    if (!is_absent(&failing)) check_blames_absent(&failing);
    bootstrap->barrier(bootstrap->context, 60);
    if (is_absent(&failing)) check_latecomer(&failing, STEP_COMBINE);
    failing_close(&failing);
    failing_check_next(bootstrap, EP_MODE_LATENCY);
}

LatencyTest(gpu_late_weights, whole_4, 4, stopped_weights(bootstrap, ROUTING_UNIFORM));
LatencyTest(gpu_late_weights, third_rank_is_absent_3, 3,
            stopped_weights(bootstrap, ROUTING_ONE_RANK));

/* ---- nothing is stored ----------------------------------------------------------------------- */

/* Whoever waits for a rank stores no row there, since the rank may still be in the operation
 * before; nor once the wait has failed. */
static void nothing_stored(const EpBootstrap *bootstrap, StepOp op) {
    FailingGroup failing;
    size_t bytes;
    failing_open_plain(&failing, bootstrap, FAILING_TIMEOUT);
    failing_call(&failing.gpu, STEP_DISPATCH, EP_OK);
    bootstrap->barrier(bootstrap->context, 60);
    char *before = failing_copy_records(failing.group, &bytes);
    bootstrap->barrier(bootstrap->context, 60);
    if (!is_absent(&failing)) {
        failing_call(&failing.gpu, op, EP_OK);
        CHECK_STATUS(ep_group_status(failing.group, NULL), EP_ERR_TIMEOUT);
    }
    bootstrap->barrier(bootstrap->context, 60);
    char *after = failing_copy_records(failing.group, &bytes);
    if (is_absent(&failing)) CHECK(!memcmp(before, after, bytes), "rows or heads were stored");
    free(before), free(after);
    failing_close(&failing);
}

RankTest(gpu_faults, nothing_stored_by_dispatch_2, 2, nothing_stored(bootstrap, STEP_DISPATCH));
RankTest(gpu_faults, nothing_stored_by_combine_2, 2, nothing_stored(bootstrap, STEP_COMBINE));
RankTest(gpu_faults, nothing_stored_by_combine_backward_4, 4,
         nothing_stored(bootstrap, STEP_COMBINE_BACKWARD));
RankTest(gpu_faults, nothing_stored_by_dispatch_backward_2, 2,
         nothing_stored(bootstrap, STEP_DISPATCH_BACKWARD));

/* ---- a plan that is overwritten -------------------------------------------------------------- */

/* Make a new handle with a plan, and overwrite the plan on the absent rank. */
static void overwrite_plan(FailingGroup *failing) {
    EpHandleConfig config = case_handle_config(&failing->gpu.c);
    size_t bytes = 0;
    config.max_recv_rows = failing->gpu.c.capacity;
    CHECK_OK(ep_handle_memory(failing->group, &config, &bytes));
    CHECK_OK(ep_handle_create(failing->group, &config, &failing->gpu.step.handle));
    char *memory = failing->gpu.step.handle->own.memory;
    failing_make_plan(&failing->gpu);
    device_step_poison(&failing->gpu);
    CHECK_CUDA(cudaStreamSynchronize(failing->gpu.stream));
    /* cudaMemset returns before the memory is set, and the step's stream does not wait for it. */
    if (is_absent(failing)) CHECK_CUDA(cudaMemset(memory, 0, bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
}

/* The rank whose memory was overwritten gets the reason and writes nothing; the others do not wait
 * for it. */
static void check_overwritten(FailingGroup *failing, unsigned ops) {
    char blamed[48];
    EpStatus expected = is_absent(failing) ? EP_ERR_NOT_PREPARED : EP_ERR_PEER;
    double begin = seconds_now();
    snprintf(blamed, sizeof(blamed), "rank %d", failing->absent);
    failing_call(&failing->gpu, ops, expected);
    failing_check_soon(begin);
    CHECK_REFUSED(ep_group_status(failing->group, NULL), expected, blamed,
                  is_absent(failing) ? "other bytes" : "given up");
    if (is_absent(failing)) device_step_check(&failing->gpu);
}

static void overwritten_memory(const EpBootstrap *bootstrap, EpMode mode) {
    static const unsigned throughput[] = {STEP_DISPATCH, STEP_COMBINE, STEP_COMBINE_BACKWARD};
    static const unsigned latency[] = {STEP_COMBINE, STEP_COMBINE_PHASES};
    int is_latency = mode == EP_MODE_LATENCY;
    Case c = failing_case(bootstrap->size, mode);
    for (int i = 0; i < (is_latency ? LENGTH(latency) : LENGTH(throughput)); i++) {
        FailingGroup failing;
        unsigned ops = is_latency ? latency[i] : throughput[i];
        failing_open(&failing, bootstrap, &c, 2 * FAILING_LIMIT);
        check_note("operations %u", ops);
        overwrite_plan(&failing);
        bootstrap->barrier(bootstrap->context, 60);
        check_overwritten(&failing, ops);
        bootstrap->barrier(bootstrap->context, 60);
        failing_close(&failing);
    }
    failing_check_next(bootstrap, mode);
}

RankTest(gpu_faults, overwritten_memory_2, 2, overwritten_memory(bootstrap, EP_MODE_THROUGHPUT));
RankTest(gpu_faults, overwritten_memory_4, 4, overwritten_memory(bootstrap, EP_MODE_THROUGHPUT));
LatencyTest(gpu_latency_faults, overwritten_memory_2, 2,
            overwritten_memory(bootstrap, EP_MODE_LATENCY));
LatencyTest(gpu_latency_faults, overwritten_memory_4, 4,
            overwritten_memory(bootstrap, EP_MODE_LATENCY));

/* ---- too much memory ------------------------------------------------------------------------- */

/* ep_prepare has tables of experts in shared memory. A group with more experts than fit is
 * refused before it exists, and where the program leaves the choice, the host backend serves
 * it. */
ThreadTest(gpu_faults, more_experts_than_there_is_room, 1) {
    Case c = case_complete((Case){.experts = 6000});
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    config.backend = EP_BACKEND_CUDA;
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_UNSUPPORTED, "shared memory",
                  "experts", "got 232448 bytes");
    CHECK(group == NULL, "a group was made");
    REQUIRE(setenv("LIBEP_BACKEND", "auto", 1) == 0, "setenv");
    char path[] = "/tmp/libep-log-XXXXXX", log[1024] = "";
    int fd = mkstemp(path);
    setenv("LIBEP_LOG_FILE", path, 1);
    config.backend = EP_BACKEND_AUTO;
    for (int i = 0; i < 2; i++) { /* one warning */
        REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
        CHECK_OK(ep_group_query(group, &info));
        CHECK(info.backend == EP_BACKEND_HOST && strstr(info.reason, "experts"), "%s", info.reason);
        ep_group_destroy(group);
    }
    CHECK(fd >= 0 && read(fd, log, sizeof(log) - 1) > 0, "no log");
    const char *warning = strstr(log, "warn: rank 0: AUTO takes the host backend although a GPU is "
                                      "present: expected a GPU whose blocks have");
    CHECK(warning && !strstr(warning + 20, "libep: warn:"), "%s", log);
    be_quiet();
    unlink(path), close(fd);
    /* The most that fit on an H100. */
    config.num_experts = 5400, config.backend = EP_BACKEND_CUDA;
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    open_handle_with(group, NULL);
    ep_group_destroy(group);
}

/* A valid group that needs more memory than the GPU has is refused, and the GPU then serves a
 * smaller group. */
ThreadTest(gpu_faults, more_memory_than_there_is, 1) {
    Case c = case_complete((Case){.experts = 64, .top_k = EP_MAX_TOP_K, .max_tokens = 1 << 30});
    EpGroupConfig config = case_group_config(&c);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    EpGroup *group = NULL;
    size_t left = 0, total = 0;
    REQUIRE_CUDA(cudaMemGetInfo(&left, &total));
    REQUIRE_OK(ep_group_memory(&config, 1, &memory));
    if ((size_t)(memory.shared_bytes + memory.private_bytes) < total)
        check_left_out("a GPU has room for the largest group");
    CHECK_STATUS(ep_group_create(bootstrap, &config, &group), EP_ERR_NO_MEMORY);
    CHECK(group == NULL, "a group was made");
    failing_check_next(bootstrap, EP_MODE_THROUGHPUT);
}
