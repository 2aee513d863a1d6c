/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/bootstrap.h"

EpStatus ep_bootstrap_check(const EpCall *call, const EpBootstrap *b) {
    EP_TRY(ep_check_struct(call, "bootstrap", b, sizeof(*b)));
    if (b->size < 1 || b->size > EP_MAX_RANKS)
        return ep_refuse(call, EP_ERR_RANGE, "bootstrap.size", "expected 1 .. %d, got %d",
                         EP_MAX_RANKS, b->size);
    if (b->rank < 0 || b->rank >= b->size)
        return ep_refuse(call, EP_ERR_RANGE, "bootstrap.rank", "expected 0 .. %d, got %d",
                         b->size - 1, b->rank);
    if (!b->allgather || !b->barrier)
        return ep_refuse(call, EP_ERR_NULL,
                         b->allgather ? "bootstrap.barrier" : "bootstrap.allgather",
                         "expected a function, got NULL");
    if (!b->share != !b->share_free)
        return ep_refuse(call, EP_ERR_NULL, "bootstrap.share",
                         "expected share and share_free, or neither, got one of them");
    int messages = !!b->isend + !!b->irecv + !!b->test + !!b->cancel;
    if (messages != 0 && messages != 4)
        return ep_refuse(call, EP_ERR_NULL, "bootstrap.isend",
                         "expected isend, irecv, test and cancel, or none, got %d of them",
                         messages);
    return EP_OK;
}

void ep_bootstrap_destroy(EpBootstrap *bootstrap) {
    if (!bootstrap || bootstrap->struct_size != sizeof(*bootstrap)) return;
    if (bootstrap->destroy) bootstrap->destroy(bootstrap->context);
    *bootstrap = (EpBootstrap)EP_BOOTSTRAP_INIT;
}

#if !EP_WITH_CUDA
/* The declaration of ep_nccl.h, whose nccl.h a build without CUDA may not have. */
struct ncclComm;
EpStatus ep_bootstrap_nccl(struct ncclComm *comm, EpBootstrap *out);

EpStatus ep_bootstrap_nccl(struct ncclComm *comm, EpBootstrap *out) {
    EpCall call = {"ep_bootstrap_nccl", -1};
    (void)comm, (void)out;
    return ep_refuse(&call, EP_ERR_UNSUPPORTED, "comm",
                     "expected a build of libep with CUDA, got one without");
}
#endif
