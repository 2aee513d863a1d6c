/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_EXCHANGE_H
#define EP_RUNTIME_EXCHANGE_H

/**
 * Rounds of messages between the ranks of a group on the host backend. prepare, dispatch, combine
 * and both backwards are sequences of rounds. In each round every rank sends one message, possibly
 * empty, to every other rank:
 *
 *     ep_round_open       wait until all peers have read my outbox of two rounds ago
 *     ep_round_region     fill the regions of the outbox
 *     ep_round_publish    make them visible to the peers
 *     ep_round_receive    for each peer: wait for its message
 *     ep_round_release    for each peer: mark its message as read
 *     ep_round_close
 *
 * A rank stores only into its own shared segment: control block, then outbox. Peers on its node
 * read the outbox in place. For peers on other nodes, the bootstrap sends each region as a message
 * into an inbox, a private buffer of the receiver. Outbox and inboxes have two buffers, for even
 * and odd rounds: a rank fills one while slower peers still read the other.
 *
 * A buffer of the outbox has regions of equal size. EP_ROUND_EACH: one for each rank.
 * EP_ROUND_SHARED: all peers on the node read the same region; in a group on one node it fills the
 * whole buffer.
 *
 * Each round has an EpRoundHeader, which names the operation that the writer has called: in the
 * control block for peers on the node, at the start of the message for others. A receiver compares
 * it with the header that it expects. If they differ, it fails the group with EP_ERR_ORDER or
 * EP_ERR_MISMATCH instead of misreading data.
 *
 * Memory order, on a node, for processors that may reorder any load or store, as Arm's do.
 * `published` and `released` only grow and are compared with >=. Each has one writer.
 *
 *     data     The writer fills header and regions with plain stores, then stores the round number
 *              to `published` with release. A reader loads it with acquire before it reads them. So
 *              the reader sees all of the round's data. A larger number is as good: the next round
 *              uses the other buffer, and the one after waits for this reader.
 *     reuse    After its last load, the reader stores the round number to its released[writer] with
 *              release. The writer loads it with acquire before it fills that buffer again, two
 *              rounds later. So no load of the reader sees the new data.
 *     streams  Stores that bypass the caches (x86 alone has them here) are not ordered by a
 *              release. ep_stream_fence stands between them and the release.
 *     failure  A rank stores `failed` with release. A waiting peer loads it with acquire, then
 *              loads the awaited counter once more. So it still takes a round that the rank
 *              published before it failed.
 *     abort    Any thread of the rank writes `why`, once, then stores `failed`, unless it is
 *              stored already. The peers' acquire orders `why` behind it. `heard` likewise, by the
 *              rank's own thread. All stores to `failed` read and replace it at once, with release
 *              where they succeed. So a later one, by another thread, hides no order of an earlier.
 *     refusal  Its words are relaxed: they may change while a peer reads them, which costs no more
 *              than a mixed sentence.
 *
 * A segment is zero, and its control block has no other first state: who maps it late misses
 * nothing. The bootstrap orders its creation before its use, as it orders all that it exchanges.
 *
 * A rank that fails, departs or is aborted sends peers on other nodes a note in place of its next
 * round's message: a header with no operation's code and the rank that it blames, then why that
 * rank went. Its own thread does that, as soon as it is in the library: bootstraps may not support
 * other threads. A rank whose call was refused sends them the sentence in such a message, too, once
 * before its next round, which is then the next message.
 *
 * Between nodes, a rank fills a region again only after the send from it has completed, and posts a
 * receive into an inbox only after it has read the message there. Messages of a pair of ranks
 * arrive in order.
 */

#include <stdatomic.h>

#include "runtime/abort.h"
#include "runtime/op.h"
#include "runtime/status.h"

typedef enum EpRoundMode { EP_ROUND_EACH, EP_ROUND_SHARED } EpRoundMode;

/** Header of a round. Every region reserves its first 64 bytes for it. All fields but `tokens` must
 *  be equal on all ranks. */
typedef struct EpRoundHeader {
    uint64_t round;
    int32_t op;
    int32_t handle; /**< id of the handle; 0: none, not compared */
    uint32_t plan;  /**< lower half of the generation of the plan that is read; 0: none */
    int32_t tokens; /**< T of the writer */
    int64_t fact[EP_OP_FACTS];
} EpRoundHeader;

/** A counter with a cache line of its own, since different ranks store and poll counters. */
typedef struct EpCounter {
    _Alignas(64) _Atomic uint64_t value;
} EpCounter;

/** Start of every shared segment. */
typedef struct EpControl {
    EpCounter published;        /**< last round whose regions are filled */
    EpCounter failed;           /**< 0, or 1 + the rank blamed for this rank's failure; EP_ABORTED |
                                     1 + this rank: aborted; and perhaps EP_DEPARTED */
    char why[EP_ABORT_BYTES];   /**< of this rank's abort */
    char heard[EP_ABORT_BYTES]; /**< why the blamed rank went, of a rank that has heard it; "" */
    _Atomic uint64_t refusal[EP_ABORT_BYTES / 8]; /**< of this rank's last call; "": none */
    EpRoundHeader header[2]; /**< of even and odd rounds; not in the regions, which move by mode */
    EpCounter released[];    /**< [size]: last round of each peer that this rank has read */
} EpControl;

#define EP_ABORTED ((uint64_t)1 << 32)
#define EP_DEPARTED ((uint64_t)1 << 33) /* beside or without a failure */

typedef struct EpExchange EpExchange;

/** Returns the bytes before the outbox in every segment. */
int64_t ep_exchange_control_bytes(int32_t num_ranks);
/** Returns the least staging bytes for which a region of EP_ROUND_EACH holds such a body. */
int64_t ep_exchange_least_stage(int32_t num_ranks, int64_t body_bytes);
/**
 * Returns the bytes of each rank's shared segment. `most_remote`: the largest number of peers that
 * a rank has on other nodes. If it is 0, the outbox takes all staging bytes; otherwise half of
 * them, and the inboxes the other half. So the total is known before the nodes are.
 */
int64_t ep_exchange_segment_bytes(int32_t num_ranks, int32_t most_remote, int64_t stage_bytes);
/** Returns the private bytes other than inboxes. */
int64_t ep_exchange_private_bytes(int32_t num_ranks);

typedef struct EpExchangeSetup {
    const EpBootstrap *bootstrap;
    const EpAbort *abort;  /**< of the group */
    void *const *segments; /**< rank r's segment, NULL where r is on another node */
    int64_t stage_bytes;   /**< of outbox and inboxes */
    int32_t most_remote;
    int32_t tag;    /**< of this group's messages */
    double timeout; /**< seconds */
    int64_t spins;  /**< polls before a wait yields the CPU: see ep_wait_begin */
} EpExchangeSetup;

/** Create an exchange. Returns NULL when out of memory. */
EpExchange *ep_exchange_create(const EpExchangeSetup *setup);
/** Destroy an exchange; NULL is allowed. `together`: whether all ranks do so now. Returns 1 if
 * messages are still being sent from this rank's segment, which must then stay mapped. Inboxes that
 * may still receive messages stay allocated. */
int ep_exchange_destroy(EpExchange *x, int together);

/** Returns the number of the last round. */
uint64_t ep_exchange_round(const EpExchange *x);

/** Returns the body bytes that a region of this mode holds; equal on all ranks. */
int64_t ep_exchange_body_bytes(const EpExchange *x, EpRoundMode mode);
int ep_exchange_on_node(const EpExchange *x, int32_t peer);
int ep_exchange_has_peers_on_node(const EpExchange *x);

/** From now on add the seconds of each wait for peer r to waited[r]; NULL: no longer. */
void ep_exchange_measure(EpExchange *x, double *waited);

/** Start a round: wait until the outbox can be filled; post receives for peers on other nodes. */
EpStatus ep_round_open(EpExchange *x, const EpOp *op, const EpRoundHeader *header,
                       EpRoundMode mode);
/** Returns the body of the region that `peer` will read. In SHARED mode all peers on the node read
 *  the same one. */
void *ep_round_region(EpExchange *x, int32_t peer);
/** Set how many body bytes are sent to a peer on another node; 0 unless set in this round. */
void ep_round_fill(EpExchange *x, int32_t peer, int64_t body_bytes);
EpStatus ep_round_publish(EpExchange *x);
/** Wait for a peer's message and check its header. `header` (may be NULL) and `body` become
 *  pointers into the peer's outbox or an inbox, valid until ep_round_release. A release marks the
 *  messages of earlier rounds, too: a reader may keep a message until it releases the next one. */
EpStatus ep_round_receive(EpExchange *x, int32_t peer, const EpRoundHeader **header,
                          const void **body);
void ep_round_release(EpExchange *x, int32_t peer);
void ep_round_close(EpExchange *x);
/** After the last round of an operation: wait until all messages to other nodes have been sent, so
 *  that peers need not wait for this rank's next call to make progress. */
EpStatus ep_exchange_flush(EpExchange *x, const EpOp *op);

/** Returns the i-th peer to serve, i = 1 .. size - 1: rotated, so that ranks do not all start with
 *  rank 0. */
static inline int32_t ep_round_peer(int32_t rank, int32_t size, int32_t i) {
    return (rank + i) % size;
}

/** Let peers that wait for this rank know that it has given up outside of rounds, because of
 *  `blamed`. */
void ep_exchange_give_up(EpExchange *x, int32_t blamed, const char *why);

/** Let peers on this node know that this rank is aborted. By any thread, once. Returns 0 if the
 *  rank has failed before. */
int ep_exchange_abort(EpExchange *x, const char *why);
/** See EpBackendOps.find_failed. No round is open. For a rank that departs, also finds those of its
 *  node that wait for it. */
int32_t ep_exchange_find_failed(EpExchange *x, int32_t *blamed, char why[EP_ABORT_BYTES]);

/** See EpBackendOps. */
void ep_exchange_refuse(EpExchange *x, const char *text);
void ep_exchange_depart(EpExchange *x, const char *why);

/** Why the exchange failed: status (EP_OK: it has not), sentence and the peer concerned. */
typedef struct EpExchangeFailure {
    EpStatus status;
    int32_t peer;
    int64_t expected, seen;
    const char *phase;
    char sentence[EP_SENTENCE_BYTES];
} EpExchangeFailure;

const EpExchangeFailure *ep_exchange_failure(const EpExchange *x);

#endif
