/* SPDX-License-Identifier: Apache-2.0 */
/* An operation on several nodes: its streams, its exchanges, and what the watcher must know of it.
 */
#include "handles/cuda/relay.h"

#include <string.h>

#include "bootstrap/cuda/setup.h"
#include "bootstrap/cuda/watch.h"
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

void ep_relay_take_part(const EpPlanShape *shape, const EpCudaPlan *whole, EpPlanPart kind,
                        int32_t chunk, int64_t num_rows, EpCudaPlan *plan, EpCudaGroup *group) {
    int64_t left = num_rows - (int64_t)chunk * shape->nodes.chunk;
    int32_t most = ep_part_tokens(shape, kind);
    *plan = ep_cuda_plan_part(shape, whole, kind, chunk);
    plan->use.fills_rest = kind == EP_PART_OWN && chunk == 0;
    plan->use.most_tokens = kind == EP_PART_OWN ? (int32_t)ep_max(0, ep_min(most, left)) : most;
    group->layout.max_tokens = most;
}

EpStatus ep_relay_launch(EpRelayRun *run, cudaStream_t stream,
                         int (*launch)(const void *args, int blocks, void *stream),
                         const void *args, int blocks) {
    return ep_cuda_check(run->group, "kernel launch", launch(args, blocks, stream));
}

EpStatus ep_relay_await_send(EpRelayRun *run, cudaStream_t stream, int32_t chunk) {
    return await(run, stream, chunk < 2 ? run->side->begun : run->side->moved[chunk % 2]);
}

/* The only exchange is complete on the wire's stream: let the watcher know. */
static EpStatus mark_end(EpRelayRun *run) {
    run->mark.last = 1;
    return ep_cuda_check(run->group, "kernel launch",
                         ep_cuda_launch_move(&run->mark, run->side->wire));
}

/* A rank that is a relay and a source of this one gets two. */
static EpStatus send_stamps(EpRelayRun *run) {
    const EpCuda *cuda = ep_cuda(run->group);
    const EpCudaRelay *r = run->relay;
    cudaStream_t wire = run->side->wire;
    EP_TRY(ep_cuda_network_enter(run->group, &run->stream));
    (void)cuda->nccl->ncclGroupStart();
    for (int32_t i = 0; i < r->num_peers; i++) {
        (void)cuda->nccl->ncclSend(r->stamps, sizeof(*r->stamps), ncclUint8, r->peers[i],
                                   cuda->network, wire);
        (void)cuda->nccl->ncclRecv(r->stamps + 1 + i, sizeof(*r->stamps), ncclUint8, r->peers[i],
                                   cuda->network, wire);
    }
    return ep_cuda_network_settle(run->group, "ncclGroupEnd", cuda->nccl->ncclGroupEnd());
}

static EpStatus send_routing(EpRelayRun *run) {
    const EpCuda *cuda = ep_cuda(run->group);
    EpCudaRelay *r = run->relay;
    char *own = r->routing + r->tables.self * r->routing_bytes;
    EP_TRY(ep_cuda_network_enter(run->group, &run->stream));
    return ep_cuda_network_settle(run->group, "ncclAllGather",
                                  cuda->nccl->ncclAllGather(own, r->routing,
                                                            (size_t)r->routing_bytes, ncclUint8,
                                                            cuda->network, run->side->wire));
}

/* Ranks that are in different operations may send messages of different sizes, so the stamps, whose
 * size is always the same, go first. */
static EpStatus exchange_stamps(EpRelayRun *run) {
    EP_TRY(send_stamps(run));
    return ep_cuda_check(run->group, "kernel launch",
                         ep_cuda_launch_compare(&run->mark, run->side->wire));
}

#define EXACT_SIZES EP_DIGEST(0, 0, 0x8000) /* in a stamp: only filled places are sent */

static void describe_marks(EpRelayRun *run, const EpRelayCall *call) {
    const EpCudaRelay *r = run->relay;
    run->mark = (EpMarkArgs){.group = ep_cuda(run->group)->device,
                             .generation = call->plan ? &call->plan->header->generation : NULL,
                             .stamps = r->stamps,
                             .peers = r->device_peers,
                             .num_peers = r->num_peers};
    run->mark.group.digest = call->digest ^ (run->places ? EXACT_SIZES : 0);
    ep_cuda_watch_describe(run->group, &run->mark);
}

/* All ranks come to the same answer: the capacity is a fact of ep_prepare, but for ranks without
 * experts in the batched layout, which is never exact; and what is captured is captured on all. A
 * graph may prepare the plan anew while some hosts have read the numbers of the step before: so
 * once a prepare has been captured, all places are sent. */
static EpStatus choose_places(EpHandle *handle, const EpRelayCall *call, EpRelayRun *run) {
    const EpCudaOwn *own = handle->own_state;
    const int32_t *number;
    int is_exact = handle->shape.capacity == 0 && handle->shape.layout != EP_LAYOUT_BATCHED;
    int knows = call->plan && call->own_plan && is_exact;
    if (!knows || own->captured || run->stream.captures) return EP_OK;
    EP_TRY(ep_cuda_await_numbers(handle, &number));
    number += ep_info_chunks(&handle->shape);
    run->chunks = number[0], run->places = number + 1;
    return EP_OK;
}

/* A rank whose plan is wrong has failed before it sends its stamp. */
static EpStatus check_plan(EpRelayRun *run, const EpRelayCall *call) {
    if (!call->plan) return EP_OK;
    EpCheckArgs args = {run->mark.group, *call->plan};
    return ep_relay_launch(run, run->stream.stream, ep_cuda_launch_check, &args, 1);
}

EpStatus ep_relay_begin(EpHandle *handle, const EpRelayCall *call, EpRelayRun *run) {
    EpCuda *cuda = ep_cuda(handle->group);
    *run = (EpRelayRun){.handle = handle,
                        .group = handle->group,
                        .relay = cuda->relay,
                        .chunks = cuda->relay->tables.chunks,
                        .record_bytes = call->record_bytes};
    EP_TRY(ep_cuda_stream(run->group, call->stream, &run->stream));
    EP_TRY(choose_places(handle, call, run));
    EP_TRY(ep_cuda_order_enter(run->group, &cuda->order, &run->stream));
    run->side = &run->relay->side[run->stream.captures];
    describe_marks(run, call);
    EP_TRY(check_plan(run, call));
    EP_TRY(ep_cuda_check(run->group, "kernel launch",
                         ep_cuda_launch_begin(&run->mark, run->stream.stream)));
    EP_TRY(record(run, run->side->begun, run->stream.stream));
    EP_TRY(await(run, run->side->wire, run->side->begun));
    return exchange_stamps(run);
}

EpStatus ep_relay_gather(EpRelayRun *run, cudaStream_t stream) {
    EP_TRY(record(run, run->side->ready[0], stream));
    EP_TRY(await(run, run->side->wire, run->side->ready[0]));
    EP_TRY(send_routing(run));
    EP_TRY(mark_end(run));
    EP_TRY(record(run, run->side->moved[0], run->side->wire));
    return await(run, stream, run->side->moved[0]);
}

/* A rank that waits in vain ends the group: then the watcher ends the communicator, whose messages
 * would keep the GPU busy, and this rank waiting, until the missing rank comes. */
EpStatus ep_cuda_relay_connect(EpGroup *group) {
    EpCudaRelay *relay = ep_cuda(group)->relay;
    EpRelayRun run = {.group = group, .relay = relay};
    cudaError_t error;
    EpWait wait;
    if (!relay) return EP_OK;
    run.side = &relay->side[0];
    EP_TRY(send_stamps(&run));
    EP_TRY(send_routing(&run));
    ep_wait_begin(&wait, group->timeout > EP_NCCL_SECONDS ? group->timeout : EP_NCCL_SECONDS, 0);
    while ((error = cudaStreamQuery(run.side->wire)) == cudaErrorNotReady) {
        (void)cudaGetLastError();
        if (!ep_wait_pause(&wait))
            return ep_cuda_network_give_up(
                group, "ep_group_create",
                ep_fail(EP_ERR_TIMEOUT,
                        "rank %d: ep_group_create: expected the first messages between "
                        "nodes within %g s, got none",
                        group->rank, wait.timeout));
    }
    group->backend->poll(group);
    EP_TRY(ep_group_usable(group));
    return ep_cuda_check(group, "NCCL between nodes", error);
}

/** The messages to or from peers of a kind. */
typedef struct Messages {
    char *buffer;
    const int32_t *peers;
    int32_t count;
    const int32_t *places; /* of each that are sent; NULL: `most` */
    int64_t most;
} Messages;

/* Returns the messages of a chunk to or from this rank's relays, or its sources. */
static Messages messages_of(const EpRelayRun *run, int32_t chunk, char *buffer, int with_relays) {
    const EpRelayTables *t = &run->relay->tables;
    int32_t others = t->nodes - 1;
    int64_t left = run->group->config.max_tokens - (int64_t)chunk * t->chunk;
    Messages m = {buffer, run->relay->peers, others, run->places, ep_min(left, t->chunk)};
    if (m.places) m.places += chunk * (others + t->lanes);
    if (with_relays) return m;
    m.peers += others, m.count = run->relay->num_sources;
    if (m.places) m.places += others;
    return m;
}

/* An empty message has a place, too: no exchange is without messages on any rank. */
static size_t message_size(const EpRelayRun *run, const Messages *m, int32_t i) {
    int64_t places = m->places ? ep_min(ep_max(1, m->places[i]), m->most) : m->most;
    return (size_t)(places * run->record_bytes);
}

/* Send a message with this rank's stamp, or receive one with its sender's. */
static void send_message(const EpRelayRun *run, const Messages *m, int32_t i) {
    const EpCuda *cuda = ep_cuda(run->group);
    const EpStamp *stamp = run->relay->stamps;
    cudaStream_t wire = run->side->wire;
    (void)cuda->nccl->ncclSend(stamp, sizeof(*stamp), ncclUint8, m->peers[i], cuda->network, wire);
    (void)cuda->nccl->ncclSend(ep_relay_message(run, m->buffer, i), message_size(run, m, i),
                               ncclUint8, m->peers[i], cuda->network, wire);
}

static void receive_message(const EpRelayRun *run, const Messages *m, int32_t i) {
    const EpCuda *cuda = ep_cuda(run->group);
    EpStamp *stamp = run->relay->stamps + 1 + i;
    cudaStream_t wire = run->side->wire;
    (void)cuda->nccl->ncclRecv(stamp, sizeof(*stamp), ncclUint8, m->peers[i], cuda->network, wire);
    (void)cuda->nccl->ncclRecv(ep_relay_message(run, m->buffer, i), message_size(run, m, i),
                               ncclUint8, m->peers[i], cuda->network, wire);
}

/* What a call within a group has found wrong, ncclGroupEnd returns, too. */
static EpStatus send_and_receive(EpRelayRun *run, const Messages *send, const Messages *receive) {
    const EpCuda *cuda = ep_cuda(run->group);
    EP_TRY(ep_cuda_check(run->group, "kernel launch",
                         ep_cuda_launch_seal(&run->mark, run->side->wire)));
    EP_TRY(ep_cuda_network_enter(run->group, &run->stream));
    (void)cuda->nccl->ncclGroupStart();
    for (int32_t i = 0; i < send->count; i++)
        send_message(run, send, i);
    for (int32_t i = 0; i < receive->count; i++)
        receive_message(run, receive, i);
    return ep_cuda_network_settle(run->group, "ncclGroupEnd", cuda->nccl->ncclGroupEnd());
}

/* Compare the stamps that came with these messages: before anything reads their rows, this rank has
 * failed if a sender has. */
static EpStatus check_stamps(const EpRelayRun *run, const Messages *received, int last) {
    EpMarkArgs args = run->mark;
    args.peers += received->peers - run->relay->peers;
    args.num_peers = received->count;
    args.last = last;
    return ep_cuda_check(run->group, "kernel launch",
                         ep_cuda_launch_compare(&args, run->side->wire));
}

EpStatus ep_relay_exchange(EpRelayRun *run, cudaStream_t stream, int32_t chunk, EpRelayWay way) {
    EpCudaSide *side = run->side;
    int to_relays = way == EP_TO_RELAYS;
    Messages out = messages_of(run, chunk, run->relay->send[chunk % 2], to_relays);
    Messages in = messages_of(run, chunk, run->relay->recv[chunk % 2], !to_relays);
    EP_TRY(record(run, side->ready[chunk % 2], stream));
    EP_TRY(await(run, side->wire, side->ready[chunk % 2]));
    if (chunk >= 2) EP_TRY(await(run, side->wire, side->taken[chunk % 2]));
    EP_TRY(send_and_receive(run, &out, &in));
    EP_TRY(check_stamps(run, &in, chunk == run->chunks - 1));
    return record(run, side->moved[chunk % 2], side->wire);
}

EpStatus ep_relay_await(EpRelayRun *run, int32_t chunk) {
    return await(run, run->stream.stream, run->side->moved[chunk % 2]);
}

EpStatus ep_relay_take(EpRelayRun *run, int32_t chunk) {
    return record(run, run->side->taken[chunk % 2], run->stream.stream);
}
