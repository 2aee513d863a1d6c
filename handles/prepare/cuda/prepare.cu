/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on GPUs: one launch of a block for each token partition and one more, all of them
 * resident together.
 *
 * The blocks divide the rank's tokens into partitions. Each block sorts the entries of its own
 * partition. The last block, the publisher, sends the rank's arrival to all ranks and reports the
 * result to the host. Who waits on whom:
 *
 *     partition counts   block -> block       each warp sums some columns over all partitions
 *     partitions before  block -> block       and returns to each the sum over those before it
 *     rank counts        rank  -> all ranks   E + R + 1 integers to each
 *     begins, routes     block -> all ranks   for each token, the number of rows before it; for
 *                                             each row, its slots there
 *
 * From every rank's number of entries for every expert, a rank computes all slabs of all ranks, and
 * so the slot of each of its own entries, without the other ranks' routing. All blocks with a
 * partition copy what other ranks send into the plan; each copies an equal part of the words.
 *
 * A block takes its partition's tokens in chunks of one entry for each thread; a token is a team of
 * lanes of one warp. Entries for an expert are numbered by token and k, rows to a rank by token:
 * within a warp by comparing lanes, across warps by a table of each warp's counts. The first chunk
 * is usually the only one. It is numbered, and its begins are sent, while counts travel.
 *
 * Memory order: no word is ordered behind another. Each word is stored at once and shows its own
 * arrival: counts and begins carry the epoch in their upper half; a route is not 0, and its only
 * reader sets it to 0 again, so routes need no epoch. Each word has two buffers, used in turn: no
 * rank is more than one operation ahead of another, so a buffer is rewritten only after its readers
 * have left the operation that filled it. A partition's counts have one reader, which overwrites
 * them with the sums over the partitions before; EP_PARTITIONS_BEFORE marks such a sum.
 */
#include "handles/prepare/cuda/entries.cuh"
#include "handles/prepare/cuda/prepare.h"

/* ---- flat rows ----------------------------------------------------------------------------- */

/* Returns the totals of this rank's experts. */
__device__ __forceinline__ const int32_t *own_total(const EpPrepareArgs &a, const Partition *p) {
    return p->total + ep_owner_first(&a.owners, a.group.rank);
}

/* Publish a plan of flat rows. By the last block to leave, since only then all rows are known.
 * After a failure the plan is undefined and not read. */
__device__ void complete_flat(const EpPrepareArgs &a, const Partition *p, uint32_t epoch) {
    __threadfence();
    if (ep_failed(a.group)) return;
    int64_t step = step_under_way(a);
    publish_flat(
        a, step, own_total(a, p), [&](int source) { return p->ranks->incoming[source]; },
        [&](int e, int source) { return counted(a, e, source, epoch); });
    if (threadIdx.x == 0) publish_step(a, step, p->ranks->num_tokens, epoch);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <int FORM>
__device__ __forceinline__ void prepare_partition(const EpPrepareArgs &a, Partition *p,
                                                  const Index &index, uint32_t epoch) {
    constexpr int FLAT = FORM == EP_ROUTES_FLAT;
    Own o = count_entries(a, p, index, epoch);
    int alive = exchange_counts(a, p, epoch);
    number_entries(a, p, &o);
    alive = alive && send_begins(a, p, o, p->begin, epoch);
    alive = alive && await_counts(a, p, epoch);
    if (!__syncthreads_and(alive)) return;
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < a.group.size && !FLAT; r += PREPARE_WARPS)
        lay_slabs(a, p, r);
    if (!FLAT) __syncthreads();
    store_entries<FORM>(a, p, o, epoch);
    receive_plan<FORM>(a, p, epoch);
}

template <int FLAT>
__device__ __forceinline__ void publish_partitions(const EpPrepareArgs &a, Partition *p,
                                                   uint32_t epoch) {
    send_arrivals(a.group, epoch);
    int64_t step = step_under_way(a);
    int alive = await_all(a, p, epoch);
    if (!__syncthreads_and(alive)) return;
    if (threadIdx.x / 32 == 1) publish_rows(a, p, step, epoch);
    if (FLAT) return; /* complete_flat publishes flat rows at the end */
    publish_all_slabs(a, step, own_total(a, p),
                      [&](int e, int source) { return counted(a, e, source, epoch); });
    if (threadIdx.x == 0) publish_step(a, step, p->ranks->num_tokens, epoch);
}

__device__ __forceinline__ Partition open_partition(const EpPrepareArgs &a, uint4 *memory) {
    const EpCudaGroup &g = a.group;
    int tokens = count_tokens(a);
    Partition p;
    p.index = blockIdx.x;
    partition_range(a, tokens, p.index, &p.begin, &p.end);
    p.columns = g.num_experts + g.size;
    p.ranks = (RankTables *)memory;
    p.table = (uint8_t *)(p.ranks + 1);
    if (threadIdx.x == 0) p.ranks->num_tokens = tokens;
    p.base = (int32_t *)(p.table + PREPARE_WARPS * p.columns);
    p.total = p.base + p.columns;
    p.team_shift = a.top_k > 1 ? 32 - __clz(a.top_k - 1) : 0;
    p.team = 1 << p.team_shift;
    p.chunk_tokens = PREPARE_THREADS >> p.team_shift;
    return p;
}

/* Load the first indices before ep_enter, so that its loads and these overlap. */
template <int FORM> __device__ __forceinline__ void prepare(const EpPrepareArgs &a, uint4 *memory) {
    constexpr int FLAT = FORM == EP_ROUTES_FLAT;
    Partition p = open_partition(a, memory);
    Index index = load_own_index(a, &p, p.begin);
    EpLook look = ep_look(a.group, a.plan);
    uint32_t epoch;
    init_tables(a, &p);
    if (!ep_enter(a.group, a.plan, look, &epoch)) {
        ep_report_plan(a.group, a.plan);
        ep_leave(a.group, epoch, 0);
        return;
    }
    if (is_publisher(a, &p))
        publish_partitions<FLAT>(a, &p, epoch);
    else
        prepare_partition<FORM>(a, &p, index, epoch);
    if (ep_leave(a.group, epoch, FLAT || p.ranks->has_bad) != EP_LAST_PUBLISHES) return;
    if (threadIdx.x == 0) report_all_bad_indices(a);
    if (FLAT) complete_flat(a, &p, epoch);
}

__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_slabs(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<EP_ROUTES_DENSE>(a, ep_keep_shared(memory));
}

__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_chained(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<EP_ROUTES_CHAINED>(a, ep_keep_shared(memory));
}

__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_flat(const __grid_constant__ EpPrepareArgs a) {
    extern __shared__ uint4 memory[];
    prepare<EP_ROUTES_FLAT>(a, ep_keep_shared(memory));
}

extern "C" int ep_cuda_open_prepare(int shared_bytes) {
    int error = ep_open_kernel(prepare_slabs, shared_bytes);
    if (!error) error = ep_open_kernel(prepare_chained, shared_bytes);
    return error ? error : ep_open_kernel(prepare_flat, shared_bytes);
}

extern "C" int ep_cuda_launch_prepare(const void *args, int blocks, void *stream) {
    const EpPrepareArgs *a = (const EpPrepareArgs *)args;
    static_assert(sizeof(RankTables) <= EP_RANK_TABLES_BYTES, "groups are created by this size");
    static_assert(PREPARE_WARPS == EP_PREPARE_WARPS, "groups are created by this number");
    size_t shared = (size_t)ep_cuda_prepare_shared(a->group.num_experts, a->group.size);
    EpRouteForm form = a->plan.sizes.form;
    auto kernel = form == EP_ROUTES_FLAT      ? prepare_flat
                  : form == EP_ROUTES_CHAINED ? prepare_chained
                                              : prepare_slabs;
    return ep_launch(kernel, blocks, PREPARE_THREADS, shared, stream, *a);
}
