/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/lines.h"

#include <stdio.h>

#include "tools/common/util.h"

/* The ranks of a case may be processes of its own. */
static int ranks_of(const Lines *lines) {
    const Options *o = lines->options;
    return o->kind == CASE_DECODE ? (int)o->processes : lines->world->size;
}

static const char *kind_of(const Lines *lines, const char *mpi) {
    if (lines->options->kind == CASE_DECODE) return "processes";
    return lines->world->threads ? "threads" : mpi;
}

bool lines_begin(Lines *lines, World *world, const Options *options, const char *about) {
    Machine machine;
    const char *path = world->rank == 0 ? options->run.json_path : NULL;
    *lines = (Lines){.world = world, .options = options};
    if (!world_all(world, !path || output_probe(path))) return false;
    if (world->rank != 0) return true;
    machine_describe(&machine);
    printf("# ep_bench: libep " VERSION_FORMAT ": %s\n", VERSION_NUMBERS, about);
    report_machine(&machine);
    printf("# timing:  %d ranks (%s), %lld iterations after %lld, slowest rank of each\n#\n",
           ranks_of(lines), kind_of(lines, "MPI"), (long long)options->run.iterations,
           (long long)options->run.warmup);
    printf("#%-42s %-8s %12s %12s %10s %7s\n", "figure", "unit", "median", "p99", "host_us",
           "ratio");
    return true;
}

void lines_add(Lines *lines, const char *name, const char *unit, Quantiles value, double host_us,
               double ratio) {
    Line *line = &lines->lines[lines->count++];
    *line = (Line){.unit = unit, .value = value, .host_us = host_us, .ratio = ratio};
    snprintf(line->name, sizeof(line->name), "%s", name);
    if (lines->world->rank != 0) return;
    printf(" %-42s %-8s %12.5g %12.5g", name, unit, value.median_us, value.p99_us);
    report_number(host_us, 10, 1);
    report_number(ratio, 7, 3);
    printf("\n");
    fflush(stdout);
}

static bool write_json(const Lines *lines) {
    OutputFile file;
    Machine machine;
    machine_describe(&machine);
    if (!output_open(&file, lines->options->run.json_path)) return false;
    Json j = json_open(file.stream, "ep_bench lines 1");
    json_begin(&j, "config", '{');
    json_put_int(&j, "ranks", ranks_of(lines));
    json_put_text(&j, "ranks_are", kind_of(lines, "mpi"));
    option_put(&options_table, lines->options, &j);
    json_end(&j, '}');
    json_put_machine(&j, &machine);
    json_begin(&j, "lines", '[');
    for (int i = 0; i < lines->count; i++) {
        const Line *line = &lines->lines[i];
        json_begin(&j, NULL, '{');
        json_put_text(&j, "name", line->name);
        json_put_text(&j, "unit", line->unit);
        json_put_real(&j, "median", line->value.median_us);
        json_put_real(&j, "p99", line->value.p99_us);
        json_put_known(&j, "host_us", line->host_us);
        json_put_positive(&j, "ratio", line->ratio);
        json_end(&j, '}');
    }
    json_end(&j, ']');
    json_close(&j);
    return output_commit(&file);
}

bool lines_end(Lines *lines) {
    bool writes = lines->world->rank == 0 && lines->options->run.json_path;
    return world_all(lines->world, !writes || write_json(lines));
}
