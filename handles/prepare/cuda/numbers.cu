/* SPDX-License-Identifier: Apache-2.0 */
/* Copies the numbers of a plan to the caller's vectors. A plan that is not the expected one has
 * failed the group in the dispatch before, and nothing is written. */
#include "handles/prepare/cuda/prepare.h"
#include "handles/prepare/cuda/publish.cuh"

enum { THREADS = 128 };

__device__ __forceinline__ void copy_totals(const EpPrepareArgs &a) {
    const EpPlanHeader *h = a.plan.header;
    const int64_t totals[] = {h->recv_rows, h->needed_rows, h->dropped_slots};
    for (int i = 0; i < 3; i++)
        store_integer(a.totals, i, totals[i]);
    store_integer(a.recv_rows, 0, totals[0]);
    store_integer(a.needed_rows, 0, totals[1]);
    store_integer(a.dropped_slots, 0, totals[2]);
}

/* By one block. */
__global__ void copy_numbers(const __grid_constant__ EpPrepareArgs a) {
    const EpLoadedHeader header = ep_load_header(a.group, a.plan);
    int experts = a.shape.num_local;
    uint32_t epoch;
    if (!ep_begin_operation(a.group, a.plan, header, &epoch)) return;
    for (int e = threadIdx.x; e < experts; e += (int)blockDim.x) {
        store_integer(a.counts, e, a.plan.expert_counts[e]);
        store_integer(a.padded, e, a.plan.expert_padded[e]);
        store_integer(a.offsets, e, a.plan.expert_offsets[e]);
    }
    if (threadIdx.x) return;
    if (a.has_offset_end) store_integer(a.offsets, experts, a.plan.expert_offsets[experts]);
    copy_totals(a);
}

extern "C" int ep_cuda_open_numbers(int shared_bytes) {
    return ep_open_kernel(copy_numbers, shared_bytes);
}

extern "C" int ep_cuda_launch_numbers(const void *args, int blocks, void *stream) {
    return ep_launch(copy_numbers, blocks, THREADS, 0, stream, *(const EpPrepareArgs *)args);
}
