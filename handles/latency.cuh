/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_LATENCY_CUH
#define EP_HANDLES_LATENCY_CUH

/**
 * What latency mode's kernels have in common: addresses in a handle's window, how they begin and
 * end, how blocks share what is to be sent and warps what is to be received.
 */

#include "handles/publish.cuh"
#include "runtime/lines.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)

/* ---- addresses ----------------------------------------------------------------------------- */

/* Of what `source` has sent, in the window of some rank. */
__device__ __forceinline__ char *latency_head(const EpLatency &l, char *window, int source,
                                              int size, uint64_t flag) {
    int index = (int)(flag & 1) * size + source;
    return window + l.layout.heads + (int64_t)index * l.layout.head_bytes;
}

__device__ __forceinline__ char *latency_record(const EpLatency &l, char *window, int source,
                                                int size, int token, uint64_t flag) {
    uint32_t index = ((uint32_t)(flag & 1) * size + source) * l.layout.max_tokens + token;
    return window + l.layout.records + (uint64_t)index * (uint32_t)l.layout.record_bytes;
}

/* ---- begin and end ------------------------------------------------------------------------- */

/* What is to be had from memory at the start is asked for by threads of different warps, so that it
 * is under way together. Thread 0 sees to ep_enter. */
#define TURN_THREAD 32
#define CLAIM_THREAD 64

/** The operation under way. */
typedef struct Turn {
    uint64_t flag;   /**< of all its lines */
    uint32_t number; /**< among the group's operations of latency mode: see ep_sent */
} Turn;

/** See ep_enter: in latency mode a rank that has failed once does nothing more. Tells all threads
 *  of the operation under way. */
__device__ __forceinline__ int latency_enter(const EpCudaGroup &g, const EpCudaPlan &plan,
                                             const EpLatency &l, Turn *turn) {
    __shared__ Turn shared;
    if (threadIdx.x == TURN_THREAD)
        shared = Turn{*(volatile uint64_t *)&l.state->done + 1,
                      *(volatile uint32_t *)&g.state->sent + 1};
    int alive = ep_enter(g, plan, 0);
    *turn = shared;
    return alive;
}

/**
 * Blocks that have entered and claimed their last item pass: the last one sets all that is counted
 * to what the next kernel is to find. Thread 0 takes the block's ticket once it may, and looks at
 * it at the end, so that nobody waits for it to come. Of other threads it is of no meaning.
 */
__device__ __forceinline__ uint32_t latency_ticket(const EpLatency &l) {
    return threadIdx.x == 0 ? atomicAdd(&l.state->passed, 1u) : 0;
}

__device__ __forceinline__ void latency_pass(const EpCudaGroup &g, const EpLatency &l,
                                             const Turn &turn, uint32_t ticket) {
    volatile EpLatencyState *state = l.state;
    if (threadIdx.x || ticket != gridDim.x - 1) return;
    state->passed = state->claimed = 0;
    if (l.receives) state->done = turn.flag;
    if (l.senders) *(volatile uint32_t *)&g.state->sent = turn.number;
}

/** What a block is to do, and which of those this is that receive. */
typedef struct Duty {
    int sends, receives;
    int block, blocks;
} Duty;

__device__ __forceinline__ Duty latency_duty(const EpLatency &l) {
    int index = blockIdx.x, block = index - l.first_receiver;
    return Duty{index < l.senders, l.receives && block >= 0, block,
                (int)gridDim.x - l.first_receiver};
}

/** By all threads of each block that receives, at its end: 1 in the last of them, which sees what
 *  the others have stored. */
__device__ __forceinline__ int latency_is_last(const EpLatency &l, const Duty &duty) {
    __shared__ int is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&l.state->left, 1u) == (unsigned)duty.blocks - 1;
        if (is_last) *(volatile uint32_t *)&l.state->left = 0;
    }
    __syncthreads();
    return is_last;
}

/* ---- what is to be sent -------------------------------------------------------------------- */

/** Items that a block claims one after another: places for two, since the next is under way while
 *  one is worked on. */
__device__ __forceinline__ int *claimed_items(void) {
    __shared__ int items[2];
    return items;
}

/** Before a barrier of the block's, behind which its first item is there. */
__device__ __forceinline__ void claims_begin(const EpLatency &l) {
    if (threadIdx.x == CLAIM_THREAD) claimed_items()[0] = (int)atomicAdd(&l.state->claimed, 1u);
}

/** By all threads: work(item) for each item below `items` that is this block's: `item`, and those
 *  that it claims, of which the first is number `claimed`. work may have barriers. */
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

/** The same, of items that are all claimed. */
template <typename Work>
__device__ __forceinline__ void claims_work(const EpLatency &l, int items, Work work) {
    claims_work_from(l, claimed_items()[0], 0, items, work);
}

/* ---- heads --------------------------------------------------------------------------------- */

/** By a warp of the block that sends the heads, after its own: which operation this is (see
 *  ep_sent). */
__device__ __forceinline__ void announce_operation(const EpCudaGroup &g, const EpLatency &l,
                                                   const Turn &turn) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = lane; r < g.size; r += 32)
        ep_store_relaxed_sys(ep_sent(g, r, g.rank, turn.number), ep_counter(turn.number, g.digest));
    if (lane == 0)
        *(volatile uint64_t *)&l.state->number = ep_counter((uint32_t)turn.flag, turn.number);
}

/* Ranks that disagree see that for themselves, each from what the others have sent: nobody goes
 * before it has sent its own. By one thread. */
__device__ __forceinline__ void report_other_operation(const EpCudaGroup &g, const EpLatency &l,
                                                       int r, uint32_t seen, uint64_t facts,
                                                       uint64_t flag) {
    EpPatience patience = {0, 0};
    const EpAwaited own = {g.rank, EP_PHASE_HEAD, 0, (uint32_t)flag, 0};
    while ((uint32_t)(*(volatile uint64_t *)&l.state->number >> 32) != (uint32_t)flag)
        if (!ep_patience(g, &patience, own)) return;
    ep_report(g, EP_FAULT_ORDER, EpAwaited{r, EP_PHASE_HEAD, 0, g.digest, seen}, facts);
}

/** A warp sends rank r's head: unit_of(u) are its words 4 * u and so on. */
template <typename Unit>
__device__ __forceinline__ void send_head(const EpCudaGroup &g, const EpLatency &l, int r,
                                          int words, uint64_t flag, Unit unit_of) {
    char *to = latency_head(l, l.window[r], g.rank, g.size, flag);
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

/** And receives that of rank r: take(u, unit u). By a warp; 0: it does not come, or is of another
 *  operation. */
template <typename Take>
__device__ __forceinline__ int take_head(const EpCudaGroup &g, const EpLatency &l, int r, int words,
                                         uint64_t flag, Take take) {
    const char *from = latency_head(l, l.own, r, g.size, flag);
    int steps = (int)ep_steps(ep_units(4 * words)), same = 1;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        ulonglong2 x = step_load(from + step * EP_STEP_BYTES);
        const StepOrigin origin = {r, EP_PHASE_HEAD, 0};
        if (!step_await(g, l, from + step * EP_STEP_BYTES, flag, &x, origin)) return 0;
        uint4 unit = step_unpack(x);
        if (step == 0 && threadIdx.x % 32 == 0 && unit.x != g.digest) {
            report_other_operation(g, l, r, unit.x, unit.y | (uint64_t)unit.z << 32, flag);
            same = 0;
        }
        if (step_unit() >= 0) take(step * EP_STEP_UNITS + step_unit(), unit);
    }
    return __all_sync(~0u, same);
}

#endif
