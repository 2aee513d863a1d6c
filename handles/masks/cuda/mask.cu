/* SPDX-License-Identifier: Apache-2.0 */
/* The rendezvous of living ranks: a block of a thread for each rank. mask.h says what it does, and
 * why its memory order is right. */
#define EP_MASKED 1
#include "handles/masks/cuda/mask.h"

#include "runtime/cuda/device.cuh"

using namespace masked;

#define MASK_THREADS 128
#define NUMBERS_APART 16              /* more than a rank that is left behind can go on */
#define GRACE_NS (250 * 1000 * 1000u) /* in which a rank may notice that its set differs */
static_assert(EP_CUDA_MAX_RANKS <= MASK_THREADS, "a thread for each rank");

/** What the threads of the block find together: ranks, or -1. */
typedef struct Found {
    int missing;                /* has no ballot */
    int absent;                 /* has had none since this rank's call */
    int differs;                /* has another set */
    int slow;                   /* is not ready, or for other ballots than this rank */
    int done;                   /* is done */
    unsigned long long tickets; /* the digest of all ballots */
} Found;

/** A thread's rank, which is another one of the new set, and what is known of it. */
typedef struct Voter {
    int rank, is_peer, came;
    uint64_t expected;   /* the ticket that this rank was ready for last */
    EpCudaBallot theirs; /* as last seen */
} Voter;

/** The same in all threads. */
typedef struct Own {
    uint64_t ticket;
    int state;     /* EpBallotState */
    uint64_t seen; /* the digest of tickets that it was ready for last; 0: none */
} Own;

__device__ __forceinline__ int in_set(const EpMaskArgs &a, int rank) {
    return (int)(a.alive[rank / 32] >> rank % 32 & 1);
}

__device__ __forceinline__ uint64_t ballot_word(const Own &own, int state) {
    return own.ticket << EP_BALLOT_STATE_BITS | (uint64_t)state;
}

__device__ __forceinline__ int same_set(const EpMaskArgs &a, const EpCudaBallot &b) {
    int same = 1;
    for (int i = 0; i < EP_ALIVE_WORDS; i++)
        same &= a.alive[i] == b.alive[i];
    return same;
}

/* Returns whether some ranks of the new set do not take part so far, for this rank. */
__device__ __forceinline__ int lacks_some(const EpMaskArgs &a) {
    int lacks = 0;
    for (int i = 0; i < EP_ALIVE_WORDS; i++)
        lacks |= ((uint32_t)a.alive[i] & ~ep_load_relaxed_gpu32(&a.group.state->alive[i])) != 0;
    return lacks;
}

/* ---- this rank's ballot -------------------------------------------------------------------- */

/* Cast this call's ballot. Until then readers see that this rank has none. */
__device__ void cast(const EpMaskArgs &a, const Voter &v, Own *own) {
    const EpCudaGroup &g = a.group;
    own->ticket++, own->state = EP_BALLOT_CAST;
    if (!v.is_peer) return;
    EpCudaBallot *to = ep_ballot(g, v.rank, g.rank);
    ep_store_relaxed_sys(&to->word, ballot_word(*own, EP_BALLOT_NONE));
    ep_fence_sys();
    for (int i = 0; i < EP_ALIVE_WORDS; i++)
        ep_store_relaxed_sys(&to->alive[i], a.alive[i]);
    ep_store_relaxed_sys(&to->seen, 0);
    ep_store_relaxed_sys(&to->cuts, (uint64_t)lacks_some(a));
    ep_store_relaxed_sys(&to->epoch, g.state->epoch);
    ep_store_relaxed_sys(&to->sent, g.state->sent);
    ep_store_relaxed_sys(&to->turn, a.sets ? a.latency->turn : 0);
    for (int s = 0; s < a.sets; s++)
        ep_store_relaxed_sys(&to->sets[s], a.latency->count[s].sent);
    ep_store_release_sys(&to->word, ballot_word(*own, EP_BALLOT_CAST));
}

/* Clear the words that peers have stored here: routes must be 0, the others are of operations that
 * nobody is in any more. */
__device__ void clear_window(const EpMaskArgs &a) {
    const EpCudaGroup &g = a.group;
    uint4 *words = ep_at<uint4>(g, g.rank, g.layout.arrival);
    int64_t units = (g.layout.aborted - g.layout.arrival) / (int64_t)sizeof(uint4);
    for (int64_t i = threadIdx.x; i < units; i += MASK_THREADS)
        words[i] = make_uint4(0, 0, 0, 0);
    __threadfence_system();
    __syncthreads();
}

/** The numbers with which all ranks of the set go on. */
typedef struct Numbers {
    unsigned long long epoch, sent, set[EP_MAX_LATENCY_SETS];
    unsigned long long turn; /* below the operations that its rank has sent */
    int differs;             /* whether those of a set do, or a rank has sent another one nothing */
} Numbers;

__device__ __forceinline__ unsigned long long turn_key(uint64_t sent, uint64_t turn) {
    return sent << 8 | turn;
}

__device__ __forceinline__ Numbers *numbers(void) {
    __shared__ Numbers n;
    return &n;
}

/* Find the numbers, from the ballots that this rank is ready for: others may be cast before it goes
 * on. By all threads. */
__device__ void find_numbers(const EpMaskArgs &a, const Voter &v) {
    Numbers &n = *numbers();
    const EpCudaState *state = a.group.state;
    if (threadIdx.x == 0) {
        n.epoch = state->epoch, n.sent = state->sent, n.differs = lacks_some(a);
        n.turn = a.sets ? turn_key(state->sent, a.latency->turn) : 0;
        for (int s = 0; s < a.sets; s++)
            n.set[s] = a.latency->count[s].sent;
    }
    __syncthreads();
    if (v.is_peer) {
        if (v.theirs.cuts) atomicMax(&n.differs, 1);
        atomicMax(&n.epoch, (unsigned long long)v.theirs.epoch);
        atomicMax(&n.sent, (unsigned long long)v.theirs.sent);
        atomicMax(&n.turn, turn_key(v.theirs.sent, v.theirs.turn));
        for (int s = 0; s < a.sets; s++) {
            if (v.theirs.sets[s] != a.latency->count[s].sent) atomicMax(&n.differs, 1);
            atomicMax(&n.set[s], (unsigned long long)v.theirs.sets[s]);
        }
    }
    __syncthreads();
}

__device__ void show_state(const EpMaskArgs &a, const Voter &v, Own *own, int state) {
    const EpCudaGroup &g = a.group;
    own->state = state;
    if (v.is_peer)
        ep_store_release_sys(&ep_ballot(g, v.rank, g.rank)->word, ballot_word(*own, state));
}

/* All ballots of the set are alike: say which ones this rank has seen. */
__device__ void become_ready(const EpMaskArgs &a, Voter *v, Own *own, uint64_t tickets) {
    const EpCudaGroup &g = a.group;
    clear_window(a);
    find_numbers(a, *v);
    own->seen = tickets;
    v->expected = v->theirs.word >> EP_BALLOT_STATE_BITS;
    if (v->is_peer) {
        EpCudaBallot *to = ep_ballot(g, v->rank, g.rank);
        ep_store_relaxed_sys(&to->masked, 0);
        ep_store_relaxed_sys(&to->seen, tickets);
        ep_fence_sys(); /* behind the barrier: the release is of all threads' zeros */
    }
    show_state(a, *v, own, EP_BALLOT_READY);
}

__device__ void withdraw(const EpMaskArgs &a, const Voter &v, Own *own) {
    const EpCudaGroup &g = a.group;
    show_state(a, v, own, EP_BALLOT_NONE);
    if (threadIdx.x) return;
    g.state->ticket = (uint32_t)own->ticket;
    if (!g.state->failed) g.state->failed = g.state->epoch ? g.state->epoch : ~0u;
}

/* ---- the others' --------------------------------------------------------------------------- */

/* Read the ballot of a rank, again if it has changed meanwhile. */
__device__ void read_ballot(const EpMaskArgs &a, Voter *v) {
    const EpCudaBallot *from = ep_ballot(a.group, a.group.rank, v->rank);
    EpCudaBallot *b = &v->theirs;
    do {
        b->word = ep_load_acquire_sys(&from->word);
        b->seen = ep_load_relaxed_sys(&from->seen), b->done = ep_load_relaxed_sys(&from->done);
        for (int i = 0; i < EP_ALIVE_WORDS; i++)
            b->alive[i] = ep_load_relaxed_sys(&from->alive[i]);
        b->cuts = ep_load_relaxed_sys(&from->cuts);
        b->epoch = ep_load_relaxed_sys(&from->epoch), b->sent = ep_load_relaxed_sys(&from->sent);
        b->turn = ep_load_relaxed_sys(&from->turn);
        for (int s = 0; s < a.sets; s++)
            b->sets[s] = ep_load_relaxed_sys(&from->sets[s]);
        ep_fence_sys();
    } while (ep_load_relaxed_sys(&from->word) != b->word);
}

/* Look at the thread's rank. */
__device__ void look(const EpMaskArgs &a, Voter *v, const Own &own, Found *found) {
    read_ballot(a, v);
    const EpCudaBallot &b = v->theirs;
    int votes = ep_is_voting(b.word, a.group.state->past[v->rank]);
    if (own.seen && b.done == own.seen) atomicMax(&found->done, v->rank);
    v->came |= votes;
    if (!votes) atomicMax(&found->missing, v->rank);
    if (!v->came) atomicMax(&found->absent, v->rank);
    if (!votes) return;
    if (!same_set(a, b)) atomicMax(&found->differs, v->rank);
    if ((b.word & 3) != EP_BALLOT_READY || b.seen != own.seen) atomicMax(&found->slow, v->rank);
    atomicAdd(&found->tickets,
              (unsigned long long)ep_mask_digest(v->rank, b.word >> EP_BALLOT_STATE_BITS));
}

/* Look at all ranks. By all threads. */
__device__ Found look_at_all(const EpMaskArgs &a, Voter *v, const Own &own) {
    __shared__ Found found;
    if (threadIdx.x == 0)
        found = Found{-1, -1, -1, -1, -1, ep_mask_digest(a.group.rank, own.ticket)};
    __syncthreads();
    if (v->is_peer) look(a, v, own, &found);
    __syncthreads();
    Found all = found;
    __syncthreads();
    return all;
}

/* ---- the end ------------------------------------------------------------------------------- */

/* Go on with the numbers. Where all ranks have sent each other the same operations, those that are
 * in flight stay. By one thread. */
__device__ void set_latency(const EpMaskArgs &a, const Numbers &n) {
    EpLatencyState *l = a.latency;
    l->passed = l->claimed = 0;
    l->turn = (uint32_t)(n.turn & 255);
    for (int s = 0; s < a.sets; s++) {
        l->set[s].passed = l->set[s].left = 0;
        l->late[s] = EpLateRanks{};
        if (n.differs) l->count[s].sent = l->count[s].done = n.set[s] + NUMBERS_APART;
    }
}

__device__ void go_on(const EpMaskArgs &a, const Voter &v, Own *own) {
    const EpCudaGroup &g = a.group;
    const Numbers *n = numbers();
    int masks = v.rank < g.size && !in_set(a, v.rank) && ep_find_alive(g, v.rank);
    if (v.is_peer) g.state->past[v.rank] = (uint32_t)v.expected;
    if (masks) ep_store_relaxed_sys(&ep_ballot(g, v.rank, g.rank)->masked, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        EpCudaState *state = g.state;
        state->epoch = (uint32_t)n->epoch + NUMBERS_APART;
        state->sent = (uint32_t)n->sent + NUMBERS_APART;
        state->failed = state->finished = 0;
        state->ticket = (uint32_t)own->ticket;
        for (int i = 0; i < EP_CLAIMERS; i++)
            state->claimed[i] = 0;
        for (int i = 0; i < EP_ALIVE_WORDS; i++)
            state->alive[i] = (uint32_t)a.alive[i];
        if (a.sets) set_latency(a, *n);
        a.result->drops = n->differs;
        __threadfence_system();
    }
    __syncthreads();
    if (v.is_peer) ep_store_release_sys(&ep_ballot(g, v.rank, g.rank)->done, own->seen);
    show_state(a, v, own, EP_BALLOT_DONE);
}

/* Returns whether all ranks vote for one set, and with the ballots that this rank is ready for. */
__device__ __forceinline__ int is_alike(const Own &own, const Found &f) {
    int is_ready = own.state == EP_BALLOT_READY;
    return f.missing < 0 && f.differs < 0 && (!is_ready || f.tickets == own.seen);
}

/* Returns how the rendezvous has ended, 0 while it goes on. */
__device__ int find_end(const EpMaskArgs &a, const Own &own, const Found &f, int is_late,
                        int is_past_grace, int *rank) {
    const EpCudaGroup &g = a.group;
    int aborted = -1;
    for (int r = 0; r < g.size; r++)
        if (in_set(a, r) && (aborted < 0 || r == g.rank) && ep_is_aborted(g, r)) aborted = r;
    if (f.done >= 0) return EP_MASK_DONE;
    if (own.state == EP_BALLOT_READY && is_alike(own, f) && f.slow < 0) return EP_MASK_DONE;
    *rank = aborted;
    if (aborted == g.rank) return EP_MASK_ABORTED;
    if (aborted >= 0) return EP_MASK_GONE;
    *rank = f.differs;
    if (f.differs >= 0 && (is_late || is_past_grace)) return EP_MASK_DIFFERS;
    /* Rather one that never came than one that gave up. */
    *rank = f.absent >= 0 ? f.absent : f.missing >= 0 ? f.missing : f.slow;
    return is_late ? EP_MASK_MISSING : 0;
}

/* Thread 0 decides for all, since the clock and the word of aborts differ between loads. */
__device__ int decide(const EpMaskArgs &a, const Own &own, const Found &f, uint64_t start,
                      uint64_t *differs_since, int *rank) {
    __shared__ int end, blamed;
    if (threadIdx.x == 0) {
        uint64_t now = ep_global_timer();
        if (f.differs < 0) *differs_since = 0;
        if (f.differs >= 0 && !*differs_since) *differs_since = now;
        int is_past_grace = f.differs >= 0 && now - *differs_since > GRACE_NS;
        end = find_end(a, own, f, now - start > a.group.timeout_ns, is_past_grace, &blamed);
    }
    __syncthreads();
    int result = end;
    *rank = blamed;
    __syncthreads();
    return result;
}

__global__ void __launch_bounds__(MASK_THREADS) mask_ranks(const __grid_constant__ EpMaskArgs a) {
    const EpCudaGroup &g = a.group;
    int rank = (int)threadIdx.x, end = 0;
    Voter v = {rank, rank < g.size && rank != g.rank && in_set(a, rank), 0, 0, {}};
    Own own = {g.state->ticket, EP_BALLOT_NONE, 0};
    uint64_t start = ep_global_timer(), differs_since = 0;
    __syncthreads();
    cast(a, v, &own);
    for (;;) {
        Found f = look_at_all(a, &v, own);
        end = decide(a, own, f, start, &differs_since, &rank);
        if (end) break;
        int alike = is_alike(own, f), is_ready = own.state == EP_BALLOT_READY;
        if (is_ready && !alike) show_state(a, v, &own, EP_BALLOT_CAST);
        if (!is_ready && alike) become_ready(a, &v, &own, f.tickets);
    }
    if (end == EP_MASK_DONE)
        go_on(a, v, &own);
    else
        withdraw(a, v, &own);
    if (end == EP_MASK_DIFFERS && v.rank == rank)
        for (int i = 0; i < EP_ALIVE_WORDS; i++)
            a.result->theirs[i] = v.theirs.alive[i];
    if (threadIdx.x == 0) a.result->rank = rank, a.result->end = end;
}

/* Cut a rank by hand: the one in the set. By one thread. */
__global__ void cut_rank(const __grid_constant__ EpMaskArgs a) {
    const EpCudaGroup &g = a.group;
    for (int r = 0; r < g.size; r++)
        if (in_set(a, r)) ep_store_relaxed_sys(&ep_ballot(g, r, g.rank)->masked, 1);
    for (int i = 0; i < EP_ALIVE_WORDS; i++)
        atomicAnd(&g.state->alive[i], ~(uint32_t)a.alive[i]); /* others may cut ranks now */
}

extern "C" int ep_cuda_open_mask(int shared_bytes) {
    int error = ep_open_kernel(mask_ranks, shared_bytes);
    return error ? error : ep_open_kernel(cut_rank, shared_bytes);
}

extern "C" int ep_cuda_launch_mask(const void *args, int blocks, void *stream) {
    return ep_launch(mask_ranks, blocks, MASK_THREADS, 0, stream, *(const EpMaskArgs *)args);
}

extern "C" int ep_cuda_launch_cut(const void *args, int blocks, void *stream) {
    return ep_launch(cut_rank, blocks, 1, 0, stream, *(const EpMaskArgs *)args);
}
