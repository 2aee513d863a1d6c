/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_STEP_H
#define TESTS_CASES_STEP_H

/**
 * The five operations of one step. Each function calls one operation on this rank and compares
 * every byte with the oracle. They may be called in any order that libep allows, for several
 * handles and worlds.
 */

#include "tests/oracle/world.h"

typedef struct Step {
    EpGroup *group;
    EpHandle *handle;
    const World *world;
    int rank;
    const EpTensor *plan; /**< that calls name; NULL: the handle's own */
} Step;

/** Prepare. Does nothing in latency mode, where step_dispatch prepares too. */
void step_prepare(const Step *step);
void step_dispatch(const Step *step);
/** Send and receive phases of step_dispatch (prepare included) and step_combine. step_dispatch_wait
 * frees what step_dispatch_send returns. */
typedef struct StepPending StepPending;
StepPending *step_dispatch_send(const Step *step);
void step_dispatch_wait(const Step *step, StepPending *pending);
void step_combine_send(const Step *step);
void step_combine_wait(const Step *step);

/** Dispatch in latency mode, with the routing of an earlier ep_prepare. */
void step_dispatch_again(const Step *step);
void step_combine(const Step *step);
void step_combine_backward(const Step *step);
void step_dispatch_backward(const Step *step);

/** Dispatch and combine; in throughput mode also combine_backward and dispatch_backward. */
void step_move(const Step *step);

/** Prepare, step_move, step_check_status. */
void step_all(const Step *step);

/** Check that ep_group_status reports what this step's routing must cause. */
void step_check_status(const Step *step);

/** Tensors of this step's inputs, for tests that make their own calls. */
EpTensor step_tokens(const Step *step);
EpTensor step_weights(const Step *step);
EpTensor step_scales(const Step *step);
EpTensor step_global_scale(const Step *step);
EpTensor step_expert_out(const Step *step);
EpTensor step_slot_weights(const Step *step);
EpTensor step_grad_out(const Step *step);
EpTensor step_bias(const Step *step, int i);

/** Receive tensors of dispatch over the caller's memory. */
EpTensor step_recv_tokens(const Step *step, const void *data);
EpTensor step_recv_scales(const Step *step, const void *data);

/** A tensor shaped like a receive buffer of this step, with `columns` elements of `type` per
 * row. */
EpTensor step_rows(const Step *step, const void *data, EpType type, int64_t columns);

#endif
