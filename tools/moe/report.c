/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>

#include "tools/common/data.h"
#include "tools/common/util.h"
#include "tools/moe/measure.h"
#include "tools/moe/stack.h"

/* ---- the head ------------------------------------------------------------------------------ */

static void report_mesh(const MoeReport *report) {
    const MoeMesh *mesh = &report->layer->mesh;
    printf("# mesh:    %s: %d ranks (%s), EP groups of %d; w1 and w2 %s, router _,_\n", mesh->text,
           report->world->size, report->world->threads ? "threads" : "MPI", mesh->ep_size,
           mesh->spec_text);
}

static const char *dispatched(const MoeOptions *o) {
    return moe_multiplies_e4m3(o) ? "dispatch quantises rows" : "rows travel as they are";
}

static void report_config(const MoeOptions *o) {
    printf("# config:  hidden %lld, ffn %lld, top-%lld of %lld experts, %s, %s tokens, seed %lld\n",
           (long long)o->hidden, (long long)o->ffn, (long long)o->top_k, (long long)o->experts,
           moe_options_name(o, "dtype"), o->uneven ? "uneven" : "even", (long long)o->run.seed);
    printf("#          weights %s, alignment %lld", moe_options_name(o, "weights"),
           (long long)o->alignment);
    if (!quant_format(o->quant)->bits)
        printf(", gathered as they are");
    else
        printf(", gathered as %s in %s, %s", moe_options_name(o, "quant"),
               moe_options_name(o, "blocks"),
               moe_multiplies_e4m3(o) ? "which GEMMs take" : "dequantised before the GEMMs");
    if (moe_multiplies_e4m3(o))
        printf(", gradients of weights from %s",
               o->wgrad == MOE_WGRAD_FP8 ? "e4m3" : moe_options_name(o, "dtype"));
    printf("%s\n", o->forward ? ", before the step" : o->regather ? ", again for backward" : "");
    if (o->forward) printf("# forward: %s%s", dispatched(o), o->graph ? ", one graph" : "");
    if (o->shared) printf("; a shared expert of %lld", (long long)o->shared);
    if (o->forward) printf("\n");
}

static void report_backend(const Layer *layer) {
    printf("# backend: %s; GEMM: %s\n", layer->device.name, layer->device.gemm);
    if (layer->overlaps)
        printf("# overlap: w1, w2 and their gradients on a second stream; dispatch takes up to %d "
               "multiprocessors\n",
               (int)layer->handle_config.num_sms);
    if (layer->options->weight_sms)
        printf("# overlap: weights take up to %lld multiprocessors\n",
               (long long)layer->options->weight_sms);
    if (layer->options->graph && !layer->options->forward)
        printf("# graph:   the step is replayed as one graph\n");
}

void moe_report_header(const MoeReport *report) {
    printf("# ep_moe: libep " VERSION_FORMAT ": one MoE layer, %s\n", VERSION_NUMBERS,
           report->options->forward ? "forward alone" : "forward and backward");
    report_machine(&report->machine);
    report_mesh(report);
    report_config(report->options);
    report_backend(report->layer);
    printf("# timing:  %lld iterations after %lld, slowest rank of each, %s\n",
           (long long)report->options->run.iterations, (long long)report->options->run.warmup,
           report->layer->device.backend == EP_BACKEND_CUDA ? "CUDA events" : "host clock");
    printf("# created: %s in %.1f s, with the first calls of weights\n",
           report->options->layers > 1 ? "the lowest layer" : "the layer", report->layer->created);
    printf("#\n# flops, and bytes read and written, are those of the rank that has most\n");
    printf(
        "# floor: the larger of the same bytes copied and the flops at the rate of a plain GEMM\n");
    printf("#%-20s %11s %11s %13s %13s %11s %7s %7s\n", "phase", "median_us", "p99_us", "bytes",
           "Mflop", "floor_us", "ratio", "#wrong");
    fflush(stdout);
}

/* ---- the table ----------------------------------------------------------------------------- */

static void report_line(const char *name, Quantiles time, int64_t bytes, int64_t flops,
                        double floor_us, int64_t wrong) {
    printf(" %-20s %11.1f %11.1f", name, time.median_us, time.p99_us);
    report_number((double)bytes, 13, 0);
    report_number((double)flops * 1e-6, 13, 3);
    report_number(floor_us, 11, 1);
    report_number(floor_us > 0 ? time.median_us / floor_us : -1, 7, 2);
    report_wrong_cell(wrong);
}

static void report_table(const MoeResult *r) {
    int64_t bytes = 0, flops = 0;
    double sum = 0;
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        const PhaseResult *phase = &r->phases[p];
        if (!phase->exists) continue;
        report_line(moe_phase_name((MoePhase)p), phase->time, phase->bytes, phase->flops,
                    phase->floor_us, moe_phase_wrong(r, (MoePhase)p));
        bytes += phase->bytes, flops += phase->flops;
        sum += phase->time.median_us;
    }
    report_line("step", r->step, bytes, flops, r->floor_us, r->checked ? r->wrong : -1);
    if (r->calls.median_us > 0) report_line("step_calls", r->calls, 0, 0, -1, -1);
    printf("# step: all phases without barriers between them; their medians add up to %.1f us\n",
           sum);
}

static void report_overlaps(const MoeResult *r) {
    for (int i = 0; i < NUM_MOE_OVERLAPS; i++) {
        const MoeOverlap *o = moe_overlap((MoeOverlapId)i);
        const OverlapResult *times = &r->overlaps[i];
        const double hidden = moe_overlap_hidden(r, (MoeOverlapId)i);
        if (!times->exists) continue;
        printf("# overlap: %s beside %s and %s: %.1f us, one after the other %.1f us; %s hidden: ",
               moe_phase_name(o->phase), moe_phase_name(o->beside[0]), moe_phase_name(o->beside[1]),
               times->together.median_us, times->apart.median_us, o->moves);
        if (isnan(hidden))
            printf("-\n");
        else
            printf("%.0f %%\n", 100 * hidden);
    }
}

static void report_facts(const MoeResult *r) {
    printf("# tokens per rank %lld to %lld, slots received %lld to %lld\n",
           (long long)r->tokens_min, (long long)r->tokens_max, (long long)r->slots_min,
           (long long)r->slots_max);
    printf("# memory: EP group and plan, promised %lld bytes, taken %lld; workspace of the weights "
           "%lld\n",
           (long long)r->promised_bytes, (long long)r->library_bytes,
           (long long)r->workspace_bytes);
    printf("# GEMMs: %lld calls in a step\n", (long long)r->gemm_calls);
    if (r->gemm_flops > 0)
        printf("# plain GEMM: %.2f Gflop/s per rank, %d x %d x %d, all ranks at once\n",
               r->gemm_flops * 1e-9, r->gemm_size, r->gemm_size, r->gemm_size);
}

static void report_comparison(const MoeComparison *c) {
    if (!c->exists) return;
    printf("# compare: with a layer without --quant, norms of differences relative to norms\n");
    for (int i = 0; i < MOE_COMPARED && c->results[i].name; i++)
        printf("# compare: %-11s error %.2e, bound %.2e\n", c->results[i].name, c->results[i].error,
               c->results[i].bound);
    for (int p = 0; p < NUM_MOE_PHASES; p++)
        if (c->products[p].elements)
            printf("# product: %-17s %7lld elements, largest error %.3f of its bound\n",
                   moe_phase_name((MoePhase)p), (long long)c->products[p].elements,
                   c->products[p].worst);
    if (c->first[0]) printf("# wrong: %s\n", c->first);
}

static void report_checks(const MoeResult *r) {
    if (r->checked)
        printf("# check: against a dense layer in double precision, errors relative to the largest "
               "element\n");
    for (int i = 0; r->checked && i < NUM_CHECKS; i++) {
        const CheckResult *c = &r->checks[i];
        if (r->phases[c->phase].exists)
            printf("# check: %-12s %10lld elements, largest error %.2e, bound %.2e, wrong %lld\n",
                   c->name, (long long)c->elements, c->worst, c->bound, (long long)c->wrong);
    }
    if (r->first_wrong[0]) printf("# wrong: %s\n", r->first_wrong);
    report_wrong(r->checked, r->wrong);
}

void moe_report_result(const MoeResult *result) {
    report_table(result);
    report_overlaps(result);
    report_facts(result);
    report_comparison(&result->comparison);
    report_checks(result);
}

static double floor_of(const StackResult *r) {
    return fmax(r->compute_us, r->wire_us);
}

void moe_report_stack(const StackResult *r) {
    const double hidden = moe_stack_hidden(r);
    report_line("step", r->step, 0, 0, floor_of(r), r->wrong);
    report_line("apart", r->apart, 0, 0, r->compute_us + r->wire_us, -1);
    report_line("weights", r->weights, 0, 0, r->wire_us, -1);
    printf("# stack: %lld layers; apart: each gathers and reduces by itself, on one stream; "
           "weights: all of this alone\n",
           (long long)r->layers);
    if (!isnan(hidden)) printf("# stack: hidden: %.0f %% of weights\n", 100 * hidden);
    if (floor_of(r) > 0)
        printf("# stack: floors: %.1f us of computing, %.1f us of what travels; of a step the "
               "larger\n",
               r->compute_us, r->wire_us);
    printf("# memory: weights that are gathered, and gradients, promised %lld bytes, taken %lld\n",
           (long long)r->promised_bytes, (long long)r->taken_bytes);
    if (r->wrong >= 0)
        printf("# check: %lld elements of the output and all gradients, against the step apart\n",
               (long long)r->elements);
    report_wrong(r->wrong >= 0, r->wrong);
}

/* ---- JSON ---------------------------------------------------------------------------------- */

static void put_config(Json *j, const MoeReport *report) {
    const MoeOptions *o = report->options;
    const MoeMesh *mesh = &report->layer->mesh;
    json_begin(j, "config", '{');
    json_put_ranks(j, report->world->size, report->world->threads);
    json_put_text(j, "mesh", mesh->text);
    json_put_text(j, "spec", mesh->spec_text);
    json_put_int(j, "ep_size", mesh->ep_size);
    json_put_text(j, "backend", report->layer->device.name);
    json_put_text(j, "gemm", report->layer->device.gemm);
    option_put(&moe_options_table, o, j);
    if (quant_format(o->quant)->bits) json_put_text(j, "blocks", moe_options_name(o, "blocks"));
    if (o->wgrad) json_put_text(j, "wgrad", moe_options_name(o, "wgrad"));
    json_put_bool(j, "overlap", report->layer->overlaps);
    if (report->layer->overlaps) json_put_int(j, "num_sms", report->layer->handle_config.num_sms);
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

static void put_comparison(Json *j, const MoeComparison *c) {
    if (!c->exists) return;
    json_begin(j, "compared", '[');
    for (int i = 0; i < MOE_COMPARED && c->results[i].name; i++) {
        json_begin(j, NULL, '{');
        json_put_text(j, "name", c->results[i].name);
        json_put_real(j, "error", c->results[i].error);
        json_put_real(j, "bound", c->results[i].bound);
        json_end(j, '}');
    }
    json_end(j, ']');
    json_begin(j, "products", '[');
    for (int p = 0; p < NUM_MOE_PHASES; p++) {
        if (!c->products[p].elements) continue;
        json_begin(j, NULL, '{');
        json_put_text(j, "name", moe_phase_name((MoePhase)p));
        json_put_int(j, "elements", c->products[p].elements);
        json_put_real(j, "largest_error", c->products[p].worst);
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
    json_put_positive(&j, "step_calls_us", result->calls.median_us);
    json_put_positive(&j, "gemm_flops_per_second", result->gemm_flops);
    json_put_int(&j, "tokens_min", result->tokens_min);
    json_put_int(&j, "tokens_max", result->tokens_max);
    json_put_int(&j, "slots_min", result->slots_min);
    json_put_int(&j, "slots_max", result->slots_max);
    json_put_int(&j, "library_bytes", result->library_bytes);
    json_put_int(&j, "promised_bytes", result->promised_bytes);
    json_put_int(&j, "workspace_bytes", result->workspace_bytes);
    json_put_int(&j, "gemm_calls", result->gemm_calls);
    put_checks(&j, result);
    put_comparison(&j, &result->comparison);
    json_close(&j);
    return output_commit(&file);
}

bool moe_json_write_stack(const MoeReport *report, const StackResult *r, const char *path) {
    OutputFile file;
    if (!output_open(&file, path)) return false;
    Json j = json_open(file.stream, "ep_moe 1");
    json_put_count(&j, "wrong", r->wrong);
    put_config(&j, report);
    json_put_machine(&j, &report->machine);
    json_begin(&j, "step", '{');
    put_times(&j, r->step, floor_of(r));
    json_put_positive(&j, "compute_floor_us", r->compute_us);
    json_put_positive(&j, "wire_floor_us", r->wire_us);
    json_put_real(&j, "apart_us", r->apart.median_us);
    json_put_real(&j, "weights_us", r->weights.median_us);
    json_put_real(&j, "hidden", moe_stack_hidden(r));
    json_end(&j, '}');
    json_put_int(&j, "buffers_promised_bytes", r->promised_bytes);
    json_put_int(&j, "buffers_taken_bytes", r->taken_bytes);
    json_close(&j);
    return output_commit(&file);
}
