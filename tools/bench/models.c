/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/models.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/util.h"

/* ---- the command line ---------------------------------------------------------------------- */

int models_list_modes(const Options *options, int64_t *out) {
    out[0] = options->mode_given ? options->mode : EP_MODE_THROUGHPUT;
    out[1] = EP_MODE_LATENCY;
    return options->mode_given ? 1 : 2;
}

/* --split and --chain are for latency mode and for graphs; the other runs do without them. */
static bool set_mode(const Options *options, int64_t mode, Options *out) {
    *out = *options;
    out->mode = mode;
    if (mode != EP_MODE_LATENCY && !options->mode_given) {
        out->split = false;
        if (!out->graphs) out->chain = 0;
    }
    return options_complete(out);
}

bool models_options(const Options *options, const char *path, const Model *model, int64_t mode,
                    Options *out) {
    char message[BENCH_MESSAGE_BYTES];
    Options shaped = *options;
    shaped.hidden = model->hidden, shaped.top_k = model->top_k, shaped.experts = model->experts;
    if (set_mode(&shaped, mode, out)) return true;
    snprintf(message, sizeof(message), "%s", bench_error_message());
    return bench_refuse("%s:%lld: %s: %s", path, (long long)model->line, model->name, message);
}

/* The sweep of --models, whose defaults are of no single mode. */
static void complete_sweep(Options *o) {
    if (o->tokens_begin < 0)
        o->tokens_begin = o->tokens_end >= 0 && o->tokens_end < 128 ? o->tokens_end : 128;
    if (o->tokens_end < 0) o->tokens_end = o->tokens_begin > 8192 ? o->tokens_begin : 8192;
    o->tokens_given = true;
    if (!o->routing) o->routing = ROUTING_UNIFORM;
}

static bool check_rules(const Options *o) {
    int64_t list[2];
    if (o->kind != CASE_STEP)
        return bench_refuse("--case: expected step with --models, got another");
    if (o->shape_given)
        return bench_refuse("--%s: expected none with --models, whose file has the shapes, got one",
                            o->shape_given);
    if (o->routing == ROUTING_FILE)
        return bench_refuse("--routing: expected uniform, zipf or one-hot with --models, got file");
    if (o->save_path) return bench_refuse("--save-routing: expected no --models, got it");
    if (o->baseline) return bench_refuse("--baseline: expected no --models, got it");
    for (int i = 0; i < models_list_modes(o, list); i++) {
        Options any;
        if (!set_mode(o, list[i], &any)) return false;
    }
    return true;
}

bool models_complete(Options *options) {
    complete_sweep(options);
    return options_check_sweep(options) && check_rules(options);
}

/* ---- which file ---------------------------------------------------------------------------- */

/* Relative to the program's folder: as installed, and in the source tree's build folder. */
static const char *const places[] = {"../share/libep/models.txt", "../tools/models.txt"};
enum { NUM_PLACES = sizeof(places) / sizeof(places[0]) };

static bool find_default(char *out, size_t bytes) {
    char program[2048];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    if (length <= 0 || length >= (ssize_t)sizeof(program) - 1)
        return bench_refuse("--models: expected a FILE, got none, and the program's own folder is "
                            "unknown");
    program[length] = 0;
    char *slash = strrchr(program, '/');
    if (slash) *slash = 0;
    for (int i = 0; i < NUM_PLACES; i++) {
        char path[4096];
        snprintf(path, sizeof(path), "%s/%s", program, places[i]);
        char *plain = realpath(path, NULL);
        if (!plain) continue;
        snprintf(out, bytes, "%s", plain);
        free(plain);
        return true;
    }
    return bench_refuse("--models: expected a FILE, or one that is installed, got neither: %s has "
                        "no %s and no %s",
                        program, places[0], places[1]);
}

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct Reader {
    const char *path;
    int64_t line;
    char *at; /* the rest of the line */
} Reader;

/* The message is printable whatever the file contains. */
static bool refuse(const Reader *in, const char *expected, const char *got) {
    char shown[64];
    size_t i = 0;
    for (; got[i] && i + 1 < sizeof(shown); i++)
        shown[i] = (char)(got[i] >= ' ' && got[i] <= '~' ? got[i] : '?');
    shown[i] = 0;
    return bench_refuse("%s:%lld: expected %s, got %s%s%s", in->path, (long long)in->line, expected,
                        i ? "\"" : "", i ? shown : "the end of the line", i ? "\"" : "");
}

static const char blanks[] = " \t\r";

/* Returns the next word of the line, "" at its end. */
static char *next_word(Reader *in) {
    char *word = in->at + strspn(in->at, blanks);
    in->at = word + strcspn(word, blanks);
    if (*in->at) *in->at++ = 0;
    return word;
}

static bool read_name(Reader *in, Model *model) {
    const char *word = next_word(in);
    const size_t length = strlen(word);
    for (size_t i = 0; i < length; i++)
        if (word[i] < '!' || word[i] > '~') return refuse(in, "a name of printable letters", word);
    if (length >= sizeof(model->name)) return refuse(in, "a name of at most 63 letters", word);
    memcpy(model->name, word, length + 1);
    return true;
}

static bool read_number(Reader *in, const char *what, int64_t high, int64_t *out) {
    char expected[64], *word = next_word(in), *end = word;
    errno = 0;
    *out = *word >= '0' && *word <= '9' ? strtoll(word, &end, 10) : 0;
    if (end != word && !*end && !errno && *out >= 1 && *out <= high) return true;
    snprintf(expected, sizeof(expected), "%s from 1 to %lld", what, (long long)high);
    return refuse(in, expected, word);
}

static bool read_end(Reader *in) {
    const char *word = next_word(in);
    return !*word || refuse(in, "the end of the line after four words", word);
}

static bool read_model(Reader *in, Model *out) {
    *out = (Model){.line = in->line};
    if (!read_name(in, out) || !read_number(in, "a hidden size", EP_MAX_ROW_BYTES, &out->hidden) ||
        !read_number(in, "a top-k", EP_MAX_TOP_K, &out->top_k) ||
        !read_number(in, "a number of experts", 1 << 20, &out->experts) || !read_end(in))
        return false;
    if (out->top_k <= out->experts) return true;
    return bench_refuse("%s:%lld: expected a top-k of at most the %lld experts, got %lld", in->path,
                        (long long)in->line, (long long)out->experts, (long long)out->top_k);
}

static bool append(const Reader *in, const Model *model, ModelList *list) {
    for (int64_t i = 0; i < list->count; i++)
        if (strcmp(list->models[i].name, model->name) == 0)
            return bench_refuse("%s:%lld: expected a name that no other line has, got \"%s\", the "
                                "name of line %lld",
                                in->path, (long long)in->line, model->name,
                                (long long)list->models[i].line);
    Model *grown = realloc(list->models, (size_t)(list->count + 1) * sizeof(Model));
    if (!grown) return bench_fail("no memory for %lld models", (long long)list->count + 1);
    list->models = grown;
    list->models[list->count++] = *model;
    return true;
}

/* A line, which a comment may end. */
static bool read_line(Reader *in, char *line, size_t length, ModelList *list) {
    Model model;
    in->line++;
    if (length && line[length - 1] == '\n') line[--length] = 0;
    if (strlen(line) < length)
        return bench_refuse("%s:%lld: expected text, got a zero byte", in->path,
                            (long long)in->line);
    line[strcspn(line, "#")] = 0;
    in->at = line;
    if (!line[strspn(line, blanks)]) return true;
    return read_model(in, &model) && append(in, &model, list);
}

static bool read_stream(FILE *stream, ModelList *list) {
    Reader in = {.path = list->path};
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    bool ok = true;
    errno = 0;
    while (ok && (length = getline(&line, &capacity, stream)) >= 0)
        ok = read_line(&in, line, (size_t)length, list);
    if (ok && ferror(stream))
        ok = bench_refuse("%s:%lld: expected a line, got an error: %s", list->path,
                          (long long)in.line + 1, strerror(errno));
    free(line);
    return ok &&
           (list->count || bench_refuse("%s: expected at least one model, got none", list->path));
}

static bool read_file(const char *path, ModelList *list) {
    if (path && strlen(path) >= sizeof(list->path))
        return bench_refuse("--models: a path of %zu characters is too long", strlen(path));
    if (path)
        snprintf(list->path, sizeof(list->path), "%s", path);
    else if (!find_default(list->path, sizeof(list->path)))
        return false;
    FILE *stream = fopen(list->path, "r");
    if (!stream) return bench_refuse("--models: cannot read %s: %s", list->path, strerror(errno));
    bool ok = read_stream(stream, list);
    fclose(stream);
    return ok;
}

/* ---- all ranks ----------------------------------------------------------------------------- */

bool models_load(World *world, const char *path, ModelList *out) {
    *out = (ModelList){.count = 0};
    if (!world_all(world, world->rank != 0 || read_file(path, out))) return false;
    if (!world_broadcast(world, &out->count, sizeof(out->count)) ||
        !world_broadcast(world, out->path, sizeof(out->path)))
        return false;
    if (world->rank != 0) out->models = bench_alloc((size_t)out->count, sizeof(Model), "models");
    return world_all(world, out->models != NULL) &&
           world_broadcast(world, out->models, (size_t)out->count * sizeof(Model));
}

void models_free(ModelList *list) {
    free(list->models);
    *list = (ModelList){.count = 0};
}
