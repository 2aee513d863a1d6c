/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/gpus.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void ep_gpus_find(const EpGroupConfig *config, const EpSettings *settings, int32_t num_ranks,
                  EpGpuReport *out) {
    const EpBackendOps *cuda = ep_backend_ops(EP_BACKEND_CUDA);
    *out = (EpGpuReport){.wanted = config->device};
    snprintf(out->reason, sizeof(out->reason), "this build has no cuda backend");
    if (cuda) cuda->find_gpus(config, num_ranks, out);
    out->may_share = settings->share_gpus == EP_SHARE_GPUS_YES;
    for (int32_t d = 0; d < out->count && settings->shared_bytes != EP_COUNT_AUTO; d++)
        out->gpu[d].shared_bytes =
            (int32_t)ep_min(out->gpu[d].shared_bytes, settings->shared_bytes);
}

/** Buffer for a sentence. */
typedef struct Reason {
    char *text;
    size_t bytes;
} Reason;

__attribute__((format(printf, 2, 3))) static int refuse(Reason reason, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(reason.text, reason.bytes, format, args);
    va_end(args);
    return 0;
}

static int is_same_gpu(const EpGpu *a, const EpGpu *b) {
    return memcmp(a->uuid, b->uuid, sizeof(a->uuid)) == 0;
}

/* ---- one rank ------------------------------------------------------------------------------ */

static int check_gpu(const EpGpuReport *report, int32_t device, int64_t shared_bytes,
                     Reason reason) {
    const EpGpu *gpu = &report->gpu[device];
    if (gpu->capability < EP_LEAST_CAPABILITY)
        return refuse(reason,
                      "expected a GPU of compute capability %d.%d or newer, got %d.%d (device %d, "
                      "%s, %s)",
                      EP_LEAST_CAPABILITY / 10, EP_LEAST_CAPABILITY % 10, gpu->capability / 10,
                      gpu->capability % 10, device, gpu->name, gpu->bus);
    if (!gpu->code)
        return refuse(
            reason,
            "expected a build with code for GPUs of compute capability %d.%d, as releases "
            "are, got one without (device %d, %s, %s)",
            gpu->capability / 10, gpu->capability % 10, device, gpu->name, gpu->bus);
    if (report->masks && !gpu->masked_code)
        return refuse(reason,
                      "expected a GPU for which this build has kernels for masks (config.masks), "
                      "as releases have for capability 9.x, got %d.%d (device %d, %s, %s)",
                      gpu->capability / 10, gpu->capability % 10, device, gpu->name, gpu->bus);
    if (gpu->shared_bytes < shared_bytes)
        return refuse(reason,
                      "expected a GPU whose blocks have %lld bytes of shared memory, which rows of "
                      "this size and so many experts need, got %d bytes (device %d, %s)",
                      (long long)shared_bytes, gpu->shared_bytes, device, gpu->name);
    return 1;
}

static int has_device(const EpGpuReport *report, int32_t device) {
    return device >= 0 && device < report->count;
}

static int check_rank(const EpGpuReport *report, int32_t device, int64_t shared_bytes,
                      Reason reason) {
    if (!report->count) return refuse(reason, "%s", report->reason);
    if (!has_device(report, device))
        return refuse(reason, "expected a device of 0 .. %d, got %d", report->count - 1, device);
    return check_gpu(report, device, shared_bytes, reason);
}

static int32_t chosen_device(const EpGpuReport *report) {
    return report->wanted == EP_DEFAULT ? report->current : report->wanted;
}

int ep_gpus_usable_here(const EpGroupConfig *config, const EpSettings *settings, int32_t num_ranks,
                        char *reason, size_t reason_bytes) {
    EpGpuReport report;
    ep_gpus_find(config, settings, num_ranks, &report);
    return check_rank(&report, chosen_device(&report), ep_cuda_least_shared(config, num_ranks, 0),
                      (Reason){reason, reason_bytes});
}

int32_t ep_gpus_choose(const EpGpuReport *mine, int32_t place, int64_t shared_bytes, char *reason,
                       size_t reason_bytes) {
    int is_free = mine->wanted == EP_DEFAULT && !mine->current && mine->count;
    int32_t device = is_free ? place % mine->count : chosen_device(mine);
    return check_rank(mine, device, shared_bytes, (Reason){reason, reason_bytes}) ? device : -1;
}

/* ---- assigning devices --------------------------------------------------------------------- */

static int has_same_first_gpu(const EpGpuReport *a, const EpGpuReport *b) {
    return a->count && b->count && is_same_gpu(&a->gpu[0], &b->gpu[0]);
}

/* Returns the device of rank `r`. Ranks that see the same GPUs get them in order of rank, also
 * where nodes of one machine are pretended; cyclically if they may share GPUs. If one of these
 * ranks has chosen a device, or if there are too few, rank `r` uses its own choice. */
static int32_t assign(const EpGpuReport *all, int32_t size, int32_t r) {
    int32_t index = 0;
    for (int32_t s = 0; s < size; s++) {
        if (!has_same_first_gpu(&all[s], &all[r])) continue;
        if (all[s].wanted != EP_DEFAULT || all[s].current != 0) return chosen_device(&all[r]);
        index += s < r;
    }
    if (all[r].may_share && all[r].count) return index % all[r].count;
    return index < all[r].count ? index : chosen_device(&all[r]);
}

void ep_gpus_assign(const EpGpuReport *all, int32_t size, int32_t *devices) {
    for (int32_t r = 0; r < size; r++)
        devices[r] = assign(all, size, r);
}

/* Processes of different machines may have the same number, but see different GPUs. */
int ep_gpus_alone(const EpGpuReport *all, int32_t size, int32_t rank) {
    for (int32_t r = 0; r < size; r++)
        if (r != rank && all[r].process == all[rank].process &&
            has_same_first_gpu(&all[r], &all[rank]))
            return 0;
    return 1;
}

/* ---- domains ------------------------------------------------------------------------------- */

/* Returns the device number of a GPU in a report, or -1 if that process does not see it. */
static int32_t find_gpu(const EpGpuReport *report, const EpGpu *gpu) {
    for (int32_t d = 0; d < report->count; d++)
        if (is_same_gpu(&report->gpu[d], gpu)) return d;
    return -1;
}

/* Returns 1 if a rank's GPU reaches another's memory. A process that does not see the other GPU of
 * its machine cannot tell: then windows will show. */
static int reaches(const EpGpuReport *all, const int32_t *devices, int32_t r, int32_t s) {
    const EpGpu *a = &all[r].gpu[devices[r]], *b = &all[s].gpu[devices[s]];
    int32_t there = find_gpu(&all[r], b);
    return is_same_gpu(a, b) || there < 0 || (a->reaches >> there & 1);
}

static int share_fabric(const EpGpu *a, const EpGpu *b) {
    static const unsigned char none[sizeof(a->fabric)];
    return memcmp(a->fabric, none, sizeof(none)) != 0 && a->clique == b->clique &&
           memcmp(a->fabric, b->fabric, sizeof(none)) == 0;
}

/* A rank without a GPU is refused later. */
static int are_joined(const EpGpuReport *all, const int32_t *devices, const int32_t *machines,
                      int pretended, int32_t r, int32_t s) {
    int here = machines[r] == machines[s], apart = all[r].apart || all[s].apart;
    if (!has_device(&all[r], devices[r]) || !has_device(&all[s], devices[s])) return here;
    if (apart && !is_same_gpu(&all[r].gpu[devices[r]], &all[s].gpu[devices[s]])) return 0;
    if (here) return reaches(all, devices, r, s) && reaches(all, devices, s, r);
    return !pretended && share_fabric(&all[r].gpu[devices[r]], &all[s].gpu[devices[s]]);
}

void ep_gpus_domains(const EpGpuReport *all, int32_t size, const int32_t *devices, int pretended,
                     int32_t *nodes) {
    int32_t machines[EP_MAX_RANKS], count = 0;
    memcpy(machines, nodes, (size_t)size * sizeof(*nodes));
    for (int32_t r = 0; r < size; r++) {
        int fits = 0;
        for (int32_t domain = 0; domain < count && !fits; domain++) {
            fits = 1;
            for (int32_t s = 0; s < r && fits; s++)
                fits = nodes[s] != domain || are_joined(all, devices, machines, pretended, r, s);
            if (fits) nodes[r] = domain;
        }
        if (!fits) nodes[r] = count++;
    }
}

/* ---- all ranks ----------------------------------------------------------------------------- */

static int is_same_kind(const EpGpu *a, const EpGpu *b) {
    return strcmp(a->name, b->name) == 0 && a->num_sms == b->num_sms &&
           a->capability == b->capability && a->shared_bytes == b->shared_bytes;
}

static int check_kinds(const EpGpu *a, int32_t r, const EpGpu *b, int32_t s, Reason reason) {
    if (is_same_kind(a, b)) return 1;
    return refuse(
        reason,
        "expected GPUs of one kind, got %s (%d multiprocessors, capability %d.%d) on rank "
        "%d and %s (%d, %d.%d) on rank %d",
        a->name, a->num_sms, a->capability / 10, a->capability % 10, r, b->name, b->num_sms,
        b->capability / 10, b->capability % 10, s);
}

static int check_shared(const EpGpuReport *all, const EpGpu *gpu, int32_t r, int32_t s,
                        Reason reason) {
    if (all[r].may_share && all[s].may_share) return 1;
    return refuse(reason,
                  "expected a GPU for each rank, got one for ranks %d and %d: %s, %s (they see %d "
                  "and %d GPUs; to find mistakes, they may share with LIBEP_SHARE_GPUS=yes)",
                  r, s, gpu->name, gpu->bus, all[r].count, all[s].count);
}

/* Require a process for each rank. Kernels of different processes take turns on a shared GPU even
 * while they wait for each other; kernels of one process do not. */
static int check_processes(const EpGpuReport *all, int32_t size, Reason reason) {
    for (int32_t r = 0; r < size; r++)
        for (int32_t s = 0; s < r; s++)
            if (all[r].process == all[s].process)
                return refuse(
                    reason,
                    "expected a process for each rank where ranks share GPUs, got one for "
                    "ranks %d and %d",
                    s, r);
    return 1;
}

static int check_node_sizes(const int32_t *nodes, int32_t size, Reason reason) {
    int32_t ranks[EP_MAX_RANKS] = {0};
    for (int32_t r = 0; r < size; r++)
        if (++ranks[nodes[r]] > EP_CUDA_MAX_RANKS)
            return refuse(reason, "expected at most %d ranks on a node, got more",
                          EP_CUDA_MAX_RANKS);
    return 1;
}

/* NCCL_HOSTID of both ranks says that they are on different hosts. */
static int are_hosts(const EpGpuReport *a, const EpGpuReport *b) {
    return a->nccl_host[0] && b->nccl_host[0] && strcmp(a->nccl_host, b->nccl_host) != 0;
}

/* Check two ranks: either their GPUs differ, or both ranks may share one. On several nodes NCCL
 * connects all ranks. */
static int check_pair(const EpGpuReport *all, int several_nodes, const int32_t *devices, int32_t r,
                      int32_t s, Reason reason) {
    const EpGpu *a = &all[r].gpu[devices[r]], *b = &all[s].gpu[devices[s]];
    if (!is_same_gpu(a, b)) return check_kinds(a, r, b, s, reason);
    if (!check_shared(all, a, r, s, reason)) return 0;
    if (several_nodes && !are_hosts(&all[r], &all[s]))
        return refuse(reason,
                      "expected a GPU for each rank of a group on several nodes, got one for ranks "
                      "%d and %d: %s, %s (to find mistakes, they may share where NCCL_HOSTID of "
                      "every rank differs)",
                      r, s, a->name, a->bus);
    return 1;
}

static int share_gpu(const EpGpuReport *all, const int32_t *devices, int32_t r, int32_t s) {
    return is_same_gpu(&all[r].gpu[devices[r]], &all[s].gpu[devices[s]]);
}

int ep_gpus_shared(const EpGpuReport *all, int32_t size, const int32_t *devices) {
    for (int32_t r = 0; r < size; r++)
        for (int32_t s = 0; s < r; s++)
            if (share_gpu(all, devices, r, s)) return 1;
    return 0;
}

int ep_gpus_nccl(const EpGpuReport *all, int32_t size, const int32_t *devices) {
    for (int32_t r = 0; r < size; r++)
        for (int32_t s = 0; s < r; s++)
            if (share_gpu(all, devices, r, s) && !are_hosts(&all[r], &all[s])) return 0;
    return 1;
}

int ep_gpus_agree(const EpGpuReport *all, int32_t size, const int32_t *nodes,
                  const int32_t *devices, int64_t shared_bytes, char *reason, size_t reason_bytes) {
    char why[192];
    Reason out = {reason, reason_bytes};
    for (int32_t r = 0; r < size; r++)
        if (!check_rank(&all[r], devices[r], shared_bytes, (Reason){why, sizeof(why)}))
            return size > 1 ? refuse(out, "rank %d: %s", r, why) : refuse(out, "%s", why);
    if (!check_node_sizes(nodes, size, out)) return 0;
    int several_nodes = 0;
    for (int32_t r = 1; r < size; r++)
        several_nodes |= nodes[r] != nodes[0];
    for (int32_t r = 0; r < size; r++)
        for (int32_t s = 0; s < size; s++)
            if (r != s && !check_pair(all, several_nodes, devices, r, s, out)) return 0;
    return !ep_gpus_shared(all, size, devices) || check_processes(all, size, out);
}
