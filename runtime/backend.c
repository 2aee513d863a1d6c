/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/backend.h"

#include <stdio.h>

#include "runtime/config.h"

#define TEXT(number) #number
#define TEXT_OF(number) TEXT(number)

EpBackend ep_backend_wish(const EpGroupConfig *config, const EpSettings *settings) {
    if (config->nccl_comm && config->backend == EP_BACKEND_AUTO) return EP_BACKEND_CUDA;
    EpBackend wish = config->backend == EP_BACKEND_AUTO ? settings->backend : config->backend;
    return wish == EP_BACKEND_AUTO && ep_config_joins(config) ? EP_BACKEND_HOST : wish;
}

const char *ep_backend_contradiction(const EpGroupConfig *config, EpBackend wish) {
    if (wish == EP_BACKEND_HOST && config->nccl_comm)
        return "the host backend has no use for an NCCL communicator";
    if (wish != EP_BACKEND_CUDA || !ep_config_joins(config)) return NULL;
    if (config->nccl_comm)
        return "a group that processes may join (config.max_ranks) maps memory without NCCL, whose "
               "communicators end with a rank (config.nccl_comm)";
    if (config->max_ranks > EP_CUDA_MAX_RANKS)
        return "a group of the cuda backend that processes may join is on one node, which has at "
               "most " TEXT_OF(EP_CUDA_MAX_RANKS) " ranks (config.max_ranks)";
    return NULL;
}

EpBackend ep_backend_decide(EpBackend wish, int cuda_usable, const char *why_not, char *reason,
                            size_t reason_bytes) {
    if (wish == EP_BACKEND_HOST) {
        snprintf(reason, reason_bytes, "the host backend is asked for");
        return EP_BACKEND_HOST;
    }
    if (wish == EP_BACKEND_CUDA) {
        snprintf(reason, reason_bytes, "the cuda backend is asked for%s%s",
                 cuda_usable ? "" : ", but ", cuda_usable ? "" : why_not);
        return cuda_usable ? EP_BACKEND_CUDA : EP_BACKEND_AUTO;
    }
    snprintf(reason, reason_bytes, "%s%s", cuda_usable ? "cuda: " : "host: ",
             cuda_usable ? "every rank has a usable GPU" : why_not);
    return cuda_usable ? EP_BACKEND_CUDA : EP_BACKEND_HOST;
}

const EpBackendOps *ep_backend_ops(EpBackend backend) {
#if EP_WITH_CUDA
    if (backend == EP_BACKEND_CUDA) return &ep_backend_cuda;
#endif
    return backend == EP_BACKEND_HOST ? &ep_backend_host : NULL;
}

unsigned ep_backend_offers(const EpBackendOps *backend, const EpNodeSizes *nodes) {
    unsigned offers = backend->offers;
    int is_auto = nodes->nodes == 1 || (nodes->latency && ep_nodes_are_equal(nodes));
    if (!(offers & EP_OFFERS_LATENCY)) return offers;
    if (is_auto) return offers | EP_OFFERS_AUTO_LATENCY;
    if (backend->id != EP_BACKEND_CUDA) return offers;
    int fits = ep_nodes_are_equal(nodes);
    return fits ? offers | EP_OFFERS_BY_NAME : offers & ~EP_OFFERS_LATENCY;
}
