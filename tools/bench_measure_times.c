/* SPDX-License-Identifier: Apache-2.0 */

/** What the calls of one size take: plainly, in halves, and in graphs. */

#include "bench_device.h"
#include "bench_result.h"

static bool run_phase(void *context, int which) {
    return phase_run(context, (PhaseId)which);
}

static bool run_step(void *context, int which) {
    (void)which;
    return phase_run_step(context);
}

static bool run_half(void *context, int which) {
    return half_run(context, (HalfId)which);
}

/* Call by call, as a program without graphs issues them. */
static bool time_plain(Case *c, Quantiles *times, SizeResult *out) {
    double issue_us[NUM_PHASES];
    int64_t iterations = c->options->iterations;
    if (!device_time_calls(c, iterations, run_phase, c, NUM_PHASES, times, issue_us)) return false;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].issue_us = issue_us[p];
    return device_time_calls(c, iterations, run_step, c, 1, &out->step, &out->step_issue_us);
}

/* Captured and replayed. What was measured without graphs is kept beside it. */
static bool time_graphs(Case *c, Quantiles *times, SizeResult *out) {
    double launch_us[NUM_PHASES];
    int64_t iterations = c->options->iterations, chain = c->options->chain;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].plain_us = times[p].median_us;
    if (!device_capture(c)) return false;
    if (!device_time_calls(c, iterations, run_phase, c, NUM_PHASES, times, launch_us)) return false;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].launch_us = launch_us[p];
    if (!device_time_calls(c, iterations, run_step, c, 1, &out->step, NULL)) return false;
    time_divide(times, NUM_PHASES, chain);
    time_divide(&out->step, 1, chain);
    return true;
}

/* Each half by itself: ranks meet before it, so a wait finds all that it waits for. */
static bool time_halves(Case *c, SizeResult *out) {
    const Options *o = c->options;
    Quantiles times[NUM_HALVES];
    double issue_us[NUM_HALVES] = {-1, -1, -1, -1};
    if (!o->halves) return true;
    if (!(c->device
              ? device_time_calls(c, o->iterations, run_half, c, NUM_HALVES, times, issue_us)
              : time_calls(c->world, o->warmup, o->iterations, run_half, c, NUM_HALVES, times)))
        return false;
    out->has_halves = true;
    for (int h = 0; h < NUM_HALVES; h++)
        out->halves[h] = (HalfResult){times[h], issue_us[h]};
    return true;
}

bool measure_times(Case *c, SizeResult *out) {
    Quantiles times[NUM_PHASES];
    const Options *o = c->options;
    if (!(c->device
              ? time_plain(c, times, out)
              : time_calls(c->world, o->warmup, o->iterations, run_phase, c, NUM_PHASES, times)))
        return false;
    if (!time_halves(c, out)) return false;
    if (o->graphs && !time_graphs(c, times, out)) return false;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].time = times[p];
    return true;
}
