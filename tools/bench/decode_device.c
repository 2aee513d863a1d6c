/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/decode_device.h"

#include <stdlib.h>

#include "tools/common/gpu.h"
#include "tools/common/util.h"

#if EP_WITH_CUDA

enum { MOST_BLOCKS = 8 };

struct DecodeDevice {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    cudaGraphExec_t graph; /* NULL: none was captured */
    void *blocks[MOST_BLOCKS];
    int count;
};

static bool open_device(DecodeDevice *d, int rank) {
    int count = 0;
    if (!cuda_ok(cudaGetDeviceCount(&count), "cudaGetDeviceCount")) return false;
    if (count == 0) return bench_fail("--backend cuda: expected a GPU, got none");
    return cuda_ok(cudaSetDevice(rank % count), "cudaSetDevice") &&
           cuda_ok(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking),
                   "cudaStreamCreateWithFlags") &&
           cuda_ok(cudaEventCreate(&d->begin), "cudaEventCreate") &&
           cuda_ok(cudaEventCreate(&d->end), "cudaEventCreate");
}

DecodeDevice *decode_device_open(int rank) {
    DecodeDevice *d = bench_alloc(1, sizeof(*d), "device");
    if (!d || open_device(d, rank)) return d;
    decode_device_close(d);
    return NULL;
}

void decode_device_close(DecodeDevice *d) {
    if (!d) return;
    if (d->graph) cudaGraphExecDestroy(d->graph);
    for (int i = 0; i < d->count; i++)
        cudaFree(d->blocks[i]);
    if (d->begin) cudaEventDestroy(d->begin);
    if (d->end) cudaEventDestroy(d->end);
    if (d->stream) cudaStreamDestroy(d->stream);
    free(d);
}

EpStream decode_device_stream(const DecodeDevice *d) {
    return d ? d->stream : NULL;
}

void *decode_device_alloc(DecodeDevice *d, size_t bytes) {
    void *memory = NULL;
    if (d->count < MOST_BLOCKS && cuda_ok(cudaMalloc(&memory, bytes), "cudaMalloc"))
        d->blocks[d->count++] = memory;
    return memory;
}

static bool finish(const DecodeDevice *d) {
    return cuda_ok(cudaStreamSynchronize(d->stream), "cudaStreamSynchronize");
}

bool decode_device_copy(DecodeDevice *d, void *to, const void *from, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, d->stream),
                   "cudaMemcpyAsync") &&
           finish(d);
}

bool decode_device_capture(DecodeDevice *d, bool (*issue)(void *context), void *context) {
    cudaGraph_t graph = NULL;
    if (!cuda_ok(cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture"))
        return false;
    bool ok = issue(context);
    cudaError_t ended = cudaStreamEndCapture(d->stream, &graph);
    ok = ok && cuda_ok(ended, "cudaStreamEndCapture") &&
         cuda_ok(cudaGraphInstantiate(&d->graph, graph, 0), "cudaGraphInstantiate");
    if (graph) cudaGraphDestroy(graph);
    return ok;
}

bool decode_device_run(DecodeDevice *d, bool (*issue)(void *context), void *context, double *us) {
    float ms = 0;
    bool ok = cuda_ok(cudaEventRecord(d->begin, d->stream), "cudaEventRecord") &&
              (d->graph ? cuda_ok(cudaGraphLaunch(d->graph, d->stream), "cudaGraphLaunch")
                        : issue(context)) &&
              cuda_ok(cudaEventRecord(d->end, d->stream), "cudaEventRecord") && finish(d) &&
              cuda_ok(cudaEventElapsedTime(&ms, d->begin, d->end), "cudaEventElapsedTime");
    *us = 1e3 * (double)ms;
    return ok;
}

#else

DecodeDevice *decode_device_open(int rank) {
    (void)rank;
    gpu_missing(NULL);
    return NULL;
}

void decode_device_close(DecodeDevice *d) {
    (void)d;
}

EpStream decode_device_stream(const DecodeDevice *d) {
    (void)d;
    return NULL;
}

void *decode_device_alloc(DecodeDevice *d, size_t bytes) {
    (void)d, (void)bytes;
    return NULL;
}

bool decode_device_copy(DecodeDevice *d, void *to, const void *from, size_t bytes) {
    return gpu_missing(d, to, from, bytes);
}

bool decode_device_capture(DecodeDevice *d, bool (*issue)(void *context), void *context) {
    return gpu_missing(d, issue, context);
}

bool decode_device_run(DecodeDevice *d, bool (*issue)(void *context), void *context, double *us) {
    return gpu_missing(d, issue, context, us);
}

#endif
