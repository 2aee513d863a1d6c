/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's table: describes each operation to its kernel, and launches it. */
#include <stdio.h>
#include <string.h>

#include "handles/handle_cuda.h"
#include "handles/ops.h"

/* ---- order --------------------------------------------------------------------------------- */

/* Operations of one group run in the order of their calls, on whatever streams: the lanes are
 * queues. Within one stream that is so by itself. */
static EpStatus enter_stream(const EpGroup *group, EpStream stream) {
    EpCuda *cuda = ep_cuda(group);
    if (!cuda->last_stream || cuda->last_stream == (cudaStream_t)stream) return EP_OK;
    return ep_cuda_check(group, "cudaStreamWaitEvent",
                         cudaStreamWaitEvent((cudaStream_t)stream, cuda->last, 0));
}

static EpStatus leave_stream(const EpGroup *group, EpStream stream, int launched) {
    EpCuda *cuda = ep_cuda(group);
    EP_TRY(ep_cuda_check(group, "kernel launch", launched));
    cuda->last_stream = (cudaStream_t)stream;
    return ep_cuda_check(group, "cudaEventRecord",
                         cudaEventRecord(cuda->last, (cudaStream_t)stream));
}

/* ---- prepare ------------------------------------------------------------------------------- */

static EpCudaVector vector_of(const EpTensor *t) {
    return t ? (EpCudaVector){t->data, t->type == EP_TYPE_INT64} : (EpCudaVector){NULL, 0};
}

static EpStatus prepare(EpHandle *handle, const EpRouting *routing) {
    const EpGroup *group = handle->group;
    EpCuda *cuda = ep_cuda(group);
    EpCudaHandle *state = handle->backend_state;
    const EpPlanTensors *out = routing->out;
    EpPrepareArgs args = {.group = cuda->device,
                          .plan = ep_cuda_plan(handle),
                          .shape = handle->shape,
                          .top_k = (int32_t)routing->top_k,
                          .num_rows = (int32_t)routing->num_rows,
                          .topk_idx = routing->topk_idx,
                          .idx_is_int64 = routing->idx_type == EP_TYPE_INT64,
                          .num_tokens = {(void *)(uintptr_t)routing->num_tokens,
                                         routing->num_tokens_type == EP_TYPE_INT64},
                          .info = state->info,
                          .notes = cuda->notes};
    if (out) {
        args.counts = vector_of(out->expert_counts);
        args.padded = vector_of(out->expert_padded);
        args.offsets = vector_of(out->expert_offsets);
        args.totals = vector_of(out->totals);
    }
    args.group.op = ep_op_prepare.code;
    EP_TRY(enter_stream(group, routing->stream));
    EP_TRY(leave_stream(group, routing->stream, ep_cuda_launch_prepare(&args, routing->stream)));
    state->prepares++;
    state->num_rows = routing->num_rows, state->top_k = routing->top_k;
    state->exact = routing->num_tokens == NULL;
    return EP_OK;
}

/* ---- movements ----------------------------------------------------------------------------- */

#define MAX_STAGES 16
#define LEAST_STAGES 3
#define STATIC_SHARED_BYTES 9216 /* room for what kernels declare */

static EpStatus count_stages(const EpGroup *group, int64_t record_bytes, int32_t *stages) {
    int64_t fit = (ep_cuda(group)->shared_bytes - STATIC_SHARED_BYTES) / record_bytes;
    *stages = (int32_t)ep_min(fit, MAX_STAGES);
    if (*stages >= LEAST_STAGES) return EP_OK;
    return ep_fail(EP_ERR_UNSUPPORTED,
                   "rank %d: expected records of which %d fit %d bytes of shared memory, got %lld "
                   "bytes each",
                   group->rank, LEAST_STAGES, ep_cuda(group)->shared_bytes,
                   (long long)record_bytes);
}

static EpStatus scatter(EpHandle *handle, const EpScatter *s) {
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
                          .scale_bytes = s->scale_bytes,
                          .rows = s->rows,
                          .topk_weights = s->topk_weights,
                          .scales = s->scales,
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
    EP_TRY(count_stages(group, args.record.bytes, &args.stages));
    args.send_blocks = (int32_t)ep_max(1, ep_min(EP_LANES / 2, cuda->num_sms / 2));
    args.fill_blocks = args.send_blocks;
    args.group.op = s->op->code;
    EP_TRY(enter_stream(group, s->stream));
    return leave_stream(group, s->stream, ep_cuda_launch_scatter(&args, s->stream));
}

static EpStatus gather(EpHandle *handle, const EpGather *g) {
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
    EP_TRY(count_stages(group, args.record.bytes, &args.stages));
    args.stages = (int32_t)ep_min(args.stages, 4);
    int32_t per_sm = args.stages * args.record.bytes * 2 < cuda->shared_bytes ? 2 : 1;
    args.sum_blocks = (int32_t)ep_max(1, ep_min(EP_LANES, per_sm * cuda->num_sms / 2));
    args.reduce_blocks = args.sum_blocks;
    args.group.op = g->op->code;
    EP_TRY(enter_stream(group, g->stream));
    return leave_stream(group, g->stream, ep_cuda_launch_gather(&args, g->stream));
}

/* ---- findings ------------------------------------------------------------------------------ */

static const char *op_name(int32_t code) {
    const EpOp *const ops[] = {&ep_op_prepare, &ep_op_dispatch, &ep_op_combine,
                               &ep_op_dispatch_backward, &ep_op_combine_backward};
    for (size_t i = 0; i < sizeof(ops) / sizeof(*ops); i++)
        if (ops[i]->code == code) return ops[i]->name;
    return "?";
}

static const char *awaited_name(int32_t phase) {
    static const char *const names[] = {"?", "counts", "routes", "data", "room", "the grid"};
    return names[phase >= 1 && phase <= 5 ? phase : 0];
}

static void poll_failure(EpGroup *group) {
    const volatile EpCudaFailure *f = ep_cuda(group)->device.failure;
    if (!f->failed || group->failed != EP_OK) return;
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_TIMEOUT;
    finding.rank = group->rank, finding.peer = f->peer;
    finding.expected = f->expected, finding.seen = f->seen, finding.count = 1;
    strncpy(finding.phase, op_name(f->op), sizeof(finding.phase) - 1);
    ep_fail(EP_ERR_TIMEOUT,
            "rank %d: %s: rank %d did not arrive within %g s (waiting for %s of lane %d: expected "
            "%u, seen %u)",
            group->rank, finding.phase, f->peer, group->timeout, awaited_name(f->phase), f->lane,
            f->expected, f->seen);
    ep_group_fail(group, &finding);
}

static void poll_routing(EpGroup *group) {
    EpCudaNotes *notes = ep_cuda(group)->notes;
    unsigned long long count = __atomic_exchange_n(&notes->bad_count, 0, __ATOMIC_ACQ_REL);
    unsigned long long entry = __atomic_exchange_n(&notes->bad_entry, ~0ull, __ATOMIC_ACQ_REL);
    if (!count) return;
    int64_t top_k = notes->top_k;
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_ROUTING, finding.rank = group->rank;
    finding.token = (int64_t)entry / top_k, finding.k = (int64_t)entry % top_k;
    finding.expected = group->config.num_experts, finding.seen = notes->bad_index;
    finding.count = (int64_t)count;
    strcpy(finding.phase, "prepare");
    ep_group_note(&group->routing, &finding);
}

static void poll_overflow(EpGroup *group) {
    EpCudaNotes *notes = ep_cuda(group)->notes;
    unsigned long long lost = __atomic_exchange_n(&notes->lost, 0, __ATOMIC_ACQ_REL);
    if (!lost) return;
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_OVERFLOW, finding.rank = group->rank;
    finding.expected = notes->capacity, finding.seen = notes->needed;
    finding.count = (int64_t)lost;
    strcpy(finding.phase, "prepare");
    ep_group_note(&group->overflow, &finding);
}

static void poll(EpGroup *group) {
    poll_failure(group);
    poll_routing(group);
    poll_overflow(group);
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

const EpBackendOps ep_backend_cuda = {.id = EP_BACKEND_CUDA,
                                      .name = "cuda",
                                      .measure = ep_cuda_measure,
                                      .open = ep_cuda_open,
                                      .close = ep_cuda_close,
                                      .poll = poll,
                                      .allocate = allocate,
                                      .release = release,
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
                                      .check_pointer = ep_cuda_check_pointer};
