/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_BASELINE_H
#define BENCH_BASELINE_H

/**
 * The baseline: what a user would write without libep. It packs rows per slot by destination, sends
 * them with MPI_Alltoallv, and unpacks them into aligned slabs; combine goes the other way and sums
 * on the token's rank. On GPUs it uses NCCL's sends and receives and a few plain kernels. On
 * several nodes of GPUs there is a bound besides: NCCL's sends and receives of the rows that cross
 * the network in libep, and no more.
 */

#include <mpi.h>

#include "tools/bench/case.h"
#include "tools/bench/check.h"
#include "tools/common/gpu.h"
#include "tools/common/time.h"

typedef enum BaselinePhase {
    BASELINE_PREPARE, /**< permutation, exchange of counts and expert ids, slabs */
    BASELINE_DISPATCH,
    BASELINE_COMBINE,
    NUM_BASELINE_PHASES
} BaselinePhase;

typedef struct BaselineResult {
    Quantiles times[NUM_BASELINE_PHASES];
    int64_t wrong[NUM_BASELINE_PHASES];
    Quantiles network;     /**< NCCL alone moves what crosses the network in a dispatch; median 0:
                                not measured, since there is one node, or no GPU */
    int64_t network_bytes; /**< which a rank sends then, maximum */
} BaselineResult;

const char *baseline_phase_name(BaselinePhase phase);

/** Collective over MPI_COMM_WORLD. Uses and overwrites slots_out and tokens_out. */
bool baseline_measure(Case *c, Check *check, BaselineResult *out);

/** The part of baseline_measure for GPUs (baseline_nccl.c). */
#if EP_WITH_CUDA
bool baseline_measure_nccl(Case *c, Check *check, BaselineResult *out);
#else
#define baseline_measure_nccl gpu_missing
#endif

/** Run the phases once more on poisoned buffers, and check what they write. */
bool baseline_check(Case *c, Check *check, TimedCall call, void *context, BaselineResult *out);

/* ---- the plan of a step -------------------------------------------------------------------- */

/** Slots per peer, and where they begin in the packed buffer. */
typedef struct Traffic {
    int *counts, *offsets; /**< [R] */
    int64_t total;
} Traffic;

/** Which rows a rank sends and receives, and where they go. */
typedef struct BaselinePlan {
    const Case *c;
    MPI_Comm comm;
    Traffic sent, received;
    int32_t *send_token, *send_expert; /**< [sent] in packed order */
    int32_t *recv_expert, *recv_row;   /**< [received] */
    int32_t *entry_at;                 /**< [T, K] index in packed order, -1: none */
    int64_t *cursor;                   /**< [R + L] scratch */
    int64_t *slab_end;                 /**< [L] end of each slab without padding */
    int64_t *slab_limit;               /**< [L] end of each slab with padding */
} BaselinePlan;

bool baseline_plan_alloc(const Case *c, Pool *pool, BaselinePlan *out);

/** Set offsets and total of traffic whose counts are known. */
void baseline_finish_traffic(Traffic *traffic, int ranks);

/** The expert of an entry, from the indices in the host's buffers; negative: none. */
int32_t baseline_expert_at(const BaselinePlan *plan, int64_t entry);

/** Collective over plan->comm. Computes the plan from the indices in the host's buffers. */
void baseline_plan_make(BaselinePlan *plan);

#endif
