/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch on GPUs, in latency mode: describes it to the kernel, launches it. */
#include "dispatch/cuda/latency_scatter.h"

#include <string.h>

#include "dispatch/cuda/backend.h"
#include "handles/cuda/handle.h"
#include "handles/nodes/cuda/latency_nodes.h"

/* Returns the percentage of the blocks that send while the others receive. Stores to other GPUs
 * fill the way out of a multiprocessor, and its loads queue behind them. A dispatch that quantises
 * needs all blocks to send; afterwards they receive. */
static int percent_of_senders(const EpGroup *group, int has_quant) {
    return has_quant ? EP_ALL_SEND
                     : ep_latency_percent(ep_cuda(group)->tuned.constants.latency_dispatch_sent);
}

/* Returns the shape of a token's record. */
static EpRecordShape shape_record(const EpHandle *handle, const EpScatterTensors *t,
                                  int64_t top_k) {
    int64_t words = top_k * (t->carries_weights ? 2 : 1);
    EpRecordShape r = {.header_units = (int32_t)ep_units(4 * words),
                       .row_units = (int32_t)ep_units(t->row_bytes),
                       .scale_units = (int32_t)ep_units(t->scale_bytes)};
    while (1u << r.expert_bits <= (uint32_t)handle->shape.num_experts)
        r.expert_bits++;
    r.steps = (int32_t)ep_steps(r.header_units + r.row_units + r.scale_units);
    return r;
}

/* Describe the routing. The receive phase describes that of its send phase again. */
static void describe_route(EpHandle *handle, const EpScatter *s, EpPrepareArgs *route) {
    int64_t agreed[2 * EP_OP_FACTS];
    ep_cuda_describe_routing(handle, s->routing, route, agreed);
    const int64_t row[] = {s->t.row_bytes, s->t.type, s->t.scale_bytes, s->t.carries_weights, 0};
    memcpy(agreed + EP_OP_FACTS, row, sizeof(row));
    route->group.digest = ep_cuda_digest(handle, s->routing->op, agreed, 2 * EP_OP_FACTS);
}

/* Divide the records among the receiving warps. */
static void partition_receive(const EpHandle *handle, int blocks, EpLatencyScatterArgs *args) {
    int receivers = (int)ep_max(1, blocks - args->latency.first_receiver - 1);
    args->latency.received =
        ep_partition(args->route.num_rows * handle->group->size, args->record.steps,
                     EP_RECEIVED_AT_ONCE, receivers * EP_LATENCY_WARPS);
}

/* Describe the kernel of an operation, or of one of its phases. Returns its blocks. */
static int describe(EpHandle *handle, const EpScatter *s, EpPhase phase,
                    EpLatencyScatterArgs *out) {
    const EpGroup *group = handle->group;
    EpLatencyScatterArgs args = {.latency = ep_cuda(group)->latency->device,
                                 .t = s->t,
                                 .record = shape_record(handle, &s->t, s->top_k)};
    const EpPrepareArgs *route = &args.route;
    describe_route(handle, s, &args.route);
    if (s->t.block_rows) args.route.shape.block_rows = s->t.block_rows;
    args.latency.token = s->place.token;
    if (args.latency.nodes.num_others)
        ep_latency_nodes_describe(handle, s->phase, s->place.token, args.record.steps,
                                  &args.route.group, &args.latency);
    args.route.stats = s->stats;
    int has_quant = s->t.format.bits != 0;
    int blocks = ep_latency_blocks(&route->group, phase, route->num_rows, args.record.steps,
                                   percent_of_senders(group, has_quant), &args.latency);
    partition_receive(handle, blocks, &args);
    args.block_counters = ep_cuda(group)->block_counters + EP_MAX_BLOCK_WORDS;
    if (s->t.ready.words) args.latency.releases = 0; /* who waits for words needs the room */
    int64_t staged = has_quant ? s->t.row_bytes + ep_round_up(s->t.scale_bytes, 16) : 0;
    int64_t entries = (int64_t)route->num_rows * route->top_k;
    args.workspace = ep_workspace_layout(&handle->shape, entries, staged);
    args.lost_slot = handle->shape.by_entry ? EP_SLOT_LOST : -1;
    args.first_expert = ep_owner_first(&args.route.owners, group->rank);
    while (1 << args.team_shift < route->top_k)
        args.team_shift++;
    *out = args;
    return blocks;
}

/* On several nodes a whole operation is launched as its phases are. */
static EpStatus scatter_on_nodes(EpHandle *handle, const EpScatter *s, const EpCudaLaunch *order) {
    EpLatencyScatterArgs send, receive;
    EpNodesLaunch l = {.order = *order};
    if (s->phase != EP_PHASE_RECEIVE) {
        int blocks = describe(handle, s, EP_PHASE_SEND, &send);
        l.send = (EpNodesKernel){ep_cuda_launch_latency_scatter_nodes, &send, blocks};
        l.group = &send.route.group, l.latency = &send.latency;
        l.forward = (EpForwardArgs){.gives_heads = 1,
                                    .relayed = {.stats = s->stats,
                                                .owners = send.route.owners,
                                                .top_k = send.route.top_k,
                                                .expert_bits = send.record.expert_bits,
                                                .carries_weights = s->t.carries_weights}};
    }
    if (s->phase != EP_PHASE_SEND) {
        int blocks = describe(handle, s, EP_PHASE_RECEIVE, &receive);
        receive.latency.nodes.begins = 0;
        receive.latency.nodes.reads_landing = s->phase == EP_PHASE_BOTH;
        l.receive = (EpNodesKernel){ep_cuda_launch_latency_scatter_nodes, &receive, blocks};
    }
    return ep_latency_nodes_launch(handle, &l);
}

EpStatus ep_cuda_latency_scatter(EpHandle *handle, const EpScatter *s) {
    EpCudaLatency *latency = ep_cuda(handle->group)->latency;
    const EpRouting *completed = s->phase == EP_PHASE_RECEIVE ? NULL : s->routing;
    EpLatencyScatterArgs args;
    EpCudaLaunch launch = {.launch = ep_cuda_variant(handle->group, ep_cuda_launch_latency_scatter,
                                                     ep_cuda_launch_latency_scatter_masked),
                           .args = &args,
                           .stream = s->stream,
                           .phase = s->phase,
                           .own = &latency->order[s->place.slot],
                           .routing = completed};
    if (latency->device.nodes.num_others) return scatter_on_nodes(handle, s, &launch);
    launch.blocks = describe(handle, s, s->phase, &args);
    return ep_cuda_launch(handle, &launch);
}
