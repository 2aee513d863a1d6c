/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_GATHER_SUM_CUH
#define EP_COMBINE_CUDA_GATHER_SUM_CUH

/**
 * What sending and receiving blocks of gather.cu share: sums of rows by the compute warps, and the
 * values that travel beside them.
 */

#include "combine/cuda/gather.h"
#include "handles/cuda/scheduler.cuh"
#include "runtime/cuda/packed.h"
#include "runtime/cuda/rows.cuh"

/* Which sums a kernel can add up. Each form is a kernel of its own, since code that does not run is
 * not free: the compiler then orders the rest worse, and blocks wait longer for instructions. */
enum Form {
    ONE_NODE,
    NODES, /* of this node for another one; and with the sums of other nodes */
    PACKED /* either, with sums that travel packed: gather_packed.cuh */
};

/* ---- sums ---------------------------------------------------------------------------------- */

/* Load VECTORS vectors of a stage; each has an element for each compute thread. */
template <int VECTORS>
__device__ __forceinline__ void load_vectors(uint4 x[VECTORS], uint32_t stage, int at) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        x[v] = ep_load_shared(stage + at + v * COMPUTE_THREADS * 16);
}

/* The progress of sum_vectors: the next term's stage, weight and vectors. */
template <int VECTORS> struct NextTerm {
    uint32_t stage;
    float weight;
    uint4 x[VECTORS];
};

/* Add the terms from `begin` to before `end`. Each is loaded while the one before is added. */
template <typename T, int VECTORS>
__device__ __forceinline__ void add_terms(EpVector<T> sum[VECTORS], NextTerm<VECTORS> *next,
                                          int begin, int end, const Stages &s, const WorkItem &item,
                                          uint32_t weights, int at) {
    int i = begin;
    if (begin >= end) return;
#pragma unroll 1
    do {
        EpVector<T> term[VECTORS];
        float weight = next->weight;
        for (int v = 0; v < VECTORS; v++)
            term[v] = ep_unpack<T>(next->x[v]);
        if (++i < item.terms) {
            next->stage = stage_of(s, next->stage, 1);
            next->weight = ep_load_shared_float(weights + i * (int)sizeof(float));
            load_vectors<VECTORS>(next->x, next->stage, at);
        }
        for (int v = 0; v < VECTORS; v++)
            ep_add_weighted(&sum[v], weight, term[v]);
    } while (i < end);
}

/* Compute VECTORS vectors of a sum, in place of its last term. The terms of the run are weighted
 * and summed on their own, rounded if `rounds`, then added to the total; every other term has
 * weight 1. */
template <typename T, int VECTORS>
__device__ __forceinline__ void sum_vectors(const Stages &s, const WorkItem &item, uint32_t first,
                                            uint32_t weights, int rounds, int at) {
    EpVector<T> total[VECTORS] = {};
    NextTerm<VECTORS> next = {first, ep_load_shared_float(weights), {}};
    load_vectors<VECTORS>(next.x, first, at);
    add_terms<T, VECTORS>(total, &next, 0, item.run, s, item, weights, at);
    if (item.run < item.run_end) {
        EpVector<T> run[VECTORS] = {};
        add_terms<T, VECTORS>(run, &next, item.run, item.run_end, s, item, weights, at);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            ep_add(&total[v], rounds ? ep_unpack<T>(ep_pack(run[v])) : run[v]);
    }
    add_terms<T, VECTORS>(total, &next, item.run_end, item.terms, s, item, weights, at);
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        ep_store_shared(next.stage + at + v * COMPUTE_THREADS * 16, ep_pack(total[v]));
}

#define VECTORS_AT_ONCE 2

/* Sum the terms of all work items; see sum_vectors. By the compute warps. */
template <typename T> __device__ void sum_rows(Pipeline *p, int rounds, int thread) {
    constexpr int STEP = COMPUTE_THREADS * 16, STEPS = VECTORS_AT_ONCE * STEP;
    Stages s = pipeline_stages(p);
    uint32_t weights = ep_smem(p->weight.begin()), width = (uint32_t)p->shape.width;
    for (uint32_t n = 0;; n++) {
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[n % PIPELINE_ENTRIES];
        if (item.loads == PIPELINE_END) return;
        uint32_t first = p->first[n % PIPELINE_ENTRIES];
        uint32_t weight = weights + n % PIPELINE_ENTRIES * width * (uint32_t)sizeof(float);
        int at = thread * 16;
#pragma unroll 1
        for (; at + STEPS - STEP < item.bytes; at += STEPS)
            sum_vectors<T, VECTORS_AT_ONCE>(s, item, first, weight, rounds, at);
#pragma unroll 1
        for (; at < item.bytes; at += STEP)
            sum_vectors<T, 1>(s, item, first, weight, rounds, at);
        pipeline_computed(p, n);
    }
}

__device__ __forceinline__ void sum(const EpGatherArgs &a, Pipeline *p, int rounds, int thread) {
    if (a.t.type == EP_TYPE_BF16)
        sum_rows<__nv_bfloat16>(p, rounds, thread);
    else if (a.t.type == EP_TYPE_FP16)
        sum_rows<__half>(p, rounds, thread);
    else
        sum_rows<float>(p, rounds, thread);
}

/* ---- posting ------------------------------------------------------------------------------- */

/* What a lane adds to its team's work item. */
typedef struct Term {
    const char *from; /* a term, NULL: none */
    int at;           /* position of the term */
    float weight;
    int peer, row;    /* rank to signal, and the record to signal it about; peer -1: none */
    int run, run_end; /* of the item's terms, as in WorkItem; the same in all lanes of the team */
} Term;

/* Returns the 16-byte units of a packed piece. */
__device__ __forceinline__ int16_t packed_units(const EpGatherArgs &a, int32_t bytes) {
    return (int16_t)(ep_packed_bytes(bytes >> (a.t.type == EP_TYPE_FP32 ? 2 : 1)) / 16);
}

/* Post the work items of a team's sum, one for each piece. The sum goes `to`; `index` is its token,
 * or its row of `source`. PACKED: sums of other ranks and nodes, and for them, are packed. */
template <Form FORM>
__device__ __forceinline__ void post_sum(const EpGatherArgs &a, Pipeline *p, const Team &t,
                                         uint32_t number, const Term &term, char *to, int index,
                                         int source, int valid) {
    int terms, signals, pieces = a.pipeline.pieces;
    team_rank(t, term.from != NULL, &terms);
    int signal = team_rank(t, term.peer >= 0, &signals), is_last = team_is_last(t, valid);
    int is_packed = FORM == PACKED && (term.at < term.run || term.at >= term.run_end);
    int packs = FORM == PACKED && (source != a.group.rank || a.rounds);
    for (int piece = 0; piece < pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % PIPELINE_ENTRIES, cell = j * a.pipeline.width;
        int64_t offset = (int64_t)piece * a.pipeline.stage_bytes;
        int64_t packed_offset = (int64_t)piece * a.packed_stride;
        int32_t bytes = piece_bytes(a.pipeline, a.t.row_bytes, piece);
        if (valid) pipeline_await_entry(p, n);
        if (valid && term.from)
            p->from[cell + term.at] = term.from + (is_packed ? packed_offset : offset),
                           p->weight[cell + term.at] = term.weight;
        if (valid && term.peer >= 0)
            p->peer[cell + signal] = term.peer, p->row[cell + signal] = term.row;
        if (valid && t.k == 0) {
            if (!terms) p->from[cell] = NULL; /* an empty sum needs a stage, too */
            p->to[cell] = to + (packs ? packed_offset : offset);
            p->item[j] = WorkItem{(int16_t)max(1, terms),
                                  (int16_t)terms,
                                  1,
                                  (int16_t)terms,
                                  bytes,
                                  (int8_t)term.run,
                                  (int8_t)term.run_end,
                                  FORM == PACKED ? packed_units(a, bytes) : (int16_t)0};
            p->signals[j] = pipeline_signals(signals, piece, pieces, is_last);
            p->piece[j] = piece, p->index[j] = index, p->source[j] = source;
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[ITEM_POSTED][j]);
    }
}

/* ---- values -------------------------------------------------------------------------------- */

/* Returns the value for entry k of a row with slots here; 0 if the entry's slot is elsewhere or
 * lost. */
__device__ __forceinline__ float value_of(const EpGatherArgs &a, int source, int row, int k) {
    int has_rows = a.shape.has_rows;
    int64_t slot = ep_slot(a.plan, a.group, a.top_k, source, row, has_rows ? 0 : k);
    if (!has_rows) return slot >= 0 ? a.t.slot_values[slot] : 0;
    int expert = ep_flat_expert(a.plan, a.group, a.top_k, source, row, k);
    return expert >= 0 && slot >= 0 ? a.t.slot_values[slot * a.top_k + k] : 0;
}

#endif
