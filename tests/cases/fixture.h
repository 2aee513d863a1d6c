/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_FIXTURE_H
#define TESTS_CASES_FIXTURE_H

/**
 * A fixture for wrong calls: a group of one rank with a handle, and valid tensors for all five
 * operations, with poisoned outputs. A test spoils one argument and checks that the call is
 * refused; fixture_check_refusals does so for a group of refusals.def.
 */

#include "tests/cases/refusals.h"
#include "tests/cases/run.h"

typedef struct Fixture {
    EpBootstrap bootstrap;
    World *world;
    EpGroup *group;
    EpHandle *handle;
    EpTensor memory;      /**< of the plan that calls name, where the case says so */
    const EpTensor *plan; /**< what they pass: a copy of `memory`, or NULL */
    EpTensor named;
    Step step;
    Image image[STEP_ARRAYS];
    EpTensor tensor[STEP_ARRAYS];
    const EpTensor *arg[STEP_ARRAYS]; /**< the argument passed: &tensor, or NULL */
} Fixture;

/** A case of 4 experts, K 2 and max_tokens 9, all of them filled; bf16 rows of 24 elements, scales
 * of 8 bytes. */
Case fixture_case(EpLayout layout);

void fixture_open(Fixture *fixture, const Case *c);
/** Returns a fixture of this case with changes, as "layout=flat capacity=77"; prepared, or not.
 * Asserts. */
Fixture *fixture_new(const char *changes);
Fixture *fixture_new_prepared(const char *changes);
void fixture_free(Fixture *fixture);
/** Open or close a fixture of several ranks, over the caller's bootstrap. Collective. */
void fixture_open_on(Fixture *fixture, const EpBootstrap *bootstrap, const Case *c);
void fixture_close_on(Fixture *fixture);
void fixture_close(Fixture *fixture);

/** Reset all arguments of all operations to valid tensors with poisoned outputs. Combine gets
 * slot_weights, or topk_weights if the case has weights_at_combine. Biases and
 * counters are NULL; operations get extras where a test sets one. */
void fixture_reset(Fixture *fixture);

EpStatus fixture_call(Fixture *fixture, StepOp op);

/** Call a send phase, `send`; before ep_dispatch_send, also prepare. Optional outputs of the plan
 * are NULL. */
void fixture_begin(Fixture *fixture, StepOp send);

/** Check that no call has written an output since the last reset. */
void fixture_check_untouched(const Fixture *fixture);

/** Check that no call has written outside of a tensor. */
void fixture_check_guards(const Fixture *fixture);

/** Check the group of refusals.def in each mode that the layout has, or in the mode that `changes`
 * names, and that a valid step succeeds afterwards. Rows of calls that the mode lacks are left out.
 * `changes` to fixture_case, as "layout=flat". */
void fixture_check_refusals(const char *group, const char *changes);

/** A test on such a fixture, `f`. One of latency mode is skipped where the backend has none. */
#define FixtureTest(suite, name, changes)        \
    static void suite##_##name##_on(Fixture *f); \
    SoloTest(suite, name) {                      \
        Fixture *f = fixture_new(changes);       \
        suite##_##name##_on(f);                  \
        fixture_free(f);                         \
    }                                            \
    static void suite##_##name##_on(Fixture *f)

/** A test of such a group. */
#define RefusalsTest(suite, name, group, changes) \
    SoloCall(suite, name, fixture_check_refusals((group), (changes)))

/** Check that zero_tail writes no further than the end of the shortest output: `arg`, of one float
 * per row, which has room for the capacity only. */
void fixture_check_shorter_tail(StepOp op, StepOutput arg);

#endif
