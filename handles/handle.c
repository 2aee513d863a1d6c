/* SPDX-License-Identifier: Apache-2.0 */
/* A handle's life, its plan's numbers for users, and the first checks of every operation. */
#include "handles/handle.h"

#include "runtime/log.h"

/* ---- life ---------------------------------------------------------------------------------- */

static EpStatus check_memory(const EpCall *call, const EpGroup *group, const void *memory,
                             size_t bytes, int64_t needed) {
    if ((uintptr_t)memory % 64)
        return ep_refuse(call, EP_ERR_ADDRESS, "memory", "expected a multiple of 64, got %p",
                         memory);
    if (bytes < (size_t)needed)
        return ep_refuse(call, EP_ERR_BUFFER_SIZE, "bytes", "expected at least %lld, got %zu",
                         (long long)needed, bytes);
    if (!group->backend->check_pointer) return EP_OK;
    return group->backend->check_pointer(group, call, "memory", memory);
}

static void link_handle(EpHandle *handle) {
    EpGroup *group = handle->group;
    handle->next = group->handles;
    if (handle->next) handle->next->previous = handle;
    group->handles = handle;
}

static void unlink_handle(EpHandle *handle) {
    if (handle->previous)
        handle->previous->next = handle->next;
    else
        handle->group->handles = handle->next;
    if (handle->next) handle->next->previous = handle->previous;
}

static void release_memory(EpHandle *handle) {
    if (!handle->owns_memory) return;
    handle->group->backend->release(handle->group, handle->memory);
    handle->group->library_bytes -= handle->bytes;
    handle->owns_memory = 0;
}

static EpStatus attach_memory(const EpCall *call, EpHandle *handle, void *memory, size_t bytes) {
    EpGroup *group = handle->group;
    handle->bytes = group->backend->plan_bytes(&handle->shape);
    if (memory) EP_TRY(check_memory(call, group, memory, bytes, handle->bytes));
    handle->memory = memory ? memory : group->backend->allocate(group, (size_t)handle->bytes);
    if (!handle->memory)
        return ep_refuse(call, EP_ERR_NO_MEMORY, "memory", "expected %lld bytes, got none",
                         (long long)handle->bytes);
    handle->owns_memory = !memory;
    if (!memory) group->library_bytes += handle->bytes;
    return group->backend->format_plan(handle);
}

static EpStatus attach_workspace(const EpCall *call, EpHandle *handle) {
    EpGroup *group = handle->group;
    int64_t bytes = ep_workspace_bytes(group->backend, &handle->shape, &group->config);
    if (!bytes) return EP_OK;
    handle->workspace = group->backend->allocate(group, (size_t)bytes);
    if (!handle->workspace)
        return ep_refuse(call, EP_ERR_NO_MEMORY, "config", "expected %lld bytes, got none",
                         (long long)bytes);
    handle->workspace_bytes = bytes;
    group->library_bytes += bytes;
    return EP_OK;
}

static void release_workspace(EpHandle *handle) {
    if (!handle->workspace) return;
    handle->group->backend->release(handle->group, handle->workspace);
    handle->group->library_bytes -= handle->workspace_bytes;
    handle->workspace = NULL;
}

/* Open a handle's buffers in latency mode. This is collective, so ranks whose handle has failed
 * (`mine`) take part, too. */
static EpStatus open_buffers(const EpCall *call, EpHandle *handle, EpStatus mine) {
    EpGroup *group = handle->group;
    if (!ep_handle_is_latency(handle)) return mine;
    EpStatus status = group->backend->open_buffers(handle, call, mine);
    if (status != EP_OK) return status;
    handle->buffer_bytes = group->backend->buffer_bytes(&handle->shape, &group->config);
    group->library_bytes += handle->buffer_bytes;
    return EP_OK;
}

static void close_buffers(EpHandle *handle) {
    if (!ep_handle_is_latency(handle)) return;
    handle->group->backend->close_buffers(handle);
    handle->group->library_bytes -= handle->buffer_bytes;
    handle->buffer_bytes = 0;
}

EpStatus ep_handle_create(EpGroup *group, const EpHandleConfig *config, void *memory, size_t bytes,
                          EpHandle **out) {
    EpCall call = {"ep_handle_create", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    if (!out) return ep_refuse(&call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EpPlanShape shape;
    EP_TRY(ep_group_handle_shape(&call, group, config, &shape));
    EpHandle *handle = ep_object_create(EP_OBJECT_HANDLE, sizeof(*handle));
    if (!handle) return ep_refuse(&call, EP_ERR_NO_MEMORY, "out", "out of memory");
    handle->group = group;
    handle->shape = shape;
    handle->top_k = config ? config->top_k : EP_DEFAULT;
    handle->ordinal = group->handles_created;
    int before = ep_group_enter(group, call.name);
    EpStatus status = attach_workspace(&call, handle);
    if (status == EP_OK) status = attach_memory(&call, handle, memory, bytes);
    status = open_buffers(&call, handle, status);
    if (status != EP_OK) {
        if (handle->memory) group->backend->retire_plan(handle);
        close_buffers(handle);
        release_workspace(handle);
        release_memory(handle);
    }
    ep_group_leave(group, before);
    if (status != EP_OK) {
        ep_object_retire(&handle->object);
        return status;
    }
    group->handles_created++;
    link_handle(handle);
    *out = handle;
    return EP_OK;
}

/* Move a handle to `memory`, which must hold its plan. */
static EpStatus rebind(const EpCall *call, EpHandle *handle, void *memory, size_t bytes) {
    EP_TRY(check_memory(call, handle->group, memory, bytes, handle->bytes));
    EP_TRY(handle->group->backend->check_plan(handle, call->name, memory));
    if (memory != handle->memory) release_memory(handle);
    handle->memory = memory;
    return handle->group->backend->adopt_plan(handle);
}

EpStatus ep_handle_bind(EpHandle *handle, void *memory, size_t bytes) {
    EpCall call = {"ep_handle_bind", -1};
    EP_TRY(ep_object_check(&call, "handle", handle, EP_OBJECT_HANDLE));
    call.rank = handle->group->rank;
    if (!memory) return ep_refuse(&call, EP_ERR_NULL, "memory", "expected a pointer, got NULL");
    EP_TRY(ep_pending_check(&call, &handle->pending, EP_PENDING_NONE));
    int before = ep_group_enter(handle->group, call.name);
    EpStatus status = rebind(&call, handle, memory, bytes);
    ep_group_leave(handle->group, before);
    return status;
}

void ep_handle_destroy(EpHandle *handle) {
    EpCall call = {"ep_handle_destroy", -1};
    if (!handle || ep_object_check(&call, "handle", handle, EP_OBJECT_HANDLE) != EP_OK) return;
    int before = ep_group_enter(handle->group, call.name);
    handle->group->backend->retire_plan(handle);
    close_buffers(handle);
    release_workspace(handle);
    release_memory(handle);
    ep_group_leave(handle->group, before);
    unlink_handle(handle);
    ep_object_retire(&handle->object);
}

EpStatus ep_handle_info(const EpHandle *handle, EpHandleInfo *out) {
    EpCall call = {"ep_handle_info", -1};
    EpStep step;
    EP_TRY(ep_handle_enter_prepared(&call, handle, &step));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpHandleInfo, expert_offsets),
                                 sizeof(*out)));
    if (!step.known)
        return ep_refuse(&call, EP_ERR_NOT_PREPARED, "handle",
                         "expected ep_prepare to have finished on its stream, got it under way");
    step.info.mode = handle->shape.mode;
    ep_write_struct(out, &step.info);
    return EP_OK;
}

/* ---- entering an operation ----------------------------------------------------------------- */

/* Check handle, group and memory. Sets call->rank. */
static EpStatus enter(EpCall *call, const EpHandle *handle) {
    EP_TRY(ep_object_check(call, "handle", handle, EP_OBJECT_HANDLE));
    call->rank = handle->group->rank;
    handle->group->backend->poll(handle->group);
    EP_TRY(ep_group_usable(handle->group));
    EP_TRACE("%s: handle %d", call->name, handle->ordinal);
    return handle->group->backend->check_plan(handle, call->name, handle->memory);
}

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

EpStatus ep_handle_enter_prepared(EpCall *call, const EpHandle *handle, EpStep *step) {
    EP_TRY(ep_handle_enter(call, handle));
    return ep_handle_read(call, handle, step);
}

EpStatus ep_handle_read(const EpCall *call, const EpHandle *handle, EpStep *step) {
    *step = (EpStep){.info = EP_HANDLE_INFO_INIT};
    EP_TRY(handle->group->backend->read_plan(handle, step));
    if (handle->deferred.pending)
        return ep_refuse(
            call, EP_ERR_NOT_PREPARED, "handle",
            "expected ep_dispatch first, which makes the plan in latency mode, got only "
            "ep_prepare");
    if (!step->prepared)
        return ep_refuse(call, EP_ERR_NOT_PREPARED, "handle",
                         "expected a prepared handle, got one without a plan");
    /* num_tokens may lie in device memory, and the host does not wait for it. */
    if (ep_handle_is_latency(handle)) step->exact = 1;
    return EP_OK;
}
