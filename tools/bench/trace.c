/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/routing.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/util.h"

static const char magic[] = "ep-routing";
enum { VERSION = 1 };

/* ---- reading: a line at a time, a number at a time ----------------------------------------- */

/* A line of a token has at most EP_MAX_TOP_K numbers. What has longer lines is not a trace. */
enum { MOST_CHARS = 4096 };

typedef struct Reader {
    const char *path;
    FILE *stream;
    char line[MOST_CHARS + 1], *at;
    int64_t number; /* line number */
} Reader;

/* The message is printable whatever the file contains. */
static bool refuse(const Reader *in, const char *expected, const char *got) {
    char shown[64];
    size_t i = 0;
    for (; got[i] && i + 1 < sizeof(shown); i++)
        shown[i] = (char)(got[i] >= ' ' && got[i] <= '~' ? got[i] : '?');
    shown[i] = 0;
    return bench_refuse("%s:%lld: expected %s, got \"%s\"", in->path, (long long)in->number,
                        expected, shown);
}

/* Read a line with its newline. Returns its length, up to MOST_CHARS, or 0 where the file ends. */
static size_t read_line(Reader *in) {
    size_t length = 0;
    for (int c = 0; c != '\n' && length < MOST_CHARS;) {
        if ((c = getc_unlocked(in->stream)) == EOF) break;
        in->line[length++] = (char)c;
    }
    in->line[length] = 0;
    return length;
}

static bool next_line(Reader *in, const char *expected) {
    in->number++;
    errno = 0;
    size_t length = read_line(in);
    if (ferror(in->stream))
        return bench_refuse("%s:%lld: expected %s, got an error: %s", in->path,
                            (long long)in->number, expected, strerror(errno));
    if (!length)
        return bench_refuse("%s:%lld: expected %s, got the end of the file", in->path,
                            (long long)in->number, expected);
    if (length == MOST_CHARS && in->line[length - 1] != '\n')
        return bench_refuse("%s:%lld: expected a line of less than %d characters, got a longer one",
                            in->path, (long long)in->number, MOST_CHARS);
    if (in->line[length - 1] != '\n')
        return bench_refuse("%s:%lld: expected a complete line, got the end of the file in the "
                            "middle of one",
                            in->path, (long long)in->number);
    in->line[length - 1] = 0;
    in->at = in->line;
    if (strlen(in->line) + 1 < length)
        return bench_refuse("%s:%lld: expected %s, got a line with a zero byte", in->path,
                            (long long)in->number, expected);
    return true;
}

static void skip_blanks(Reader *in) {
    while (*in->at == ' ' || *in->at == '\t' || *in->at == '\r')
        in->at++;
}

static bool read_word(Reader *in, const char *word) {
    skip_blanks(in);
    size_t length = strlen(word);
    if (strncmp(in->at, word, length) != 0 || (in->at[length] && in->at[length] != ' '))
        return refuse(in, word, in->at);
    in->at += length;
    return true;
}

static bool read_number(Reader *in, const char *what, int64_t low, int64_t high, int64_t *value) {
    skip_blanks(in);
    char *end;
    errno = 0;
    long long number = strtoll(in->at, &end, 10);
    bool digits = in->at[*in->at == '-'] >= '0' && in->at[*in->at == '-'] <= '9'; /* no + */
    bool whole = digits && (!*end || *end == ' ' || *end == '\t' || *end == '\r');
    if (!whole || errno || number < low || number > high) {
        char expected[128];
        snprintf(expected, sizeof(expected), "%s from %lld to %lld", what, (long long)low,
                 (long long)high);
        return refuse(in, expected, in->at);
    }
    in->at = end;
    *value = number;
    return true;
}

static bool read_end(Reader *in) {
    skip_blanks(in);
    return *in->at == 0 || refuse(in, "the end of the line", in->at);
}

/* ---- the parts of a trace ------------------------------------------------------------------ */

/* Read a number that must be the wanted one; 0: it becomes that, at most `most`. */
static bool read_matching(Reader *in, const char *name, const char *option, int most, int *wanted) {
    int64_t value;
    if (!read_word(in, name) || !read_number(in, name, 1, *wanted ? INT_MAX : most, &value))
        return false;
    if (*wanted && value != *wanted)
        return bench_refuse("%s:%lld: expected %s %d (%s), got %lld", in->path,
                            (long long)in->number, name, *wanted, option, (long long)value);
    *wanted = (int)value;
    return true;
}

static bool read_header(Reader *in, TraceShape *shape) {
    int64_t version;
    if (!next_line(in, "\"ep-routing 1\"")) return false;
    if (!read_word(in, magic) || !read_number(in, "version", VERSION, VERSION, &version) ||
        !read_end(in))
        return false;
    return next_line(in, "\"experts E top_k K ranks R\"") &&
           read_matching(in, "experts", "--experts", EP_MAX_EXPERTS, &shape->num_experts) &&
           read_matching(in, "top_k", "--top-k", EP_MAX_TOP_K, &shape->top_k) &&
           read_matching(in, "ranks", "the number of ranks", EP_MAX_RANKS, &shape->num_ranks) &&
           read_end(in);
}

/* Rows read so far. They grow with the lines, so a wrong count cannot allocate much memory. */
typedef struct Rows {
    int32_t *experts;
    size_t used, capacity;
} Rows;

static bool rows_reserve(Rows *rows, size_t more) {
    if (rows->used + more <= rows->capacity) return true;
    size_t capacity = 2 * rows->capacity + more + 4096;
    int32_t *grown = realloc(rows->experts, capacity * sizeof(int32_t));
    if (!grown) return bench_fail("no memory for %zu indices of a trace", capacity);
    rows->experts = grown;
    rows->capacity = capacity;
    return true;
}

static bool read_row(Reader *in, const TraceShape *shape, Rows *rows) {
    if (!next_line(in, "a token's indices") || !rows_reserve(rows, (size_t)shape->top_k))
        return false;
    for (int k = 0; k < shape->top_k; k++) {
        int64_t expert;
        if (!read_number(in, "an expert index", INT_MIN, shape->num_experts - 1, &expert))
            return false;
        rows->experts[rows->used++] = (int32_t)expert;
    }
    return read_end(in);
}

static bool read_rank(Reader *in, const TraceShape *shape, Rows *rows, int64_t *tokens) {
    if (!next_line(in, "\"tokens T\"") || !read_word(in, "tokens") ||
        !read_number(in, "a number of tokens", 0, 1 << 24, tokens) || !read_end(in))
        return false;
    for (int64_t t = 0; t < *tokens; t++) {
        if (!read_row(in, shape, rows)) return false;
    }
    return true;
}

static bool read_ranks(Reader *in, const TraceShape *shape, Rows *rows, int64_t *tokens) {
    for (int r = 0; r < shape->num_ranks; r++) {
        if (!read_rank(in, shape, rows, &tokens[r])) return false;
    }
    in->number++;
    int c = fgetc(in->stream);
    return c == EOF || bench_refuse("%s:%lld: expected the end of the file, got more lines",
                                    in->path, (long long)in->number);
}

static bool read_all(Reader *in, TraceShape *shape, Rows *rows, Routing *out) {
    if (!read_header(in, shape)) return false;
    int64_t *tokens = bench_alloc((size_t)shape->num_ranks, sizeof(int64_t), "trace");
    bool ok = tokens && read_ranks(in, shape, rows, tokens) &&
              routing_alloc(out, shape->num_ranks, shape->top_k, shape->num_experts, tokens);
    free(tokens);
    return ok;
}

bool trace_read(const char *path, TraceShape *shape, Routing *out) {
    Reader in = {.path = path, .stream = fopen(path, "r")};
    if (!in.stream)
        return bench_refuse("--routing file: cannot read %s: %s", path, strerror(errno));
    Rows rows = {NULL, 0, 0};
    bool ok = read_all(&in, shape, &rows, out);
    if (ok && rows.used) memcpy(out->experts, rows.experts, rows.used * sizeof(int32_t));
    free(rows.experts);
    fclose(in.stream);
    return ok;
}

/* ---- writing ------------------------------------------------------------------------------- */

static void write_rank(FILE *out, const Routing *routing, int rank) {
    fprintf(out, "tokens %lld\n", (long long)routing->tokens[rank]);
    for (int64_t t = 0; t < routing->tokens[rank]; t++) {
        const int32_t *row = routing_row(routing, rank, t);
        for (int k = 0; k < routing->top_k; k++)
            fprintf(out, "%d%c", row[k], k + 1 < routing->top_k ? ' ' : '\n');
    }
}

bool trace_write(const char *path, const Routing *routing) {
    OutputFile file;
    if (!output_open(&file, path)) return false;
    fprintf(file.stream, "%s %d\nexperts %d top_k %d ranks %d\n", magic, VERSION,
            routing->num_experts, routing->top_k, routing->num_ranks);
    for (int r = 0; r < routing->num_ranks; r++)
        write_rank(file.stream, routing, r);
    return output_commit(&file);
}
