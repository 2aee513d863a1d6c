/* SPDX-License-Identifier: Apache-2.0 */

/**
 * The baseline on GPUs: rows packed per slot by a kernel, sent and received with NCCL in one group,
 * unpacked into aligned slabs by another; and back, summed by the token's rank.
 */

#if EP_WITH_CUDA

#include <stdlib.h>

#include "bench_baseline_plan.h"
#include "bench_cuda.h"
#include "bench_error.h"
#include "bench_kernels.h"
#include "bench_nccl.h"

/* ---- the baseline's memory ----------------------------------------------------------------- */

typedef struct Baseline {
    Case *c;
    Nccl nccl;
    BaselinePlan plan;
    int32_t *padding; /* rows of padding, on the host; as many as the receive buffer has */
    int64_t num_padding;
    /* in device memory */
    int32_t *d_send_token, *d_recv_row, *d_entry_at, *d_padding;
    char *send_rows, *recv_rows, *send_scales, *recv_scales, *send_weights, *recv_weights;
    bool ok; /* a failed rank goes on taking part: the others are inside NCCL */
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
    b->padding = bench_alloc(rows, sizeof(int32_t), "baseline");
    b->ok = baseline_plan_alloc(c, &b->plan) && b->padding;
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
    baseline_plan_free(&b->plan);
    free(b->padding);
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
    const Nccl *n = &b->nccl;
    size_t sends = (size_t)out.traffic->counts[peer] * bytes;
    size_t receives = (size_t)in.traffic->counts[peer] * bytes;
    const char *from = out.rows + (size_t)out.traffic->offsets[peer] * bytes;
    char *to = in.rows + (size_t)in.traffic->offsets[peer] * bytes;
    cudaStream_t stream = b->c->stream;
    return (!sends ||
            nccl_ok(n, n->send(from, sends, ncclUint8, peer, n->comm, stream), "ncclSend")) &&
           (!receives ||
            nccl_ok(n, n->recv(to, receives, ncclUint8, peer, n->comm, stream), "ncclRecv"));
}

static bool exchange(const Baseline *b, Packed out, Packed in, size_t bytes) {
    const Nccl *n = &b->nccl;
    bool ok = nccl_ok(n, n->group_start(), "ncclGroupStart");
    for (int peer = 0; ok && peer < b->c->world->size; peer++)
        ok = exchange_with(b, out, in, bytes, peer);
    return nccl_ok(n, n->group_end(), "ncclGroupEnd") && ok;
}

/* One thing that travels with a slot. */
typedef struct Cargo {
    const void *from;
    char *packed, *received;
    void *to;
    size_t bytes;   /* for each slot */
    bool per_entry; /* there is one for each entry, else for each token */
} Cargo;

enum { MAX_CARGO = 3 };

static int list_cargo(const Baseline *b, Cargo *out) {
    const Case *c = b->c;
    const Buffers *d = &c->device->buffers;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    int n = 0;
    out[n++] = (Cargo){d->tokens_in, b->send_rows, b->recv_rows, d->slots_out, c->row_bytes, false};
    if (c->options->weighted)
        out[n++] = (Cargo){d->topk_weights, b->send_weights, b->recv_weights,
                           d->recv_weights, sizeof(float),   true};
    if (scale_bytes)
        out[n++] =
            (Cargo){d->scales, b->send_scales, b->recv_scales, d->recv_scales, scale_bytes, false};
    return n;
}

static bool pack(const Baseline *b, const Cargo *cargo) {
    const Case *c = b->c;
    int64_t entries = c->tokens * c->routing.top_k;
    cudaError_t status = cargo->per_entry
                             ? kernel_scatter_rows(cargo->packed, cargo->from, b->d_entry_at,
                                                   entries, cargo->bytes, c->stream)
                             : kernel_gather_rows(cargo->packed, cargo->from, b->d_send_token,
                                                  b->plan.sent.total, cargo->bytes, c->stream);
    return cuda_ok(status, "packing rows");
}

/* Received rows to their slots, zeros between the slabs. */
static bool unpack(const Baseline *b, const Cargo *cargo) {
    cudaStream_t stream = b->c->stream;
    return cuda_ok(kernel_scatter_rows(cargo->to, cargo->received, b->d_recv_row,
                                       b->plan.received.total, cargo->bytes, stream),
                   "unpacking rows") &&
           cuda_ok(kernel_scatter_rows(cargo->to, NULL, b->d_padding, b->num_padding, cargo->bytes,
                                       stream),
                   "zeroing the padding");
}

/* Groups nest: all that travels goes in one. */
static bool dispatch(Baseline *b) {
    const Nccl *n = &b->nccl;
    Cargo cargo[MAX_CARGO];
    int count = list_cargo(b, cargo);
    bool ok = true;
    for (int i = 0; i < count; i++)
        ok = pack(b, &cargo[i]) && ok;
    ok = nccl_ok(n, n->group_start(), "ncclGroupStart") && ok;
    for (int i = 0; i < count; i++) {
        Packed out = {cargo[i].packed, &b->plan.sent}, in = {cargo[i].received, &b->plan.received};
        ok = exchange(b, out, in, cargo[i].bytes) && ok;
    }
    ok = nccl_ok(n, n->group_end(), "ncclGroupEnd") && ok;
    for (int i = 0; i < count; i++)
        ok = unpack(b, &cargo[i]) && ok;
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

/* ---- the measurement ----------------------------------------------------------------------- */

/* Whatever fails is told at the end. */
static bool run(void *context, int which) {
    static bool (*const phases[NUM_BASELINE_PHASES])(Baseline *) = {prepare, dispatch, combine};
    Baseline *b = context;
    b->ok = phases[which](b) && b->ok;
    return true;
}

/* Once more on poisoned buffers. */
static bool check_results(Baseline *b, Check *check, BaselineResult *out) {
    Case *c = b->c;
    bool ok = device_poison(c, PHASE_DISPATCH) && device_poison(c, PHASE_COMBINE);
    int64_t before = check->wrong;
    for (int which = 0; which < NUM_BASELINE_PHASES; which++)
        run(b, which);
    ok = device_fetch(c, PHASE_DISPATCH) && device_fetch(c, PHASE_COMBINE) && ok && b->ok;
    if (!ok) return false;
    check_baseline_dispatch(check);
    out->wrong[BASELINE_DISPATCH] = check->wrong - before;
    check_baseline_combine(check);
    out->wrong[BASELINE_COMBINE] = check->wrong - before - out->wrong[BASELINE_DISPATCH];
    return true;
}

static bool measure(Baseline *b, Check *check, BaselineResult *out) {
    Case *c = b->c;
    const Options *o = c->options;
    bool ok = device_time_calls(c, o->iterations, run, b, NUM_BASELINE_PHASES, out->times, NULL);
    return world_all(c->world, ok && b->ok) &&
           world_all(c->world, !o->check || check_results(b, check, out)) &&
           world_sum(c->world, out->wrong, NUM_BASELINE_PHASES);
}

bool nccl_measure(Case *c, Check *check, BaselineResult *out) {
    Baseline b = {.c = c};
    bool ok = world_all(c->world, alloc_all(&b));
    if (ok) {
        MPI_Comm_dup(MPI_COMM_WORLD, &b.plan.comm);
        ok = nccl_open(c->world, &b.nccl) && measure(&b, check, out);
        nccl_close(&b.nccl);
        MPI_Comm_free(&b.plan.comm);
    }
    free_all(&b);
    return ok;
}

#endif
