/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on several nodes; handles/nodes/cuda/route.h has the story.
 *
 * Who waits on whom: nobody. The stream orders the kernels, and the exchange of messages is NCCL's.
 * It also keeps the ranks of a node within one operation of each other, as arrivals do elsewhere:
 * it is complete on a rank only once every rank has entered this operation.
 */
#include "handles/nodes/cuda/route.h"

#include "handles/placement/cuda/copies.cuh"

/* ==== tiles ================================================================================= */

/*
 * Tiles of the ranks' tokens, a thread for each entry, and how the lanes of a warp agree on what
 * their entries have in common.
 */

/* A tile, and this thread's entry in it. */
typedef struct Tile {
    int source, chunk, index; /* rank, its chunk, the tile there */
    int token;                /* of this thread, in the chunk; -1: past the tile's end */
    int k;                    /* of this thread; may be K or more */
    int expert;               /* of the group; -1: none */
    int owner, number;        /* rank of the group; its number on this node; -1: none, elsewhere */
} Tile;

__device__ __forceinline__ const EpRoutingHead *head_of(const EpRouteArgs &a, int source) {
    return (const EpRoutingHead *)(a.messages + source * a.message_bytes);
}

__device__ __forceinline__ int tokens_of(const EpRouteArgs &a, int source) {
    return min(max(head_of(a, source)->num_tokens, 0), a.p.shape.max_tokens);
}

__device__ __forceinline__ int num_tiles(const EpRouteArgs &a) {
    return a.t.group * a.t.chunks * a.tiles;
}

__device__ __forceinline__ int tile_number(const EpRouteArgs &a, int source, int chunk, int index) {
    return (source * a.t.chunks + chunk) * a.tiles + index;
}

__device__ __forceinline__ int32_t *before_of(const EpRouteArgs &a, int tile) {
    return a.counts.before + (int64_t)tile * a.columns;
}

/* Columns behind the experts. */
__device__ __forceinline__ int flat_column(const EpRouteArgs &a, int number) {
    return a.t.experts + number;
}

__device__ __forceinline__ int row_column(const EpRouteArgs &a, int number) {
    return a.t.experts + a.t.ranks + number;
}

__device__ __forceinline__ int need_column(const EpRouteArgs &a) {
    return a.t.experts + 2 * a.t.ranks;
}

__device__ __forceinline__ int expert_column(const EpRouteArgs &a, const Tile &p) {
    return a.t.first_expert[p.number] + p.expert - ep_owner_first(&a.p.owners, p.owner);
}

/* Returns the tokens of a rank in a chunk, at most. LIMITED, of kernels: whether there is a limit.
 * Then tokens of ranks elsewhere are places of their messages. */
template <int LIMITED>
__device__ __forceinline__ int chunk_tokens(const EpRouteArgs &a, int source) {
    return LIMITED && a.t.number_of[source] < 0 ? a.t.message : a.t.chunk;
}

__device__ __forceinline__ int load_expert(const EpRouteArgs &a, const int32_t *entry) {
    return (uint32_t)*entry < (uint32_t)a.p.shape.num_experts ? *entry : -1;
}

template <int LIMITED> __device__ __forceinline__ Tile take_tile(const EpRouteArgs &a, int number) {
    Tile p;
    p.index = number % a.tiles, number /= a.tiles;
    p.chunk = number % a.t.chunks, p.source = number / a.t.chunks;
    int i = (int)threadIdx.x >> a.team_shift;
    p.k = threadIdx.x & ((1 << a.team_shift) - 1);
    p.token = p.index * a.tile_tokens + i;
    int each = chunk_tokens<LIMITED>(a, p.source);
    if (i >= a.tile_tokens || p.token >= each) p.token = -1;
    p.expert = p.owner = p.number = -1;
    int64_t token = (int64_t)p.chunk * each + p.token;
    if (p.token < 0 || p.k >= a.p.top_k || token >= tokens_of(a, p.source)) return p;
    const int32_t *routing = (const int32_t *)(head_of(a, p.source) + 1);
    p.expert = load_expert(a, routing + token * a.p.top_k + p.k);
    if (p.expert < 0) return p;
    p.owner = ep_owner(&a.p.owners, p.expert);
    p.number = a.t.number_of[p.owner];
    return p;
}

/* ---- lanes --------------------------------------------------------------------------------- */

__device__ __forceinline__ unsigned lanes_below(int lane) {
    return (1u << lane) - 1;
}

/* Returns the lanes of this thread's token. */
__device__ __forceinline__ unsigned team_lanes(const EpRouteArgs &a) {
    int width = 1 << a.team_shift, first = threadIdx.x % 32 & -width;
    return (width == 32 ? ~0u : (1u << width) - 1) << first;
}

/* How the lanes of a warp agree on a key; none for a negative one. */
typedef struct Same {
    unsigned all;  /* lanes with the key */
    unsigned rows; /* of these the first of each token */
    int leads;     /* whether this lane is the first of its token */
    int earlier;   /* tokens before this one, in the warp, with the key */
} Same;

__device__ __forceinline__ Same find_same(const EpRouteArgs &a, int key) {
    int lane = threadIdx.x % 32, width = 1 << a.team_shift;
    Same s;
    unsigned all = __match_any_sync(~0u, key);
    s.all = key >= 0 ? all : 0;
    s.leads = key >= 0 && __ffs(s.all & team_lanes(a)) - 1 == lane;
    s.rows = __ballot_sync(~0u, s.leads) & s.all;
    s.earlier = __popc(s.rows & lanes_below(lane & -width));
    return s;
}

__device__ __forceinline__ int is_first(unsigned lanes) {
    return __ffs(lanes) - 1 == (int)(threadIdx.x % 32);
}

/* Returns whether this rank has not failed: the same in all threads of a block, whoever may fail
 * meanwhile. */
__device__ __forceinline__ int is_alive(const EpRouteArgs &a) {
    return __syncthreads_and(ep_failed(a.p.group) == 0);
}

/* ==== collect =============================================================================== */

/* Returns the physical expert of an entry, -1 for none: also where an earlier k has it, if one is
 * enough. Two entries of a token have the same copy if they name the same expert. */
template <int PLACED>
__device__ __forceinline__ int collect_entry(const EpRouteArgs &a, int64_t token, int k) {
    const EpPrepareArgs &p = a.p;
    int64_t at = token * p.top_k;
    int expert = place_index<PLACED>(p, load_index(p, at + k), (int)token);
    for (int i = 0; i < k && p.shape.merges && expert >= 0; i++)
        if (place_index<PLACED>(p, load_index(p, at + i), (int)token) == expert) expert = NO_EXPERT;
    if (expert == BAD_EXPERT) {
        atomicAdd(&p.group.state->bad_count, 1ull);
        atomicMax(&p.group.state->bad_entry, ~(unsigned long long)(at + k));
    }
    return expert < 0 ? -1 : expert;
}

template <int PLACED>
__global__ void __launch_bounds__(EP_ROUTE_THREADS)
    collect_routing(const __grid_constant__ EpRouteArgs a) {
    uint32_t epoch = ep_epoch(a.p.group), digest = a.p.group.digest;
    char *message = a.messages + a.t.self * a.message_bytes;
    int32_t *routing = (int32_t *)((EpRoutingHead *)message + 1);
    int tokens = count_tokens(a.p), thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (ep_failed_before(ep_failed(a.p.group), epoch))
        tokens = 0, digest = EP_DIGEST(EP_OP_GONE, 0, 0);
    for (int64_t i = thread; i < (int64_t)tokens * a.p.top_k; i += gridDim.x * blockDim.x)
        routing[i] = collect_entry<PLACED>(a, i / a.p.top_k, (int)(i % a.p.top_k));
    if (thread == 0) {
        *(EpRoutingHead *)message = EpRoutingHead{a.p.group.facts, epoch, digest, tokens, {0}};
        *a.counts.sent = *a.counts.lost = 0;
    }
}

/* ==== limit ================================================================================= */

#define LIMIT_THREADS 1024

/* A list of tokens that a node needs: those of a rank elsewhere that this one does, or this rank's
 * own that another one does. A thread for each token. */
typedef struct List {
    int source, other; /* its rank; the other node, -1: this one */
    int32_t *routing;
} List;

__device__ __forceinline__ List take_list(const EpRouteArgs &a, int number) {
    List l = {a.t.self, number, NULL};
    int i = number - (a.t.nodes - 1); /* among the ranks elsewhere, by node */
    if (i >= 0) {
        int r = a.t.by_node[i] & ~EP_NODE_BEGINS,
            is_before = a.t.number_of[r] < 0 && a.t.other_of[r] < a.t.node;
        l.source = is_before ? r : a.t.by_node[i + a.t.ranks] & ~EP_NODE_BEGINS, l.other = -1;
    }
    l.routing = (int32_t *)(head_of(a, l.source) + 1);
    return l;
}

/* Returns the rank of an entry's expert if that is on the list's node, else -1. */
__device__ __forceinline__ int list_owner(const EpRouteArgs &a, const List &l,
                                          const int32_t *entry) {
    int expert = load_expert(a, entry), owner = expert < 0 ? -1 : ep_owner(&a.p.owners, expert);
    return owner >= 0 && a.t.other_of[owner] == l.other ? owner : -1;
}

/* Returns how many threads of the block before this one have `needs` set, and in `all` how many
 * have. By all threads. */
__device__ int count_before(int needs, int *all) {
    __shared__ int32_t sums[LIMIT_THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = 0;
    unsigned with = __ballot_sync(~0u, needs);
    __syncthreads();
    if (lane == 0) sums[warp] = __popc(with);
    __syncthreads();
    *all = 0;
    for (int w = 0; w < LIMIT_THREADS / 32; w++)
        before += w < warp ? sums[w] : 0, *all += sums[w];
    return before + __popc(with & lanes_below(lane));
}

/* Move a token's entries to its place, -1: none. Places are not behind the tokens, and all threads
 * have loaded an entry before any stores it. By all threads. */
__device__ void move_token(const EpRouteArgs &a, const List &l, int token, int place) {
    for (int k = 0; k < a.p.top_k; k++) {
        int32_t expert = place >= 0 ? l.routing[(int64_t)token * a.p.top_k + k] : -1;
        __syncthreads();
        if (place >= 0) l.routing[(int64_t)place * a.p.top_k + k] = expert;
        __syncthreads();
    }
}

/* Lose a token's entries on the list's node; count those that would have slots here. */
__device__ void lose_token(const EpRouteArgs &a, const List &l, int token) {
    int32_t *entry = l.routing + (int64_t)token * a.p.top_k;
    int lost = 0;
    for (int k = 0; k < a.p.top_k; k++) {
        int owner = list_owner(a, l, entry + k);
        if (owner == a.t.self) lost++;
        if (owner >= 0 && l.source == a.t.self) entry[k] = -1;
    }
    if (lost) atomicAdd(a.counts.lost, a.p.shape.has_rows ? 1 : lost);
}

/* Store the places of this rank's tokens before the tile that this one is the first of. */
__device__ void store_tile(const EpRouteArgs &a, const List &l, int token, int place) {
    int chunk = token / a.t.chunk, at = token % a.t.chunk;
    if (at % a.tile_tokens || chunk >= a.t.chunks) return;
    int tile = chunk * a.tiles + at / a.tile_tokens;
    a.counts.message_slots[tile * (a.t.nodes - 1) + l.other] = place;
}

/* Store what each message of a list holds, or how many tokens the list has. */
__device__ void store_filled(const EpRouteArgs &a, const List &l, int tokens) {
    if (l.other < 0 && threadIdx.x == 0)
        ((EpRoutingHead *)head_of(a, l.source))->num_tokens = tokens;
    for (int c = threadIdx.x; c < a.t.chunks && l.other >= 0; c += LIMIT_THREADS)
        a.counts.filled[c * (a.t.nodes - 1) + l.other] =
            min(max(tokens - c * a.t.message, 0), a.t.message);
}

__global__ void __launch_bounds__(LIMIT_THREADS)
    limit_routing(const __grid_constant__ EpRouteArgs a) {
    List l = take_list(a, blockIdx.x);
    int tokens = tokens_of(a, l.source), first = 0;
    if (!is_alive(a)) return;
    for (int base = 0; base < tokens; base += LIMIT_THREADS) {
        int token = base + (int)threadIdx.x, needs = 0, all;
        for (int k = 0; k < a.p.top_k && token < tokens; k++)
            needs |= list_owner(a, l, l.routing + (int64_t)token * a.p.top_k + k) >= 0;
        int place = first + count_before(needs, &all);
        if (needs && place >= a.t.limit) lose_token(a, l, token);
        if (l.other < 0) move_token(a, l, token, needs && place < a.t.limit ? place : -1);
        if (l.other >= 0) store_tile(a, l, token, place);
        first += all;
    }
    store_filled(a, l, min(first, a.t.limit));
}

/* ==== count ================================================================================= */

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

/* Count a tile in shared memory. The last columns count for other nodes, of this rank's tokens. */
template <int LIMITED>
__device__ __forceinline__ void count_entry(const EpRouteArgs &a, const Tile &p, int32_t *count) {
    Same owner = find_same(a, p.owner), here = find_same(a, p.number >= 0 ? 0 : -1);
    int other = p.owner >= 0 && p.source == a.t.self ? a.t.other_of[p.owner] : -1;
    Same node = find_same(a, other);
    if (p.number >= 0) atomicAdd(count + expert_column(a, p), 1);
    if (p.number >= 0 && owner.leads) {
        atomicAdd(count + flat_column(a, p.number), 1);
        atomicAdd(count + row_column(a, p.number), 1);
    }
    if (here.leads) atomicAdd(count + need_column(a), 1);
    if (!LIMITED && node.leads) atomicAdd(count + a.columns + other, 1);
    if (p.source == a.t.self && owner.leads && p.owner != a.t.self) atomicAdd(a.counts.sent, 1);
}

template <int LIMITED>
__global__ void __launch_bounds__(EP_ROUTE_THREADS)
    count_tiles(const __grid_constant__ EpRouteArgs a) {
    extern __shared__ uint4 memory[];
    int32_t *count = (int32_t *)ep_keep_shared(memory);
    uint32_t epoch = ep_epoch(a.p.group);
    int others = a.t.nodes - 1;
    if (threadIdx.x == 0) ep_set_operation(a.p.group, 0);
    if (!is_alive(a)) return;
    for (int number = blockIdx.x; number < num_tiles(a); number += gridDim.x) {
        __syncthreads();
        for (int c = threadIdx.x; c < a.columns + others; c += EP_ROUTE_THREADS)
            count[c] = 0;
        __syncthreads();
        Tile p = take_tile<LIMITED>(a, number);
        if (threadIdx.x == 0 && p.chunk + p.index == 0) check_head(a, p.source, epoch);
        count_entry<LIMITED>(a, p, count);
        __syncthreads();
        for (int c = threadIdx.x; c < a.columns; c += EP_ROUTE_THREADS)
            before_of(a, number)[c] = count[c];
        for (int c = threadIdx.x; !LIMITED && c < others && p.source == a.t.self;
             c += EP_ROUTE_THREADS)
            a.counts.message_slots[(p.chunk * a.tiles + p.index) * others + c] =
                count[a.columns + c];
    }
}

/* ==== sum =================================================================================== */

#define SUM_THREADS 1024
#define SUM_COLUMNS 32 /* of a block: neighbours, whose loads share a sector */

/* Sum columns over all tiles: 32 threads share a column, a stretch of tiles each. */
__device__ void sum_columns(const EpRouteArgs &a, int first, int32_t (*sums)[SUM_COLUMNS]) {
    int column = first + (int)threadIdx.x % SUM_COLUMNS, part = threadIdx.x / SUM_COLUMNS;
    int tiles = num_tiles(a), each = (tiles + 31) / 32, sum = 0;
    int begin = min(tiles, part * each), end = min(tiles, begin + each);
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

/* Continue a sum over the tiles of a rank's chunk. Returns it. */
__device__ __forceinline__ int sum_chunk(const EpRouteArgs &a, int source, int chunk, int column,
                                         int sum) {
    for (int i = 0; i < a.tiles; i++) {
        int32_t *at = before_of(a, tile_number(a, source, chunk, i)) + column, count = *at;
        *at = sum, sum += count;
    }
    return sum;
}

/* Sum the rows of the agents' chunk plans: `i` is a chunk, an agent and a rank of this node. */
__device__ __forceinline__ void sum_chunk_plans(const EpRouteArgs &a, int i) {
    int to = i % a.t.ranks, agent = i / a.t.ranks % a.t.ranks, chunk = i / a.t.ranks / a.t.ranks;
    a.counts.own[i] = sum_chunk(a, a.t.members[agent], chunk, row_column(a, to), 0);
    int sum = 0;
    for (int s = 0; s < a.t.num_sources[agent]; s++)
        sum = sum_chunk(a, a.t.source_rank[agent * a.t.sources + s], chunk, row_column(a, to), sum);
    a.counts.relayed[i] = sum;
}

/* Sum the message slots of this rank's messages: `i` is a chunk and another node. */
__device__ __forceinline__ void sum_message_slots(const EpRouteArgs &a, int i) {
    int others = a.t.nodes - 1, chunk = i / others, sum = 0;
    for (int tile = 0; tile < a.tiles; tile++) {
        int32_t *at = a.counts.message_slots + (chunk * a.tiles + tile) * others + i % others;
        int count = *at;
        *at = sum, sum += count;
    }
    a.counts.filled[i] = sum;
}

template <int LIMITED>
__global__ void __launch_bounds__(SUM_THREADS) sum_tiles(const __grid_constant__ EpRouteArgs a) {
    __shared__ int32_t sums[32][SUM_COLUMNS];
    int columns = a.t.experts + a.t.ranks, blocks = (columns + SUM_COLUMNS - 1) / SUM_COLUMNS;
    if (!is_alive(a)) return;
    if ((int)blockIdx.x < blocks) {
        sum_columns(a, blockIdx.x * SUM_COLUMNS, sums);
        return;
    }
    int chunk_plans = a.t.chunks * a.t.ranks * a.t.ranks, needs = a.t.group * a.t.chunks;
    int messages = LIMITED ? 0 : a.t.chunks * (a.t.nodes - 1);
    for (int i = (blockIdx.x - blocks) * SUM_THREADS + threadIdx.x;
         i < chunk_plans + needs + messages; i += (gridDim.x - blocks) * SUM_THREADS) {
        int need = i - chunk_plans;
        if (i < chunk_plans)
            sum_chunk_plans(a, i);
        else if (need < needs)
            a.counts.needed[need] =
                sum_chunk(a, need / a.t.chunks, need % a.t.chunks, need_column(a), 0);
        else
            sum_message_slots(a, need - needs);
    }
}

/* ==== assigning slots ======================================================================= */

/*
 * Slots, rows and message slots of the entries of a tile, stored into the chunk plans that this
 * rank needs, as a source, a relay or a receiver.
 */

/* A block's tables in shared memory. */
typedef struct Tables {
    uint8_t *count; /* [columns + others, EP_ROUTE_WARPS] of each warp in the tile */
    int32_t *start; /* [experts] first row of each expert's slab on its rank, capacity ignored */
} Tables;

__device__ __forceinline__ Tables open_tables(const EpRouteArgs &a, uint4 *memory) {
    int columns = a.columns + a.t.nodes - 1;
    Tables t = {(uint8_t *)memory, NULL};
    t.start = (int32_t *)(t.count + (EP_ROUTE_WARPS * columns + 15) / 16 * 16);
    return t;
}

/* Lay the slabs of this node's ranks, a warp for each. */
__device__ void lay_node_slabs(const EpRouteArgs &a, const Tables &t) {
    for (int number = threadIdx.x / 32; number < a.t.ranks; number += EP_ROUTE_WARPS) {
        int first = a.t.first_expert[number], experts = a.t.first_expert[number + 1] - first;
        int64_t start = 0;
        for (int at = 0; at < experts; at += 32) {
            int e = at + (int)threadIdx.x % 32;
            SlabStart slab = lay_slab(a.p, a.counts.total + first, experts, at, &start);
            if (e >= experts) continue;
            t.start[first + e] = (int)ep_block_begin(&a.p.shape, e, slab.start);
        }
    }
}

__device__ __forceinline__ uint8_t *count_at(const Tables &t, int column) {
    return t.count + column * EP_ROUTE_WARPS;
}

__device__ __forceinline__ int warps_before(const Tables &t, int column) {
    int sum = 0;
    for (int w = 0; w < (int)threadIdx.x / 32; w++)
        sum += count_at(t, column)[w];
    return sum;
}

/* What is numbered of a thread's entry, counted within its tile first. */
typedef struct Numbered {
    Same expert, owner, node;     /* in the warp */
    int entry, row, message_slot; /* entries for its expert, rows to its rank, slots of its message
                                 before this one */
    int here;                     /* tokens before this one that this node needs */
    int mine;                     /* rows to this rank before this token */
    int needs;                    /* whether this node needs the token */
    int other;                    /* its expert's node, among the others; -1: none */
} Numbered;

/* Count each warp's part of the tile; then number by what is before. By all threads. */
__device__ __forceinline__ Numbered number_entry(const EpRouteArgs &a, const Tile &p,
                                                 const Tables &t) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = 1 << a.team_shift;
    int columns = a.columns + a.t.nodes - 1, expert = p.number >= 0 ? expert_column(a, p) : -1;
    Numbered n;
    n.other = p.owner >= 0 && p.source == a.t.self ? a.t.other_of[p.owner] : -1;
    n.expert = find_same(a, expert), n.owner = find_same(a, p.number);
    n.node = find_same(a, n.other);
    Same here = find_same(a, p.number >= 0 ? 0 : -1);
    unsigned needs = __ballot_sync(~0u, here.leads);
    unsigned mine = __ballot_sync(~0u, n.owner.leads && p.number == a.t.rank);
    __syncthreads();
    for (int i = threadIdx.x; i < EP_ROUTE_WARPS * columns; i += EP_ROUTE_THREADS)
        t.count[i] = 0;
    __syncthreads();
    if (is_first(n.expert.all)) count_at(t, expert)[warp] = (uint8_t)__popc(n.expert.all);
    if (is_first(n.owner.all))
        count_at(t, row_column(a, p.number))[warp] = (uint8_t)__popc(n.owner.rows);
    if (is_first(n.node.all)) count_at(t, a.columns + n.other)[warp] = (uint8_t)__popc(n.node.rows);
    if (lane == 0) count_at(t, need_column(a))[warp] = (uint8_t)__popc(needs);
    __syncthreads();
    unsigned earlier = lanes_below(lane & -width);
    n.needs = (needs & team_lanes(a)) != 0;
    n.here = __popc(needs & earlier) + warps_before(t, need_column(a));
    n.mine = __popc(mine & earlier) + warps_before(t, row_column(a, a.t.rank));
    n.entry = n.row = n.message_slot = 0;
    if (p.number >= 0) {
        n.entry = __popc(n.expert.all & lanes_below(lane)) + warps_before(t, expert);
        n.row = n.owner.earlier + warps_before(t, row_column(a, p.number));
    }
    if (n.other >= 0) n.message_slot = n.node.earlier + warps_before(t, a.columns + n.other);
    return n;
}

/* Where a token belongs on this node: its agent, its chunk plan, its position there. */
typedef struct Home {
    EpCudaPlan plan;
    EpChunkPlan kind;
    int agent, tokens; /* most tokens of the chunk plan */
    int at;            /* the token's position */
    int end;           /* rows to this rank from the tokens behind the last row of its source */
    int last; /* where this token stores the chunk plan's last begin; -1: another one does */
} Home;

/* Returns where the places of messages from a relay's sources begin: source `index`. */
template <int LIMITED> __device__ __forceinline__ int first_place(const EpRouteArgs &a, int index) {
    return index * (LIMITED ? a.t.message : a.t.chunk);
}

template <typename T> __device__ __forceinline__ T *shift(T *array, int64_t bytes) {
    return (T *)((char *)array + bytes);
}

__device__ __forceinline__ EpCudaPlan chunk_plan_of(const EpRouteArgs &a, EpChunkPlan kind,
                                                    int chunk) {
    EpCudaPlan plan = a.chunk_plan[kind];
    int64_t bytes = chunk * a.chunk_stride;
    plan.entries = shift(plan.entries, bytes), plan.own_token = shift(plan.own_token, bytes);
    plan.tokens = shift(plan.tokens, bytes), plan.begins = shift(plan.begins, bytes);
    plan.row_slots = shift(plan.row_slots, bytes);
    plan.rows_to = shift(plan.rows_to, bytes), plan.rows_from = shift(plan.rows_from, bytes);
    if (plan.sizes.form == EP_ROUTES_DENSE) plan.routes = shift(plan.routes, bytes);
    return plan;
}

/* The tokens of a source that this node needs come first, in order; then the others, which have no
 * rows here. So a token has the position of its record in the message. */
template <int LIMITED>
__device__ __forceinline__ Home find_home(const EpRouteArgs &a, const Tile &p, const Numbered &n,
                                          const int32_t *before) {
    Home h;
    int index = a.t.source_index[p.source];
    h.agent = a.t.agent_of[p.source];
    h.kind = index < 0 ? EP_CHUNK_OWN : EP_CHUNK_RELAYED;
    h.plan = chunk_plan_of(a, h.kind, p.chunk);
    h.tokens = ep_chunk_plan_tokens(&a.p.shape, h.kind);
    const int32_t *rows =
        (index < 0 ? a.counts.own : a.counts.relayed) + (p.chunk * a.t.ranks + h.agent) * a.t.ranks;
    h.end = rows[a.t.rank];
    int sources = index < 0 ? 1 : a.t.num_sources[h.agent]; /* of the chunk plan */
    int is_last = p.token == chunk_tokens<LIMITED>(a, p.source) - 1 && max(index, 0) == sources - 1;
    h.last = is_last ? sources * chunk_tokens<LIMITED>(a, p.source) : -1;
    h.at = p.token;
    if (index < 0) return h;
    int needed = a.counts.needed[p.source * a.t.chunks + p.chunk];
    int slot = before[need_column(a)] + n.here;
    h.at = first_place<LIMITED>(a, index) + (n.needs ? slot : needed + p.token - slot);
    if (index + 1 < a.t.num_sources[h.agent]) {
        int next = a.t.source_rank[h.agent * a.t.sources + index + 1];
        h.end = before_of(a, tile_number(a, next, p.chunk, 0))[row_column(a, a.t.rank)];
    }
    return h;
}

/* Store where the rows of the token begin on this rank. By one lane of the token. */
__device__ __forceinline__ void store_begin(const EpRouteArgs &a, const Tile &p, const Numbered &n,
                                            const Home &h, const int32_t *before) {
    int32_t *begins = h.plan.begins + (int64_t)h.agent * (h.tokens + 1);
    int begin = before[row_column(a, a.t.rank)] + n.mine;
    begins[h.at] = h.kind == EP_CHUNK_OWN || n.needs ? begin : h.end;
    if (h.last >= 0) begins[h.last] = h.end;
}

/* Returns one lane for each row of a token: the first that has a slot, if any has. */
__device__ __forceinline__ int find_leader(const EpRouteArgs &a, const Numbered &n, int slot) {
    unsigned with = __ballot_sync(~0u, slot >= 0), row = n.owner.all & team_lanes(a);
    return is_first(with & row ? with & row : row);
}

/* Store this rank's own entry, for the ranks of this node or for another node's message. */
template <int LIMITED>
__device__ __forceinline__ void store_entry(const EpRouteArgs &a, const Tile &p, const Numbered &n,
                                            const Home &h, const EpEntry &here) {
    EpEntry e = here;
    int other = n.other >= 0 ? a.t.ranks + n.other : -1;
    const int32_t *earlier =
        a.counts.message_slots + (p.chunk * a.tiles + p.index) * (a.t.nodes - 1) + n.other;
    if (p.number < 0) e = EpEntry{-1, 0, (int16_t)other, 0, n.node.leads};
    if (n.other >= 0) e.row = *earlier + n.message_slot;
    if (LIMITED && n.other >= 0) e.row = ep_message_row(&a.p.shape.nodes, e.row);
    h.plan.entries[(int64_t)h.at * a.p.top_k + p.k] = e;
    if (e.leader && p.number == a.t.rank) h.plan.own_token[e.row] = h.at;
}

/* Returns by how much the slots of a source's rows on the rank of a column are moved: where each
 * source has a block, they lie there, and not behind the rows of the sources before it. */
__device__ __forceinline__ int block_shift(const EpRouteArgs &a, int source, int column) {
    if (!ep_has_source_blocks(&a.p.shape)) return 0;
    return source * a.p.shape.max_tokens - before_of(a, tile_number(a, source, 0, 0))[column];
}

/* Store what this rank, as a receiver, must know of a token's row: the slots of its entries. `row`,
 * `flat`: of the row, in all lanes of the token. */
__device__ __forceinline__ void store_route(const EpRouteArgs &a, const Tile &p, const Home &h,
                                            int row, int flat, int slot, int expert) {
    int64_t at = (int64_t)h.agent * h.tokens + row, k = p.k;
    int is_mine = p.number == a.t.rank;
    if (h.plan.sizes.form == EP_ROUTES_DENSE) {
        h.plan.routes[at * a.p.top_k + k] = is_mine ? slot : -1;
        return;
    }
    if (k == 0) h.plan.row_slots[at] = flat;
    if (flat < h.plan.sizes.slots)
        h.plan.routes[(int64_t)flat * a.p.top_k + k] = is_mine ? expert : -1;
}

template <int LIMITED>
__device__ __forceinline__ void assign_entry(const EpRouteArgs &a, const Tile &p, const Tables &t,
                                             const int32_t *before) {
    Numbered n = number_entry(a, p, t);
    Home h = find_home<LIMITED>(a, p, n, before);
    int has_rows = a.p.shape.has_rows, exists = p.token >= 0 && p.k < a.p.top_k;
    int slot = -1, row = 0, flat = 0, expert = -1;
    if (p.number >= 0) {
        expert = p.expert - ep_owner_first(&a.p.owners, p.owner);
        row = before[row_column(a, p.number)] + n.row;
        flat = before[flat_column(a, p.number)] + n.row;
        int column = expert_column(a, p);
        if (!has_rows) slot = t.start[column] + before[column] + n.entry;
        if (slot >= ep_slot_limit(&a.p.shape, expert)) slot = -1;
    }
    int leads = find_leader(a, n, slot) && p.number >= 0;
    if (p.number >= 0) flat += block_shift(a, p.source, flat_column(a, p.number));
    if (has_rows && leads) slot = flat < ep_row_limit(&a.p.shape) ? flat : -1;
    if (exists && h.agent == a.t.rank)
        store_entry<LIMITED>(a, p, n, h,
                             EpEntry{slot, row, (int16_t)p.number, (int16_t)expert, leads});
    unsigned mine = __ballot_sync(~0u, p.number == a.t.rank) & team_lanes(a);
    int from = mine ? __ffs(mine) - 1 : 0;
    row = __shfl_sync(~0u, row, from), flat = __shfl_sync(~0u, flat, from);
    if (exists && mine) store_route(a, p, h, row, flat, slot, expert);
    if (p.token >= 0 && p.k == 0) store_begin(a, p, n, h, before);
}

/* ==== publishing ============================================================================ */

/* Store how many tokens each agent has in each chunk plan. An agent that relays for nobody has zero
 * tokens; store its offset here, since no tile will. By all threads. */
__device__ void store_tokens(const EpRouteArgs &a) {
    for (int i = threadIdx.x; i < a.t.chunks * a.t.ranks; i += EP_ROUTE_THREADS) {
        int chunk = i / a.t.ranks, agent = i % a.t.ranks, sources = a.t.num_sources[agent];
        EpCudaPlan own = chunk_plan_of(a, EP_CHUNK_OWN, chunk);
        EpCudaPlan relayed = chunk_plan_of(a, EP_CHUNK_RELAYED, chunk);
        int tokens = tokens_of(a, a.t.members[agent]) - chunk * a.t.chunk;
        own.tokens[agent] = min(max(tokens, 0), a.t.chunk);
        relayed.tokens[agent] = sources * a.t.message;
        int64_t stride = ep_chunk_plan_tokens(&a.p.shape, EP_CHUNK_RELAYED) + 1;
        if (!sources) relayed.begins[agent * stride] = 0;
    }
}

/* Store into a chunk's plans how many rows this rank sends to each rank of its node and gets from
 * it, and how many records go to other nodes. By all threads. */
__device__ void store_row_counts(const EpRouteArgs &a, int chunk) {
    EpCudaPlan own = chunk_plan_of(a, EP_CHUNK_OWN, chunk);
    EpCudaPlan relayed = chunk_plan_of(a, EP_CHUNK_RELAYED, chunk);
    int ranks = a.t.ranks, others = a.t.nodes - 1, first = chunk * ranks * ranks;
    for (int r = threadIdx.x; r < ranks; r += EP_ROUTE_THREADS) {
        int to = first + a.t.rank * ranks + r, from = first + r * ranks + a.t.rank;
        own.rows_to[r] = a.counts.own[to], own.rows_from[r] = a.counts.own[from];
        relayed.rows_to[r] = a.counts.relayed[to], relayed.rows_from[r] = a.counts.relayed[from];
    }
    for (int i = threadIdx.x; i < others; i += EP_ROUTE_THREADS)
        own.rows_to[ranks + i] = a.counts.filled[chunk * others + i];
    for (int i = threadIdx.x; i < a.t.num_sources[a.t.rank]; i += EP_ROUTE_THREADS)
        relayed.rows_to[ranks + i] =
            a.counts.needed[a.t.source_rank[a.t.rank * a.t.sources + i] * a.t.chunks + chunk];
}

/* Returns the count of a rank in a column of the first ones, from the sums before its tiles. */
__device__ __forceinline__ int count_of(const EpRouteArgs &a, int source, int column) {
    const int32_t *at = before_of(a, tile_number(a, source, 0, 0)) + column;
    int64_t next = (int64_t)a.t.chunks * a.tiles * a.columns;
    return (source + 1 < a.t.group ? at[next] : a.counts.total[column]) - *at;
}

__device__ void publish_rows(const EpRouteArgs &a, int64_t step) {
    int column = flat_column(a, a.t.rank), local = count_of(a, a.t.self, column);
    publish_row_counts(a.p, step, *a.counts.sent, a.counts.total[column] - local, local);
}

/* Tell the host how many chunks there are, and how much of each message is filled. By all threads.
 */
__device__ void publish_message_slots(const EpRouteArgs &a, int64_t step) {
    int word = (int)ep_info_chunks(&a.p.shape), others = a.t.nodes - 1, most = 1;
    for (int r = 0; r < a.t.group; r++)
        most = max(most, tokens_of(a, r));
    int chunks = (most + a.t.chunk - 1) / a.t.chunk, width = others + a.t.sources;
    if (threadIdx.x == 0) publish_word(a.p, step, word, chunks);
    for (int i = threadIdx.x; i < a.t.chunks * width; i += EP_ROUTE_THREADS) {
        int chunk = i / width, at = i % width, source = at - others, filled = 0;
        if (source < 0)
            filled = a.counts.filled[chunk * others + at];
        else if (source < a.t.num_sources[a.t.rank])
            filled =
                a.counts
                    .needed[a.t.source_rank[a.t.rank * a.t.sources + source] * a.t.chunks + chunk];
        publish_word(a.p, step, word + 1 + i, filled);
    }
}

template <int LIMITED> __device__ void publish(const EpRouteArgs &a, uint32_t epoch) {
    const EpPrepareArgs &p = a.p;
    int64_t step = step_under_way(p);
    int first = a.t.first_expert[a.t.rank], flat = flat_column(a, a.t.rank);
    auto rows_of = [&](int source) { return count_of(a, source, flat); };
    auto counted = [&](int e, int source) { return count_of(a, source, first + e); };
    if (threadIdx.x == 0) publish_rows(a, step);
    publish_message_slots(a, step);
    store_tokens(a);
    for (int chunk = 0; chunk < a.t.chunks; chunk++)
        store_row_counts(a, chunk);
    if (p.shape.has_rows)
        publish_flat(p, step, a.counts.total + first, rows_of, counted);
    else
        publish_all_slabs(p, step, a.counts.total + first, counted);
    /* The host reads the number once publish_step has told it of the step. */
    if (LIMITED && threadIdx.x == 0) publish_lost(p, step, *(volatile int32_t *)a.counts.lost);
    if (threadIdx.x == 0) publish_step(p, step, tokens_of(a, a.t.self), epoch);
}

template <int LIMITED>
__global__ void __launch_bounds__(EP_ROUTE_THREADS)
    assign_slots(const __grid_constant__ EpRouteArgs a) {
    extern __shared__ uint4 memory[];
    Tables t = open_tables(a, ep_keep_shared(memory));
    uint32_t epoch = ep_epoch(a.p.group);
    int alive = is_alive(a);
    if (alive) {
        lay_node_slabs(a, t);
        for (int number = blockIdx.x; number < num_tiles(a); number += gridDim.x)
            assign_entry<LIMITED>(a, take_tile<LIMITED>(a, number), t, before_of(a, number));
    }
    if (ep_end_operation(a.p.group, epoch, 1) != EP_LAST_PUBLISHES || !alive) return;
    if (threadIdx.x == 0) report_all_bad_indices(a.p);
    __threadfence();
    publish<LIMITED>(a, epoch);
}

/* ==== placement ============================================================================= */

/* Two launches of a block, and an exchange of messages without routing between them. Their heads
 * carry the hash of the map as the facts of the operation. */

__global__ void __launch_bounds__(COPIES_THREADS)
    collect_map(const __grid_constant__ EpMapArgs a) {
    const EpCudaGroup &g = a.route.p.group;
    uint32_t epoch = ep_epoch(g), hash = hash_map(a.copies, a.map);
    uint32_t digest = g.digest + (hash << 16);
    if (ep_failed_before(ep_failed(g), epoch)) digest = EP_DIGEST(EP_OP_GONE, 0, 0);
    if (threadIdx.x == 0)
        *(EpRoutingHead *)(a.route.messages + a.route.t.self * a.route.message_bytes) =
            EpRoutingHead{hash, epoch, digest, 0, {0}};
}

__global__ void __launch_bounds__(COPIES_THREADS) take_gathered_map(
    const __grid_constant__ EpMapArgs a) {
    const EpCudaGroup &g = a.route.p.group;
    uint32_t epoch = ep_epoch(g);
    if (threadIdx.x == 0)
        ep_set_operation(g, (uint32_t)head_of(a.route, a.route.t.self)->facts);
    int alive = is_alive(a.route);
    for (int r = threadIdx.x; r < a.route.t.group && alive; r += COPIES_THREADS)
        check_head(a.route, r, epoch);
    if (is_alive(a.route)) take_map(a.copies, a.map, a.route.p.errors);
    (void)ep_end_operation(g, epoch, 0);
}

/* ==== launching ============================================================================= */

template <int LIMITED> static int open_route(int shared_bytes) {
    int error = ep_open_kernel(count_tiles<LIMITED>, shared_bytes);
    if (!error) error = ep_open_kernel(sum_tiles<LIMITED>, shared_bytes);
    return error ? error : ep_open_kernel(assign_slots<LIMITED>, shared_bytes);
}

extern "C" int ep_cuda_open_route(int shared_bytes) {
    int error = ep_open_kernel(collect_routing<0>, shared_bytes);
    if (!error) error = ep_open_kernel(collect_routing<1>, shared_bytes);
    if (!error) error = ep_open_kernel(collect_map, shared_bytes);
    if (!error) error = ep_open_kernel(take_gathered_map, shared_bytes);
    if (!error) error = ep_open_kernel(limit_routing, shared_bytes);
    if (!error) error = open_route<0>(shared_bytes);
    return error ? error : open_route<1>(shared_bytes);
}

extern "C" int ep_cuda_collect_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    auto kernel = a->p.copies.of ? collect_routing<1> : collect_routing<0>;
    return ep_launch(kernel, blocks, EP_ROUTE_THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_limit_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    return ep_launch(limit_routing, blocks, LIMIT_THREADS, 0, stream, *a);
}

static size_t route_shared(const EpRouteArgs *a) {
    return (size_t)ep_route_shared(a->columns, a->t.nodes - 1, a->t.experts);
}

extern "C" int ep_cuda_count_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    auto kernel = a->t.limit ? count_tiles<1> : count_tiles<0>;
    return ep_launch(kernel, blocks, EP_ROUTE_THREADS, route_shared(a), stream, *a);
}

/* The first blocks sum columns, as many as there are columns; the others all the rest. */
extern "C" int ep_cuda_sum_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    int columns = a->t.experts + a->t.ranks;
    auto kernel = a->t.limit ? sum_tiles<1> : sum_tiles<0>;
    blocks += (columns + SUM_COLUMNS - 1) / SUM_COLUMNS;
    return ep_launch(kernel, blocks, SUM_THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_assign_routes(const void *args, int blocks, void *stream) {
    const EpRouteArgs *a = (const EpRouteArgs *)args;
    auto kernel = a->t.limit ? assign_slots<1> : assign_slots<0>;
    return ep_launch(kernel, blocks, EP_ROUTE_THREADS, route_shared(a), stream, *a);
}

extern "C" int ep_cuda_collect_map(const void *args, int blocks, void *stream) {
    return ep_launch(collect_map, blocks, COPIES_THREADS, 0, stream, *(const EpMapArgs *)args);
}

extern "C" int ep_cuda_take_map(const void *args, int blocks, void *stream) {
    const EpMapArgs *a = (const EpMapArgs *)args;
    return ep_launch(take_gathered_map, blocks, COPIES_THREADS, 0, stream, *a);
}
