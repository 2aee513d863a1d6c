/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HANDLE_H
#define EP_HANDLES_HANDLE_H

/**
 * EpHandle: a layer's configuration and the address of its memory. A step's state is in the plan
 * (plan.h), which backends fill and read. In latency mode the handle also holds a deferred routing
 * and a pending operation (pending.h).
 */

#include "handles/pending.h"
#include "handles/plan.h"
#include "runtime/group.h"

struct EpHandle {
    EpObject object;
    EpGroup *group;
    EpHandle *previous, *next; /* the group's live handles */
    EpPlanShape shape;
    int32_t top_k;   /* K of every step; EP_DEFAULT: any */
    int32_t ordinal; /* number of the handle in its group */
    void *memory;    /* of the plan */
    int64_t bytes;
    int owns_memory;
    void *backend_state; /* the backend's state outside the plan; NULL on the host backend */
    void *workspace;     /* owned by the library; NULL: the backend needs none */
    int64_t workspace_bytes;
    /* latency mode */
    EpDeferredRouting deferred;
    EpPending pending;
    void *buffer; /* owned by the backend */
    int64_t buffer_bytes;
};

/** Check the configuration (NULL: defaults) and derive the plan's shape from it. `offers`: the
 *  backend's features (EP_OFFERS_...). */
EpStatus ep_handle_shape(const EpCall *call, const EpGroupConfig *group, unsigned offers,
                         int32_t num_ranks, int32_t rank, const EpHandleConfig *config,
                         EpPlanShape *shape);

/** Call ep_handle_shape with a group's configuration, backend and rank. */
EpStatus ep_group_handle_shape(const EpCall *call, const EpGroup *group,
                               const EpHandleConfig *config, EpPlanShape *shape);

/** Returns the bytes of a handle's private workspace; 0: none. */
int64_t ep_workspace_bytes(const EpBackendOps *backend, const EpPlanShape *shape,
                           const EpGroupConfig *config);

/** Returns the mode and the memory of a handle with this shape. */
EpHandleCost ep_handle_shape_cost(const EpPlanShape *shape, const EpBackendOps *backend,
                                  const EpGroupConfig *config);

static inline int ep_handle_is_latency(const EpHandle *handle) {
    return handle->shape.mode == EP_MODE_LATENCY;
}

/**
 * Make the first checks of every operation: the handle is live, the group has not failed, the
 * memory holds this handle's plan, no operation is pending. Sets call->rank.
 */
EpStatus ep_handle_enter(EpCall *call, const EpHandle *handle);

/** Make the first checks of a receive phase: as ep_handle_enter, but in latency mode and with an
 *  operation of this kind pending. */
EpStatus ep_handle_enter_receive(EpCall *call, const EpHandle *handle, EpPendingKind kind);

/** Refuse a handle in throughput mode, whose operations have no phases. */
EpStatus ep_handle_check_phases(const EpCall *call, const EpHandle *handle);

/** Call ep_handle_enter, then ep_handle_read. */
EpStatus ep_handle_enter_prepared(EpCall *call, const EpHandle *handle, EpStep *step);

/** Refuse a handle without a plan. Sets `step`, which argument checks use. */
EpStatus ep_handle_read(const EpCall *call, const EpHandle *handle, EpStep *step);

/** Returns the header of a handle's empty plan. */
EpPlanHeader ep_plan_header(const EpHandle *handle);

/** Refuse a plan whose header differs from `expected` or whose last word is not the magic. */
EpStatus ep_plan_check(const EpCall *call, const EpPlanHeader *got, uint64_t tail,
                       const EpPlanHeader *expected);

#endif
