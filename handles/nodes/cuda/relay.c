/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/nodes/cuda/relay.h"

#include <stdlib.h>
#include <string.h>

#include "handles/nodes/cuda/route.h"

/* ---- sizes --------------------------------------------------------------------------------- */

static int64_t message_bytes(const EpGroupConfig *config, const EpNodeSizes *nodes) {
    return ep_round_up(nodes->message * ep_config_record_bytes(config), 128);
}

/* A rank has a relay on each other node, and is the relay of at most all ranks. */
static int64_t most_peers(int32_t num_ranks, const EpNodeSizes *nodes) {
    return nodes->nodes - 1 + (int64_t)num_ranks;
}

/* Returns the messages that a rank keeps at a time. With a limit a gather keeps all of them, since
 * a chunk's tokens may have records in each: see relay.h. */
static int64_t kept_messages(const EpGroupConfig *config, const EpNodeSizes *nodes) {
    int64_t chunks = (config->max_tokens + nodes->chunk - 1) / nodes->chunk;
    return nodes->limit ? ep_max(2 * nodes->most, chunks * (nodes->nodes - 1)) : 2 * nodes->most;
}

/* Locate the parts of a group's memory for the network; memory NULL: none. Returns its bytes. */
static int64_t lay_out(const EpGroupConfig *config, int32_t num_ranks, const EpNodeSizes *nodes,
                       char *memory, EpCudaRelay *r) {
    EpArena arena = {.base = (uintptr_t)memory, .unit = 128};
    r->message_bytes = message_bytes(config, nodes);
    r->routing_bytes = ep_routing_message_bytes(config);
    for (int i = 0; i < 2; i++)
        r->send[i] = ep_arena_array(&arena, nodes->most, (size_t)r->message_bytes);
    r->recv = ep_arena_array(&arena, kept_messages(config, nodes), (size_t)r->message_bytes);
    r->routing = ep_arena_array(&arena, num_ranks, (size_t)r->routing_bytes);
    r->stamp = ep_arena_array(&arena, 1, sizeof(*r->stamp));
    for (int i = 0; i < 2; i++)
        r->stamps[i] = ep_arena_array(&arena, most_peers(num_ranks, nodes), sizeof(*r->stamp));
    r->counts = ep_arena_array(&arena, ep_route_counts(config, num_ranks, nodes), sizeof(int32_t));
    return arena.bytes;
}

#define TABLES_OF_RANKS 5 /* of a group's ranks, in EpRelayTables */

/* The integers of EpRelayTables. */
static int64_t table_integers(int32_t num_ranks, const EpNodeSizes *nodes) {
    int64_t ranks = nodes->ranks;
    return TABLES_OF_RANKS * (int64_t)num_ranks + ranks * (4 + nodes->sources) + nodes->nodes +
           most_peers(num_ranks, nodes);
}

int64_t ep_cuda_relay_bytes(const EpGroupConfig *config, int32_t num_ranks,
                            const EpNodeSizes *nodes) {
    EpCudaRelay r;
    if (nodes->nodes <= 1) return 0;
    return lay_out(config, num_ranks, nodes, NULL, &r) + (int64_t)sizeof(r) +
           table_integers(num_ranks, nodes) * (int64_t)sizeof(int32_t);
}

/* ---- tables -------------------------------------------------------------------------------- */

/* Integers that are laid one after the other on the host, and copied to the device together. */
typedef struct Integers {
    int32_t *host, *device;
    int64_t count;
} Integers;

static int32_t *take(Integers *at, int64_t count, const int32_t **device) {
    int32_t *host = at->host + at->count;
    *device = at->device + at->count;
    at->count += count;
    return host;
}

/* Returns the number of a node among the nodes other than this one; -1: it is this one. */
static int32_t other_of(const EpNodes *n, int32_t node) {
    return node == n->node ? -1 : node - (node > n->node);
}

static void describe_ranks(const EpNodes *n, Integers *at, EpRelayTables *t) {
    int32_t *other = take(at, n->group, &t->other_of), *number = take(at, n->group, &t->number_of);
    int32_t *agent = take(at, n->group, &t->agent_of),
            *index = take(at, n->group, &t->source_index);
    int32_t *by_node = take(at, n->group, &t->by_node);
    int32_t *sources = take(at, t->ranks, &t->num_sources);
    int32_t *source = take(at, (int64_t)t->ranks * t->sources, &t->source_rank);
    for (int32_t r = 0; r < n->group; r++) {
        int here = n->of[r] == n->node;
        int32_t first = ep_nodes_member(n, n->of[n->members[r]], 0);
        by_node[r] = n->members[r] | (n->members[r] == first ? EP_NODE_BEGINS : 0);
        other[r] = other_of(n, n->of[r]);
        number[r] = here ? n->number[r] : -1;
        agent[r] = n->number[here ? r : ep_nodes_relay(n, r, n->node)];
        index[r] = here ? -1 : sources[agent[r]]++;
        if (!here) source[agent[r] * t->sources + index[r]] = r;
    }
}

/* A rank's place in the order of summation is its own number in the group, another node's that of
 * its lowest rank. */
static void describe_node(const EpGroup *group, Integers *at, EpRelayTables *t) {
    const EpNodes *n = &group->nodes;
    int32_t *member = take(at, t->ranks, &t->members);
    int32_t *first = take(at, t->ranks + 1, &t->first_expert);
    int32_t *order = take(at, t->ranks + t->nodes - 1, &t->order);
    for (int32_t i = 0; i < t->ranks; i++) {
        member[i] = order[i] = ep_nodes_member(n, n->node, i);
        first[i + 1] = first[i] + ep_placement_count(&group->placement, member[i]);
    }
    t->experts = first[t->ranks];
    for (int32_t node = 0; node < t->nodes; node++)
        if (node != n->node) order[t->ranks + other_of(n, node)] = ep_nodes_member(n, node, 0);
}

static EpStatus list_peers(const EpGroup *group, EpCudaRelay *relay) {
    const EpNodes *n = &group->nodes;
    relay->peers = calloc((size_t)most_peers(group->size, &n->sizes), sizeof(*relay->peers));
    if (!relay->peers)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    for (int32_t node = 0; node < n->sizes.nodes; node++)
        if (node != n->node) relay->peers[other_of(n, node)] = ep_nodes_relay(n, group->rank, node);
    relay->num_sources = ep_nodes_sources(n, group->rank, relay->peers + n->sizes.nodes - 1);
    relay->num_peers = n->sizes.nodes - 1 + relay->num_sources;
    return EP_OK;
}

static EpStatus open_tables(const EpGroup *group, EpCudaRelay *relay) {
    const EpNodes *n = &group->nodes;
    EpRelayTables *t = &relay->tables;
    size_t bytes = (size_t)table_integers(group->size, &n->sizes) * sizeof(int32_t);
    *t =
        (EpRelayTables){.group = group->size,
                        .nodes = n->sizes.nodes,
                        .ranks = n->sizes.ranks,
                        .node = n->node,
                        .rank = n->rank,
                        .self = group->rank,
                        .sources = n->sizes.sources,
                        .limit = n->sizes.limit,
                        .message = n->sizes.message,
                        .chunk = n->sizes.chunk,
                        .chunks = (group->config.max_tokens + n->sizes.chunk - 1) / n->sizes.chunk};
    Integers at = {.host = calloc(1, bytes)};
    EpStatus status = EP_ERR_NO_MEMORY;
    if (!at.host)
        status = ep_fail(status, "rank %d: ep_group_create: out of memory", group->rank);
    else
        status = ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&at.device, bytes));
    relay->integers = at.device;
    if (status == EP_OK) {
        describe_ranks(n, &at, t);
        describe_node(group, &at, t);
        memcpy(take(&at, relay->num_peers, &relay->device_peers), relay->peers,
               (size_t)relay->num_peers * sizeof(*relay->peers));
        status = ep_cuda_put(group, at.device, at.host, bytes);
    }
    free(at.host);
    return status;
}

/* ---- opening ------------------------------------------------------------------------------- */

/* NCCL's kernels go first where multiprocessors are short: the node's kernels wait for them. */
static EpStatus open_side(const EpGroup *group, EpCudaSide *side) {
    cudaEvent_t *events[] = {&side->begun, &side->ready[0], &side->ready[1], &side->moved};
    EP_TRY(ep_cuda_open_stream(group, 1, &side->wire));
    for (size_t i = 0; i < sizeof(events) / sizeof(*events); i++)
        EP_TRY(ep_cuda_open_event(group, events[i]));
    return EP_OK;
}

EpStatus ep_cuda_relay_open(EpGroup *group) {
    const EpNodeSizes *nodes = &group->nodes.sizes;
    if (nodes->nodes <= 1) return EP_OK;
    EpCudaRelay *relay = calloc(1, sizeof(*relay));
    ep_cuda(group)->relay = relay;
    if (!relay)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    EP_TRY(list_peers(group, relay));
    EP_TRY(open_tables(group, relay));
    ep_cuda(group)->device.members = relay->tables.members;
    int64_t bytes = lay_out(&group->config, group->size, nodes, NULL, relay);
    if (cudaMalloc((void **)&relay->memory, (size_t)bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return ep_fail(EP_ERR_NO_MEMORY,
                       "rank %d: ep_group_create: expected %lld bytes of device memory for the "
                       "network, got none",
                       group->rank, (long long)bytes);
    }
    lay_out(&group->config, group->size, nodes, relay->memory, relay);
    /* A stamp that is still 0 tells that nothing has come. */
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(relay->memory, 0, (size_t)bytes)));
    EP_TRY(ep_cuda_check(group, "cudaStreamSynchronize", cudaStreamSynchronize(NULL)));
    for (int i = 0; i < 2; i++)
        EP_TRY(open_side(group, &relay->side[i]));
    EP_INFO(
        "%d nodes: this rank is number %d of %d on node %d, relays for %d ranks, %d rows cross the "
        "network at a time, %lld bytes for it",
        nodes->nodes, group->nodes.rank, nodes->ranks, group->nodes.node, relay->num_sources,
        nodes->message, (long long)bytes);
    return EP_OK;
}

static void close_side(EpCudaSide *side) {
    cudaEvent_t events[] = {side->begun, side->ready[0], side->ready[1], side->moved};
    if (side->wire) (void)cudaStreamDestroy(side->wire);
    for (size_t i = 0; i < sizeof(events) / sizeof(*events); i++)
        if (events[i]) (void)cudaEventDestroy(events[i]);
}

void ep_cuda_relay_close(EpGroup *group) {
    EpCudaRelay *relay = ep_cuda(group)->relay;
    if (!relay) return;
    close_side(&relay->side[0]);
    close_side(&relay->side[1]);
    (void)cudaFree(relay->memory);
    (void)cudaFree(relay->integers);
    free(relay->peers);
    free(relay);
    ep_cuda(group)->relay = NULL;
}
