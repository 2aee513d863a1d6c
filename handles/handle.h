/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HANDLE_H
#define EP_HANDLES_HANDLE_H

/**
 * EpHandle: a layer's configuration and the address of its memory. The object itself holds nothing
 * of a step; that is all in the plan (plan.h), which backends fill and read.
 */

#include "handles/flight.h"
#include "handles/plan.h"
#include "handles/recorded.h"
#include "runtime/group.h"

struct EpHandle {
    EpObject object;
    EpGroup *group;
    EpHandle *previous, *next; /* the group's live handles */
    EpPlanShape shape;
    int32_t top_k; /* of every step, or EP_DEFAULT */
    int32_t ordinal;
    void *memory;
    int64_t bytes;
    int owns_memory;
    void *backend_state; /* what a backend keeps outside the plan: nothing of the host's */
    void *workspace;     /* the library's in any case; NULL where none is needed */
    int64_t workspace_bytes;
    /* latency mode */
    EpRecorded recorded;
    EpFlight flight;
    void *buffer; /* the backend's, for rows in flight */
    int64_t buffer_bytes;
};

/** Check the configuration (NULL: defaults) and derive the plan's shape from it. `offers`: what the
 *  backend has (EP_OFFERS_...). */
EpStatus ep_handle_shape(const EpCall *call, const EpGroupConfig *group, unsigned offers,
                         int32_t num_ranks, int32_t rank, const EpHandleConfig *config,
                         EpPlanShape *shape);

/** The same for a handle of a group that exists. */
EpStatus ep_group_handle_shape(const EpCall *call, const EpGroup *group,
                               const EpHandleConfig *config, EpPlanShape *shape);

/** Private memory of a handle beside its plan, 0 for none. */
int64_t ep_workspace_bytes(const EpBackendOps *backend, const EpPlanShape *shape,
                           const EpGroupConfig *config);

EpHandleCost ep_handle_shape_cost(const EpPlanShape *shape, const EpBackendOps *backend,
                                  const EpGroupConfig *config);

static inline int ep_handle_is_latency(const EpHandle *handle) {
    return handle->shape.mode == EP_MODE_LATENCY;
}

/**
 * What every operation checks first: a live handle, a group that has not failed, memory that holds
 * this handle's plan, nothing in flight. Sets call->rank.
 */
EpStatus ep_handle_enter(EpCall *call, const EpHandle *handle);

/** The same for the second half of what flies. */
EpStatus ep_handle_enter_wait(EpCall *call, const EpHandle *handle, EpFlying what);

/** Refuse a handle in throughput mode, which has no halves. */
EpStatus ep_handle_check_halves(const EpCall *call, const EpHandle *handle);

/** The same, and that the handle has a plan; reads its numbers for argument checks. */
EpStatus ep_handle_enter_prepared(EpCall *call, const EpHandle *handle, EpStep *step);
EpStatus ep_handle_read(const EpCall *call, const EpHandle *handle, EpStep *step);

/** The header of a handle's empty plan; and whether a header and a last word are this handle's. */
EpPlanHeader ep_plan_header(const EpHandle *handle);
EpStatus ep_plan_check(const EpCall *call, const EpPlanHeader *got, uint64_t tail,
                       const EpPlanHeader *expected);

/** Plans in plain memory: the host backend's part of the table. */
int64_t ep_host_plan_bytes(const EpPlanShape *shape);
EpStatus ep_host_format_plan(EpHandle *handle);
EpStatus ep_host_check_plan(const EpHandle *handle, const char *call, void *memory);
void ep_host_retire_plan(EpHandle *handle);
EpStatus ep_host_read_plan(const EpHandle *handle, EpStep *out);
EpStatus ep_host_prepare(EpHandle *handle, const EpRouting *routing);
int64_t ep_host_buffer_bytes(const EpPlanShape *shape, const EpGroupConfig *config);
EpStatus ep_host_open_buffers(EpHandle *handle, const EpCall *call, EpStatus mine);
void ep_host_close_buffers(EpHandle *handle);

/** The plan of a handle on the host backend. */
static inline EpPlan ep_host_plan(const EpHandle *handle) {
    EpPlan plan;
    ep_plan_map(&handle->shape, handle->memory, &plan);
    return plan;
}

#endif
