/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_CREW_H
#define TESTS_GPU_CREW_H

/**
 * Ranks of a group that is going to fail, because its last rank does something else or nothing.
 */

#include "tests/cases/run.h"
#include "tests/gpu/rig.h"

/** Deadline of waits that are to pass, and what no failure takes, in seconds. */
#define CREW_SOON 3.0
#define CREW_LATE 30.0

/** A rank with a prepared handle; in latency mode with one that has dispatched. */
typedef struct Crew {
    EpGroup *group;
    World *world;
    Rig rig;
    int absent; /**< the rank that will do something else: the last one */
} Crew;

Case crew_case(int ranks, EpMode mode);

/** Collective. Waits of the group end after some seconds. False after a failed check. */
bool crew_open(Crew *crew, const EpBootstrap *bootstrap, const Case *c, double seconds);
void crew_close(Crew *crew);

/** Give all ranks a handle in memory of their own, prepared, of which the absent rank's is then
 *  overwritten. Returns that memory, to be freed with cudaFree. */
char *crew_overwrite(Crew *crew);

/** Call operations in the order of RigOp, and wait: each is under way or refused as `expected`. */
void crew_call(const Rig *rig, unsigned ops, EpStatus expected);

/** The group has failed so, the sentence has this in it, and every call is refused with it. */
void crew_check_refuses(const Crew *crew, EpStatus status, const char *part);

/** The GPUs are none the worse for what has failed: another group does all of a step. */
void crew_check_next(const EpBootstrap *bootstrap, EpMode mode);

/** Seconds. */
double crew_now(void);

#endif
