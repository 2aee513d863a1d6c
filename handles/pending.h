/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PENDING_H
#define EP_HANDLES_PENDING_H

/**
 * Latency mode: what a handle keeps from one call to the next. Rows wait in the backend's buffers.
 *
 *     deferred routing     the arguments of ep_prepare, for the dispatches that follow
 *     pending operation    the arguments of the send phase, for the receive phase
 */

#include "runtime/backend.h"

#define EP_PLAN_TENSORS 9

/** A routing that a dispatch turns into a plan. It holds the caller's data pointers and copies of
 *  the tensor descriptors. */
typedef struct EpDeferredRouting {
    int given;   /**< whether there is a routing */
    int pending; /**< whether no dispatch has made its plan yet */
    EpRouting routing;
    EpPlanTensors out;
    EpTensor tensor[EP_PLAN_TENSORS]; /**< copies of the tensors of `out` */
} EpDeferredRouting;

/** Keep a checked routing. */
void ep_routing_defer(EpDeferredRouting *deferred, const EpRouting *routing);

/** Returns what argument checks need for a step whose plan does not exist yet. */
EpStep ep_deferred_step(const EpDeferredRouting *deferred);

typedef enum EpPendingKind {
    EP_PENDING_NONE,
    EP_PENDING_DISPATCH,
    EP_PENDING_COMBINE
} EpPendingKind;

typedef struct EpPending {
    EpPendingKind kind;
    EpStep step;       /**< the receive phase's arguments are checked against it */
    EpScatter scatter; /**< EP_PENDING_DISPATCH: without the inputs, which may be gone */
    EpGather gather;   /**< EP_PENDING_COMBINE: likewise */
} EpPending;

/** Returns EP_ERR_ORDER unless the pending operation is of the `expected` kind. */
EpStatus ep_pending_check(const EpCall *call, const EpPending *pending, EpPendingKind expected);

#endif
