/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_HOST_H
#define EP_RUNTIME_HOST_H

/**
 * The host backend's state of a group: its exchange. Operations run on the calling thread and have
 * finished when they return.
 */

#include "runtime/exchange.h"
#include "runtime/group.h"
#include "runtime/rowmath.h"

typedef struct EpHost {
    EpExchange *exchange;
    const EpRowMath *math;
    void *memory; /* of the shared segments */
} EpHost;

static inline EpHost *ep_host(const EpGroup *group) {
    return group->backend_state;
}

/** Make the exchange's failure the group's. Returns its status. */
EpStatus ep_host_broken(EpGroup *group);

#define EP_TRY_EXCHANGE(group, expression)                       \
    do {                                                         \
        if ((expression) != EP_OK) return ep_host_broken(group); \
    } while (0)

/** The two movements. */
EpStatus ep_host_scatter(EpHandle *handle, const EpScatter *scatter);
EpStatus ep_host_gather(EpHandle *handle, const EpGather *gather);

/** Collective parts of the backend table. */
void ep_host_measure(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                     int64_t *shared_bytes, int64_t *private_bytes);
EpStatus ep_host_open(EpGroup *group);
void ep_host_close(EpGroup *group, int together);
EpStatus ep_host_open_window(EpGroup *group, const EpCall *call, EpWindow *window);
void ep_host_close_window(EpGroup *group, EpWindow *window, int together);

#endif
