/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's arithmetic on GPUs: cuBLAS, group by group, and the kernels of kernels.cu. */

#include "tools/moe/device.h"

#include "tools/common/util.h"

#if EP_WITH_CUDA

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/gpu.h"
#include "tools/moe/cublas.h"
#include "tools/moe/kernels.h"

/* Scratch for operands and products that cuBLAS cannot take or give as they are. */
typedef struct Scratch {
    void *data;
    size_t bytes;
} Scratch;

enum { SCRATCH_A, SCRATCH_B, SCRATCH_C, NUM_SCRATCH };

/* The last two have no time. */
enum { BEGIN, END, FORKED, JOINED, NUM_EVENTS };

typedef struct CudaState {
    Cublas *cublas;
    Scratch scratch[NUM_SCRATCH];
    cudaEvent_t events[NUM_EVENTS];
} CudaState;

static cudaStream_t stream_of(const MoeDevice *d) {
    return (cudaStream_t)d->stream;
}

static bool cuda_finish(MoeDevice *d) {
    return cuda_ok(cudaStreamSynchronize(stream_of(d)), "cudaStreamSynchronize");
}

/* ---- memory -------------------------------------------------------------------------------- */

static void *cuda_alloc(MoeDevice *d, size_t bytes, const char *what) {
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError();
        bench_fail("%s: no memory of the GPU for %zu bytes", what, bytes);
        return NULL;
    }
    if (cuda_ok(cudaMemsetAsync(memory, 0, bytes ? bytes : 1, stream_of(d)), "cudaMemset") &&
        cuda_finish(d))
        return memory;
    cudaFree(memory);
    return NULL;
}

static void cuda_release(MoeDevice *d, void *memory) {
    (void)d;
    cudaFree(memory);
}

static bool cuda_upload(MoeDevice *d, void *to, const void *from, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(d)),
                   "cudaMemcpyAsync") &&
           cuda_finish(d);
}

static bool cuda_download(MoeDevice *d, void *to, const void *from, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(d)),
                   "cudaMemcpyAsync") &&
           cuda_finish(d);
}

static bool cuda_copy(MoeDevice *d, void *to, const void *from, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(d)),
                   "cudaMemcpyAsync");
}

static bool follow(MoeDevice *d, cudaStream_t later, int which, cudaStream_t earlier) {
    cudaEvent_t event = ((CudaState *)d->state)->events[which];
    return cuda_ok(cudaEventRecord(event, earlier), "cudaEventRecord") &&
           cuda_ok(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

static bool cuda_fork(MoeDevice *d) {
    return follow(d, (cudaStream_t)d->side, FORKED, stream_of(d));
}

static bool cuda_join(MoeDevice *d) {
    return follow(d, stream_of(d), JOINED, (cudaStream_t)d->side);
}

static bool cuda_start(MoeDevice *d) {
    CudaState *s = d->state;
    d->took_us = 0;
    return cuda_ok(cudaEventRecord(s->events[BEGIN], stream_of(d)), "cudaEventRecord");
}

static bool cuda_stop(MoeDevice *d) {
    CudaState *s = d->state;
    float ms = 0;
    bool ok = cuda_ok(cudaEventRecord(s->events[END], stream_of(d)), "cudaEventRecord") &&
              cuda_finish(d) &&
              cuda_ok(cudaEventElapsedTime(&ms, s->events[BEGIN], s->events[END]),
                      "cudaEventElapsedTime");
    d->took_us = 1e3 * (double)ms;
    return ok;
}

static void cuda_destroy(MoeDevice *d) {
    CudaState *s = d->state;
    for (int i = 0; s && i < NUM_SCRATCH; i++)
        cudaFree(s->scratch[i].data);
    if (s) cublas_close(s->cublas);
    for (int i = 0; s && i < NUM_EVENTS; i++)
        if (s->events[i]) cudaEventDestroy(s->events[i]);
    if (d->side) cudaStreamDestroy((cudaStream_t)d->side);
    if (d->stream) cudaStreamDestroy(stream_of(d));
    free(s);
    d->state = NULL;
    d->stream = d->side = NULL;
}

/* It grows in the first step, which is not timed. */
static void *reserve(MoeDevice *d, int which, int64_t elements) {
    Scratch *scratch = &((CudaState *)d->state)->scratch[which];
    const size_t bytes = (size_t)elements * sizeof(float);
    if (scratch->data && bytes <= scratch->bytes) return scratch->data;
    if (!cuda_finish(d)) return NULL;
    cudaFree(scratch->data);
    scratch->data = cuda_alloc(d, bytes, "operands of a GEMM");
    scratch->bytes = scratch->data ? bytes : 0;
    return scratch->data;
}

/* ---- GEMMs --------------------------------------------------------------------------------- */

static int64_t elements_of(const EpTensor *t) {
    int64_t count = 1;
    for (int i = 0; i < t->ndim; i++)
        count *= t->shape[i];
    return count;
}

static bool convert(MoeDevice *d, const EpTensor *from, const EpTensor *to, int add) {
    ConvertArgs args = {from->data, to->data, from->type, to->type, elements_of(from), add};
    return cuda_ok(moe_launch_convert(&args, stream_of(d)), "converting");
}

/* `t` in fp32: itself, or a copy. */
static bool widen(MoeDevice *d, int which, const EpTensor *t, bool filled, EpTensor *out) {
    *out = *t;
    if (t->type == EP_TYPE_FP32) return true;
    out->type = EP_TYPE_FP32;
    out->data = reserve(d, which, elements_of(t));
    return out->data && (!filled || convert(d, t, out, 0));
}

typedef bool (*Product)(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                        bool transposed, const EpTensor *c);

static bool cublas_takes(const EpTensor *a, const EpTensor *b, const EpTensor *c) {
    return a->type == b->type && (c->type == a->type || c->type == EP_TYPE_FP32);
}

/* cuBLAS takes operands of one type. Others become fp32 first, and so does their product. */
static bool run_product(MoeDevice *d, Product product, const Groups *groups, const EpTensor *a,
                        const EpTensor *b, bool transposed, const EpTensor *c) {
    EpTensor wide_a, wide_b, wide_c;
    if (cublas_takes(a, b, c)) return product(d, groups, a, b, transposed, c);
    if (!widen(d, SCRATCH_A, a, true, &wide_a) || !widen(d, SCRATCH_B, b, true, &wide_b) ||
        !widen(d, SCRATCH_C, c, false, &wide_c) ||
        !product(d, groups, &wide_a, &wide_b, transposed, &wide_c))
        return false;
    return c->type == EP_TYPE_FP32 || convert(d, &wide_c, c, 0);
}

static CublasMatrix matrix(const EpTensor *t, int64_t at, bool transposed) {
    return (CublasMatrix){(const char *)t->data + (size_t)at * ep_type_bytes(t->type), t->type,
                          transposed};
}

static bool multiply_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                            const EpTensor *b, bool transposed, const EpTensor *c) {
    CudaState *s = d->state;
    const int64_t k = a->shape[1], n = c->shape[1];
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        if (rows > 0 &&
            !cublas_multiply(s->cublas, rows, n, k, matrix(a, first * k, false),
                             matrix(b, g * k * n, transposed), matrix(c, first * n, false)))
            return false;
    }
    return true;
}

/* A group without rows has a gradient of zero. */
static bool correlate_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                             const EpTensor *b, bool transposed, const EpTensor *c) {
    CudaState *s = d->state;
    const int64_t m = a->shape[1], n = b->shape[1];
    const size_t bytes = (size_t)(m * n) * ep_type_bytes(c->type);
    (void)transposed;
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        bool ok = rows > 0
                      ? cublas_multiply(s->cublas, m, n, rows, matrix(a, first * m, true),
                                        matrix(b, first * n, false), matrix(c, g * m * n, false))
                      : cuda_ok(cudaMemsetAsync((char *)c->data + (size_t)g * bytes, 0, bytes,
                                                stream_of(d)),
                                "cudaMemsetAsync");
        if (!ok) return false;
    }
    return true;
}

static bool cuda_multiply(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                          bool transposed, const EpTensor *c) {
    return run_product(d, multiply_groups, groups, a, b, transposed, c);
}

static bool cuda_correlate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                           const EpTensor *c) {
    return run_product(d, correlate_groups, groups, a, b, false, c);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static bool cuda_choose(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                        const EpTensor *weights) {
    ChooseArgs args = {p->data,
                       idx->data,
                       weights->data,
                       p->shape[0],
                       (int32_t)p->shape[1],
                       (int32_t)idx->shape[1]};
    return cuda_ok(moe_launch_choose(&args, stream_of(d)), "choosing experts");
}

static bool cuda_choose_backward(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                                 const EpTensor *grad_weights, const EpTensor *grad) {
    ChooseBackwardArgs args = {p->data,
                               grad_weights->data,
                               idx->data,
                               grad->data,
                               p->shape[0],
                               (int32_t)p->shape[1],
                               (int32_t)idx->shape[1]};
    return cuda_ok(moe_launch_choose_backward(&args, stream_of(d)), "the router's gradient");
}

static bool cuda_add(MoeDevice *d, const EpTensor *in, const EpTensor *out) {
    return convert(d, in, out, 1);
}

/* Rows up to the end of the last slab, padding included: it is computed and not used. */
static int64_t rows_of(const Groups *groups) {
    const int32_t last = groups->num - 1;
    return last < 0 ? 0 : groups->first[last] + groups->count[last];
}

static bool cuda_activate(MoeDevice *d, const Groups *groups, const EpTensor *z, const EpTensor *w,
                          const EpTensor *a) {
    ActivateArgs args = {.z = z->data,
                         .w = w ? w->data : NULL,
                         .a = a->data,
                         .rows = rows_of(groups),
                         .width = a->shape[1]};
    return cuda_ok(moe_launch_activate(a->type, &args, stream_of(d)), "the activation");
}

static bool cuda_activate_backward(MoeDevice *d, const Groups *groups, const EpTensor *z,
                                   const EpTensor *w, const EpTensor *grad_a,
                                   const EpTensor *grad_z, const EpTensor *grad_w) {
    ActivateArgs args = {.z = z->data,
                         .w = w ? w->data : NULL,
                         .grad_a = grad_a->data,
                         .grad_z = grad_z->data,
                         .grad_w = grad_w ? grad_w->data : NULL,
                         .rows = rows_of(groups),
                         .width = grad_a->shape[1]};
    return cuda_ok(moe_launch_activate_backward(z->type, &args, stream_of(d)),
                   "the activation's gradient");
}

static bool cuda_dequantise(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                            int64_t columns, const EpTensor *out) {
    DequantiseArgs args = {.q = q->data,
                           .scales = scales->data,
                           .out = out->data,
                           .count = elements_of(q),
                           .height = q->shape[1],
                           .width = q->shape[2],
                           .block_rows = rows,
                           .block_columns = columns,
                           .scales_per_matrix = scales->shape[1] * scales->shape[2],
                           .scales_per_row = scales->shape[2],
                           .bytes = scales->type == EP_TYPE_UINT8};
    return cuda_ok(moe_launch_dequantise(&args, stream_of(d)), "dequantising");
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

static bool count_multiprocessors(int *out) {
    int device;
    return cuda_ok(cudaGetDevice(&device), "cudaGetDevice") &&
           cuda_ok(cudaDeviceGetAttribute(out, cudaDevAttrMultiProcessorCount, device),
                   "cudaDeviceGetAttribute");
}

static bool open_state(MoeDevice *d) {
    CudaState *s = d->state = bench_alloc(1, sizeof(CudaState), "the GPU's state");
    return s && count_multiprocessors(&d->multiprocessors) && open_streams(d) && open_events(s) &&
           cublas_open(d->stream, &s->cublas);
}

static void describe(MoeDevice *d) {
    char name[96], gpu[128];
    cublas_name(((CudaState *)d->state)->cublas, name, sizeof(name));
    gpu_name(gpu, sizeof(gpu));
    snprintf(d->gemm, sizeof(d->gemm), "%s on %s", name, gpu);
}

bool moe_cuda_create(MoeDevice *out) {
    *out = (MoeDevice){.name = "cuda",
                       .backend = EP_BACKEND_CUDA,
                       .square = 4096,
                       .alloc = cuda_alloc,
                       .release = cuda_release,
                       .upload = cuda_upload,
                       .download = cuda_download,
                       .copy = cuda_copy,
                       .finish = cuda_finish,
                       .fork = cuda_fork,
                       .join = cuda_join,
                       .start = cuda_start,
                       .stop = cuda_stop,
                       .destroy = cuda_destroy,
                       .multiply = cuda_multiply,
                       .correlate = cuda_correlate,
                       .choose = cuda_choose,
                       .choose_backward = cuda_choose_backward,
                       .add = cuda_add,
                       .activate = cuda_activate,
                       .activate_backward = cuda_activate_backward,
                       .dequantise = cuda_dequantise};
    if (!open_state(out)) return false;
    describe(out);
    return true;
}

#else

bool moe_cuda_create(MoeDevice *out) {
    *out = (MoeDevice){.name = "cuda"};
    return bench_refuse("--backend: expected host, got cuda, but this ep_moe was built without "
                        "CUDA");
}

#endif
