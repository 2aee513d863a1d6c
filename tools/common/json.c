/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/json.h"

#include <math.h>

#include "ep/ep.h"

static void separate(Json *j) {
    fputs(j->comma ? ",\n" : "\n", j->out);
    j->comma = true;
}

static void put_escaped(Json *j, const char *text) {
    fputc('"', j->out);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fprintf(j->out, "\\%c", *c);
        else if (*c < 0x20 || *c > 0x7E) /* the bytes may not be UTF-8 */
            fprintf(j->out, "\\u%04x", *c);
        else
            fputc(*c, j->out);
    }
    fputc('"', j->out);
}

static void put_key(Json *j, const char *key) {
    separate(j);
    if (!key) return;
    put_escaped(j, key);
    fputs(": ", j->out);
}

void json_begin(Json *j, const char *key, char bracket) {
    put_key(j, key);
    fputc(bracket, j->out);
    j->comma = false;
}

void json_end(Json *j, char bracket) {
    fprintf(j->out, "\n%c", bracket);
    j->comma = true;
}

void json_put_text(Json *j, const char *key, const char *value) {
    put_key(j, key);
    put_escaped(j, value);
}

void json_put_int(Json *j, const char *key, int64_t value) {
    put_key(j, key);
    fprintf(j->out, "%lld", (long long)value);
}

/* JSON has no infinities: they become null. */
void json_put_real(Json *j, const char *key, double value) {
    put_key(j, key);
    if (isfinite(value))
        fprintf(j->out, "%.6g", value);
    else
        fputs("null", j->out);
}

/* A negative count is unknown: null. */
void json_put_count(Json *j, const char *key, int64_t value) {
    if (value >= 0) {
        json_put_int(j, key, value);
        return;
    }
    put_key(j, key);
    fputs("null", j->out);
}

void json_put_bool(Json *j, const char *key, bool value) {
    put_key(j, key);
    fputs(value ? "true" : "false", j->out);
}

/* ---- what all tools write ------------------------------------------------------------------ */

void json_put_machine(Json *j, const Machine *machine) {
    json_begin(j, "machine", '{');
    json_put_text(j, "hostname", machine->hostname);
    json_put_text(j, "cpu", machine->cpu);
    json_put_int(j, "cores", machine->cores);
    json_put_int(j, "memory_bytes", machine->memory);
    json_put_text(j, "date", machine->date);
    json_end(j, '}');
}

Json json_open(FILE *out, const char *format) {
    int version = ep_version();
    char text[32];
    Json j = {out, false};
    snprintf(text, sizeof(text), "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    fputc('{', out);
    json_put_text(&j, "format", format);
    json_put_text(&j, "version", text);
    return j;
}

void json_close(Json *j) {
    fputs("\n}\n", j->out);
}
