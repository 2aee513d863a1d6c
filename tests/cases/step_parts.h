/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_STEP_PARTS_H
#define TESTS_CASES_STEP_PARTS_H

/**
 * What the parts of a step share. Inner part of step.h: the plan is in step_plan.c, dispatch in
 * step_rows.c, combine and the backward calls in step_sums.c.
 */

#include "tests/cases/step.h"

static inline const RankWorld *step_mine(const Step *step) {
    return &step->world->rank[step->rank];
}

static inline int step_is_latency(const Step *step) {
    return step->world->c.mode == EP_MODE_LATENCY;
}

static inline size_t step_index_bytes(const Step *step) {
    return step->world->c.index_type == EP_TYPE_INT64 ? 8 : 4;
}

/** One float per slot: the shape of the rows without their columns. */
EpTensor step_per_slot(const Step *step, const void *data);

/** The shape of recv_topk_weights and of its gradient. */
EpTensor step_per_weight(const Step *step, const void *data);

/** A copy of an input, in which the tensor then lies; to be overwritten and given back by
 * step_spoil once it was sent. */
Image step_borrow(EpTensor *tensor);
void step_spoil(Image *image);

/** An optional output of prepare: what came, what should have come. */
typedef struct StepPlanArray {
    Image got, expected;
    EpTensor tensor;
} StepPlanArray;

/** All that one call of ep_prepare is given. */
typedef struct StepRouted {
    StepPlanArray counts, padded, offsets, totals, tokens, sources;
    Image index;
    EpTensor topk_idx;
} StepRouted;

/** Lay out a prepare, call it, and once the plan is made check what it wrote: frees all. */
void step_routed_new(const Step *step, StepRouted *r);
void step_routed_prepare(const Step *step, StepRouted *r);
void step_routed_check(const Step *step, StepRouted *r);

/** ep_handle_info says what this step's plan is. */
void step_check_info(const Step *step);

#endif
