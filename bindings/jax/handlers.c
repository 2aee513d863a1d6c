/* SPDX-License-Identifier: Apache-2.0 */
/* The operations as handlers. Above each one are its operands and results behind the order. */
#include <stdio.h>

#include "bindings/jax/handlers.h"

/** _calls.py looks up ep_jax_NAME. */
#define HANDLER(NAME)                                        \
    XLA_FFI_Handler ep_jax_##NAME;                           \
    static JaxOperation NAME;                                \
    XLA_FFI_Error *ep_jax_##NAME(XLA_FFI_CallFrame *frame) { \
        return jax_call(frame, #NAME, NAME);                 \
    }
HANDLER(prepare)
HANDLER(dispatch)
HANDLER(combine)
HANDLER(dispatch_backward)
HANDLER(combine_backward)
XLA_FFI_Handler ep_jax_order;

/* A mesh with the same devices in another order would give a rank the experts of another. A GPU's
 * operand is in its memory: reading it would wait for the stream, and could not be captured. */
static EpStatus check_place(const JaxCall *call, const EpTensor *place) {
    const JaxRank *rank = call->rank;
    char sentence[160];
    if (!rank->on_host || *(const int32_t *)place->data == rank->number) return EP_OK;
    snprintf(sentence, sizeof(sentence),
             "rank %d: prepare: expected place %d in shard_map, as in bootstrap's mesh, got %d",
             rank->number, rank->number, *(const int32_t *)place->data);
    return ep_set_last_error(EP_ERR_FOREIGN, sentence);
}

/* topk_idx, place[, num_tokens][, placement]
 *     -> plan, expert_counts, expert_padded, expert_offsets, totals
 * The attribute `placed` says whether the last operand is there. */
static EpStatus prepare(JaxCall *call) {
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    out.expert_counts = jax_result(call, 1);
    out.expert_padded = jax_result(call, 2);
    out.expert_offsets = jax_result(call, 3);
    out.totals = jax_result(call, 4);
    const EpExtras extras = jax_extras(call, JAX_WAITS);
    const int64_t map = call->num_operands - jax_attribute(call, "placed");
    EpStatus status = check_place(call, jax_operand(call, 1));
    if (status == EP_OK && map < call->num_operands)
        status = ep_group_place(call->rank->group, jax_operand(call, map), call->stream);
    if (status == EP_OK)
        status =
            ep_prepare_with(call->handle, jax_result(call, 0), jax_operand(call, 0),
                            map > 2 ? jax_operand(call, 2) : NULL, call->stream, &out, &extras);
    return status;
}

/* plan, tokens[, topk_weights][, global_scale] -> recv_tokens[, recv_topk_weights][, recv_scales]
 * The attributes `scaled` and `quantises` say whether the last ones are there. */
static EpStatus dispatch(JaxCall *call) {
    const int64_t scale = call->num_operands - jax_attribute(call, "scaled");
    const int64_t scales = call->num_results - jax_attribute(call, "quantises");
    EpExtras extras = jax_extras(call, JAX_WAITS | JAX_ROWS | JAX_EXPERTS);
    extras.global_scale = jax_operand(call, scale);
    return ep_dispatch_with(call->handle, jax_operand(call, 0), NULL, jax_operand(call, 1),
                            scale > 2 ? jax_operand(call, 2) : NULL, NULL, call->stream,
                            jax_result(call, 0), scales > 1 ? jax_result(call, 1) : NULL,
                            jax_result(call, scales), NULL, &extras);
}

/* plan, expert_out[, slot_weights][, bias0[, bias1]] -> out
 * The attribute `biases` says how many of the last operands are biases. */
static EpStatus combine(JaxCall *call) {
    const int64_t first = call->num_operands - jax_attribute(call, "biases");
    EpExtras extras = jax_extras(call, JAX_WAITS | JAX_ROWS);
    extras.bias0 = jax_operand(call, first);
    extras.bias1 = jax_operand(call, first + 1);
    return ep_combine_with(call->handle, jax_operand(call, 0), jax_operand(call, 1),
                           first > 2 ? jax_operand(call, 2) : NULL, NULL, call->stream,
                           jax_result(call, 0), &extras);
}

/* plan, grad_recv_tokens[, grad_slot_weights]
 *     -> grad_tokens[, grad_topk_weights] */
static EpStatus dispatch_backward(JaxCall *call) {
    const EpExtras extras = jax_extras(call, JAX_WAITS | JAX_ROWS);
    return ep_dispatch_backward_with(call->handle, jax_operand(call, 0), jax_operand(call, 1),
                                     jax_operand(call, 2), call->stream, jax_result(call, 0),
                                     jax_result(call, 1), &extras);
}

/* plan, grad_out[, slot_weights, expert_out]
 *     -> grad_expert_out[, grad_slot_weights][, grad_scales]
 * The attribute `quantises` says whether the last one is there. */
static EpStatus combine_backward(JaxCall *call) {
    const int64_t scales = call->num_results - jax_attribute(call, "quantises");
    EpExtras extras = jax_extras(call, JAX_WAITS | JAX_ROWS);
    extras.grad_scales = jax_result(call, scales);
    return ep_combine_backward_with(call->handle, jax_operand(call, 0), jax_operand(call, 1),
                                    jax_operand(call, 2), jax_operand(call, 3), call->stream,
                                    jax_result(call, 0), scales > 1 ? jax_result(call, 1) : NULL,
                                    &extras);
}

/* token -> order, or order -> token: for the compiler alone. */
XLA_FFI_Error *ep_jax_order(XLA_FFI_CallFrame *frame) {
    jax_answer_metadata(frame);
    return NULL;
}
