/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/measure.h"

#include <stdio.h>

#include "tools/common/json.h"
#include "tools/common/util.h"

/* ---- the parts ----------------------------------------------------------------------------- */

static void put_shape(Json *j, const Options *o) {
    json_put_int(j, "hidden", o->hidden);
    json_put_text(j, "dtype", options_type_name(o->type));
    json_put_int(j, "row_bytes", o->hidden * (int64_t)ep_type_bytes((EpType)o->type));
    json_put_int(j, "top_k", o->top_k);
    json_put_int(j, "experts", o->experts);
    json_put_int(j, "alignment", o->alignment);
    json_put_text(j, "padding", options_padding_name(o->padding));
    json_put_text(j, "layout", options_layout_name(o->layout));
    json_put_int(j, "capacity", o->capacity);
    json_put_text(j, "overflow", options_overflow_name(o->overflow));
    json_put_bool(j, "weighted", o->weighted);
    json_put_int(j, "scale_bytes", o->scale_bytes);
    json_put_text(j, "mode", options_mode_name(o->mode));
    json_put_bool(j, "split", o->split);
    json_put_text(j, "quant", options_quant_name(o->quant));
    json_put_text(j, "sum_quant", options_quant_name(o->sum_quant));
    json_put_text(j, "idx", options_type_name(o->index_type));
}

static void put_config(Json *j, const Report *report, const SizeResult *last) {
    const Options *o = report->options;
    const World *world = report->world;
    char routing[4096 + 16];
    options_routing_name(o, routing, sizeof(routing));
    json_begin(j, "config", '{');
    json_put_int(j, "ranks", world->size);
    json_put_text(j, "ranks_are", world->threads ? "threads" : "mpi");
    json_put_text(j, "backend", options_backend_name(report->memory.backend));
    json_put_text(j, "backend_reason", report->memory.reason);
    if (report->device[0]) json_put_text(j, "device", report->device);
    if (o->num_sms) json_put_int(j, "num_sms", o->num_sms);
    if (o->graphs) json_put_bool(j, "graphs", true);
    if (o->graphs || o->chain > 1) json_put_int(j, "chain", o->chain);
    json_put_bool(j, "zero_copy", o->zero_copy);
    json_put_int(j, "tokens", last->tokens);
    json_put_bool(j, "uneven", o->uneven);
    json_put_text(j, "routing", routing);
    json_put_real(j, "masked", o->masked);
    put_shape(j, o);
    json_put_int(j, "iterations", o->iterations);
    json_put_int(j, "warmup", o->warmup);
    json_put_bool(j, "check", o->check);
    json_put_int(j, "seed", o->seed);
    json_end(j, '}');
}

static void put_phase(Json *j, const PhaseResult *phase) {
    if (phase->absent) return;
    json_begin(j, NULL, '{');
    json_put_text(j, "name", phase->name);
    json_put_real(j, "median_us", phase->time.median_us);
    json_put_real(j, "p99_us", phase->time.p99_us);
    json_put_int(j, "remote_bytes", phase->remote_bytes);
    json_put_int(j, "local_bytes", phase->local_bytes);
    json_put_int(j, "useful_bytes", phase->useful_bytes);
    if (phase->zero_bytes > 0) json_put_int(j, "zero_bytes", phase->zero_bytes);
    if (phase->memory_bytes > 0) json_put_int(j, "memory_bytes", phase->memory_bytes);
    if (phase->wire_us > 0) json_put_real(j, "wire_us", phase->wire_us);
    if (phase->mem_us > 0) json_put_real(j, "mem_us", phase->mem_us);
    if (phase_floor_us(phase) > 0) {
        json_put_real(j, "floor_us", phase_floor_us(phase));
        json_put_text(j, "floor_is", phase_floor_is_wire(phase) ? "wire" : "memory");
        json_put_real(j, "floor_ratio", phase->time.median_us / phase_floor_us(phase));
    }
    if (phase->issue_us >= 0) json_put_real(j, "issue_us", phase->issue_us);
    if (phase->plain_us >= 0) json_put_real(j, "plain_us", phase->plain_us);
    if (phase->launch_us >= 0) json_put_real(j, "launch_us", phase->launch_us);
    json_put_count(j, "wrong", phase->wrong);
    json_end(j, '}');
}

static void put_step(Json *j, const SizeResult *r) {
    if (r->step.median_us <= 0) return;
    json_begin(j, "step", '{');
    json_put_real(j, "median_us", r->step.median_us);
    json_put_real(j, "p99_us", r->step.p99_us);
    json_put_real(j, "issue_us", r->step_issue_us);
    json_end(j, '}');
}

static void put_new_handle(Json *j, const SizeResult *r) {
    json_begin(j, "new_handle", '{');
    json_put_real(j, "median_us", r->new_handle_us);
    json_put_real(j, "destroy_us", r->destroy_us);
    json_end(j, '}');
}

static void put_split(Json *j, const SizeResult *r) {
    if (!r->has_split) return;
    json_begin(j, "split_phases", '[');
    for (int h = 0; h < NUM_SPLIT_PHASES; h++) {
        json_begin(j, NULL, '{');
        json_put_text(j, "name", split_phase_name((SplitPhaseId)h));
        json_put_real(j, "median_us", r->split[h].time.median_us);
        json_put_real(j, "p99_us", r->split[h].time.p99_us);
        if (r->split[h].issue_us >= 0) json_put_real(j, "issue_us", r->split[h].issue_us);
        json_end(j, '}');
    }
    json_end(j, ']');
}

static void put_baseline(Json *j, const SizeResult *r) {
    if (r->num_phases == NUM_PHASES) return;
    json_begin(j, "baseline", '{');
    json_put_real(j, "median_us", r->baseline_us);
    json_put_real(j, "speedup", r->speedup);
    if (r->network_us > 0) {
        json_put_real(j, "network_us", r->network_us);
        json_put_int(j, "network_bytes", r->network_bytes);
    }
    json_begin(j, "phases", '[');
    for (int p = NUM_PHASES; p < r->num_phases; p++)
        put_phase(j, &r->phases[p]);
    json_end(j, ']');
    json_end(j, '}');
}

static void put_size(Json *j, const Options *o, const SizeResult *r) {
    json_put_int(j, "tokens", r->tokens);
    json_put_int(j, "tokens_min", r->tokens_min);
    json_put_count(j, "wrong", o->check ? r->wrong : -1);
    json_put_int(j, "slots_max", r->slots_max);
    json_put_int(j, "slots_min", r->slots_min);
    json_put_int(j, "receive_rows", r->rows_max);
    json_put_int(j, "dropped_slots", r->dropped);
    json_put_int(j, "library_bytes", r->library_bytes);
    json_put_int(j, "promised_bytes", r->promised_bytes);
    json_put_int(j, "travelled_bytes", r->travelled_bytes);
    json_begin(j, "phases", '[');
    for (int p = 0; p < NUM_PHASES; p++)
        put_phase(j, &r->phases[p]);
    json_end(j, ']');
    put_split(j, r);
    put_new_handle(j, r);
    put_step(j, r);
    if (r->empty_node_us >= 0) json_put_real(j, "empty_node_us", r->empty_node_us);
    if (r->flag_us >= 0) json_put_real(j, "flag_us", r->flag_us);
    put_baseline(j, r);
}

static void put_sweep(Json *j, const Options *o, const SizeResult *results, int count) {
    json_begin(j, "sweep", '[');
    for (int i = 0; i < count; i++) {
        json_begin(j, NULL, '{');
        put_size(j, o, &results[i]);
        json_end(j, '}');
    }
    json_end(j, ']');
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
    json_put_machine(j, &run->report.machine);
    if (run->count > 1) put_sweep(j, &run->options, run->results, run->count);
}

/* A list with an element for each model and mode. */
static void put_models(Json *j, const RunList *list) {
    int64_t wrong = 0;
    for (int i = 0; i < list->count; i++)
        wrong += top_level(&list->runs[i]).wrong;
    json_put_count(j, "wrong", list->runs[0].options.check ? wrong : -1);
    json_put_machine(j, &list->runs[0].report.machine);
    json_put_text(j, "models_file", list->models.path);
    json_begin(j, "models", '[');
    for (int i = 0; i < list->count; i++) {
        const Run *run = &list->runs[i];
        SizeResult last = top_level(run);
        json_begin(j, NULL, '{');
        json_put_text(j, "model", run->model);
        put_config(j, &run->report, &last);
        put_sweep(j, &run->options, run->results, run->count);
        json_end(j, '}');
    }
    json_end(j, ']');
}

bool json_write(const RunList *list, const char *path) {
    OutputFile file;
    if (!output_open(&file, path)) return false;
    Json j = json_open(file.stream, "ep_bench 1");
    if (list->models.count)
        put_models(&j, list);
    else
        put_run(&j, &list->runs[0]);
    json_close(&j);
    return output_commit(&file);
}
