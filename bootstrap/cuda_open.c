/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA backend sets up with the peers: a communicator of NCCL's, whose unique id travels
 * over the bootstrap, and from it one window that every rank can reach.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/cuda_host.h"
#include "runtime/log.h"
#include "runtime/window.h"

#define GREETING 0x65702100u

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
                     4LL * EP_LANES * config->num_experts;
}

/* ---- opening ------------------------------------------------------------------------------- */

EpStatus ep_cuda_check(const EpGroup *group, const char *what, int error) {
    if (error == cudaSuccess) return EP_OK;
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_ERR_NO_MEMORY : EP_ERR_SYSTEM,
                   "rank %d: %s: %s", group->rank, what, cudaGetErrorString((cudaError_t)error));
}

static EpStatus check_nccl(const EpGroup *group, const char *what, ncclResult_t result) {
    if (result == ncclSuccess) return EP_OK;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: %s", group->rank, what,
                   ep_cuda(group)->nccl->ncclGetErrorString(result));
}

/* A borrowed one is to be of the same ranks, counted alike. */
static EpStatus check_borrowed(const EpGroup *group, const EpCuda *cuda) {
    EpCall call = {"ep_group_create", group->rank};
    int size = 0, rank = -1;
    EP_TRY(check_nccl(group, "ncclCommCount", cuda->nccl->ncclCommCount(cuda->comm, &size)));
    EP_TRY(check_nccl(group, "ncclCommUserRank", cuda->nccl->ncclCommUserRank(cuda->comm, &rank)));
    if (size == group->size && rank == group->rank) return EP_OK;
    return ep_refuse(&call, EP_ERR_MISMATCH, "config.nccl_comm",
                     "expected rank %d of %d as in the bootstrap, got rank %d of %d", group->rank,
                     group->size, rank, size);
}

static EpStatus open_communicator(EpGroup *group, EpCuda *cuda) {
    const EpBootstrap *b = &group->bootstrap;
    char reason[192];
    cuda->nccl = ep_nccl_load(reason, sizeof(reason));
    cuda->comm = group->config.nccl_comm;
    if (cuda->comm) return check_borrowed(group, cuda);
    ncclUniqueId mine = {{0}}, *all = calloc((size_t)group->size, sizeof(*all));
    if (!all)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    EpStatus status = EP_OK;
    if (group->rank == 0)
        status = check_nccl(group, "ncclGetUniqueId", cuda->nccl->ncclGetUniqueId(&mine));
    EpStatus gathered = b->allgather(b->context, &mine, all, sizeof(mine), group->timeout);
    if (status == EP_OK && gathered == EP_OK) {
        status =
            check_nccl(group, "ncclCommInitRank",
                       cuda->nccl->ncclCommInitRank(&cuda->comm, group->size, all[0], group->rank));
        cuda->owns_comm = status == EP_OK;
    }
    free(all);
    return gathered != EP_OK ? gathered : status;
}

/* A window that cannot be used may come with success: every rank greets every other, and counts. */
static EpStatus verify_window(EpGroup *group, EpCuda *cuda) {
    const EpBootstrap *b = &group->bootstrap;
    int greetings = 0, missing = 0;
    for (int32_t r = 0; r < group->size; r++)
        missing += cuda->device.window[r] == NULL;
    if (missing)
        return ep_fail(EP_ERR_UNSUPPORTED,
                       "rank %d: ep_group_create: window: expected to reach %d ranks over NVLink, "
                       "cannot reach %d of them",
                       group->rank, group->size, missing);
    EP_TRY(ep_cuda_check(group, "greeting the peers",
                         ep_window_greet(cuda->device.window, group->rank, group->size, GREETING)));
    EP_TRY(b->barrier(b->context, group->timeout));
    EP_TRY(ep_cuda_check(group, "reading greetings",
                         ep_window_count_greetings(cuda->device.window[group->rank], group->size,
                                                   GREETING, &greetings)));
    if (greetings != group->size)
        return ep_fail(EP_ERR_UNSUPPORTED,
                       "rank %d: ep_group_create: window: expected greetings of %d ranks, got %d",
                       group->rank, group->size, greetings);
    EP_TRY(ep_cuda_check(group, "cudaMemset",
                         cudaMemset(cuda->window_memory, 0, (size_t)cuda->device.layout.bytes)));
    EP_TRY(ep_cuda_check(group, "cudaDeviceSynchronize", cudaDeviceSynchronize()));
    return b->barrier(b->context, group->timeout);
}

static EpStatus open_window(EpGroup *group, EpCuda *cuda) {
    size_t bytes = (size_t)cuda->device.layout.bytes;
    if (group->size == 1) {
        EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc(&cuda->window_memory, bytes)));
        cuda->device.window[0] = cuda->window_memory;
        return verify_window(group, cuda);
    }
    EP_TRY(open_communicator(group, cuda));
    EP_TRY(
        check_nccl(group, "ncclMemAlloc", cuda->nccl->ncclMemAlloc(&cuda->window_memory, bytes)));
    EP_TRY(check_nccl(group, "ncclCommWindowRegister",
                      cuda->nccl->ncclCommWindowRegister(cuda->comm, cuda->window_memory, bytes,
                                                         &cuda->window, 0)));
    if (!cuda->window)
        return ep_fail(EP_ERR_UNSUPPORTED,
                       "rank %d: ep_group_create: window: expected one from NCCL, got none",
                       group->rank);
    EP_TRY(ep_cuda_check(group, "finding the window's pointers",
                         ep_window_pointers(cuda->window, group->size, cuda->device.window)));
    return verify_window(group, cuda);
}

static EpStatus open_memory(EpGroup *group, EpCuda *cuda) {
    EpCudaGroup *g = &cuda->device;
    size_t counts = 4 * (size_t)EP_LANES * (size_t)group->config.num_experts;
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->state, sizeof(*g->state))));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->lane_counts, counts)));
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
    cuda->ordinal = group->choice.device;
    EP_TRY(ep_cuda_check(group, "cudaSetDevice", cudaSetDevice(cuda->ordinal)));
    EP_TRY(
        ep_cuda_check(group, "cudaDeviceGetAttribute",
                      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, cuda->ordinal)));
    EP_TRY(ep_cuda_check(group, "cudaDeviceGetAttribute",
                         cudaDeviceGetAttribute(&cuda->shared_bytes,
                                                cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                                cuda->ordinal)));
    EP_TRY(ep_cuda_check(
        group, "cudaDeviceGetAttribute",
        cudaDeviceGetAttribute(&cuda->pageable, cudaDevAttrPageableMemoryAccess, cuda->ordinal)));
    int64_t wanted = group->settings.num_sms;
    cuda->num_sms = wanted > 1 && wanted < sms ? (int)wanted : sms;
    return EP_OK;
}

EpStatus ep_cuda_open(EpGroup *group) {
    EpCuda *cuda = calloc(1, sizeof(*cuda));
    if (!cuda)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    group->backend_state = cuda;
    EpCudaGroup *g = &cuda->device;
    g->rank = group->rank, g->size = group->size;
    g->num_experts = group->config.num_experts;
    g->layout = ep_window_layout(&group->config, group->size);
    g->timeout_ns = (uint64_t)(group->timeout * 1e9);
    EP_TRY(read_device(group, cuda));
    EP_TRY(open_memory(group, cuda));
    EP_TRY(open_window(group, cuda));
    EP_INFO(
        "cuda backend: device %d, %d multiprocessors, window of %lld bytes, rings of %d records",
        cuda->ordinal, cuda->num_sms, (long long)g->layout.bytes, g->layout.depth);
    return EP_OK;
}

/* Ending a communicator is collective: without the others, it is left to the process's end. */
static void close_window(EpCuda *cuda, int together) {
    if (!cuda->nccl) {
        (void)cudaFree(cuda->window_memory);
        return;
    }
    if (together && cuda->window) cuda->nccl->ncclCommWindowDeregister(cuda->comm, cuda->window);
    if (together && cuda->window_memory) cuda->nccl->ncclMemFree(cuda->window_memory);
    if (cuda->owns_comm && together) cuda->nccl->ncclCommDestroy(cuda->comm);
}

void ep_cuda_close(EpGroup *group, int together) {
    EpCuda *cuda = group->backend_state;
    if (!cuda) return;
    (void)cudaDeviceSynchronize();
    close_window(cuda, together);
    (void)cudaFree(cuda->device.state);
    (void)cudaFree(cuda->device.lane_counts);
    (void)cudaFreeHost(cuda->device.failure);
    (void)cudaFreeHost(cuda->notes);
    if (cuda->last) (void)cudaEventDestroy(cuda->last);
    (void)cudaGetLastError();
    free(cuda);
    group->backend_state = NULL;
}
