/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_FORKS_H
#define TESTS_HARNESS_FORKS_H

/**
 * A test runner for the thread sanitizer, whose memory map has no room for the memory that
 * Criterion shares with its workers. Forks once for each test; its options are --filter PATTERN and -jN.
 */

int forks_main(int argc, char **argv);

#endif
