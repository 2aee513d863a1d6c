/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/collectives.h"

#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "tools/bench/device.h"
#include "tools/common/data.h"
#include "tools/common/util.h"

const char *collective_name(Collective which) {
    static const char *const names[] = {"baseline_all_gather", "baseline_reduce_scatter"};
    return names[which];
}

static void row_bytes(const Case *c, size_t out[NUM_GATHERED]) {
    const size_t top_k = (size_t)c->options->top_k;
    out[0] = c->row_bytes;
    out[1] = top_k * ep_type_bytes((EpType)c->options->index_type);
    out[2] = c->options->weighted ? top_k * sizeof(float) : 0;
}

int64_t collectives_bytes(const Case *c, Collective which, bool remote) {
    size_t bytes[NUM_GATHERED];
    row_bytes(c, bytes);
    int64_t row = (int64_t)(which == ALL_GATHER ? bytes[0] + bytes[1] + bytes[2] : bytes[0]);
    return c->routing.max_tokens * row * (remote ? c->world->size - 1 : 1);
}

/* ---- inputs -------------------------------------------------------------------------------- */

/* The sum of this rank's slots of one token, in ascending k, as an engine computes it before it
 * combines. Returns false if there is none. */
static bool sum_slots(const Case *c, int rank, int64_t token, float *total) {
    const int32_t *experts = routing_row(&c->routing, rank, token);
    const int64_t first = (c->routing.first[rank] + token) * c->routing.top_k;
    bool any = false;
    memset(total, 0, (size_t)c->options->hidden * sizeof(float));
    for (int k = 0; k < c->routing.top_k; k++) {
        int32_t row = c->slots.row_of[first + k];
        if (row < 0 || routing_owner(&c->routing, experts[k]) != c->world->rank) continue;
        if (any && slots_has_rows(c->slots.layout)) break; /* one row stands for all */
        data_fma_row((EpType)c->options->type, total,
                     c->options->weighted ? c->buffers.slot_weights[row] : 1.0f,
                     c->buffers.slots_in + (size_t)row * c->row_bytes, c->options->hidden);
        any = true;
    }
    return any;
}

static void fill_sums(Collectives *l, float *total) {
    const Case *c = l->c;
    for (int r = 0; r < c->world->size; r++)
        for (int64_t t = 0; t < c->routing.tokens[r]; t++)
            if (sum_slots(c, r, t, total))
                data_from_float((EpType)c->options->type, total,
                                l->host.sums + (size_t)(r * l->most + t) * c->row_bytes,
                                c->options->hidden);
}

static bool fill(Collectives *l) {
    const Case *c = l->c;
    const void *const from[] = {c->buffers.tokens_in, c->buffers.index, c->buffers.topk_weights};
    float *total = pool_alloc(&l->pool, (size_t)c->options->hidden, sizeof(float), "a sum");
    if (!total) return false;
    for (int i = 0; i < NUM_GATHERED; i++)
        memcpy(l->host.send[i], from[i], (size_t)c->tokens * l->bytes[i]);
    fill_sums(l, total);
    return true;
}

static bool alloc_host(Collectives *l) {
    const size_t most = (size_t)l->most, all = most * (size_t)l->c->world->size;
    for (int i = 0; i < NUM_GATHERED; i++) {
        l->host.send[i] = pool_alloc(&l->pool, most, l->bytes[i], "baseline");
        l->host.recv[i] = pool_alloc(&l->pool, all, l->bytes[i], "baseline");
    }
    l->host.sums = pool_alloc(&l->pool, all, l->c->row_bytes, "baseline");
    l->host.out = pool_alloc(&l->pool, most, l->c->row_bytes, "baseline");
    return !l->pool.failed;
}

/* ---- MPI ----------------------------------------------------------------------------------- */

typedef struct Mpi {
    MPI_Comm comm;
    MPI_Datatype row[NUM_GATHERED];
    MPI_Datatype element; /* of the sums */
    MPI_Op sum;           /* MPI has no sums of bf16 and fp16 */
} Mpi;

/* Elements summed at a time. */
enum { BLOCK = 1024 };

static void add_halves(EpType type, const void *in, void *out, int count) {
    float total[BLOCK];
    for (int at = 0; at < count; at += BLOCK) {
        const int n = count - at < BLOCK ? count - at : BLOCK;
        uint16_t *to = (uint16_t *)out + at;
        data_to_float(type, to, total, n);
        data_fma_row(type, total, 1.0f, (const uint16_t *)in + at, n);
        data_from_float(type, total, to, n);
    }
}

static void add_bf16(void *in, void *out, int *count, MPI_Datatype *type) {
    (void)type;
    add_halves(EP_TYPE_BF16, in, out, *count);
}

static void add_fp16(void *in, void *out, int *count, MPI_Datatype *type) {
    (void)type;
    add_halves(EP_TYPE_FP16, in, out, *count);
}

static bool open_mpi(Collectives *l) {
    const int64_t type = l->c->options->type;
    Mpi *mpi = pool_alloc(&l->pool, 1, sizeof(Mpi), "baseline");
    if (!world_all(l->c->world, mpi != NULL)) return false;
    l->library = mpi;
    l->work = l->host;
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi->comm);
    for (int i = 0; i < NUM_GATHERED; i++) {
        MPI_Type_contiguous((int)l->bytes[i], MPI_BYTE, &mpi->row[i]);
        MPI_Type_commit(&mpi->row[i]);
    }
    mpi->element = type == EP_TYPE_FP32 ? MPI_FLOAT : MPI_UINT16_T;
    if (type == EP_TYPE_FP32)
        mpi->sum = MPI_SUM;
    else
        MPI_Op_create(type == EP_TYPE_BF16 ? add_bf16 : add_fp16, 1, &mpi->sum);
    return true;
}

static void close_mpi(Mpi *mpi) {
    if (mpi->sum != MPI_SUM) MPI_Op_free(&mpi->sum);
    for (int i = 0; i < NUM_GATHERED; i++)
        MPI_Type_free(&mpi->row[i]);
    MPI_Comm_free(&mpi->comm);
}

static bool run_mpi(const Collectives *l, Collective which) {
    const Mpi *mpi = l->library;
    const CollectiveBuffers *b = &l->work;
    const int most = (int)l->most;
    if (which == REDUCE_SCATTER) {
        MPI_Reduce_scatter_block(b->sums, b->out, most * (int)l->c->options->hidden, mpi->element,
                                 mpi->sum, mpi->comm);
        return true;
    }
    for (int i = 0; i < NUM_GATHERED; i++)
        if (l->bytes[i])
            MPI_Allgather(b->send[i], most, mpi->row[i], b->recv[i], most, mpi->row[i], mpi->comm);
    return true;
}

/* ---- both ---------------------------------------------------------------------------------- */

bool collectives_run(void *context, int which) {
    Collectives *l = context;
    bool ok =
        l->c->device ? collectives_run_nccl(l, (Collective)which) : run_mpi(l, (Collective)which);
    l->ok = ok && l->ok;
    return true;
}

bool collectives_open(Case *c, Collectives *out) {
    *out = (Collectives){.c = c, .most = c->routing.max_tokens, .ok = true};
    row_bytes(c, out->bytes);
    return world_all(c->world, alloc_host(out) && fill(out)) &&
           (c->device ? collectives_open_nccl(out) : open_mpi(out));
}

void collectives_close(Collectives *l) {
    if (l->library && l->c->device)
        collectives_close_nccl(l);
    else if (l->library)
        close_mpi(l->library);
    pool_free(&l->pool);
}

/* ---- the check ----------------------------------------------------------------------------- */

/* All rows of all ranks, byte by byte. What pads a rank's rows is anything. */
static void check_gather(const Collectives *l, Check *check) {
    const Case *c = l->c;
    const int top_k = c->routing.top_k;
    check->phase = "baseline all-gather";
    for (int r = 0; r < c->world->size; r++)
        for (int64_t t = 0; t < c->routing.tokens[r]; t++) {
            const int64_t row = r * l->most + t;
            const char *indices = l->host.recv[1] + (size_t)row * l->bytes[1];
            data_row((EpType)c->options->type, case_token_id(c, r, t), check->row, c->row_bytes);
            check_bytes(check, "tokens", row, l->host.recv[0] + (size_t)row * c->row_bytes,
                        check->row, c->row_bytes, check_unit(check));
            for (int k = 0; k < top_k; k++) {
                const int64_t want = routing_row(&c->routing, r, t)[k];
                const int32_t narrow = (int32_t)want;
                const size_t bytes = l->bytes[1] / (size_t)top_k;
                check_bytes(check, "topk_idx", row, indices + (size_t)k * bytes,
                            bytes == sizeof(want) ? (const void *)&want : &narrow, bytes, bytes);
                if (l->bytes[2])
                    check_float(check, "topk_weights", row,
                                (const float *)(const void *)l->host.recv[2] + row * top_k + k,
                                case_topk_weight(c, r, t, k));
            }
        }
}

/* Nothing has written the outputs yet: they are zeros. */
static bool check_once(Collectives *l, Check *check, CollectivesResult *out) {
    const int64_t before = check->wrong;
    for (int which = 0; which < NUM_COLLECTIVES; which++)
        collectives_run(l, which);
    if (l->c->device && !collectives_fetch(l)) return false;
    check_gather(l, check);
    out->wrong[ALL_GATHER] = check->wrong - before;
    check_near_sums(check, "baseline reduce-scatter", l->host.out);
    out->wrong[REDUCE_SCATTER] = check->wrong - before - out->wrong[ALL_GATHER];
    return l->ok;
}

/* ---- the measurement ----------------------------------------------------------------------- */

static bool time_both(Collectives *l, Quantiles *times) {
    Case *c = l->c;
    const Options *o = c->options;
    const int64_t n = o->run.iterations;
    if (o->graphs) return device_time_graphs(c, collectives_run, l, NUM_COLLECTIVES, times);
    return c->device
               ? device_time_calls(c, n, collectives_run, l, NUM_COLLECTIVES, times, NULL)
               : time_calls(c->world, o->run.warmup, n, collectives_run, l, NUM_COLLECTIVES, times);
}

bool collectives_measure(Collectives *l, Check *check, CollectivesResult *out) {
    World *world = l->c->world;
    *out = (CollectivesResult){0};
    return world_all(world, !l->c->options->run.check || check_once(l, check, out)) &&
           time_both(l, out->times) && world_all(world, l->ok) &&
           world_sum(world, out->wrong, NUM_COLLECTIVES);
}
