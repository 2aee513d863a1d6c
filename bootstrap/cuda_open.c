/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA backend sets up with the peers: a communicator of NCCL's, whose unique id travels
 * over the bootstrap, and from it one window that every rank can reach.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/meet.h"
#include "runtime/cuda_host.h"
#include "runtime/log.h"

#define LEAST_CAPABILITY 9 /* bulk copies between shared memory and peers */

#define PEERS_BYTES (sizeof(char *) * EP_MAX_WINDOWS * EP_CUDA_MAX_RANKS)

/* ---- sizes --------------------------------------------------------------------------------- */

#define RING_BYTES (48 << 20) /* of all rings together, where that makes them deep enough */
#define LEAST_DEPTH 4
#define MOST_DEPTH 16

static int64_t take(int64_t *at, int64_t bytes) {
    int64_t offset = *at;
    *at = ep_round_up(offset + bytes, 128);
    return offset;
}

EpWindowLayout ep_window_layout(const EpGroupConfig *config, int32_t num_ranks) {
    EpWindowLayout w = {0};
    int64_t lanes = (int64_t)num_ranks * EP_LANES, at = 0;
    w.record_bytes =
        ep_record(config->max_row_bytes, config->max_top_k, config->max_scale_bytes).bytes;
    w.lane_tokens = (config->max_tokens + EP_LANES - 1) / EP_LANES;
    int64_t depth = RING_BYTES / (lanes * w.record_bytes);
    w.depth = (int32_t)ep_max(LEAST_DEPTH, ep_min(MOST_DEPTH, depth));
    w.depth = (int32_t)ep_min(w.depth, ep_max(LEAST_DEPTH, w.lane_tokens));
    w.head = take(&at, lanes * 4);
    w.credit = take(&at, lanes * 4);
    w.count_flag = take(&at, (int64_t)num_ranks * 4);
    w.route_flag = take(&at, lanes * 4);
    w.counts = take(&at, 2LL * num_ranks * config->num_experts * 4);
    w.route_rows = take(&at, 2 * lanes * 4);
    w.routes = take(&at, 2 * lanes * w.lane_tokens * config->max_top_k * 4);
    w.ring = take(&at, lanes * w.depth * w.record_bytes);
    w.bytes = at;
    return w;
}

void ep_cuda_measure(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                     int64_t *shared_bytes, int64_t *private_bytes) {
    (void)settings;
    *shared_bytes = ep_window_layout(config, num_ranks).bytes;
    *private_bytes = (int64_t)(sizeof(EpCuda) + sizeof(EpCudaState) + sizeof(EpCudaNotes) +
                               sizeof(EpCudaFailure)) +
                     4LL * EP_LANES * config->num_experts + (int64_t)PEERS_BYTES;
}

/* ---- feasibility --------------------------------------------------------------------------- */

static int refuse(char *reason, size_t bytes, const char *text) {
    snprintf(reason, bytes, "%s", text);
    return 0;
}

int ep_cuda_usable(const EpGroupConfig *config, int32_t num_ranks, char *reason, size_t bytes) {
    int devices = 0, device = 0, capability = 0;
    (void)config;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        (void)cudaGetLastError();
        return refuse(reason, bytes, "no CUDA device is visible");
    }
    if (num_ranks > EP_CUDA_MAX_RANKS)
        return refuse(reason, bytes, "the cuda backend serves at most 72 ranks");
    if (num_ranks > 1 && !ep_nccl_load(reason, bytes)) return 0;
    (void)cudaGetDevice(&device);
    (void)cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
    if (capability < LEAST_CAPABILITY)
        return refuse(reason, bytes, "the GPU is older than compute capability 9.0");
    return 1;
}

/* ---- opening ------------------------------------------------------------------------------- */

EpStatus ep_cuda_check(const EpGroup *group, const char *what, int error) {
    if (error == cudaSuccess) return EP_OK;
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_ERR_NO_MEMORY : EP_ERR_SYSTEM,
                   "rank %d: %s: %s", group->rank, what, cudaGetErrorString((cudaError_t)error));
}

EpStatus ep_cuda_check_nccl(const EpGroup *group, const char *what, ncclResult_t result) {
    if (result == ncclSuccess) return EP_OK;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: %s", group->rank, what,
                   ep_cuda(group)->nccl->ncclGetErrorString(result));
}

static EpStatus open_communicator(EpGroup *group, EpCuda *cuda) {
    const EpBootstrap *b = &group->bootstrap;
    char reason[192];
    cuda->nccl = ep_nccl_load(reason, sizeof(reason));
    cuda->comm = group->config.nccl_comm;
    if (cuda->comm) return EP_OK;
    ncclUniqueId mine = {{0}}, *all = calloc((size_t)group->size, sizeof(*all));
    if (!all)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    EpStatus status = EP_OK;
    if (group->rank == 0)
        status = ep_cuda_check_nccl(group, "ncclGetUniqueId", cuda->nccl->ncclGetUniqueId(&mine));
    EpStatus gathered = b->allgather(b->context, &mine, all, sizeof(mine), group->timeout);
    if (status == EP_OK && gathered == EP_OK) {
        status = ep_cuda_check_nccl(
            group, "ncclCommInitRank",
            cuda->nccl->ncclCommInitRank(&cuda->comm, group->size, all[0], group->rank));
        cuda->owns_comm = status == EP_OK;
    }
    free(all);
    return gathered != EP_OK ? gathered : status;
}

static EpStatus open_memory(EpGroup *group, EpCuda *cuda) {
    EpCudaGroup *g = &cuda->device;
    size_t counts = 4 * (size_t)EP_LANES * (size_t)group->config.num_experts;
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->state, sizeof(*g->state))));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->lane_counts, counts)));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->peers, PEERS_BYTES)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&g->failure, sizeof(*g->failure), 0)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&cuda->notes, sizeof(*cuda->notes), 0)));
    memset(g->failure, 0, sizeof(*g->failure));
    memset(cuda->notes, 0, sizeof(*cuda->notes));
    cuda->notes->bad_entry = ~0ull;
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(g->state, 0, sizeof(*g->state))));
    return ep_cuda_check(group, "cudaEventCreate",
                         cudaEventCreateWithFlags(&cuda->last, cudaEventDisableTiming));
}

static EpStatus read_device(EpGroup *group, EpCuda *cuda) {
    int sms = 0;
    EP_TRY(ep_cuda_check(group, "cudaGetDevice", cudaGetDevice(&cuda->ordinal)));
    EP_TRY(
        ep_cuda_check(group, "cudaDeviceGetAttribute",
                      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, cuda->ordinal)));
    EP_TRY(ep_cuda_check(group, "cudaDeviceGetAttribute",
                         cudaDeviceGetAttribute(&cuda->shared_bytes,
                                                cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                                cuda->ordinal)));
    int64_t wanted = group->settings.num_sms;
    cuda->num_sms = wanted > 1 && wanted < sms ? (int)wanted : sms;
    return EP_OK;
}

static EpStatus open_device(EpGroup *group) {
    EpCuda *cuda = calloc(1, sizeof(*cuda));
    if (!cuda)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    group->backend_state = cuda;
    EpCudaGroup *g = &cuda->device;
    g->rank = group->rank, g->size = group->size;
    g->num_experts = group->config.num_experts;
    g->layout = ep_window_layout(&group->config, group->size);
    g->timeout_ns = (uint64_t)(group->timeout * 1e9);
    cuda->own = (EpCudaWindow){.bytes = g->layout.bytes, .owned = 1};
    EP_TRY(read_device(group, cuda));
    return open_memory(group, cuda);
}

EpStatus ep_cuda_open(EpGroup *group) {
    EpCall call = {"ep_group_create", group->rank};
    EP_TRY(ep_group_agree(group, &call, open_device(group)));
    EpCuda *cuda = ep_cuda(group);
    if (group->size > 1) EP_TRY(ep_group_agree(group, &call, open_communicator(group, cuda)));
    EP_TRY(ep_cuda_window_open(group, &call, &cuda->own, cuda->device.window));
    EP_INFO(
        "cuda backend: device %d, %d multiprocessors, window of %lld bytes, rings of %d records",
        cuda->ordinal, cuda->num_sms, (long long)cuda->own.bytes, cuda->device.layout.depth);
    return EP_OK;
}

/* Ending a communicator is collective: without the others, it is left to the process's end. */
void ep_cuda_close(EpGroup *group, int together) {
    EpCuda *cuda = group->backend_state;
    if (!cuda) return;
    (void)cudaDeviceSynchronize();
    ep_cuda_window_close(cuda, &cuda->own, together);
    if (cuda->owns_comm && together) cuda->nccl->ncclCommDestroy(cuda->comm);
    (void)cudaFree(cuda->device.state);
    (void)cudaFree(cuda->device.lane_counts);
    (void)cudaFree((void *)(uintptr_t)cuda->device.peers);
    (void)cudaFreeHost(cuda->device.failure);
    (void)cudaFreeHost(cuda->notes);
    if (cuda->last) (void)cudaEventDestroy(cuda->last);
    (void)cudaGetLastError();
    free(cuda);
    group->backend_state = NULL;
}
