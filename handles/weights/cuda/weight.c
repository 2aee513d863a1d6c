/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/weights/cuda/weight.h"

#include <string.h>

#include "handles/nodes/cuda/relay.h"
#include "handles/weights/cuda/push.h"
#include "handles/weights/cuda/quantise.h"
#include "handles/weights/cuda/slices.h"
#include "runtime/layout.h"
#include "runtime/quant.h"

#define MOST_PIECES 1024 /* of one shard, in one group of NCCL calls: experts of a rank */
#define MOST_SLICES 4
#define PIECE_BYTES 64 /* shorter ones are not worth a call */

/* ---- shards -------------------------------------------------------------------------------- */

static int64_t runs_of(const EpShards *s) {
    int64_t elements = ep_shard_elements(s);
    return elements ? elements / ep_shards_run(s) : 0;
}

int ep_weight_goes_directly(const EpShards *s, int64_t unit) {
    int gathered = (s->count[0] > 1) + (s->count[1] > 1) + (s->count[2] > 1);
    int64_t runs = runs_of(s);
    return gathered == 0 ||
           (gathered == 1 &&
            (runs == 1 || (runs <= MOST_PIECES && ep_shards_run(s) * unit >= PIECE_BYTES)));
}

/** Shards that are gathered: this rank's one lies at `from`. */
typedef struct Gathered {
    EpShards shards;
    int64_t unit;
    const char *from; /* flat, or NULL: in its place in the whole, or in the workspace */
    char *whole;
    char *staged; /* [shards] in the workspace, or NULL: goes directly */
} Gathered;

/* Kernels put shards into their places, so nothing is staged for them. */
static int64_t staged_bytes(const EpGroup *group, const EpShards *s, int64_t unit) {
    if (ep_push_reaches(&group->nodes.sizes, group->size, s, unit)) return 0;
    if (ep_weight_goes_directly(s, unit)) return 0;
    return ep_round_up(ep_shards_number(s) * ep_shard_elements(s) * unit, 64);
}

static void send_directly(const EpWeightWork *w, const Gathered *g) {
    int64_t run = ep_shards_run(&g->shards);
    for (int64_t i = 0; i < runs_of(&g->shards); i++) {
        const char *own = g->from
                              ? g->from + i * run * g->unit
                              : g->whole + ep_shard_run_at(&g->shards, w->group->rank, i) * g->unit;
        char *first = g->whole + ep_shard_run_at(&g->shards, 0, i) * g->unit;
        (void)w->cuda->nccl->ncclAllGather(own, first, (size_t)(run * g->unit), ncclUint8, w->comm,
                                           w->wire);
    }
}

static void send_staged(const EpWeightWork *w, const Gathered *g) {
    int64_t bytes = ep_shard_elements(&g->shards) * g->unit;
    const char *own = g->from ? g->from : g->staged + w->group->rank * bytes;
    (void)w->cuda->nccl->ncclAllGather(own, g->staged, (size_t)bytes, ncclUint8, w->comm, w->wire);
}

static EpStatus arrange(const EpWeightWork *w, const Gathered *g) {
    EpArrangeArgs args = {
        .shards = g->shards, .flat = g->staged, .whole = g->whole, .unit = (int32_t)g->unit};
    return ep_cuda_check(
        w->group, "arranging shards",
        ep_cuda_launch_arrange(&args, ep_weight_arrange_grid(w), w->stream.stream));
}

/* Tensors of scales start on multiples of 4 bytes alone. */
static EpStatus push(const EpWeightWork *w, const Gathered *g) {
    int32_t word = ep_push_word(&g->shards, g->unit);
    if (((uintptr_t)g->from | (uintptr_t)g->whole) % 16) word = word > 4 ? 4 : word;
    EpPushGrid grid = ep_weight_push_grid(w);
    int32_t receivers = EP_PUSH_GATHER_RECEIVERS(w->group->size);
    EpPushGatherArgs args = {.group = w->mark.group,
                             .shards = ep_push_describe(&g->shards, g->unit, word),
                             .receivers = ep_push_receivers(grid, receivers),
                             .from = g->from,
                             .whole = g->whole};
    for (int32_t r = 0; r < w->group->size; r++)
        args.shards.base[r] = ep_shard_run_at(&g->shards, r, 0) * g->unit / word;
    return ep_cuda_check(w->group, "gathering shards",
                         ep_cuda_launch_push_gather(&args, grid, w->stream.stream));
}

static EpStatus move_all(const EpWeightWork *w, const Gathered *g, int count) {
    for (int i = 0; w->pushes && i < count; i++)
        EP_TRY(push(w, &g[i]));
    if (w->pushes) return EP_OK;
    EP_TRY(ep_weight_group_start(w));
    for (int i = 0; i < count; i++)
        (g[i].staged ? send_staged : send_directly)(w, &g[i]);
    return ep_weight_group_end(w, "ncclAllGather");
}

static EpStatus gather_all(const EpWeightWork *w, const Gathered *g, int count) {
    EP_TRY(move_all(w, g, count));
    for (int i = 0; i < count; i++)
        if (g[i].staged) EP_TRY(arrange(w, &g[i]));
    return EP_OK;
}

/* ---- gather, in slices --------------------------------------------------------------------- */

/** A gather of a weight or, quantised, of its rows and of their scales. */
typedef struct Gathering {
    const EpWeightGather *call;
    Gathered part[2];
    int count;
} Gathering;

/* Returns a slice of what is gathered. More than one only where dimension 0 is not. */
static Gathered take_slice(const Gathered *whole, EpSlice slice) {
    Gathered g = *whole;
    int64_t row = g.shards.part[1] * g.shards.part[2] * g.unit;
    g.shards.part[0] = slice.rows;
    if (g.from) g.from += slice.first * row;
    if (g.staged) g.staged += slice.first * row * ep_shards_number(&g.shards);
    g.whole += slice.first * ep_shards_whole(&g.shards, 1) * ep_shards_whole(&g.shards, 2) * g.unit;
    return g;
}

static EpStatus move_slice(const EpWeightWork *w, const void *gathering, EpSlice slice) {
    const Gathering *all = gathering;
    Gathered g[2];
    if (w->group->size == 1) return EP_OK;
    for (int i = 0; i < all->count; i++)
        g[i] = take_slice(&all->part[i], slice);
    return move_all(w, g, all->count);
}

static EpStatus arrange_slice(const EpWeightWork *w, const void *gathering, EpSlice slice) {
    const Gathering *all = gathering;
    for (int i = 0; i < all->count && w->group->size > 1; i++) {
        Gathered g = take_slice(&all->part[i], slice);
        if (g.staged) EP_TRY(arrange(w, &g));
    }
    return EP_OK;
}

/* A gather without kernels is one call of NCCL's. */
static int count_slices(const EpWeightWork *w, const EpSliceStages *stages, const Gathering *all,
                        int has_kernels) {
    const Gathered *g = &all->part[0];
    int64_t others = w->group->size - 1;
    if (!has_kernels || others == 0 || w->pushes || g->shards.count[0] > 1) return 1;
    return ep_weight_slices(stages, g->shards.part[0],
                            others * ep_shard_elements(&g->shards) * g->unit);
}

/* ---- gather -------------------------------------------------------------------------------- */

static EpStatus copy(const EpWeightWork *w, void *to, const void *from, int64_t bytes) {
    return ep_cuda_check(
        w->group, "cudaMemcpyAsync",
        cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, w->stream.stream));
}

static EpStatus gather_plain(EpWeightWork *w, const EpWeightGather *call) {
    static const EpSliceStages stages = {MOST_SLICES, .move = move_slice, .after = arrange_slice};
    const EpShards *shards = &call->view->shards;
    Gathering all = {call,
                     {{.shards = *shards,
                       .unit = (int64_t)ep_type_bytes(call->view->sizes.type),
                       .from = call->shard,
                       .whole = call->out}},
                     1};
    Gathered *g = &all.part[0];
    if (w->group->size == 1)
        return copy(w, call->out, call->shard, ep_shard_elements(shards) * g->unit);
    if (staged_bytes(w->group, shards, g->unit)) g->staged = call->workspace;
    return ep_weight_run_slices(w, &stages, &all, shards->part[0],
                                count_slices(w, &stages, &all, g->staged != NULL));
}

/* ---- gather, quantised --------------------------------------------------------------------- */

/** The parts of a workspace. */
typedef struct Parts {
    EpShards scales;                  /* of one scale each, where none straddles */
    int64_t amaxes, rows, scale_rows; /* bytes */
} Parts;

static Parts parts_of(const EpGroup *group, const EpWeightView *view) {
    Parts p = {.scales = view->shards, .amaxes = ep_view_amax_bytes(view)};
    for (int d = 0; d < 3; d++)
        p.scales.part[d] = (view->shards.part[d] + view->block[d] - 1) / view->block[d];
    p.rows = staged_bytes(group, &view->codes, 1);
    if (!view->straddles)
        p.scale_rows =
            staged_bytes(group, &p.scales, (int64_t)ep_type_bytes(view->sizes.scale_type));
    return p;
}

/* Whether kernels move all parts of a gather. */
static int is_pushed(const EpGroup *group, const EpWeightView *view) {
    const EpNodeSizes *nodes = &group->nodes.sizes;
    int64_t unit = (int64_t)ep_type_bytes(view->sizes.scale_type);
    if (!ep_push_reaches(nodes, group->size, &view->codes,
                         (int64_t)ep_type_bytes(view->sizes.type)))
        return 0;
    if (!view->format.bits || view->straddles) return 1;
    Parts p = parts_of(group, view);
    return ep_push_reaches(nodes, group->size, &p.scales, unit);
}

/* All of a quantising launch of some rows but `phase` and where scales are. `g` are these rows. */
static EpQuantiseArgs describe_quant(const EpWeightWork *w, const EpWeightGather *call,
                                     const Gathered *g, int64_t first_row) {
    const EpWeightView *view = call->view;
    const EpShards *codes = &g->shards;
    EpShards shards = view->shards, *s = &shards;
    int transposed = view->form.transposed;
    size_t row_bytes = (size_t)(s->part[1] * s->part[2]) * ep_type_bytes(call->weight->config.type);
    s->part[0] = codes->part[0];
    EpQuantiseArgs args = {.format = view->format,
                           .type = call->weight->config.type,
                           .tiles = view->form.blocks == EP_BLOCKS_TILES,
                           .from = (const char *)call->shard + (size_t)first_row * row_bytes,
                           .scale_step = {0, 0, 1}};
    memcpy(args.part, s->part, sizeof(args.part));
    ep_shard_begin(s, w->group->rank, args.begin);
    args.step[0] = s->part[1] * s->part[2];
    args.step[1] = transposed ? 1 : s->part[2];
    args.step[2] = transposed ? s->part[1] : 1;
    if (g->staged) {
        args.out = (uint8_t *)g->staged + w->group->rank * ep_shard_elements(codes);
        args.out_step[0] = codes->part[1] * codes->part[2], args.out_step[1] = codes->part[2];
    } else {
        args.out = (uint8_t *)g->whole + ep_shard_run_at(codes, w->group->rank, 0);
        args.out_step[0] = ep_shards_whole(codes, 1) * ep_shards_whole(codes, 2);
        args.out_step[1] = ep_shards_whole(codes, 2);
    }
    return args;
}

static EpStatus launch_quant(const EpWeightWork *w, const EpQuantiseArgs *args) {
    return ep_cuda_check(w->group, "quantising a shard",
                         ep_cuda_launch_quantise(args, ep_weight_blocks(w), w->stream.stream));
}

static EpStatus quantise_slice(const EpWeightWork *w, const void *gathering, EpSlice slice) {
    const Gathering *all = gathering;
    Gathered rows = take_slice(&all->part[0], slice), g = take_slice(&all->part[1], slice);
    EpQuantiseArgs args = describe_quant(w, all->call, &rows, slice.first);
    int64_t own = w->group->rank * ep_shard_elements(&g.shards);
    args.phase = EP_QUANT_WHOLE;
    args.scales = g.staged ? g.staged + own * g.unit
                           : g.whole + ep_shard_run_at(&g.shards, w->group->rank, 0) * g.unit;
    args.scale_step[0] = g.staged ? g.shards.part[1] * g.shards.part[2]
                                  : ep_shards_whole(&g.shards, 1) * ep_shards_whole(&g.shards, 2);
    args.scale_step[1] = g.staged ? g.shards.part[2] : ep_shards_whole(&g.shards, 2);
    return launch_quant(w, &args);
}

/* A block of scales lies in one row of dimension 0, so there are as many rows of scales. */
static EpStatus gather_whole_blocks(EpWeightWork *w, const EpWeightGather *call, const Parts *p,
                                    const Gathered *rows) {
    static const EpSliceStages stages = {MOST_SLICES, .before = quantise_slice, .move = move_slice,
                                         .after = arrange_slice};
    const EpWeightView *view = call->view;
    Gathering all = {call,
                     {*rows,
                      {.shards = p->scales,
                       .unit = (int64_t)ep_type_bytes(view->sizes.scale_type),
                       .whole = call->scales,
                       .staged = p->scale_rows ? (char *)call->workspace + p->rows : NULL}},
                     2};
    return ep_weight_run_slices(w, &stages, &all, view->shards.part[0],
                                count_slices(w, &stages, &all, 1));
}

/* Agree on the amaxes of blocks that lie in several shards, then quantise. */
static EpStatus gather_straddling(const EpWeightWork *w, const EpWeightGather *call, const Parts *p,
                                  const Gathered *rows) {
    const EpWeightView *view = call->view;
    EpMergeArgs merge = {.format = view->format, .shards = view->shards, .scales = call->scales};
    for (int d = 0; d < 3; d++) {
        merge.block[d] = view->block[d], merge.blocks[d] = ep_view_blocks(view, d);
        merge.touched[d] = d ? ep_view_touched(view, d) : view->shards.part[0];
    }
    int64_t touched = merge.touched[0] * merge.touched[1] * merge.touched[2];
    merge.amaxes = (uint32_t *)((char *)call->workspace + p->rows);
    uint32_t *found = merge.amaxes + merge.blocks[0] * merge.blocks[1] * merge.blocks[2];
    merge.found = found;
    EpQuantiseArgs args = describe_quant(w, call, rows, 0);
    args.phase = EP_QUANT_FIND;
    args.scales = found + w->group->rank * touched;
    args.scale_step[0] = merge.touched[1] * merge.touched[2], args.scale_step[1] = merge.touched[2];
    EP_TRY(launch_quant(w, &args));
    Gathered g = {.shards = {.part = {1, 1, touched}, .count = {w->group->size, 1, 1}},
                  .unit = sizeof(*found),
                  .whole = (char *)found};
    EP_TRY(gather_all(w, &g, 1));
    EP_TRY(ep_cuda_check(w->group, "merging amaxes",
                         ep_cuda_launch_merge(&merge, ep_weight_blocks(w), w->stream.stream)));
    args.phase = EP_QUANT_CONVERT;
    args.scale_step[0] = merge.blocks[1] * merge.blocks[2], args.scale_step[1] = merge.blocks[2];
    args.scales = merge.amaxes + args.begin[0] * args.scale_step[0] +
                  args.begin[1] / merge.block[1] * args.scale_step[1] +
                  args.begin[2] / merge.block[2];
    EP_TRY(launch_quant(w, &args));
    return gather_all(w, rows, 1);
}

static EpStatus gather_quantised(EpWeightWork *w, const EpWeightGather *call) {
    Parts p = parts_of(w->group, call->view);
    Gathered rows = {.shards = call->view->codes,
                     .unit = 1,
                     .whole = call->out,
                     .staged = p.rows ? call->workspace : NULL};
    return call->view->straddles ? gather_straddling(w, call, &p, &rows)
                                 : gather_whole_blocks(w, call, &p, &rows);
}

EpStatus ep_cuda_weight_gather(const EpWeightGather *call) {
    EpWeightWork w;
    const EpWeightView *view = call->view;
    EpWeightFacts facts = {
        &ep_op_weight_gather, call->weight->number, ep_weight_form_code(&view->form),
        ep_shard_elements(&view->codes) * (int64_t)ep_type_bytes(view->sizes.type)};
    EpGroup *group = call->weight->gathers;
    EP_TRY((is_pushed(group, view) ? ep_weight_enter : ep_weight_begin)(group, &facts, call->stream,
                                                                        &w));
    return ep_weight_end(&w,
                         view->format.bits ? gather_quantised(&w, call) : gather_plain(&w, call));
}

/* ---- sizes --------------------------------------------------------------------------------- */

void ep_cuda_weight_measure(const EpWeight *weight, EpWeightView *view) {
    EpWeightSizes *sizes = &view->sizes;
    if (!view->format.bits) {
        sizes->gather_workspace =
            staged_bytes(weight->gathers, &view->shards, (int64_t)ep_type_bytes(sizes->type));
    } else {
        Parts p = parts_of(weight->gathers, view);
        sizes->gather_workspace = p.amaxes + p.rows + p.scale_rows;
    }
    sizes->reduce_workspace = ep_weight_reduce_bytes(weight);
}
