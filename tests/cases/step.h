/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_STEP_H
#define TESTS_CASES_STEP_H

/**
 * The five operations of one step, each called once on this rank and compared with the oracle,
 * byte for byte. They may be called in any order that libep allows, for several handles and worlds.
 */

#include "tests/oracle/world.h"

typedef struct Step {
    EpGroup *group;
    EpHandle *handle;
    const World *world;
    int rank;
} Step;

/** In latency mode this is left to step_dispatch, which then prepares, too. */
void step_prepare(const Step *step);
void step_dispatch(const Step *step);
/** Halves of step_dispatch (prepare included) and step_combine. What step_dispatch_send returns is
 *  for step_dispatch_wait, which frees it. */
typedef struct StepFlight StepFlight;
StepFlight *step_dispatch_send(const Step *step);
void step_dispatch_wait(const Step *step, StepFlight *flight);
void step_combine_send(const Step *step);
void step_combine_wait(const Step *step);

/** In latency mode: a dispatch of the routing that an earlier call of ep_prepare has recorded. */
void step_dispatch_again(const Step *step);
void step_combine(const Step *step);
void step_combine_backward(const Step *step);
void step_dispatch_backward(const Step *step);

/** dispatch, combine, and but for latency mode combine_backward, dispatch_backward */
void step_move(const Step *step);

/** prepare, step_move, and the group's status: what the case's routing must leave there. */
void step_all(const Step *step);

/** What ep_group_status says now is what this step's routing must have left there. */
void step_check_status(const Step *step);

/** Names of this step's input tensors, for tests that make calls of their own. */
EpTensor step_tokens(const Step *step);
EpTensor step_weights(const Step *step);
EpTensor step_scales(const Step *step);
EpTensor step_expert_out(const Step *step);
EpTensor step_slot_weights(const Step *step);
EpTensor step_grad_out(const Step *step);

/** Receive tensors of dispatch over memory of the caller's. */
EpTensor step_recv_tokens(const Step *step, const void *data);
EpTensor step_recv_scales(const Step *step, const void *data);

/** A tensor like a receive buffer of this step: `columns` elements of `type` per row. */
EpTensor step_rows(const Step *step, const void *data, EpType type, int64_t columns);

#endif
