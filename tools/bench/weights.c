/* SPDX-License-Identifier: Apache-2.0 */

/**
 * --case weights: sharded weights on GPUs, and NCCL's own collectives of the same bytes. A weight
 * [experts, hidden, ffn] of bf16 is sharded over all ranks. Ratios are to NCCL's collective of
 * bf16, and of quantised rows to a copy of as many bytes.
 */

#if EP_WITH_CUDA

#include <stdio.h>
#include <stdlib.h>

#include "ep/ep_weight.h"
#include "tools/bench/device.h"
#include "tools/bench/lines.h"
#include "tools/bench/nccl.h"

enum { QUANTISED_ROWS = 65536 };

typedef struct Weights {
    Case c; /* its stream and clock alone */
    Lines lines;
    Nccl nccl;
    __typeof__(&ncclAllGather) all_gather;
    __typeof__(&ncclReduceScatter) reduce_scatter;
    EpMesh mesh;
    EpMeshComm *comm;
    EpWeight *rows, *last; /* sharded along [experts, hidden], and along [experts, ffn] */
    EpGroup *group;
    char *shard, *full, *scales, *workspace;
    int32_t *from, *to; /* [experts] maps of moves */
    double base_us;
    int64_t elements;      /* of the whole weight */
    int64_t num_rows, row; /* that are quantised, and their elements */
} Weights;

/* ---- what is timed ------------------------------------------------------------------------- */

/** A line: calls of one kind. */
typedef struct Call {
    const char *name;
    bool (*run)(Weights *w, const struct Call *call);
    bool base; /* the next lines are compared with it */
    bool last; /* the weight that is sharded along its last dimension */
    EpQuant quant;
    EpBlocks blocks;
    int transposed, by_rank;
    EpType type; /* of reduced gradients */
} Call;

static bool nccl_gather(Weights *w, const Call *call) {
    (void)call;
    const size_t bytes = (size_t)(w->elements / w->c.world->size) * 2;
    return nccl_ok(&w->nccl,
                   w->all_gather(w->shard, w->full, bytes, ncclUint8, w->nccl.comm, w->c.stream),
                   "ncclAllGather");
}

static bool gather(Weights *w, const Call *call) {
    EpWeight *weight = call->last ? w->last : w->rows;
    EpWeightForm form = EP_WEIGHT_FORM_INIT;
    EpWeightSizes z = EP_WEIGHT_SIZES_INIT;
    EpSharding s = EP_SHARDING_INIT;
    form.quant = call->quant ? call->quant : EP_QUANT_NONE;
    form.blocks = call->blocks ? call->blocks : form.blocks;
    form.transposed = call->transposed, form.by_rank = call->by_rank;
    if (!bench_ok(ep_weight_sharding(weight, &s), "ep_weight_sharding") ||
        !bench_ok(ep_weight_sizes(weight, &form, &z), "ep_weight_sizes"))
        return false;
    EpTensor shard = ep_tensor_3d(w->shard, EP_TYPE_BF16, s.stored[0], s.stored[1], s.stored[2]);
    EpTensor out = ep_tensor_3d(w->full, z.type, z.shape[0], z.shape[1], z.shape[2]);
    EpTensor scales =
        ep_tensor_3d(w->scales, z.scale_type, z.scale_shape[0], z.scale_shape[1], z.scale_shape[2]);
    EpTensor space = ep_tensor_1d(w->workspace, EP_TYPE_UINT8, z.gather_workspace);
    return bench_ok(ep_weight_gather(weight, &form, &shard, z.gather_workspace ? &space : NULL,
                                     w->c.stream, &out,
                                     form.quant != EP_QUANT_NONE ? &scales : NULL),
                    "ep_weight_gather");
}

/* NCCL's sums have the type of what is added: for sums in fp32 it moves fp32. */
static bool nccl_reduce(Weights *w, const Call *call) {
    const bool wide = call->type == EP_TYPE_FP32;
    return nccl_ok(&w->nccl,
                   w->reduce_scatter(wide ? w->workspace : w->full, w->shard,
                                     (size_t)(w->elements / w->c.world->size),
                                     wide ? ncclFloat32 : ncclBfloat16, ncclSum, w->nccl.comm,
                                     w->c.stream),
                   "ncclReduceScatter");
}

static bool make_weight(Weights *w, const char *spec, EpType reduced, EpWeight **out) {
    const Options *o = w->c.options;
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    config.name = spec, config.reduced_type = reduced;
    config.shape[0] = o->experts, config.shape[1] = o->hidden, config.shape[2] = o->ffn;
    return bench_ok(ep_spec_parse(&w->mesh, spec, &config.spec), "ep_spec_parse") &&
           bench_ok(ep_weight_create(w->comm, &config, out), "ep_weight_create");
}

static bool reduce(Weights *w, const Call *call) {
    EpWeight *weight = call->last ? w->last : w->rows;
    EpWeightSizes z = EP_WEIGHT_SIZES_INIT;
    EpSharding s = EP_SHARDING_INIT;
    if (!bench_ok(ep_weight_sharding(weight, &s), "ep_weight_sharding") ||
        !bench_ok(ep_weight_sizes(weight, NULL, &z), "ep_weight_sizes"))
        return false;
    EpTensor grad = ep_tensor_3d(w->full, EP_TYPE_BF16, s.used[0], s.used[1], s.used[2]);
    EpTensor out = ep_tensor_3d(w->shard, call->type, s.stored[0], s.stored[1], s.stored[2]);
    EpTensor space = ep_tensor_1d(w->workspace, EP_TYPE_UINT8, z.reduce_workspace);
    return bench_ok(
        ep_weight_reduce(weight, &grad, 0, z.reduce_workspace ? &space : NULL, w->c.stream, &out),
        "ep_weight_reduce");
}

/* A copy reads and writes 3/2 bytes for each of the 3 that quantising moves. */
static bool copy(Weights *w, const Call *call) {
    (void)call;
    return cuda_ok(cudaMemcpyAsync(w->full, w->shard, (size_t)(w->num_rows * w->row * 3 / 2),
                                   cudaMemcpyDeviceToDevice, w->c.stream),
                   "cudaMemcpyAsync");
}

static bool quantise(Weights *w, const Call *call) {
    const bool tiles = call->blocks == EP_BLOCKS_TILES;
    const int64_t n = w->num_rows, h = w->row;
    EpRowsForm form = EP_ROWS_FORM_INIT;
    if (call->blocks) form.blocks = call->blocks;
    form.transposed = call->transposed;
    EpTensor rows = ep_tensor_2d(w->shard, EP_TYPE_BF16, n, h);
    EpTensor out = call->transposed ? ep_tensor_2d(w->full, EP_TYPE_FP8_E4M3, h, n)
                                    : ep_tensor_2d(w->full, EP_TYPE_FP8_E4M3, n, h);
    EpTensor scales = call->transposed ? ep_tensor_2d(w->scales, EP_TYPE_FP32, h, n / 128)
                                       : ep_tensor_2d(w->scales, EP_TYPE_FP32, tiles ? n / 128 : n,
                                                      (h + 127) / 128);
    return bench_ok(ep_quantise_rows(w->group, &form, &rows, NULL, w->c.stream, &out, &scales),
                    "ep_quantise_rows");
}

#define SLOT_BYTES ((int64_t)4 << 20)

/* Experts go to the next rank: all bytes cross. Maps and workspace are equal on all ranks. */
static bool move(Weights *w, const Call *call) {
    const Options *o = w->c.options;
    const int64_t places = o->experts, size = w->c.world->size, most = (places + size - 1) / size;
    const int64_t row = (o->hidden * o->ffn * 2 + 63) / 64 * 64;
    int32_t first, local;
    if (!bench_ok(ep_expert_range((int32_t)places, (int32_t)size, w->c.world->rank, &first, &local),
                  "ep_expert_range"))
        return false;
    for (int64_t p = 0; p < places; p++)
        w->from[p] = (int32_t)p, w->to[p] = (int32_t)((p + most) % places);
    EpTensor rows = ep_tensor_3d(w->shard, EP_TYPE_BF16, local, o->hidden, o->ffn), out = rows;
    EpTensor space = ep_tensor_1d(w->workspace, EP_TYPE_UINT8,
                                  most * (row < SLOT_BYTES ? row : SLOT_BYTES));
    out.data = w->full;
    return bench_ok(ep_weight_move(w->group, w->from, w->to, &rows, 1, call->base ? NULL : &space,
                                   w->c.stream, call->base ? &out : NULL),
                    "ep_weight_move");
}

static const Call moves[] = {
    {"experts to the next rank", move, .base = true},
    {"experts to the next rank, in place", .run = move},
};

static const Call gathers[] = {
    {"nccl all-gather, bf16", nccl_gather, .base = true},
    {"in sharded", .run = gather},
    {"out sharded", gather, .last = true},
    {"out sharded, by rank", gather, .last = true, .by_rank = 1},
    {"in sharded, fp8 rows", gather, .quant = EP_QUANT_FP8, .blocks = EP_BLOCKS_ROWS},
    {"in sharded, fp8 rows, transposed", gather, .quant = EP_QUANT_FP8, .blocks = EP_BLOCKS_ROWS,
     .transposed = 1},
    {"in sharded, fp8 tiles", gather, .quant = EP_QUANT_FP8, .blocks = EP_BLOCKS_TILES},
    {"in sharded, fp8 tiles, transposed", gather, .quant = EP_QUANT_FP8, .blocks = EP_BLOCKS_TILES,
     .transposed = 1},
    {"in sharded, mxfp8 rows", gather, .quant = EP_QUANT_MXFP8, .blocks = EP_BLOCKS_ROWS},
};

static const Call reductions[] = {
    {"nccl reduce-scatter, bf16", nccl_reduce, .base = true, .type = EP_TYPE_BF16},
    {"in sharded, bf16", reduce, .type = EP_TYPE_BF16},
    {"out sharded, bf16", reduce, .last = true, .type = EP_TYPE_BF16},
};

static const Call wide_reductions[] = {
    {"in sharded, bf16 to fp32", reduce, .type = EP_TYPE_FP32},
    {"out sharded, bf16 to fp32", reduce, .last = true, .type = EP_TYPE_FP32},
    {"nccl reduce-scatter, fp32", nccl_reduce, .type = EP_TYPE_FP32},
};

static const Call quantisings[] = {
    {"copy of as many bytes", copy, .base = true},
    {"rows to fp8", .run = quantise},
    {"rows to fp8, tiles", quantise, .blocks = EP_BLOCKS_TILES},
    {"rows to fp8, transposed", quantise, .blocks = EP_BLOCKS_ROWS, .transposed = 1},
};

/* ---- timing -------------------------------------------------------------------------------- */

typedef struct CallList {
    Weights *weights;
    const Call *calls;
} CallList;

static bool run(void *context, int which) {
    const CallList *list = context;
    return list->calls[which].run(list->weights, &list->calls[which]);
}

static bool time_list(Weights *w, const Call *calls, int count) {
    CallList list = {w, calls};
    Quantiles times[TIMED_CALLS];
    double host_us[TIMED_CALLS];
    if (!device_time_calls(&w->c, w->c.options->run.iterations, run, &list, count, times, host_us))
        return false;
    for (int i = 0; i < count; i++) {
        if (calls[i].base) w->base_us = times[i].median_us;
        lines_add(&w->lines, calls[i].name, "us", times[i], host_us[i],
                  times[i].median_us / w->base_us);
    }
    return true;
}

#define TIME(w, list) time_list(w, list, (int)(sizeof(list) / sizeof((list)[0])))

/* Weights whose gradients are reduced to this type. */
static bool make_weights(Weights *w, EpType reduced) {
    ep_weight_destroy(w->rows);
    ep_weight_destroy(w->last);
    w->rows = w->last = NULL;
    return make_weight(w, "expert,fsdp,_", reduced, &w->rows) &&
           make_weight(w, "expert,_,fsdp", reduced, &w->last);
}

static bool time_all(Weights *w) {
    World *world = w->c.world;
    return world_all(world, make_weights(w, EP_TYPE_BF16)) && TIME(w, gathers) &&
           TIME(w, reductions) && world_all(world, make_weights(w, EP_TYPE_FP32)) &&
           TIME(w, wide_reductions) && TIME(w, quantisings) && TIME(w, moves);
}

/* ---- creating ------------------------------------------------------------------------------ */

static bool alloc(size_t bytes, char **out) {
    return cuda_ok(cudaMalloc((void **)out, bytes + 64), "cudaMalloc") &&
           cuda_ok(cudaMemset(*out, 1, bytes), "cudaMemset");
}

/* All memory is of the largest form. */
static bool alloc_all(Weights *w) {
    const size_t full = (size_t)w->elements * 2, rows = (size_t)(w->num_rows * w->row) * 2;
    const size_t most = full > rows ? full : rows;
    const size_t experts = (size_t)w->c.options->experts;
    w->from = bench_alloc(2 * experts, sizeof(int32_t), "maps"), w->to = w->from + experts;
    return w->from && alloc(most, &w->shard) && alloc(most, &w->full) && alloc(most / 16, &w->scales) &&
           alloc(2 * most, &w->workspace);
}

static bool create_group(Weights *w) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = config.num_physical = (int32_t)w->c.options->experts;
    config.max_tokens = 128, config.max_top_k = 1, config.max_row_bytes = w->c.options->hidden * 2;
    config.alignment = 128, config.backend = EP_BACKEND_CUDA;
    return bench_ok(ep_group_create(&w->c.world->boot, &config, &w->group), "ep_group_create");
}

static bool create_comm(Weights *w) {
    char text[64];
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    config.backend = EP_BACKEND_CUDA;
    snprintf(text, sizeof(text), "fsdp=%d,expert=1", w->c.world->size);
    return bench_ok(ep_mesh_parse(text, &w->mesh), "ep_mesh_parse") &&
           bench_ok(ep_mesh_comm_create(&w->c.world->boot, &w->mesh, &config, &w->comm),
                    "ep_mesh_comm_create");
}

static bool find_collectives(Weights *w) {
    return library_find(w->nccl.library, "ncclAllGather", &w->all_gather) &&
           library_find(w->nccl.library, "ncclReduceScatter", &w->reduce_scatter);
}

static bool create(Weights *w) {
    World *world = w->c.world;
    return gpu_select(world) && device_open(&w->c) && nccl_open(world, &w->nccl) &&
           world_all(world, find_collectives(w)) && world_all(world, alloc_all(w)) &&
           world_all(world, create_comm(w)) && world_all(world, create_group(w));
}

static void destroy(Weights *w) {
    void *all[] = {w->shard, w->full, w->scales, w->workspace};
    ep_weight_destroy(w->rows);
    ep_weight_destroy(w->last);
    ep_group_destroy(w->group);
    ep_mesh_comm_destroy(w->comm);
    nccl_close(&w->nccl);
    for (int i = 0; i < 4; i++)
        cudaFree(all[i]);
    free(w->from);
    if (w->c.device) device_destroy(&w->c);
}

bool weights_case(World *world, const Options *options) {
    char about[128];
    Weights w = {.c = {.world = world, .options = options}, .mesh = EP_MESH_INIT};
    w.elements = options->experts * options->hidden * options->ffn;
    w.row = options->hidden;
    w.num_rows = options->tokens_given ? options->tokens_end : QUANTISED_ROWS;
    snprintf(about, sizeof(about), "weights [%lld, %lld, %lld] of bf16 over all ranks, %lld rows",
             (long long)options->experts, (long long)options->hidden, (long long)options->ffn,
             (long long)w.num_rows);
    bool ok = create(&w) && lines_begin(&w.lines, world, options, about) && time_all(&w) &&
              lines_end(&w.lines);
    if (!world->broken) destroy(&w);
    return ok;
}

#endif
