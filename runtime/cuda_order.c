/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda_order.h"

#include "runtime/cuda_host.h"

EpStatus ep_cuda_order_open(const EpGroup *group, EpCudaOrder *order) {
    return ep_cuda_check(group, "cudaEventCreate",
                         cudaEventCreateWithFlags(&order->last, cudaEventDisableTiming));
}

void ep_cuda_order_close(EpCudaOrder *order) {
    if (order->last) (void)cudaEventDestroy(order->last);
    order->last = NULL;
}

EpStatus ep_cuda_order_enter(const EpGroup *group, EpCudaOrder *order, EpStream stream) {
    enum cudaStreamCaptureStatus capturing;
    unsigned long long capture = 0;
    EP_TRY(ep_cuda_check(group, "cudaStreamGetCaptureInfo",
                         ep_cuda_capture_info((cudaStream_t)stream, &capturing, &capture)));
    capture = capturing == cudaStreamCaptureStatusActive ? capture : 0;
    int follows = order->has_last && order->capture == capture;
    int same = order->stream == (cudaStream_t)stream;
    order->capture = capture;
    if (!follows || same) return EP_OK;
    return ep_cuda_check(group, "cudaStreamWaitEvent",
                         cudaStreamWaitEvent((cudaStream_t)stream, order->last, 0));
}

EpStatus ep_cuda_order_leave(const EpGroup *group, EpCudaOrder *order, EpStream stream,
                             int launched) {
    EP_TRY(ep_cuda_check(group, "kernel launch", launched));
    order->stream = (cudaStream_t)stream, order->has_last = 1;
    return ep_cuda_check(group, "cudaEventRecord",
                         cudaEventRecord(order->last, (cudaStream_t)stream));
}
