/* SPDX-License-Identifier: Apache-2.0 */
/* Combine on GPUs, in latency mode: describes it to the kernel, launches it. */
#include "combine/cuda/latency_gather.h"

#include "combine/cuda/backend.h"
#include "handles/cuda/handle.h"
#include "handles/nodes/cuda/latency_nodes.h"
#include "runtime/log.h"

/* Returns the percentage of the blocks that send while the others receive. Each row sent is the sum
 * of some slots: where these are few, fewer blocks keep up. */
static int percent_of_senders(const EpGroup *group, int by_entry, int64_t top_k) {
    const EpTuning *tuning = &ep_cuda(group)->tuned.constants;
    int few = !by_entry && (double)top_k < tuning->latency_few_terms * group->size;
    return ep_latency_percent(few ? tuning->latency_few_sent : tuning->latency_combine_sent);
}

/* Divide the rows among the sending warps, and the tokens among the receiving warps. */
static void partition(const EpHandle *handle, int64_t num_rows, int blocks,
                      EpLatencyGatherArgs *args) {
    int32_t reads_own = args->latency.receives || args->latency.nodes.keeps_turn;
    int32_t targets = handle->group->size - reads_own;
    int32_t senders = (int32_t)ep_max(1, args->latency.senders);
    int32_t receivers = blocks - args->latency.first_receiver;
    args->targets = ep_divisor((int32_t)ep_max(1, targets));
    args->sent = ep_partition((int32_t)num_rows * targets, args->steps, EP_SENT_STEPS,
                              senders * EP_LATENCY_WARPS);
    int32_t at_once = args->t.format.bits ? 1 : EP_REDUCED_AT_ONCE;
    args->latency.received = ep_partition((int32_t)args->t.out_num_rows, args->steps, at_once,
                                          receivers * EP_LATENCY_WARPS);
}

/* Returns the steps of a sum on its way. */
static int64_t count_steps(const EpGatherTensors *t) {
    if (t->by_entry) return ep_entry_steps(ep_units(t->row_bytes));
    if (!t->format.bits) return ep_steps(ep_units(t->row_bytes));
    return (t->row_elements + EP_PACKED_STEP_ELEMENTS - 1) / EP_PACKED_STEP_ELEMENTS;
}

/* Returns the steps of a place in a message: the sum's, or the rows' of all entries. */
static int64_t place_steps(const EpLatencyGatherArgs *args) {
    return args->steps * (int64_t)(args->t.by_entry ? args->top_k : 1);
}

/* Describe the kernel of an operation, or of one of its phases. Returns its blocks. */
static int describe(const EpHandle *handle, const EpGather *g, EpPhase phase,
                    EpLatencyGatherArgs *out) {
    const EpGroup *group = handle->group;
    const EpCudaLatency *latency = ep_cuda(group)->latency;
    int64_t tokens = g->num_rows >= 0 ? g->num_rows : handle->shape.max_tokens;
    EpLatencyGatherArgs args = {.group = ep_cuda_launch_group(handle),
                                .plan = ep_cuda_plan(handle, g->plan, g->top_k, g->num_rows,
                                                     g->t.num_slots, g->t.block_rows),
                                .shape = handle->shape,
                                .latency = latency->device,
                                .t = g->t,
                                .top_k = (int32_t)g->top_k,
                                .row_units = (int32_t)ep_units(g->t.row_bytes),
                                .steps = (int32_t)count_steps(&g->t)};
    args.carries_weights = ep_carries_weights(&g->t);
    int64_t weights = g->t.weighs_entries + 2 * args.carries_weights;
    const int64_t agreed[] = {g->top_k, g->t.row_bytes,    g->t.type,
                              weights,  g->t.format.quant, g->t.block_rows};
    args.group.digest = ep_cuda_digest(handle, g->op, agreed, 6);
    args.latency.awaits_weights = g->t.weighs_entries && !g->t.by_entry;
    args.latency.token = g->place.token;
    if (latency->device.nodes.num_others)
        ep_latency_nodes_describe(handle, g->phase, g->place.token, place_steps(&args), &args.group,
                                  &args.latency);
    int percent = percent_of_senders(group, g->t.by_entry, g->top_k);
    int blocks = ep_latency_blocks(&args.group, phase, tokens, args.steps, percent, &args.latency);
    if (g->t.done.words) args.latency.releases = 0; /* who produces rows needs the room */
    args.stats = g->stats, args.counts = ep_counts_any(&g->stats);
    partition(handle, tokens, blocks, &args);
    *out = args;
    return blocks;
}

/* On several nodes a whole operation is launched as its phases are. But it receives sums where NCCL
 * has put them, and reads this rank's own rows only then. */
static EpStatus gather_on_nodes(EpHandle *handle, const EpGather *g, const EpCudaLaunch *order) {
    EpLatencyGatherArgs weights, send, relay, receive;
    EpNodesLaunch l = {.order = *order};
    if (g->phase != EP_PHASE_RECEIVE) {
        int blocks = describe(handle, g, EP_PHASE_SEND, &send);
        if (send.latency.awaits_weights) {
            weights = send;
            weights.latency.nodes.marks.last = send.latency.nodes.begins = 0;
            int few = (int)ep_min(blocks, 1 + g->t.out_num_rows / EP_LATENCY_WARPS);
            l.weights = (EpNodesKernel){ep_cuda_launch_latency_weights, &weights, few};
            l.spread = (EpNodesKernel){ep_cuda_launch_latency_spread, &weights, few};
        }
        l.send = (EpNodesKernel){ep_cuda_launch_latency_gather_nodes, &send, blocks};
        l.group = &send.group, l.latency = &send.latency;
        relay = send;
        relay.latency.senders = 0;
        if (ep_latency_relays(send.group.size, g->t.format.bits != 0))
            l.relay = (EpNodesKernel){ep_cuda_launch_latency_relay, &relay, blocks};
    }
    if (g->phase != EP_PHASE_SEND) {
        int blocks = describe(handle, g, EP_PHASE_RECEIVE, &receive);
        receive.latency.nodes.reads_landing = g->phase == EP_PHASE_BOTH;
        receive.latency.nodes.begins = 0;
        if (g->phase == EP_PHASE_RECEIVE) /* the send phase has summed this rank's own rows */
            receive.latency.awaits_weights = 0, receive.t.done.words = NULL;
        l.receive = (EpNodesKernel){ep_cuda_launch_latency_gather_nodes, &receive, blocks};
    }
    return ep_latency_nodes_launch(handle, &l);
}

EpStatus ep_cuda_latency_gather(EpHandle *handle, const EpGather *g) {
    EpCudaLatency *latency = ep_cuda(handle->group)->latency;
    EpLatencyGatherArgs args;
    EpCudaLaunch launch = {.launch = ep_cuda_variant(handle->group, ep_cuda_launch_latency_gather,
                                                     ep_cuda_launch_latency_gather_masked),
                           .args = &args,
                           .stream = g->stream,
                           .phase = g->phase,
                           .own = &latency->order[g->place.slot]};
    if (latency->device.nodes.num_others) return gather_on_nodes(handle, g, &launch);
    launch.blocks = describe(handle, g, g->phase, &args);
    return ep_cuda_launch(handle, &launch);
}

/* A rank may send the set's next operation only once it has received something of this one from
 * every rank: see runtime/cuda/latency.h. The caller's plan and tensors may be gone. */
void ep_cuda_drop(EpHandle *handle) {
    EpCuda *cuda = ep_cuda(handle->group);
    EpInFlight place = handle->pending.place;
    EpLatencyGatherArgs args = {.group = ep_cuda_launch_group(handle),
                                .shape = handle->shape,
                                .latency = cuda->latency->device,
                                .t = {.type = EP_TYPE_FP32}};
    int blocks = ep_latency_blocks(&args.group, EP_PHASE_RECEIVE, 0, 1, 0, &args.latency);
    args.latency.token = place.token;
    args.latency.received = ep_partition(0, 1, EP_REDUCED_AT_ONCE, blocks * EP_LATENCY_WARPS);
    EpCudaLauncher one_node = ep_cuda_variant(handle->group, ep_cuda_launch_latency_gather,
                                              ep_cuda_launch_latency_gather_masked);
    EpStatus status =
        ep_cuda_launch(handle, &(EpCudaLaunch){.launch = args.latency.nodes.num_others
                                                             ? ep_cuda_launch_latency_gather_nodes
                                                             : one_node,
                                               .args = &args,
                                               .blocks = blocks,
                                               .stream = cuda->stream,
                                               .phase = EP_PHASE_RECEIVE,
                                               .own = &cuda->latency->order[place.slot],
                                               .drops = 1});
    if (status != EP_OK) EP_WARN("dropping an operation: %s", ep_last_error());
}
