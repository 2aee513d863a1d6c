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
    EpHandle *handle;
    EpPlanRef plan;
    EpStep step;
    int64_t block_rows; /**< blocks of sources: of this call's tensors, see ep_arg_blocks */
} EpOperation;

/** Begin an operation that reads a plan. Each begin function checks handle and group, and sets all
 *  fields of `o`. */
EpStatus ep_operation_begin(EpOperation *o, const char *name, EpHandle *handle,
                            const EpTensor *plan);

/** Read the plan of an operation that ep_operation_begin_plan has begun. */
EpStatus ep_operation_read(EpOperation *o);

/** Begin the receive phase of the pending operation. Refuses any other kind than `kind`. */
EpStatus ep_operation_begin_receive(EpOperation *o, const char *name, EpHandle *handle,
                                    EpPendingKind kind);

/** Begin a backward operation. Refuses latency mode, which has none. */
EpStatus ep_operation_begin_backward(EpOperation *o, const char *name, EpHandle *handle,
                                     const EpTensor *plan);

/** Begin an operation that may write a plan, ep_prepare or ep_dispatch: find its memory, which may
 *  hold anything. */
EpStatus ep_operation_begin_plan(EpOperation *o, const char *name, EpHandle *handle,
                                 const EpTensor *plan);

/** Check the arguments of ep_prepare and describe them. `tensors` is space for routing->out. */
EpStatus ep_routing_describe(const EpOperation *o, const EpPrepare *given, EpPlanTensors *tensors,
                             EpRouting *routing);

/** The same for outputs alone, of the plan that a dispatch in throughput mode reads. */
EpStatus ep_numbers_describe(const EpOperation *o, const EpPrepare *given, EpPlanTensors *tensors,
                             EpRouting *routing);

/** Check a tensor [T, columns] of this step's tokens. `columns` < 0: any number. `what` names the
 *  columns. */
EpStatus ep_arg_token_rows(EpOperation *o, const char *argument, const EpTensor *t, int64_t columns,
                           const char *what);

/** Find how many rows a source's block has in the tensors of this call, from the first of them. It
 *  must hold T rows. Does nothing in layouts without such blocks. */
EpStatus ep_arg_blocks(EpOperation *o, const char *argument, const EpTensor *t);

/** Check a tensor of receive rows: [rows, columns], [L, rows_per_expert, columns] if batched, or
 *  [R, block_rows, columns] if rank-major. */
EpStatus ep_arg_slot_rows(const EpOperation *o, const char *argument, const EpTensor *t,
                          int64_t columns, const char *what);

/** Check the scales of receive rows, in the handle's order: [rows, columns], [columns, rows], or
 *  whole tiles of rows and columns. If batched, L comes first; if rank-major, R. */
EpStatus ep_arg_slot_scales(const EpOperation *o, const char *argument, const EpTensor *t,
                            int64_t columns);

/** Check one FP32 per receive row: [rows], [L, rows_per_expert] or [R, block_rows]. */
EpStatus ep_arg_slot_values(const EpOperation *o, const char *argument, const EpTensor *t);

/** Check weights as dispatch delivers them: one FP32 per receive row; K if it has one slot for all
 *  its entries. */
EpStatus ep_arg_slot_weights(const EpOperation *o, const char *argument, const EpTensor *t);

/** Check the rows of tokens: a multiple of 16 bytes, at most the group's max_row_bytes, in memory
 *  that the backend reaches (LIBEP_CHECK=rows). */
EpStatus ep_arg_token_bytes(const EpOperation *o, const char *argument, const EpTensor *t);

/** Check the two row tensors of a sum: slot rows and token rows of one type and length. */
EpStatus ep_arg_summed_rows(EpOperation *o, const char *slots_argument, const EpTensor *slots,
                            const char *tokens_argument, const EpTensor *tokens);

/**
 * Check that the backend reaches the memory of a tensor whose shape was checked. The look-up takes
 * time, so it runs only if LIBEP_CHECK is `check`. NULL and empty tensors pass.
 */
EpStatus ep_arg_reachable(const EpCall *call, const EpHandle *handle, EpCheck check,
                          const char *argument, const EpTensor *t);

/** The same unless LIBEP_CHECK is none, for calls without a handle. */
EpStatus ep_arg_memory(const EpCall *call, const EpGroup *group, const char *argument,
                       const EpTensor *t);

/** Check the rows of a tensor [T, H] of sums: whole units of 16 elements where sums are quantised
 * on their way. */
EpStatus ep_arg_sum_elements(const EpOperation *o, const char *argument, const EpTensor *t);

/** Refuse `t` unless it is given (not NULL) exactly if `given` is. `cause` names the latter. */
EpStatus ep_arg_pair(const EpOperation *o, const char *argument, const void *t, const char *cause,
                     const void *given);

/** Call the backend with a checked operation, on its device and in a profiler range. Sets the plan,
 *  K, T and the place of the movement. A send phase becomes the handle's pending operation. */
EpStatus ep_run_prepare(const EpOperation *o, const EpRouting *routing);
EpStatus ep_run_publish(const EpOperation *o, const EpRouting *routing);
EpStatus ep_run_scatter(const EpOperation *o, EpScatter *scatter);
EpStatus ep_run_gather(const EpOperation *o, EpGather *gather);

/** Returns EP_OK unless a rank is cut, which suspends the group: ranks that have cut others do not
 *  agree on what operations of throughput mode exchange. */
EpStatus ep_refuse_cuts(EpGroup *group);

/** Returns the number of receive rows in a checked tensor of slot rows. */
int64_t ep_slot_capacity(const EpHandle *handle, const EpTensor *t);

#endif
