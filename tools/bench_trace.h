/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_TRACE_H
#define BENCH_TRACE_H

/**
 * Trace files: the routing of one step of a whole job, as text.
 *
 *     ep-routing 1
 *     experts 256 top_k 8 ranks 4
 *     tokens 3                             rank 0 brings 3 tokens:
 *     12 200 3 77 45 130 9 61              one line each, top_k indices, negative: no expert
 *     ...
 *     tokens 0                             rank 1 brings none
 *     ...
 *
 * Line 1 is the magic word and the version of the format. Line 2 gives the shape. Then, rank by
 * rank, a line with its number of tokens and a line for each token. Numbers are decimal, separated
 * by blanks; a line ends in a newline; nothing follows the last line. An index is less than the
 * number of experts; naming an expert twice in a line is allowed.
 */

#include <stdbool.h>

#include "bench_routing.h"

/** What a trace must match to be of use to this run. */
typedef struct TraceShape {
    int num_ranks, top_k, num_experts;
} TraceShape;

/** Read `path`; false, with a sentence that names file and line, where it is not as it should. */
bool trace_read(const char *path, const TraceShape *shape, Routing *out);

/** Write `path` by way of a temporary file beside it. */
bool trace_write(const char *path, const Routing *routing);

#endif
