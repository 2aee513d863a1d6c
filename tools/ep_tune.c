/* SPDX-License-Identifier: Apache-2.0 */
/**
 * ep_tune: measures the constants by which libep's kernels divide their blocks on this machine, and
 * writes them to a file for LIBEP_TUNING. Start it on as many GPUs as the program will use.
 *
 * It starts from the table that libep would use, and first measures two rates directly: copies
 * within the memory, and the wire. Then it searches, one knob after the other: a knob makes some
 * constants larger or smaller by a factor. A change stays if two comparisons in a row show that the
 * calls become faster on average, and that none becomes slower. Both tables take turns in each
 * comparison. At the end the new table is compared with the first one in all cells, and is written
 * only if it is faster. See docs/settings.md.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/time.h"
#include "tools/common/tool.h"
#include "tools/tune/tune.h"

const char *const bench_program = "ep_tune";

/* ---- options ------------------------------------------------------------------------------- */

#define AT(member) offsetof(TuneOptions, member)
static const Option specs[] = {
    {'o', "output", "FILE", OPTION_TEXT(output), NULL, 0, "the file to write (libep.tuning)"},
    {0, "tokens", "N", OPTION_INT(tokens, 1, 65536), NULL, 4096, "tokens per rank (4096)"},
    {0, "seconds", "N", OPTION_INT(seconds, 1, 3600), NULL, 165,
     "the run takes about so many, and two comparisons at least (165)"},
    {0, "chain", "N", OPTION_INT(chain, 1, 1000), NULL, 4, "calls that are timed together (4)"},
    {0, "seed", "N", OPTION_INT(run.seed, 0, INT32_MAX), NULL, 1, "seed of the routing (1)"},
    OPTION_THREADS,
    OPTION_HELP,
};

static const OptionTable table = {
    "usage: mpirun -n RANKS ep_tune [options]\n\n"
    "Measures how libep's kernels should divide their blocks on this machine, and writes a file\n"
    "for LIBEP_TUNING. Nothing else may use the GPUs meanwhile.\n\n",
    specs, sizeof(specs) / sizeof(specs[0])};

static bool complete(void *options) {
    TuneOptions *o = options;
    if (!o->output) o->output = "libep.tuning";
    return option_check_threads(&o->run);
}

/* ---- knobs --------------------------------------------------------------------------------- */

enum { FEW = 1, MANY = 2, LATENCY = 4, MANY_SMS = 64, MOST_NAMES = 10 };
#define CALLS(call) (1 << (call))
#define COPIES CALLS(CELL_DISPATCH)
#define SUMS CALLS(CELL_COMBINE)
#define FACTORS CALLS(CELL_COMBINE_BACKWARD)
#define COST(name) name ".token_us", name ".row_us", name ".bytes_per_us"

/** Constants that one factor scales, and the cells that depend on them. Rates are divided. */
typedef struct Knob {
    const char *what;
    int calls, budgets;
    const char *names[MOST_NAMES];
} Knob;

/* The balance of both kinds of blocks comes first: it matters most. */
static const Knob knobs[] = {
    {"few blocks: time to receive copies", COPIES, FEW, {COST("few.receive_copies")}},
    {"few blocks: time to receive sums", SUMS, FEW, {COST("few.receive_sums")}},
    {"many blocks: time to receive copies", COPIES, MANY, {COST("many.receive_copies")}},
    {"many blocks: time to receive sums", SUMS, MANY, {COST("many.receive_sums")}},
    {"time to multiply", FACTORS, FEW | MANY, {COST("multiply")}},
    {"senders of copies over what the wire uses", COPIES | FACTORS, MANY, {"spare_senders"}},
    {"senders of sums over what the wire uses", SUMS, MANY, {"many.spare_sums"}},
    {"likewise of few blocks", SUMS, FEW, {"few.spare_sums"}},
    {"the least part of blocks that send sums", SUMS, FEW | MANY, {"sums_sent.least"}},
    {"the least part that sends copies", COPIES, FEW | MANY, {"copies_sent.least"}},
    {"many blocks: an item's way to a peer", COPIES | FACTORS, MANY, {"item_us"}},
    {"few blocks: all times of copies",
     COPIES,
     FEW,
     {COST("few.send_copies"), COST("few.receive_copies"), "post_us", "post_pass_us",
      "least_send_us"}},
    {"few blocks: all times of sums", SUMS, FEW, {COST("few.send_sums"), COST("few.receive_sums")}},
    {"few blocks: time to post a token", COPIES, FEW, {"post_us", "post_pass_us", "least_send_us"}},
    {"scheduler warps: time of a pass", COPIES | SUMS, FEW | MANY, {"pass_us", "token_us"}},
    {"scheduler warps: time of a claim", COPIES | SUMS, FEW | MANY, {"claim_us"}},
    {"likewise where nobody is waited for", FACTORS, FEW | MANY, {"own_pass_us", "own_claim_us"}},
    {"tokens claimed by all blocks", COPIES | SUMS, MANY, {"most_claimed"}},
    {"copies under way", COPIES, MANY, {"copies.active"}},
    {"sums under way", SUMS, MANY, {"sums.active"}},
    {"latency mode: the part that sends copies", COPIES, LATENCY, {"latency_dispatch_sent"}},
    {"latency mode: the part that sends sums", SUMS, LATENCY, {"latency_combine_sent"}},
    {"likewise of few terms", SUMS, LATENCY, {"latency_few_sent"}},
};
enum { NUM_KNOBS = sizeof(knobs) / sizeof(knobs[0]) };

static bool is_rate(const char *name) {
    size_t length = strlen(name), end = strlen("bytes_per_us");
    return length >= end && strcmp(name + length - end, "bytes_per_us") == 0;
}

static bool turn(const Knob *knob, double factor, Table *t) {
    for (int i = 0; i < MOST_NAMES && knob->names[i]; i++) {
        double value;
        const char *name = knob->names[i];
        if (!table_get(t, name, &value) ||
            !table_set(t, name, is_rate(name) ? value / factor : value * factor))
            return false;
    }
    return true;
}

/* Returns the number of cells of these calls and budgets. */
static int list_cells(const TuneRank *r, int calls, int budgets, Cell *out) {
    int count = 0;
    for (int c = 0; c < NUM_CELL_CALLS; c++)
        for (int b = 0; b < r->num_budgets; b++) {
            int kind = r->budgets[b] < MANY_SMS ? FEW : MANY;
            /* A GPU of few multiprocessors has none of the other kind. */
            if (!(calls >> c & 1) || !(budgets & kind)) continue;
            for (int s = 0; s < NUM_SHAPES; s++)
                out[count++] = (Cell){(CellCall)c, s, b, false, false};
            if (c == CELL_DISPATCH) out[count++] = (Cell){(CellCall)c, 0, b, true, false};
        }
    /* Latency mode has no backward. */
    for (int c = CELL_DISPATCH; c <= CELL_COMBINE && (budgets & LATENCY); c++)
        for (int s = 0; s < NUM_SHAPES && (calls >> c & 1); s++)
            out[count++] = (Cell){(CellCall)c, s, r->num_budgets - 1, false, true};
    return count;
}

/* ---- search -------------------------------------------------------------------------------- */

/** The table so far, and a trial that runs with it and has handles for all cells. */
typedef struct Search {
    TuneRank *r;
    Table table;
    Trial base;
    Cell cells[MOST_CELLS];
    int num_cells;
    double end_us;
    int tried, kept;
} Search;

/* Limits of what counts: noise is below 1 %, of one cell below 3. */
#define GAIN .996
#define WORST 1.03

static double mean_of(const double *ratios, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += log(ratios[i]);
    return count ? exp(sum / count) : 1;
}

static bool is_faster(const double *ratios, int count) {
    for (int i = 0; i < count; i++)
        if (ratios[i] > WORST) return false;
    return mean_of(ratios, count) < GAIN;
}

/* Rank 0's clock decides, since all ranks must go the same way. */
static bool is_over(Search *s, bool *over) {
    *over = time_now_us() > s->end_us;
    return world_broadcast(s->r->world, over, sizeof(*over));
}

static bool rebase(Search *s) {
    bool refused;
    trial_close(&s->base);
    return trial_open(s->r, &s->table, s->cells, s->num_cells, &refused, &s->base);
}

/* Compare a changed table with the one so far; two comparisons must agree. A table that libep
 * refuses, since a constant leaves its range, is not faster. */
static bool try_table(Search *s, const Table *changed, const Cell *cells, int count, bool *faster,
                      double *gain) {
    double ratios[MOST_CELLS];
    bool refused;
    Trial trial;
    *faster = false;
    s->tried++;
    if (!trial_open(s->r, changed, cells, count, &refused, &trial)) return refused;
    bool ok = trial_compare(&s->base, &trial, cells, count, ratios, NULL);
    *faster = ok && is_faster(ratios, count);
    if (*faster) {
        ok = trial_compare(&s->base, &trial, cells, count, ratios, NULL);
        *faster = ok && is_faster(ratios, count);
    }
    *gain = 1 - mean_of(ratios, count);
    trial_close(&trial);
    return ok;
}

enum { MOST_STEPS = 4 };

/* Turn a knob in one direction as long as calls become faster. */
static bool climb(Search *s, const Knob *knob, double factor, bool *moved) {
    Cell cells[MOST_CELLS];
    int count = list_cells(s->r, knob->calls, knob->budgets, cells);
    bool faster = count > 0, over = false;
    *moved = false;
    for (int step = 0; faster && step < MOST_STEPS; step++) {
        Table changed = s->table;
        double gain = 0;
        if (!is_over(s, &over)) return false;
        if (over) return true;
        if (!turn(knob, factor, &changed) || !try_table(s, &changed, cells, count, &faster, &gain))
            return false;
        if (!faster) continue;
        s->table = changed, s->kept++, *moved = true;
        if (s->r->world->rank == 0)
            printf("# %s: times %.3g, %.1f %% faster\n", knob->what, factor, 100 * gain);
        if (!rebase(s)) return false;
    }
    return true;
}

static bool search(Search *s) {
    static const double factors[] = {1.3, 1.14};
    for (size_t f = 0; f < sizeof(factors) / sizeof(factors[0]); f++)
        for (int k = 0; k < NUM_KNOBS; k++) {
            bool moved;
            if (!climb(s, &knobs[k], factors[f], &moved)) return false;
            if (!moved && !climb(s, &knobs[k], 1 / factors[f], &moved)) return false;
        }
    return true;
}

/* ---- rates --------------------------------------------------------------------------------- */

/* Replace a rate that is a tenth or more off: what the search needs is no more exact. */
static bool take_rate(Search *s, const char *name, double measured) {
    double known;
    if (!world_max_double(s->r->world, &measured, 1) || !table_get(&s->table, name, &known))
        return false;
    bool differs = measured >= 1 && fabs(log(measured / known)) > log(1.1);
    if (s->r->world->rank == 0)
        printf("# %s: measured %.4g, the table has %.4g%s\n", name, measured, known,
               differs ? ": replaced" : "");
    return !differs || table_set(&s->table, name, measured);
}

/* Bytes read and written by copies within the memory. */
static bool measure_memory(Search *s) {
    TuneRank *r = s->r;
    enum { COPIES_TIMED = 4 };
    size_t bytes = (size_t)(r->o->tokens * tune_shapes[0].top_k * tune_shapes[0].hidden * 2);
    float ms = 0;
    bool ok = true;
    for (int i = 0; ok && i <= COPIES_TIMED; i++)
        ok =
            (i != 1 || cuda_ok(cudaEventRecord(r->begin, r->stream), "cudaEventRecord")) &&
            cuda_ok(cudaMemcpyAsync(r->staged, r->rows, bytes, cudaMemcpyDeviceToDevice, r->stream),
                    "cudaMemcpyAsync");
    ok = ok && cuda_ok(cudaEventRecord(r->end, r->stream), "cudaEventRecord") &&
         cuda_ok(cudaStreamSynchronize(r->stream), "cudaStreamSynchronize") &&
         cuda_ok(cudaEventElapsedTime(&ms, r->begin, r->end), "cudaEventElapsedTime");
    double rate = ok && ms > 0 ? 2.0 * COPIES_TIMED * (double)bytes / ((double)ms * 1e3) : 0;
    return world_all(r->world, ok) && take_rate(s, "memory_bytes_per_us", rate);
}

/* The wire's rate, by the fastest calls that send large rows: they come within 3 % of it. */
static bool measure_wire(Search *s) {
    TuneRank *r = s->r;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    Cell cells[2] = {{CELL_DISPATCH, 0, r->num_budgets - 1, false, false},
                     {CELL_COMBINE, 0, r->num_budgets - 1, false, false}};
    double ratios[2], us[2], ranks = r->world->size;
    if (!world_all(r->world,
                   bench_ok(ep_group_query(s->base.of[0].group, &info), "ep_group_query")))
        return false;
    if (ranks < 2 || info.num_nodes > 1) return true;
    if (!trial_compare(&s->base, &s->base, cells, 2, ratios, us)) return false;
    double sent = (ranks - 1) * (1 - pow(1 - 1 / ranks, (double)tune_shapes[0].top_k));
    double bytes = sent * (double)(r->o->tokens * tune_shapes[0].hidden * 2);
    double best = us[0] < us[1] ? us[0] : us[1];
    return take_rate(s, "wire_bytes_per_us", best > 0 ? bytes / best : 0);
}

/* Compare the table with itself in all cells. That shows the noise, and how long the comparison at
 * the end will take, for which the search leaves time. */
static bool measure_noise(Search *s) {
    double ratios[MOST_CELLS], worst = 1, begin_us = time_now_us();
    if (!trial_compare(&s->base, &s->base, s->cells, s->num_cells, ratios, NULL)) return false;
    double took_us = time_now_us() - begin_us;
    s->end_us -= took_us;
    for (int i = 0; i < s->num_cells; i++)
        worst = fmax(worst, fmax(ratios[i], 1 / ratios[i]));
    if (s->r->world->rank == 0)
        printf(
            "# all cells take %.1f s; compared with itself, the table is %.1f %% off, %.1f %% in "
            "one cell\n",
            took_us * 1e-6, 100 * fabs(mean_of(ratios, s->num_cells) - 1), 100 * (worst - 1));
    return true;
}

/* ---- everything ---------------------------------------------------------------------------- */

static bool start(Search *s) {
    TuneRank *r = s->r;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    bool refused;
    s->num_cells = list_cells(r, COPIES | SUMS | FACTORS, FEW | MANY | LATENCY, s->cells);
    if (!trial_open(r, NULL, s->cells, s->num_cells, &refused, &s->base)) return false;
    bool ok = bench_ok(ep_group_tuning(s->base.of[0].group, s->table.text, sizeof(s->table.text)),
                       "ep_group_tuning") &&
              bench_ok(ep_group_query(s->base.of[0].group, &info), "ep_group_query");
    if (r->world->rank == 0)
        printf("# ep_tune, libep " VERSION_FORMAT ": %d GPUs, %s; starts from: %s\n",
               VERSION_NUMBERS, r->world->size, info.gpu, info.tuning);
    /* Ranks may have files of their own, but search together: rank 0's is where they start. */
    return world_all(r->world, ok) &&
           world_broadcast(r->world, s->table.text, sizeof(s->table.text));
}

/* Print how the new table compares with the first one, as a mean for each call and budget. */
static void report(const Search *s, const double *ratios) {
    static const char *const names[] = {"dispatch", "combine", "combine_backward",
                                        "latency dispatch", "latency combine"};
    const TuneRank *r = s->r;
    printf("# tables tried: %d, kept: %d\n#\n# new over first table%*s", s->tried, s->kept, 1, "");
    for (int b = 0; b < r->num_budgets; b++)
        printf(" %4d SMs", r->budgets[b]);
    for (int row = 0; row < 5; row++) {
        const bool latency = row >= NUM_CELL_CALLS;
        printf("\n%22s", names[row]);
        for (int b = latency ? r->num_budgets - 1 : 0; b < r->num_budgets; b++) {
            double some[MOST_CELLS];
            int count = 0;
            for (int i = 0; i < s->num_cells; i++) {
                const Cell *cell = &s->cells[i];
                if ((int)cell->call == row % NUM_CELL_CALLS && cell->budget == b &&
                    cell->latency == latency)
                    some[count++] = ratios[i];
            }
            printf("%*s%8.3f", 1 + 9 * (latency ? b : 0), "", mean_of(some, count));
        }
    }
    printf("\n");
}

/* Compare with the first table in all cells, and write the better one. */
static bool finish(Search *s, const Table *first) {
    double ratios[MOST_CELLS];
    TuneRank *r = s->r;
    bool refused, ok = true;
    Trial before;
    if (!trial_open(r, first, s->cells, s->num_cells, &refused, &before)) return false;
    ok = trial_compare(&before, &s->base, s->cells, s->num_cells, ratios, NULL);
    trial_close(&before);
    if (!ok) return false;
    bool better = mean_of(ratios, s->num_cells) < 1;
    if (r->world->rank == 0) {
        report(s, ratios);
        ok = table_write(better ? &s->table : first, r->o->output);
        printf("# %s has %s; use it with LIBEP_TUNING=%s\n", r->o->output,
               better ? "the new table" : "the first table: no other one was faster", r->o->output);
    }
    return world_all(r->world, ok);
}

static bool tune(TuneRank *r) {
    Search *s = bench_alloc(1, sizeof(*s), "the search");
    Table *first = bench_alloc(1, sizeof(*first), "a table");
    bool ok = world_all(r->world, s && first);
    if (ok) {
        s->r = r;
        s->end_us = time_now_us() + 1e6 * (double)r->o->seconds;
        ok = start(s);
        if (ok) *first = s->table;
        ok = ok && measure_memory(s) && measure_wire(s) && rebase(s) && measure_noise(s) &&
             search(s) && finish(s, first);
        trial_close(&s->base);
    }
    free(s);
    free(first);
    return ok;
}

static bool run(World *world, const void *options) {
    TuneRank r = {.o = options, .world = world};
    bool ok = world_all(world, world->rank != 0 || output_probe(r.o->output)) && tune_open(&r) &&
              tune(&r);
    tune_close(&r);
    return ok;
}

int main(int argc, char **argv) {
    static const Tool tool = {"ep_tune", &table, complete, run};
    TuneOptions options = {.output = NULL};
    return tool_main(&tool, argc, argv, &options);
}
