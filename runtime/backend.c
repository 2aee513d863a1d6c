/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/backend.h"

#include <stdio.h>

#if !EP_WITH_CUDA
int ep_cuda_usable(const EpGroupConfig *config, int32_t num_ranks, char *reason,
                   size_t reason_bytes) {
    (void)config, (void)num_ranks;
    snprintf(reason, reason_bytes, "this build has no cuda backend");
    return 0;
}
#endif

EpBackend ep_backend_wish(const EpGroupConfig *config, const EpSettings *settings) {
    if (config->nccl_comm && config->backend == EP_BACKEND_AUTO) return EP_BACKEND_CUDA;
    return config->backend == EP_BACKEND_AUTO ? settings->backend : config->backend;
}

static const EpBackendOps *cuda_ops(void) {
#if EP_WITH_CUDA
    return &ep_backend_cuda;
#else
    return NULL;
#endif
}

/* AUTO is to mean cuda where every rank can have it, once that backend is released. */
const EpBackendOps *ep_backend_choose(const EpGroupConfig *config, int32_t num_ranks,
                                      const EpSettings *settings, char *reason,
                                      size_t reason_bytes) {
    EpBackend wish = ep_backend_wish(config, settings);
    char why_not[192] = "";
    int usable = ep_cuda_usable(config, num_ranks, why_not, sizeof(why_not));
    if (wish == EP_BACKEND_HOST && config->nccl_comm) {
        snprintf(reason, reason_bytes, "the host backend has no use for an NCCL communicator");
        return NULL;
    }
    if (wish == EP_BACKEND_CUDA) {
        snprintf(reason, reason_bytes, "the cuda backend is asked for%s%s", usable ? "" : ", but ",
                 usable ? "" : why_not);
        return usable ? cuda_ops() : NULL;
    }
    if (wish == EP_BACKEND_HOST)
        snprintf(reason, reason_bytes, "the host backend is asked for");
    else
        snprintf(reason, reason_bytes, "host: %s",
                 usable ? "the cuda backend is not released yet: ask for it by name" : why_not);
    return &ep_backend_host;
}
