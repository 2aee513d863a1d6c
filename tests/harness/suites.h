/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_SUITES_H
#define TESTS_HARNESS_SUITES_H

/**
 * A runner of its own for tests on GPUs, where a process for each test would spend its time making
 * contexts: the tests of a suite run one after the other in one process, several suites at a time.
 * A test that crashes or takes too long is counted as failed, and the suite goes on behind it in
 * another process.
 *
 *     --filter PATTERN   "suite/test", as fnmatch knows patterns
 *     -jN                suites at a time
 */

int suites_main(int argc, char **argv);

#endif
