/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/data.h"
#include "tools/tune/tune.h"

/* Large rows, small rows of many experts, one expert, and many experts: what divides work most
 * differently among the models of tools/models.txt. */
const Shape tune_shapes[NUM_SHAPES] = {{7168, 8}, {2048, 10}, {5120, 1}, {4096, 22}};

enum { EXPERTS = 256, WIDEST = 7168, MOST_TOP_K = 22, FEW_TOKENS = 128 };

/* ---- buffers ------------------------------------------------------------------------------- */

static void *device_memory(TuneRank *r, int64_t bytes) {
    void *memory = NULL;
    if (!cuda_ok(cudaMalloc(&memory, (size_t)bytes), "cudaMalloc")) return NULL;
    r->blocks[r->num_blocks++] = memory;
    return cuda_ok(cudaMemset(memory, 0, (size_t)bytes), "cudaMemset") ? memory : NULL;
}

/* Uniform routing: the first experts of a shuffled list, a new one for each token. */
static bool route(TuneRank *r, int shape) {
    const int64_t k = tune_shapes[shape].top_k, tokens = r->o->tokens;
    size_t bytes = (size_t)(tokens * k) * sizeof(int32_t);
    int32_t order[EXPERTS], *idx = bench_alloc((size_t)(tokens * k), sizeof(int32_t), "a routing");
    uint64_t hash = hash_add((uint64_t)r->o->run.seed, shape * 4096 + r->world->rank);
    if (!idx || !(r->topk_idx[shape] = device_memory(r, (int64_t)bytes))) {
        free(idx);
        return false;
    }
    for (int e = 0; e < EXPERTS; e++)
        order[e] = e;
    for (int64_t i = 0; i < tokens * k; i++) {
        int at = (int)(i % k);
        hash = hash_word(hash);
        int other = at + (int)(hash % (uint64_t)(EXPERTS - at));
        int32_t taken = order[other];
        order[other] = order[at], order[at] = taken;
        idx[i] = taken;
    }
    bool ok = cuda_ok(cudaMemcpy(r->topk_idx[shape], idx, bytes, cudaMemcpyHostToDevice), "copy");
    free(idx);
    return ok;
}

/* Bytes of the receive rows of a shape, with room for an uneven routing. */
static int64_t room_bytes(const TuneRank *r) {
    int64_t most = 0;
    for (int s = 0; s < NUM_SHAPES; s++) {
        int64_t rows = r->o->tokens * tune_shapes[s].top_k;
        int64_t bytes = (rows * 5 / 4 + 4096) * tune_shapes[s].hidden * 2;
        most = bytes > most ? bytes : most;
    }
    return most;
}

static bool allocate(TuneRank *r) {
    const int64_t t = r->o->tokens, slots = t * MOST_TOP_K * 5 / 4 + 4096;
    r->few_tokens = t < FEW_TOKENS ? t : FEW_TOKENS;
    for (int s = 0; s < NUM_SHAPES; s++)
        if (!route(r, s)) return false;
    return (r->slot_weights = device_memory(r, slots * 4)) &&
           (r->slot_grads = device_memory(r, slots * 4)) &&
           (r->tokens = device_memory(r, t * WIDEST * 2)) &&
           (r->out = device_memory(r, t * WIDEST * 2)) &&
           (r->rows = device_memory(r, room_bytes(r))) &&
           (r->staged = device_memory(r, room_bytes(r)));
}

/* Few multiprocessors, some, and all. */
static void list_budgets(TuneRank *r) {
    const int wanted[] = {8, 24, 48, 64, 96};
    for (int i = 0; i < 5; i++)
        if (wanted[i] < r->sms) r->budgets[r->num_budgets++] = wanted[i];
    r->budgets[r->num_budgets++] = r->sms;
}

bool tune_open(TuneRank *r) {
    bool ok = gpu_select(r->world) && gpu_multiprocessors(&r->sms);
    if (ok) list_budgets(r);
    ok = ok && cuda_ok(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking), "a stream") &&
         cuda_ok(cudaEventCreate(&r->begin), "an event") &&
         cuda_ok(cudaEventCreate(&r->end), "an event") && allocate(r);
    return world_all(r->world, ok);
}

void tune_close(TuneRank *r) {
    for (int i = 0; i < r->num_blocks; i++)
        cudaFree(r->blocks[i]);
    if (r->begin) cudaEventDestroy(r->begin);
    if (r->end) cudaEventDestroy(r->end);
    if (r->stream) cudaStreamDestroy(r->stream);
}

/* ---- calls --------------------------------------------------------------------------------- */

static EpTensor matrix(void *data, int64_t rows, int64_t columns) {
    return ep_tensor_2d(data, EP_TYPE_BF16, rows, columns);
}

static bool call(Trial *t, const Cell *cell) {
    TuneRank *r = t->r;
    const TrialGroup *g = &t->of[cell->latency];
    const Shape *shape = &tune_shapes[cell->shape];
    EpHandle *handle = g->handles[cell->shape][cell->budget];
    int64_t rows = g->recv_rows[cell->shape];
    EpTensor tokens = matrix(r->tokens, g->tokens, shape->hidden);
    EpTensor out = matrix(r->out, g->tokens, shape->hidden);
    EpTensor received = matrix(cell->staged ? r->staged : g->received, rows, shape->hidden);
    EpTensor expert_out = matrix(r->rows, rows, shape->hidden);
    EpTensor weights = ep_tensor_1d(r->slot_weights, EP_TYPE_FP32, rows);
    EpTensor grads = ep_tensor_1d(r->slot_grads, EP_TYPE_FP32, rows);
    if (cell->call == CELL_DISPATCH)
        return bench_ok(ep_dispatch(handle, NULL, NULL, &tokens, NULL, NULL, r->stream, &received,
                                    NULL, NULL, NULL),
                        "ep_dispatch");
    if (cell->call == CELL_COMBINE)
        return bench_ok(ep_combine(handle, NULL, &expert_out, NULL, NULL, r->stream, &out),
                        "ep_combine");
    return bench_ok(ep_combine_backward(handle, NULL, &tokens, &weights, &expert_out, r->stream,
                                        &received, &grads),
                    "ep_combine_backward");
}

/* ---- groups -------------------------------------------------------------------------------- */

/* Create a handle and its plan, which in latency mode a dispatch makes. */
static bool open_handle(Trial *t, const Cell *cell) {
    TuneRank *r = t->r;
    TrialGroup *g = &t->of[cell->latency];
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpHandle **handle = &g->handles[cell->shape][cell->budget];
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    config.num_sms = r->budgets[cell->budget];
    EpTensor idx = ep_tensor_2d(r->topk_idx[cell->shape], EP_TYPE_INT32, g->tokens,
                                tune_shapes[cell->shape].top_k);
    bool ok = bench_ok(ep_handle_create(g->group, &config, handle), "ep_handle_create") &&
              bench_ok(ep_prepare(*handle, NULL, &idx, NULL, r->stream, NULL), "ep_prepare");
    if (cell->latency) {
        Cell dispatch = *cell;
        dispatch.call = CELL_DISPATCH;
        return ok && call(t, &dispatch);
    }
    if (!ok) return false;
    ok = cuda_ok(cudaStreamSynchronize(r->stream), "cudaStreamSynchronize") &&
         bench_ok(ep_handle_info(*handle, &info), "ep_handle_info");
    g->recv_rows[cell->shape] = info.recv_rows;
    return ok && (info.recv_rows * tune_shapes[cell->shape].hidden * 2 <= room_bytes(r) ||
                  bench_fail("the routing is too uneven for the receive buffer"));
}

/* All handles of latency mode have the worst case's rows of a token with the most experts. */
static bool open_group(Trial *t, bool latency, bool *refused) {
    TuneRank *r = t->r;
    TrialGroup *g = &t->of[latency];
    int64_t rows = 0, most = room_bytes(r) / (WIDEST * 2);
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    g->tokens = latency ? r->few_tokens : r->o->tokens;
    config.num_experts = EXPERTS;
    config.max_tokens = (int32_t)g->tokens, config.max_top_k = MOST_TOP_K;
    config.max_row_bytes = WIDEST * 2, config.alignment = 1;
    config.backend = EP_BACKEND_CUDA;
    if (latency) {
        config.mode = EP_MODE_LATENCY, config.latency_sets = 1;
        if (!bench_ok(ep_max_recv_rows(&config, r->world->size, r->world->rank,
                                       EP_LAYOUT_EXPERT_MAJOR, 0, &rows),
                      "ep_max_recv_rows"))
            return false;
        config.max_recv_rows = rows < most ? rows : most, config.overflow = EP_OVERFLOW_DROP;
        for (int s = 0; s < NUM_SHAPES; s++)
            g->recv_rows[s] = config.max_recv_rows;
    }
    EpStatus status = ep_group_create(&r->world->boot, &config, &g->group);
    *refused = *refused || status == EP_ERR_SETTING;
    return bench_ok(status, "ep_group_create") &&
           bench_ok(ep_mem_alloc(g->group, (size_t)room_bytes(r), &g->received), "ep_mem_alloc");
}

/* Name the table to the library. Each process has a file of its own; ranks that are threads share
 * the environment, so one of them sets it while the others wait. The name stays, since threads of
 * NCCL may read the environment: only the first table sets it. The file goes once it is read. */
static bool name_table(TuneRank *r, const Table *table, char *path, size_t bytes) {
    World *world = r->world;
    bool mine = !world->threads || world->rank == 0, ok = true;
    snprintf(path, bytes, "%s.%d.tmp", r->o->output, world->threads ? 0 : world->rank);
    if (mine) {
        const char *named = getenv("LIBEP_TUNING");
        ok = table_write(table, path) &&
             ((named && strcmp(named, path) == 0) || setenv("LIBEP_TUNING", path, 1) == 0);
    }
    return world_all(world, ok);
}

bool trial_open(TuneRank *r, const Table *table, const Cell *cells, int count, bool *refused,
                Trial *out) {
    char path[4096] = "";
    *out = (Trial){.r = r};
    *refused = false;
    if (table && !name_table(r, table, path, sizeof(path))) return false;
    bool ok = true;
    for (int i = 0; ok && i < count; i++) {
        TrialGroup *g = &out->of[cells[i].latency];
        if (!g->group) ok = open_group(out, cells[i].latency, refused);
        if (ok && !g->handles[cells[i].shape][cells[i].budget]) ok = open_handle(out, &cells[i]);
    }
    if (path[0]) unlink(path);
    if (world_all(r->world, ok)) return true;
    trial_close(out);
    return false;
}

void trial_close(Trial *t) {
    for (int i = 0; i < 2; i++) {
        if (t->of[i].group) ep_group_destroy(t->of[i].group);
        t->of[i].group = NULL;
    }
}

/* ---- times --------------------------------------------------------------------------------- */

/* Time a chain of calls on this rank, a longer one in latency mode, whose calls are short, in
 * microseconds for each. The first one is not timed: there the ranks meet. */
static bool time_chain_of(Trial *t, const Cell *cell, double *us) {
    TuneRank *r = t->r;
    const int64_t length = r->o->chain * (cell->latency ? r->o->chain : 1);
    float ms = 0;
    bool ok = call(t, cell) && cuda_ok(cudaEventRecord(r->begin, r->stream), "cudaEventRecord");
    for (int64_t i = 0; ok && i < length; i++)
        ok = call(t, cell);
    ok = ok && cuda_ok(cudaEventRecord(r->end, r->stream), "cudaEventRecord") &&
         cuda_ok(cudaStreamSynchronize(r->stream), "cudaStreamSynchronize") &&
         bench_ok(ep_group_status(t->of[cell->latency].group, NULL), "ep_group_status") &&
         cuda_ok(cudaEventElapsedTime(&ms, r->begin, r->end), "cudaEventElapsedTime");
    *us = (double)ms * 1e3 / (double)length;
    return ok;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { TURNS = 3 };

/* The trials take turns, so that a drift of the GPUs' clocks meets both. Of each the median of the
 * slowest ranks' times counts. */
bool trial_compare(Trial *first, Trial *second, const Cell *cells, int count, double *ratios,
                   double *us) {
    World *world = first->r->world;
    for (int c = 0; c < count; c++) {
        double times[2][TURNS];
        bool ok = true;
        for (int turn = 0; ok && turn < TURNS; turn++)
            ok = time_chain_of(first, &cells[c], &times[0][turn]) &&
                 time_chain_of(second, &cells[c], &times[1][turn]);
        if (!world_all(world, ok) || !world_max_double(world, &times[0][0], 2 * TURNS))
            return false;
        for (int i = 0; i < 2; i++)
            qsort(times[i], TURNS, sizeof(double), ascending);
        double a = times[0][TURNS / 2], b = times[1][TURNS / 2];
        ratios[c] = a > 0 && b > 0 ? b / a : 1;
        if (us) us[c] = b;
    }
    return true;
}
