/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather over NVLink: slots to token rows, for ep_combine and ep_dispatch_backward.
 *
 * One launch, two roles. A summing block adds up, for every row that another rank had sent it, the
 * slots that the row had filled, and pushes the sum, rounded to the rows' type, back through the
 * ring of its lane. A reducing block walks its lanes' tokens: it waits until the sums of all ranks
 * that a token went to are there, adds them in ascending rank, this rank's own slots unrounded in
 * their turn, and writes the token's row.
 *
 * Who waits on whom: a reducer for the heads of a token's ranks, a summer for credit of any one of
 * the ranks that it still has rows for. Sums travel to each rank in order of token. So of all
 * unfinished tokens of a lane, on all ranks, the reducer of the lowest has emptied the rings of
 * what came before; the summers it waits for find room there; and all of it goes on.
 *
 * Order: as in dispatch_nvlink.cu. The ring is read past the first-level cache, which other
 * multiprocessors' and other GPUs' stores do not reach.
 */
#include "handles/plan_cuda.h"
#include "runtime/device.cuh"
#include "runtime/rows.cuh"

#define WORKERS 448
#define THREADS (WORKERS + 32) /* the first warp looks ahead */
#define ROWS_PER_PUBLISH 4
#define MAX_TERMS (2 * EP_MAX_TOP_K)
#define RANK_WORDS ((EP_CUDA_MAX_RANKS + 31) / 32)

/* One term of a sum; `first` begins a run, which is summed on its own before it is added. */
typedef struct Term {
    const char *row;
    float weight;
    int32_t first;
} Term;

/* What the workers sum next, and where to. The first warp fills one while they work on another. */
typedef struct Job {
    Term term[MAX_TERMS];
    int32_t terms;
    int32_t source; /* summer: where the sum goes, -1: no more */
} Job;

typedef struct Shared {
    Job job[2];
    uint32_t count[EP_CUDA_MAX_RANKS]; /* records put into, or taken out of, the lane: ever */
    uint32_t seen[EP_CUDA_MAX_RANKS];  /* the other side's counter, as last read */
    uint32_t told[EP_CUDA_MAX_RANKS];  /* summer: as published */
    int32_t rows[EP_CUDA_MAX_RANKS], next[EP_CUDA_MAX_RANKS];
    int32_t alive;
} Shared;

/* ---- arithmetic ---------------------------------------------------------------------------- */

template <typename T> struct Vector {
    static constexpr int SIZE = 16 / sizeof(T);
    float at[SIZE];
};

template <typename T>
__device__ __forceinline__ void add_term(Vector<T> *part, const uint4 &x, float w) {
    const T *from = (const T *)&x;
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        part->at[i] = fmaf(w, ep_float(from[i]), part->at[i]);
}

/* 16 bytes of a row, summed over the terms and rounded. */
template <typename T> __device__ __forceinline__ uint4 sum_vector(const Job *job, int64_t at) {
    Vector<T> total, part;
    uint4 out;
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        total.at[i] = part.at[i] = 0;
    for (int j = 0; j < job->terms; j++) {
        uint4 x = __ldcg((const uint4 *)(job->term[j].row + at));
        if (job->term[j].first) {
#pragma unroll
            for (int i = 0; i < Vector<T>::SIZE; i++)
                total.at[i] += part.at[i], part.at[i] = 0;
        }
        add_term<T>(&part, x, job->term[j].weight);
    }
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        ((T *)&out)[i] = ep_round<T>(total.at[i] + part.at[i]);
    return out;
}

/* The sum of a job's rows, by all workers. */
template <typename T>
__device__ __forceinline__ void sum_rows(const EpGatherArgs &a, const Job *job, char *out) {
    for (int64_t at = (threadIdx.x - 32) * 16; at < a.row_bytes; at += WORKERS * 16)
        *(uint4 *)(out + at) = sum_vector<T>(job, at);
}

__device__ __forceinline__ void work(const EpGatherArgs &a, const Job *job, char *out) {
    if (a.type == EP_TYPE_BF16)
        sum_rows<__nv_bfloat16>(a, job, out);
    else if (a.type == EP_TYPE_FP16)
        sum_rows<__half>(a, job, out);
    else
        sum_rows<float>(a, job, out);
}

/* Terms of the slots that a row has filled, from term `at` on: by the lanes of a warp, one for each
 * k. Returns how many. */
__device__ __forceinline__ int add_slots(const EpGatherArgs &a, Job *job, int at, int source,
                                         int ring, int row, int lane) {
    int slot = -1;
    if (lane < a.top_k) slot = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, lane);
    unsigned filled = __ballot_sync(~0u, slot >= 0);
    int before = __popc(filled & ((1u << lane) - 1));
    if (slot >= 0)
        job->term[at + before] = Term{a.rows + (int64_t)slot * a.row_bytes,
                                      a.weighs ? a.slot_weights[slot] : 1, before == 0};
    return __popc(filled);
}

/* The value carried for entry k of a row: 0 where it is elsewhere or lost. */
__device__ __forceinline__ float value_of(const EpGatherArgs &a, int source, int ring, int row,
                                          int k) {
    int entry = ep_entry(a.plan, a.group, a.top_k, source, ring, row, k);
    if (a.shape.layout != EP_LAYOUT_FLAT) return entry >= 0 ? a.slot_values[entry] : 0;
    int64_t slot = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, 0);
    return entry >= 0 && slot >= 0 ? a.slot_values[slot * a.top_k + k] : 0;
}

/* ---- summing ------------------------------------------------------------------------------- */

/* Let receivers see what has been written: everything but the last record, to `pending`, if that
 * is a rank. By the thread that has pushed. */
__device__ __forceinline__ void publish_heads(const EpCudaGroup &g, Shared *s, int ring,
                                              int pending) {
    if (pending < 0)
        ep_bulk_wait<0>();
    else
        ep_bulk_wait<1>();
    ep_fence_sys(); /* one for all: each costs as much as a short copy */
    for (int r = 0; r < g.size; r++) {
        uint32_t done = s->count[r] - (r == pending);
        if (s->told[r] == done) continue;
        s->told[r] = done;
        ep_store_relaxed_sys(ep_head(g, r, g.rank, ring), done);
    }
}

/* Is there room in the ring to a rank? What was last seen is enough until it is used up. A row
 * that is chosen but not yet pushed needs its room, too. */
__device__ __forceinline__ int has_room(const EpCudaGroup &g, Shared *s, int rank, int ring,
                                        int chosen) {
    uint32_t needed = s->count[rank] + (chosen == rank) + 1 - g.layout.depth;
    if (!ep_reached(s->seen[rank], needed))
        s->seen[rank] = ep_load_acquire_sys(ep_credit(g, g.rank, rank, ring));
    return ep_reached(s->seen[rank], needed);
}

/* A row whose sum can be pushed, of the other ranks in turn; -1 where all are done, -2 where no
 * ring has room. `waiting` is a rank with rows left. */
__device__ __forceinline__ int find_row(const EpGatherArgs &a, Shared *s, int ring, int turn,
                                        int chosen, int *waiting) {
    const EpCudaGroup &g = a.group;
    *waiting = -1;
    for (int i = 0; i < g.size; i++) {
        int source = (turn + i) % g.size;
        if (source == g.rank || s->next[source] >= s->rows[source]) continue;
        *waiting = source;
        if (has_room(g, s, source, ring, chosen)) return source;
    }
    return *waiting < 0 ? -1 : -2;
}

/* The next row's source, waiting for room if there must be: -1 where there is none, -2 where only
 * pushing the row that is chosen already can help. Any ring with room will do: were a full one
 * waited for, ranks could wait for each other in a circle. By lane 0. */
__device__ __forceinline__ int choose_source(const EpGatherArgs &a, Shared *s, int ring, int turn,
                                             int chosen) {
    const EpCudaGroup &g = a.group;
    EpPatience patience = {0, 0};
    int waiting, source = find_row(a, s, ring, turn, chosen, &waiting);
    if (source != -2 || chosen >= 0) return source;
    publish_heads(g, s, ring, -1); /* readers may be waiting for what is not yet announced */
    while (source == -2) {
        uint32_t expected = s->count[waiting] + 1 - g.layout.depth;
        EpAwaited awaited = {waiting, EP_PHASE_CREDIT, ring, expected, s->seen[waiting]};
        s->alive = ep_patience(g, &patience, awaited);
        source = s->alive ? find_row(a, s, ring, turn, chosen, &waiting) : -1;
    }
    return source;
}

/* Fill a job with the next row, by the first warp. Carried values go straight into its record. */
__device__ __forceinline__ int next_sum(const EpGatherArgs &a, Shared *s, Job *job, char *record,
                                        int ring, int turn, int chosen, int lane) {
    int source = lane == 0 ? choose_source(a, s, ring, turn, chosen) : 0;
    source = __shfl_sync(~0u, source, 0);
    if (source < 0) return source;
    int row = s->next[source];
    int terms = add_slots(a, job, 0, source, ring, row, lane);
    if (a.carries_values && lane < a.top_k)
        ((float *)(record + a.record.weights))[lane] = value_of(a, source, ring, row, lane);
    ep_fence_proxy_async();
    __syncwarp();
    if (lane == 0) job->terms = terms, s->next[source] = row + 1;
    __syncwarp();
    return source;
}

/* Push a finished sum. By lane 0. */
__device__ __forceinline__ void push_sum(const EpGatherArgs &a, Shared *s, const char *record,
                                         int source, int ring) {
    const EpCudaGroup &g = a.group;
    uint32_t count = s->count[source]++;
    ep_bulk_store(ep_ring(g, source, g.rank, ring, count), record, (uint32_t)a.record.bytes);
    ep_bulk_commit();
}

__device__ __forceinline__ void enter_lane(const EpGatherArgs &a, Shared *s, int ring) {
    const EpCudaGroup &g = a.group;
    for (int r = threadIdx.x; r < g.size; r += THREADS) {
        s->count[r] = s->told[r] = g.state->sent[r][ring];
        s->seen[r] = s->count[r] - g.layout.depth; /* nothing known of the credit yet */
        s->rows[r] = a.plan.lane_rows[r * EP_LANES + ring];
        s->next[r] = 0;
    }
    if (threadIdx.x == 0) s->alive = 1;
    __syncthreads();
}

/* The first warp's part of a round: push sum n - 1, then choose row n + 1 while the workers sum
 * row n. Where the rings are full, row n must be pushed first: then the next round has no row.
 * Returns whether there is neither a row n nor a next one. */
__device__ __forceinline__ int look_ahead(const EpGatherArgs &a, Shared *s, char *stages, int ring,
                                          int n, int lane) {
    Job *last = &s->job[(n + 1) % 2]; /* of row n - 1; becomes that of row n + 1 */
    int current = s->job[n % 2].source, next;
    if (lane == 0 && n > 0 && last->source >= 0) {
        push_sum(a, s, stages + (n - 1) % a.stages * a.record.bytes, last->source, ring);
        if (n % ROWS_PER_PUBLISH == 0) publish_heads(a.group, s, ring, last->source);
    }
    if (lane == 0 && a.stages > 3)
        ep_bulk_wait_read<2>();
    else if (lane == 0)
        ep_bulk_wait_read<1>();
    __syncwarp();
    next = next_sum(a, s, last, stages + (n + 1) % a.stages * a.record.bytes, ring,
                    (current < 0 ? a.group.rank : current) + 1, current, lane);
    if (lane == 0) last->source = next;
    return current < 0 && next == -1;
}

/* Rounds with a barrier between them: the workers sum row n, the first warp looks ahead. */
__device__ int sum_lane(const EpGatherArgs &a, Shared *s, char *stages, int ring) {
    const EpCudaGroup &g = a.group;
    enter_lane(a, s, ring);
    if (threadIdx.x == 0) s->job[0].source = s->job[1].source = -2;
    __syncthreads();
    for (int n = 0;; n++) {
        const Job *job = &s->job[n % 2];
        int done = 0;
        if (threadIdx.x < 32)
            done = look_ahead(a, s, stages, ring, n, threadIdx.x);
        else if (job->source >= 0)
            work(a, job, stages + n % a.stages * a.record.bytes);
        ep_fence_proxy_async();
        if (__syncthreads_or(done)) break;
    }
    if (threadIdx.x == 0) publish_heads(g, s, ring, -1);
    __syncthreads();
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        g.state->sent[r][ring] = s->count[r];
    __syncthreads();
    return s->alive;
}

/* ---- reducing ------------------------------------------------------------------------------ */

/* The lane-th of the ranks in a set, ascending; -1 where there are fewer. Returns how many. */
__device__ __forceinline__ int pick_rank(const uint32_t *word, int lane, int *rank) {
    int count = 0;
    *rank = -1;
    for (int w = 0; w < RANK_WORDS; w++)
        for (uint32_t left = word[w]; left; left &= left - 1, count++)
            if (count == lane) *rank = w * 32 + __ffs(left) - 1;
    return count;
}

/* Wait for the next record of a rank. */
__device__ __forceinline__ int await_record(const EpCudaGroup &g, Shared *s, int rank, int ring) {
    uint32_t expected = s->count[rank] + 1;
    if (ep_reached(s->seen[rank], expected)) return 1;
    const uint32_t *head = ep_head(g, g.rank, rank, ring);
    int alive = ep_wait_counter(g, head, expected, rank, EP_PHASE_RECORD, ring);
    s->seen[rank] = alive ? ep_load_acquire_sys(head) : s->seen[rank];
    return alive;
}

__device__ __forceinline__ float returned_value(const EpGatherArgs &a, const Shared *s, int owner,
                                                int ring, int own, int k) {
    const EpCudaGroup &g = a.group;
    if (owner < 0) return 0;
    if (owner == g.rank) return value_of(a, owner, ring, own, k);
    const char *record = ep_ring(g, g.rank, owner, ring, s->count[owner]);
    return __ldcg((const float *)(record + a.record.weights) + k);
}

/* Fill a job with a token, once all its sums are there: by the first warp. The lanes stand first
 * for its entries, then for its ranks. Returns whether the wait was in vain. */
__device__ __forceinline__ int next_token(const EpGatherArgs &a, Shared *s, Job *job, int ring,
                                          int token, int *own, int lane) {
    const EpCudaGroup &g = a.group;
    int64_t entry = (int64_t)token * a.top_k + lane;
    int owner = lane < a.top_k ? a.plan.owner[entry] : -1, rank, own_terms = 0;
    uint32_t word[RANK_WORDS];
    for (int w = 0; w < RANK_WORDS; w++)
        word[w] = __reduce_or_sync(
            ~0u, owner >= w * 32 && owner < w * 32 + 32 ? 1u << (owner - w * 32) : 0u);
    int ranks = pick_rank(word, lane, &rank);
    unsigned is_own = __ballot_sync(~0u, rank == g.rank);
    if (is_own) own_terms = add_slots(a, job, __ffs(is_own) - 1, g.rank, ring, *own, lane);
    int alive = rank < 0 || rank == g.rank || await_record(g, s, rank, ring);
    if (rank >= 0 && rank != g.rank)
        job->term[lane + (is_own && rank > g.rank ? own_terms - 1 : 0)] =
            Term{ep_ring(g, g.rank, rank, ring, s->count[rank]), 1, 1};
    alive = __all_sync(~0u, alive);
    if (a.carries_values && lane < a.top_k && alive)
        a.out_values[entry] = returned_value(a, s, owner, ring, *own, lane);
    __syncwarp();
    if (rank >= 0 && rank != g.rank) s->count[rank]++;
    *own += is_own != 0;
    if (lane == 0) job->terms = ranks + (is_own ? own_terms - 1 : 0);
    __syncwarp();
    return alive;
}

/* Everyone has read a token's records, and each load has returned its value: nothing is left to
 * order before their room is given back. Credit is counted by job, one behind the heads. */
__device__ __forceinline__ void give_credits(const EpGatherArgs &a, Shared *s, int ring, int token,
                                             int lane) {
    const EpCudaGroup &g = a.group;
    int owner = lane < a.top_k ? a.plan.owner[(int64_t)token * a.top_k + lane] : -1;
    unsigned same = __match_any_sync(~0u, owner);
    if (owner >= 0 && owner != g.rank && __ffs(same) - 1 == lane)
        ep_store_relaxed_sys(ep_credit(g, owner, g.rank, ring), ++s->told[owner]);
    __syncwarp();
}

__device__ int reduce_lane(const EpGatherArgs &a, Shared *s, int ring) {
    const EpCudaGroup &g = a.group;
    int begin, end, own = 0, alive = 1, lane = threadIdx.x;
    ep_lane_range((int)a.plan.header->num_tokens, ring, &begin, &end);
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        s->told[r] = s->seen[r] = s->count[r] = g.state->received[r][ring];
    __syncthreads();
    if (lane < 32 && begin < end) alive = next_token(a, s, &s->job[0], ring, begin, &own, lane);
    if (lane == 0) s->alive = alive;
    __syncthreads();
    for (int token = begin; token < end && s->alive; token++) {
        int n = token - begin;
        if (lane >= 32)
            work(a, &s->job[n % 2], a.out_rows + (int64_t)token * a.row_bytes);
        else if (token + 1 < end)
            alive = next_token(a, s, &s->job[(n + 1) % 2], ring, token + 1, &own, lane);
        __syncthreads();
        if (lane < 32) give_credits(a, s, ring, token, lane);
        if (lane == 0) s->alive = alive;
        __syncthreads();
    }
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        g.state->received[r][ring] = s->count[r];
    __syncthreads();
    return s->alive;
}

/* Rows of a fixed-shape buffer past this step's tokens have no slots. */
__device__ void zero_beyond(const EpGatherArgs &a, int block) {
    int64_t tokens = a.plan.header->num_tokens;
    for (int64_t t = tokens + block; t < a.out_num_rows; t += a.reduce_blocks) {
        for (int64_t at = threadIdx.x * 16; at < a.row_bytes; at += THREADS * 16)
            *(uint4 *)(a.out_rows + t * a.row_bytes + at) = make_uint4(0, 0, 0, 0);
        if (a.carries_values && (int)threadIdx.x < a.top_k)
            a.out_values[t * a.top_k + threadIdx.x] = 0;
    }
}

__global__ void __launch_bounds__(THREADS, 2)
    gather_kernel(const __grid_constant__ EpGatherArgs a) {
    extern __shared__ __align__(128) char stages[];
    __shared__ Shared s;
    int alive = 1, block = (int)blockIdx.x - a.sum_blocks;
    if (block < 0) {
        for (int ring = blockIdx.x; ring < EP_LANES && alive; ring += a.sum_blocks)
            alive = sum_lane(a, &s, stages, ring);
        return;
    }
    zero_beyond(a, block);
    for (int ring = block; ring < EP_LANES && alive; ring += a.reduce_blocks)
        alive = reduce_lane(a, &s, ring);
}

extern "C" int ep_cuda_launch_gather(const EpGatherArgs *a, void *stream) {
    size_t shared = (size_t)a->stages * (size_t)a->record.bytes;
    cudaError_t error = cudaFuncSetAttribute(
        gather_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return error;
    gather_kernel<<<a->sum_blocks + a->reduce_blocks, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
