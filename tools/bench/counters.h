/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_COUNTERS_H
#define BENCH_COUNTERS_H

/** Counters that all calls of a case add to, with --stats: see EpExtras. */

#include "tools/bench/case.h"

/** What they hold in the end, over all calls and ranks. */
typedef struct CountersResult {
    int64_t slots, most_slots; /**< received; of the busiest expert */
    int64_t rows, bytes;       /**< sent to other ranks */
    double waited_us;          /**< all ranks for all others */
    double longest_us;         /**< the longest wait of a call */
} CountersResult;

/** Returns the elements of the buffer: 0 without --stats. */
size_t counters_size(const Case *c);

/** Returns the extras of a phase, in memory of the case; NULL without --stats. */
const EpExtras *counters_of(Case *c, PhaseId phase);
const EpExtras *counters_of_split(Case *c, SplitPhaseId phase);

/** Point the tensors into the memory of `b`. */
void counters_describe(Case *c, const Buffers *b);

/** Collective: read them. */
bool counters_read(Case *c, CountersResult *out);

#endif
