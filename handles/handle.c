/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/handle.h"

#include "runtime/log.h"

static int64_t inherit(int64_t value, int64_t standard) {
    return value == EP_DEFAULT ? standard : value;
}

static EpStatus check_layout(const EpCall *call, const EpHandleConfig *c) {
    if ((int)c->layout < EP_LAYOUT_EXPERT_MAJOR || (int)c->layout > EP_LAYOUT_BATCHED)
        return ep_refuse(call, EP_ERR_RANGE, "config.layout",
                         "expected 1 (expert-major), 2 (flat) or 3 (batched), got %d",
                         (int)c->layout);
    int batched = c->layout == EP_LAYOUT_BATCHED;
    if (batched ? c->rows_per_expert < 1 || c->rows_per_expert > INT32_MAX
                : c->rows_per_expert != EP_DEFAULT)
        return ep_refuse(call, EP_ERR_RANGE, "config.rows_per_expert", "expected %s, got %lld",
                         batched ? "1 .. 2147483647 in the batched layout"
                                 : "EP_DEFAULT outside the batched layout",
                         (long long)c->rows_per_expert);
    return EP_OK;
}

static EpStatus check_config(const EpCall *call, const EpGroupConfig *group,
                             const EpHandleConfig *c) {
    EP_TRY(ep_check_struct(call, "config", c, sizeof(*c)));
    EP_TRY(check_layout(call, c));
    if (c->top_k != EP_DEFAULT && (c->top_k < 1 || c->top_k > group->max_top_k))
        return ep_refuse(call, EP_ERR_TOP_K, "config.top_k",
                         "expected 1 .. %d (the group's max_top_k) or EP_DEFAULT, got %d",
                         group->max_top_k, c->top_k);
    if (c->alignment != EP_DEFAULT && !ep_is_power_of_two(c->alignment))
        return ep_refuse(call, EP_ERR_ALIGNMENT, "config.alignment",
                         "expected a power of two or EP_DEFAULT, got %d", c->alignment);
    if (c->max_recv_rows != EP_DEFAULT && (c->max_recv_rows < 0 || c->max_recv_rows > INT32_MAX))
        return ep_refuse(call, EP_ERR_RANGE, "config.max_recv_rows",
                         "expected 0 .. 2147483647 or EP_DEFAULT, got %lld",
                         (long long)c->max_recv_rows);
    if (c->overflow != EP_DEFAULT &&
        (c->overflow < EP_OVERFLOW_ERROR || c->overflow > EP_OVERFLOW_DROP))
        return ep_refuse(call, EP_ERR_RANGE, "config.overflow",
                         "expected an EpOverflow or EP_DEFAULT, got %d", c->overflow);
    if (c->zero_tail != 0 && c->zero_tail != 1)
        return ep_refuse(call, EP_ERR_RANGE, "config.zero_tail", "expected 0 or 1, got %d",
                         c->zero_tail);
    return EP_OK;
}

EpStatus ep_handle_shape(const EpCall *call, const EpGroupConfig *group, int32_t num_ranks,
                         int32_t rank, const EpHandleConfig *config, EpPlanShape *shape) {
    const EpHandleConfig standard = EP_HANDLE_CONFIG_INIT;
    const EpHandleConfig *c = config ? config : &standard;
    EP_TRY(check_config(call, group, c));
    EpPlacement placement = ep_config_placement(group, num_ranks);
    EpPlanShape s = {.num_ranks = num_ranks, .rank = rank, .num_experts = group->num_experts};
    s.num_local = ep_placement_count(&placement, rank);
    s.max_tokens = group->max_tokens;
    s.max_top_k = (int32_t)inherit(c->top_k, group->max_top_k);
    s.layout = c->layout;
    s.alignment = (int32_t)inherit(c->alignment, group->alignment);
    s.capacity = inherit(c->max_recv_rows, group->max_recv_rows);
    s.overflow = (EpOverflow)inherit(c->overflow, group->overflow);
    s.zero_tail = c->zero_tail;
    if (c->layout == EP_LAYOUT_BATCHED) {
        s.rows_per_expert = c->rows_per_expert;
        s.capacity = s.num_local * s.rows_per_expert;
    }
    if (ep_plan_largest_index(&s) > INT32_MAX)
        return ep_refuse(call, EP_ERR_RANGE, "config",
                         "expected at most 2147483647 slots, got ranks * max_tokens * top_k plus "
                         "padding = %lld",
                         (long long)ep_plan_largest_index(&s));
    *shape = s;
    return EP_OK;
}

EpStatus ep_handle_memory(const EpGroup *group, const EpHandleConfig *config, size_t *bytes) {
    EpCall call = {"ep_handle_memory", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    if (!bytes) return ep_refuse(&call, EP_ERR_NULL, "bytes", "expected a pointer, got NULL");
    EpPlanShape shape;
    EP_TRY(ep_handle_shape(&call, &group->config, group->size, group->rank, config, &shape));
    *bytes = (size_t)group->backend->plan_bytes(&shape, &group->settings);
    return EP_OK;
}

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
    handle->bytes = group->backend->plan_bytes(&handle->shape, &group->settings);
    if (memory) EP_TRY(check_memory(call, group, memory, bytes, handle->bytes));
    handle->memory = memory ? memory : group->backend->allocate(group, (size_t)handle->bytes);
    if (!handle->memory)
        return ep_refuse(call, EP_ERR_NO_MEMORY, "memory", "expected %lld bytes, got none",
                         (long long)handle->bytes);
    handle->owns_memory = !memory;
    if (!memory) group->library_bytes += handle->bytes;
    return group->backend->format_plan(handle);
}

EpStatus ep_handle_create(EpGroup *group, const EpHandleConfig *config, void *memory, size_t bytes,
                          EpHandle **out) {
    EpCall call = {"ep_handle_create", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    if (!out) return ep_refuse(&call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EpPlanShape shape;
    EP_TRY(ep_handle_shape(&call, &group->config, group->size, group->rank, config, &shape));
    EpHandle *handle = ep_object_create(EP_OBJECT_HANDLE, sizeof(*handle));
    if (!handle) return ep_refuse(&call, EP_ERR_NO_MEMORY, "out", "out of memory");
    handle->group = group;
    handle->shape = shape;
    handle->top_k = config ? config->top_k : EP_DEFAULT;
    handle->ordinal = group->handles_created;
    int before = ep_group_enter(group, call.name);
    EpStatus status = attach_memory(&call, handle, memory, bytes);
    if (status != EP_OK) release_memory(handle);
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
    release_memory(handle);
    ep_group_leave(handle->group, before);
    unlink_handle(handle);
    ep_object_retire(&handle->object);
}

EpStatus ep_handle_info(const EpHandle *handle, EpHandleInfo *out) {
    EpCall call = {"ep_handle_info", -1};
    EpStep step;
    EP_TRY(ep_handle_enter_prepared(&call, handle, &step));
    EP_TRY(ep_check_struct(&call, "out", out, sizeof(*out)));
    if (!step.known)
        return ep_refuse(&call, EP_ERR_NOT_PREPARED, "handle",
                         "expected ep_prepare to have finished on its stream, got it under way");
    *out = step.info;
    return EP_OK;
}

/* ---- entering an operation ----------------------------------------------------------------- */

EpStatus ep_handle_enter(EpCall *call, const EpHandle *handle) {
    EP_TRY(ep_object_check(call, "handle", handle, EP_OBJECT_HANDLE));
    call->rank = handle->group->rank;
    handle->group->backend->poll(handle->group);
    EP_TRY(ep_group_usable(handle->group));
    EP_TRACE("%s: handle %d", call->name, handle->ordinal);
    return handle->group->backend->check_plan(handle, call->name, handle->memory);
}

EpStatus ep_handle_enter_prepared(EpCall *call, const EpHandle *handle, EpStep *step) {
    EP_TRY(ep_handle_enter(call, handle));
    *step = (EpStep){.info = EP_HANDLE_INFO_INIT};
    EP_TRY(handle->group->backend->read_plan(handle, step));
    if (!step->prepared)
        return ep_refuse(call, EP_ERR_NOT_PREPARED, "handle",
                         "expected a prepared handle, got one without a plan");
    return EP_OK;
}
