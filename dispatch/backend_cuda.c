/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's table: describes each operation to its kernel, and launches it. */
#include <math.h>

#include "dispatch/latency_cuda.h"
#include "handles/handle_cuda.h"
#include "handles/ops.h"
#include "runtime/cuda_limits.h"
#include "runtime/quant.h"

/* ---- prepare ------------------------------------------------------------------------------- */

static EpStatus prepare(EpHandle *handle, const EpRouting *routing) {
    const EpGroup *group = handle->group;
    EpCudaOrder *order = &ep_cuda(group)->order;
    EpCudaPlace place;
    EpPrepareArgs args;
    int64_t facts[EP_ROUND_FACTS];
    ep_cuda_describe_routing(handle, routing, &args, facts);
    args.group.digest = ep_cuda_digest(handle, &ep_op_prepare, facts, EP_ROUND_FACTS);
    EP_TRY(ep_cuda_place(group, routing->stream, &place));
    EP_TRY(ep_cuda_order_enter(group, order, &place));
    int64_t seen = ep_cuda_steps_seen(handle);
    int launched = ep_cuda_launch_prepare(&args, place.stream);
    EP_TRY(ep_cuda_order_leave(group, order, &place, launched));
    ep_cuda_note_routing(handle, routing, place.captures, seen);
    return EP_OK;
}

/* ---- movements ----------------------------------------------------------------------------- */

#define WANTED_STAGES 6 /* to overlap loads with stores */
#define MOST_STAGES 40  /* more would not be used: few jobs are under way, and one may hold 33 */

#define MANY_BLOCKS 64
#define LARGE_ROW_BYTES 16384

/* How finely blocks divide the work, found by trying. Where there are many blocks, what each has
 * begun when no tokens are left it ends alone, and what all of them have begun arrives at about the
 * same time, while it is waited for in order: so they claim few tokens at once and have few jobs
 * under way. Few blocks have planners that are short of time, and claim as many tokens as these
 * plan at once; so have those of small rows, of which there are more in the same time. */
typedef struct Grain {
    int32_t chunk, ahead; /* tokens, jobs */
} Grain;

static const Grain copied = {2, 4}, summed = {1, 8};

static Grain grain_of(const EpGroup *group, Grain large, int64_t row_bytes) {
    const Grain most = {4, EP_MOST_AHEAD};
    int64_t fold = ep_max(1, (LARGE_ROW_BYTES + row_bytes / 2) / row_bytes);
    if (ep_cuda(group)->device.blocks < MANY_BLOCKS) return most;
    return (Grain){(int32_t)ep_min(most.chunk, fold * large.chunk),
                   (int32_t)ep_min(most.ahead, fold * large.ahead)};
}

/* What jobs of a pipe ask of its shape. */
typedef struct Jobs {
    int64_t width;  /* most loads or stores of one */
    int64_t held;   /* most stages that one holds at once */
    int64_t wanted; /* stages to overlap loads with stores, if pieces can be made that small */
    int32_t ahead;  /* how many are under way */
} Jobs;

/* Stages of whole rows, if that makes enough of them, or of pieces, multiples of `unit` bytes. A
 * planner posts up to four rows at once. */
static EpStatus shape_pipe(const EpGroup *group, int64_t row_bytes, int64_t unit, Jobs jobs,
                           EpPipeShape *shape) {
    int64_t room =
        ep_cuda(group)->shared_bytes - EP_STATIC_SHARED_BYTES - EP_JOB_TABLE_BYTES * jobs.width;
    int64_t wanted = ep_max(jobs.held, ep_max(WANTED_STAGES, ep_min(jobs.wanted, MOST_STAGES)));
    int64_t pieces = 1, bytes = row_bytes;
    while (room / bytes < wanted && bytes > EP_LEAST_PIECE_BYTES)
        bytes = ep_round_up((row_bytes + pieces) / (pieces + 1), unit), pieces++;
    pieces = (row_bytes + bytes - 1) / bytes;
    *shape = (EpPipeShape){.stages = (int32_t)ep_min(MOST_STAGES, room / bytes),
                           .stage_bytes = (int32_t)bytes,
                           .width = (int32_t)jobs.width,
                           .pieces = (int32_t)pieces,
                           .ahead = (int32_t)ep_min(EP_MOST_AHEAD, ep_max(jobs.ahead, 4 * pieces)),
                           .shrink = shape->shrink};
    if (shape->stages >= jobs.held) return EP_OK;
    return ep_fail(EP_ERR_UNSUPPORTED,
                   "rank %d: expected shared memory for %lld pieces of %lld bytes, got %d bytes",
                   group->rank, (long long)jobs.held, (long long)bytes,
                   ep_cuda(group)->shared_bytes);
}

/* How many rows a token moves through each kind of block, in loads and stores, where routing is
 * uniform. */
typedef struct Moves {
    double sent, received;
} Moves;

/* A token's entries: those of experts here and those of others; of how many other ranks these are;
 * and the entries of a row, that is, of those that have the same rank. */
typedef struct Spread {
    double own, other, ranks, row;
} Spread;

static Spread spread_of(const EpGroup *group, int64_t top_k) {
    double ranks = group->size, k = (double)top_k, taken = 1 - pow(1 - 1 / ranks, k);
    return (Spread){k / ranks, k - k / ranks, (ranks - 1) * taken, k / ranks / taken};
}

static Moves scatter_moves(const EpGroup *group, const EpScatterArgs *a) {
    Spread t = spread_of(group, a->top_k);
    double multiplied = a->takes_dots ? 2 * a->top_k : a->top_k;
    double sent = group->size > 1 ? 1 + t.ranks : 0;
    if (a->type) return (Moves){sent, 1 + t.ranks + multiplied};
    double loaded = (double)a->source_row_bytes / (double)a->row_bytes;
    return (Moves){loaded + t.own + t.ranks, t.other + (a->lands ? 0 : t.ranks)};
}

static Moves gather_moves(const EpGroup *group, const EpGatherArgs *a) {
    Spread t = spread_of(group, a->top_k);
    return (Moves){t.other + t.ranks, t.own + t.ranks + 1};
}

/* What a filling block does. Where rows are multiplied a job has a stage for each slot, too, which
 * are loaded together: there should be room for two rows of the usual number of slots. */
static Jobs jobs_to_fill(const EpGroup *group, const EpScatterArgs *a, int32_t ahead) {
    int64_t most = 1 + a->top_k;
    if (!a->type) return (Jobs){a->top_k, 1, 1, ahead};
    return (Jobs){most, most, (int64_t)(2 * (1 + spread_of(group, a->top_k).row) + .5), ahead};
}

/* Blocks that receive. Where there are many, the wire decides how long senders take, so that they
 * need not be more than receivers; but less than a quarter do not fill it. Those that receive also
 * write zeros, where nothing comes. */
static int32_t share_blocks(int32_t blocks, Moves moves) {
    double share = moves.received / (moves.sent + moves.received);
    if (blocks >= MANY_BLOCKS && moves.sent > 0) share = fmin(fmax(share, .5), .75);
    return ep_min(blocks - 1, (int32_t)(blocks * fmax(share, .25) + .5));
}

/* Rows that are only copied may land where they belong, if that is in a window of the group; each
 * rank tells the others where. */
static void choose_landing(const EpGroup *group, const EpScatter *s, EpScatterArgs *args) {
    int64_t offset;
    int window =
        ep_cuda_window_find(ep_cuda(group), s->out_rows, s->out_capacity * s->row_bytes, &offset);
    args->lands = !args->type && window >= 0 && group->size > 1;
    if (args->lands) args->where = (uint64_t)(window + 1) << 40 | (uint64_t)(offset / 16);
}

/* The scales of a quantised token, on its way from those who make them to those who spread them. */
static int64_t made_scale_bytes(EpQuant quant, int64_t elements) {
    int64_t unit = (int64_t)ep_type_bytes(ep_quant_scale_type(quant));
    return ep_round_up(ep_quant_scales(quant, elements) * unit, 16);
}

/* Rows are quantised where they pass through shared memory, by whole blocks: returns of how many
 * bytes pieces of a row are multiples. */
static int64_t describe_quantising(const EpHandle *handle, const EpScatter *s,
                                   EpScatterArgs *args) {
    int64_t size = (int64_t)ep_type_bytes(s->source_type);
    if (s->quant <= EP_QUANT_NONE) return 16;
    args->quant = s->quant;
    args->source_type = (int32_t)s->source_type;
    args->source_row_bytes = s->source_row_bytes;
    args->scales = args->made_scales = handle->workspace;
    args->scale_stride = made_scale_bytes(s->quant, s->row_elements);
    args->send.shrink = size == 4 ? 2 : 1;
    return size * ep_quant_block(s->quant);
}

static EpStatus scatter(EpHandle *handle, const EpScatter *s) {
    if (ep_handle_is_latency(handle)) return ep_cuda_latency_scatter(handle, s);
    const EpGroup *group = handle->group;
    EpCuda *cuda = ep_cuda(group);
    const EpCudaHandle *state = handle->backend_state;
    int64_t weights = s->carries_weights ? state->top_k : 0;
    EpScatterArgs args = {.group = cuda->device,
                          .plan = ep_cuda_plan(handle),
                          .shape = handle->shape,
                          .record = ep_record(s->row_bytes, weights, s->scale_bytes),
                          .top_k = (int32_t)state->top_k,
                          .type = s->weighs || s->takes_dots ? (int32_t)s->type : 0,
                          .row_bytes = s->row_bytes,
                          .source_row_bytes = s->row_bytes,
                          .scale_bytes = s->scale_bytes,
                          .rows = s->rows,
                          .topk_weights = s->topk_weights,
                          .scales = s->scales,
                          .scale_stride = s->scale_bytes,
                          .scale_map = s->scale_map,
                          .carries_weights = s->carries_weights,
                          .weighs = s->weighs,
                          .takes_dots = s->takes_dots,
                          .slot_weights = s->slot_weights,
                          .slot_rows = s->slot_rows,
                          .out_rows = s->out_rows,
                          .out_weights = s->out_weights,
                          .out_scales = s->out_scales,
                          .out_idx = s->out_idx,
                          .idx_is_int64 = s->idx_type == EP_TYPE_INT64,
                          .out_capacity = s->out_capacity};
    int64_t unit = describe_quantising(handle, s, &args);
    /* What is multiplied keeps workers busy rather than planners, however small its rows are. */
    int64_t bytes = args.type ? LARGE_ROW_BYTES : s->row_bytes;
    Grain grain = grain_of(group, args.type ? summed : copied, bytes);
    Grain fill = grain_of(group, summed, bytes);
    choose_landing(group, s, &args);
    args.chunk = grain.chunk;
    args.receivers = share_blocks(cuda->device.blocks, scatter_moves(group, &args));
    Jobs sends = {state->top_k, 1, 1, grain.ahead}, fills = jobs_to_fill(group, &args, fill.ahead);
    EP_TRY(shape_pipe(group, args.source_row_bytes, unit, sends, &args.send));
    EP_TRY(shape_pipe(group, s->row_bytes, 16, fills, &args.fill));
    const int64_t agreed[] = {state->top_k, s->row_bytes, s->type, s->scale_bytes,
                              s->carries_weights};
    args.group.digest = ep_cuda_digest(handle, s->op, agreed, 5);
    EpCudaPlace place;
    EP_TRY(ep_cuda_place(group, s->stream, &place));
    EP_TRY(ep_cuda_order_enter(group, &cuda->order, &place));
    return ep_cuda_order_leave(group, &cuda->order, &place,
                               ep_cuda_launch_scatter(&args, place.stream));
}

static EpStatus gather(EpHandle *handle, const EpGather *g) {
    if (ep_handle_is_latency(handle)) return ep_cuda_latency_gather(handle, g);
    const EpGroup *group = handle->group;
    EpCuda *cuda = ep_cuda(group);
    const EpCudaHandle *state = handle->backend_state;
    EpGatherArgs args = {.group = cuda->device,
                         .plan = ep_cuda_plan(handle),
                         .shape = handle->shape,
                         .record = ep_record(g->row_bytes, g->carries_values ? state->top_k : 0, 0),
                         .top_k = (int32_t)state->top_k,
                         .type = (int32_t)g->type,
                         .row_bytes = g->row_bytes,
                         .rows = g->rows,
                         .weighs = g->weighs,
                         .carries_values = g->carries_values,
                         .slot_weights = g->slot_weights,
                         .slot_values = g->slot_values,
                         .out_rows = g->out_rows,
                         .out_num_rows = g->out_num_rows,
                         .out_values = g->out_values};
    Grain grain = grain_of(group, summed, g->row_bytes);
    args.chunk = grain.chunk;
    args.receivers = share_blocks(cuda->device.blocks, gather_moves(group, &args));
    Jobs jobs = {state->top_k, state->top_k, 1, grain.ahead};
    EP_TRY(shape_pipe(group, g->row_bytes, 16, jobs, &args.pipe));
    const int64_t agreed[] = {state->top_k, g->row_bytes, g->type, g->carries_values};
    args.group.digest = ep_cuda_digest(handle, g->op, agreed, 4);
    EpCudaPlace place;
    EP_TRY(ep_cuda_place(group, g->stream, &place));
    EP_TRY(ep_cuda_order_enter(group, &cuda->order, &place));
    return ep_cuda_order_leave(group, &cuda->order, &place,
                               ep_cuda_launch_gather(&args, place.stream));
}

/* ---- opening ------------------------------------------------------------------------------- */

/* Kernels are loaded and given their shared memory here, so that no call has to. */
static EpStatus open(EpGroup *group) {
    EP_TRY(ep_cuda_open(group));
    int bytes = ep_cuda(group)->shared_bytes;
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_prepare(bytes)));
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_scatter(bytes)));
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_gather(bytes)));
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_latency_scatter(bytes)));
    return ep_cuda_check(group, "loading kernels", ep_cuda_open_latency_gather(bytes));
}

/* ---- table --------------------------------------------------------------------------------- */

static void *allocate(const EpGroup *group, size_t bytes) {
    void *memory = NULL;
    return ep_cuda_check(group, "cudaMalloc", cudaMalloc(&memory, bytes)) == EP_OK ? memory : NULL;
}

static void release(const EpGroup *group, void *memory) {
    (void)group;
    (void)cudaFree(memory);
}

/* A step's scales: of the narrowest type, the most elements of a row. */
static int64_t workspace_bytes(const EpPlanShape *shape, const EpGroupConfig *config) {
    if (shape->quant == EP_QUANT_NONE || shape->mode == EP_MODE_LATENCY) return 0;
    return shape->max_tokens * made_scale_bytes(shape->quant, config->max_row_bytes / 2);
}

const EpBackendOps ep_backend_cuda = {.id = EP_BACKEND_CUDA,
                                      .name = "cuda",
                                      .offers = EP_CUDA_OFFERS,
                                      .measure = ep_cuda_measure,
                                      .open = open,
                                      .close = ep_cuda_close,
                                      .poll = ep_cuda_poll,
                                      .finish = ep_cuda_finish,
                                      .open_window = ep_cuda_open_window,
                                      .close_window = ep_cuda_close_window,
                                      .allocate = allocate,
                                      .release = release,
                                      .workspace_bytes = workspace_bytes,
                                      .plan_bytes = ep_cuda_plan_bytes,
                                      .format_plan = ep_cuda_format_plan,
                                      .check_plan = ep_cuda_check_plan,
                                      .retire_plan = ep_cuda_retire_plan,
                                      .adopt_plan = ep_cuda_adopt_plan,
                                      .read_plan = ep_cuda_read_plan,
                                      .prepare = prepare,
                                      .scatter = scatter,
                                      .gather = gather,
                                      .enter = ep_cuda_enter,
                                      .leave = ep_cuda_leave,
                                      .check_pointer = ep_cuda_check_pointer,
                                      .buffer_bytes = ep_cuda_buffer_bytes,
                                      .open_buffers = ep_cuda_open_buffers,
                                      .close_buffers = ep_cuda_close_buffers};
