/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_LATENCY_CUH
#define EP_RUNTIME_CUDA_LATENCY_CUH

/**
 * What latency mode's kernels share: lines, addresses in a group's buffers, how kernels begin and
 * end, how blocks claim what they send, and how heads travel.
 */

#include "runtime/cuda/latency.h"
#include "runtime/cuda/plan.cuh"

#define LATENCY_THREADS 512
#define LATENCY_WARPS (LATENCY_THREADS / 32)

EP_VARIANT_BEGIN

/* ---- lines --------------------------------------------------------------------------------- */

/*
 * Latency mode's protocol for peer memory: lines of 128 bytes that carry data and a flag together.
 *
 * The last eight bytes of a line are its flag: the number of the operation, a value that was never
 * in that place before. A receiver polls the flags of the data itself. So no separate signal
 * follows the data, and no sender waits until its writes are confirmed. A warp moves four lines at
 * once, a step: 30 units of 16 bytes, one for each of 30 lanes.
 *
 *     lane       0  1  2  3  4  5  6  7      8 .. 14  15         16 .. 22  23     24 .. 30  31
 *     unit       0  1  2  3  4  5  6  28     7 .. 13  -          14 .. 20  29     21 .. 27  -
 *     stores     its unit             28 low          28 high              29 low           29 high
 *                                     + flag          + flag               + flag           + flag
 *
 * Memory order. Between GPUs connected by NVLink, the 128 bytes that a warp stores to one line with
 * one instruction arrive together (NCCL's LL128 protocol relies on this): lines are `whole`, and a
 * line whose flag is here is here. That it is one instruction of all lanes does not depend on the
 * compiler: ep_store_warp_sys is one block of PTX, in which the warp converges and then stores a
 * scalar of 16 bytes for each lane. Elsewhere a sender stores the data, then a fence, then the
 * flags; a receiver sees the flag, then a fence, then loads the data again: the same format,
 * slower.
 *
 * A flag must never be found where an earlier message has left data. So flags lie only in the last
 * eight bytes of a line, whatever the message is.
 */

/** Returns the unit of a step that belongs to this lane, -1: none. */
__device__ __forceinline__ int step_unit(void) {
    unsigned lane = threadIdx.x % 32, line = lane / 8;
    if (lane % 8 < 7) return (int)(line * 7 + lane % 8);
    return line % 2 ? -1 : (int)(28 + line / 2);
}

/** Returns the lane that a unit of a step belongs to. */
__device__ __forceinline__ int lane_of_unit(int unit) {
    return unit < 28 ? unit / 7 * 8 + unit % 7 : unit == 28 ? 7 : 23;
}

__device__ __forceinline__ int has_flag(void) {
    return threadIdx.x % 8 == 7;
}

/** Returns the 16 bytes that this lane stores of a step, made from its unit and the flag. By a
 *  warp. */
__device__ __forceinline__ ulonglong2 step_pack(const uint4 &unit, uint64_t flag) {
    unsigned lane = threadIdx.x % 32;
    ulonglong2 x = {unit.x | (unsigned long long)unit.y << 32,
                    unit.z | (unsigned long long)unit.w << 32};
    unsigned long long high = __shfl_sync(~0u, x.y, (lane + 24) % 32);
    if (has_flag()) x.x = lane / 8 % 2 ? high : x.x, x.y = flag;
    return x;
}

/** Returns this lane's unit of a step, from the 16 bytes that each lane has loaded. By a warp. */
__device__ __forceinline__ uint4 step_unpack(const ulonglong2 &x) {
    unsigned long long low = __shfl_sync(~0u, x.x, (threadIdx.x + 8) % 32);
    unsigned long long high = has_flag() ? low : x.y;
    return make_uint4((uint32_t)x.x, (uint32_t)(x.x >> 32), (uint32_t)high, (uint32_t)(high >> 32));
}

static_assert(32 * sizeof(ulonglong2) == EP_STEP_BYTES, "a warp stores a step at once");

/** Store this lane's 16 bytes of a step at `to`, without its flag unless lines are whole. By a
 * warp, with the same `whole` in all lanes. */
__device__ __forceinline__ void step_store(char *to, const ulonglong2 &x, int whole) {
    char *at = to + threadIdx.x % 32 * 16;
    if (whole) {
        ep_store_warp_sys(at, x);
        return;
    }
    __syncwarp(); /* a store by some lanes alone, which whole lines forbid, fails here, too */
    if (!has_flag())
        ep_store_relaxed_sys_pair(at, x);
    else
        ep_store_relaxed_sys((uint64_t *)at, x.x);
}

/** Order the stores of steps before their flags, or a flag's load before the next load of its data,
 *  where lines are not whole. By a warp. */
__device__ __forceinline__ void step_fence(void) {
    __syncwarp();
    if (has_flag()) ep_fence_sys();
}

__device__ __forceinline__ void step_store_flag(char *to, uint64_t flag) {
    if (has_flag()) ep_store_relaxed_sys((uint64_t *)(to + threadIdx.x % 32 * 16 + 8), flag);
}

__device__ __forceinline__ ulonglong2 step_load(const char *from) {
    return ep_load_relaxed_sys_pair(from + threadIdx.x % 32 * 16);
}

/** Returns whether all flags of a loaded step are of this operation. By a warp. */
__device__ __forceinline__ int step_is_here(const ulonglong2 &x, uint64_t flag) {
    return __all_sync(~0u, !has_flag() || x.y == flag);
}

/** Returns the word that says which operation of the group this rank has sent last in the set of a
 *  flag, whose lower half is given. */
__device__ __forceinline__ uint64_t *latency_number(const EpLatency &l, uint32_t flag) {
    return &l.state->set[EP_FLAG_SET(flag)].number;
}

/* ---- waiting ------------------------------------------------------------------------------- */

/* Returns whether a rank is in throughput mode instead of its `number`th operation of latency mode;
 * `what` becomes its word. Only an operation or a phase that sends can tell, since the next
 * operation waits for it. A throughput operation may run beside receive phases. */
__device__ __forceinline__ int ep_is_in_throughput_mode(const EpCudaGroup &g,
                                                        const EpLatency &latency, int peer,
                                                        uint32_t number, uint64_t *what) {
    uint32_t next = ep_epoch(g);
    if (!latency.senders) return 0;
    *what = ep_load_relaxed_sys(&ep_arrival(g, g.rank, peer, next)->what);
    if (!ep_is_in_other_mode(*what, next)) return 0;
    ep_fence_sys();
    uint64_t sent = ep_load_relaxed_sys(ep_sent(g, g.rank, peer, number));
    return (int32_t)((uint32_t)(sent >> 32) - number) < 0;
}

/** Which step a wait waits for: the report, if it times out. */
typedef struct StepOrigin {
    int source, awaited, row; /* awaited: EpAwait */
} StepOrigin;

/* Returns whether a wait for a head goes on although the peer's digest has other sizes. The head
 * says which ones, and may arrive after the number that came with the digest. If it does not, half
 * of the timeout is enough. */
__device__ __forceinline__ int ep_leaves_to_head(const EpCudaGroup &g, int awaited, uint64_t start,
                                                 uint32_t digest, uint32_t other) {
    if (awaited != EP_AWAIT_HEAD || !ep_same_call(digest, other)) return 0;
    return !start || ep_global_timer() - start < g.timeout_ns / 2;
}

/* Returns whether a peer has entered another operation than this rank's current one of latency
 * mode; reports it. A peer may be some operations ahead. This rank reports only once it has sent
 * its own operation's number to all ranks, since it leaves afterwards. `start` is 0 unless the wait
 * is long. */
__device__ __forceinline__ int ep_peer_differs(const EpCudaGroup &g, const EpLatency &latency,
                                               int peer, int awaited, uint32_t flag,
                                               uint64_t start) {
    uint64_t own = *(volatile uint64_t *)latency_number(latency, flag);
    uint32_t digest = ep_own_operation()->digest;
    uint32_t number = (uint32_t)own;
    uint64_t word = ep_load_relaxed_sys(ep_sent(g, g.rank, peer, number));
    /* An operation that was dropped is received without its digest. */
    int is_known = (uint32_t)(own >> 32) == flag && EP_DIGEST_OP(digest);
    int has_sent = (uint32_t)(word >> 32) == number;
    int differs = has_sent ? !ep_same_operation(digest, (uint32_t)word)
                           : start && ep_is_in_throughput_mode(g, latency, peer, number, &word);
    if (!is_known || !differs) return 0;
    if (ep_leaves_to_head(g, awaited, start, digest, (uint32_t)word)) return 0;
    ep_report(g, EP_FAULT_ORDER, EpAwaited{peer, EP_AWAIT_HEAD, 0, digest, (uint32_t)word});
    return 1;
}

/* Returns whether the peer that this rank waits for has given up, or has entered another operation;
 * reports either. In a combine that awaits weights that peer may have stopped because a third rank
 * has entered another operation. So in a long wait this rank looks for it, too. */
static __device__ __noinline__ int ep_is_elsewhere(const EpCudaGroup &g, const EpLatency &latency,
                                                   const StepOrigin &origin, uint32_t flag,
                                                   uint64_t start) {
    int all = latency.awaits_weights && start, end = all ? g.size : origin.source + 1;
#pragma unroll 1
    for (int r = all ? 0 : origin.source; r < end; r++)
        if (ep_is_alive(r) && ep_peer_differs(g, latency, r, origin.awaited, flag, start)) return 1;
    return ep_has_given_up(g, origin.source);
}

/* Find the rank to blame for a timeout in a combine that awaits weights. The peer that this rank
 * waits for may itself wait for a third rank. Ranks send their number before they wait, so a rank
 * whose number is not here has not entered the operation: then blame that one. */
static __device__ EpAwaited ep_find_unsent(const EpCudaGroup &g, const EpLatency &latency,
                                           const EpAwaited &awaited) {
    uint64_t own = *(volatile uint64_t *)latency_number(latency, awaited.expected);
    uint32_t number = (uint32_t)own;
    if ((uint32_t)(own >> 32) != awaited.expected) return awaited;
#pragma unroll 1
    for (int r = 0; r < g.size; r++) {
        if (!ep_is_alive(r)) continue;
        uint32_t seen = (uint32_t)(ep_load_relaxed_sys(ep_sent(g, g.rank, r, number)) >> 32);
        if ((int32_t)(seen - number) < 0) return EpAwaited{r, EP_AWAIT_HEAD, 0, number, seen};
    }
    return awaited;
}

/* ---- ranks that are late ------------------------------------------------------------------- */

/* What waits return, beside 0 and 1: the rank is late, what it sends is void. */
#define STEP_LATE 2

__device__ __forceinline__ EpLateRanks *latency_late(const EpLatency &l, uint64_t flag) {
    return &l.state->late[EP_FLAG_SET(flag)];
}

__device__ __forceinline__ int has_bit(const uint32_t *words, int rank) {
    return *(const volatile uint32_t *)&words[rank / 32] >> rank % 32 & 1;
}

/* Returns whether a rank is late in this operation: what is summed of it does not count. */
__device__ __forceinline__ int latency_is_late(const EpLatency &l, int rank, uint64_t flag) {
    const EpLateRanks *late = latency_late(l, flag);
    return has_bit(late->absent, rank) || has_bit(late->lost, rank);
}

/* Check a long wait for a rank, where late ranks are cut. Returns 1 while it goes on, 0 if it has
 * failed. */
static __device__ __noinline__ int check_late(const EpCudaGroup &g, const EpLatency &l,
                                              const StepOrigin &origin, uint32_t flag,
                                              uint64_t start) {
    EpLateRanks *late = latency_late(l, flag);
    uint32_t *words = origin.awaited == EP_AWAIT_HEAD ? late->absent : late->lost;
    int r = origin.source;
    uint64_t now = ep_global_timer();
    ep_note_late();
    if (ep_failed(g)) return 0;
    if (ep_is_aborted(g, g.rank)) {
        ep_report(g, EP_FAULT_LATE, EpAwaited{r, origin.awaited, origin.row, flag, 0});
        return 0;
    }
    if (has_bit(words, r)) return STEP_LATE;
    if (ep_peer_differs(g, l, r, origin.awaited, flag, start)) return 0;
    uint64_t since = atomicMax((unsigned long long *)&late->since[origin.awaited - EP_AWAIT_HEAD],
                               (unsigned long long)~now);
    uint64_t waited = since ? now - min(now, (uint64_t)~since) : 0;
    uint32_t epoch = ep_epoch(g);
    uint64_t given_up = ep_load_relaxed_sys(&ep_arrival(g, g.rank, r, epoch)->gone);
    int gone = ep_is_masked_by(g, r) || ep_has_left(g, r, origin.awaited, flag) ||
               ep_is_aborted(g, r) || (uint32_t)(given_up >> 32) == epoch;
    if (!gone && waited < g.state->late_us * (uint64_t)1000) return 1;
    atomicOr(&words[r / 32], 1u << r % 32);
    return STEP_LATE;
}

#define NOTES_LATE 0x10000u /* in EpLateRanks.left, above the number of blocks */

/** Returns 1 in the last receiving block, as latency_is_last does, if it may have something to do:
 *  some block has noted that it has looked for a late rank, or done without a rank, or `asks`. Then
 *  other blocks than receiving ones may have looked, too. Counts for each rank the blocks that have
 *  done without it: it may have been cut while this kernel began. By all threads of each receiving
 *  block, where late ranks are cut. */
__device__ __forceinline__ int latency_ends_late(const EpCudaGroup &g, const EpLatency &l,
                                                 int blocks, uint64_t flag, int asks) {
    __shared__ int is_last;
    int r = (int)threadIdx.x, skips = r < g.size && !ep_is_alive(r);
    if (skips) atomicAdd(&latency_late(l, flag)->skipped[r], 1u);
    int notes = !__syncthreads_and(!skips && !asks && !ep_has_late());
    if (threadIdx.x == 0) {
        uint32_t *left = &latency_late(l, flag)->left;
        __threadfence();
        uint32_t before = atomicAdd(left, 1u + (notes ? NOTES_LATE : 0));
        int ends = before % NOTES_LATE == (unsigned)blocks - 1;
        if (ends) *(volatile uint32_t *)left = 0;
        is_last = ends && (notes || before >= NOTES_LATE);
    }
    __syncthreads();
    return is_last;
}

/** Returns how many blocks have done without rank `r`, and forgets it. By one thread of the last
 *  block for each rank. */
__device__ __forceinline__ int latency_take_skipped(const EpLatency &l, int r, uint64_t flag) {
    volatile uint32_t *skipped = &latency_late(l, flag)->skipped[r];
    int blocks = (int)*skipped;
    *skipped = 0;
    return blocks;
}

/** Take the late ranks out of this block's set of those who are alive. Returns whether there are
 *  any. By all threads of the last block. */
__device__ __forceinline__ int latency_leave_late(const EpLatency &l, uint64_t flag) {
    const EpLateRanks *late = latency_late(l, flag);
    uint32_t cut = 0;
    if (threadIdx.x < EP_ALIVE_WORDS)
        cut = *(volatile uint32_t *)&late->absent[threadIdx.x] |
              *(volatile uint32_t *)&late->lost[threadIdx.x];
    if (cut) ep_alive_words()[threadIdx.x] &= ~cut;
    return !__syncthreads_and(!cut);
}

/* Tell the host who is not alive, in a word. Operations that cut ranks at a time store different
 * words. The fences order each one's store before its load. So who stores an old word sees the
 * new one, and stores again. */
__device__ __forceinline__ void latency_tell_cuts(const EpCudaGroup &g, int word) {
    volatile EpCudaFailure *out = g.failure;
    uint32_t alive = ep_load_relaxed_gpu32(&g.state->alive[word]), before;
    out->cut_op = EP_DIGEST_OP(g.digest);
    do {
        before = alive;
        __threadfence_system();
        out->cut[word] = (uint32_t)~before;
        __threadfence_system();
        alive = ep_load_relaxed_gpu32(&g.state->alive[word]);
    } while (alive != before);
}

/** Cut the late ranks: tell the host and them, and leave nothing for the next operation of the set.
 *  By all threads of the last block. */
[[maybe_unused]] static __device__ __noinline__ void
latency_cut(const EpCudaGroup &g, const EpLatency &l, uint64_t flag) {
    EpLateRanks *late = latency_late(l, flag);
    int t = (int)threadIdx.x;
    if (t < g.size && latency_is_late(l, t, flag))
        ep_store_relaxed_sys(&ep_ballot(g, t, g.rank)->masked, 1);
    __syncthreads();
    if (t < EP_ALIVE_WORDS) {
        uint32_t cut = late->absent[t] | late->lost[t];
        if (cut) atomicAnd(&g.state->alive[t], ~cut);
        if (cut) latency_tell_cuts(g, t);
        late->absent[t] = late->lost[t] = 0;
    }
    if (t < 3) late->since[t] = 0;
}

/* State of a long wait. */
typedef struct WaitState {
    uint64_t start;
    int alive;
} WaitState;

/* Check a long wait now and then: the timeout, and whether the peer is in another operation. Not
 * inlined, which keeps the waits short. */
static __device__ __noinline__ WaitState ep_check_wait(const EpCudaGroup *g,
                                                       const EpLatency *latency, StepOrigin origin,
                                                       uint32_t expected, uint32_t seen,
                                                       uint64_t start) {
    if (ep_cuts() && origin.source != g->rank) {
        int alive = check_late(*g, *latency, origin, expected, start);
        return WaitState{start ? start : ep_global_timer(), alive};
    }
    EpTimeout timeout = {start, EP_POLLS_PER_CLOCK_READ - 1};
    EpAwaited awaited = {origin.source, origin.awaited, origin.row, expected, seen};
    if (latency->awaits_weights && start && ep_global_timer() - start >= g->timeout_ns)
        awaited = ep_find_unsent(*g, *latency, awaited);
    int alive = ep_keep_waiting(*g, &timeout, awaited);
    return WaitState{timeout.start,
                     alive && !ep_is_elsewhere(*g, *latency, origin, expected, start)};
}

/**
 * Wait until a step is here; x is what a load of it has returned so far. Returns 0 if it will not
 * come, or STEP_LATE. By a warp.
 */
__device__ __forceinline__ int step_await(const EpCudaGroup &g, const EpLatency &latency,
                                          const char *from, uint64_t flag, ulonglong2 *x,
                                          const StepOrigin &origin) {
    uint64_t start = 0;
#pragma unroll 1
    for (int polls = 1; !step_is_here(*x, flag); polls++) {
        if (polls % EP_POLLS_PER_CLOCK_READ == 0) {
            WaitState wait =
                ep_check_wait(&g, &latency, origin, (uint32_t)flag, (uint32_t)x->y, start);
            if (!__all_sync(~0u, wait.alive)) return 0;
            if (EP_MASKED && __any_sync(~0u, wait.alive == STEP_LATE)) return STEP_LATE;
            start = wait.start;
        }
        *x = step_load(from);
    }
    if (latency.whole) return 1;
    step_fence();
    __syncwarp();
    *x = step_load(from);
    return 1;
}

/* ---- addresses ----------------------------------------------------------------------------- */

/* Returns where the head of `source` for this operation lies in a rank's `window`. */
__device__ __forceinline__ char *latency_head(const EpLatency &l, char *window, int source,
                                              int size, uint64_t flag) {
    int index = EP_FLAG_BUFFER(flag) * size + source;
    return window + l.layout.heads + (int64_t)index * l.layout.head_bytes;
}

__device__ __forceinline__ char *latency_record(const EpLatency &l, char *window, int source,
                                                int size, int token, uint64_t flag) {
    uint32_t index = (uint32_t)(EP_FLAG_BUFFER(flag) * size + source) * l.layout.max_tokens + token;
    return window + l.layout.records + (uint64_t)index * (uint32_t)l.layout.record_bytes;
}

/* Several nodes: the place of a rank, and where place `row` lies in the message `other` at
 * `messages`. */
__device__ __forceinline__ EpRankPlace rank_place(const EpLatency &l, int rank) {
    const int word = __ldg((const int *)l.nodes.places + rank);
    return EpRankPlace{(int16_t)(word & 0xffff), (int16_t)(word >> 16)};
}

__device__ __forceinline__ EpOtherNode other_node(const EpLatency &l, int other) {
    const int word = __ldg((const int *)l.nodes.others + other);
    return EpOtherNode{(int16_t)(word & 0xffff), (int16_t)(word >> 16)};
}

__device__ __forceinline__ char *message_place(const EpLatency &l, char *messages, int other,
                                               int row) {
    return messages + other * l.layout.message_bytes + l.layout.message_heads +
           (int64_t)row * (l.nodes.record_steps * EP_STEP_BYTES);
}

/* Returns the messages of this operation that a rank of this node has received, in its window. */
__device__ __forceinline__ char *latency_messages(const EpLatency &l, char *window, uint64_t flag) {
    return window + l.layout.messages +
           EP_FLAG_BUFFER(flag) * l.nodes.num_others * l.layout.message_bytes;
}

/* Returns what rank `number` of this node adds to a relay's sum, in the relay's window. */
__device__ __forceinline__ char *latency_partial(const EpLatency &l, char *window, int other,
                                                 int number, int size, int row, uint64_t flag) {
    int64_t index =
        ((EP_FLAG_BUFFER(flag) * l.nodes.num_others + other) * size + number) * l.layout.node_rows;
    return window + l.layout.partials + (index + row) * l.layout.record_bytes;
}

/* Returns the record of entry k of a place, in the window of the relay. */
__device__ __forceinline__ char *latency_relay_entry(const EpLatency &l, char *window, int other,
                                                     int row, int k, uint64_t flag) {
    int64_t index = (EP_FLAG_BUFFER(flag) * l.nodes.num_others + other) * l.layout.node_rows + row;
    return window + l.layout.partials +
           (index * l.layout.entry_places + k) * (int64_t)l.layout.entry_bytes;
}

/* Returns the weights of a place among those that NCCL sends or receives, which are at `lines`. */
__device__ __forceinline__ char *message_weights(const EpLatency &l, int64_t lines, int other,
                                                 int row) {
    return l.own + lines + other * ep_weights_stride(&l.layout) +
           (int64_t)row * l.layout.weight_bytes;
}

/* Returns the stamp before a message at `messages`, of rows or of weights. */
__device__ __forceinline__ EpStamp *message_stamp(const EpLatency &l, int64_t messages, int other,
                                                  int of_weights) {
    int64_t stride = of_weights ? ep_weights_stride(&l.layout) : l.layout.message_bytes;
    return (EpStamp *)(l.own + messages + other * stride) - 1;
}

/* Returns the record of entry k of a token, in the window of the rank that has the token. */
__device__ __forceinline__ char *latency_entry(const EpLatency &l, char *window, int k, int token,
                                               uint64_t flag) {
    uint32_t place = (uint32_t)(EP_FLAG_BUFFER(flag) * l.layout.entry_places + k);
    uint64_t index = place * (uint32_t)l.layout.max_tokens + (uint32_t)token;
    return window + l.layout.entries + index * (uint32_t)l.layout.entry_bytes;
}

/* Returns where the weights of a token of `source` lie in a rank's `window`. */
__device__ __forceinline__ char *latency_weights(const EpLatency &l, char *window, int source,
                                                 int size, int token, uint64_t flag) {
    uint32_t index = (uint32_t)(EP_FLAG_BUFFER(flag) * size + source) * l.layout.max_tokens + token;
    return window + l.layout.weights + (uint64_t)index * (uint32_t)l.layout.weight_bytes;
}

/* ---- begin and end ------------------------------------------------------------------------- */

/** Begin a kernel, before anything of the device's memory is read or written: wait for the kernel
 *  before it, and let blocks of the next one start, which wait here. So a launch costs less where
 *  operations follow each other. Blocks that wait hold multiprocessors while this kernel waits for
 *  other ranks, and these might wait for a kernel of another group that finds no room. So they
 *  start early only where the group has the whole GPU: then groups do not work at the same time
 *  (docs/semantics.md). All blocks of this kernel have started by then, so the next one, whose
 *  blocks let nobody start yet, takes no room from it. Elsewhere the next kernel's blocks start
 *  where this one's have ended. */
__device__ __forceinline__ void latency_begin(const EpLatency &l) {
    ep_grid_wait();
    if (l.releases) ep_grid_release();
}

/* What a kernel loads at its start is loaded by threads of different warps, so that the loads
 * overlap. Thread 0 runs ep_begin_operation. */
#define OP_WARP 1
#define CLAIM_THREAD 64

/** The operation under way. */
typedef struct LatencyOp {
    uint64_t flag;   /**< flag of all its lines */
    uint32_t number; /**< its number among the group's operations of latency mode: see ep_sent */
} LatencyOp;

/* Find the operation under way: its set, and its number there; of a kernel that only receives also
 * its number among all. Returns whether the set is as it must be: free for a kernel that sends, in
 * flight for one that only receives. A lane loads the counts of a set. By a warp; the result is
 * lane 0's. */
__device__ __forceinline__ int latency_find(const EpLatency &l, LatencyOp *op) {
    const EpLatencyState *state = l.state;
    const ulonglong2 count = ep_load_relaxed_gpu_pair(
        (const uint64_t *)&state->count[min((int)threadIdx.x % 32, l.sets - 1)]);
    uint32_t set = ep_load_relaxed_gpu32(l.senders ? &state->turn : &state->set_of[l.token]);
    set %= EP_MAX_LATENCY_SETS;
    unsigned long long sent = __shfl_sync(~0u, count.x, set), done = __shfl_sync(~0u, count.y, set);
    op->flag = EP_FLAG(done + 1, set), op->number = 0;
    if (l.senders) return sent == done;
    op->number = (uint32_t)ep_load_relaxed_gpu(&state->set[set].number);
    return sent == done + 1;
}

/** What the threads of a block that load it tell the others. */
typedef struct LatencyEntry {
    LatencyOp op;
    int is_right; /**< see latency_find */
} LatencyEntry;

__device__ __forceinline__ LatencyEntry *latency_entry(void) {
    __shared__ LatencyEntry entry;
    return &entry;
}

/** Several nodes: as ep_compare_stamps and ep_report_stamps, of the stamps before messages that
 * have come, of rows or of weights. */
__device__ __forceinline__ const EpStamp *landed_stamp(const EpLatency &l, int i, int of_weights) {
    return message_stamp(l, of_weights ? l.layout.weights_in : l.layout.landing, i, of_weights);
}

__device__ __forceinline__ void latency_compare_stamps(const EpLatency &l, int of_weights,
                                                       EpLoadedHeader *header) {
    auto theirs = [&](int i) { return landed_stamp(l, i, of_weights); };
    if (threadIdx.x < 32 && !ep_stamps_agree(l.nodes.marks, theirs)) header->failed = ~0u;
}

[[maybe_unused]] static __device__ __noinline__ void
latency_report_stamps(const EpCudaGroup &g, const EpLatency &l, int of_weights) {
    ep_report_stamps(g, l.nodes.marks, [&](int i) { return landed_stamp(l, i, of_weights); });
}

/* Put this rank's stamp before all messages that it sends. By one thread. */
__device__ __forceinline__ void put_stamps(const EpLatency &l) {
    const EpStamp own = *l.nodes.marks.own;
#pragma unroll 1
    for (int i = 0; i < l.nodes.num_others; i++) {
        *message_stamp(l, l.layout.outgoing, i, 0) = own;
        if (l.layout.weights_out) *message_stamp(l, l.layout.weights_out, i, 1) = own;
    }
}

/** Several nodes: as ep_seal_stamp. */
__device__ __forceinline__ void latency_seal_stamps(const EpCudaGroup &g, const EpLatency &l) {
    if (threadIdx.x || !ep_failed(g)) return;
    ep_seal_stamp(g, l.nodes.marks.own);
    put_stamps(l);
}

/* As ep_take_messages, but not by the first block: the fence before its heads (forward_head) would
 * wait until the host's memory has the mark. */
__device__ __forceinline__ void latency_take_messages(const EpLatency &l) {
    if (blockIdx.x == 1 && threadIdx.x == 0) ep_mark(l.nodes.marks, !l.nodes.marks.last);
}

/** Enter an operation, as ep_begin_operation does, and give it to all threads. Epoch 0 stands for
 * none: in latency mode a rank that has failed once does nothing more. */
__device__ __forceinline__ int latency_begin_operation(const EpCudaGroup &g, const EpCudaPlan &plan,
                                                       const EpLatency &l, LatencyOp *op) {
    LatencyEntry *entry = latency_entry();
    EpLoadedHeader header = ep_load_header(g, plan);
    if (threadIdx.x == 0 && l.senders) entry->op.number = header.number;
    if (threadIdx.x / 32 == OP_WARP) {
        LatencyOp found;
        int right = latency_find(l, &found);
        if (threadIdx.x % 32 == 0) entry->op.flag = found.flag, entry->is_right = right;
        if (threadIdx.x % 32 == 0 && !l.senders) entry->op.number = found.number;
    }
    if (EP_SEVERAL_NODES && l.nodes.reads_landing) latency_compare_stamps(l, 0, &header);
    int alive = ep_begin_operation_as(g, plan, header, 0);
    if (EP_SEVERAL_NODES && l.nodes.reads_landing) latency_take_messages(l);
    *op = entry->op;
    return alive & entry->is_right;
}

/** Report why latency_begin_operation has returned 0, as ep_report_plan does. */
[[maybe_unused]] static __device__ __noinline__ void
latency_report(const EpCudaGroup &g, const EpCudaPlan &plan, const EpLatency &l) {
    if (EP_SEVERAL_NODES && l.nodes.reads_landing) latency_report_stamps(g, l, 0);
    ep_report_plan(g, plan);
    if (threadIdx.x == 0 && !latency_entry()->is_right)
        ep_report(g, EP_FAULT_FLIGHT, EpAwaited{g.rank, 0, 0, (uint32_t)l.sets, 0});
}

/**
 * Blocks take a ticket once they have entered and claimed their last item. The last ticket resets
 * all counters for the next kernel. Thread 0 takes the block's ticket as soon as it may and looks
 * at it at the end (latency_pass), so that no thread waits for the atomic. In other threads it
 * means nothing.
 */
__device__ __forceinline__ uint32_t *latency_tickets(const EpLatency &l, const LatencyOp &op) {
    return l.senders ? &l.state->passed : &l.state->set[EP_FLAG_SET(op.flag)].passed;
}

__device__ __forceinline__ uint32_t latency_ticket(const EpLatency &l, const LatencyOp &op) {
    return threadIdx.x == 0 ? atomicAdd(latency_tickets(l, op), 1u) : 0;
}

__device__ __forceinline__ void latency_pass(const EpCudaGroup &g, const EpLatency &l,
                                             const LatencyOp &op, uint32_t ticket) {
    volatile EpLatencyState *state = l.state;
    int set = EP_FLAG_SET(op.flag);
    if (threadIdx.x || ticket != gridDim.x - 1) return;
    *(volatile uint32_t *)latency_tickets(l, op) = 0;
    if (l.receives) state->count[set].done = EP_FLAG_NUMBER(op.flag);
    if (!l.senders) return;
    /* No block waits for weights any more; receiving blocks may have ended before such a wait. */
    if (EP_MASKED) state->late[set].since[EP_AWAIT_WEIGHTS - EP_AWAIT_HEAD] = 0;
    state->claimed = 0;
    state->count[set].sent = EP_FLAG_NUMBER(op.flag);
    *(volatile uint32_t *)&g.state->sent = op.number;
    if (l.receives) return;
    state->set_of[l.token] = set;
    if (EP_SEVERAL_NODES && l.nodes.keeps_turn) return;
    state->turn = set + 1 < l.sets ? set + 1 : 0;
}

/** Several nodes: the last block, which has the least to do, tells the watcher that the operation
 *  begins, and writes this rank's stamps, once it is known whether the rank has failed. By all
 *  threads of each block. */
__device__ __forceinline__ void latency_mark_begin(const EpCudaGroup &g, const EpLatency &l) {
    if (!l.nodes.begins || blockIdx.x + 1 < gridDim.x || threadIdx.x) return;
    ep_mark_begin(g, l.nodes.marks, ep_own_operation()->generation);
    put_stamps(l);
    __threadfence(); /* a block that fails meanwhile puts other ones */
    latency_seal_stamps(g, l);
}

/** Whether a block sends and receives, and its number among the receiving blocks. */
typedef struct LatencyRole {
    int sends, receives;
    int block, blocks;
} LatencyRole;

__device__ __forceinline__ LatencyRole latency_role(const EpLatency &l) {
    int index = blockIdx.x, block = index - l.first_receiver;
    return LatencyRole{index < l.senders, l.receives && block >= 0, block,
                       (int)gridDim.x - l.first_receiver};
}

/** Returns 1 in the last receiving block, which sees what the others have stored: the fence orders
 *  that before their count. By all threads of each receiving block, at its end. */
__device__ __forceinline__ int latency_is_last(const EpLatency &l, const LatencyRole &role,
                                               uint64_t flag) {
    __shared__ int is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *left = &l.state->set[EP_FLAG_SET(flag)].left;
        __threadfence();
        is_last = atomicAdd(left, 1u) == (unsigned)role.blocks - 1;
        if (is_last) *(volatile uint32_t *)left = 0;
    }
    __syncthreads();
    return is_last;
}

/* ---- claiming what is sent ----------------------------------------------------------------- */

/** Returns the block's two claimed items: the next one is claimed while one is worked on. */
__device__ __forceinline__ int *claimed_items(void) {
    __shared__ int items[2];
    return items;
}

/** Claim the block's first item. It is there behind the block's next barrier. */
__device__ __forceinline__ void claims_begin(const EpLatency &l) {
    if (threadIdx.x == CLAIM_THREAD) claimed_items()[0] = (int)atomicAdd(&l.state->claimed, 1u);
}

/** Call work(item) for each of this block's items below `items`: first `item`, then those that it
 *  claims, which are numbered from `claimed` on. work may have barriers. By all threads of the
 *  block. */
template <typename Work>
__device__ __forceinline__ void claims_work_from(const EpLatency &l, int item, int claimed,
                                                 int items, Work work) {
    int at = 0;
#pragma unroll 1
    for (; item < items; item = claimed_items()[at]) {
        uint32_t next = 0;
        if (threadIdx.x == CLAIM_THREAD) next = atomicAdd(&l.state->claimed, 1u);
        work(item);
        at ^= 1;
        if (threadIdx.x == CLAIM_THREAD) claimed_items()[at] = claimed + (int)next;
        __syncthreads();
    }
}

/** Call work(item) for each of this block's items below `items`, where all items are claimed. By
 *  all threads of the block. */
template <typename Work>
__device__ __forceinline__ void claims_work(const EpLatency &l, int items, Work work) {
    claims_work_from(l, claimed_items()[0], 0, items, work);
}

/* ---- heads --------------------------------------------------------------------------------- */

/** Send all ranks the number of this operation (see ep_sent). By a warp of the block that sends the
 *  heads, after it has sent its own. */
__device__ __forceinline__ void store_operation_number(const EpCudaGroup &g, const EpLatency &l,
                                                       const LatencyOp &op) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = lane; r < g.size; r += 32)
        if (ep_is_alive(r))
            ep_store_relaxed_sys(ep_sent(g, r, g.rank, op.number),
                                 ep_counter(op.number, ep_own_operation()->digest));
    if (lane == 0)
        *(volatile uint64_t *)latency_number(l, (uint32_t)op.flag) =
            ep_counter((uint32_t)op.flag, op.number);
}

/* Report that rank r is in another operation. Wait before that until this rank has sent all ranks
 * its own heads and number: r sees the disagreement from them, and this rank leaves afterwards. By
 * one thread. */
__device__ __forceinline__ void report_other_operation(const EpCudaGroup &g, const EpLatency &l,
                                                       int r, uint32_t seen, uint64_t facts,
                                                       uint64_t flag) {
    EpTimeout timeout = {0, 0};
    const EpAwaited own = {g.rank, EP_AWAIT_HEAD, 0, (uint32_t)flag, 0};
    const volatile uint64_t *number = latency_number(l, (uint32_t)flag);
    while ((uint32_t)(*number >> 32) != (uint32_t)flag)
        if (!ep_keep_waiting(g, &timeout, own)) return;
    ep_report(g, EP_FAULT_ORDER, EpAwaited{r, EP_AWAIT_HEAD, 0, ep_own_operation()->digest, seen},
              facts);
}

/** Returns the heads of a buffer. */
__device__ __forceinline__ int latency_num_heads(const EpCudaGroup &g, const EpLatency &l) {
    return EP_SEVERAL_NODES ? l.layout.num_heads : g.size;
}

/** Store a head: unit_of(u) returns unit u, which is words 4 * u to 4 * u + 3. By a warp. */
template <typename Unit>
__device__ __forceinline__ void store_head(const EpLatency &l, char *to, int words, uint64_t flag,
                                           Unit unit_of) {
    int steps = (int)ep_steps(ep_units(4 * words));
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        uint4 unit = make_uint4(0, 0, 0, 0);
        if (step_unit() >= 0) unit = unit_of(step * EP_STEP_UNITS + step_unit());
        step_store(to + step * EP_STEP_BYTES, step_pack(unit, flag), l.whole);
    }
    if (!l.whole) step_fence();
#pragma unroll 1
    for (int step = 0; step < steps && !l.whole; step++)
        step_store_flag(to + step * EP_STEP_BYTES, flag);
}

/** Send this rank's head to rank r, as store_head does. */
template <typename Unit>
__device__ __forceinline__ void send_head(const EpCudaGroup &g, const EpLatency &l, int r,
                                          int words, uint64_t flag, Unit unit_of) {
    char *to = latency_head(l, l.window[r], g.rank, latency_num_heads(g, l), flag);
    store_head(l, to, words, flag, unit_of);
}

/** Receive the head at `from`, which rank r has stored: take(u, unit u). Returns 0 if it does not
 *  come or, where that is to be compared, is of another operation; or STEP_LATE. By a warp. */
template <typename Take>
__device__ __forceinline__ int take_head_at(const EpCudaGroup &g, const EpLatency &l,
                                            const char *from, int r, int words, uint64_t flag,
                                            int compares, Take take) {
    int steps = (int)ep_steps(ep_units(4 * words)), same = 1;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        ulonglong2 x = step_load(from + step * EP_STEP_BYTES);
        const StepOrigin origin = {r, EP_AWAIT_HEAD, 0};
        int here = step_await(g, l, from + step * EP_STEP_BYTES, flag, &x, origin);
        if (!here) return 0;
        if (EP_MASKED && here == STEP_LATE && step == 0) return STEP_LATE;
        if (EP_MASKED && here == STEP_LATE) {
            ep_report(g, EP_FAULT_LATE, EpAwaited{r, EP_AWAIT_HEAD, 0, (uint32_t)flag, 0});
            return 0;
        }
        uint4 unit = step_unpack(x);
        if (step == 0 && threadIdx.x % 32 == 0 && compares &&
            !ep_same_operation(ep_own_operation()->digest, unit.x)) {
            report_other_operation(g, l, r, unit.x, unit.y | (uint64_t)unit.z << 32, flag);
            same = 0;
        }
        if (step_unit() >= 0) take(step * EP_STEP_UNITS + step_unit(), unit);
    }
    return __all_sync(~0u, same);
}

/** Receive head number `index` of a buffer, as take_head_at does. */
template <typename Take>
__device__ __forceinline__ int take_head(const EpCudaGroup &g, const EpLatency &l, int index, int r,
                                         int words, uint64_t flag, int compares, Take take) {
    const char *from = latency_head(l, l.own, index, latency_num_heads(g, l), flag);
    return take_head_at(g, l, from, r, words, flag, compares, take);
}

/** Several nodes: wait until the other ranks of this node have begun this operation, as their heads
 *  say. So they have read what NCCL has brought in a whole operation before. A rank that does not
 *  come fails this one, and its stamps say so. By a block. */
[[maybe_unused]] static __device__ __noinline__ void await_node(const EpCudaGroup &g,
                                                                const EpLatency &l, uint64_t flag) {
#pragma unroll 1
    for (int r = (int)(threadIdx.x / 32); r < g.size; r += LATENCY_WARPS)
        if (r != g.rank) (void)take_head(g, l, r, r, 1, flag, 0, [](int, const uint4 &) {});
}

/* ---- records of a dispatch ----------------------------------------------------------------- */

/* Entry k of a record's header, whose units lie in a warp's lanes: its word, and its weight if
 * weights travel. */
typedef struct RecordWords {
    uint32_t word, weight;
} RecordWords;

__device__ __forceinline__ RecordWords record_words(const uint4 &unit, int has_weights, int k) {
    int lane = lane_of_unit(has_weights ? k / 2 : k / 4);
    uint32_t x = __shfl_sync(~0u, unit.x, lane), y = __shfl_sync(~0u, unit.y, lane);
    uint32_t z = __shfl_sync(~0u, unit.z, lane), w = __shfl_sync(~0u, unit.w, lane);
    if (has_weights) return k & 1 ? RecordWords{z, w} : RecordWords{x, y};
    return RecordWords{k & 2 ? (k & 1 ? w : z) : (k & 1 ? y : x), 0};
}

#define MEASURE_WARP (LATENCY_WARPS - 1) /* the last to take a head, and the first without one */
#define LINE_FLAG 120                    /* bytes before the flag of a line */

/** Measure the waits for the heads of an operation. By all threads of a block, before they wait for
 *  anything; a warp does it. */
__device__ __forceinline__ void latency_measure_heads(const EpCudaGroup &g, const EpLatency &l,
                                                      const EpStatistics &s, uint64_t flag) {
    uint64_t start = 0;
    int polls = 0;
    auto seen = [&](int r) {
        return ep_load_relaxed_sys(
            (const uint64_t *)(latency_head(l, l.own, r, latency_num_heads(g, l), flag) +
                               LINE_FLAG));
    };
    auto is_here = [&](int r) {
        return !ep_is_alive(r) || seen(r) == flag || (ep_cuts() && latency_is_late(l, r, flag));
    };
    auto may_wait = [&](int r) {
        if (++polls % EP_POLLS_PER_CLOCK_READ) return 1;
        WaitState wait = ep_check_wait(&g, &l, StepOrigin{r, EP_AWAIT_HEAD, 0}, (uint32_t)flag,
                                       (uint32_t)seen(r), start);
        start = wait.start;
        return wait.alive;
    };
    if (ep_counts_waits(s) && threadIdx.x / 32 == MEASURE_WARP)
        ep_measure_waits(g, s, is_here, may_wait);
}

/* ---- messages of other nodes --------------------------------------------------------------- */

/*
 * What a dispatch does with messages that have come: it gives their heads to the ranks of this
 * node, and counts their rows. A send phase forwards them, a whole dispatch leaves them where they
 * are.
 */

__device__ __forceinline__ const char *landed_message(const EpLatency &l, int other) {
    return l.own + l.layout.landing + other * l.layout.message_bytes;
}

/* Returns how many places of a message are filled. By a warp. */
__device__ __forceinline__ int landed_rows(const EpLatency &l, int other) {
    uint4 head = step_unpack(step_load(landed_message(l, other)));
    return min(max((int)__shfl_sync(~0u, head.w, 0), 0), l.layout.node_rows);
}

/* Give rank r its head of the source on another node. By a warp. */
__device__ __forceinline__ void forward_head(const EpCudaGroup &g, const EpLatency &l, int other,
                                             int r, uint64_t flag) {
    const char *from = landed_message(l, other) + (int64_t)r * l.layout.head_bytes;
    EpRankPlace source = {(int16_t)other, (int16_t)g.rank};
    char *to = latency_head(l, l.window[r], ep_head_of(source, g.size), l.layout.num_heads, flag);
#pragma unroll 1
    for (int at = 0; at < l.layout.head_bytes; at += EP_STEP_BYTES)
        step_store(to + at, step_load(from + at), l.whole);
    if (!l.whole) step_fence();
#pragma unroll 1
    for (int at = 0; at < l.layout.head_bytes && !l.whole; at += EP_STEP_BYTES)
        step_store_flag(to + at, flag);
}

/* Add the rows of a message that the ranks of this node take to the caller's counters: a warp for
 * each place. */
[[maybe_unused]] static __device__ __noinline__ void count_landed(const EpCudaGroup &g,
                                                                  const EpLatency &l,
                                                                  const EpRelayedRows &c, int other,
                                                                  int warp, int warps) {
    int lane = threadIdx.x % 32, rows = landed_rows(l, other);
    const char *from = landed_message(l, other) + l.layout.message_heads;
#pragma unroll 1
    for (int place = warp; place < rows; place += warps) {
        const char *at = from + (int64_t)place * l.nodes.record_steps * EP_STEP_BYTES;
        uint4 unit = step_unpack(step_load(at));
        RecordWords h = record_words(unit, c.carries_weights, lane < c.top_k ? lane : 0);
        int expert = (int)(h.word & ((1u << c.expert_bits) - 1)) - 1, number = -1;
        if (lane < c.top_k && expert >= 0 && expert < g.num_experts) {
            EpRankPlace owner = rank_place(l, ep_owner(&c.owners, expert));
            if (owner.other < 0) number = owner.number;
        }
        int leads = __ffs((int)__match_any_sync(~0u, number)) - 1 == lane;
        if (leads && number >= 0) ep_count_row(c.stats, ep_member(g, number), 1);
    }
}

EP_VARIANT_END

#endif
