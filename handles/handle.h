/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HANDLE_H
#define EP_HANDLES_HANDLE_H

/**
 * EpHandle: a configuration, checked. A step's state is in a plan (plan.h), which backends fill and
 * read: the handle's own, or one that the call names. In latency mode the handle also holds a
 * deferred routing and a pending operation (pending.h).
 */

#include "handles/pending.h"
#include "runtime/group.h"
#include "runtime/layout.h"
#include "runtime/layouts.h"

struct EpHandle {
    EpObject object;
    EpGroup *group;
    EpOwned owned; /* by the group */
    EpPlanShape shape;
    int32_t top_k;      /* K of every step; EP_DEFAULT: any, or with named plans max_top_k */
    int32_t id;         /* the caller's; 0: none */
    EpQuant grad_quant; /* of combine_backward */
    uint64_t config;    /* of its named plans: see ep_plan_config */
    int64_t bytes;      /* of a plan */
    EpPlanRef own;      /* the handle's own plan; memory NULL: none */
    void *own_state;    /* the backend's state of it outside its memory; NULL on the host backend */
    /* latency mode */
    EpDeferredRouting deferred;
    EpPending pending;
};

/** Check the configuration (NULL: defaults) and derive the plan's shape from it. `read` becomes the
 *  configuration with all fields. `offers`: the backend's features (EP_OFFERS_...) on these
 *  nodes. */
EpStatus ep_handle_shape(const EpCall *call, const EpGroupConfig *group, unsigned offers,
                         const EpNodeSizes *nodes, int32_t num_ranks, int32_t rank,
                         const EpHandleConfig *config, EpHandleConfig *read, EpPlanShape *shape);

/** Call ep_handle_shape with a group's configuration, backend and rank. */
EpStatus ep_group_handle_shape(const EpCall *call, const EpGroup *group,
                               const EpHandleConfig *config, EpHandleConfig *read,
                               EpPlanShape *shape);

static inline int ep_handle_is_latency(const EpHandle *handle) {
    return handle->shape.mode == EP_MODE_LATENCY;
}

/** Returns K of a step with a named plan. */
static inline int32_t ep_handle_top_k(const EpHandle *handle) {
    return handle->top_k == EP_DEFAULT ? handle->shape.max_top_k : handle->top_k;
}

/** Make the first checks of every operation: the handle is live, the group has not failed, no
 *  operation is pending. Sets call->rank. */
EpStatus ep_handle_enter(EpCall *call, const EpHandle *handle);

/** Make the first checks of a receive phase: as ep_handle_enter, but in latency mode and with an
 *  operation of this kind pending. */
EpStatus ep_handle_enter_receive(EpCall *call, const EpHandle *handle, EpPendingKind kind);

/** Refuse a handle in throughput mode, whose operations have no phases. */
EpStatus ep_handle_check_phases(const EpCall *call, const EpHandle *handle);

/** Find the plan that a call names: `plan`, or the handle's own where that is NULL. Refuses memory
 *  that cannot hold a plan. */
EpStatus ep_handle_find_plan(const EpCall *call, const EpHandle *handle, const EpTensor *plan,
                             EpPlanRef *out);

/** Refuse memory without a plan. Sets `step`, which argument checks use. The CUDA backend's kernels
 *  look into named plans; here they count as known to be right. */
EpStatus ep_handle_read(const EpCall *call, const EpHandle *handle, EpPlanRef plan, EpStep *step);

/** Returns a hash of all that a plan's contents depend on besides the routing. `top_k`: K of its
 *  steps. Differs between ranks. */
uint64_t ep_plan_config(const EpPlanShape *shape, int32_t top_k);

/** Returns the largest index or slot number of this shape. It must fit an int32_t. */
int64_t ep_plan_largest_index(const EpPlanShape *shape);

/** Refuse a plan whose header differs from `expected` or whose last word is not the magic. */
EpStatus ep_plan_check(const EpCall *call, const EpPlanHeader *got, uint64_t tail,
                       const EpPlanHeader *expected);

/** Returns the words of a header that ep_plan_check compares, of a plan that this handle made with
 *  this K. */
static inline EpPlanHeader ep_plan_mark(const EpHandle *handle, int64_t top_k) {
    EpPlanHeader mark = {.magic = EP_PLAN_MAGIC,
                         .group = handle->group->id,
                         .config = ep_plan_config(&handle->shape, (int32_t)top_k)};
    return mark;
}

#endif
