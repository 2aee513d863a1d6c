/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shards and gradients travel in rounds. All messages of an operation have equal length, so every
 * rank works out the same rounds:
 *
 *     gather   each rank publishes its shard once; its peers copy it into its place
 *     reduce   each rank publishes, for each peer, its gradient's part of what that peer adds; the
 *              peer adds what it gets from all ranks. Then ranks that keep the same shard publish
 *              the sums of their pieces
 *     amax     each rank publishes its numbers; its peers take their maximum
 *     move     (move.c) each rank publishes, for each peer, its rows that go there
 */
#include "handles/weights/host/weight.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/host/host.h"
#include "runtime/layout.h"

static void fill_regions(const EpWeightRounds *r, EpExchange *x, int64_t at, int64_t length) {
    int32_t size = r->group->size, rank = r->group->rank;
    int filled = 0;
    for (int32_t i = 0; i < size; i++) {
        int32_t peer = ep_round_peer(rank, size, i);
        if (!ep_exchange_is_alive(x, peer)) continue;
        int shared = r->mode == EP_ROUND_SHARED && ep_exchange_on_node(x, peer);
        if (peer != rank) ep_round_fill(x, peer, length);
        if (!shared || !filled) r->fill(r->context, peer, at, length, ep_round_region(x, peer));
        filled |= shared;
    }
}

static EpStatus run_round(const EpWeightRounds *r, EpExchange *x, int64_t at, int64_t length) {
    EpRoundHeader header = {.handle = 0};
    int32_t size = r->group->size, rank = r->group->rank;
    memcpy(header.fact, r->fact, sizeof(header.fact));
    EP_TRY(ep_round_open(x, r->op, &header, r->mode));
    fill_regions(r, x, at, length);
    EP_TRY(ep_round_publish(x));
    for (int32_t i = 1; i < size; i++) {
        int32_t peer = ep_round_peer(rank, size, i);
        const void *message;
        if (!ep_exchange_is_alive(x, peer)) continue;
        EP_TRY(ep_round_receive(x, peer, NULL, &message));
        r->take(r->context, peer, at, length, message);
    }
    if (r->finish) r->finish(r->context, at, length);
    for (int32_t i = 1; i < size; i++)
        if (ep_exchange_is_alive(x, ep_round_peer(rank, size, i)))
            ep_round_release(x, ep_round_peer(rank, size, i));
    return ep_round_close(x);
}

EpStatus ep_host_weight_rounds(const EpWeightRounds *r) {
    EpExchange *x = ep_host(r->group)->exchange;
    int64_t most = ep_exchange_body_bytes(x, r->mode) / 64 * 64;
    for (int64_t at = 0; at < r->bytes; at += most)
        EP_TRY_EXCHANGE(r->group, run_round(r, x, at, ep_min(most, r->bytes - at)));
    EP_TRY_EXCHANGE(r->group, ep_exchange_flush(x, r->op));
    return EP_OK;
}

/* Shards are copied to their places as they arrive. */
void ep_host_weight_measure(const EpWeight *weight, EpWeightView *view) {
    view->sizes.gather_workspace = ep_view_amax_bytes(view);
    view->sizes.reduce_workspace = weight->replicates ? 4 * ep_weight_piece_stride(weight) : 0;
}

/* ---- runs of a shard ----------------------------------------------------------------------- */

/* Copy bytes [at, at + length) of a shard between its place in the whole and flat memory. */
typedef enum Direction { TO_WHOLE, TO_FLAT } Direction;

static void copy_shard(const EpShards *s, int64_t unit, int64_t shard, Direction direction,
                       char *whole, char *flat, int64_t at, int64_t length) {
    int64_t run_bytes = ep_shards_run(s) * unit;
    while (length > 0) {
        int64_t run = at / run_bytes, into = at % run_bytes;
        int64_t bytes = ep_min(run_bytes - into, length);
        char *place = whole + ep_shard_run_at(s, shard, run) * unit + into;
        memcpy(direction == TO_WHOLE ? place : flat, direction == TO_WHOLE ? flat : place,
               (size_t)bytes);
        at += bytes, flat += bytes, length -= bytes;
    }
}

/* ---- gather -------------------------------------------------------------------------------- */

typedef struct Gather {
    const EpShards *shards;
    int64_t unit;
    int32_t rank;
    const char *shard; /* this rank's, or NULL: it is in its place */
    char *whole;
} Gather;

static void fill_shard(void *context, int32_t peer, int64_t at, int64_t length, void *region) {
    const Gather *g = context;
    (void)peer;
    if (g->shard)
        memcpy(region, g->shard + at, (size_t)length);
    else
        copy_shard(g->shards, g->unit, g->rank, TO_FLAT, g->whole, region, at, length);
}

static void take_shard(void *context, int32_t peer, int64_t at, int64_t length,
                       const void *message) {
    const Gather *g = context;
    copy_shard(g->shards, g->unit, peer, TO_WHOLE, g->whole, (char *)(uintptr_t)message, at,
               length);
}

static EpStatus gather(const EpWeightGather *call, Gather *g) {
    EpWeightRounds rounds = {.group = call->weight->gathers,
                             .op = &ep_op_weight_gather,
                             .mode = EP_ROUND_SHARED,
                             .bytes = ep_shard_elements(g->shards) * g->unit,
                             .context = g,
                             .fill = fill_shard,
                             .take = take_shard};
    rounds.fact[0] = call->weight->number;
    rounds.fact[1] = ep_weight_form_code(&call->view->form);
    rounds.fact[2] = rounds.bytes;
    g->rank = rounds.group->rank;
    return ep_host_weight_rounds(&rounds);
}

EpStatus ep_host_gather_shards(const EpWeightGather *call, const EpShards *shards, int64_t unit,
                               void *whole) {
    return gather(call, &(Gather){.shards = shards, .unit = unit, .whole = whole});
}

EpStatus ep_host_weight_gather(const EpWeightGather *call) {
    const EpWeightView *view = call->view;
    if (view->format.bits) return ep_host_gather_quantised(call);
    Gather g = {.shards = &view->shards,
                .unit = (int64_t)ep_type_bytes(view->sizes.type),
                .shard = call->shard,
                .whole = call->out};
    copy_shard(g.shards, g.unit, call->weight->gathers->rank, TO_WHOLE, g.whole,
               (char *)(uintptr_t)g.shard, 0, ep_shard_elements(g.shards) * g.unit);
    return gather(call, &g);
}

/* ---- reduce -------------------------------------------------------------------------------- */

typedef struct Reduce {
    const EpWeightReduce *call;
    const EpRowMath *math;
    EpExchange *exchange;
    int64_t unit;     /* bytes of an element of the gradient */
    EpTerm *terms;    /* [ranks] in the order of summation */
    int32_t *term_of; /* [ranks] */
} Reduce;

/* Elements of a piece in bytes [at, at + length) of a message, whose elements have `unit` bytes. */
static int64_t elements_there(const EpWeight *weight, int32_t piece, int64_t unit, int64_t at,
                              int64_t length) {
    int64_t left = ep_weight_piece_length(weight, piece) * unit - at;
    return ep_max(0, ep_min(length, left)) / unit;
}

static void fill_gradient(void *context, int32_t peer, int64_t at, int64_t length, void *region) {
    const Reduce *r = context;
    const EpWeight *weight = r->call->weight;
    EpReducedPart part = weight->reduced[peer];
    copy_shard(&weight->shards, r->unit, part.shard, TO_FLAT, (char *)(uintptr_t)r->call->grad,
               region, part.piece * ep_weight_piece_stride(weight) * r->unit + at,
               elements_there(weight, part.piece, r->unit, at, length) * r->unit);
}

static void take_gradient(void *context, int32_t peer, int64_t at, int64_t length,
                          const void *message) {
    const Reduce *r = context;
    (void)at, (void)length;
    r->terms[r->term_of[peer]].row = message;
}

/* This rank's own part is in its own region. */
static void add_gradients(void *context, int64_t at, int64_t length) {
    const Reduce *r = context;
    const EpWeight *weight = r->call->weight;
    int32_t rank = weight->reduces->rank;
    int divided = weight->replicates != NULL;
    EpType type = divided ? EP_TYPE_FP32 : weight->config.reduced_type;
    char *out = divided ? r->call->workspace : r->call->out;
    r->terms[r->term_of[rank]].row = ep_round_region(r->exchange, rank);
    r->math->reduce(weight->config.grad_type, r->terms, weight->reduces->size, type,
                    !divided && r->call->accumulate,
                    out + at / r->unit * (int64_t)ep_type_bytes(type),
                    elements_there(weight, weight->reduced[rank].piece, r->unit, at, length));
}

/* ---- sums of pieces ------------------------------------------------------------------------ */

static void fill_sums(void *context, int32_t peer, int64_t at, int64_t length, void *region) {
    const Reduce *r = context;
    const EpWeight *weight = r->call->weight;
    int64_t elements = elements_there(weight, weight->replicates->rank, 4, at, length);
    (void)peer;
    memcpy(region, (const char *)r->call->workspace + at, (size_t)(4 * elements));
}

/* Round a rank's sums to their place in the shard. */
static void take_sums(void *context, int32_t peer, int64_t at, int64_t length,
                      const void *message) {
    const Reduce *r = context;
    const EpWeight *weight = r->call->weight;
    EpType type = weight->config.reduced_type;
    EpTerm term = {message, 1, EP_RUN_BEGINS, NULL};
    int64_t first = peer * ep_weight_piece_stride(weight) + at / 4;
    r->math->reduce(EP_TYPE_FP32, &term, 1, type, r->call->accumulate,
                    (char *)r->call->out + first * (int64_t)ep_type_bytes(type),
                    elements_there(weight, peer, 4, at, length));
}

static EpStatus share_sums(Reduce *r) {
    const EpWeight *weight = r->call->weight;
    EpWeightRounds rounds = {.group = weight->replicates,
                             .op = &ep_op_weight_reduce,
                             .mode = EP_ROUND_SHARED,
                             .bytes = 4 * ep_weight_piece_stride(weight),
                             .context = r,
                             .fill = fill_sums,
                             .take = take_sums};
    rounds.fact[0] = weight->number;
    rounds.fact[1] = r->call->accumulate;
    rounds.fact[2] = rounds.bytes;
    take_sums(r, rounds.group->rank, 0, rounds.bytes, r->call->workspace);
    return ep_host_weight_rounds(&rounds);
}

/* Nodes are numbered in the order of their lowest ranks. A run of terms is the sum of a node. */
static void order_terms(const EpGroup *group, Reduce *r) {
    int32_t at = 0;
    for (int32_t node = 0; node < group->nodes.sizes.nodes; node++) {
        EpRun run = EP_RUN_BEGINS;
        for (int32_t rank = 0; rank < group->size; rank++) {
            if (group->nodes.of[rank] != node) continue;
            r->terms[at] = (EpTerm){NULL, 1, run, NULL};
            r->term_of[rank] = at++;
            run = EP_RUN_GOES_ON;
        }
    }
}

EpStatus ep_host_weight_reduce(const EpWeightReduce *call) {
    const EpWeight *weight = call->weight;
    EpGroup *group = weight->reduces;
    EpTerm terms[EP_MAX_RANKS];
    int32_t term_of[EP_MAX_RANKS];
    Reduce r = {.call = call,
                .math = ep_host(group)->math,
                .exchange = ep_host(group)->exchange,
                .unit = (int64_t)ep_type_bytes(weight->config.grad_type),
                .terms = terms,
                .term_of = term_of};
    order_terms(group, &r);
    EpWeightRounds rounds = {.group = group,
                             .op = &ep_op_weight_reduce,
                             .mode = EP_ROUND_EACH,
                             .bytes = ep_weight_piece_stride(weight) * r.unit,
                             .context = &r,
                             .fill = fill_gradient,
                             .take = take_gradient,
                             .finish = add_gradients};
    rounds.fact[0] = weight->number;
    rounds.fact[1] = call->accumulate;
    rounds.fact[2] = rounds.bytes;
    EpStatus status = ep_host_weight_rounds(&rounds);
    if (!weight->replicates) return status;
    if (status == EP_OK) return share_sums(&r);
    /* Others may have got further, and wait for this rank's sums. */
    char sentence[EP_SENTENCE_BYTES];
    strcpy(sentence, ep_last_error());
    (void)ep_group_abort(weight->replicates, sentence);
    return ep_fail(status, "%s", sentence);
}

/* ---- amax ---------------------------------------------------------------------------------- */

static void fill_numbers(void *context, int32_t peer, int64_t at, int64_t length, void *region) {
    const EpWeightAmax *call = context;
    (void)peer;
    memcpy(region, (const char *)call->amax + at, (size_t)length);
}

/* Numbers >= 0 compare as their bits do, and every NaN is larger than all of them. */
static void take_maximum(void *context, int32_t peer, int64_t at, int64_t length,
                         const void *message) {
    const EpWeightAmax *call = context;
    const uint32_t *theirs = message;
    uint32_t *mine = (uint32_t *)call->amax + at / 4;
    (void)peer;
    for (int64_t i = 0; i < length / 4; i++)
        mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
}

EpStatus ep_host_weight_amax(const EpWeightAmax *call) {
    EpWeightRounds rounds = {.group = call->group,
                             .op = &ep_op_weight_amax,
                             .mode = EP_ROUND_SHARED,
                             .bytes = call->count * 4,
                             .context = (void *)(uintptr_t)call,
                             .fill = fill_numbers,
                             .take = take_maximum};
    rounds.fact[0] = call->weight->number;
    rounds.fact[1] = call->scope;
    rounds.fact[2] = rounds.bytes;
    return ep_host_weight_rounds(&rounds);
}
