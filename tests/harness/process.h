/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_PROCESS_H
#define TESTS_HARNESS_PROCESS_H

/**
 * Run another program from a test, with empty stdin and without Criterion's environment. Its output
 * is kept, and it dies with the test.
 */

#include <stddef.h>

typedef struct ProcessResult {
    int exit_status; /**< -1: killed by a signal */
    char *out;       /**< its stdout; free with process_result_free */
    char *err;       /**< its stderr; NULL where merged into `out` */
} ProcessResult;

/** Run argv[0] (found on PATH) and wait for it. With `merge`, stderr goes to `out` too. */
ProcessResult process_run(const char *const *argv, int merge);
/** Run a program on `ranks` ranks, which mpirun ends after `seconds`, and merge its output.
 *  `arguments`: more options of mpirun, then the program and its own; NULL is the last. */
ProcessResult mpirun_run(int ranks, int seconds, const char *const *arguments);

void process_result_free(ProcessResult *result);

/** Returns the path of a file of this build ("ep_bench"), in static memory. */
const char *build_path(const char *name);

/** Returns the path of this test program. */
const char *self_path(void);

#endif
