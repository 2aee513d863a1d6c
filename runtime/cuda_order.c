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
    *order = (EpCudaOrder){.plain = {.last = NULL}};
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

EpStatus ep_cuda_place(const EpGroup *group, EpStream stream, EpCudaPlace *out) {
    enum cudaStreamCaptureStatus capturing;
    *out = (EpCudaPlace){.stream = (cudaStream_t)stream};
    EP_TRY(ep_cuda_check(group, "cudaStreamGetCaptureInfo",
                         ep_cuda_capture_info(out->stream, &capturing, &out->id)));
    out->captures = capturing == cudaStreamCaptureStatusActive;
    if (!out->captures) out->id = id_of(out->stream);
    return EP_OK;
}

static EpCudaTrail *trail_at(EpCudaOrder *order, const EpCudaPlace *place) {
    return place->captures ? &order->captured : &order->plain;
}

/* Whether what runs at `place` follows by itself what ran where the trail ends. */
static int is_same(const EpCudaTrail *trail, const EpCudaPlace *place) {
    if (!place->captures) return place->id && trail->place.id == place->id;
    return trail->place.stream == place->stream && place->stream != cudaStreamPerThread;
}

EpStatus ep_cuda_order_enter(const EpGroup *group, EpCudaOrder *order, const EpCudaPlace *place) {
    const EpCudaTrail *trail = trail_at(order, place);
    int follows = trail->set && (!place->captures || trail->place.id == place->id);
    if (!follows || is_same(trail, place)) return EP_OK;
    return ep_cuda_check(group, "cudaStreamWaitEvent",
                         cudaStreamWaitEvent(place->stream, trail->last, 0));
}

EpStatus ep_cuda_order_leave(const EpGroup *group, EpCudaOrder *order, const EpCudaPlace *place,
                             int launched) {
    EpCudaTrail *trail = trail_at(order, place);
    EP_TRY(ep_cuda_check(group, "kernel launch", launched));
    trail->place = *place, trail->set = 1;
    return ep_cuda_check(group, "cudaEventRecord", cudaEventRecord(trail->last, place->stream));
}

void ep_cuda_order_forget(EpCudaOrder *order, const EpCudaPlace *place) {
    trail_at(order, place)->set = 0;
}
