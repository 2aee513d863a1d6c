/* SPDX-License-Identifier: Apache-2.0 */
/* The exchanges of an operation on several nodes. What a call within a group has found wrong,
 * ncclGroupEnd returns, too, so only its result counts. */
#include "bootstrap/network/cuda/network.h"
#include "handles/nodes/cuda/relay.h"

static EpStatus enter(const EpRelayRun *run) {
    return ep_cuda_network_enter(run->group, &run->stream);
}

static EpStatus settle(const EpRelayRun *run, ncclResult_t result) {
    return ep_cuda_network_settle(run->group, "ncclGroupEnd", result);
}

static EpStatus launched(const EpRelayRun *run, int error) {
    return ep_cuda_check(run->group, "kernel launch", error);
}

/* ---- stamps and routing -------------------------------------------------------------------- */

/* A rank that is a relay and a source of this one gets two stamps. */
static void add_stamps(const EpRelayRun *run) {
    const EpCuda *cuda = ep_cuda(run->group);
    const EpCudaRelay *r = run->relay;
    cudaStream_t wire = run->side->wire;
    for (int32_t i = 0; i < r->num_peers; i++) {
        (void)cuda->nccl->ncclSend(r->stamp, sizeof(*r->stamp), ncclUint8, r->peers[i],
                                   cuda->network, wire);
        (void)cuda->nccl->ncclRecv(r->stamps[0] + i, sizeof(*r->stamp), ncclUint8, r->peers[i],
                                   cuda->network, wire);
    }
}

static void add_routing(const EpRelayRun *run) {
    const EpCuda *cuda = ep_cuda(run->group);
    const EpCudaRelay *r = run->relay;
    const char *own = r->routing + r->tables.self * r->routing_bytes;
    (void)cuda->nccl->ncclAllGather(own, r->routing, (size_t)r->routing_bytes, ncclUint8,
                                    cuda->network, run->side->wire);
}

ncclResult_t ep_relay_call_once(const EpRelayRun *run) {
    const EpNccl *nccl = ep_cuda(run->group)->nccl;
    (void)nccl->ncclGroupStart();
    add_stamps(run);
    add_routing(run);
    return nccl->ncclGroupEnd();
}

EpStatus ep_relay_send_stamps(const EpRelayRun *run) {
    const EpNccl *nccl = ep_cuda(run->group)->nccl;
    EP_TRY(enter(run));
    (void)nccl->ncclGroupStart();
    add_stamps(run);
    EP_TRY(settle(run, nccl->ncclGroupEnd()));
    return launched(run, ep_cuda_launch_compare(&run->mark, run->side->wire));
}

/* Messages say which operation their ranks are in. No other exchange follows: let the watcher know
 * that this one is complete. */
EpStatus ep_relay_send_routing(const EpRelayRun *run) {
    const EpNccl *nccl = ep_cuda(run->group)->nccl;
    EpMarkArgs args = run->mark;
    args.marks.last = 1;
    EP_TRY(enter(run));
    (void)nccl->ncclGroupStart();
    add_routing(run);
    EP_TRY(settle(run, nccl->ncclGroupEnd()));
    return launched(run, ep_cuda_launch_move(&args, run->side->wire));
}

/* ---- rows ---------------------------------------------------------------------------------- */

/** The messages to or from peers of a kind. */
typedef struct Messages {
    char *buffer;
    const int32_t *peers;
    int32_t count;
    const int32_t *message_slots; /* of each that are sent; NULL: `most` */
    int64_t most;
} Messages;

/* Returns the messages of a chunk to or from this rank's relays, or its sources. */
static Messages messages_of(const EpRelayRun *run, int32_t chunk, char *buffer, int with_relays) {
    const EpRelayTables *t = &run->relay->tables;
    int32_t others = t->nodes - 1;
    int64_t rows = ep_config_node_rows(&run->group->config);
    int64_t most = ep_max(1, ep_min(rows - (int64_t)chunk * t->message, t->message));
    Messages m = {buffer, run->relay->peers, others, run->message_slots, most};
    if (m.message_slots) m.message_slots += chunk * (others + t->sources);
    if (with_relays) return m;
    m.peers += others, m.count = run->relay->num_sources;
    if (m.message_slots) m.message_slots += others;
    return m;
}

/* An empty message has a slot, too: no exchange is without messages on any rank. */
static size_t message_size(const EpRelayRun *run, const Messages *m, int32_t i) {
    int64_t slots = m->message_slots ? ep_min(ep_max(1, m->message_slots[i]), m->most) : m->most;
    return (size_t)(slots * run->record_bytes);
}

/* Send a message with this rank's stamp, or receive one with its sender's. */
static void send_message(const EpRelayRun *run, const Messages *m, int32_t i) {
    const EpCuda *cuda = ep_cuda(run->group);
    const EpStamp *stamp = run->relay->stamp;
    cudaStream_t wire = run->side->wire;
    (void)cuda->nccl->ncclSend(stamp, sizeof(*stamp), ncclUint8, m->peers[i], cuda->network, wire);
    (void)cuda->nccl->ncclSend(ep_relay_message(run, m->buffer, i), message_size(run, m, i),
                               ncclUint8, m->peers[i], cuda->network, wire);
}

static void receive_message(const EpRelayRun *run, const Messages *m, EpStamp *stamp, int32_t i) {
    const EpCuda *cuda = ep_cuda(run->group);
    cudaStream_t wire = run->side->wire;
    (void)cuda->nccl->ncclRecv(stamp, sizeof(*stamp), ncclUint8, m->peers[i], cuda->network, wire);
    (void)cuda->nccl->ncclRecv(ep_relay_message(run, m->buffer, i), message_size(run, m, i),
                               ncclUint8, m->peers[i], cuda->network, wire);
}

EpStatus ep_relay_send_rows(const EpRelayRun *run, int32_t chunk, EpRelayWay way) {
    const EpNccl *nccl = ep_cuda(run->group)->nccl;
    int to_relays = way == EP_TO_RELAYS;
    Messages out = messages_of(run, chunk, run->relay->send[chunk % 2], to_relays);
    Messages in = messages_of(run, chunk, ep_relay_received(run, chunk, way), !to_relays);
    EP_TRY(enter(run));
    (void)nccl->ncclGroupStart();
    for (int32_t i = 0; i < out.count; i++)
        send_message(run, &out, i);
    for (int32_t i = 0; i < in.count; i++)
        receive_message(run, &in, run->relay->stamps[chunk % 2] + i, i);
    return settle(run, nccl->ncclGroupEnd());
}
