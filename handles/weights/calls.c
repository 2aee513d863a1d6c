/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of weights: check the arguments, describe the operation, hand it to the backend.
 */
#include <stdio.h>

#include "handles/operation.h"
#include "handles/weights/weight.h"

#define WORKSPACE_ALIGNMENT 64
#define ALIGNMENT 16
#define SCALE_ALIGNMENT 4

/** A call on a weight while its arguments are checked. Sentences name the weight. */
typedef struct WeightCall {
    EpCall call;
    const char *function;
    char name[EP_WEIGHT_NAME_BYTES + 32];
} WeightCall;

static EpStatus begin(WeightCall *c, const char *name, const EpWeight *weight) {
    c->function = name;
    c->call = (EpCall){name, -1};
    EP_TRY(ep_object_check(&c->call, "weight", weight, EP_OBJECT_WEIGHT));
    snprintf(c->name, sizeof(c->name), "%s: %s", name, weight->name);
    c->call = (EpCall){c->name, weight->comm->world.rank};
    return EP_OK;
}

static int start(const WeightCall *c, const EpWeight *weight, EpGroup *group) {
    return ep_group_start(group, &(EpActivity){c->function, "weight", weight->number, -1});
}

static EpStatus check_usable(const EpWeight *weight, EpGroup *group) {
    return ep_mesh_comm_explain(weight->comm, group, ep_group_usable(group));
}

static EpStatus check_tensor(const WeightCall *c, const char *argument, const EpTensor *t,
                             EpType type, int32_t ndim, const int64_t *shape, int64_t unit) {
    EP_TRY(ep_arg_tensor(&c->call, argument, t, ndim));
    EP_TRY(ep_arg_type(&c->call, argument, t, type));
    for (int32_t d = 0; d < ndim; d++)
        EP_TRY(ep_arg_dim(&c->call, argument, t, d, shape[d], "size"));
    return ep_arg_alignment(&c->call, argument, t, unit);
}

static EpStatus check_workspace(const WeightCall *c, const EpTensor *t, int64_t bytes, void **out) {
    *out = NULL;
    if (!t && bytes == 0) return EP_OK;
    EP_TRY(ep_arg_tensor(&c->call, "workspace", t, 1));
    EP_TRY(ep_arg_type(&c->call, "workspace", t, EP_TYPE_UINT8));
    if (t->shape[0] < bytes)
        return ep_refuse(&c->call, EP_ERR_BUFFER_SIZE, "workspace",
                         "expected at least %lld bytes, got %lld", (long long)bytes,
                         (long long)t->shape[0]);
    EP_TRY(ep_arg_alignment(&c->call, "workspace", t, WORKSPACE_ALIGNMENT));
    *out = t->data;
    return EP_OK;
}

/* ---- gather -------------------------------------------------------------------------------- */

static EpStatus check_scales(const WeightCall *c, const EpWeightView *view,
                             const EpTensor *scales) {
    const EpWeightSizes *sizes = &view->sizes;
    if (view->format.bits)
        return check_tensor(c, "scales", scales, sizes->scale_type, sizes->ndim, sizes->scale_shape,
                            SCALE_ALIGNMENT);
    if (!scales) return EP_OK;
    return ep_refuse(&c->call, EP_ERR_UNSUPPORTED, "scales",
                     "expected NULL where nothing is quantised, got a tensor");
}

EpStatus ep_weight_gather(EpWeight *weight, const EpWeightForm *form, const EpTensor *shard,
                          const EpTensor *workspace, EpStream stream, const EpTensor *out,
                          const EpTensor *scales) {
    WeightCall c;
    EpWeightView view;
    EP_TRY(begin(&c, "ep_weight_gather", weight));
    EpWeightGather gather = {.weight = weight, .view = &view, .stream = stream};
    EpGroup *group = weight->gathers;
    const EpSharding *s = &weight->sharding;
    EP_TRY(check_usable(weight, group));
    c.call.group = group;
    EP_TRY(ep_weight_view(&c.call, weight, form, &view));
    EP_TRY(check_tensor(&c, "shard", shard, weight->config.type, s->ndim, s->stored, ALIGNMENT));
    EP_TRY(check_workspace(&c, workspace, view.sizes.gather_workspace, &gather.workspace));
    EP_TRY(check_tensor(&c, "out", out, view.sizes.type, s->ndim, view.sizes.shape, ALIGNMENT));
    EP_TRY(check_scales(&c, &view, scales));
    EP_TRY(ep_arg_memory(&c.call, group, "shard", shard));
    EP_TRY(ep_arg_memory(&c.call, group, "out", out));
    gather.shard = shard->data, gather.out = out->data;
    gather.scales = scales ? scales->data : NULL;
    int before = start(&c, weight, group);
    EpStatus status = group->backend->gather_weight(&gather);
    ep_group_stop(group, before, status);
    return ep_mesh_comm_explain(weight->comm, group, status);
}

/* ---- reduce -------------------------------------------------------------------------------- */

EpStatus ep_weight_reduce(EpWeight *weight, const EpTensor *grad, int accumulate,
                          const EpTensor *workspace, EpStream stream, const EpTensor *out) {
    WeightCall c;
    EP_TRY(begin(&c, "ep_weight_reduce", weight));
    EpWeightReduce reduce = {.weight = weight, .accumulate = accumulate, .stream = stream};
    EpGroup *group = weight->reduces;
    const EpSharding *s = &weight->sharding;
    EpWeightView view;
    EP_TRY(check_usable(weight, group));
    if (weight->replicates) EP_TRY(check_usable(weight, weight->replicates));
    c.call.group = group;
    EP_TRY(ep_weight_view(&c.call, weight, NULL, &view));
    EP_TRY(check_tensor(&c, "grad", grad, weight->config.grad_type, s->ndim, s->used, ALIGNMENT));
    if (accumulate != 0 && accumulate != 1)
        return ep_refuse(&c.call, EP_ERR_RANGE, "accumulate", "expected 0 or 1, got %d",
                         accumulate);
    EP_TRY(check_workspace(&c, workspace, view.sizes.reduce_workspace, &reduce.workspace));
    EP_TRY(
        check_tensor(&c, "out", out, weight->config.reduced_type, s->ndim, s->stored, ALIGNMENT));
    EP_TRY(ep_arg_memory(&c.call, group, "grad", grad));
    EP_TRY(ep_arg_memory(&c.call, group, "out", out));
    reduce.grad = grad->data, reduce.out = out->data;
    int before = start(&c, weight, group);
    EpStatus status = group->backend->reduce_weight(&reduce);
    /* Not ep_group_stop: the other group may be what has failed. */
    ep_group_leave(group, before);
    ep_record_end(&group->recorder, status);
    if (group->failed == EP_OK && weight->replicates) group = weight->replicates;
    return ep_mesh_comm_explain(weight->comm, group, status);
}

/* ---- amax ---------------------------------------------------------------------------------- */

EpStatus ep_weight_amax(EpWeight *weight, EpAmaxScope scope, EpStream stream,
                        const EpTensor *amax) {
    WeightCall c;
    EP_TRY(begin(&c, "ep_weight_amax", weight));
    EpGroup *group = weight->maximises[scope == EP_AMAX_EXPERT];
    EP_TRY(check_usable(weight, group));
    c.call.group = group;
    if (scope != EP_AMAX_TENSOR && scope != EP_AMAX_EXPERT)
        return ep_refuse(&c.call, EP_ERR_RANGE, "scope", "expected an EpAmaxScope, got %d",
                         (int)scope);
    if (scope == EP_AMAX_EXPERT && weight->config.kind != EP_TENSOR_EXPERT_WEIGHT)
        return ep_refuse(&c.call, EP_ERR_UNSUPPORTED, "scope",
                         "expected EP_AMAX_TENSOR for a weight outside the experts, got "
                         "EP_AMAX_EXPERT");
    int64_t count = scope == EP_AMAX_EXPERT ? weight->sharding.stored[0] : 1;
    EP_TRY(ep_arg_tensor(&c.call, "amax", amax, 1));
    EP_TRY(ep_arg_float(&c.call, "amax", amax));
    EP_TRY(ep_arg_dim(&c.call, "amax", amax, 0, count, "size"));
    EP_TRY(ep_arg_memory(&c.call, group, "amax", amax));
    EpWeightAmax reduction = {.weight = weight,
                              .scope = scope,
                              .group = group,
                              .amax = amax->data,
                              .count = count,
                              .stream = stream};
    int before = start(&c, weight, group);
    EpStatus status = group->backend->reduce_amax(&reduction);
    ep_group_stop(group, before, status);
    return ep_mesh_comm_explain(weight->comm, group, status);
}
