/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/json.h"

#include "tools/common/data.h"
#include "tools/common/option.h"
#include "tools/common/util.h"
#include "tools/moe/measure.h"

static void put_config(Json *j, const MoeReport *report) {
    const MoeOptions *o = report->options;
    const MoeMesh *mesh = &report->layer->mesh;
    json_begin(j, "config", '{');
    json_put_int(j, "ranks", report->world->size);
    json_put_text(j, "ranks_are", report->world->threads ? "threads" : "mpi");
    json_put_text(j, "mesh", mesh->text);
    json_put_text(j, "spec", mesh->spec_text);
    json_put_int(j, "ep_size", mesh->ep_size);
    json_put_text(j, "backend", report->layer->device.name);
    json_put_text(j, "gemm", report->layer->device.gemm);
    json_put_int(j, "tokens", o->tokens);
    json_put_bool(j, "uneven", o->uneven);
    json_put_int(j, "hidden", o->hidden);
    json_put_int(j, "ffn", o->ffn);
    json_put_int(j, "experts", o->experts);
    json_put_int(j, "top_k", o->top_k);
    json_put_text(j, "dtype", option_choice_name(option_types, o->type));
    json_put_text(j, "weights", moe_weights_name(o->weights_at));
    json_put_text(j, "quant", option_choice_name(option_quants, o->quant));
    if (quant_format(o->quant)->bits) json_put_text(j, "blocks", moe_blocks_name(o->blocks));
    json_put_bool(j, "regather", o->regather);
    json_put_int(j, "alignment", o->alignment);
    json_put_bool(j, "overlap", report->layer->overlaps);
    if (report->layer->overlaps) json_put_int(j, "num_sms", report->layer->handle_config.num_sms);
    json_put_int(j, "iterations", o->iterations);
    json_put_int(j, "warmup", o->warmup);
    json_put_bool(j, "check", o->check);
    json_put_int(j, "seed", o->seed);
    json_end(j, '}');
}

static void put_times(Json *j, Quantiles time, double floor_us) {
    json_put_real(j, "median_us", time.median_us);
    json_put_real(j, "p99_us", time.p99_us);
    if (floor_us <= 0) return;
    json_put_real(j, "floor_us", floor_us);
    json_put_real(j, "floor_ratio", time.median_us / floor_us);
}

static void put_phases(Json *j, const MoeResult *r) {
    json_begin(j, "phases", '[');
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        const PhaseResult *phase = &r->phases[p];
        if (!phase->exists) continue;
        json_begin(j, NULL, '{');
        json_put_text(j, "name", moe_phase_name((MoePhase)p));
        put_times(j, phase->time, phase->floor_us);
        if (phase->bytes > 0) json_put_int(j, "bytes", phase->bytes);
        if (phase->flops > 0) json_put_int(j, "flops", phase->flops);
        json_put_count(j, "wrong", moe_phase_wrong(r, (MoePhase)p));
        json_end(j, '}');
    }
    json_end(j, ']');
}

static void put_overlaps(Json *j, const MoeResult *r) {
    json_begin(j, "overlaps", '[');
    for (int i = 0; i < NUM_MOE_OVERLAPS; i++) {
        const MoeOverlap *o = moe_overlap((MoeOverlapId)i);
        if (!r->overlaps[i].exists) continue;
        json_begin(j, NULL, '{');
        json_put_text(j, "name", moe_phase_name(o->phase));
        json_begin(j, "beside", '[');
        for (int b = 0; b < MOE_BESIDE; b++)
            json_put_text(j, NULL, moe_phase_name(o->beside[b]));
        json_end(j, ']');
        json_put_real(j, "median_us", r->overlaps[i].together.median_us);
        json_put_real(j, "p99_us", r->overlaps[i].together.p99_us);
        json_put_real(j, "apart_us", r->overlaps[i].apart.median_us);
        json_put_real(j, "hidden", moe_overlap_hidden(r, (MoeOverlapId)i));
        json_end(j, '}');
    }
    json_end(j, ']');
}

static void put_checks(Json *j, const MoeResult *r) {
    if (!r->checked) return;
    json_begin(j, "checks", '[');
    for (int i = 0; i < NUM_CHECKS; i++) {
        const CheckResult *c = &r->checks[i];
        json_begin(j, NULL, '{');
        json_put_text(j, "name", c->name);
        json_put_int(j, "elements", c->elements);
        json_put_real(j, "largest_error", c->worst);
        json_put_real(j, "bound", c->bound);
        json_put_int(j, "wrong", c->wrong);
        json_end(j, '}');
    }
    json_end(j, ']');
}

bool moe_json_write(const MoeReport *report, const MoeResult *result, const char *path) {
    OutputFile file;
    if (!output_open(&file, path)) return false;
    Json j = json_open(file.stream, "ep_moe 1");
    json_put_count(&j, "wrong", result->checked ? result->wrong : -1);
    put_config(&j, report);
    json_put_machine(&j, &report->machine);
    put_phases(&j, result);
    put_overlaps(&j, result);
    json_begin(&j, "step", '{');
    put_times(&j, result->step, result->floor_us);
    json_end(&j, '}');
    if (result->gemm_flops > 0) json_put_real(&j, "gemm_flops_per_second", result->gemm_flops);
    json_put_int(&j, "tokens_min", result->tokens_min);
    json_put_int(&j, "tokens_max", result->tokens_max);
    json_put_int(&j, "slots_min", result->slots_min);
    json_put_int(&j, "slots_max", result->slots_max);
    json_put_int(&j, "library_bytes", result->library_bytes);
    json_put_int(&j, "promised_bytes", result->promised_bytes);
    json_put_int(&j, "workspace_bytes", result->workspace_bytes);
    put_checks(&j, result);
    json_close(&j);
    return output_commit(&file);
}
