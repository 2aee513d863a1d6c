/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA backend sets up with the peers: a communicator of NCCL's (cuda_comm.h), and from it
 * one window that every rank can reach.
 */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/cuda_comm.h"
#include "bootstrap/cuda_links.h"
#include "bootstrap/meet.h"
#include "runtime/cuda_host.h"
#include "runtime/log.h"

#define PEERS_BYTES (sizeof(char *) * EP_MAX_WINDOWS * EP_CUDA_MAX_RANKS)

/* ---- sizes --------------------------------------------------------------------------------- */

#ifndef RING_BYTES
#define RING_BYTES (44 << 20) /* of all rings together, where that makes them deep enough */
#endif
#define LEAST_DEPTH 32

int32_t ep_cuda_blocks(const EpSettings *settings) {
    int device = 0, sms = 2;
    if (cudaGetDevice(&device) == cudaSuccess)
        (void)cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    (void)cudaGetLastError();
    if (settings->num_sms != EP_COUNT_AUTO) sms = (int)ep_min(sms, settings->num_sms);
    return (int32_t)ep_max(2, sms);
}

static int64_t take(int64_t *at, int64_t bytes) {
    int64_t offset = *at;
    *at = ep_round_up(offset + bytes, 128);
    return offset;
}

/* A ring has room for all rows that there can be, or as many as there is memory for. */
EpWindowLayout ep_window_layout(const EpGroupConfig *config, int32_t num_ranks) {
    EpWindowLayout w = {.depth = 1, .max_tokens = config->max_tokens};
    int64_t ranks = num_ranks, rings = ep_max(1, ranks - 1), tokens = config->max_tokens, at = 0;
    w.record_bytes = ep_round_up(
        ep_record(config->max_row_bytes, config->max_top_k, config->max_scale_bytes).bytes, 128);
    int64_t depth = ep_max(LEAST_DEPTH, RING_BYTES / (rings * w.record_bytes));
    while (w.depth * 2 <= depth && w.depth < tokens)
        w.depth *= 2;
    w.arrival = take(&at, 2 * ranks * (int64_t)sizeof(EpArrival));
    w.sent = take(&at, ranks * EP_SENT_WORDS * 8);
    w.head = take(&at, ranks * w.depth * 8);
    w.credit = take(&at, ranks * w.depth * 8);
    w.counts = take(&at, 2 * ranks * EP_COUNT_WORDS(config->num_experts, ranks) * 8);
    w.begins = take(&at, 2 * ranks * tokens * 8);
    w.routes = take(&at, 2 * ranks * tokens * config->max_top_k * 4);
    w.ring = take(&at, ranks > 1 ? rings * w.depth * w.record_bytes : 0);
    w.bytes = at;
    return w;
}

static int32_t lanes_of(int32_t blocks) {
    return (int32_t)ep_min(EP_MAX_LANES, blocks / 2);
}

void ep_cuda_measure(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                     int64_t *shared_bytes, int64_t *private_bytes) {
    *shared_bytes = ep_window_layout(config, num_ranks).bytes;
    *private_bytes = (int64_t)(sizeof(EpCuda) + sizeof(EpCudaState) + sizeof(EpCudaNotes) +
                               sizeof(EpCudaFailure)) +
                     8LL * lanes_of(ep_cuda_blocks(settings)) *
                         EP_COUNT_STRIDE((int64_t)config->num_experts, num_ranks) +
                     (int64_t)PEERS_BYTES;
}

/* ---- opening ------------------------------------------------------------------------------- */

EpStatus ep_cuda_check(const EpGroup *group, const char *what, int error) {
    if (error == cudaSuccess) return EP_OK;
    (void)cudaGetLastError(); /* told: it is not the next call's */
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_ERR_NO_MEMORY : EP_ERR_SYSTEM,
                   "rank %d: %s: %s", group->rank, what, cudaGetErrorString((cudaError_t)error));
}

EpStatus ep_cuda_put(const EpGroup *group, void *to, const void *from, size_t bytes) {
    cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    if (error == cudaSuccess) error = cudaStreamSynchronize(NULL);
    return ep_cuda_check(group, "cudaMemcpy", error);
}

static EpStatus open_memory(EpGroup *group, EpCuda *cuda) {
    EpCudaGroup *g = &cuda->device;
    size_t stride = (size_t)EP_COUNT_STRIDE((int64_t)group->config.num_experts, group->size);
    size_t counts = 8 * (size_t)g->lanes * stride;
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->state, sizeof(*g->state))));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->lane_counts, counts)));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->peers, PEERS_BYTES)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&g->failure, sizeof(*g->failure), 0)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&cuda->notes, sizeof(*cuda->notes), 0)));
    memset(g->failure, 0, sizeof(*g->failure));
    memset(cuda->notes, 0, sizeof(*cuda->notes));
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(g->state, 0, sizeof(*g->state))));
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(g->lane_counts, 0, counts)));
    return ep_cuda_order_open(group, &cuda->order);
}

static EpStatus read_device(EpGroup *group, EpCuda *cuda) {
    cuda->ordinal = group->choice.device;
    EP_TRY(ep_cuda_check(group, "cudaSetDevice", cudaSetDevice(cuda->ordinal)));
    EP_TRY(ep_cuda_check(group, "cudaDeviceGetAttribute",
                         cudaDeviceGetAttribute(&cuda->shared_bytes,
                                                cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                                cuda->ordinal)));
    return ep_cuda_check(
        group, "cudaDeviceGetAttribute",
        cudaDeviceGetAttribute(&cuda->pageable, cudaDevAttrPageableMemoryAccess, cuda->ordinal));
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
    g->blocks = ep_cuda_blocks(&group->settings), g->lanes = lanes_of(g->blocks);
    g->timeout_ns = (uint64_t)(group->timeout * 1e9);
    cuda->own = (EpCudaWindow){.bytes = g->layout.bytes, .owned = 1};
    EP_TRY(read_device(group, cuda));
    return open_memory(group, cuda);
}

EpStatus ep_cuda_open(EpGroup *group) {
    EpCall call = {"ep_group_create", group->rank};
    EP_TRY(ep_group_agree(group, &call, open_device(group)));
    EpCuda *cuda = ep_cuda(group);
    if (group->size > 1 && !group->choice.shared)
        EP_TRY(ep_cuda_comm_agree(group, &call, ep_cuda_comm_open(group)));
    EP_TRY(ep_cuda_window_open(group, &call, &cuda->own, cuda->device.window));
    EP_TRY(ep_cuda_choose_lines(group));
    EP_INFO("cuda backend: device %d, %d blocks, window of %lld bytes, rings of %d records",
            cuda->ordinal, cuda->device.blocks, (long long)cuda->own.bytes,
            cuda->device.layout.depth);
    return EP_OK;
}

void ep_cuda_close(EpGroup *group, int together) {
    EpCuda *cuda = group->backend_state;
    if (!cuda) return;
    (void)cudaDeviceSynchronize();
    ep_cuda_window_close(group, &cuda->own, together);
    ep_cuda_comm_close(group, together);
    (void)cudaFree(cuda->device.state);
    (void)cudaFree(cuda->device.lane_counts);
    (void)cudaFree((void *)(uintptr_t)cuda->device.peers);
    (void)cudaFreeHost(cuda->device.failure);
    (void)cudaFreeHost(cuda->notes);
    ep_cuda_order_close(&cuda->order);
    (void)cudaGetLastError();
    free(cuda);
    group->backend_state = NULL;
}
