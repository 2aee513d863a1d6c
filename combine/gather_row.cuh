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
        x[v] = ep_load_shared(stage + at + v * WORKERS * 16);
}

/* How far sum_vectors has come: the next term's stage, weight and vectors. */
template <int VECTORS> struct NextTerm {
    uint32_t stage;
    float weight;
    uint4 x[VECTORS];
};

/* The terms from `begin` up to `end`. Each is read while the one before is added. */
template <typename T, int VECTORS>
__device__ __forceinline__ void add_terms(EpVector<T> sum[VECTORS], NextTerm<VECTORS> *next,
                                          int begin, int end, const Stages &s, const PipeJob &job,
                                          uint32_t weights, int at) {
    int i = begin;
    if (begin >= end) return;
#pragma unroll 1
    do {
        EpVector<T> term[VECTORS];
        float weight = next->weight;
        for (int v = 0; v < VECTORS; v++)
            term[v] = ep_unpack<T>(next->x[v]);
        if (++i < job.terms) {
            next->stage = stage_of(s, next->stage, 1);
            next->weight = ep_load_shared_float(weights + i * (int)sizeof(float));
            load_vectors<VECTORS>(next->x, next->stage, at);
        }
        for (int v = 0; v < VECTORS; v++)
            for (int e = 0; e < EpVector<T>::SIZE; e++)
                sum[v].at[e] = fmaf(weight, term[v].at[e], sum[v].at[e]);
    } while (i < end);
}

/* VECTORS vectors of a sum, in place of its last term. The terms of the run are weighted and summed
 * on their own, then added to the total; the weight of each other term is 1. */
template <typename T, int VECTORS>
__device__ __forceinline__ void sum_vectors(const Stages &s, const PipeJob &job, uint32_t first,
                                            uint32_t weights, int at) {
    EpVector<T> total[VECTORS] = {};
    NextTerm<VECTORS> next = {first, ep_load_shared_float(weights), {}};
    load_vectors<VECTORS>(next.x, first, at);
    add_terms<T, VECTORS>(total, &next, 0, job.run, s, job, weights, at);
    if (job.run < job.run_end) {
        EpVector<T> run[VECTORS] = {};
        add_terms<T, VECTORS>(run, &next, job.run, job.run_end, s, job, weights, at);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int e = 0; e < EpVector<T>::SIZE; e++)
                total[v].at[e] += run[v].at[e];
    }
    add_terms<T, VECTORS>(total, &next, job.run_end, job.terms, s, job, weights, at);
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        ep_store_shared(next.stage + at + v * WORKERS * 16, ep_pack(total[v]));
}

#define VECTORS_AT_ONCE 2

/* The workers. */
template <typename T> __device__ void sum_rows(Pipe *p, int worker) {
    constexpr int STEP = WORKERS * 16, STEPS = VECTORS_AT_ONCE * STEP;
    Stages s = pipe_stages(p);
    uint32_t weights = ep_smem(p->weight.begin()), width = (uint32_t)p->shape.width;
    for (uint32_t n = 0;; n++) {
        pipe_wait(p->barrier[FULL], n);
        PipeJob job = p->job[n % JOBS];
        if (job.loads == PIPE_END) return;
        uint32_t first = p->first[n % JOBS];
        uint32_t weight = weights + n % JOBS * width * (uint32_t)sizeof(float);
        int at = worker * 16;
#pragma unroll 1
        for (; at + STEPS - STEP < job.bytes; at += STEPS)
            sum_vectors<T, VECTORS_AT_ONCE>(s, job, first, weight, at);
#pragma unroll 1
        for (; at < job.bytes; at += STEP)
            sum_vectors<T, 1>(s, job, first, weight, at);
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
