/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Returns word `number`, and its length, or NULL. */
static const char *word_at(const char *words, int64_t number, int *length) {
    for (; words && number > 0; number--)
        words = strchr(words, '|') ? strchr(words, '|') + 1 : NULL;
    *length = words ? (int)strcspn(words, "|") : 0;
    return *length ? words : NULL;
}

static void fail(const char *name, const char *value) {
    fprintf(stderr, "expected a field and its value, got %s=%s\n", name, value);
    abort();
}

static int64_t number_of(const TextField *field, const char *value) {
    char *end;
    int64_t number = strtoll(value, &end, 10);
    if (end > value && !*end) return number;
    for (number = 0; number < 16; number++) {
        int length;
        const char *word = word_at(field->words, number, &length);
        if (word && (size_t)length == strlen(value) && !strncmp(word, value, (size_t)length))
            return number;
    }
    fail(field->name, value);
    return 0;
}

void text_set(void *object, const TextField *fields, int n, const char *name, const char *value) {
    const TextField *field = fields, *end = fields + n;
    while (field < end && strcmp(field->name, name))
        field++;
    if (field == end) fail(name, value);
    char *to = (char *)object + field->at;
    double real = field->is_real ? strtod(value, NULL) : 0;
    if (field->bytes > sizeof(int64_t)) {
        snprintf(to, field->bytes, "%s", value);
        return;
    }
    int64_t wide = field->is_real ? 0 : number_of(field, value);
    int32_t narrow = (int32_t)wide;
    const void *from = field->bytes == sizeof(narrow) ? (const void *)&narrow : &wide;
    memcpy(to, field->is_real ? (const void *)&real : from, field->bytes);
}

static int64_t load(const void *from, size_t bytes) {
    int32_t narrow;
    int64_t wide;
    memcpy(&narrow, from, sizeof(narrow));
    if (bytes == sizeof(narrow)) return narrow;
    memcpy(&wide, from, sizeof(wide));
    return wide;
}

const char *text_of(const void *object, const TextField *fields, int n, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (const TextField *f = fields; f < fields + n && used < bytes; f++) {
        const char *from = (const char *)object + f->at, *word = from;
        char number[24];
        int length = (int)sizeof(number), is_text = f->bytes > sizeof(int64_t);
        int64_t value = is_text ? *from : load(from, f->bytes);
        if (!value || f->is_real) continue;
        snprintf(number, sizeof(number), "%lld", (long long)value);
        if (is_text)
            length = (int)f->bytes;
        else if (!(word = word_at(f->words, value, &length)))
            word = number, length = (int)sizeof(number);
        used += (size_t)snprintf(text + used, bytes - used, "%s%s=%.*s", used ? " " : "", f->name,
                                 length, word);
    }
    return text;
}
