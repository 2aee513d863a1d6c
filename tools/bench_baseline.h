/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_BASELINE_H
#define BENCH_BASELINE_H

/**
 * What a user would write without libep: rows packed per slot by destination, MPI_Alltoallv,
 * unpacked into aligned slabs; and back, summed by the token's rank. On GPUs with NCCL's sends and
 * receives and a few plain kernels.
 */

#include "bench_case.h"
#include "bench_check.h"
#include "bench_time.h"

typedef enum BaselinePhase {
    BASELINE_PREPARE, /**< permutation, exchange of counts and expert ids, slabs */
    BASELINE_DISPATCH,
    BASELINE_COMBINE,
    NUM_BASELINE_PHASES
} BaselinePhase;

typedef struct BaselineResult {
    Quantiles times[NUM_BASELINE_PHASES];
    int64_t wrong[NUM_BASELINE_PHASES];
} BaselineResult;

const char *baseline_phase_name(BaselinePhase phase);

/** Collective over MPI_COMM_WORLD. Uses and overwrites slots_out and tokens_out. */
bool baseline_measure(Case *c, Check *check, BaselineResult *out);

#endif
