/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_PIPELINE_CUH
#define EP_RUNTIME_CUDA_PIPELINE_CUH

/**
 * The warp-specialised TMA pipeline in which a block moves rows, in CUTLASS's terms: producer and
 * consumer warps, stages in shared memory, mbarriers with phases. Each step has warps of its own,
 * so that none of them waits for another's latency.
 *
 *     scheduler warps  produce work items: claim rows, wait for other ranks, fill an entry
 *     load warp        bulk copies: global memory -> stages
 *     compute warps    (all but WORK_COPY and WORK_MOVE) stages -> stages, in place; all of them
 *                      on one item, so that its stages are soon free: bytes in flight limit the
 *                      speed
 *     store warps      bulk copies: stages -> global memory, here or on a peer; they take turns
 *     metadata warps   (optional) weights and scales, too small for bulk copies; they take turns
 *     signal warp      stores heads of written records, or credits for records that were read
 *
 * There are two rings. Item n has entry n % PIPELINE_ENTRIES, which describes it. An item of n
 * loads holds n consecutive stages until they are computed or stored; PipelineWork says which are
 * stored.
 *
 * Order. An entry has an mbarrier for each WorkStep. Its phase n / PIPELINE_ENTRIES completes when
 * the step is done for item n. Every thread that reads or writes anything of an item arrives
 * itself, or one lane arrives for its warp after __syncwarp. An arrival releases and a wait
 * acquires, so each step sees what the steps before it wrote. Between ordinary accesses and bulk
 * copies lies a proxy fence.
 *
 * Schedulers. A block has one or two. Each claims rows and waits for them on its own, as if it were
 * a block of its own. When it waits for no other rank any more, it takes numbers for its items and
 * writes them (pipeline_take). So an item that has a number is soon written. A pass of a scheduler
 * is mostly a wait for its own loads, and two of them wait at the same time.
 *
 * Reuse. A scheduler writes item n after item n - active is signaled, active <= EP_MAX_ACTIVE <
 * PIPELINE_ENTRIES. Items are signaled in order, and only after all their readers have arrived. So
 * no warp still uses item n's entry, which item n - PIPELINE_ENTRIES had before.
 *
 * Phases. A wait knows the last completed phase by its parity alone, so it takes the phase two
 * before its own for its own. So who waits for a step of item n must know that the step is done for
 * item n - PIPELINE_ENTRIES. The load, compute and signal warps handle every item in order, so they
 * know. A scheduler that takes number n knows that each scheduler has written its batches but the
 * last one, of at most `active` items, and so has seen item n - 2 * active signaled. Store and
 * metadata warps take at least one of PIPELINE_END_ITEMS consecutive items. They know that the last
 * one they took was under way, so all items EP_MAX_ACTIVE or more before it were signaled: hence
 * the static_assert. Nor can the step complete for item n + PIPELINE_ENTRIES while a warp waits for
 * item n: that warp's own steps have to come first.
 *
 * No deadlock. A step of item n waits for earlier steps of item n and for items before n, and no
 * item needs more stages than there are. Only schedulers wait for other ranks, before they take a
 * number for an item; other warps do so before their first item at most
 * (combine/cuda/gather.cu). runtime/cuda/device.h explains why those waits end. A store warp
 * may delay ITEM_STORED of its last item, to overlap the writes, only while its next item is ready:
 * a later item may wait, through another rank, for that signal.
 *
 * End. After the last item, or a failed wait, the scheduler that ends last writes
 * PIPELINE_END_ITEMS entries with PIPELINE_END, at least one for each warp that takes turns. So all
 * warps leave.
 *
 * Code of 8.0 (EP_HAS_BULK) has the same warps, stages and steps, and two steps are done otherwise:
 *
 *     load warp   cp.async, 16 bytes a lane. An arrival of each lane follows its copies
 *                 (ep_async_arrive). Such an arrival completes the phase for what was copied, but
 *                 releases nothing else. So lane 0 arrives once more, as any thread does, and with
 *                 it what the warp knows of the item goes on to those who wait for ITEM_LOADED.
 *     store warps load from stages and store to global memory, all lanes. Lane 0 arrives after
 *                 __syncwarp. So the signal warp knows the stores, and its release orders them
 *                 before the head or the word of a block, as it does the metadata warps' stores.
 *                 No store is waited for, and no arrival delayed.
 *
 * cp.async, loads and stores of stages are accesses of one proxy, so no fence lies between them. A
 * stage is read by the loads of a store or compute warp, whose values are there before it arrives.
 * So copies into the stage, which wait for that arrival, come after them. Waits poll.
 *
 * A store warp is one thread, and each of its cycles between two copies counts. So all that it
 * reads of an item, except the first stage, is one 16-byte word, and constants stay in registers,
 * among them the pipeline's address in shared memory (ep_keep_shared).
 */

#include "runtime/cuda/device.cuh"

EP_VARIANT_BEGIN

#define PIPELINE_ENTRIES 32
#define PIPELINE_END (-1)
#define PIPELINE_END_ITEMS 12
#define COMPUTE_WARPS 14 /* 24 warps in all: each thread has 80 registers */
#define COMPUTE_THREADS (COMPUTE_WARPS * 32)
static_assert(EP_MAX_ACTIVE + PIPELINE_END_ITEMS <= PIPELINE_ENTRIES, "see above");

/* A multiprocessor's four warp schedulers take every fourth warp each. Compute warps come last, so
 * that the load warp's hardware scheduler has one of them less: the load warp is busier than any
 * other single warp. */
enum WarpRole {
    FIRST_STORE_WARP,
    STORE_WARPS = 4,
    SIGNAL_WARP = FIRST_STORE_WARP + STORE_WARPS,
    LOAD_WARP,
    SCHEDULER_WARP,
    SCHEDULER_WARPS = 2,
    FIRST_METADATA_WARP = SCHEDULER_WARP + SCHEDULER_WARPS,
    METADATA_WARPS = 2,
    FIRST_COMPUTE_WARP = FIRST_METADATA_WARP + METADATA_WARPS,
    ALL_METADATA_WARPS = METADATA_WARPS + 8, /* without compute work, compute warps join */
};
static_assert(STORE_WARPS <= PIPELINE_END_ITEMS && ALL_METADATA_WARPS <= PIPELINE_END_ITEMS,
              "a warp that takes turns takes one of so many consecutive items");
static_assert(ALL_METADATA_WARPS <= METADATA_WARPS + COMPUTE_WARPS, "a block has them");
static_assert(PIPELINE_END_ITEMS <= 32, "a lane of a scheduler warp writes each end item");

__device__ __forceinline__ int pipeline_is_store_warp(int warp) {
    return warp >= FIRST_STORE_WARP && warp < FIRST_STORE_WARP + STORE_WARPS;
}

/** `schedulers`: warps of the block that schedule. */
__device__ __forceinline__ int pipeline_is_scheduler(int warp, int schedulers) {
    return warp >= SCHEDULER_WARP && warp < SCHEDULER_WARP + schedulers;
}

/** Steps of an item, in order. The barrier of a step completes a phase when the step is done. */
enum WorkStep {
    ITEM_POSTED, /* described in its entry */
    ITEM_LOADED, /* its rows are in its stages */
    ITEM_COMPUTED,
    ITEM_FREED,    /* the stages that it stores are free */
    ITEM_STORED,   /* the other side may be signaled */
    ITEM_SIGNALED, /* its signals are taken; the entry is free */
    ITEM_BARRIERS
};

/** What happens to an item's stages between its loads and its stores. */
enum PipelineWork {
    WORK_COPY,    /* nothing: the one stage goes to each store */
    WORK_CONVERT, /* likewise, after compute warps have replaced its contents */
    WORK_COMPUTE, /* compute warps leave a stage for each store, the last ones, and free the others
                   */
    WORK_PACKED,  /* likewise; terms outside of the run are packed, and stores may be */
    WORK_MOVE     /* nothing: each load has a store of its own */
};

/** A work item as the scheduler warp writes it. */
struct alignas(16) WorkItem {
    int16_t loads;  /* stages that it holds, or PIPELINE_END */
    int16_t loaded; /* how many of them are loaded */
    int16_t stores;
    int16_t terms;       /* rows to add, biases excepted, or slots to multiply for */
    int32_t bytes;       /* of each load; a store has bytes >> shrink (EpPipelineShape) */
    int8_t run, run_end; /* terms [run, run_end): weighted, summed on their own */
    int16_t packed;      /* WORK_PACKED: 16-byte units of a packed fragment */
};

/** An array in shared memory, by its distance from this struct: so compilers know that it lies
 *  there. */
template <typename T> struct PipelineTable {
    ptrdiff_t distance;
    __device__ __forceinline__ T *begin(void) const {
        return (T *)((char *)this + distance);
    }
    __device__ __forceinline__ T &operator[](int i) const {
        return begin()[i];
    }
    __device__ __forceinline__ char *assign(char *memory, int count) {
        distance = memory - (char *)this;
        return memory + count * sizeof(T);
    }
};

typedef struct Pipeline {
    WorkItem item[PIPELINE_ENTRIES];
    uint32_t first[PIPELINE_ENTRIES]; /* address in shared memory of each item's first stage; by the
                                         load warp */
    uint32_t holder[EP_MAX_STAGES];   /* load warp: the last item of each stage, see STAGE_HOLDER */
    uint64_t barrier[ITEM_BARRIERS][PIPELINE_ENTRIES];
    int32_t signals[PIPELINE_ENTRIES]; /* how many to send, and SIGNALS_GO_ON */
    int32_t index[PIPELINE_ENTRIES], source[PIPELINE_ENTRIES]; /* token, or row and its source */
    int32_t fragment[PIPELINE_ENTRIES];                        /* of the row */
    /* [PIPELINE_ENTRIES, width] */
    PipelineTable<const char *> from; /* NULL: the stage is held but not loaded */
    PipelineTable<char *> to;
    PipelineTable<int32_t> peer, row; /* where to signal */
    PipelineTable<int32_t> slot;
    PipelineTable<float> weight;
    uint32_t stages; /* address in shared memory of the first stage */
    uint32_t posted; /* numbers taken, and ONE_HAS_ENDED: see pipeline_take, pipeline_end */
    EpPipelineShape shape;
} Pipeline;

/** Whether a block receives or sends, its number among the blocks that do the same, and their
 *  count. */
typedef struct Role {
    int receives, index, count;
} Role;

/**
 * Returns this block's role. Sending and receiving blocks alternate, as far as their numbers allow,
 * from the first two blocks on: no more than these may be resident. Neighbours share a port to the
 * network: one of them sends and one receives, so that no block has less of the wire than others.
 */
__device__ __forceinline__ Role pipeline_role(int receivers) {
    int block = (int)blockIdx.x, blocks = (int)gridDim.x;
    int before = ep_receivers_before(block, blocks, receivers);
    int receives = ep_receivers_before(block + 1, blocks, receivers) > before;
    return Role{receives, receives ? before : block - before,
                receives ? receivers : blocks - receivers};
}

/** Returns the bytes of dynamic shared memory that a pipeline needs. */
static __host__ __device__ __forceinline__ size_t pipeline_bytes(const EpPipelineShape &s) {
    size_t table =
        (size_t)PIPELINE_ENTRIES * s.width * (2 * sizeof(char *) + 3 * sizeof(int32_t) + 4);
    return (size_t)s.stages * s.stage_bytes + table;
}

__device__ __forceinline__ uint32_t pipeline_phase(uint32_t n) {
    return n / PIPELINE_ENTRIES & 1;
}

/** Wait for a step of item n. There is no timeout: within a block every step is reached. */
__device__ __forceinline__ void pipeline_wait(uint64_t *barrier, uint32_t n) {
    while (!ep_mbarrier_try_wait(&barrier[n % PIPELINE_ENTRIES], pipeline_phase(n))) {
    }
}

__device__ __forceinline__ int pipeline_test(uint64_t *barrier, uint32_t n) {
    return ep_mbarrier_test(&barrier[n % PIPELINE_ENTRIES], pipeline_phase(n));
}

/** The ring of stages, as addresses in shared memory. */
typedef struct Stages {
    uint32_t begin, end, bytes; /* of the ring; of one stage */
} Stages;

__device__ __forceinline__ Stages pipeline_stages(const Pipeline *p) {
    uint32_t bytes = (uint32_t)p->shape.stage_bytes;
    return Stages{p->stages, p->stages + p->shape.stages * bytes, bytes};
}

/** Returns stage i of an item whose first stage is `first`. */
__device__ __forceinline__ uint32_t stage_of(const Stages &s, uint32_t first, int i) {
    uint32_t at = first + i * s.bytes;
    return at >= s.end ? at - (s.end - s.begin) : at;
}

#define ONE_HAS_ENDED 0x80000000u /* of the scheduler warps; or there is only one */
static_assert(SCHEDULER_WARPS == 2, "the other one has ended, or it has not");

/* Place the tables behind the stages in `memory`. By one thread. */
__device__ __forceinline__ void pipeline_init_tables(Pipeline *p, const EpPipelineShape &shape,
                                                     char *memory, int schedulers) {
    int cells = PIPELINE_ENTRIES * shape.width;
    p->shape = shape, p->stages = ep_smem(memory);
    p->posted = schedulers < SCHEDULER_WARPS ? ONE_HAS_ENDED : 0;
    memory += (size_t)shape.stages * shape.stage_bytes;
    memory = p->from.assign(memory, cells);
    memory = p->to.assign(memory, cells);
    memory = p->peer.assign(memory, cells);
    memory = p->row.assign(memory, cells);
    memory = p->slot.assign(memory, cells);
    p->weight.assign(memory, cells);
}

#define LOAD_ARRIVALS (EP_HAS_BULK ? 32 : 33) /* see pipeline_load, load_vectors */

/* Initialise the barriers. One takes 54 cycles, lane by lane, so a single warp would take 6 us for
 * all of them: each warp has some. By one thread of each warp. */
__device__ __forceinline__ void pipeline_init_barriers(Pipeline *p, int compute_warps,
                                                       int has_metadata, int posters) {
    int stored = 1 + 32 * has_metadata;
    const int arrivals[ITEM_BARRIERS] = {posters, LOAD_ARRIVALS, compute_warps, 1, stored, 1};
    for (int step = 0; step < ITEM_BARRIERS; step++)
        for (int j = threadIdx.x / 32; j < PIPELINE_ENTRIES; j += (int)blockDim.x / 32)
            ep_mbarrier_init(&p->barrier[step][j], arrivals[step]);
    ep_fence_mbarrier_init();
    ep_fence_proxy_shared();
}

/** Initialise the pipeline, which is open after the block's next barrier. `has_metadata`: whether
 *  metadata warps run. The signal warp places the tables: thread 0 enters the operation meanwhile.
 *  By all threads of the block. */
__device__ __forceinline__ void pipeline_open(Pipeline *p, const EpPipelineShape &shape,
                                              char *memory, int compute_warps, int has_metadata,
                                              int schedulers, int top_k) {
    if (threadIdx.x == SIGNAL_WARP * 32) pipeline_init_tables(p, shape, memory, schedulers);
    if (threadIdx.x % 32 == 0)
        pipeline_init_barriers(p, compute_warps, has_metadata, ep_team_width(top_k));
}

/* ---- scheduler warps ----------------------------------------------------------------------- */

/** The lanes of a scheduler warp form teams, one lane for each k; a team schedules a row. Lanes
 *  that are left over are in no team. Where rows have many fragments there are fewer teams:
 *  (count - 1) * fragments < active, so that no lane waits for an entry that another lane of the
 * warp has yet to fill. */
typedef struct Team {
    int width, count; /* lanes of a team; number of teams */
    int index, k;     /* of this lane */
    unsigned mask;
} Team;

/** Returns the bytes of a fragment of a row. */
__device__ __forceinline__ int32_t fragment_bytes(const EpPipelineShape &s, int64_t row_bytes,
                                                  int fragment) {
    return (int32_t)min((int64_t)s.stage_bytes, row_bytes - (int64_t)fragment * s.stage_bytes);
}

__device__ __forceinline__ Team make_team(int top_k, const EpPipelineShape &s) {
    Team t;
    t.width = ep_team_width(top_k);
    int lane = threadIdx.x % 32;
    t.count = min(32 / t.width, (s.active - 1) / s.fragments + 1);
    t.index = lane / t.width, t.k = lane % t.width;
    t.mask = (t.width == 32 ? ~0u : (1u << t.width) - 1) << (t.index * t.width);
    return t;
}

/** Returns for how many lanes of this team before this one `holds` is true; `count`: for how many
 *  lanes of the team. By the whole warp. */
__device__ __forceinline__ int team_rank(const Team &t, int holds, int *count) {
    unsigned lanes = __ballot_sync(~0u, holds) & t.mask;
    *count = __popc(lanes);
    return __popc(lanes & ((1u << (threadIdx.x % 32)) - 1));
}

/** Returns whether this lane's team is the last one that posts a row: `valid` in its lanes. By the
 *  whole warp. */
__device__ __forceinline__ int team_is_last(const Team &t, int valid) {
    return !(__ballot_sync(~0u, valid) & ~(t.mask | (t.mask - 1)));
}

#define SIGNALS_GO_ON 0x100 /* the next item was posted together with this one */

/** Returns Pipeline.signals of a fragment of a row: a row has `signals` to send, with its last
 * fragment.
 */
__device__ __forceinline__ int pipeline_signals(int signals, int fragment, int fragments,
                                                int is_last) {
    if (fragment < fragments - 1) return SIGNALS_GO_ON;
    return is_last ? signals : signals | SIGNALS_GO_ON;
}

/** Wait until entry n may be written. A scheduler is at most `active` items ahead: what it has
 *  claimed no other block can do. */
__device__ __forceinline__ void pipeline_await_entry(Pipeline *p, uint32_t n) {
    uint32_t active = (uint32_t)p->shape.active;
    if (n >= active) pipeline_wait(p->barrier[ITEM_SIGNALED], n - active);
}

/* Add to the numbers taken. Returns what they were. By a scheduler warp. */
__device__ __forceinline__ uint32_t pipeline_count(Pipeline *p, uint32_t count) {
    uint32_t before = threadIdx.x % 32 == 0 ? atomicAdd(&p->posted, count) : 0;
    return __shfl_sync(~0u, before, 0);
}

/** Take the next numbers for `count` items, and return the first. The caller waits for no other
 * rank until it has posted them. By a scheduler warp. */
__device__ __forceinline__ uint32_t pipeline_take(Pipeline *p, int count) {
    return pipeline_count(p, (uint32_t)count) & ~ONE_HAS_ENDED;
}

/** End the pipeline, if the other scheduler warp has ended, too: then all numbers have been taken.
 *  By a scheduler warp. */
__device__ __forceinline__ void pipeline_end(Pipeline *p, const Team &t) {
    uint32_t before = pipeline_count(p, ONE_HAS_ENDED), n = before & ~ONE_HAS_ENDED;
    if (before == n) return;
    uint32_t end = n + threadIdx.x % 32;
    if (end >= n + PIPELINE_END_ITEMS) return;
    if (end >= PIPELINE_ENTRIES) pipeline_wait(p->barrier[ITEM_SIGNALED], end - PIPELINE_ENTRIES);
    p->item[end % PIPELINE_ENTRIES].loads = PIPELINE_END;
    ep_mbarrier_arrive_for(&p->barrier[ITEM_POSTED][end % PIPELINE_ENTRIES], t.width);
}

/* ---- load warp ----------------------------------------------------------------------------- */

/* Complete ITEM_LOADED of the end items, so that all who wait for a loaded item see the end. */
__device__ __forceinline__ void pipeline_load_end(Pipeline *p, uint32_t n) {
    uint32_t end = n + threadIdx.x % 32;
    if (end >= n + PIPELINE_END_ITEMS) return;
    pipeline_wait(p->barrier[ITEM_POSTED], end);
    ep_mbarrier_arrive_for(&p->barrier[ITEM_LOADED][end % PIPELINE_ENTRIES], LOAD_ARRIVALS);
}

/** Returns the stages at an item's begin that are free once it is computed; it stores the rest. */
__device__ __forceinline__ int pipeline_input_stages(const WorkItem &item, PipelineWork work) {
    return work == WORK_COMPUTE || work == WORK_PACKED ? item.loads - item.stores : 0;
}

/** Returns where a packed load lies in its stage: at the end of the item's bytes. */
__device__ __forceinline__ uint32_t pipeline_packed_offset(const WorkItem &item) {
    return (uint32_t)item.bytes - (uint32_t)item.packed * 16;
}

/* Returns whether load `i` of an item is packed. */
__device__ __forceinline__ bool pipeline_is_packed(const WorkItem &item, int i, PipelineWork work) {
    return work == WORK_PACKED && (i < item.run || (i >= item.run_end && i < item.terms));
}

/* Returns the bytes of all loads of an item. */
__device__ __forceinline__ uint32_t pipeline_loaded_bytes(const WorkItem &item, PipelineWork work) {
    int whole = item.loaded;
    if (work == WORK_PACKED) whole -= item.terms - (item.run_end - item.run);
    return (uint32_t)(whole * item.bytes + (item.loaded - whole) * item.packed * 16);
}

/** The last item that was given a stage: its number * 2, + 1 if it holds the stage until
 *  ITEM_FREED, and not only until ITEM_COMPUTED. */
#define STAGE_HOLDER(item, stored) ((item)*2 + (stored))

/* Wait until the stage's holder is done with it, before item n gets it. A holder `active` or more
 * items before n is over, since n is posted. Its barriers may be in a later phase, so that a wait
 * would not end. */
__device__ __forceinline__ void pipeline_await_stage(Pipeline *p, uint32_t holder, uint32_t n) {
    uint32_t item = holder / 2;
    if (n - item < (uint32_t)p->shape.active)
        pipeline_wait(p->barrier[holder % 2 ? ITEM_FREED : ITEM_COMPUTED], item);
}

/* Load item n by code of 8.0: all lanes together, one load after another. `at` is the number of its
 * first stage. Each lane waits for each stage itself. It has an arrival that follows its own loads,
 * and lane 0 one more. That one orders all else that the warp knows of the item, since lanes meet
 * before it. By all lanes. */
__device__ __forceinline__ void load_vectors(Pipeline *p, const Stages &s, uint32_t n, int at,
                                             const WorkItem &item, PipelineWork work) {
    int j = n % PIPELINE_ENTRIES, lane = threadIdx.x % 32, stages = p->shape.stages;
    int inputs = pipeline_input_stages(item, work);
    const char *const *from = p->from.begin() + j * p->shape.width;
    for (int i = 0; i < item.loads; i++) {
        int stage = at + i < stages ? at + i : at + i - stages;
        const char *source = from[i];
        pipeline_await_stage(p, p->holder[stage], n);
        __syncwarp(); /* all lanes know the last holder */
        if (lane == 0) p->holder[stage] = STAGE_HOLDER(n, i >= inputs);
        uint32_t skipped = pipeline_is_packed(item, i, work) ? pipeline_packed_offset(item) : 0;
        uint32_t to = s.begin + stage * s.bytes + skipped;
        uint32_t bytes = source ? (uint32_t)item.bytes - skipped : 0;
#pragma unroll 4
        for (uint32_t b = lane * 16; b < bytes; b += 32 * 16)
            ep_async_load(to + b, source + b);
    }
    ep_async_arrive(&p->barrier[ITEM_LOADED][j]);
    __syncwarp();
    if (lane) return;
    p->first[j] = s.begin + at * s.bytes;
    ep_mbarrier_arrive(&p->barrier[ITEM_LOADED][j]);
}

/** Load all items, one lane for each load. Bytes may arrive before the barrier expects them: the
 *  phase cannot complete before lane 0's arrival, which expects them. By the load warp. */
__device__ __forceinline__ void pipeline_load(Pipeline *p, PipelineWork work) {
    const Stages s = pipeline_stages(p);
    const char *const *from = p->from.begin();
    uint32_t full = ep_smem(p->barrier[ITEM_LOADED]);
    int lane = threadIdx.x % 32, width = p->shape.width, stages = p->shape.stages, at = 0;
    for (int i = lane; i < stages; i += 32)
        p->holder[i] = STAGE_HOLDER(0u - EP_MAX_ACTIVE, 0);
    for (uint32_t n = 0;; n++) {
        int j = n % PIPELINE_ENTRIES;
        __syncwarp();
        pipeline_wait(p->barrier[ITEM_POSTED], n);
        WorkItem item = p->item[j];
        if (item.loads == PIPELINE_END) return pipeline_load_end(p, n);
        int inputs = pipeline_input_stages(item, work);
        if (!EP_HAS_BULK) load_vectors(p, s, n, at, item, work);
        for (int i = lane; i < item.loads && EP_HAS_BULK; i += 32) {
            int stage = at + i < stages ? at + i : at + i - stages;
            const char *source = from[j * width + i];
            pipeline_await_stage(p, p->holder[stage], n);
            p->holder[stage] = STAGE_HOLDER(n, i >= inputs);
            uint32_t skipped = pipeline_is_packed(item, i, work) ? pipeline_packed_offset(item) : 0;
            if (source)
                ep_bulk_load(s.begin + stage * s.bytes + skipped, source,
                             (uint32_t)item.bytes - skipped, full + j * 8);
        }
        if (lane == 0 && EP_HAS_BULK) {
            p->first[j] = s.begin + at * s.bytes;
            ep_mbarrier_expect(&p->barrier[ITEM_LOADED][j], pipeline_loaded_bytes(item, work));
        } else if (EP_HAS_BULK) {
            ep_mbarrier_arrive(&p->barrier[ITEM_LOADED][j]);
        }
        at += item.loads;
        if (at >= stages) at -= stages;
    }
}

/* ---- compute warps ------------------------------------------------------------------------- */

/** Arrive for a warp that has computed its part of item n. By a compute warp. */
__device__ __forceinline__ void pipeline_computed(Pipeline *p, uint32_t n) {
    ep_fence_proxy_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ep_mbarrier_arrive(&p->barrier[ITEM_COMPUTED][n % PIPELINE_ENTRIES]);
}

/* ---- store warps --------------------------------------------------------------------------- */

/** Whether this thread of a store warp stores: one does by bulk copies, all of them otherwise. */
__device__ __forceinline__ int pipeline_is_storing(int warp, int lane) {
    return pipeline_is_store_warp(warp) && (!EP_HAS_BULK || lane == 0);
}

/* Store `bytes` bytes of a stage, several vectors of each lane under way at a time. By all lanes of
 * a warp. */
__device__ __forceinline__ void store_vectors(char *to, uint32_t stage, uint32_t bytes) {
    enum { VECTORS = 4, STEP = 32 * 16 };
    uint32_t b = threadIdx.x % 32 * 16;
#pragma unroll 1
    for (; b + (VECTORS - 1) * STEP < bytes; b += VECTORS * STEP) {
        uint4 x[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            x[i] = ep_load_shared(stage + b + i * STEP);
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            ep_store_global(to + b + i * STEP, x[i]);
    }
#pragma unroll 1
    for (; b < bytes; b += STEP)
        ep_store_global(to + b, ep_load_shared(stage + b));
}

/* As pipeline_store, by code of 8.0. By all lanes of each store warp. They store what they have
 * read of a stage, so its contents are no longer needed when they meet. Then lane 0 arrives for
 * them. */
__device__ __forceinline__ void store_all_vectors(Pipeline *p, int warp, PipelineWork work,
                                                  int packs, int is_void) {
    const Stages s = pipeline_stages(p);
    char *const *to = p->to.begin();
    int computes = work != WORK_COPY && work != WORK_MOVE;
    for (uint32_t n = warp;; n += STORE_WARPS) {
        int j = n % PIPELINE_ENTRIES, cell = j * p->shape.width;
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[j];
        if (item.loads == PIPELINE_END) return;
        uint32_t at = stage_of(s, p->first[j], pipeline_input_stages(item, work));
        uint32_t bytes = (uint32_t)item.bytes >> p->shape.shrink;
        if (work == WORK_PACKED && packs) bytes = (uint32_t)item.packed * 16;
        if (computes) pipeline_wait(p->barrier[ITEM_COMPUTED], n);
        for (int i = 0; i < item.stores && !is_void; i++) {
            store_vectors(to[cell + i], at, bytes);
            if (work >= WORK_COMPUTE) at = stage_of(s, at, 1);
        }
        __syncwarp();
        if (threadIdx.x % 32) continue;
        ep_mbarrier_arrive(&p->barrier[ITEM_FREED][j]);
        ep_mbarrier_arrive(&p->barrier[ITEM_STORED][j]);
    }
}

/**
 * Store every STORE_WARPS-th item, from number `warp` on. ITEM_STORED completes when the stores are
 * written, if the receiver is signaled (`until_written`), or else when they are read from their
 * stages. `packs` (WORK_PACKED): stores are packed. `is_void`: nothing is stored, since a wait has
 * failed. By the threads that store (pipeline_is_storing).
 */
__device__ __forceinline__ void pipeline_store(Pipeline *p, int warp, PipelineWork work,
                                               int until_written, int packs, int is_void) {
    if (!EP_HAS_BULK) return store_all_vectors(p, warp, work, packs, is_void);
    const Stages s = pipeline_stages(p);
    char *const *to = p->to.begin();
    int width = p->shape.width, shrink = p->shape.shrink;
    int computes = work != WORK_COPY && work != WORK_MOVE;
    int pending = -1; /* last item's entry until it is written */
    for (uint32_t n = warp;; n += STORE_WARPS) {
        int j = n % PIPELINE_ENTRIES, cell = j * width;
        /* Never block while the last item is unsignaled: the next item may wait for its signal. */
        if (pending >= 0 && !(pipeline_test(p->barrier[ITEM_LOADED], n) &&
                              (!computes || pipeline_test(p->barrier[ITEM_COMPUTED], n)))) {
            ep_bulk_wait<0>();
            ep_mbarrier_arrive(&p->barrier[ITEM_STORED][pending]);
            pending = -1;
        }
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[j];
        if (item.loads == PIPELINE_END) break;
        uint32_t at = stage_of(s, p->first[j], pipeline_input_stages(item, work));
        uint32_t bytes = (uint32_t)item.bytes >> shrink;
        if (work == WORK_PACKED && packs) bytes = (uint32_t)item.packed * 16;
        if (computes) pipeline_wait(p->barrier[ITEM_COMPUTED], n);
        for (int i = 0; i < item.stores && !is_void; i++) {
            ep_bulk_store(to[cell + i], at, bytes);
            if (work >= WORK_COMPUTE) at = stage_of(s, at, 1);
        }
        ep_bulk_commit();
        if (pending >= 0) {
            ep_bulk_wait<1>();
            ep_mbarrier_arrive(&p->barrier[ITEM_STORED][pending]);
        }
        ep_bulk_wait_read<0>();
        ep_mbarrier_arrive(&p->barrier[ITEM_FREED][j]);
        pending = until_written ? j : -1;
        if (!until_written) ep_mbarrier_arrive(&p->barrier[ITEM_STORED][j]);
    }
    ep_bulk_wait<0>();
    if (pending >= 0) ep_mbarrier_arrive(&p->barrier[ITEM_STORED][pending]);
}

/* ---- metadata warps ------------------------------------------------------------------------ */

/** Call `move(entry, item)` for every count-th item, from number `warp` on, to move what
 *  accompanies its row: once per row, with its last fragment, when compute warps have produced all
 * its metadata. By a metadata warp. */
template <typename Move>
__device__ __forceinline__ void pipeline_metadata(Pipeline *p, int warp, int count, Move move) {
    int last = p->shape.fragments - 1;
    for (uint32_t n = warp;; n += count) {
        int j = n % PIPELINE_ENTRIES;
        pipeline_wait(p->barrier[ITEM_POSTED], n);
        if (p->item[j].loads == PIPELINE_END) return;
        if (p->fragment[j] == last) move(j, n);
        ep_mbarrier_arrive(&p->barrier[ITEM_STORED][j]);
        __syncwarp();
    }
}

/* ---- signal warp --------------------------------------------------------------------------- */

/* A lane's signal: the row whose record was written on `peer`, or read from it. */
typedef struct Signal {
    int peer, row; /* peer -1: none */
} Signal;

/* Spread the signals of a batch of items over the lanes, where an item may have several; this
 * lane's item has `signals`. Returns how many items the lanes suffice for. */
__device__ __forceinline__ uint32_t spread_signals(Pipeline *p, uint32_t n, uint32_t batch,
                                                   int signals, Signal *signal) {
    int lane = threadIdx.x % 32, through = ep_warp_prefix(signals);
    batch = (uint32_t)__popc(__ballot_sync(~0u, lane < (int)batch && through <= 32));
    int index = 0; /* in the batch, of the item whose signal this lane sends */
    for (int step = 16; step > 0; step /= 2)
        index += __shfl_sync(~0u, through, index + step - 1) <= lane ? step : 0;
    int signals_before = __shfl_sync(~0u, through, max(0, index - 1));
    int cell =
        (n + index) % PIPELINE_ENTRIES * p->shape.width + lane - (index ? signals_before : 0);
    *signal = Signal{-1, 0};
    if (index < (int)batch) *signal = Signal{p->peer[cell], p->row[cell]};
    return batch;
}

/* Returns how many items from n on are finished. Item n is. Each lane tests, and so acquires, one
 * item; __syncwarp passes that on, so that any lane may signal any of them. */
__device__ __forceinline__ uint32_t finished_items(Pipeline *p, uint32_t n) {
    uint32_t lane = threadIdx.x % 32;
    unsigned waiting = ~__ballot_sync(~0u, pipeline_test(p->barrier[ITEM_STORED], n + lane));
    __syncwarp();
    return waiting ? __ffs((int)waiting) - 1 : 32;
}

/* Wait for the rest of the scheduler's batch of which the last of `count` finished items is:
 * receivers wait for all of it, and the release for one item takes as long as that for several. An
 * item that is posted needs no signal of those before it; one that is not may wait for one, so this
 * does not wait for it. Returns how many are finished then. */
__device__ __forceinline__ uint32_t await_batch(Pipeline *p, uint32_t n, uint32_t count) {
    while (count < 32 && p->signals[(n + count - 1) % PIPELINE_ENTRIES] & SIGNALS_GO_ON &&
           __all_sync(~0u, pipeline_test(p->barrier[ITEM_POSTED], n + count))) {
        pipeline_wait(p->barrier[ITEM_STORED], n + count);
        count++;
    }
    return count;
}

/* Find this lane's signal among the finished items from n on, and return how many these are. Item n
 * is finished. `heads`: records were written. */
__device__ __forceinline__ uint32_t take_signals(Pipeline *p, uint32_t n, int heads,
                                                 Signal *signal) {
    uint32_t lane = threadIdx.x % 32, j = (n + lane) % PIPELINE_ENTRIES;
    uint32_t batch = finished_items(p, n);
    if (heads) batch = await_batch(p, n, batch);
    int signals = lane < batch ? p->signals[j] & (SIGNALS_GO_ON - 1) : 0;
    int cell = j * p->shape.width;
    if (__any_sync(~0u, signals > 1)) return spread_signals(p, n, batch, signals, signal);
    *signal = signals ? Signal{p->peer[cell], p->row[cell]} : Signal{-1, 0};
    return batch;
}

__device__ __forceinline__ void send_signal(const EpCudaGroup &g, uint32_t epoch,
                                            const Signal &signal, int heads) {
    uint64_t word = ep_counter(epoch, (uint32_t)signal.row + 1);
    if (heads)
        ep_store_release_sys(ep_head(g, signal.peer, g.rank, signal.row), word);
    else
        ep_store_relaxed_sys(ep_credit(g, signal.peer, g.rank, signal.row), word);
}

/** What the signals of a block say. */
enum Signals {
    NO_SIGNALS, /* nothing is sent, since a wait has failed */
    CREDITS,    /* records were read */
    HEADS,      /* records were written to their receivers */
    LATE_HEADS  /* likewise; and an item is under way until its head has left */
};

/** Does nothing with finished items: see pipeline_signal. */
struct IgnoreItems {
    __device__ __forceinline__ void note(uint32_t, uint32_t) const {}
    __device__ __forceinline__ void finish() const {}
};

/**
 * Send the signals of all items. `items.note(n, count)` is called for `count` finished items from n
 * on, while their entries are still theirs, and items.finish() once their signals have left; both
 * by all lanes. A head is stored with a release, which orders
 * the writes of its record before it. Behind a record that was read nothing is left to order: each
 * load has returned its value. A fence instead of releases would empty the multiprocessor's cache,
 * from which schedulers read. By the signal warp.
 */
template <typename Items = IgnoreItems>
__device__ __forceinline__ void pipeline_signal(Pipeline *p, const EpCudaGroup &g, uint32_t epoch,
                                                Signals signals, Items items = Items()) {
    uint32_t lane = threadIdx.x % 32;
    int heads = signals >= HEADS;
    for (uint32_t n = 0, batch;; n += batch) {
        Signal signal;
        pipeline_wait(p->barrier[ITEM_POSTED], n);
        if (p->item[n % PIPELINE_ENTRIES].loads == PIPELINE_END) return;
        pipeline_wait(p->barrier[ITEM_STORED], n);
        batch = take_signals(p, n, heads, &signal);
        if (signals == NO_SIGNALS) signal.peer = -1;
        if (signals == LATE_HEADS && signal.peer >= 0) send_signal(g, epoch, signal, heads);
        items.note(n, batch);
        __syncwarp();
        if (lane < batch)
            ep_mbarrier_arrive(&p->barrier[ITEM_SIGNALED][(n + lane) % PIPELINE_ENTRIES]);
        if (signals != LATE_HEADS && signal.peer >= 0) send_signal(g, epoch, signal, heads);
        items.finish();
    }
}

EP_VARIANT_END

#endif
