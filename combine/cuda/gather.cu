/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather over NVLink: slots to token rows, for ep_combine and ep_dispatch_backward.
 *
 * One launch of sending and receiving blocks (pipeline_role). For every row that another rank has
 * sent, a sending block adds up the row's slots, and pushes the sum, rounded to the rows' type or
 * packed (gather_packed.cuh), through the ring back to that rank. A receiving block takes this
 * rank's tokens: it waits for the sums of all ranks that a token went to, adds them in ascending
 * rank, this rank's own slots unrounded in their turn, and writes the token's row.
 * runtime/cuda/pipeline.cuh describes the warps of a block; runtime/cuda/device.h how blocks divide
 * the work, why there is no circular wait, and the memory order of records, heads and credits.
 *
 * Who waits on whom: a receiving block waits for the heads of a token's rows; a sending block waits
 * for all ranks' arrivals and for credits, that is, until the other rank's receiving block has
 * emptied a record of the ring.
 */
#include "combine/cuda/gather_packed.cuh"
#include "handles/cuda/relay_marks.cuh"

#define GATHER_THREADS (FIRST_COMPUTE_WARP * 32 + COMPUTE_THREADS)

typedef struct Shared {
    Pipeline pipeline;
    ChunkRows rows;
} Shared;

/* ---- sending blocks ------------------------------------------------------------------------- */

/* For each row of another rank: the sum of its slots, sent back to that rank. */

/* Post the work items of a batch of rows, a row for each team. */
template <Form FORM>
__device__ __forceinline__ void post_batch(const EpGatherArgs &a, Pipeline *p, const Team &t,
                                           uint32_t number, const RowBatch &r, float weight) {
    int terms, at = team_rank(t, r.slot >= 0, &terms);
    Term term = {NULL, at, weight, -1, r.row, 0, terms};
    if (r.slot >= 0) term.from = a.t.rows + r.slot * a.t.row_bytes;
    if (r.valid && t.k == 0) term.peer = r.source;
    char *to = r.valid ? ep_ring(a.group, r.source, a.group.rank, r.row) : NULL;
    post_sum<FORM>(a, p, t, number, term, to, r.row, r.source, r.valid);
}

/* The scheduler warp of a sending block. A receiving block adds up the slots of own rows in
 * place. */
template <Form FORM>
__device__ void schedule_sums(const EpGatherArgs &a, Pipeline *p, ChunkRows *rows,
                              const Start &start, uint32_t epoch, int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.pipeline);
    int arrived = 0;
    auto await = [&](const RowBatch &r) {
        if (!arrived && !(arrived = ep_await_arrivals(g, epoch))) return 0;
        int waits = r.valid && t.k == 0;
        return __all_sync(~0u, !waits || ep_await_room(g, epoch, r.source, r.row));
    };
    auto post = [&](const RowBatch &r, float weight, uint32_t number) {
        post_batch<FORM>(a, p, t, number, r, weight);
    };
    pipeline_end(p, t,
                 walk_rows(a, rows, t, start, SENDERS, blocks, a.pipeline.pieces, 0, await, post));
    if (!arrived) ep_await_arrivals(g, epoch);
}

/* The metadata warps of a sending block: copy the values of a row's slots into the record of its
 * sum. */
__device__ void send_values(const EpGatherArgs &a, Pipeline *p, int warp) {
    const EpCudaGroup &g = a.group;
    int k = threadIdx.x % 32;
    pipeline_metadata(p, warp, METADATA_WARPS, [&](int j, uint32_t) {
        int source = p->source[j], row = p->index[j];
        char *record = ep_ring(g, source, g.rank, row);
        if (k < a.top_k) ((float *)(record + a.record.weights))[k] = value_of(a, source, row, k);
    });
}

template <Form FORM>
__device__ void send(const EpGatherArgs &a, Shared *s, const Start &start, uint32_t epoch,
                     int blocks) {
    Pipeline *p = &s->pipeline;
    constexpr PipelineWork work = FORM == PACKED ? WORK_PACKED : WORK_COMPUTE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == SCHEDULER_WARP)
        schedule_sums<FORM>(a, p, &s->rows, start, epoch, blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p, work);
    else if (pipeline_is_store_warp(warp) && lane == 0)
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 1, FORM == PACKED);
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, 1);
    else if (warp >= FIRST_METADATA_WARP && a.t.carries_values)
        send_values(a, p, warp - FIRST_METADATA_WARP);
}

/* ---- receiving blocks ---------------------------------------------------------------------- */

/* For each token of this rank: the total of the sums of all ranks that it went to. */

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
    return a.nodes.records + (owner - a.group.size) * a.nodes.stride + row * a.record.bytes;
}

/* Returns a lane's term of its token's sum: the sum of another rank or node, or one of this rank's
 * own slots, which are added up on their own first. */
template <Form FORM>
__device__ __forceinline__ Term make_term(const EpGatherArgs &a, const Team &t, const EpEntry &e,
                                          float weight) {
    const EpCudaGroup &g = a.group;
    int is_own = e.owner == g.rank && e.slot >= 0, place = place_of<FORM>(a, e.owner);
    int is_sum = e.owner >= 0 && e.owner != g.rank && e.leader, own, before;
    team_rank(t, is_own, &own);
    team_rank(t, is_sum && place < place_of<FORM>(a, g.rank), &before);
    Term term = {NULL, order_term(t, is_own || is_sum, place), 1, -1, e.row, before, before + own};
    if (FORM != ONE_NODE && is_sum && e.owner >= g.size)
        term.from = node_sum(a, e.owner, e.row);
    else if (is_sum)
        term.from = ep_ring(g, g.rank, e.owner, e.row), term.peer = e.owner;
    if (is_own) term.from = a.t.rows + e.slot * a.t.row_bytes, term.weight = weight;
    return term;
}

/* The scheduler warp of a receiving block. */
template <Form FORM>
__device__ void schedule_tokens(const EpGatherArgs &a, Pipeline *p, const Start &start,
                                uint32_t epoch, int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.pipeline);
    auto post = [&](const EpEntry &e, int token, int valid, uint32_t number) {
        int weighs = a.t.weighs && e.owner == g.rank && e.slot >= 0;
        Term term = make_term<FORM>(a, t, e, weighs ? a.t.slot_weights[e.slot] : 1);
        int alive = term.peer < 0 || ep_await_record(g, epoch, term.peer, term.row);
        if (!__all_sync(~0u, alive)) return 0;
        post_sum<FORM>(a, p, t, number, term, a.t.out_rows + (int64_t)token * a.target.row_stride,
                       token, g.rank, valid);
        return 1;
    };
    auto ready = [] { return 1; };
    pipeline_end(p, t, walk_tokens(a, t, start, RECEIVERS, blocks, a.pipeline.pieces, ready, post));
}

/* Returns the value of an entry whose slot is here. The entry names the slot, unless it shares a
 * flat row: the row's chain of slots would take up to K loads, one after another. */
__device__ __forceinline__ float own_value(const EpGatherArgs &a, const EpEntry &e, int k) {
    if (a.shape.layout == EP_LAYOUT_FLAT) return value_of(a, a.group.rank, e.row, k);
    int slot = ep_check_slot(a.plan, e.slot);
    return slot >= 0 ? a.t.slot_values[slot] : 0;
}

/* Returns the value of an entry: from its slot here, or from the record of its owner's sum. */
__device__ __forceinline__ float returned_value(const EpGatherArgs &a, const EpEntry &e, int k) {
    const EpCudaGroup &g = a.group;
    if (e.owner < 0 || e.owner >= a.owners) return 0;
    if (e.owner == g.rank) return own_value(a, e, k);
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

template <Form FORM>
__device__ void receive(const EpGatherArgs &a, Pipeline *p, const Start &start, uint32_t epoch,
                        int blocks) {
    constexpr PipelineWork work = FORM == PACKED ? WORK_PACKED : WORK_COMPUTE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == SCHEDULER_WARP)
        schedule_tokens<FORM>(a, p, start, epoch, blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p, work);
    else if (pipeline_is_store_warp(warp) && lane == 0)
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 0, FORM == PACKED && a.rounds);
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, 0);
    else if (warp >= FIRST_METADATA_WARP && a.t.carries_values)
        receive_values(a, p, warp - FIRST_METADATA_WARP);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <Form FORM>
__global__ void __launch_bounds__(GATHER_THREADS, 1)
    gather_kernel(const __grid_constant__ EpGatherArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    int thread = (int)threadIdx.x - FIRST_COMPUTE_WARP * 32;
    Shared *shared = ep_keep_shared(&s);
    uint32_t epoch;
    EpLook look = ep_look(a.group, a.plan);
    Role role = pipeline_role(a.receivers);
    Start start = {0, 0};
    if (threadIdx.x / 32 == SCHEDULER_WARP)
        start =
            role.receives ? start_tokens(a, RECEIVERS) : start_rows(a, &shared->rows, SENDERS, 0);
    pipeline_open(&shared->pipeline, a.pipeline, memory, COMPUTE_WARPS, a.t.carries_values,
                  a.top_k);
    int reads_messages = FORM != ONE_NODE && a.marks.watch != NULL;
    if (reads_messages) ep_look_at_stamps(a.marks, &look);
    if (!ep_enter(a.group, a.plan, look, &epoch)) {
        if (reads_messages) ep_report_stamps(a.group, a.marks);
        ep_report_plan(a.group, a.plan);
        ep_leave(a.group, epoch, 0);
        if (FORM != ONE_NODE && a.stamp) ep_seal_stamp(a.group, a.stamp);
        return;
    }
    if (reads_messages) ep_take_messages(a.marks);
    ep_arrive(a.group, epoch, 0, 0);
    /* First, since nothing has been loaded yet that could be summed. */
    if (thread >= 0 && role.receives && a.plan.use.fills_rest) zero_extra_rows(a, role, thread);
    int rounds = FORM != ONE_NODE && role.receives && a.rounds;
    if (thread >= 0 && FORM == PACKED)
        sum_packed(a, &shared->pipeline, rounds, !role.receives || rounds, thread);
    else if (thread >= 0)
        sum(a, &shared->pipeline, rounds, thread);
    else if (role.receives)
        receive<FORM>(a, &shared->pipeline, start, epoch, role.count);
    else
        send<FORM>(a, shared, start, epoch, role.count);
    ep_leave(a.group, epoch, 0);
    if (FORM != ONE_NODE && a.stamp) ep_seal_stamp(a.group, a.stamp);
}

extern "C" int ep_cuda_open_gather(int shared_bytes) {
    int error = ep_open_kernel(gather_kernel<ONE_NODE>, shared_bytes);
    if (!error) error = ep_open_kernel(gather_kernel<NODES>, shared_bytes);
    return error ? error : ep_open_kernel(gather_kernel<PACKED>, shared_bytes);
}

extern "C" int ep_cuda_launch_gather(const void *args, int blocks, void *stream) {
    const EpGatherArgs *a = (const EpGatherArgs *)args;
    int has_nodes = a->rounds || a->nodes.order || a->nodes.records;
    auto kernel = a->t.quant > EP_QUANT_NONE ? gather_kernel<PACKED>
                  : has_nodes                ? gather_kernel<NODES>
                                             : gather_kernel<ONE_NODE>;
    return ep_launch(kernel, blocks, GATHER_THREADS, pipeline_bytes(a->pipeline), stream, *a);
}
