/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_LINES_CUH
#define EP_RUNTIME_LINES_CUH

/**
 * Data that says by itself that it is there: latency mode's way through peers' memory.
 *
 * A message is cut into lines of 128 bytes, of which the last eight are the flag: the number of the
 * operation, which was never in that place before. Who waits for data looks at the flags, so that
 * nothing travels behind it and nobody waits for its writes to be confirmed. A warp moves four
 * lines at once, a step: 30 units of 16 bytes, each the business of one lane.
 *
 *     lane       0  1  2  3  4  5  6  7      8 .. 14  15         16 .. 22  23     24 .. 30  31
 *     unit       0  1  2  3  4  5  6  28     7 .. 13  -          14 .. 20  29     21 .. 27  -
 *     stores     its unit             28 low          28 high              29 low           29 high
 *                                     + flag          + flag               + flag           + flag
 *
 * Between GPUs that NVLink connects, the 128 bytes that a warp stores to one line with one
 * instruction arrive together (NCCL's LL128 protocol builds on the same): lines are `whole`.
 * Elsewhere, flags follow behind a fence, and the data is read anew behind another: the same
 * format, slower.
 *
 * A flag must never be found where an earlier message has left data: flags only ever lie in the
 * last eight bytes of a line, whatever the message is.
 */

#include "handles/latency.h"
#include "runtime/device.cuh"

/** The unit of a step that is this lane's, -1: none. */
__device__ __forceinline__ int step_unit(void) {
    unsigned lane = threadIdx.x % 32, line = lane / 8;
    if (lane % 8 < 7) return (int)(line * 7 + lane % 8);
    return line % 2 ? -1 : (int)(28 + line / 2);
}

/** The lane whose unit this is. */
__device__ __forceinline__ int lane_of_unit(int unit) {
    return unit < 28 ? unit / 7 * 8 + unit % 7 : unit == 28 ? 7 : 23;
}

__device__ __forceinline__ int has_flag(void) {
    return threadIdx.x % 8 == 7;
}

/** What this lane stores of a step. By a warp. */
__device__ __forceinline__ ulonglong2 step_pack(const uint4 &unit, uint64_t flag) {
    unsigned lane = threadIdx.x % 32;
    ulonglong2 x = {unit.x | (unsigned long long)unit.y << 32,
                    unit.z | (unsigned long long)unit.w << 32};
    unsigned long long high = __shfl_sync(~0u, x.y, (lane + 24) % 32);
    if (has_flag()) x.x = lane / 8 % 2 ? high : x.x, x.y = flag;
    return x;
}

/** And back. */
__device__ __forceinline__ uint4 step_unpack(const ulonglong2 &x) {
    unsigned long long low = __shfl_sync(~0u, x.x, (threadIdx.x + 8) % 32);
    unsigned long long high = has_flag() ? low : x.y;
    return make_uint4((uint32_t)x.x, (uint32_t)(x.x >> 32), (uint32_t)high, (uint32_t)(high >> 32));
}

/** This lane's part of a step, `to` being where the step goes. */
__device__ __forceinline__ void step_store(char *to, const ulonglong2 &x, int whole) {
    char *at = to + threadIdx.x % 32 * 16;
    if (whole || !has_flag())
        ep_store_relaxed_sys_pair(at, x);
    else
        ep_store_relaxed_sys((uint64_t *)at, x.x);
}

/** Where lines are not whole: between the stores of steps and their flags. By a warp. */
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

/** Whether what was loaded is of this operation. By a warp. */
__device__ __forceinline__ int step_is_here(const ulonglong2 &x, uint64_t flag) {
    return __all_sync(~0u, !has_flag() || x.y == flag);
}

/* ---- waiting ------------------------------------------------------------------------------- */

/* Is a rank in throughput mode instead of its `number`th operation of latency mode? `what` becomes
 * what it says. That tells only in operations which send and receive, behind which the next one
 * waits: beside second halves it may run. */
__device__ __forceinline__ int ep_is_in_throughput_mode(const EpCudaGroup &g,
                                                        const EpLatency &latency, int peer,
                                                        uint32_t number, uint64_t *what) {
    uint32_t next = ep_epoch(g);
    if (!latency.senders || !latency.receives) return 0;
    *what = ep_load_relaxed_sys(&ep_arrival(g, g.rank, peer, next)->what);
    if (!ep_is_in_other_mode(*what, next)) return 0;
    ep_fence_sys();
    uint64_t sent = ep_load_relaxed_sys(ep_sent(g, g.rank, peer, number));
    return (int32_t)((uint32_t)(sent >> 32) - number) < 0;
}

/* Whether a rank, where this one is in its `number`th operation of latency mode, has entered
 * another one, or has given up; which is then reported. Ranks may be some operations ahead. Whoever
 * reports goes: only once it has told all where it is. */
static __device__ __noinline__ int ep_is_elsewhere(const EpCudaGroup &g, const EpLatency &latency,
                                                   int peer, uint32_t flag, int is_long) {
    uint64_t own = *(volatile uint64_t *)&latency.state->number;
    uint32_t number = (uint32_t)own;
    uint64_t word = ep_load_relaxed_sys(ep_sent(g, g.rank, peer, number));
    int knows = (uint32_t)(own >> 32) == flag, told = (uint32_t)(word >> 32) == number;
    int differs = told ? (uint32_t)word != g.digest
                       : is_long && ep_is_in_throughput_mode(g, latency, peer, number, &word);
    if (knows && differs) {
        ep_report(g, EP_FAULT_ORDER, EpAwaited{peer, EP_PHASE_HEAD, 0, g.digest, (uint32_t)word});
        return 1;
    }
    return ep_has_given_up(g, peer);
}

/** Of what step, for the report if it does not come. */
typedef struct StepOrigin {
    int source, phase, row;
} StepOrigin;

/* How long a wait has lasted, where that has been looked at. */
typedef struct LongWait {
    uint64_t start;
    int alive;
} LongWait;

/* Now and then in a wait that lasts: the deadline, and whether the other rank does something else.
 * Apart from the waits, which are short code this way. */
static __device__ __noinline__ LongWait ep_look_up(const EpCudaGroup *g, const EpLatency *latency,
                                                   StepOrigin origin, uint32_t expected,
                                                   uint32_t seen, uint64_t start) {
    EpPatience patience = {start, EP_POLLS_PER_CLOCK_READ - 1};
    int alive = ep_patience(*g, &patience,
                            EpAwaited{origin.source, origin.phase, origin.row, expected, seen});
    return LongWait{patience.start,
                    alive && !ep_is_elsewhere(*g, *latency, origin.source, expected, start != 0)};
}

/**
 * Until a step is here that may already have been loaded into x. By a warp; 0: it will not come.
 */
__device__ __forceinline__ int step_await(const EpCudaGroup &g, const EpLatency &latency,
                                          const char *from, uint64_t flag, ulonglong2 *x,
                                          const StepOrigin &origin) {
    uint64_t start = 0;
#pragma unroll 1
    for (int polls = 1; !step_is_here(*x, flag); polls++) {
        if (polls % EP_POLLS_PER_CLOCK_READ == 0) {
            LongWait wait = ep_look_up(&g, &latency, origin, (uint32_t)flag, (uint32_t)x->y, start);
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
