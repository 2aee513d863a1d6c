/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda/order.h"

#include "runtime/cuda/cuda.h"

EpStatus ep_cuda_order_open(const EpGroup *group, EpCudaOrder *order) {
    EP_TRY(ep_cuda_open_event(group, &order->plain.event));
    return ep_cuda_open_event(group, &order->captured.event);
}

void ep_cuda_order_close(EpCudaOrder *order) {
    if (order->plain.event) (void)cudaEventDestroy(order->plain.event);
    if (order->captured.event) (void)cudaEventDestroy(order->captured.event);
    *order = (EpCudaOrder){.plain = {.event = NULL}};
}

#define LEGACY_STREAM (~0ull) /* CUDA counts ids up */

/* Returns the id of a stream, 0 where it is not known. Ids are never reused, and a thread's own
 * default stream has an id of its own. A device's legacy stream is there as long as the device. */
static unsigned long long id_of(cudaStream_t stream) {
    unsigned long long id = 0;
    if (!stream) return LEGACY_STREAM;
#if CUDART_VERSION >= 12000
    if (cudaStreamGetId(stream, &id) == cudaSuccess) return id;
    (void)cudaGetLastError();
#else
    (void)stream;
#endif
    return 0;
}

EpStatus ep_cuda_stream(const EpGroup *group, EpStream stream, EpCudaStream *out) {
    enum cudaStreamCaptureStatus capturing;
    *out = (EpCudaStream){.stream = (cudaStream_t)stream};
    EP_TRY(ep_cuda_check(group, "cudaStreamGetCaptureInfo",
                         ep_cuda_capture_info(out->stream, &capturing, &out->id)));
    out->captures = capturing == cudaStreamCaptureStatusActive;
    if (!out->captures) out->id = id_of(out->stream);
    return EP_OK;
}

static EpCudaLast *last_of(EpCudaOrder *order, const EpCudaStream *stream) {
    return stream->captures ? &order->captured : &order->plain;
}

/* Returns whether a launch on `stream` follows the last one without an event. */
static int is_same(const EpCudaLast *last, const EpCudaStream *stream) {
    if (!stream->captures) return stream->id && last->at.id == stream->id;
    return last->at.stream == stream->stream && stream->stream != cudaStreamPerThread;
}

EpStatus ep_cuda_order_enter(const EpGroup *group, EpCudaOrder *order, const EpCudaStream *stream) {
    const EpCudaLast *last = last_of(order, stream);
    int follows = last->set && (!stream->captures || last->at.id == stream->id);
    if (!follows || is_same(last, stream)) return EP_OK;
    return ep_cuda_await(group, stream->stream, last->event);
}

EpStatus ep_cuda_order_leave(const EpGroup *group, EpCudaOrder *order, const EpCudaStream *stream,
                             int launched) {
    EpCudaLast *last = last_of(order, stream);
    EP_TRY(ep_cuda_check(group, "kernel launch", launched));
    last->at = *stream, last->set = 1;
    return ep_cuda_record(group, last->event, stream->stream);
}

void ep_cuda_order_forget(EpCudaOrder *order, const EpCudaStream *stream) {
    last_of(order, stream)->set = 0;
}
