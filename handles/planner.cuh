/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLANNER_CUH
#define EP_HANDLES_PLANNER_CUH

/**
 * What the planners of pipes take from the plan: chunks of tokens that nobody else has taken, this
 * rank's, or those of all ranks at once, for the rows that come of them here. Always in ascending
 * order: runtime/cuda.h tells why. `Args` is EpScatterArgs or EpGatherArgs.
 *
 * What is next is claimed and looked up while the current chunk is passed on.
 */

#include "handles/enter.cuh"
#include "runtime/pipe.cuh"

/* ---- claims -------------------------------------------------------------------------------- */

enum Claimer { SENDERS, RECEIVERS };

/** The next chunk, by lane 0 of a planner's warp: see claimed. */
__device__ __forceinline__ int claim(const EpCudaGroup &g, int claimer) {
    return ep_count_up(&g.state->claimed[claimer], threadIdx.x % 32 == 0);
}

__device__ __forceinline__ int claimed(int claim) {
    return __shfl_sync(~0u, claim, 0);
}

#define CHUNKS_EACH 4

/** Tokens of a chunk: at most `most`, one for each team, and so many that each block can have
 *  several chunks. */
__device__ __forceinline__ int chunk_size(const Team &t, int most, int tokens, int blocks) {
    return max(1, min(min(most, t.count), tokens / (blocks * CHUNKS_EACH)));
}

/* ---- tokens -------------------------------------------------------------------------------- */

/** Entry k of this team's token, in the chunk from `first` on; none past the end. */
template <typename Args>
__device__ __forceinline__ EpEntry entry_of(const Args &a, const Team &t, int first, int size) {
    EpEntry none = {-1, 0, -1, 0, 0};
    int token = first + t.index;
    int valid = t.index < size && token < a.plan.header->num_tokens && t.k < a.top_k;
    return valid ? a.plan.entries[(int64_t)token * a.top_k + t.k] : none;
}

/**
 * This rank's tokens, a team each, to `post(entry, token, valid, number of the team's first job)`,
 * which returns 0 when all is in vain. A token makes `pieces` jobs. Returns how many jobs there
 * are.
 */
template <typename Args, typename Post>
__device__ __forceinline__ uint32_t walk_tokens(const Args &a, const Team &t, int claimer,
                                                int blocks, int pieces, Post post) {
    int tokens = (int)a.plan.header->num_tokens, size = chunk_size(t, a.chunk, tokens, blocks);
    int first = claimed(claim(a.group, claimer)) * size, then = claim(a.group, claimer);
    EpEntry next = entry_of(a, t, first, size);
    uint32_t n = 0;
    while (first < tokens) {
        EpEntry e = next;
        int token = first + t.index, valid = t.index < size && token < tokens;
        int second = claimed(then) * size;
        next = entry_of(a, t, second, size);
        then = claim(a.group, claimer);
        if (!post(e, token, valid, n + t.index * pieces)) break;
        n += min(size, tokens - first) * pieces;
        first = second;
    }
    return n;
}

/* ---- rows ---------------------------------------------------------------------------------- */

/** The rows of a chunk, by source in their turn: the next rank's first, so that not all ranks turn
 *  to the same one. In shared memory. */
typedef struct ChunkRows {
    int32_t begin[EP_CUDA_MAX_RANKS];   /* first of each source */
    int32_t through[EP_CUDA_MAX_RANKS]; /* how many there are of it and of those before it */
    int32_t tokens[RANK_WORDS * 32];    /* of each source, which only its own lane reads */
} ChunkRows;

__device__ __forceinline__ int source_of(const EpCudaGroup &g, int turn) {
    int source = turn + g.rank + 1;
    return source < g.size ? source : source - g.size;
}

/** How far a planner's warp has come with the rows of all sources. */
typedef struct RowWalk {
    ChunkRows *rows;
    int size, tokens;                       /* of a chunk; most tokens of a source */
    int taken, all;                         /* rows of the current chunk */
    int first;                              /* token of the next chunk */
    int begin[RANK_WORDS], end[RANK_WORDS]; /* rows of it, of the sources that this lane has */
    int then, claimer;                      /* claim of the one after */
} RowWalk;

/** A row for each team. `slot` is this lane's of its team's, -1: none. */
typedef struct Round {
    int count; /* teams that have one */
    int valid, source, row, slot;
} Round;

/* Number w of the sources that this lane has, -1: none. This rank's own turn is the last. */
__device__ __forceinline__ int lane_source(const EpCudaGroup &g, int w, int takes_own) {
    int turn = w * 32 + (int)threadIdx.x % 32;
    return turn < g.size - !takes_own ? source_of(g, turn) : -1;
}

/* Begin to look up the rows of the next chunk. A lane without a source has one without tokens, so
 * that no load hangs on a condition, and all are under way together. */
template <typename Args>
__device__ __forceinline__ void look_ahead(const Args &a, RowWalk *walk, int takes_own) {
    uint32_t stride = (uint32_t)a.group.layout.max_tokens + 1;
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++) {
        if (w * 32 >= a.group.size) break;
        int source = max(0, lane_source(a.group, w, takes_own));
        int tokens = walk->rows->tokens[w * 32 + threadIdx.x % 32];
        const int32_t *begins = a.plan.begins + (uint64_t)(uint32_t)source * stride;
        walk->begin[w] = begins[min(walk->first, tokens)];
        walk->end[w] = begins[min(walk->first + walk->size, tokens)];
    }
}

/** By the planner's warp. */
template <typename Args>
__device__ __forceinline__ RowWalk open_rows(const Args &a, ChunkRows *rows, const Team &t,
                                             int claimer, int blocks, int takes_own) {
    RowWalk walk = {rows, 1, 0, 0, 0, 0, {0}, {0}, 0, claimer};
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++) {
        int source = lane_source(a.group, w, takes_own);
        int tokens = source >= 0 ? a.plan.tokens[source] : 0;
        rows->tokens[w * 32 + threadIdx.x % 32] = tokens;
        walk.tokens = max(walk.tokens, tokens);
    }
    walk.tokens = __reduce_max_sync(~0u, walk.tokens);
    walk.size = chunk_size(t, a.chunk, walk.tokens, blocks);
    walk.first = claimed(claim(a.group, claimer)) * walk.size;
    look_ahead(a, &walk, takes_own);
    walk.then = claim(a.group, claimer);
    return walk;
}

/* On to the next chunk that has rows. 0: there is none. */
template <typename Args>
__device__ __forceinline__ int next_chunk(const Args &a, RowWalk *walk, int takes_own) {
    int lane = threadIdx.x % 32;
    while (walk->taken >= walk->all) {
        if (walk->first >= walk->tokens) return 0;
        int all = 0;
        __syncwarp();
#pragma unroll
        for (int w = 0; w < RANK_WORDS; w++) {
            if (w * 32 >= a.group.size) break;
            int turn = w * 32 + lane, through = all + ep_warp_prefix(walk->end[w] - walk->begin[w]);
            if (turn < a.group.size)
                walk->rows->begin[turn] = walk->begin[w], walk->rows->through[turn] = through;
            all = __shfl_sync(~0u, through, 31);
        }
        __syncwarp();
        walk->taken = 0, walk->all = all;
        walk->first = claimed(walk->then) * walk->size;
        look_ahead(a, walk, takes_own);
        walk->then = claim(a.group, walk->claimer);
    }
    return 1;
}

/* The next rows, and begin to look up their slots. */
template <typename Args>
__device__ __forceinline__ Round take_round(const Args &a, RowWalk *walk, const Team &t,
                                            int takes_own) {
    Round r = {0, 0, 0, 0, -1};
    if (!next_chunk(a, walk, takes_own)) return r;
    int at = walk->taken + t.index, low = 0, high = a.group.size - 1;
    r.count = min(t.count, walk->all - walk->taken);
    r.valid = t.index < r.count;
    walk->taken += r.count;
    while (r.valid && low < high) {
        int middle = (low + high) / 2;
        if (walk->rows->through[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    r.source = source_of(a.group, low);
    if (r.valid) r.row = walk->rows->begin[low] + at - (low ? walk->rows->through[low - 1] : 0);
    if (r.valid && t.k < a.top_k)
        r.slot = ep_slot(a.plan, a.group, a.shape, a.top_k, r.source, r.row, t.k);
    return r;
}

/**
 * The rows that come from all ranks, a team each, to `post(round, weight, number of the team's
 * first job)`, which returns 0 when all is in vain. A row makes `pieces` jobs. Returns how many
 * jobs there are. `takes_own`: whether rows that stay on this rank are among them.
 */
template <typename Args, typename Post>
__device__ __forceinline__ uint32_t walk_rows(const Args &a, ChunkRows *rows, const Team &t,
                                              int claimer, int blocks, int pieces, int takes_own,
                                              Post post) {
    RowWalk walk = open_rows(a, rows, t, claimer, blocks, takes_own);
    Round now = take_round(a, &walk, t, takes_own);
    uint32_t n = 0;
    while (now.count > 0) {
        /* The slot is here; else, as the compiler counts, it would be waited for together with the
         * next one, which is not. */
        int slot = __shfl_sync(~0u, now.slot, threadIdx.x % 32);
        Round next = take_round(a, &walk, t, takes_own);
        float weight = a.weighs && slot >= 0 ? a.slot_weights[slot] : 1;
        if (!post(now, weight, n + t.index * pieces)) break;
        n += now.count * pieces;
        now = next;
    }
    return n;
}

#endif
