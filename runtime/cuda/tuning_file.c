/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of constants:
 *
 *     # comments, and blank lines
 *     version = 1
 *     gpu = NVIDIA H200
 *     capability = 9.0
 *     gpus = 4
 *     links = nvlink
 *     wire_bytes_per_us = 350000
 *     ...
 *     end
 *
 * The five lines about the machine come first, in any order. The last line shows that the file is
 * whole.
 */
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/cuda/tuning.h"
#include "runtime/status.h"

typedef struct Constant {
    const char *name;
    size_t offset; /* in EpTuning */
    double least, most;
    const char *unit, *how;
} Constant;

#define CONSTANT(member, value, least, most, unit, how) \
    {#member, offsetof(EpTuning, member), least, most, unit, how},
static const Constant constants[] = {EP_TUNING_MAP(CONSTANT)};
#undef CONSTANT
enum { NUM_CONSTANTS = sizeof(constants) / sizeof(constants[0]) };

static const char *const links[] = {"none", "nvlink", "peer"}; /* in the order of EpTuningLinks */

enum { NUM_MACHINE = 5 };
static const char *const machine[NUM_MACHINE] = {"version", "gpu", "capability", "gpus", "links"};

/* What has been read so far. */
typedef struct Reader {
    const char *path;
    int line;
    const EpTuningKey *key;
    EpTuning tuning;
    int fits;
    unsigned given; /* bit i: machine[i] */
    char seen[NUM_CONSTANTS];
    int ended;
} Reader;

__attribute__((format(printf, 2, 3))) static EpStatus refuse(const Reader *r, const char *format,
                                                             ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (!r->line) return ep_fail(EP_ERR_SETTING, "setting LIBEP_TUNING: %s: %s", r->path, text);
    return ep_fail(EP_ERR_SETTING, "setting LIBEP_TUNING: %s, line %d: %s", r->path, r->line, text);
}

/* ---- the machine --------------------------------------------------------------------------- */

static EpStatus read_version(Reader *r, const char *value) {
    char expected[16];
    snprintf(expected, sizeof(expected), "%d", EP_TUNING_VERSION);
    if (strcmp(value, expected) == 0) return EP_OK;
    return refuse(r, "expected version %s, got '%s': run this libep's ep_tune again", expected,
                  value);
}

static EpStatus read_gpu(Reader *r, const char *value) {
    if (strcmp(value, r->key->gpu) == 0) return EP_OK;
    return refuse(r, "expected a file of this rank's GPU, %s, got one of '%s'", r->key->gpu, value);
}

static EpStatus read_capability(Reader *r, const char *value) {
    char expected[16];
    snprintf(expected, sizeof(expected), "%d.%d", r->key->capability / 10, r->key->capability % 10);
    if (strcmp(value, expected) == 0) return EP_OK;
    return refuse(r, "expected a file of capability %s, as this rank's GPU has, got '%s'", expected,
                  value);
}

static EpStatus read_gpus(Reader *r, const char *value) {
    char *end;
    long gpus = strtol(value, &end, 10);
    if (end == value || *end || gpus < 1 || gpus > EP_MAX_RANKS)
        return refuse(r, "expected gpus = 1 .. %d, got '%s'", EP_MAX_RANKS, value);
    r->fits &= gpus == r->key->gpus;
    return EP_OK;
}

static EpStatus read_links(Reader *r, const char *value) {
    for (int i = 0; i < 3; i++)
        if (strcmp(value, links[i]) == 0) {
            r->fits &= i == (int)r->key->links;
            return EP_OK;
        }
    return refuse(r, "expected links = none, nvlink or peer, got '%s'", value);
}

static EpStatus read_machine(Reader *r, int which, const char *value) {
    static EpStatus (*const readers[NUM_MACHINE])(Reader *, const char *) = {
        read_version, read_gpu, read_capability, read_gpus, read_links};
    if (r->given >> which & 1) return refuse(r, "'%s' comes twice", machine[which]);
    r->given |= 1u << which;
    return readers[which](r, value);
}

/* ---- constants ----------------------------------------------------------------------------- */

static EpStatus read_constant(Reader *r, int which, const char *value) {
    const Constant *c = &constants[which];
    char *end;
    double number = strtod(value, &end);
    if (r->given != (1u << NUM_MACHINE) - 1)
        return refuse(r,
                      "expected version, gpu, capability, gpus and links before the constants, "
                      "got '%s'",
                      c->name);
    if (r->seen[which]) return refuse(r, "'%s' comes twice", c->name);
    if (end == value || *end || !(number >= c->least && number <= c->most))
        return refuse(r, "%s: expected a number of %g .. %g (%s), got '%s'", c->name, c->least,
                      c->most, c->unit, value);
    r->seen[which] = 1;
    memcpy((char *)&r->tuning + c->offset, &number, sizeof(number));
    return EP_OK;
}

/* ---- lines --------------------------------------------------------------------------------- */

/* Remove blanks at both ends. */
static char *trim(char *text) {
    text += strspn(text, " \t\r\n");
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r\n", text[length - 1]))
        length--;
    text[length] = 0;
    return text;
}

static EpStatus read_line(Reader *r, char *line) {
    line[strcspn(line, "#")] = 0;
    line = trim(line);
    if (!line[0]) return EP_OK;
    if (r->ended) return refuse(r, "expected nothing after the line 'end', got '%.64s'", line);
    if (strcmp(line, "end") == 0) {
        r->ended = 1;
        return EP_OK;
    }
    char *equals = strchr(line, '=');
    if (!equals) return refuse(r, "expected NAME = VALUE, or 'end', got '%.64s'", line);
    *equals = 0;
    const char *name = trim(line), *value = trim(equals + 1);
    for (int i = 0; i < NUM_MACHINE; i++)
        if (strcmp(name, machine[i]) == 0) return read_machine(r, i, value);
    for (int i = 0; i < NUM_CONSTANTS; i++)
        if (strcmp(name, constants[i].name) == 0) return read_constant(r, i, value);
    return refuse(r, "expected the name of a constant, as ep_tune writes it, got '%.64s'", name);
}

static EpStatus read_lines(Reader *r, FILE *file) {
    char line[512];
    while (fgets(line, sizeof(line), file)) {
        r->line++;
        if (!strchr(line, '\n') && strlen(line) == sizeof(line) - 1)
            return refuse(r, "expected lines of at most %d characters", (int)sizeof(line) - 2);
        if (!r->ended && !strchr(line, '\n') && strcmp(trim(line), "end") != 0)
            return refuse(r, "expected whole lines and a last line 'end': the file is cut short");
        EP_TRY(read_line(r, line));
    }
    if (ferror(file)) return refuse(r, "cannot be read: %s", strerror(errno));
    r->line = 0;
    if (!r->ended) return refuse(r, "expected a last line 'end', got none: the file is cut short");
    if (r->tuning.many_spare <= r->tuning.few_spare)
        return refuse(r, "expected many_spare above few_spare, got %g and %g", r->tuning.many_spare,
                      r->tuning.few_spare);
    return EP_OK;
}

EpStatus ep_tuning_read(const char *path, const EpTuningKey *key, EpTuning *out, int *fits) {
    Reader r = {.path = path, .key = key, .tuning = *out, .fits = 1};
    FILE *file = fopen(path, "re");
    if (!file) return refuse(&r, "expected a file that can be read: %s", strerror(errno));
    EpStatus status = read_lines(&r, file);
    fclose(file);
    if (status != EP_OK) return status;
    *fits = r.fits;
    if (r.fits) *out = r.tuning;
    return EP_OK;
}

/* ---- writing ------------------------------------------------------------------------------- */

/* Add a line. `length` counts all, as snprintf does, whether it fits or not. */
__attribute__((format(printf, 4, 5))) static void put(char *text, size_t bytes, size_t *length,
                                                      const char *format, ...) {
    va_list args;
    va_start(args, format);
    size_t left = *length < bytes ? bytes - *length : 0;
    *length += (size_t)vsnprintf(left ? text + *length : NULL, left, format, args);
    va_end(args);
}

size_t ep_tuning_write(const EpTuning *tuning, const EpTuningKey *key, char *text, size_t bytes) {
    size_t length = 0;
    put(text, bytes, &length,
        "# How libep's kernels divide their blocks: LIBEP_TUNING names this file.\n"
        "version = %d\ngpu = %s\ncapability = %d.%d\ngpus = %d\nlinks = %s\n\n",
        EP_TUNING_VERSION, key->gpu, key->capability / 10, key->capability % 10, key->gpus,
        links[key->links]);
    for (int i = 0; i < NUM_CONSTANTS; i++) {
        const Constant *c = &constants[i];
        double number;
        memcpy(&number, (const char *)tuning + c->offset, sizeof(number));
        put(text, bytes, &length, "# %s (%s)\n%s = %.9g\n", c->how, c->unit, c->name, number);
    }
    put(text, bytes, &length, "end\n");
    return length;
}
