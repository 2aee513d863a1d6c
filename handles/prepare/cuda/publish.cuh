/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_CUDA_PUBLISH_CUH
#define EP_HANDLES_PREPARE_CUDA_PUBLISH_CUH

/**
 * What routing kernels share: reading the caller's integers and indices, locating slabs, and
 * publishing a step's results to the caller and the host.
 */

#include "runtime/cuda/plan.cuh"

EP_VARIANT_BEGIN

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
#define BAD_EXPERT (-2) /* an index >= E */

/* An index as loaded. Any arithmetic on it would wait for the load, so that is left to
 * expert_of. */
typedef struct Index {
    int32_t low, high; /* high: set for int64 only */
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

/* PLACED, of kernels: the group has a placement. Then indices are of logical experts. */
template <int PLACED>
__device__ __forceinline__ int expert_of(const EpPrepareArgs &a, const Index &index) {
    int high = a.idx_is_int64 ? index.high : index.low >> 31;
    int experts = PLACED ? a.copies.num_logical : a.group.num_experts;
    int is_valid = high == 0 && (uint32_t)index.low < (uint32_t)experts;
    return high < 0 ? NO_EXPERT : is_valid ? index.low : BAD_EXPERT;
}

/* Returns the physical expert that a token's index names. */
template <int PLACED>
__device__ __forceinline__ int place_index(const EpPrepareArgs &a, const Index &index, int token) {
    int expert = expert_of<PLACED>(a, index);
    return PLACED && expert >= 0 ? ep_copy_of(&a.copies, expert, token) : expert;
}

/* Report bad indices to the host: their count, and the first one. The host may be reading the
 * report before, so this one goes beside it. The fence orders it before the number of reports. By
 * one thread; routings of a group follow each other, so there is one writer at a time. */
__device__ inline void report_bad_indices(const EpPrepareArgs &a, unsigned long long count,
                                          unsigned long long entry) {
    volatile EpCudaAsyncErrors *errors = a.errors;
    unsigned long long number = errors->bad_reports + 1;
    volatile EpCudaBadIndices *report = &errors->bad[number % 2];
    report->total = errors->bad[(number - 1) % 2].total + count;
    report->entry = entry, report->top_k = a.top_k;
    report->index = load_integer(a.topk_idx, a.idx_is_int64, (int64_t)entry);
    __threadfence_system();
    errors->bad_reports = number;
}

/* Report the bad indices that all blocks have found. By one thread of the last block. */
__device__ inline void report_all_bad_indices(const EpPrepareArgs &a) {
    volatile EpCudaState *state = a.group.state;
    unsigned long long count = state->bad_count, entry = ~state->bad_entry;
    if (!count) return;
    state->bad_count = state->bad_entry = 0;
    report_bad_indices(a, count, entry);
}

/* ---- results for the host ------------------------------------------------------------------ */

/* Returns the number of the step under way, among those of a handle's own plan; 0 for a named plan,
 * whose memory may hold anything, and whose numbers go to the caller alone. Call it before
 * publish_step. */
__device__ __forceinline__ int64_t step_under_way(const EpPrepareArgs &a) {
    return a.info ? *(volatile int64_t *)&a.plan.header->step + 1 : 0;
}

__device__ __forceinline__ void publish_word(const EpPrepareArgs &a, int64_t step, int word,
                                             int64_t value) {
    if (a.info) ((volatile uint64_t *)a.info)[word] = (uint64_t)step << 32 | (uint32_t)value;
}

/* Publish the rows sent to other ranks, received from them, and kept on this rank. */
__device__ inline void publish_row_counts(const EpPrepareArgs &a, int64_t step, int sent,
                                          int received, int local) {
    publish_word(a, step, EP_INFO_SENT, sent);
    publish_word(a, step, EP_INFO_RECEIVED, received);
    publish_word(a, step, EP_INFO_LOCAL, local);
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
    publish_word(a, step, EP_INFO_EXPERTS + local, count);
    publish_word(a, step, EP_INFO_EXPERTS + experts + local, padded);
    publish_word(a, step, EP_INFO_EXPERTS + 2 * experts + local, offset);
}

__device__ __forceinline__ int warp_sum(int value) {
    return __reduce_add_sync(~0u, value);
}

__device__ inline void publish_offset_end(const EpPrepareArgs &a, int64_t step, int64_t offset) {
    a.plan.expert_offsets[a.shape.num_local] = (int)offset;
    if (a.has_offset_end) store_integer(a.offsets, a.shape.num_local, offset);
    publish_word(a, step, EP_INFO_EXPERTS + 3 * a.shape.num_local, offset);
}

/* Add to the lost slots that the host finds, under EP_OVERFLOW_ERROR. The first fence orders the
 * need and the capacity, which share a word, before the count.
 *
 * Receive phases of different handles may run at the same time, so this GPU's memory holds the sum.
 * Each of them writes it to the host until it has written the latest sum: a kernel that overwrites
 * a later sum with its own finds the later one after the fence, and writes that. By one thread. */
__device__ inline void report_overflow(const EpPrepareArgs &a, int64_t needed, int64_t dropped) {
    volatile EpCudaAsyncErrors *errors = a.errors;
    /* In latency mode the shape has the block_rows of the tensors, and the plan has max_tokens. */
    int64_t capacity =
        ep_has_source_blocks(&a.shape) ? a.shape.max_tokens : ep_agreed_rows(&a.shape);
    unsigned long long *sum = &a.group.state->lost, written;
    errors->overflow = (unsigned long long)needed << 32 | (uint32_t)capacity;
    unsigned long long latest = atomicAdd(sum, (unsigned long long)dropped) + dropped;
    do {
        written = latest;
        __threadfence_system();
        errors->lost = written;
        __threadfence_system();
        latest = *(volatile unsigned long long *)sum;
    } while (latest != written);
}

__device__ inline void publish_totals(const EpPrepareArgs &a, int64_t step, int64_t rows,
                                      int64_t needed, int64_t dropped) {
    volatile EpPlanHeader *h = a.plan.header;
    h->recv_rows = rows, h->needed_rows = needed, h->dropped_slots = dropped;
    publish_word(a, step, EP_INFO_ROWS, rows);
    publish_word(a, step, EP_INFO_NEEDED, needed);
    publish_word(a, step, EP_INFO_DROPPED, dropped);
    store_integer(a.totals, 0, rows);
    store_integer(a.totals, 1, needed);
    store_integer(a.totals, 2, dropped);
    store_integer(a.recv_rows, 0, rows);
    store_integer(a.needed_rows, 0, needed);
    store_integer(a.dropped_slots, 0, dropped);
    if (dropped && a.shape.overflow == EP_OVERFLOW_ERROR) report_overflow(a, needed, dropped);
}

/* Count the slots that no message had room for (node_rows) among those that are dropped. By one
 * thread, after publish_totals. */
__device__ inline void publish_lost(const EpPrepareArgs &a, int64_t step, int64_t lost) {
    volatile EpPlanHeader *h = a.plan.header;
    int64_t dropped = h->dropped_slots + lost;
    if (!lost) return;
    h->dropped_slots = dropped;
    publish_word(a, step, EP_INFO_DROPPED, dropped);
    store_integer(a.totals, 2, dropped);
    store_integer(a.dropped_slots, 0, dropped);
    if (a.shape.overflow == EP_OVERFLOW_ERROR) report_overflow(a, h->needed_rows, lost);
    __threadfence_system();
}

/* Where an expert's slab begins; see ep_slab. */
typedef struct SlabStart {
    int count; /* entries routed to it */
    int64_t start;
} SlabStart;

/* Returns the slab of local expert at + lane, for a warp that walks a rank's `experts` in order.
 * total[experts] holds their entries. `start` is where the next 32 slabs begin, and moves past
 * them. */
__device__ __forceinline__ SlabStart lay_slab(const EpPrepareArgs &a, const int32_t *total,
                                              int experts, int at, int64_t *start) {
    int e = at + (int)threadIdx.x % 32, count = e < experts ? total[e] : 0;
    int rows = e < experts ? ep_slab_rows(&a.shape, count) : 0;
    int through = ep_warp_prefix(rows);
    int64_t begin = *start + through - rows;
    *start += __shfl_sync(~0u, through, 31);
    return SlabStart{count, begin};
}

/* Publish this rank's slabs. By a warp. */
__device__ inline void publish_slabs(const EpPrepareArgs &a, int64_t step, const int32_t *total) {
    const EpPlanShape &s = a.shape;
    int local = s.num_local, lane = threadIdx.x % 32, most = 0;
    int64_t start = 0, dropped = 0;
    for (int at = 0; at < local; at += 32) {
        int e = at + lane;
        SlabStart first = lay_slab(a, total, local, at, &start);
        EpSlab slab = ep_slab(&s, e, first.start, first.count);
        if (e < local) publish_expert(a, step, e, (int)slab.kept, slab.offset, slab.padded);
        most = max(most, ep_slab_rows(&s, first.count));
        dropped += warp_sum((int)(e < local ? first.count - slab.kept : 0));
    }
    most = __reduce_max_sync(~0u, most);
    int64_t needed = s.is_fixed ? most : start, rows = ep_recv_rows(&s, start);
    if (lane) return;
    publish_totals(a, step, rows, needed, dropped);
    publish_offset_end(a, step, rows);
}

/* Publish the entries of each expert in rows with one slot: total[L], or the
 * plan's counts where it is NULL; and the offsets that a permutation by expert would have. By a
 * warp. */
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
    return (int64_t)local * a.shape.num_ranks + source;
}

/* Publish the kept slots of each source, of all experts together: a warp for a source, a lane for
 * an expert, since a thread that walks all experts waits for each count. As publish_sources. */
template <typename Count>
__device__ void publish_source_rows(const EpPrepareArgs &a, Count count_of) {
    int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    for (int s = (int)threadIdx.x / 32; a.source_rows.data && s < a.shape.num_ranks; s += warps) {
        int rows = 0;
        for (int e = lane; e < a.shape.num_local; e += 32) {
            int left = *(volatile int32_t *)&a.plan.expert_counts[e];
            for (int before = 0; before < s; before++)
                left -= (int)count_of(e, before);
            rows += max(0, min(left, (int)count_of(e, s)));
        }
        rows = warp_sum(rows);
        if (lane == 0) store_integer(a.source_rows, s, rows);
    }
}

/* Publish how many kept slots each expert has from each source. An expert's slots are ordered by
 * source and the first ones are kept; count_of(expert, source) entries have arrived. By all threads
 * of a block, once expert_counts is visible to them. */
template <typename Count> __device__ void publish_sources(const EpPrepareArgs &a, Count count_of) {
    for (int e = threadIdx.x; a.source_counts.data && e < a.shape.num_local; e += (int)blockDim.x) {
        int left = *(volatile int32_t *)&a.plan.expert_counts[e];
        for (int s = 0; s < a.shape.num_ranks; s++) {
            int count = min(left, (int)count_of(e, s));
            store_integer(a.source_counts, source_count_at(a, e, s), count);
            left -= count;
        }
    }
    if (!a.shape.has_rows) publish_source_rows(a, count_of);
}

/* Publish the rows of each source, where rows have one slot: rows_of(source) from slot
 * begin_of(source) on. Slots from `kept` on are lost. By all threads of a block. */
template <typename Begin, typename Rows>
__device__ void publish_flat_source_rows(const EpPrepareArgs &a, int64_t kept, Begin begin_of,
                                         Rows rows_of) {
    for (int s = threadIdx.x; a.source_rows.data && s < a.shape.num_ranks; s += (int)blockDim.x) {
        int64_t left = max((int64_t)0, kept - (int64_t)begin_of(s));
        store_integer(a.source_rows, s, min(left, (int64_t)rows_of(s)));
    }
}

/* Clear the counts by source, for flat rows of which some are lost: their entries are counted one
 * by one. */
__device__ inline void clear_sources(const EpPrepareArgs &a) {
    int counts = a.shape.num_local * a.shape.num_ranks;
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

/* ---- all slabs, all flat rows -------------------------------------------------------------- */

/* Publish this rank's slabs, total[L] entries in them, and the slots of each source. By all threads
 * of a block. */
template <typename Count>
__device__ void publish_all_slabs(const EpPrepareArgs &a, int64_t step, const int32_t *total,
                                  Count count_of) {
    if (threadIdx.x < 32) publish_slabs(a, step, total);
    __syncthreads();
    publish_sources(a, count_of);
    __syncthreads();
}

/* Compute where each source's flat rows begin: by source, without gaps. Publish their number; where
 * each source has a block, that of all blocks. By a warp. */
template <typename Rows>
__device__ void lay_flat_rows(const EpPrepareArgs &a, int64_t step, Rows rows_of) {
    int lane = threadIdx.x, begin = 0, most = 0;
    for (int at = 0; at < a.shape.num_ranks; at += 32) {
        int rows = at + lane < a.shape.num_ranks ? rows_of(at + lane) : 0;
        int through = ep_warp_prefix(rows);
        most = max(most, rows);
        if (at + lane < a.shape.num_ranks) a.plan.flat_begin[at + lane] = begin + through - rows;
        begin += __shfl_sync(~0u, through, 31);
    }
    most = __reduce_max_sync(~0u, most);
    int64_t kept = min((int64_t)begin, ep_row_limit(&a.shape));
    if (lane == 0)
        publish_totals(a, step, ep_recv_rows(&a.shape, begin), a.shape.is_fixed ? most : begin,
                       begin - kept);
}

/* Count the entries of the rows that are kept, in the plan. By all threads of the block. */
template <typename Rows> __device__ void count_kept_entries(const EpPrepareArgs &a, Rows rows_of) {
    int k = a.top_k;
    int64_t kept = a.plan.header->recv_rows;
    for (int e = threadIdx.x; e < a.shape.num_local; e += (int)blockDim.x)
        a.plan.expert_counts[e] = 0;
    clear_sources(a);
    __syncthreads();
    for (int r = 0; r < a.shape.num_ranks; r++) {
        int64_t begin = a.plan.flat_begin[r];
        int64_t rows = min((int64_t)rows_of(r), kept - begin);
        const int32_t *routes = a.plan.routes + begin * k;
        for (int i = threadIdx.x; i < rows * k; i += (int)blockDim.x) {
            int local = __ldcg(routes + i);
            if ((uint32_t)local >= (uint32_t)a.shape.num_local) continue;
            atomicAdd(&a.plan.expert_counts[local], 1);
            count_source(a, local, r);
        }
    }
    __syncthreads();
}

/* Publish flat rows: rows_of(source), of count_of(expert, source) entries, total[L] of all sources.
 * By all threads of a block, once the plan's routes are complete and visible to them. */
template <typename Rows, typename Count>
__device__ void publish_flat(const EpPrepareArgs &a, int64_t step, const int32_t *total,
                             Rows rows_of, Count count_of) {
    if (threadIdx.x < 32) lay_flat_rows(a, step, rows_of);
    __syncthreads();
    int all_kept = *(volatile int64_t *)&a.plan.header->dropped_slots == 0;
    if (!all_kept) count_kept_entries(a, rows_of);
    if (threadIdx.x < 32) publish_flat_experts(a, step, all_kept ? total : NULL);
    __syncthreads();
    if (all_kept) publish_sources(a, count_of);
    publish_flat_source_rows(
        a, *(volatile int64_t *)&a.plan.header->recv_rows,
        [&](int source) { return a.plan.flat_begin[source]; }, rows_of);
    __syncthreads();
}

/* ---- end ----------------------------------------------------------------------------------- */

/* Mark the plan as complete. `generation`: the number of this operation. By one thread, after every
 * call of step_under_way. */
__device__ inline void publish_step(const EpPrepareArgs &a, int64_t step, int tokens,
                                    uint32_t generation) {
    const EpPlanMark &mark = a.plan.use.mark;
    volatile EpPlanHeader *h = a.plan.header;
    h->magic = mark.magic, h->group = mark.group, h->config = mark.config;
    h->generation = generation;
    *a.plan.tail = mark.tail;
    h->num_tokens = tokens;
    h->num_rows = a.num_rows;
    h->top_k = a.top_k;
    h->exact_rows = a.num_tokens.data == NULL;
    h->step = step;
    publish_word(a, step, EP_INFO_TOKENS, tokens);
}

EP_VARIANT_END

#endif
