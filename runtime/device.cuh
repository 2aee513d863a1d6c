/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_DEVICE_CUH
#define EP_RUNTIME_DEVICE_CUH

/**
 * What all kernels share: addresses in windows, waits that end, the grid barrier.
 */

#include "runtime/cuda.h"
#include "runtime/ptx.cuh"

/* ---- addresses ----------------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ T *ep_at(const EpCudaGroup &g, int rank, int64_t offset) {
    return (T *)(g.window[rank] + offset);
}

/** In `receiver`'s window: how many records `sender` has put into the lane. */
__device__ __forceinline__ uint32_t *ep_head(const EpCudaGroup &g, int receiver, int sender,
                                             int lane) {
    return ep_at<uint32_t>(g, receiver, g.layout.head) + sender * EP_LANES + lane;
}

/** In `sender`'s window: how many records of its lane `receiver` has taken out. */
__device__ __forceinline__ uint32_t *ep_credit(const EpCudaGroup &g, int sender, int receiver,
                                               int lane) {
    return ep_at<uint32_t>(g, sender, g.layout.credit) + receiver * EP_LANES + lane;
}

/** Record number `index` of the lane from `sender`, in `receiver`'s window. */
__device__ __forceinline__ char *ep_ring(const EpCudaGroup &g, int receiver, int sender, int lane,
                                         uint32_t index) {
    int64_t ring = (int64_t)(sender * EP_LANES + lane) * g.layout.depth;
    return ep_at<char>(g, receiver, g.layout.ring) +
           (ring + index % (uint32_t)g.layout.depth) * g.layout.record_bytes;
}

/** The tokens of a lane, out of `tokens`: begin, and end at most `tokens`. */
__device__ __forceinline__ void ep_lane_range(int tokens, int lane, int *begin, int *end) {
    int share = (tokens + EP_LANES - 1) / EP_LANES;
    *begin = min(tokens, lane * share);
    *end = min(tokens, *begin + share);
}

/* ---- waiting ------------------------------------------------------------------------------- */

enum EpPhase {
    EP_PHASE_COUNTS = 1,
    EP_PHASE_ROUTES,
    EP_PHASE_RECORD,
    EP_PHASE_CREDIT,
    EP_PHASE_GRID
};

#define EP_POLLS_PER_CLOCK_READ 256

/** What a wait waits for: the report, should it expire. */
typedef struct EpAwaited {
    int peer, phase, lane;
    uint32_t expected, seen;
} EpAwaited;

typedef struct EpPatience {
    uint64_t start; /* 0 until the clock is first read */
    int polls;
} EpPatience;

static __device__ __noinline__ void ep_report_expiry(const EpCudaGroup &g,
                                                     const EpAwaited &awaited) {
    if (atomicExch(&g.state->failed, 1)) return;
    volatile EpCudaFailure *out = g.failure;
    out->op = g.op;
    out->peer = awaited.peer, out->phase = awaited.phase, out->lane = awaited.lane;
    out->expected = awaited.expected, out->seen = awaited.seen;
    __threadfence_system();
    out->failed = 1;
}

/**
 * One more poll: 0 when the deadline has passed, or another wait of this rank has failed already.
 * Then everyone hurries out, and what the kernel wrote is void.
 */
__device__ __forceinline__ int ep_patience(const EpCudaGroup &g, EpPatience *p,
                                           const EpAwaited &awaited) {
    if (++p->polls % EP_POLLS_PER_CLOCK_READ) return 1;
    if (*(volatile int32_t *)&g.state->failed) return 0;
    uint64_t now = ep_global_timer();
    p->start = p->start ? p->start : now;
    if (now - p->start < g.timeout_ns) return 1;
    ep_report_expiry(g, awaited);
    return 0;
}

/** Has a counter, that only grows, reached `expected`? Holds across its wrapping around. */
__device__ __forceinline__ int ep_reached(uint32_t seen, uint32_t expected) {
    return (int32_t)(seen - expected) >= 0;
}

__device__ __forceinline__ int ep_wait_counter(const EpCudaGroup &g, const uint32_t *counter,
                                               uint32_t expected, int peer, int phase, int lane) {
    EpPatience patience = {0, 0};
    for (;;) {
        uint32_t seen = ep_load_acquire_sys(counter);
        if (ep_reached(seen, expected)) return 1;
        if (!ep_patience(g, &patience, EpAwaited{peer, phase, lane, expected, seen})) return 0;
    }
}

/** All blocks of the grid, which are resident together, meet. Called by all threads. */
__device__ __forceinline__ int ep_grid_barrier(const EpCudaGroup &g) {
    __shared__ int alive;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        uint32_t blocks = gridDim.x;
        uint32_t ticket = atomicAdd(&g.state->arrivals, 1);
        uint32_t target = (ticket / blocks + 1) * blocks;
        alive = ep_wait_counter(g, &g.state->arrivals, target, g.rank, EP_PHASE_GRID, 0);
    }
    __syncthreads();
    return alive;
}

#endif
