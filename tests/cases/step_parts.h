/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_STEP_PARTS_H
#define TESTS_CASES_STEP_PARTS_H

/**
 * Internal helpers of step.h: the plan is in step_plan.c, dispatch in step_rows.c, combine and the
 * backward calls in step_sums.c.
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

/** A tensor of one float per slot. */
EpTensor step_per_slot(const Step *step, const void *data);

/** A tensor of the shape of recv_topk_weights and its gradient. */
EpTensor step_per_weight(const Step *step, const void *data);

size_t step_tensor_bytes(const EpTensor *tensor);

/** Copy an input's data and point the tensor at the copy. After the send, step_overwrite_input
 * overwrites and frees the copy. */
Image step_copy_input(EpTensor *tensor);
void step_overwrite_input(Image *image);

/** An optional output of prepare, and its expected contents. */
typedef struct StepPlanArray {
    Image got, expected;
    EpTensor tensor;
} StepPlanArray;

/** All arguments of one call of ep_prepare. */
typedef struct StepRouted {
    StepPlanArray counts, padded, offsets, totals, tokens, sources;
    StepPlanArray recv_rows, needed_rows, dropped_slots, source_rows;
    Image index;
    EpTensor topk_idx;
} StepRouted;

/** Make the arguments of a prepare; call it; once the plan is made, check its outputs and free
 * all. */
void step_routed_new(const Step *step, StepRouted *r);
void step_routed_prepare(const Step *step, StepRouted *r);
void step_routed_check(const Step *step, StepRouted *r);

/** Make the outputs of a dispatch in throughput mode that delivers its plan's numbers; check them
 *  and free all. */
void step_numbers_new(const Step *step, StepRouted *r, EpPlanTensors *out);
void step_numbers_check(const Step *step, StepRouted *r);

/** Check that ep_handle_info describes this step's plan. */
void step_check_info(const Step *step);

/** Check that ep_plan_sources tells the token of each receive row, after the dispatch. */
void step_check_sources(const Step *step);

#endif
