/* SPDX-License-Identifier: Apache-2.0 */
/* An operation on several nodes: its streams, and what the watcher must know of it. */
#include "handles/nodes/cuda/relay.h"

#include <stdlib.h>
#include <string.h>

#include "bootstrap/network/cuda/network.h"
#include "handles/nodes/cuda/route.h"
#include "runtime/wait.h"

static EpStatus record(const EpRelayRun *run, cudaEvent_t event, cudaStream_t stream) {
    return ep_cuda_record(run->group, event, stream);
}

static EpStatus await(const EpRelayRun *run, cudaStream_t stream, cudaEvent_t event) {
    return ep_cuda_await(run->group, stream, event);
}

/* The caller's stream has waited for the last exchange, which all packing precedes. */
EpStatus ep_relay_end(EpRelayRun *run) {
    return ep_cuda_order_leave(run->group, &ep_cuda(run->group)->order, &run->stream, cudaSuccess);
}

void ep_relay_take_chunk(const EpPlanShape *shape, const EpCudaPlan *whole, EpChunkPlan kind,
                         int32_t chunk, int64_t num_rows, EpCudaPlan *plan, EpCudaGroup *group) {
    int64_t left = num_rows - (int64_t)chunk * shape->nodes.chunk;
    int32_t most = ep_chunk_plan_tokens(shape, kind);
    *plan = ep_cuda_chunk_plan(shape, whole, kind, chunk);
    plan->use.fills_rest = kind == EP_CHUNK_OWN && chunk == 0;
    plan->use.most_tokens = kind == EP_CHUNK_OWN ? (int32_t)ep_max(0, ep_min(most, left)) : most;
    group->layout.max_tokens = most;
}

EpStatus ep_relay_launch(EpRelayRun *run, int (*launch)(const void *args, int blocks, void *stream),
                         const void *args, int blocks) {
    return ep_cuda_check(run->group, "kernel launch", launch(args, blocks, run->stream.stream));
}

#define EXACT_SIZES EP_DIGEST(0, 0, 0x8000) /* in a stamp: only filled slots are sent */

static void describe_marks(EpRelayRun *run, const EpRelayCall *call) {
    const EpCudaRelay *r = run->relay;
    run->mark = (EpMarkArgs){.group = ep_cuda(run->group)->device,
                             .marks = {.own = r->stamp,
                                       .theirs = r->stamps[0],
                                       .peers = r->device_peers,
                                       .num_peers = r->num_peers}};
    run->mark.group.digest = call->digest ^ (run->message_slots ? EXACT_SIZES : 0);
    ep_cuda_watch_describe(run->group, &run->mark);
}

/* All ranks come to the same answer: they agree on the rows in ep_prepare, and what is captured is
 * captured on all. A graph may prepare the plan anew while some hosts have read the numbers of the
 * step before: so once a prepare has been captured, all slots are sent. */
static EpStatus choose_message_slots(EpHandle *handle, const EpRelayCall *call, EpRelayRun *run) {
    const EpCudaOwn *own = handle->own_state;
    const int32_t *number;
    int is_exact = ep_agreed_rows(&handle->shape) == 0;
    int knows = call->plan && call->own_plan && is_exact;
    if (!knows || own->captured || run->stream.captures) return EP_OK;
    EP_TRY(ep_cuda_await_numbers(handle, &number));
    number += ep_info_chunks(&handle->shape);
    run->chunks = number[0], run->message_slots = number + 1;
    return EP_OK;
}

/* A rank whose plan is wrong has failed before it sends its stamp. */
static EpStatus launch_begin(EpRelayRun *run, const EpRelayCall *call) {
    if (!call->plan)
        return ep_cuda_check(run->group, "kernel launch",
                             ep_cuda_launch_begin(&run->mark, run->stream.stream));
    EpCheckArgs args = {run->mark, *call->plan};
    return ep_relay_launch(run, ep_cuda_launch_check, &args, 1);
}

static EpStatus begin(EpGroup *group, EpHandle *handle, const EpRelayCall *call, EpRelayRun *run) {
    EpCuda *cuda = ep_cuda(group);
    *run = (EpRelayRun){.group = group,
                        .relay = cuda->relay,
                        .chunks = cuda->relay->tables.chunks,
                        .record_bytes = call->record_bytes};
    EP_TRY(ep_cuda_stream(run->group, call->stream, &run->stream));
    if (handle) EP_TRY(choose_message_slots(handle, call, run));
    EP_TRY(ep_cuda_order_enter(run->group, &cuda->order, &run->stream));
    run->side = &run->relay->side[run->stream.captures];
    describe_marks(run, call);
    EP_TRY(launch_begin(run, call));
    return run->message_slots ? record(run, run->side->begun, run->stream.stream) : EP_OK;
}

EpStatus ep_relay_begin(EpHandle *handle, const EpRelayCall *call, EpRelayRun *run) {
    return begin(handle->group, handle, call, run);
}

EpStatus ep_relay_begin_group(EpGroup *group, const EpRelayCall *call, EpRelayRun *run) {
    return begin(group, NULL, call, run);
}

/* The first exchange of exact sizes. It waits for the operation to begin, and for nothing else. */
static EpStatus send_stamps(EpRelayRun *run) {
    EP_TRY(await(run, run->side->wire, run->side->begun));
    return ep_relay_send_stamps(run);
}

/* Make the caller's stream follow what is on the wire's. */
static EpStatus follow_wire(EpRelayRun *run) {
    EpCudaSide *side = run->side;
    EP_TRY(record(run, side->moved, side->wire));
    return await(run, run->stream.stream, side->moved);
}

/* Make the wire's stream follow what is on the caller's. */
static EpStatus lead_wire(EpRelayRun *run) {
    EP_TRY(record(run, run->side->ready[0], run->stream.stream));
    return await(run, run->side->wire, run->side->ready[0]);
}

EpStatus ep_relay_gather(EpRelayRun *run) {
    EP_TRY(lead_wire(run));
    EP_TRY(ep_relay_send_routing(run));
    return follow_wire(run);
}

EpStatus ep_relay_begin_messages(EpRelayRun *run, EpExchange *x) {
    EP_TRY(lead_wire(run));
    return ep_relay_open_messages(run, x);
}

EpStatus ep_relay_end_messages(EpRelayRun *run, const EpExchange *x) {
    EP_TRY(ep_relay_close_messages(run, x));
    return follow_wire(run);
}

EpStatus ep_relay_end_last(EpRelayRun *run) {
    EpMarkArgs args = run->mark;
    args.marks.last = 1;
    EP_TRY(
        ep_cuda_check(run->group, "kernel launch", ep_cuda_launch_move(&args, run->stream.stream)));
    return ep_relay_end(run);
}

/* ---- the first exchange -------------------------------------------------------------------- */

/** Calls that let NCCL connect the ranks. */
typedef struct Connecting {
    EpNcclCall call;
    EpRelayRun run;
} Connecting;

static ncclResult_t connect(EpNcclCall *call) {
    return ep_relay_call_once(&((const Connecting *)call)->run);
}

EpStatus ep_cuda_relay_connect(EpGroup *group) {
    EpCudaRelay *relay = ep_cuda(group)->relay;
    if (!relay) return EP_OK;
    Connecting *c = calloc(1, sizeof(*c));
    if (!c)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    *c = (Connecting){{.make = connect, .device = ep_cuda(group)->ordinal},
                      {.group = group, .relay = relay, .side = &relay->side[0]}};
    return ep_cuda_network_connect(group, &c->call, relay->side[0].wire);
}

EpStatus ep_relay_set_ready(EpRelayRun *run, int32_t chunk) {
    return record(run, run->side->ready[chunk % 2], run->stream.stream);
}

EpMarks ep_relay_marks(const EpRelayRun *run, int32_t chunk, EpRelayWay way) {
    const EpCudaRelay *r = run->relay;
    int32_t others = r->tables.nodes - 1, first = way == EP_TO_RELAYS ? others : 0;
    EpMarks marks = run->mark.marks;
    marks.theirs = r->stamps[chunk % 2], marks.peers = r->device_peers + first;
    marks.num_peers = way == EP_TO_RELAYS ? r->num_sources : others;
    marks.last = chunk == run->chunks - 1;
    return marks;
}

EpStatus ep_relay_compare(const EpRelayRun *run, int32_t chunk, EpRelayWay way) {
    EpMarkArgs args = run->mark;
    args.marks = ep_relay_marks(run, chunk, way);
    return ep_cuda_check(run->group, "kernel launch",
                         ep_cuda_launch_compare(&args, run->stream.stream));
}

/* What has filled the send buffer follows what has read the receive buffer two chunks before. */
EpStatus ep_relay_exchange(EpRelayRun *run, int32_t chunk, EpRelayWay way) {
    if (chunk == 0 && run->message_slots) EP_TRY(send_stamps(run));
    EP_TRY(await(run, run->side->wire, run->side->ready[chunk % 2]));
    EP_TRY(ep_relay_send_rows(run, chunk, way));
    return follow_wire(run);
}
