/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/op.h"

#include <stdio.h>

#include <stddef.h>

const EpOp ep_op_prepare = {1, "prepare", {"top_k", "alignment", "layout", "capacity", "quant"}, 1};
/* The dispatch of latency mode, which includes the routing. */
const EpOp ep_op_route = {6, "dispatch", {"top_k", "alignment", "layout", "capacity", "quant"}, 1};
const EpOp ep_op_dispatch = {
    2,
    "dispatch",
    {"row bytes", "element type", "bytes of scales", "number of topk_weights", ""},
    EP_OP_FACTS};
const EpOp ep_op_combine = {
    3,
    "combine",
    {"row bytes", "element type", "number of slot values", "number of topk_weights", "sum_quant"},
    EP_OP_FACTS};
const EpOp ep_op_dispatch_backward = {
    4,
    "dispatch backward",
    {"row bytes", "element type", "number of slot values", "", "sum_quant"},
    EP_OP_FACTS};
const EpOp ep_op_combine_backward = {
    5, "combine backward", {"row bytes", "element type", "bytes of scales", "", ""}, EP_OP_FACTS};
/* Of weights. Their configurations were compared when they were created. */
const EpOp ep_op_weight_gather = {7, "weight gather", {"weight", "form", "bytes", "", ""}, 1};
const EpOp ep_op_weight_reduce = {8, "weight reduce", {"weight", "accumulate", "bytes", "", ""}, 1};
const EpOp ep_op_weight_amax = {9, "weight amax", {"weight", "scope", "bytes", "", ""}, 1};

const EpOp *ep_op_find(int32_t code) {
    static const EpOp unknown = {0, "?", {"", "", "", "", ""}, 0};
    const EpOp *const ops[] = {&ep_op_prepare,           &ep_op_route,
                               &ep_op_dispatch,          &ep_op_combine,
                               &ep_op_dispatch_backward, &ep_op_combine_backward,
                               &ep_op_weight_gather,     &ep_op_weight_reduce,
                               &ep_op_weight_amax};
    for (size_t i = 0; i < sizeof(ops) / sizeof(*ops); i++)
        if (ops[i]->code == code) return ops[i];
    return &unknown;
}

const char *ep_op_name(int32_t code) {
    return code == ep_op_route.code ? "dispatch in latency mode" : ep_op_find(code)->name;
}

const char *ep_op_owner(int32_t code) {
    return code >= ep_op_weight_gather.code && code <= ep_op_weight_amax.code ? "weight" : "handle";
}

const char *ep_op_place(int32_t code, int32_t id, char out[EP_OP_PLACE_BYTES]) {
    out[0] = 0;
    if (id) snprintf(out, EP_OP_PLACE_BYTES, " on %s %d", ep_op_owner(code), id);
    return out;
}
