/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that make different calls. Every rank gets the error long before the timeout, and its GPU
 * serves the next group. */
#include "tests/gpu/failing.h"

TestSuite(gpu_latency_faults, .init = be_quiet);

/** What else is different where a rank deviates. */
typedef enum Change {
    NOTHING,
    THE_HANDLE, /* of equal configuration, with another id */
    THE_MODE,   /* a handle of throughput mode */
    TOP_K,
    HIDDEN,
    ROW_TYPE,
    SUM_TYPE,
    WEIGHTS /* topk_weights at combine, not slot_weights */
} Change;

/** Operations of the last rank, which deviates, and of the others. */
typedef struct Disagreement {
    unsigned deviating, others;
    Change change;
    int by_turns; /* a second time all others deviate from the last rank */
} Disagreement;

/* Each changed case is valid by itself. */
static Case changed_case(Case c, Change change) {
    if (change == THE_HANDLE) c.id = EP_MAX_HANDLE_ID;
    if (change == THE_MODE) c.mode = EP_MODE_THROUGHPUT;
    if (change == TOP_K) c.top_k = 2;
    if (change == HIDDEN) c.hidden = 64;
    if (change == ROW_TYPE) c.row_type = EP_TYPE_FP16;
    if (change == SUM_TYPE) c.sum_type = EP_TYPE_FP16;
    if (change == WEIGHTS) c.weights_at_combine = 1;
    return case_complete(c);
}

/* Open the step of the ranks that deviate. A handle of the other mode has a plan. */
static void open_changed(FailingGroup *failing, Change change, DeviceStep *odd) {
    Case c = changed_case(failing->gpu.c, change), named = failing->gpu.c;
    int rank = failing->gpu.step.rank, is_new = change == THE_HANDLE || change == THE_MODE;
    EpHandle *handle = failing->gpu.step.handle;
    if (is_new) handle = open_handle(failing->group, &c);
    named.id = 1;
    if (change == THE_HANDLE) failing->gpu.step.handle = open_handle(failing->group, &named);
    device_step_open(odd, failing->group, handle, &c, rank, failing->gpu.stream, NULL);
    device_step_draw(odd, &c);
    if (change != THE_MODE) return;
    device_step_issue(odd, STEP_PREPARE | STEP_DISPATCH);
    device_step_check(odd);
}

/* Call one operation, or two in the order of StepOp. Ranks of throughput mode find another order,
 * those of latency mode also other sizes. */
static void check_disagree(const FailingGroup *failing, const DeviceStep *gpu, unsigned ops,
                           Change change) {
    double begin = seconds_now();
    int throughput = failing->gpu.c.mode == EP_MODE_THROUGHPUT;
    EpStatus also = throughput ? EP_ERR_ORDER : EP_ERR_MISMATCH;
    EpStatus status = device_step_try(gpu, (StepOp)(ops & -ops));
    if (status == EP_OK && (ops & (ops - 1)))
        status = device_step_try(gpu, (StepOp)(ops & (ops - 1)));
    CHECK(status == EP_OK || status == EP_ERR_ORDER || status == also, "%d: %s", (int)status,
          ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
    failing_check_soon(begin);
    status = ep_group_status(failing->group, NULL);
    CHECK(status == EP_ERR_ORDER || status == also, "%d: %s", (int)status, ep_last_error());
    if (change == THE_HANDLE && throughput)
        CHECK_REFUSED(status, EP_ERR_ORDER, "id differs", "has 4095", "has 1");
    failing_check_refuses(failing, status, "rank");
}

static void disagree(const EpBootstrap *bootstrap, const Case *c, const Disagreement *d,
                     int others_deviate) {
    FailingGroup failing;
    DeviceStep odd;
    failing_open(&failing, bootstrap, c, 2 * FAILING_LIMIT);
    open_changed(&failing, d->change, &odd);
    bootstrap->barrier(bootstrap->context, 60);
    int deviates = (bootstrap->rank == failing.absent) != others_deviate;
    check_disagree(&failing, deviates && d->change ? &odd : &failing.gpu,
                   deviates ? d->deviating : d->others, d->change);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
    device_step_close(&odd);
}

static void disagree_each(const EpBootstrap *bootstrap, Case c, const Disagreement *d, int count) {
    for (int i = 0; i < count; i++)
        for (int others_deviate = 0; others_deviate <= d[i].by_turns; others_deviate++) {
            if (!failing_none(bootstrap)) return;
            check_note("disagreement %d, others deviate: %d", i, others_deviate);
            disagree(bootstrap, &c, &d[i], others_deviate);
        }
    failing_check_next(bootstrap, c.mode);
}

/* ---- throughput mode ----------------------------------------------------------------------- */

static const Disagreement throughput_calls[] = {{STEP_COMBINE, STEP_DISPATCH, NOTHING, 0},
                                                {STEP_DISPATCH_BACKWARD, STEP_COMBINE, NOTHING, 0},
                                                {STEP_PREPARE, STEP_COMBINE_BACKWARD, NOTHING, 0}};
static const Disagreement throughput_handles[] = {{STEP_PREPARE, STEP_PREPARE, THE_HANDLE, 0}};

#define THROUGHPUT(list) \
    disagree_each(bootstrap, failing_case(bootstrap->size, EP_MODE_THROUGHPUT), list, LENGTH(list))
RankTest(gpu_faults, other_operations_2, 2, THROUGHPUT(throughput_calls));
RankTest(gpu_faults, other_operations_4, 4, THROUGHPUT(throughput_calls));
RankTest(gpu_faults, other_handles_2, 2, THROUGHPUT(throughput_handles));
RankTest(gpu_faults, other_handles_4, 4, THROUGHPUT(throughput_handles));

/* ---- latency mode ---------------------------------------------------------------------------- */

static const Disagreement calls[] = {{STEP_COMBINE, STEP_DISPATCH, NOTHING, 0},
                                     {STEP_DISPATCH, STEP_COMBINE, NOTHING, 0},
                                     {STEP_COMBINE_PHASES, STEP_DISPATCH_PHASES, NOTHING, 0}};
static const Disagreement handles[] = {
    {STEP_PREPARE | STEP_DISPATCH, STEP_PREPARE | STEP_DISPATCH, THE_HANDLE, 0}};
static const Disagreement modes[] = {{STEP_PREPARE, STEP_DISPATCH, THE_MODE, 1},
                                     {STEP_DISPATCH, STEP_DISPATCH, THE_MODE, 1},
                                     {STEP_COMBINE, STEP_COMBINE, THE_MODE, 1},
                                     {STEP_DISPATCH_BACKWARD, STEP_COMBINE, THE_MODE, 1}};
static const Disagreement sizes[] = {
    {STEP_PREPARE | STEP_DISPATCH, STEP_PREPARE | STEP_DISPATCH, TOP_K, 0},
    {STEP_PREPARE | STEP_DISPATCH, STEP_PREPARE | STEP_DISPATCH, HIDDEN, 0},
    {STEP_PREPARE | STEP_DISPATCH, STEP_PREPARE | STEP_DISPATCH, ROW_TYPE, 0},
    {STEP_COMBINE, STEP_COMBINE, SUM_TYPE, 0}};
static const Disagreement weights[] = {{STEP_COMBINE, STEP_COMBINE, WEIGHTS, 1},
                                       {STEP_COMBINE_PHASES, STEP_COMBINE_PHASES, WEIGHTS, 1}};

#define LATENCY(list) \
    disagree_each(bootstrap, failing_case(bootstrap->size, EP_MODE_LATENCY), list, LENGTH(list))
LatencyTest(gpu_latency_faults, other_operations_2, 2, LATENCY(calls));
LatencyTest(gpu_latency_faults, other_operations_4, 4, LATENCY(calls));
LatencyTest(gpu_latency_faults, other_handles_2, 2, LATENCY(handles));
LatencyTest(gpu_latency_faults, other_handles_4, 4, LATENCY(handles));
LatencyTest(gpu_latency_faults, other_modes_2, 2, LATENCY(modes));
LatencyTest(gpu_latency_faults, other_modes_4, 4, LATENCY(modes));
LatencyTest(gpu_latency_faults, other_sizes_2, 2, LATENCY(sizes));
LatencyTest(gpu_latency_faults, other_sizes_4, 4, LATENCY(sizes));
LatencyTest(gpu_latency_faults, other_weights_2, 2, LATENCY(weights));
LatencyTest(gpu_latency_faults, other_weights_4, 4, LATENCY(weights));

/* Sums wait for the weights of a rank that has called something else. If all tokens go to rank
 * 1, others wait for its sums, and their send phases alone wait for nothing. */
static const Disagreement than_weights[] = {{STEP_DISPATCH, STEP_COMBINE, NOTHING, 0},
                                            {STEP_COMBINE, STEP_DISPATCH, NOTHING, 0},
                                            {STEP_DISPATCH_PHASES, STEP_COMBINE_PHASES, NOTHING, 0},
                                            {STEP_DISPATCH, STEP_COMBINE_SEND, NOTHING, 0}};
/* Send phases find the disagreement, too. */
static const Disagreement weights_and_modes[] = {{STEP_PREPARE, STEP_COMBINE, THE_MODE, 1},
                                                 {STEP_COMBINE, STEP_COMBINE, THE_MODE, 1},
                                                 {STEP_PREPARE, STEP_COMBINE_SEND, THE_MODE, 1}};

#define WEIGHING(routing, list, count) \
    disagree_each(bootstrap, failing_weighing_case(bootstrap->size, routing), list, count)
LatencyTest(gpu_latency_faults, others_than_weights_2, 2,
            WEIGHING(ROUTING_UNIFORM, than_weights, 4));
LatencyTest(gpu_latency_faults, others_than_weights_4, 4,
            WEIGHING(ROUTING_ONE_RANK, than_weights, 3));
LatencyTest(gpu_latency_faults, weights_in_other_modes_2, 2,
            WEIGHING(ROUTING_UNIFORM, weights_and_modes, 3));

/* Both modes by turns, while each rank in turn keeps the others waiting. No rank is blamed. */
static void both_in_turn(const EpBootstrap *bootstrap) {
    FailingGroup failing;
    DeviceStep other;
    Case c = failing_case(bootstrap->size, EP_MODE_LATENCY);
    failing_open(&failing, bootstrap, &c, 2 * FAILING_LIMIT);
    open_changed(&failing, THE_MODE, &other);
    for (int turn = 0; turn < 2 * bootstrap->size && !check_failure()[0]; turn++) {
        check_note("turn %d", turn);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        bootstrap->barrier(bootstrap->context, 60);
        if (bootstrap->rank == turn / 2) usleep(700000);
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

LatencyTest(gpu_latency_faults, both_in_turn_2, 2, both_in_turn(bootstrap));
LatencyTest(gpu_latency_faults, both_in_turn_4, 4, both_in_turn(bootstrap));
