/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_HOST_HOST_H
#define EP_RUNTIME_HOST_HOST_H

/**
 * The host backend's state of a group: its exchange. Operations run on the calling thread and have
 * finished when they return.
 */

#include "runtime/group.h"
#include "runtime/host/exchange.h"
#include "runtime/host/rowmath.h"

typedef struct EpHost {
    EpExchange *exchange;
    EpBootstrap messages; /* libep's own, where the caller's bootstrap has none; else all zero */
    const EpRowMath *math;
    void *memory; /* the shared segments, for share_free */
    char *sets;   /* buffers of latency mode; NULL: none */
    int64_t set_bytes;
    EpMask lost[EP_MAX_LATENCY_SETS]; /* of each set: the ranks whose rows have not come */
    char *routes;                     /* [size]: copies of routes, where late ranks are cut */
    EpDeviceOf device_of; /* NULL where no driver is, and so no memory that CPUs cannot load from */
} EpHost;

static inline EpHost *ep_host(const EpGroup *group) {
    return group->backend_state;
}

/** Returns a set of buffers of latency mode. */
static inline char *ep_host_set(const EpGroup *group, int32_t slot) {
    return ep_host(group)->sets + slot * ep_host(group)->set_bytes;
}

/** Returns the words of a token's routing as it travels to one rank: the token, then K local
 *  experts, -1 for a k whose expert is on another rank. */
static inline int64_t ep_route_words(int64_t top_k) {
    return 1 + top_k;
}

/** Words at the start of a routing message: routes in this round, routes in all rounds, slots lost
 *  on the way (node_rows). L counts follow. */
#define EP_ROUTE_HEAD_WORDS 3

/** Returns the bytes of the largest message of routes of a whole step. */
int64_t ep_host_route_bytes(const EpGroupConfig *config, int32_t num_ranks);

/** Returns the bytes that copies of routes take; 0 where late ranks are not cut. */
int64_t ep_host_routes_bytes(const EpGroupConfig *config, int32_t num_ranks);

/** Returns the staging bytes per rank, from configuration and settings alone. */
int64_t ep_host_stage_bytes(const EpGroupConfig *config, int32_t num_ranks,
                            const EpSettings *settings);

/** In a group with a placement: let routing take copies of experts on ranks that take part. */
void ep_host_choose_copies(EpGroup *group);

/** Fail the group with the exchange's failure. Returns its status. */
EpStatus ep_host_broken(EpGroup *group);

#define EP_TRY_EXCHANGE(group, expression)                       \
    do {                                                         \
        if ((expression) != EP_OK) return ep_host_broken(group); \
    } while (0)

#endif
