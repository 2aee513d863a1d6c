/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_SLABS_CUH
#define EP_HANDLES_PREPARE_SLABS_CUH

/**
 * Slabs of ep_prepare: where each expert's rows begin on each rank; and what of it the caller is
 * told.
 */

#include "handles/prepare_counts.cuh"

__device__ void publish_expert(const EpPrepareArgs &a, int local, int count, int64_t offset,
                               int64_t padded) {
    int experts = a.shape.num_local;
    a.plan.expert_counts[local] = count;
    a.plan.expert_padded[local] = (int)padded;
    a.plan.expert_offsets[local] = (int)offset;
    store_integer(a.counts, local, count);
    store_integer(a.padded, local, padded);
    store_integer(a.offsets, local, offset);
    a.info->experts[local] = count;
    a.info->experts[experts + local] = (int)padded;
    a.info->experts[2 * experts + local] = (int)offset;
}

__device__ __forceinline__ int64_t slot_limit(const EpPrepareArgs &a, int local) {
    const EpPlanShape &s = a.shape;
    if (s.layout == EP_LAYOUT_BATCHED) return (local + 1) * s.rows_per_expert;
    return s.capacity ? s.capacity : INT32_MAX;
}

__device__ __forceinline__ int warp_sum(int value) {
    return __reduce_add_sync(~0u, value);
}

__device__ void publish_offset_end(const EpPrepareArgs &a, int64_t offset) {
    a.plan.expert_offsets[a.shape.num_local] = (int)offset;
    store_integer(a.offsets, a.shape.num_local, offset);
    a.info->experts[3 * a.shape.num_local] = (int)offset;
}

/* Under EP_OVERFLOW_ERROR the group's status tells of lost slots. */
__device__ void note_overflow(const EpPrepareArgs &a, int64_t needed, int64_t dropped) {
    a.notes->capacity =
        a.shape.layout == EP_LAYOUT_BATCHED ? a.shape.rows_per_expert : a.shape.capacity;
    a.notes->needed = needed;
    __threadfence_system();
    atomicAdd_system(&a.notes->lost, (unsigned long long)dropped);
}

__device__ void publish_totals(const EpPrepareArgs &a, int64_t rows, int64_t needed,
                               int64_t dropped) {
    volatile EpPlanHeader *h = a.plan.header, *out = &a.info->header;
    h->recv_rows = rows, h->needed_rows = needed, h->dropped_slots = dropped;
    out->recv_rows = rows, out->needed_rows = needed, out->dropped_slots = dropped;
    store_integer(a.totals, 0, rows);
    store_integer(a.totals, 1, needed);
    store_integer(a.totals, 2, dropped);
    if (dropped && a.shape.overflow == EP_OVERFLOW_ERROR) note_overflow(a, needed, dropped);
}

/* The slab of an expert: entries that want to go there, rows that they take, where it begins. */
typedef struct Slab {
    int count, rows;
    int64_t offset;
} Slab;

/* Of a rank's expert number at + lane, for a warp that walks the experts in order; `start` is where
 * the next 32 begin. */
__device__ __forceinline__ Slab lay_slab(const EpPrepareArgs &a, const Lane *l, int rank, int at,
                                         int64_t *start) {
    const EpPlanShape &s = a.shape;
    int lane = threadIdx.x % 32, e = at + lane, column = l->ranks->first[rank] + e;
    int count = column < l->ranks->first[rank + 1] ? l->total[column] : 0;
    int rows = (count + s.alignment - 1) / s.alignment * s.alignment;
    int through = ep_warp_prefix(rows);
    int64_t begin = *start + through - rows;
    *start += __shfl_sync(~0u, through, 31);
    return Slab{count, rows, s.layout == EP_LAYOUT_BATCHED ? e * s.rows_per_expert : begin};
}

/* Slabs of one rank: adds each one's offset to base. By a warp. */
__device__ void lay_slabs(const EpPrepareArgs &a, Lane *l, int rank) {
    int local = l->ranks->first[rank + 1] - l->ranks->first[rank], lane = threadIdx.x % 32;
    int64_t start = 0;
    for (int at = 0; at < local; at += 32) {
        Slab slab = lay_slab(a, l, rank, at, &start);
        if (at + lane < local)
            l->base[l->ranks->first[rank] + at + lane] += (int)min(slab.offset, (int64_t)INT32_MAX);
    }
}

/* Slabs of this rank, for everyone to see. By a warp. */
__device__ void publish_slabs(const EpPrepareArgs &a, const Lane *l) {
    int local = a.shape.num_local, lane = threadIdx.x % 32;
    int batched = a.shape.layout == EP_LAYOUT_BATCHED, most = 0;
    int64_t start = 0, dropped = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane;
        Slab slab = lay_slab(a, l, a.group.rank, at, &start);
        int64_t limit = slot_limit(a, e), begin = min(slab.offset, limit);
        int64_t kept = max((int64_t)0, min((int64_t)slab.count, limit - slab.offset));
        if (e < local)
            publish_expert(a, e, (int)kept, begin, min(slab.offset + slab.rows, limit) - begin);
        most = max(most, slab.rows);
        dropped += warp_sum((int)(e < local ? slab.count - kept : 0));
    }
    most = __reduce_max_sync(~0u, most);
    int64_t needed = batched ? most : start;
    int64_t rows = batched ? local * a.shape.rows_per_expert : min(start, slot_limit(a, 0));
    if (lane) return;
    publish_totals(a, rows, needed, dropped);
    publish_offset_end(a, rows);
}

/* Rows to and from the other ranks, and those that stay. By a warp. */
__device__ void publish_rows(const EpPrepareArgs &a, const Lane *l, uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    const uint64_t *own = counts_of(g, g.rank, g.rank, epoch) + g.num_experts;
    int sent = 0, local = (int)ep_load_relaxed_sys(own + g.rank);
    for (int r = threadIdx.x % 32; r < g.size; r += 32)
        sent += r == g.rank ? 0 : (int)ep_load_relaxed_sys(own + r);
    sent = warp_sum(sent);
    if (threadIdx.x % 32) return;
    a.info->remote_sent = sent, a.info->local = local;
    a.info->remote_received = l->total[g.num_experts + g.rank] - local;
}

/* The step's numbers are all there. By one thread, behind whatever it has seen. */
__device__ void publish_step(const EpPrepareArgs &a, int tokens) {
    volatile EpPlanHeader *h = a.plan.header, *out = &a.info->header;
    int64_t step = h->step + 1;
    h->num_tokens = tokens;
    h->num_rows = a.num_rows;
    h->top_k = a.top_k;
    h->exact_rows = a.num_tokens.data == NULL;
    h->step = step;
    h->prepared = 1;
    out->num_tokens = tokens, out->top_k = a.top_k;
    __threadfence_system();
    out->step = step;
}

#endif
