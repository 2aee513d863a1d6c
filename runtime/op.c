/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/op.h"

#include <stddef.h>
#include <stdio.h>

#define ROUTING                                                                        \
    {                                                                                  \
        {"top_k", EP_NUMBERS}, {"alignment", EP_NUMBERS}, {"layout", EP_NAMES_LAYOUT}, \
            {"capacity", EP_NUMBERS}, {                                                \
            "quant", EP_NAMES_QUANT                                                    \
        }                                                                              \
    }

const EpOp ep_op_prepare = {1, "prepare", ROUTING, 1};
/* The dispatch of latency mode, which includes the routing. */
const EpOp ep_op_route = {6, "dispatch", ROUTING, 1};
const EpOp ep_op_route_send = {10, "dispatch", ROUTING, 1};
const EpOp ep_op_dispatch = {2,
                             "dispatch",
                             {{"row bytes", EP_NUMBERS},
                              {"element type", EP_NAMES_TYPE},
                              {"bytes of scales", EP_NUMBERS},
                              {"number of topk_weights", EP_NUMBERS},
                              {"rows of a source", EP_NUMBERS}},
                             EP_OP_FACTS};
#define COMBINE                                                                              \
    {                                                                                        \
        {"row bytes", EP_NUMBERS}, {"element type", EP_NAMES_TYPE},                          \
            {"number of slot values", EP_NUMBERS}, {"number of topk_weights", EP_NUMBERS}, { \
            "sum_quant", EP_NAMES_QUANT                                                      \
        }                                                                                    \
    }
const EpOp ep_op_combine = {3, "combine", COMBINE, EP_OP_FACTS};
const EpOp ep_op_combine_send = {11, "combine", COMBINE, EP_OP_FACTS};
const EpOp ep_op_dispatch_backward = {4,
                                      "dispatch backward",
                                      {{"row bytes", EP_NUMBERS},
                                       {"element type", EP_NAMES_TYPE},
                                       {"number of slot values", EP_NUMBERS},
                                       {"", EP_NUMBERS},
                                       {"sum_quant", EP_NAMES_QUANT}},
                                      EP_OP_FACTS};
const EpOp ep_op_combine_backward = {5,
                                     "combine backward",
                                     {{"row bytes", EP_NUMBERS},
                                      {"element type", EP_NAMES_TYPE},
                                      {"bytes of scales", EP_NUMBERS},
                                      {"grad_quant", EP_NAMES_QUANT},
                                      {"rows of a source", EP_NUMBERS}},
                                     EP_OP_FACTS};
/* Of weights. Their configurations were compared when they were created: these are arguments. */
#define OF_WEIGHT(argument, names)                                                            \
    {                                                                                         \
        {"weight", EP_NUMBERS}, {argument, names}, {"bytes", EP_NUMBERS}, {"", EP_NUMBERS}, { \
            "", EP_NUMBERS                                                                    \
        }                                                                                     \
    }
const EpOp ep_op_weight_gather = {7, "weight gather", OF_WEIGHT("form", EP_NAMES_FORM),
                                  EP_OP_FACTS};
const EpOp ep_op_weight_reduce = {8, "weight reduce", OF_WEIGHT("accumulate", EP_NUMBERS),
                                  EP_OP_FACTS};
const EpOp ep_op_weight_amax = {9, "weight amax", OF_WEIGHT("scope", EP_NAMES_AMAX), EP_OP_FACTS};

const EpOp ep_op_placement = {12,
                              "place",
                              {{"hash of the map", EP_NUMBERS},
                               {"", EP_NUMBERS},
                               {"", EP_NUMBERS},
                               {"", EP_NUMBERS},
                               {"", EP_NUMBERS}},
                              EP_OP_FACTS};

const EpOp ep_op_weight_move = {13,
                                "weight move",
                                {{"hash of the map `from`", EP_NUMBERS},
                                 {"hash of the map `to`", EP_NUMBERS},
                                 {"hash of the weights' sizes", EP_NUMBERS},
                                 {"bytes of the workspace", EP_NUMBERS},
                                 {"", EP_NUMBERS}},
                                EP_OP_FACTS};

const EpOp *ep_op_find(int32_t code) {
    static const EpOp unknown = {.name = "?"};
    const EpOp *const ops[] = {&ep_op_prepare,           &ep_op_route,
                               &ep_op_dispatch,          &ep_op_combine,
                               &ep_op_dispatch_backward, &ep_op_combine_backward,
                               &ep_op_weight_gather,     &ep_op_weight_reduce,
                               &ep_op_weight_amax,       &ep_op_route_send,
                               &ep_op_combine_send,      &ep_op_placement,
                               &ep_op_weight_move};
    for (size_t i = 0; i < sizeof(ops) / sizeof(*ops); i++)
        if (ops[i]->code == code) return ops[i];
    return &unknown;
}

const char *ep_op_name(int32_t code) {
    if (code == ep_op_route.code) return "dispatch in latency mode";
    if (code == ep_op_route_send.code) return "dispatch in two phases";
    return code == ep_op_combine_send.code ? "combine in two phases" : ep_op_find(code)->name;
}

const char *ep_op_owner(int32_t code) {
    int is_of_weight = (code >= ep_op_weight_gather.code && code <= ep_op_weight_amax.code) ||
                       code == ep_op_weight_move.code;
    return is_of_weight ? "weight" : "handle";
}

const char *ep_op_values(const EpOp *op, int fact, int32_t rank, int64_t mine, int32_t peer,
                         int64_t theirs, char out[EP_OP_VALUES_BYTES]) {
    char own[EP_NAME_BYTES], other[EP_NAME_BYTES];
    EpNames names = op->fact[fact].names;
    snprintf(out, EP_OP_VALUES_BYTES, "%s differs: rank %d has %s, rank %d has %s",
             op->fact[fact].name, rank, ep_name(names, mine, own), peer,
             ep_name(names, theirs, other));
    return out;
}

const char *ep_op_place(int32_t code, int32_t id, char out[EP_OP_PLACE_BYTES]) {
    out[0] = 0;
    if (id) snprintf(out, EP_OP_PLACE_BYTES, " on %s %d", ep_op_owner(code), id);
    return out;
}
