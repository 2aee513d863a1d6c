/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_FORKS_H
#define TESTS_HARNESS_FORKS_H

/**
 * A runner of its own for the thread sanitizer, whose memory map has no room for what Criterion
 * shares with its workers. It forks once for each test and knows one option, --filter PATTERN.
 */

int forks_main(int argc, char **argv);

#endif
