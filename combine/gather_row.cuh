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

#define WORKER_WARPS 8
#define WORKERS (WORKER_WARPS * 32)

/* ---- sums ---------------------------------------------------------------------------------- */

template <typename T> struct Vector {
    static constexpr int SIZE = 16 / sizeof(T);
    float at[SIZE];
};

template <typename T> __device__ __forceinline__ void clear(Vector<T> *v) {
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        v->at[i] = 0;
}

template <typename T>
__device__ __forceinline__ void add_term(Vector<T> *part, const uint4 &x, float w) {
    const T *from = (const T *)&x;
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        part->at[i] = fmaf(w, ep_float(from[i]), part->at[i]);
}

template <typename T>
__device__ __forceinline__ void add_part(Vector<T> *total, const Vector<T> &part) {
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        total->at[i] += part.at[i];
}

/* 16 bytes of a row, summed over the terms of a job and rounded. A term that begins a run begins a
 * sum of its own, which is added to the total when the run is over. */
template <typename T>
__device__ __forceinline__ uint4 sum_vector(const Pipe &p, uint32_t n, int terms, uint32_t begins,
                                            int v) {
    int cell = n % JOBS * p.shape.width;
    Vector<T> total, part;
    uint4 out;
    clear(&total), clear(&part);
    for (int i = 0; i < terms; i++) {
        uint4 x = ((const uint4 *)pipe_stage(p, n, i))[v];
        if (begins >> i & 1) {
            add_part(&total, part);
            clear(&part);
        }
        add_term<T>(&part, x, p.weight[cell + i]);
    }
    add_part(&total, part);
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        ((T *)&out)[i] = ep_round<T>(total.at[i]);
    return out;
}

/* The workers: the sum of each job takes the place of its first term. */
template <typename T> __device__ void sum_rows(Pipe *p, int thread) {
    for (uint32_t n = 0;; n++) {
        int j = n % JOBS;
        pipe_wait(p->posted, n);
        if (p->loads[j] == PIPE_END) return;
        pipe_wait(p->full, n);
        uint4 *out = (uint4 *)pipe_stage(*p, n, 0);
        int vectors = p->bytes[j] / 16, terms = p->item[j];
        uint32_t begins = p->begins[j];
#pragma unroll 2
        for (int v = thread; v < vectors; v += WORKERS)
            out[v] = sum_vector<T>(*p, n, terms, begins, v);
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
