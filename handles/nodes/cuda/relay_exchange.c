/* SPDX-License-Identifier: Apache-2.0 */
/* The exchanges of an operation on several nodes. */
#include "bootstrap/network/cuda/exchange.h"
#include "handles/nodes/cuda/relay.h"

static EpStatus begin(const EpRelayRun *run, EpExchange *x) {
    return ep_exchange_begin(x, run->group, &run->stream, run->side->wire);
}

static EpStatus launched(const EpRelayRun *run, int error) {
    return ep_cuda_check(run->group, "kernel launch", error);
}

/* ---- stamps and routing -------------------------------------------------------------------- */

/* A rank that is a relay and a source of this one gets two stamps. */
static void add_stamps(const EpExchange *x, const EpCudaRelay *r) {
    for (int32_t i = 0; i < r->num_peers; i++) {
        ep_exchange_send(x, r->peers[i], r->stamp, sizeof(*r->stamp));
        ep_exchange_receive(x, r->peers[i], r->stamps[0] + i, sizeof(*r->stamp));
    }
}

static void add_routing(const EpExchange *x, const EpCudaRelay *r) {
    ep_exchange_gather(x, r->routing + r->tables.self * r->routing_bytes, r->routing,
                       (size_t)r->routing_bytes);
}

ncclResult_t ep_relay_call_once(const EpRelayRun *run) {
    EpExchange x;
    ep_exchange_begin_first(&x, run->group, run->side->wire);
    add_stamps(&x, run->relay);
    add_routing(&x, run->relay);
    return ep_exchange_end_first(&x);
}

EpStatus ep_relay_open_messages(const EpRelayRun *run, EpExchange *x) {
    EP_TRY(begin(run, x));
    add_stamps(x, run->relay);
    return EP_OK;
}

EpStatus ep_relay_close_messages(const EpRelayRun *run, const EpExchange *x) {
    EP_TRY(ep_exchange_end(x));
    return launched(run, ep_cuda_launch_compare(&run->mark, run->side->wire));
}

EpStatus ep_relay_send_stamps(const EpRelayRun *run) {
    EpExchange x;
    EP_TRY(ep_relay_open_messages(run, &x));
    return ep_relay_close_messages(run, &x);
}

/* Messages say which operation their ranks are in. No other exchange follows: let the watcher know
 * that this one is complete. */
EpStatus ep_relay_send_routing(const EpRelayRun *run) {
    EpExchange x;
    EpMarkArgs args = run->mark;
    args.marks.last = 1;
    EP_TRY(begin(run, &x));
    add_routing(&x, run->relay);
    EP_TRY(ep_exchange_end(&x));
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

/* A stamp goes before each message, of the rank that sends it. */
EpStatus ep_relay_send_rows(const EpRelayRun *run, int32_t chunk, EpRelayWay way) {
    int to_relays = way == EP_TO_RELAYS;
    EpCudaRelay *r = run->relay;
    EpStamp *stamps = r->stamps[chunk % 2];
    Messages out = messages_of(run, chunk, r->send[chunk % 2], to_relays);
    Messages in = messages_of(run, chunk, ep_relay_received(run, chunk, way), !to_relays);
    EpExchange x;
    EP_TRY(begin(run, &x));
    for (int32_t i = 0; i < out.count; i++) {
        ep_exchange_send(&x, out.peers[i], r->stamp, sizeof(*r->stamp));
        ep_exchange_send(&x, out.peers[i], ep_relay_message(run, out.buffer, i),
                         message_size(run, &out, i));
    }
    for (int32_t i = 0; i < in.count; i++) {
        ep_exchange_receive(&x, in.peers[i], stamps + i, sizeof(*stamps));
        ep_exchange_receive(&x, in.peers[i], ep_relay_message(run, in.buffer, i),
                            message_size(run, &in, i));
    }
    return ep_exchange_end(&x);
}
