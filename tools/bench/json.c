/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/measure.h"

#include <stdio.h>

#include "tools/common/util.h"

/* ---- the parts ----------------------------------------------------------------------------- */

static void put_config(Json *j, const Report *report, const SizeResult *last) {
    const Options *o = report->options;
    char routing[4096 + 16];
    options_routing_name(o, routing, sizeof(routing));
    json_begin(j, "config", '{');
    json_put_ranks(j, report->world->size, report->world->threads);
    json_put_text(j, "backend", option_choice_name(option_backends, report->memory.backend));
    json_put_text(j, "backend_reason", report->memory.reason);
    if (report->device[0]) json_put_text(j, "device", report->device);
    if (o->num_sms) json_put_int(j, "num_sms", o->num_sms);
    if (o->graphs) json_put_bool(j, "graphs", true);
    if (o->graphs || o->chain > 1) json_put_int(j, "chain", o->chain);
    json_put_int(j, "tokens", last->tokens);
    json_put_text(j, "routing", routing);
    json_put_real(j, "masked", o->masked);
    json_put_int(j, "row_bytes", o->hidden * (int64_t)ep_type_bytes((EpType)o->type));
    option_put(&options_table, o, j);
    json_end(j, '}');
}

static void put_times(Json *j, Quantiles time) {
    json_put_real(j, "median_us", time.median_us);
    json_put_real(j, "p99_us", time.p99_us);
}

static void put_phase(Json *j, const PhaseResult *phase) {
    if (phase->absent) return;
    json_begin(j, NULL, '{');
    json_put_text(j, "name", phase->name);
    put_times(j, phase->time);
    json_put_int(j, "remote_bytes", phase->remote_bytes);
    json_put_int(j, "local_bytes", phase->local_bytes);
    json_put_int(j, "useful_bytes", phase->useful_bytes);
    if (phase->zero_bytes > 0) json_put_int(j, "zero_bytes", phase->zero_bytes);
    if (phase->memory_bytes > 0) json_put_int(j, "memory_bytes", phase->memory_bytes);
    json_put_positive(j, "wire_us", phase->wire_us);
    json_put_positive(j, "mem_us", phase->mem_us);
    if (phase_floor_us(phase) > 0) {
        json_put_real(j, "floor_us", phase_floor_us(phase));
        json_put_text(j, "floor_is", phase_floor_is_wire(phase) ? "wire" : "memory");
        json_put_real(j, "floor_ratio", phase->time.median_us / phase_floor_us(phase));
    }
    json_put_known(j, "issue_us", phase->issue_us);
    json_put_known(j, "plain_us", phase->plain_us);
    json_put_known(j, "launch_us", phase->launch_us);
    json_put_count(j, "wrong", phase->wrong);
    json_end(j, '}');
}

static void put_step(Json *j, const SizeResult *r) {
    if (r->step.median_us <= 0) return;
    json_begin(j, "step", '{');
    put_times(j, r->step);
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
        put_times(j, r->split[h].time);
        json_put_known(j, "issue_us", r->split[h].issue_us);
        json_end(j, '}');
    }
    json_end(j, ']');
}

static void put_versus(Json *j, const Versus *v, const SizeResult *r) {
    if (r->phases[v->first].absent) return;
    json_begin(j, v->key, '{');
    json_put_positive(j, "median_us", versus_us(v, r));
    json_put_positive(j, "speedup", versus_speedup(v, r));
    if (v == versus && r->network_us > 0) {
        json_put_real(j, "network_us", r->network_us);
        json_put_int(j, "network_bytes", r->network_bytes);
    }
    json_begin(j, "phases", '[');
    for (int p = v->first; p < v->end; p++)
        put_phase(j, &r->phases[p]);
    json_end(j, ']');
    json_end(j, '}');
}

static void put_size(Json *j, const Options *o, const SizeResult *r) {
    json_put_int(j, "tokens", r->tokens);
    json_put_int(j, "tokens_min", r->tokens_min);
    json_put_count(j, "wrong", o->run.check ? r->wrong : -1);
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
    json_put_known(j, "empty_node_us", r->empty_node_us);
    json_put_known(j, "flag_us", r->flag_us);
    for (int i = 0; i < NUM_VERSUS; i++)
        put_versus(j, &versus[i], r);
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
    json_put_count(j, "wrong", list->runs[0].options.run.check ? wrong : -1);
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
