/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_OP_H
#define EP_RUNTIME_OP_H

/**
 * The operations as ranks announce them to each other: a code that travels, and names for the
 * sentences of errors.
 */

#include <stdint.h>

#define EP_OP_FACTS 5

typedef struct EpOp {
    int32_t code; /**< 1 .. 14; see EP_OP_GONE in runtime/cuda/device.h for 15 */
    const char *name;
    const char *fact[EP_OP_FACTS]; /**< names of the values that must be equal on all ranks */
    int config; /**< index of the first fact that is configuration: a difference there is
                     EP_ERR_MISMATCH, in facts before it EP_ERR_ORDER */
} EpOp;

extern const EpOp ep_op_prepare, ep_op_route, ep_op_dispatch, ep_op_combine,
    ep_op_dispatch_backward, ep_op_combine_backward, ep_op_weight_gather, ep_op_weight_reduce,
    ep_op_weight_amax;

/** Returns the operation with this code, or one named "?" if there is none. */
const EpOp *ep_op_find(int32_t code);

/** Returns what this operation is one of: "handle" or "weight". */
const char *ep_op_owner(int32_t code);

#define EP_OP_PLACE_BYTES 32

/** Write " on handle ID", or weight, or "" for a handle without an id, into `out`. Returns `out`. */
const char *ep_op_place(int32_t code, int32_t id, char out[EP_OP_PLACE_BYTES]);

/** Returns the name of the operation with this code, unique among operations. */
const char *ep_op_name(int32_t code);

#endif
