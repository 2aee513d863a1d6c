/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/refusals.h"

/* A row: a group's name, or a call of the group before it. */
typedef struct Refusal {
    const char *group, *call, *change;
    EpStatus status;
    const char *words[4];
} Refusal;

static const Refusal refusals[] = {
#define GROUP(group) {#group, NULL, NULL, EP_OK, {NULL}},
#define R(call, change, status, ...) {NULL, #call, change, EP_ERR_##status, {__VA_ARGS__}},
#include "tests/cases/refusals.def"
#undef GROUP
#undef R
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

void check_refusals(const char *group, const Subject *subject, void *context) {
    int rows = 0, is_here = 0;
    for (const Refusal *r = refusals; r < refusals + LENGTH(refusals); r++) {
        if (r->group) is_here = !strcmp(r->group, group);
        if (r->group || !is_here) continue;
        rows++;
        if (*r->call) check_call(r, r->call, subject, context);
        for (const char *const *call = subject->calls; !*r->call && *call; call++)
            check_call(r, *call, subject, context);
    }
    CHECK(rows, "no rows of %s", group);
}
