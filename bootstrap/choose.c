/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses a group's backend: the one that the configuration asks for, if all ranks can use it. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/gpus.h"

static int spans_nodes(const int32_t *nodes, int32_t size) {
    int32_t r = 1;
    while (r < size && nodes[r] == nodes[0])
        r++;
    return r < size;
}

static void describe_device(const EpGpuReport *report, int32_t device, EpChoice *out) {
    const EpGpu *gpu = &report->gpu[device];
    out->device = device;
    out->code = gpu->code, out->shared_bytes = gpu->shared_bytes;
    out->sm = gpu->capability;
    snprintf(out->bus, sizeof(out->bus), "%s", gpu->bus);
    snprintf(out->gpu, sizeof(out->gpu), "%s, %s", gpu->name, gpu->bus);
}

EpStatus ep_backend_choose(const EpCall *call, EpGroupConfig *config, const EpSettings *settings,
                           int32_t place, EpChoice *out) {
    EpGpuReport mine;
    char why_not[224];
    *out = (EpChoice){.backend = ep_backend_wish(config, settings), .device = -1};
    if (out->backend == EP_BACKEND_HOST) return EP_OK;
    ep_gpus_find(config, settings, 1, &mine);
    int32_t device = ep_gpus_choose(
        &mine, place, ep_cuda_least_shared(config, config->max_ranks, 0), why_not, sizeof(why_not));
    if (device < 0)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.backend",
                         "expected one that can serve this rank: %s", why_not);
    describe_device(&mine, device, out);
    out->assigned = config->device == EP_DEFAULT && mine.current != device;
    config->device = device;
    return EP_OK;
}

/* Assign devices and check whether the CUDA backend can serve all ranks with them. Returns 0, with
 * the reason in `why_not`, if it cannot. */
static int agree_on_gpus(const EpBootstrap *b, const EpGroupConfig *config,
                         const EpSettings *settings, EpPurpose purpose, int32_t *nodes,
                         const EpGpuReport *all, EpChoice *out, char *why_not, size_t bytes) {
    int32_t devices[EP_MAX_RANKS];
    int machines = spans_nodes(nodes, b->size);
    ep_gpus_assign(all, b->size, devices);
    int64_t shared_bytes =
        ep_cuda_least_shared(config, ep_config_places(config, b->size), purpose == EP_FOR_WEIGHTS);
    ep_gpus_domains(all, b->size, devices, settings->topology.text[0] != 0, nodes);
    if (!ep_gpus_agree(all, b->size, nodes, devices, shared_bytes, why_not, bytes)) return 0;
    if (config->masks && spans_nodes(nodes, b->size)) {
        snprintf(why_not, bytes,
                 "a group with masks (config.masks) needs one node, that is one NVLink domain, and "
                 "its GPUs are on several");
        return 0;
    }
    if (ep_config_joins(config) && machines) {
        snprintf(
            why_not, bytes,
            "a group that processes may join (config.max_ranks) needs one machine, whose ranks "
            "give each other file descriptors of their memory, and its ranks are on several");
        return 0;
    }
    describe_device(&all[b->rank], devices[b->rank], out);
    out->assigned = all[b->rank].wanted == EP_DEFAULT && all[b->rank].current != out->device;
    out->shared = ep_gpus_shared(all, b->size, devices);
    out->nccl = ep_gpus_nccl(all, b->size, devices);
    out->alone = ep_gpus_alone(all, b->size, b->rank);
    for (int32_t r = 0; r < b->size; r++)
        out->threads |= !ep_gpus_alone(all, b->size, r);
    return 1;
}

/* Gather the ranks' reports. Their strings are terminated, their counts are checked. */
static EpStatus gather_reports(const EpCall *call, const EpBootstrap *b, const EpGpuReport *mine,
                               EpGpuReport *all, double timeout) {
    EP_TRY(ep_bootstrap_gather(b, mine, all, sizeof(*mine), timeout));
    for (int32_t r = 0; r < b->size; r++) {
        if (all[r].count < 0 || all[r].count > EP_GPUS_LISTED)
            return ep_refuse(call, EP_ERR_BOOTSTRAP, "bootstrap.allgather",
                             "expected 0 .. %d GPUs of rank %d, got %d", EP_GPUS_LISTED, r,
                             all[r].count);
        all[r].reason[sizeof(all[r].reason) - 1] = 0;
        all[r].nccl_host[sizeof(all[r].nccl_host) - 1] = 0;
        for (int32_t d = 0; d < all[r].count; d++) {
            EpGpu *gpu = &all[r].gpu[d];
            gpu->bus[sizeof(gpu->bus) - 1] = 0, gpu->name[sizeof(gpu->name) - 1] = 0;
        }
    }
    return EP_OK;
}

/* A program that runs on CPUs beside a GPU is slow, and nothing else says so. Each process warns
 * once: its groups lack the same. */
static void warn_of_idle_gpus(const EpBootstrap *b, const EpGpuReport *reports, const char *why) {
    static int warned; /* relaxed: orders nothing */
    int present = 0;
    for (int32_t r = 0; r < b->size; r++)
        present |= reports[r].present;
    if (present && b->rank == 0 && !__atomic_exchange_n(&warned, 1, __ATOMIC_RELAXED))
        EP_WARN("AUTO takes the host backend although a GPU is present: %s", why);
}

/* NCCL reads this variable likewise. */
static int nccl_is_apart(void) {
    const char *text = getenv("NCCL_P2P_DISABLE");
    return text && atoi(text) != 0;
}

EpStatus ep_backend_agree(const EpCall *call, const EpBootstrap *bootstrap,
                          const EpGroupConfig *config, const EpSettings *settings,
                          EpPurpose purpose, int32_t *nodes, EpGpuReport *reports, EpChoice *out) {
    EpBackend wish = ep_backend_wish(config, settings);
    EpChoice none = {.device = -1}, choice = none;
    char why_not[224] = "";
    int usable = 0;
    int32_t domains[EP_MAX_RANKS];
    if (wish != EP_BACKEND_HOST) {
        EpGpuReport mine;
        ep_gpus_find(config, settings, bootstrap->size, &mine);
        mine.apart = settings->peers == EP_PEERS_NONE || nccl_is_apart();
        EP_TRY(
            gather_reports(call, bootstrap, &mine, reports, ep_config_timeout(config, settings)));
        memcpy(domains, nodes, (size_t)bootstrap->size * sizeof(*nodes));
        usable = agree_on_gpus(bootstrap, config, settings, purpose, domains, reports, &choice,
                               why_not, sizeof(why_not));
    }
    EpBackend backend =
        ep_backend_decide(wish, usable, why_not, choice.reason, sizeof(choice.reason));
    if (backend == EP_BACKEND_AUTO)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.backend",
                         "expected one that can serve all ranks: %s", choice.reason);
    if (wish == EP_BACKEND_AUTO && backend == EP_BACKEND_HOST)
        warn_of_idle_gpus(bootstrap, reports, why_not);
    *out = backend == EP_BACKEND_CUDA ? choice : none;
    if (backend == EP_BACKEND_CUDA)
        memcpy(nodes, domains, (size_t)bootstrap->size * sizeof(*nodes));
    snprintf(out->reason, sizeof(out->reason), "%s", choice.reason);
    if (out->shared)
        strncat(out->reason, "; ranks share GPUs, so times say nothing",
                sizeof(out->reason) - strlen(out->reason) - 1);
    out->backend = backend;
    return EP_OK;
}
