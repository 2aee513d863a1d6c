/* SPDX-License-Identifier: Apache-2.0 */

/**
 * The baseline on GPUs: one kernel packs rows per slot, NCCL sends and receives them in one group,
 * another kernel unpacks them into aligned slabs. Combine goes the other way and sums on the
 * token's rank.
 */

#if EP_WITH_CUDA

#include <stdlib.h>
#include <string.h>

#include "tools/bench/baseline.h"
#include "tools/bench/device.h"
#include "tools/bench/nccl.h"
#include "tools/common/util.h"

/* ---- NCCL's sends and receives ------------------------------------------------------------- */

typedef struct Sends {
    Nccl nccl;
    __typeof__(&ncclGroupStart) group_start;
    __typeof__(&ncclGroupEnd) group_end;
    __typeof__(&ncclSend) send;
    __typeof__(&ncclRecv) recv;
} Sends;

static bool sends_open(World *world, Sends *s) {
    if (!nccl_open(world, &s->nccl)) return false;
    void *library = s->nccl.library;
    return world_all(world, library_find(library, "ncclGroupStart", &s->group_start) &&
                                library_find(library, "ncclGroupEnd", &s->group_end) &&
                                library_find(library, "ncclSend", &s->send) &&
                                library_find(library, "ncclRecv", &s->recv));
}

/* ---- the baseline's memory ----------------------------------------------------------------- */

typedef struct Baseline {
    Case *c;
    Sends nccl;
    BaselinePlan plan;
    Pool pool;
    int32_t *padding; /* indices of the padding rows, on the host */
    int64_t num_padding;
    /* device memory */
    int32_t *d_send_token, *d_recv_row, *d_entry_at, *d_padding;
    char *send_rows, *recv_rows, *send_scales, *recv_scales, *send_weights, *recv_weights;
    bool ok; /* after a failure the rank still takes part: the others are in NCCL */
} Baseline;

static void *alloc(Baseline *b, size_t count, size_t bytes) {
    void *memory = NULL;
    b->ok = b->ok && cuda_ok(cudaMalloc(&memory, count * bytes + 1), "cudaMalloc for --baseline");
    return memory;
}

static bool alloc_all(Baseline *b) {
    const Case *c = b->c;
    size_t entries = (size_t)(c->tokens * c->routing.top_k), slots = (size_t)c->slots.num_slots;
    size_t rows = (size_t)c->slots.num_rows, scale_bytes = (size_t)c->options->scale_bytes;
    b->padding = pool_alloc(&b->pool, rows, sizeof(int32_t), "baseline");
    b->ok = baseline_plan_alloc(c, &b->pool, &b->plan);
    b->d_send_token = alloc(b, entries, sizeof(int32_t));
    b->d_entry_at = alloc(b, entries, sizeof(int32_t));
    b->d_recv_row = alloc(b, slots, sizeof(int32_t));
    b->d_padding = alloc(b, rows, sizeof(int32_t));
    b->send_rows = alloc(b, entries, c->row_bytes);
    b->recv_rows = alloc(b, slots, c->row_bytes);
    b->send_scales = alloc(b, entries, scale_bytes);
    b->recv_scales = alloc(b, slots, scale_bytes);
    b->send_weights = alloc(b, entries, sizeof(float));
    b->recv_weights = alloc(b, slots, sizeof(float));
    return b->ok;
}

static void free_all(Baseline *b) {
    void *all[] = {b->d_send_token, b->d_entry_at,  b->d_recv_row,  b->d_padding,
                   b->send_rows,    b->recv_rows,   b->send_scales, b->recv_scales,
                   b->send_weights, b->recv_weights};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        cudaFree(all[i]);
    pool_free(&b->pool);
}

/* ---- prepare: on the host ------------------------------------------------------------------ */

static bool copy(Baseline *b, void *to, const void *from, int64_t count, size_t bytes) {
    return cuda_ok(
        cudaMemcpyAsync(to, from, (size_t)count * bytes, cudaMemcpyDefault, b->c->stream),
        "cudaMemcpyAsync");
}

static void list_padding(Baseline *b) {
    b->num_padding = 0;
    for (int l = 0; l < b->c->slots.num_local; l++) {
        for (int64_t row = b->plan.slab_end[l]; row < b->plan.slab_limit[l]; row++)
            b->padding[b->num_padding++] = (int32_t)row;
    }
}

static bool prepare(Baseline *b) {
    Case *c = b->c;
    int64_t entries = c->tokens * c->routing.top_k;
    size_t word = sizeof(int32_t);
    bool ok = copy(b, c->buffers.index, c->device->buffers.index, entries,
                   ep_type_bytes((EpType)c->options->index_type));
    ok = device_finish(c) && ok;
    baseline_plan_make(&b->plan);
    list_padding(b);
    return ok && copy(b, b->d_send_token, b->plan.send_token, b->plan.sent.total, word) &&
           copy(b, b->d_entry_at, b->plan.entry_at, entries, word) &&
           copy(b, b->d_recv_row, b->plan.recv_row, b->plan.received.total, word) &&
           copy(b, b->d_padding, b->padding, b->num_padding, word) && device_finish(c);
}

/* ---- dispatch ------------------------------------------------------------------------------ */

typedef struct Packed {
    char *rows;
    const Traffic *traffic;
} Packed;

static bool exchange_with(const Baseline *b, Packed out, Packed in, size_t bytes, int peer) {
    const Sends *n = &b->nccl;
    size_t sends = (size_t)out.traffic->counts[peer] * bytes;
    size_t receives = (size_t)in.traffic->counts[peer] * bytes;
    const char *from = out.rows + (size_t)out.traffic->offsets[peer] * bytes;
    char *to = in.rows + (size_t)in.traffic->offsets[peer] * bytes;
    cudaStream_t stream = b->c->stream;
    return (!sends || nccl_ok(&n->nccl, n->send(from, sends, ncclUint8, peer, n->nccl.comm, stream),
                              "ncclSend")) &&
           (!receives ||
            nccl_ok(&n->nccl, n->recv(to, receives, ncclUint8, peer, n->nccl.comm, stream),
                    "ncclRecv"));
}

static bool exchange(const Baseline *b, Packed out, Packed in, size_t bytes) {
    const Sends *n = &b->nccl;
    bool ok = nccl_ok(&n->nccl, n->group_start(), "ncclGroupStart");
    for (int peer = 0; ok && peer < b->c->world->size; peer++)
        ok = exchange_with(b, out, in, bytes, peer);
    return nccl_ok(&n->nccl, n->group_end(), "ncclGroupEnd") && ok;
}

/* Data that travels with each slot. */
typedef struct Payload {
    const void *from;
    char *packed, *received;
    void *to;
    size_t bytes;   /* per slot */
    bool per_entry; /* one per entry, else one per token */
} Payload;

enum { MAX_PAYLOADS = 3 };

static int list_payloads(const Baseline *b, Payload *out) {
    const Case *c = b->c;
    const Buffers *d = &c->device->buffers;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    int n = 0;
    out[n++] =
        (Payload){d->tokens_in, b->send_rows, b->recv_rows, d->slots_out, c->row_bytes, false};
    if (c->options->weighted)
        out[n++] = (Payload){d->topk_weights, b->send_weights, b->recv_weights,
                             d->recv_weights, sizeof(float),   true};
    if (scale_bytes)
        out[n++] = (Payload){d->scales,      b->send_scales, b->recv_scales,
                             d->recv_scales, scale_bytes,    false};
    return n;
}

static bool pack(const Baseline *b, const Payload *payload) {
    const Case *c = b->c;
    int64_t entries = c->tokens * c->routing.top_k;
    cudaError_t status = payload->per_entry
                             ? kernel_scatter_rows(payload->packed, payload->from, b->d_entry_at,
                                                   entries, payload->bytes, c->stream)
                             : kernel_gather_rows(payload->packed, payload->from, b->d_send_token,
                                                  b->plan.sent.total, payload->bytes, c->stream);
    return cuda_ok(status, "packing rows");
}

/* Copy received rows to their slots and zero the padding. */
static bool unpack(const Baseline *b, const Payload *payload) {
    cudaStream_t stream = b->c->stream;
    return cuda_ok(kernel_scatter_rows(payload->to, payload->received, b->d_recv_row,
                                       b->plan.received.total, payload->bytes, stream),
                   "unpacking rows") &&
           cuda_ok(kernel_scatter_rows(payload->to, NULL, b->d_padding, b->num_padding,
                                       payload->bytes, stream),
                   "zeroing the padding");
}

/* Groups nest, so one outer group holds all exchanges. */
static bool dispatch(Baseline *b) {
    const Sends *n = &b->nccl;
    Payload payload[MAX_PAYLOADS];
    int count = list_payloads(b, payload);
    bool ok = true;
    for (int i = 0; i < count; i++)
        ok = pack(b, &payload[i]) && ok;
    ok = nccl_ok(&n->nccl, n->group_start(), "ncclGroupStart") && ok;
    for (int i = 0; i < count; i++) {
        Packed out = {payload[i].packed, &b->plan.sent},
               in = {payload[i].received, &b->plan.received};
        ok = exchange(b, out, in, payload[i].bytes) && ok;
    }
    ok = nccl_ok(&n->nccl, n->group_end(), "ncclGroupEnd") && ok;
    for (int i = 0; i < count; i++)
        ok = unpack(b, &payload[i]) && ok;
    return ok;
}

/* ---- combine ------------------------------------------------------------------------------- */

static bool sum_rows(const Baseline *b) {
    const Case *c = b->c;
    const Buffers *d = &c->device->buffers;
    SumArgs args = {.type = (int)c->options->type,
                    .out = d->tokens_out,
                    .rows = b->send_rows,
                    .at = b->d_entry_at,
                    .weights = c->options->weighted ? d->topk_weights : NULL,
                    .tokens = c->tokens,
                    .top_k = c->routing.top_k,
                    .row_bytes = c->row_bytes};
    return cuda_ok(kernel_sum_rows(&args, c->stream), "summing rows");
}

static bool combine(Baseline *b) {
    const Case *c = b->c;
    Packed out = {b->recv_rows, &b->plan.received}, in = {b->send_rows, &b->plan.sent};
    bool ok = cuda_ok(kernel_gather_rows(b->recv_rows, c->device->buffers.slots_in, b->d_recv_row,
                                         b->plan.received.total, c->row_bytes, c->stream),
                      "packing slots");
    return exchange(b, out, in, c->row_bytes) && ok && sum_rows(b);
}

/* ---- what crosses the network -------------------------------------------------------------- */

/* A row crosses the network once for each other node that needs it, to one rank there. */
typedef struct Network {
    Baseline *b;
    Traffic sent, received;
    char *send_rows, *recv_rows;
    int32_t *nodes; /* of each rank */
} Network;

static int64_t rows_for_node(const Network *net, int32_t node) {
    const Case *c = net->b->c;
    int top_k = c->routing.top_k;
    int64_t rows = 0;
    for (int64_t token = 0; token < c->tokens; token++) {
        bool needs = false;
        for (int k = 0; k < top_k && !needs; k++) {
            int32_t expert = baseline_expert_at(&net->b->plan, token * top_k + k);
            needs = expert >= 0 && net->nodes[routing_owner(&c->routing, expert)] == node;
        }
        rows += needs;
    }
    return rows;
}

static bool count_network(Network *net, const EpGroupInfo *info) {
    const BaselinePlan *plan = &net->b->plan;
    MPI_Allgather(&info->node, 1, MPI_INT32_T, net->nodes, 1, MPI_INT32_T, plan->comm);
    bool ok = true;
    for (int32_t node = 0; node < info->num_nodes; node++) {
        int32_t relay;
        if (node == info->node) continue;
        bool found = bench_ok(ep_group_relay(net->b->c->group, node, &relay), "ep_group_relay");
        if (found) net->sent.counts[relay] = (int)rows_for_node(net, node);
        ok = found && ok;
    }
    MPI_Alltoall(net->sent.counts, 1, MPI_INT, net->received.counts, 1, MPI_INT, plan->comm);
    baseline_finish_traffic(&net->sent, net->b->c->world->size);
    baseline_finish_traffic(&net->received, net->b->c->world->size);
    return ok;
}

static bool run_network(void *context, int which) {
    Network *net = context;
    (void)which;
    Packed out = {net->send_rows, &net->sent}, in = {net->recv_rows, &net->received};
    net->b->ok = exchange(net->b, out, in, net->b->c->row_bytes) && net->b->ok;
    return true;
}

static bool time_network(Network *net, const EpGroupInfo *info, BaselineResult *out) {
    Case *c = net->b->c;
    bool ok = count_network(net, info);
    net->b->ok = ok;
    net->send_rows = alloc(net->b, (size_t)net->sent.total, c->row_bytes);
    net->recv_rows = alloc(net->b, (size_t)net->received.total, c->row_bytes);
    out->network_bytes = net->sent.total * (int64_t)c->row_bytes;
    return world_all(c->world, net->b->ok) && world_max(c->world, &out->network_bytes, 1) &&
           device_time_calls(c, c->options->run.iterations, run_network, net, 1, &out->network,
                             NULL) &&
           world_all(c->world, net->b->ok);
}

static bool measure_network(Baseline *b, BaselineResult *out) {
    World *world = b->c->world;
    size_t ranks = (size_t)world->size;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    if (!world_all(world, bench_ok(ep_group_query(b->c->group, &info), "ep_group_query")))
        return false;
    if (info.num_nodes == 1) return true;
    int *numbers = bench_alloc(4 * ranks, sizeof(int), "the network's traffic");
    Network net = {.b = b, .nodes = bench_alloc(ranks, sizeof(int32_t), "nodes")};
    bool ok = world_all(world, numbers && net.nodes);
    if (ok) {
        net.sent = (Traffic){numbers, numbers + ranks, 0};
        net.received = (Traffic){numbers + 2 * ranks, numbers + 3 * ranks, 0};
        ok = time_network(&net, &info, out);
    }
    cudaFree(net.send_rows);
    cudaFree(net.recv_rows);
    free(numbers);
    free(net.nodes);
    return ok;
}

/* ---- the measurement ----------------------------------------------------------------------- */

/* b->ok keeps a failure until the end. */
static bool run(void *context, int which) {
    static bool (*const phases[NUM_BASELINE_PHASES])(Baseline *) = {prepare, dispatch, combine};
    Baseline *b = context;
    b->ok = phases[which](b) && b->ok;
    return true;
}

static bool measure(Baseline *b, Check *check, BaselineResult *out) {
    Case *c = b->c;
    const Options *o = c->options;
    bool ok =
        device_time_calls(c, o->run.iterations, run, b, NUM_BASELINE_PHASES, out->times, NULL);
    return world_all(c->world, ok && b->ok) &&
           world_all(c->world, !o->run.check || (baseline_check(c, check, run, b, out) && b->ok)) &&
           world_sum(c->world, out->wrong, NUM_BASELINE_PHASES) && measure_network(b, out);
}

bool baseline_measure_nccl(Case *c, Check *check, BaselineResult *out) {
    Baseline b = {.c = c};
    bool ok = world_all(c->world, alloc_all(&b));
    if (ok) {
        MPI_Comm_dup(MPI_COMM_WORLD, &b.plan.comm);
        ok = sends_open(c->world, &b.nccl) && measure(&b, check, out);
        nccl_close(&b.nccl.nccl);
        MPI_Comm_free(&b.plan.comm);
    }
    free_all(&b);
    return ok;
}

#endif
