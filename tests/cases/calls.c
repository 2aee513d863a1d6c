/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/calls.h"

/* The tensors live as long as the test: a failed operation may have begun to write. */
EpStatus call_op(const Step *step, StepOp op) {
    static const StepOutput written[] = {OUT_TOKENS, OUT_SUMS, OUT_GRAD_ROWS, OUT_GRAD_TOKENS};
    static _Thread_local _Alignas(64) char room[1 << 16], index[1 << 16];
    StepMemory memory = {.counters = NULL};
    for (StepInput i = 0; i < INPUTS; i++)
        memory.in[i] = step_input(step, i).data;
    step_fill(step, IN_INDEX, index), memory.in[IN_INDEX] = index;
    for (int i = 0; i < LENGTH(written); i++)
        memory.out[written[i]] = room;
    return step_call(step, &memory, op, NULL);
}

EpStatus call_ops(const Step *step, unsigned ops) {
    EpStatus first = EP_OK;
    for (unsigned op = STEP_PREPARE; op <= ops; op <<= 1) {
        if (!(ops & op)) continue;
        GPU_ENQUEUES(ops >= 2 * op && op != STEP_PREPARE);
        EpStatus status = call_op(step, (StepOp)op);
        if (first == EP_OK) first = status;
    }
    GPU_ENQUEUES(0);
    return first == EP_OK && TESTS_ON_GPU ? ep_group_status(step->group, NULL) : first;
}

const char *op_phase(StepOp op) {
    return op == STEP_PREPARE                            ? "prepare"
           : op & (STEP_DISPATCH | STEP_DISPATCH_PHASES) ? "dispatch"
           : op & (STEP_COMBINE | STEP_COMBINE_PHASES)   ? "combine"
           : op == STEP_COMBINE_BACKWARD                 ? "combine backward"
                                                         : "dispatch backward";
}
