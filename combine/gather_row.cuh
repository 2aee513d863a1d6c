/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_GATHER_ROW_CUH
#define EP_COMBINE_GATHER_ROW_CUH

/**
 * What summing and reducing blocks of combine_nvlink.cu share: sums of rows, by the workers, and
 * the values that travel beside them.
 */

#include "handles/planner.cuh"
#include "runtime/rows.cuh"

/* ---- sums ---------------------------------------------------------------------------------- */

#define TERMS_AT_ONCE 4

/* A run of terms is summed on its own; then it is added to the total. */
template <typename T> struct Sum {
    EpVector<T> total, run;

    __device__ __forceinline__ Sum() {
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i++)
            total.at[i] = run.at[i] = 0;
    }
    __device__ __forceinline__ void add(const uint4 &x, float w) {
        EpVector<T> term = ep_unpack<T>(x);
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i++)
            run.at[i] = fmaf(w, term.at[i], run.at[i]);
    }
    __device__ __forceinline__ void end_run() {
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i++)
            total.at[i] += run.at[i], run.at[i] = 0;
    }
};

/* Add terms base .. base + N - 1; the first term of all begins no run that would not be there. */
template <typename T, int N>
__device__ __forceinline__ void add_terms(Sum<T> *sum, const Stages &s, const PipeWork &work,
                                          const float *weight, int base, int at) {
    uint4 x[N > 0 ? N : 1];
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = ep_load_shared(stage_of(s, work.stage, base + i) + at);
#pragma unroll
    for (int i = 0; i < N; i++) {
        if ((base || i) && work.begins >> (base + i) & 1) sum->end_run();
        sum->add(x[i], weight[base + i]);
    }
}

/* A job of N terms: the sum takes the place of the first. */
template <typename T, int N>
__device__ __forceinline__ void sum_few(const Stages &s, const PipeWork &work, const float *weight,
                                        int thread) {
    float w[N > 0 ? N : 1];
#pragma unroll
    for (int i = 0; i < N; i++)
        w[i] = weight[i];
#pragma unroll 2
    for (int at = thread * 16; at < work.bytes; at += TEAM_THREADS * 16) {
        Sum<T> sum;
        if (N > 0) add_terms<T, N>(&sum, s, work, w, 0, at);
        sum.end_run();
        ep_store_shared(work.stage + at, ep_pack(sum.total));
    }
}

/* A job of any number. */
template <typename T>
__device__ __forceinline__ void sum_many(const Stages &s, const PipeWork &work, const float *weight,
                                         int thread) {
    for (int at = thread * 16; at < work.bytes; at += TEAM_THREADS * 16) {
        Sum<T> sum;
        int base = 0;
        for (; base + TERMS_AT_ONCE <= work.terms; base += TERMS_AT_ONCE)
            add_terms<T, TERMS_AT_ONCE>(&sum, s, work, weight, base, at);
        for (; base < work.terms; base++)
            add_terms<T, 1>(&sum, s, work, weight, base, at);
        sum.end_run();
        ep_store_shared(work.stage + at, ep_pack(sum.total));
    }
}

/* The workers: each team takes jobs in turn. */
template <typename T> __device__ void sum_rows(Pipe *p, int worker) {
    int thread = worker % TEAM_THREADS;
    Stages s = pipe_stages(p);
    for (uint32_t n = worker / TEAM_THREADS;; n += TEAMS) {
        pipe_wait(p->full, n);
        PipeWork work = p->work[n % JOBS];
        const float *weight = &p->weight[n % JOBS * p->shape.width];
        if (work.bytes == PIPE_END) return;
        switch (work.terms) {
        case 0:
            sum_few<T, 0>(s, work, weight, thread);
            break;
        case 1:
            sum_few<T, 1>(s, work, weight, thread);
            break;
        case 2:
            sum_few<T, 2>(s, work, weight, thread);
            break;
        case 3:
            sum_few<T, 3>(s, work, weight, thread);
            break;
        case 4:
            sum_few<T, 4>(s, work, weight, thread);
            break;
        default:
            sum_many<T>(s, work, weight, thread);
        }
        pipe_worked(p, n);
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

/* The jobs of a team's sum. `to`: where it goes; `item`: its token, or row of `source`. */
__device__ __forceinline__ void post_sum(const EpGatherArgs &a, Pipe *p, const Team &t,
                                         uint32_t number, const Part &part, char *to, int item,
                                         int source, int valid) {
    int terms, notes, pieces = a.pipe.pieces;
    team_rank(t, part.from != NULL, &terms);
    int note = team_rank(t, part.peer >= 0, &notes);
    uint32_t begins = part.from && part.begins ? 1u << part.at : 0;
    for (int d = t.width / 2; d > 0; d /= 2)
        begins |= __shfl_xor_sync(~0u, begins, d);
    for (int piece = 0; piece < pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % JOBS, cell = j * a.pipe.width;
        int64_t offset = (int64_t)piece * a.pipe.stage_bytes;
        if (valid) pipe_await_open(p, n);
        if (valid && part.from)
            p->from[cell + part.at] = part.from + offset, p->weight[cell + part.at] = part.weight;
        if (valid && part.peer >= 0)
            p->peer[cell + note] = part.peer, p->row[cell + note] = part.row;
        if (valid && t.k == 0) {
            if (!terms) p->from[cell] = NULL; /* a sum of nothing needs a stage, too */
            p->to[cell] = to + offset;
            p->job[j] = PipeJob{(int16_t)max(1, terms),
                                (int16_t)terms,
                                1,
                                (int16_t)terms,
                                piece_bytes(a.pipe, a.row_bytes, piece),
                                begins};
            p->notes[j] = piece == pieces - 1 ? notes : 0;
            p->piece[j] = piece, p->item[j] = item, p->source[j] = source;
        }
        __syncwarp();
        if (valid && t.k == 0) ep_mbarrier_arrive(&p->posted[j]);
    }
}

/* ---- values -------------------------------------------------------------------------------- */

/* The value carried for entry k of a row that fills slots here: 0 where it is elsewhere or lost. */
__device__ __forceinline__ float value_of(const EpGatherArgs &a, int source, int row, int k) {
    int entry = ep_route(a.plan, a.group, a.top_k, source, row, k);
    if (a.shape.layout != EP_LAYOUT_FLAT) return entry >= 0 ? a.slot_values[entry] : 0;
    int64_t slot = ep_slot(a.plan, a.group, a.shape, a.top_k, source, row, 0);
    return entry >= 0 && slot >= 0 ? a.slot_values[slot * a.top_k + k] : 0;
}

#endif
