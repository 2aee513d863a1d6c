/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that peers reach: ep_mem_alloc, ep_window_register, and the calls that undo them. In each
 * call the ranks gather their arguments, or the errors that refused them. Then the backend opens or
 * closes the window on all ranks or on none. So a window has the same number on every rank.
 * Windows that ranks adopt each on their own are in adopt.c.
 */
#include <string.h>

#include "bootstrap/memory/memory.h"

#define PAGE_BYTES 4096
#define MOST_BYTES ((size_t)PTRDIFF_MAX - PAGE_BYTES)

typedef enum Code { MEM_ALLOC, MEM_FREE, WINDOW_REGISTER, WINDOW_DEREGISTER, NUM_CODES } Code;

static const char *const names[NUM_CODES] = {"ep_mem_alloc", "ep_mem_free", "ep_window_register",
                                             "ep_window_deregister"};

/* What each rank contributes to the rendezvous. */
typedef struct Descriptor {
    EpRankStatus status;
    int32_t code, number;
    uint64_t bytes;
} Descriptor;

/* Check that the group can be used. A rank that is refused here skips the rendezvous, so its peers
 * wait for it until their timeout. */
static EpStatus enter(EpCall *call, EpGroup *group) {
    EP_TRY(ep_object_check(call, "group", group, EP_OBJECT_GROUP));
    call->rank = group->rank;
    group->backend->poll(group);
    return ep_group_usable(group);
}

EpStatus ep_window_enter(EpCall *call, EpGroup *group) {
    EP_TRY(enter(call, group));
    if (!group->config.masks) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "group",
                     "expected one without config.masks, since a masked rank could still write to "
                     "such memory, got one with them");
}

/* ---- rendezvous ---------------------------------------------------------------------------- */

static EpStatus compare(const EpCall *call, const Descriptor *all, int32_t size) {
    for (int32_t r = 0; r < size; r++) {
        if (all[r].code < 0 || all[r].code >= NUM_CODES || all[r].bytes > MOST_BYTES)
            return ep_refuse(call, EP_ERR_BOOTSTRAP, "bootstrap.allgather",
                             "expected what rank %d has contributed, got call number %d of %llu "
                             "bytes",
                             r, all[r].code, (unsigned long long)all[r].bytes);
        if (all[r].code != all[0].code)
            return ep_refuse(call, EP_ERR_ORDER, "group",
                             "expected the same call on all ranks, got %s on rank 0 and %s on "
                             "rank %d",
                             names[all[0].code], names[all[r].code], r);
        if (all[r].number != all[0].number)
            return ep_refuse(call, EP_ERR_ORDER, "memory",
                             "expected the same window on all ranks, got number %d on rank 0 and "
                             "number %d on rank %d",
                             all[0].number, all[r].number, r);
        if (all[r].code == WINDOW_REGISTER && all[r].bytes != all[0].bytes)
            return ep_refuse(call, EP_ERR_MISMATCH, "bytes",
                             "expected one value on all ranks, got %llu on rank 0 and %llu on "
                             "rank %d",
                             (unsigned long long)all[0].bytes, (unsigned long long)all[r].bytes, r);
    }
    return EP_OK;
}

static EpStatus gather_descriptors(EpGroup *group, const EpCall *call, const Descriptor *mine,
                                   Descriptor *all, EpWindow *window) {
    EP_TRY(ep_group_gather(group, mine, all, sizeof(*mine)));
    EP_TRY(ep_rank_status_check(call, &group->bootstrap, all, sizeof(*mine)));
    EP_TRY(compare(call, all, group->size));
    for (int32_t r = 0; r < group->size; r++)
        if (all[r].bytes > window->most) window->most = (size_t)all[r].bytes;
    return EP_OK;
}

static EpStatus finish(EpGroup *group) {
    EP_TRY(group->backend->finish(group));
    group->backend->poll(group);
    return ep_group_usable(group);
}

/* Compare this call with the other ranks' calls. `status`: result of this rank's argument checks;
 * if it is EP_OK, first wait for this rank's operations to finish. */
static EpStatus rendezvous(EpGroup *group, const EpCall *call, Code code, EpStatus status,
                           EpWindow *window) {
    if (status == EP_OK) status = finish(group);
    Descriptor mine;
    memset(&mine, 0, sizeof(mine)); /* the peers get its padding, too */
    mine.status = ep_rank_status(status);
    mine.code = (int32_t)code, mine.number = window->number, mine.bytes = window->bytes;
    _Static_assert(sizeof(mine) <= EP_RENDEZVOUS_BYTES, "the group has memory for it");
    return gather_descriptors(group, call, &mine, group->gathered, window);
}

/* Returns `status`. Fails the group if a rendezvous failed: its ranks may be out of step. */
static EpStatus leave(EpGroup *group, const EpCall *call, EpStatus status) {
    return status == EP_OK || !group->lost ? status : ep_group_break(group, call, status);
}

/* ---- creating ------------------------------------------------------------------------------ */

static EpStatus choose_number(const EpCall *call, const EpGroup *group, EpWindow *window) {
    for (window->number = 0; window->number < EP_MAX_WINDOWS; window->number++)
        if (!group->windows[window->number].memory) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "group", "expected at most %d windows at a time, got %d",
                     EP_MAX_WINDOWS, EP_MAX_WINDOWS + 1);
}

static EpStatus check_bytes(const EpCall *call, size_t bytes, size_t least) {
    if (bytes >= least && bytes <= MOST_BYTES) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "bytes", "expected %zu .. %zu, got %zu", least, MOST_BYTES,
                     bytes);
}

static EpStatus create(EpGroup *group, const EpCall *call, Code code, EpStatus status,
                       EpWindow *window) {
    int before = ep_group_enter(group, call->name);
    status = rendezvous(group, call, code, status, window);
    if (status == EP_OK) status = group->backend->open_window(group, call, window);
    if (status == EP_OK) group->windows[window->number] = *window;
    ep_group_leave(group, before);
    return leave(group, call, status);
}

static EpStatus check_alloc(const EpCall *call, const EpGroup *group, EpWindow *window,
                            void *const *out) {
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EP_TRY(check_bytes(call, window->bytes, 1));
    return choose_number(call, group, window);
}

EpStatus ep_mem_alloc(EpGroup *group, size_t bytes, void **out) {
    EpCall call = {names[MEM_ALLOC], -1};
    EP_TRY(ep_window_enter(&call, group));
    EpWindow window = {.bytes = bytes, .owned = 1};
    EpStatus status = check_alloc(&call, group, &window, out);
    EP_TRY(create(group, &call, MEM_ALLOC, status, &window));
    *out = window.memory;
    return EP_OK;
}

EpStatus ep_window_apart(const EpCall *call, const EpGroup *group, const EpWindow *window) {
    uintptr_t begin = (uintptr_t)window->memory;
    for (int i = 0; i < EP_WINDOW_NUMBERS; i++) {
        const EpWindow *other = &group->windows[i];
        uintptr_t there = (uintptr_t)other->memory;
        if (!there || begin >= there + other->bytes || there >= begin + window->bytes) continue;
        return ep_refuse(call, EP_ERR_RANGE, "memory",
                         "expected memory apart from the group's other windows, got %p, which "
                         "overlaps the %zu bytes at %p",
                         window->memory, other->bytes, other->memory);
    }
    return EP_OK;
}

static EpStatus check_register(const EpCall *call, const EpGroup *group, EpWindow *window) {
    if (!window->memory) return ep_refuse(call, EP_ERR_NULL, "memory", "expected memory, got NULL");
    if ((uintptr_t)window->memory % PAGE_BYTES)
        return ep_refuse(call, EP_ERR_ADDRESS, "memory", "expected a multiple of %d, got %p",
                         PAGE_BYTES, window->memory);
    EP_TRY(check_bytes(call, window->bytes, PAGE_BYTES));
    EP_TRY(ep_window_apart(call, group, window));
    return choose_number(call, group, window);
}

EpStatus ep_window_register(EpGroup *group, void *memory, size_t bytes) {
    EpCall call = {names[WINDOW_REGISTER], -1};
    EP_TRY(ep_window_enter(&call, group));
    EpWindow window = {.memory = memory, .bytes = bytes};
    EpStatus status = check_register(&call, group, &window);
    return create(group, &call, WINDOW_REGISTER, status, &window);
}

/* ---- destroying ---------------------------------------------------------------------------- */

static EpStatus find_window(const EpCall *call, const EpGroup *group, const void *memory,
                            Code creator, EpWindow *out) {
    if (!memory) return ep_refuse(call, EP_ERR_NULL, "memory", "expected memory, got NULL");
    for (int i = 0; i < EP_MAX_WINDOWS; i++) {
        *out = group->windows[i];
        if (out->memory == memory && out->owned == (creator == MEM_ALLOC)) return EP_OK;
    }
    return ep_refuse(call, EP_ERR_FOREIGN, "memory",
                     "expected memory from %s on this group, not given back yet, got %p",
                     names[creator], memory);
}

static EpStatus destroy(EpGroup *group, const EpCall *call, Code code, Code creator, void *memory) {
    EpWindow window = {.memory = NULL};
    EpStatus status = find_window(call, group, memory, creator, &window);
    int before = ep_group_enter(group, call->name);
    status = rendezvous(group, call, code, status, &window);
    if (status == EP_OK) {
        group->backend->close_window(group, &window, 1);
        group->windows[window.number] = (EpWindow){.memory = NULL};
    }
    ep_group_leave(group, before);
    return leave(group, call, status);
}

EpStatus ep_mem_free(EpGroup *group, void *memory) {
    EpCall call = {names[MEM_FREE], -1};
    if (!memory) return enter(&call, group);
    EP_TRY(ep_window_enter(&call, group));
    return destroy(group, &call, MEM_FREE, MEM_ALLOC, memory);
}

EpStatus ep_window_deregister(EpGroup *group, void *memory) {
    EpCall call = {names[WINDOW_DEREGISTER], -1};
    EP_TRY(ep_window_enter(&call, group));
    return destroy(group, &call, WINDOW_DEREGISTER, WINDOW_REGISTER, memory);
}
