/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_TOOLS_RUN_BENCH_H
#define TESTS_TOOLS_RUN_BENCH_H

/**
 * Runs of ep_bench, and the files that it reads and writes.
 */

#include <stddef.h>

#include "tests/harness/check.h"
#include "tests/harness/process.h"

/** Options of small and quick runs. The check is on by default. */
#define QUICK "-n 1 -w 0 --hidden 64 --experts 12 --top-k 3 --floor 0 "

/** Run a tool of this build, as "ep_moe". `line` has words separated by blanks. */
ProcessResult run_tool(const char *tool, const char *line);
/** The same with ep_bench. */
ProcessResult run_bench(const char *line);

/** Run a tool and check its exit status and, unless NULL, that its output and its errors contain
 * these words. */
void check_tool(const char *tool, const char *line, int exit_status, const char *in_out,
                const char *in_err);
/** The same with ep_bench. */
void check_run(const char *line, int exit_status, const char *in_out, const char *in_err);

/** Runs with these options end with status 2, and say why. */
typedef struct BadOptions {
    const char *line, *message;
} BadOptions;
void check_bad_options(const char *tool, const BadOptions *options, int n);

/** Run a tool, which succeeds and prints `in_out`. Returns what it writes as JSON, in static
 * memory. */
const char *run_json(const char *tool, const char *line, const char *in_out);
/** Check that a text, as the JSON, has each of these words. */
void check_words(const char *text, const char *const *words, int n);

/** Run a tool under mpirun and check its exit status and its output. Sanitizers skip the test. */
void check_mpirun(int ranks, const char *tool, const char *line, int exit_status,
                  const char *const *words, int n);
#define CHECK_MPIRUN(ranks, tool, line, exit_status, ...)                            \
    check_mpirun(ranks, tool, line, exit_status, (const char *const[]){__VA_ARGS__}, \
                 LENGTH(((const char *const[]){__VA_ARGS__})))

void write_file(const char *path, const char *text);
void write_bytes(const char *path, const char *text, size_t bytes);

#endif
