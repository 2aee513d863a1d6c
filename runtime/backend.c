/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/backend.h"

#include <stdio.h>

const EpBackendOps *ep_backend_choose(const EpGroupConfig *config, const EpSettings *settings,
                                      char *reason, size_t reason_bytes) {
    EpBackend wish = config->backend == EP_BACKEND_AUTO ? settings->backend : config->backend;
    if (wish == EP_BACKEND_CUDA || config->nccl_comm) {
        snprintf(reason, reason_bytes, "the cuda backend %s, but this build has none",
                 config->nccl_comm ? "is needed for a borrowed NCCL communicator" : "is asked for");
        return NULL;
    }
    if (wish == EP_BACKEND_HOST)
        snprintf(reason, reason_bytes, "the host backend is asked for");
    else
        snprintf(reason, reason_bytes, "host: this build has no cuda backend");
    return &ep_backend_host;
}
