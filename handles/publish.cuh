/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PUBLISH_CUH
#define EP_HANDLES_PUBLISH_CUH

/**
 * What routing kernels have in common: integers and indices of the caller's, where slabs lie, and
 * what the caller and the host are told of a step.
 */

#include "handles/enter.cuh"

__device__ __forceinline__ int64_t load_integer(const void *data, int is_int64, int64_t i) {
    return is_int64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
}

__device__ __forceinline__ void store_integer(const EpCudaVector &v, int64_t i, int64_t value) {
    if (!v.data) return;
    if (v.is_int64)
        ((int64_t *)v.data)[i] = value;
    else
        ((int32_t *)v.data)[i] = (int32_t)value;
}

__device__ __forceinline__ int count_tokens(const EpPrepareArgs &a) {
    if (!a.num_tokens.data) return a.num_rows;
    int64_t count = load_integer(a.num_tokens.data, a.num_tokens.is_int64, 0);
    return (int)min((int64_t)a.num_rows, max((int64_t)0, count));
}

#define NO_EXPERT (-1)
#define BAD_EXPERT (-2) /* the caller meant one, which there is not */

/* An index as it lies in memory: what is computed of it at once is waited for at once. */
typedef struct Index {
    int32_t low, high; /* high: of an int64 alone */
} Index;

__device__ __forceinline__ Index load_index(const EpPrepareArgs &a, int64_t entry) {
    Index index;
    if (a.idx_is_int64) {
        int2 both = __ldg((const int2 *)a.topk_idx + entry);
        index.low = both.x, index.high = both.y;
    } else {
        index.low = __ldg((const int32_t *)a.topk_idx + entry);
    }
    return index;
}

__device__ __forceinline__ int expert_of(const EpPrepareArgs &a, const Index &index) {
    int high = a.idx_is_int64 ? index.high : index.low >> 31;
    int is = high == 0 && (uint32_t)index.low < (uint32_t)a.group.num_experts;
    return high < 0 ? NO_EXPERT : is ? index.low : BAD_EXPERT;
}

/* By one thread: how many, and the first of them, for the host, which may be about to fetch what
 * an earlier prepare had found. */
__device__ inline void tell_bad_indices(const EpPrepareArgs &a, unsigned long long count,
                                        unsigned long long entry) {
    volatile EpCudaNotes *notes = a.notes;
    if (!notes->bad_count) {
        notes->bad_index = load_integer(a.topk_idx, a.idx_is_int64, (int64_t)entry);
        notes->bad_entry = entry, notes->top_k = a.top_k;
        __threadfence_system();
    }
    atomicAdd_system(&a.notes->bad_count, count);
}

/* ---- to the host --------------------------------------------------------------------------- */

/* The step that is being made: for who publishes it, before publish_step. */
__device__ __forceinline__ int64_t step_under_way(const EpPrepareArgs &a) {
    return *(volatile int64_t *)&a.plan.header->step + 1;
}

__device__ __forceinline__ void tell_host(const EpPrepareArgs &a, int64_t step, int word,
                                          int64_t value) {
    ((volatile uint64_t *)a.info)[word] = (uint64_t)step << 32 | (uint32_t)value;
}

/* Rows to other ranks, from them, and those that stay. */
__device__ inline void publish_row_counts(const EpPrepareArgs &a, int64_t step, int sent,
                                          int received, int local) {
    tell_host(a, step, EP_INFO_SENT, sent);
    tell_host(a, step, EP_INFO_RECEIVED, received);
    tell_host(a, step, EP_INFO_LOCAL, local);
    EpPlanHeader *header = a.plan.header;
    header->rows_sent = sent, header->rows_received = received, header->rows_kept = local;
}

/* ---- slabs --------------------------------------------------------------------------------- */

__device__ inline void publish_expert(const EpPrepareArgs &a, int64_t step, int local, int count,
                                      int64_t offset, int64_t padded) {
    int experts = a.shape.num_local;
    a.plan.expert_counts[local] = count;
    a.plan.expert_padded[local] = (int)padded;
    a.plan.expert_offsets[local] = (int)offset;
    store_integer(a.counts, local, count);
    store_integer(a.padded, local, padded);
    store_integer(a.offsets, local, offset);
    tell_host(a, step, EP_INFO_EXPERTS + local, count);
    tell_host(a, step, EP_INFO_EXPERTS + experts + local, padded);
    tell_host(a, step, EP_INFO_EXPERTS + 2 * experts + local, offset);
}

__device__ __forceinline__ int64_t slot_limit(const EpPrepareArgs &a, int local) {
    const EpPlanShape &s = a.shape;
    if (s.layout == EP_LAYOUT_BATCHED) return (local + 1) * s.rows_per_expert;
    return s.capacity ? s.capacity : INT32_MAX;
}

__device__ __forceinline__ int warp_sum(int value) {
    return __reduce_add_sync(~0u, value);
}

__device__ inline void publish_offset_end(const EpPrepareArgs &a, int64_t step, int64_t offset) {
    a.plan.expert_offsets[a.shape.num_local] = (int)offset;
    store_integer(a.offsets, a.shape.num_local, offset);
    tell_host(a, step, EP_INFO_EXPERTS + 3 * a.shape.num_local, offset);
}

/* Under EP_OVERFLOW_ERROR the group's status tells of lost slots. */
__device__ inline void note_overflow(const EpPrepareArgs &a, int64_t needed, int64_t dropped) {
    a.notes->capacity =
        a.shape.layout == EP_LAYOUT_BATCHED ? a.shape.rows_per_expert : a.shape.capacity;
    a.notes->needed = needed;
    __threadfence_system();
    atomicAdd_system(&a.notes->lost, (unsigned long long)dropped);
}

__device__ inline void publish_totals(const EpPrepareArgs &a, int64_t step, int64_t rows,
                                      int64_t needed, int64_t dropped) {
    volatile EpPlanHeader *h = a.plan.header;
    h->recv_rows = rows, h->needed_rows = needed, h->dropped_slots = dropped;
    tell_host(a, step, EP_INFO_ROWS, rows);
    tell_host(a, step, EP_INFO_NEEDED, needed);
    tell_host(a, step, EP_INFO_DROPPED, dropped);
    store_integer(a.totals, 0, rows);
    store_integer(a.totals, 1, needed);
    store_integer(a.totals, 2, dropped);
    if (dropped && a.shape.overflow == EP_OVERFLOW_ERROR) note_overflow(a, needed, dropped);
}

/* Rows of a slab, padding included: the alignment is a power of two. */
__device__ __forceinline__ int slab_rows(const EpPlanShape &s, int count) {
    return (count + s.alignment - 1) & -s.alignment;
}

/* The slab of an expert: entries that want to go there, rows that they take, where it begins. */
typedef struct Slab {
    int count, rows;
    int64_t offset;
} Slab;

/* Of a rank's expert number at + lane, for a warp that walks its `experts` in order; total[experts]
 * are their entries, `start` is where the next 32 begin. */
__device__ __forceinline__ Slab lay_slab(const EpPrepareArgs &a, const int32_t *total, int experts,
                                         int at, int64_t *start) {
    const EpPlanShape &s = a.shape;
    int e = at + (int)threadIdx.x % 32, count = e < experts ? total[e] : 0;
    int rows = slab_rows(s, count);
    int through = ep_warp_prefix(rows);
    int64_t begin = *start + through - rows;
    *start += __shfl_sync(~0u, through, 31);
    return Slab{count, rows, s.layout == EP_LAYOUT_BATCHED ? e * s.rows_per_expert : begin};
}

/* Slabs of this rank, for everyone to see. By a warp. */
__device__ inline void publish_slabs(const EpPrepareArgs &a, int64_t step, const int32_t *total) {
    int local = a.shape.num_local, lane = threadIdx.x % 32;
    int batched = a.shape.layout == EP_LAYOUT_BATCHED, most = 0;
    int64_t start = 0, dropped = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane;
        Slab slab = lay_slab(a, total, local, at, &start);
        int64_t limit = slot_limit(a, e), begin = min(slab.offset, limit);
        int64_t kept = max((int64_t)0, min((int64_t)slab.count, limit - slab.offset));
        if (e < local)
            publish_expert(a, step, e, (int)kept, begin,
                           min(slab.offset + slab.rows, limit) - begin);
        most = max(most, slab.rows);
        dropped += warp_sum((int)(e < local ? slab.count - kept : 0));
    }
    most = __reduce_max_sync(~0u, most);
    int64_t needed = batched ? most : start;
    int64_t rows = batched ? local * a.shape.rows_per_expert : min(start, slot_limit(a, 0));
    if (lane) return;
    publish_totals(a, step, rows, needed, dropped);
    publish_offset_end(a, step, rows);
}

/* Entries for each expert of flat rows: total[L], or NULL: those of the plan; and offsets as a
 * permutation by expert would have. By a warp. */
__device__ inline void publish_flat_experts(const EpPrepareArgs &a, int64_t step,
                                            const int32_t *total) {
    int local = a.shape.num_local, lane = threadIdx.x, offset = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane, count = 0;
        if (e < local) count = total ? total[e] : *(volatile int32_t *)&a.plan.expert_counts[e];
        int through = ep_warp_prefix(count);
        if (e < local) publish_expert(a, step, e, count, offset + through - count, count);
        offset += __shfl_sync(~0u, through, 31);
    }
    if (lane == 0) publish_offset_end(a, step, offset);
}

/* ---- sources ------------------------------------------------------------------------------- */

__device__ __forceinline__ int64_t source_count_at(const EpPrepareArgs &a, int local, int source) {
    return (int64_t)local * a.group.size + source;
}

/* An expert's slots are its sources' in ascending order, and what is kept of them comes first. By
 * the threads of a block, once they see how many of each expert are kept; count_of(expert, source)
 * entries have come. */
template <typename Count> __device__ void publish_sources(const EpPrepareArgs &a, Count count_of) {
    for (int e = threadIdx.x; a.source_counts.data && e < a.shape.num_local; e += (int)blockDim.x) {
        int left = *(volatile int32_t *)&a.plan.expert_counts[e];
        for (int s = 0; s < a.group.size; s++) {
            int count = min(left, (int)count_of(e, s));
            store_integer(a.source_counts, source_count_at(a, e, s), count);
            left -= count;
        }
    }
}

/* Where flat rows are lost, entries are counted one by one. */
__device__ inline void clear_sources(const EpPrepareArgs &a) {
    int counts = a.shape.num_local * a.group.size;
    for (int i = threadIdx.x; a.source_counts.data && i < counts; i += (int)blockDim.x)
        store_integer(a.source_counts, i, 0);
}

__device__ __forceinline__ void count_source(const EpPrepareArgs &a, int local, int source) {
    const EpCudaVector &v = a.source_counts;
    int64_t at = source_count_at(a, local, source);
    if (v.data && v.is_int64)
        atomicAdd((unsigned long long *)v.data + at, 1ull);
    else if (v.data)
        atomicAdd((int32_t *)v.data + at, 1);
}

/* ---- end ----------------------------------------------------------------------------------- */

/* The plan is complete. By one thread, behind all that has asked for the step under way. */
__device__ inline void publish_step(const EpPrepareArgs &a, int64_t step, int tokens) {
    volatile EpPlanHeader *h = a.plan.header;
    h->num_tokens = tokens;
    h->num_rows = a.num_rows;
    h->top_k = a.top_k;
    h->exact_rows = a.num_tokens.data == NULL;
    h->step = step;
    h->prepared = 1;
    tell_host(a, step, EP_INFO_TOKENS, tokens);
}

#endif
