/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_EXCHANGE_STATE_H
#define EP_RUNTIME_EXCHANGE_STATE_H

/**
 * What exchange.c (rounds, failure) and masks.c (the rendezvous of living ranks) share. Only these
 * two files include it.
 */

#include "runtime/host/exchange.h"
#include "runtime/mask.h"

#define EP_EXCHANGE_BUFFERS 2 /* of the outbox, and of each inbox: for even and odd rounds */

/* In place of an operation's code, in the headers of messages. */
#define EP_NOTE (-1)    /* the writer has given up */
#define EP_REFUSED (-2) /* the writer's call was refused, and its next message follows */
#define EP_BALLOT (-3)  /* an EpVote follows the header */

/** A peer on another node. Arrays: for even and odd rounds. */
typedef struct EpRemote {
    char *inbox[EP_EXCHANGE_BUFFERS];     /* hold its messages */
    void *sending[EP_EXCHANGE_BUFFERS];   /* requests; NULL: none pending */
    void *receiving[EP_EXCHANGE_BUFFERS]; /* likewise */
    uint64_t posted;                      /* the last round that a receive was posted for */
    int64_t fill;                         /* body bytes of this round's message to it */
    void *sending_note, *sending_refusal, *sending_ballot;
    char *refusal; /* of its last call; NULL: none so far, "": none */
} EpRemote;

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
    EpRemote *remote;        /* [size] */
    char *note;              /* in a group that spans nodes */
    int noted;               /* 1 once the note was sent */
    char *refusal;           /* a message, in a group that spans nodes */
    uint64_t refused;        /* the round before which it was sent */
    int departs;             /* whether this rank destroys the group after a refused call */
    int32_t peers_on_node;
    int spans_nodes;
    double *waited; /* see ep_exchange_measure */
    /* masks */
    int masks;          /* whether the group has the option */
    EpMask alive;       /* the ranks that take part, this one included */
    EpMask cut;         /* those of them that this rank has cut */
    double late;        /* see ep_exchange_set_late */
    double late_end;    /* of the waits of this part of a round; 0: none has begun */
    uint64_t base;      /* the round at which they began to */
    EpVote own;         /* what this rank says in its last rendezvous of living ranks */
    EpVote *votes;      /* [size]: what the others have said last, as far as is known */
    uint64_t *expected; /* [size]: the ticket of each that this rank was ready for last */
    uint64_t *past;     /* [size]: the ticket of each in the last rendezvous that succeeded */
    uint64_t next_base; /* of the rendezvous that this rank is ready for */
    char *ballots;      /* [size]: messages to peers on other nodes, or NULL */
    /* the open round */
    uint64_t round;
    const EpOp *op;
    EpRoundHeader header; /* what this rank publishes and expects of its peers */
    EpRoundMode mode;
    EpExchangeFailure failure;
};

/* The fences of exchange.h: between a reader's last load of a round and its look at `base` or
 * `cut`, and between a writer's store there and its next one to the outbox. The thread sanitizer
 * does not know fences. */
#ifdef __SANITIZE_THREAD__
#define EP_EXCHANGE_FENCE() (void)0
#else
#define EP_EXCHANGE_FENCE() atomic_thread_fence(memory_order_seq_cst)
#endif

#define EP_BALLOT_BYTES (64 + (int64_t)sizeof(EpVote)) /* with its header */

/** Record a failure for good, and tell the peers. `why`: what is known of the rank to blame, or "".
 *  Returns the status. In a group with masks a missing rank only suspends it. */
EpStatus ep_exchange_fail(EpExchange *x, EpStatus status, int32_t blamed, int64_t expected,
                          int64_t seen, const char *why);

/** Post a receive from a peer on another node into an inbox. */
EpStatus ep_exchange_post(EpExchange *x, int32_t peer, int parity);

/** Returns whether a peer that has said `vote` is in a rendezvous of living ranks. It may still say
 *  what it did in one in which this rank is done. */
static inline int ep_exchange_is_voting(const EpExchange *x, int32_t peer, const EpVote *vote) {
    int is_open = vote->state == EP_VOTE_CAST || vote->state == EP_VOTE_READY;
    return is_open && vote->ticket != x->past[peer];
}

/** Keep what a message without an operation says: a ballot or a refusal. */
void ep_exchange_take_word(EpExchange *x, int32_t peer, const EpRoundHeader *message);

#endif
