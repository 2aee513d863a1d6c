/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_WORLD_H
#define COMMON_WORLD_H

/**
 * The ranks of the run: MPI processes, or threads of one process.
 *
 * Every call below that takes a World is collective. A rank that has failed continues to take part,
 * so that no rank waits for it; world_all makes its failure every rank's failure.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep/ep.h"

typedef struct World {
    int rank, size;
    bool threads; /**< ranks are threads: there is no MPI */
    bool broken;  /**< a collective call failed: the ranks can no longer agree */
    EpBootstrap boot;
} World;

/** Timeout of every wait, in seconds. */
double world_deadline(void);

/** The work of one rank. Returns its exit status. */
typedef int (*WorldBody)(World *world, void *argument);

/** Run `body` on every rank: on `threads` threads, or on the MPI processes if that is 0. */
int world_run(int threads, WorldBody body, void *argument);

/** Whether an MPI launcher started this process. */
bool world_launched(void);

bool world_allgather(World *world, const void *in, void *out, size_t bytes);
bool world_barrier(World *world);

/** Copy rank 0's bytes to every rank. */
bool world_broadcast(World *world, void *data, size_t bytes);

/** Bring every rank's `bytes` bytes to rank 0: out[size * bytes], in rank order. Other ranks' `out`
 *  may be NULL. */
bool world_gather(World *world, const void *in, void *out, size_t bytes);

/** True if every rank passes true. Else false, with the message of the first rank that failed. */
bool world_all(World *world, bool ok);

/** Reduce each element over the ranks, in place. */
bool world_max_double(World *world, double *values, size_t count);
bool world_max(World *world, int64_t *values, size_t count);
bool world_min(World *world, int64_t *values, size_t count);
bool world_sum(World *world, int64_t *values, size_t count);

#endif
