/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/abort.h"

#include <stdio.h>
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

void ep_abort_hold(EpAbort *abort) {
    pthread_mutex_lock(&abort->mutex);
}

void ep_abort_release(EpAbort *abort) {
    pthread_mutex_unlock(&abort->mutex);
}

int ep_abort_fail(EpAbort *abort) {
    pthread_mutex_lock(&abort->mutex);
    int aborted = ep_abort_requested(abort);
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

#define REFUSED "its last call was refused: "

void ep_abort_compose(const EpAbort *abort, const char *why, char out[EP_ABORT_BYTES]) {
    char both[2 * EP_ABORT_BYTES + 2];
    int says_so = !abort->refusal[0] || strstr(why, abort->refusal + strlen(REFUSED));
    snprintf(both, sizeof(both), "%s%s%s", why, says_so ? "" : "; ", says_so ? "" : abort->refusal);
    copy_sentence(out, both);
}

/* The caller holds the mutex. */
static void request(EpGroup *group) {
    EpAbort *abort = &group->abort;
    char why[EP_ABORT_BYTES];
    ep_abort_compose(abort, abort->sentence, why);
    int before = ep_group_enter(group, "ep_group_abort");
    int first = group->backend->abort(group, why, abort->phase == EP_ABORT_LEAVING);
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
    if (!closed && !abort->failed && !ep_abort_requested(abort)) {
        copy_sentence(abort->sentence, sentence);
        __atomic_store_n(&abort->asked, 1, __ATOMIC_RELEASE);
        request(group);
    }
    pthread_mutex_unlock(&abort->mutex);
    if (!closed) return EP_OK;
    return ep_refuse(&call, EP_ERR_DESTROYED, "group",
                     "expected a live object, got one that is being destroyed");
}

/* ---- refused calls ------------------------------------------------------------------------- */

/* An abort may come from another thread: whichever is first under the mutex lets the peers know. */
static void set_refusal(EpGroup *group, const char *text) {
    EpAbort *abort = &group->abort;
    int before = ep_group_enter(group, "refused call");
    pthread_mutex_lock(&abort->mutex);
    memset(abort->refusal, 0, sizeof(abort->refusal));
    if (text[0]) copy_sentence(abort->refusal, text);
    if (!ep_abort_requested(abort)) group->backend->refuse(group, abort->refusal);
    pthread_mutex_unlock(&abort->mutex);
    ep_group_leave(group, before);
}

void ep_group_accept(EpGroup *group) {
    if (group->abort.refusal[0]) set_refusal(group, "");
}

void ep_group_refuse(EpGroup *group) {
    char text[EP_SENTENCE_BYTES];
    if (group->failed != EP_OK || group->suspended != EP_OK || group->size == 1) return;
    snprintf(text, sizeof(text), REFUSED "%.*s", EP_ABORT_BYTES, ep_last_error());
    set_refusal(group, text);
}

int ep_group_start(EpGroup *group, const EpActivity *activity) {
    ep_group_accept(group);
    ep_record_begin(&group->recorder, activity);
    return group->backend->enter ? group->backend->enter(group, activity) : 0;
}

/* A backend refuses what it alone can see, as the number of tokens. */
void ep_group_stop(EpGroup *group, int before, EpStatus status) {
    ep_group_leave(group, before);
    ep_record_end(&group->recorder, status);
    if (status != EP_OK) ep_group_refuse(group);
}

void ep_group_depart(EpGroup *group) {
    EpAbort *abort = &group->abort;
    char why[EP_ABORT_BYTES];
    if (!abort->refusal[0]) return;
    ep_abort_compose(abort, "it has destroyed the group", why);
    pthread_mutex_lock(&abort->mutex);
    if (!ep_abort_requested(abort)) group->backend->depart(group, why);
    pthread_mutex_unlock(&abort->mutex);
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
    int32_t blamed = -1, peer = group->backend->find_failed(group, &blamed, why);
    if (peer < 0) return EP_OK;
    next_look = 0; /* the next look finds it again */
    EpFarewell farewell = {.rank = peer, .blamed = blamed};
    memcpy(farewell.why, why, sizeof(farewell.why));
    return ep_abort_hear(&farewell);
}

EpFarewell ep_abort_say(void) {
    const EpGroup *group = awaited_group;
    EpFarewell farewell = {.rank = group->rank, .blamed = group->rank};
    if (ep_abort_requested(&group->abort)) {
        ep_abort_compose(&group->abort, group->abort.sentence, farewell.why);
    } else {
        farewell.blamed = group->aborted_peer;
        memcpy(farewell.why, group->peer_why, sizeof(farewell.why));
    }
    return farewell;
}

EpStatus ep_abort_hear(const EpFarewell *farewell) {
    EpGroup *group = awaited_group;
    if (!group) return EP_OK;
    group->aborted_peer = farewell->blamed;
    memcpy(group->peer_why, farewell->why, sizeof(group->peer_why));
    return ep_fail_peer(group->rank, "bootstrap", farewell->rank, farewell->blamed, farewell->why);
}
