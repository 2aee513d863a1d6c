/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_FAILING_H
#define TESTS_GPU_FAILING_H

/**
 * A group that is going to fail because its last rank makes another call or none.
 */

#include "tests/gpu/device_step.h"

/** Seconds: the timeout of groups whose waits shall expire, and a time that no failure takes. */
#define FAILING_TIMEOUT 3.0
#define FAILING_LIMIT 30.0

/** One rank's group and a prepared handle, which has also dispatched in latency mode. */
typedef struct FailingGroup {
    EpGroup *group;
    DeviceStep gpu;
    int absent; /**< the last rank, which makes another call or none */
} FailingGroup;

Case failing_case(int ranks, EpMode mode);

/** Open a group with a timeout of `seconds`. Collective. */
void failing_open(FailingGroup *failing, const EpBootstrap *bootstrap, const Case *c,
                  double seconds);
/** Likewise for the case of throughput mode. */
void failing_open_plain(FailingGroup *failing, const EpBootstrap *bootstrap, double seconds);
void failing_close(FailingGroup *failing);

/** Make a plan; in latency mode a dispatch makes it. */
void failing_make_plan(DeviceStep *gpu);

/** Call operations in the order of StepOp and wait. Each must return EP_OK or `expected`. */
void failing_call(const DeviceStep *gpu, unsigned ops, EpStatus expected);

/** Check that less than FAILING_LIMIT has passed since `begin` (gpu_now). */
void failing_check_soon(double begin);
/** Check that the group has failed with this status, that every call is refused with it, and that
 *  each message has `part` in it. */
void failing_check_refuses(const FailingGroup *failing, EpStatus status, const char *part);

/** Returns a copy of the heads and records that other ranks store in this one's window. */
char *failing_copy_records(const EpGroup *group, size_t *bytes);

/** Returns whether no rank's check has failed. Ranks go on together, or end together. */
int failing_none(const EpBootstrap *bootstrap);

/** Check that a new group on the same GPUs completes a whole step after the failure. */
void failing_check_next(const EpBootstrap *bootstrap, EpMode mode);

#endif
