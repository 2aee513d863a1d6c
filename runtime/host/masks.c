/* SPDX-License-Identifier: Apache-2.0 */
/* The rendezvous of living ranks. exchange.h says what it does, and why its memory order is right.
 */
#include <stdio.h>
#include <string.h>

#include "runtime/callback.h"
#include "runtime/host/exchange_state.h"
#include "runtime/wait.h"

#define LINE 64
#define ROUNDS_APART 16     /* more than a rank that is left behind can go on */
#define GRACE_SECONDS .25   /* in which a rank may notice that its set differs, and call again */
#define STATE_BITS 2

static const EpOp mask_op = {.name = "ep_group_mask"};

static uint64_t load(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_acquire);
}

static void store(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}

/* Returns whether a rank of the new set is another one. */
static int is_peer(const EpExchange *x, int32_t rank) {
    return rank != x->rank && ep_mask_has(&x->own.alive, rank);
}

/* ---- this rank's ballot -------------------------------------------------------------------- */

static void show_state(EpExchange *x, EpVoteState state) {
    x->own.state = state;
    store(&x->control[x->rank]->ballot.word, x->own.ticket << STATE_BITS | state);
}

/* Cast this call's ballot. Until then readers see that this rank has none. */
static void cast(EpExchange *x, const EpMask *alive) {
    EpBallot *ballot = &x->control[x->rank]->ballot;
    show_state(x, EP_VOTE_NONE);
    x->own.ticket++;
    x->own.alive = *alive;
    x->own.seen = 0;
    x->own.round = x->round;
    store(&ballot->seen, 0);
    store(&ballot->round, x->own.round);
    for (int i = 0; i < EP_MASK_WORDS; i++)
        atomic_store_explicit(&ballot->alive[i], x->own.alive.word[i], memory_order_release);
    show_state(x, EP_VOTE_CAST);
}

/* Returns the round at which the ranks of the set go on: odd, so that its successor's messages come
 * into the inboxes of even rounds, where ballots came. */
static uint64_t find_base(const EpExchange *x) {
    uint64_t most = x->own.round;
    for (int32_t r = 0; r < x->size; r++)
        if (is_peer(x, r) && x->votes[r].round > most) most = x->votes[r].round;
    return (most + ROUNDS_APART) | 1;
}

/* All ballots of the set are alike: say which ones this rank has seen. */
static void become_ready(EpExchange *x, uint64_t seen) {
    for (int32_t r = 0; r < x->size; r++)
        if (is_peer(x, r)) x->expected[r] = x->votes[r].ticket;
    x->own.seen = seen;
    x->next_base = find_base(x);
    store(&x->control[x->rank]->ballot.seen, seen);
    show_state(x, EP_VOTE_READY);
}

/* Peers that wait for this rank in an operation wait in vain: `failed` told them, and its ballot
 * tells them now. An abort stays. */
static void clear_failure(EpExchange *x) {
    _Atomic uint64_t *word = &x->control[x->rank]->failed.value;
    uint64_t failed = load(word);
    while (!(failed & EP_ABORTED) &&
           !atomic_compare_exchange_weak_explicit(word, &failed, 0, memory_order_release,
                                                  memory_order_acquire))
        ;
}

/* ---- the others' --------------------------------------------------------------------------- */

/* Read the ballot of a rank on this node, again if it has changed meanwhile. */
static void read_ballot(EpExchange *x, int32_t rank) {
    const EpControl *theirs = x->control[rank];
    const EpBallot *ballot = &theirs->ballot;
    EpVote *vote = &x->votes[rank];
    uint64_t word;
    do {
        word = load(&ballot->word);
        vote->ticket = word >> STATE_BITS, vote->state = word & ((1 << STATE_BITS) - 1);
        vote->round = load(&ballot->round);
        vote->seen = load(&ballot->seen);
        vote->done = load(&ballot->done);
        for (int i = 0; i < EP_MASK_WORDS; i++)
            vote->alive.word[i] = atomic_load_explicit(&ballot->alive[i], memory_order_acquire);
    } while (load(&ballot->word) != word);
}

/* Send a rank on another node this rank's ballot, if it has changed. One at a time is under way. */
static EpStatus send_ballot(EpExchange *x, int32_t peer) {
    char *message = x->ballots + peer * EP_BALLOT_BYTES;
    void **request = &x->remote[peer].sending_ballot;
    EpRoundHeader header = {.op = EP_BALLOT};
    EpVote vote = x->own;
    int done = 1;
    if (*request) EP_TRY(ep_call_test(x->bootstrap, request, &done));
    if (!done) return EP_OK;
    *request = NULL;
    if (!memcmp(message + LINE, &vote, sizeof(vote))) return EP_OK;
    memcpy(message, &header, sizeof(header));
    memcpy(message + LINE, &vote, sizeof(vote));
    return ep_call_isend(x->bootstrap, peer, x->tag, message, (size_t)EP_BALLOT_BYTES, request);
}

/* Returns whether the message in a peer's even inbox is of the next round: the peer is done. It
 * stays there for that round. */
static int has_next_round(const EpExchange *x, int32_t peer) {
    const EpRemote *remote = &x->remote[peer];
    const EpRoundHeader *header = (const EpRoundHeader *)remote->inbox[0];
    return x->own.seen && !remote->receiving[0] && header->op > 0 &&
           header->round == x->next_base + 1;
}

static void swap_inboxes(EpRemote *remote) {
    char *inbox = remote->inbox[0];
    void *receiving = remote->receiving[0];
    remote->inbox[0] = remote->inbox[1], remote->inbox[1] = inbox;
    remote->receiving[0] = remote->receiving[1], remote->receiving[1] = receiving;
}

/* Let the receive that ends first be that of the even inbox. Receives from before may be pending
 * for either inbox, or both. */
static EpStatus order_receives(EpExchange *x, int32_t peer) {
    EpRemote *remote = &x->remote[peer];
    int is_first = !remote->receiving[1] || remote->posted % 2 == 1;
    if (remote->receiving[0] && !is_first) swap_inboxes(remote);
    if (!remote->receiving[0] && remote->receiving[1]) swap_inboxes(remote);
    remote->posted = 1;
    if (remote->receiving[0]) return EP_OK;
    ((EpRoundHeader *)remote->inbox[0])->op = 0;
    return ep_exchange_post(x, peer, 0);
}

/* Read messages of a rank on another node up to its last ballot. What it has sent in rounds that it
 * has left is dropped. */
static EpStatus receive_ballots(EpExchange *x, int32_t peer) {
    EpRemote *remote = &x->remote[peer];
    int done = 1;
    while (done && !has_next_round(x, peer)) {
        EP_TRY(order_receives(x, peer));
        EP_TRY(ep_call_test(x->bootstrap, &remote->receiving[0], &done));
        if (!done) return EP_OK;
        remote->receiving[0] = NULL;
        ep_exchange_take_word(x, peer, (const EpRoundHeader *)remote->inbox[0]);
    }
    return EP_OK;
}

/* Let the messages to and from a rank on another node make progress. */
static EpStatus exchange_messages(EpExchange *x, int32_t peer) {
    EpRemote *remote = &x->remote[peer];
    void **requests[] = {&remote->sending[0], &remote->sending[1], &remote->sending_note,
                         &remote->sending_refusal};
    for (int i = 0; i < 4; i++) {
        int done = 0;
        if (!*requests[i]) continue;
        EP_TRY(ep_call_test(x->bootstrap, requests[i], &done));
        if (done) *requests[i] = NULL;
    }
    EP_TRY(send_ballot(x, peer));
    return receive_ballots(x, peer);
}

/* ---- the rendezvous ------------------------------------------------------------------------ */

/** What a look at all ballots has found: ranks, or -1. */
typedef struct Look {
    int32_t gone;     /* cannot come */
    int32_t missing;  /* has no ballot */
    int32_t absent;   /* has had none since this rank's call */
    int32_t differs;  /* has another set */
    int32_t slow;     /* is not ready, or for other ballots than this rank */
    int is_done;      /* whether a rank is done */
    uint64_t tickets; /* of all ballots */
} Look;

/* A rank that is done has seen that all were ready, for the ballots that this rank was ready for
 * last. It may have another ballot by now. */
static int is_done(const EpExchange *x, int32_t rank) {
    int with_this = x->own.seen && x->votes[rank].done == x->own.seen;
    return with_this || (!x->control[rank] && has_next_round(x, rank));
}

static int is_gone(const EpExchange *x, int32_t rank) {
    return x->control[rank] &&
           (load(&x->control[rank]->failed.value) & (EP_ABORTED | EP_DEPARTED)) != 0;
}

/* `came`: the ranks that have been seen with a ballot. */
static void look_at(EpExchange *x, int32_t rank, EpMask *came, Look *look) {
    const EpVote *vote = &x->votes[rank];
    if (x->control[rank]) read_ballot(x, rank);
    if (!x->control[rank] && exchange_messages(x, rank) != EP_OK) look->gone = rank;
    if (is_gone(x, rank)) look->gone = rank;
    if (is_done(x, rank)) look->is_done = 1;
    int has_ballot = ep_exchange_is_voting(x, rank, vote);
    if (has_ballot) ep_mask_add(came, rank);
    if (!has_ballot) look->missing = rank;
    if (!ep_mask_has(came, rank)) look->absent = rank;
    if (!has_ballot) return;
    if (memcmp(&vote->alive, &x->own.alive, sizeof(EpMask))) look->differs = rank;
    look->tickets += ep_mask_digest(rank, vote->ticket);
    if (vote->state != EP_VOTE_READY || vote->seen != x->own.seen) look->slow = rank;
}

static Look look_at_all(EpExchange *x, EpMask *came) {
    Look look = {-1, -1, -1, -1, -1, 0, ep_mask_digest(x->rank, x->own.ticket)};
    for (int32_t r = 0; r < x->size; r++)
        if (is_peer(x, r)) look_at(x, r, came, &look);
    return look;
}

/* Returns whom to blame at the deadline: rather a rank that never came than one that gave up. */
static int32_t find_late(const Look *look) {
    return look->absent >= 0 ? look->absent : look->missing >= 0 ? look->missing : look->slow;
}

static void go_on(EpExchange *x) {
    EpControl *own = x->control[x->rank];
    x->base = x->round = x->next_base;
    x->alive = x->own.alive;
    x->cut = (EpMask){{0}};
    for (int32_t r = 0; r < x->size; r++) {
        if (!is_peer(x, r)) continue;
        x->past[r] = x->expected[r];
        x->remote[r].posted = x->round + (x->remote[r].receiving[1] ? 2 : 1); /* or received */
        store(&own->released[r].value, x->round);
    }
    store(&own->published.value, x->round);
    store(&own->base.value, x->round);
    EP_EXCHANGE_FENCE();
    x->own.done = x->own.seen;
    store(&own->ballot.done, x->own.done);
    show_state(x, EP_VOTE_DONE);
    x->op = NULL, x->noted = 0, x->refused = 0;
    x->failure = (EpExchangeFailure){.status = EP_OK};
}

/* ---- giving up ----------------------------------------------------------------------------- */

/* `mine`, `theirs`: a rank that is in one set alone, or -1. */
static EpStatus withdraw(EpExchange *x, EpStatus status, int32_t rank, int32_t mine,
                         int32_t theirs) {
    show_state(x, EP_VOTE_NONE);
    for (int32_t r = 0; r < x->size; r++)
        if (is_peer(x, r) && !x->control[r]) (void)send_ballot(x, r);
    (void)ep_exchange_fail(x, EP_ERR_TIMEOUT, rank, mine, theirs, "");
    return ep_fail(status, "%s", x->failure.sentence);
}

static EpStatus fail_missing(EpExchange *x, int32_t rank) {
    ep_fail(EP_ERR_TIMEOUT, "rank %d: ep_group_mask: rank %d did not call it within %g s", x->rank,
            rank, x->timeout);
    return withdraw(x, EP_ERR_TIMEOUT, rank, -1, -1);
}

static EpStatus fail_gone(EpExchange *x, int32_t rank) {
    ep_fail(EP_ERR_TIMEOUT,
            "rank %d: ep_group_mask: rank %d is in `alive`, but has ended or was aborted", x->rank,
            rank);
    return withdraw(x, EP_ERR_TIMEOUT, rank, -1, -1);
}

static EpStatus fail_differs(EpExchange *x, int32_t rank) {
    int32_t r = 0;
    while (ep_mask_has(&x->own.alive, r) == ep_mask_has(&x->votes[rank].alive, r))
        r++;
    int here = ep_mask_has(&x->own.alive, r);
    ep_fail(EP_ERR_ORDER,
            "rank %d: ep_group_mask: expected one set on all ranks, got rank %d as %s on rank %d "
            "and as %s on rank %d",
            x->rank, r, here ? "alive" : "masked", x->rank, here ? "masked" : "alive", rank);
    return withdraw(x, EP_ERR_ORDER, rank, here ? r : -1, here ? -1 : r);
}

static EpStatus fail_aborted(EpExchange *x) {
    show_state(x, EP_VOTE_NONE);
    ep_fail(EP_ERR_ABORTED, "rank %d: ep_group_mask: the group was aborted", x->rank);
    return ep_exchange_fail(x, EP_ERR_ABORTED, x->rank, -1, -1, "");
}

/* Wait until the rendezvous has succeeded. */
static EpStatus await_all(EpExchange *x) {
    double differs_since = 0;
    EpMask came = {{0}};
    EpWait wait;
    ep_wait_begin(&wait, x->timeout, x->spins);
    for (;;) {
        Look look = look_at_all(x, &came);
        int is_ready = x->own.state == EP_VOTE_READY;
        int is_alike = look.missing < 0 && look.differs < 0;
        if (is_ready && look.tickets != x->own.seen) is_alike = 0;
        if (look.is_done || (is_ready && is_alike && look.slow < 0)) return EP_OK;
        if (ep_abort_requested(x->abort)) return fail_aborted(x);
        if (look.gone >= 0) return fail_gone(x, look.gone);
        if (is_ready && !is_alike) show_state(x, EP_VOTE_CAST);
        if (!is_ready && is_alike) become_ready(x, look.tickets);
        if (look.differs < 0) differs_since = 0;
        if (look.differs >= 0 && !differs_since) differs_since = ep_clock();
        int is_late = !ep_wait_pause(&wait);
        if (look.differs >= 0 && (is_late || ep_clock() - differs_since > GRACE_SECONDS))
            return fail_differs(x, look.differs);
        if (is_late) return fail_missing(x, find_late(&look));
    }
}

EpStatus ep_exchange_mask(EpExchange *x, const EpMask *alive) {
    x->op = &mask_op;
    clear_failure(x);
    cast(x, alive);
    EP_TRY(await_all(x));
    go_on(x);
    for (int32_t r = 0; r < x->size; r++)
        if (is_peer(x, r) && !x->control[r]) (void)send_ballot(x, r);
    return EP_OK;
}
