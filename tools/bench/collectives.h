/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_COLLECTIVES_H
#define BENCH_COLLECTIVES_H

/**
 * The baseline without any library for expert parallelism, as serving engines have it by default.
 * Dispatch is an all-gather of tokens, indices and weights, so that each rank has all of them.
 * Combine is a reduce-scatter of each rank's weighted sums. On the host MPI does both, on GPUs
 * NCCL. The sums of a rank's experts are staged before, outside the timing.
 */

#include "tools/bench/case.h"
#include "tools/bench/check.h"
#include "tools/common/gpu.h"
#include "tools/common/time.h"

typedef enum Collective { ALL_GATHER, REDUCE_SCATTER, NUM_COLLECTIVES } Collective;

/** What is gathered: rows of tokens, of indices, of weights. */
enum { NUM_GATHERED = 3 };

/** Each rank brings N tokens: those it has, and as many more as the rank with most has. */
typedef struct CollectiveBuffers {
    char *send[NUM_GATHERED]; /**< [N] rows */
    char *recv[NUM_GATHERED]; /**< [R, N] rows */
    char *sums;               /**< [R, N, H] of this rank's slots, rounded */
    char *out;                /**< [N, H] */
} CollectiveBuffers;

typedef struct Collectives {
    Case *c;
    int64_t most;               /**< N */
    size_t bytes[NUM_GATHERED]; /**< of a row */
    Pool pool;
    CollectiveBuffers host; /**< where inputs are made and outputs are checked */
    CollectiveBuffers work; /**< of the collectives: on GPUs device memory, else `host` */
    void *library;          /**< what collectives_nccl.c or the MPI part keeps */
    bool ok;                /**< after a failure a rank still takes part */
} Collectives;

typedef struct CollectivesResult {
    Quantiles times[NUM_COLLECTIVES];
    int64_t wrong[NUM_COLLECTIVES]; /**< on all ranks */
} CollectivesResult;

const char *collective_name(Collective which);

/** Collective. False, with a message, on every rank; call collectives_close even then. */
bool collectives_open(Case *c, Collectives *out);
void collectives_close(Collectives *l);

/** A TimedCall with Collectives as its context. A failure shows in `ok`. */
bool collectives_run(void *context, int which);

/** Collective: time both, with --graphs in graphs. With checks, compare what they write once. */
bool collectives_measure(Collectives *l, Check *check, CollectivesResult *out);

/** Bytes that arrive from other ranks, or stay here, in one collective. */
int64_t collectives_bytes(const Case *c, Collective which, bool remote);

/** NCCL's part (collectives_nccl.c): the same, of Collectives whose host buffers exist. */
#if EP_WITH_CUDA
bool collectives_open_nccl(Collectives *l);
void collectives_close_nccl(Collectives *l);
bool collectives_run_nccl(Collectives *l, Collective which);
/** Copy what both wrote to the host's buffers. */
bool collectives_fetch(Collectives *l);
#else
#define collectives_open_nccl gpu_missing
#define collectives_close_nccl gpu_missing
#define collectives_run_nccl gpu_missing
#define collectives_fetch gpu_missing
#endif

#endif
