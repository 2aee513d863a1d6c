/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantising a shard before it is gathered. A scale belongs to a block of the gathered weight. If
 * no block lies in several shards, each rank works out the scales of its own blocks, and they are
 * gathered like the elements. Else ranks first gather the amaxes of the blocks that they touch, and
 * each one works all scales out.
 *
 * Dimensions are those of the gathered weight in its form: with form.transposed, the last two of
 * the shard are swapped.
 */
#include <string.h>

#include "handles/host/weight.h"
#include "runtime/host/rowmath.h"
#include "runtime/layout.h"
#include "runtime/quant.h"

typedef struct Quantiser {
    const EpWeightGather *call;
    const EpWeightView *view;
    const EpShards *shards;
    EpType type;
    int64_t shard;                 /* this rank's number */
    int64_t begin[3];              /* its first element in the gathered weight */
    int64_t step[3];               /* between elements of the shard, by dimension */
    int64_t blocks[3], touched[3]; /* of the gathered weight; at most, of a shard */
    uint32_t *amaxes;              /* [blocks] of the gathered weight, where blocks straddle */
    uint32_t *found;               /* [shards, touched] */
} Quantiser;

static int64_t first_block(const Quantiser *q, const int64_t begin[3], int d) {
    return begin[d] / q->view->block[d];
}

/* The part of a block that lies in this rank's shard; it may be empty. */
static EpQuantBlock own_part(const Quantiser *q, const int64_t block[3]) {
    int64_t begin[3], end[3], at = 0;
    int64_t rows = ep_shards_whole(q->shards, 1), columns = ep_shards_whole(q->shards, 2);
    for (int d = 0; d < 3; d++) {
        int64_t length = q->view->block[d];
        begin[d] = ep_max(block[d] * length, q->begin[d]);
        end[d] = ep_min((block[d] + 1) * length, q->begin[d] + q->shards->part[d]);
        at += (begin[d] - q->begin[d]) * q->step[d];
    }
    return (EpQuantBlock){
        .type = q->type,
        .from = (const char *)q->call->shard + at * (int64_t)ep_type_bytes(q->type),
        .rows = end[1] - begin[1],
        .columns = end[2] - begin[2],
        .row_step = q->step[1],
        .step = q->step[2],
        .out = (uint8_t *)q->call->out +
               ep_quant_bytes(q->view->format, (begin[0] * rows + begin[1]) * columns + begin[2]),
        .out_step = ep_quant_bytes(q->view->format, columns)};
}

static int is_empty(const EpQuantBlock *b) {
    return b->rows <= 0 || b->columns <= 0;
}

static int64_t block_number(const Quantiser *q, const int64_t block[3]) {
    return (block[0] * q->blocks[1] + block[1]) * q->blocks[2] + block[2];
}

static void store_scale(const Quantiser *q, const int64_t block[3], uint32_t stored) {
    ep_store_scale(q->view->format, q->call->scales, block_number(q, block), stored);
}

/* ---- blocks of a shard --------------------------------------------------------------------- */

/* Call `visit` for each block that a shard touches; `at` counts through [part[0], touched]. */
static void visit_blocks(Quantiser *q, int64_t shard,
                         void (*visit)(Quantiser *q, const int64_t block[3], uint32_t *found)) {
    int64_t begin[3], block[3], touched = q->touched[1] * q->touched[2];
    uint32_t *found = q->found ? q->found + shard * q->shards->part[0] * touched : NULL;
    ep_shard_begin(q->shards, shard, begin);
    for (int64_t e = 0; e < q->shards->part[0]; e++)
        for (int64_t at = 0; at < touched; at++) {
            block[0] = begin[0] + e;
            block[1] = first_block(q, begin, 1) + at / q->touched[2];
            block[2] = first_block(q, begin, 2) + at % q->touched[2];
            if (block[1] < q->blocks[1] && block[2] < q->blocks[2])
                visit(q, block, found ? found + e * touched + at : NULL);
        }
}

/* ---- blocks that lie in one shard ---------------------------------------------------------- */

static void quantise_whole_block(Quantiser *q, const int64_t block[3], uint32_t *found) {
    EpQuantBlock part = own_part(q, block);
    (void)found;
    if (is_empty(&part)) return;
    EpQuantScale scale = ep_quant_scale(q->view->format, ep_block_amax(&part));
    store_scale(q, block, scale.stored);
    ep_block_convert(q->view->format, &part, scale.inverse);
}

static EpStatus gather_scales(const Quantiser *q) {
    EpShards scales = *q->shards;
    for (int d = 0; d < 3; d++)
        scales.part[d] = (q->shards->part[d] + q->view->block[d] - 1) / q->view->block[d];
    return ep_host_gather_shards(
        q->call, &scales, (int64_t)ep_type_bytes(q->view->sizes.scale_type), q->call->scales);
}

/* ---- blocks that lie in several shards ----------------------------------------------------- */

static void find_own_amax(Quantiser *q, const int64_t block[3], uint32_t *found) {
    EpQuantBlock part = own_part(q, block);
    *found = is_empty(&part) ? EP_QUANT_LEAST_BITS : ep_block_amax(&part);
}

static void take_amax(Quantiser *q, const int64_t block[3], uint32_t *found) {
    uint32_t *amax = &q->amaxes[block_number(q, block)];
    *amax = *found > *amax ? *found : *amax;
}

static void convert_block(Quantiser *q, const int64_t block[3], uint32_t *found) {
    EpQuantBlock part = own_part(q, block);
    (void)found;
    if (is_empty(&part)) return;
    EpQuantScale scale = ep_quant_scale(q->view->format, q->amaxes[block_number(q, block)]);
    ep_block_convert(q->view->format, &part, scale.inverse);
}

static void store_all_scales(const Quantiser *q) {
    for (int64_t i = 0; i < q->blocks[0] * q->blocks[1] * q->blocks[2]; i++) {
        int64_t block[3] = {i / q->blocks[2] / q->blocks[1], i / q->blocks[2] % q->blocks[1],
                            i % q->blocks[2]};
        store_scale(q, block, ep_quant_scale(q->view->format, q->amaxes[i]).stored);
    }
}

static EpStatus agree_on_amaxes(Quantiser *q) {
    int64_t number = ep_shards_number(q->shards);
    int64_t blocks = q->blocks[0] * q->blocks[1] * q->blocks[2];
    EpShards found = {.part = {1, 1, q->shards->part[0] * q->touched[1] * q->touched[2]},
                      .count = {number, 1, 1}};
    q->amaxes = q->call->workspace;
    q->found = q->amaxes + blocks;
    size_t bytes = (size_t)found.part[2] * sizeof(*q->found);
    if (bytes) memset(q->found + q->shard * found.part[2], 0, bytes);
    visit_blocks(q, q->shard, find_own_amax);
    EP_TRY(ep_host_gather_shards(q->call, &found, sizeof(*q->found), q->found));
    for (int64_t i = 0; i < blocks; i++)
        q->amaxes[i] = EP_QUANT_LEAST_BITS;
    for (int64_t shard = 0; shard < number; shard++)
        visit_blocks(q, shard, take_amax);
    return EP_OK;
}

/* ---- all ----------------------------------------------------------------------------------- */

static Quantiser quantiser(const EpWeightGather *call) {
    const EpWeightView *view = call->view;
    Quantiser q = {.call = call,
                   .view = view,
                   .shards = &view->shards,
                   .type = call->weight->config.type,
                   .shard = call->weight->gathers->rank};
    const int64_t *part = view->shards.part;
    int transposed = view->form.transposed;
    q.step[0] = part[1] * part[2];
    q.step[1] = transposed ? 1 : part[2];
    q.step[2] = transposed ? part[1] : 1;
    ep_shard_begin(q.shards, q.shard, q.begin);
    for (int d = 0; d < 3; d++) {
        q.blocks[d] = ep_view_blocks(view, d);
        q.touched[d] = ep_view_touched(view, d);
    }
    return q;
}

EpStatus ep_host_gather_quantised(const EpWeightGather *call) {
    Quantiser q = quantiser(call);
    if (q.view->straddles) {
        EP_TRY(agree_on_amaxes(&q));
        store_all_scales(&q);
        visit_blocks(&q, q.shard, convert_block);
        return ep_host_gather_shards(call, &q.view->codes, 1, call->out);
    }
    visit_blocks(&q, q.shard, quantise_whole_block);
    EP_TRY(gather_scales(&q));
    return ep_host_gather_shards(call, &q.view->codes, 1, call->out);
}
