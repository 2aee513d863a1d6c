/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_WORLD_H
#define BENCH_WORLD_H

/**
 * The ranks of the run, as MPI processes or as threads of one process, behind one set of calls.
 * Every call below is collective: a rank that has failed goes on taking part, so that nobody waits
 * for it, and the failure becomes everyone's in world_all.
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

/** Seconds after which a wait gives up. */
double world_deadline(void);

/** Exit status of one rank. */
typedef int (*WorldBody)(World *world, void *argument);

/** Run `body` as every rank: `threads` threads, or, where that is 0, the MPI processes. */
int world_run(int threads, WorldBody body, void *argument);

/** Whether an MPI launcher started this process. */
bool world_launched(void);

bool world_allgather(World *world, const void *in, void *out, size_t bytes);
bool world_barrier(World *world);

/** Rank 0's bytes on every rank. */
bool world_broadcast(World *world, void *data, size_t bytes);

/** True where every rank passes true. Else false, with the first failing rank's sentence. */
bool world_all(World *world, bool ok);

/** Element by element over the ranks, in place. */
bool world_max_double(World *world, double *values, size_t count);
bool world_max(World *world, int64_t *values, size_t count);
bool world_min(World *world, int64_t *values, size_t count);
bool world_sum(World *world, int64_t *values, size_t count);

#endif
