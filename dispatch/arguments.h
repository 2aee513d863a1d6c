/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_ARGUMENTS_H
#define EP_DISPATCH_ARGUMENTS_H

/**
 * Arguments of ep_dispatch, checked and described: what a rank sends, and where what it receives
 * is to go.
 */

#include "handles/ops.h"

typedef struct EpSent {
    const EpTensor *tokens, *topk_weights, *scales;
} EpSent;

typedef struct EpReceived {
    const EpTensor *tokens, *topk_weights, *scales, *topk_idx;
} EpReceived;

/** Check what is sent, and begin a scatter with it. */
EpStatus ep_dispatch_describe_sent(const EpOperation *o, const EpSent *sent, EpScatter *scatter);

/** Check what is received against that, and complete the scatter. */
EpStatus ep_dispatch_describe_received(const EpOperation *o, const EpReceived *received,
                                       EpScatter *scatter);

#endif
