/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_SCHEDULER_CUH
#define EP_RUNTIME_CUDA_SCHEDULER_CUH

/**
 * How scheduler warps claim work from the plan, in chunks of tokens: this rank's own tokens
 * (walk_tokens), or the rows produced here by other ranks' tokens (walk_rows). Blocks claim chunks
 * in ascending order; runtime/cuda/device.h explains why. Rows of this rank's own tokens that are
 * multiplied have chunks of their own (OwnWalk). `Args` is EpScatterArgs or EpGatherArgs.
 *
 * The first scheduler warp claims its first chunk before the block has entered its operation
 * (FirstClaim), the second one after that. Each other chunk is claimed while the one before is
 * posted. Where there are no more chunks than blocks, each block gets one: others have claimed
 * their first one by the time that a block claims its second.
 *
 * The caller's post() may wait for all rows of a batch at once: a chunk has no more tokens than a
 * ring has entries, so none of them waits for another one's credit.
 */

#include "runtime/cuda/pipeline.cuh"
#include "runtime/cuda/plan.cuh"

EP_VARIANT_BEGIN

/* ---- claims -------------------------------------------------------------------------------- */

/** Who claims what: sending blocks, receiving blocks, and these the rows of this rank's own tokens
 *  where they multiply rows. */
enum Claimer { SENDERS, RECEIVERS, OWN_ROWS };
static_assert(OWN_ROWS + 1 == EP_CLAIMERS, "each has a counter");

/** Claim the next chunk, by lane 0 of a scheduler warp. claimed_chunk waits for the result. */
__device__ __forceinline__ int claim_chunk(const EpCudaGroup &g, int claimer) {
    return ep_count_up(&g.state->claimed[claimer], threadIdx.x % 32 == 0);
}

__device__ __forceinline__ int claimed_chunk(int claim) {
    return __shfl_sync(~0u, claim, 0);
}

#define CHUNKS_PER_WARP 4

/** Returns the tokens of a chunk: at most `most`, at most one for each team, and few enough that
 *  each scheduler warp can have several chunks. */
__device__ __forceinline__ int chunk_size(const Team &t, int most, int tokens, int blocks,
                                          int schedulers) {
    return max(1, min(min(most, t.count), tokens / (blocks * schedulers * CHUNKS_PER_WARP)));
}

/** How a scheduler warp starts: what it needs of the group and of the plan before anything else. It
 *  loads this before ep_begin_operation, so that all these loads overlap with those of
 * ep_load_header. The plan's words are void until ep_begin_operation has returned. */
typedef struct FirstClaim {
    int claim;  /* of the first chunk */
    int tokens; /* of this rank; or the most of any source of this lane */
} FirstClaim;

/* ---- tokens -------------------------------------------------------------------------------- */

/** Begin to walk this rank's tokens. */
template <typename Args>
__device__ __forceinline__ FirstClaim claim_first_tokens(const Args &a, int claimer) {
    int claim = claim_chunk(a.group, claimer);
    return FirstClaim{claim, ep_num_tokens(a.plan, a.group)};
}

/** Begin to load entry k of this team's token in the chunk from `first` on; past the end it is an
 *  empty entry. check_entry completes it. */
template <typename Args>
__device__ __forceinline__ EpEntry load_entry(const Args &a, const Team &t, int first, int size,
                                              int tokens) {
    EpEntry none = {-1, 0, -1, 0, 0};
    int token = first + t.index;
    int valid = t.index < size && token < tokens && t.k < a.top_k;
    return valid ? a.plan.entries[(int64_t)token * a.top_k + t.k] : none;
}

/* The words may be damaged, and the owner masked. Only here the entry is waited for: the next one,
 * and the claim after it, are on their way by then. */
template <typename Args> __device__ __forceinline__ EpEntry check_entry(const Args &a, EpEntry e) {
    EpEntry none = {-1, 0, -1, 0, 0};
    if (e.owner >= a.owners) return none;
    if (EP_MASKED && e.owner >= 0 && !ep_is_alive(e.owner)) return none;
    e.slot = ep_flat_position(a.plan, a.group.rank, e.row, e.slot);
    if (e.owner == a.group.rank) e.slot = ep_check_slot(a.plan, e.slot);
    return e;
}

/** Returns the entry of another lane, as load_entry has left it. By the whole warp. */
__device__ __forceinline__ EpEntry shuffle_entry(const EpEntry &e, int lane) {
    uint32_t names = (uint32_t)(uint16_t)e.owner | (uint32_t)(uint16_t)e.expert << 16;
    names = __shfl_sync(~0u, names, lane);
    return EpEntry{__shfl_sync(~0u, e.slot, lane), __shfl_sync(~0u, e.row, lane),
                   (int16_t)(names & 0xffff), (int16_t)(names >> 16),
                   __shfl_sync(~0u, e.leader, lane)};
}

/** How far a scheduler warp has come with this rank's tokens. */
typedef struct TokenWalk {
    int tokens, size;        /* of this rank; of a chunk */
    int first;               /* token of the next chunk */
    EpEntry entry;           /* of this team's token there, still being loaded: see check_entry */
    int next_claim, claimer; /* claim of the chunk after it */
} TokenWalk;

template <typename Args>
__device__ __forceinline__ TokenWalk open_tokens(const Args &a, const Team &t,
                                                 const FirstClaim &first_claim, int claimer,
                                                 int blocks) {
    TokenWalk walk = {};
    walk.tokens = first_claim.tokens, walk.claimer = claimer;
    walk.size = chunk_size(t, a.chunk, first_claim.tokens, blocks, a.schedulers);
    walk.first = claimed_chunk(first_claim.claim) * walk.size;
    walk.next_claim = claim_chunk(a.group, claimer);
    walk.entry = load_entry(a, t, walk.first, walk.size, walk.tokens);
    return walk;
}

/** Move on to the chunk after the next one. */
template <typename Args>
__device__ __forceinline__ void next_tokens(const Args &a, const Team &t, TokenWalk *walk) {
    walk->first = claimed_chunk(walk->next_claim) * walk->size;
    walk->entry = load_entry(a, t, walk->first, walk->size, walk->tokens);
    walk->next_claim = claim_chunk(a.group, walk->claimer);
}

/**
 * Claim this rank's tokens and pass them to `post(entry, token, valid, number of tokens)`, one
 * token per team, until post returns 0: a wait has failed. `ready()` is called once, while the
 * first entries are loaded; it returns 0 if a wait has failed.
 */
template <typename Args, typename Ready, typename Post>
__device__ __forceinline__ void walk_tokens(const Args &a, const Team &t,
                                            const FirstClaim &first_claim, int claimer, int blocks,
                                            Ready ready, Post post) {
    TokenWalk walk = open_tokens(a, t, first_claim, claimer, blocks);
    if (!ready()) return;
    while (walk.first < walk.tokens) {
        int token = walk.first + t.index, valid = t.index < walk.size && token < walk.tokens;
        int count = min(walk.size, walk.tokens - walk.first);
        EpEntry entry = walk.entry;
        next_tokens(a, t, &walk);
        if (!post(check_entry(a, entry), token, valid, count)) return;
    }
}

/* ---- rows ---------------------------------------------------------------------------------- */

/** The rows of a chunk, in shared memory, by source in turn: the next rank comes first, so that not
 *  all ranks turn to the same one. This rank would be the last, and has none. */
typedef struct ChunkRows {
    int32_t begin[EP_CUDA_MAX_RANKS];   /* first row of each source */
    int32_t through[EP_CUDA_MAX_RANKS]; /* rows of each source and those before it */
    int32_t tokens[RANK_WORDS * 32];    /* of each source, read by its own lane alone */
} ChunkRows;

__device__ __forceinline__ int source_of(const EpCudaGroup &g, int turn) {
    int source = turn + g.rank + 1;
    return source < g.size ? source : source - g.size;
}

/** Rows of a source. */
typedef struct RowRange {
    int begin, end;
} RowRange;

/** How far a scheduler warp has come with the rows of other ranks. */
typedef struct RowWalk {
    ChunkRows *rows;
    int size, most_tokens;   /* tokens of a chunk; most tokens of any source */
    int taken, total;        /* rows of the current chunk */
    int next_first;          /* first token of the next chunk */
    RowRange next;           /* the next chunk's rows, for this lane's source number 0 */
    int next_claim, claimer; /* claim of the chunk after it */
} RowWalk;

/** One row for each team. */
typedef struct RowBatch {
    int count; /* teams that have a row */
    int valid; /* whether this team has one */
    int source, row;
    int slot;       /* of this lane's entry of its team's row, -1: none */
    uint32_t chain; /* see ep_follow_chain */
} RowBatch;

/* Returns source number w of this lane, -1: none. */
__device__ __forceinline__ int lane_source(const EpCudaGroup &g, int w) {
    int turn = w * 32 + (int)threadIdx.x % 32;
    return turn < g.size - 1 ? source_of(g, turn) : -1;
}

/* Begin to load the next chunk's rows of source number w of this lane. A lane without a source
 * reads with 0 tokens, so that no load depends on a condition, and all of them overlap. */
template <typename Args>
__device__ __forceinline__ RowRange load_rows(const Args &a, const RowWalk *walk, int w) {
    int source = max(0, lane_source(a.group, w));
    int tokens = walk->rows->tokens[w * 32 + threadIdx.x % 32];
    uint32_t stride = (uint32_t)a.group.layout.max_tokens + 1;
    const int32_t *begins = a.plan.begins + (uint64_t)(uint32_t)source * stride;
    return RowRange{begins[min(walk->next_first, tokens)],
                    begins[min(walk->next_first + walk->size, tokens)]};
}

/** Begin to walk the rows of other ranks. */
template <typename Args>
__device__ __forceinline__ FirstClaim claim_first_rows(const Args &a, ChunkRows *rows,
                                                       int claimer) {
    FirstClaim first_claim = {claim_chunk(a.group, claimer), 0};
#pragma unroll
    for (int w = 0; w < RANK_WORDS; w++) {
        int source = lane_source(a.group, w);
        int sends = source >= 0 && ep_find_alive(a.group, source);
        int tokens = sends ? ep_check_count(a.group, a.plan.tokens[source]) : 0;
        rows->tokens[w * 32 + threadIdx.x % 32] = tokens;
        first_claim.tokens = max(first_claim.tokens, tokens);
    }
    return first_claim;
}

template <typename Args>
__device__ __forceinline__ RowWalk open_rows(const Args &a, ChunkRows *rows, const Team &t,
                                             const FirstClaim &first_claim, int claimer,
                                             int blocks) {
    RowWalk walk = {rows, 1, 0, 0, 0, 0, {0, 0}, 0, claimer};
    walk.most_tokens = __reduce_max_sync(~0u, first_claim.tokens);
    walk.size = chunk_size(t, a.chunk, walk.most_tokens, blocks, a.schedulers);
    walk.next_first = claimed_chunk(first_claim.claim) * walk.size;
    walk.next = load_rows(a, &walk, 0);
    walk.next_claim = claim_chunk(a.group, claimer);
    return walk;
}

/* List the next chunk's rows by source, and return their number. Those of 32 ranks are here
 * already; those of other ranks are loaded now, since registers are few. */
template <typename Args> __device__ __forceinline__ int list_rows(const Args &a, RowWalk *walk) {
    int total = 0;
    __syncwarp();
#pragma unroll 1
    for (int w = 0; w * 32 < a.group.size; w++) {
        RowRange range = walk->next;
        if (w > 0) range = load_rows(a, walk, w);
        int turn = w * 32 + (int)threadIdx.x % 32, lanes = min(32, a.group.size - w * 32);
        int begin = ep_check_count(a.group, range.begin);
        int rows = max(0, ep_check_count(a.group, range.end) - begin);
        int through = total + ep_warp_prefix(rows, lanes);
        if (turn < a.group.size)
            walk->rows->begin[turn] = begin, walk->rows->through[turn] = through;
        total = __shfl_sync(~0u, through, lanes - 1);
    }
    __syncwarp();
    return total;
}

/* Move on to the next chunk that has rows. Returns 0 if there is none. */
template <typename Args> __device__ __forceinline__ int next_chunk(const Args &a, RowWalk *walk) {
    while (walk->taken >= walk->total) {
        if (walk->next_first >= walk->most_tokens) return 0;
        walk->taken = 0, walk->total = list_rows(a, walk);
        walk->next_first = claimed_chunk(walk->next_claim) * walk->size;
        walk->next = load_rows(a, walk, 0);
        walk->next_claim = claim_chunk(a.group, walk->claimer);
    }
    return 1;
}

/* Take the next rows, one per team, and begin to load their slots, or the first of them. */
template <typename Args>
__device__ __forceinline__ RowBatch take_batch(const Args &a, RowWalk *walk, const Team &t) {
    RowBatch r = {0, 0, 0, 0, -1, 0};
    if (!next_chunk(a, walk)) return r;
    int at = walk->taken + t.index, low = 0, high = a.group.size - 1;
    r.count = min(t.count, walk->total - walk->taken);
    int valid = t.index < r.count;
    walk->taken += r.count;
    while (valid && low < high) {
        int middle = (low + high) / 2;
        if (walk->rows->through[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    r.source = source_of(a.group, low);
    if (valid) r.row = walk->rows->begin[low] + at - (low ? walk->rows->through[low - 1] : 0);
    if (valid && t.k < a.top_k) {
        EpChain chain = ep_load_slot(a.plan, a.group, a.top_k, r.source, r.row, t.k);
        r.slot = chain.slot, r.chain = chain.mask;
    }
    return r;
}

/* Go on to this lane's slot where the batch has the first one of its row. */
template <typename Args>
__device__ __forceinline__ void follow_chains(const Args &a, const Team &t, RowBatch *r) {
    if (a.plan.sizes.form == EP_ROUTES_CHAINED)
        r->slot = ep_follow_chain(a.plan, EpChain{r->slot, r->chain}, t.k);
}

/**
 * Claim the rows of other ranks, one per team at a time, until a wait fails: `await(batch, word)`
 * returns 0. Pass them to `post(batch, weight)`. What `preload(batch)` has begun to load before the
 * next batch is taken, `await` gets.
 *
 * What the next batch needs of the plan is loaded meanwhile: its slots, or the first of them,
 * during `await`, and the others of chains during `post`. `post_first_batch_early`: but the first
 * batch is posted before anything of the next one is loaded.
 */
template <typename Args, typename Preload, typename Await, typename Post>
__device__ __forceinline__ void
walk_rows(const Args &a, ChunkRows *rows, const Team &t, const FirstClaim &first_claim, int claimer,
          int blocks, int post_first_batch_early, Preload preload, Await await, Post post) {
    RowWalk walk = open_rows(a, rows, t, first_claim, claimer, blocks);
    RowBatch batch = {0, 0, 0, 0, -1, 0};
    for (int takes = 1, early = post_first_batch_early;;) {
        /* The shuffle makes the compiler wait for this slot here. Otherwise it would wait for it
         * together with the next batch's slot, which is still being loaded. */
        int slot = __shfl_sync(~0u, batch.slot, threadIdx.x % 32);
        batch.slot = slot = ep_check_slot(a.plan, slot);
        batch.valid = t.index < batch.count;
        float weight = a.t.weighs && slot >= 0 ? a.t.slot_weights[slot] : 1;
        uint64_t word = preload(batch);
        RowBatch next = {0, 0, 0, 0, -1, 0};
        if (takes) next = take_batch(a, &walk, t);
        if (takes && !batch.count && !next.count) return;
        if (batch.count && !await(batch, word)) return;
        follow_chains(a, t, &next);
        if (batch.count) post(batch, weight), early = 0;
        takes = !early;
        batch = next;
    }
}

/* ---- rows that stay here ------------------------------------------------------------------- */

/** How far a scheduler warp has come with the rows of this rank's tokens that stay here. They wait
 *  for nobody, so they are posted while rows of other ranks are waited for. */
typedef struct OwnWalk {
    int total, size; /* rows; of a chunk */
    int next_claim;  /* of the chunk after the next one */
    int first;       /* row of the next chunk */
    EpChain chain;   /* of this lane's entry of its team's row there; being loaded */
} OwnWalk;

/* Returns the next chunk, one row for each team, without its slots. */
template <typename Args>
__device__ __forceinline__ RowBatch own_batch(const Args &a, const Team &t, const OwnWalk *walk) {
    RowBatch r = {min(walk->size, max(0, walk->total - walk->first)), 0, a.group.rank, 0, -1, 0};
    r.valid = t.index < r.count;
    if (r.valid) r.row = walk->first + t.index;
    return r;
}

/* Take the chunk that has been claimed, and claim the one after it. */
template <typename Args>
__device__ __forceinline__ void next_own(const Args &a, const Team &t, OwnWalk *walk) {
    walk->first = claimed_chunk(walk->next_claim) * walk->size;
    walk->chain = EpChain{-1, 0};
    RowBatch r = own_batch(a, t, walk);
    if (r.valid && t.k < a.top_k)
        walk->chain = ep_load_slot(a.plan, a.group, a.top_k, r.source, r.row, t.k);
    walk->next_claim = claim_chunk(a.group, OWN_ROWS);
}

template <typename Args>
__device__ __forceinline__ OwnWalk open_own(const Args &a, const Team &t, int blocks) {
    int rank = a.group.rank, tokens = ep_check_count(a.group, a.plan.tokens[rank]);
    uint32_t stride = (uint32_t)a.group.layout.max_tokens + 1;
    int rows = a.plan.begins[(uint64_t)(uint32_t)rank * stride + tokens];
    OwnWalk walk = {ep_check_count(a.group, rows), 1, claim_chunk(a.group, OWN_ROWS), 0, {}};
    walk.size = chunk_size(t, a.chunk, walk.total, blocks, a.schedulers);
    next_own(a, t, &walk);
    return walk;
}

/** Pass the next rows that stay here to `post(batch, weight)`, one for each team. Returns 0 if none
 *  are left. */
template <typename Args, typename Post>
__device__ __forceinline__ int post_own(const Args &a, const Team &t, OwnWalk *walk, Post post) {
    RowBatch batch = own_batch(a, t, walk);
    if (!batch.count) return 0;
    batch.slot = walk->chain.slot, batch.chain = walk->chain.mask;
    follow_chains(a, t, &batch);
    batch.slot = ep_check_slot(a.plan, batch.slot);
    float weight = a.t.weighs && batch.slot >= 0 ? a.t.slot_weights[batch.slot] : 1;
    next_own(a, t, walk);
    post(batch, weight);
    return 1;
}

EP_VARIANT_END

#endif
