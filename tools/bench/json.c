/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/measure.h"

#include <math.h>
#include <stdio.h>

#include "tools/bench/util.h"

/* A writer that keeps track of commas. The caller closes what it opens. */
typedef struct Json {
    FILE *out;
    bool comma;
} Json;

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

static void begin(Json *j, const char *key, char bracket) {
    put_key(j, key);
    fputc(bracket, j->out);
    j->comma = false;
}

static void end(Json *j, char bracket) {
    fprintf(j->out, "\n%c", bracket);
    j->comma = true;
}

static void put_text(Json *j, const char *key, const char *value) {
    put_key(j, key);
    put_escaped(j, value);
}

static void put_int(Json *j, const char *key, int64_t value) {
    put_key(j, key);
    fprintf(j->out, "%lld", (long long)value);
}

/* JSON has no infinities: they become null. */
static void put_real(Json *j, const char *key, double value) {
    put_key(j, key);
    if (isfinite(value))
        fprintf(j->out, "%.6g", value);
    else
        fputs("null", j->out);
}

/* A negative count is unknown: null. */
static void put_count(Json *j, const char *key, int64_t value) {
    if (value >= 0) {
        put_int(j, key, value);
        return;
    }
    put_key(j, key);
    fputs("null", j->out);
}

static void put_bool(Json *j, const char *key, bool value) {
    put_key(j, key);
    fputs(value ? "true" : "false", j->out);
}

/* ---- the parts ----------------------------------------------------------------------------- */

static void put_shape(Json *j, const Options *o) {
    put_int(j, "hidden", o->hidden);
    put_text(j, "dtype", options_type_name(o->type));
    put_int(j, "row_bytes", o->hidden * (int64_t)ep_type_bytes((EpType)o->type));
    put_int(j, "top_k", o->top_k);
    put_int(j, "experts", o->experts);
    put_int(j, "alignment", o->alignment);
    put_text(j, "layout", options_layout_name(o->layout));
    put_int(j, "capacity", o->capacity);
    put_text(j, "overflow", options_overflow_name(o->overflow));
    put_bool(j, "weighted", o->weighted);
    put_int(j, "scale_bytes", o->scale_bytes);
    put_text(j, "mode", options_mode_name(o->mode));
    put_bool(j, "split", o->split);
    put_text(j, "quant", options_quant_name(o->quant));
    put_text(j, "idx", options_type_name(o->index_type));
}

static void put_config(Json *j, const Report *report, const SizeResult *last) {
    const Options *o = report->options;
    const World *world = report->world;
    char routing[4096 + 16];
    options_routing_name(o, routing, sizeof(routing));
    begin(j, "config", '{');
    put_int(j, "ranks", world->size);
    put_text(j, "ranks_are", world->threads ? "threads" : "mpi");
    put_text(j, "backend", options_backend_name(report->memory.backend));
    put_text(j, "backend_reason", report->memory.reason);
    if (report->device[0]) put_text(j, "device", report->device);
    if (o->num_sms) put_int(j, "num_sms", o->num_sms);
    if (o->graphs) put_bool(j, "graphs", true);
    if (o->graphs || o->chain > 1) put_int(j, "chain", o->chain);
    put_bool(j, "zero_copy", o->zero_copy);
    put_int(j, "tokens", last->tokens);
    put_bool(j, "uneven", o->uneven);
    put_text(j, "routing", routing);
    put_real(j, "masked", o->masked);
    put_shape(j, o);
    put_int(j, "iterations", o->iterations);
    put_int(j, "warmup", o->warmup);
    put_bool(j, "check", o->check);
    put_int(j, "seed", o->seed);
    end(j, '}');
}

static void put_machine(Json *j, const Machine *machine) {
    begin(j, "machine", '{');
    put_text(j, "hostname", machine->hostname);
    put_text(j, "cpu", machine->cpu);
    put_int(j, "cores", machine->cores);
    put_int(j, "memory_bytes", machine->memory);
    put_text(j, "date", machine->date);
    end(j, '}');
}

static void put_phase(Json *j, const PhaseResult *phase) {
    if (phase->absent) return;
    begin(j, NULL, '{');
    put_text(j, "name", phase->name);
    put_real(j, "median_us", phase->time.median_us);
    put_real(j, "p99_us", phase->time.p99_us);
    put_int(j, "remote_bytes", phase->remote_bytes);
    put_int(j, "local_bytes", phase->local_bytes);
    put_int(j, "useful_bytes", phase->useful_bytes);
    if (phase->memory_bytes > 0) put_int(j, "memory_bytes", phase->memory_bytes);
    if (phase->wire_us > 0) put_real(j, "wire_us", phase->wire_us);
    if (phase->mem_us > 0) put_real(j, "mem_us", phase->mem_us);
    if (phase_floor_us(phase) > 0) {
        put_real(j, "floor_us", phase_floor_us(phase));
        put_real(j, "floor_ratio", phase->time.median_us / phase_floor_us(phase));
    }
    if (phase->issue_us >= 0) put_real(j, "issue_us", phase->issue_us);
    if (phase->plain_us >= 0) put_real(j, "plain_us", phase->plain_us);
    if (phase->launch_us >= 0) put_real(j, "launch_us", phase->launch_us);
    put_count(j, "wrong", phase->wrong);
    end(j, '}');
}

static void put_step(Json *j, const SizeResult *r) {
    if (r->step.median_us <= 0) return;
    begin(j, "step", '{');
    put_real(j, "median_us", r->step.median_us);
    put_real(j, "p99_us", r->step.p99_us);
    put_real(j, "issue_us", r->step_issue_us);
    end(j, '}');
}

static void put_new_handle(Json *j, const SizeResult *r) {
    begin(j, "new_handle", '{');
    put_real(j, "median_us", r->new_handle_us);
    put_real(j, "destroy_us", r->destroy_us);
    end(j, '}');
}

static void put_split(Json *j, const SizeResult *r) {
    if (!r->has_split) return;
    begin(j, "split_phases", '[');
    for (int h = 0; h < NUM_SPLIT_PHASES; h++) {
        begin(j, NULL, '{');
        put_text(j, "name", split_phase_name((SplitPhaseId)h));
        put_real(j, "median_us", r->split[h].time.median_us);
        put_real(j, "p99_us", r->split[h].time.p99_us);
        if (r->split[h].issue_us >= 0) put_real(j, "issue_us", r->split[h].issue_us);
        end(j, '}');
    }
    end(j, ']');
}

static void put_baseline(Json *j, const SizeResult *r) {
    if (r->num_phases == NUM_PHASES) return;
    begin(j, "baseline", '{');
    put_real(j, "median_us", r->baseline_us);
    put_real(j, "speedup", r->speedup);
    begin(j, "phases", '[');
    for (int p = NUM_PHASES; p < r->num_phases; p++)
        put_phase(j, &r->phases[p]);
    end(j, ']');
    end(j, '}');
}

static void put_size(Json *j, const Options *o, const SizeResult *r) {
    put_int(j, "tokens", r->tokens);
    put_int(j, "tokens_min", r->tokens_min);
    put_count(j, "wrong", o->check ? r->wrong : -1);
    put_int(j, "slots_max", r->slots_max);
    put_int(j, "slots_min", r->slots_min);
    put_int(j, "receive_rows", r->rows_max);
    put_int(j, "dropped_slots", r->dropped);
    put_int(j, "library_bytes", r->library_bytes);
    put_int(j, "promised_bytes", r->promised_bytes);
    put_int(j, "travelled_bytes", r->travelled_bytes);
    begin(j, "phases", '[');
    for (int p = 0; p < NUM_PHASES; p++)
        put_phase(j, &r->phases[p]);
    end(j, ']');
    put_split(j, r);
    put_new_handle(j, r);
    put_step(j, r);
    if (r->empty_node_us >= 0) put_real(j, "empty_node_us", r->empty_node_us);
    if (r->flag_us >= 0) put_real(j, "flag_us", r->flag_us);
    put_baseline(j, r);
}

static void put_sweep(Json *j, const Options *o, const SizeResult *results, int count) {
    begin(j, "sweep", '[');
    for (int i = 0; i < count; i++) {
        begin(j, NULL, '{');
        put_size(j, o, &results[i]);
        end(j, '}');
    }
    end(j, ']');
}

/* The last size's results, with the wrong elements of all sizes. */
static SizeResult top_level(const Run *run) {
    SizeResult last = run->results[run->count - 1];
    last.wrong = 0;
    for (int i = 0; i < run->count; i++)
        last.wrong += run->results[i].wrong;
    return last;
}

static void put_run(Json *j, const Run *run) {
    SizeResult last = top_level(run);
    put_size(j, &run->options, &last);
    put_config(j, &run->report, &last);
    put_machine(j, &run->report.machine);
    if (run->count > 1) put_sweep(j, &run->options, run->results, run->count);
}

/* A list with an element for each model and mode. */
static void put_models(Json *j, const RunList *list) {
    int64_t wrong = 0;
    for (int i = 0; i < list->count; i++)
        wrong += top_level(&list->runs[i]).wrong;
    put_count(j, "wrong", list->runs[0].options.check ? wrong : -1);
    put_machine(j, &list->runs[0].report.machine);
    put_text(j, "models_file", list->models.path);
    begin(j, "models", '[');
    for (int i = 0; i < list->count; i++) {
        const Run *run = &list->runs[i];
        SizeResult last = top_level(run);
        begin(j, NULL, '{');
        put_text(j, "model", run->model);
        put_config(j, &run->report, &last);
        put_sweep(j, &run->options, run->results, run->count);
        end(j, '}');
    }
    end(j, ']');
}

bool json_write(const RunList *list, const char *path) {
    OutputFile file;
    int version = ep_version();
    char text[32];
    if (!output_open(&file, path)) return false;
    snprintf(text, sizeof(text), "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    Json j = {file.stream, false};
    fputc('{', j.out);
    put_text(&j, "version", text);
    if (list->models.count)
        put_models(&j, list);
    else
        put_run(&j, &list->runs[0]);
    fputs("\n}\n", j.out);
    return output_commit(&file);
}
