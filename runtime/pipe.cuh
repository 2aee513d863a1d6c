/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_PIPE_CUH
#define EP_RUNTIME_PIPE_CUH

/**
 * How a block moves rows: a pipe of jobs through stages in shared memory, in which each step is the
 * business of a warp of its own, so that none of them waits for another's latency.
 *
 *     planner     decides what is next, waits for other ranks, writes the job's addresses
 *     loader      bulk copies: global memory -> stages
 *     workers     (where rows are computed) stages -> stages, in place; teams take jobs in turn
 *     storer      bulk copies: stages -> global memory, here or on a peer
 *     side warps  (where there are any) weights and scales, which are too small for bulk copies
 *     announcer   tells the other side: heads of what has been written, or credits for what has been
 *                 read; then the job's place is open again
 *
 * Jobs pass in order. Each place has a barrier for every step that says for which job, of those that
 * come round to this place, the step is done; waiting for job n is waiting for the phase n / JOBS.
 *
 * A job of n loads holds n stages. All of the pipe ends with a job whose `loads` is PIPE_END.
 */

#include "runtime/device.cuh"

#define JOBS 32
#define PIPE_END (-1)
#define PIPE_ENDS 4 /* ends that are posted, for steps that share jobs among up to as many warps */
#define STORE_LAG 2 /* jobs whose stores may be under way while the storer goes on */
#define ANNOUNCE_BATCH 8
#define TEAM_WARPS 4
#define TEAMS PIPE_ENDS
#define TEAM_THREADS (TEAM_WARPS * 32)
#define WORKERS (TEAMS * TEAM_THREADS)
#define RANK_WORDS ((EP_CUDA_MAX_RANKS + 31) / 32)

enum PipeWarp {
    PLANNER,
    LOADER,
    STORER,
    ANNOUNCER,
    FIRST_SIDE,
    SIDE_WARPS = PIPE_ENDS,
    FIRST_WORKER = FIRST_SIDE + SIDE_WARPS
};

/** What workers must know of a job: in one place, since each of them reads it for each job. */
typedef struct __align__(16) PipeWork {
    uint32_t stage;  /* the first, as an address in shared memory */
    int32_t vectors; /* of 16 bytes; PIPE_END */
    int32_t terms;   /* rows to add, or slots to multiply for */
    uint32_t begins; /* terms of a sum that begin a run */
} PipeWork;

typedef struct Pipe {
    PipeWork work[JOBS];
    uint64_t posted[JOBS], full[JOBS], worked[JOBS], freed[JOBS], done[JOBS], open[JOBS];
    int32_t loads[JOBS], stores[JOBS], notes[JOBS];
    int32_t bytes[JOBS];                     /* of each load and store */
    int32_t item[JOBS], source[JOBS];        /* what it is: token, or row and its source */
    int32_t piece[JOBS];                     /* which piece of its row */
    int32_t terms[JOBS];
    uint32_t begins[JOBS];
    int32_t first_stage[JOBS], held[JOBS]; /* the loader's */
    /* [JOBS, width] */
    const char **from; /* NULL: the stage is only held */
    char **to;
    int32_t *peer, *row; /* the announcer's notes */
    int32_t *slot;
    float *weight;
    char *stage;
    EpPipeShape shape;
} Pipe;

/** Bytes of dynamic shared memory. */
static __host__ __device__ __forceinline__ size_t pipe_bytes(const EpPipeShape &s) {
    size_t table = (size_t)JOBS * s.width * (2 * sizeof(char *) + 3 * sizeof(int32_t) + 4);
    return (size_t)s.stages * s.stage_bytes + table;
}

__device__ __forceinline__ uint32_t pipe_phase(uint32_t n) {
    return n / JOBS & 1;
}

/** Local barriers: what they wait for cannot fail to come. */
__device__ __forceinline__ void pipe_wait(uint64_t *barrier, uint32_t n) {
    while (!ep_mbarrier_try_wait(&barrier[n % JOBS], pipe_phase(n))) {
    }
}

__device__ __forceinline__ int pipe_test(uint64_t *barrier, uint32_t n) {
    return ep_mbarrier_test(&barrier[n % JOBS], pipe_phase(n));
}

__device__ __forceinline__ char *pipe_stage(const Pipe &p, uint32_t n, int i) {
    int at = p.first_stage[n % JOBS] + i;
    return p.stage + (at >= p.shape.stages ? at - p.shape.stages : at) * p.shape.stage_bytes;
}

/** Called by all threads of the block. */
__device__ __forceinline__ void pipe_open(Pipe *p, const EpPipeShape &shape, char *memory,
                                          int has_side) {
    int cells = JOBS * shape.width;
    if (threadIdx.x == 0) {
        p->shape = shape, p->stage = memory;
        memory += (size_t)shape.stages * shape.stage_bytes;
        p->from = (const char **)memory, memory += cells * sizeof(char *);
        p->to = (char **)memory, memory += cells * sizeof(char *);
        p->peer = (int32_t *)memory, memory += cells * sizeof(int32_t);
        p->row = (int32_t *)memory, memory += cells * sizeof(int32_t);
        p->slot = (int32_t *)memory, memory += cells * sizeof(int32_t);
        p->weight = (float *)memory;
    }
    for (int j = threadIdx.x; j < JOBS; j += blockDim.x) {
        ep_mbarrier_init(&p->posted[j], 1);
        ep_mbarrier_init(&p->full[j], 1);
        ep_mbarrier_init(&p->worked[j], TEAM_WARPS);
        ep_mbarrier_init(&p->freed[j], 1);
        ep_mbarrier_init(&p->done[j], 1 + has_side);
        ep_mbarrier_init(&p->open[j], 1);
    }
    ep_fence_mbarrier_init();
    ep_fence_proxy_shared();
    __syncthreads();
}

/* ---- planner ------------------------------------------------------------------------------- */

/** The lanes of the planner's warp, in teams of one lane for each k: a team plans a row. */
typedef struct Team {
    int width, count; /* lanes of each, and how many there are */
    int index, k;     /* this lane's */
    unsigned mask;
} Team;

#define LEAST_TEAM 8

__device__ __forceinline__ Team make_team(int top_k, int most) {
    Team t;
    t.width = LEAST_TEAM;
    while (t.width < top_k)
        t.width *= 2;
    int lane = threadIdx.x % 32;
    t.count = max(1, min(32 / t.width, most));
    t.index = lane / t.width, t.k = lane % t.width;
    t.mask = (t.width == 32 ? ~0u : (1u << t.width) - 1) << (t.index * t.width);
    return t;
}

/** Of this lane's team, those for which `is` holds, before this lane and in all. */
__device__ __forceinline__ int team_rank(const Team &t, int is, int *count) {
    unsigned who = __ballot_sync(~0u, is) & t.mask;
    *count = __popc(who);
    return __popc(who & ((1u << (threadIdx.x % 32)) - 1));
}

/** Until the place of job n may be written. */
__device__ __forceinline__ void pipe_await_open(Pipe *p, uint32_t n) {
    if (n >= JOBS) pipe_wait(p->open, n - JOBS);
}

/** End the pipe after n jobs; by the planner's whole warp. */
__device__ __forceinline__ void pipe_end(Pipe *p, uint32_t n) {
    __syncwarp();
    uint32_t end = n + threadIdx.x % 32;
    if (end >= n + PIPE_ENDS) return;
    pipe_await_open(p, end);
    p->loads[end % JOBS] = PIPE_END;
    ep_mbarrier_arrive(&p->posted[end % JOBS]);
}

/* ---- loader -------------------------------------------------------------------------------- */

/* All that wait for a job to be loaded learn that there is none. */
__device__ __forceinline__ void pipe_load_end(Pipe *p, uint32_t n) {
    for (uint32_t end = n; end != n + PIPE_ENDS; end++) {
        pipe_wait(p->posted, end);
        p->work[end % JOBS].vectors = PIPE_END;
        ep_mbarrier_arrive(&p->full[end % JOBS]);
    }
}

/** By one thread. */
__device__ __forceinline__ void pipe_load(Pipe *p) {
    int next = 0, unused = p->shape.stages, width = p->shape.width;
    uint32_t oldest = 0;
    for (uint32_t n = 0;; n++) {
        int j = n % JOBS, brought = 0;
        pipe_wait(p->posted, n);
        int loads = p->loads[j];
        if (loads == PIPE_END) return pipe_load_end(p, n);
        while (oldest < n && (unused < loads || oldest + JOBS <= n)) {
            pipe_wait(p->freed, oldest);
            unused += p->held[oldest++ % JOBS];
        }
        p->first_stage[j] = next, p->held[j] = loads;
        p->work[j] = PipeWork{ep_smem(pipe_stage(*p, n, 0)), p->bytes[j] / 16, p->terms[j],
                              p->begins[j]};
        for (int i = 0; i < loads; i++)
            brought += p->from[j * width + i] != NULL;
        ep_mbarrier_expect(&p->full[j], (uint32_t)(brought * p->bytes[j]));
        for (int i = 0; i < loads; i++)
            if (p->from[j * width + i])
                ep_bulk_load(pipe_stage(*p, n, i), p->from[j * width + i], (uint32_t)p->bytes[j],
                             &p->full[j]);
        next = (next + loads) % p->shape.stages;
        unused -= loads;
    }
}

/* ---- workers ------------------------------------------------------------------------------- */

/** Stages of a job's terms, as addresses in shared memory. */
typedef struct Stages {
    uint32_t end, bytes, all; /* of the stages */
} Stages;

__device__ __forceinline__ Stages pipe_stages(const Pipe &p) {
    uint32_t all = (uint32_t)(p.shape.stages * p.shape.stage_bytes);
    return Stages{ep_smem(p.stage) + all, (uint32_t)p.shape.stage_bytes, all};
}

/** Stage i of those that begin at `first`. */
__device__ __forceinline__ uint32_t stage_of(const Stages &s, uint32_t first, int i) {
    uint32_t at = first + i * s.bytes;
    return at >= s.end ? at - s.all : at;
}

/** A warp has done its part of job n. */
__device__ __forceinline__ void pipe_worked(Pipe *p, uint32_t n) {
    ep_fence_proxy_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ep_mbarrier_arrive(&p->worked[n % JOBS]);
}

/* ---- storer -------------------------------------------------------------------------------- */

/** Jobs up to n are finished with their stages, and stored. */
__device__ __forceinline__ void pipe_release(Pipe *p, uint32_t *released, uint32_t n) {
    for (; *released != n; ++*released) {
        ep_mbarrier_arrive(&p->freed[*released % JOBS]);
        ep_mbarrier_arrive(&p->done[*released % JOBS]);
    }
}

/** Until all but the LAG youngest jobs are stored; or, unless it matters when stores are complete,
 *  until they are read from their stages. */
template <int LAG> __device__ __forceinline__ void pipe_settle(int completely) {
    if (completely)
        ep_bulk_wait<LAG>();
    else
        ep_bulk_wait_read<LAG>();
}

/** By one thread. `ready`: the barrier after which stages may be stored. `spread`: whether store i
 *  is from stage 1 + i of its job instead of all from the first. */
__device__ __forceinline__ void pipe_store(Pipe *p, uint64_t *ready, int spread, int completely) {
    uint32_t released = 0, n = 0;
    int width = p->shape.width;
    for (;; n++) {
        int j = n % JOBS;
        /* Nobody may wait for long for what is stored but not told: others may wait for it, and
         * the next job for them. */
        if (released != n && !(pipe_test(p->posted, n) && pipe_test(ready, n))) {
            pipe_settle<0>(completely);
            pipe_release(p, &released, n);
        }
        pipe_wait(p->posted, n);
        if (p->loads[j] == PIPE_END) break;
        pipe_wait(ready, n);
        for (int i = 0; i < p->stores[j]; i++)
            ep_bulk_store(p->to[j * width + i], pipe_stage(*p, n, spread ? 1 + i : 0),
                          (uint32_t)p->bytes[j]);
        ep_bulk_commit();
        if (n + 1 - released <= STORE_LAG) continue;
        pipe_settle<STORE_LAG>(completely);
        pipe_release(p, &released, n + 1 - STORE_LAG);
    }
    ep_bulk_wait<0>();
    pipe_release(p, &released, n);
}

/* ---- announcer ----------------------------------------------------------------------------- */

/**
 * By a whole warp: lane r stores the counters of ranks r, r + 32 and so on. `heads`: records have
 * been written to their receivers, all of it before this fence; else they have been read, and each
 * load has returned its value, so that nothing is left to order before the credit.
 */
__device__ __forceinline__ void pipe_announce(Pipe *p, const EpCudaGroup &g, uint32_t epoch,
                                              int ring, int heads) {
    int lane = threadIdx.x % 32, width = p->shape.width;
    int count[RANK_WORDS] = {0}, told[RANK_WORDS] = {0};
    for (uint32_t n = 0, batch;; n += batch) {
        pipe_wait(p->posted, n);
        if (p->loads[n % JOBS] == PIPE_END) return;
        pipe_wait(p->done, n);
        for (batch = 1; batch < ANNOUNCE_BATCH && pipe_test(p->done, n + batch);)
            batch++;
        batch = __reduce_min_sync(~0u, batch);
        for (uint32_t b = 0; b < batch; b++) {
            int j = (n + b) % JOBS;
            for (int i = 0; i < p->notes[j]; i++)
#pragma unroll
                for (int w = 0; w < RANK_WORDS; w++)
                    if (p->peer[j * width + i] == w * 32 + lane)
                        count[w] = p->row[j * width + i] + 1;
        }
        __syncwarp();
        if (lane < (int)batch) ep_mbarrier_arrive(&p->open[(n + lane) % JOBS]);
        int changed = 0;
#pragma unroll
        for (int w = 0; w < RANK_WORDS; w++)
            changed |= count[w] != told[w];
        if (heads && __any_sync(~0u, changed)) ep_fence_sys();
#pragma unroll
        for (int w = 0; w < RANK_WORDS; w++) {
            if (count[w] == told[w]) continue;
            int peer = w * 32 + lane;
            uint64_t *counter =
                heads ? ep_head(g, peer, g.rank, ring) : ep_credit(g, peer, g.rank, ring);
            ep_store_relaxed_sys(counter, ep_counter(epoch, count[w]));
            told[w] = count[w];
        }
    }
}

#endif
