/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/nodes/cuda/latency_nodes.h"

#include <stdlib.h>

#include "bootstrap/network/cuda/exchange.h"
#include "runtime/config.h"

/* ---- tables -------------------------------------------------------------------------------- */

/* The counter of forwarding blocks comes first. */
static int64_t table_bytes(int32_t num_ranks, const EpNodeSizes *nodes) {
    return (int64_t)sizeof(uint32_t) + num_ranks * (int64_t)sizeof(EpRankPlace) +
           (nodes->nodes - 1) * (int64_t)sizeof(EpOtherNode);
}

int64_t ep_latency_tables_bytes(const EpGroupConfig *config, int32_t num_ranks,
                                const EpNodeSizes *nodes) {
    int has = nodes->nodes > 1 && ep_config_latency_sets(config, ep_latency_offers(nodes));
    return has ? table_bytes(num_ranks, nodes) : 0;
}

static void fill_tables(const EpNodes *n, EpRankPlace *places, EpOtherNode *others) {
    for (int32_t r = 0; r < n->group; r++) {
        int32_t node = n->of[r], other = node == n->node ? -1 : node - (node > n->node);
        places[r] = (EpRankPlace){(int16_t)other, (int16_t)n->number[r]};
        if (other < 0) continue;
        others[other].first = (int16_t)ep_nodes_member(n, node, 0);
        if (n->number[r] == n->rank) others[other].peer = (int16_t)r;
    }
}

EpStatus ep_latency_nodes_open(EpGroup *group) {
    const EpNodes *n = &group->nodes;
    if (!group->latency_sets || n->sizes.nodes == 1) return EP_OK;
    EpCudaLatency *latency = ep_cuda(group)->latency;
    size_t bytes = (size_t)table_bytes(group->size, &n->sizes);
    uint32_t *host = calloc(1, bytes);
    EpStatus status = EP_ERR_NO_MEMORY;
    if (!host) return ep_fail(status, "rank %d: ep_group_create: out of memory", group->rank);
    EpRankPlace *places = (EpRankPlace *)(host + 1);
    fill_tables(n, places, (EpOtherNode *)(places + group->size));
    status = ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&latency->tables, bytes));
    if (status == EP_OK) status = ep_cuda_put(group, latency->tables, host, bytes);
    free(host);
    latency->device.nodes.forwarded = latency->tables;
    latency->device.nodes.places = (const EpRankPlace *)(latency->tables + 1);
    latency->device.nodes.others =
        (const EpOtherNode *)(latency->device.nodes.places + group->size);
    latency->device.nodes.num_others = n->sizes.nodes - 1;
    return status;
}

void ep_latency_nodes_close(EpGroup *group) {
    EpCudaLatency *latency = ep_cuda(group)->latency;
    if (latency) (void)cudaFree(latency->tables);
}

/* No kernel of an operation runs beside its exchange, so each may have what throughput mode leaves
 * to NCCL. Ranks that share a GPU leave it to each other's exchanges. */
static int32_t count_blocks(const EpHandle *handle, const EpCudaGroup *launch) {
    const EpGroup *group = handle->group;
    int is_limited = handle->shape.num_sms != EP_DEFAULT || group->config.num_sms != EP_DEFAULT ||
                     group->settings.num_sms != EP_COUNT_AUTO || group->choice.shared;
    return is_limited ? launch->blocks : launch->most_blocks;
}

void ep_latency_nodes_describe(const EpHandle *handle, EpPhase phase, int32_t token, int64_t steps,
                               EpCudaGroup *launch, EpLatency *latency) {
    const EpGroup *group = handle->group;
    const EpCudaRelay *r = ep_cuda(group)->relay;
    EpLatencyNodes *nodes = &latency->nodes;
    EpMarkArgs args = {
        .marks = {
            .own = r->stamp, .peers = r->device_peers, .num_peers = nodes->num_others, .last = 1}};
    ep_cuda_watch_describe(group, &args);
    launch->blocks = count_blocks(handle, launch);
    nodes->marks = args.marks;
    nodes->record_steps = (int32_t)steps;
    nodes->begins = 1;
    nodes->keeps_turn = phase == EP_PHASE_BOTH;
    latency->token = phase == EP_PHASE_BOTH ? EP_WHOLE_TOKEN : token;
}

/* ---- launching ----------------------------------------------------------------------------- */

static int64_t message_bytes(const EpLatency *l) {
    return l->layout.message_heads +
           (int64_t)l->layout.node_rows * l->nodes.record_steps * EP_STEP_BYTES;
}

/** Messages of one size, in this rank's window. */
typedef struct Messages {
    int64_t out, in, stride, bytes;
} Messages;

static Messages rows_of(const EpLatency *l) {
    const EpBufferLayout *b = &l->layout;
    return (Messages){b->outgoing, b->landing, b->message_bytes, message_bytes(l)};
}

static Messages weights_of(const EpLatency *l) {
    const EpBufferLayout *b = &l->layout;
    return (Messages){b->weights_out, b->weights_in, ep_weights_stride(b),
                      b->node_rows * (int64_t)b->weight_bytes};
}

/* Exchange messages and the stamps before them: NCCL takes messages between two ranks one after
 * another. The places are sent whether they are filled or not. */
static EpStatus exchange(EpGroup *group, const EpLatency *l, Messages m,
                         const EpCudaStream *stream) {
    const EpCudaRelay *r = ep_cuda(group)->relay;
    const int64_t stamp = sizeof(EpStamp);
    const size_t bytes = (size_t)(stamp + m.bytes);
    EpExchange x;
    EP_TRY(ep_exchange_begin(&x, group, stream, stream->stream));
    for (int32_t i = 0; i < l->nodes.num_others; i++) {
        ep_exchange_send(&x, r->peers[i], l->own + m.out - stamp + i * m.stride, bytes);
        ep_exchange_receive(&x, r->peers[i], l->own + m.in - stamp + i * m.stride, bytes);
    }
    return ep_exchange_end(&x);
}

static int launch(const EpNodesKernel *k, const EpCudaStream *stream) {
    return k->launch ? k->launch(k->args, k->blocks, stream->stream) : cudaSuccess;
}

static int forward(const EpNodesLaunch *l, const EpCudaStream *stream) {
    EpForwardArgs args = l->forward;
    args.group = *l->group, args.latency = *l->latency;
    enum { AT_ONCE = 4 * EP_LATENCY_WARPS * 32 * 16 }; /* bytes that a block copies at once */
    int64_t others = args.latency.nodes.num_others;
    int64_t blocks = 1 + others * message_bytes(&args.latency) / AT_ONCE;
    args.latency.senders = 0;
    blocks = ep_min(ep_min(blocks, args.group.blocks), EP_FORWARD_BLOCKS);
    return ep_cuda_launch_forward(&args, (int)ep_max(others, blocks), stream->stream);
}

/* Continue on the group's stream, after what is on the caller's. */
static EpStatus move_on(EpGroup *group, const EpCudaStream *from, EpCudaStream *to) {
    EpCudaSide *side = &ep_cuda(group)->relay->side[0];
    EP_TRY(ep_cuda_stream(group, side->wire, to));
    EP_TRY(ep_cuda_record(group, side->ready[0], from->stream));
    return ep_cuda_await(group, to->stream, side->ready[0]);
}

/* All that is sent, and what comes of it. `at` becomes the stream on which it ends. */
static EpStatus launch_all(const EpHandle *handle, const EpNodesLaunch *l, EpCudaStream *at) {
    EpGroup *group = handle->group;
    EpPhase phase = l->order.phase;
    if (l->weights.launch) {
        EP_TRY(ep_cuda_check(group, "kernel launch", launch(&l->weights, at)));
        EP_TRY(exchange(group, l->latency, weights_of(l->latency), at));
        EP_TRY(ep_cuda_check(group, "kernel launch", launch(&l->spread, at)));
    }
    EP_TRY(ep_cuda_check(group, "kernel launch", launch(&l->send, at)));
    const EpCudaStream stream = *at;
    if (phase == EP_PHASE_SEND && !stream.captures) EP_TRY(move_on(group, &stream, at));
    EP_TRY(ep_cuda_check(group, "kernel launch", launch(&l->relay, at)));
    EP_TRY(exchange(group, l->latency, rows_of(l->latency), at));
    if (phase == EP_PHASE_SEND) EP_TRY(ep_cuda_check(group, "kernel launch", forward(l, at)));
    return ep_cuda_check(group, "kernel launch", launch(&l->receive, at));
}

EpStatus ep_latency_nodes_launch(const EpHandle *handle, const EpNodesLaunch *l) {
    const EpGroup *group = handle->group;
    const EpRouting *routing = l->order.routing;
    EpCudaStream stream;
    EP_TRY(ep_cuda_stream(group, l->order.stream, &stream));
    EP_TRY(ep_cuda_launch_enter(handle, &l->order, &stream));
    EpCudaOwn *own = routing && !routing->plan.is_named ? handle->own_state : NULL;
    int64_t seen = own ? ep_cuda_steps_seen(own) : 0;
    int captures = stream.captures;
    if (l->order.phase == EP_PHASE_RECEIVE)
        EP_TRY(ep_cuda_check(group, "kernel launch", launch(&l->receive, &stream)));
    else
        EP_TRY(launch_all(handle, l, &stream));
    EP_TRY(ep_cuda_launch_leave(handle, &l->order, &stream, cudaSuccess));
    if (own) ep_cuda_routing_issued(own, routing, captures, seen);
    return EP_OK;
}
