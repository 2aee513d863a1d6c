/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/host/exchange_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/callback.h"
#include "runtime/object.h"
#include "runtime/wait.h"

#define LINE 64
#define BUFFERS EP_EXCHANGE_BUFFERS
#define PAUSES_PER_LOOK 1024
#define PAUSES_PER_TEST 8 /* of all messages, in a crowd */

typedef EpRemote Remote;

_Static_assert(sizeof(EpRoundHeader) == LINE, "regions start with one cache line for a header");

/* ---- sizes --------------------------------------------------------------------------------- */

int64_t ep_exchange_control_bytes(int32_t num_ranks) {
    return (int64_t)sizeof(EpControl) + num_ranks * (int64_t)sizeof(EpCounter);
}

static int64_t buffer_bytes(int32_t most_remote, int64_t stage_bytes) {
    return stage_bytes / (most_remote ? 2 * BUFFERS : BUFFERS) / LINE * LINE;
}

int64_t ep_exchange_least_stage(int32_t num_ranks, int64_t body_bytes) {
    int64_t region = (LINE + body_bytes + LINE - 1) / LINE * LINE;
    return 2 * BUFFERS * num_ranks * region;
}

int64_t ep_exchange_segment_bytes(int32_t num_ranks, int32_t most_remote, int64_t stage_bytes) {
    return ep_exchange_control_bytes(num_ranks) + BUFFERS * buffer_bytes(most_remote, stage_bytes);
}

int64_t ep_exchange_ballot_bytes(void) {
    return (int64_t)sizeof(EpVote);
}

/* Of masks, for each rank. */
#define MASK_BYTES (int64_t)(sizeof(EpVote) + 2 * sizeof(uint64_t))

int64_t ep_exchange_private_bytes(int32_t num_ranks, int masks) {
    return (int64_t)sizeof(EpExchange) +
           num_ranks * (int64_t)(sizeof(EpControl *) + sizeof(Remote)) +
           (masks ? num_ranks * (MASK_BYTES + EP_BALLOT_BYTES) : 0);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void map_control(EpExchange *x, void *const *segments) {
    for (int32_t r = 0; r < x->size; r++) {
        x->control[r] = segments[r];
        x->peers_on_node += r != x->rank && segments[r];
    }
}

/* Returns whether a rank is on another node, or may be once. */
static int has_inboxes(const EpExchange *x, int32_t rank, int joins) {
    return joins ? rank != x->rank : !x->control[rank];
}

static void divide_inboxes(EpExchange *x, int64_t bytes, int joins) {
    char *next = x->inboxes;
    for (int32_t r = 0; r < x->size; r++)
        for (int parity = 0; parity < BUFFERS && has_inboxes(x, r, joins); parity++, next += bytes)
            x->remote[r].inbox[parity] = next;
}

static void forget(EpExchange *x, int32_t rank) {
    Remote *remote = &x->remote[rank];
    free(remote->refusal);
    *remote = (Remote){.inbox = {remote->inbox[0], remote->inbox[1]}};
    for (int parity = 0; parity < BUFFERS && x->spans_nodes; parity++)
        memset(remote->inbox[parity], 0, LINE);
    if (x->ballots) memset(x->ballots + rank * EP_BALLOT_BYTES, 0, (size_t)EP_BALLOT_BYTES);
    x->votes[rank] = (EpVote){.state = EP_VOTE_NONE};
    x->expected[rank] = x->past[rank] = 0;
}

void ep_exchange_admit(EpExchange *x, const EpMask *changed, void *const *segments,
                       const EpMask *alive) {
    x->peers_on_node = 0;
    for (int32_t r = 0; r < x->size; r++) {
        if (r == x->rank) continue;
        if (ep_mask_has(changed, r)) forget(x, r);
        if (ep_mask_has(changed, r)) x->control[r] = segments[r];
        x->peers_on_node += x->control[r] != NULL;
    }
    x->alive = *alive;
    for (int i = 0; i < EP_MASK_WORDS; i++)
        x->cut.word[i] &= alive->word[i];
}

/* Returns 0 when out of memory. */
static int open_masks(EpExchange *x, int masks) {
    size_t size = (size_t)x->size;
    x->alive = ep_mask_of_all(x->size);
    x->masks = masks;
    x->late = -1;
    if (!masks) return 1;
    x->votes = calloc(size, sizeof(*x->votes));
    x->expected = calloc(size, sizeof(*x->expected));
    x->past = calloc(size, sizeof(*x->past));
    if (x->spans_nodes) x->ballots = calloc(size, (size_t)EP_BALLOT_BYTES);
    return x->votes && x->expected && x->past && (x->ballots || !x->spans_nodes);
}

EpExchange *ep_exchange_create(const EpExchangeSetup *setup) {
    const EpBootstrap *b = setup->bootstrap;
    EpExchange *x = calloc(1, sizeof(*x));
    if (!x) return NULL;
    x->bootstrap = b, x->rank = b->rank, x->size = b->size;
    x->abort = setup->abort;
    x->tag = setup->tag, x->timeout = setup->timeout, x->spins = setup->spins;
    x->buffer_bytes = buffer_bytes(setup->most_remote, setup->stage_bytes);
    x->spans_nodes = setup->most_remote > 0;
    x->region_bytes[EP_ROUND_EACH] = x->buffer_bytes / x->size / LINE * LINE;
    x->region_bytes[EP_ROUND_SHARED] =
        x->spans_nodes ? x->region_bytes[EP_ROUND_EACH] : x->buffer_bytes;
    x->control = calloc((size_t)x->size, sizeof(*x->control));
    x->remote = calloc((size_t)x->size, sizeof(*x->remote));
    if (x->control && x->remote) map_control(x, setup->segments);
    int32_t remotes = setup->joins ? x->size - 1 : x->size - 1 - x->peers_on_node;
    int64_t bytes = x->region_bytes[EP_ROUND_EACH] * BUFFERS * remotes;
    if (x->spans_nodes) x->inboxes = aligned_alloc(LINE, (size_t)bytes + LINE);
    if (x->spans_nodes) x->note = calloc(1, LINE + EP_ABORT_BYTES);
    if (x->spans_nodes) x->refusal = calloc(1, LINE + EP_ABORT_BYTES);
    int has_messages = x->inboxes && x->note && x->refusal;
    if (!open_masks(x, setup->masks) || !x->control || !x->remote ||
        (x->spans_nodes && !has_messages)) {
        (void)ep_exchange_destroy(x, 0);
        return NULL;
    }
    divide_inboxes(x, x->region_bytes[EP_ROUND_EACH], setup->joins);
    x->own.ticket = setup->ticket;
    return x;
}

/* Cancel a request. Returns 0 if there was none. */
static int cancel(const EpExchange *x, void **request) {
    if (!*request) return 0;
    x->bootstrap->cancel(x->bootstrap->context, request);
    return 1;
}

/* A canceled message may still use its memory. */
static void free_or_keep(void *memory, int messages) {
    (messages ? ep_keep_memory : free)(memory);
}

int ep_exchange_destroy(EpExchange *x, int together) {
    int sends = 0, receives = 0, notes = 0, refusals = 0, ballots = 0;
    if (!x) return 0;
    for (int32_t r = 0; x->remote && r < x->size; r++) {
        notes += cancel(x, &x->remote[r].sending_note);
        refusals += cancel(x, &x->remote[r].sending_refusal);
        ballots += cancel(x, &x->remote[r].sending_ballot);
        free(x->remote[r].refusal);
    }
    for (int32_t r = 0; x->remote && r < x->size; r++)
        for (int parity = 0; parity < BUFFERS; parity++) {
            sends += cancel(x, &x->remote[r].sending[parity]);
            receives += cancel(x, &x->remote[r].receiving[parity]);
        }
    /* Where all ranks are here, only find_note has posted receives. */
    free_or_keep(x->inboxes, receives && !together);
    free_or_keep(x->note, notes);
    free_or_keep(x->refusal, refusals);
    free_or_keep(x->ballots, ballots);
    free(x->votes);
    free(x->expected);
    free(x->past);
    free(x->remote);
    free(x->control);
    free(x);
    return sends > 0;
}

/* ---- who takes part ------------------------------------------------------------------------ */

static int takes_part(const EpExchange *x, int32_t rank) {
    return ep_mask_has(&x->alive, rank) && !ep_mask_has(&x->cut, rank);
}

double ep_exchange_set_late(EpExchange *x, double seconds) {
    double before = x->late;
    x->late = seconds;
    return before;
}

int ep_exchange_cuts_late(const EpExchange *x) {
    return x->late >= 0;
}

const EpMask *ep_exchange_cuts(const EpExchange *x) {
    return &x->cut;
}

void ep_exchange_cut(EpExchange *x, int32_t rank) {
    _Atomic uint64_t *word = &x->control[x->rank]->released[rank].cut;
    ep_mask_add(&x->cut, rank);
    atomic_store_explicit(word, 1 + x->base, memory_order_release);
    EP_EXCHANGE_FENCE();
}

/* ---- failure ------------------------------------------------------------------------------- */

const EpExchangeFailure *ep_exchange_failure(const EpExchange *x) {
    return &x->failure;
}

static uint64_t load(const EpCounter *counter) {
    return atomic_load_explicit(&counter->value, memory_order_acquire);
}

/* Returns whom a rank's word `failed` blames, or -1. */
static int32_t blamed_in(uint64_t failed) {
    return (int32_t)(uint32_t)failed - 1;
}

/* Publish to the peers on this node that this rank has failed, unless that is published. They then
 * need not wait for their own timeouts. `failed`: 1 + the rank to blame, and EP_ABORTED. */
static int publish_failure(EpExchange *x, uint64_t failed) {
    _Atomic uint64_t *word = &x->control[x->rank]->failed.value;
    uint64_t departed = load(&x->control[x->rank]->failed) & EP_DEPARTED;
    return atomic_compare_exchange_strong_explicit(word, &departed, departed | failed,
                                                   memory_order_release, memory_order_relaxed);
}

/* The same, by this rank's own thread, with what it has heard of the rank to blame. */
static void publish_heard(EpExchange *x, int32_t blamed, const char *why) {
    EpControl *own = x->control[x->rank];
    if (load(&own->failed)) return;
    memcpy(own->heard, why, strnlen(why, EP_ABORT_BYTES - 1));
    (void)publish_failure(x, 1 + (uint64_t)blamed);
}

/* Write a message to peers on other nodes. Returns its bytes: a sentence is cut to their room. */
static size_t write_note(const EpExchange *x, char *note, EpRoundHeader header, const char *why) {
    int64_t room = x->region_bytes[EP_ROUND_EACH] - LINE;
    int64_t bytes = room < EP_ABORT_BYTES ? room : EP_ABORT_BYTES;
    header.round = x->round + 1;
    memset(note, 0, LINE + EP_ABORT_BYTES);
    memcpy(note, &header, sizeof(header));
    memcpy(note + LINE, why, strnlen(why, (size_t)bytes - 1));
    return (size_t)(LINE + bytes);
}

/* Returns whether a rank takes part, on another node. */
static int is_remote(const EpExchange *x, int32_t rank) {
    return !x->control[rank] && takes_part(x, rank);
}

/** Messages that are no round's. */
typedef enum Word { SENDING_NOTE, SENDING_REFUSAL, SENDING_BALLOT } Word;

static void **find_word_request(Remote *remote, Word word) {
    return word == SENDING_NOTE      ? &remote->sending_note
           : word == SENDING_REFUSAL ? &remote->sending_refusal
                                     : &remote->sending_ballot;
}

/* Returns whether no peer is still being sent the last message of this kind. A masked one may be
 * for ever: it drops the message, whatever its words have become. */
static int has_sent(EpExchange *x, Word word) {
    const EpBootstrap *b = x->bootstrap;
    int left = 0;
    for (int32_t r = 0; r < x->size; r++) {
        int done = 1;
        void **request = find_word_request(&x->remote[r], word);
        if (*request && ep_call_test(b, request, &done) != EP_OK) done = 0;
        if (done) *request = NULL;
        left += !done && takes_part(x, r);
    }
    return !left;
}

/* Send the note to peers on other nodes: whom this rank blames and, if it knows, why that one went,
 * or that this rank departs. Whether it arrives is not waited for: this group is at its end. */
static void send_notes(EpExchange *x, int32_t blamed, int departs, const char *why) {
    const EpBootstrap *b = x->bootstrap;
    if (!x->spans_nodes || x->noted || !has_sent(x, SENDING_NOTE)) return;
    x->noted = 1;
    EpRoundHeader header = {.op = EP_NOTE, .fact = {blamed, departs}};
    size_t bytes = write_note(x, x->note, header, why);
    for (int32_t r = 0; r < x->size; r++)
        if (is_remote(x, r))
            (void)ep_call_isend(b, r, x->tag, x->note, bytes, &x->remote[r].sending_note);
}

EpStatus ep_exchange_fail(EpExchange *x, EpStatus status, int32_t blamed, int64_t expected,
                          int64_t seen, const char *why) {
    EpExchangeFailure *failure = &x->failure;
    failure->suspends = x->masks && (status == EP_ERR_TIMEOUT || status == EP_ERR_PEER);
    if (failure->suspends) status = EP_ERR_TIMEOUT;
    failure->status = status, failure->peer = blamed, failure->phase = x->op->name;
    failure->expected = expected, failure->seen = seen;
    strcpy(failure->sentence, ep_last_error());
    publish_heard(x, blamed, why);
    send_notes(x, blamed, 0, why);
    return ep_fail(status, "%s", failure->sentence);
}

static EpStatus fail_exchange(EpExchange *x, EpStatus status, int32_t blamed, int64_t expected,
                              int64_t seen) {
    return ep_exchange_fail(x, status, blamed, expected, seen, "");
}

static int is_aborted(const EpExchange *x, int32_t rank) {
    return x->control[rank] && (load(&x->control[rank]->failed) & EP_ABORTED);
}

/* ---- aborts -------------------------------------------------------------------------------- */

int ep_exchange_abort(EpExchange *x, const char *why) {
    memcpy(x->control[x->rank]->why, why, EP_ABORT_BYTES);
    return publish_failure(x, EP_ABORTED | (1 + (uint64_t)x->rank));
}

/* Returns a rank on this node that is aborted, or -1. */
static int32_t find_aborted(const EpExchange *x) {
    int32_t r = 0;
    while (r < x->size && (r == x->rank || !takes_part(x, r) || !is_aborted(x, r)))
        r++;
    return r < x->size ? r : -1;
}

void ep_exchange_give_up(EpExchange *x, int32_t blamed, const char *why) {
    publish_heard(x, blamed, why);
    send_notes(x, blamed, 0, why);
}

/* ---- refused calls ------------------------------------------------------------------------- */

/* Peers on other nodes get one message before each round: they read it when they wait for that. */
static void send_refusal(EpExchange *x, const char *text) {
    const EpBootstrap *b = x->bootstrap;
    if (!x->spans_nodes || x->noted || x->refused == x->round + 1) return;
    if (!has_sent(x, SENDING_REFUSAL)) return;
    x->refused = x->round + 1;
    size_t bytes = write_note(x, x->refusal, (EpRoundHeader){.op = EP_REFUSED}, text);
    for (int32_t r = 0; r < x->size; r++)
        if (is_remote(x, r))
            (void)ep_call_isend(b, r, x->tag, x->refusal, bytes, &x->remote[r].sending_refusal);
}

void ep_exchange_refuse(EpExchange *x, const char *text) {
    uint64_t words[EP_ABORT_BYTES / 8];
    memcpy(words, text, sizeof(words));
    for (int i = 0; i < EP_ABORT_BYTES / 8; i++)
        atomic_store_explicit(&x->control[x->rank]->refusal[i], words[i], memory_order_relaxed);
    if (text[0]) send_refusal(x, text);
}

/* Get what is known of a rank's last call, if that was refused, else "". */
static void find_refusal(const EpExchange *x, int32_t rank, char out[EP_ABORT_BYTES]) {
    const EpControl *control = x->control[rank];
    uint64_t words[EP_ABORT_BYTES / 8];
    if (!control) {
        snprintf(out, EP_ABORT_BYTES, "%s", x->remote[rank].refusal ? x->remote[rank].refusal : "");
        return;
    }
    for (int i = 0; i < EP_ABORT_BYTES / 8; i++)
        words[i] = atomic_load_explicit(&control->refusal[i], memory_order_relaxed);
    memcpy(out, words, EP_ABORT_BYTES);
}

/* Keep a message that says why a peer's call was refused. */
static void take_refusal(Remote *remote, const char *text) {
    if (!remote->refusal) remote->refusal = malloc(EP_ABORT_BYTES);
    if (remote->refusal) snprintf(remote->refusal, EP_ABORT_BYTES, "%s", text);
}

void ep_exchange_depart(EpExchange *x, const char *why) {
    EpControl *own = x->control[x->rank];
    x->departs = 1;
    if (!load(&own->failed)) memcpy(own->heard, why, strnlen(why, EP_ABORT_BYTES - 1));
    atomic_fetch_or_explicit(&own->failed.value, EP_DEPARTED, memory_order_release);
    send_notes(x, x->rank, 1, why);
}

/* ---- messages between nodes ----------------------------------------------------------------- */

/* A message fails: its peer may have ended. */
static EpStatus fail_message(EpExchange *x, EpStatus status, int32_t peer) {
    if (x->late < 0 || status != EP_ERR_PEER) return fail_exchange(x, status, peer, -1, -1);
    ep_exchange_cut(x, peer);
    return EP_OK;
}

static EpStatus test_request(EpExchange *x, int32_t peer, void **request) {
    int done = 0;
    if (!*request) return EP_OK;
    EpStatus status = ep_call_test(x->bootstrap, request, &done);
    if (status != EP_OK) return fail_message(x, status, peer);
    if (done) *request = NULL;
    return EP_OK;
}

/* Post the receive of a round's message, unless find_note has. */
static EpStatus post_receive(EpExchange *x, int32_t peer, uint64_t round) {
    Remote *remote = &x->remote[peer];
    if (remote->posted == round) return EP_OK;
    remote->posted = round;
    return ep_exchange_post(x, peer, (int)(round % BUFFERS));
}

EpStatus ep_exchange_post(EpExchange *x, int32_t peer, int parity) {
    Remote *remote = &x->remote[peer];
    return ep_call_irecv(x->bootstrap, peer, x->tag, remote->inbox[parity],
                         (size_t)x->region_bytes[EP_ROUND_EACH], &remote->receiving[parity]);
}

/* A rank keeps the latest ballot, since it may look at them in any order. */
void ep_exchange_take_word(EpExchange *x, int32_t peer, const EpRoundHeader *message) {
    const char *body = (const char *)message + LINE;
    if (message->op == EP_REFUSED) take_refusal(&x->remote[peer], body);
    if (message->op == EP_BALLOT && x->masks) memcpy(&x->votes[peer], body, sizeof(EpVote));
}

/* Test a receive. A refusal or a ballot is not the awaited message: that comes next, into the same
 * inbox. */
static EpStatus try_receive(EpExchange *x, int32_t peer, int parity) {
    const EpBootstrap *b = x->bootstrap;
    Remote *remote = &x->remote[peer];
    const EpRoundHeader *header = (const EpRoundHeader *)remote->inbox[parity];
    int done = 0;
    if (!remote->receiving[parity]) return EP_OK;
    EP_TRY(ep_call_test(b, &remote->receiving[parity], &done));
    if (!done) return EP_OK;
    remote->receiving[parity] = NULL;
    if (remote->refusal && header->op > 0) remote->refusal[0] = 0;
    if (header->op != EP_REFUSED && header->op != EP_BALLOT) return EP_OK;
    ep_exchange_take_word(x, peer, header);
    return ep_exchange_post(x, peer, parity);
}

static EpStatus test_receive(EpExchange *x, int32_t peer, int parity) {
    EpStatus status = try_receive(x, peer, parity);
    return status == EP_OK ? EP_OK : fail_message(x, status, peer);
}

/* Test all pending messages. They may make progress only in such tests, so every wait calls this,
 * whatever it waits for. Else two ranks on different nodes could deadlock: each waits for a peer
 * that in turn waits for the other one's message. */
static EpStatus test_messages(EpExchange *x) {
    for (int32_t r = 0; r < x->size && x->spans_nodes; r++)
        for (int parity = 0; parity < BUFFERS && is_remote(x, r); parity++) {
            EP_TRY(test_request(x, r, &x->remote[r].sending[parity]));
            EP_TRY(test_receive(x, r, parity));
        }
    return EP_OK;
}

/* The same in a wait for a peer. In a crowd many ranks look at many messages each, which costs more
 * than what it finds: then look at that peer's, and at all of them now and then. */
static EpStatus test_in_wait(EpExchange *x, int32_t peer, const EpWait *wait) {
    if (x->spins >= 0 || wait->pauses % PAUSES_PER_TEST == 0) return test_messages(x);
    for (int parity = 0; parity < BUFFERS && !x->control[peer]; parity++) {
        EP_TRY(test_request(x, peer, &x->remote[peer].sending[parity]));
        EP_TRY(test_receive(x, peer, parity));
    }
    return EP_OK;
}

/* ---- whom to blame ------------------------------------------------------------------------- */

#define GRACE_SECONDS .25

/* Returns whom a rank that has given up blames, or -1: it has not, as far as is known here. `why`
 * becomes what that rank knows of the reason, or "". */
static int32_t find_blamed_by(const EpExchange *x, int32_t rank, char why[EP_ABORT_BYTES]) {
    int parity = (int)(x->round % BUFFERS);
    const EpControl *control = x->control[rank];
    why[0] = 0;
    if (control) {
        uint64_t failed = load(&control->failed);
        if (failed)
            memcpy(why, failed & EP_ABORTED ? control->why : control->heard, EP_ABORT_BYTES);
        return failed == EP_DEPARTED ? rank : blamed_in(failed);
    }
    if (x->remote[rank].receiving[parity]) return -1;
    const EpRoundHeader *header = (const EpRoundHeader *)x->remote[rank].inbox[parity];
    if (header->op != EP_NOTE) return -1;
    snprintf(why, EP_ABORT_BYTES, "%s", (const char *)header + LINE);
    return (int32_t)header->fact[0];
}

/* A rank that is late may itself wait for another one. Its own deadline passes at about this time,
 * so give it a moment to say so, and follow its word. Returns the rank to blame; `why` becomes what
 * is known of it. */
static int32_t follow_blame(EpExchange *x, int32_t blamed, char why[EP_ABORT_BYTES]) {
    char heard[EP_ABORT_BYTES];
    EpWait wait;
    ep_wait_begin(&wait, GRACE_SECONDS, x->spins);
    for (int32_t hops = 0; blamed != x->rank && hops < x->size;) {
        int32_t next = find_blamed_by(x, blamed, heard);
        if (heard[0] && next != x->rank) memcpy(why, heard, EP_ABORT_BYTES);
        if (next == blamed || next == x->rank) break; /* itself, or this rank */
        if (next >= 0) blamed = next, hops++;
        if (next < 0 && (test_messages(x) != EP_OK || !ep_wait_pause(&wait))) break;
    }
    if (!why[0] && blamed != x->rank) find_refusal(x, blamed, why);
    return blamed;
}

/* Tell the peers at once, who may be about to blame this rank. */
static EpStatus fail_timeout(EpExchange *x, int32_t peer, const char *what, uint64_t expected,
                             uint64_t seen) {
    char refusal[EP_ABORT_BYTES], why[EP_ABORT_BYTES] = "";
    find_refusal(x, peer, refusal);
    publish_heard(x, peer, refusal);
    send_notes(x, peer, 0, refusal);
    int32_t blamed = follow_blame(x, peer, why);
    if (blamed != peer) {
        ep_fail_peer(x->rank, x->op->name, peer, blamed, why);
        return ep_exchange_fail(x, EP_ERR_PEER, blamed, -1, -1, why);
    }
    ep_fail(EP_ERR_TIMEOUT,
            "rank %d: %s: rank %d did not %s within %g s (expected round %llu, seen %llu)%s%s",
            x->rank, x->op->name, peer, what, x->timeout, (unsigned long long)expected,
            (unsigned long long)seen, refusal[0] ? "; " : "", refusal);
    return ep_exchange_fail(x, EP_ERR_TIMEOUT, peer, (int64_t)expected, (int64_t)seen, refusal);
}

/* A peer has given up because of a rank, perhaps itself. `heard`: what is known of that. */
static EpStatus fail_peer(EpExchange *x, int32_t peer, int32_t blamed, const char *heard) {
    char why[EP_ABORT_BYTES];
    snprintf(why, sizeof(why), "%s", heard);
    blamed = follow_blame(x, blamed, why);
    ep_fail_peer(x->rank, x->op->name, peer, blamed, why);
    return ep_exchange_fail(x, EP_ERR_PEER, blamed, -1, -1, why);
}

/* A peer on this node says in its control block that it has given up. */
static EpStatus fail_gone(EpExchange *x, int32_t peer) {
    char why[EP_ABORT_BYTES];
    int32_t blamed = find_blamed_by(x, peer, why);
    return fail_peer(x, peer, blamed, why);
}

/* Get whom a rank on another node blames that has given up, or -1: its note comes in place of the
 * next round's message. That message itself stays for its round; a rank that departs takes it as a
 * word that the other one waits for it. A rank that has departed waits for those that end the
 * group, too (`ends`). */
static int32_t find_note(EpExchange *x, int32_t rank, int ends, char why[EP_ABORT_BYTES]) {
    uint64_t next = x->round + 1;
    int parity = (int)(next % BUFFERS);
    const EpRoundHeader *header = (const EpRoundHeader *)x->remote[rank].inbox[parity];
    EpStatus status = post_receive(x, rank, next);
    if (status == EP_OK) status = try_receive(x, rank, parity);
    why[0] = 0;
    if (status != EP_OK || x->remote[rank].receiving[parity]) return -1;
    if (header->op != EP_NOTE) return x->departs ? x->rank : -1;
    if (ends && header->fact[1]) return -1;
    snprintf(why, EP_ABORT_BYTES, "%s", (const char *)header + LINE);
    return (int32_t)header->fact[0];
}

/* The same of a rank on this node. */
static int32_t find_word(const EpExchange *x, int32_t rank, char why[EP_ABORT_BYTES]) {
    const EpControl *control = x->control[rank];
    uint64_t failed = load(&control->failed);
    why[0] = 0;
    if (x->departs && load(&control->published) > x->round) return x->rank;
    return blamed_in(failed) < 0 ? -1 : find_blamed_by(x, rank, why);
}

/* A rank that has given up at its deadline does not say why: this one names the late rank better.
 */
int32_t ep_exchange_find_failed(EpExchange *x, int ends, int32_t *blamed,
                                char why[EP_ABORT_BYTES]) {
    for (int32_t r = 0; r < x->size; r++) {
        if (r == x->rank || !takes_part(x, r)) continue;
        *blamed = x->control[r] ? find_word(x, r, why) : find_note(x, r, ends, why);
        if (*blamed >= 0 && (why[0] || *blamed == x->rank)) return r;
    }
    return -1;
}

/* ---- waiting ------------------------------------------------------------------------------- */

/* Look for aborts, in a wait: this rank's at every poll, since the flag is its own; now and then
 * those of all ranks on the node, since without them the group will not go on. */
static EpStatus check_aborts(EpExchange *x, const EpWait *wait) {
    if (ep_abort_requested(x->abort)) {
        char why[EP_ABORT_BYTES];
        ep_abort_compose(x->abort, x->abort->sentence, why);
        ep_fail(EP_ERR_ABORTED, "rank %d: %s: the group was aborted", x->rank, x->op->name);
        return ep_exchange_fail(x, EP_ERR_ABORTED, x->rank, -1, -1, why);
    }
    int looks = x->spins < 0 ? 4 * PAUSES_PER_TEST : wait->sleeps ? 1 : PAUSES_PER_LOOK;
    if ((wait->pauses + 1) % looks) return EP_OK;
    int32_t r = find_aborted(x);
    if (r >= 0 && x->late >= 0) ep_exchange_cut(x, r);
    return r < 0 || x->late >= 0 ? EP_OK : fail_gone(x, r);
}

/* Returns whether a peer is in a rendezvous of living ranks, and so in no round. */
static int is_voting(const EpExchange *x, int32_t peer) {
    EpVote vote = {.state = EP_VOTE_NONE};
    if (!x->masks) return 0;
    if (x->control[peer]) {
        uint64_t word = atomic_load_explicit(&x->control[peer]->ballot.word, memory_order_acquire);
        vote.state = word & 3, vote.ticket = word >> 2;
    } else {
        vote = x->votes[peer];
    }
    return ep_exchange_is_voting(x, peer, &vote);
}

static EpStatus fail_voting(EpExchange *x, int32_t peer) {
    ep_fail(EP_ERR_TIMEOUT, "rank %d: %s: rank %d has left it to call ep_group_mask", x->rank,
            x->op->name, peer);
    return ep_exchange_fail(x, EP_ERR_TIMEOUT, peer, -1, -1, "");
}

/* Returns whether a peer on this node has a newer set of living ranks than this rank. */
static int has_gone_on(const EpExchange *x, int32_t peer) {
    return x->masks && load(&x->control[peer]->base) > x->base;
}

static EpStatus fail_left_behind(EpExchange *x, int32_t peer) {
    ep_fail(EP_ERR_TIMEOUT, "rank %d: %s: rank %d has masked this rank", x->rank, x->op->name,
            peer);
    return ep_exchange_fail(x, EP_ERR_TIMEOUT, x->rank, -1, -1, "");
}

void ep_exchange_measure(EpExchange *x, double *waited) {
    x->waited = waited;
}

/* Returns when a wait began, if it is measured and has to wait at all; else 0. */
static double begin_measure(const EpExchange *x, int waits) {
    return x->waited && waits ? ep_clock() : 0;
}

static void end_measure(const EpExchange *x, int32_t peer, double start) {
    if (start > 0) x->waited[peer] += ep_clock() - start;
}

/* Returns whether a peer on this node has cut this rank. */
static int has_cut(const EpExchange *x, int32_t peer) {
    const EpCounter *word = &x->control[peer]->released[x->rank];
    return atomic_load_explicit(&word->cut, memory_order_acquire) == 1 + x->base;
}

int ep_round_settle(EpExchange *x, int32_t peer) {
    if (x->late < 0 || !x->control[peer]) return 1;
    EP_EXCHANGE_FENCE();
    if (!has_gone_on(x, peer) && !has_cut(x, peer)) return 1;
    ep_exchange_cut(x, peer);
    return 0;
}

/* Returns whether a peer that takes part is found to take part no longer, where late ones are cut.
 * It is cut then. */
static int finds_lost(EpExchange *x, int32_t peer) {
    const EpControl *control = x->control[peer];
    if (x->late < 0) return 0;
    int is_lost =
        is_voting(x, peer) ||
        (control && (load(&control->failed) != 0 || has_gone_on(x, peer) || has_cut(x, peer)));
    if (is_lost) ep_exchange_cut(x, peer);
    return is_lost;
}

int32_t ep_exchange_find_masker(const EpExchange *x) {
    for (int32_t r = 0; r < x->size; r++)
        if (r != x->rank && takes_part(x, r) && x->control[r] &&
            (has_gone_on(x, r) || has_cut(x, r)))
            return r;
    return -1;
}

/* Begin a wait. Those of a part of a round end together, where late ranks are cut. */
static void begin_wait(EpExchange *x, EpWait *wait) {
    double seconds = x->timeout;
    if (x->late >= 0) {
        double now = ep_clock();
        if (!x->late_end) x->late_end = now + (x->late < x->timeout ? x->late : x->timeout);
        seconds = x->late_end > now ? x->late_end - now : 0;
    }
    ep_wait_begin(wait, seconds, x->spins);
}

/* Pause. Returns whether the wait goes on; `is_late`: it has ended, and nobody has been cut. */
static int pause_wait(EpExchange *x, int32_t peer, EpWait *wait, int *is_late) {
    int goes_on = ep_wait_pause(wait);
    *is_late = !goes_on && x->late < 0;
    if (!goes_on && x->late >= 0) ep_exchange_cut(x, peer);
    return goes_on;
}

static EpStatus wait_counter(EpExchange *x, int32_t peer, const EpCounter *counter,
                             uint64_t expected, const char *what) {
    if (load(counter) >= expected) return EP_OK;
    double start = begin_measure(x, 1);
    int is_late = 0;
    EpWait wait;
    begin_wait(x, &wait);
    while (load(counter) < expected && takes_part(x, peer)) {
        uint64_t failed = load(&x->control[peer]->failed);
        int leaves = is_voting(x, peer), gone_on = has_gone_on(x, peer);
        if (load(counter) >= expected || finds_lost(x, peer)) break;
        if (gone_on) return fail_left_behind(x, peer);
        if (failed) return fail_gone(x, peer);
        if (leaves) return fail_voting(x, peer);
        EP_TRY(check_aborts(x, &wait));
        EP_TRY(test_in_wait(x, peer, &wait));
        (void)pause_wait(x, peer, &wait, &is_late);
        if (is_late) return fail_timeout(x, peer, what, expected, load(counter));
    }
    end_measure(x, peer, start);
    return EP_OK;
}

static EpStatus wait_request(EpExchange *x, int32_t peer, void **request, const char *what) {
    if (!*request) return EP_OK;
    double start = begin_measure(x, 1);
    int is_late = 0;
    EpWait wait;
    begin_wait(x, &wait);
    while (*request && takes_part(x, peer)) {
        EP_TRY(check_aborts(x, &wait));
        EP_TRY(test_in_wait(x, peer, &wait));
        if (!*request || finds_lost(x, peer)) break;
        if (is_voting(x, peer)) return fail_voting(x, peer);
        (void)pause_wait(x, peer, &wait, &is_late);
        if (is_late) return fail_timeout(x, peer, what, x->round, x->round - 1);
    }
    end_measure(x, peer, start);
    return EP_OK;
}

/* ---- rounds -------------------------------------------------------------------------------- */

int64_t ep_exchange_body_bytes(const EpExchange *x, EpRoundMode mode) {
    return x->region_bytes[mode] - LINE;
}

int ep_exchange_on_node(const EpExchange *x, int32_t peer) {
    return x->control[peer] != NULL;
}

int ep_exchange_is_alive(const EpExchange *x, int32_t rank) {
    return takes_part(x, rank);
}

int ep_exchange_has_peers_on_node(const EpExchange *x) {
    return x->peers_on_node > 0;
}

/* Returns the region of `reader` in `writer`'s outbox, in the open round. */
static char *region(const EpExchange *x, int32_t writer, int32_t reader) {
    char *outbox = (char *)x->control[writer] + ep_exchange_control_bytes(x->size);
    int64_t index = reader;
    if (x->mode == EP_ROUND_SHARED && x->control[reader]) index = x->spans_nodes ? writer : 0;
    return outbox + (int64_t)(x->round % BUFFERS) * x->buffer_bytes +
           index * x->region_bytes[x->mode];
}

static EpStatus post_receives(EpExchange *x) {
    for (int32_t r = 0; r < x->size; r++) {
        if (!is_remote(x, r)) continue;
        EpStatus status = post_receive(x, r, x->round);
        if (status != EP_OK) return fail_exchange(x, status, r, -1, -1);
        x->remote[r].fill = 0;
    }
    return EP_OK;
}

static EpStatus wait_until_read(EpExchange *x, int32_t peer) {
    if (!x->control[peer])
        return wait_request(x, peer, &x->remote[peer].sending[x->round % BUFFERS], "receive");
    uint64_t reused = x->round > BUFFERS ? x->round - BUFFERS : 0;
    return wait_counter(x, peer, &x->control[peer]->released[x->rank], reused, "finish reading");
}

EpStatus ep_round_open(EpExchange *x, const EpOp *op, const EpRoundHeader *header,
                       EpRoundMode mode) {
    x->round++;
    x->late_end = 0;
    x->op = op, x->mode = mode, x->header = *header;
    x->header.round = x->round, x->header.op = op->code;
    /* A request that has completed takes room until it is tested. */
    for (Word word = SENDING_NOTE; x->spans_nodes && word <= SENDING_BALLOT; word++)
        (void)has_sent(x, word);
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        if (takes_part(x, peer)) EP_TRY(wait_until_read(x, peer));
    }
    return post_receives(x);
}

uint64_t ep_exchange_round(const EpExchange *x) {
    return x->round;
}

void *ep_round_region(EpExchange *x, int32_t peer) {
    return region(x, x->rank, peer) + LINE;
}

void ep_round_fill(EpExchange *x, int32_t peer, int64_t body_bytes) {
    x->remote[peer].fill = body_bytes;
}

static EpStatus send_region(EpExchange *x, int32_t peer) {
    EpStatus status = ep_call_isend(x->bootstrap, peer, x->tag, region(x, x->rank, peer),
                                    (size_t)(LINE + x->remote[peer].fill),
                                    &x->remote[peer].sending[x->round % BUFFERS]);
    return status == EP_OK ? EP_OK : fail_exchange(x, status, peer, -1, -1);
}

EpStatus ep_round_publish(EpExchange *x) {
    x->late_end = 0;
    x->control[x->rank]->header[x->round % BUFFERS] = x->header;
    for (int32_t r = 0; r < x->size; r++)
        if (is_remote(x, r)) memcpy(region(x, x->rank, r), &x->header, sizeof(x->header));
    atomic_store_explicit(&x->control[x->rank]->published.value, x->round, memory_order_release);
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        if (is_remote(x, peer)) EP_TRY(send_region(x, peer));
    }
    return EP_OK;
}

static EpStatus fail_header(EpExchange *x, int32_t peer, const char *what, long long mine,
                            long long theirs) {
    ep_fail(EP_ERR_ORDER, "rank %d: %s: %s differs: rank %d has %lld, rank %d has %lld", x->rank,
            x->op->name, what, x->rank, mine, peer, theirs);
    return fail_exchange(x, EP_ERR_ORDER, peer, mine, theirs);
}

static EpStatus fail_fact(EpExchange *x, int32_t peer, const EpRoundHeader *theirs, int i) {
    EpStatus status = i < x->op->config ? EP_ERR_ORDER : EP_ERR_MISMATCH;
    int64_t own = x->header.fact[i], other = theirs->fact[i];
    char text[EP_OP_VALUES_BYTES];
    ep_fail(status, "rank %d: %s: %s", x->rank, x->op->name,
            ep_op_values(x->op, i, x->rank, own, peer, other, text));
    return fail_exchange(x, status, peer, own, other);
}

static EpStatus fail_other_operation(EpExchange *x, int32_t peer, const EpRoundHeader *theirs) {
    char mine[EP_OP_PLACE_BYTES], other[EP_OP_PLACE_BYTES];
    ep_fail(EP_ERR_ORDER, "rank %d: %s: expected all ranks to call it%s, rank %d called %s%s",
            x->rank, ep_op_name(x->header.op), ep_op_place(x->header.op, x->header.handle, mine),
            peer, ep_op_name(theirs->op), ep_op_place(theirs->op, theirs->handle, other));
    return fail_exchange(x, EP_ERR_ORDER, peer, x->header.op, theirs->op);
}

static EpStatus check_header(EpExchange *x, int32_t peer, const EpRoundHeader *theirs) {
    const EpRoundHeader *mine = &x->header;
    if (theirs->op == EP_NOTE)
        return fail_peer(x, peer, (int32_t)theirs->fact[0], (const char *)theirs + LINE);
    if (x->masks && theirs->round != mine->round) return fail_left_behind(x, peer);
    if (theirs->op != mine->op) return fail_other_operation(x, peer, theirs);
    if (theirs->handle != mine->handle && theirs->handle && mine->handle)
        return fail_header(x, peer, "the handle's id", mine->handle, theirs->handle);
    if (theirs->plan != mine->plan)
        return fail_header(x, peer, "the operation that wrote the plan", mine->plan, theirs->plan);
    for (int i = 0; i < EP_OP_FACTS; i++)
        if (theirs->fact[i] != mine->fact[i]) return fail_fact(x, peer, theirs, i);
    if (theirs->round != mine->round)
        return fail_header(x, peer, "round", (long long)mine->round, (long long)theirs->round);
    return EP_OK;
}

/* Find a peer's message, once it is there. */
static const char *find_message(const EpExchange *x, int32_t peer, const EpRoundHeader **header) {
    int parity = (int)(x->round % BUFFERS);
    const char *message =
        x->control[peer] ? region(x, peer, x->rank) : x->remote[peer].inbox[parity];
    *header = x->control[peer] ? &x->control[peer]->header[parity] : (const EpRoundHeader *)message;
    return message;
}

/* Returns whether a message is none of this round, where late ranks are cut. */
static int is_stray(const EpExchange *x, const EpRoundHeader *header) {
    return x->late >= 0 && (header->op == EP_NOTE || header->round != x->round);
}

/* A peer that goes on without this rank may write its next header meanwhile, so look at a copy. */
EpStatus ep_round_receive(EpExchange *x, int32_t peer, const EpRoundHeader **header,
                          const void **body) {
    const EpRoundHeader *theirs;
    *body = NULL;
    if (x->control[peer])
        EP_TRY(wait_counter(x, peer, &x->control[peer]->published, x->round, "arrive"));
    else
        EP_TRY(wait_request(x, peer, &x->remote[peer].receiving[x->round % BUFFERS], "arrive"));
    if (!takes_part(x, peer)) return EP_OK;
    const char *message = find_message(x, peer, &theirs);
    EpRoundHeader copy = *theirs;
    if (!ep_round_settle(x, peer)) return EP_OK;
    if (is_stray(x, &copy)) {
        ep_exchange_cut(x, peer);
        return EP_OK;
    }
    if (x->masks && x->control[peer]) {
        EP_EXCHANGE_FENCE();
        if (has_gone_on(x, peer)) return fail_left_behind(x, peer);
    }
    EP_TRY(check_header(x, peer, x->masks && x->control[peer] ? &copy : theirs));
    if (header) *header = theirs;
    *body = message + LINE;
    return EP_OK;
}

void ep_round_release(EpExchange *x, int32_t peer) {
    atomic_store_explicit(&x->control[x->rank]->released[peer].value, x->round,
                          memory_order_release);
}

EpStatus ep_round_close(EpExchange *x) {
    if (x->masks) EP_EXCHANGE_FENCE();
    for (int32_t r = 0; x->masks && x->late < 0 && r < x->size; r++)
        if (x->control[r] && takes_part(x, r) && has_gone_on(x, r)) return fail_left_behind(x, r);
    x->op = NULL;
    return EP_OK;
}

EpStatus ep_exchange_flush(EpExchange *x, const EpOp *op) {
    x->op = op;
    for (int32_t r = 0; r < x->size; r++)
        for (int parity = 0; parity < BUFFERS && is_remote(x, r); parity++)
            EP_TRY(wait_request(x, r, &x->remote[r].sending[parity], "receive"));
    x->op = NULL;
    return EP_OK;
}
