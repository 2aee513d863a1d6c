/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's table: describes each operation to its kernel, and launches it. */
#include "dispatch/latency_cuda.h"
#include "dispatch/shares.h"
#include "handles/handle_cuda.h"
#include "handles/ops.h"
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

static EpStatus refuse_rows(const EpGroup *group, int64_t row_bytes) {
    return ep_fail(EP_ERR_UNSUPPORTED,
                   "rank %d: expected shared memory for rows of %lld bytes, got %d bytes",
                   group->rank, (long long)row_bytes, ep_cuda(group)->shared_bytes);
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
    choose_landing(group, s, &args);
    if (!ep_share_scatter(&args, cuda->shared_bytes, unit)) return refuse_rows(group, s->row_bytes);
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
    if (!ep_share_gather(&args, cuda->shared_bytes)) return refuse_rows(group, g->row_bytes);
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
