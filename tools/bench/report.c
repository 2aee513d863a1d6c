/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/measure.h"

#include <stdio.h>
#include <string.h>

/* ---- the head of the report ---------------------------------------------------------------- */

static void report_mode(const Options *o) {
    printf("#          mode %s%s", options_name(o, "mode"), o->split ? " as send and wait" : "");
}

/* What all models share, and what each mode has. */
static void report_models(const RunList *list, const char *ranks, const char *routing) {
    const Options *o = &list->runs[0].options;
    printf("# models:  %lld of %s\n", (long long)list->models.count, list->models.path);
    printf("# config:  %s, %s, %s, seed %lld\n", ranks, options_name(o, "dtype"), routing,
           (long long)o->run.seed);
    printf("#          %s, scales %lld bytes, indices %s, quant %s, sums %s, padding %s\n",
           o->weighted ? "weighted" : "unweighted", (long long)o->scale_bytes,
           options_name(o, "idx"), options_name(o, "quant"), options_sums_name(o),
           options_name(o, "padding"));
    for (int i = 0; i < list->count && strcmp(list->runs[i].model, list->runs[0].model) == 0; i++) {
        o = &list->runs[i].options;
        report_mode(o);
        printf(": alignment %lld, layout %s\n", (long long)o->alignment, options_name(o, "layout"));
    }
}

static void report_run(const Report *report, const char *ranks, const char *routing) {
    const Options *o = report->options;
    printf("# config:  %s, hidden %lld %s (%lld bytes a row), top-%lld of %lld experts\n", ranks,
           (long long)o->hidden, options_name(o, "dtype"),
           (long long)o->hidden * (long long)ep_type_bytes((EpType)o->type), (long long)o->top_k,
           (long long)o->experts);
    printf("#          alignment %lld, layout %s, %s, seed %lld\n", (long long)o->alignment,
           options_name(o, "layout"), routing, (long long)o->run.seed);
    printf("#          %s, scales %lld bytes, indices %s, capacity %lld (%s)\n",
           o->weighted ? "weighted" : "unweighted", (long long)o->scale_bytes,
           options_name(o, "idx"), (long long)o->capacity,
           o->capacity ? options_name(o, "overflow")
           : report->memory.backend == EP_BACKEND_CUDA || o->mode != EP_MODE_THROUGHPUT
               ? "what the routing needs"
               : "exact sizing");
    report_mode(o);
    printf(", quant %s, sums %s, padding %s\n", options_name(o, "quant"), options_sums_name(o),
           options_name(o, "padding"));
}

static void report_config(const RunList *list) {
    const Report *report = &list->runs[0].report;
    const Options *o = report->options;
    char ranks[64], kind[512], routing[640];
    options_routing_name(o, kind, sizeof(kind));
    snprintf(ranks, sizeof(ranks), "%d ranks (%s)", report->world->size,
             report->world->threads ? "threads" : "MPI");
    snprintf(routing, sizeof(routing), "routing %s, masked %g, %s tokens", kind, o->masked,
             o->uneven ? "uneven" : "even");
    if (list->models.count)
        report_models(list, ranks, routing);
    else
        report_run(report, ranks, routing);
}

/* The reason may begin with the backend's name, which is then not repeated. */
static void report_backend(const EpGroupMemory *memory) {
    const char *name = option_choice_name(option_backends, memory->backend),
               *reason = memory->reason;
    size_t length = strlen(name);
    if (strncmp(reason, name, length) == 0 && strncmp(reason + length, ": ", 2) == 0)
        reason += length + 2;
    printf("# backend: %s: %s\n", name, reason);
}

static void report_table_head(const RunList *list) {
    const Report *report = &list->runs[0].report;
    bool models = list->models.count > 0;
    bool cuda = report->memory.backend == EP_BACKEND_CUDA;
    bool stores = report->options->mode == EP_MODE_LATENCY;
    printf("#\n# bytes are per rank, the mean over ranks; ratio is to the larger floor\n");
    if (cuda)
        printf("# floors: wire, the remote bytes %s; mem, the GPU memory's bytes copied by one%s\n",
               models   ? "copied to the peers by a plain kernel"
               : stores ? "stored by a plain kernel"
                        : "pushed by a plain copy kernel",
               models   ? "; in latency mode in graphs"
               : stores ? "; in graphs"
                        : "");
    else
        printf("# floors: mem, a memcpy of the same bytes\n");
    if (models) printf("#%-19s %-10s ", "model", "mode");
    printf("%s%8s  %-23s %11s %11s %13s %13s %12s %10s %10s %6s %7s\n", models ? " " : "#",
           "tokens", "phase", "median_us", "p99_us", "remote_bytes", "local_bytes", "useful_GB/s",
           "wire_us", "mem_us", "ratio", "#wrong");
}

/* How the table's times come from graphs: of one call, or of one among many in a graph. */
static void describe_graphs(const Options *o, char *out, size_t bytes) {
    if (!o->graphs)
        out[0] = 0;
    else if (o->chain == 1)
        snprintf(out, bytes, ", graphs of one call each");
    else
        snprintf(out, bytes, ", graphs of %lld equal calls, a graph's time divided by %lld",
                 (long long)o->chain, (long long)o->chain);
}

void report_header(const RunList *list) {
    const Report *report = &list->runs[0].report;
    const Options *o = report->options;
    char graphs[96];
    describe_graphs(o, graphs, sizeof(graphs));
    printf("# ep_bench: libep " VERSION_FORMAT "\n", VERSION_NUMBERS);
    report_config(list);
    report_machine(&report->machine);
    if (report->device[0]) printf("# device:  %s\n", report->device);
    report_backend(&report->memory);
    if (o->zero_copy) printf("# memory:  zero-copy: slot rows in peer-accessible memory\n");
    printf("# timing:  %lld iterations after %lld warm-up, slowest rank of each%s%s; check %s\n",
           (long long)o->run.iterations, (long long)o->run.warmup,
           report->memory.backend == EP_BACKEND_CUDA ? ", device time" : "", graphs,
           o->run.check ? "every byte, before and after" : "off");
    report_table_head(list);
    fflush(stdout);
}

/* ---- one size ------------------------------------------------------------------------------ */

static void report_phase(const Run *run, const SizeResult *result, const PhaseResult *phase) {
    double us = phase->time.median_us;
    if (phase->absent) return;
    if (run->model[0]) printf("%-20s %-10s ", run->model, options_name(&run->options, "mode"));
    printf("%9lld  %-23s %11.1f %11.1f %13lld %13lld %12.2f", (long long)result->tokens,
           phase->name, us, phase->time.p99_us, (long long)phase->remote_bytes,
           (long long)phase->local_bytes, us > 0 ? (double)phase->useful_bytes / us * 1e-3 : 0);
    report_number(phase->wire_us, 10, 1);
    report_number(phase->mem_us, 10, 1);
    report_number(phase_floor_us(phase) > 0 ? us / phase_floor_us(phase) : -1, 6, 2);
    report_wrong_cell(phase->wrong);
}

static void report_facts(const SizeResult *r) {
    printf("# tokens %lld: %lld to %lld per rank, slots received %lld to %lld, rows with padding "
           "up to "
           "%lld, dropped %lld\n",
           (long long)r->tokens, (long long)r->tokens_min, (long long)r->tokens,
           (long long)r->slots_min, (long long)r->slots_max, (long long)r->rows_max,
           (long long)r->dropped);
    printf("# tokens %lld: library memory %lld bytes per rank (promised %lld), travelled "
           "%lld bytes\n",
           (long long)r->tokens, (long long)r->library_bytes, (long long)r->promised_bytes,
           (long long)r->travelled_bytes);
}

/* Each send and wait alone. The table has the time of both together. */
static void report_split(const SizeResult *r) {
    if (!r->has_split) return;
    printf("# split:");
    for (int h = 0; h < NUM_SPLIT_PHASES; h++)
        printf("%s %s %.1f us", h ? "," : "", split_phase_name((SplitPhaseId)h),
               r->split[h].time.median_us);
    printf(", each alone\n");
}

/* The same calls outside graphs, and the host's time to launch a graph. */
static void report_plain(const SizeResult *r) {
    const char *comma = "";
    if (r->phases[PHASE_DISPATCH].plain_us < 0) return;
    printf("# plain: ");
    for (int p = 0; p < NUM_PHASES; p++) {
        const PhaseResult *phase = &r->phases[p];
        if (phase->absent) continue;
        printf("%s %s %.1f us (graph launched in %.1f us)", comma, phase->name, phase->plain_us,
               phase->launch_us);
        comma = ",";
    }
    printf(", without graphs\n");
}

static void report_signals(const SizeResult *r) {
    if (r->empty_node_us < 0) return;
    printf("# empty graph node: %.2f us, flag one way: ", r->empty_node_us);
    if (r->flag_us >= 0)
        printf("%.2f us\n", r->flag_us);
    else
        printf("-\n");
}

static void report_device(const SizeResult *r) {
    if (r->step.median_us <= 0) return;
    printf("# tokens %lld: step %.1f us, p99 %.1f us\n", (long long)r->tokens, r->step.median_us,
           r->step.p99_us);
    report_plain(r);
    printf("# issue:");
    for (int p = 0; p < NUM_PHASES; p++)
        if (!r->phases[p].absent) printf(" %s %.1f us,", r->phases[p].name, r->phases[p].issue_us);
    for (int h = 0; r->has_split && h < NUM_SPLIT_PHASES; h++)
        printf(" %s %.1f us,", split_phase_name((SplitPhaseId)h), r->split[h].issue_us);
    printf(" step %.1f us of the host's time\n", r->step_issue_us);
    report_signals(r);
    if (r->no_floor[0]) printf("# floor:   not measured: %s\n", r->no_floor);
}

/* On the host backend the calls return when their work is done. */
static void report_new_handle(const SizeResult *r) {
    printf("# tokens %lld: new handle, prepare and dispatch %.1f us, destroying the handle %.1f us "
           "of the host's time\n",
           (long long)r->tokens, r->new_handle_us, r->destroy_us);
}

static void report_baseline(const SizeResult *r) {
    for (int i = 0; i < NUM_VERSUS; i++) {
        const double us = versus_us(&versus[i], r), speedup = versus_speedup(&versus[i], r);
        if (us > 0)
            printf("# tokens %lld: baseline %s %.1f us, libep %.1f us: speedup %.2f\n",
                   (long long)r->tokens, versus[i].what, us, us / speedup, speedup);
    }
    if (r->network_us <= 0) return;
    printf("# tokens %lld: NCCL alone moves the %lld bytes that cross the network each way in "
           "%.1f us; dispatch takes %.2f times that, combine %.2f\n",
           (long long)r->tokens, (long long)r->network_bytes, r->network_us,
           r->phases[PHASE_DISPATCH].time.median_us / r->network_us,
           r->phases[PHASE_COMBINE].time.median_us / r->network_us);
}

/* Over all calls of the run, checks and warm-up included. */
static void report_counters(const Options *o, const SizeResult *r) {
    const CountersResult *n = &r->counters;
    double mean = (double)n->slots / (double)(o->physical ? o->physical : o->experts);
    if (!o->stats) return;
    printf("# tokens %lld: counted in all calls: %lld slots, the busiest expert's %.2f times the "
           "mean; %lld rows and %lld bytes to other ranks; waits of %.0f us, the longest %.1f us\n",
           (long long)r->tokens, (long long)n->slots, n->slots ? (double)n->most_slots / mean : 1.0,
           (long long)n->rows, (long long)n->bytes, n->waited_us, n->longest_us);
}

static void report_placement(const Options *o, const SizeResult *r) {
    const Placed *p = &r->placed;
    if (!o->physical) return;
    printf("# tokens %lld: %lld places: the largest rank has %.3f times the mean of slots, %.3f "
           "without copies; %lld rows to other ranks, %lld without (%.1f %%)\n",
           (long long)r->tokens, (long long)o->physical, p->largest, p->largest_before,
           (long long)p->rows, (long long)p->rows_before,
           100 * (double)p->rows / (double)(p->rows_before ? p->rows_before : 1));
}

static void report_rest(const Options *o, const SizeResult *result) {
    report_facts(result);
    report_counters(o, result);
    report_placement(o, result);
    report_split(result);
    report_new_handle(result);
    report_device(result);
    report_baseline(result);
}

/* With --models the table is all; the JSON has the rest. */
void report_size(const Run *run, const SizeResult *result) {
    for (int p = 0; p < MAX_RESULTS; p++)
        report_phase(run, result, &result->phases[p]);
    if (!run->model[0]) report_rest(&run->options, result);
    if (result->first_wrong[0]) printf("# wrong: %s\n", result->first_wrong);
    fflush(stdout);
}

/* ---- models side by side: a row for each, a table for each mode and size ------------------- */

/* Share of the rows that dispatch writes here that are padding, in percent. */
static double percent_of_zeros(const SizeResult *r) {
    const PhaseResult *p = &r->phases[PHASE_DISPATCH];
    double written = (double)p->zero_bytes + (double)p->useful_bytes;
    return written > 0 ? 100 * (double)p->zero_bytes / written : 0;
}

static void report_cell(const PhaseResult *phase) {
    double floor_us = phase_floor_us(phase);
    const char *bound = phase_floor_is_wire(phase) ? "w" : "m";
    printf("  %11.1f", phase->time.median_us);
    if (floor_us > 0)
        printf(" %6.2f%s", phase->time.median_us / floor_us, bound);
    else
        printf(" %6s ", "-");
}

static void report_row(const Run *run, const SizeResult *r) {
    printf("# %-20s %6lld %5lld %7lld %6.1f", run->model, (long long)run->options.hidden,
           (long long)run->options.top_k, (long long)run->options.experts, percent_of_zeros(r));
    for (int p = PHASE_PREPARE + 1; p < NUM_PHASES; p++)
        if (!r->phases[p].absent) report_cell(&r->phases[p]);
    printf("\n");
}

/* Size `i` of all runs in the mode of run `first`. */
static void report_table(const RunList *list, int first, int i) {
    const Run *head = &list->runs[first];
    const SizeResult *sizes = &head->results[i];
    printf("#\n# %lld tokens, %s: median_us, and its ratio to the floor (w: wire, m: memory)\n",
           (long long)sizes->tokens, options_name(&head->options, "mode"));
    printf("# %-20s %6s %5s %7s %6s", "model", "hidden", "top-k", "experts", "zeros%");
    for (int p = PHASE_PREPARE + 1; p < NUM_PHASES; p++)
        if (!sizes->phases[p].absent) printf("  %19s", sizes->phases[p].name);
    printf("\n");
    for (int r = first; r < list->count; r++)
        if (list->runs[r].options.mode == head->options.mode)
            report_row(&list->runs[r], &list->runs[r].results[i]);
}

static void report_summary(const RunList *list) {
    int modes = 1;
    while (modes < list->count && strcmp(list->runs[modes].model, list->runs[0].model) == 0)
        modes++;
    for (int first = 0; first < modes; first++)
        for (int i = 0; i < list->runs[first].count; i++)
            report_table(list, first, i);
}

void report_footer(const RunList *list, int64_t wrong) {
    if (list->models.count) report_summary(list);
    report_wrong(list->runs[0].options.run.check, wrong);
}
