/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_abort while kernels wait on streams, with other work behind them; while a stream is
 * being captured; and at any moment of a step. */
#include <pthread.h>
#include <stdint.h>

#include "runtime/group.h"
#include "tests/gpu/failing.h"
#include "tests/harness/ranked.h"

#define WHY "the watchdog has had enough"

TestSuite(gpu_abort, .init = be_quiet);

static void *abort_main(void *group) {
    return ep_group_abort(group, WHY) == EP_OK ? group : NULL;
}

/* Abort the group from another thread, whose current device is not the group's, while this one
 * captures a stream. The capture must survive. */
static void abort_while_capturing(const FailingGroup *failing) {
    pthread_t thread;
    void *done = NULL;
    cudaStream_t captured = new_stream();
    CHECK_CUDA(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    REQUIRE(!pthread_create(&thread, NULL, abort_main, failing->group), "no thread");
    pthread_join(thread, &done);
    CHECK(done != NULL, "the abort failed");
    graph_discard(captured);
    CHECK_CUDA(cudaStreamDestroy(captured));
}

/* Enqueue an operation that waits for the absent rank, another one behind it, and copies that wait
 * for both. */
static void enqueue(const FailingGroup *failing, StepOp op) {
    const DeviceStep *gpu = &failing->gpu;
    CHECK_OK(device_step_try(gpu, op));
    CHECK_OK(device_step_try(gpu, op));
    CHECK_CUDA(cudaMemcpyAsync(gpu->got, gpu->device, 64, cudaMemcpyDeviceToHost, gpu->stream));
    CHECK_CUDA(cudaMemcpyAsync(gpu->device, gpu->inputs, 64, cudaMemcpyHostToDevice, gpu->stream));
}

static void check_waits(const FailingGroup *failing) {
    usleep(100000);
    CHECK(cudaStreamQuery(failing->gpu.stream) == cudaErrorNotReady, "nothing waits");
    (void)cudaGetLastError();
}

static void aborted(const EpBootstrap *bootstrap, EpMode mode, StepOp op) {
    FailingGroup failing;
    Case c = failing_case(bootstrap->size, mode);
    failing_open(&failing, bootstrap, &c, 2 * FAILING_LIMIT);
    double begin = seconds_now();
    if (bootstrap->rank != failing.absent) {
        EpStatus expected = bootstrap->rank ? EP_ERR_PEER : EP_ERR_ABORTED;
        enqueue(&failing, op);
        check_waits(&failing);
        bootstrap->barrier(bootstrap->context, 60);
        if (bootstrap->rank == 0) abort_while_capturing(&failing);
        bootstrap->barrier(bootstrap->context, 60); /* other threads may not wait meanwhile */
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        CHECK_REFUSED(ep_group_status(failing.group, NULL), expected, "rank 0", WHY);
        failing_check_refuses(&failing, expected, WHY);
    } else {
        bootstrap->barrier(bootstrap->context, 60);
        bootstrap->barrier(bootstrap->context, 60);
    }
    failing_check_soon(begin);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
    failing_check_next(bootstrap, mode);
}

RankTest(gpu_abort, dispatch_2, 2, aborted(bootstrap, EP_MODE_THROUGHPUT, STEP_DISPATCH));
RankTest(gpu_abort, combine_4, 4, aborted(bootstrap, EP_MODE_THROUGHPUT, STEP_COMBINE));
RankTest(gpu_abort, prepare_4, 4, aborted(bootstrap, EP_MODE_THROUGHPUT, STEP_PREPARE));
LatencyTest(gpu_abort, dispatch_in_latency_mode_4, 4,
            aborted(bootstrap, EP_MODE_LATENCY, STEP_DISPATCH));
LatencyTest(gpu_abort, combine_in_latency_mode_2, 2,
            aborted(bootstrap, EP_MODE_LATENCY, STEP_COMBINE));

static void open_on_nodes(FailingGroup *failing, const EpBootstrap *bootstrap) {
    Case c = failing_case(bootstrap->size, EP_MODE_THROUGHPUT);
    snprintf(c.nodes, sizeof(c.nodes), "01");
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    failing_open(failing, bootstrap, &c, 2 * FAILING_LIMIT);
}

/* ---- while memory is freed ---- */

typedef struct Freeing {
    void *memory;
    int device; /* which the thread waits for: another thread begins with the first one */
    cudaError_t error;
} Freeing;

static void *free_main(void *context) {
    Freeing *f = context;
    f->error = cudaSetDevice(f->device);
    if (f->error == cudaSuccess) f->error = cudaFreeHost(f->memory);
    return NULL;
}

/* A thread frees memory while kernels wait for the absent rank: until the GPU is idle, the driver
 * lets no other thread enqueue anything. The absent rank aborts. */
static void abort_while_freeing(const EpBootstrap *bootstrap, StepOp op) {
    FailingGroup failing;
    pthread_t thread;
    Freeing freeing = {.memory = NULL};
    open_on_nodes(&failing, bootstrap);
    CHECK_CUDA(cudaHostAlloc(&freeing.memory, 64, 0));
    CHECK_CUDA(cudaGetDevice(&freeing.device));
    double begin = seconds_now();
    if (bootstrap->rank != failing.absent) {
        CHECK_OK(device_step_try(&failing.gpu, op));
        REQUIRE(!pthread_create(&thread, NULL, free_main, &freeing), "no thread");
        check_waits(&failing);
        bootstrap->barrier(bootstrap->context, 60);
        pthread_join(thread, NULL);
        CHECK_CUDA(freeing.error);
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        CHECK_REFUSED(ep_group_status(failing.group, NULL), EP_ERR_PEER, "rank 1", WHY);
    } else {
        bootstrap->barrier(bootstrap->context, 60);
        CHECK_OK(ep_group_abort(failing.group, WHY));
        CHECK_CUDA(cudaFreeHost(freeing.memory));
    }
    failing_check_soon(begin);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
}

RankTest(gpu_abort, of_dispatch_while_memory_is_freed_2, 2,
         abort_while_freeing(bootstrap, STEP_DISPATCH));
RankTest(gpu_abort, of_prepare_while_memory_is_freed_2, 2,
         abort_while_freeing(bootstrap, STEP_PREPARE));

/* ---- that hangs ---- */

#define HANGS_SECONDS 6 /* longer than a watcher waits for an abort */

/* What ep_group_abort does, if its calls of CUDA hang. */
static void *hang_main(void *group) {
    EpAbort *abort = &((EpGroup *)group)->abort;
    pthread_mutex_lock(&abort->mutex);
    snprintf(abort->sentence, sizeof(abort->sentence), "%s", WHY);
    __atomic_store_n(&abort->asked, 1, __ATOMIC_RELEASE);
    sleep(HANGS_SECONDS);
    pthread_mutex_unlock(&abort->mutex);
    return NULL;
}

/* On several nodes the watcher ends the communicator meanwhile, and with it the kernels. From then
 * on no output can be right. */
ThreadTest(gpu_abort, hangs_2, 2) {
    FailingGroup failing;
    pthread_t thread;
    open_on_nodes(&failing, bootstrap);
    double begin = seconds_now();
    if (bootstrap->rank != failing.absent) {
        CHECK_OK(device_step_try(&failing.gpu, STEP_DISPATCH));
        REQUIRE(!pthread_create(&thread, NULL, hang_main, failing.group), "no thread");
        CHECK_CUDA(cudaStreamSynchronize(failing.gpu.stream));
        CHECK(seconds_now() - begin < HANGS_SECONDS, "kernels waited for the abort");
        CHECK_REFUSED(ep_group_status(failing.group, NULL), EP_ERR_ABORTED, "aborted", WHY);
        pthread_join(thread, NULL);
    } else {
        while (ep_group_status(failing.group, NULL) == EP_OK)
            usleep(1000);
        CHECK_REFUSED(ep_group_status(failing.group, NULL), EP_ERR_PEER, "rank 0", WHY);
    }
    failing_check_soon(begin);
    bootstrap->barrier(bootstrap->context, 60);
    failing_close(&failing);
}

/* ---- at any moment ---- */

/* Processes that share a GPU wait for its turns. */
#define ROUNDS(bootstrap) (gpu_shares((bootstrap)->size) ? 4 : 20)

/* On one node, "", or on several, where the rows of a rank cross the network in several chunks. */
static Case any_case(const EpBootstrap *bootstrap, const char *nodes) {
    int ranks = bootstrap->size;
    Case c = {.ranks = ranks, .experts = 2 * ranks, .top_k = 3, .hidden = 264, .max_tokens = 150};
    c.weighted = 1, c.capacity = 900, c.alignment = 4, c.layout = EP_LAYOUT_EXPERT_MAJOR;
    snprintf(c.nodes, sizeof(c.nodes), "%s", nodes);
    if (nodes[0]) set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    if (nodes[0]) set_on_ranks(bootstrap, "LIBEP_NODE_CHUNK", "20000");
    return case_complete(c);
}

typedef struct Aborter {
    EpGroup *group;
    unsigned microseconds;
} Aborter;

static void *abort_later(void *context) {
    const Aborter *a = context;
    usleep(a->microseconds);
    (void)ep_group_abort(a->group, WHY);
    return NULL;
}

/* One rank aborts during a step, after 1 us to 130 ms. A rank whose status is EP_OK after the step
 * has right outputs. Returns whether that was so; *exec is the step's graph. */
static int abort_during_step(EpGroup *group, const EpBootstrap *bootstrap, DeviceStep *gpu,
                             int round, cudaGraphExec_t *exec) {
    pthread_t thread;
    uint32_t draw = (uint32_t)(round + 1) * 2654435761u >> 8;
    Aborter aborter = {group, (1u << draw % 18) + draw % 1000 * (draw % 18 > 10)};
    int aborts = bootstrap->rank == round % bootstrap->size;
    device_step_draw_step(gpu, round);
    unsigned all = device_step_all(&gpu->c);
    *exec = device_step_capture(gpu, all);
    bootstrap->barrier(bootstrap->context, 60);
    if (aborts) CHECK(!pthread_create(&thread, NULL, abort_later, &aborter), "no thread");
    CHECK_CUDA(cudaGraphLaunch(*exec, gpu->stream));
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
    int is_right = ep_group_status(group, NULL) == EP_OK;
    if (is_right) device_step_replayed(gpu, all);
    if (is_right) device_step_check(gpu);
    if (aborts) pthread_join(thread, NULL);
    if (aborts) CHECK_STATUS(ep_group_status(group, NULL), EP_ERR_ABORTED);
    /* On several nodes this rank hears of the abort soon. Else it would wait for the others when it
     * destroys the group. */
    while (gpu->c.nodes[0] && ep_group_status(group, NULL) == EP_OK)
        usleep(1000);
    bootstrap->barrier(bootstrap->context, 60);
    return is_right;
}

static void any_moment(const EpBootstrap *bootstrap, const char *nodes, EpMode mode) {
    Case c = any_case(bootstrap, nodes);
    c.mode = mode;
    int right = 0, rounds = ROUNDS(bootstrap);
    for (int round = 0; round < rounds && failing_none(bootstrap); round++) {
        DeviceStep gpu;
        EpGroup *group = open_group(bootstrap, &c);
        cudaGraphExec_t exec = NULL;
        device_step_new(&gpu, group, &c, bootstrap->rank);
        right += abort_during_step(group, bootstrap, &gpu, round, &exec);
        if (round % 2) CHECK_CUDA(cudaGraphExecDestroy(exec));
        device_step_close(&gpu);
        ep_group_destroy(group);
        if (round % 2 == 0) CHECK_CUDA(cudaGraphExecDestroy(exec));
    }
    check_note("rank %d: %d of %d rounds ended before the abort", bootstrap->rank, right, rounds);
}

RankTest(gpu_abort, any_moment_2, 2, any_moment(bootstrap, "", EP_MODE_THROUGHPUT));
RankTest(gpu_abort, any_moment_on_nodes_2, 2, any_moment(bootstrap, "01", EP_MODE_THROUGHPUT));
RankTest(gpu_abort, any_moment_on_nodes_4, 4, any_moment(bootstrap, "0011", EP_MODE_THROUGHPUT));
RankTest(gpu_abort, any_moment_decoding_on_nodes_4, 4,
         any_moment(bootstrap, "0011", EP_MODE_LATENCY));
