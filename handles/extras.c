/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/extras.h"

#include <stddef.h>

/* ---- members ------------------------------------------------------------------------------- */

/* A member of EpExtras. */
typedef struct Member {
    const char *name;
    size_t offset;
    unsigned takes;
} Member;

#define MEMBER(field, takes) \
    { "extras." #field, offsetof(EpExtras, field), (takes) }

static const Member members[] = {
    MEMBER(bias0, EP_TAKES_BIAS),
    MEMBER(bias1, EP_TAKES_BIAS),
    MEMBER(global_scale, EP_TAKES_GLOBAL_SCALE),
    MEMBER(expert_tokens, EP_TAKES_EXPERTS),
    MEMBER(peer_rows, EP_TAKES_ROWS),
    MEMBER(peer_bytes, EP_TAKES_ROWS),
    MEMBER(peer_wait_ns, EP_TAKES_WAITS),
    MEMBER(peer_longest_wait_ns, EP_TAKES_WAITS),
    MEMBER(ready, EP_TAKES_READY),
    MEMBER(done, EP_TAKES_DONE),
    MEMBER(grad_scales, EP_TAKES_GRAD_SCALES),
};

enum {
    MEMBERS = sizeof(members) / sizeof(members[0]),
    FIRST_COUNTER = EP_MAX_BIASES + 1,
    READY = MEMBERS - 3, /* behind the counters */
    DONE
};

static const EpTensor *tensor_of(const EpExtras *extras, const Member *m) {
    return *(const EpTensor *const *)((const char *)extras + m->offset);
}

EpStatus ep_extras_read(const EpOperation *o, const EpExtras *given, unsigned takes,
                        EpExtras *out) {
    *out = (EpExtras)EP_EXTRAS_INIT;
    if (!given) return EP_OK;
    EP_TRY(ep_read_struct(&o->call, "extras", given, EP_FIRST_SIZE(EpExtras, bias1), out));
    for (int i = 0; i < MEMBERS; i++)
        if (tensor_of(out, &members[i]) && !(takes & members[i].takes))
            return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, members[i].name,
                             "expected NULL, since this call has no use for it, got a tensor");
    if (out->block_rows && !out->ready && !out->done)
        return ep_refuse(&o->call, EP_ERR_NULL, "extras.block_rows",
                         "expected 0, since neither ready nor done is given, got %d",
                         out->block_rows);
    if (out->expected && !out->done)
        return ep_refuse(&o->call, EP_ERR_NULL, "extras.expected",
                         "expected 0, since done is NULL, got %d", out->expected);
    return EP_OK;
}

EpStatus ep_extras_bias(EpOperation *o, const EpExtras *extras, const EpTensor *out,
                        EpGatherTensors *t) {
    for (int i = 0; i < EP_MAX_BIASES; i++) {
        const char *name = members[i].name;
        const EpTensor *bias = tensor_of(extras, &members[i]);
        if (!bias) continue;
        EP_TRY(ep_arg_token_rows(o, name, bias, ep_tensor_row_elements(out), "H"));
        EP_TRY(ep_arg_type(&o->call, name, bias, out->type));
        EP_TRY(ep_arg_token_bytes(o, name, bias));
        t->bias[t->num_biases++] = bias->data;
    }
    return EP_OK;
}

EpStatus ep_extras_global_scale(const EpOperation *o, const EpExtras *extras, EpScatterTensors *t) {
    const char *const name = "extras.global_scale";
    const EpTensor *scale = extras->global_scale;
    int needed = t->format.scaling == EP_SCALE_GLOBAL;
    if (scale && !needed)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, name,
                         "expected NULL, since the handle's quant has no global scale, got a "
                         "tensor");
    EP_TRY(ep_arg_pair(o, name, scale, "the handle's quant", needed ? t : NULL));
    if (!scale) return EP_OK;
    EP_TRY(ep_arg_tensor(&o->call, name, scale, 1));
    EP_TRY(ep_arg_float(&o->call, name, scale));
    EP_TRY(ep_arg_dim(&o->call, name, scale, 0, 1, "one number"));
    EP_TRY(ep_arg_memory(&o->call, o->handle->group, name, scale));
    t->global_scale = scale->data;
    return EP_OK;
}

/* ---- statistics ---------------------------------------------------------------------------- */

static EpStatus check_counter(const EpOperation *o, const Member *m, const EpTensor *t) {
    const EpPlanShape *shape = &o->handle->shape;
    int of_experts = m->takes == EP_TAKES_EXPERTS;
    EP_TRY(ep_arg_tensor(&o->call, m->name, t, 1));
    if (of_experts)
        EP_TRY(ep_arg_index_type(&o->call, m->name, t));
    else
        EP_TRY(ep_arg_type(&o->call, m->name, t, EP_TYPE_INT64));
    EP_TRY(ep_arg_dim(&o->call, m->name, t, 0, of_experts ? shape->num_local : shape->num_ranks,
                      of_experts ? "local experts" : "ranks"));
    EP_TRY(ep_arg_alignment(&o->call, m->name, t, (int64_t)ep_type_bytes(t->type)));
    return ep_arg_reachable(&o->call, o->handle, EP_CHECK_ALL, m->name, t);
}

static int overlap(const EpTensor *a, const EpTensor *b) {
    uintptr_t at = (uintptr_t)a->data, other = (uintptr_t)b->data;
    return at < other + (uintptr_t)ep_tensor_row_bytes(b) &&
           other < at + (uintptr_t)ep_tensor_row_bytes(a);
}

/* Two counters in one place would both be wrong. */
static EpStatus check_apart(const EpOperation *o, const EpExtras *extras, int i) {
    for (int j = FIRST_COUNTER; j < i; j++) {
        const EpTensor *other = tensor_of(extras, &members[j]);
        if (other && overlap(tensor_of(extras, &members[i]), other))
            return ep_refuse(&o->call, EP_ERR_ADDRESS, members[i].name,
                             "expected memory of its own, got memory that overlaps %s",
                             members[j].name);
    }
    return EP_OK;
}

static void *counters_of(const EpTensor *t) {
    return t ? t->data : NULL;
}

EpStatus ep_extras_statistics(const EpOperation *o, const EpExtras *extras, int64_t row_bytes,
                              EpStatistics *out) {
    for (int i = FIRST_COUNTER; i < READY; i++) {
        const EpTensor *t = tensor_of(extras, &members[i]);
        if (!t) continue;
        EP_TRY(check_counter(o, &members[i], t));
        EP_TRY(check_apart(o, extras, i));
    }
    const EpTensor *experts = extras->expert_tokens;
    *out = (EpStatistics){.expert_tokens = counters_of(experts),
                          .is_narrow = experts && experts->type == EP_TYPE_INT32,
                          .peer_rows = counters_of(extras->peer_rows),
                          .peer_bytes = counters_of(extras->peer_bytes),
                          .peer_wait = counters_of(extras->peer_wait_ns),
                          .peer_longest_wait = counters_of(extras->peer_longest_wait_ns),
                          .row_bytes = row_bytes};
    return EP_OK;
}

/* ---- blocks of rows ------------------------------------------------------------------------ */

static EpStatus check_sizes(const EpOperation *o, const EpExtras *extras, int is_done) {
    const EpPlanShape *shape = &o->handle->shape;
    if (extras->block_rows < 1)
        return ep_refuse(&o->call, EP_ERR_RANGE, "extras.block_rows",
                         "expected at least 1 row, got %d", extras->block_rows);
    if (is_done && extras->expected < 1)
        return ep_refuse(&o->call, EP_ERR_RANGE, "extras.expected", "expected at least 1, got %d",
                         extras->expected);
    if (shape->has_rows || shape->is_fixed || shape->alignment % extras->block_rows == 0)
        return EP_OK;
    return ep_refuse(&o->call, EP_ERR_ALIGNMENT, "extras.block_rows",
                     "expected a divisor of the handle's alignment, %d, got %d", shape->alignment,
                     extras->block_rows);
}

/* Cut the rows into blocks. Returns the number of all blocks. */
static int64_t cut_rows(const EpPlanShape *shape, const EpTensor *rows, EpRowBlocks *out) {
    out->sections = (int32_t)(shape->is_fixed ? rows->shape[0] : 1);
    out->section_rows = (int32_t)ep_min(rows->shape[shape->is_fixed], INT32_MAX);
    out->per_section = (int32_t)(((int64_t)out->section_rows + out->rows - 1) / out->rows);
    return (int64_t)out->sections * out->per_section;
}

EpStatus ep_extras_blocks(const EpOperation *o, const EpExtras *extras, unsigned takes,
                          const EpTensor *rows, EpRowBlocks *out) {
    const Member *m = &members[takes == EP_TAKES_DONE ? DONE : READY];
    const EpTensor *t = tensor_of(extras, m);
    *out = (EpRowBlocks){.words = NULL};
    if (!t) return EP_OK;
    EP_TRY(check_sizes(o, extras, takes == EP_TAKES_DONE));
    *out = (EpRowBlocks){.expected = extras->expected, .rows = extras->block_rows};
    int64_t count = cut_rows(&o->handle->shape, rows, out);
    EP_TRY(ep_arg_tensor(&o->call, m->name, t, 1));
    EP_TRY(ep_arg_type(&o->call, m->name, t, EP_TYPE_INT32));
    EP_TRY(ep_arg_alignment(&o->call, m->name, t, (int64_t)sizeof(int32_t)));
    if (t->shape[0] < count)
        return ep_refuse(&o->call, EP_ERR_BUFFER_SIZE, m->name,
                         "expected at least %lld words, one for each block of %d rows, got %lld",
                         (long long)count, out->rows, (long long)t->shape[0]);
    if (count > EP_MAX_BLOCK_WORDS)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, "extras.block_rows",
                         "expected at most %d blocks, got %lld of %d rows", EP_MAX_BLOCK_WORDS,
                         (long long)count, out->rows);
    EP_TRY(ep_arg_reachable(&o->call, o->handle, EP_CHECK_ALL, m->name, t));
    out->words = count ? t->data : NULL;
    return EP_OK;
}
