/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_SCATTER_RECEIVE_CUH
#define EP_DISPATCH_CUDA_SCATTER_RECEIVE_CUH

/**
 * A receiving block: rows of other ranks, copied or multiplied into their slots.
 */

#include "dispatch/cuda/scatter_metadata.cuh"
#include "runtime/cuda/rows.cuh"

/* Returns where a row lies that is copied or multiplied: in the ring, among this rank's tokens or,
 * for a zero-copy receive, in the slot where its sender has stored it. NULL: the plan is damaged
 * and names no token of this rank; nothing is loaded. */
__device__ __forceinline__ const char *find_row(const EpScatterArgs &a, int source, int row,
                                                int leader_slot) {
    const EpCudaGroup &g = a.group;
    if (source == g.rank) {
        int64_t token = a.plan.own_token[row];
        return (uint64_t)token < (uint64_t)ep_num_tokens(a.plan, g)
                   ? a.t.rows + token * a.source.row_stride
                   : NULL;
    }
    if (a.zero_copy) return a.t.out_rows + leader_slot * a.t.row_bytes;
    return ep_ring(g, g.rank, source, row);
}

/* Write a work item. By one lane. */
__device__ __forceinline__ void write_item(const EpScatterArgs &a, Pipeline *p, uint32_t n,
                                           int source, int row, int piece, int loads, int loaded,
                                           int stores) {
    int j = n % PIPELINE_ENTRIES, cell = j * a.receive.width;
    p->item[j] = WorkItem{(int16_t)loads,
                          (int16_t)loaded,
                          (int16_t)stores,
                          (int16_t)stores,
                          piece_bytes(a.receive, a.t.row_bytes, piece),
                          0,
                          0,
                          0};
    p->signals[j] = source != a.group.rank && piece == a.receive.pieces - 1;
    p->source[j] = source, p->index[j] = row, p->piece[j] = piece;
    p->peer[cell] = source, p->row[cell] = row;
}

/* Post the work items of a batch's rows, one for each piece. Where rows are copied, one load feeds
 * a store to each slot except the one where the sender has stored the row. Where they are
 * multiplied, each slot has a stage of its own, which holds the slot's row of slot_rows if dot
 * products are taken. */
template <Form FORM>
__device__ __forceinline__ void post_rows(const EpScatterArgs &a, Pipeline *p, const Team &t,
                                          const RowBatch &r, float weight) {
    int valid = r.valid, slot = r.slot, slots, at = team_rank(t, slot >= 0, &slots);
    constexpr int multiplies = FORM == MULTIPLIED;
    int is_stored = !multiplies && a.zero_copy;
    int stores = is_stored && slots ? slots - 1 : slots;
    int loads = multiplies ? 1 + slots : stores > 0;
    int leader_slot =
        __shfl_sync(~0u, slot, max(0, __ffs(__ballot_sync(~0u, slot >= 0) & t.mask) - 1));
    const char *from = valid && loads ? find_row(a, r.source, r.row, leader_slot) : NULL;
    int loaded = (from != NULL) + (multiplies && a.t.takes_dots ? slots : 0);
    uint32_t number = pipeline_take(p, r.count * a.receive.pieces) + t.index * a.receive.pieces;
    for (int piece = 0; piece < a.receive.pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % PIPELINE_ENTRIES, cell = j * a.receive.width, index = at - is_stored;
        int64_t offset = (int64_t)piece * a.receive.stage_bytes;
        if (valid) pipeline_await_entry(p, n);
        if (valid && slot >= 0 && index >= 0)
            p->to[cell + index] = a.t.out_rows + slot * a.t.row_bytes + offset;
        if (valid && slot >= 0 && multiplies) {
            p->from[cell + 1 + at] =
                a.t.takes_dots ? a.t.slot_rows + slot * a.t.row_bytes + offset : NULL;
            p->slot[cell + at] = slot, p->weight[cell + at] = weight;
        }
        if (valid && t.k == 0) {
            p->from[cell] = from ? from + offset : NULL;
            write_item(a, p, n, r.source, r.row, piece, loads, loaded, stores);
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[ITEM_POSTED][j]);
    }
}

/* A scheduler warp of a receiving block that copies. Sending blocks store rows that stay here. */
__device__ void schedule_copies(const EpScatterArgs &a, Pipeline *p, ChunkRows *rows,
                                const Start &start, uint32_t epoch, int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.receive);
    auto look = [](const RowBatch &) { return (uint64_t)0; };
    auto await = [&](const RowBatch &r, uint64_t) {
        int waits = r.valid && t.k == 0;
        int alive = !waits || ep_await_record(g, epoch, r.source, r.row);
        return __all_sync(~0u, alive);
    };
    auto post = [&](const RowBatch &r, float weight) { post_rows<COPIED>(a, p, t, r, weight); };
    walk_rows(a, rows, t, start, RECEIVERS, blocks, 0, look, await, post);
    pipeline_end(p, t);
}

/*
 * A scheduler warp of a receiving block that multiplies. Rows that stay here are multiplied while
 * those of other ranks are waited for, and after these. So blocks have work before the first row
 * arrives, which takes some 20 us.
 */
__device__ void schedule_products(const EpScatterArgs &a, Pipeline *p, ChunkRows *rows,
                                  const Start &start, uint32_t epoch, int blocks) {
    Team t = make_team(a.top_k, a.receive);
    OwnWalk own = open_own(a, t, blocks);
    int alive = 1;
    auto post = [&](const RowBatch &r, float weight) { post_rows<MULTIPLIED>(a, p, t, r, weight); };
    auto look = [](const RowBatch &) { return (uint64_t)0; };
    auto await = [&](const RowBatch &r, uint64_t) {
        int here = !r.valid || t.k != 0;
        do
            here = here || ep_has_record(a.group, epoch, r.source, r.row);
        while (!__all_sync(~0u, here) && post_own(a, t, &own, post));
        alive = __all_sync(~0u, here || ep_await_record(a.group, epoch, r.source, r.row));
        ep_fence_proxy_global();
        return alive;
    };
    walk_rows(a, rows, t, start, RECEIVERS, blocks, 0, look, await, post);
    while (alive && post_own(a, t, &own, post)) {
    }
    pipeline_end(p, t);
}

template <Form FORM>
__device__ __forceinline__ void schedule_rows(const EpScatterArgs &a, Pipeline *p, ChunkRows *rows,
                                              const Start &start, uint32_t epoch, int blocks) {
    if (FORM == MULTIPLIED)
        schedule_products(a, p, rows, start, epoch, blocks);
    else
        schedule_copies(a, p, rows, start, epoch, blocks);
}

/* ---- weights and scales -------------------------------------------------------------------- */

/* Copy a record's weights and scales to its row's slots. By a warp. */
__device__ __forceinline__ void receive_metadata(const EpScatterArgs &a, int source, int row) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32;
    const char *record = ep_ring(g, g.rank, source, row);
    MetadataEntry metadata = {-1, -1, 0, NULL};
    if (lane < a.top_k && a.t.carries_weights)
        metadata.weight = __ldcg((const float *)(record + a.record.weights) + lane);
    if (lane < a.top_k) metadata.slot = ep_slot(a.plan, g, a.top_k, source, row, lane);
    if (lane < a.top_k && a.shape.has_rows)
        metadata.expert = ep_flat_expert(a.plan, g, a.top_k, source, row, lane);
    spread_metadata(a, metadata, record + a.record.scales);
}

__device__ void receive_all_metadata(const EpScatterArgs &a, Pipeline *p, int warp) {
    pipeline_metadata(p, warp, ALL_METADATA_WARPS,
                      [&](int j, uint32_t) { receive_metadata(a, p->source[j], p->index[j]); });
}

/* ---- multiplying --------------------------------------------------------------------------- */

/* Rows that are multiplied have no metadata, so a metadata warp multiplies, too. Where pieces are
 * small, each half of the warps takes every other pair of a row's slots. */
#define MULTIPLY_WARPS 16
#define FIRST_MULTIPLY_WARP (FIRST_COMPUTE_WARP + COMPUTE_WARPS - MULTIPLY_WARPS)
#define SLOTS_AT_ONCE 2
static_assert(FIRST_MULTIPLY_WARP >= FIRST_METADATA_WARP, "other warps have work");

/* The warps that multiply by a slot, among those that do so at the same time. */
typedef struct MultiplyGroup {
    int index, count; /* of this group; of all groups */
    int warps, thread;
} MultiplyGroup;

__device__ __forceinline__ MultiplyGroup make_group(const Stages &s, int thread) {
    int count = s.bytes <= MULTIPLY_WARPS / 2 * 32 * 16 ? 2 : 1, warps = MULTIPLY_WARPS / count;
    return MultiplyGroup{thread / (warps * 32), count, warps, thread % (warps * 32)};
}

/** Dot products of a row's slots, by warp of its group, over all pieces of the row. There are two
 *  sets, so that one can be read while the next row's is written. */
typedef struct Dots {
    float partial[2][EP_MAX_TOP_K][MULTIPLY_WARPS];
} Dots;

/* Multiply a row in shared memory by the weights of N slots from slot `base` on. Each product,
 * rounded, replaces its slot's stage; with dot products, these are summed over the row and what the
 * stage held. Each thread sums the products of its vectors in order, each warp those of its
 * threads, finish_dots those of the warps: always in the same order. By a group. */
template <typename T, int N>
__device__ __forceinline__ void multiply_few(const EpScatterArgs &a, const Stages &s,
                                             const WorkItem &item, uint32_t first,
                                             const float *weight, int base, const MultiplyGroup &g,
                                             float (*partial)[MULTIPLY_WARPS], int accumulates) {
    float dot[N] = {0};
    for (int at = g.thread * 16; at < item.bytes; at += g.warps * 32 * 16) {
        uint4 x = ep_load_shared(first + at), y[N];
        EpVector<T> row = ep_unpack<T>(x);
#pragma unroll
        for (int i = 0; i < N; i++)
            y[i] = a.t.takes_dots ? ep_load_shared(stage_of(s, first, 1 + base + i) + at) : x;
#pragma unroll
        for (int i = 0; i < N; i++) {
            EpVector<T> other = ep_unpack<T>(y[i]), product;
#pragma unroll
            for (int e = 0; e < EpVector<T>::SIZE; e++) {
                if (a.t.takes_dots) dot[i] = fmaf(row.at[e], other.at[e], dot[i]);
                product.at[e] = weight[base + i] * row.at[e];
            }
            ep_store_shared(stage_of(s, first, 1 + base + i) + at,
                            a.t.weighs ? ep_pack(product) : x);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        for (int d = 16; d > 0; d /= 2)
            dot[i] += __shfl_xor_sync(~0u, dot[i], d);
        float *sum = &partial[base + i][g.thread / 32];
        if (g.thread % 32 == 0) *sum = accumulates ? *sum + dot[i] : dot[i];
    }
}

/* Add up the warps' sums behind the last piece of a row, a thread for each slot. */
__device__ __forceinline__ void finish_dots(const EpScatterArgs &a, const Pipeline *p, uint32_t n,
                                            const float (*partial)[MULTIPLY_WARPS], int warps,
                                            int slots, int thread) {
    ep_barrier(1, MULTIPLY_WARPS * 32);
    if (thread >= slots) return;
    float dot = 0;
    for (int w = 0; w < warps; w++)
        dot += partial[thread][w];
    a.t.out_weights[p->slot[n % PIPELINE_ENTRIES * p->shape.width + thread]] = dot;
}

template <typename T>
__device__ void multiply_rows(const EpScatterArgs &a, Pipeline *p, Dots *dots, int thread) {
    int pieces = p->shape.pieces;
    Stages s = pipeline_stages(p);
    MultiplyGroup g = make_group(s, thread);
    for (uint32_t n = 0, row = 0;; n++) {
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[n % PIPELINE_ENTRIES];
        if (item.loads == PIPELINE_END) return;
        uint32_t first = p->first[n % PIPELINE_ENTRIES];
        const float *weight = &p->weight[n % PIPELINE_ENTRIES * p->shape.width];
        int piece = p->piece[n % PIPELINE_ENTRIES], base = g.index * SLOTS_AT_ONCE;
        float(*partial)[MULTIPLY_WARPS] = dots->partial[row % 2];
        for (; base + SLOTS_AT_ONCE <= item.terms; base += g.count * SLOTS_AT_ONCE)
            multiply_few<T, SLOTS_AT_ONCE>(a, s, item, first, weight, base, g, partial, piece);
        if (base < item.terms)
            multiply_few<T, 1>(a, s, item, first, weight, base, g, partial, piece);
        if (a.t.takes_dots && piece == pieces - 1)
            finish_dots(a, p, n, partial, g.warps, item.terms, thread);
        row += piece == pieces - 1;
        pipeline_computed(p, n);
    }
}

__device__ __forceinline__ void multiply(const EpScatterArgs &a, Pipeline *p, Dots *dots,
                                         int thread) {
    if (a.multiplied == EP_TYPE_BF16)
        multiply_rows<__nv_bfloat16>(a, p, dots, thread);
    else if (a.multiplied == EP_TYPE_FP16)
        multiply_rows<__half>(a, p, dots, thread);
    else
        multiply_rows<float>(a, p, dots, thread);
}

#endif
