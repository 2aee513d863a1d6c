/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_PIPE_CUH
#define EP_RUNTIME_PIPE_CUH

/**
 * How a block moves rows: a pipe of jobs through stages in shared memory, in which each step is the
 * business of warps of its own, so that none of them waits for another's latency.
 *
 *     planner     decides what is next, waits for other ranks, writes the job's addresses
 *     loader      bulk copies: global memory -> stages
 *     workers     (where rows are worked on) stages -> stages, in place; all of them on one job,
 *                 so that its stages are soon free again: how many bytes are under way decides
 *     storers     bulk copies: stages -> global memory, here or on a peer; they take jobs in turn
 *     side warps  (where there are any) weights and scales, which are too small for bulk copies
 *     announcer   tells the other side: heads of what has been written, or credits for what was
 *                 read; the job's place is open again
 *
 * Jobs pass in order. Each place has a barrier for every step that says for which job, of those
 * that come round to this place, the step is done; to wait for job n is to wait for phase n / JOBS.
 * Every thread that has read or written something of a job arrives there itself, or one does for
 * its warp, behind __syncwarp. A phase can only be told from the next one: who waits for job n must
 * know that job n - JOBS is over. Those that take jobs in turn know of their last one that it was
 * under way, and so that EP_MOST_AHEAD before it none was: places are so many more that this is
 * enough.
 *
 * A job of n loads holds n stages; PipeWork tells which are stored. The pipe ends with PIPE_ENDS
 * jobs that are none, at least one for each of those that take jobs in turn.
 *
 * Storers are single threads: every cycle of theirs between two copies counts. So what they must
 * know of a job lies in one 16-byte word, but for its first stage, and what never changes in
 * registers: also where the pipe lies in shared memory (ep_keep_shared).
 */

#include "runtime/device.cuh"

#define JOBS 32
#define PIPE_END (-1)
#define PIPE_ENDS 12
#define WORKER_WARPS 15 /* 24 warps in all: each thread has 80 registers */
#define WORKERS (WORKER_WARPS * 32)
static_assert(EP_MOST_AHEAD + PIPE_ENDS <= JOBS, "see above");

/* A multiprocessor's four schedulers take every fourth warp each. Workers come last, so that the
 * loader's has one of them less than others: it is busier than any other single warp. */
enum PipeWarp {
    LOADER,
    FIRST_STORER,
    STORERS = 4,
    ANNOUNCER = FIRST_STORER + STORERS,
    PLANNER,
    FIRST_SIDE,
    SIDE_WARPS = 2,
    FIRST_WORKER = FIRST_SIDE + SIDE_WARPS,
    ALL_SIDES = SIDE_WARPS + 8, /* where there is no work, workers help with what lies beside */
};

__device__ __forceinline__ int pipe_is_storer(int warp) {
    return warp >= FIRST_STORER && warp < FIRST_STORER + STORERS;
}

/** What is over when a job's barrier completes a phase. */
enum PipeStep {
    POSTED, /* planned */
    FULL,   /* loaded */
    WORKED,
    FREED, /* stored, as far as the stages are concerned */
    DONE,  /* stored, as far as the other side is concerned */
    OPEN,  /* told */
    BARRIERS
};

/** What becomes of a job's stages between its loads and its stores. */
enum PipeWork {
    COPIED,    /* nothing: its one stage goes to each store */
    CONVERTED, /* the same, behind workers who have put something else into it */
    COMPUTED   /* workers leave a stage for each store, the last of the job's; the others are free
                  as soon as they have been worked on */
};

/** A job as the planner writes it. */
struct alignas(16) PipeJob {
    int16_t loads;   /* stages it holds, PIPE_END */
    int16_t brought; /* how many of them are loaded */
    int16_t stores;
    int16_t terms;       /* rows to add, or slots to multiply for */
    int32_t bytes;       /* of each load; a store has as many, or what the shape's shrink leaves */
    int8_t run, run_end; /* of the terms: those that are weighted, and added up first */
};

/** An array in shared memory, by how far it is from here: so that compilers see that it is there.
 */
template <typename T> struct PipeCells {
    ptrdiff_t distance;
    __device__ __forceinline__ T *begin(void) const {
        return (T *)((char *)this + distance);
    }
    __device__ __forceinline__ T &operator[](int i) const {
        return begin()[i];
    }
    __device__ __forceinline__ char *place(char *memory, int count) {
        distance = memory - (char *)this;
        return memory + count * sizeof(T);
    }
};

typedef struct Pipe {
    PipeJob job[JOBS];
    uint32_t first[JOBS]; /* of a job's stages, as an address in shared memory; by the loader */
    uint32_t hold[EP_MOST_STAGES]; /* the loader's: see PIPE_HOLD */
    uint64_t barrier[BARRIERS][JOBS];
    int32_t notes[JOBS];
    int32_t item[JOBS], source[JOBS]; /* what it is: token, or row and its source */
    int32_t piece[JOBS];              /* which piece of its row */
    /* [JOBS, width] */
    PipeCells<const char *> from; /* NULL: the stage is only held */
    PipeCells<char *> to;
    PipeCells<int32_t> peer, row; /* the announcer's notes */
    PipeCells<int32_t> slot;
    PipeCells<float> weight;
    uint32_t stages; /* all of them, as an address in shared memory */
    EpPipeShape shape;
} Pipe;

/** What a block does, and which of those that do it this is. */
typedef struct Role {
    int receives, index, count;
} Role;

/**
 * Blocks that send and blocks that receive alternate, as far as their numbers allow. Neighbours
 * share a port to the network: one of them sends and one receives, so that no block has less of the
 * wire than others.
 */
__device__ __forceinline__ Role pipe_role(int receivers) {
    int block = (int)blockIdx.x, blocks = (int)gridDim.x;
    int before = block * receivers / blocks, receives = (block + 1) * receivers / blocks > before;
    return Role{receives, receives ? before : block - before,
                receives ? receivers : blocks - receivers};
}

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

/** Stages as addresses in shared memory: a job's follow each other, round the end. */
typedef struct Stages {
    uint32_t begin, end, bytes; /* of all; of one */
} Stages;

__device__ __forceinline__ Stages pipe_stages(const Pipe *p) {
    uint32_t bytes = (uint32_t)p->shape.stage_bytes;
    return Stages{p->stages, p->stages + p->shape.stages * bytes, bytes};
}

/** Stage i of those that begin at `first`. */
__device__ __forceinline__ uint32_t stage_of(const Stages &s, uint32_t first, int i) {
    uint32_t at = first + i * s.bytes;
    return at >= s.end ? at - (s.end - s.begin) : at;
}

#define LEAST_TEAM 8

/** Lanes that plan a row. */
__device__ __forceinline__ int team_width(int top_k) {
    int width = LEAST_TEAM;
    while (width < top_k)
        width *= 2;
    return width;
}

/* Where the arrays lie. By one thread. */
__device__ __forceinline__ void pipe_lay_out(Pipe *p, const EpPipeShape &shape, char *memory) {
    int cells = JOBS * shape.width;
    p->shape = shape, p->stages = ep_smem(memory);
    memory += (size_t)shape.stages * shape.stage_bytes;
    memory = p->from.place(memory, cells);
    memory = p->to.place(memory, cells);
    memory = p->peer.place(memory, cells);
    memory = p->row.place(memory, cells);
    memory = p->slot.place(memory, cells);
    p->weight.place(memory, cells);
}

/* A barrier takes 54 cycles to begin with, lane by lane: one warp would take 6 us for all of them.
 * So each warp has some. By one thread of each. */
__device__ __forceinline__ void pipe_begin_barriers(Pipe *p, int has_side, int posters) {
    const int arrivals[BARRIERS] = {posters, 32, WORKER_WARPS, 1, 1 + 32 * has_side, 1};
    for (int kind = 0; kind < BARRIERS; kind++)
        for (int j = threadIdx.x / 32; j < JOBS; j += (int)blockDim.x / 32)
            ep_mbarrier_init(&p->barrier[kind][j], arrivals[kind]);
    ep_fence_mbarrier_init();
    ep_fence_proxy_shared();
}

/** Called by all threads of the block; the pipe is open behind their next barrier. `has_side`:
 *  whether there are side warps. */
__device__ __forceinline__ void pipe_open(Pipe *p, const EpPipeShape &shape, char *memory,
                                          int has_side, int top_k) {
    if (threadIdx.x == 0) pipe_lay_out(p, shape, memory);
    if (threadIdx.x % 32 == 0) pipe_begin_barriers(p, has_side, team_width(top_k));
}

/* ---- planner ------------------------------------------------------------------------------- */

/** The lanes of the planner's warp, in teams of one lane for each k: a team plans a row. Of rows in
 *  many pieces fewer are planned at once, so that no lane waits for a place that another one of the
 *  warp is yet to fill. */
typedef struct Team {
    int width, count; /* lanes of each, and how many there are */
    int index, k;     /* this lane's */
    unsigned mask;
} Team;

/** The bytes of a piece of a row. */
__device__ __forceinline__ int32_t piece_bytes(const EpPipeShape &s, int64_t row_bytes, int piece) {
    return (int32_t)min((int64_t)s.stage_bytes, row_bytes - (int64_t)piece * s.stage_bytes);
}

__device__ __forceinline__ Team make_team(int top_k, const EpPipeShape &s) {
    Team t;
    t.width = team_width(top_k);
    int lane = threadIdx.x % 32;
    t.count = min(32 / t.width, (s.ahead - 1) / s.pieces + 1);
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

/** Until the place of job n may be written. A planner is no further ahead than it needs: what it
 *  has claimed no other block can do. */
__device__ __forceinline__ void pipe_await_open(Pipe *p, uint32_t n) {
    uint32_t ahead = (uint32_t)p->shape.ahead;
    if (n >= ahead) pipe_wait(p->barrier[OPEN], n - ahead);
}

/** End the pipe after n jobs; by the planner's whole warp. */
__device__ __forceinline__ void pipe_end(Pipe *p, const Team &t, uint32_t n) {
    __syncwarp();
    uint32_t end = n + threadIdx.x % 32;
    if (end >= n + PIPE_ENDS) return;
    if (end >= JOBS) pipe_wait(p->barrier[OPEN], end - JOBS);
    p->job[end % JOBS].loads = PIPE_END;
    ep_mbarrier_arrive_for(&p->barrier[POSTED][end % JOBS], t.width);
}

/* ---- loader -------------------------------------------------------------------------------- */

/* All that wait for a job to be loaded learn that there is none. */
__device__ __forceinline__ void pipe_load_end(Pipe *p, uint32_t n) {
    uint32_t end = n + threadIdx.x % 32;
    if (end >= n + PIPE_ENDS) return;
    pipe_wait(p->barrier[POSTED], end);
    ep_mbarrier_arrive_for(&p->barrier[FULL][end % JOBS], 32);
}

/** Stages that are free when a job has been worked on; its stores are of the rest. */
__device__ __forceinline__ int pipe_spent(const PipeJob &job, PipeWork work) {
    return work == COMPUTED ? job.loads - job.stores : 0;
}

/** The last job that was given this stage: its number * 2, + 1 if it holds the stage until that is
 *  stored, and not only until it has been worked on. */
#define PIPE_HOLD(job, stored) ((job)*2 + (stored))

/* Until the job that has a stage is done with it, before job n gets it. A job that is `ahead` or
 * more before n is over, since n has been planned; and its barriers may have gone on. */
__device__ __forceinline__ void pipe_await_stage(Pipe *p, uint32_t hold, uint32_t n) {
    uint32_t before = hold / 2;
    if (n - before < (uint32_t)p->shape.ahead)
        pipe_wait(p->barrier[hold % 2 ? FREED : WORKED], before);
}

/** By a warp, a lane for each load. What has been loaded may be counted before it is expected: the
 *  barrier lacks this arrival until then. */
__device__ __forceinline__ void pipe_load(Pipe *p, PipeWork work) {
    const Stages s = pipe_stages(p);
    const char *const *from = p->from.begin();
    uint32_t full = ep_smem(p->barrier[FULL]);
    int lane = threadIdx.x % 32, width = p->shape.width, stages = p->shape.stages, at = 0;
    for (int i = lane; i < stages; i += 32)
        p->hold[i] = PIPE_HOLD(0u - EP_MOST_AHEAD, 0);
    for (uint32_t n = 0;; n++) {
        int j = n % JOBS;
        __syncwarp();
        pipe_wait(p->barrier[POSTED], n);
        PipeJob job = p->job[j];
        if (job.loads == PIPE_END) return pipe_load_end(p, n);
        int spent = pipe_spent(job, work);
        for (int i = lane; i < job.loads; i += 32) {
            int stage = at + i < stages ? at + i : at + i - stages;
            const char *source = from[j * width + i];
            pipe_await_stage(p, p->hold[stage], n);
            p->hold[stage] = PIPE_HOLD(n, i >= spent);
            if (source)
                ep_bulk_load(s.begin + stage * s.bytes, source, (uint32_t)job.bytes, full + j * 8);
        }
        if (lane == 0) {
            p->first[j] = s.begin + at * s.bytes;
            ep_mbarrier_expect(&p->barrier[FULL][j], (uint32_t)(job.brought * job.bytes));
        } else {
            ep_mbarrier_arrive(&p->barrier[FULL][j]);
        }
        at += job.loads;
        if (at >= stages) at -= stages;
    }
}

/* ---- workers ------------------------------------------------------------------------------- */

/** A warp has done its part of job n. */
__device__ __forceinline__ void pipe_worked(Pipe *p, uint32_t n) {
    ep_fence_proxy_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ep_mbarrier_arrive(&p->barrier[WORKED][n % JOBS]);
}

/* ---- storers ------------------------------------------------------------------------------- */

/**
 * By one thread of each storer. A job is done when its stores are written, if it is the other side
 * that is told (`completely`), or else when they are read from their stages.
 */
__device__ __forceinline__ void pipe_store(Pipe *p, int storer, PipeWork work, int completely) {
    const Stages s = pipe_stages(p);
    char *const *to = p->to.begin();
    int width = p->shape.width, shrink = p->shape.shrink;
    int works = work != COPIED, stored = -1; /* the place of a job that may not be written yet */
    for (uint32_t n = storer;; n += STORERS) {
        int j = n % JOBS, cell = j * width;
        /* Nobody may wait for what is stored but not told: the next job may wait for them. */
        if (stored >= 0 &&
            !(pipe_test(p->barrier[FULL], n) && (!works || pipe_test(p->barrier[WORKED], n)))) {
            ep_bulk_wait<0>();
            ep_mbarrier_arrive(&p->barrier[DONE][stored]);
            stored = -1;
        }
        pipe_wait(p->barrier[FULL], n);
        PipeJob job = p->job[j];
        if (job.loads == PIPE_END) break;
        uint32_t at = stage_of(s, p->first[j], pipe_spent(job, work));
        uint32_t bytes = (uint32_t)job.bytes >> shrink;
        if (works) pipe_wait(p->barrier[WORKED], n);
        for (int i = 0; i < job.stores; i++) {
            ep_bulk_store(to[cell + i], at, bytes);
            if (work == COMPUTED) at = stage_of(s, at, 1);
        }
        ep_bulk_commit();
        if (stored >= 0) {
            ep_bulk_wait<1>();
            ep_mbarrier_arrive(&p->barrier[DONE][stored]);
        }
        ep_bulk_wait_read<0>();
        ep_mbarrier_arrive(&p->barrier[FREED][j]);
        stored = completely ? j : -1;
        if (!completely) ep_mbarrier_arrive(&p->barrier[DONE][j]);
    }
    ep_bulk_wait<0>();
    if (stored >= 0) ep_mbarrier_arrive(&p->barrier[DONE][stored]);
}

/* ---- side warps ---------------------------------------------------------------------------- */

/** By warp number `warp` of `count`: `move(job's place, job)` for what lies beside each row, once:
 *  with its last piece, behind which workers have made all that they make beside it. */
template <typename Move>
__device__ __forceinline__ void pipe_sides(Pipe *p, int warp, int count, Move move) {
    int last = p->shape.pieces - 1;
    for (uint32_t n = warp;; n += count) {
        int j = n % JOBS;
        pipe_wait(p->barrier[POSTED], n);
        if (p->job[j].loads == PIPE_END) return;
        if (p->piece[j] == last) move(j, n);
        ep_mbarrier_arrive(&p->barrier[DONE][j]);
        __syncwarp();
    }
}

/* ---- announcer ----------------------------------------------------------------------------- */

/* What one lane is to tell a rank: which row has been put into its place, or taken out. */
typedef struct Note {
    int peer, row; /* peer -1: nothing */
} Note;

/* The notes of a batch, each in a lane of its own, where a lane has several: `notes` of its job.
 * Returns how many jobs these are: lanes may be too few for all. */
__device__ __forceinline__ uint32_t deal_notes(Pipe *p, uint32_t n, uint32_t batch, int notes,
                                               Note *note) {
    int lane = threadIdx.x % 32, through = ep_warp_prefix(notes);
    batch = (uint32_t)__popc(__ballot_sync(~0u, lane < (int)batch && through <= 32));
    int before = 0; /* jobs whose notes are those of lanes before this one */
    for (int step = 16; step > 0; step /= 2)
        before += __shfl_sync(~0u, through, before + step - 1) <= lane ? step : 0;
    int notes_before = __shfl_sync(~0u, through, max(0, before - 1));
    int cell = (n + before) % JOBS * p->shape.width + lane - (before ? notes_before : 0);
    *note = Note{-1, 0};
    if (before < (int)batch) *note = Note{p->peer[cell], p->row[cell]};
    return batch;
}

/* Jobs from n on, which is done: as many as are. Each lane looks at one of them; what it sees to be
 * done, all may tell of. And this lane's note. */
__device__ __forceinline__ uint32_t take_notes(Pipe *p, uint32_t n, Note *note) {
    uint32_t lane = threadIdx.x % 32, j = (n + lane) % JOBS;
    unsigned waiting = ~__ballot_sync(~0u, pipe_test(p->barrier[DONE], n + lane));
    uint32_t batch = waiting ? __ffs((int)waiting) - 1 : 32;
    __syncwarp();
    int notes = lane < batch ? p->notes[j] : 0, cell = j * p->shape.width;
    if (__any_sync(~0u, notes > 1)) return deal_notes(p, n, batch, notes, note);
    *note = notes ? Note{p->peer[cell], p->row[cell]} : Note{-1, 0};
    return batch;
}

__device__ __forceinline__ void tell(const EpCudaGroup &g, uint32_t epoch, const Note &note,
                                     int heads) {
    uint64_t word = ep_counter(epoch, (uint32_t)note.row + 1);
    if (heads)
        ep_store_release_sys(ep_head(g, note.peer, g.rank, note.row), word);
    else
        ep_store_relaxed_sys(ep_credit(g, note.peer, g.rank, note.row), word);
}

/**
 * By a whole warp. `heads`: records have been written to their receivers, all of it before the head
 * is; else they have been read, and each load has returned its value, so that nothing is left to
 * order before the credit. A fence would do instead of stores that release, but also empty the
 * multiprocessor's cache, from which planners read.
 */
__device__ __forceinline__ void pipe_announce(Pipe *p, const EpCudaGroup &g, uint32_t epoch,
                                              int heads) {
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t n = 0, batch;; n += batch) {
        Note note;
        pipe_wait(p->barrier[POSTED], n);
        if (p->job[n % JOBS].loads == PIPE_END) return;
        pipe_wait(p->barrier[DONE], n);
        batch = take_notes(p, n, &note);
        __syncwarp();
        if (lane < batch) ep_mbarrier_arrive(&p->barrier[OPEN][(n + lane) % JOBS]);
        if (note.peer >= 0) tell(g, epoch, note, heads);
    }
}

#endif
