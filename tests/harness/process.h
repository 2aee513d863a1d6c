/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_PROCESS_H
#define TESTS_HARNESS_PROCESS_H

/**
 * Run another program from a test: stdin empty, output kept, no trace of Criterion in its
 * environment, and dead when the test dies.
 */

#include <stddef.h>

typedef struct ProcessResult {
    int exit_status; /**< -1: it was killed by a signal */
    char *out;       /**< what it wrote to stdout; free with process_result_free */
    char *err;       /**< stderr; NULL where it was merged into `out` */
} ProcessResult;

/** Run argv[0] (found on PATH) and wait. `merge`: stderr goes to `out` too. */
ProcessResult process_run(const char *const *argv, int merge);
void process_result_free(ProcessResult *result);

/** Path of a program that the same build made, in static memory: "ep_bench" beside this build. */
const char *build_path(const char *name);

/** Path of this test program itself. */
const char *self_path(void);

#endif
