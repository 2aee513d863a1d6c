/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/calls.h"

EpStatus call_prepare(const Step *step) {
    const RankWorld *me = &step->world->rank[step->rank];
    EpTensor topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, step->world->c.top_k);
    return ep_prepare(step->handle, NULL, &topk_idx, NULL, NULL, NULL);
}

/* The outputs live as long as the test: a failed operation may have begun to write. */
EpStatus call_dispatch(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor tokens = step_tokens(step);
    EpTensor rows = step_rows(step, room, EP_TYPE_BF16, step->world->c.hidden);
    return ep_dispatch(step->handle, NULL, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL,
                       NULL);
}

EpStatus call_combine(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor rows = step_expert_out(step), out = step_grad_out(step);
    out.data = room;
    return ep_combine(step->handle, NULL, &rows, NULL, NULL, NULL, &out);
}

EpStatus call_combine_backward(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor grad = step_grad_out(step);
    EpTensor rows = step_rows(step, room, EP_TYPE_BF16, step->world->c.hidden);
    return ep_combine_backward(step->handle, NULL, &grad, NULL, NULL, NULL, &rows, NULL);
}

EpStatus call_dispatch_backward(const Step *step) {
    static _Thread_local _Alignas(16) char room[1 << 16];
    EpTensor rows = step_expert_out(step), out = step_grad_out(step);
    out.data = room;
    return ep_dispatch_backward(step->handle, NULL, &rows, NULL, NULL, &out, NULL);
}

const Call calls[NUM_CALLS] = {call_prepare, call_dispatch, call_combine, call_combine_backward,
                               call_dispatch_backward};
const char *const call_phases[NUM_CALLS] = {"prepare", "dispatch", "combine", "combine backward",
                                            "dispatch backward"};

EpStatus call_outcome(Call call, const Step *step) {
    EpStatus status = call(step);
    return status == EP_OK && TESTS_ON_GPU ? ep_group_status(step->group, NULL) : status;
}
