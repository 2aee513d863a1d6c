/* SPDX-License-Identifier: Apache-2.0 */
/* Exchanges by NCCL: one group of calls each. */
#include "bootstrap/network/cuda/exchange.h"

void ep_exchange_begin_first(EpExchange *x, EpGroup *group, cudaStream_t wire) {
    const EpCuda *cuda = ep_cuda(group);
    *x = (EpExchange){group, cuda->nccl, cuda->network, wire};
    (void)x->nccl->ncclGroupStart();
}

ncclResult_t ep_exchange_end_first(const EpExchange *x) {
    return x->nccl->ncclGroupEnd();
}

EpStatus ep_exchange_begin(EpExchange *x, EpGroup *group, const EpCudaStream *stream,
                           cudaStream_t wire) {
    EP_TRY(ep_cuda_network_enter(group, stream));
    ep_exchange_begin_first(x, group, wire);
    return EP_OK;
}

EpStatus ep_exchange_end(const EpExchange *x) {
    return ep_cuda_network_settle(x->group, "ncclGroupEnd", ep_exchange_end_first(x));
}

void ep_exchange_send(const EpExchange *x, int32_t peer, const void *message, size_t bytes) {
    (void)x->nccl->ncclSend(message, bytes, ncclUint8, peer, x->comm, x->wire);
}

void ep_exchange_receive(const EpExchange *x, int32_t peer, void *message, size_t bytes) {
    (void)x->nccl->ncclRecv(message, bytes, ncclUint8, peer, x->comm, x->wire);
}

void ep_exchange_gather(const EpExchange *x, const void *own, void *all, size_t bytes) {
    (void)x->nccl->ncclAllGather(own, all, bytes, ncclUint8, x->comm, x->wire);
}
