/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_device.h"
#include "bench_error.h"
#include "bench_floor.h"
#include "bench_result.h"
#include "bench_trace.h"

/* ---- bytes --------------------------------------------------------------------------------- */

/* (token, rank) rows that a rank sends, and routing entries by where their expert is. */
typedef struct Traffic {
    int64_t remote_rows, local_rows, remote_entries, local_entries;
} Traffic;

static void count_token(const Case *c, int rank, int64_t token, int64_t *seen, Traffic *out) {
    int64_t number = c->routing.first[rank] + token;
    for (int k = 0; k < c->routing.top_k; k++) {
        int64_t entry = number * c->routing.top_k + k;
        if (c->slots.row_of[entry] < 0) continue;
        int owner = routing_owner(&c->routing, c->routing.experts[entry]);
        bool fresh = seen[owner] != number + 1, remote = owner != rank;
        seen[owner] = number + 1;
        out->remote_entries += remote;
        out->local_entries += !remote;
        out->remote_rows += fresh && remote;
        out->local_rows += fresh && !remote;
    }
}

/* `seen` has a number for each rank, all zero. */
static Traffic count_rank(const Case *c, int rank, int64_t *seen) {
    Traffic traffic = {0, 0, 0, 0};
    for (int64_t t = 0; t < c->tokens; t++)
        count_token(c, rank, t, seen, &traffic);
    return traffic;
}

static void set_bytes(const Case *c, const Traffic *sum, int64_t slots, SizeResult *out) {
    int64_t ranks = c->world->size, entries = sum->remote_entries + sum->local_entries;
    for (int p = 0; p < NUM_PHASES; p++) {
        PhaseResult *phase = &out->phases[p];
        PhaseId id = (PhaseId)p;
        phase->remote_bytes = phase_bytes(c, id, sum->remote_rows, sum->remote_entries) / ranks;
        phase->local_bytes = phase_bytes(c, id, sum->local_rows, sum->local_entries) / ranks;
        phase->useful_bytes = phase_bytes(c, id, slots, entries) / ranks;
    }
}

/* Packed per slot, every remote slot travels, with what lies beside it in dispatch. */
static void set_baseline_bytes(const Case *c, const Traffic *sum, int64_t slots, SizeResult *out) {
    for (int p = NUM_PHASES; p < MAX_RESULTS; p++) {
        PhaseResult *phase = &out->phases[p];
        int64_t unit = phase_bytes(c, (PhaseId)(p - NUM_PHASES), 1, 1);
        if (p == NUM_PHASES) unit = (int64_t)sizeof(int32_t); /* indices go as these */
        phase->remote_bytes = sum->remote_entries * unit / c->world->size;
        phase->local_bytes = sum->local_entries * unit / c->world->size;
        phase->useful_bytes = slots * unit / c->world->size;
    }
}

static bool count_bytes(Case *c, SizeResult *out) {
    World *world = c->world;
    int64_t *seen = bench_alloc((size_t)world->size, sizeof(int64_t), "traffic");
    if (!world_all(world, seen != NULL)) return false;
    Traffic mine = count_rank(c, world->rank, seen);
    free(seen);
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    if (!world_all(world, bench_library(ep_group_query(c->group, &info), "ep_group_query")))
        return false;
    int64_t most[] = {phase_bytes(c, PHASE_DISPATCH, mine.remote_rows, mine.remote_entries),
                      info.library_bytes,
                      c->promised_bytes,
                      c->tokens,
                      c->slots.num_slots,
                      c->slots.recv_rows};
    int64_t least[] = {c->tokens, c->slots.num_slots};
    int64_t sums[] = {mine.remote_rows, mine.local_rows, mine.remote_entries, mine.local_entries,
                      c->slots.num_slots};
    if (!world_max(world, most, 6) || !world_min(world, least, 2) || !world_sum(world, sums, 5))
        return false;
    out->travelled_bytes = most[0], out->library_bytes = most[1], out->promised_bytes = most[2];
    out->tokens = most[3], out->slots_max = most[4], out->rows_max = most[5];
    out->tokens_min = least[0], out->slots_min = least[1];
    out->dropped = c->slots.all_dropped;
    Traffic sum = {sums[0], sums[1], sums[2], sums[3]};
    set_bytes(c, &sum, sums[4], out);
    set_baseline_bytes(c, &sum, sums[2] + sums[3], out);
    return true;
}

/* ---- checking ------------------------------------------------------------------------------ */

/* The library's own count of what travels; dropped slots leave it open which rows still go. */
static void check_traffic(const Case *c, Check *check) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    int64_t *seen = bench_alloc((size_t)c->world->size, sizeof(int64_t), "traffic");
    if (!seen || c->slots.all_dropped || ep_handle_info(c->handle, &info) != EP_OK) {
        free(seen);
        return;
    }
    Traffic mine = count_rank(c, c->world->rank, seen);
    if (info.remote_rows_sent != mine.remote_rows || info.local_rows != mine.local_rows) {
        if (check->wrong++ == 0)
            snprintf(check->first, sizeof(check->first),
                     "rank %d, prepare: expected %lld remote and %lld local rows, got %lld and "
                     "%lld",
                     c->world->rank, (long long)mine.remote_rows, (long long)mine.local_rows,
                     (long long)info.remote_rows_sent, (long long)info.local_rows);
    }
    free(seen);
}

/* What the group found in its inputs; a capacity that is too small is an error by policy. */
static bool check_status(Case *c) {
    return bench_library(ep_group_status(c->group, NULL), "ep_group_status");
}

static bool poison_and_run(Case *c, PhaseId phase, bool plans) {
    return (!plans || phase_poison(c, PHASE_PREPARE)) && phase_poison(c, phase) &&
           phase_run(c, phase) && (!plans || phase_fetch(c, PHASE_PREPARE)) &&
           phase_fetch(c, phase);
}

/* Each phase on poisoned outputs, then a look at them before the next one reuses the buffers. In
 * latency mode dispatch makes the plan. */
static bool check_phases(Case *c, Check *check, SizeResult *out) {
    bool ok = true;
    for (int p = 0; p < NUM_PHASES; p++) {
        int64_t before = check->wrong;
        bool plans = c->latency && p == PHASE_DISPATCH;
        if (!phase_is_there(c, (PhaseId)p)) continue;
        ok = ok && poison_and_run(c, (PhaseId)p, plans);
        if (!ok) continue;
        if (plans) check_phase(check, PHASE_PREPARE);
        if (plans || p == PHASE_PREPARE) check_traffic(c, check);
        check_phase(check, (PhaseId)p);
        out->phases[p].wrong += check->wrong - before;
    }
    return world_all(c->world, ok && check_status(c));
}

/* ---- one size ------------------------------------------------------------------------------ */

/* prepare, dispatch, ... need a plan even where nothing is checked first. */
static bool warm_up_unchecked(Case *c) {
    bool ok = true;
    for (int p = 0; p < NUM_PHASES; p++)
        ok = ok && phase_run(c, (PhaseId)p) && phase_fetch(c, (PhaseId)p);
    return world_all(c->world, ok && check_status(c));
}

static bool time_memcpy(Case *c, double floor_us[NUM_PHASES]) {
    Quantiles floors[NUM_PHASES];
    if (!floor_measure(c, floors)) return false;
    for (int p = 0; p < NUM_PHASES; p++)
        floor_us[p] = floors[p].median_us;
    return true;
}

/* A memcpy copies rows as they are; the wire takes any bytes. */
static bool has_floor(const Case *c, int phase) {
    return c->device || phase != PHASE_DISPATCH || c->quant == EP_QUANT_NONE;
}

static bool time_floor(Case *c, SizeResult *out) {
    double floor_us[NUM_PHASES];
    if (!c->options->floor) return true;
    if (!(c->device ? wire_measure(c, floor_us) : time_memcpy(c, floor_us))) return false;
    bool signals = c->device && c->options->mode == EP_MODE_LATENCY;
    if (signals && !signal_measure(c, &out->empty_node_us, &out->flag_us)) return false;
    for (int p = 0; p < NUM_PHASES; p++)
        if (out->phases[p].useful_bytes > 0 && has_floor(c, p))
            out->phases[p].floor_us = floor_us[p];
    if (c->device) memcpy(out->no_floor, c->device->reason, sizeof(out->no_floor));
    return true;
}

static bool time_baseline(Case *c, Check *check, SizeResult *out) {
    BaselineResult result;
    if (!c->options->baseline) return true;
    if (!baseline_measure(c, check, &result)) return false;
    for (int p = 0; p < NUM_BASELINE_PHASES; p++) {
        PhaseResult *phase = &out->phases[NUM_PHASES + p];
        phase->time = result.times[p];
        phase->wrong = c->options->check && p != BASELINE_PREPARE ? result.wrong[p] : -1;
    }
    double ours =
        out->phases[PHASE_DISPATCH].time.median_us + out->phases[PHASE_COMBINE].time.median_us;
    out->num_phases = MAX_RESULTS;
    out->baseline_us =
        result.times[BASELINE_DISPATCH].median_us + result.times[BASELINE_COMBINE].median_us;
    out->speedup = ours > 0 ? out->baseline_us / ours : 0;
    return true;
}

static void name_phases(const Options *options, SizeResult *out) {
    out->num_phases = NUM_PHASES;
    out->empty_node_us = out->flag_us = -1;
    for (int p = 0; p < MAX_RESULTS; p++) {
        out->phases[p].name = p < NUM_PHASES ? phase_name((PhaseId)p)
                                             : baseline_phase_name((BaselinePhase)(p - NUM_PHASES));
        out->phases[p].floor_us = out->phases[p].issue_us = -1;
        out->phases[p].plain_us = out->phases[p].launch_us = -1;
        out->phases[p].wrong = options->check ? 0 : -1;
    }
}

/* Wrong elements of all ranks, and the first rank's sentence about one. */
static bool gather_wrong(Case *c, const Check *check, SizeResult *out) {
    World *world = c->world;
    int64_t wrong[NUM_PHASES];
    char *all = bench_alloc((size_t)world->size, CHECK_SENTENCE_BYTES, "findings");
    bool ok = world_all(world, all != NULL) &&
              world_allgather(world, check->first, all, CHECK_SENTENCE_BYTES);
    for (int r = world->size - 1; ok && r >= 0; r--) {
        if (all[(size_t)r * CHECK_SENTENCE_BYTES])
            memcpy(out->first_wrong, all + (size_t)r * CHECK_SENTENCE_BYTES, CHECK_SENTENCE_BYTES);
    }
    free(all);
    for (int p = 0; p < NUM_PHASES; p++)
        wrong[p] = out->phases[p].wrong;
    ok = ok && (!c->options->check || world_sum(world, wrong, NUM_PHASES));
    for (int p = 0; ok && p < out->num_phases; p++) {
        if (p < NUM_PHASES) out->phases[p].wrong = wrong[p];
        if (out->phases[p].wrong > 0) out->wrong += out->phases[p].wrong;
    }
    return ok;
}

static bool save_routing(Case *c) {
    bool ok = c->world->rank != 0 || !c->options->save_path ||
              trace_write(c->options->save_path, &c->routing);
    return world_all(c->world, ok);
}

static bool measure_case(Case *c, Check *check, SizeResult *out) {
    bool checks = c->options->check;
    for (int p = 0; p < NUM_PHASES; p++)
        out->phases[p].absent = !phase_is_there(c, (PhaseId)p);
    return save_routing(c) && count_bytes(c, out) && world_all(c->world, phase_begin(c)) &&
           (checks ? check_phases(c, check, out) : warm_up_unchecked(c)) && measure_times(c, out) &&
           (!checks || check_phases(c, check, out)) && time_floor(c, out) &&
           time_baseline(c, check, out) && gather_wrong(c, check, out);
}

bool measure_size(World *world, const Options *options, int64_t size, SizeResult *out) {
    *out = (SizeResult){0};
    name_phases(options, out);
    Case c;
    Check check = {.c = NULL};
    bool ok = case_create(world, options, size, &c);
    if (ok) ok = world_all(world, check_create(&c, &check)) && measure_case(&c, &check, out);
    check_destroy(&check);
    case_destroy(&c);
    return ok;
}
