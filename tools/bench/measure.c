/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/bench/device.h"
#include "tools/common/data.h"
#include "tools/common/util.h"

/* ---- bytes --------------------------------------------------------------------------------- */

/* `zeros`: rows of padding on all ranks. */
static void set_zero_bytes(const Case *c, int64_t zeros, SizeResult *out) {
    int64_t ranks = c->world->size, recv = (int64_t)(c->recv_bytes + c->recv_scale_bytes);
    out->phases[PHASE_DISPATCH].zero_bytes = zeros * recv / ranks;
    out->phases[PHASE_COMBINE_BACKWARD].zero_bytes = zeros * (int64_t)c->row_bytes / ranks;
}

/* Of the sums over all ranks. */
static void set_bytes(const Case *c, const Counts *sum, SizeResult *out) {
    int64_t ranks = c->world->size;
    for (int p = 0; p < NUM_PHASES; p++) {
        PhaseResult *phase = &out->phases[p];
        PhaseId id = (PhaseId)p;
        phase->remote_bytes = phase_remote_bytes(c, id, sum->far_pairs, sum->far_entries) / ranks;
        phase->local_bytes =
            phase_bytes(c, id, sum->near_pairs, sum->entries - sum->far_entries) / ranks;
        phase->useful_bytes = phase_bytes(c, id, sum->slots, sum->entries) / ranks;
    }
}

/* The baseline sends every remote slot, in dispatch with its scales and weight. */
static void set_baseline_bytes(const Case *c, const Counts *sum, SizeResult *out) {
    for (int p = 0; p < NUM_BASELINE_PHASES; p++) {
        PhaseResult *phase = &out->phases[BASELINE_RESULTS + p];
        int64_t unit = phase_bytes(c, (PhaseId)p, 1, 1);
        if (p == BASELINE_PREPARE) unit = (int64_t)sizeof(int32_t); /* indices travel as int32 */
        phase->remote_bytes = sum->far_entries * unit / c->world->size;
        phase->local_bytes = (sum->entries - sum->far_entries) * unit / c->world->size;
        phase->useful_bytes = sum->entries * unit / c->world->size;
    }
}

static void add_bytes(PhaseResult *to, const PhaseResult *phase) {
    to->remote_bytes += phase->remote_bytes;
    to->local_bytes += phase->local_bytes;
    to->useful_bytes += phase->useful_bytes;
}

/* The collectives are as useful as dispatch and combine. A pair has the bytes of both. */
static void set_pair_bytes(const Case *c, SizeResult *out) {
    PhaseResult *pairs = &out->phases[PAIR_RESULTS];
    for (int i = 0; i < NUM_COLLECTIVES; i++) {
        const PhaseResult *phase = &out->phases[PHASE_DISPATCH + i];
        PhaseResult *collective = &out->phases[COLLECTIVE_RESULTS + i];
        collective->remote_bytes = collectives_bytes(c, (Collective)i, true);
        collective->local_bytes = collectives_bytes(c, (Collective)i, false);
        collective->useful_bytes = phase->useful_bytes;
        add_bytes(&pairs[PAIR_LIBEP], phase);
        add_bytes(&pairs[PAIR_BASELINE], collective);
    }
}

static bool count_bytes(Case *c, SizeResult *out) {
    World *world = c->world;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    if (!world_all(world, bench_ok(ep_group_query(c->group, &info), "ep_group_query")))
        return false;
    const Counts mine = count_all(c);
    Counts sum = mine;
    int64_t most[] = {phase_bytes(c, PHASE_DISPATCH, mine.far_pairs, mine.far_entries),
                      info.library_bytes,
                      c->promised_bytes,
                      c->tokens,
                      c->slots.num_slots,
                      c->slots.recv_rows};
    int64_t least[] = {c->tokens, c->slots.num_slots};
    int64_t memory[NUM_PHASES];
    memory_count(c, memory);
    if (!world_max(world, most, 6) || !world_min(world, least, 2) ||
        !world_sum(world, (int64_t *)&sum, sizeof(sum) / sizeof(int64_t)) ||
        !world_sum(world, memory, NUM_PHASES))
        return false;
    out->travelled_bytes = most[0], out->library_bytes = most[1], out->promised_bytes = most[2];
    out->tokens = most[3], out->slots_max = most[4], out->rows_max = most[5];
    out->tokens_min = least[0], out->slots_min = least[1];
    out->dropped = c->slots.all_dropped;
    set_bytes(c, &sum, out);
    set_zero_bytes(c, sum.padding, out);
    set_baseline_bytes(c, &sum, out);
    set_pair_bytes(c, out);
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].memory_bytes = memory[p] / world->size;
    return true;
}

/* ---- checking ------------------------------------------------------------------------------ */

/* Check the library's own row counts. Not with dropped slots: then the contract does not say which
 * rows travel. */
static void check_row_counts(const Case *c, Check *check) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    if (c->slots.all_dropped || ep_handle_info(c->handle, &info) != EP_OK) return;
    const Counts mine = count_all(c);
    if (info.remote_rows_sent == mine.far_pairs && info.local_rows == mine.near_pairs) return;
    if (check->wrong++ == 0)
        snprintf(check->first, sizeof(check->first),
                 "rank %d, prepare: expected %lld remote and %lld local rows, got %lld and %lld",
                 c->world->rank, (long long)mine.far_pairs, (long long)mine.near_pairs,
                 (long long)info.remote_rows_sent, (long long)info.local_rows);
}

/* Errors that the group recorded. By default a capacity that is too small is one. */
static bool check_status(Case *c) {
    return bench_ok(ep_group_status(c->group, NULL), "ep_group_status");
}

static bool poison_and_run(Case *c, PhaseId phase, bool plans) {
    return (!plans || phase_poison(c, PHASE_PREPARE)) && phase_poison(c, phase) &&
           phase_run(c, phase) && (!plans || phase_fetch(c, PHASE_PREPARE)) &&
           phase_fetch(c, phase);
}

/* Run each phase on poisoned outputs and check these before the next phase reuses the buffers. In
 * latency mode dispatch makes the plan. */
static bool check_phases(Case *c, Check *check, SizeResult *out) {
    bool ok = true;
    for (int p = 0; p < NUM_PHASES; p++) {
        int64_t before = check->wrong;
        bool plans = c->latency && p == PHASE_DISPATCH;
        if (!phase_exists(c, (PhaseId)p)) continue;
        ok = ok && poison_and_run(c, (PhaseId)p, plans);
        if (!ok) continue;
        if (plans) check_phase(check, PHASE_PREPARE);
        if (plans || p == PHASE_PREPARE) check_row_counts(c, check);
        check_phase(check, (PhaseId)p);
        out->phases[p].wrong += check->wrong - before;
    }
    return world_all(c->world, ok && check_status(c));
}

/* Without checks, run each phase once: later calls need a plan. */
static bool run_unchecked(Case *c) {
    bool ok = true;
    for (int p = 0; p < NUM_PHASES; p++)
        ok = ok && phase_run(c, (PhaseId)p) && phase_fetch(c, (PhaseId)p);
    return world_all(c->world, ok && check_status(c));
}

/* ---- times of the calls: plain, split into send and wait, in graphs ------------------------ */

static bool run_phase(void *context, int which) {
    return phase_run(context, (PhaseId)which);
}

static bool run_step(void *context, int which) {
    (void)which;
    return phase_run_step(context);
}

static bool run_split(void *context, int which) {
    return split_phase_run(context, (SplitPhaseId)which);
}

/* Issued call by call, without graphs. */
static bool time_plain(Case *c, Quantiles *times, SizeResult *out) {
    double issue_us[NUM_PHASES];
    int64_t iterations = c->options->run.iterations;
    if (!device_time_calls(c, iterations, run_phase, c, NUM_PHASES, times, issue_us)) return false;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].issue_us = issue_us[p];
    return device_time_calls(c, iterations, run_step, c, 1, &out->step, &out->step_issue_us);
}

/* Captured and replayed. The times without graphs become plain_us. */
static bool time_graphs(Case *c, Quantiles *times, SizeResult *out) {
    double launch_us[NUM_PHASES];
    int64_t iterations = c->options->run.iterations, chain = c->options->chain;
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

/* Each send and wait alone. A barrier precedes it, so a wait finds that its data has arrived. */
static bool time_split(Case *c, SizeResult *out) {
    const Options *o = c->options;
    Quantiles times[NUM_SPLIT_PHASES];
    double issue_us[NUM_SPLIT_PHASES] = {-1, -1, -1, -1};
    if (!o->split) return true;
    if (!(c->device ? device_time_calls(c, o->run.iterations, run_split, c, NUM_SPLIT_PHASES, times,
                                        issue_us)
                    : time_calls(c->world, o->run.warmup, o->run.iterations, run_split, c,
                                 NUM_SPLIT_PHASES, times)))
        return false;
    out->has_split = true;
    for (int p = 0; p < NUM_SPLIT_PHASES; p++)
        out->split[p] = (SplitPhaseResult){times[p], issue_us[p]};
    return true;
}

/*
 *
 */
typedef enum HandleCall { CREATE_AND_USE, DESTROY, HANDLE_CALLS } HandleCall;

/* In latency mode ep_prepare is no phase: it only records the routing. */
static bool create_and_use(Case *c) {
    EpHandleConfig config = case_handle_config(c);
    config.plans = EP_PLANS_NAMED;
    if (!bench_ok(ep_handle_create(c->group, &config, &c->handle), "ep_handle_create"))
        return false;
    bool prepared = c->latency ? phase_begin(c) : phase_run(c, PHASE_PREPARE);
    return prepared && phase_run(c, PHASE_DISPATCH);
}

static bool run_handle(void *context, int which) {
    Case *c = context;
    if (which == CREATE_AND_USE) return create_and_use(c);
    ep_handle_destroy(c->handle);
    return true;
}

static bool measure_new_handle(Case *c, double *new_us, double *destroy_us) {
    const Options *o = c->options;
    Case named = *c;
    Quantiles times[HANDLE_CALLS];
    double host_us[HANDLE_CALLS];
    named.plan = &c->tensors.plan_memory;
    if (c->device) {
        if (!device_time_calls(&named, o->run.iterations, run_handle, &named, HANDLE_CALLS, times,
                               host_us))
            return false;
    } else {
        if (!time_calls(c->world, o->run.warmup, o->run.iterations, run_handle, &named,
                        HANDLE_CALLS, times))
            return false;
        for (int i = 0; i < HANDLE_CALLS; i++)
            host_us[i] = times[i].median_us;
    }
    *new_us = host_us[CREATE_AND_USE], *destroy_us = host_us[DESTROY];
    return true;
}

static bool measure_times(Case *c, SizeResult *out) {
    Quantiles times[NUM_PHASES];
    const Options *o = c->options;
    if (!(c->device ? time_plain(c, times, out)
                    : time_calls(c->world, o->run.warmup, o->run.iterations, run_phase, c,
                                 NUM_PHASES, times)))
        return false;
    if (!time_split(c, out)) return false;
    if (!measure_new_handle(c, &out->new_handle_us, &out->destroy_us)) return false;
    if (o->graphs && !time_graphs(c, times, out)) return false;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].time = times[p];
    return true;
}

/* ---- floor and baseline -------------------------------------------------------------------- */

bool phase_floor_is_wire(const PhaseResult *phase) {
    return phase->wire_us > phase->mem_us;
}

double phase_floor_us(const PhaseResult *phase) {
    return phase_floor_is_wire(phase) ? phase->wire_us : phase->mem_us;
}

static bool time_floor(Case *c, SizeResult *out) {
    Floor floor;
    if (!c->options->run.floor) return true;
    for (int p = 0; p < NUM_PHASES; p++)
        floor.wire_us[p] = floor.mem_us[p] = -1;
    if (!(c->device ? floor_measure_device(c, &floor) : floor_measure_host(c, &floor)))
        return false;
    bool signals = c->device && c->options->mode == EP_MODE_LATENCY;
    if (signals && !floor_measure_signals(c, &out->empty_node_us, &out->flag_us)) return false;
    for (int p = 0; p < NUM_PHASES; p++) {
        /* memcpy copies unquantised rows, so it is no floor for a dispatch that quantises. */
        bool valid = c->device || p != PHASE_DISPATCH || !quant_format(c->quant)->bits;
        if (out->phases[p].useful_bytes == 0 || !valid) continue;
        out->phases[p].wire_us = floor.wire_us[p];
        out->phases[p].mem_us = floor.mem_us[p];
    }
    if (c->device) memcpy(out->no_floor, c->device->reason, sizeof(out->no_floor));
    return true;
}

/* `wrong` is of all ranks. */
static void set_baseline(SizeResult *out, int at, Quantiles time, int64_t wrong, bool checked) {
    out->phases[at].absent = false;
    out->phases[at].time = time;
    out->phases[at].wrong = checked ? wrong : -1;
}

static bool time_baseline(Case *c, Check *check, SizeResult *out) {
    BaselineResult result;
    const bool checks = c->options->run.check;
    if (!options_slots_baseline(c->options)) return true;
    if (!baseline_measure(c, check, &result)) return false;
    for (int p = 0; p < NUM_BASELINE_PHASES; p++)
        set_baseline(out, BASELINE_RESULTS + p, result.times[p], result.wrong[p],
                     checks && p != BASELINE_PREPARE);
    out->network_us = result.network.median_us, out->network_bytes = result.network_bytes;
    return true;
}

static bool time_collectives(Collectives *l, Check *check, SizeResult *out) {
    CollectivesResult result;
    if (!collectives_measure(l, check, &result)) return false;
    for (int i = 0; i < NUM_COLLECTIVES; i++)
        set_baseline(out, COLLECTIVE_RESULTS + i, result.times[i], result.wrong[i],
                     l->c->options->run.check);
    return true;
}

static bool time_pairs(Case *c, Collectives *baseline, SizeResult *out) {
    Quantiles times[NUM_PAIR_SIDES];
    if (!c->options->pair) return true;
    if (!pairs_measure(c, baseline, times)) return false;
    for (int side = 0; side < (baseline ? NUM_PAIR_SIDES : 1); side++)
        set_baseline(out, PAIR_RESULTS + side, times[side], 0, false);
    return true;
}

static bool time_collectives_and_pairs(Case *c, Check *check, SizeResult *out) {
    Collectives l;
    if (!c->options->baseline) return time_pairs(c, NULL, out);
    bool ok = collectives_open(c, &l) && time_collectives(&l, check, out) && time_pairs(c, &l, out);
    collectives_close(&l);
    return ok;
}

const Versus versus[NUM_VERSUS] = {
    {"baseline", "dispatch + combine", PHASE_DISPATCH, BASELINE_RESULTS + BASELINE_DISPATCH, 2,
     BASELINE_RESULTS, COLLECTIVE_RESULTS},
    {"collectives", "all-gather + reduce-scatter", PHASE_DISPATCH, COLLECTIVE_RESULTS, 2,
     COLLECTIVE_RESULTS, PAIR_RESULTS},
    {"pairs", "pair", PAIR_RESULTS + PAIR_LIBEP, PAIR_RESULTS + PAIR_BASELINE, 1, PAIR_RESULTS,
     MAX_RESULTS},
};

static double add_medians(const SizeResult *r, int first, int count) {
    double us = 0;
    for (int p = first; p < first + count; p++)
        us += r->phases[p].absent ? 0 : r->phases[p].time.median_us;
    return us;
}

double versus_us(const Versus *v, const SizeResult *r) {
    return add_medians(r, v->theirs, v->count);
}

double versus_speedup(const Versus *v, const SizeResult *r) {
    double ours = add_medians(r, v->ours, v->count);
    return ours > 0 ? versus_us(v, r) / ours : 0;
}

/* ---- one size ------------------------------------------------------------------------------ */

static const char *result_name(int at) {
    static const char *const pairs[NUM_PAIR_SIDES] = {"pair", "baseline_pair"};
    return at < BASELINE_RESULTS     ? phase_name((PhaseId)at)
           : at < COLLECTIVE_RESULTS ? baseline_phase_name((BaselinePhase)(at - BASELINE_RESULTS))
           : at < PAIR_RESULTS       ? collective_name((Collective)(at - COLLECTIVE_RESULTS))
                                     : pairs[at - PAIR_RESULTS];
}

static void name_phases(const Options *options, SizeResult *out) {
    out->empty_node_us = out->flag_us = -1;
    for (int p = 0; p < MAX_RESULTS; p++) {
        out->phases[p].name = result_name(p);
        out->phases[p].absent = true;
        out->phases[p].wire_us = out->phases[p].mem_us = out->phases[p].issue_us = -1;
        out->phases[p].plain_us = out->phases[p].launch_us = -1;
        out->phases[p].wrong = options->run.check ? 0 : -1;
    }
}

/* Sum the wrong elements over the ranks, and take the message of the first rank that has one. */
static bool gather_wrong(Case *c, const Check *check, SizeResult *out) {
    World *world = c->world;
    int64_t wrong[NUM_PHASES];
    char *all = bench_alloc((size_t)world->size, CHECK_MESSAGE_BYTES, "messages");
    bool ok = world_all(world, all != NULL) &&
              world_allgather(world, check->first, all, CHECK_MESSAGE_BYTES);
    for (int r = world->size - 1; ok && r >= 0; r--) {
        if (all[(size_t)r * CHECK_MESSAGE_BYTES])
            memcpy(out->first_wrong, all + (size_t)r * CHECK_MESSAGE_BYTES, CHECK_MESSAGE_BYTES);
    }
    free(all);
    for (int p = 0; p < NUM_PHASES; p++)
        wrong[p] = out->phases[p].wrong;
    ok = ok && (!c->options->run.check || world_sum(world, wrong, NUM_PHASES));
    for (int p = 0; ok && p < MAX_RESULTS; p++) {
        if (p < NUM_PHASES) out->phases[p].wrong = wrong[p];
        if (!out->phases[p].absent && out->phases[p].wrong > 0) out->wrong += out->phases[p].wrong;
    }
    return ok;
}

static bool save_routing(Case *c) {
    Routing as_named = c->routing;
    if (as_named.named)
        as_named.experts = as_named.named, as_named.num_experts = (int)c->options->experts;
    bool ok = c->world->rank != 0 || !c->options->save_path ||
              trace_write(c->options->save_path, &as_named);
    return world_all(c->world, ok);
}

static bool measure_case(Case *c, Check *check, SizeResult *out) {
    bool checks = c->options->run.check;
    out->placed = c->placed;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].absent = !phase_exists(c, (PhaseId)p);
    return save_routing(c) && count_bytes(c, out) && world_all(c->world, phase_begin(c)) &&
           (checks ? check_phases(c, check, out) : run_unchecked(c)) && measure_times(c, out) &&
           time_collectives_and_pairs(c, check, out) && (!checks || check_phases(c, check, out)) &&
           counters_read(c, &out->counters) && time_floor(c, out) && time_baseline(c, check, out) &&
           gather_wrong(c, check, out);
}

bool measure_size(World *world, const Options *options, int64_t size, SizeResult *out) {
    *out = (SizeResult){0};
    name_phases(options, out);
    Case c;
    Check check = {.c = NULL};
    bool ok = case_create(world, options, size, &c);
    if (ok) ok = world_all(world, check_create(&c, &check)) && measure_case(&c, &check, out);
    check_destroy(&check);
    /* Destroying may wait for the rank that is lost. The process ends now. */
    if (!world->broken) case_destroy(&c);
    return ok;
}
