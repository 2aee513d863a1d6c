/* SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>
#include <string.h>

#include "tools/bench/case.h"
#include "tools/bench/counters.h"
#include "tools/common/data.h"
#include "tools/common/layout.h"
#include "tools/common/util.h"

/* ---- the table ----------------------------------------------------------------------------- */

/* Spare bytes: the floor's copy kernels read whole chunks. */
enum { ZERO_COPY_SPARE = 65536 };

bool zero_copy_create(Case *c) {
    size_t bytes = (size_t)c->slots.num_rows * c->row_bytes + ZERO_COPY_SPARE;
    if (!c->options->zero_copy) return true;
    bool ok = bench_ok(ep_mem_alloc(c->group, bytes, &c->zero_copy_in), "ep_mem_alloc");
    if (!world_all(c->world, ok)) return false;
    ok = bench_ok(ep_mem_alloc(c->group, bytes, &c->zero_copy_out), "ep_mem_alloc");
    return world_all(c->world, ok);
}

#define AT(member) offsetof(Buffers, member)

void buffers_list(const Case *c, Part out[NUM_PARTS]) {
    const size_t tokens = (size_t)c->tokens, entries = tokens * (size_t)c->options->top_k;
    const size_t rows = (size_t)c->slots.num_rows, wide = rows * (size_t)c->weights_width;
    const size_t index = ep_type_bytes((EpType)c->options->index_type), word = sizeof(float);
    const size_t row = c->row_bytes, plan = (size_t)c->slots.num_local * 3 + 4;
    const int sums = BY(PHASE_COMBINE) | BY(PHASE_DISPATCH_BACKWARD);
    const int received = BY(PHASE_DISPATCH), slots = received | BY(PHASE_COMBINE_BACKWARD);
    const Part parts[NUM_PARTS] = {
        {"topk_idx", AT(index), entries, index, PART_INPUT, NULL},
        {"topk_weights", AT(topk_weights), entries, word, PART_INPUT, NULL},
        {"grad_topk_weights", AT(topk_grads), entries, word, BY(PHASE_DISPATCH_BACKWARD), NULL},
        {"tokens", AT(tokens_in), tokens, row, PART_INPUT, NULL},
        {"out", AT(tokens_out), tokens, row, sums, NULL},
        {"scales", AT(scales), tokens, (size_t)c->options->scale_bytes, PART_INPUT, NULL},
        {"global_scale", AT(global_scale), 1, word, PART_INPUT, NULL},
        {"expert_out", AT(slots_in), rows, row, PART_INPUT, c->zero_copy_in},
        {"recv_tokens", AT(slots_out), rows, row, slots, c->zero_copy_out},
        {"recv_topk_weights", AT(recv_weights), wide, word, received, NULL},
        {"recv_scales", AT(recv_scales), rows, c->recv_scale_bytes, received, NULL},
        {"recv_topk_idx", AT(recv_index), wide, sizeof(int32_t), received, NULL},
        {"slot_weights", AT(slot_weights), rows, word, PART_INPUT, NULL},
        {"grad_slot_weights", AT(slot_grads_in), wide, word, PART_INPUT, NULL},
        {"grad_slot_weights", AT(slot_grads_out), rows, word, BY(PHASE_COMBINE_BACKWARD), NULL},
        {"plan", AT(plan), plan, sizeof(int64_t), BY(PHASE_PREPARE), NULL},
        {"a plan's memory", AT(plan_memory), (size_t)c->plan_bytes, 1, 0, NULL},
        {"counters", AT(counters), counters_size(c), sizeof(int64_t), PART_INPUT | BY(COUNTED),
         NULL},
    };
    memcpy(out, parts, sizeof(parts));
}

void *buffers_get(const Buffers *b, const Part *part) {
    void *memory;
    memcpy(&memory, (const char *)b + part->offset, sizeof(memory));
    return memory;
}

void buffers_set(Buffers *b, const Part *part, void *memory) {
    memcpy((char *)b + part->offset, &memory, sizeof(memory));
}

/* With --zero-copy on the host backend, the library works on peer-accessible host buffers. */
static bool alloc_all(Case *c) {
    Part parts[NUM_PARTS];
    buffers_list(c, parts);
    for (int i = 0; i < NUM_PARTS; i++) {
        const Part *p = &parts[i];
        buffers_set(&c->buffers, p,
                    p->zero_copy && !c->cuda ? p->zero_copy
                                             : pool_alloc(&c->pool, p->count, p->bytes, p->what));
    }
    return !c->pool.failed;
}

/* Skips unused rows, so that their pages stay untouched: batched slabs may be very large. */
static void poison_slots(Case *c, size_t row_bytes) {
    for (int64_t row = 0; row < c->slots.num_rows; row++)
        if (c->slots.rows[row].state != ROW_UNUSED)
            memset(c->buffers.slots_out + (size_t)row * row_bytes, POISON_BYTE, row_bytes);
}

void buffers_poison(Case *c, PhaseId phase) {
    Part parts[NUM_PARTS];
    buffers_list(c, parts);
    for (int i = 0; i < NUM_PARTS; i++) {
        void *memory = buffers_get(&c->buffers, &parts[i]);
        if (!(parts[i].use & BY(phase))) continue;
        if (memory == c->buffers.slots_out)
            poison_slots(c, phase == PHASE_DISPATCH ? c->recv_bytes : c->row_bytes);
        else
            memset(memory, POISON_BYTE, parts[i].count * parts[i].bytes);
    }
}

/* ---- descriptors --------------------------------------------------------------------------- */

/* One value (column) or a row of `width` values per slot; blocks of fixed size have a dimension of
 * their own. */
static EpTensor slot_tensor(const Case *c, void *data, EpType type, int64_t width, bool column) {
    int64_t rows = c->slots.num_rows;
    const Layout *layout = tool_layout(c->slots.layout);
    int64_t slab = c->slots.block_rows;
    int64_t slabs = layout->has_rows ? c->routing.num_ranks : c->slots.num_local;
    if (!layout->is_fixed)
        return column ? ep_tensor_1d(data, type, rows) : ep_tensor_2d(data, type, rows, width);
    return column ? ep_tensor_2d(data, type, slabs, slab)
                  : ep_tensor_3d(data, type, slabs, slab, width);
}

static void describe_tokens(Case *c, const Buffers *b) {
    Tensors *t = &c->tensors;
    const Options *o = c->options;
    t->index = ep_tensor_2d(b->index, (EpType)o->index_type, c->tokens, o->top_k);
    t->topk_weights = ep_tensor_2d(b->topk_weights, EP_TYPE_FP32, c->tokens, o->top_k);
    t->topk_grads = ep_tensor_2d(b->topk_grads, EP_TYPE_FP32, c->tokens, o->top_k);
    t->tokens_in = ep_tensor_2d(b->tokens_in, (EpType)o->type, c->tokens, o->hidden);
    t->tokens_out = ep_tensor_2d(b->tokens_out, (EpType)o->type, c->tokens, o->hidden);
    t->scales = ep_tensor_2d(b->scales, EP_TYPE_UINT8, c->tokens, o->scale_bytes);
    t->global_scale = ep_tensor_1d(b->global_scale, EP_TYPE_FP32, 1);
}

static void describe_slots(Case *c, const Buffers *b) {
    Tensors *t = &c->tensors;
    const Options *o = c->options;
    bool column = !slots_has_rows(c->slots.layout);
    t->slots_in = slot_tensor(c, b->slots_in, (EpType)o->type, o->hidden, false);
    t->slots_out = slot_tensor(c, b->slots_out, (EpType)o->type, o->hidden, false);
    int64_t scales = (int64_t)(c->recv_scale_bytes / ep_type_bytes(c->recv_scale_type));
    int64_t recv_width = (int64_t)(c->recv_bytes / ep_type_bytes(c->recv_type));
    t->recv_tokens = slot_tensor(c, b->slots_out, c->recv_type, recv_width, false);
    t->recv_scales = slot_tensor(c, b->recv_scales, c->recv_scale_type, scales, false);
    t->recv_weights = slot_tensor(c, b->recv_weights, EP_TYPE_FP32, o->top_k, column);
    t->slot_grads_in = slot_tensor(c, b->slot_grads_in, EP_TYPE_FP32, o->top_k, column);
    t->recv_index = slot_tensor(c, b->recv_index, EP_TYPE_INT32, o->top_k, column);
    t->slot_weights = slot_tensor(c, b->slot_weights, EP_TYPE_FP32, 1, true);
    t->slot_grads_out = slot_tensor(c, b->slot_grads_out, EP_TYPE_FP32, 1, true);
}

static void describe_plan(Case *c, const Buffers *b) {
    Tensors *t = &c->tensors;
    int64_t local = c->slots.num_local, *plan = b->plan;
    t->plan_counts = ep_tensor_1d(plan, EP_TYPE_INT64, local);
    t->plan_padded = ep_tensor_1d(plan + local, EP_TYPE_INT64, local);
    t->plan_offsets = ep_tensor_1d(plan + 2 * local, EP_TYPE_INT64, local + 1);
    t->plan_totals = ep_tensor_1d(plan + 3 * local + 1, EP_TYPE_INT64, 3);
    t->plan_memory = ep_tensor_1d(b->plan_memory, EP_TYPE_UINT8, c->plan_bytes);
}

void buffers_describe(Case *c, const Buffers *b) {
    describe_tokens(c, b);
    describe_slots(c, b);
    describe_plan(c, b);
    counters_describe(c, b);
}

/* ---- contents ------------------------------------------------------------------------------ */

static void fill_index(Case *c) {
    int64_t entries = c->tokens * c->options->top_k;
    const Routing *r = &c->routing;
    const int32_t *from = (r->named ? r->named : r->experts) + r->first[c->world->rank] * r->top_k;
    for (int64_t i = 0; i < entries; i++) {
        if (c->options->index_type == EP_TYPE_INT64)
            ((int64_t *)c->buffers.index)[i] = from[i];
        else
            ((int32_t *)c->buffers.index)[i] = from[i];
    }
}

static void fill_tokens(Case *c) {
    Buffers *b = &c->buffers;
    int rank = c->world->rank, top_k = (int)c->options->top_k;
    size_t scale_bytes = (size_t)c->options->scale_bytes;
    *b->global_scale = DATA_GLOBAL_SCALE;
    for (int64_t t = 0; t < c->tokens; t++) {
        data_row((EpType)c->options->type, case_token_id(c, rank, t),
                 b->tokens_in + (size_t)t * c->row_bytes, c->row_bytes);
        data_row(EP_TYPE_UINT8, case_scale_id(c, rank, t), b->scales + (size_t)t * scale_bytes,
                 scale_bytes);
        for (int k = 0; k < top_k; k++)
            b->topk_weights[t * top_k + k] = case_topk_weight(c, rank, t, k);
    }
}

/* Whether entry k of a token is a live slot of this rank. */
static bool is_local_slot(const Case *c, int rank, int64_t token, int k) {
    int64_t entry = (c->routing.first[rank] + token) * c->routing.top_k + k;
    return c->slots.row_of[entry] >= 0 &&
           routing_owner(&c->routing, c->routing.experts[entry]) == c->world->rank;
}

static void fill_slot(Case *c, int64_t row) {
    Buffers *b = &c->buffers;
    const Row *what = &c->slots.rows[row];
    data_row((EpType)c->options->type,
             case_slot_id(c, what->rank, what->token, c->world->rank, what->expert, what->k),
             b->slots_in + (size_t)row * c->row_bytes, c->row_bytes);
    b->slot_weights[row] = case_slot_weight(c, what->rank, what->token, c->world->rank, what->k);
    for (int i = 0; i < c->weights_width; i++) {
        int k = what->k < 0 ? i : what->k;
        if (is_local_slot(c, what->rank, what->token, k))
            b->slot_grads_in[row * c->weights_width + i] =
                case_slot_grad(c, what->rank, what->token, k);
    }
}

/* Rows without a slot are NaN, so that an error that adds them to a sum shows. All ones is NaN in
 * every format. */
static void fill_slots(Case *c) {
    Buffers *b = &c->buffers;
    size_t rows = (size_t)c->slots.num_rows;
    memset(b->slot_weights, 0xFF, rows * sizeof(float));
    memset(b->slot_grads_in, 0xFF, rows * (size_t)c->weights_width * sizeof(float));
    for (int64_t row = 0; row < c->slots.num_rows; row++) {
        if (c->slots.rows[row].state == ROW_SLOT)
            fill_slot(c, row);
        else if (c->slots.rows[row].state != ROW_UNUSED)
            memset(b->slots_in + (size_t)row * c->row_bytes, 0xFF, c->row_bytes);
    }
}

bool buffers_create(Case *c) {
    if (!alloc_all(c)) return false;
    buffers_describe(c, &c->buffers);
    fill_index(c);
    fill_tokens(c);
    fill_slots(c);
    return true;
}
