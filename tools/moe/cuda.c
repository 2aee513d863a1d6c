/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's arithmetic on GPUs: memory, streams and events. GEMMs are in cublas.c, the rest
 *  in kernels.cu. */

#include "tools/moe/cuda_state.h"

#include "tools/common/util.h"

#if EP_WITH_CUDA

#include <stdio.h>
#include <stdlib.h>

#include "tools/common/gpu.h"

static bool cuda_finish(MoeDevice *d) {
    return cuda_ok(cudaStreamSynchronize(cuda_stream_of(d)), "cudaStreamSynchronize");
}

/* ---- memory -------------------------------------------------------------------------------- */

static void *cuda_alloc(MoeDevice *d, size_t bytes, const char *what) {
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError();
        bench_fail("%s: no memory of the GPU for %zu bytes", what, bytes);
        return NULL;
    }
    if (cuda_ok(cudaMemsetAsync(memory, 0, bytes ? bytes : 1, cuda_stream_of(d)), "cudaMemset") &&
        cuda_finish(d))
        return memory;
    cudaFree(memory);
    return NULL;
}

static int64_t cuda_room(MoeDevice *d) {
    size_t left = 0, total = 0;
    (void)d;
    return cudaMemGetInfo(&left, &total) == cudaSuccess ? (int64_t)left : 0;
}

static void cuda_release(MoeDevice *d, void *memory) {
    (void)d;
    cudaFree(memory);
}

static bool cuda_upload(MoeDevice *d, void *to, const void *from, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cuda_stream_of(d)),
                   "cudaMemcpyAsync") &&
           cuda_finish(d);
}

static bool cuda_download(MoeDevice *d, void *to, const void *from, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cuda_stream_of(d)),
                   "cudaMemcpyAsync") &&
           cuda_finish(d);
}

static bool cuda_copy(MoeDevice *d, void *to, const void *from, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_stream_of(d)),
                   "cudaMemcpyAsync");
}

static bool cuda_set(MoeDevice *d, void *to, int byte, size_t bytes) {
    return cuda_ok(cudaMemsetAsync(to, byte, bytes, cuda_stream_of(d)), "cudaMemsetAsync");
}

static bool follow(MoeDevice *d, cudaStream_t later, int which, cudaStream_t earlier) {
    cudaEvent_t event = cuda_state(d)->events[which];
    return cuda_ok(cudaEventRecord(event, earlier), "cudaEventRecord") &&
           cuda_ok(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

static bool cuda_fork(MoeDevice *d) {
    return follow(d, (cudaStream_t)d->side, FORKED, cuda_stream_of(d));
}

static bool cuda_join(MoeDevice *d) {
    return follow(d, cuda_stream_of(d), JOINED, (cudaStream_t)d->side);
}

/* Events are made when a point is marked for the first time, which is not timed. */
static bool reserve_points(CudaState *s, int count) {
    cudaEvent_t *points = bench_alloc((size_t)count, sizeof(cudaEvent_t), "events");
    bool ok = points != NULL;
    for (int i = 0; ok && i < s->num_points; i++)
        points[i] = s->points[i];
    free(s->points);
    s->points = points;
    for (; ok && s->num_points < count; s->num_points += ok)
        ok = cuda_ok(cudaEventCreateWithFlags(&points[s->num_points], cudaEventDisableTiming),
                     "cudaEventCreateWithFlags");
    return ok;
}

static cudaStream_t stream_of(const MoeDevice *d, bool side) {
    return side ? (cudaStream_t)d->side : cuda_stream_of(d);
}

static bool cuda_mark(MoeDevice *d, bool side, int point) {
    CudaState *s = d->state;
    if (point >= s->num_points && !reserve_points(s, point + 32)) return false;
    return cuda_ok(cudaEventRecord(s->points[point], stream_of(d, side)), "cudaEventRecord");
}

static bool cuda_await(MoeDevice *d, bool side, int point) {
    return cuda_ok(cudaStreamWaitEvent(stream_of(d, side), cuda_state(d)->points[point], 0),
                   "cudaStreamWaitEvent");
}

static bool cuda_start(MoeDevice *d) {
    CudaState *s = d->state;
    d->took_us = 0;
    return cuda_ok(cudaEventRecord(s->events[BEGIN], cuda_stream_of(d)), "cudaEventRecord");
}

static bool cuda_stop(MoeDevice *d) {
    CudaState *s = d->state;
    float ms = 0;
    bool ok = cuda_ok(cudaEventRecord(s->events[END], cuda_stream_of(d)), "cudaEventRecord") &&
              cuda_finish(d) &&
              cuda_ok(cudaEventElapsedTime(&ms, s->events[BEGIN], s->events[END]),
                      "cudaEventElapsedTime");
    d->took_us = 1e3 * (double)ms;
    return ok;
}

static bool cuda_capture(MoeDevice *d, bool (*queue)(void *context), void *context, void **graph) {
    cudaGraph_t captured = NULL;
    CudaState *s = d->state;
    cudaGraphExec_t *out = &s->graphs[s->num_graphs];
    if (s->num_graphs == MAX_GRAPHS) return bench_fail("more than %d graphs", MAX_GRAPHS);
    if (!cuda_ok(cudaStreamBeginCapture(cuda_stream_of(d), cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture"))
        return false;
    bool ok = queue(context);
    ok = cuda_ok(cudaStreamEndCapture(cuda_stream_of(d), &captured), "cudaStreamEndCapture") && ok;
    ok = ok && cuda_ok(cudaGraphInstantiate(out, captured, 0), "cudaGraphInstantiate") &&
         cuda_ok(cudaGraphUpload(*out, cuda_stream_of(d)), "cudaGraphUpload");
    if (captured) cudaGraphDestroy(captured);
    *graph = *out;
    s->num_graphs += ok;
    return ok;
}

static bool cuda_replay(MoeDevice *d, void *graph) {
    return cuda_ok(cudaGraphLaunch((cudaGraphExec_t)graph, cuda_stream_of(d)), "cudaGraphLaunch");
}

static void cuda_exchange(MoeDevice *d) {
    const EpStream stream = d->stream;
    d->stream = d->side, d->side = stream;
}

static void cuda_destroy(MoeDevice *d) {
    CudaState *s = d->state;
    for (int i = 0; s && i < s->num_graphs; i++)
        cudaGraphExecDestroy(s->graphs[i]);
    for (int i = 0; s && i < s->num_points; i++)
        cudaEventDestroy(s->points[i]);
    if (s) free(s->points);
    if (s) cublas_close(d);
    for (int i = 0; s && i < NUM_EVENTS; i++)
        if (s->events[i]) cudaEventDestroy(s->events[i]);
    if (s) cudaFree(s->drawn);
    if (d->side) cudaStreamDestroy((cudaStream_t)d->side);
    if (d->stream) cudaStreamDestroy(cuda_stream_of(d));
    free(s);
    d->state = NULL;
    d->stream = d->side = NULL;
}

/* ---- the device ---------------------------------------------------------------------------- */

static bool open_stream(int priority, EpStream *out) {
    cudaStream_t stream;
    if (!cuda_ok(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
                 "cudaStreamCreateWithPriority"))
        return false;
    *out = stream;
    return true;
}

/* The few blocks of NCCL on the second stream go first where multiprocessors are short. */
static bool open_streams(MoeDevice *d) {
    int least = 0, greatest = 0;
    return cuda_ok(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                   "cudaDeviceGetStreamPriorityRange") &&
           open_stream(least, &d->stream) && open_stream(greatest, &d->side);
}

static bool open_events(CudaState *s) {
    bool ok = true;
    for (int i = 0; ok && i < NUM_EVENTS; i++)
        ok = cuda_ok(
            cudaEventCreateWithFlags(&s->events[i], i < FORKED ? 0 : cudaEventDisableTiming),
            "cudaEventCreateWithFlags");
    return ok;
}

static bool open_state(MoeDevice *d) {
    char name[96], gpu[128];
    CudaState *s = d->state = bench_alloc(1, sizeof(CudaState), "the GPU's state");
    if (!s || !gpu_multiprocessors(&d->multiprocessors) || !open_streams(d) || !open_events(s) ||
        !cublas_open(d, name, sizeof(name)) ||
        !(s->drawn = cuda_alloc(d, 2 * sizeof(*s->drawn), "the counters of products")))
        return false;
    gpu_name(gpu, sizeof(gpu));
    d->product_sms = d->multiprocessors;
    d->multiplies_e4m3 = gpu_capability() == 90;
    snprintf(d->gemm, sizeof(d->gemm), "%s on %s", name, gpu);
    return true;
}

bool moe_cuda_create(MoeDevice *out, Grouping grouping) {
    *out = (MoeDevice){.name = "cuda",
                       .backend = EP_BACKEND_CUDA,
                       .grouping = grouping,
                       .square = 4096,
                       .alloc = cuda_alloc,
                       .release = cuda_release,
                       .upload = cuda_upload,
                       .download = cuda_download,
                       .room = cuda_room,
                       .copy = cuda_copy,
                       .set = cuda_set,
                       .fill = cuda_fill,
                       .differ = cuda_differ,
                       .finish = cuda_finish,
                       .fork = cuda_fork,
                       .join = cuda_join,
                       .mark = cuda_mark,
                       .await = cuda_await,
                       .start = cuda_start,
                       .stop = cuda_stop,
                       .capture = cuda_capture,
                       .replay = cuda_replay,
                       .limit = cublas_limit,
                       .exchange = cuda_exchange,
                       .destroy = cuda_destroy,
                       .multiply = cuda_multiply,
                       .multiply_narrow = cuda_multiply_narrow,
                       .accumulate = cuda_accumulate,
                       .correlate = cuda_correlate,
                       .multiply_scaled = cuda_multiply_scaled,
                       .correlate_scaled = cuda_correlate_scaled,
                       .choose = cuda_choose,
                       .choose_backward = cuda_choose_backward,
                       .activate = cuda_activate,
                       .activate_backward = cuda_activate_backward,
                       .quantise = cuda_quantise,
                       .requantise = cuda_requantise,
                       .activate_scaled = cuda_activate_scaled,
                       .activate_backward_scaled = cuda_activate_backward_scaled,
                       .transpose = cuda_transpose,
                       .dequantise = cuda_dequantise};
    return open_state(out);
}

#else

bool moe_cuda_create(MoeDevice *out, Grouping grouping) {
    *out = (MoeDevice){.name = "cuda", .grouping = grouping};
    return bench_refuse("--backend: expected host, got cuda, but this ep_moe was built without "
                        "CUDA");
}

#endif
