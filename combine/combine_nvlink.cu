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

#define THREADS 448
#define ROWS_PER_PUBLISH 4
#define MAX_TERMS (2 * EP_MAX_TOP_K)

/* One term of a sum; `first` begins a run, which is summed on its own before it is added. */
typedef struct Term {
    const char *row;
    float weight;
    int32_t first;
} Term;

typedef struct Shared {
    Term term[MAX_TERMS];
    int32_t terms;
    int32_t source, row; /* summer: what is next; source -1: nothing left */
    uint32_t count[EP_CUDA_MAX_RANKS];
    uint32_t published[EP_CUDA_MAX_RANKS];
    uint32_t credit[EP_CUDA_MAX_RANKS]; /* as last seen */
    int32_t rows[EP_CUDA_MAX_RANKS], next[EP_CUDA_MAX_RANKS];
    int32_t own; /* reducer: rows of this rank's own tokens so far in the lane */
    int32_t ranks[EP_MAX_TOP_K], num_ranks;
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
template <typename T>
__device__ __forceinline__ uint4 sum_vector(const Shared *s, int64_t at) {
    Vector<T> total, part;
    uint4 out;
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        total.at[i] = part.at[i] = 0;
    for (int j = 0; j < s->terms; j++) {
        uint4 x = __ldcg((const uint4 *)(s->term[j].row + at));
        if (s->term[j].first) {
#pragma unroll
            for (int i = 0; i < Vector<T>::SIZE; i++)
                total.at[i] += part.at[i], part.at[i] = 0;
        }
        add_term<T>(&part, x, s->term[j].weight);
    }
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; i++)
        ((T *)&out)[i] = ep_round<T>(total.at[i] + part.at[i]);
    return out;
}

__device__ __forceinline__ uint4 sum_vector_of(const EpGatherArgs &a, const Shared *s, int64_t at) {
    if (a.type == EP_TYPE_BF16)
        return sum_vector<__nv_bfloat16>(s, at);
    if (a.type == EP_TYPE_FP16)
        return sum_vector<__half>(s, at);
    return sum_vector<float>(s, at);
}

/* Terms of the slots that a row has filled, appended by one thread. */
__device__ __forceinline__ void add_slots(const EpGatherArgs &a, Shared *s, int source, int ring,
                                          int row) {
    int first = 1;
    for (int k = 0; k < a.top_k; k++) {
        int64_t slot = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, k);
        if (slot < 0)
            continue;
        s->term[s->terms++] =
            Term{a.rows + slot * a.row_bytes, a.weighs ? a.slot_weights[slot] : 1, first};
        first = 0;
    }
}

/* The value carried for entry k of a row: 0 where it is elsewhere or lost. */
__device__ __forceinline__ float value_of(const EpGatherArgs &a, int source, int ring, int row,
                                          int k) {
    int entry = ep_entry(a.plan, a.group, a.top_k, source, ring, row, k);
    if (a.shape.layout != EP_LAYOUT_FLAT)
        return entry >= 0 ? a.slot_values[entry] : 0;
    int64_t slot = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, 0);
    return entry >= 0 && slot >= 0 ? a.slot_values[slot * a.top_k + k] : 0;
}

/* ---- summing ------------------------------------------------------------------------------- */

__device__ __forceinline__ void publish_heads(const EpCudaGroup &g, Shared *s, int ring) {
    ep_bulk_wait<0>();
    for (int r = 0; r < g.size; r++)
        if (s->published[r] != s->count[r]) {
            s->published[r] = s->count[r];
            ep_store_release_sys(ep_head(g, r, g.rank, ring), s->count[r]);
        }
}

/* Is there room in the ring to a rank? What was last seen is enough until it is used up. */
__device__ __forceinline__ int has_room(const EpCudaGroup &g, Shared *s, int rank, int ring) {
    uint32_t needed = s->count[rank] + 1 - g.layout.depth;
    if (!ep_reached(s->credit[rank], needed))
        s->credit[rank] = ep_load_acquire_sys(ep_credit(g, g.rank, rank, ring));
    return ep_reached(s->credit[rank], needed);
}

/* A row whose sum can be pushed, of the other ranks in turn; -1 where all are done, -2 where no
 * ring has room. `waiting` is a rank with rows left. */
__device__ __forceinline__ int find_row(const EpGatherArgs &a, Shared *s, int ring, int turn,
                                        int *waiting) {
    const EpCudaGroup &g = a.group;
    *waiting = -1;
    for (int i = 0; i < g.size; i++) {
        int source = (turn + i) % g.size;
        if (source == g.rank || s->next[source] >= s->rows[source])
            continue;
        *waiting = source;
        if (has_room(g, s, source, ring))
            return source;
    }
    return *waiting < 0 ? -1 : -2;
}

/* The next row, waiting for room if there must be. Any ring with room will do: were a full one
 * waited for, ranks could wait for each other in a circle. By thread 0. */
__device__ __forceinline__ void choose_row(const EpGatherArgs &a, Shared *s, int ring, int turn) {
    const EpCudaGroup &g = a.group;
    EpPatience patience = {0, 0};
    int waiting, source = find_row(a, s, ring, turn, &waiting);
    if (source == -2)
        publish_heads(g, s, ring); /* readers may be waiting for what is not yet announced */
    while (source == -2) {
        uint32_t expected = s->count[waiting] + 1 - g.layout.depth;
        EpAwaited awaited = {waiting, EP_PHASE_CREDIT, ring, expected, s->credit[waiting]};
        s->alive = ep_patience(g, &patience, awaited);
        source = s->alive ? find_row(a, s, ring, turn, &waiting) : -1;
    }
    s->source = source;
    if (source >= 0)
        s->row = s->next[source]++;
}

/* Push a finished sum. By thread 0. */
__device__ __forceinline__ void push_sum(const EpGatherArgs &a, Shared *s, const char *record,
                                         int ring) {
    const EpCudaGroup &g = a.group;
    uint32_t count = s->count[s->source]++;
    ep_bulk_store(ep_ring(g, s->source, g.rank, ring, count), record, (uint32_t)a.record.bytes);
    ep_bulk_commit();
}

__device__ __forceinline__ void enter_lane(const EpGatherArgs &a, Shared *s, int ring) {
    const EpCudaGroup &g = a.group;
    for (int r = threadIdx.x; r < g.size; r += THREADS) {
        s->count[r] = s->published[r] = g.state->sent[r][ring];
        s->credit[r] = s->count[r] - g.layout.depth; /* nothing seen yet */
        s->rows[r] = a.plan.lane_rows[r * EP_LANES + ring];
        s->next[r] = 0;
    }
    if (threadIdx.x == 0)
        s->alive = 1;
}

__device__ int sum_lane(const EpGatherArgs &a, Shared *s, char *stages, int ring) {
    const EpCudaGroup &g = a.group;
    enter_lane(a, s, ring);
    for (int n = 0, turn = g.rank + 1;; n++) {
        char *record = stages + n % a.stages * a.record.bytes;
        __syncthreads();
        if (threadIdx.x == 0) {
            choose_row(a, s, ring, turn);
            s->terms = 0;
            if (s->source >= 0)
                add_slots(a, s, s->source, ring, s->row);
            turn = s->source + 1;
            if (a.stages > 3)
                ep_bulk_wait_read<3>();
            else
                ep_bulk_wait_read<1>();
        }
        __syncthreads();
        if (s->source < 0)
            break;
        for (int64_t at = threadIdx.x * 16; at < a.row_bytes; at += THREADS * 16)
            *(uint4 *)(record + at) = sum_vector_of(a, s, at);
        if (a.carries_values && (int)threadIdx.x < a.top_k)
            ((float *)(record + a.record.weights))[threadIdx.x] =
                value_of(a, s->source, ring, s->row, threadIdx.x);
        ep_fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            push_sum(a, s, record, ring);
            if (n % ROWS_PER_PUBLISH == ROWS_PER_PUBLISH - 1)
                publish_heads(g, s, ring);
        }
    }
    if (threadIdx.x == 0)
        publish_heads(g, s, ring);
    __syncthreads();
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        g.state->sent[r][ring] = s->count[r];
    __syncthreads();
    return s->alive;
}

/* ---- reducing ------------------------------------------------------------------------------ */

/* The ranks that a token went to, ascending. By thread 0. */
__device__ __forceinline__ void list_ranks(const EpGatherArgs &a, Shared *s, int token) {
    s->num_ranks = 0;
    for (int k = 0; k < a.top_k; k++) {
        int rank = a.plan.owner[(int64_t)token * a.top_k + k], at = s->num_ranks;
        for (int i = 0; i < s->num_ranks; i++)
            if (s->ranks[i] == rank)
                rank = -1;
        if (rank < 0)
            continue;
        for (; at > 0 && s->ranks[at - 1] > rank; at--)
            s->ranks[at] = s->ranks[at - 1];
        s->ranks[at] = rank;
        s->num_ranks++;
    }
}

/* Terms of a token, once all have arrived. By thread 0. */
__device__ __forceinline__ int await_terms(const EpGatherArgs &a, Shared *s, int ring) {
    const EpCudaGroup &g = a.group;
    s->terms = 0;
    for (int i = 0; i < s->num_ranks; i++) {
        int rank = s->ranks[i];
        if (rank == g.rank) {
            add_slots(a, s, rank, ring, s->own);
            continue;
        }
        uint32_t count = s->count[rank];
        if (!ep_wait_counter(g, ep_head(g, g.rank, rank, ring), count + 1, rank, EP_PHASE_RECORD,
                             ring))
            return 0;
        s->term[s->terms++] = Term{ep_ring(g, g.rank, rank, ring, count), 1, 1};
    }
    return 1;
}

__device__ __forceinline__ void take_value(const EpGatherArgs &a, const Shared *s, int ring,
                                           int token, int k) {
    const EpCudaGroup &g = a.group;
    int64_t at = (int64_t)token * a.top_k + k;
    int rank = a.plan.owner[at];
    float value = 0;
    if (rank == g.rank)
        value = value_of(a, rank, ring, s->own, k);
    else if (rank >= 0)
        value = __ldcg((const float *)(ep_ring(g, g.rank, rank, ring, s->count[rank]) +
                                       a.record.weights) +
                       k);
    a.out_values[at] = value;
}

/* Everyone has read: count what was taken, and give the room back. By thread 0. */
__device__ __forceinline__ void give_credits(const EpCudaGroup &g, Shared *s, int ring) {
    for (int i = 0; i < s->num_ranks; i++) {
        int rank = s->ranks[i];
        if (rank == g.rank)
            s->own++;
        else
            ep_store_relaxed_sys(ep_credit(g, rank, g.rank, ring), ++s->count[rank]);
    }
}

__device__ int reduce_lane(const EpGatherArgs &a, Shared *s, int ring) {
    const EpCudaGroup &g = a.group;
    int begin, end;
    ep_lane_range((int)a.plan.header->num_tokens, ring, &begin, &end);
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        s->count[r] = g.state->received[r][ring];
    if (threadIdx.x == 0)
        s->own = 0;
    for (int token = begin; token < end; token++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            list_ranks(a, s, token);
            s->alive = await_terms(a, s, ring);
        }
        __syncthreads();
        if (!s->alive)
            return 0;
        char *out = a.out_rows + token * a.row_bytes;
        for (int64_t at = threadIdx.x * 16; at < a.row_bytes; at += THREADS * 16)
            *(uint4 *)(out + at) = sum_vector_of(a, s, at);
        if (a.carries_values && (int)threadIdx.x < a.top_k)
            take_value(a, s, ring, token, threadIdx.x);
        __syncthreads();
        if (threadIdx.x == 0)
            give_credits(g, s, ring);
    }
    __syncthreads();
    for (int r = threadIdx.x; r < g.size; r += THREADS)
        g.state->received[r][ring] = s->count[r];
    __syncthreads();
    return 1;
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
        ep_bulk_wait<0>();
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
    if (error != cudaSuccess)
        return error;
    gather_kernel<<<a->sum_blocks + a->reduce_blocks, THREADS, shared, (cudaStream_t)stream>>>(*a);
    return cudaGetLastError();
}
