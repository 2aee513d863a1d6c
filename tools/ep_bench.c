/* SPDX-License-Identifier: Apache-2.0 */

/**
 * ep_bench: times the calls of libep on the shape of a model and checks every byte. Each rank
 * derives from the routing of all ranks what its rows must be; see docs/benchmarking.md. The parts
 * are in tools/bench.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/bench/device.h"
#include "tools/bench/lines.h"
#include "tools/bench/measure.h"
#include "tools/bench/models.h"
#include "tools/bench/options.h"
#include "tools/bench/routing.h"
#include "tools/common/tool.h"
#include "tools/common/util.h"

const char *const bench_program = "ep_bench";

/* Sizes of the sweep: at most MAX_SIZES, since each is at least twice the one before. */
static int list_sizes(const Options *o, int64_t *sizes) {
    int count = 0;
    for (int64_t size = o->tokens_begin; size <= o->tokens_end;) {
        sizes[count++] = size;
        if (size == o->tokens_end) break;
        size = size ? size * o->tokens_factor : 1;
    }
    return count;
}

enum { MAX_SIZES = 64 };

/* ---- progress ------------------------------------------------------------------------------ */

/* With --models a terminal shows which of `total` sizes is being measured, on a line that the next
 * output replaces. */
static void show_progress(const World *world, const Run *run, int64_t size, int number, int total) {
    if (world->rank != 0 || !run->model[0] || !isatty(STDERR_FILENO)) return;
    fprintf(stderr, "\r\033[K%d of %d: %s, %s, %lld tokens", number, total, run->model,
            options_name(&run->options, "mode"), (long long)size);
    fflush(stderr);
}

static void clear_progress(const World *world, const Run *run) {
    if (world->rank == 0 && run->model[0] && isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
}

/* ---- runs ---------------------------------------------------------------------------------- */

/* Say which model a failure is about. */
static bool fail_model(const Run *run, int64_t size) {
    char message[BENCH_MESSAGE_BYTES], text[2 * BENCH_MESSAGE_BYTES];
    if (!run->model[0]) return false;
    snprintf(message, sizeof(message), "%s", bench_error_message());
    snprintf(text, sizeof(text), "%s, %s, %lld tokens: %s", run->model,
             options_name(&run->options, "mode"), (long long)size, message);
    bench_error_set(bench_error_exit_status(), text);
    return false;
}

/* False after a failure. *wrong counts wrong elements, which are no failure. */
static bool sweep(World *world, Run *run, int number, int total, int64_t *wrong) {
    int64_t sizes[MAX_SIZES];
    int count = list_sizes(&run->options, sizes);
    for (int i = 0; i < count; i++) {
        show_progress(world, run, sizes[i], number + i + 1, total);
        bool ok = measure_size(world, &run->options, sizes[i], &run->results[i]);
        clear_progress(world, run);
        if (!ok) return fail_model(run, sizes[i]);
        *wrong += run->results[i].wrong;
        run->count = i + 1;
        if (world->rank == 0) report_size(run, &run->results[i]);
    }
    return true;
}

static bool sweep_all(World *world, const RunList *list, const char *json_path, int64_t *wrong) {
    int64_t sizes[MAX_SIZES];
    const int each = list_sizes(&list->runs[0].options, sizes);
    for (int i = 0; i < list->count; i++)
        if (!sweep(world, &list->runs[i], i * each, list->count * each, wrong)) return false;
    return world_all(world, world->rank != 0 || !json_path || json_write(list, json_path));
}

/* Rank 0 also reads the trace here, so that a bad one is refused before any output. */
static bool probe_files(const World *world, const Options *o) {
    TraceShape shape = {world->size, (int)o->top_k, (int)o->experts};
    Routing routing = {0};
    if (world->rank != 0) return true;
    if (o->run.json_path && !output_probe(o->run.json_path)) return false;
    if (o->save_path && !output_probe(o->save_path)) return false;
    bool ok = o->routing != ROUTING_FILE || trace_read(o->routing_path, &shape, &routing);
    routing_free(&routing);
    return ok;
}

/* Number of ranks on this rank's machine. */
static int count_local_ranks(World *world, const Machine *machine) {
    size_t bytes = sizeof(machine->hostname);
    char *names = bench_alloc((size_t)world->size, bytes, "host names");
    int count = 0;
    if (world_all(world, names != NULL) && world_allgather(world, machine->hostname, names, bytes))
        for (int r = 0; r < world->size; r++)
            count += strcmp(names + (size_t)r * bytes, machine->hostname) == 0;
    free(names);
    return count;
}

/* Whether the token rows and slot rows, in and out, fit the machine's memory. Without this check
 * the kernel would kill the process. */
static bool fits_memory(World *world, const Options *o, const Machine *machine) {
    int local_ranks = count_local_ranks(world, machine);
    double row = (double)o->hidden * (double)ep_type_bytes((EpType)o->type);
    double entries = o->routing == ROUTING_ONE_HOT ? 1 : (double)o->top_k * (1 - o->masked);
    double bytes = 2 * row * (double)o->tokens_end * (1 + entries) * local_ranks;
    if (o->routing == ROUTING_FILE || machine->memory <= 0 || bytes <= (double)machine->memory)
        return true;
    return bench_refuse("--tokens %lld: expected buffers within the %.0f GB of %s, got %.0f GB for "
                        "its %d ranks",
                        (long long)o->tokens_end, (double)machine->memory * 1e-9, machine->hostname,
                        bytes * 1e-9, local_ranks);
}

/* Refuse what can be refused before the first line of the report. */
static bool start_report(World *world, const Options *options, Report *report) {
    *report = (Report){.options = options, .world = world};
    machine_describe(&report->machine);
    if (!case_ask_backend(world, options, &report->memory)) return false;
    if (report->memory.backend == EP_BACKEND_CUDA) gpu_name(report->device, sizeof(report->device));
    return world_all(world, fits_memory(world, options, &report->machine)) &&
           world_all(world, probe_files(world, options));
}

/* A run for each model and mode, or one. */
static bool list_runs(World *world, const Options *options, RunList *list) {
    int64_t modes[2];
    const int num_modes = options->models ? models_list_modes(options, modes) : 1;
    if (options->models && !models_load(world, options->models_path, &list->models)) return false;
    list->count = options->models ? (int)list->models.count * num_modes : 1;
    list->runs = bench_alloc((size_t)list->count, sizeof(Run), "runs");
    bool ok = list->runs != NULL;
    for (int i = 0; ok && i < list->count; i++) {
        Run *run = &list->runs[i];
        const Model *model = options->models ? &list->models.models[i / num_modes] : NULL;
        run->options = *options;
        if (model) {
            memcpy(run->model, model->name, sizeof(run->model));
            ok = models_options(options, list->models.path, model, modes[i % num_modes],
                                &run->options);
        }
        run->results = bench_alloc(MAX_SIZES, sizeof(SizeResult), "results");
        ok = ok && run->results;
    }
    return world_all(world, ok);
}

static void free_runs(RunList *list) {
    for (int i = 0; list->runs && i < list->count; i++)
        free(list->runs[i].results);
    free(list->runs);
    models_free(&list->models);
}

static bool run_all(World *world, const Options *options, RunList *list) {
    int64_t wrong = 0;
    if (!list_runs(world, options, list)) return false;
    for (int i = 0; i < list->count; i++) {
        Run *run = &list->runs[i];
        if (!start_report(world, &run->options, &run->report))
            return fail_model(run, run->options.tokens_end);
    }
    if (world->rank == 0) report_header(list);
    if (!sweep_all(world, list, options->run.json_path, &wrong)) return false;
    if (world->rank == 0) report_footer(list, wrong);
    return wrong == 0 || bench_fail("%lld elements are wrong", (long long)wrong);
}

static bool run_steps(World *world, const Options *options) {
    RunList list = {.count = 0};
    bool ok = run_all(world, options, &list);
    free_runs(&list);
    return ok;
}

static bool run(World *world, const void *options) {
    static bool (*const cases[])(World *, const Options *) = {[CASE_STEP] = run_steps,
                                                              [CASE_CALLS] = calls_case,
                                                              [CASE_SUMS] = sums_case,
                                                              [CASE_WEIGHTS] = weights_case,
                                                              [CASE_DECODE] = decode_case,
                                                              [CASE_NCCL_EP] = nccl_ep_case};
    return cases[((const Options *)options)->kind](world, options);
}

/* Creating a group reads the settings. setenv is safe here: no other thread has started. */
static bool complete(void *options) {
    Options *o = options;
    char text[32];
    snprintf(text, sizeof(text), "%lld", (long long)o->num_sms);
    if (o->num_sms && o->kind != CASE_NCCL_EP) setenv("LIBEP_NUM_SMS", text, 1);
    return o->models ? models_complete(o) : options_complete(o);
}

int main(int argc, char **argv) {
    static const Tool tool = {"ep_bench", &options_table, complete, run};
    Options options = {.models = false};
    return tool_main(&tool, argc, argv, &options);
}
