/* SPDX-License-Identifier: Apache-2.0 */
/* Scatter on several nodes: chunks of tokens are packed, cross the network, and are scattered on
 * each node. handles/nodes/cuda/relay.h has the order of it all. */
#include "dispatch/cuda/pack.h"
#include "dispatch/cuda/scatter.h"
#include "handles/nodes/cuda/relay.h"

/** The operation, and what all of its launches share. */
typedef struct Operation {
    const EpScatter *call;
    const EpScatterArgs *args; /* of a whole plan */
    int64_t unit;
    EpRelayRun run;
} Operation;

/* Take a chunk plan. `args` is its launch's copy. */
static void take_chunk(const Operation *o, EpChunkPlan kind, int32_t chunk, EpScatterArgs *args) {
    ep_relay_take_chunk(&args->shape, &o->args->plan, kind, chunk, o->call->num_rows, &args->plan,
                        &args->group);
}

/* Point at this rank's tokens of the chunk. */
static void take_tokens(int64_t first, EpScatterTensors *t, const EpSource *source) {
    t->rows += first * source->row_stride;
    if (t->carries_weights)
        t->topk_weights =
            (const float *)((const char *)t->topk_weights + first * source->weight_stride);
    if (t->scale_bytes && !t->format.bits) t->scales += first * source->scale_stride;
}

/* Point at the records that the sources have sent: their rows are as they travel. */
static void take_records(const char *records, EpScatterArgs *args) {
    EpScatterTensors *t = &args->t;
    const EpRecord *r = &args->record;
    args->source = (EpSource){r->bytes, r->bytes, r->bytes};
    args->send.shrink = 0, args->made_scales = NULL;
    t->format.bits = 0, t->global_scale = NULL;
    t->source_type = t->type, t->source_row_bytes = t->row_bytes;
    t->rows = records;
    t->topk_weights = (const float *)(records + r->weights);
    t->scales = records + r->scales;
}

static EpStatus scatter_chunk(Operation *o, EpChunkPlan kind, int32_t chunk) {
    const EpGroup *group = o->run.group;
    EpScatterArgs args = *o->args;
    const EpScatterTensors *t = &args.t;
    take_chunk(o, kind, chunk, &args);
    if (kind == EP_CHUNK_OWN)
        take_tokens((int64_t)chunk * args.shape.nodes.chunk, &args.t, &args.source);
    else
        take_records(ep_relay_received(&o->run, chunk, EP_TO_RELAYS), &args);
    args.blocks.clears = kind == EP_CHUNK_RELAYED && chunk == o->run.chunks - 1;
    if (kind == EP_CHUNK_RELAYED) args.marks = ep_relay_marks(&o->run, chunk, EP_TO_RELAYS);
    if (!ep_partition_scatter(&ep_cuda(group)->tuned.constants, &args, ep_cuda(group)->shared_bytes,
                              kind == EP_CHUNK_OWN ? o->unit : 16))
        return ep_cuda_refuse_rows(group, t->row_bytes);
    args.group.digest = ep_relay_chunk_digest(o->args->group.digest, kind, chunk);
    return ep_relay_launch(&o->run, ep_cuda_launch_scatter, &args, args.group.blocks);
}

/* Pack a chunk for the other nodes. With a limit a message has tokens of any chunk from the one on
 * in which the token of its first place is, where all tokens need the node. */
static EpStatus pack_chunk(Operation *o, int32_t chunk) {
    EpScatterArgs own = *o->args;
    const EpNodeSizes *nodes = &own.shape.nodes;
    const EpCudaPlan *whole = &o->args->plan;
    int32_t from = nodes->limit ? chunk * nodes->message / nodes->chunk : chunk;
    take_chunk(o, EP_CHUNK_OWN, from, &own);
    take_tokens((int64_t)from * nodes->chunk, &own.t, &own.source);
    EpPackArgs args = {.group = own.group,
                       .plan = own.plan,
                       .t = own.t,
                       .source = own.source,
                       .record = own.record,
                       .top_k = own.top_k,
                       .message_slots = nodes->message,
                       .messages = nodes->nodes - 1,
                       .out = o->run.relay->send[chunk % 2],
                       .relays = ep_relay_marks(&o->run, chunk, EP_FROM_RELAYS).peers,
                       .stats = own.stats,
                       .stamp = o->run.relay->stamp};
    if (nodes->limit) {
        args.first_row = chunk * args.messages * nodes->message;
        args.filled = ep_cuda_chunk_plan(&own.shape, whole, EP_CHUNK_OWN, chunk).rows_to;
        args.chunks = ep_plan_chunks(&own.shape) - from, args.chunk_tokens = nodes->chunk;
        args.chunk_stride =
            whole->chunk_plan_bytes[EP_CHUNK_OWN] + whole->chunk_plan_bytes[EP_CHUNK_RELAYED];
        args.num_rows = o->call->num_rows - (int64_t)from * nodes->chunk;
    }
    EP_TRY(ep_relay_launch(&o->run, ep_cuda_launch_pack, &args, args.group.blocks));
    return ep_relay_set_ready(&o->run, chunk);
}

/* Send a chunk, and scatter what has come of it from the other nodes. */
static EpStatus spread_chunk(Operation *o, int32_t chunk) {
    EP_TRY(ep_relay_exchange(&o->run, chunk, EP_TO_RELAYS));
    return scatter_chunk(o, EP_CHUNK_RELAYED, chunk);
}

EpStatus ep_cuda_scatter_nodes(EpHandle *handle, const EpScatter *call, const EpScatterArgs *args,
                               int64_t unit) {
    Operation o = {.call = call, .args = args, .unit = unit};
    EpRelayCall relay = {.stream = call->stream,
                         .record_bytes = args->record.bytes,
                         .plan = &args->plan,
                         .own_plan = !call->plan.is_named,
                         .digest = args->group.digest};
    EP_TRY(ep_relay_begin(handle, &relay, &o.run));
    for (int32_t c = 0; c < o.run.chunks; c++) {
        EP_TRY(pack_chunk(&o, c));
        EP_TRY(scatter_chunk(&o, EP_CHUNK_OWN, c));
        if (c > 0) EP_TRY(spread_chunk(&o, c - 1));
    }
    EP_TRY(spread_chunk(&o, o.run.chunks - 1));
    return ep_relay_end(&o.run);
}
