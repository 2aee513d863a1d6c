/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/abort.h"

#include <string.h>

#include "runtime/group.h"
#include "runtime/wait.h"

#define SECONDS_PER_LOOK 2e-3 /* at what the peers have stored, in a wait in a bootstrap */

void ep_abort_open(EpAbort *abort) {
    pthread_mutex_init(&abort->mutex, NULL);
}

void ep_abort_set_phase(EpAbort *abort, EpAbortPhase phase) {
    pthread_mutex_lock(&abort->mutex);
    abort->phase = phase;
    pthread_mutex_unlock(&abort->mutex);
}

int ep_abort_fail(EpAbort *abort) {
    pthread_mutex_lock(&abort->mutex);
    int aborted = abort->requested;
    abort->failed = !aborted;
    pthread_mutex_unlock(&abort->mutex);
    return aborted;
}

EpStatus ep_fail_peer(int32_t rank, const char *phase, int32_t peer, int32_t blamed,
                      const char *why) {
    const char *colon = why[0] ? ": " : "";
    if (blamed != peer)
        return ep_fail(EP_ERR_PEER,
                       "rank %d: %s: rank %d has given up on the group because of rank %d%s%.*s",
                       rank, phase, peer, blamed, colon, EP_ABORT_BYTES - 1, why);
    if (why[0])
        return ep_fail(EP_ERR_PEER, "rank %d: %s: rank %d has given up on the group: %.*s", rank,
                       phase, peer, EP_ABORT_BYTES - 1, why);
    return ep_fail(EP_ERR_PEER,
                   "rank %d: %s: rank %d has given up on the group for a reason of its own", rank,
                   phase, peer);
}

/* ---- aborting ------------------------------------------------------------------------------ */

/* Copy as much of a sentence as there is room for, in whole characters of UTF-8. */
static void copy_sentence(char *to, const char *from) {
    size_t bytes = strnlen(from, EP_ABORT_BYTES);
    if (bytes == EP_ABORT_BYTES)
        for (bytes--; bytes && ((unsigned char)from[bytes] & 0xc0) == 0x80;)
            bytes--;
    memset(to, 0, EP_ABORT_BYTES);
    memcpy(to, from, bytes);
    if (!bytes) strcpy(to, "no reason given");
}

/* The caller holds the mutex. */
static void request(EpGroup *group) {
    EpAbort *abort = &group->abort;
    int before = ep_group_enter(group, "ep_group_abort");
    int first = group->backend->abort(group, abort->sentence, abort->phase == EP_ABORT_LEAVING);
    if (first) __atomic_store_n(&abort->requested, 1, __ATOMIC_RELEASE);
    ep_group_leave(group, before);
}

EpStatus ep_group_abort(EpGroup *group, const char *sentence) {
    EpCall call = {"ep_group_abort", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    if (!sentence) return ep_refuse(&call, EP_ERR_NULL, "sentence", "expected a text, got NULL");
    EpAbort *abort = &group->abort;
    pthread_mutex_lock(&abort->mutex);
    int closed = abort->phase == EP_ABORT_CLOSED;
    if (!closed && !abort->failed && !abort->requested) {
        copy_sentence(abort->sentence, sentence);
        __atomic_store_n(&abort->asked, 1, __ATOMIC_RELEASE);
        request(group);
    }
    pthread_mutex_unlock(&abort->mutex);
    if (!closed) return EP_OK;
    return ep_refuse(&call, EP_ERR_DESTROYED, "group",
                     "expected a live object, got one that is being destroyed");
}

/* ---- waits in a bootstrap ------------------------------------------------------------------ */

/* What the calling thread waits for in a bootstrap's callback. */
static _Thread_local EpGroup *awaited_group;
static _Thread_local double next_look;

EpStatus ep_group_await(EpGroup *group) {
    awaited_group = group && group->abort.phase != EP_ABORT_CLOSED ? group : NULL;
    next_look = 0;
    return ep_poll_abort();
}

EpStatus ep_poll_abort(void) {
    EpGroup *group = awaited_group;
    char why[EP_ABORT_BYTES];
    if (!group) return EP_OK;
    if (ep_abort_requested(&group->abort)) return ep_group_fail_aborted(group, "bootstrap");
    double now = ep_clock();
    if (now < next_look) return EP_OK;
    next_look = now + SECONDS_PER_LOOK;
    int32_t peer = group->backend->find_aborted(group, why);
    if (peer < 0) return EP_OK;
    next_look = 0; /* the next look finds it again */
    group->aborted_peer = peer;
    return ep_fail_peer(group->rank, "bootstrap", peer, peer, why);
}
