/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_NETWORK_CUDA_WATCH_H
#define EP_BOOTSTRAP_NETWORK_CUDA_WATCH_H

/**
 * What the watcher's thread (watch.c) and its group's (network.c) share.
 */

#include <pthread.h>

#include "bootstrap/network/cuda/network.h"

#define EP_WATCH_TICK_NANOSECONDS 2000000

/** A rank that has found a failure itself gives others this time, on a busy machine. Ranks that
 *  disagree all find it, and say what differs. NCCL knows that a peer is gone, who knows why. */
#define EP_EXPLAIN_SECONDS 2.0

/* ---- what watchers tell each other --------------------------------------------------------- */

typedef enum EpNoteKind {
    EP_NOTE_BEAT = 1,
    EP_NOTE_FAILED,
    EP_NOTE_LEAVING,
    EP_NOTE_REFUSED, /* a call, or "": the next one was not */
    EP_NOTE_DEPARTED /* begins no further operation, after a refused call */
} EpNoteKind;

typedef struct EpNote {
    int32_t kind;
    int32_t by, blamed; /* who has given up first, and because of whom */
    uint64_t begun;     /* as in EpWatchMarks */
    char why[EP_ABORT_BYTES];
} EpNote;

/** Another rank, which this one is connected with. */
typedef struct EpWatchPeer {
    int32_t rank;
    EpNote in, out;
    void *receiving, *sending;    /* requests, NULL: none */
    int told;                     /* whether it was told that this rank fails or leaves */
    int left;                     /* whether it leaves */
    int departed;                 /* whether it has said so */
    uint32_t refusals;            /* of this rank's, what the other was told */
    char refusal[EP_ABORT_BYTES]; /* of its last call, or "" */
    double heard;                 /* when, last */
    uint64_t begun;
} EpWatchPeer;

/** Why the group cannot go on. */
typedef enum EpLossKind {
    EP_LOSS_NONE,
    EP_LOSS_OWN,    /* this rank fails, as its group learns in other ways */
    EP_LOSS_FAILED, /* `peer` has given up on the group because of `blamed` */
    EP_LOSS_CLOSED, /* `peer` has closed its connection */
    EP_LOSS_LATE,   /* an exchange is late because of `blamed`, -1: not known */
    EP_LOSS_ORDER,  /* `peer` is in another operation */
    EP_LOSS_NCCL    /* NCCL reports `result` */
} EpLossKind;

typedef struct EpLoss {
    int kind; /* EpLossKind; stored with release, last */
    int32_t peer, blamed;
    uint32_t own, other; /* digests: of this rank's operation; EP_LOSS_ORDER: of the peer's */
    ncclResult_t result;
    char why[EP_ABORT_BYTES]; /* EP_LOSS_LATE, EP_LOSS_CLOSED: the refusal of `blamed` */
} EpLoss;

/** How the watcher stops. */
typedef enum EpWatchStop {
    EP_STOP_NOT,
    EP_STOP_TOGETHER,
    EP_STOP_ALONE,     /* without a word, unless something is lost */
    EP_STOP_ABANDONED, /* likewise; the communicator stays, and so does the watcher if it hangs */
} EpWatchStop;

typedef struct EpCudaWatch {
    EpGroup *group; /* its failures alone: the watcher may outlive it */
    const EpCuda *cuda;
    int32_t rank;
    double timeout;
    EpBootstrap messages;
    int has_messages, started;
    pthread_t thread;
    int stop;        /* EpWatchStop */
    ncclComm_t comm; /* of all ranks; NULL: there is none yet */
    int busy;        /* whether the group's thread is in NCCL */
    int looks;       /* whether the watcher is, which ends soon */
    int ending;      /* whether the thread aborts the communicator, or has done so */
    int is_ended;    /* whether the communicator was aborted */
    int done;        /* the thread has ended */
    EpLoss loss;
    EpWatchPeer *peers;
    int32_t num_peers;
    double beat, next_beat;
    double since;        /* nothing has moved */
    double unsaid; /* since when this rank has a failure that others can explain; 0: it has none */
    double unexplained;  /* since when it is late, and knows nobody to blame; 0: it is not */
    double nccl_fails;   /* since when NCCL reports an error; 0: it does not */
    double abort_hangs;  /* since when an abort has been on its way; 0: none is */
    EpWatchMarks *marks; /* pinned */
    uint64_t *counts;    /* device */
    EpStamp *stamps;     /* device [1 + ranks], in a group of weights; else NULL */
    uint64_t moved;      /* as seen last */
    cudaStream_t stream;
    char refusal[EP_ABORT_BYTES]; /* of the group; under the mutex of aborts */
    uint32_t refusals;            /* their number; under that mutex */
    int departs;                  /* under that mutex */
    EpNote told;                  /* the last one, as the thread has read it: kind and why */
    uint32_t refusals_told;
    uint32_t *failed;  /* pinned: FAILED_FOREVER */
    pthread_t stopper; /* gives the word to the kernels */
    int has_stopper, stopped;
} EpCudaWatch;

/** Returns what is lost, once it is complete (EpLossKind). */
static inline int ep_watch_lost(const EpCudaWatch *w) {
    return __atomic_load_n(&w->loss.kind, __ATOMIC_ACQUIRE);
}

/** Say whether the group's thread is in NCCL. */
static inline void ep_watch_say(EpCudaWatch *w, int busy) {
    __atomic_store_n(&w->busy, busy, __ATOMIC_SEQ_CST);
}

/** Start the thread. */
EpStatus ep_watch_start(EpCudaWatch *w);

#endif
