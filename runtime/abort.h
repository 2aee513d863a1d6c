/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_ABORT_H
#define EP_RUNTIME_ABORT_H

/**
 * ep_group_abort: how any thread ends the waits of a rank.
 *
 * A group is used by one thread at a time; its EpAbort is the part that any thread may use. An
 * abort stores the sentence, has the backend tell the peers, and sets `requested`. The thread that
 * uses the group sees `requested` in its waits and at its next call, and then marks the group as
 * failed. Whichever comes first under the mutex counts: an abort, or another failure.
 *
 * Memory order. `asked` and `requested` are stored with release after the sentence, and loaded with
 * acquire before it is read. Where the watcher stores `requested` for an abort that hangs, it has
 * loaded `asked` before: so the group's thread sees the sentence through two such pairs.
 */

#include <pthread.h>
#include <stdint.h>

#include "runtime/status.h"

#define EP_ABORT_BYTES 256 /* of an abort's sentence, with its end; a multiple of 8 */

/** What an abort may still do. */
typedef enum EpAbortPhase {
    EP_ABORT_CLOSED, /**< the group is being created, or its memory is being freed: nothing */
    EP_ABORT_OPEN,
    EP_ABORT_LEAVING /**< this rank meets its peers to destroy the group: peers that have met it may
                          free what it could reach */
} EpAbortPhase;

typedef struct EpAbort {
    pthread_mutex_t mutex; /**< of the fields below; only those stored with release are read
                                without it, and `requested` is also stored without it */
    EpAbortPhase phase;    /**< set by the group's thread */
    int failed;            /**< whether the group has failed for another reason */
    int asked;             /**< whether an abort has stored its sentence, and tells the peers now;
                                stored with release */
    int requested;         /**< whether the group was aborted; stored with release, last */
    char sentence[EP_ABORT_BYTES];
    char refusal[EP_ABORT_BYTES]; /**< what peers are told of the last call, which was refused; "":
                                       it was not. Written by the group's thread */
} EpAbort;

void ep_abort_open(EpAbort *abort);
void ep_abort_set_phase(EpAbort *abort, EpAbortPhase phase);

/** In between no other thread tells the peers that the group is aborted. */
void ep_abort_hold(EpAbort *abort);
void ep_abort_release(EpAbort *abort);

/** Returns whether the group was aborted. The acquire orders the sentence behind it. */
static inline int ep_abort_requested(const EpAbort *abort) {
    return __atomic_load_n(&abort->requested, __ATOMIC_ACQUIRE);
}

/** An abort hangs while it tells the peers, and holds the mutex: it counts from now on. */
static inline void ep_abort_hangs(EpAbort *abort) {
    __atomic_store_n(&abort->requested, 1, __ATOMIC_RELEASE);
}

/** The group has failed. Returns 1 if an abort came first; otherwise later aborts do nothing. */
int ep_abort_fail(EpAbort *abort);

/** Write what peers quote: `why` this rank goes, and then, unless that says so, its refusal. */
void ep_abort_compose(const EpAbort *abort, const char *why, char out[EP_ABORT_BYTES]);

/** Why a rank gives up a rendezvous. */
typedef struct EpFarewell {
    int32_t rank, blamed;
    char why[EP_ABORT_BYTES];
} EpFarewell;

/** For a bootstrap whose ranks reach each other: get why the calling thread gives up, after
 *  ep_poll_abort has told it to. And hear it from another rank: returns EP_ERR_PEER with the
 *  sentence, or EP_OK if the thread waits for no group. */
EpFarewell ep_abort_say(void);
EpStatus ep_abort_hear(const EpFarewell *farewell);

/** Set the sentence of a rank that has seen `peer` give up because of `blamed`, and return
 *  EP_ERR_PEER. `why`: the sentence with which `blamed` has aborted the group, or "". */
EpStatus ep_fail_peer(int32_t rank, const char *phase, int32_t peer, int32_t blamed,
                      const char *why);

#endif
