/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_STEP_H
#define TESTS_CASES_STEP_H

/**
 * The operations of one step: their arrays, their calls, and what they must write.
 *
 * step_prepare and the functions behind it call one operation on this rank in the host's memory and
 * compare every byte with the oracle. They may be called in any order that libep allows, for
 * several handles and worlds. tests/gpu/device_step.h makes the same calls in device memory.
 */

#include "tests/oracle/world.h"

typedef struct Step {
    EpGroup *group;
    EpHandle *handle;
    const World *world;
    int rank;
    const EpTensor *plan; /**< that calls name; NULL: the handle's own */
    EpStatus *ended; /**< EP_OK; a call that returns EP_ERR_TIMEOUT, or cuts a rank, sets it, and
                          from then on nothing is compared. NULL: no call may */
    int32_t *cuts;   /**< shared by all ranks, or NULL: how often each has cut others. Its slots are
                          not those that the case says, so the rows that it combines are wrong */
    const int32_t *no_cuts;   /**< what they were when the ranks met */
    int block_rows, expected; /**< as in EpExtras; 0: what the case and the given words want */
} Step;

static inline const RankWorld *step_mine(const Step *step) {
    return &step->world->rank[step->rank];
}

/* ---- calls --------------------------------------------------------------------------------- */

typedef enum StepOp {
    STEP_PREPARE = 1,
    STEP_DISPATCH = 2,
    STEP_COMBINE = 4,
    STEP_COMBINE_BACKWARD = 8,
    STEP_DISPATCH_BACKWARD = 16,
    STEP_DISPATCH_SEND = 32,
    STEP_DISPATCH_WAIT = 64,
    STEP_COMBINE_SEND = 128,
    STEP_COMBINE_WAIT = 256
} StepOp;

#define STEP_FORWARD (STEP_PREPARE | STEP_DISPATCH | STEP_COMBINE)
#define STEP_BACKWARD (STEP_COMBINE_BACKWARD | STEP_DISPATCH_BACKWARD)
#define STEP_ALL (STEP_FORWARD | STEP_BACKWARD)
#define STEP_SENDS (STEP_DISPATCH_SEND | STEP_COMBINE_SEND)
#define STEP_DISPATCH_PHASES (STEP_DISPATCH_SEND | STEP_DISPATCH_WAIT)
#define STEP_COMBINE_PHASES (STEP_COMBINE_SEND | STEP_COMBINE_WAIT)
#define STEP_PHASES (STEP_PREPARE | STEP_DISPATCH_PHASES | STEP_COMBINE_PHASES)

typedef enum StepInput {
    IN_INDEX,
    IN_COUNT,
    IN_TOKENS,
    IN_WEIGHTS,
    IN_SCALES,
    IN_GLOBAL_SCALE,
    IN_EXPERT_OUT,
    IN_SLOT_WEIGHTS,
    IN_COMBINE_WEIGHTS, /**< as IN_WEIGHTS, for combine */
    IN_GRAD_SLOT_WEIGHTS,
    IN_GRAD_OUT,
    IN_BIAS0,
    IN_BIAS1,
    INPUTS
} StepInput;

typedef enum StepOutput {
    OUT_COUNTS = INPUTS, /**< inputs and outputs are numbered together */
    OUT_PADDED,
    OUT_OFFSETS,
    OUT_TOTALS,
    OUT_RECV_ROWS,
    OUT_NEEDED_ROWS,
    OUT_DROPPED,
    OUT_SOURCE_ROWS,
    OUT_SOURCES,
    OUT_TOKENS,
    OUT_WEIGHTS,
    OUT_SCALES,
    OUT_INDEX,
    OUT_SUMS,
    OUT_GRAD_ROWS,
    OUT_GRAD_SLOTS,
    OUT_GRAD_SCALES,
    OUT_GRAD_TOKENS,
    OUT_GRAD_WEIGHTS,
    STEP_OUTPUTS
} StepOutput;

/** What calls add to, and words of blocks of rows. Numbered behind the outputs. */
typedef enum StepCounter {
    EXPERT_TOKENS = STEP_OUTPUTS,
    PEER_ROWS,
    PEER_BYTES,
    PEER_WAIT,
    LONGEST_WAIT,
    READY_WORDS,
    DONE_WORDS,
    STEP_ARRAYS
} StepCounter;

/** Where the arrays of calls lie. NULL: an output is not asked for. */
typedef struct StepMemory {
    void *in[INPUTS], *out[STEP_OUTPUTS];
    int64_t *counters; /**< of step_counters_new, or NULL */
    int numbers_again; /**< a dispatch of throughput mode writes the outputs of prepare, too */
} StepMemory;

/** Make one call of the step's case, and return its status. */
EpStatus step_call(const Step *step, const StepMemory *memory, StepOp op, EpStream stream);
/** Make one call with any tensors; NULL: none is given. `again`: numbers_again. */
EpStatus step_call_with(const Step *step, const EpTensor *const given[STEP_ARRAYS], int again,
                        StepOp op, EpStream stream);

/** Returns the name of an array in sentences. */
const char *step_array_name(int array);
/** Return an input, over the world's array, or the shape of an output, without data. */
EpTensor step_input(const Step *step, StepInput input);
EpTensor step_output(const Step *step, StepOutput output);
size_t step_bytes(EpTensor tensor);
/** Write an input as calls read it: indices have the case's type. */
void step_fill(const Step *step, StepInput input, void *to);

/** Return the most bytes of an array on any rank. */
size_t case_input_bytes(const Case *c, StepInput input);
size_t case_output_bytes(const Case *c, StepOutput output);
/** Returns the least alignment that the public header accepts. */
size_t case_output_align(const Case *c, StepOutput output);

/** Whether the case asks for an output, and the operations that write it. */
int case_asks(const Case *c, StepOutput output);
unsigned case_writers(const Case *c, StepOutput output);

/** Write what the operations must write into poisoned images, one for each output. */
void step_expect(const Step *step, unsigned ops, Image *out);
/** Compare an output, guards included. Dot products may differ by 1e-5 of the sum of their terms'
 * magnitudes; `expected` gets those received. */
void step_compare(const Step *step, StepOutput output, const Image *got, Image *expected);

/* ---- counters ------------------------------------------------------------------------------ */

/** Return what the case's calls add to, filled with what it holds before the first one: in this
 * order, the vectors of StepCounter. Calls get those that the case asks for and that they take.
 * NULL: the case asks for none. */
int64_t *step_counters_new(const Step *step);
/** Return a counter, without data where `counters` is NULL, and whether a call gets it. */
EpTensor step_counter(const Step *step, int64_t *counters, StepCounter counter);
int step_counts(const Step *step, StepOp op, StepCounter counter);
/** Check that these operations, so many times each, have added to them, and free them. */
void step_counters_check(const Step *step, unsigned ops, int times, int64_t *counters);

/* ---- one operation each ---------------------------------------------------------------------- */

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
/** Likewise without gradients of weights, and so without expert_out. */
void step_combine_backward_rows(const Step *step);
void step_dispatch_backward(const Step *step);

/** Dispatch and combine; in throughput mode also combine_backward and dispatch_backward. */
void step_move(const Step *step);
/** Prepare, step_move, step_check_status. */
void step_all(const Step *step);

/** Return what these say of themselves. */
EpGroupInfo group_info(const EpGroup *group);
EpHandleInfo handle_info(const EpHandle *handle);
/** Check that ep_group_status reports what this step's routing must cause. */
void step_check_status(const Step *step);
/** Check that ep_handle_info describes this step's plan. */
void step_check_info(const Step *step);
/** Check that ep_plan_sources tells the token of each receive row, after the dispatch. */
void step_check_sources(const Step *step);

/* ---- tensors for tests that make their own calls ----------------------------------------------
 */

#define step_tokens(step) step_input(step, IN_TOKENS)
#define step_weights(step) step_input(step, IN_WEIGHTS)
#define step_scales(step) step_input(step, IN_SCALES)
#define step_expert_out(step) step_input(step, IN_EXPERT_OUT)
#define step_slot_weights(step) step_input(step, IN_SLOT_WEIGHTS)
#define step_grad_out(step) step_input(step, IN_GRAD_OUT)

/** Receive tensors of dispatch over the caller's memory. */
EpTensor step_recv_tokens(const Step *step, void *data);
/** A tensor shaped like a receive buffer of this step, with `columns` elements of `type` per
 * row. */
EpTensor step_rows(const Step *step, const void *data, EpType type, int64_t columns);

#endif
