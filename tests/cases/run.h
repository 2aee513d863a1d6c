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

/** Likewise for several cases of equal ranks, nodes, experts, tokens and K: they share a group,
 * since creating one takes half a second on GPUs. */
void run_cases_on_threads(const Case *cases, int count);

/** A test that makes this call, which runs cases: CasesTest(suite, name, call); */
#define CasesTest(suite, name, call)    \
    Test(suite, name, .timeout = 300) { \
        call;                           \
    }                                   \
    struct suite##_##name##_done

/** Run all cases of a text (cases_of) on threads. Those that can share a group. */
__attribute__((format(printf, 1, 2))) void run_grid(const char *format, ...);
#define EACH_LAYOUT "layout=expert-major,flat,batched,rank-major "
/** Likewise of these texts, which end with NULL, each behind `more`. With `run` call that with
 * the case of each text instead. Seeds begin with the text's number. */
void run_texts(void (*run)(Case c), const char *more, const char *const *texts);
#define TextsTest(suite, name, run, ...) \
    CasesTest(suite, name, run_texts(run, "", (const char *const[]){__VA_ARGS__, NULL}))
#define GridTest(suite, name, more, ...) \
    CasesTest(suite, name, run_texts(NULL, more, (const char *const[]){__VA_ARGS__, NULL}))
/** Run prepare and dispatch of a case alone, on threads, in the case's mode. */
void run_dispatch(Case c);

/** Make the world, group and handle of a case, complete or not. close_step frees all. A test of
 * latency mode is skipped where the backend has none. */
Step open_step(const EpBootstrap *bootstrap, const Case *c);
Step open_step_of(const EpBootstrap *bootstrap, const char *text);
void close_step(Step *step);

/** Create a group or a handle, of a case or of a configuration. Leave the test if that fails. */
EpGroup *open_group(const EpBootstrap *bootstrap, const Case *c);
EpGroup *open_group_with(const EpBootstrap *bootstrap, const EpGroupConfig *config);
/** Returns the configuration of a plain case. */
EpGroupConfig group_config(int ranks);
/** Check that a group is refused, with these words. */
#define CHECK_NO_GROUP(bootstrap, config, status, ...)                                            \
    check_no_group(bootstrap, config, status, (const char *const[]){__VA_ARGS__, NULL}, __FILE__, \
                   __LINE__)
void check_no_group(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpStatus status,
                    const char *const *words, const char *file, int line);
EpHandle *open_handle(EpGroup *group, const Case *c);
EpHandle *open_handle_with(EpGroup *group, const EpHandleConfig *config);

EpGroup *open_group_of(const EpBootstrap *bootstrap, const char *text);

/** A test whose body gets what each rank `opens`, and `closes` afterwards. */
#define OpenTest(suite, name, ranks, parameter, opens, argument, closes)      \
    static void suite##_##name##_on(const EpBootstrap *bootstrap, parameter); \
    ThreadTest(suite, name, ranks) {                                          \
        opens;                                                                \
        suite##_##name##_on(bootstrap, argument);                             \
        closes;                                                               \
    }                                                                         \
    static void suite##_##name##_on(__attribute__((unused)) const EpBootstrap *bootstrap, parameter)
/** A group, or a step, of a case, given as text without its ranks. */
#define GroupTest(suite, name, ranks, text)                                                       \
    OpenTest(suite, name, ranks, EpGroup *group, EpGroup *group = open_group_of(bootstrap, text), \
             group, ep_group_destroy(group))
#define StepTest(suite, name, ranks, text)                                                     \
    OpenTest(suite, name, ranks, Step *step, Step step = open_step_of(bootstrap, text), &step, \
             close_step(&step))

/** Call ep_group_place with the case's map. */
EpStatus place_experts(EpGroup *group, const Case *c);

/** Allocate a block for a plan of handles of this case, filled with garbage. The caller frees
 *  plan->data. */
void open_plan(EpGroup *group, const Case *c, EpTensor *plan);

#endif
