/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and closes the host backend of a group: shared segments, and the exchange that uses them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/host/setup.h"
#include "bootstrap/memory/host/host_memory.h"
#include "bootstrap/network/sockets.h"
#include "runtime/callback.h"
#include "runtime/host/host.h"
#include "runtime/wait.h"

#define SPINS_WITH_CPUS_TO_SPARE 2000
#define RANKS_OF_A_CROWD 16 /* for each CPU */

void ep_host_measure(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                     int64_t *shared_bytes, int64_t *private_bytes) {
    *shared_bytes =
        ep_exchange_control_bytes(num_ranks) + ep_host_stage_bytes(config, num_ranks, settings);
    *private_bytes = (int64_t)sizeof(EpHost) + ep_exchange_private_bytes(num_ranks, config->masks);
}

/* Count the ranks of the node that has the fewest, and of this rank's node. */
static void count_nodes(const EpGroup *group, int32_t *least, int32_t *here) {
    *least = group->size, *here = group->nodes.sizes.ranks;
    for (int32_t node = 0; node < group->nodes.sizes.nodes; node++) {
        int32_t count = ep_nodes_size(&group->nodes, node);
        *least = count < *least ? count : *least;
    }
}

/* Refuse segments that exceed the node's memory. The system would grant them, and kill the process
 * when it uses them. */
static EpStatus check_physical(const EpGroup *group, int64_t bytes, int32_t ranks_here) {
    int64_t physical = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (bytes * ranks_here <= physical) return EP_OK;
    return ep_fail(EP_ERR_NO_MEMORY,
                   "rank %d: ep_group_create: memory: expected %lld bytes for each of %d ranks on "
                   "this node, got a node of %lld",
                   group->rank, (long long)bytes, ranks_here, (long long)physical);
}

static int64_t choose_spins(const EpGroup *group, int32_t ranks_here) {
    if (group->settings.spin != EP_COUNT_AUTO) return group->settings.spin;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t on_machine = group->settings.topology.text[0] ? group->size : ranks_here;
    if (on_machine > RANKS_OF_A_CROWD * online) return -on_machine;
    return ranks_here <= online ? SPINS_WITH_CPUS_TO_SPARE : 0;
}

/* Share segments through the bootstrap's callback or, if it has none, POSIX shared memory. */
static EpStatus share(EpGroup *group, size_t bytes, void **segments, void **memory) {
    const EpBootstrap *b = &group->bootstrap;
    if (!b->share) return ep_posix_share(group, bytes, segments, memory);
    return ep_call_share(b, group->nodes.of[b->rank], bytes, group->timeout, segments, memory);
}

static void share_free(const EpBootstrap *b, void *memory, int together) {
    if (b->share)
        b->share_free(b->context, memory, together);
    else
        ep_posix_share_free(memory);
}

static EpStatus open_exchange(const EpCall *call, EpGroup *group, EpHost *host, void **segments) {
    const EpBootstrap *b = &group->bootstrap;
    int32_t least, here;
    count_nodes(group, &least, &here);
    EpStatus status = b->isend ? EP_OK : ep_sockets_open(group, &host->messages);
    EpExchangeSetup setup = {.bootstrap = b->isend ? b : &host->messages,
                             .abort = &group->abort,
                             .segments = segments,
                             .most_remote = group->size - least,
                             .tag = group->tag,
                             .timeout = group->timeout,
                             .masks = group->config.masks};
    setup.stage_bytes = ep_host_stage_bytes(&group->config, group->size, &group->settings);
    setup.spins = choose_spins(group, here);
    int64_t bytes = ep_exchange_segment_bytes(group->size, setup.most_remote, setup.stage_bytes);
    if (status == EP_OK) status = check_physical(group, bytes, here);
    EP_TRY(ep_group_agree(group, call, status));
    EP_TRY(share(group, (size_t)bytes, segments, &host->memory));
    host->exchange = ep_exchange_create(&setup);
    if (!host->exchange)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: memory: out of memory",
                       group->rank);
    EP_INFO("host backend: %d ranks on this node, %lld bytes of shared memory each, %s", here,
            (long long)bytes, host->math->name);
    return EP_OK;
}

EpStatus ep_host_open(EpGroup *group) {
    EpCall call = {"ep_group_create", group->rank};
    void *segments[EP_MAX_RANKS];
    EpHost *host = calloc(1, sizeof(*host));
    group->backend_state = host;
    EpStatus status = EP_OK;
    if (!host)
        status = ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: memory: out of memory",
                         group->rank);
    EP_TRY(ep_group_agree(group, &call, status));
    host->math = ep_rowmath();
    const EpBackendOps *cuda = ep_backend_ops(EP_BACKEND_CUDA);
    if (cuda) host->device_of = cuda->find_device_of();
    return open_exchange(&call, group, host, segments);
}

void ep_host_close(EpGroup *group, int together) {
    EpHost *host = group->backend_state;
    if (!host) return;
    int sends = ep_exchange_destroy(host->exchange, together);
    if (host->memory && !sends) share_free(&group->bootstrap, host->memory, together);
    ep_bootstrap_destroy(&host->messages);
    free(host);
    group->backend_state = NULL;
}

void ep_host_describe(const EpGroup *group, EpGroupInfo *out) {
    snprintf(out->within, sizeof(out->within), "%s",
             group->nodes.sizes.ranks > 1 ? "shared memory" : "one rank");
    if (group->nodes.sizes.nodes == 1) return;
    snprintf(out->between, sizeof(out->between), "%s",
             group->bootstrap.isend ? "messages of the bootstrap" : "TCP");
}
