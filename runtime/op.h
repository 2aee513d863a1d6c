/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_OP_H
#define EP_RUNTIME_OP_H

/**
 * The operations as ranks announce them to each other: a code that travels, and names for the
 * sentences of errors.
 */

#include <stdint.h>

#include "runtime/names.h"

#define EP_OP_FACTS 5

typedef struct EpOp {
    int32_t code; /**< 1 .. 14; see EP_OP_GONE in runtime/cuda/device.h for 15 */
    const char *name;
    struct {
        const char *name;
        EpNames names;   /**< how its value is written */
    } fact[EP_OP_FACTS]; /**< the values that must be equal on all ranks */
    int config;          /**< index of the first fact that is configuration: a difference there is
                              EP_ERR_MISMATCH, in facts before it EP_ERR_ORDER */
} EpOp;

/* A send phase is an operation of its own: it takes a set of buffers, where a whole operation takes
 * none, so that all ranks split an operation or none does. */
extern const EpOp ep_op_route_send, ep_op_combine_send;
extern const EpOp ep_op_prepare, ep_op_route, ep_op_dispatch, ep_op_combine,
    ep_op_dispatch_backward, ep_op_combine_backward, ep_op_weight_gather, ep_op_weight_reduce,
    ep_op_weight_amax, ep_op_placement, ep_op_weight_move;

/** Returns the operation with this code, or one named "?" if there is none. */
const EpOp *ep_op_find(int32_t code);

/** Returns what this operation is one of: "handle" or "weight". */
const char *ep_op_owner(int32_t code);

#define EP_OP_VALUES_BYTES (2 * EP_NAME_BYTES + 64)

/** Write "layout differs: rank 0 has EP_LAYOUT_FLAT, rank 3 has EP_LAYOUT_BATCHED", of the fact
 *  number `fact`, into `out`. Returns `out`. */
const char *ep_op_values(const EpOp *op, int fact, int32_t rank, int64_t mine, int32_t peer,
                         int64_t theirs, char out[EP_OP_VALUES_BYTES]);

#define EP_OP_PLACE_BYTES 32

/** Write " on handle ID", or weight, or "" for a handle without an id, into `out`. Returns `out`.
 */
const char *ep_op_place(int32_t code, int32_t id, char out[EP_OP_PLACE_BYTES]);

/** Returns the name of the operation with this code, unique among operations. */
const char *ep_op_name(int32_t code);

#endif
