/* SPDX-License-Identifier: Apache-2.0 */
/* Sharded weights: gradients go back to their shards, and amaxes are agreed on. */
#include "bootstrap/network/cuda/network.h"
#include "handles/nodes/cuda/relay.h"
#include "handles/weights/cuda/push.h"
#include "handles/weights/cuda/slices.h"
#include "handles/weights/cuda/weight.h"
#include "runtime/layout.h"

#define MOST_SLICES 8

/* ---- reduce -------------------------------------------------------------------------------- */

/* Exchanged shards lie on multiples of 16 bytes, so that they can be added 16 bytes at a time. */
static int64_t shard_stride(const EpWeight *weight) {
    return ep_round_up(
        ep_shard_elements(&weight->shards) * (int64_t)ep_type_bytes(weight->config.grad_type), 64);
}

static int packs(const EpWeight *weight) {
    return !ep_weight_goes_directly(&weight->shards,
                                    (int64_t)ep_type_bytes(weight->config.grad_type));
}

/* Whether one kernel reduces it: 16 bytes at a time, where no ranks divide the sum of a shard.
 * Equal on all ranks. */
static int is_pushed(const EpWeight *weight) {
    const EpGroup *group = weight->reduces;
    int64_t unit = (int64_t)ep_type_bytes(weight->config.grad_type);
    return !weight->replicates && ep_push_word(&weight->shards, unit) == 16 &&
           ep_push_reaches(&group->nodes.sizes, group->size, &weight->shards, unit);
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
    if (weight->reduces->size == 1 || is_pushed(weight)) return p;
    p.packed = p.piece * weight->reduces->size;
    p.sums = p.packed;
    if (packs(weight)) p.sums += ep_shards_number(&weight->shards) * shard_stride(weight);
    p.bytes = p.sums + pieces * stride * 4;
    return p;
}

int64_t ep_weight_reduce_bytes(const EpWeight *weight) {
    return reduce_parts(weight).bytes;
}

/** A reduction. */
typedef struct Reduction {
    const EpWeightReduce *call;
    ReduceParts parts;
    const char *packed; /* shards of this rank's gradient, or NULL: they go directly */
    int packs_own;      /* whether this rank's own is among them: what it adds lies there, too */
    int64_t unit, run;  /* bytes of an element; elements that lie side by side */
} Reduction;

/* This rank's own shard is read where it lies if that is possible 16 bytes at a time, and if no
 * other rank is sent a part of it. */
static int packs_own(const EpWeight *weight, int32_t rank, int64_t unit) {
    for (int32_t r = 0; r < weight->reduces->size; r++)
        if (r != rank && weight->reduced[r].shard == weight->reduced[rank].shard) return 1;
    return ep_shards_run(&weight->shards) * unit % 16 != 0;
}

static Reduction describe_reduction(const EpWeightWork *w, const EpWeightReduce *call) {
    const EpWeight *weight = call->weight;
    Reduction r = {.call = call, .parts = reduce_parts(weight)};
    r.unit = (int64_t)ep_type_bytes(weight->config.grad_type);
    r.run = ep_shards_run(&weight->shards);
    if (w->group->size == 1 || !packs(weight)) return r;
    r.packed = (char *)call->workspace + r.parts.packed;
    r.packs_own = packs_own(weight, w->group->rank, r.unit);
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

/* Returns how many elements of a shard are in a row of its first dimension. */
static int64_t row_of(const Reduction *r) {
    const EpShards *s = &r->call->weight->shards;
    return s->part[1] * s->part[2];
}

/* Send a rank this slice of its piece of this rank's gradient (`sends`), or receive the slice of
 * its part of this rank's piece, a message for each run. */
static void exchange_piece(const EpWeightWork *w, const Reduction *r, EpSlice slice, int32_t peer,
                           int sends) {
    const EpWeight *weight = r->call->weight;
    const EpNccl *nccl = w->cuda->nccl;
    EpReducedPart part = weight->reduced[sends ? peer : w->group->rank];
    int64_t begin = part.piece * ep_weight_piece_stride(weight);
    int64_t end = begin + ep_min(ep_weight_piece_length(weight, part.piece),
                                 (slice.first + slice.rows) * row_of(r));
    char *received = (char *)r->call->workspace + peer * r->parts.piece;
    for (int64_t at = begin + slice.first * row_of(r), next; at < end; at = next) {
        next = ep_min(end, at + r->run - at % r->run);
        size_t bytes = (size_t)((next - at) * r->unit);
        if (sends)
            (void)nccl->ncclSend(element_at(r, part.shard, at), bytes, ncclUint8, peer, w->comm,
                                 w->wire);
        else
            (void)nccl->ncclRecv(received + (at - begin) * r->unit, bytes, ncclUint8, peer, w->comm,
                                 w->wire);
    }
}

static EpStatus exchange(const EpWeightWork *w, const void *reduction, EpSlice slice) {
    int32_t size = w->group->size, rank = w->group->rank;
    if (size == 1) return EP_OK;
    EP_TRY(ep_weight_group_start(w));
    for (int32_t i = 1; i < size; i++) {
        exchange_piece(w, reduction, slice, (rank + i) % size, 1);
        exchange_piece(w, reduction, slice, (rank - i + size) % size, 0);
    }
    return ep_weight_group_end(w, "ncclSend and ncclRecv");
}

/* Shards are packed one by one, since a packed shard begins on a multiple of 64 bytes. More than
 * one slice only where dimension 0 is not sharded. */
static EpStatus pack(const EpWeightWork *w, const void *reduction, EpSlice slice) {
    const Reduction *r = reduction;
    const EpWeight *weight = r->call->weight;
    int64_t row = row_of(r) * r->unit, others = weight->shards.count[1] * weight->shards.count[2];
    EpArrangeArgs args = {.shards = weight->shards,
                          .flat = r->packed + slice.first * row,
                          .whole = (char *)(uintptr_t)r->call->grad + slice.first * row * others,
                          .unit = (int32_t)r->unit,
                          .back = 1,
                          .without = r->packs_own ? 0 : 1 + weight->reduced[w->group->rank].shard,
                          .stride = shard_stride(weight)};
    args.shards.part[0] = slice.rows;
    return ep_cuda_check(
        w->group, "packing shards",
        ep_cuda_launch_arrange(&args, ep_weight_packing_grid(w), w->stream.stream));
}

/* Add this rank's piece to the output or, where others have the other pieces, for them to take. */
static EpStatus add(const EpWeightWork *w, const void *reduction, EpSlice slice) {
    const Reduction *r = reduction;
    const EpWeight *weight = r->call->weight;
    int32_t rank = w->group->rank;
    EpReducedPart part = weight->reduced[rank];
    const EpCudaRelay *relay = w->cuda->relay;
    int divided = weight->replicates != NULL;
    EpType out_type = divided ? EP_TYPE_FP32 : weight->config.reduced_type;
    int64_t first = slice.first * row_of(r);
    int64_t begin = part.piece * ep_weight_piece_stride(weight) + first;
    char *out = divided ? (char *)r->call->workspace + r->parts.sums : r->call->out;
    EpSumArgs args = {.elements = ep_min(ep_weight_piece_length(weight, part.piece) - first,
                                         slice.rows * row_of(r)),
                      .parts = w->group->size,
                      .type = weight->config.grad_type,
                      .out_type = out_type,
                      .accumulate = !divided && r->call->accumulate,
                      .rank = rank,
                      .in_whole = !r->packs_own,
                      .shards = weight->shards,
                      .own_shard = part.shard,
                      .own_begin = begin,
                      .mine = r->packs_own ? element_at(r, part.shard, begin) : r->call->grad,
                      .received = (char *)r->call->workspace + first * r->unit,
                      .stride = r->parts.piece,
                      .by_node = relay ? relay->tables.by_node : NULL,
                      .out = out + begin * (int64_t)ep_type_bytes(out_type)};
    int64_t run = r->packs_own ? args.elements : ep_shards_run(&weight->shards);
    args.vectors = run * r->unit % 16 == 0;
    return ep_cuda_check(w->group, "adding gradients",
                         ep_cuda_launch_sum(&args, ep_weight_sum_grid(w), w->stream.stream));
}

/* Gather the sums of the pieces, which lie one after the other as the shard's elements do, and
 * round them. */
static EpStatus share_sums(const Reduction *r, const EpWeightWork *w) {
    const EpWeight *weight = r->call->weight;
    int64_t bytes = 4 * ep_weight_piece_stride(weight);
    char *sums = (char *)r->call->workspace + r->parts.sums;
    EP_TRY(ep_weight_group_start(w));
    (void)w->cuda->nccl->ncclAllGather(sums + w->group->rank * bytes, sums, (size_t)bytes,
                                       ncclUint8, w->comm, w->wire);
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
                         ep_cuda_launch_sum(&args, ep_weight_sum_grid(w), w->stream.stream));
}

/* Pieces of a shard are not divided into slices. */
static int count_slices(const EpWeightWork *w, const EpSliceStages *stages, const Reduction *r) {
    const EpWeight *weight = r->call->weight;
    int64_t others = w->group->size - 1, bytes = others * r->parts.piece;
    if (others == 0 || weight->replicates || row_of(r) * r->unit % 16) return 1;
    if (r->packed && weight->shards.count[0] > 1) return 1;
    return ep_weight_slices(stages, weight->shards.part[0], bytes);
}

/* A weight without elements has no workspace, and nothing moves. */
static EpStatus reduce(EpWeightWork *w, const Reduction *r) {
    if (ep_shard_elements(&r->call->weight->shards) == 0) return EP_OK;
    const EpSliceStages stages = {MOST_SLICES, 1, .before = r->packed ? pack : NULL,
                                  .move = exchange, .after = add};
    return ep_weight_run_slices(w, &stages, r, r->call->weight->shards.part[0],
                                count_slices(w, &stages, r));
}

static EpPushArgs describe_push(const EpWeightWork *w, const EpWeightReduce *call) {
    const EpWeight *weight = call->weight;
    int64_t unit = (int64_t)ep_type_bytes(weight->config.grad_type);
    EpPushArgs args = {.group = w->mark.group,
                       .shards = ep_push_describe(&weight->shards, unit, 16),
                       .type = weight->config.grad_type,
                       .out_type = weight->config.reduced_type,
                       .accumulate = call->accumulate,
                       .grad = call->grad,
                       .out = call->out};
    for (int32_t r = 0; r < w->group->size; r++)
        args.shards.base[r] =
            ep_shard_run_at(&weight->shards, weight->reduced[r].shard, 0) * unit / 16;
    return args;
}

static EpStatus push(const EpWeightReduce *call, const EpWeightFacts *facts) {
    EpWeightWork w;
    EP_TRY(ep_weight_enter(call->weight->reduces, facts, call->stream, &w));
    EpPushArgs args = describe_push(&w, call);
    EpPushGrid grid = ep_weight_push_grid(&w);
    args.receivers = ep_push_receivers(grid, EP_PUSH_RECEIVERS);
    return ep_weight_end(&w, ep_cuda_check(w.group, "adding gradients",
                                           ep_cuda_launch_push(&args, grid, w.stream.stream)));
}

EpStatus ep_cuda_weight_reduce(const EpWeightReduce *call) {
    EpWeightWork w, sharing;
    const EpWeight *weight = call->weight;
    EpWeightFacts facts = {&ep_op_weight_reduce, weight->number, call->accumulate,
                           reduce_parts(weight).piece};
    if (is_pushed(weight)) return push(call, &facts);
    EP_TRY(ep_weight_begin(weight->reduces, &facts, call->stream, &w));
    Reduction r = describe_reduction(&w, call);
    EP_TRY(ep_weight_end(&w, reduce(&w, &r)));
    if (!weight->replicates) return EP_OK;
    EP_TRY(ep_weight_begin(weight->replicates, &facts, call->stream, &sharing));
    return ep_weight_end(&sharing, share_sums(&r, &sharing));
}

/* ---- who needs NCCL ------------------------------------------------------------------------ */

/* The words of some form may have one byte. */
static int gathers_by_nccl(const EpWeight *weight) {
    const EpGroup *group = weight->gathers;
    int64_t unit = (int64_t)ep_type_bytes(weight->config.type);
    EpShards bytes = {.part = {unit * ep_shard_elements(&weight->shards), 1, 1},
                      .count = {1, 1, 2}};
    return !ep_push_reaches(&group->nodes.sizes, group->size, &bytes, 1);
}

/* In a group on one node NCCL moves what kernels do not. Such groups connect when a weight is
 * created that needs it: that takes seconds, and most need none. */
static EpStatus connect(EpGroup *group, int is_needed) {
    EpCall call = {"ep_weight_create", group->rank};
    EpCuda *cuda = ep_cuda(group);
    if (!is_needed || group->size == 1 || cuda->network || !cuda->comm) return EP_OK;
    EP_TRY(ep_cuda_comm_agree(group, &call, ep_cuda_comm_open_network(group)));
    ep_cuda_watch_comm(group);
    return ep_cuda_comm_agree(group, &call, ep_cuda_slices_connect(group));
}

EpStatus ep_cuda_weight_open(const EpWeight *weight) {
    EP_TRY(connect(weight->gathers, gathers_by_nccl(weight)));
    EP_TRY(connect(weight->reduces, !is_pushed(weight)));
    return weight->replicates ? connect(weight->replicates, 1) : EP_OK;
}

/* ---- amax ---------------------------------------------------------------------------------- */

static EpStatus push_amax(const EpWeightAmax *call, const EpWeightFacts *facts) {
    EpWeightWork w;
    EP_TRY(ep_weight_enter(call->group, facts, call->stream, &w));
    EpPushMaxArgs args = {
        .group = w.mark.group, .numbers = (uint32_t *)call->amax, .count = call->count};
    return ep_weight_end(&w, ep_cuda_check(w.group, "agreeing on amaxes",
                                           ep_cuda_launch_push_max(&args, w.stream.stream)));
}

/* Numbers >= 0 compare as their bits do, and every NaN is larger than all of them. */
EpStatus ep_cuda_weight_amax(const EpWeightAmax *call) {
    EpWeightWork w;
    EpWeightFacts facts = {&ep_op_weight_amax, call->weight->number, call->scope, 4 * call->count};
    if (call->group->size == 1 || call->count == 0) return EP_OK;
    if (call->group->nodes.sizes.nodes == 1) return push_amax(call, &facts);
    EP_TRY(ep_weight_begin(call->group, &facts, call->stream, &w));
    EpStatus status = ep_weight_group_start(&w);
    if (status == EP_OK) {
        (void)w.cuda->nccl->ncclAllReduce(call->amax, call->amax, (size_t)call->count, ncclUint32,
                                          ncclMax, w.comm, w.wire);
        status = ep_weight_group_end(&w, "ncclAllReduce");
    }
    return ep_weight_end(&w, status);
}
