/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/host/exchange.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/callback.h"
#include "runtime/kept.h"
#include "runtime/wait.h"

_Static_assert(sizeof(EpRoundHeader) == 64, "regions start with one cache line for a header");

#define LINE 64
#define BUFFERS 2 /* of the outbox, and of each inbox: for even and odd rounds */
#define NOTE (-1) /* in place of an operation's code: the writer has given up */
#define PAUSES_PER_LOOK 1024

/** A peer on another node. Arrays: for even and odd rounds. */
typedef struct Remote {
    char *inbox[BUFFERS];     /* hold its messages */
    void *sending[BUFFERS];   /* requests; NULL: none pending */
    void *receiving[BUFFERS]; /* likewise */
    int64_t fill;             /* body bytes of this round's message to it */
    void *sending_note;
} Remote;

struct EpExchange {
    const EpBootstrap *bootstrap;
    const EpAbort *abort;
    int32_t rank, size;
    int32_t tag;
    double timeout;
    int64_t spins;
    int64_t buffer_bytes;    /* of each of the outbox's buffers */
    int64_t region_bytes[2]; /* by EpRoundMode, header included */
    EpControl **control;     /* [size]: of each rank on the node, else NULL */
    char *inboxes;           /* all inboxes, or NULL */
    Remote *remote;          /* [size] */
    char *note;              /* in a group that spans nodes */
    int noted;               /* 1 once the note was sent */
    int32_t peers_on_node;
    int spans_nodes;
    /* the open round */
    uint64_t round;
    const EpOp *op;
    EpRoundHeader header; /* what this rank publishes and expects of its peers */
    EpRoundMode mode;
    EpExchangeFailure failure;
};

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

int64_t ep_exchange_private_bytes(int32_t num_ranks) {
    return (int64_t)sizeof(EpExchange) +
           num_ranks * (int64_t)(sizeof(EpControl *) + sizeof(Remote));
}

/* ---- life ---------------------------------------------------------------------------------- */

static void map_control(EpExchange *x, void *const *segments) {
    for (int32_t r = 0; r < x->size; r++) {
        x->control[r] = segments[r];
        x->peers_on_node += r != x->rank && segments[r];
    }
}

static void divide_inboxes(EpExchange *x, int64_t bytes) {
    char *next = x->inboxes;
    for (int32_t r = 0; r < x->size; r++)
        for (int parity = 0; parity < BUFFERS && !x->control[r]; parity++, next += bytes)
            x->remote[r].inbox[parity] = next;
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
    int64_t bytes = x->region_bytes[EP_ROUND_EACH] * BUFFERS * (x->size - 1 - x->peers_on_node);
    if (x->spans_nodes) x->inboxes = aligned_alloc(LINE, (size_t)bytes + LINE);
    if (x->spans_nodes) x->note = calloc(1, LINE + EP_ABORT_BYTES);
    if (!x->control || !x->remote || (x->spans_nodes && (!x->inboxes || !x->note))) {
        (void)ep_exchange_destroy(x);
        return NULL;
    }
    divide_inboxes(x, x->region_bytes[EP_ROUND_EACH]);
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

int ep_exchange_destroy(EpExchange *x) {
    int sends = 0, receives = 0, notes = 0;
    if (!x) return 0;
    for (int32_t r = 0; x->remote && r < x->size; r++)
        notes += cancel(x, &x->remote[r].sending_note);
    for (int32_t r = 0; x->remote && r < x->size; r++)
        for (int parity = 0; parity < BUFFERS; parity++) {
            sends += cancel(x, &x->remote[r].sending[parity]);
            receives += cancel(x, &x->remote[r].receiving[parity]);
        }
    free_or_keep(x->inboxes, receives);
    free_or_keep(x->note, notes);
    free(x->remote);
    free(x->control);
    free(x);
    return sends > 0;
}

/* ---- failure ------------------------------------------------------------------------------- */

const EpExchangeFailure *ep_exchange_failure(const EpExchange *x) {
    return &x->failure;
}

/* Publish to the peers on this node that this rank has failed, unless that is published. They then
 * need not wait for their own timeouts. */
static int publish_failure(EpExchange *x, uint64_t failed) {
    uint64_t none = 0;
    return atomic_compare_exchange_strong_explicit(&x->control[x->rank]->failed.value, &none,
                                                   failed, memory_order_release,
                                                   memory_order_relaxed);
}

/* Send the note to peers on other nodes: whom this rank blames and, if it was aborted, why. Whether
 * it arrives is not waited for: this group is at its end. */
static void send_notes(EpExchange *x, int32_t blamed) {
    const EpBootstrap *b = x->bootstrap;
    EpRoundHeader header = {.round = x->round + 1, .op = NOTE, .fact = {blamed}};
    int64_t room = x->region_bytes[EP_ROUND_EACH] - LINE;
    int64_t bytes = room < EP_ABORT_BYTES ? room : EP_ABORT_BYTES;
    if (!x->spans_nodes || x->noted) return;
    x->noted = 1;
    memcpy(x->note, &header, sizeof(header));
    if (ep_abort_requested(x->abort)) memcpy(x->note + LINE, x->abort->sentence, (size_t)bytes - 1);
    for (int32_t r = 0; r < x->size; r++)
        if (!x->control[r])
            (void)ep_call_isend(b, r, x->tag, x->note, (size_t)(LINE + bytes),
                                &x->remote[r].sending_note);
}

/* Record the failure for good, and tell the peers. Returns `status`. */
static EpStatus fail_exchange(EpExchange *x, EpStatus status, int32_t blamed, int64_t expected,
                              int64_t seen) {
    EpExchangeFailure *failure = &x->failure;
    failure->status = status, failure->peer = blamed, failure->phase = x->op->name;
    failure->expected = expected, failure->seen = seen;
    strcpy(failure->sentence, ep_last_error());
    (void)publish_failure(x, 1 + (uint64_t)blamed);
    send_notes(x, blamed);
    return ep_fail(status, "%s", failure->sentence);
}

static uint64_t load(const EpCounter *counter) {
    return atomic_load_explicit(&counter->value, memory_order_acquire);
}

static int is_aborted(const EpExchange *x, int32_t rank) {
    return x->control[rank] && (load(&x->control[rank]->failed) & EP_ABORTED);
}

/* ---- aborts -------------------------------------------------------------------------------- */

int ep_exchange_abort(EpExchange *x, const char *why) {
    memcpy(x->control[x->rank]->why, why, EP_ABORT_BYTES);
    return publish_failure(x, EP_ABORTED | (1 + (uint64_t)x->rank));
}

int32_t ep_exchange_find_aborted(const EpExchange *x, char why[EP_ABORT_BYTES]) {
    int32_t r = 0;
    while (r < x->size && (r == x->rank || !is_aborted(x, r)))
        r++;
    if (r == x->size) return -1;
    if (why) memcpy(why, x->control[r]->why, EP_ABORT_BYTES);
    return r;
}

void ep_exchange_give_up(EpExchange *x) {
    (void)publish_failure(x, 1 + (uint64_t)x->rank);
    send_notes(x, x->rank);
}

/* ---- messages between nodes ----------------------------------------------------------------- */

static EpStatus test_request(EpExchange *x, int32_t peer, void **request) {
    int done = 0;
    if (!*request) return EP_OK;
    EpStatus status = ep_call_test(x->bootstrap, request, &done);
    if (status != EP_OK) return fail_exchange(x, status, peer, -1, -1);
    if (done) *request = NULL;
    return EP_OK;
}

/* Test all pending messages. They may make progress only in such tests, so every wait calls this,
 * whatever it waits for. Else two ranks on different nodes could deadlock: each waits for a peer
 * that in turn waits for the other one's message. */
static EpStatus test_messages(EpExchange *x) {
    for (int32_t r = 0; r < x->size && x->spans_nodes; r++)
        for (int parity = 0; parity < BUFFERS; parity++) {
            EP_TRY(test_request(x, r, &x->remote[r].sending[parity]));
            EP_TRY(test_request(x, r, &x->remote[r].receiving[parity]));
        }
    return EP_OK;
}

/* ---- whom to blame ------------------------------------------------------------------------- */

#define GRACE_SECONDS .25

/* Returns whom a rank that has given up blames, or -1: it has not, as far as is known here. */
static int32_t find_blamed_by(const EpExchange *x, int32_t rank) {
    int parity = (int)(x->round % BUFFERS);
    if (x->control[rank]) return (int32_t)((load(&x->control[rank]->failed) & ~EP_ABORTED) - 1);
    if (x->remote[rank].receiving[parity]) return -1;
    const EpRoundHeader *header = (const EpRoundHeader *)x->remote[rank].inbox[parity];
    return header->op == NOTE ? (int32_t)header->fact[0] : -1;
}

/* A rank that is late may itself wait for another one. Its own deadline passes at about this time,
 * so give it a moment to say so, and follow its word. Returns the rank to blame. */
static int32_t follow_blame(EpExchange *x, int32_t blamed) {
    EpWait wait;
    ep_wait_begin(&wait, GRACE_SECONDS, x->spins);
    for (int32_t hops = 0; blamed != x->rank && hops < x->size;) {
        int32_t next = find_blamed_by(x, blamed);
        if (next == blamed || next == x->rank) break; /* itself, or this rank */
        if (next >= 0) blamed = next, hops++;
        if (next < 0 && (test_messages(x) != EP_OK || !ep_wait_pause(&wait))) break;
    }
    return blamed;
}

/* Tell the peers at once, who may be about to blame this rank. */
static EpStatus fail_timeout(EpExchange *x, int32_t peer, const char *what, uint64_t expected,
                             uint64_t seen) {
    (void)publish_failure(x, 1 + (uint64_t)peer);
    send_notes(x, peer);
    int32_t blamed = follow_blame(x, peer);
    if (blamed != peer) {
        ep_fail_peer(x->rank, x->op->name, peer, blamed, "");
        return fail_exchange(x, EP_ERR_PEER, blamed, -1, -1);
    }
    ep_fail(EP_ERR_TIMEOUT,
            "rank %d: %s: rank %d did not %s within %g s (expected round %llu, seen %llu)", x->rank,
            x->op->name, peer, what, x->timeout, (unsigned long long)expected,
            (unsigned long long)seen);
    return fail_exchange(x, EP_ERR_TIMEOUT, peer, (int64_t)expected, (int64_t)seen);
}

/* A peer has given up because of a rank, perhaps itself. `why`: of an abort; NULL: not known here,
 * unless that rank is on this node. */
static EpStatus fail_peer(EpExchange *x, int32_t peer, int32_t blamed, const char *why) {
    blamed = follow_blame(x, blamed);
    if (!why) why = is_aborted(x, blamed) ? x->control[blamed]->why : "";
    ep_fail_peer(x->rank, x->op->name, peer, blamed, why);
    return fail_exchange(x, EP_ERR_PEER, blamed, -1, -1);
}

/* ---- waiting ------------------------------------------------------------------------------- */

/* Look for aborts, in a wait: this rank's at every poll, since the flag is its own; now and then
 * those of all ranks on the node, since without them the group will not go on. */
static EpStatus check_aborts(EpExchange *x, const EpWait *wait) {
    if (ep_abort_requested(x->abort)) {
        ep_fail(EP_ERR_ABORTED, "rank %d: %s: the group was aborted", x->rank, x->op->name);
        return fail_exchange(x, EP_ERR_ABORTED, x->rank, -1, -1);
    }
    if ((wait->pauses + 1) % PAUSES_PER_LOOK) return EP_OK;
    int32_t r = ep_exchange_find_aborted(x, NULL);
    return r < 0 ? EP_OK : fail_peer(x, r, r, NULL);
}

static EpStatus wait_counter(EpExchange *x, int32_t peer, const EpCounter *counter,
                             uint64_t expected, const char *what) {
    EpWait wait;
    ep_wait_begin(&wait, x->timeout, x->spins);
    while (load(counter) < expected) {
        uint64_t failed = load(&x->control[peer]->failed);
        if (failed && load(counter) < expected)
            return fail_peer(x, peer, (int32_t)((failed & ~EP_ABORTED) - 1), NULL);
        EP_TRY(check_aborts(x, &wait));
        EP_TRY(test_messages(x));
        if (!ep_wait_pause(&wait)) return fail_timeout(x, peer, what, expected, load(counter));
    }
    return EP_OK;
}

static EpStatus wait_request(EpExchange *x, int32_t peer, void **request, const char *what) {
    EpWait wait;
    ep_wait_begin(&wait, x->timeout, x->spins);
    while (*request) {
        EP_TRY(check_aborts(x, &wait));
        EP_TRY(test_messages(x));
        if (*request && !ep_wait_pause(&wait))
            return fail_timeout(x, peer, what, x->round, x->round - 1);
    }
    return EP_OK;
}

/* ---- rounds -------------------------------------------------------------------------------- */

int64_t ep_exchange_body_bytes(const EpExchange *x, EpRoundMode mode) {
    return x->region_bytes[mode] - LINE;
}

int ep_exchange_on_node(const EpExchange *x, int32_t peer) {
    return x->control[peer] != NULL;
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
    const EpBootstrap *b = x->bootstrap;
    for (int32_t r = 0; r < x->size; r++) {
        Remote *remote = &x->remote[r];
        int parity = (int)(x->round % BUFFERS);
        if (x->control[r]) continue;
        EpStatus status =
            ep_call_irecv(b, r, x->tag, remote->inbox[parity], (size_t)x->region_bytes[x->mode],
                          &remote->receiving[parity]);
        if (status != EP_OK) return fail_exchange(x, status, r, -1, -1);
        remote->fill = 0;
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
    x->op = op, x->mode = mode, x->header = *header;
    x->header.round = x->round, x->header.op = op->code;
    for (int32_t i = 1; i < x->size; i++)
        EP_TRY(wait_until_read(x, ep_round_peer(x->rank, x->size, i)));
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
    x->control[x->rank]->header[x->round % BUFFERS] = x->header;
    for (int32_t r = 0; r < x->size; r++)
        if (!x->control[r]) memcpy(region(x, x->rank, r), &x->header, sizeof(x->header));
    atomic_store_explicit(&x->control[x->rank]->published.value, x->round, memory_order_release);
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        if (!x->control[peer]) EP_TRY(send_region(x, peer));
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
    if (theirs->op == NOTE)
        return fail_peer(x, peer, (int32_t)theirs->fact[0], (const char *)theirs + LINE);
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

EpStatus ep_round_receive(EpExchange *x, int32_t peer, const EpRoundHeader **header,
                          const void **body) {
    const char *message;
    const EpRoundHeader *theirs;
    if (x->control[peer]) {
        EP_TRY(wait_counter(x, peer, &x->control[peer]->published, x->round, "arrive"));
        message = region(x, peer, x->rank);
        theirs = &x->control[peer]->header[x->round % BUFFERS];
    } else {
        Remote *remote = &x->remote[peer];
        EP_TRY(wait_request(x, peer, &remote->receiving[x->round % BUFFERS], "arrive"));
        message = remote->inbox[x->round % BUFFERS];
        theirs = (const EpRoundHeader *)message;
    }
    EP_TRY(check_header(x, peer, theirs));
    if (header) *header = theirs;
    *body = message + LINE;
    return EP_OK;
}

void ep_round_release(EpExchange *x, int32_t peer) {
    atomic_store_explicit(&x->control[x->rank]->released[peer].value, x->round,
                          memory_order_release);
}

void ep_round_close(EpExchange *x) {
    x->op = NULL;
}

EpStatus ep_exchange_flush(EpExchange *x, const EpOp *op) {
    x->op = op;
    for (int32_t r = 0; r < x->size; r++)
        for (int parity = 0; parity < BUFFERS; parity++)
            EP_TRY(wait_request(x, r, &x->remote[r].sending[parity], "receive"));
    x->op = NULL;
    return EP_OK;
}
