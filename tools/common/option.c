/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/option.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "ep/ep.h"
#include "tools/common/util.h"
#include "tools/common/world.h"

/* ---- choices ------------------------------------------------------------------------------- */

const Choice option_types[] = {
    {"bf16", EP_TYPE_BF16}, {"fp16", EP_TYPE_FP16}, {"fp32", EP_TYPE_FP32}, {NULL, 0}};

const Choice option_backends[] = {
    {"auto", EP_BACKEND_AUTO}, {"host", EP_BACKEND_HOST}, {"cuda", EP_BACKEND_CUDA}, {NULL, 0}};

const char *option_choice_name(const Choice *choices, int64_t value) {
    for (; choices->name; choices++) {
        if (choices->value == value) return choices->name;
    }
    return "unknown";
}

/* ---- parsers ------------------------------------------------------------------------------- */

void *option_field(const Option *option, void *values) {
    return (char *)values + option->offset;
}

bool option_parse_flag(const Option *option, const char *text, void *values) {
    (void)text;
    *(bool *)option_field(option, values) = true;
    return true;
}

bool option_parse_text(const Option *option, const char *text, void *values) {
    if (!text[0])
        return bench_refuse("--%s: expected %s, got an empty string", option->name,
                            option->argument);
    *(const char **)option_field(option, values) = text;
    return true;
}

bool option_parse_int(const Option *option, const char *text, void *values) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < option->low || value > option->high ||
        text[0] == ' ' || text[0] == '+')
        return bench_refuse("--%s: expected a whole number from %lld to %lld, got \"%s\"",
                            option->name, (long long)option->low, (long long)option->high, text);
    *(int64_t *)option_field(option, values) = value;
    return true;
}

bool option_parse_switch(const Option *option, const char *text, void *values) {
    return option_parse_int(option, text, values);
}

/* The whole text must be a number from low to high; NaN is outside every range. */
bool option_read_real(const char *text, double low, double high, double *value) {
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    return end != text && !*end && !errno && *value >= low && *value <= high && text[0] != ' ';
}

bool option_parse_choice(const Option *option, const char *text, void *values) {
    for (const Choice *c = option->choices; c->name; c++) {
        if (strcmp(c->name, text) == 0) {
            *(int64_t *)option_field(option, values) = c->value;
            return true;
        }
    }
    return bench_refuse("--%s: expected %s, got \"%s\"", option->name, option->argument, text);
}

/* ---- values -------------------------------------------------------------------------------- */

void option_put(const OptionTable *table, const void *values, Json *j) {
    for (int i = 0; i < table->count; i++) {
        const Option *o = &table->options[i];
        const void *field = (const char *)values + o->offset;
        if (!o->key) continue;
        if (o->parse == option_parse_flag)
            json_put_bool(j, o->key, *(const bool *)field);
        else if (o->parse == option_parse_switch)
            json_put_bool(j, o->key, *(const int64_t *)field);
        else if (o->choices)
            json_put_text(j, o->key, option_choice_name(o->choices, *(const int64_t *)field));
        else
            json_put_int(j, o->key, *(const int64_t *)field);
    }
}

const char *option_value_name(const OptionTable *table, const void *values, const char *name) {
    const Option *o = table->options;
    while (strcmp(o->name, name) != 0)
        o++;
    return option_choice_name(o->choices, *(const int64_t *)((const char *)values + o->offset));
}

static void set_defaults(const OptionTable *table, void *values) {
    for (int i = 0; i < table->count; i++) {
        const Option *o = &table->options[i];
        if (o->initial) *(int64_t *)option_field(o, values) = o->initial;
    }
}

/* ---- checks -------------------------------------------------------------------------------- */

bool option_check_threads(const RunOptions *o) {
    return !o->threads || !world_launched() ||
           bench_refuse("--threads: expected a start without mpirun, got one under mpirun");
}

bool option_check_row(const char *name, int64_t elements, int64_t type) {
    long long bytes = (long long)elements * (long long)ep_type_bytes((EpType)type);
    if (bytes % 16 == 0 && bytes <= EP_MAX_ROW_BYTES) return true;
    return bench_refuse("--%s: expected rows of a multiple of 16 bytes up to %d, got %lld x %s = "
                        "%lld bytes",
                        name, EP_MAX_ROW_BYTES, (long long)elements,
                        option_choice_name(option_types, type), bytes);
}

bool option_check_alignment(int64_t alignment) {
    return !(alignment & (alignment - 1)) ||
           bench_refuse("--align: expected a power of two, got %lld", (long long)alignment);
}

/* ---- help ---------------------------------------------------------------------------------- */

void option_print_help(const OptionTable *table, FILE *out) {
    fputs(table->usage, out);
    for (int i = 0; i < table->count; i++) {
        const Option *o = &table->options[i];
        char left[64];
        snprintf(left, sizeof(left), "--%s%s%s", o->name, o->argument ? " " : "",
                 o->argument ? o->argument : "");
        if (o->letter)
            fprintf(out, "  -%c, %-26s", o->letter, left);
        else
            fprintf(out, "      %-26s", left);
        fprintf(out, "%s%s\n", strlen(left) > 25 ? "\n                                " : "",
                o->doc);
    }
}

/* ---- the command line ---------------------------------------------------------------------- */

enum { FIRST_LONG = 256 };

static const Option *find_option(const OptionTable *table, int key) {
    if (key >= FIRST_LONG) return &table->options[key - FIRST_LONG];
    for (int i = 0; i < table->count; i++) {
        if (table->options[i].letter == key) return &table->options[i];
    }
    return NULL;
}

static void build_getopt_tables(const OptionTable *table, char *letters, struct option *longs) {
    *letters++ = '+'; /* stop at the first non-option */
    *letters++ = ':'; /* distinguish a missing argument from an unknown option */
    for (int i = 0; i < table->count; i++) {
        const Option *o = &table->options[i];
        int argument = !o->argument            ? no_argument
                       : o->argument[0] == '[' ? optional_argument
                                               : required_argument;
        longs[i] = (struct option){o->name, argument, NULL, FIRST_LONG + i};
        if (!o->letter) continue;
        *letters++ = o->letter;
        if (o->argument) *letters++ = ':';
    }
    *letters = 0;
    longs[table->count] = (struct option){NULL, 0, NULL, 0};
}

static bool refuse_option(int key, char **argv, int at) {
    const char *text = argv[at];
    if (key == ':') return bench_refuse("%s: expected an argument, got none", text);
    if (optopt >= FIRST_LONG) return bench_refuse("%s: expected no argument, got one", text);
    return bench_refuse("%s: expected an option of %s (see --help), got an unknown one", text,
                        bench_program);
}

bool option_parse(const OptionTable *table, int argc, char **argv, void *values) {
    char letters[2 * OPTION_MAX + 3];
    struct option longs[OPTION_MAX + 1];
    build_getopt_tables(table, letters, longs);
    set_defaults(table, values);
    opterr = 0, optind = 1;
    for (;;) {
        int at = optind;
        int key = getopt_long(argc, argv, letters, longs, NULL);
        if (key == -1) break;
        if (key == '?' || key == ':') return refuse_option(key, argv, at < argc ? at : argc - 1);
        const Option *option = find_option(table, key);
        bool optional = option->argument && option->argument[0] == '[';
        if (optional && !optarg && optind < argc && argv[optind][0] != '-') optarg = argv[optind++];
        if (!option->parse(option, optarg, values)) return false;
    }
    if (optind < argc)
        return bench_refuse("%s: expected options alone, got a stray argument", argv[optind]);
    return true;
}
