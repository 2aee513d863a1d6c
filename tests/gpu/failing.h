/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_FAILING_H
#define TESTS_GPU_FAILING_H

/**
 * A group that is going to fail because its last rank makes another call or none.
 */

#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"

/** Seconds: the timeout of groups whose waits shall expire, and a time that no failure takes. */
#define FAILING_TIMEOUT 3.0
#define FAILING_LIMIT 30.0

/** One rank's group and a prepared handle, which has also dispatched in latency mode. */
typedef struct FailingGroup {
    EpGroup *group;
    World *world;
    DeviceStep gpu;
    int absent; /**< the last rank, which makes another call or none */
} FailingGroup;

Case failing_case(int ranks, EpMode mode);

/** Open a group with a timeout of `seconds`. Collective. Returns false after a failed check. */
bool failing_open(FailingGroup *failing, const EpBootstrap *bootstrap, const Case *c,
                  double seconds);
void failing_close(FailingGroup *failing);

/** Give each rank a prepared handle in memory of the caller's, and overwrite that memory on the
 *  absent rank. Returns the memory, to be freed with cudaFree. */
char *failing_overwrite(FailingGroup *failing);

/** Call operations in the order of StepOp and wait. Each must return EP_OK or `expected`. */
void failing_call(const DeviceStep *gpu, unsigned ops, EpStatus expected);

/** Check that the group has failed with this status, that every call is refused with it, and that
 *  each message has `part` in it. */
void failing_check_refuses(const FailingGroup *failing, EpStatus status, const char *part);

/** Check that a new group on the same GPUs completes a whole step after the failure. */
void failing_check_next(const EpBootstrap *bootstrap, EpMode mode);

/** Returns a monotonic time in seconds. */
double failing_now(void);

#endif
