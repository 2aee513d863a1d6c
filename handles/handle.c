/* SPDX-License-Identifier: Apache-2.0 */
/* A handle's life, the plans that calls name, and the first checks of every operation. */
#include "handles/handle.h"

#include "runtime/args.h"
#include "runtime/log.h"

#define PLAN_ALIGNMENT 64

/* ---- life ---------------------------------------------------------------------------------- */

static EpStatus open_plan(const EpCall *call, EpHandle *handle) {
    EpGroup *group = handle->group;
    int before = ep_group_enter(group, call->name);
    EpStatus status = group->backend->open_plan(handle, call);
    ep_group_leave(group, before);
    return status;
}

static void destroy_owned(void *handle) {
    ep_handle_destroy(handle);
}

EpStatus ep_handle_create(EpGroup *group, const EpHandleConfig *config, EpHandle **out) {
    EpCall call = {"ep_handle_create", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    if (!out) return ep_refuse(&call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EpPlanShape shape;
    EpHandleConfig read;
    EP_TRY(ep_group_handle_shape(&call, group, config, &read, &shape));
    EpHandle *handle = ep_object_create(EP_OBJECT_HANDLE, sizeof(*handle));
    if (!handle) return ep_refuse(&call, EP_ERR_NO_MEMORY, "out", "out of memory");
    handle->group = group;
    handle->shape = shape;
    handle->top_k = read.top_k;
    handle->id = read.id;
    handle->grad_quant = read.grad_quant;
    handle->config = ep_plan_config(&shape, ep_handle_top_k(handle));
    handle->bytes = group->backend->plan_bytes(&shape);
    EpStatus status = read.plans == EP_PLANS_OWNED ? open_plan(&call, handle) : EP_OK;
    if (status != EP_OK) {
        group->backend->close_plan(handle);
        ep_object_retire(&handle->object);
        return status;
    }
    ep_owned_add(&group->handles, &handle->owned, handle, destroy_owned);
    *out = handle;
    return EP_OK;
}

/* The group's sets of buffers go on without the operation. */
static void drop_pending(EpHandle *handle, const EpCall *call) {
    EpGroup *group = handle->group;
    const EpPending *pending = &handle->pending;
    if (pending->kind != EP_PENDING_NONE && !pending->place.is_captured && group->backend->drop &&
        group->failed == EP_OK) {
        int before = ep_group_enter(group, call->name);
        group->backend->drop(handle);
        ep_group_leave(group, before);
    }
    ep_flight_end(handle);
}

/* Waits for nobody, and may run while a stream is being captured. */
void ep_handle_destroy(EpHandle *handle) {
    EpCall call = {"ep_handle_destroy", -1};
    if (!handle || ep_object_check(&call, "handle", handle, EP_OBJECT_HANDLE) != EP_OK) return;
    handle->group->backend->close_plan(handle);
    drop_pending(handle, &call);
    ep_owned_remove(&handle->owned);
    ep_object_retire(&handle->object);
}

EpStatus ep_handle_plan(const EpHandle *handle, EpTensor *plan) {
    EpCall call = {"ep_handle_plan", -1};
    EP_TRY(ep_object_check(&call, "handle", handle, EP_OBJECT_HANDLE));
    call.rank = handle->group->rank;
    if (!plan) return ep_refuse(&call, EP_ERR_NULL, "plan", "expected a pointer, got NULL");
    if (!handle->own.memory)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "handle",
                         "expected one with a plan of its own, got one with EP_PLANS_NAMED");
    *plan = ep_tensor_1d(handle->own.memory, EP_TYPE_UINT8, handle->bytes);
    return EP_OK;
}

/* Check handle and group. Sets call->rank and call->group. */
static EpStatus enter(EpCall *call, const EpHandle *handle) {
    EP_TRY(ep_object_check(call, "handle", handle, EP_OBJECT_HANDLE));
    call->rank = handle->group->rank;
    handle->group->backend->poll(handle->group);
    EP_TRY(ep_group_usable(handle->group));
    call->group = handle->group;
    EP_TRACE("%s: handle %d", call->name, handle->id);
    return EP_OK;
}

EpStatus ep_handle_info(const EpHandle *handle, EpHandleInfo *out) {
    EpCall call = {"ep_handle_info", -1};
    EpStep step;
    EP_TRY(enter(&call, handle));
    call.group = NULL; /* nobody waits for it */
    EP_TRY(ep_pending_check(&call, &handle->pending, EP_PENDING_NONE));
    if (!handle->own.memory)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "handle",
                         "expected one with a plan of its own, since the numbers of named plans "
                         "are outputs of ep_prepare, got one with EP_PLANS_NAMED");
    EP_TRY(ep_handle_read(&call, handle, handle->own, &step));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpHandleInfo, expert_offsets),
                                 sizeof(*out)));
    if (!step.known)
        return ep_refuse(&call, EP_ERR_NOT_PREPARED, "handle",
                         "expected ep_prepare to have finished on its stream, got it under way");
    step.info.mode = handle->shape.mode;
    ep_write_struct(out, &step.info);
    return EP_OK;
}

/* ---- plans --------------------------------------------------------------------------------- */

EpStatus ep_handle_find_plan(const EpCall *call, const EpHandle *handle, const EpTensor *plan,
                             EpPlanRef *out) {
    const EpGroup *group = handle->group;
    *out = handle->own;
    if (!plan && handle->own.memory) return EP_OK;
    if (!plan)
        return ep_refuse(call, EP_ERR_NULL, "plan",
                         "expected a tensor, since the handle has no plan of its own "
                         "(EP_PLANS_NAMED), got NULL");
    EP_TRY(ep_arg_tensor(call, "plan", plan, 1));
    EP_TRY(ep_arg_type(call, "plan", plan, EP_TYPE_UINT8));
    if (plan->shape[0] < handle->bytes)
        return ep_refuse(call, EP_ERR_BUFFER_SIZE, "plan",
                         "expected at least %lld bytes (ep_handle_memory), got %lld",
                         (long long)handle->bytes, (long long)plan->shape[0]);
    EP_TRY(ep_arg_alignment(call, "plan", plan, PLAN_ALIGNMENT));
    if (group->backend->check_pointer && group->settings.check != EP_CHECK_NONE)
        EP_TRY(group->backend->check_pointer(group, call, "plan", plan->data));
    *out = (EpPlanRef){plan->data, 1};
    return EP_OK;
}

/* Refuse the handle's own plan where it does not exist yet. */
static EpStatus check_own(const EpCall *call, const EpHandle *handle, const EpStep *step) {
    if (handle->deferred.pending)
        return ep_refuse(
            call, EP_ERR_NOT_PREPARED, "handle",
            "expected ep_dispatch first, which makes the plan in latency mode, got only "
            "ep_prepare");
    if (step->prepared) return EP_OK;
    return ep_refuse(call, EP_ERR_NOT_PREPARED, "handle",
                     "expected a prepared handle, got one without a plan");
}

EpStatus ep_handle_read(const EpCall *call, const EpHandle *handle, EpPlanRef plan, EpStep *step) {
    *step = (EpStep){.info = EP_HANDLE_INFO_INIT};
    EP_TRY(handle->group->backend->read_plan(handle, call, plan, step));
    if (!plan.is_named) EP_TRY(check_own(call, handle, step));
    /* num_tokens may lie in device memory, and the host does not wait for it. */
    if (ep_handle_is_latency(handle)) step->exact = 1;
    return EP_OK;
}

/* ---- entering an operation ----------------------------------------------------------------- */

EpStatus ep_handle_enter(EpCall *call, const EpHandle *handle) {
    EP_TRY(enter(call, handle));
    return ep_pending_check(call, &handle->pending, EP_PENDING_NONE);
}

EpStatus ep_handle_enter_receive(EpCall *call, const EpHandle *handle, EpPendingKind kind) {
    EP_TRY(enter(call, handle));
    EP_TRY(ep_handle_check_phases(call, handle));
    return ep_pending_check(call, &handle->pending, kind);
}

EpStatus ep_handle_check_phases(const EpCall *call, const EpHandle *handle) {
    if (ep_handle_is_latency(handle)) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "handle",
                     "expected one in latency mode, where operations have two phases, got one in "
                     "throughput mode");
}
