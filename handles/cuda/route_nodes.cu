/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on several nodes; handles/cuda/route_nodes.h has the story.
 *
 * Who waits on whom: nobody. The stream orders the kernels, and the exchange of messages is NCCL's.
 * It also keeps the ranks of a node within one operation of each other, as arrivals do elsewhere:
 * it is complete on a rank only once every rank has entered this operation.
 */
#include "handles/cuda/route_assign.cuh"

/* ---- collect ------------------------------------------------------------------------------- */

/* Returns the expert of an entry, -1 for none: also where an earlier k has it, if one is enough. */
__device__ __forceinline__ int collect_entry(const EpRouteArgs &a, int64_t token, int k) {
    const EpPrepareArgs &p = a.p;
    int64_t at = token * p.top_k;
    int expert = expert_of(p, load_index(p, at + k));
    for (int i = 0; i < k && p.shape.merges && expert >= 0; i++)
        if (expert_of(p, load_index(p, at + i)) == expert) expert = NO_EXPERT;
    if (expert == BAD_EXPERT) {
        atomicAdd(&p.group.state->bad_count, 1ull);
        atomicMax(&p.group.state->bad_entry, ~(unsigned long long)(at + k));
    }
    return expert < 0 ? -1 : expert;
}

__global__ void __launch_bounds__(EP_ROUTE_THREADS)
    collect_routing(const __grid_constant__ EpRouteArgs a) {
    uint32_t epoch = ep_epoch(a.p.group), digest = a.p.group.digest;
    char *message = a.messages + a.t.self * a.message_bytes;
    int32_t *routing = (int32_t *)((EpRoutingHead *)message + 1);
    int tokens = count_tokens(a.p), thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (ep_failed_before(ep_failed(a.p.group), epoch))
        tokens = 0, digest = EP_DIGEST(EP_OP_GONE, 0, 0);
    for (int64_t i = thread; i < (int64_t)tokens * a.p.top_k; i += gridDim.x * blockDim.x)
        routing[i] = collect_entry(a, i / a.p.top_k, (int)(i % a.p.top_k));
    if (thread == 0) {
        *(EpRoutingHead *)message = EpRoutingHead{a.p.group.facts, epoch, digest, tokens, {0}};
        *a.counts.sent = 0;
    }
}

/* ---- count --------------------------------------------------------------------------------- */

/* Returns what the head of a rank that is not in this operation tells. One of an earlier operation
 * is what was here before: nothing has come, since the communicator has ended. */
__device__ __forceinline__ int head_fault(const EpRoutingHead *head, uint32_t epoch) {
    if (EP_DIGEST_OP(head->digest) == EP_OP_GONE) return EP_FAULT_PEER;
    return (int32_t)(epoch - head->epoch) > 0 ? EP_FAULT_ENDED : EP_FAULT_ORDER;
}

/* Report a rank that has given up, is in another operation, or sends nothing. */
static __device__ __noinline__ void report_head(const EpRouteArgs &a, int source) {
    const EpRoutingHead *head = head_of(a, source), *own = head_of(a, a.t.self);
    EpCudaGroup g = a.p.group;
    g.size = a.t.ranks, g.members = a.t.members;
    int fault = head_fault(head, own->epoch), peer = ep_elsewhere(g, source);
    uint32_t seen = fault == EP_FAULT_PEER ? (uint32_t)source : head->digest;
    ep_report(g, fault, EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, own->digest, seen}, head->facts);
}

/* Check that a rank is in this operation, with the same facts. By one thread. */
__device__ __forceinline__ void check_head(const EpRouteArgs &a, int source, uint32_t epoch) {
    const EpRoutingHead *head = head_of(a, source), *own = head_of(a, a.t.self);
    int is_same = head->epoch == epoch && head->facts == own->facts &&
                  ep_same_operation(head->digest, own->digest);
    if (!is_same) report_head(a, source);
}

/* Count a piece in shared memory; `places` counts for the other nodes, of this rank's tokens. */
__device__ __forceinline__ void count_entry(const EpRouteArgs &a, const Piece &p, int32_t *count) {
    Same owner = find_same(a, p.owner), here = find_same(a, p.number >= 0 ? 0 : -1);
    int other = p.owner >= 0 && p.source == a.t.self ? a.t.other_of[p.owner] : -1;
    Same node = find_same(a, other);
    if (p.number >= 0) atomicAdd(count + expert_column(a, p), 1);
    if (p.number >= 0 && owner.leads) {
        atomicAdd(count + flat_column(a, p.number), 1);
        atomicAdd(count + row_column(a, p.number), 1);
    }
    if (here.leads) atomicAdd(count + need_column(a), 1);
    if (node.leads) atomicAdd(count + a.columns + other, 1);
    if (p.source == a.t.self && owner.leads && p.owner != a.t.self) atomicAdd(a.counts.sent, 1);
}

__global__ void __launch_bounds__(EP_ROUTE_THREADS)
    count_pieces(const __grid_constant__ EpRouteArgs a) {
    extern __shared__ uint4 memory[];
    int32_t *count = (int32_t *)ep_keep_shared(memory);
    uint32_t epoch = ep_epoch(a.p.group);
    int others = a.t.nodes - 1;
    if (threadIdx.x == 0) ep_set_operation(a.p.group, 0);
    if (!is_alive(a)) return;
    for (int number = blockIdx.x; number < num_pieces(a); number += gridDim.x) {
        __syncthreads();
        for (int c = threadIdx.x; c < a.columns + others; c += EP_ROUTE_THREADS)
            count[c] = 0;
        __syncthreads();
        Piece p = take_piece(a, number);
        if (threadIdx.x == 0 && p.chunk + p.index == 0) check_head(a, p.source, epoch);
        count_entry(a, p, count);
        __syncthreads();
        for (int c = threadIdx.x; c < a.columns; c += EP_ROUTE_THREADS)
            before_of(a, number)[c] = count[c];
        for (int c = threadIdx.x; c < others && p.source == a.t.self; c += EP_ROUTE_THREADS)
            a.counts.places[(p.chunk * a.pieces + p.index) * others + c] = count[a.columns + c];
    }
}

/* ---- sum ----------------------------------------------------------------------------------- */

#define SUM_THREADS 1024
#define SUM_COLUMNS 32 /* of a block: neighbours, whose loads share a sector */

/* Sum columns over all pieces: 32 threads share a column, a stretch of pieces each. */
__device__ void sum_columns(const EpRouteArgs &a, int first, int32_t (*sums)[SUM_COLUMNS]) {
    int column = first + (int)threadIdx.x % SUM_COLUMNS, part = threadIdx.x / SUM_COLUMNS;
    int pieces = num_pieces(a), each = (pieces + 31) / 32, sum = 0;
    int begin = min(pieces, part * each), end = min(pieces, begin + each);
    int is_column = column < a.t.experts + a.t.ranks;
    for (int i = begin; i < end && is_column; i++)
        sum += before_of(a, i)[column];
    sums[part][threadIdx.x % SUM_COLUMNS] = sum;
    __syncthreads();
    if (!is_column) return;
    sum = 0;
    for (int i = 0; i < part; i++)
        sum += sums[i][threadIdx.x % SUM_COLUMNS];
    for (int i = begin; i < end; i++) {
        int32_t *at = before_of(a, i) + column, count = *at;
        *at = sum, sum += count;
    }
    if (part == 31) a.counts.total[column] = sum;
}

/* Continue a sum over the pieces of a rank's chunk. Returns it. */
__device__ __forceinline__ int sum_chunk(const EpRouteArgs &a, int source, int chunk, int column,
                                         int sum) {
    for (int i = 0; i < a.pieces; i++) {
        int32_t *at = before_of(a, piece_number(a, source, chunk, i)) + column, count = *at;
        *at = sum, sum += count;
    }
    return sum;
}

/* Sum the rows of the agents' parts: `i` is a chunk, an agent and a rank of this node. */
__device__ __forceinline__ void sum_parts(const EpRouteArgs &a, int i) {
    int to = i % a.t.ranks, agent = i / a.t.ranks % a.t.ranks, chunk = i / a.t.ranks / a.t.ranks;
    a.counts.own[i] = sum_chunk(a, a.t.members[agent], chunk, row_column(a, to), 0);
    int sum = 0;
    for (int lane = 0; lane < a.t.lanes_of[agent]; lane++)
        sum = sum_chunk(a, a.t.source_of[agent * a.t.lanes + lane], chunk, row_column(a, to), sum);
    a.counts.relayed[i] = sum;
}

/* Sum the places of this rank's messages: `i` is a chunk and another node. */
__device__ __forceinline__ void sum_places(const EpRouteArgs &a, int i) {
    int others = a.t.nodes - 1, chunk = i / others, sum = 0;
    for (int piece = 0; piece < a.pieces; piece++) {
        int32_t *at = a.counts.places + (chunk * a.pieces + piece) * others + i % others;
        int count = *at;
        *at = sum, sum += count;
    }
    a.counts.filled[i] = sum;
}

__global__ void __launch_bounds__(SUM_THREADS) sum_pieces(const __grid_constant__ EpRouteArgs a) {
    __shared__ int32_t sums[32][SUM_COLUMNS];
    int columns = a.t.experts + a.t.ranks, blocks = (columns + SUM_COLUMNS - 1) / SUM_COLUMNS;
    if (!is_alive(a)) return;
    if ((int)blockIdx.x < blocks) {
        sum_columns(a, blockIdx.x * SUM_COLUMNS, sums);
        return;
    }
    int parts = a.t.chunks * a.t.ranks * a.t.ranks, needs = a.t.group * a.t.chunks;
    int places = a.t.chunks * (a.t.nodes - 1);
    for (int i = (blockIdx.x - blocks) * SUM_THREADS + threadIdx.x; i < parts + needs + places;
         i += (gridDim.x - blocks) * SUM_THREADS) {
        int need = i - parts;
        if (i < parts)
            sum_parts(a, i);
        else if (need < needs)
            a.counts.needed[need] =
                sum_chunk(a, need / a.t.chunks, need % a.t.chunks, need_column(a), 0);
        else
            sum_places(a, need - needs);
    }
}

/* ---- publishing ---------------------------------------------------------------------------- */

/* Store how many tokens each agent has in each part. An agent without lanes has none, and no piece
 * that would store its begin. By all threads. */
__device__ void store_tokens(const EpRouteArgs &a) {
    for (int i = threadIdx.x; i < a.t.chunks * a.t.ranks; i += EP_ROUTE_THREADS) {
        int chunk = i / a.t.ranks, agent = i % a.t.ranks, lanes = a.t.lanes_of[agent];
        EpCudaPlan own = part_of(a, EP_PART_OWN, chunk);
        EpCudaPlan relayed = part_of(a, EP_PART_RELAYED, chunk);
        int tokens = tokens_of(a, a.t.members[agent]) - chunk * a.t.chunk;
        own.tokens[agent] = min(max(tokens, 0), a.t.chunk);
        relayed.tokens[agent] = lanes * a.t.chunk;
        int64_t stride = ep_part_tokens(&a.p.shape, EP_PART_RELAYED) + 1;
        if (!lanes) relayed.begins[agent * stride] = 0;
    }
}

/* Returns the count of a rank in a column of the first ones, from the sums before its pieces. */
__device__ __forceinline__ int count_of(const EpRouteArgs &a, int source, int column) {
    const int32_t *at = before_of(a, piece_number(a, source, 0, 0)) + column;
    int64_t next = (int64_t)a.t.chunks * a.pieces * a.columns;
    return (source + 1 < a.t.group ? at[next] : a.counts.total[column]) - *at;
}

__device__ void publish_rows(const EpRouteArgs &a, int64_t step) {
    int column = flat_column(a, a.t.rank), local = count_of(a, a.t.self, column);
    publish_row_counts(a.p, step, *a.counts.sent, a.counts.total[column] - local, local);
}

/* Tell the host how many chunks there are, and how much of each message is filled. By all threads.
 */
__device__ void publish_places(const EpRouteArgs &a, int64_t step) {
    int word = (int)ep_info_chunks(&a.p.shape), others = a.t.nodes - 1, most = 1;
    for (int r = 0; r < a.t.group; r++)
        most = max(most, tokens_of(a, r));
    int chunks = (most + a.t.chunk - 1) / a.t.chunk, width = others + a.t.lanes;
    if (threadIdx.x == 0) publish_word(a.p, step, word, chunks);
    for (int i = threadIdx.x; i < a.t.chunks * width; i += EP_ROUTE_THREADS) {
        int chunk = i / width, at = i % width, lane = at - others, places = 0;
        if (lane < 0)
            places = a.counts.filled[chunk * others + at];
        else if (lane < a.t.lanes_of[a.t.rank])
            places =
                a.counts.needed[a.t.source_of[a.t.rank * a.t.lanes + lane] * a.t.chunks + chunk];
        publish_word(a.p, step, word + 1 + i, places);
    }
}

__device__ void publish(const EpRouteArgs &a, uint32_t epoch) {
    const EpPrepareArgs &p = a.p;
    int64_t step = step_under_way(p);
    int first = a.t.first_expert[a.t.rank], flat = flat_column(a, a.t.rank);
    auto rows_of = [&](int source) { return count_of(a, source, flat); };
    auto counted = [&](int e, int source) { return count_of(a, source, first + e); };
    if (threadIdx.x == 0) publish_rows(a, step);
    publish_places(a, step);
    store_tokens(a);
    if (p.shape.has_rows)
        publish_flat(p, step, a.counts.total + first, rows_of, counted);
    else
        publish_all_slabs(p, step, a.counts.total + first, counted);
    if (threadIdx.x == 0) publish_step(p, step, tokens_of(a, a.t.self), epoch);
}

__global__ void __launch_bounds__(EP_ROUTE_THREADS)
    assign_slots(const __grid_constant__ EpRouteArgs a) {
    extern __shared__ uint4 memory[];
    Tables t = open_tables(a, ep_keep_shared(memory));
    uint32_t epoch = ep_epoch(a.p.group);
    int alive = is_alive(a);
    if (alive) {
        lay_node_slabs(a, t);
        for (int number = blockIdx.x; number < num_pieces(a); number += gridDim.x)
            assign_entry(a, take_piece(a, number), t, before_of(a, number));
    }
    if (ep_leave(a.p.group, epoch, 1) != EP_LAST_PUBLISHES || !alive) return;
    if (threadIdx.x == 0) report_all_bad_indices(a.p);
    __threadfence();
    publish(a, epoch);
}

/* ---- launching ----------------------------------------------------------------------------- */

extern "C" int ep_cuda_open_route(int shared_bytes) {
    int error = ep_open_kernel(collect_routing, shared_bytes);
    if (!error) error = ep_open_kernel(count_pieces, shared_bytes);
    if (!error) error = ep_open_kernel(sum_pieces, shared_bytes);
    return error ? error : ep_open_kernel(assign_slots, shared_bytes);
}

extern "C" int ep_cuda_collect_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    return ep_launch(collect_routing, blocks, EP_ROUTE_THREADS, 0, stream, *a);
}

static size_t route_shared(const EpRouteArgs *a) {
    return (size_t)ep_route_shared(a->columns, a->t.nodes - 1, a->t.experts);
}

extern "C" int ep_cuda_count_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    return ep_launch(count_pieces, blocks, EP_ROUTE_THREADS, route_shared(a), stream, *a);
}

/* The first blocks sum columns, as many as there are columns; the others all the rest. */
extern "C" int ep_cuda_sum_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    int columns = a->t.experts + a->t.ranks;
    blocks += (columns + SUM_COLUMNS - 1) / SUM_COLUMNS;
    return ep_launch(sum_pieces, blocks, SUM_THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_assign_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    return ep_launch(assign_slots, blocks, EP_ROUTE_THREADS, route_shared(a), stream, *a);
}
