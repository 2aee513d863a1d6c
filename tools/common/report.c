/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/report.h"

#include <math.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- the machine --------------------------------------------------------------------------- */

/* "model name : ..." on x86. Other processors may have no such line. */
static void read_cpu(char *out, size_t bytes) {
    char line[256];
    snprintf(out, bytes, "unknown");
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof(line), file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(out, bytes, "%s", colon + 1 + strspn(colon + 1, " "));
        break;
    }
    if (file) fclose(file);
}

void machine_describe(Machine *out) {
    time_t now = time(NULL);
    struct tm utc;
    if (gethostname(out->hostname, sizeof(out->hostname)) != 0)
        snprintf(out->hostname, sizeof(out->hostname), "unknown");
    out->hostname[sizeof(out->hostname) - 1] = 0;
    read_cpu(out->cpu, sizeof(out->cpu));
    out->cores = sysconf(_SC_NPROCESSORS_ONLN);
    out->memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    strftime(out->date, sizeof(out->date), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
}

/* ---- text ---------------------------------------------------------------------------------- */

void report_machine(const Machine *machine) {
    printf("# machine: %s, %s, %ld cores, %s\n", machine->hostname, machine->cpu, machine->cores,
           machine->date);
}

void report_number(double value, int width, int digits) {
    if (value > 0)
        printf(" %*.*f", width, digits, value);
    else
        printf(" %*s", width, "-");
}

void report_wrong_cell(int64_t wrong) {
    if (wrong >= 0)
        printf(" %7lld\n", (long long)wrong);
    else
        printf(" %7s\n", "-");
}

void report_wrong(bool checked, int64_t wrong) {
    if (checked)
        printf("#wrong %lld\n", (long long)wrong);
    else
        printf("#wrong - (not checked)\n");
    fflush(stdout);
}

/* ---- JSON ---------------------------------------------------------------------------------- */

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

void json_put_known(Json *j, const char *key, double value) {
    if (value >= 0) json_put_real(j, key, value);
}

void json_put_positive(Json *j, const char *key, double value) {
    if (value > 0) json_put_real(j, key, value);
}

/* ---- what all tools write ------------------------------------------------------------------ */

void json_put_ranks(Json *j, int ranks, bool threads) {
    json_put_int(j, "ranks", ranks);
    json_put_text(j, "ranks_are", threads ? "threads" : "mpi");
}

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
    char text[32];
    Json j = {out, false};
    snprintf(text, sizeof(text), VERSION_FORMAT, VERSION_NUMBERS);
    fputc('{', out);
    json_put_text(&j, "format", format);
    json_put_text(&j, "version", text);
    return j;
}

void json_close(Json *j) {
    fputs("\n}\n", j->out);
}
