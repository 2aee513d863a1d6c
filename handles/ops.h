/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_OPS_H
#define EP_HANDLES_OPS_H

/**
 * The five operations as ranks announce them to each other (see EpOp), and the shapes that their
 * tensors have in common.
 */

#include "handles/handle.h"
#include "runtime/args.h"
#include "runtime/exchange.h"

extern const EpOp ep_op_prepare, ep_op_route, ep_op_dispatch, ep_op_combine,
    ep_op_dispatch_backward, ep_op_combine_backward;

/** One of these by its code; and its name where it is told from another. */
const EpOp *ep_op_find(int32_t code);
const char *ep_op_name(int32_t code);

/** A data operation while its arguments are checked. */
typedef struct EpOperation {
    EpCall call;
    const EpHandle *handle;
    EpStep step;
} EpOperation;

EpStatus ep_operation_begin(EpOperation *o, const char *name, const EpHandle *handle);

/** The same for ep_dispatch, which in latency mode finds a routing instead of a plan. */
EpStatus ep_operation_begin_dispatch(EpOperation *o, const char *name, const EpHandle *handle);

/** What such a dispatch routes by: the recorded routing, in `out`; NULL in throughput mode. */
const EpRouting *ep_operation_routing(const EpOperation *o, EpStream stream, EpRouting *out);

/** The same for first halves, and for second halves, which go by what flies. */
EpStatus ep_operation_begin_dispatch_send(EpOperation *o, const char *name, const EpHandle *handle);
EpStatus ep_operation_begin_combine_send(EpOperation *o, const char *name, const EpHandle *handle);
EpStatus ep_operation_begin_wait(EpOperation *o, const char *name, const EpHandle *handle,
                                 EpFlying what);

/** The same for an operation that latency mode does not have. */
EpStatus ep_operation_begin_backward(EpOperation *o, const char *name, const EpHandle *handle);

/** A tensor [T, columns] of this step's tokens; `columns` < 0: any number. */
EpStatus ep_arg_token_rows(const EpOperation *o, const char *argument, const EpTensor *t,
                           int64_t columns, const char *what);

/** A tensor of receive rows: [rows, columns], or [L, rows_per_expert, columns]. */
EpStatus ep_arg_slot_rows(const EpOperation *o, const char *argument, const EpTensor *t,
                          int64_t columns, const char *what);

/** Scales of receive rows, as the handle orders them: [rows, columns] or [columns, rows], and slabs
 *  of these. */
EpStatus ep_arg_slot_scales(const EpOperation *o, const char *argument, const EpTensor *t,
                            int64_t columns);

/** One FP32 per receive row: [rows], or [L, rows_per_expert]. */
EpStatus ep_arg_slot_values(const EpOperation *o, const char *argument, const EpTensor *t);

/** Weights as dispatch delivers them: as above, or [rows, K] in the flat layout. */
EpStatus ep_arg_slot_weights(const EpOperation *o, const char *argument, const EpTensor *t);

/** Row tensors that carry tokens: at most the group's max_row_bytes, 16-byte units. */
EpStatus ep_arg_token_bytes(const EpOperation *o, const char *argument, const EpTensor *t);

/** The pair of row tensors that a sum reads or writes: slot rows and token rows of one type. */
EpStatus ep_arg_summed_rows(const EpOperation *o, const char *slots_argument, const EpTensor *slots,
                            const char *tokens_argument, const EpTensor *tokens);

/**
 * Memory that the backend reaches, for a tensor whose shape was checked. Looking it up takes time,
 * so EP_CHECK says how much of it is done: where it says `check`, this is. Optional tensors may be
 * NULL, empty ones are not looked at.
 */
EpStatus ep_arg_reachable(const EpCall *call, const EpHandle *handle, EpCheck check,
                          const char *argument, const EpTensor *t);

/** `argument` must be given exactly where `cause` is. */
EpStatus ep_arg_pair(const EpOperation *o, const char *argument, const void *t, const char *cause,
                     const void *given);

/** Hand a checked operation to the backend, on its device and as profilers are to see it. */
EpStatus ep_run_prepare(const EpCall *call, EpHandle *handle, const EpRouting *routing);
EpStatus ep_run_scatter(const EpCall *call, EpHandle *handle, const EpScatter *scatter);
EpStatus ep_run_gather(const EpCall *call, EpHandle *handle, const EpGather *gather);

/** Receive rows that a checked tensor of slot rows holds. */
int64_t ep_slot_capacity(const EpHandle *handle, const EpTensor *t);

#endif
