/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_ARGUMENTS_H
#define EP_COMBINE_ARGUMENTS_H

/**
 * What ep_combine and its first half share.
 */

#include "handles/ops.h"

/** The part of the description that the inputs give. Both have been checked; slot_weights may be
 *  NULL. */
static inline EpGather ep_combine_describe(const EpTensor *expert_out,
                                           const EpTensor *slot_weights) {
    return (EpGather){.op = &ep_op_combine,
                      .rows = expert_out->data,
                      .type = expert_out->type,
                      .row_bytes = ep_tensor_row_bytes(expert_out),
                      .row_elements = ep_tensor_row_elements(expert_out),
                      .weighs = slot_weights != NULL,
                      .slot_weights = slot_weights ? slot_weights->data : NULL};
}

#endif
