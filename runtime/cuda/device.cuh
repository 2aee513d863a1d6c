/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_DEVICE_CUH
#define EP_RUNTIME_CUDA_DEVICE_CUH

/**
 * What all kernels share: addresses in windows, waits with a timeout, how an operation begins and
 * ends. runtime/cuda/device.h describes the words and their memory order.
 */

#include "runtime/cuda/device.h"
#include "runtime/cuda/ptx.cuh"
#include "runtime/layout.h"

#define RANK_WORDS ((EP_CUDA_MAX_RANKS + 31) / 32) /* ranks per lane of a warp */

EP_VARIANT_BEGIN

/* ---- kernels ------------------------------------------------------------------------------- */

/**
 * Load a kernel, so that its first launch does not, and let a block of it have `shared_bytes` of
 * shared memory, what it declares included. Returns a cudaError_t.
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
 * Launch a kernel of one argument on a cudaStream_t. Returns this launch's own cudaError_t,
 * whatever other calls have left in cudaGetLastError.
 */
template <typename Kernel, typename Args>
static int ep_launch(Kernel *kernel, int blocks, int threads, size_t shared, void *stream,
                     const Args &args) {
    void *arguments[] = {(void *)(uintptr_t)&args};
    return cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3((unsigned)threads), arguments,
                            shared, (cudaStream_t)stream);
}

/**
 * Launch a kernel as ep_launch does, so that its blocks may start before what the kernel before it
 * on the stream wrote can be read: once all of that one's blocks have called ep_grid_release or
 * have ended. It reads and writes nothing before its ep_grid_wait. After anything but a kernel it
 * starts as any other; in a captured graph it is the same. In code of 8.0 ep_grid_wait does
 * nothing: then `early` (EpCudaGroup) is 0, and the kernel starts as any other.
 */
template <typename Kernel, typename Args>
static int ep_launch_early(Kernel *kernel, int blocks, int threads, size_t shared, void *stream,
                           const Args &args, int early) {
    if (!early) return ep_launch(kernel, blocks, threads, shared, stream, args);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks), config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared, config.stream = (cudaStream_t)stream;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args);
}

/* ---- warps --------------------------------------------------------------------------------- */

/** Returns the sum of the values of lanes 0 to this one, which is one of the first `lanes`. */
__device__ __forceinline__ int ep_warp_prefix(int value, int lanes = 32) {
    int lane = (int)threadIdx.x % 32;
    for (int d = 1; d < lanes; d *= 2) {
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

#define EP_WHERE (((uint64_t)1 << 48) - 1) /* the part of EpArrival.where below the epoch */

/** Returns the arrival of `sender` in operation `epoch`, in `receiver`'s window. */
__device__ __forceinline__ EpArrival *ep_arrival(const EpCudaGroup &g, int receiver, int sender,
                                                 uint32_t epoch) {
    return ep_at<EpArrival>(g, receiver, g.layout.arrival) + (epoch & 1) * g.size + sender;
}

/** Returns the word in `receiver`'s window in which `sender` says which operation its `number`th
 *  operation of latency mode was. */
__device__ __forceinline__ uint64_t *ep_sent(const EpCudaGroup &g, int receiver, int sender,
                                             uint32_t number) {
    return ep_at<uint64_t>(g, receiver, g.layout.sent) + sender * EP_SENT_WORDS +
           number % EP_SENT_WORDS;
}

/** Returns the word in this rank's window that names a rank which is aborted. */
__device__ __forceinline__ uint64_t *ep_aborted(const EpCudaGroup &g) {
    return ep_at<uint64_t>(g, g.rank, g.layout.aborted);
}

/** Returns the head of the ring entry of row `row` from `sender`, in `receiver`'s window. */
__device__ __forceinline__ uint64_t *ep_head(const EpCudaGroup &g, int receiver, int sender,
                                             int row) {
    int depth = EP_MASKED ? g.layout.peer_depth : g.layout.depth;
    int64_t entry = (int64_t)sender * depth + (row & (g.layout.depth - 1));
    return ep_at<uint64_t>(g, receiver, g.layout.head) + entry;
}

/** Returns the credit for the ring entry of row `row` to `receiver`, in `sender`'s window. */
__device__ __forceinline__ uint64_t *ep_credit(const EpCudaGroup &g, int sender, int receiver,
                                               int row) {
    int depth = EP_MASKED ? g.layout.peer_depth : g.layout.depth;
    int64_t entry = (int64_t)receiver * depth + (row & (g.layout.depth - 1));
    return ep_at<uint64_t>(g, sender, g.layout.credit) + entry;
}

/** Returns the record of row `row` from `sender`, in the window of `receiver`, which is another
 *  rank. */
__device__ __forceinline__ char *ep_ring(const EpCudaGroup &g, int receiver, int sender, int row) {
    int64_t peer = (int64_t)(sender - (sender > receiver));
    if (EP_MASKED)
        return ep_at<char>(g, receiver, g.layout.ring) + peer * g.layout.peer_lines * EP_RING_UNIT +
               (int64_t)(row & (g.layout.depth - 1)) * g.layout.record_bytes;
    int64_t ring = peer * g.layout.depth;
    return ep_at<char>(g, receiver, g.layout.ring) +
           (ring + (row & (g.layout.depth - 1))) * g.layout.record_bytes;
}

/** Names a rank of the group, on whatever node, where a rank of this node is expected. */
__device__ __forceinline__ int ep_elsewhere(const EpCudaGroup &g, int member) {
    return g.size + member;
}

/** Returns the number in the group of a rank of this node, or of one that ep_elsewhere names. */
__device__ __forceinline__ int ep_member(const EpCudaGroup &g, int rank) {
    if (rank >= g.size) return rank - g.size;
    return g.members && rank >= 0 ? g.members[rank] : rank;
}

/* ---- masks --------------------------------------------------------------------------------- */

/*
 * In kernels for groups with masks (EP_MASKED). A rank that is masked is not waited for, nothing is
 * stored in its window, and what it stores in this one is not read: whatever it may still send lies
 * where only its own data does. In other kernels all ranks are alive, and these functions are
 * nothing. EpCudaBallot tells how ranks come to one set.
 */

/* Returns the block's copy of the words that say who is alive, then of late_us. The last word is
 * the block's own: see ep_note_late. */
__device__ __forceinline__ uint32_t *ep_alive_words(void) {
    __shared__ __align__(16) uint32_t words[EP_ALIVE_WORDS + 2];
    return words;
}

static_assert((EP_ALIVE_WORDS + 1) * sizeof(uint32_t) == sizeof(ulonglong2) &&
                  offsetof(EpCudaState, alive) % sizeof(ulonglong2) == 0 &&
                  offsetof(EpCudaState, late_us) ==
                      offsetof(EpCudaState, alive) + EP_ALIVE_WORDS * sizeof(uint32_t),
              "loaded at once");

/** Load who is alive, before a barrier behind which ep_is_alive is called. All blocks read these
 *  words at about the same time, and the cache serves them one after the other. So one thread of a
 *  block loads them at once. */
__device__ __forceinline__ void ep_load_alive(const EpCudaGroup &g) {
    if (!EP_MASKED || threadIdx.x) return;
    *(ulonglong2 *)ep_alive_words() = ep_load_relaxed_gpu_pair((const uint64_t *)g.state->alive);
    ep_alive_words()[EP_ALIVE_WORDS + 1] = 0;
}

/** Note that a rank is late for this block, or that it has looked for one: see ep_has_late. */
__device__ __forceinline__ void ep_note_late(void) {
    *(volatile uint32_t *)&ep_alive_words()[EP_ALIVE_WORDS + 1] = 1;
}

/** Returns whether this thread, or another one before a barrier, has noted that. */
__device__ __forceinline__ int ep_has_late(void) {
    return *(volatile uint32_t *)&ep_alive_words()[EP_ALIVE_WORDS + 1] != 0;
}

/** Returns whether ranks that are late are cut. */
__device__ __forceinline__ int ep_cuts(void) {
    return EP_MASKED && ep_alive_words()[EP_ALIVE_WORDS] != 0;
}

/** Returns whether a rank of this node takes part. */
__device__ __forceinline__ int ep_is_alive(int rank) {
    return !EP_MASKED || (ep_alive_words()[rank / 32] >> rank % 32 & 1);
}

/** As ep_is_alive, before ep_load_alive. */
__device__ __forceinline__ int ep_find_alive(const EpCudaGroup &g, int rank) {
    return !EP_MASKED || (ep_load_relaxed_gpu32(&g.state->alive[rank / 32]) >> rank % 32 & 1);
}

/** Returns the ballot of `voter` in `reader`'s window. */
__device__ __forceinline__ EpCudaBallot *ep_ballot(const EpCudaGroup &g, int reader, int voter) {
    return ep_at<EpCudaBallot>(g, reader, ep_ballots_at(&g.layout, g.size)) + voter;
}

/* ---- counters ------------------------------------------------------------------------------ */

/** Returns the epoch of the operation under way. */
__device__ __forceinline__ uint32_t ep_epoch(const EpCudaGroup &g) {
    return *(volatile uint32_t *)&g.state->epoch + 1;
}

__device__ __forceinline__ uint64_t ep_counter(uint32_t epoch, uint32_t count) {
    return (uint64_t)epoch << 32 | count;
}

/** Returns the count in a word, or 0 if the word is not of operation `epoch`. */
__device__ __forceinline__ int ep_read_counter(uint64_t word, uint32_t epoch) {
    return (uint32_t)(word >> 32) == epoch ? (int)(uint32_t)word : 0;
}

/* ---- the operation under way --------------------------------------------------------------- */

/** What a block knows of its operation once it has looked at the plan. */
typedef struct EpOwnOperation {
    uint32_t digest;     /**< the group's, with the generation */
    uint32_t generation; /**< of the plan that is read; 0: none is */
} EpOwnOperation;

/** Returns the block's operation. Thread 0 sets it before the barrier of ep_begin_operation. */
__device__ __forceinline__ EpOwnOperation *ep_own_operation(void) {
    __shared__ EpOwnOperation own;
    return &own;
}

__device__ __forceinline__ void ep_set_operation(const EpCudaGroup &g, uint32_t generation) {
    *ep_own_operation() = EpOwnOperation{g.digest + (generation << 16), generation};
}

/** Returns the operation in which this rank has failed; 0: it has not. */
__device__ __forceinline__ uint32_t ep_failed(const EpCudaGroup &g) {
    return *(volatile uint32_t *)&g.state->failed;
}

/* ---- waiting ------------------------------------------------------------------------------- */

#ifndef EP_POLLS_PER_CLOCK_READ
#define EP_POLLS_PER_CLOCK_READ 256
#endif

/** What a wait waits for: the report, if the wait times out. */
typedef struct EpAwaited {
    int peer, awaited, row; /* awaited: EpAwait */
    uint32_t expected, seen;
} EpAwaited;

typedef struct EpTimeout {
    uint64_t start; /* 0 until the clock is first read. Masks: odd once a rank that has masked this
                       one was found */
    int polls;
} EpTimeout;

/* Find the rank to blame for a timeout. The peer that this rank waits for may itself wait for a
 * third rank that has not entered the operation: then blame that one. A rank whose word is of a
 * later operation was here, failed and went on: it is not to blame. */
static __device__ EpAwaited ep_find_absent(const EpCudaGroup &g, const EpAwaited &awaited) {
    uint32_t epoch = ep_epoch(g);
#pragma unroll 1
    for (int r = 0; r < g.size; r++) {
        if (!ep_is_alive(r)) continue;
        uint32_t seen =
            (uint32_t)(ep_load_relaxed_sys(&ep_arrival(g, g.rank, r, epoch)->what) >> 32);
        if ((int32_t)(seen - epoch) < 0) return EpAwaited{r, EP_AWAIT_ARRIVAL, 0, epoch, seen};
    }
    return awaited;
}

/* Send all ranks the word that this one has given up, for this operation and for `later` ones. One
 * that fails in an operation tells the next one, too, in which ranks may be before they see it. The
 * words stay, since operations enqueued after a failure send nothing: see ep_begin_operation. */
static __device__ void ep_give_up(const EpCudaGroup &g, int blamed, uint32_t later) {
    uint32_t epoch = ep_epoch(g), gone = EP_DIGEST(EP_OP_GONE, 0, blamed);
#pragma unroll 1
    for (int r = 0; r < g.size; r++)
#pragma unroll 1
        for (uint32_t e = epoch; e != epoch + later + 1 && ep_is_alive(r); e++) {
            EpArrival *arrival = ep_arrival(g, r, g.rank, e);
            ep_store_relaxed_sys(&arrival->gone, ep_counter(e, 1 + (uint32_t)blamed));
            ep_store_relaxed_sys(&arrival->what, ep_counter(e, gone));
        }
}

/* Copy the sentence with which a rank of the group was aborted, if it is of this node. Its words
 * were complete before the word that named the rank, and before all that the rank's peers stored
 * because of it. */
static __device__ void ep_copy_why(const EpCudaGroup &g, uint32_t member, volatile uint64_t *out) {
    int rank = 0;
    while (rank < g.size && (uint32_t)ep_member(g, rank) != member)
        rank++;
    const uint64_t *why = ep_aborted(g) + (1 + rank) * EP_ABORT_WORDS;
    ep_fence_sys();
#pragma unroll 1
    for (int i = 0; i < EP_ABORT_WORDS && rank < g.size; i++)
        out[i] = ep_load_relaxed_sys(why + i);
}

/* Masks: returns whether a rank is aborted. An old process of its place is nobody's business. */
__device__ __forceinline__ int ep_is_aborted(const EpCudaGroup &g, int r) {
    return ep_load_relaxed_sys(&ep_ballot(g, g.rank, r)->aborted) == g.state->incarnation[r];
}

/* Returns the word that names a rank which is aborted: 1 + its number, or 0. A masked rank's abort
 * is nobody's business. */
__device__ __forceinline__ uint32_t ep_find_aborted(const EpCudaGroup &g) {
    uint32_t aborted = EP_MASKED ? 0 : (uint32_t)ep_load_relaxed_sys(ep_aborted(g));
#pragma unroll 1
    for (int r = 0; EP_MASKED && !aborted && r < g.size; r++)
        if (ep_is_alive(r) && ep_is_aborted(g, r)) aborted = 1 + (uint32_t)r;
    return aborted;
}

/* Report this rank's first failure to the host, and to all ranks. A wait that ends since a rank is
 * aborted is reported as that rank's giving up; the caller says EP_FAULT_LATE. Ranks that disagree
 * about the operation (EP_FAULT_ORDER) need no such word: each of them sees that itself. The fence
 * orders the report's fields before `fault`. */
static __device__ __noinline__ void ep_report(const EpCudaGroup &g, int fault, EpAwaited awaited,
                                              uint64_t peer_facts = 0) {
    if (atomicCAS(&g.state->failed, 0u, ep_epoch(g))) return;
    uint32_t aborted = ep_find_aborted(g);
    if (fault == EP_FAULT_LATE && aborted) {
        fault = EP_FAULT_PEER;
        awaited.peer = (int)aborted - 1, awaited.seen = (uint32_t)ep_member(g, awaited.peer);
    }
    if (fault == EP_FAULT_LATE && awaited.awaited < EP_AWAIT_HEAD)
        awaited = ep_find_absent(g, awaited);
    int peer = ep_member(g, awaited.peer);
    if (fault != EP_FAULT_ORDER)
        ep_give_up(g, fault == EP_FAULT_PEER ? (int)awaited.seen : peer, 1);
    volatile EpCudaFailure *out = g.failure;
    out->op = EP_DIGEST_OP(g.digest);
    out->peer = peer, out->awaited = awaited.awaited, out->row = awaited.row;
    out->expected = awaited.expected, out->seen = awaited.seen;
    out->facts = g.facts ? g.facts : ep_own_operation()->generation;
    out->peer_facts = peer_facts;
    if (fault == EP_FAULT_PEER) ep_copy_why(g, awaited.seen, out->why);
    __threadfence_system();
    out->fault = fault;
}

/* Returns whether a rank has given up, and reports it. */
__device__ __forceinline__ int ep_has_given_up(const EpCudaGroup &g, int peer) {
    uint32_t epoch = ep_epoch(g);
    uint64_t gone = ep_load_relaxed_sys(&ep_arrival(g, g.rank, peer, epoch)->gone);
    if ((uint32_t)(gone >> 32) != epoch) return 0;
    ep_report(g, EP_FAULT_PEER, EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, epoch, (uint32_t)gone - 1});
    return 1;
}

/* Masks: returns whether a rank has masked this one, or cut it. */
__device__ __forceinline__ int ep_is_masked_by(const EpCudaGroup &g, int r) {
    return ep_load_relaxed_sys(&ep_ballot(g, g.rank, r)->masked) != 0;
}

/* Masks: returns whether a rank that is waited for has left the operation to vote. It may also have
 * completed it before: its kernels had ended when it cast its ballot, so what they stored is here,
 * or soon is. In latency mode that holds once it has sent. `expected` is a flag then. A rank whose
 * kernels have given up has said so. */
static __device__ __noinline__ int ep_has_left(const EpCudaGroup &g, int r, int awaited,
                                               uint32_t expected) {
    const EpCudaBallot *ballot = ep_ballot(g, g.rank, r);
    uint32_t past = *(volatile uint32_t *)&g.state->past[r], epoch = ep_epoch(g);
    int in_latency = awaited >= EP_AWAIT_HEAD && awaited <= EP_AWAIT_WEIGHTS;
    uint64_t word = ep_load_acquire_sys(&ballot->word);
    if (r == g.rank || !ep_is_voting(word, past)) return 0;
    uint64_t gone = ep_load_relaxed_sys(&ep_arrival(g, g.rank, r, epoch)->gone);
    uint64_t count =
        ep_load_relaxed_sys(in_latency ? &ballot->sets[EP_FLAG_SET(expected)] : &ballot->epoch);
    ep_fence_sys();
    if (ep_load_relaxed_sys(&ballot->word) != word) return 0; /* not all of it is of one ballot */
    if ((uint32_t)(gone >> 32) == epoch) return 1;
    uint32_t at = (uint32_t)(in_latency ? EP_FLAG(count, EP_FLAG_SET(expected)) : count);
    return (int32_t)(at - (in_latency ? expected : epoch)) < 0;
}

/* Masks: returns 1 if the rank that is waited for has left, or a rank has masked this one. Reports
 * it, or whom that rank blames. Where ranks are cut, one that has cut this one ends the waits for
 * itself alone. A rank that masks this one may have completed the operation before: its kernels had
 * ended, so what they stored is here. Returns -1 where it is first found: the caller looks `again`
 * behind more polls. In a long wait. */
static __device__ __noinline__ int ep_finds_vote(const EpCudaGroup &g, int peer, int awaited,
                                                 uint32_t expected, int again) {
    int found = 0;
#pragma unroll 1
    for (int r = 0; r < g.size; r++) {
        if (r == g.rank || !ep_is_alive(r) || (ep_cuts() && r != peer)) continue;
        int masks = ep_is_masked_by(g, r);
        if (masks && !again) {
            found = -1;
            continue;
        }
        if (!masks && (r != peer || !ep_has_left(g, r, awaited, expected))) continue;
        if (!masks && ep_has_given_up(g, r)) return 1;
        ep_report(g, masks ? EP_FAULT_MASKED : EP_FAULT_LEFT,
                  EpAwaited{r, EP_AWAIT_ARRIVAL, 0, 0, 0});
        return 1;
    }
    if (found) ep_fence_sys(); /* before the loads of the next polls */
    return found;
}

/**
 * Count one more poll of a wait. Returns 0 once the timeout has passed, a rank is aborted, or
 * another wait of this rank has failed. Then all threads leave, and what the kernel wrote is void.
 */
__device__ __forceinline__ int ep_keep_waiting(const EpCudaGroup &g, EpTimeout *timeout,
                                               const EpAwaited &awaited) {
    if (__builtin_expect(++timeout->polls % EP_POLLS_PER_CLOCK_READ != 0, 1)) return 1;
    if (ep_failed(g)) return 0;
    int found = EP_MASKED ? ep_finds_vote(g, awaited.peer, awaited.awaited, awaited.expected,
                                          (int)(timeout->start & 1))
                          : 0;
    if (found > 0) return 0;
    int aborted = EP_MASKED ? ep_find_aborted(g) != 0 : ep_load_relaxed_sys(ep_aborted(g)) != 0;
    uint64_t now = ep_global_timer();
    timeout->start = timeout->start ? timeout->start : EP_MASKED ? now & ~(uint64_t)1 : now;
    if (now - timeout->start < g.timeout_ns && !aborted) {
        timeout->start |= (uint64_t)(found < 0);
        return 1;
    }
    ep_report(g, EP_FAULT_LATE, awaited);
    return 0;
}

/* Returns whether some rank has given up for a reason of its own, and reports it: it sends no more
 * rows. A rank that has given up because of a third one is not looked for: this rank waits for the
 * third one, too, and names it at its own timeout. Not inlined, which keeps the waits short. */
static __device__ __noinline__ int ep_finds_failure(const EpCudaGroup &g) {
    uint32_t epoch = ep_epoch(g);
#pragma unroll 1
    for (int r = 0; r < g.size; r++) {
        if (!ep_is_alive(r)) continue;
        uint64_t gone = ep_load_relaxed_sys(&ep_arrival(g, g.rank, r, epoch)->gone);
        uint32_t member = (uint32_t)ep_member(g, r);
        if (gone != ep_counter(epoch, 1 + member)) continue;
        ep_report(g, EP_FAULT_PEER, EpAwaited{r, EP_AWAIT_ARRIVAL, 0, epoch, member});
        return 1;
    }
    return 0;
}

/* Returns whether the next poll reads the clock, and not for the first time. */
__device__ __forceinline__ int ep_is_long_wait(const EpTimeout &timeout) {
    return timeout.start && (timeout.polls + 1) % EP_POLLS_PER_CLOCK_READ == 0;
}

/* Returns whether `what` says that a rank has entered its `next` operation of the other mode. That
 * rank may have been in this operation meanwhile, after this rank last looked: it stored that
 * arrival in an earlier kernel, so a load behind a fence sees it. The caller must load it again. */
__device__ __forceinline__ int ep_is_in_other_mode(uint64_t what, uint32_t next) {
    return (uint32_t)(what >> 32) == next && EP_DIGEST_OP((uint32_t)what) != EP_OP_GONE;
}

/* Returns whether a rank is in latency mode instead of throughput operation `epoch`; `what` becomes
 * its word. */
__device__ __forceinline__ int ep_is_in_latency_mode(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                     uint64_t *what) {
    uint32_t next = *(volatile uint32_t *)&g.state->sent + 1;
    *what = ep_load_relaxed_sys(ep_sent(g, g.rank, peer, next));
    if (!ep_is_in_other_mode(*what, next)) return 0;
    ep_fence_sys();
    uint64_t here = ep_load_relaxed_sys(&ep_arrival(g, g.rank, peer, epoch)->what);
    return (uint32_t)(here >> 32) != epoch;
}

/* Wait until a ring entry's word has reached `row` in this operation. `load(word)` loads the word.
 * Returns 0 on timeout, or if a rank has given up. */
template <typename Load>
__device__ __forceinline__ int ep_await_row(const EpCudaGroup &g, const uint64_t *word,
                                            uint32_t epoch, int row, int peer, int phase,
                                            Load load) {
    EpTimeout timeout = {0, 0};
    int seen;
    while ((seen = ep_read_counter(load(word), epoch)) < row + 1) {
        if (ep_is_long_wait(timeout) && ep_finds_failure(g)) return 0;
        if (!ep_keep_waiting(g, &timeout,
                             EpAwaited{peer, phase, row, (uint32_t)row + 1, (uint32_t)seen}))
            return 0;
    }
    return 1;
}

/** Wait until row `row` of another rank is here: the acquire orders all reads of the record behind
 *  its head. The proxy fence extends that to bulk copies, which read through the async proxy.
 *  Returns 0 on timeout. */
__device__ __forceinline__ int ep_await_record(const EpCudaGroup &g, uint32_t epoch, int source,
                                               int row) {
    int alive = ep_await_row(g, ep_head(g, g.rank, source, row), epoch, row, source,
                             EP_AWAIT_RECORD, ep_load_acquire_sys);
    ep_fence_proxy_global();
    return alive;
}

/** Returns whether row `row` of another rank is here, as ep_await_record waits for it.
 *  ep_fence_proxy_global has to follow before bulk copies. */
__device__ __forceinline__ int ep_has_record(const EpCudaGroup &g, uint32_t epoch, int source,
                                             int row) {
    return ep_read_counter(ep_load_acquire_sys(ep_head(g, g.rank, source, row)), epoch) > row;
}

/** Look once whether row `row` of another rank is here, as ep_await_record does; `timeout` is that
 *  of all looks since something was here. *alive becomes 0 on timeout, or if a rank has given up.
 *  ep_fence_proxy_global has to follow before bulk copies. */
__device__ __forceinline__ int ep_poll_record(const EpCudaGroup &g, uint32_t epoch, int source,
                                              int row, EpTimeout *timeout, int *alive) {
    int seen = ep_read_counter(ep_load_acquire_sys(ep_head(g, g.rank, source, row)), epoch);
    if (seen >= row + 1) return 1;
    EpAwaited awaited = {source, EP_AWAIT_RECORD, row, (uint32_t)row + 1, (uint32_t)seen};
    *alive =
        !(ep_is_long_wait(*timeout) && ep_finds_failure(g)) && ep_keep_waiting(g, timeout, awaited);
    return 0;
}

/** Begin to load the word that says whether `receiver` has room for row `row`. */
__device__ __forceinline__ uint64_t ep_load_credit(const EpCudaGroup &g, int receiver, int row) {
    return row < g.layout.depth ? 0 : ep_load_relaxed_sys(ep_credit(g, g.rank, receiver, row));
}

/** Wait until `receiver` has room for row `row`; `word` is what ep_load_credit has loaded. A
 *  relaxed load is enough: the receiver has read the row that was there, and this rank reads
 *  nothing of it, so no load has to be ordered behind this one. Returns 0 on timeout. */
__device__ __forceinline__ int ep_await_room(const EpCudaGroup &g, uint32_t epoch, int receiver,
                                             int row, uint64_t word) {
    int previous = row - g.layout.depth;
    return previous < 0 || ep_read_counter(word, epoch) > previous ||
           ep_await_row(g, ep_credit(g, g.rank, receiver, row), epoch, previous, receiver,
                        EP_AWAIT_CREDIT, ep_load_relaxed_sys);
}

/* ---- begin and end of an operation --------------------------------------------------------- */

/** Send a rank this one's arrival. The words order nothing, so their stores are relaxed. */
__device__ __forceinline__ void ep_send_arrival(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                uint64_t where, uint32_t rows) {
    if (!ep_is_alive(peer)) return;
    EpArrival *arrival = ep_arrival(g, peer, g.rank, epoch);
    const EpOwnOperation own = *ep_own_operation();
    if (rows) ep_store_relaxed_sys(&arrival->rows, ep_counter(epoch, rows));
    ep_store_relaxed_sys(&arrival->where, (uint64_t)epoch << 48 | where);
    ep_store_relaxed_sys(&arrival->what, ep_counter(epoch, own.digest));
    if (own.generation) ep_store_relaxed_sys(&arrival->plan, ep_counter(epoch, own.generation));
}

/* Report that a rank has entered another operation. Its plan's generation follows its digest. */
static __device__ __noinline__ void ep_report_other(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                    uint32_t what, uint64_t where) {
    const uint64_t *plan = &ep_arrival(g, g.rank, peer, epoch)->plan;
    uint64_t word = 0;
#pragma unroll 1
    for (int i = 0; i < EP_POLLS_PER_CLOCK_READ && (uint32_t)(word >> 32) != epoch; i++)
        word = ep_load_relaxed_sys(plan);
    uint64_t facts = g.facts ? where & EP_WHERE : (uint32_t)word;
    ep_report(g, EP_FAULT_ORDER,
              EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, ep_own_operation()->digest, what}, facts);
}

/**
 * Wait until a rank has entered the operation, and check that it is the same one there. `where` may
 * be NULL, and so may *rows, the word beside it, arrived or not: see ep_await_rows. `end` may be
 * NULL; it becomes the time of the arrival, unless that was here already. A masked rank is not
 * waited for; its `where` is 0. Returns 0 on timeout, if the rank has given up, or if it is in
 * another operation or mode.
 */
__device__ __forceinline__ int ep_await_arrival(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                uint64_t *where, uint64_t *rows,
                                                uint64_t *end = NULL) {
    if (!ep_is_alive(peer)) {
        if (where) *where = 0;
        return 1;
    }
    const EpArrival *arrival = ep_arrival(g, g.rank, peer, epoch);
    EpTimeout timeout = {0, 0};
    uint64_t what, at;
    do {
        what = ep_load_relaxed_sys(&arrival->what);
        at = ep_load_relaxed_sys(&arrival->where);
        if (rows) *rows = ep_load_relaxed_sys(&arrival->rows);
        if (EP_DIGEST_OP((uint32_t)what) == EP_OP_GONE) {
            ep_report(g, EP_FAULT_PEER,
                      EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, epoch, EP_DIGEST_SIZES((uint32_t)what)});
            return 0;
        }
        if ((uint32_t)(what >> 32) == epoch && at >> 48 == (epoch & 0xffff)) {
            if (where) *where = at & EP_WHERE;
            if (end && timeout.polls) *end = ep_global_timer();
            if (ep_same_operation(ep_own_operation()->digest, (uint32_t)what)) return 1;
            ep_report_other(g, peer, epoch, (uint32_t)what, at);
            return 0;
        }
        if (ep_is_long_wait(timeout) && ep_is_in_latency_mode(g, peer, epoch, &at)) {
            ep_report(
                g, EP_FAULT_ORDER,
                EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, ep_own_operation()->digest, (uint32_t)at});
            return 0;
        }
    } while (ep_keep_waiting(g, &timeout,
                             EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, epoch, (uint32_t)(what >> 32)}));
    return 0;
}

/** Wait until all ranks have entered the operation: only then may anything be stored there. Returns
 *  0 as ep_await_arrival does. By a warp. */
__device__ __forceinline__ int ep_await_arrivals(const EpCudaGroup &g, uint32_t epoch) {
    int alive = 1;
    for (int r = threadIdx.x % 32; r < g.size && alive; r += 32)
        alive = ep_await_arrival(g, r, epoch, NULL, NULL);
    return __all_sync(~0u, alive);
}

/** Returns whether that is an earlier one than the operation under way. */
__device__ __forceinline__ int ep_failed_before(uint32_t failed, uint32_t epoch) {
    return failed != 0 && failed != epoch;
}

/** Send this rank's arrival to all ranks. Block 0 does it, before anything else. */
__device__ __forceinline__ void ep_arrive(const EpCudaGroup &g, uint32_t epoch, uint64_t where,
                                          uint32_t rows) {
    for (int r = threadIdx.x; r < g.size && blockIdx.x == 0; r += blockDim.x)
        ep_send_arrival(g, r, epoch, where, rows);
}

/** Wait for the number of rows at the `where` of a rank that has arrived with one. `word` is what
 *  ep_await_arrival has loaded. Returns -1 on timeout. */
__device__ __forceinline__ int64_t ep_await_rows(const EpCudaGroup &g, int peer, uint32_t epoch,
                                                 uint64_t word) {
    const uint64_t *rows = &ep_arrival(g, g.rank, peer, epoch)->rows;
    EpTimeout timeout = {0, 0};
    for (; (uint32_t)(word >> 32) != epoch; word = ep_load_relaxed_sys(rows))
        if (!ep_keep_waiting(g, &timeout,
                             EpAwaited{peer, EP_AWAIT_ARRIVAL, 0, epoch, (uint32_t)(word >> 32)}))
            return -1;
    return (int64_t)(uint32_t)word;
}

#define EP_FINISHED_BLOCKS \
    0xffffu /* bits of EpCudaState.finished; above them, blocks that publish */

/** What ep_end_operation returns. */
enum EpLast { EP_NOT_LAST, EP_LAST, EP_LAST_PUBLISHES };

/** Leave the operation; the last block to leave completes it. `publishes`: this block has stored
 *  what the last one must see; its fence orders those stores before its count. Returns EP_NOT_LAST
 *  except in the last block: there EP_LAST_PUBLISHES if any block publishes, else EP_LAST. By all
 *  threads of each block, at its end. */
__device__ __forceinline__ int ep_end_operation(const EpCudaGroup &g, uint32_t epoch,
                                                int publishes) {
    __shared__ int result;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (publishes) __threadfence();
        uint32_t finished = atomicAdd(&g.state->finished, publishes ? EP_FINISHED_BLOCKS + 2 : 1u);
        int is_last = (finished & EP_FINISHED_BLOCKS) == gridDim.x - 1;
        result = !is_last                                     ? EP_NOT_LAST
                 : publishes || finished > EP_FINISHED_BLOCKS ? EP_LAST_PUBLISHES
                                                              : EP_LAST;
        if (is_last) *(volatile uint32_t *)&g.state->finished = 0;
        for (int i = 0; is_last && i < EP_CLAIMERS; i++)
            g.state->claimed[i] = 0;
        if (is_last) *(volatile uint32_t *)&g.state->epoch = epoch;
    }
    __syncthreads();
    return result;
}

/* ---- blocks of receive rows ---------------------------------------------------------------- */

/** Add units, and rows with a token, to a block whose rows have `units` each, and which has `more`
 *  units besides. Stores its word if they complete it. See EpBlockCounters. By one thread, which
 *  has written what it adds or knows it to be written. */
__device__ __forceinline__ void ep_add_to_block(const EpRowBlocks &b, uint64_t *counters, int block,
                                                uint32_t added, uint32_t rows, uint32_t units,
                                                uint32_t more) {
    uint32_t all = (uint32_t)ep_block_size(&b, block) * units + more;
    uint64_t sum = ep_add_release_gpu(&counters[block], (uint64_t)added << 32 | rows);
    if ((uint32_t)(sum >> 32) != all) return;
    ep_fence_gpu();
    ep_store_relaxed_gpu(&counters[block], 0);
    ep_store_relaxed_gpu32((uint32_t *)&b.words[block], 1 + (uint32_t)sum);
}

/** Add the units of rows `begin` to before `end`, which hold no token. This thread is number
 * `index` of `threads`, which divide the blocks. */
__device__ __forceinline__ void ep_add_rest(const EpRowBlocks &b, uint64_t *counters, int64_t begin,
                                            int64_t end, uint32_t units, uint32_t more, int index,
                                            int threads) {
    begin = max(begin, (int64_t)0), end = min(end, (int64_t)b.sections * b.section_rows);
    if (begin >= end) return;
    int last = ep_row_block(&b, (int)end - 1);
#pragma unroll 1
    for (int i = ep_row_block(&b, (int)begin) + index; i <= last; i += threads) {
        int first = ep_block_first(&b, i);
        int from = max(first, (int)begin), to = min(first + ep_block_size(&b, i), (int)end);
        ep_add_to_block(b, counters, i, (uint32_t)(to - from) * units, 0, units, more);
    }
}

/** Look once whether the block of a row is done. The acquire orders loads of its rows behind its
 *  word; ep_fence_proxy_global has to follow before bulk copies. `timeout` is that of all looks
 *  since something was here. *alive becomes 0 on timeout, or if a rank has given up. */
__device__ __forceinline__ int ep_poll_done(const EpCudaGroup &g, const EpRowBlocks &b, int row,
                                            EpTimeout *timeout, int *alive) {
    int block = ep_row_block(&b, row);
    int seen = (int)ep_load_acquire_gpu32((const uint32_t *)&b.words[block]);
    if (seen >= b.expected) return 1;
    EpAwaited awaited = {g.rank, EP_AWAIT_DONE, block, (uint32_t)b.expected, (uint32_t)seen};
    *alive =
        !(ep_is_long_wait(*timeout) && ep_finds_failure(g)) && ep_keep_waiting(g, timeout, awaited);
    return 0;
}

/** Wait until the block of a row is done, as ep_poll_done. Returns 0 if it will not be. */
__device__ __forceinline__ int ep_await_done(const EpCudaGroup &g, const EpRowBlocks &b, int row) {
    EpTimeout timeout = {0, 0};
    int alive = 1;
    while (!ep_poll_done(g, b, row, &timeout, &alive) && alive) {
    }
    return alive;
}

/* ---- statistics ---------------------------------------------------------------------------- */

/*
 * What a kernel adds to the caller's counters: see EpExtras. A warp does it that has nothing else
 * to do at that time, and its additions return nothing, so rows do not wait for it. Calls on other
 * streams may add to the same counters.
 */

__device__ __forceinline__ void ep_count(int64_t *counters, int i, int64_t value) {
    if (counters && value) atomicAdd((unsigned long long *)counters + i, (unsigned long long)value);
}

/** Add `rows` rows to a rank of the group. By one lane. */
__device__ __forceinline__ void ep_count_row(const EpStatistics &s, int member, int rows) {
    ep_count(s.peer_rows, member, rows);
    ep_count(s.peer_bytes, member, rows * s.row_bytes);
}

/** Add rows[r] rows to each rank r of this node. Damaged numbers count as the nearest possible. By
 *  a warp. */
__device__ __forceinline__ void ep_count_rows(const EpCudaGroup &g, const EpStatistics &s,
                                              const int32_t *rows) {
    int counts = s.peer_rows || s.peer_bytes;
#pragma unroll 1
    for (int r = (int)threadIdx.x % 32; r < g.size && counts; r += 32)
        if (ep_is_alive(r))
            ep_count_row(s, ep_member(g, r), min(max(rows[r], 0), g.layout.max_tokens));
}

/** Add the slots of a local expert. By one lane. */
__device__ __forceinline__ void ep_count_expert(const EpStatistics &s, int expert, int slots) {
    if (!s.expert_tokens) return;
    if (s.is_narrow)
        atomicAdd((int *)s.expert_tokens + expert, slots);
    else
        ep_count((int64_t *)s.expert_tokens, expert, slots);
}

/** Add the slots of each local expert; this lane is number `index` of `lanes`. */
__device__ __forceinline__ void ep_count_experts(const EpStatistics &s, const int32_t *counts,
                                                 int num_local, int index, int lanes) {
#pragma unroll 1
    for (int e = index; e < num_local && s.expert_tokens; e += lanes)
        ep_count_expert(s, e, counts[e]);
}

__device__ __forceinline__ int ep_counts_waits(const EpStatistics &s) {
    return s.peer_wait || s.peer_longest_wait;
}

/** Add a wait for a rank of this node. By one lane. */
__device__ __forceinline__ void ep_count_wait(const EpCudaGroup &g, const EpStatistics &s, int rank,
                                              uint64_t ns) {
    int member = ep_member(g, rank);
    if (rank == g.rank) return;
    ep_count(s.peer_wait, member, (int64_t)ns);
    if (s.peer_longest_wait) atomicMax((long long *)s.peer_longest_wait + member, (long long)ns);
}

/**
 * Wait until all other ranks are here, and add for how long each of them was waited for. A lane
 * watches the ranks of its own residue modulo 32: `is_here(r)`. `may_wait(r)` returns 0 once the
 * wait is over without them. By a warp.
 */
template <typename Here, typename Wait>
__device__ __forceinline__ void ep_measure_waits(const EpCudaGroup &g, const EpStatistics &s,
                                                 Here is_here, Wait may_wait) {
    const uint64_t start = ep_global_timer();
    unsigned left = 0; /* bit w: rank w * 32 + lane */
    int lane = (int)threadIdx.x % 32, alive = 1;
    for (int r = lane; r < g.size; r += 32)
        left |= (unsigned)(r != g.rank && !is_here(r)) << r / 32;
#pragma unroll 1
    while (__any_sync(~0u, left) && __all_sync(~0u, alive)) {
        int r = (__ffs((int)left) - 1) * 32 + lane;
        if (!left) continue;
        alive = may_wait(r);
        for (unsigned looked = left; looked; looked &= looked - 1) {
            r = (__ffs((int)looked) - 1) * 32 + lane;
            if (!is_here(r)) continue;
            ep_count_wait(g, s, r, ep_global_timer() - start);
            left &= ~(1u << r / 32);
        }
    }
}

/** Measure the waits for arrivals in throughput operation `epoch`. By a warp. */
__device__ __forceinline__ void ep_measure_arrivals(const EpCudaGroup &g, const EpStatistics &s,
                                                    uint32_t epoch) {
    EpTimeout timeout = {0, 0};
    auto seen = [&](int r) {
        return (uint32_t)(ep_load_relaxed_sys(&ep_arrival(g, g.rank, r, epoch)->what) >> 32);
    };
    auto is_here = [&](int r) { return !ep_is_alive(r) || seen(r) == epoch; };
    auto may_wait = [&](int r) {
        return ep_keep_waiting(g, &timeout, EpAwaited{r, EP_AWAIT_ARRIVAL, 0, epoch, seen(r)});
    };
    if (ep_counts_waits(s)) ep_measure_waits(g, s, is_here, may_wait);
}

/* ---- stamps of messages between nodes ------------------------------------------------------ */

/** Tell the watcher that an exchange is complete, and whether one is to follow. The group's
 *  operations follow each other, so no two kernels that mark run at a time. By one thread. */
__device__ __forceinline__ void ep_mark(const EpMarks &m, int under_way) {
    uint64_t marks = m.counts[1] + 1;
    m.counts[1] = marks;
    ep_store_relaxed_sys(&m.watch->moved, marks << 1 | under_way);
}

/**
 * If this rank has failed, let its stamp say so. Every kernel that fills a message ends with this,
 * in each of its blocks: a block that leaves early does so because the rank has failed, and its
 * rows are not what they should be. The stamp stays so until an operation begins. Whom this rank
 * blames it has told its node: see ep_give_up. By all threads of a block, or by one.
 */
__device__ __forceinline__ void ep_seal_stamp(const EpCudaGroup &g, EpStamp *stamp) {
    if (threadIdx.x || !ep_failed(g)) return;
    stamp->digest = EP_DIGEST(EP_OP_GONE, 0, 0);
    stamp->blamed =
        (uint32_t)ep_load_relaxed_sys(&ep_arrival(g, g.rank, g.rank, ep_epoch(g))->gone);
}

/** The operation begins: write this rank's stamp, for a plan of this generation. By one thread. */
__device__ __forceinline__ void ep_mark_begin(const EpCudaGroup &g, const EpMarks &m,
                                              uint32_t generation) {
    m.counts[0]++;
    *m.own = EpStamp{g.digest, (uint32_t)m.counts[0], generation, 0};
    ep_seal_stamp(g, m.own);
    ep_store_relaxed_sys(&m.watch->begun, m.counts[0] << 32 | g.digest);
    ep_mark(m, 1);
}

__device__ __forceinline__ void ep_mark_begin(const EpMarkArgs &a, uint32_t generation = 0) {
    ep_mark_begin(a.group, a.marks, generation);
}

__device__ __forceinline__ int ep_stamps_match(const EpStamp &a, const EpStamp &b) {
    return ep_same_operation(a.digest, b.digest) && a.number == b.number &&
           a.generation == b.generation;
}

/** Returns whether all stamps that have come, theirs(i), are as this rank's. By a whole warp. */
template <typename Theirs>
__device__ __forceinline__ int ep_stamps_agree(const EpMarks &m, Theirs theirs) {
    const EpStamp own = *m.own;
    int agree = 1;
    for (int i = threadIdx.x % 32; i < m.num_peers; i += 32)
        agree &= ep_stamps_match(own, *theirs(i));
    return __all_sync(~0u, agree);
}

__device__ __forceinline__ int ep_stamps_agree(const EpMarks &m) {
    return ep_stamps_agree(m, [&](int i) { return m.theirs + i; });
}

/* Returns what a stamp tells that differs from this rank's. One of an earlier operation is what was
 * here before: nothing has come, since the communicator has ended. */
static __device__ int ep_stamp_fault(const EpStamp &own, const EpStamp &theirs) {
    if (EP_DIGEST_OP(theirs.digest) == EP_OP_GONE) return EP_FAULT_PEER;
    return (int32_t)(own.number - theirs.number) > 0 ? EP_FAULT_ENDED : EP_FAULT_ORDER;
}

/**
 * Report a rank that has failed, is in another operation or reads another plan, or sends nothing,
 * unless this rank has failed already. On a path that leaves the kernel: see ep_report_plan. The
 * block knows its operation (ep_own_operation).
 */
template <typename Theirs>
__device__ __forceinline__ void ep_report_stamps(const EpCudaGroup &g, const EpMarks &m,
                                                 Theirs stamp) {
    const EpStamp own = *m.own;
    if (threadIdx.x || EP_DIGEST_OP(own.digest) == EP_OP_GONE) return;
    for (int i = 0; i < m.num_peers && !ep_failed(g); i++) {
        const EpStamp theirs = *stamp(i);
        if (ep_stamps_match(own, theirs)) continue;
        int fault = ep_stamp_fault(own, theirs), member = m.peers ? m.peers[i] : i;
        uint32_t blamed = theirs.blamed ? theirs.blamed - 1 : (uint32_t)member;
        ep_report(g, fault,
                  EpAwaited{ep_elsewhere(g, member), EP_AWAIT_ARRIVAL, 0, own.digest,
                            fault == EP_FAULT_PEER ? blamed : theirs.digest},
                  theirs.generation);
    }
}

[[maybe_unused]] static __device__ __noinline__ void ep_report_stamps(const EpCudaGroup &g,
                                                                      const EpMarks &m) {
    ep_report_stamps(g, m, [&](int i) { return m.theirs + i; });
}

EP_VARIANT_END

#endif
