/* SPDX-License-Identifier: Apache-2.0 */
/* The exchanges of an operation on several nodes, and the kernels before and after each of them,
 * which must not need more of the operation than the exchange's key has: see replay.h. */
#include "bootstrap/cuda/replay.h"
#include "bootstrap/cuda/watch.h"
#include "handles/cuda/relay.h"

/* In an exchange's key. */
enum { STAMPS = 1, ROUTING, ROWS_TO_RELAYS, ROWS_FROM_RELAYS };

/* ---- stamps and routing -------------------------------------------------------------------- */

/* What a call within a group has found wrong, ncclGroupEnd returns, too. A rank that is a relay and
 * a source of this one gets two stamps. */
static void add_stamps(const EpRelayRun *run) {
    const EpCuda *cuda = ep_cuda(run->group);
    const EpCudaRelay *r = run->relay;
    cudaStream_t wire = run->side->wire;
    for (int32_t i = 0; i < r->num_peers; i++) {
        (void)cuda->nccl->ncclSend(r->stamps, sizeof(*r->stamps), ncclUint8, r->peers[i],
                                   cuda->network, wire);
        (void)cuda->nccl->ncclRecv(r->stamps + 1 + i, sizeof(*r->stamps), ncclUint8, r->peers[i],
                                   cuda->network, wire);
    }
}

static ncclResult_t call_for_stamps(const void *context) {
    const EpRelayRun *run = context;
    const EpNccl *nccl = ep_cuda(run->group)->nccl;
    (void)nccl->ncclGroupStart();
    add_stamps(run);
    return nccl->ncclGroupEnd();
}

static int compare_stamps(const void *context) {
    const EpRelayRun *run = context;
    return ep_cuda_launch_compare(&run->mark, run->side->wire);
}

/* Ranks that are in different operations may send messages of different sizes, so the stamps, whose
 * size is always the same, go first. */
EpStatus ep_relay_send_stamps(const EpRelayRun *run) {
    return ep_cuda_exchange(run->group, &run->stream,
                            &(EpExchange){.what = "ncclGroupEnd",
                                          .stream = run->side->wire,
                                          .call = call_for_stamps,
                                          .after = compare_stamps,
                                          .context = run,
                                          .key = {STAMPS}});
}

static ncclResult_t call_for_routing(const void *context) {
    const EpRelayRun *run = context;
    const EpCuda *cuda = ep_cuda(run->group);
    const EpCudaRelay *r = run->relay;
    const char *own = r->routing + r->tables.self * r->routing_bytes;
    return cuda->nccl->ncclAllGather(own, r->routing, (size_t)r->routing_bytes, ncclUint8,
                                     cuda->network, run->side->wire);
}

ncclResult_t ep_relay_call_once(const EpRelayRun *run) {
    const EpNccl *nccl = ep_cuda(run->group)->nccl;
    (void)nccl->ncclGroupStart();
    add_stamps(run);
    (void)call_for_routing(run);
    return nccl->ncclGroupEnd();
}

/* It is the only exchange after the stamps: let the watcher know that it is complete. */
static int mark_end(const void *context) {
    const EpRelayRun *run = context;
    EpMarkArgs args = run->mark;
    args.last = 1;
    return ep_cuda_launch_move(&args, run->side->wire);
}

EpStatus ep_relay_send_routing(const EpRelayRun *run) {
    return ep_cuda_exchange(run->group, &run->stream,
                            &(EpExchange){.what = "ncclAllGather",
                                          .stream = run->side->wire,
                                          .call = call_for_routing,
                                          .after = mark_end,
                                          .context = run,
                                          .key = {ROUTING}});
}

/* ---- rows ---------------------------------------------------------------------------------- */

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

/** The rows of a chunk. */
typedef struct Rows {
    const EpRelayRun *run;
    Messages out, in;
    int last; /* whether the operation has no further chunk */
} Rows;

static ncclResult_t call_for_rows(const void *context) {
    const Rows *rows = context;
    const EpNccl *nccl = ep_cuda(rows->run->group)->nccl;
    (void)nccl->ncclGroupStart();
    for (int32_t i = 0; i < rows->out.count; i++)
        send_message(rows->run, &rows->out, i);
    for (int32_t i = 0; i < rows->in.count; i++)
        receive_message(rows->run, &rows->in, i);
    return nccl->ncclGroupEnd();
}

/* Compare the stamps that came with the messages: before anything reads their rows, this rank has
 * failed if a sender has. */
static int check_stamps(const void *context) {
    const Rows *rows = context;
    EpMarkArgs args = rows->run->mark;
    args.peers += rows->in.peers - rows->run->relay->peers;
    args.num_peers = rows->in.count;
    args.last = rows->last;
    return ep_cuda_launch_compare(&args, rows->run->side->wire);
}

/* The addresses of messages follow from the buffers and the records' size, and the lengths from
 * that and the places. With exact sizes lengths differ by pairs of ranks. */
EpStatus ep_relay_send_rows(const EpRelayRun *run, int32_t chunk, EpRelayWay way) {
    int to_relays = way == EP_TO_RELAYS;
    Rows rows = {.run = run,
                 .out = messages_of(run, chunk, run->relay->send[chunk % 2], to_relays),
                 .in = messages_of(run, chunk, run->relay->recv[chunk % 2], !to_relays),
                 .last = chunk == run->chunks - 1};
    EpExchange exchange = {.what = "ncclGroupEnd",
                           .stream = run->side->wire,
                           .call = call_for_rows,
                           .after = check_stamps,
                           .context = &rows,
                           .key = {to_relays ? ROWS_TO_RELAYS : ROWS_FROM_RELAYS,
                                   chunk % 2 + 2 * rows.last, rows.out.most, run->record_bytes}};
    if (run->places) exchange.key[0] = 0;
    return ep_cuda_exchange(run->group, &run->stream, &exchange);
}
