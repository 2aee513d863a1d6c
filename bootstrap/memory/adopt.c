/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows that the lent communicator already has: ep_window_adopt, ep_window_release and
 * ep_window_locate. Each rank calls them on its own. The caller's id takes the place of the number
 * that ranks agree on where they make a window together.
 */
#include "bootstrap/memory/memory.h"

#define ROW_ALIGNMENT 16

/* Returns the first id that is not in use, or EP_MAX_ADOPTED_WINDOWS. */
static int32_t free_id(const EpGroup *group) {
    int32_t id = 0;
    while (id < EP_MAX_ADOPTED_WINDOWS && group->windows[EP_MAX_WINDOWS + id].memory)
        id++;
    return id;
}

static EpStatus check_id(const EpCall *call, const EpGroup *group, int32_t id) {
    if (id == EP_WINDOW_PAIRED && free_id(group) < EP_MAX_ADOPTED_WINDOWS) return EP_OK;
    if (id == EP_WINDOW_PAIRED)
        return ep_refuse(call, EP_ERR_RANGE, "id", "expected at most %d adopted windows, got more",
                         EP_MAX_ADOPTED_WINDOWS);
    if (id < 0 || id >= EP_MAX_ADOPTED_WINDOWS)
        return ep_refuse(call, EP_ERR_RANGE, "id",
                         "expected 0 .. %d or EP_WINDOW_PAIRED (%d), got %d",
                         EP_MAX_ADOPTED_WINDOWS - 1, EP_WINDOW_PAIRED, id);
    const EpWindow *there = &group->windows[EP_MAX_WINDOWS + id];
    if (!there->memory) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "id",
                     "expected one that is not in use, got %d, which has the %zu bytes at %p", id,
                     there->bytes, there->memory);
}

static EpStatus check_memory(const EpCall *call, const EpGroup *group, const EpWindow *window) {
    uintptr_t begin = (uintptr_t)window->memory;
    if (!window->memory) return ep_refuse(call, EP_ERR_NULL, "memory", "expected memory, got NULL");
    if (begin % ROW_ALIGNMENT)
        return ep_refuse(call, EP_ERR_ADDRESS, "memory", "expected a multiple of %d, got %p",
                         ROW_ALIGNMENT, window->memory);
    size_t most = begin < PTRDIFF_MAX ? PTRDIFF_MAX - begin : 0; /* no address is larger */
    if (window->bytes < 1 || window->bytes > most)
        return ep_refuse(call, EP_ERR_RANGE, "bytes", "expected 1 .. %zu, got %zu", most,
                         window->bytes);
    return ep_window_apart(call, group, window);
}

/* A call that timed out leaves open whether kernels use the window: the group ends. */
static EpStatus change(EpGroup *group, const EpCall *call, const EpWindow *window,
                       EpStatus (*backend_call)(EpGroup *, const EpCall *, const EpWindow *)) {
    if (!backend_call) return EP_OK;
    int before = ep_group_enter(group, call->name);
    EpStatus status = backend_call(group, call, window);
    ep_group_leave(group, before);
    return status == EP_ERR_TIMEOUT ? ep_group_break(group, call, status) : status;
}

EpStatus ep_window_adopt(EpGroup *group, void *window, int32_t id, void *memory, size_t bytes) {
    EpCall call = {"ep_window_adopt", -1};
    EP_TRY(ep_window_enter(&call, group));
    EP_TRY(check_id(&call, group, id));
    int paired = id == EP_WINDOW_PAIRED;
    EpWindow adopted = {.memory = memory,
                        .bytes = bytes,
                        .number = EP_MAX_WINDOWS + (paired ? free_id(group) : id),
                        .paired = paired,
                        .adopted = window};
    EP_TRY(check_memory(&call, group, &adopted));
    EP_TRY(change(group, &call, &adopted, group->backend->adopt_window));
    group->windows[adopted.number] = adopted;
    return EP_OK;
}

EpStatus ep_window_release(EpGroup *group, void *memory) {
    EpCall call = {"ep_window_release", -1};
    EP_TRY(ep_window_enter(&call, group));
    if (!memory) return ep_refuse(&call, EP_ERR_NULL, "memory", "expected memory, got NULL");
    EpWindow *window = &group->windows[EP_MAX_WINDOWS];
    while (window < group->windows + EP_WINDOW_NUMBERS && window->memory != memory)
        window++;
    if (window == group->windows + EP_WINDOW_NUMBERS)
        return ep_refuse(&call, EP_ERR_FOREIGN, "memory",
                         "expected memory from ep_window_adopt on this group, not released yet, "
                         "got %p",
                         memory);
    EP_TRY(change(group, &call, window, group->backend->release_window));
    *window = (EpWindow){.memory = NULL};
    return EP_OK;
}

EpStatus ep_window_locate(EpGroup *group, void *window, void **memory, size_t *bytes) {
    EpCall call = {"ep_window_locate", -1};
    EP_TRY(ep_window_enter(&call, group));
    if (!window || !memory)
        return ep_refuse(&call, EP_ERR_NULL, window ? "memory" : "window",
                         "expected a pointer, got NULL");
    if (!group->backend->locate_window)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "group",
                         "expected one on the CUDA backend, got one on the host backend");
    int before = ep_group_enter(group, call.name);
    EpStatus status = group->backend->locate_window(group, &call, window, memory, bytes);
    ep_group_leave(group, before);
    return status;
}
