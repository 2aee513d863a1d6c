/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_OPERATION_H
#define EP_HANDLES_OPERATION_H

/**
 * The common parts of the five operations: first checks, checks of tensors, and calls of the
 * backend.
 */

#include "handles/handle.h"
#include "runtime/args.h"
#include "runtime/op.h"

/** A data operation while its arguments are checked. */
typedef struct EpOperation {
    EpCall call;
    const EpHandle *handle;
    EpStep step;
} EpOperation;

/** Begin an operation that needs a plan. Each begin function checks handle and group, and sets all
 *  fields of `o`. */
EpStatus ep_operation_begin(EpOperation *o, const char *name, const EpHandle *handle);

/** Begin ep_dispatch. In latency mode it needs a deferred routing instead of a plan. */
EpStatus ep_operation_begin_dispatch(EpOperation *o, const char *name, const EpHandle *handle);

/** Returns the dispatch's deferred routing, copied to `out`; NULL in throughput mode. */
const EpRouting *ep_operation_routing(const EpOperation *o, EpStream stream, EpRouting *out);

/** Begin a send phase. Refuses throughput mode. */
EpStatus ep_operation_begin_dispatch_send(EpOperation *o, const char *name, const EpHandle *handle);
EpStatus ep_operation_begin_combine_send(EpOperation *o, const char *name, const EpHandle *handle);

/** Begin the receive phase of the pending operation. Refuses any other kind than `kind`. */
EpStatus ep_operation_begin_receive(EpOperation *o, const char *name, const EpHandle *handle,
                                    EpPendingKind kind);

/** Begin a backward operation. Refuses latency mode, which has none. */
EpStatus ep_operation_begin_backward(EpOperation *o, const char *name, const EpHandle *handle);

/** Check a tensor [T, columns] of this step's tokens. `columns` < 0: any number. `what` names the
 *  columns. */
EpStatus ep_arg_token_rows(const EpOperation *o, const char *argument, const EpTensor *t,
                           int64_t columns, const char *what);

/** Check a tensor of receive rows: [rows, columns], or [L, rows_per_expert, columns] if batched. */
EpStatus ep_arg_slot_rows(const EpOperation *o, const char *argument, const EpTensor *t,
                          int64_t columns, const char *what);

/** Check the scales of receive rows, in the handle's order: [rows, columns] or [columns, rows].
 *  If batched, L comes first. */
EpStatus ep_arg_slot_scales(const EpOperation *o, const char *argument, const EpTensor *t,
                            int64_t columns);

/** Check one FP32 per receive row: [rows], or [L, rows_per_expert] if batched. */
EpStatus ep_arg_slot_values(const EpOperation *o, const char *argument, const EpTensor *t);

/** Check weights as dispatch delivers them: one FP32 per receive row, or [rows, K] if flat. */
EpStatus ep_arg_slot_weights(const EpOperation *o, const char *argument, const EpTensor *t);

/** Check the rows of tokens: a multiple of 16 bytes, at most the group's max_row_bytes, in memory
 *  that the backend reaches (LIBEP_CHECK=rows). */
EpStatus ep_arg_token_bytes(const EpOperation *o, const char *argument, const EpTensor *t);

/** Check the two row tensors of a sum: slot rows and token rows of one type and length. */
EpStatus ep_arg_summed_rows(const EpOperation *o, const char *slots_argument, const EpTensor *slots,
                            const char *tokens_argument, const EpTensor *tokens);

/**
 * Check that the backend reaches the memory of a tensor whose shape was checked. The look-up takes
 * time, so it runs only if LIBEP_CHECK is `check`. NULL and empty tensors pass.
 */
EpStatus ep_arg_reachable(const EpCall *call, const EpHandle *handle, EpCheck check,
                          const char *argument, const EpTensor *t);

/** Refuse `t` unless it is given (not NULL) exactly if `given` is. `cause` names the latter. */
EpStatus ep_arg_pair(const EpOperation *o, const char *argument, const void *t, const char *cause,
                     const void *given);

/** Call the backend with a checked operation, on its device and in a profiler range. */
EpStatus ep_run_prepare(const EpCall *call, EpHandle *handle, const EpRouting *routing);
EpStatus ep_run_scatter(const EpCall *call, EpHandle *handle, const EpScatter *scatter);
EpStatus ep_run_gather(const EpCall *call, EpHandle *handle, const EpGather *gather);

/** Returns the number of receive rows in a checked tensor of slot rows. */
int64_t ep_slot_capacity(const EpHandle *handle, const EpTensor *t);

#endif
