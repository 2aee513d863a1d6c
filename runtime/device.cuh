/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_DEVICE_CUH
#define EP_RUNTIME_DEVICE_CUH

/**
 * What all kernels share: addresses in windows, waits that end, how an operation begins and ends.
 */

#include "runtime/cuda.h"
#include "runtime/cuda_limits.h"
#include "runtime/ptx.cuh"

#define RANK_WORDS ((EP_CUDA_MAX_RANKS + 31) / 32) /* ranks of each lane of a warp */

/* ---- kernels ------------------------------------------------------------------------------- */

/**
 * Let a kernel have all the shared memory that a block may, `shared_bytes` with what it declares;
 * and load it, so that the first launch does not. A cudaError_t.
 */
template <typename Kernel> static int ep_open_kernel(Kernel kernel, int shared_bytes) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    if (attributes.sharedSizeBytes > EP_STATIC_SHARED_BYTES) return cudaErrorInvalidConfiguration;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shared_bytes - (int)attributes.sharedSizeBytes);
}

/**
 * Launch a kernel of one argument on a cudaStream_t. A cudaError_t, of this launch alone: what
 * other calls have left behind in cudaGetLastError is not its failure.
 */
template <typename Kernel, typename Args>
static int ep_launch(Kernel *kernel, int blocks, int threads, size_t shared, void *stream,
                     const Args &args) {
    void *arguments[] = {(void *)(uintptr_t)&args};
    return cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3((unsigned)threads), arguments,
                            shared, (cudaStream_t)stream);
}

/* ---- warps --------------------------------------------------------------------------------- */

/** The sum of the values of the lanes up to this one. */
__device__ __forceinline__ int ep_warp_prefix(int value) {
    int lane = (int)threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, value, d);
        value += lane >= d ? other : 0;
    }
    return value;
}

/* ---- addresses ----------------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ T *ep_at(const EpCudaGroup &g, int rank, int64_t offset) {
    return (T *)(g.window[rank] + offset);
}

#define EP_WHERE (((uint64_t)1 << 48) - 1) /* what is not the epoch, in that word of an arrival */

/** In `receiver`'s window: what `sender` says in operation `epoch`. */
__device__ __forceinline__ EpArrival *ep_arrival(const EpCudaGroup &g, int receiver, int sender,
                                                 uint32_t epoch) {
    return ep_at<EpArrival>(g, receiver, g.layout.arrival) + (epoch & 1) * g.size + sender;
}

/** In `receiver`'s window: which operation of latency mode was `sender`'s `number`th. */
__device__ __forceinline__ uint64_t *ep_sent(const EpCudaGroup &g, int receiver, int sender,
                                             uint32_t number) {
    return ep_at<uint64_t>(g, receiver, g.layout.sent) + sender * EP_SENT_WORDS +
           number % EP_SENT_WORDS;
}

/** In `receiver`'s window: what `sender` has put where row `row` goes. */
__device__ __forceinline__ uint64_t *ep_head(const EpCudaGroup &g, int receiver, int sender,
                                             int row) {
    int64_t place = (int64_t)sender * g.layout.depth + (row & (g.layout.depth - 1));
    return ep_at<uint64_t>(g, receiver, g.layout.head) + place;
}

/** In `sender`'s window: what `receiver` has taken from where row `row` goes. */
__device__ __forceinline__ uint64_t *ep_credit(const EpCudaGroup &g, int sender, int receiver,
                                               int row) {
    int64_t place = (int64_t)receiver * g.layout.depth + (row & (g.layout.depth - 1));
    return ep_at<uint64_t>(g, sender, g.layout.credit) + place;
}

/** The record of row `row` from `sender`, in `receiver`'s window; they differ. */
__device__ __forceinline__ char *ep_ring(const EpCudaGroup &g, int receiver, int sender, int row) {
    int64_t ring = (int64_t)(sender - (sender > receiver)) * g.layout.depth;
    return ep_at<char>(g, receiver, g.layout.ring) +
           (ring + (row & (g.layout.depth - 1))) * g.layout.record_bytes;
}

/* ---- counters ------------------------------------------------------------------------------ */

/** Of the operation under way. */
__device__ __forceinline__ uint32_t ep_epoch(const EpCudaGroup &g) {
    return *(volatile uint32_t *)&g.state->epoch + 1;
}

__device__ __forceinline__ uint64_t ep_counter(uint32_t epoch, uint32_t count) {
    return (uint64_t)epoch << 32 | count;
}

/** What a word says of operation `epoch`: 0 where it has not been touched in it. */
__device__ __forceinline__ int ep_read_counter(uint64_t word, uint32_t epoch) {
    return (uint32_t)(word >> 32) == epoch ? (int)(uint32_t)word : 0;
}

/* ---- waiting ------------------------------------------------------------------------------- */

#define EP_POLLS_PER_CLOCK_READ 256

/** What a wait waits for: the report, should it expire. */
typedef struct EpAwaited {
    int peer, phase, row;
    uint32_t expected, seen;
} EpAwaited;

typedef struct EpPatience {
    uint64_t start; /* 0 until the clock is first read */
    int polls;
} EpPatience;

/* A rank that waits in vain for what another was to send may be waiting, as the other is, for a
 * third that has not even entered the operation: then that is the one to name. A word of a later
 * operation is that of a rank which was here, failed and went on: it is not the one. */
static __device__ EpAwaited ep_find_absent(const EpCudaGroup &g, const EpAwaited &awaited) {
    uint32_t epoch = ep_epoch(g);
#pragma unroll 1
    for (int r = 0; r < g.size; r++) {
        uint32_t seen =
            (uint32_t)(ep_load_relaxed_sys(&ep_arrival(g, g.rank, r, epoch)->what) >> 32);
        if ((int32_t)(seen - epoch) < 0) return EpAwaited{r, EP_PHASE_ARRIVAL, 0, epoch, seen};
    }
    return awaited;
}

/* Tell all ranks that this one has given up: those still in this operation, and those that are in
 * the next before they hear of it. The words stay, since what is enqueued behind a failure does not
 * enter: see ep_enter. */
static __device__ void ep_give_up(const EpCudaGroup &g, int blamed) {
    uint32_t epoch = ep_epoch(g), gone = EP_DIGEST(EP_OP_GONE, 0, blamed);
#pragma unroll 1
    for (int r = 0; r < g.size; r++)
#pragma unroll 1
        for (uint32_t e = epoch; e != epoch + 2; e++)
            ep_store_relaxed_sys(&ep_arrival(g, r, g.rank, e)->what, ep_counter(e, gone));
}

/* Ranks that disagree need not be told: each of them sees that for itself. */
static __device__ __noinline__ void ep_report(const EpCudaGroup &g, int fault, EpAwaited awaited,
                                              uint64_t peer_facts = 0) {
    if (atomicCAS(&g.state->failed, 0u, ep_epoch(g))) return;
    if (fault == EP_FAULT_LATE && awaited.phase < EP_PHASE_HEAD)
        awaited = ep_find_absent(g, awaited);
    if (fault != EP_FAULT_ORDER)
        ep_give_up(g, fault == EP_FAULT_PEER ? (int)awaited.seen : awaited.peer);
    volatile EpCudaFailure *out = g.failure;
    out->op = EP_DIGEST_OP(g.digest);
    out->peer = awaited.peer, out->phase = awaited.phase, out->row = awaited.row;
    out->expected = awaited.expected, out->seen = awaited.seen;
    out->facts = g.facts, out->peer_facts = peer_facts;
    __threadfence_system();
    out->fault = fault;
}

/**
 * One more poll: 0 when the deadline has passed, or another wait of this rank has failed already.
 * Then everyone hurries out, and what the kernel wrote is void.
 */
__device__ __forceinline__ int ep_patience(const EpCudaGroup &g, EpPatience *p,
                                           const EpAwaited &awaited) {
    if (__builtin_expect(++p->polls % EP_POLLS_PER_CLOCK_READ != 0, 1)) return 1;
    if (*(volatile uint32_t *)&g.state->failed) return 0;
    uint64_t now = ep_global_timer();
    p->start = p->start ? p->start : now;
    if (now - p->start < g.timeout_ns) return 1;
    ep_report(g, EP_FAULT_LATE, awaited);
    return 0;
}

/* Whether a rank has given up, which is then reported. */
__device__ __forceinline__ int ep_has_given_up(const EpCudaGroup &g, int peer) {
    uint32_t epoch = ep_epoch(g);
    uint64_t what = ep_load_relaxed_sys(&ep_arrival(g, g.rank, peer, epoch)->what);
    if ((uint32_t)(what >> 32) != epoch || EP_DIGEST_OP((uint32_t)what) != EP_OP_GONE) return 0;
    ep_report(g, EP_FAULT_PEER,
              EpAwaited{peer, EP_PHASE_ARRIVAL, 0, epoch, EP_DIGEST_SIZES((uint32_t)what)});
    return 1;
}

/* Whether a wait is about to look at the clock, and not for the first time. */
__device__ __forceinline__ int ep_is_long(const EpPatience &p) {
    return p.start && (p.polls + 1) % EP_POLLS_PER_CLOCK_READ == 0;
}

/* Whether a rank has told of its `next` operation of the other mode, in this word of it. One that
 * was not here when this rank looked, and is there, may have been here in between: what it says of
 * this operation is to be loaded again, behind a fence. It stores that in an earlier kernel. */
__device__ __forceinline__ int ep_is_in_other_mode(uint64_t what, uint32_t next) {
    return (uint32_t)(what >> 32) == next && EP_DIGEST_OP((uint32_t)what) != EP_OP_GONE;
}

/* In throughput mode: is it in latency mode instead? `what` becomes what it says. */
__device__ __forceinline__ int ep_is_in_latency_mode(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                     uint64_t *what) {
    uint32_t next = *(volatile uint32_t *)&g.state->sent + 1;
    *what = ep_load_relaxed_sys(ep_sent(g, g.rank, peer, next));
    if (!ep_is_in_other_mode(*what, next)) return 0;
    ep_fence_sys();
    uint64_t here = ep_load_relaxed_sys(&ep_arrival(g, g.rank, peer, epoch)->what);
    return (uint32_t)(here >> 32) != epoch;
}

/* Until the word of a row's place says that row, in this operation. load(word) loads it. */
template <typename Load>
__device__ __forceinline__ int ep_await_row(const EpCudaGroup &g, const uint64_t *word,
                                            uint32_t epoch, int row, int peer, int phase,
                                            Load load) {
    EpPatience patience = {0, 0};
    int seen;
    while ((seen = ep_read_counter(load(word), epoch)) < row + 1)
        if (!ep_patience(g, &patience,
                         EpAwaited{peer, phase, row, (uint32_t)row + 1, (uint32_t)seen}))
            return 0;
    return 1;
}

/** Until row `row` of another rank is here. It may then be read by bulk copies, too, which go
 *  through another proxy than the load that has seen its head. */
__device__ __forceinline__ int ep_await_record(const EpCudaGroup &g, uint32_t epoch, int source,
                                               int row) {
    int alive = ep_await_row(g, ep_head(g, g.rank, source, row), epoch, row, source,
                             EP_PHASE_RECORD, ep_load_acquire_sys);
    ep_fence_proxy_global();
    return alive;
}

/** Until another rank has room for row `row`. The row that was there has been read, and nothing of
 *  it is read here: no load is to be ordered behind this one. */
__device__ __forceinline__ int ep_await_room(const EpCudaGroup &g, uint32_t epoch, int receiver,
                                             int row) {
    int before = row - g.layout.depth;
    return before < 0 || ep_await_row(g, ep_credit(g, g.rank, receiver, row), epoch, before,
                                      receiver, EP_PHASE_CREDIT, ep_load_relaxed_sys);
}

/* ---- begin and end of an operation --------------------------------------------------------- */

/** Tell a rank that this one has entered the operation, and no more: neither word orders anything.
 */
__device__ __forceinline__ void ep_announce_arrival(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                    uint64_t where) {
    EpArrival *arrival = ep_arrival(g, peer, g.rank, epoch);
    ep_store_relaxed_sys(&arrival->where, (uint64_t)epoch << 48 | where);
    ep_store_relaxed_sys(&arrival->what, ep_counter(epoch, g.digest));
}

/**
 * Wait until a rank has entered the operation, and see that it is the same one. `where` may be
 * NULL. 0: it has not, or another, or one of latency mode, or it has given up.
 */
__device__ __forceinline__ int ep_await_arrival(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                uint64_t *where) {
    const EpArrival *arrival = ep_arrival(g, g.rank, peer, epoch);
    EpPatience patience = {0, 0};
    uint64_t what, at;
    do {
        what = ep_load_relaxed_sys(&arrival->what);
        at = ep_load_relaxed_sys(&arrival->where);
        if (EP_DIGEST_OP((uint32_t)what) == EP_OP_GONE) {
            ep_report(g, EP_FAULT_PEER,
                      EpAwaited{peer, EP_PHASE_ARRIVAL, 0, epoch, EP_DIGEST_SIZES((uint32_t)what)});
            return 0;
        }
        if ((uint32_t)(what >> 32) == epoch && at >> 48 == (epoch & 0xffff)) {
            if (where) *where = at & EP_WHERE;
            if ((uint32_t)what == g.digest) return 1;
            ep_report(g, EP_FAULT_ORDER,
                      EpAwaited{peer, EP_PHASE_ARRIVAL, 0, g.digest, (uint32_t)what},
                      at & EP_WHERE);
            return 0;
        }
        if (ep_is_long(patience) && ep_is_in_latency_mode(g, peer, epoch, &at)) {
            ep_report(g, EP_FAULT_ORDER,
                      EpAwaited{peer, EP_PHASE_ARRIVAL, 0, g.digest, (uint32_t)at});
            return 0;
        }
    } while (ep_patience(g, &patience,
                         EpAwaited{peer, EP_PHASE_ARRIVAL, 0, epoch, (uint32_t)(what >> 32)}));
    return 0;
}

/** Whether this rank has failed in an operation before this one. */
__device__ __forceinline__ int ep_failed_before(const EpCudaGroup &g, uint32_t epoch) {
    uint32_t failed = *(volatile uint32_t *)&g.state->failed;
    return failed != 0 && failed != epoch;
}

/** Tell all ranks, by one block, before anything else is done. */
__device__ __forceinline__ void ep_arrive(const EpCudaGroup &g, uint32_t epoch, uint64_t where) {
    for (int r = threadIdx.x; r < g.size && blockIdx.x == 0; r += blockDim.x)
        ep_announce_arrival(g, r, epoch, where);
}

#define EP_LEFT_BLOCKS 0xffffu /* in EpCudaState.finished; above them, those that leave traces */

/** What a block that leaves is told. */
enum EpLeft { EP_LEFT_OTHERS, EP_LEFT_NOTHING, EP_LEFT_TRACES };

/** The last block to leave completes the operation; called by all threads of each, once nothing is
 *  left to do. Returns other than EP_LEFT_OTHERS in the last block; EP_LEFT_TRACES where a block
 *  leaves traces, which is what the last one is to see of what it has stored. */
__device__ __forceinline__ int ep_leave(const EpCudaGroup &g, uint32_t epoch, int traces = 1) {
    __shared__ int left;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (traces) __threadfence();
        uint32_t finished = atomicAdd(&g.state->finished, traces ? EP_LEFT_BLOCKS + 2 : 1u);
        int is_last = (finished & EP_LEFT_BLOCKS) == gridDim.x - 1;
        left = !is_last                              ? EP_LEFT_OTHERS
               : traces || finished > EP_LEFT_BLOCKS ? EP_LEFT_TRACES
                                                     : EP_LEFT_NOTHING;
        if (is_last) *(volatile uint32_t *)&g.state->finished = 0;
        if (is_last) g.state->claimed[0] = g.state->claimed[1] = 0;
        if (is_last) *(volatile uint32_t *)&g.state->epoch = epoch;
    }
    __syncthreads();
    return left;
}

#endif
