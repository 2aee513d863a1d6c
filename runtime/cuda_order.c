/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda_order.h"

#include "runtime/cuda_host.h"

static EpStatus open_trail(const EpGroup *group, EpCudaTrail *trail) {
    return ep_cuda_check(group, "cudaEventCreate",
                         cudaEventCreateWithFlags(&trail->last, cudaEventDisableTiming));
}

EpStatus ep_cuda_order_open(const EpGroup *group, EpCudaOrder *order) {
    EP_TRY(open_trail(group, &order->plain));
    return open_trail(group, &order->captured);
}

void ep_cuda_order_close(EpCudaOrder *order) {
    if (order->plain.last) (void)cudaEventDestroy(order->plain.last);
    if (order->captured.last) (void)cudaEventDestroy(order->captured.last);
    *order = (EpCudaOrder){.now = NULL};
}

/* Ids are never used again, and those of a thread's own default stream are that thread's. 0: not
 * known. */
static unsigned long long id_of(cudaStream_t stream) {
    unsigned long long id = 0;
#if CUDART_VERSION >= 12000
    if (cudaStreamGetId(stream, &id) == cudaSuccess) return id;
    (void)cudaGetLastError();
#else
    (void)stream;
#endif
    return 0;
}

static int is_same(const EpCudaOrder *order, cudaStream_t stream) {
    const EpCudaTrail *trail = order->now;
    if (trail == &order->captured) return trail->stream == stream && stream != cudaStreamPerThread;
    return order->now_id && trail->id == order->now_id;
}

EpStatus ep_cuda_order_enter(const EpGroup *group, EpCudaOrder *order, EpStream stream) {
    enum cudaStreamCaptureStatus capturing;
    unsigned long long capture = 0;
    EP_TRY(ep_cuda_check(group, "cudaStreamGetCaptureInfo",
                         ep_cuda_capture_info((cudaStream_t)stream, &capturing, &capture)));
    int captures = capturing == cudaStreamCaptureStatusActive;
    order->now = captures ? &order->captured : &order->plain;
    order->now_id = captures ? capture : id_of((cudaStream_t)stream);
    const EpCudaTrail *trail = order->now;
    int follows = trail->set && (!captures || trail->id == capture);
    if (!follows || is_same(order, (cudaStream_t)stream)) return EP_OK;
    return ep_cuda_check(group, "cudaStreamWaitEvent",
                         cudaStreamWaitEvent((cudaStream_t)stream, trail->last, 0));
}

EpStatus ep_cuda_order_leave(const EpGroup *group, EpCudaOrder *order, EpStream stream,
                             int launched) {
    EpCudaTrail *trail = order->now;
    EP_TRY(ep_cuda_check(group, "kernel launch", launched));
    trail->stream = (cudaStream_t)stream, trail->id = order->now_id, trail->set = 1;
    return ep_cuda_check(group, "cudaEventRecord",
                         cudaEventRecord(trail->last, (cudaStream_t)stream));
}
