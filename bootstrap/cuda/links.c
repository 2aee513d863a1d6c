/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out whether NVLink connects the ranks' GPUs, and says what connects the ranks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/nvml.h"
#include "bootstrap/cuda/setup.h"

/* Returns 1 if NVLink connects two devices of this process. Only GPUs that NVLink connects have
 * atomics on each other's memory. */
static int are_linked(int device, int other) {
    int linked = 0;
    if (cudaDeviceGetP2PAttribute(&linked, cudaDevP2PAttrNativeAtomicSupported, device, other) ==
        cudaSuccess)
        return linked;
    (void)cudaGetLastError();
    return 0;
}

/* Number of a GPU's active links, and of those that lead to a switch. */
typedef struct Links {
    int active, switched;
} Links;

static Links links_of(const char *bus) {
    EpNvml nvml;
    Links links = {0, 0};
    if (!ep_nvml_open(bus, &nvml)) return links;
    for (unsigned link = 0; link < EP_NVML_LINKS; link++) {
        int active = 0, end = -1;
        if (nvml.link_state(nvml.device, link, &active) || !active) continue;
        links.active++;
        if (nvml.link_end && !nvml.link_end(nvml.device, link, &end))
            links.switched += end == EP_NVML_SWITCH;
    }
    ep_nvml_close(&nvml);
    return links;
}

/* Returns 1 if NVLink connects this rank's GPU with the one at `bus`. If this process does not see
 * that GPU, a link from this rank's GPU to a switch counts. So it does if the GPU seems to be this
 * rank's own: ranks that share one are not asked here, so it is at the same place of another
 * machine, which NVLink joins with this one. */
static int is_linked_to(const EpGroup *group, const char *bus) {
    int other;
    if (cudaDeviceGetByPCIBusId(&other, bus) == cudaSuccess && other != group->choice.device)
        return are_linked(group->choice.device, other);
    (void)cudaGetLastError();
    return links_of(group->choice.bus).switched > 0;
}

/* Returns 1 if this rank's GPU has any NVLink: the criterion for a group of one rank. */
static int has_links(const EpGroup *group) {
    int count = 0, linked = 0;
    (void)cudaGetDeviceCount(&count);
    for (int other = 0; other < count && !linked; other++)
        linked = other != group->choice.device && are_linked(group->choice.device, other);
    return linked || links_of(group->choice.bus).active > 0;
}

/* What a rank contributes: its GPU's bus id. */
typedef struct Bus {
    char id[sizeof(((EpGroup *)NULL)->choice.bus)];
} Bus;

static EpStatus check_buses(const EpGroup *group, const Bus *all) {
    EpCall call = {group->call, group->rank};
    for (int32_t r = 0; r < group->size; r++)
        if (!memchr(all[r].id, 0, sizeof(all[r].id)))
            return ep_refuse(&call, EP_ERR_BOOTSTRAP, "bootstrap.allgather",
                             "expected the bus id of rank %d's GPU, got %d bytes without an end", r,
                             (int)sizeof(all[r].id));
    return EP_OK;
}

/* Ranks that share a GPU have no link. Where others may join, this rank may be alone so far. */
static int is_linked_to_all(const EpGroup *group, const Bus *all) {
    const EpNodes *n = &group->nodes;
    int has_others = n->sizes.ranks > 1 && !ep_config_joins(&group->config);
    int linked = !group->choice.shared && (has_others || has_links(group));
    for (int32_t i = 0; i < n->sizes.ranks && linked; i++) {
        int32_t r = ep_nodes_member(n, n->node, i);
        if (r != group->rank && ep_mask_has(&group->members, r))
            linked = is_linked_to(group, all[r].id);
    }
    return linked;
}

/* Collective: set cuda->linked, 1 if NVLink connects this rank's GPU with every other one of its
 * node. */
static EpStatus check_links(EpGroup *group) {
    EpCall call = {group->call, group->rank};
    Bus mine, *all = calloc((size_t)group->size, sizeof(*all));
    EpStatus status = all ? EP_OK : ep_refuse(&call, EP_ERR_NO_MEMORY, "group", "out of memory");
    status = ep_group_agree(group, &call, status);
    memcpy(mine.id, group->choice.bus, sizeof(mine.id));
    if (status == EP_OK) status = ep_group_gather(group, &mine, all, sizeof(mine));
    if (status == EP_OK) status = check_buses(group, all);
    if (status == EP_OK) ep_cuda(group)->linked = is_linked_to_all(group, all);
    free(all);
    return status;
}

/* Returns whether this rank wants whole lines. */
static int32_t wants_lines(const EpGroup *group) {
    EpLines wish = group->settings.lines;
    return wish == EP_LINES_AUTO ? ep_cuda(group)->linked : wish == EP_LINES_WHOLE;
}

/* Only latency mode has lines, which several nodes, with any number of ranks, have not. */
EpStatus ep_cuda_choose_lines(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    int32_t all[EP_CUDA_MAX_RANKS];
    EP_TRY(check_links(group));
    if (group->nodes.sizes.nodes > 1) return EP_OK;
    int32_t mine = wants_lines(group);
    EpStatus status = ep_group_gather(group, &mine, all, sizeof(mine));
    cuda->whole_lines = status == EP_OK;
    for (int32_t r = 0; r < group->size; r++)
        cuda->whole_lines = cuda->whole_lines && all[r];
    EP_DEBUG("lines of latency mode: %s", cuda->whole_lines ? "whole" : "fenced");
    return status;
}

void ep_cuda_find_links(EpGroup *group) {
    ep_cuda(group)->linked = has_links(group);
}

/** What a rank says when ranks join. */
typedef struct Lines {
    int32_t wants, has; /* whole lines */
} Lines;

/* Those that have whole lines keep them, since captured graphs have: newcomers must want them. */
static EpStatus choose_among(const EpGroup *group, const EpCall *call, const EpMask *alive,
                             const Lines *all, int *whole) {
    int32_t first = ep_mask_lowest(alive), differs = -1;
    int is_new = ep_mask_has(&group->newcomers, first);
    for (int32_t r = 0; r < group->size; r++)
        if (ep_mask_has(&group->members, r) && !all[r].wants) differs = r;
    *whole = is_new ? differs < 0 : all[first].has;
    if (is_new || !*whole || differs < 0) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "group",
                     "expected NVLink between every two GPUs, as the group has it so far (or "
                     "LIBEP_LINES=fenced on all ranks from its beginning), got rank %d without",
                     differs);
}

EpStatus ep_cuda_admit_lines(EpGroup *group, const EpCall *call, const EpMask *alive, int *whole) {
    EpCuda *cuda = ep_cuda(group);
    Lines all[EP_CUDA_MAX_RANKS];
    int linked = cuda->linked;
    EpStatus status = check_links(group);
    Lines mine = {wants_lines(group), cuda->whole_lines};
    if (status == EP_OK) status = ep_group_gather(group, &mine, all, sizeof(mine));
    if (status == EP_OK) status = choose_among(group, call, alive, all, whole);
    if (status != EP_OK) cuda->linked = linked;
    return status;
}

void ep_cuda_describe(const EpGroup *group, EpGroupInfo *out) {
    const EpCuda *cuda = ep_cuda(group);
    int alone = group->nodes.sizes.ranks == 1;
    snprintf(out->within, sizeof(out->within), "%s",
             alone                                                     ? "one GPU"
             : ep_config_joins(&group->config) && group->choice.shared ? "shared GPUs"
             : group->choice.shared                                    ? "CUDA IPC, shared GPUs"
             : cuda->linked                                            ? "NVLink"
                                                                       : "peer access, no NVLink");
    snprintf(out->tuning, sizeof(out->tuning), "%s", cuda->tuned.source);
    if (group->nodes.sizes.nodes == 1) return;
    int version = cuda->nccl->version;
    snprintf(out->between, sizeof(out->between), "NCCL %d.%d.%d", version / 10000,
             version / 100 % 100, version % 100);
}
