/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_NCCL_STATE_H
#define TESTS_EMULATOR_NCCL_STATE_H

/**
 * Communicators of ranks that are threads of this process: what nccl.c, which makes and ends them,
 * shares with nccl_collectives.c.
 */

#include <nccl.h>
#include <pthread.h>

#include "tests/emulator/device.h"

enum { MAX_RANKS = EMULATED_MAX_GPUS, VERSION = 22803 }; /* or EMULATED_NCCL */

/* What a rank says in a split. */
typedef struct Part {
    int color, key;
} Part;

/* The state of a communicator that its ranks share. Collective calls are rounds: a round is over
 * when all ranks have arrived. */
typedef struct Shared {
    struct Shared *next;
    char id[NCCL_UNIQUE_ID_BYTES];
    int size;
    int arrived; /* in the current round */
    int members; /* ranks that have not destroyed it */
    unsigned rounds;
    void *values[2][MAX_RANKS]; /* of the current and the previous round, which may still be read */
    Part parts[2][MAX_RANKS];   /* likewise, if the round is a split */
    /* Collectives on streams. */
    int running;                  /* tasks on streams that use this struct */
    int present, leaving;         /* ranks in the current collective; of these, who has copied */
    unsigned collectives;         /* completed */
    const void *given[MAX_RANKS]; /* each rank's data in the current collective */
    size_t bytes[MAX_RANKS];
    int replayed[MAX_RANKS]; /* whether it comes from a graph, as on all ranks or on none */
    int aborted[MAX_RANKS], any_aborted; /* then no collective completes */
} Shared;

typedef enum Kind { GATHER, SUM, MAX, SUM_BF16, SUM_FP32, EXCHANGE } Kind;

/* A send or receive of an exchange. */
typedef struct Message {
    int peer, is_send;
    void *memory;
    size_t bytes;
    struct Message *next; /* in the order of the calls */
} Message;

/* One rank's part in a collective on a stream. */
typedef struct Collective {
    ncclComm_t comm; /* where it is captured: its replays are numbered when they are launched */
    Shared *shared;
    int rank;
    Kind kind;
    unsigned number; /* of the collective; equal on all ranks */
    int replayed;    /* whether it comes from a graph */
    const void *from;
    void *to;
    size_t bytes;
    cudaStream_t stream;
    Message *messages; /* of an exchange */
} Collective;

/* Which ncclCommGetAsyncError enqueues what waits in a nonblocking communicator: one that is in
 * it now, the next one, the one after that. */
enum Starting { START_NOW = 1, START_NEXT, START_LATER };

struct ncclComm {
    Shared *shared;
    int rank, device, blocking;
    int connected; /* its ranks are, if it blocks */
    int pending;   /* has arrived in a round that was not over at the last check */
    unsigned round;
    ncclWindow_t *window; /* output for the window of that round, or NULL */
    ncclComm_t *part;     /* output for the communicator of that round, or NULL */
    int part_blocking;
    int inside;           /* whether a call waits for the round */
    unsigned collectives; /* number of collectives called */
    int captured;         /* of these, those in graphs that are still there */
    int starting;         /* Starting; 0: nothing waits */
    int num_waiting;
    Collective *waiting;
};

/* In memory of the rank's device, as NCCL's. */
struct ncclWindow_vidmem {
    int size, rank;
    char *memory[MAX_RANKS];
};

/** Guards all that communicators share; the other one tells that it has changed. */
extern pthread_mutex_t nccl_mutex;
extern pthread_cond_t nccl_changed;

/** Returns whether the rank's last round is over. With the lock. */
static inline int nccl_round_is_over(const struct ncclComm *comm) {
    return !comm->pending || comm->shared->rounds != comm->round;
}

/** Wait until all ranks are here. With the lock. */
ncclResult_t nccl_synchronise(ncclComm_t comm);

/** NCCL has this from 2.29 on. */
ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **out);
/** NCCL has this from 2.30 on. */
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **out);

/** Enqueue what waits in a nonblocking communicator. Other threads may ask meanwhile. */
void nccl_start(ncclComm_t comm);

#endif
