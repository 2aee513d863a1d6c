/* SPDX-License-Identifier: Apache-2.0 */
/* Gather on several nodes: each node's sums go to its relays, over the network, and into the
 * tokens' sums. handles/nodes/cuda/relay.h has the order of it all. */
#include "combine/cuda/gather.h"
#include "handles/nodes/cuda/relay.h"

/** The operation, and what all of its launches share. */
typedef struct Operation {
    const EpGather *call;
    const EpGatherArgs *args; /* of a whole plan */
    EpRelayRun run;
} Operation;

/* Gather a chunk plan; `args` is this launch's copy. */
static EpStatus gather_chunk(Operation *o, EpChunkPlan kind, int32_t chunk, EpGatherArgs *args) {
    const EpGroup *group = o->run.group;
    const EpGatherTensors *t = &args->t;
    ep_relay_take_chunk(&args->shape, &o->args->plan, kind, chunk, o->call->num_rows, &args->plan,
                        &args->group);
    if (!ep_partition_gather(&ep_cuda(group)->tuned.constants, args, ep_cuda(group)->shared_bytes))
        return ep_cuda_refuse_rows(group, t->row_bytes);
    args->group.digest = ep_relay_chunk_digest(o->args->group.digest, kind, chunk);
    return ep_relay_launch(&o->run, ep_cuda_launch_gather, args, args->group.blocks);
}

/* Sum what this rank relays into records, for their tokens' ranks. */
static EpStatus sum_chunk(Operation *o, int32_t chunk) {
    EpGatherArgs args = *o->args;
    char *records = o->run.relay->send[chunk % 2];
    args.t.out_rows = records, args.t.out_values = (float *)(records + args.record.weights);
    args.target = (EpTarget){args.record.bytes, args.record.bytes};
    args.t.num_biases = 0;
    args.t.weighs_entries = 0; /* they are of this rank's own tokens */
    args.rounds = 1, args.stamp = o->run.relay->stamp;
    const EpMarks marks = ep_relay_marks(&o->run, chunk, EP_TO_RELAYS);
    args.sources = marks.peers, args.num_sources = marks.num_peers;
    EP_TRY(gather_chunk(o, EP_CHUNK_RELAYED, chunk, &args));
    return ep_relay_set_ready(&o->run, chunk);
}

/* Describe the records of the other nodes that a chunk's tokens may have. */
static EpNodeSums node_sums(const Operation *o, int32_t chunk) {
    const EpRelayTables *t = &o->run.relay->tables;
    EpNodeSums sums = {.records = ep_relay_received(&o->run, chunk, EP_FROM_RELAYS),
                       .message_slots = t->message,
                       .rows = t->message,
                       .order = t->order};
    if (!t->limit) return sums;
    sums.records = ep_relay_received(&o->run, 0, EP_FROM_RELAYS);
    sums.rows += (t->chunks - 1) * (t->nodes - 1) * t->message;
    return sums;
}

/* Sum this rank's tokens of a chunk: its own node's ranks, and the records of the other nodes.
 * `marks`: of the messages that have just come, if no other launch has them. */
static EpStatus finish_chunk(Operation *o, int32_t chunk, EpMarks marks) {
    EpGatherArgs args = *o->args;
    const EpRelayTables *tables = &o->run.relay->tables;
    int64_t first = (int64_t)chunk * args.shape.nodes.chunk;
    args.owners = tables->ranks + tables->nodes - 1;
    args.nodes = node_sums(o, chunk);
    args.marks = marks;
    args.t.out_rows += first * args.target.row_stride;
    if (args.t.weighs_entries) args.t.topk_weights += first * args.top_k;
    for (int i = 0; i < args.t.num_biases; i++)
        args.t.bias[i] += first * args.t.row_bytes;
    if (args.t.carries_values && !args.carries_weights)
        args.t.out_values = (float *)((char *)args.t.out_values + first * args.target.value_stride);
    return gather_chunk(o, EP_CHUNK_OWN, chunk, &args);
}

/* Returns the last message that may have records of a chunk's tokens. With a limit each token may
 * have the place of its number, or one before. */
static int32_t last_message(const Operation *o, int32_t chunk) {
    const EpRelayTables *t = &o->run.relay->tables;
    int64_t last = ((int64_t)(chunk + 1) * t->chunk - 1) / t->message;
    return t->limit ? (int32_t)ep_min(last, o->run.chunks - 1) : chunk;
}

/* Send a chunk's records. Then finish the chunks whose records are all here; `finished` counts
 * them. Each exchange has one launch that compares its stamps. */
static EpStatus exchange_chunk(Operation *o, int32_t chunk, int32_t *finished) {
    EpMarks marks = ep_relay_marks(&o->run, chunk, EP_FROM_RELAYS);
    EP_TRY(ep_relay_exchange(&o->run, chunk, EP_FROM_RELAYS));
    if (last_message(o, *finished) > chunk) return ep_relay_compare(&o->run, chunk, EP_FROM_RELAYS);
    while (*finished < o->run.chunks && last_message(o, *finished) <= chunk) {
        EP_TRY(finish_chunk(o, (*finished)++, marks));
        marks = (EpMarks){.watch = NULL};
    }
    return EP_OK;
}

EpStatus ep_cuda_gather_nodes(EpHandle *handle, const EpGather *call, const EpGatherArgs *args) {
    Operation o = {.call = call, .args = args};
    EpRelayCall relay = {.stream = call->stream,
                         .record_bytes = args->record.bytes,
                         .plan = &args->plan,
                         .own_plan = !call->plan.is_named,
                         .digest = args->group.digest};
    EP_TRY(ep_relay_begin(handle, &relay, &o.run));
    int32_t finished = 0;
    for (int32_t c = 0; c < o.run.chunks; c++) {
        EP_TRY(sum_chunk(&o, c));
        if (c > 0) EP_TRY(exchange_chunk(&o, c - 1, &finished));
    }
    EP_TRY(exchange_chunk(&o, o.run.chunks - 1, &finished));
    return ep_relay_end(&o.run);
}
