/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scatter on the host: token rows to slots, for ep_dispatch and ep_combine_backward.
 *
 * In each round a rank stages the next chunk of its tokens, each once, in its outbox. Every peer on
 * its node reads the rows that the peer's plan names from there and writes them to all their slots.
 * For a peer on another node the rank packs and sends the rows that go there. The rank's own rows
 * and the zeros of the padding need no staging; a rank writes them while the first messages travel.
 *
 * In two phases, the send phase does everything that involves other ranks. It stores received rows
 * in the handle's buffer, in the order of the plan. The receive phase fills slots from there.
 *
 * Bytes per rank: T rows written to staging, R * T * (fraction sent to this rank) rows read from
 * staging, which stays in cache, and every slot written once, past the caches if output is large.
 */
#include <string.h>

#include "dispatch/host/scatter.h"
#include "handles/host/blocks.h"
#include "handles/host/plan.h"
#include "handles/host/statistics.h"
#include "runtime/args.h"
#include "runtime/host/host.h"

/* Larger outputs are not worth keeping in cache. */
#define STREAM_BYTES (4 << 20)

typedef struct Scatter {
    const EpHandle *handle;
    const EpScatter *call;
    const EpScatterTensors *s;
    const EpPlanShape *shape;
    int has_rows;       /* whether a row has one slot for all its entries */
    int64_t block_rows; /* of the tensors' blocks of sources */
    EpPlan plan;
    EpExchange *exchange;
    const EpRowMath *math;
    int32_t rank, size;
    int64_t top_k;
    float global; /* scale of the call's rows; 0: none */
    EpRecord record;
    int64_t chunk;                  /* tokens of each source in one round */
    int stream;                     /* whether rows are stored past the caches */
    char *staging;                  /* in two phases: [rows] records of received rows; else NULL */
    char *quantised;                /* space for one record of this rank's own */
    int32_t sent[EP_MAX_RANKS];     /* rows already sent to each rank */
    int32_t received[EP_MAX_RANKS]; /* rows already read from each rank */
    EpMask lost;                    /* the ranks whose rows do not come */
} Scatter;

/* The parts of one token, in the caller's tensors or in a record. */
typedef struct Token {
    const char *row;
    const float *weights;
    const char *scales;
} Token;

static int has_quant(const EpScatterTensors *s) {
    return s->format.bits != 0;
}

/* Write a token's quantised row and its scales into a record. */
static void quantise(const Scatter *x, int64_t token, char *record) {
    const EpScatterTensors *s = x->s;
    ep_quantise(s->format, x->global, s->source_type, s->rows + token * s->source_row_bytes,
                s->row_elements, (uint8_t *)record, record + x->record.scales);
}

/* Returns the parts of one of this rank's tokens, quantised if rows are. */
static Token own_token(const Scatter *x, int64_t token) {
    const EpScatterTensors *s = x->s;
    Token t = {s->rows + token * s->row_bytes, NULL, NULL};
    if (s->carries_weights) t.weights = s->topk_weights + token * x->top_k;
    if (has_quant(s)) {
        quantise(x, token, x->quantised);
        t.row = x->quantised, t.scales = x->quantised + x->record.scales;
    } else if (s->scale_bytes) {
        t.scales = s->scales + token * s->scale_bytes;
    }
    return t;
}

static Token token_of_record(const Scatter *x, const char *record) {
    return (Token){record, (const float *)(record + x->record.weights), record + x->record.scales};
}

/* ---- sending ------------------------------------------------------------------------------- */

static void write_record(const Scatter *x, int64_t token, char *record) {
    const EpScatterTensors *s = x->s;
    if (s->carries_weights)
        memcpy(record + x->record.weights, s->topk_weights + token * x->top_k,
               (size_t)x->top_k * sizeof(float));
    if (has_quant(s)) {
        quantise(x, token, record);
        return;
    }
    memcpy(record, s->rows + token * s->row_bytes, (size_t)s->row_bytes);
    if (s->scale_bytes)
        memcpy(record + x->record.scales, s->scales + token * s->scale_bytes,
               (size_t)s->scale_bytes);
}

static int has_node_peer(const Scatter *x, int64_t token) {
    const int16_t *owner = x->plan.owner + token * x->top_k;
    for (int64_t k = 0; k < x->top_k; k++)
        if (owner[k] >= 0 && owner[k] != x->rank && ep_exchange_on_node(x->exchange, owner[k]))
            return 1;
    return 0;
}

/* Stage tokens in the region that all peers on the node read, indexed by token. */
static void stage_for_node(Scatter *x, int64_t begin, int64_t end) {
    if (!ep_exchange_has_peers_on_node(x->exchange)) return;
    char *region = ep_round_region(x->exchange, x->rank);
    for (int64_t t = begin; t < end; t++)
        if (has_node_peer(x, t)) write_record(x, t, region + (t - begin) * x->record.bytes);
}

/* Pack the rows that go to a peer on another node into that peer's region. */
static void pack_for_peer(Scatter *x, int32_t peer, int64_t end) {
    const EpPlan *plan = &x->plan;
    char *region = ep_round_region(x->exchange, peer), *record = region;
    int32_t at = x->sent[peer], last = plan->send_begin[peer + 1];
    for (; at < last && plan->send_token[at] < end; at++, record += x->record.bytes)
        write_record(x, plan->send_token[at], record);
    x->sent[peer] = at;
    ep_round_fill(x->exchange, peer, record - region);
}

/* Stage tokens begin .. end - 1 for all peers. */
static void stage(Scatter *x, int64_t begin, int64_t end) {
    int64_t own_end = ep_min(end, x->plan.header->num_tokens);
    stage_for_node(x, begin, own_end);
    for (int32_t r = 0; r < x->size; r++)
        if (!ep_exchange_on_node(x->exchange, r) && ep_exchange_is_alive(x->exchange, r))
            pack_for_peer(x, r, end);
}

/* ---- slots --------------------------------------------------------------------------------- */

/* Returns the position of an entry's slot in the tensors. */
static int64_t position(const Scatter *x, int64_t entry) {
    return ep_slot_position(x->shape, x->block_rows, x->plan.entry_slot[entry]);
}

/* Write the scales of one slot. `scales` NULL: zeros, as behind the last scale of a tile. */
static void fill_scales(const Scatter *x, int64_t slot, const char *scales) {
    const EpScaleMap *map = &x->s->scale_map;
    int by_row = !map->by_column && !map->swizzled;
    size_t bytes = by_row ? (size_t)x->s->scale_bytes : (size_t)map->element_bytes;
    int64_t count = by_row ? 1 : map->count, all = count;
    if (map->swizzled) all = ep_round_up(count, EP_TILE_SCALES);
    for (int64_t i = 0; i < all; i++) {
        char *to = x->s->out_scales + ep_scale_at(map, slot, i);
        if (scales && i < count)
            memcpy(to, scales + (size_t)i * bytes, bytes);
        else
            memset(to, 0, bytes);
    }
}

/* Write a token into one slot: its row, and its weight (or dot product) and scales. */
static void fill_slot(const Scatter *x, int64_t slot, int64_t k, const Token *t) {
    const EpScatterTensors *s = x->s;
    char *out = s->out_rows + slot * s->row_bytes;
    if (s->weighs)
        x->math->scale(s->type, out, t->row, s->slot_weights[slot], s->row_elements);
    else
        ep_row_copy(out, t->row, (size_t)s->row_bytes, x->stream);
    if (s->takes_dots)
        s->out_weights[slot] =
            x->math->dot(s->type, s->slot_rows + slot * s->row_bytes, t->row, s->row_elements);
    else if (s->carries_weights && !x->has_rows)
        s->out_weights[slot] = t->weights[k];
    if (s->scale_bytes) fill_scales(x, slot, t->scales);
}

static void write_index(void *out, EpType type, int64_t i, int32_t value) {
    if (type == EP_TYPE_INT64)
        ((int64_t *)out)[i] = value;
    else
        ((int32_t *)out)[i] = value;
}

/* Write the experts of a row with one slot, and their weights. */
static void describe_row(const Scatter *x, int32_t entry, const Token *t) {
    const EpScatterTensors *s = x->s;
    const int32_t *experts = x->plan.entry_experts + entry * x->top_k;
    int all = x->shape->row_weights == EP_WEIGHTS_ALL;
    for (int64_t k = 0, at = position(x, entry) * x->top_k; k < x->top_k; k++, at++) {
        int here = experts[k] >= 0;
        if (s->out_idx)
            write_index(s->out_idx, s->idx_type, at, here ? experts[k] + s->first_id : -1);
        if (s->carries_weights) s->out_weights[at] = here || all ? t->weights[k] : 0;
    }
}

/* Write a token into all slots of its row. */
static void fill_row(const Scatter *x, int32_t row, const Token *t) {
    const EpPlan *plan = &x->plan;
    int32_t first = plan->row_entry[row], count = plan->row_entries[row];
    for (int32_t i = first; i < first + count; i++) {
        fill_slot(x, position(x, i), x->has_rows ? 0 : plan->entry_k[i], t);
        if (x->has_rows) describe_row(x, i, t);
    }
}

static void fill_own_rows(Scatter *x) {
    const EpPlan *plan = &x->plan;
    for (int32_t row = plan->recv_begin[x->rank]; row < plan->recv_begin[x->rank + 1]; row++) {
        Token t = own_token(x, plan->row_token[row]);
        fill_row(x, row, &t);
    }
}

/* ---- rows between the phases --------------------------------------------------------------- */

static char *staged_record(const Scatter *x, int32_t row) {
    return x->staging + row * x->record.bytes;
}

static void stage_own_rows(Scatter *x) {
    const EpPlan *plan = &x->plan;
    for (int32_t row = plan->recv_begin[x->rank]; row < plan->recv_begin[x->rank + 1]; row++)
        write_record(x, plan->row_token[row], staged_record(x, row));
}

static void fill_staged_rows(Scatter *x, int32_t rank) {
    for (int32_t row = x->plan.recv_begin[rank]; row < x->plan.recv_begin[rank + 1]; row++) {
        Token t = token_of_record(x, staged_record(x, row));
        fill_row(x, row, &t);
    }
}

/* Take the rows of tokens begin .. end - 1 from a peer's records. Records from a peer on the node
 * are indexed by token, those from another node are packed. */
static void take_rows(Scatter *x, int32_t peer, const char *records, int64_t begin, int64_t end) {
    const EpPlan *plan = &x->plan;
    int32_t row = x->received[peer], last = plan->recv_begin[peer + 1];
    int by_token = ep_exchange_on_node(x->exchange, peer);
    for (int64_t i = 0; row < last && plan->row_token[row] < end; row++, i++) {
        int64_t index = by_token ? plan->row_token[row] - begin : i;
        const char *record = records + index * x->record.bytes;
        Token t = token_of_record(x, record);
        if (x->staging)
            memcpy(staged_record(x, row), record, (size_t)x->record.bytes);
        else
            fill_row(x, row, &t);
    }
    x->received[peer] = row;
}

/* ---- padding ------------------------------------------------------------------------------- */

static void write_no_ids(const Scatter *x, int64_t begin, int64_t end) {
    const EpScatterTensors *s = x->s;
    for (int64_t i = begin * x->top_k; s->out_idx && i < end * x->top_k; i++)
        write_index(s->out_idx, s->idx_type, i, -1);
}

/* Write zeros to all that is not ids. */
static void zero_rows(const Scatter *x, int64_t begin, int64_t end) {
    const EpScatterTensors *s = x->s;
    int64_t values = x->has_rows && s->carries_weights ? x->top_k : 1;
    size_t count = (size_t)(end - begin);
    ep_row_zero(s->out_rows + begin * s->row_bytes, count * (size_t)s->row_bytes, x->stream);
    if (s->out_weights)
        memset(s->out_weights + begin * values, 0, count * (size_t)values * sizeof(float));
    for (int64_t slot = begin; s->scale_bytes && slot < end; slot++)
        fill_scales(x, slot, NULL);
}

static void zero_slots(const Scatter *x, int64_t begin, int64_t end) {
    if (begin >= end) return;
    write_no_ids(x, begin, end);
    /* Layouts with ids have no padding but the tail. */
    if (x->shape->tail != EP_TAIL_IDS) zero_rows(x, begin, end);
}

/* Zero the slots behind each source's rows, in blocks of fixed size. */
static void zero_source_tails(const Scatter *x) {
    for (int32_t r = 0; r < x->size; r++) {
        int64_t rows = x->plan.recv_begin[r + 1] - x->plan.recv_begin[r];
        int64_t begin = (int64_t)r * x->block_rows;
        zero_slots(x, begin + rows, begin + x->block_rows);
    }
}

static void zero_padding(const Scatter *x) {
    const EpPlanShape *shape = x->shape;
    const EpPlan *plan = &x->plan;
    if (ep_has_source_blocks(shape) && shape->tail) zero_source_tails(x);
    for (int32_t e = 0; e < shape->num_local && !x->has_rows; e++) {
        int64_t begin = ep_padding_begin(shape, plan->expert_offsets, plan->expert_counts,
                                         plan->expert_padded, e);
        int64_t end = ep_padding_end(shape, plan->expert_offsets, plan->expert_padded, e);
        zero_slots(x, begin, end);
    }
    if (!shape->is_fixed && shape->tail) zero_slots(x, plan->header->recv_rows, x->s->out_capacity);
}

/* ---- masked ranks -------------------------------------------------------------------------- */

/* Zero the slots of a rank's rows. */
static void zero_rows_of(const Scatter *x, int32_t rank) {
    const EpPlan *plan = &x->plan;
    for (int32_t row = plan->recv_begin[rank]; row < plan->recv_begin[rank + 1]; row++)
        for (int32_t i = 0; i < plan->row_entries[row]; i++) {
            int64_t at = position(x, plan->row_entry[row] + i);
            write_no_ids(x, at, at + 1);
            zero_rows(x, at, at + 1);
        }
}

/* A plan may have rows of ranks that were masked or cut later. */
static void find_lost(Scatter *x) {
    x->lost = ep_host_lost(x->handle->group);
}

static void zero_lost_rows(const Scatter *x) {
    for (int32_t r = 0; r < x->size; r++)
        if (ep_mask_has(&x->lost, r)) zero_rows_of(x, r);
}

/* Fill all slots in a receive phase. */
static void fill_all_slots(Scatter *x) {
    zero_padding(x);
    zero_lost_rows(x);
    for (int32_t r = 0; r < x->size; r++)
        if (!ep_mask_has(&x->lost, r)) fill_staged_rows(x, r);
}

/* ---- rounds -------------------------------------------------------------------------------- */

static EpRoundHeader expected_header(const Scatter *x) {
    const EpScatterTensors *s = x->s;
    return (EpRoundHeader){.handle = x->handle->id,
                           .plan = (uint32_t)x->plan.header->generation,
                           .fact = {s->row_bytes, s->type, s->scale_bytes,
                                    ep_scatter_fact(x->call, x->top_k), s->block_rows},
                           .tokens = (int32_t)x->plan.header->num_tokens};
}

static EpStatus run_round(Scatter *x, int64_t begin) {
    EpRoundHeader expected = expected_header(x);
    int64_t end = begin + x->chunk;
    EP_TRY(ep_round_open(x->exchange, x->call->op, &expected, EP_ROUND_SHARED));
    stage(x, begin, end);
    EP_TRY(ep_round_publish(x->exchange));
    if (begin == 0) x->staging ? stage_own_rows(x) : fill_own_rows(x);
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        const void *records;
        if (!ep_exchange_is_alive(x->exchange, peer)) continue;
        EP_TRY(ep_round_receive(x->exchange, peer, NULL, &records));
        if (!records) continue;
        take_rows(x, peer, records, begin, end);
        if (ep_round_settle(x->exchange, peer)) ep_round_release(x->exchange, peer);
    }
    return ep_round_close(x->exchange);
}

/* Write the padding first, while late peers arrive. */
static EpStatus run_rounds(Scatter *x) {
    if (!x->staging) zero_padding(x);
    for (int64_t begin = 0; begin < x->plan.header->most_tokens; begin += x->chunk)
        EP_TRY(run_round(x, begin));
    EP_TRY(ep_exchange_flush(x->exchange, x->call->op));
    find_lost(x);
    if (!x->staging) zero_lost_rows(x);
    return EP_OK;
}

/* Bound of a quantised record. The row is at most half as long as its source, with at most a byte
 * of scales for every 32 elements; or a quarter, with a byte for every 16. 4 * EP_MAX_TOP_K is
 * space for weights, 64 covers rounding. */
#define MAX_QUANTISED_BYTES (EP_MAX_ROW_BYTES / 2 + EP_MAX_ROW_BYTES / 64 + 4 * EP_MAX_TOP_K + 64)

/* Make the plan if the call has a routing. A receive phase finds the plan of its send phase, and
 * checks it, since the caller may have written there meanwhile. */
static EpStatus begin_plan(EpHandle *handle, const EpScatter *scatter) {
    EpCall call = {scatter->op->name, handle->group->rank, handle->group};
    if (scatter->phase == EP_PHASE_RECEIVE) {
        call = (EpCall){"ep_dispatch_wait", handle->group->rank, NULL};
        EP_TRY(ep_host_check_plan(handle, &call, scatter->plan, scatter->top_k));
    }
    if (scatter->routing && scatter->phase != EP_PHASE_RECEIVE)
        return ep_host_prepare(handle, scatter->routing);
    return ep_host_check_blocks(handle, &call, scatter->plan, scatter->t.block_rows);
}

/* Read the call's global scale, if it has one, before any rank takes part. */
static EpStatus read_global(const EpHandle *handle, const EpScatter *scatter, float *global) {
    EpCall call = {scatter->op->name, handle->group->rank, handle->group};
    *global = scatter->t.global_scale ? *scatter->t.global_scale : 0;
    if (!scatter->t.global_scale || ep_is_global_scale(*global)) return EP_OK;
    return ep_refuse_global_scale(&call, *global);
}

static EpStatus run(EpHandle *handle, const void *call) {
    const EpScatter *scatter = call;
    _Alignas(64) char quantised[MAX_QUANTISED_BYTES];
    float global;
    EP_TRY(read_global(handle, scatter, &global));
    EP_TRY(begin_plan(handle, scatter));
    EpHost *host = ep_host(handle->group);
    const EpScatterTensors *s = &scatter->t;
    Scatter x = {.handle = handle,
                 .call = scatter,
                 .s = s,
                 .shape = &handle->shape,
                 .exchange = host->exchange,
                 .global = global};
    x.has_rows = handle->shape.has_rows;
    x.block_rows = s->block_rows;
    x.plan = ep_host_plan(handle, scatter->plan);
    x.math = host->math;
    x.quantised = quantised;
    x.rank = handle->group->rank, x.size = handle->group->size;
    x.top_k = x.plan.header->top_k;
    x.record = ep_record(s->row_bytes, s->carries_weights ? x.top_k : 0, s->scale_bytes);
    x.chunk = ep_exchange_body_bytes(x.exchange, EP_ROUND_SHARED) / x.record.bytes;
    x.stream = x.plan.header->recv_rows * s->row_bytes > STREAM_BYTES;
    memcpy(x.sent, x.plan.send_begin, (size_t)x.size * sizeof(int32_t));
    memcpy(x.received, x.plan.recv_begin, (size_t)x.size * sizeof(int32_t));
    if (scatter->phase != EP_PHASE_BOTH)
        x.staging = ep_host_set(handle->group, scatter->place.slot);
    EpStatus status = EP_OK;
    if (scatter->phase != EP_PHASE_RECEIVE) {
        status = run_rounds(&x);
        if (x.staging) host->lost[scatter->place.slot] = x.lost;
    } else {
        x.lost = host->lost[scatter->place.slot];
        fill_all_slots(&x);
    }
    ep_stream_fence();
    if (status != EP_OK) return ep_host_broken(handle->group);
    ep_host_count_rows(handle->group, &scatter->stats, x.plan.send_begin);
    ep_host_count_experts(&scatter->stats, x.plan.expert_counts, x.shape->num_local);
    ep_host_set_ready(x.shape, &x.plan, &x.lost, &s->ready);
    return EP_OK;
}

EpStatus ep_host_scatter(EpHandle *handle, const EpScatter *scatter) {
    return ep_host_run(handle, &scatter->stats, run, scatter, scatter->op->name);
}
