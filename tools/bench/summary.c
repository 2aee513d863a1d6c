/* SPDX-License-Identifier: Apache-2.0 */

/** The models of a run side by side: a row for each, a table for each mode and size. */

#include <stdio.h>
#include <string.h>

#include "tools/bench/measure.h"

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
           (long long)sizes->tokens, options_mode_name(head->options.mode));
    printf("# %-20s %6s %5s %7s %6s", "model", "hidden", "top-k", "experts", "zeros%");
    for (int p = PHASE_PREPARE + 1; p < NUM_PHASES; p++)
        if (!sizes->phases[p].absent) printf("  %19s", sizes->phases[p].name);
    printf("\n");
    for (int r = first; r < list->count; r++)
        if (list->runs[r].options.mode == head->options.mode)
            report_row(&list->runs[r], &list->runs[r].results[i]);
}

void report_summary(const RunList *list) {
    int modes = 1;
    while (modes < list->count && strcmp(list->runs[modes].model, list->runs[0].model) == 0)
        modes++;
    for (int first = 0; first < modes; first++)
        for (int i = 0; i < list->runs[first].count; i++)
            report_table(list, first, i);
}
