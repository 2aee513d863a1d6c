/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_BASELINE_PLAN_H
#define BENCH_BASELINE_PLAN_H

/** What the baseline knows of a step: who sends which rows to whom, and where they go. */

#include <mpi.h>

#include "bench_case.h"

/** Slots per peer and where they begin in the packed buffer. */
typedef struct Traffic {
    int *counts, *offsets; /**< [R] */
    int64_t total;
} Traffic;

typedef struct BaselinePlan {
    const Case *c;
    MPI_Comm comm;
    Traffic sent, received;
    int32_t *send_token, *send_expert; /**< [sent] in packed order */
    int32_t *recv_expert, *recv_row;   /**< [received] */
    int32_t *entry_at;                 /**< [T, K] place in packed order, -1: none */
    int64_t *cursor;                   /**< [max(R, L)] */
    int64_t *slab_end;                 /**< [L] end of the slots of each slab */
    int64_t *slab_limit;               /**< [L] the same with padding */
} BaselinePlan;

bool baseline_plan_alloc(const Case *c, BaselinePlan *out);
void baseline_plan_free(BaselinePlan *plan);

/** Collective over the communicator: from the indices in the host's buffers. */
void baseline_plan_make(BaselinePlan *plan);

#endif
