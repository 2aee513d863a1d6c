/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_CALLS_H
#define TESTS_CASES_CALLS_H

/**
 * Calls that may fail: one operation on a step's tensors, with an output that nobody looks at.
 */

#include "tests/cases/step.h"

typedef EpStatus (*Call)(const Step *step);

EpStatus call_prepare(const Step *step);
EpStatus call_dispatch(const Step *step);
EpStatus call_combine(const Step *step);
EpStatus call_combine_backward(const Step *step);
EpStatus call_dispatch_backward(const Step *step);

/** All of them, in the order of a step, and their names in sentences. */
enum { NUM_CALLS = 5 };
extern const Call calls[NUM_CALLS];
extern const char *const call_phases[NUM_CALLS];

/** Returns a call's final status. On GPUs a call returns while it is running, and ep_group_status
 *  reports errors. */
EpStatus call_outcome(Call call, const Step *step);

#endif
