/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PENDING_H
#define EP_HANDLES_PENDING_H

/**
 * Latency mode: what a handle keeps from one call to the next, and which operations of the group
 * are in flight. Rows wait in the group's sets of buffers.
 *
 *     deferred routing     the arguments of ep_prepare, for the dispatches that follow
 *     pending operation    the arguments of the send phase, for the receive phase
 *
 * Send phases take the sets in turn. All ranks call them in the same order, so all use the same
 * set, whatever the order of receive phases is. A whole operation uses the set whose turn is next
 * and leaves it free.
 */

#include "runtime/backend.h"

#define EP_PLAN_TENSORS 9

/** A routing that a dispatch turns into a plan. It holds the caller's data pointers and copies of
 *  the tensor descriptors. */
typedef struct EpDeferredRouting {
    int given;   /**< whether there is a routing */
    int pending; /**< whether no dispatch has made the handle's own plan from it yet */
    EpRouting routing;
    EpPlanTensors out;
    EpTensor tensor[EP_PLAN_TENSORS]; /**< copies of the tensors of `out` */
} EpDeferredRouting;

/** Keep a checked routing. */
void ep_routing_defer(EpDeferredRouting *deferred, const EpRouting *routing);

/** Returns what argument checks need for a step whose plan does not exist yet. */
EpStep ep_routing_step(const EpRouting *routing);

typedef enum EpPendingKind {
    EP_PENDING_NONE,
    EP_PENDING_DISPATCH,
    EP_PENDING_COMBINE
} EpPendingKind;

typedef struct EpPending {
    EpPendingKind kind;
    EpStep step;               /**< the receive phase's arguments are checked against it */
    EpScatter scatter;         /**< EP_PENDING_DISPATCH: without the inputs, which may be gone */
    EpGather gather;           /**< EP_PENDING_COMBINE: likewise */
    EpDeferredRouting routing; /**< EP_PENDING_DISPATCH: for the plan's outputs */
    EpInFlight place;
} EpPending;

/** Returns EP_ERR_ORDER unless the pending operation is of the `expected` kind. */
EpStatus ep_pending_check(const EpCall *call, const EpPending *pending, EpPendingKind expected);

/** Find the turn of an operation on `stream`. Returns EP_ERR_ORDER if the operation that has it is
 *  still pending. */
EpStatus ep_flight_find(const EpCall *call, EpHandle *handle, EpStream stream, EpInFlight *place);

/** Note that the handle's send phase has been issued at a place, or that its receive phase has or
 *  never will be. */
void ep_flight_begin(EpHandle *handle, EpPendingKind kind, EpInFlight place);
void ep_flight_end(EpHandle *handle);

#endif
