/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lets ranks join a group on GPUs. All that is found stays apart until all ranks have it; then it
 * is mapped where kernels expect it. This rank's kernels have ended, and until ep_group_mask no
 * kernel of a rank that takes part touches the memory of those that do not.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "bootstrap/memory/cuda/places.h"
#include "bootstrap/places.h"
#include "handles/cuda/handle.h"
#include "handles/masks/cuda/mask.h"

/** What ranks tell each other, before they change anything. */
typedef struct Found {
    int whole;
    uint32_t incarnation[EP_CUDA_MAX_RANKS];
} Found;

/** The group's windows. */
typedef struct Windows {
    EpCudaPlaces *places[2];
    int count;
} Windows;

static Windows windows_of(const EpCuda *cuda) {
    Windows w = {{cuda->own.places, NULL}, 1};
    if (cuda->latency) w.places[w.count++] = cuda->latency->window.places;
    return w;
}

/* ---- what is left of old processes --------------------------------------------------------- */

static EpStatus clear(const EpGroup *group, void *memory, size_t bytes) {
    return ep_cuda_check(group, "cudaMemset", cudaMemset(memory, 0, bytes));
}

/* Forget what the process that stood at a place has left in this rank's memory: its ballot, with
 * the word of its abort, and its sentence. What else it has stored has numbers that no operation
 * has any more. */
static EpStatus forget(const EpGroup *group, int32_t rank) {
    const EpCudaGroup *g = &ep_cuda(group)->device;
    char *window = g->window[g->rank];
    char *why = window + g->layout.aborted + (1 + rank) * (int64_t)EP_ABORT_BYTES;
    EP_TRY(clear(group, window + ep_ballots_at(&g->layout, g->size) + rank * sizeof(EpCudaBallot),
                 sizeof(EpCudaBallot)));
    EP_TRY(clear(group, why, EP_ABORT_BYTES));
    return clear(group, &g->state->past[rank], sizeof(g->state->past[rank]));
}

/* A newcomer's tickets begin at a random number, which is its incarnation, too: no ballot or abort
 * of its place's old process is taken for its own. The lowest ones are not random, and the highest
 * leave room to count. */
static EpStatus begin_tickets(const EpGroup *group) {
    uint32_t ticket;
    if (getrandom(&ticket, sizeof(ticket), 0) != (ssize_t)sizeof(ticket))
        return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: getrandom failed", group->rank, group->call);
    ticket = ticket >> 2 | 1u << 16;
    ep_cuda(group)->incarnation[group->rank] = ticket;
    return ep_cuda_put(group, &ep_cuda(group)->device.state->ticket, &ticket, sizeof(ticket));
}

/* Prepare this rank's memory for the newcomers. They are masked, so nobody looks there yet. */
static EpStatus clear_places(const EpGroup *group) {
    EP_TRY(ep_cuda_check(group, "cudaDeviceSynchronize", cudaDeviceSynchronize()));
    if (ep_mask_has(&group->newcomers, group->rank)) return begin_tickets(group);
    for (int32_t r = 0; r < group->size; r++)
        if (ep_mask_has(&group->newcomers, r)) EP_TRY(forget(group, r));
    return ep_cuda_check(group, "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

/* ---- placements ---------------------------------------------------------------------------- */

static EpStatus share_map(EpGroup *group, const EpCall *call, const EpMask *alive, int32_t *host) {
    int32_t *map = group->copies.memory.logical_of;
    size_t bytes = sizeof(*map) * (size_t)group->placement.num_experts;
    EpStatus status =
        ep_cuda_check(group, "cudaMemcpy", cudaMemcpy(host, map, bytes, cudaMemcpyDefault));
    EP_TRY(ep_group_agree(group, call, status));
    EP_TRY(ep_places_share_map(group, call, alive, host));
    /* Only a masked rank's map changes, which no operation of its own reads before its mask. */
    if (!ep_mask_has(alive, group->rank)) status = ep_cuda_put(group, map, host, bytes);
    return ep_group_agree(group, call, status);
}

static EpStatus find_map(EpGroup *group, const EpCall *call, const EpMask *alive) {
    if (!ep_config_has_copies(&group->config)) return EP_OK;
    int32_t *map = malloc(sizeof(*map) * (size_t)group->placement.num_experts);
    EpStatus status = map ? EP_OK : ep_refuse(call, EP_ERR_NO_MEMORY, "group", "out of memory");
    status = ep_group_agree(group, call, status);
    if (status == EP_OK) status = share_map(group, call, alive, map);
    free(map);
    return status;
}

/* ---- admitting ----------------------------------------------------------------------------- */

static EpStatus find_others(EpGroup *group, const EpCall *call, const EpMask *alive, Found *out) {
    const EpCuda *cuda = ep_cuda(group);
    Windows windows = windows_of(cuda);
    EP_TRY(ep_group_agree(group, call, clear_places(group)));
    EP_TRY(ep_group_gather(group, &cuda->incarnation[group->rank], out->incarnation,
                           sizeof(out->incarnation[0])));
    EP_TRY(ep_cuda_admit_lines(group, call, alive, &out->whole));
    for (int i = 0; i < windows.count; i++)
        EP_TRY(ep_cuda_places_find(group, call, windows.places[i]));
    return find_map(group, call, alive);
}

/* Set who is alive. A rank that takes part keeps what it has, since it may have cut some. */
static EpStatus set_alive(EpGroup *group, const EpMask *alive) {
    EpCuda *cuda = ep_cuda(group);
    int is_new = ep_mask_has(&group->newcomers, group->rank);
    if (ep_mask_has(alive, group->rank) && !is_new) return EP_OK;
    EP_TRY(ep_cuda_put(group, cuda->device.state->alive, alive->word,
                       sizeof(cuda->device.state->alive)));
    return ep_cuda_choose_copies(group);
}

/* From now on aborts count that carry these numbers. */
static EpStatus set_incarnations(EpGroup *group, const Found *found) {
    EpCuda *cuda = ep_cuda(group);
    for (int32_t r = 0; r < group->size; r++)
        cuda->incarnation[r] =
            ep_mask_has(&group->members, r) ? found->incarnation[r] : EP_NO_INCARNATION;
    return ep_cuda_put(group, cuda->device.state->incarnation, cuda->incarnation,
                       sizeof(cuda->incarnation));
}

static EpStatus adopt(EpGroup *group, const EpMask *alive, const Found *found) {
    EpCuda *cuda = ep_cuda(group);
    Windows windows = windows_of(cuda);
    EpMask changed = ep_group_changes(group);
    EpStatus status = set_incarnations(group, found);
    cuda->whole_lines = found->whole;
    if (cuda->latency) cuda->latency->device.whole = found->whole;
    ep_abort_hold(&group->abort); /* another thread may store into what is mapped */
    for (int i = 0; i < windows.count && status == EP_OK; i++)
        status = ep_cuda_places_adopt(group, windows.places[i], &changed);
    for (int i = 0; i < EP_MASK_WORDS; i++)
        cuda->reached.word[i] =
            status == EP_OK ? group->members.word[i] : cuda->reached.word[i] & ~changed.word[i];
    ep_cuda_repeat_abort(group); /* the newcomers do not know */
    ep_abort_release(&group->abort);
    return status == EP_OK ? set_alive(group, alive) : status;
}

/* What was found holds memory of ranks that may be gone. */
static void drop_found(const EpGroup *group) {
    const EpMask nobody = {{0}};
    Windows windows = windows_of(ep_cuda(group));
    for (int i = 0; i < windows.count; i++)
        (void)ep_cuda_places_adopt(group, windows.places[i], &nobody);
}

/* The others have admitted, and what is mapped here is of no use: the group ends. */
static EpStatus fail_group(EpGroup *group, EpStatus status) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = status, finding.rank = group->rank, finding.count = 1;
    return ep_group_fail(group, &finding);
}

EpStatus ep_cuda_admit(EpGroup *group, const EpMask *alive) {
    EpCall call = {group->call, group->rank};
    Found found = {.whole = 0};
    EpStatus status = find_others(group, &call, alive, &found);
    if (status != EP_OK) {
        drop_found(group);
        return status;
    }
    status = adopt(group, alive, &found);
    return status == EP_OK ? EP_OK : fail_group(group, status);
}
