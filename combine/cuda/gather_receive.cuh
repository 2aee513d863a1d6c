/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_GATHER_RECEIVE_CUH
#define EP_COMBINE_CUDA_GATHER_RECEIVE_CUH

/**
 * A receiving block of gather.cu: for each token of this rank, the total of the sums of all ranks
 * that it went to.
 */

#include "combine/cuda/gather_sum.cuh"

/* ---- terms --------------------------------------------------------------------------------- */

/* Returns the place of a rank, or of another node, in the order of summation. */
template <Form FORM> __device__ __forceinline__ int place_of(const EpGatherArgs &a, int owner) {
    return FORM != ONE_NODE && a.nodes.order && owner >= 0 ? a.nodes.order[owner] : owner;
}

/* Returns the position of a lane's term in its team's sum: by place, and within this rank by k.
 * Counts the lanes before it bit by bit of the places, from the highest bit down: as long as the
 * bits are equal, a lane with 0 where this one has 1 comes first. On one rank there is no bit to
 * compare. */
__device__ __forceinline__ int order_term(const Team &t, int is_term, int place) {
    int highest = __reduce_max_sync(~0u, is_term ? place : 0);
    unsigned equal = __ballot_sync(~0u, is_term) & t.mask, before = 0;
    for (int bit = 31 - __clz(highest); bit >= 0; bit--) {
        unsigned ones = __ballot_sync(~0u, place >> bit & 1);
        if (place >> bit & 1) before |= equal & ~ones;
        equal &= place >> bit & 1 ? ones : ~ones;
    }
    return __popc(before | (equal & ((1u << threadIdx.x % 32) - 1)));
}

/* Returns the record of another node's sum; `owner` is beyond the ranks. */
__device__ __forceinline__ const char *node_sum(const EpGatherArgs &a, int owner, int row) {
    int64_t at = (int64_t)(owner - a.group.size) * a.nodes.places + row;
    return a.nodes.records + at * a.record.bytes;
}

/* Whether an entry's sum comes from elsewhere. A damaged place in a node's records is none. */
template <Form FORM>
__device__ __forceinline__ int is_elsewhere(const EpGatherArgs &a, const EpEntry &e) {
    if (e.owner < 0 || e.owner == a.group.rank) return 0;
    return FORM == ONE_NODE || e.owner < a.group.size || (uint32_t)e.row < (uint32_t)a.nodes.places;
}

/* Returns a lane's term of its token's sum: the sum of another rank or node, or one of this rank's
 * own slots, which are added up on their own first. Its weight is 1. */
template <Form FORM>
__device__ __forceinline__ Term make_term(const EpGatherArgs &a, const Team &t, const EpEntry &e) {
    const EpCudaGroup &g = a.group;
    int is_own = e.owner == g.rank && e.slot >= 0, place = place_of<FORM>(a, e.owner);
    int is_sum = is_elsewhere<FORM>(a, e) && e.leader, own, before;
    team_rank(t, is_own, &own);
    team_rank(t, is_sum && place < place_of<FORM>(a, g.rank), &before);
    Term term = {NULL, order_term(t, is_own || is_sum, place), 1, -1, e.row, before, before + own};
    if (FORM != ONE_NODE && is_sum && e.owner >= g.size)
        term.from = node_sum(a, e.owner, e.row);
    else if (is_sum)
        term.from = ep_ring(g, g.rank, e.owner, e.row), term.peer = e.owner;
    if (is_own) term.from = a.t.rows + e.slot * a.t.row_bytes;
    return term;
}

/* ---- the scheduler warps ------------------------------------------------------------------- */

/* A token that a team holds until all its sums are here; -1: none. */
typedef struct HeldToken {
    int token;
    Term term; /* of this lane */
} HeldToken;

/* Give the next chunk's tokens to teams that hold none: `free` are the first lanes of such teams. A
 * weight is only begun to load. */
template <Form FORM>
__device__ __forceinline__ void hold_chunk(const EpGatherArgs &a, const Team &t, TokenWalk *walk,
                                           unsigned free, HeldToken *held) {
    int i = __popc(free & ((1u << t.index * t.width) - 1)), token = walk->first + i;
    EpEntry e = check_entry(a, shuffle_entry(walk->entry, (i * t.width + t.k) % 32));
    Term term = make_term<FORM>(a, t, e);
    if (held->token < 0 && t.index < t.count && i < walk->size && token < walk->tokens) {
        *held = HeldToken{token, term};
        if (a.t.weighs && e.owner == a.group.rank && e.slot >= 0)
            held->term.weight = a.t.slot_weights[e.slot];
    }
    next_tokens(a, t, walk);
}

/*
 * A scheduler warp: claim tokens, and post those whose sums are here, a token for each team. Rows
 * come in another order than they were sent in. So the teams hold two chunks or more, if these have
 * room, and who is here first is posted first. Otherwise a chunk is posted as a whole: a pass
 * through this loop takes a microsecond, whatever it posts. Looking is not waiting: no token that
 * is held keeps another one from being posted.
 */
template <Form FORM>
__device__ void schedule_tokens(const EpGatherArgs &a, Pipeline *p, const Start &start,
                                uint32_t epoch, int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.pipeline);
    TokenWalk walk = open_tokens(a, t, start, RECEIVERS, blocks);
    int leads = t.k == 0 && t.index < t.count;
    int is_whole = t.count < 2 * walk.size;
    HeldToken held = {-1, {NULL, 0, 1, -1, 0, 0, 0}};
    EpTimeout timeout = {0, 0};
    for (;;) {
        unsigned free = __ballot_sync(~0u, leads && held.token < 0);
        if (walk.first < walk.tokens && __popc(free) >= walk.size) {
            hold_chunk<FORM>(a, t, &walk, free, &held);
            continue;
        }
        if (__popc(free) == t.count) break;
        int alive = 1, here = 1;
        if (held.token >= 0 && held.term.peer >= 0)
            here = ep_look_for_record(g, epoch, held.term.peer, held.term.row, &timeout, &alive);
        if (!__all_sync(~0u, alive)) break;
        unsigned missing = __ballot_sync(~0u, !here);
        int ready = held.token >= 0 && !(missing & t.mask);
        unsigned posted = __ballot_sync(~0u, leads && ready);
        if (!posted || (is_whole && missing)) continue;
        ep_fence_proxy_global();
        int before = __popc(posted & ((1u << t.index * t.width) - 1)), pieces = a.pipeline.pieces;
        uint32_t number = pipeline_take(p, __popc(posted) * pieces) + before * pieces;
        post_sum<FORM>(a, p, t, number, held.term,
                       a.t.out_rows + (int64_t)held.token * a.target.row_stride, held.token, g.rank,
                       ready);
        if (ready) held.token = -1;
        timeout = EpTimeout{0, 0};
    }
    pipeline_end(p, t);
}

/* ---- the metadata warps -------------------------------------------------------------------- */

/* Returns the value of an entry whose slot is here. The entry names the slot, unless it shares a
 * flat row: the row's chain of slots would take up to K loads, one after another. */
__device__ __forceinline__ float own_value(const EpGatherArgs &a, const EpEntry &e, int k) {
    if (a.shape.has_rows) return value_of(a, a.group.rank, e.row, k);
    int slot = ep_check_slot(a.plan, e.slot);
    return slot >= 0 ? a.t.slot_values[slot] : 0;
}

/* Returns the value of an entry: from its slot here, or from the record of its owner's sum. */
__device__ __forceinline__ float returned_value(const EpGatherArgs &a, const EpEntry &e, int k) {
    const EpCudaGroup &g = a.group;
    if (e.owner < 0 || e.owner >= a.owners) return 0;
    if (e.owner == g.rank) return own_value(a, e, k);
    if (!is_elsewhere<NODES>(a, e)) return 0;
    const char *record =
        e.owner < g.size ? ep_ring(g, g.rank, e.owner, e.row) : node_sum(a, e.owner, e.row);
    return __ldcg((const float *)(record + a.record.weights) + k);
}

/* The metadata warps of a receiving block: write the values of a token's entries. */
__device__ void receive_values(const EpGatherArgs &a, Pipeline *p, int warp) {
    int k = threadIdx.x % 32;
    pipeline_metadata(p, warp, METADATA_WARPS, [&](int j, uint32_t) {
        int64_t token = p->index[j];
        float *out = (float *)((char *)a.t.out_values + token * a.target.value_stride);
        if (k < a.top_k) out[k] = returned_value(a, a.plan.entries[token * a.top_k + k], k);
    });
}

/* Zero the rows of a fixed-shape buffer past this step's tokens, which have no slots. By the
 * compute warps. */
__device__ void zero_extra_rows(const EpGatherArgs &a, const Role &role, int thread) {
    int64_t tokens = a.plan.header->num_tokens;
    for (int64_t t = tokens + role.index; t < a.t.out_num_rows; t += role.count) {
        for (int64_t at = thread * 16; at < a.t.row_bytes; at += COMPUTE_THREADS * 16)
            *(uint4 *)(a.t.out_rows + t * a.t.row_bytes + at) = make_uint4(0, 0, 0, 0);
        if (a.t.carries_values && thread < a.top_k) a.t.out_values[t * a.top_k + thread] = 0;
    }
}

/* ---- all warps ---------------------------------------------------------------------------- */

template <Form FORM>
__device__ void receive(const EpGatherArgs &a, Pipeline *p, const Start &start, uint32_t epoch,
                        int blocks) {
    constexpr PipelineWork work = FORM == PACKED ? WORK_PACKED : WORK_COMPUTE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_tokens<FORM>(a, p, start, epoch, blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p, work);
    else if (pipeline_is_store_warp(warp) && lane == 0)
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 0, FORM == PACKED && a.rounds, 0);
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, CREDITS);
    else if (warp >= FIRST_METADATA_WARP && a.t.carries_values)
        receive_values(a, p, warp - FIRST_METADATA_WARP);
}

#endif
