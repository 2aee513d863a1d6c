/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_GATHER_ROW_CUH
#define EP_COMBINE_GATHER_ROW_CUH

/**
 * What summing and reducing blocks of combine_nvlink.cu share: sums of rows, by the workers, and
 * the values that travel beside them.
 */

#include "handles/plan_cuda.h"
#include "runtime/pipe.cuh"
#include "runtime/rows.cuh"

#define WORKER_WARPS 16
#define WORKERS (WORKER_WARPS * 32)

/* ---- sums ---------------------------------------------------------------------------------- */

/* A job as its workers see it. */
typedef struct Terms {
    const char *stage; /* of all jobs */
    int first, stages, stage_bytes;
    int count;
    uint32_t begins; /* terms that begin a run: a sum of its own, added to the total in the end */
    const float *weight;
} Terms;

#define TERMS_AT_ONCE 4

template <typename T>
__device__ __forceinline__ void add_term(EpVector<T> *part, const uint4 &x, float w) {
    EpVector<T> term = ep_unpack<T>(x);
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        part->at[i] = fmaf(w, term.at[i], part->at[i]);
}

/* The run is over: add it to the total, and begin the next. */
template <typename T>
__device__ __forceinline__ void end_run(EpVector<T> *total, EpVector<T> *part) {
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        total->at[i] += part->at[i], part->at[i] = 0;
}

/* Vector v of a row, summed over the terms and rounded. */
template <typename T> __device__ __forceinline__ uint4 sum_vector(const Terms &t, int v) {
    EpVector<T> total, part;
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        total.at[i] = part.at[i] = 0;
    for (int base = 0; base < t.count; base += TERMS_AT_ONCE) {
        uint4 x[TERMS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            int at = t.first + base + i;
            at -= at >= t.stages ? t.stages : 0;
            if (base + i < t.count) x[i] = ((const uint4 *)(t.stage + at * t.stage_bytes))[v];
        }
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            if (base + i >= t.count) break;
            if (t.begins >> (base + i) & 1) end_run(&total, &part);
            add_term<T>(&part, x[i], t.weight[base + i]);
        }
    }
    end_run(&total, &part);
    return ep_pack(total);
}

/* The workers: the sum of each job takes the place of its first term. */
template <typename T> __device__ void sum_rows(Pipe *p, int thread) {
    Terms t = {p->stage, 0, p->shape.stages, p->shape.stage_bytes, 0, 0, NULL};
    for (uint32_t n = 0;; n++) {
        int j = n % JOBS;
        pipe_wait(p->posted, n);
        if (p->loads[j] == PIPE_END) return;
        t.count = p->item[j], t.begins = p->begins[j], t.weight = &p->weight[j * p->shape.width];
        int vectors = p->bytes[j] / 16;
        pipe_wait(p->full, n);
        t.first = p->first_stage[j];
        uint4 *out = (uint4 *)pipe_stage(*p, n, 0);
        for (int v = thread; v < vectors; v += WORKERS)
            out[v] = sum_vector<T>(t, v);
        ep_fence_proxy_async();
        __syncwarp();
        if (thread % 32 == 0) ep_mbarrier_arrive(&p->worked[j]);
    }
}

__device__ __forceinline__ void sum(const EpGatherArgs &a, Pipe *p, int thread) {
    if (a.type == EP_TYPE_BF16)
        sum_rows<__nv_bfloat16>(p, thread);
    else if (a.type == EP_TYPE_FP16)
        sum_rows<__half>(p, thread);
    else
        sum_rows<float>(p, thread);
}

/* ---- posting ------------------------------------------------------------------------------- */

/* What a lane of a team brings into its team's job. */
typedef struct Part {
    const char *from; /* a term, NULL: none */
    int at, begins;   /* which term it is; whether it begins a run */
    float weight;
    int peer, row; /* whom to tell about which record; peer -1: nobody */
} Part;

/* The jobs of a team's sum. `to`: where it goes. */
__device__ __forceinline__ void post_sum(const EpGatherArgs &a, Pipe *p, const Team &t,
                                         uint32_t number, const Part &part, char *to, int token,
                                         int source, int valid) {
    int terms, notes, pieces = p->shape.pieces;
    team_rank(t, part.from != NULL, &terms);
    int note = team_rank(t, part.peer >= 0, &notes);
    uint32_t begins = part.from && part.begins ? 1u << part.at : 0;
    for (int d = t.width / 2; d > 0; d /= 2)
        begins |= __shfl_xor_sync(~0u, begins, d);
    for (int piece = 0; piece < pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % JOBS, cell = j * p->shape.width;
        int64_t offset = (int64_t)piece * p->shape.stage_bytes;
        if (valid) pipe_await_open(p, n);
        if (valid && part.from)
            p->from[cell + part.at] = part.from + offset, p->weight[cell + part.at] = part.weight;
        if (valid && part.peer >= 0)
            p->peer[cell + note] = part.peer, p->row[cell + note] = part.row;
        if (valid && t.k == 0) {
            if (!terms) p->from[cell] = NULL; /* a sum of nothing needs a stage, too */
            p->to[cell] = to + offset;
            p->loads[j] = max(1, terms), p->stores[j] = 1, p->item[j] = terms;
            p->begins[j] = begins;
            p->notes[j] = piece == pieces - 1 ? notes : 0;
            p->bytes[j] = (int32_t)min((int64_t)p->shape.stage_bytes, a.row_bytes - offset);
            p->piece[j] = piece, p->slot[cell] = token, p->source[j] = source;
        }
        __syncwarp();
        if (valid && t.k == 0) ep_mbarrier_arrive(&p->posted[j]);
    }
}

/* ---- values -------------------------------------------------------------------------------- */

/* The value carried for entry k of a row that fills slots here: 0 where it is elsewhere or lost. */
__device__ __forceinline__ float value_of(const EpGatherArgs &a, int source, int ring, int row,
                                          int k) {
    int entry = ep_route(a.plan, a.group, a.top_k, source, ring, row, k);
    if (a.shape.layout != EP_LAYOUT_FLAT) return entry >= 0 ? a.slot_values[entry] : 0;
    int64_t slot = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, 0);
    return entry >= 0 && slot >= 0 ? a.slot_values[slot * a.top_k + k] : 0;
}

#endif
