/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scatter over NVLink: token rows to slots, for ep_dispatch and ep_combine_backward.
 *
 * One launch of sending and receiving blocks (pipeline_role). A sending block loads tokens into
 * shared memory one by one, and pushes each to every rank that needs it, once: into the ring there
 * or, for a zero-copy receive, into the first of the row's slots. A receiving block takes what has
 * arrived and writes it to all (other) slots of each row. runtime/cuda/pipeline.cuh describes the
 * warps of a block; runtime/cuda/device.h how blocks divide the work, why there is no circular
 * wait, and the memory order of records, heads and credits.
 *
 * Who waits on whom: a sending block waits for all ranks' arrivals and for credits, that is, until
 * the receiver's block has emptied a record of the ring; a receiving block waits for heads.
 *
 * Rows of the rank's own tokens that are only copied go from the sending block straight to their
 * slots. Where rows are multiplied, the receiving block reads them in place.
 */
#include "dispatch/cuda/scatter_receive.cuh"
#include "dispatch/cuda/scatter_send.cuh"
#include "handles/cuda/relay_marks.cuh"

#define SCATTER_THREADS (FIRST_COMPUTE_WARP * 32 + COMPUTE_THREADS)

typedef struct Shared {
    Pipeline pipeline;
    union {
        ReceiveRows receivers[SCHEDULER_WARPS];
        struct {
            ChunkRows rows[SCHEDULER_WARPS];
            Dots dots;
        };
    };
} Shared;
static_assert(sizeof(Shared) <= EP_SCATTER_STATIC_BYTES, "the pipeline has the rest");

/* ---- padding ------------------------------------------------------------------------------- */

/* A thread among those that write zeros. */
typedef struct ZeroThreads {
    int index, count;
} ZeroThreads;

/* Nobody reads the zeros soon, so they leave the cache first (__stcs); several stores at once would
 * delay the rows. */
template <typename Word> __device__ void zero_words(char *out, int64_t bytes, ZeroThreads z) {
    int64_t words = bytes / (int64_t)sizeof(Word);
#pragma unroll 1
    for (int64_t at = z.index; at < words; at += z.count)
        __stcs((Word *)out + at, Word{});
}

__device__ void zero_bytes(char *out, int64_t bytes, ZeroThreads z) {
    if (((uintptr_t)out | (uintptr_t)bytes) % sizeof(uint32_t) == 0)
        zero_words<uint32_t>(out, bytes, z);
    else
        zero_words<uint8_t>(out, bytes, z);
}

/* Zero the scales of slots of one slab; by column, these are a range in each column. */
__device__ void zero_scales(const EpScatterArgs &a, int64_t begin, int64_t end, ZeroThreads z) {
    const EpScaleMap &map = a.t.scale_map;
    char *out = a.t.out_scales + ep_scale_at(&map, begin, 0);
    int64_t step = ep_scale_step(&map), rows = end - begin;
    if (!map.by_column) zero_bytes(out, rows * a.t.scale_bytes, z);
    for (int64_t i = 0; map.by_column && i < map.count; i++)
        zero_bytes(out + i * step, rows * map.element_bytes, z);
}

__device__ void set_no_experts(const EpScatterArgs &a, int64_t begin, int64_t end, ZeroThreads z) {
    for (int64_t i = begin * a.top_k + z.index; a.t.out_idx && i < end * a.top_k; i += z.count) {
        if (a.t.idx_type == EP_TYPE_INT64)
            ((int64_t *)a.t.out_idx)[i] = -1;
        else
            ((int32_t *)a.t.out_idx)[i] = -1;
    }
}

__device__ void zero_slots(const EpScatterArgs &a, int64_t begin, int64_t end, ZeroThreads z) {
    begin = max(begin, (int64_t)0), end = min(end, a.t.out_capacity);
    if (begin >= end) return;
    set_no_experts(a, begin, end, z);
    if (a.shape.tail == EP_TAIL_IDS) return; /* such layouts have no padding but the tail */
    zero_words<uint4>(a.t.out_rows + begin * a.t.row_bytes, (end - begin) * a.t.row_bytes, z);
    int64_t values = a.shape.has_rows && a.t.carries_weights ? a.top_k : 1;
    if (a.t.out_weights)
        zero_bytes((char *)(a.t.out_weights + begin * values), (end - begin) * values * 4, z);
    if (a.t.scale_bytes) zero_scales(a, begin, end, z);
}

/* Zero a receiving block's part of all slabs' padding. Where slabs are few, each is divided, so
 * that every block has a part, or two of half the size. */
__device__ void zero_slabs(const EpScatterArgs &a, const Role &role, ZeroThreads z) {
    const EpPlanShape &s = a.shape;
    int parts = max(1, 2 * role.count / max(s.num_local, 1));
    for (int i = role.index; i < s.num_local * parts; i += role.count) {
        int e = i / parts;
        int64_t begin = ep_padding_begin(&s, a.plan.expert_offsets, a.plan.expert_counts,
                                         a.plan.expert_padded, e);
        int64_t end = ep_padding_end(&s, a.plan.expert_offsets, a.plan.expert_padded, e);
        int64_t rows = (max(end - begin, (int64_t)0) + parts - 1) / parts;
        begin += i % parts * rows;
        zero_slots(a, begin, min(begin + rows, end), z);
    }
}

/* Zero a receiving block's part of all padding. */
__device__ void zero_padding(const EpScatterArgs &a, const Role &role, ZeroThreads z) {
    const EpPlanShape &s = a.shape;
    if (!s.has_rows) zero_slabs(a, role, z);
    int64_t tail = a.plan.header->recv_rows, rows = a.t.out_capacity - tail;
    if (s.is_fixed || s.tail == EP_TAIL_KEEP || rows <= 0) return;
    rows = (rows + role.count - 1) / role.count;
    int64_t begin = tail + role.index * rows;
    zero_slots(a, begin, min(begin + rows, a.t.out_capacity), z);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <Form FORM>
__device__ void send(const EpScatterArgs &a, Shared *s, const Start &start, uint32_t epoch,
                     int blocks) {
    Pipeline *p = &s->pipeline;
    PipelineWork work = FORM == COPIED && a.t.format.bits ? WORK_CONVERT : WORK_COPY;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_tokens<FORM>(a, p, &s->receivers[warp - SCHEDULER_WARP], start, epoch, blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p,
                      WORK_COPY); /* for either work: all stages are held until they are stored */
    else if (pipeline_is_store_warp(warp) && lane == 0)
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 1, 0, 0);
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, HEADS);
    else if (warp >= FIRST_COMPUTE_WARP && work == WORK_CONVERT)
        quantise(a, p, threadIdx.x - FIRST_COMPUTE_WARP * 32);
    else if (warp >= FIRST_METADATA_WARP && warp < FIRST_METADATA_WARP + ALL_METADATA_WARPS &&
             has_metadata(a))
        send_all_metadata<FORM>(a, p, warp - FIRST_METADATA_WARP, work);
}

/* Whether metadata warps work in receiving blocks. Rows that are multiplied have no metadata:
 * compute warps write their dot products. */
template <Form FORM>
__device__ __forceinline__ int has_metadata_to_receive(const EpScatterArgs &a) {
    return FORM == COPIED && has_metadata(a);
}

template <Form FORM>
__device__ void receive(const EpScatterArgs &a, Shared *s, const Start &start, uint32_t epoch,
                        const Role &role) {
    Pipeline *p = &s->pipeline;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr PipelineWork work = FORM == MULTIPLIED ? WORK_COMPUTE : WORK_COPY;
    int moves_metadata = has_metadata_to_receive<FORM>(a);
    int first_free =
        (moves_metadata ? FIRST_METADATA_WARP + ALL_METADATA_WARPS : FIRST_COMPUTE_WARP) * 32;
    ZeroThreads zero_threads = {(int)threadIdx.x - first_free, SCATTER_THREADS - first_free};
    /* Warps that multiply do this first, while the first rows are still on their way. */
    if (zero_threads.index >= 0 && a.plan.use.fills_rest) zero_padding(a, role, zero_threads);
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_rows<FORM>(a, p, &s->rows[warp - SCHEDULER_WARP], start, epoch, role.count);
    else if (warp == LOAD_WARP)
        pipeline_load(p, work);
    else if (pipeline_is_store_warp(warp) && lane == 0)
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 0, 0, 0);
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, CREDITS);
    else if (warp >= FIRST_METADATA_WARP && warp < FIRST_METADATA_WARP + ALL_METADATA_WARPS &&
             moves_metadata)
        receive_all_metadata(a, p, warp - FIRST_METADATA_WARP);
    else if (FORM == MULTIPLIED && warp >= FIRST_MULTIPLY_WARP)
        multiply(a, p, &s->dots, threadIdx.x - FIRST_MULTIPLY_WARP * 32);
}

/* Start to walk what this block moves. By a scheduler warp. */
__device__ __forceinline__ Start start_walk(const EpScatterArgs &a, const Role &role, Shared *s,
                                            int warp) {
    return role.receives ? start_rows(a, &s->rows[warp - SCHEDULER_WARP], RECEIVERS)
                         : start_tokens(a, SENDERS);
}

/* A kernel of its own reads records of other nodes: its code would cost the others half a
 * microsecond. */
template <Form FORM, int READS_RECORDS>
__global__ void __launch_bounds__(SCATTER_THREADS, 1)
    scatter_kernel(const __grid_constant__ EpScatterArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    Shared *shared = ep_keep_shared(&s);
    uint32_t epoch;
    EpLook look = ep_look(a.group, a.plan);
    Role role = pipeline_role(a.receivers);
    Start start = {0, 0};
    int warp = (int)threadIdx.x / 32;
    if (warp == SCHEDULER_WARP) start = start_walk(a, role, shared, warp);
    pipeline_open(&shared->pipeline, role.receives ? a.receive : a.send, memory,
                  FORM == MULTIPLIED && role.receives ? MULTIPLY_WARPS : COMPUTE_WARPS,
                  role.receives ? has_metadata_to_receive<FORM>(a) : has_metadata(a), a.schedulers,
                  a.top_k);
    if (READS_RECORDS) ep_look_at_stamps(a.marks, &look);
    if (!ep_enter(a.group, a.plan, look, &epoch)) {
        if (READS_RECORDS) ep_report_stamps(a.group, a.marks);
        ep_report_plan(a.group, a.plan);
        ep_leave(a.group, epoch, 0);
        return;
    }
    if (READS_RECORDS) ep_take_messages(a.marks);
    ep_arrive(a.group, epoch, a.where, a.zero_copy ? (uint32_t)a.plan.use.num_slots : 0);
    if (warp > SCHEDULER_WARP && pipeline_is_scheduler(warp, a.schedulers))
        start = start_walk(a, role, shared, warp);
    if (role.receives)
        receive<FORM>(a, shared, start, epoch, role);
    else
        send<FORM>(a, shared, start, epoch, role.count);
    ep_leave(a.group, epoch, 0);
}

extern "C" int ep_cuda_open_scatter(int shared_bytes) {
    int error = ep_open_kernel(scatter_kernel<COPIED, 0>, shared_bytes);
    if (!error) error = ep_open_kernel(scatter_kernel<COPIED, 1>, shared_bytes);
    if (!error) error = ep_open_kernel(scatter_kernel<MULTIPLIED, 0>, shared_bytes);
    return error ? error : ep_open_kernel(scatter_kernel<MULTIPLIED, 1>, shared_bytes);
}

template <Form FORM> static int launch(const EpScatterArgs &a, int blocks, void *stream) {
    size_t send = pipeline_bytes(a.send), receive = pipeline_bytes(a.receive);
    auto kernel = a.marks.watch ? scatter_kernel<FORM, 1> : scatter_kernel<FORM, 0>;
    return ep_launch(kernel, blocks, SCATTER_THREADS, send > receive ? send : receive, stream, a);
}

extern "C" int ep_cuda_launch_scatter(const void *args, int blocks, void *stream) {
    const EpScatterArgs *a = (const EpScatterArgs *)args;
    return a->multiplied ? launch<MULTIPLIED>(*a, blocks, stream)
                         : launch<COPIED>(*a, blocks, stream);
}
