/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/settings.h"

#include <errno.h>
#include <hwloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/status.h"

extern char **environ;

static EpStatus malformed(const char *name, const char *expected, const char *text) {
    return ep_fail(EP_ERR_SETTING, "setting %s: expected %s, got '%s'", name, expected, text);
}

/* A parser parse_<type> for each C type in the table. `kind` is the table's description, from which
 * parsers of choices read their words. */

static EpStatus parse_double(const char *name, const char *kind, const char *text, double *out) {
    (void)kind;
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value) || value <= 0)
        return malformed(name, "a positive number of seconds", text);
    *out = value;
    return EP_OK;
}

static EpStatus parse_int64_t(const char *name, const char *kind, const char *text, int64_t *out) {
    if (strcmp(kind, "count") == 0 && strcmp(text, "auto") == 0) {
        *out = EP_COUNT_AUTO;
        return EP_OK;
    }
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    int bad = end == text || errno || value < 0 || end[shift != 0] || value > (INT64_MAX >> shift);
    const char *kinds =
        strcmp(kind, "count") ? "a number, as in 4096, 512K, 16M or 1G" : "a number, or auto";
    if (bad) return malformed(name, kinds, text);
    *out = (int64_t)value << shift;
    return EP_OK;
}

static EpStatus parse_EpSettingText(const char *name, const char *kind, const char *text,
                                    EpSettingText *out) {
    (void)kind;
    if (strlen(text) >= sizeof(out->text)) return malformed(name, "at most 255 characters", text);
    snprintf(out->text, sizeof(out->text), "%s", text);
    return EP_OK;
}

enum { MAX_SYNTHETIC_PUS = 4096 };

/* Processing units of a description: the product of its levels' counts, as in "numa:2 core:4 pu:1"
 * or "2 4 1". Attributes in parentheses and memory in brackets have no part in it. Stops above the
 * limit, so the product cannot overflow. What is no description is left to hwloc. */
static uint64_t count_synthetic_pus(const char *at) {
    uint64_t pus = 1;
    while (*at && pus <= MAX_SYNTHETIC_PUS) {
        if (*at == '(' || *at == '[') {
            at += strcspn(at, *at == '(' ? ")" : "]");
        } else if (*at >= '0' && *at <= '9') {
            char *end;
            unsigned long long count = strtoull(at, &end, 0); /* as hwloc: also 0x and 0 */
            if (count > MAX_SYNTHETIC_PUS) count = MAX_SYNTHETIC_PUS + 1ull;
            pus *= count > 0 ? count : 1;
            at = end;
            continue;
        } else if (*at != ' ') { /* the name of a level, which may contain digits */
            at += strcspn(at, ": ([");
            if (*at != ':') continue;
        }
        at += *at != 0;
    }
    return pus;
}

static int is_synthetic(const char *description) {
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) return 0;
    int valid = hwloc_topology_set_synthetic(topology, description) == 0;
    hwloc_topology_destroy(topology);
    return valid;
}

/* Parse a number of nodes, or the node of each rank, as in 0,1,0,1. Returns what follows, or NULL
 * if it is neither. */
static const char *parse_nodes(const char *text, EpSettingTopology *out) {
    int32_t count = 0;
    for (const char *at = text;; at++) {
        char *end;
        long node = strtol(at, &end, 10);
        if (end == at || node < 0 || node > EP_MAX_RANKS || count == EP_MAX_RANKS) return NULL;
        out->node[count++] = (int16_t)node;
        at = end;
        if (*at == ',') continue;
        out->nodes = count == 1 ? out->node[0] : 0;
        out->listed = count == 1 ? 0 : count;
        return out->nodes || out->listed ? at : NULL;
    }
}

static uint64_t hash_text(const char *text) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3ull;
    return hash;
}

static EpStatus parse_EpSettingTopology(const char *name, const char *kind, const char *text,
                                        EpSettingTopology *out) {
    (void)kind;
    memset(out, 0, sizeof(*out));
    if (!text[0]) return EP_OK;
    const char *end = parse_nodes(text, out), *hwloc = end && *end == '/' ? end + 1 : "";
    int bad = !end || (*end && *end != '/');
    if (!bad && strlen(hwloc) >= sizeof(out->hwloc))
        return malformed(name, "at most 255 characters behind the /", text);
    /* hwloc would work on it for minutes. */
    if (!bad && count_synthetic_pus(hwloc) > MAX_SYNTHETIC_PUS)
        return malformed(name, "a machine of at most 4096 processing units (pu)", text);
    if (bad || (hwloc[0] && !is_synthetic(hwloc)))
        return malformed(name,
                         "a number of nodes, or each rank's node as in 0,1,0,1, then perhaps a "
                         "machine as in /numa:2 core:4 pu:1",
                         text);
    snprintf(out->hwloc, sizeof(out->hwloc), "%s", hwloc);
    snprintf(out->text, sizeof(out->text), "%.64s%s", text, strlen(text) > 64 ? "..." : "");
    out->hash = hash_text(text);
    return EP_OK;
}

/* Returns the index of `text` among the words of "choice: a|b|c", or -1. */
static int choice(const char *kind, const char *text) {
    const char *word = kind + strlen("choice: ");
    for (int i = 0;; i++) {
        size_t length = strcspn(word, "|");
        if (strlen(text) == length && strncmp(word, text, length) == 0) return i;
        if (!word[length]) return -1;
        word += length + 1;
    }
}

/* Define the parser of an enumeration whose words count from `first`. */
#define PARSE_WORDS(type, first)                                                       \
    static EpStatus parse_##type(const char *name, const char *kind, const char *text, \
                                 type *out) {                                          \
        int index = choice(kind, text);                                                \
        if (index < 0) return malformed(name, kind, text);                             \
        *out = (type)((first) + index);                                                \
        return EP_OK;                                                                  \
    }
PARSE_WORDS(EpBackend, EP_BACKEND_AUTO)
PARSE_WORDS(EpSums, EP_SUMS_BY_RANK)
PARSE_WORDS(EpBind, 0)
PARSE_WORDS(EpCheck, 0)
PARSE_WORDS(EpShareGpus, 0)
PARSE_WORDS(EpPeers, 0)
PARSE_WORDS(EpLines, 0)
PARSE_WORDS(EpLogLevel, 0)
#undef PARSE_WORDS

static const char *value_of(const char *name, const char *standard) {
    const char *value = getenv(name);
    return value ? value : standard;
}

EpStatus ep_settings_load(EpSettings *out) {
#define SETTING_PARSE(field, type, name, kind, standard, doc) \
    EP_TRY(parse_##type(name, kind, value_of(name, standard), &out->field));
    EP_SETTINGS_MAP(SETTING_PARSE)
#undef SETTING_PARSE
    return EP_OK;
}

static int is_setting(const char *entry) {
    size_t length = strcspn(entry, "=");
#define SETTING_MATCH(field, type, name, kind, standard, doc) \
    if (strlen(name) == length && strncmp(entry, name, length) == 0) return 1;
    EP_SETTINGS_MAP(SETTING_MATCH)
#undef SETTING_MATCH
    return 0;
}

const char *ep_settings_unknown(void) {
    for (char **entry = environ; entry && *entry; entry++)
        if (strncmp(*entry, "LIBEP_", 6) == 0 && strncmp(*entry, "LIBEP_TEST_", 11) != 0 &&
            !is_setting(*entry))
            return *entry;
    return NULL;
}

EpStatus ep_settings(void (*visit)(const EpSetting *setting, void *context), void *context) {
#define SETTING_VISIT(field, ctype, setting, kind, standard, line) \
    if (visit)                                                     \
        visit(&(EpSetting){.struct_size = sizeof(EpSetting),       \
                           .name = setting,                        \
                           .type = kind,                           \
                           .default_value = standard,              \
                           .value = value_of(setting, standard),   \
                           .doc = line},                           \
              context);
    EP_SETTINGS_MAP(SETTING_VISIT)
#undef SETTING_VISIT
    EpSettings parsed;
    EP_TRY(ep_settings_load(&parsed));
    const char *unknown = ep_settings_unknown();
    if (unknown)
        return ep_fail(EP_ERR_SETTING, "setting %.*s: expected one that ep_info lists, got '%s'",
                       (int)strcspn(unknown, "="), unknown, unknown);
    return EP_OK;
}
