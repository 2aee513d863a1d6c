/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/case.h"

#include <stdarg.h>

#include "tests/harness/check.h"
#include "tests/harness/text.h"
#include "tests/oracle/quant.h"

static int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

/* LIBEP_TEST_NODES=2 runs the cases that say nothing of nodes on two of them. */
static void divide_nodes(Case *c) {
    const char *text = getenv("LIBEP_TEST_NODES");
    int nodes = text ? atoi(text) : 0;
    if (nodes < 2 || c->ranks < 2 || c->ranks >= (int)sizeof(c->nodes)) return;
    for (int r = 0; r < c->ranks; r++)
        c->nodes[r] = (char)('0' + r * (nodes < c->ranks ? nodes : c->ranks) / c->ranks);
}

static int quantises(const Case *c) {
    return quant_form(c->quant)->bits != 0;
}

Case case_complete(Case c) {
    if (!c.ranks) c.ranks = 1;
    if (!c.timeout) c.timeout = 60;
    if (!c.nodes[0] && !c.even_nodes) divide_nodes(&c);
    if (!c.experts) c.experts = 2 * c.ranks;
    if (!c.top_k) c.top_k = 2;
    if (!c.hidden) c.hidden = 24;
    if (!c.max_tokens) c.max_tokens = 9;
    if (!c.row_type) c.row_type = EP_TYPE_BF16;
    if (!c.sum_type) c.sum_type = EP_TYPE_BF16;
    if (!c.index_type) c.index_type = EP_TYPE_INT32;
    if (!c.layout) c.layout = EP_LAYOUT_EXPERT_MAJOR;
    if (!c.alignment) c.alignment = 1;
    if (!c.overflow) c.overflow = EP_OVERFLOW_ERROR;
    if (!c.choice) c.choice = EP_CHOICE_NEAR;
    int64_t most = (int64_t)c.ranks * c.max_tokens * (c.duplicates ? c.top_k : 1);
    if (!c.rows_per_expert) c.rows_per_expert = round_up(most, c.alignment);
    if (!c.padding) c.padding = EP_PADDING_ZERO;
    if (!c.sum_quant) c.sum_quant = EP_QUANT_NONE;
    if (quant_form(c.sum_quant)->bits) c.hidden = (int)round_up(c.hidden, 16);
    if (!c.grad_quant) c.grad_quant = EP_QUANT_NONE;
    if (quant_form(c.grad_quant)->bits) c.hidden = (int)round_up(c.hidden, 16), c.weighted = 0;
    if (!c.quant) c.quant = EP_QUANT_NONE;
    if (!c.scale_order) c.scale_order = EP_SCALES_BY_ROW;
    if (quantises(&c)) {
        c.hidden = (int)round_up(c.hidden, 16 * 8 / quant_form(c.quant)->bits), c.scale_bytes = 0;
        if (c.row_type > EP_TYPE_FP32) c.row_type = EP_TYPE_BF16;
    }
    const CaseLayout *layout = case_layout(&c);
    if (!c.mode) c.mode = EP_MODE_THROUGHPUT;
    if (layout->has_rows) c.by_entry = 0;
    if (c.by_entry) c.sum_quant = EP_QUANT_NONE;
    if ((c.mode != EP_MODE_LATENCY && !c.by_entry) || layout->has_rows) c.weights_at_combine = 0;
    if (c.weights_at_combine) c.weighted = 0;
    if (c.zero_tail == EP_TAIL_IDS && !layout->has_rows) c.zero_tail = EP_TAIL_KEEP;
    int64_t tokens = (int64_t)c.ranks * c.max_tokens, slots = tokens * c.top_k;
    if (c.mode == EP_MODE_LATENCY && !c.capacity && layout->blocks != BLOCKS_OF_TOKENS)
        c.capacity = layout->has_rows ? tokens : slots + case_physical(&c) * c.alignment;
    if (!c.capacity && layout->blocks == BLOCKS_PACKED) c.node_rows = 0;
    return c;
}

/* ---- text ---------------------------------------------------------------------------------- */

static const TextField fields[] = {
    TEXT_FIELD(Case, ranks, NULL),
    TEXT_FIELD(Case, nodes, NULL),
    TEXT_FIELD(Case, even_nodes, NULL),
    TEXT_FIELD(Case, experts, NULL),
    TEXT_FIELD(Case, top_k, NULL),
    TEXT_FIELD(Case, hidden, NULL),
    TEXT_FIELD(Case, max_tokens, NULL),
    TEXT_FIELD(Case, spare_tokens, NULL),
    TEXT_FIELD(Case, spread, "random|full|none|hole|alone"),
    TEXT_FIELD(Case, routing, "uniform|skewed|one-expert|one-rank|nobody"),
    TEXT_FIELD(Case, target, NULL),
    TEXT_FIELD(Case, masked_percent, NULL),
    TEXT_FIELD(Case, invalid_percent, NULL),
    TEXT_FIELD(Case, duplicates, NULL),
    TEXT_FIELD(Case, strange, NULL),
    TEXT_FIELD(Case, physical, NULL),
    TEXT_FIELD(Case, choice, "|near|spread"),
    TEXT_FIELD(Case, map, "first|identity|random|everywhere|half|nobody"),
    TEXT_FIELD(Case, map_seed, NULL),
    TEXT_FIELD(Case, merged, NULL),
    TEXT_FIELD(Case, row_type, TEXT_TYPES),
    TEXT_FIELD(Case, sum_type, TEXT_TYPES),
    TEXT_FIELD(Case, index_type, TEXT_TYPES),
    TEXT_FIELD(Case, layout, TEXT_LAYOUTS),
    TEXT_FIELD(Case, alignment, NULL),
    TEXT_FIELD(Case, capacity, NULL),
    TEXT_FIELD(Case, rows_per_expert, NULL),
    TEXT_FIELD(Case, overflow, TEXT_OVERFLOWS),
    TEXT_FIELD(Case, weighted, NULL),
    TEXT_FIELD(Case, node_rows, NULL),
    TEXT_FIELD(Case, by_entry, NULL),
    TEXT_FIELD(Case, weights_at_combine, NULL),
    TEXT_FIELD(Case, scale_bytes, NULL),
    TEXT_FIELD(Case, counted, NULL),
    TEXT_FIELD(Case, spare_rows, NULL),
    TEXT_FIELD(Case, zero_tail, TEXT_TAILS),
    TEXT_FIELD(Case, padding, "|zero|keep"),
    TEXT_FIELD(Case, sum_quant, TEXT_QUANTS),
    TEXT_FIELD(Case, grad_quant, TEXT_QUANTS),
    TEXT_FIELD(Case, quant, TEXT_QUANTS),
    TEXT_FIELD(Case, scale_order, TEXT_ORDERS),
    TEXT_FIELD(Case, mode, TEXT_MODES),
    TEXT_FIELD(Case, num_sms, NULL),
    TEXT_FIELD(Case, sets, NULL),
    TEXT_FIELD(Case, timeout, NULL),
    TEXT_FIELD(Case, id, NULL),
    TEXT_FIELD(Case, named, NULL),
    TEXT_FIELD(Case, phases, NULL),
    TEXT_FIELD(Case, global_ids, NULL),
    TEXT_FIELD(Case, biases, NULL),
    TEXT_FIELD(Case, counters, NULL),
    TEXT_FIELD(Case, block_rows, NULL),
    TEXT_FIELD(Case, all_weights, NULL),
    TEXT_FIELD(Case, seed, NULL),
};
enum { FIELDS = sizeof(fields) / sizeof(fields[0]) };

Case case_of(const char *format, ...) {
    char text[800], *rest = text;
    Case c = {0};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    for (char *name; (name = strsep(&rest, " "));) {
        char *value = name;
        if (!*strsep(&value, "=")) continue;
        text_set(&c, fields, FIELDS, name, value ? value : "");
    }
    return c;
}

/* A word of a text: a field and its values. */
typedef struct Word {
    char *name, *values;
    int count, multiplies;
} Word;

/* Returns the words of a text that no later one overrides. */
static int words_of(char *text, Word *words, int most) {
    int count = 0;
    for (char *name; count < most && (name = strsep(&text, " "));) {
        Word w = {.name = strsep(&name, "="), .values = name, .count = 1};
        if (!name) continue;
        for (const char *at = w.values; *at; at++)
            w.count += *at == ',' || *at == '|', w.multiplies |= *at == ',';
        int same = 0;
        while (same < count && strcmp(words[same].name, w.name))
            same++;
        words[same] = w, count += same == count;
    }
    return count;
}

/* Set the value of a word in case `number` of those that multiply. */
static void set_word(Case *c, const Word *w, int number) {
    char value[64];
    const char *at = w->values;
    for (int i = 0; i < number % w->count; i++)
        at += strcspn(at, ",|") + 1;
    snprintf(value, sizeof(value), "%.*s", (int)strcspn(at, ",|"), at);
    text_set(c, fields, FIELDS, w->name, value);
}

int cases_of(Case *cases, int most, const char *text) {
    enum { MOST_WORDS = 48 };
    char copied[1024];
    Word words[MOST_WORDS];
    snprintf(copied, sizeof(copied), "%s", text);
    int num_words = words_of(copied, words, MOST_WORDS), product = 1, longest = 1;
    for (const Word *w = words; w < words + num_words; w++) {
        if (w->multiplies) product *= w->count;
        if (w->count > longest) longest = w->count;
    }
    int count = product > longest ? product : longest;
    if (count > most) abort();
    for (int i = 0; i < count; i++) {
        int left = i;
        cases[i] = (Case){0};
        for (const Word *w = words + num_words; w-- > words;) {
            set_word(&cases[i], w, w->multiplies ? left : i);
            if (w->multiplies) left /= w->count;
        }
        cases[i].seed += (uint64_t)i;
    }
    return count;
}

const char *case_describe(const Case *c) {
    static _Thread_local char text[800];
    return text_of(c, fields, FIELDS, text, sizeof(text));
}

int case_physical(const Case *c) {
    return c->physical ? c->physical : c->experts;
}

int case_node(const Case *c, int rank) {
    int lowest = 0;
    if (c->even_nodes) {
        int node = rank * c->even_nodes / c->ranks;
        return (node * c->ranks + c->even_nodes - 1) / c->even_nodes;
    }
    while (c->nodes[0] && c->nodes[lowest] != c->nodes[rank])
        lowest++;
    return lowest;
}

static size_t type_bytes(EpType type) {
    switch (type) {
    case EP_TYPE_BF16:
    case EP_TYPE_FP16:
        return 2;
    case EP_TYPE_FP32:
    case EP_TYPE_INT32:
        return 4;
    case EP_TYPE_INT64:
        return 8;
    default:
        return 1;
    }
}

size_t case_row_bytes(const Case *c) {
    return (size_t)c->hidden * type_bytes(c->row_type);
}

int case_has_rows(const Case *c) {
    return case_layout(c)->has_rows;
}

int64_t case_block_rows(const Case *c) {
    CaseBlocks blocks = case_layout(c)->blocks;
    if (blocks == BLOCKS_PACKED) return 0;
    return blocks == BLOCKS_OF_ROWS ? c->rows_per_expert : c->max_tokens;
}

EpType case_recv_type(const Case *c) {
    return quantises(c) ? quant_form(c->quant)->type : c->row_type;
}

int case_recv_width(const Case *c) {
    return quantises(c) ? quant_bytes(c->quant, c->hidden) : c->hidden;
}

EpType case_scale_type(const Case *c) {
    return quant_form(c->quant)->scale_type;
}

int case_scales(const Case *c) {
    return quantises(c) ? quant_scales(c->quant, c->hidden) : c->scale_bytes;
}

size_t case_recv_bytes(const Case *c) {
    return (size_t)case_recv_width(c) * type_bytes(case_recv_type(c));
}

size_t case_recv_scale_bytes(const Case *c) {
    return (size_t)case_scales(c) * type_bytes(case_scale_type(c));
}

size_t case_sum_bytes(const Case *c) {
    return (size_t)c->hidden * type_bytes(c->sum_type);
}

EpType case_grad_type(const Case *c) {
    return quant_form(c->grad_quant)->bits ? quant_form(c->grad_quant)->type : c->sum_type;
}

size_t case_grad_bytes(const Case *c) {
    return (size_t)c->hidden * type_bytes(case_grad_type(c));
}

size_t case_grad_scale_bytes(const Case *c) {
    if (!quant_form(c->grad_quant)->bits) return 0;
    return (size_t)(quant_scales(c->grad_quant, c->hidden) * quant_scale_bytes(c->grad_quant));
}

EpGroupConfig case_group_config(const Case *c) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    size_t row = case_row_bytes(c), sum = case_sum_bytes(c);
    config.num_experts = c->experts;
    config.max_tokens = c->max_tokens + c->spare_tokens;
    config.max_top_k = c->top_k;
    config.max_row_bytes = (int64_t)(row > sum ? row : sum);
    config.max_scale_bytes = c->scale_bytes;
    config.alignment = c->alignment;
    config.max_recv_rows = case_layout(c)->blocks == BLOCKS_OF_ROWS ? 0 : c->capacity;
    config.overflow = c->overflow;
    config.backend = TEST_BACKEND;
    config.timeout_seconds = c->timeout;
    if (c->mode == EP_MODE_LATENCY || c->sets) config.latency_sets = c->sets ? c->sets : 4;
    config.node_rows = c->node_rows;
    if (c->by_entry) config.sums = EP_SUMS_BY_ENTRY;
    if (c->merged) config.duplicates = EP_DUPLICATES_MERGE;
    if (c->physical) config.num_physical = c->physical, config.choice = c->choice;
    return config;
}

EpHandleConfig case_handle_config(const Case *c) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    config.layout = c->layout;
    if (case_layout(c)->blocks == BLOCKS_OF_ROWS)
        config.rows_per_expert = c->rows_per_expert;
    else
        config.max_recv_rows = c->capacity;
    config.alignment = c->alignment;
    config.overflow = (int32_t)c->overflow;
    config.zero_tail = c->zero_tail;
    config.padding = c->padding;
    config.sum_quant = c->sum_quant;
    config.grad_quant = c->grad_quant;
    config.mode = c->mode;
    config.id = c->id;
    if (c->named) config.plans = EP_PLANS_NAMED;
    config.quant = c->quant;
    config.scale_order = c->scale_order;
    if (c->num_sms) config.num_sms = c->num_sms;
    if (c->global_ids && case_has_rows(c)) config.expert_ids = EP_IDS_GLOBAL;
    if (c->all_weights && case_layout(c)->takes_all) config.row_weights = EP_WEIGHTS_ALL;
    return config;
}
