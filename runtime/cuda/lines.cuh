/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_LINES_CUH
#define EP_RUNTIME_CUDA_LINES_CUH

/**
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

#include "runtime/cuda/device.cuh"
#include "runtime/cuda/latency.h"

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
        if (ep_peer_differs(g, latency, r, origin.awaited, flag, start)) return 1;
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
        uint32_t seen = (uint32_t)(ep_load_relaxed_sys(ep_sent(g, g.rank, r, number)) >> 32);
        if ((int32_t)(seen - number) < 0) return EpAwaited{r, EP_AWAIT_HEAD, 0, number, seen};
    }
    return awaited;
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
 * come. By a warp.
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

#endif
