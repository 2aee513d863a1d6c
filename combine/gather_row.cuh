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

/* VECTORS vectors of a stage: element i of each is one thread's. */
template <int VECTORS>
__device__ __forceinline__ void load_vectors(uint4 x[VECTORS], uint32_t stage, int at) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        x[v] = ep_load_shared(stage + at + v * TEAM_THREADS * 16);
}

template <typename T, int VECTORS>
__device__ __forceinline__ void add_vectors(EpVector<T> sum[VECTORS], const uint4 x[VECTORS],
                                            float weight) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        EpVector<T> term = ep_unpack<T>(x[v]);
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i++)
            sum[v].at[i] = fmaf(weight, term.at[i], sum[v].at[i]);
    }
}

/* VECTORS vectors of a sum, in place of its last term. The terms of the run are weighted and summed
 * on their own, then added to the total; each other term is added as it is. A term is read while
 * the one before is added. */
template <typename T, int VECTORS>
__device__ __forceinline__ void sum_vectors(const Stages &s, const PipeWork &work,
                                            const float *weight, int at) {
    EpVector<T> total[VECTORS] = {}, run[VECTORS] = {};
    uint4 next[VECTORS];
    uint32_t stage = work.stage;
    load_vectors<VECTORS>(next, stage, at);
#pragma unroll 1
    for (int i = 0; i < work.terms; i++) {
        uint4 x[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            x[v] = next[v];
        if (i + 1 < work.terms) {
            stage = stage_of(s, stage, 1);
            load_vectors<VECTORS>(next, stage, at);
        }
        if (i < work.run || i >= work.run_end) {
            add_vectors<T, VECTORS>(total, x, 1);
            continue;
        }
        add_vectors<T, VECTORS>(run, x, weight[i]);
        if (i + 1 < work.run_end) continue;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int e = 0; e < EpVector<T>::SIZE; e++)
                total[v].at[e] += run[v].at[e];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        ep_store_shared(stage + at + v * TEAM_THREADS * 16, ep_pack(total[v]));
}

#define VECTORS_AT_ONCE 2

/* The workers: each team takes jobs in turn. */
template <typename T> __device__ void sum_rows(Pipe *p, int worker) {
    constexpr int STEP = TEAM_THREADS * 16, STEPS = VECTORS_AT_ONCE * STEP;
    Stages s = pipe_stages(p);
    for (uint32_t n = worker / TEAM_THREADS;; n += TEAMS) {
        pipe_wait(p->barrier[FULL], n);
        PipeWork work = p->work[n % JOBS];
        const float *weight = &p->weight[n % JOBS * p->shape.width];
        int at = worker % TEAM_THREADS * 16;
        if (work.bytes == PIPE_END) return;
#pragma unroll 1
        for (; at + STEPS - STEP < work.bytes; at += STEPS)
            sum_vectors<T, VECTORS_AT_ONCE>(s, work, weight, at);
#pragma unroll 1
        for (; at < work.bytes; at += STEP)
            sum_vectors<T, 1>(s, work, weight, at);
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
    int at;           /* which term it is */
    float weight;
    int peer, row;    /* whom to tell about which record; peer -1: nobody */
    int run, run_end; /* of the job's terms, as in PipeJob; all lanes of the team know */
} Part;

/* The jobs of a team's sum. `to`: where it goes; `item`: its token, or row of `source`. */
__device__ __forceinline__ void post_sum(const EpGatherArgs &a, Pipe *p, const Team &t,
                                         uint32_t number, const Part &part, char *to, int item,
                                         int source, int valid) {
    int terms, notes, pieces = a.pipe.pieces;
    team_rank(t, part.from != NULL, &terms);
    int note = team_rank(t, part.peer >= 0, &notes);
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
                                (int8_t)part.run,
                                (int8_t)part.run_end};
            p->notes[j] = piece == pieces - 1 ? notes : 0;
            p->piece[j] = piece, p->item[j] = item, p->source[j] = source;
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[POSTED][j]);
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
