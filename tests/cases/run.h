/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_RUN_H
#define TESTS_CASES_RUN_H

/**
 * Whole cases over any bootstrap: create a group and a handle, run a step.
 */

#include "tests/cases/step.h"
#include "tests/harness/threads.h"

/** Run one rank of a case whose world the caller has made. */
void run_world(const EpBootstrap *bootstrap, const World *world);

/** Run one rank of a case, for instance under MPI: makes the world itself. */
void run_case(const EpBootstrap *bootstrap, const Case *c);

/** Run all ranks of a case as threads and assert that the results equal the oracle's. Runs the
 * case's mode, or those that its layout has where it names none. Pretends the case's nodes;
 * elsewhere the test sets LIBEP_TOPOLOGY itself. */
void run_case_on_threads(const Case *c);

/** Likewise for several cases of equal ranks, nodes, experts, tokens and K: they share a group, since
 * creating one takes half a second on GPUs. */
void run_cases_on_threads(const Case *cases, int count);
/** The same in every layout. */
void run_layouts(Case c);

/** A test that runs a case, given as text, in every layout. */
#define LayoutsTest(suite, name, text)      \
    Test(suite, name, .timeout = 120) {     \
        run_layouts(case_of("%s", (text))); \
    }

/** Run prepare and dispatch of a case alone, on threads, in the case's mode. */
void run_dispatch(Case c);

/** Make the world, group and handle of a case, complete or not. close_step frees all. */
Step open_step(const EpBootstrap *bootstrap, const Case *c);
void close_step(Step *step);

/** Create a group or a handle, of a case or of a configuration. Leave the test if that fails. */
EpGroup *open_group(const EpBootstrap *bootstrap, const Case *c);
EpGroup *open_group_with(const EpBootstrap *bootstrap, const EpGroupConfig *config);
EpHandle *open_handle(EpGroup *group, const Case *c);
EpHandle *open_handle_with(EpGroup *group, const EpHandleConfig *config);

/** Allocate a block for a plan of handles of this case, filled with garbage. The caller frees
 *  plan->data. */
void open_plan(EpGroup *group, const Case *c, EpTensor *plan);

#endif
