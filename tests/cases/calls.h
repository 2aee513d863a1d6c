/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_CALLS_H
#define TESTS_CASES_CALLS_H

/**
 * Calls that may fail: operations on a step's tensors, with outputs that nobody looks at.
 */

#include "tests/cases/step.h"

EpStatus call_op(const Step *step, StepOp op);

/** Call operations in the order of StepOp, each behind the others, and return the first error. On
 *  GPUs a call returns while it is running, and ep_group_status reports errors. */
EpStatus call_ops(const Step *step, unsigned ops);

/** Returns the name of an operation in sentences. */
const char *op_phase(StepOp op);

/** Throughput mode has this many operations, in this order. */
enum { NUM_CALLS = 5 };
#define call_number(n) ((StepOp)(1u << (n)))

#endif
