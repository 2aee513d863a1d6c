/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_SUITES_H
#define TESTS_HARNESS_SUITES_H

/**
 * A test runner of our own. On GPUs, where a process for each test would spend its time on creating
 * contexts, the tests of a suite run one after the other in one process, several suites at a time.
 * Under the thread sanitizer, whose memory map has no room for the memory that Criterion shares
 * with its workers, each test has a process. A test that crashes or takes too long counts as
 * failed, and another process continues the suite after it. On emulated GPUs the last suites are
 * shared by processes that would be idle.
 *
 *     --filter PATTERN   "suite/test", an fnmatch pattern
 *     --early PATTERN    tests that start first: those that take long
 *     -jN                processes at a time
 */

int suites_main(int argc, char **argv);

#endif
