/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_EXCHANGE_H
#define EP_RUNTIME_EXCHANGE_H

/**
 * Rounds of messages between the ranks of a group on the host backend. prepare, dispatch, combine
 * and both backwards are all sequences of rounds; in each round every rank sends one message,
 * possibly empty, to every other rank:
 *
 *     ep_round_open       my outbox of two rounds ago has been read by everyone: reuse it
 *     ep_round_region     fill the regions of the outbox
 *     ep_round_publish    let the peers see them
 *     ep_round_receive    for each peer: wait for its message
 *     ep_round_release    for each peer: its message has been read
 *     ep_round_close
 *
 * A rank writes to its own shared segment alone. Peers of the same node read the outbox where it
 * lies; to peers on other nodes the regions are sent as messages. The outbox has two halves, for
 * even and odd rounds, so that a rank may fill one while slower peers still read the other.
 *
 * A half is divided into regions of equal size. EP_ROUND_EACH: one per rank. EP_ROUND_SHARED: all
 * peers on the node read one region; where the whole group is on one node, that is the whole half.
 *
 * With each round goes an EpRoundHeader that says what its writer believes is going on: on the node
 * in the control block, in messages before the body. A rank that receives another's belief fails
 * the group with EP_ERR_ORDER instead of misreading data.
 *
 * Memory order: a writer fills a region with plain stores, then publishes the round number with a
 * release store; a reader acquires that number before it reads. A reader releases with a release
 * store after its last load, which the writer acquires before it writes the half again. All
 * counters only grow and are compared with >=.
 */

#include <stdatomic.h>

#include "runtime/status.h"

typedef enum EpRoundMode { EP_ROUND_EACH, EP_ROUND_SHARED } EpRoundMode;

#define EP_ROUND_FACTS 5

/** An operation as rounds know it: its name, and the names of the facts that ranks must share. */
typedef struct EpOp {
    int32_t code;
    const char *name;
    const char *fact[EP_ROUND_FACTS];
    int config; /**< facts from this index on are configuration: EP_ERR_MISMATCH, not EP_ERR_ORDER
                 */
} EpOp;

/** Of a round; the first 64 bytes of every region are for it. All but `tokens` must agree between
 *  ranks. */
typedef struct EpRoundHeader {
    uint64_t round;
    int32_t op;
    int32_t handle;
    uint32_t step;  /**< the lower half */
    int32_t tokens; /**< T of the writer */
    int64_t fact[EP_ROUND_FACTS];
} EpRoundHeader;

/** Cache lines of their own for what different ranks write and poll. */
typedef struct EpCounter {
    _Alignas(64) _Atomic uint64_t value;
} EpCounter;

/** Start of every shared segment. */
typedef struct EpControl {
    EpCounter published;     /**< last round whose regions are filled */
    EpCounter failed;        /**< 0, or 1 + the rank blamed for this rank's failure */
    EpRoundHeader belief[2]; /**< of even and odd rounds; where regions lie depends on the mode */
    EpCounter released[];    /**< [size]: last round of that peer that this rank has read */
} EpControl;

typedef struct EpExchange EpExchange;

/** Bytes before the outbox in every segment. */
int64_t ep_exchange_control_bytes(int32_t num_ranks);
/** Least staging bytes with which a region of EP_ROUND_EACH holds a body of that many bytes. */
int64_t ep_exchange_least_stage(int32_t num_ranks, int64_t body_bytes);
/**
 * Bytes of each rank's shared segment. `most_remote`: how many ranks any rank has on other nodes,
 * at most. The outbox takes all of the staging where there are none, and half of it otherwise: the
 * other half is for landing zones. So the total can be promised before the nodes are known.
 */
int64_t ep_exchange_segment_bytes(int32_t num_ranks, int32_t most_remote, int64_t stage_bytes);
/** Private bytes beside segment and landing zones. */
int64_t ep_exchange_private_bytes(int32_t num_ranks);

typedef struct EpExchangeSetup {
    const EpBootstrap *bootstrap;
    void *const *segments; /**< rank r's segment, NULL where r is on another node */
    int64_t stage_bytes;   /**< landing zones included */
    int32_t most_remote;
    int32_t tag; /**< of this group's messages */
    double timeout;
    int64_t spins;
    const char *(*op_name)(int32_t code); /**< of an operation, for sentences */
} EpExchangeSetup;

/** NULL when out of memory. */
EpExchange *ep_exchange_create(const EpExchangeSetup *setup);
/** 1 where messages of this rank's are still to be sent: its segment must stay mapped. What may
 *  still be received has memory that stays. NULL is allowed. */
int ep_exchange_destroy(EpExchange *x);

/** Bytes of body that a region of this mode holds; the same on all ranks. */
int64_t ep_exchange_body_bytes(const EpExchange *x, EpRoundMode mode);
int ep_exchange_on_node(const EpExchange *x, int32_t peer);
int ep_exchange_has_peers_on_node(const EpExchange *x);

EpStatus ep_round_open(EpExchange *x, const EpOp *op, const EpRoundHeader *belief,
                       EpRoundMode mode);
/** Body of the region that `peer` will read; for peers on the node in SHARED mode the same one. */
void *ep_round_region(EpExchange *x, int32_t peer);
/** Say how much of a peer's region is filled; matters for peers on other nodes. Default: none. */
void ep_round_fill(EpExchange *x, int32_t peer, int64_t body_bytes);
EpStatus ep_round_publish(EpExchange *x);
EpStatus ep_round_receive(EpExchange *x, int32_t peer, const EpRoundHeader **header,
                          const void **body);
void ep_round_release(EpExchange *x, int32_t peer);
void ep_round_close(EpExchange *x);
/** After the last round of an operation: wait until messages to other nodes are on their way, so
 *  that peers do not depend on this rank's next call for progress. */
EpStatus ep_exchange_flush(EpExchange *x, const EpOp *op);

/** The i-th peer to serve, i = 1 .. size - 1: rotated, so that ranks do not all meet at rank 0. */
static inline int32_t ep_round_peer(int32_t rank, int32_t size, int32_t i) {
    return (rank + i) % size;
}

/** This rank has given up outside of rounds: peers on its node that wait for it learn so. */
void ep_exchange_give_up(EpExchange *x);

/** Why the exchange is broken: status, sentence and whom it concerns. EP_OK if it is not. */
typedef struct EpExchangeFailure {
    EpStatus status;
    int32_t peer;
    int64_t expected, seen;
    const char *phase;
    char sentence[EP_SENTENCE_BYTES];
} EpExchangeFailure;

const EpExchangeFailure *ep_exchange_failure(const EpExchange *x);

#endif
