/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/cuda/weight.h"

#include <string.h>

#include "handles/cuda/quantise.h"
#include "handles/cuda/relay.h"
#include "handles/cuda/weight_nccl.h"
#include "runtime/layout.h"
#include "runtime/quant.h"

#define MOST_PIECES 1024 /* of one shard, in one group of NCCL calls: experts of a rank */
#define PIECE_BYTES 64   /* shorter ones are not worth a call */

static int blocks_of(const EpWeightWork *w) {
    return w->cuda->device.blocks * EP_QUANT_BLOCKS_PER_SM;
}

/* ---- shards -------------------------------------------------------------------------------- */

static int64_t runs_of(const EpShards *s) {
    int64_t elements = ep_shard_elements(s);
    return elements ? elements / ep_shards_run(s) : 0;
}

/* Whether NCCL puts all shards of this into place: one dimension is gathered, in few pieces. */
static int goes_directly(const EpShards *s, int64_t unit) {
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

static int64_t staged_bytes(const EpShards *s, int64_t unit) {
    if (goes_directly(s, unit)) return 0;
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
                                           w->stream.stream);
    }
}

static void send_staged(const EpWeightWork *w, const Gathered *g) {
    int64_t bytes = ep_shard_elements(&g->shards) * g->unit;
    const char *own = g->from ? g->from : g->staged + w->group->rank * bytes;
    (void)w->cuda->nccl->ncclAllGather(own, g->staged, (size_t)bytes, ncclUint8, w->comm,
                                       w->stream.stream);
}

static EpStatus arrange(const EpWeightWork *w, const Gathered *g) {
    EpArrangeArgs args = {
        .shards = g->shards, .flat = g->staged, .whole = g->whole, .unit = (int32_t)g->unit};
    return ep_cuda_check(w->group, "arranging shards",
                         ep_cuda_launch_arrange(&args, blocks_of(w), w->stream.stream));
}

static EpStatus gather_all(const EpWeightWork *w, const Gathered *g, int count) {
    EP_TRY(ep_weight_group_start(w));
    for (int i = 0; i < count; i++)
        (g[i].staged ? send_staged : send_directly)(w, &g[i]);
    EP_TRY(ep_weight_group_end(w, "ncclAllGather"));
    for (int i = 0; i < count; i++)
        if (g[i].staged) EP_TRY(arrange(w, &g[i]));
    return EP_OK;
}

/* ---- gather -------------------------------------------------------------------------------- */

static EpStatus copy(const EpWeightWork *w, void *to, const void *from, int64_t bytes) {
    return ep_cuda_check(
        w->group, "cudaMemcpyAsync",
        cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, w->stream.stream));
}

static EpStatus gather_plain(const EpWeightWork *w, const EpWeightGather *call) {
    const EpWeightView *view = call->view;
    Gathered g = {.shards = view->shards,
                  .unit = (int64_t)ep_type_bytes(view->sizes.type),
                  .from = call->shard,
                  .whole = call->out};
    if (w->group->size == 1)
        return copy(w, call->out, call->shard, ep_shard_elements(&g.shards) * g.unit);
    if (staged_bytes(&g.shards, g.unit)) g.staged = call->workspace;
    return gather_all(w, &g, 1);
}

/* ---- gather, quantised --------------------------------------------------------------------- */

/** The parts of a workspace. */
typedef struct Parts {
    EpShards scales;                  /* of one scale each, where none straddles */
    int64_t amaxes, rows, scale_rows; /* bytes */
} Parts;

static Parts parts_of(const EpWeightView *view) {
    Parts p = {.scales = view->shards, .amaxes = ep_view_amax_bytes(view)};
    for (int d = 0; d < 3; d++)
        p.scales.part[d] = (view->shards.part[d] + view->block[d] - 1) / view->block[d];
    p.rows = staged_bytes(&view->shards, 1);
    if (!view->straddles)
        p.scale_rows = staged_bytes(&p.scales, (int64_t)ep_type_bytes(view->sizes.scale_type));
    return p;
}

/* All of a quantising launch but `phase` and where scales are. */
static EpQuantiseArgs describe_quant(const EpWeightWork *w, const EpWeightGather *call,
                                     const Gathered *rows) {
    const EpWeightView *view = call->view;
    const EpShards *s = &view->shards;
    int transposed = view->form.transposed;
    EpQuantiseArgs args = {.quant = view->form.quant,
                           .type = call->weight->config.type,
                           .tiles = view->form.blocks == EP_BLOCKS_TILES,
                           .from = call->shard,
                           .scale_step = {0, 0, 1}};
    memcpy(args.part, s->part, sizeof(args.part));
    ep_shard_begin(s, w->group->rank, args.begin);
    args.step[0] = s->part[1] * s->part[2];
    args.step[1] = transposed ? 1 : s->part[2];
    args.step[2] = transposed ? s->part[1] : 1;
    if (rows->staged) {
        args.out = (uint8_t *)rows->staged + w->group->rank * ep_shard_elements(s);
        args.out_step[0] = s->part[1] * s->part[2], args.out_step[1] = s->part[2];
    } else {
        args.out = (uint8_t *)rows->whole + ep_shard_run_at(s, w->group->rank, 0);
        args.out_step[0] = ep_shards_whole(s, 1) * ep_shards_whole(s, 2);
        args.out_step[1] = ep_shards_whole(s, 2);
    }
    return args;
}

static EpStatus launch_quant(const EpWeightWork *w, const EpQuantiseArgs *args) {
    return ep_cuda_check(w->group, "quantising a shard",
                         ep_cuda_launch_quantise(args, blocks_of(w), w->stream.stream));
}

static EpStatus gather_whole_blocks(const EpWeightWork *w, const EpWeightGather *call,
                                    const Parts *p, Gathered g[2]) {
    const EpWeightView *view = call->view;
    EpQuantiseArgs args = describe_quant(w, call, &g[0]);
    char *workspace = call->workspace;
    args.phase = EP_QUANT_WHOLE;
    g[1] = (Gathered){.shards = p->scales,
                      .unit = (int64_t)ep_type_bytes(view->sizes.scale_type),
                      .whole = call->scales,
                      .staged = p->scale_rows ? workspace + p->rows : NULL};
    int64_t own = w->group->rank * ep_shard_elements(&p->scales);
    args.scales = g[1].staged
                      ? g[1].staged + own * g[1].unit
                      : g[1].whole + ep_shard_run_at(&p->scales, w->group->rank, 0) * g[1].unit;
    args.scale_step[0] = g[1].staged
                             ? p->scales.part[1] * p->scales.part[2]
                             : ep_shards_whole(&p->scales, 1) * ep_shards_whole(&p->scales, 2);
    args.scale_step[1] = g[1].staged ? p->scales.part[2] : ep_shards_whole(&p->scales, 2);
    EP_TRY(launch_quant(w, &args));
    return w->group->size == 1 ? EP_OK : gather_all(w, g, 2);
}

/* Agree on the amaxes of blocks that lie in several shards, then quantise. */
static EpStatus gather_straddling(const EpWeightWork *w, const EpWeightGather *call, const Parts *p,
                                  const Gathered *rows) {
    const EpWeightView *view = call->view;
    EpMergeArgs merge = {.quant = view->form.quant, .shards = view->shards, .scales = call->scales};
    for (int d = 0; d < 3; d++) {
        merge.block[d] = view->block[d], merge.blocks[d] = ep_view_blocks(view, d);
        merge.touched[d] = d ? ep_view_touched(view, d) : view->shards.part[0];
    }
    int64_t touched = merge.touched[0] * merge.touched[1] * merge.touched[2];
    merge.amaxes = (uint32_t *)((char *)call->workspace + p->rows);
    uint32_t *found = merge.amaxes + merge.blocks[0] * merge.blocks[1] * merge.blocks[2];
    merge.found = found;
    EpQuantiseArgs args = describe_quant(w, call, rows);
    args.phase = EP_QUANT_FIND;
    args.scales = found + w->group->rank * touched;
    args.scale_step[0] = merge.touched[1] * merge.touched[2], args.scale_step[1] = merge.touched[2];
    EP_TRY(launch_quant(w, &args));
    Gathered g = {.shards = {.part = {1, 1, touched}, .count = {w->group->size, 1, 1}},
                  .unit = sizeof(*found),
                  .whole = (char *)found};
    EP_TRY(gather_all(w, &g, 1));
    EP_TRY(ep_cuda_check(w->group, "merging amaxes",
                         ep_cuda_launch_merge(&merge, blocks_of(w), w->stream.stream)));
    args.phase = EP_QUANT_CONVERT;
    args.scale_step[0] = merge.blocks[1] * merge.blocks[2], args.scale_step[1] = merge.blocks[2];
    args.scales = merge.amaxes + args.begin[0] * args.scale_step[0] +
                  args.begin[1] / merge.block[1] * args.scale_step[1] +
                  args.begin[2] / merge.block[2];
    EP_TRY(launch_quant(w, &args));
    return gather_all(w, rows, 1);
}

static EpStatus gather_quantised(const EpWeightWork *w, const EpWeightGather *call) {
    Parts p = parts_of(call->view);
    Gathered g[2] = {{.shards = call->view->shards,
                      .unit = 1,
                      .whole = call->out,
                      .staged = p.rows ? call->workspace : NULL}};
    if (call->view->straddles) return gather_straddling(w, call, &p, g);
    return gather_whole_blocks(w, call, &p, g);
}

EpStatus ep_cuda_weight_gather(const EpWeightGather *call) {
    EpWeightWork w;
    const EpWeightView *view = call->view;
    EpWeightFacts facts = {
        &ep_op_weight_gather, call->weight->number, ep_weight_form_code(&view->form),
        ep_shard_elements(&view->shards) * (int64_t)ep_type_bytes(view->sizes.type)};
    EP_TRY(ep_weight_begin(call->weight->gathers, &facts, call->stream, &w));
    return ep_weight_end(&w, view->form.quant == EP_QUANT_NONE ? gather_plain(&w, call)
                                                               : gather_quantised(&w, call));
}

/* ---- reduce -------------------------------------------------------------------------------- */

/* Exchanged shards lie on multiples of 16 bytes, so that they can be added 16 bytes at a time. */
static int64_t shard_stride(const EpWeight *weight) {
    return ep_round_up(
        ep_shard_elements(&weight->shards) * (int64_t)ep_type_bytes(weight->config.grad_type), 64);
}

static int packs(const EpWeight *weight) {
    return !goes_directly(&weight->shards, (int64_t)ep_type_bytes(weight->config.grad_type));
}

/* The parts of the workspace: what each rank has sent of this rank's piece; packed shards; the sums
 * of all pieces of this rank's shard. */
typedef struct ReduceParts {
    int64_t piece, packed, sums, bytes;
} ReduceParts;

static ReduceParts reduce_parts(const EpWeight *weight) {
    int64_t stride = ep_weight_piece_stride(weight);
    int32_t pieces = weight->replicates ? weight->replicates->size : 0;
    ReduceParts p = {.piece = stride * (int64_t)ep_type_bytes(weight->config.grad_type)};
    if (weight->reduces->size == 1) return p;
    p.packed = p.piece * weight->reduces->size;
    p.sums = p.packed;
    if (packs(weight)) p.sums += ep_shards_number(&weight->shards) * shard_stride(weight);
    p.bytes = p.sums + pieces * stride * 4;
    return p;
}

void ep_cuda_weight_measure(const EpWeight *weight, EpWeightView *view) {
    EpWeightSizes *sizes = &view->sizes;
    if (view->form.quant == EP_QUANT_NONE) {
        sizes->gather_workspace = staged_bytes(&view->shards, (int64_t)ep_type_bytes(sizes->type));
    } else {
        Parts p = parts_of(view);
        sizes->gather_workspace = p.amaxes + p.rows + p.scale_rows;
    }
    sizes->reduce_workspace = reduce_parts(weight).bytes;
}

/** A reduction. */
typedef struct Reduction {
    const EpWeightWork *w;
    const EpWeightReduce *call;
    ReduceParts parts;
    const char *packed; /* shards of this rank's gradient, or NULL: they go directly */
    int64_t unit, run;  /* bytes of an element; elements that lie side by side */
} Reduction;

static Reduction describe_reduction(const EpWeightWork *w, const EpWeightReduce *call) {
    const EpWeight *weight = call->weight;
    Reduction r = {.w = w, .call = call, .parts = reduce_parts(weight)};
    r.unit = (int64_t)ep_type_bytes(weight->config.grad_type);
    r.run = ep_shards_run(&weight->shards);
    if (w->group->size == 1 || !packs(weight)) return r;
    r.packed = (char *)call->workspace + r.parts.packed;
    r.run = ep_shard_elements(&weight->shards);
    return r;
}

/* Returns where element `at` of a shard lies in this rank's gradient. */
static const char *element_at(const Reduction *r, int32_t shard, int64_t at) {
    const EpWeight *weight = r->call->weight;
    if (r->packed) return r->packed + shard * shard_stride(weight) + at * r->unit;
    int64_t begin = ep_shard_run_at(&weight->shards, shard, at / r->run);
    return (const char *)r->call->grad + (begin + at % r->run) * r->unit;
}

/* Send a rank its piece of this rank's gradient (`sends`), or receive its part of this rank's
 * piece, a message for each run. */
static void exchange_piece(const Reduction *r, int32_t peer, int sends) {
    const EpWeight *weight = r->call->weight;
    const EpNccl *nccl = r->w->cuda->nccl;
    EpReducedPart part = weight->reduced[sends ? peer : r->w->group->rank];
    int64_t begin = part.piece * ep_weight_piece_stride(weight);
    int64_t end = begin + ep_weight_piece_length(weight, part.piece);
    char *received = (char *)r->call->workspace + peer * r->parts.piece;
    for (int64_t at = begin, next; at < end; at = next) {
        next = ep_min(end, at + r->run - at % r->run);
        size_t bytes = (size_t)((next - at) * r->unit);
        if (sends)
            (void)nccl->ncclSend(element_at(r, part.shard, at), bytes, ncclUint8, peer, r->w->comm,
                                 r->w->stream.stream);
        else
            (void)nccl->ncclRecv(received + (at - begin) * r->unit, bytes, ncclUint8, peer,
                                 r->w->comm, r->w->stream.stream);
    }
}

static EpStatus exchange(const Reduction *r) {
    int32_t size = r->w->group->size, rank = r->w->group->rank;
    EP_TRY(ep_weight_group_start(r->w));
    for (int32_t i = 1; i < size; i++) {
        exchange_piece(r, (rank + i) % size, 1);
        exchange_piece(r, (rank - i + size) % size, 0);
    }
    return ep_weight_group_end(r->w, "ncclSend and ncclRecv");
}

/* Shards are packed one by one, since a packed shard begins on a multiple of 64 bytes. */
static EpStatus pack(const Reduction *r) {
    const EpWeight *weight = r->call->weight;
    EpArrangeArgs args = {.shards = weight->shards,
                          .flat = r->packed,
                          .whole = (char *)(uintptr_t)r->call->grad,
                          .unit = (int32_t)r->unit,
                          .back = 1,
                          .stride = shard_stride(weight)};
    return ep_cuda_check(r->w->group, "packing shards",
                         ep_cuda_launch_arrange(&args, blocks_of(r->w), r->w->stream.stream));
}

/* Add this rank's piece to the output or, where others have the other pieces, for them to take. */
static EpStatus add(const Reduction *r) {
    const EpWeight *weight = r->call->weight;
    int32_t rank = r->w->group->rank;
    EpReducedPart part = weight->reduced[rank];
    const EpCudaRelay *relay = r->w->cuda->relay;
    int64_t stride = ep_weight_piece_stride(weight);
    int divided = weight->replicates != NULL;
    EpSumArgs args = {.elements = ep_weight_piece_length(weight, part.piece),
                      .parts = r->w->group->size,
                      .type = weight->config.grad_type,
                      .out_type = divided ? EP_TYPE_FP32 : weight->config.reduced_type,
                      .accumulate = !divided && r->call->accumulate,
                      .rank = rank,
                      .in_whole = !r->packed,
                      .shards = weight->shards,
                      .own_shard = part.shard,
                      .own_begin = part.piece * stride,
                      .mine = r->packed ? element_at(r, part.shard, part.piece * stride)
                                        : r->call->grad,
                      .received = r->call->workspace,
                      .stride = r->parts.piece,
                      .by_node = relay ? relay->tables.by_node : NULL,
                      .out = r->call->out};
    if (divided) args.out = (char *)r->call->workspace + r->parts.sums + 4 * args.own_begin;
    args.vectors = (r->packed ? args.elements : r->run) * r->unit % 16 == 0;
    return ep_cuda_check(r->w->group, "adding gradients",
                         ep_cuda_launch_sum(&args, blocks_of(r->w), r->w->stream.stream));
}

/* Gather the sums of the pieces, which lie one after the other as the shard's elements do, and
 * round them. */
static EpStatus share_sums(const Reduction *r, const EpWeightWork *w) {
    const EpWeight *weight = r->call->weight;
    int64_t bytes = 4 * ep_weight_piece_stride(weight);
    char *sums = (char *)r->call->workspace + r->parts.sums;
    EP_TRY(ep_weight_group_start(w));
    (void)w->cuda->nccl->ncclAllGather(sums + w->group->rank * bytes, sums, (size_t)bytes,
                                       ncclUint8, w->comm, w->stream.stream);
    EP_TRY(ep_weight_group_end(w, "ncclAllGather"));
    EpSumArgs args = {.elements = ep_shard_elements(&weight->shards),
                      .parts = 1,
                      .type = EP_TYPE_FP32,
                      .out_type = weight->config.reduced_type,
                      .accumulate = r->call->accumulate,
                      .shards = weight->shards,
                      .mine = sums,
                      .out = r->call->out};
    args.vectors = args.elements % 4 == 0;
    return ep_cuda_check(w->group, "rounding gradients",
                         ep_cuda_launch_sum(&args, blocks_of(w), w->stream.stream));
}

static EpStatus reduce(const Reduction *r) {
    if (r->packed) EP_TRY(pack(r));
    if (r->w->group->size > 1) EP_TRY(exchange(r));
    return add(r);
}

EpStatus ep_cuda_weight_reduce(const EpWeightReduce *call) {
    EpWeightWork w, sharing;
    const EpWeight *weight = call->weight;
    EpWeightFacts facts = {&ep_op_weight_reduce, weight->number, call->accumulate,
                           reduce_parts(weight).piece};
    EP_TRY(ep_weight_begin(weight->reduces, &facts, call->stream, &w));
    Reduction r = describe_reduction(&w, call);
    EP_TRY(ep_weight_end(&w, reduce(&r)));
    if (!weight->replicates) return EP_OK;
    EP_TRY(ep_weight_begin(weight->replicates, &facts, call->stream, &sharing));
    return ep_weight_end(&sharing, share_sums(&r, &sharing));
}

/* ---- amax ---------------------------------------------------------------------------------- */

/* Numbers >= 0 compare as their bits do, and every NaN is larger than all of them. */
EpStatus ep_cuda_weight_amax(const EpWeightAmax *call) {
    EpWeightWork w;
    EpWeightFacts facts = {&ep_op_weight_amax, call->weight->number, call->scope, 4 * call->count};
    if (call->group->size == 1 || call->count == 0) return EP_OK;
    EP_TRY(ep_weight_begin(call->group, &facts, call->stream, &w));
    EpStatus status = ep_weight_group_start(&w);
    if (status == EP_OK) {
        (void)w.cuda->nccl->ncclAllReduce(call->amax, call->amax, (size_t)call->count, ncclUint32,
                                          ncclMax, w.comm, w.stream.stream);
        status = ep_weight_group_end(&w, "ncclAllReduce");
    }
    return ep_weight_end(&w, status);
}
