/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/refusals.h"

#include <stdarg.h>

/* A row: a group's name, or a call of the group before it: one change, or all of a tensor. */
typedef struct Refusal {
    const char *group, *call, *change;
    EpStatus status;
    const char *words[4];
    const char *tensor, *dims, *types;
    int is_required, alignment;
} Refusal;

static const Refusal refusals[] = {
#define GROUP(group) {#group, NULL, NULL, EP_OK, {NULL}},
#define R(call, change, status, ...) {NULL, #call, change, EP_ERR_##status, {__VA_ARGS__}},
#define T(call, tensor, is_required, dims, types, alignment) \
    {NULL, #call, NULL, EP_OK, {NULL}, #tensor, dims, types, is_required, alignment},
#define N(call, tensors) {NULL, #call, NULL, EP_OK, {NULL}, tensors, NULL},
#include "tests/cases/refusals.def"
#undef GROUP
#undef R
#undef T
#undef N
};

static const TextField tensor_fields[] = {
    TEXT_FIELD(EpTensor, struct_size, NULL), TEXT_FIELD(EpTensor, type, TEXT_TYPES),
    TEXT_FIELD(EpTensor, ndim, NULL),        TEXT_FIELD(EpTensor, shape[0], NULL),
    TEXT_FIELD(EpTensor, shape[1], NULL),    TEXT_FIELD(EpTensor, shape[2], NULL)};

Part part_tensor(EpTensor *tensor, const EpTensor **given, const char *said) {
    Part part = PART(tensor_fields, tensor);
    part.given = (const void **)given, part.said = said;
    return part;
}

static Part find_part(const Subject *s, void *context, const char *call, const char *name) {
    if (s->find) return s->find(context, call, name);
    const Member *m = s->members;
    while (m < s->members + s->num_members && strcmp(m->name, name))
        m++;
    cr_assert(m < s->members + s->num_members, "no argument %s", name);
    char *object = (char *)context + m->at;
    Part part = m->fields ? (Part){m->fields, m->num_fields, object, NULL, NULL}
                          : part_tensor((EpTensor *)(void *)object, NULL, m->name);
    if (m->given_at) part.given = (const void **)(void *)((char *)context + m->given_at);
    return part;
}

/* Make one change: "tensor=NULL", "tensor.data=NULL", "tensor.data+=8", "tensor.shape[0]+=-1",
 * "tensor.ndim=1", or "field=1" of the argument "". Returns the argument's name in sentences. */
static const char *change_part(const Subject *s, void *context, const char *call, char *text) {
    char *value = text, *field = text;
    strsep(&value, "=");
    int shifts = text[strlen(text) - 1] == '+', removes = !strcmp(value, "NULL");
    if (shifts) text[strlen(text) - 1] = 0;
    const char *name = strsep(&field, ".");
    if (!field && !removes) field = text, name = "";
    Part part = find_part(s, context, call, name);
    EpTensor *tensor = part.object;
    if (part.given) *part.given = field ? part.object : NULL;
    if (!field) return part.said;
    if (!strcmp(field, "data"))
        tensor->data = shifts ? (char *)tensor->data + atoi(value) : NULL;
    else if (shifts)
        tensor->shape[field[strlen("shape[")] - '0'] += atoi(value);
    else
        text_set(part.object, part.fields, part.num_fields, field, value);
    return part.said;
}

static void check_call(const Refusal *r, const char *call, const Subject *s, void *context) {
    if (s->has && !s->has(context, call)) return;
    char text[256], *rest = text, *good = malloc(2 * s->bytes + 1), *changed = good + s->bytes;
    const char *said = call;
    check_note("%s, %s", call, r->change);
    memcpy(good, context, s->bytes);
    if (s->reset) s->reset(context, call);
    snprintf(text, sizeof(text), "%s", r->change);
    for (char *change; !s->is_bystander && (change = strsep(&rest, " "));)
        said = change_part(s, context, call, change);
    const char *const words[] = {call,        said ? said : call, r->words[0], r->words[1],
                                 r->words[2], r->words[3],        NULL};
    memcpy(changed, context, s->bytes);
    check_refused(s->call(context, call), s->is_bystander ? EP_ERR_PEER : r->status, words,
                  __FILE__, __LINE__, call);
    CHECK(!memcmp(changed, context, s->bytes), "an output was written");
    memcpy(context, good, s->bytes);
    free(good);
    if (s->check) s->check(context, call);
}

/* Check a row for each of the values that its last change names, "field=1|2". */
static void check_values(const Refusal *r, const char *call, const Subject *s, void *context) {
    const char *bar = strchr(r->change, '|'), *equals = bar ? strrchr(r->change, '=') : NULL;
    char values[64], *rest = values, change[256], got[64];
    if (!bar) {
        check_call(r, call, s, context);
        return;
    }
    snprintf(values, sizeof(values), "%s", equals + 1);
    for (char *value; (value = strsep(&rest, "|"));) {
        Refusal one = *r;
        snprintf(change, sizeof(change), "%.*s=%s", (int)(equals - r->change), r->change, value);
        snprintf(got, sizeof(got), "got %s", value);
        one.change = change, one.words[3] = got;
        check_call(&one, call, s, context);
    }
}

/* What a tensor row is checked for. */
typedef struct TensorRow {
    const Refusal *row;
    const Subject *subject;
    void *context;
} TensorRow;

__attribute__((format(printf, 4, 5))) static void
check_tensor(const TensorRow *t, EpStatus status, const char *change, const char *format, ...) {
    char text[128], sentence[128];
    va_list values;
    va_start(values, format);
    vsnprintf(sentence, sizeof(sentence), format, values);
    va_end(values);
    snprintf(text, sizeof(text), "%s%s", t->row->tensor, change);
    Refusal one = {NULL, t->row->call, text, status, {sentence}};
    check_call(&one, one.call, t->subject, t->context);
}

/* A size one less and one more than "name=size"; "rows": fewer rows than are needed; "": any. */
static void check_dimension(const TensorRow *t, int d, char *size) {
    char change[48], *name = strsep(&size, "=");
    int right = size ? atoi(size) : 0;
    for (int wrong = right - 1; size && wrong <= right + 1; wrong += 2) {
        snprintf(change, sizeof(change), ".shape[%d]=%d", d, wrong);
        check_tensor(t, EP_ERR_SHAPE, change, "expected %s = %d in dimension %d, got %d", name,
                     right, d, wrong);
    }
    snprintf(change, sizeof(change), ".shape[%d]=1", d);
    if (!strcmp(name, "rows")) check_tensor(t, EP_ERR_BUFFER_SIZE, change, "rows, got 1");
}

static void check_type(const TensorRow *t, const char *type) {
    char change[48];
    snprintf(change, sizeof(change), ".type=%s", type);
    if (*type && !strstr(t->row->types, type))
        check_tensor(t, EP_ERR_TYPE, change, "expected %s, got %s", t->row->types, type);
}

/* All that a tensor may be refused for by itself. */
static void check_whole_tensor(const TensorRow *t) {
    const Refusal *r = t->row;
    char dims[96], types[] = TEXT_TYPES, *sizes = dims, *rest = types, change[48];
    int ndim = 0, at = r->alignment;
    snprintf(dims, sizeof(dims), "%s", r->dims);
    for (char *size; (size = strsep(&sizes, "|"));)
        check_dimension(t, ndim++, size);
    for (int wrong = ndim - 1; wrong <= ndim + 1; wrong += 2) {
        snprintf(change, sizeof(change), ".ndim=%d", wrong);
        check_tensor(t, EP_ERR_NDIM, change, "expected %d dimensions, got %d", ndim, wrong);
    }
    for (char *type; *r->types && (type = strsep(&rest, "|"));)
        check_type(t, type);
    if (r->is_required) check_tensor(t, EP_ERR_NULL, "=NULL", "expected a tensor, got NULL");
    check_tensor(t, EP_ERR_NULL, ".data=NULL", "expected data, got NULL");
    check_tensor(t, EP_ERR_STRUCT_SIZE, ".struct_size=8", "expected struct_size 48, got 8");
    snprintf(change, sizeof(change), ".data+=%d", at / 2);
    if (at > 1) check_tensor(t, EP_ERR_ADDRESS, change, "expected data on a multiple of %d", at);
}

static void check_useless(const TensorRow *t) {
    char names[128], *rest = names;
    Refusal one = *t->row;
    snprintf(names, sizeof(names), "%s", one.tensor);
    while ((one.tensor = strsep(&rest, "|")))
        check_tensor(&(TensorRow){&one, t->subject, t->context}, EP_ERR_UNSUPPORTED,
                     ".struct_size=48", "this call has no use for it, got a tensor");
}

void check_refusals(const char *group, const Subject *subject, void *context) {
    int rows = 0, is_here = 0;
    for (const Refusal *r = refusals; r < refusals + LENGTH(refusals); r++) {
        if (r->group) is_here = !strcmp(r->group, group);
        if (r->group || !is_here) continue;
        rows++;
        if (r->tensor && !r->dims)
            check_useless(&(TensorRow){r, subject, context});
        else if (r->tensor)
            check_whole_tensor(&(TensorRow){r, subject, context});
        else if (*r->call)
            check_values(r, r->call, subject, context);
        for (const char *const *call = subject->calls; !*r->call && *call; call++)
            check_values(r, *call, subject, context);
    }
    CHECK(rows, "no rows of %s", group);
}
