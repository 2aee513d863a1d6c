/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_RUN_H
#define TESTS_CASES_RUN_H

/**
 * Whole cases: a group, a handle, a step, over any bootstrap.
 */

#include "tests/cases/step.h"
#include "tests/harness/threads.h"

/** One rank of a case, its world made elsewhere. */
void run_world(const EpBootstrap *bootstrap, const World *world);

/** One rank of a case, under MPI for instance: makes the world first. */
void run_case(const EpBootstrap *bootstrap, const Case *c);

/** All ranks of a case as threads; asserts that they agree with the oracle. In the case's mode;
 * where it names none, in both. */
void run_case_on_threads(const Case *c);

/** Create the case's group (handle), or fail the check and return NULL. */
EpGroup *open_group(const EpBootstrap *bootstrap, const Case *c);
EpHandle *open_handle(EpGroup *group, const Case *c);

#endif
