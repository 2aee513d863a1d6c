/* SPDX-License-Identifier: Apache-2.0 */
/* Describes and launches kernels: the part common to all operations. */
#include "handles/cuda/handle.h"
#include "handles/masks/cuda/mask.h"
#include "handles/operation.h"
#include "runtime/cuda/digest.h"

uint32_t ep_cuda_digest(const EpHandle *handle, const EpOp *op, const int64_t *values, int count) {
    return ep_digest_of(op, handle->id, values, count);
}

static EpCudaVector vector_of(const EpTensor *t) {
    return t ? (EpCudaVector){t->data, t->type == EP_TYPE_INT64} : (EpCudaVector){NULL, 0};
}

/* List the facts of ep_prepare. */
static void list_facts(const EpPlanShape *shape, const EpRouting *routing,
                       int64_t facts[EP_OP_FACTS]) {
    facts[0] = routing->top_k, facts[1] = shape->alignment, facts[2] = shape->layout;
    facts[3] = routing->block_rows ? routing->block_rows : ep_agreed_rows(shape);
    facts[4] = shape->quant;
}

EpCudaGroup ep_cuda_launch_group(const EpHandle *handle) {
    EpCudaGroup group = ep_cuda(handle->group)->device;
    if (handle->shape.num_sms != EP_DEFAULT)
        group.blocks = (int32_t)ep_min(group.blocks, handle->shape.num_sms);
    group.partitions = ep_cuda_partitions(group.blocks);
    return group;
}

void ep_cuda_describe_routing(const EpHandle *handle, const EpRouting *routing, EpPrepareArgs *args,
                              int64_t facts[EP_OP_FACTS]) {
    EpCuda *cuda = ep_cuda(handle->group);
    const EpCudaOwn *own = routing->plan.is_named ? NULL : handle->own_state;
    const EpPlanTensors *out = routing->out;
    EpCudaGroup group = ep_cuda_launch_group(handle);
    int32_t rows = (int32_t)routing->num_rows, partitions = group.partitions;
    *args = (EpPrepareArgs){.group = group,
                            .plan = ep_cuda_plan(handle, routing->plan, routing->top_k, -1, 0, 0),
                            .shape = handle->shape,
                            .owners = ep_placement_owners(&handle->group->placement),
                            .top_k = (int32_t)routing->top_k,
                            .num_rows = rows,
                            .partition_tokens = rows / partitions + (rows % partitions != 0),
                            .topk_idx = routing->topk_idx,
                            .idx_is_int64 = routing->idx_type == EP_TYPE_INT64,
                            .num_tokens = {(void *)(uintptr_t)routing->num_tokens,
                                           routing->num_tokens_type == EP_TYPE_INT64},
                            .info = own ? own->info : NULL,
                            .errors = cuda->errors,
                            .stats = routing->stats,
                            .copies = ep_copy_table(&handle->group->copies)};
    args->plan.use.is_read = 0;
    if (out) {
        args->counts = vector_of(out->expert_counts);
        args->padded = vector_of(out->expert_padded);
        args->offsets = vector_of(out->expert_offsets);
        args->totals = vector_of(out->totals);
        args->source_counts = vector_of(out->source_counts);
        args->recv_rows = vector_of(out->recv_rows);
        args->needed_rows = vector_of(out->needed_rows);
        args->dropped_slots = vector_of(out->dropped_slots);
        args->source_rows = vector_of(out->source_rows);
        args->has_offset_end =
            out->expert_offsets && out->expert_offsets->shape[0] > handle->shape.num_local;
    }
    list_facts(&handle->shape, routing, facts);
    args->group.facts = ep_facts_pack(facts);
}

EpStatus ep_cuda_refuse_rows(const EpGroup *group, int64_t row_bytes) {
    return ep_fail(EP_ERR_UNSUPPORTED,
                   "rank %d: expected shared memory for rows of %lld bytes, got %d bytes",
                   group->rank, (long long)row_bytes, ep_cuda(group)->shared_bytes);
}

/* ---- launching ----------------------------------------------------------------------------- */

/* Order the stream after earlier operations. Whole operations and send phases keep the group's
 * order. Receive phases follow their send phase, and the next operation of this turn follows
 * them. */
EpStatus ep_cuda_launch_enter(const EpHandle *handle, const EpCudaLaunch *l,
                              const EpCudaStream *stream) {
    const EpGroup *group = handle->group;
    if (l->phase != EP_PHASE_RECEIVE)
        EP_TRY(ep_cuda_order_enter(group, &ep_cuda(group)->order, stream));
    return l->own ? ep_cuda_order_enter(group, l->own, stream) : EP_OK;
}

/* Order later operations after this launch. */
EpStatus ep_cuda_launch_leave(const EpHandle *handle, const EpCudaLaunch *l,
                              const EpCudaStream *stream, int launched) {
    const EpGroup *group = handle->group;
    if (l->phase != EP_PHASE_RECEIVE)
        EP_TRY(ep_cuda_order_leave(group, &ep_cuda(group)->order, stream, launched));
    if (l->own && l->phase != EP_PHASE_BOTH)
        return ep_cuda_order_leave(group, l->own, stream, launched);
    if (l->own) ep_cuda_order_forget(l->own, stream); /* the group's order is enough */
    return EP_OK;
}

/* Where late ranks are cut, operations have a look at who is. */
static EpStatus follow_cuts(const EpHandle *handle, const EpCudaStream *stream) {
    EpGroup *group = handle->group;
    if (group->config.on_late != EP_LATE_MASK) return EP_OK;
    ep_cuda_poll(group);
    EP_TRY(ep_group_usable(group));
    if (!ep_handle_is_latency(handle)) return ep_refuse_cuts(group);
    return ep_cuda_follow_cuts(group, stream);
}

EpStatus ep_cuda_launch(const EpHandle *handle, const EpCudaLaunch *l) {
    EpCudaStream stream;
    EP_TRY(ep_cuda_stream(handle->group, l->stream, &stream));
    if (!l->drops) EP_TRY(follow_cuts(handle, &stream));
    EP_TRY(ep_cuda_launch_enter(handle, l, &stream));
    EpCudaOwn *own = l->routing && !l->routing->plan.is_named ? handle->own_state : NULL;
    int64_t seen = own ? ep_cuda_steps_seen(own) : 0;
    int launched = l->launch(l->args, l->blocks, stream.stream);
    EP_TRY(ep_cuda_launch_leave(handle, l, &stream, launched));
    if (own) ep_cuda_routing_issued(own, l->routing, stream.captures, seen);
    return EP_OK;
}
