/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opens and closes the CUDA backend of a group: its device memory, an NCCL communicator, and one
 * window that every rank can reach.
 */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/nccl_bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "bootstrap/memory/cuda/cuda_memory.h"
#include "bootstrap/network/cuda/network.h"
#include "runtime/cuda/code.h"

#define PEERS_BYTES (sizeof(char *) * EP_WINDOW_NUMBERS * EP_CUDA_MAX_RANKS)

/* ---- sizes --------------------------------------------------------------------------------- */

void ep_cuda_measure(const EpGroupConfig *config, const EpNodeSizes *nodes,
                     const EpSettings *settings, int64_t *shared_bytes, int64_t *private_bytes) {
    *shared_bytes = ep_window_layout(config, nodes).bytes;
    *private_bytes = (int64_t)(sizeof(EpCuda) + sizeof(EpCudaState) + sizeof(EpCudaAsyncErrors) +
                               sizeof(EpCudaFailure) + 2 * sizeof(EpCudaNote)) +
                     8LL * ep_cuda_partitions(ep_cuda_blocks(config, nodes, settings)) *
                         EP_COUNT_STRIDE((int64_t)ep_physical_experts(config), nodes->ranks) +
                     (int64_t)PEERS_BYTES + ep_cuda_adopting_bytes(config, nodes->ranks);
}

/* ---- opening ------------------------------------------------------------------------------- */

static EpStatus open_memory(EpGroup *group, EpCuda *cuda) {
    EpCudaGroup *g = &cuda->device;
    size_t stride = (size_t)EP_COUNT_STRIDE((int64_t)g->num_experts, g->size);
    size_t counts = 8 * (size_t)g->partitions * stride;
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->state, sizeof(*g->state))));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->partition_counts, counts)));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&g->peers, PEERS_BYTES)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&g->failure, sizeof(*g->failure), 0)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&cuda->errors, sizeof(*cuda->errors), 0)));
    memset(g->failure, 0, sizeof(*g->failure));
    memset(cuda->errors, 0, sizeof(*cuda->errors));
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(g->state, 0, sizeof(*g->state))));
    EP_TRY(ep_cuda_check(group, "cudaMemset",
                         cudaMemset((void *)(uintptr_t)g->peers, 0, PEERS_BYTES)));
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(g->partition_counts, 0, counts)));
    EP_TRY(ep_cuda_notes_open(group, &cuda->notes));
    EP_TRY(ep_cuda_adopting_open(group));
    return ep_cuda_order_open(group, &cuda->order);
}

static EpStatus read_device(EpGroup *group, EpCuda *cuda) {
    cuda->ordinal = group->choice.device;
    EP_TRY(ep_cuda_check(group, "cudaSetDevice", cudaSetDevice(cuda->ordinal)));
    cuda->shared_bytes = group->choice.shared_bytes;
    cuda->device.early = group->choice.code >= EP_EARLY_CODE;
    return ep_cuda_check(
        group, "cudaDeviceGetAttribute",
        cudaDeviceGetAttribute(&cuda->pageable, cudaDevAttrPageableMemoryAccess, cuda->ordinal));
}

static EpStatus open_device(EpGroup *group) {
    EpCuda *cuda = calloc(1, sizeof(*cuda));
    if (!cuda)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: %s: out of memory", group->rank, group->call);
    group->backend_state = cuda;
    EpCudaGroup *g = &cuda->device;
    g->rank = group->nodes.rank, g->size = group->nodes.sizes.ranks;
    g->num_experts = group->placement.num_experts;
    g->layout = ep_window_layout(&group->config, &group->nodes.sizes);
    g->most_blocks = ep_cuda_multiprocessors();
    g->blocks = ep_cuda_blocks(&group->config, &group->nodes.sizes, &group->settings);
    g->partitions = ep_cuda_partitions(g->blocks);
    g->timeout_ns = (uint64_t)(group->timeout * 1e9);
    cuda->own = (EpCudaWindow){.bytes = g->layout.bytes, .owned = 1};
    EP_TRY(read_device(group, cuda));
    return open_memory(group, cuda);
}

static void say_opened(const EpCuda *cuda, const EpGroup *group) {
    EP_INFO("cuda backend: device %d, code of capability %d.%d, %d blocks with %d bytes of shared "
            "memory, window of %lld bytes, rings of %d records",
            cuda->ordinal, group->choice.code / 10, group->choice.code % 10, cuda->device.blocks,
            cuda->shared_bytes, (long long)cuda->own.bytes, cuda->device.layout.depth);
}

EpStatus ep_cuda_open(EpGroup *group) {
    EpCall call = {"ep_group_create", group->rank};
    EP_TRY(ep_group_agree(group, &call, open_device(group)));
    EpCuda *cuda = ep_cuda(group);
    if (group->size > 1 && group->choice.nccl)
        EP_TRY(ep_cuda_comm_agree(group, &call, ep_cuda_comm_open(group)));
    EP_TRY(ep_cuda_window_open(group, &call, &cuda->own, cuda->device.window));
    cuda->reached = ep_mask_of_all(cuda->device.size);
    EP_TRY(ep_cuda_choose_lines(group));
    EP_TRY(ep_cuda_watch_open(group));
    say_opened(cuda, group);
    return EP_OK;
}

EpStatus ep_cuda_reserve(EpGroup *group) {
    EpCall call = {group->call, group->rank};
    EP_TRY(open_device(group));
    EpCuda *cuda = ep_cuda(group);
    EP_TRY(ep_cuda_window_reserve(group, &call, &cuda->own, cuda->device.window));
    ep_mask_add(&cuda->reached, group->rank);
    ep_cuda_find_links(group);
    say_opened(cuda, group);
    return EP_OK;
}

/* In a process with several ranks, what one rank frees may wait for kernels on the GPUs of the
 * others, and the last one to end its communicator frees what NCCL has of all of them. So no rank
 * goes on to kernels that wait for its peers before they have freed everything. Ranks whose
 * bootstrap meets by such kernels do without: see ep_bootstrap_nccl. */
static void await_freed(EpGroup *group) {
    if (group->choice.threads && !ep_nccl_bootstrap_is(&group->bootstrap))
        (void)ep_group_meet(group);
}

void ep_cuda_close(EpGroup *group, int together) {
    EpCuda *cuda = group->backend_state;
    if (!cuda) return;
    ep_cuda_watch_close(group, together);
    ep_cuda_window_close(group, &cuda->own, together);
    ep_cuda_comm_close(group, together);
    (void)cudaFree(cuda->device.state);
    (void)cudaFree(cuda->device.partition_counts);
    (void)cudaFree((void *)(uintptr_t)cuda->device.peers);
    (void)cudaFreeHost(cuda->device.failure);
    (void)cudaFreeHost(cuda->errors);
    ep_cuda_notes_close(&cuda->notes);
    ep_cuda_adopting_close(group);
    ep_cuda_order_close(&cuda->order);
    (void)cudaGetLastError();
    free(cuda);
    group->backend_state = NULL;
    if (together) await_freed(group);
}
