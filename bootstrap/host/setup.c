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
#include "bootstrap/places.h"
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
    return ep_fail(
        EP_ERR_NO_MEMORY,
        "rank %d: %s: memory: expected %lld bytes for each of %d ranks on this node, got "
        "a node of %lld",
        group->rank, group->call, (long long)bytes, ranks_here, (long long)physical);
}

static EpStatus fail_memory(const EpGroup *group) {
    return ep_fail(EP_ERR_NO_MEMORY, "rank %d: %s: memory: out of memory", group->rank,
                   group->call);
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

static EpExchangeSetup describe_exchange(const EpGroup *group, void *const *segments) {
    return (EpExchangeSetup){.bootstrap = &group->bootstrap,
                             .abort = &group->abort,
                             .segments = segments,
                             .stage_bytes =
                                 ep_host_stage_bytes(&group->config, group->size, &group->settings),
                             .tag = group->tag,
                             .timeout = group->timeout,
                             .masks = group->config.masks};
}

static EpStatus open_exchange(const EpCall *call, EpGroup *group, EpHost *host, void **segments) {
    const EpBootstrap *b = &group->bootstrap;
    int32_t least, here;
    count_nodes(group, &least, &here);
    EpStatus status = b->isend ? EP_OK : ep_sockets_open(group, &host->messages);
    EpExchangeSetup setup = describe_exchange(group, segments);
    if (!b->isend) setup.bootstrap = &host->messages;
    setup.most_remote = group->size - least;
    setup.spins = choose_spins(group, here);
    int64_t bytes = ep_exchange_segment_bytes(group->size, setup.most_remote, setup.stage_bytes);
    if (status == EP_OK) status = check_physical(group, bytes, here);
    EP_TRY(ep_group_agree(group, call, status));
    EP_TRY(share(group, (size_t)bytes, segments, &host->memory));
    host->exchange = ep_exchange_create(&setup);
    if (!host->exchange) return fail_memory(group);
    EP_INFO("host backend: %d ranks on this node, %lld bytes of shared memory each, %s", here,
            (long long)bytes, host->math->name);
    return EP_OK;
}

/* Make the backend's state. Returns NULL when out of memory. */
static EpHost *make_host(EpGroup *group) {
    EpHost *host = calloc(1, sizeof(*host));
    group->backend_state = host;
    if (!host) return NULL;
    host->math = ep_rowmath();
    const EpBackendOps *cuda = ep_backend_ops(EP_BACKEND_CUDA);
    if (cuda) host->device_of = cuda->find_device_of();
    return host;
}

EpStatus ep_host_open(EpGroup *group) {
    EpCall call = {group->call, group->rank};
    void *segments[EP_MAX_RANKS];
    EpHost *host = make_host(group);
    EP_TRY(ep_group_agree(group, &call, host ? EP_OK : fail_memory(group)));
    return open_exchange(&call, group, host, segments);
}

/* ---- groups that processes may join -------------------------------------------------------- */

/** What an admission has found, before it counts. */
typedef struct Found {
    void *segments[EP_MAX_RANKS];
    void *memory;
    EpSockets *sockets;
} Found;

EpStatus ep_host_reserve(EpGroup *group) {
    void *segments[EP_MAX_RANKS] = {NULL};
    EpHost *host = make_host(group);
    if (!host) return fail_memory(group);
    EpExchangeSetup setup = describe_exchange(group, segments);
    /* Any rank may be on another node once. */
    setup.bootstrap = &host->messages;
    setup.most_remote = group->size - 1;
    setup.joins = 1;
    setup.spins = choose_spins(group, group->size);
    int64_t bytes = ep_exchange_segment_bytes(group->size, setup.most_remote, setup.stage_bytes);
    EP_TRY(check_physical(group, bytes, 1));
    EP_TRY(ep_sockets_reserve(group, &host->messages));
    EP_TRY(ep_posix_reserve(group, (size_t)bytes, &segments[group->rank], &host->memory));
    setup.ticket = ep_posix_proof(host->memory) >> 8;
    host->exchange = ep_exchange_create(&setup);
    return host->exchange ? EP_OK : fail_memory(group);
}

/* Connect to the others. All that is found stays apart until all ranks have it. */
static EpStatus find_others(EpGroup *group, const EpCall *call, const EpMask *alive, Found *found) {
    EpStatus status = ep_sockets_connect_new(group, &found->sockets);
    EP_TRY(ep_group_agree(group, call, status));
    status = ep_posix_connect(group, ep_host(group)->memory, found->segments, &found->memory);
    EP_TRY(ep_group_agree(group, call, status));
    /* Only a masked rank's map changes, which no operation of its own reads before its mask. */
    return ep_places_share_map(group, call, alive, group->copies.memory.logical_of);
}

static void adopt(EpGroup *group, const EpMask *alive, Found *found) {
    EpHost *host = ep_host(group);
    EpMask changed = ep_group_changes(group);
    ep_exchange_admit(host->exchange, &changed, found->segments, alive);
    ep_posix_adopt(host->memory, found->memory, &changed);
    ep_sockets_adopt(&host->messages, found->sockets, &changed);
    ep_host_choose_copies(group);
}

EpStatus ep_host_admit(EpGroup *group, const EpMask *alive) {
    EpCall call = {group->call, group->rank};
    Found found = {.memory = NULL};
    EpStatus status = find_others(group, &call, alive, &found);
    if (status == EP_OK) adopt(group, alive, &found);
    ep_posix_share_free(found.memory);
    ep_sockets_discard(found.sockets);
    return status;
}

void ep_host_close(EpGroup *group, int together) {
    EpHost *host = group->backend_state;
    if (!host) return;
    int sends = ep_exchange_destroy(host->exchange, together);
    /* A message of the bootstrap may still be read from the segment. The group's own connections end
     * here. */
    int stays = sends && !host->messages.isend;
    ep_bootstrap_destroy(&host->messages);
    if (host->memory && !stays) share_free(&group->bootstrap, host->memory, together);
    free(host);
    group->backend_state = NULL;
}

void ep_host_describe(const EpGroup *group, EpGroupInfo *out) {
    snprintf(out->within, sizeof(out->within), "%s",
             group->nodes.sizes.ranks > 1 ? "shared memory" : "one rank");
    if (group->nodes.sizes.nodes == 1 && !ep_config_joins(&group->config)) return;
    snprintf(out->between, sizeof(out->between), "%s",
             group->bootstrap.isend ? "messages of the bootstrap" : "TCP");
}
