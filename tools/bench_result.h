/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_RESULT_H
#define BENCH_RESULT_H

/** What a run found out, as the table and the JSON file tell it. */

#include <stdbool.h>
#include <stdint.h>

#include "bench_baseline.h"
#include "bench_case.h"
#include "bench_check.h"
#include "bench_time.h"

typedef struct PhaseResult {
    const char *name;
    bool absent;    /**< there is no such phase in this mode */
    Quantiles time; /**< of one call: with graphs, of one among many in a graph */
    int64_t remote_bytes, local_bytes, useful_bytes; /**< per rank, mean over the ranks */
    double floor_us;                                 /**< negative: not measured */
    double issue_us;                                 /**< host's time to issue the call; the same */
    double plain_us;  /**< with graphs: median of a call that is in none; the same */
    double launch_us; /**< with graphs: host's time to launch the phase's graph; the same */
    int64_t wrong;    /**< on all ranks; negative: not checked */
} PhaseResult;

typedef struct HalfResult {
    Quantiles time;
    double issue_us; /**< negative: not measured */
} HalfResult;

enum { MAX_RESULTS = NUM_PHASES + NUM_BASELINE_PHASES };

typedef struct SizeResult {
    int64_t tokens, tokens_min;   /**< of the ranks: most and least */
    int64_t slots_max, slots_min; /**< live slots received, most and least */
    int64_t rows_max;             /**< most rows received, padding included */
    int64_t dropped;              /**< slots lost to the capacity, all ranks */
    int64_t library_bytes;        /**< ep_group_query, max over ranks */
    int64_t promised_bytes;       /**< ep_group_memory */
    int64_t travelled_bytes;      /**< remote rows sent in dispatch, max over ranks */
    int num_phases;
    PhaseResult phases[MAX_RESULTS];
    Quantiles step;       /**< all phases back to back; median 0: not measured */
    double step_issue_us; /**< host's time to issue it */
    bool has_halves;
    HalfResult halves[NUM_HALVES];
    double
        empty_node_us; /**< latency mode: a kernel that does nothing, in a graph; negative: not */
    double flag_us;    /**< measured. And a word's way from one GPU to another; the same */
    double baseline_us, speedup; /**< 0: not measured */
    char no_floor[256];          /**< why there is no floor, or "" */
    int64_t wrong;
    char first_wrong[CHECK_SENTENCE_BYTES];
} SizeResult;

/** Collective: create the case of one size, check it, time it, check it again. */
bool measure_size(World *world, const Options *options, int64_t size, SizeResult *out);

/** Collective, the part of it that takes the times: of phases, of halves, of the step. */
bool measure_times(Case *c, SizeResult *out);

#endif
