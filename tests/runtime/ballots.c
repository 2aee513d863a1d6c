/* SPDX-License-Identifier: Apache-2.0 */
/* A meeting of living ranks, in which the test writes the others' ballots: it ends only if all are
 * ready for the same ones. */
#include "runtime/host/exchange.h"

#include <stdlib.h>
#include <string.h>

#include "tests/harness/check.h"

enum { RANKS = 3, STAGE = 4096, TICKET = 40, READY = EP_VOTE_READY };

static const EpAbort no_abort;

typedef struct Meeting {
    EpBootstrap bootstrap;
    EpControl *control[RANKS]; /* rank 0's is this rank's */
    EpExchange *exchange;
} Meeting;

static void open_meeting(Meeting *m) {
    void *segments[RANKS];
    size_t bytes = (size_t)ep_exchange_segment_bytes(RANKS, 0, STAGE) + 64;
    m->bootstrap = (EpBootstrap)EP_BOOTSTRAP_INIT;
    m->bootstrap.size = RANKS;
    for (int r = 0; r < RANKS; r++) {
        segments[r] = m->control[r] = aligned_alloc(64, bytes / 64 * 64);
        memset(segments[r], 0, bytes / 64 * 64);
    }
    EpExchangeSetup setup = {.bootstrap = &m->bootstrap,
                             .abort = &no_abort,
                             .segments = segments,
                             .stage_bytes = STAGE,
                             .timeout = 0.05,
                             .masks = 1,
                             .ticket = TICKET - 1};
    m->exchange = ep_exchange_create(&setup);
    CHECK(m->exchange, "no exchange");
}

static void close_meeting(Meeting *m) {
    (void)ep_exchange_destroy(m->exchange, 1);
    for (int r = 0; r < RANKS; r++)
        free(m->control[r]);
}

static uint64_t digest(uint64_t own, uint64_t first, uint64_t second) {
    return ep_mask_digest(0, own) + ep_mask_digest(1, first) + ep_mask_digest(2, second);
}

/* A rank votes for all, and is ready for ballots of this digest. */
static void vote(const Meeting *m, int rank, uint64_t ticket, uint64_t seen) {
    EpBallot *ballot = &m->control[rank]->ballot;
    ballot->alive[0] = (1 << RANKS) - 1;
    ballot->seen = seen;
    ballot->word = ticket << 2 | READY;
}

static EpStatus mask_all(const Meeting *m) {
    EpMask all = ep_mask_of_all(RANKS);
    return ep_exchange_mask(m->exchange, &all);
}

/* Both others have seen this rank's ballot, but rank 2 an older one of rank 1. */
SoloTest(runtime_ballots, seen_by_all_but_not_alike) {
    Meeting m;
    open_meeting(&m);
    vote(&m, 1, 5, digest(TICKET, 5, 7));
    vote(&m, 2, 7, digest(TICKET, 4, 7));
    CHECK_REFUSED(mask_all(&m), EP_ERR_TIMEOUT, "rank 2 did not call it");
    vote(&m, 1, 5, digest(TICKET + 1, 5, 7));
    vote(&m, 2, 7, digest(TICKET + 1, 5, 7));
    CHECK_OK(mask_all(&m));
    close_meeting(&m);
}

/* A rank that is done counts if it is with the ballots that this rank was ready for. */
SoloTest(runtime_ballots, done_with_others) {
    Meeting m;
    open_meeting(&m);
    vote(&m, 1, 5, digest(TICKET, 5, 7));
    vote(&m, 2, 7, 0);
    m.control[1]->ballot.done = digest(TICKET, 4, 7);
    CHECK_STATUS(mask_all(&m), EP_ERR_TIMEOUT);
    m.control[1]->ballot.done = digest(TICKET + 1, 5, 7);
    CHECK_OK(mask_all(&m));
    close_meeting(&m);
}
