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
#include "runtime/mask.h"
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
    _Atomic uint64_t cut; /**< in `released`: 1 + `base` if this rank has cut that peer since */
} EpCounter;

/**
 * Masks. A rank that is not in `alive` takes no part in rounds: nobody writes to it, reads from it
 * or waits for it. The set changes in a *rendezvous of living ranks* (ep_exchange_mask), of those
 * in the new set alone. It needs no round to be complete, since ranks may have given up anywhere:
 *
 *     cast     A rank publishes its ballot: a ticket of this call, the new set and its last round.
 *     ready    It has read a ballot of each other rank with the same set. It publishes a digest of
 *              all tickets, its own included, and knows the round at which all begin: odd, and
 *              larger than that of any of them.
 *     done     All others are ready with the same digest, or one of them is done with it. It sets
 *              its counters to that round, and `base`, and takes part.
 *
 * A rank that gives up withdraws its ballot, and comes back with another ticket. Ranks that were
 * ready then stop being so, and go on waiting. So whoever is done knows that all were ready for the
 * same ballots. It does not suffice that each has seen this rank's: two others might be ready for
 * different ballots of each other. A rank that dies, or gives up, after it was ready may leave
 * others done without it: they wait for it in their next operation, as for any rank that is gone.
 *
 * Numbers. There are rounds alone: `published`, `released` and the generation of plans are rounds.
 * All ranks of the set continue at one round. It exceeds the last round of each by 16 or more, and
 * a rank that is left behind gets no further than two rounds without them. So the round in a header
 * tells the sets apart. Rounds only grow, so old values of counters mean "not yet".
 *
 * Memory order, on a node. The words of a ballot are atomic. Its state is stored with release
 * behind them and loaded before and after them, so that a reader has them of one ballot. A ballot
 * says that its rank is in no round: after reading all ballots of the set, ranks may fill their
 * outboxes. Only a masked rank may still read there, one that was stopped in a round, say. Ranks
 * store `base` before they fill, and a fence lies between. A reader looks at `base` after its last
 * load of a round, behind a fence. It then knows that the data may be of later rounds, and fails.
 * Until then, what it has read may be anything: so it bounds all indices. It writes to its own
 * memory alone.
 *
 * Cuts. A rank may cut another one until the next rendezvous (EpLate): by itself, in any round. It
 * then does not wait for it, read from it or write for it, as if it were masked. It says so in a
 * word of its control block, in the place of `base` above: a fence lies between that store and its
 * next one to the outbox. The other rank looks at the word after its last load of a message, and
 * drops what it has read (ep_round_settle). On another node it finds no message in time, and cuts,
 * too. Rounds of both go on. So an operation that cuts must have as many rounds on all ranks,
 * whomever they have cut: latency mode then has those of max_tokens.
 *
 * Between nodes ballots are messages. A pair's messages arrive in order, and the old ones are
 * dropped up to the last ballot. No request is canceled: what was sent to a masked rank, or posted
 * to receive from it, stays until that rank is back. Nothing else uses its regions.
 */
typedef enum EpVoteState { EP_VOTE_NONE, EP_VOTE_CAST, EP_VOTE_READY, EP_VOTE_DONE } EpVoteState;

/** A ballot, as it travels. */
typedef struct EpVote {
    uint64_t ticket, state;
    uint64_t round; /**< the last of the voter */
    uint64_t seen;  /**< the digest of tickets for which it was ready last, in this call */
    uint64_t done;  /**< that of its last call that has succeeded; 0: none */
    EpMask alive;
} EpVote;

/** The same in a control block. */
typedef struct EpBallot {
    _Alignas(64) _Atomic uint64_t word; /**< ticket << 2 | state */
    _Atomic uint64_t round, seen, done;
    _Atomic uint32_t alive[EP_MASK_WORDS];
} EpBallot;

/** Start of every shared segment. */
typedef struct EpControl {
    EpCounter published;        /**< last round whose regions are filled */
    EpCounter failed;           /**< 0, or 1 + the rank blamed for this rank's failure; EP_ABORTED |
                                     1 + this rank: aborted; and perhaps EP_DEPARTED */
    char why[EP_ABORT_BYTES];   /**< of this rank's abort */
    char heard[EP_ABORT_BYTES]; /**< why the blamed rank went, of a rank that has heard it; "" */
    _Atomic uint64_t refusal[EP_ABORT_BYTES / 8]; /**< of this rank's last call; "": none */
    EpBallot ballot;
    EpCounter base;          /**< round at which this rank began with its set of living ranks */
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
/** Returns the bytes of the largest body that masks need. */
int64_t ep_exchange_ballot_bytes(void);
/**
 * Returns the bytes of each rank's shared segment. `most_remote`: the largest number of peers that
 * a rank has on other nodes. If it is 0, the outbox takes all staging bytes; otherwise half of
 * them, and the inboxes the other half. So the total is known before the nodes are.
 */
int64_t ep_exchange_segment_bytes(int32_t num_ranks, int32_t most_remote, int64_t stage_bytes);
/** Returns the private bytes other than inboxes. */
int64_t ep_exchange_private_bytes(int32_t num_ranks, int masks);

typedef struct EpExchangeSetup {
    const EpBootstrap *bootstrap;
    const EpAbort *abort;  /**< of the group */
    void *const *segments; /**< rank r's segment, NULL where r is on another node */
    int64_t stage_bytes;   /**< of outbox and inboxes */
    int32_t most_remote;
    int32_t tag;    /**< of this group's messages */
    double timeout; /**< seconds */
    int64_t spins;  /**< polls before a wait yields the CPU: see ep_wait_begin */
    int masks;      /**< whether ranks may be masked */
    int joins;      /**< whether ranks may join: then any may be on another node */
    uint64_t ticket; /**< before the first of this rank's ballots */
} EpExchangeSetup;

/** Create an exchange. Returns NULL when out of memory. */
EpExchange *ep_exchange_create(const EpExchangeSetup *setup);
/** Destroy an exchange; NULL is allowed. `together`: whether all ranks do so now. Returns 1 if
 * messages are still being sent from this rank's segment, which must then stay mapped. Inboxes that
 * may still receive messages stay allocated. */
int ep_exchange_destroy(EpExchange *x, int together);

/**
 * Ranks join (ep_group_admit): other processes stand at these places from now on, or none. They
 * have the segments, or are on other nodes. `alive`: who takes part. What is known of the processes
 * before them is forgotten: their counters, ballots and messages. A newcomer's tickets begin
 * anywhere, so that no ballot is taken for one of the process before it.
 */
void ep_exchange_admit(EpExchange *x, const EpMask *changed, void *const *segments,
                       const EpMask *alive);

/** Returns the number of the last round. */
uint64_t ep_exchange_round(const EpExchange *x);

/** Returns the body bytes that a region of this mode holds; equal on all ranks. */
int64_t ep_exchange_body_bytes(const EpExchange *x, EpRoundMode mode);
int ep_exchange_on_node(const EpExchange *x, int32_t peer);
int ep_exchange_has_peers_on_node(const EpExchange *x);

/** Returns whether a rank takes part in rounds: it is neither masked nor cut. */
int ep_exchange_is_alive(const EpExchange *x, int32_t rank);

/** Meet the other ranks of `alive`, and go on with them alone. On failure the set is what it was,
 *  and the exchange has failed until a repetition succeeds. */
EpStatus ep_exchange_mask(EpExchange *x, const EpMask *alive);

/** From now on wait so many seconds for ranks, in each round, then cut those that are missing. < 0:
 *  wait until the deadline, then fail. Returns what was set before. */
double ep_exchange_set_late(EpExchange *x, double seconds);
int ep_exchange_cuts_late(const EpExchange *x);
/** Cut a rank. */
void ep_exchange_cut(EpExchange *x, int32_t rank);
/** Returns the ranks that this rank has cut. */
const EpMask *ep_exchange_cuts(const EpExchange *x);

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
/** Wait for a peer's message and check its header. `body` becomes NULL if the peer is cut. Else
 *  `header` (may be NULL) and `body` become pointers into the peer's outbox or an inbox, valid until
 *  ep_round_release. A release marks the messages of earlier rounds, too: a reader may keep a
 *  message until it releases the next one. */
EpStatus ep_round_receive(EpExchange *x, int32_t peer, const EpRoundHeader **header,
                          const void **body);
/** Where ranks cut late ones, after the last load of a peer's message: returns whether it was
 *  whole. If not, the peer is cut. */
int ep_round_settle(EpExchange *x, int32_t peer);
void ep_round_release(EpExchange *x, int32_t peer);
/** In a group with masks, fails if what was read in this round may be of another one. */
EpStatus ep_round_close(EpExchange *x);
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
 *  node that wait for it. For one that `ends` the group, a rank that has departed has not failed. */
int32_t ep_exchange_find_failed(EpExchange *x, int ends, int32_t *blamed,
                                char why[EP_ABORT_BYTES]);
/** Returns a rank on this node that has masked or cut this one, which does not know it, or -1. */
int32_t ep_exchange_find_masker(const EpExchange *x);

/** See EpBackendOps. */
void ep_exchange_refuse(EpExchange *x, const char *text);
void ep_exchange_depart(EpExchange *x, const char *why);

/** Why the exchange failed: status (EP_OK: it has not), sentence and the peer concerned. */
typedef struct EpExchangeFailure {
    EpStatus status;
    int suspends; /**< 1: ep_exchange_mask may mend it */
    int32_t peer;
    int64_t expected, seen;
    const char *phase;
    char sentence[EP_SENTENCE_BYTES];
} EpExchangeFailure;

const EpExchangeFailure *ep_exchange_failure(const EpExchange *x);

#endif
