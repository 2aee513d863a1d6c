/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/pairs.h"

#include <stdlib.h>

#include "tools/bench/device.h"

/* Both sides in turn: chains of pairs, whose first ones are not counted. */
enum { ROUNDS = 4, PAIRS = 128, DROPPED = 16, KEPT = PAIRS - DROPPED };

typedef struct Pairs {
    Case *c;
    Collectives *baseline; /* NULL: libep's pairs alone */
    Graphs *graphs;        /* NULL: plain calls */
    double *times;         /* [NUM_PAIR_SIDES][ROUNDS * KEPT] */
    double chain[PAIRS];
} Pairs;

static int num_sides(const Pairs *p) {
    return p->baseline ? NUM_PAIR_SIDES : 1;
}

static bool run_pair(void *context, int side) {
    Pairs *p = context;
    if (side == PAIR_LIBEP) return phase_run_pair(p->c);
    return collectives_run(p->baseline, ALL_GATHER) && collectives_run(p->baseline, REDUCE_SCATTER);
}

static bool run_chain(Pairs *p, int side) {
    Chain chain = {p->graphs ? graphs_replay : run_pair, p, side, PAIRS};
    if (p->graphs) chain.context = p->graphs;
    return p->c->device ? device_time_chain(p->c, &chain, p->chain)
                        : time_chain(p->c->world, &chain, p->chain);
}

static bool sample(Pairs *p) {
    bool ok = true;
    for (int round = 0; ok && round < ROUNDS; round++)
        for (int side = 0; ok && side < num_sides(p); side++) {
            ok = world_all(p->c->world, run_chain(p, side));
            for (int i = 0; ok && i < KEPT; i++)
                p->times[(side * ROUNDS + round) * KEPT + i] = p->chain[DROPPED + i];
        }
    return ok;
}

static bool measure(Pairs *p, Quantiles *out) {
    World *world = p->c->world;
    const int64_t length = p->c->options->chain;
    if (p->c->options->graphs) {
        p->graphs = graphs_open(p->c, run_pair, p, num_sides(p), length);
        if (!p->graphs) return false;
    }
    bool ok = world_all(world, sample(p) && (!p->baseline || p->baseline->ok));
    for (int side = 0; ok && side < num_sides(p); side++)
        ok = time_median_rank(world, true, p->times + side * ROUNDS * KEPT, ROUNDS * KEPT,
                              &out[side]);
    if (ok && p->graphs) time_divide(out, num_sides(p), length);
    return ok;
}

bool pairs_measure(Case *c, Collectives *baseline, Quantiles out[NUM_PAIR_SIDES]) {
    Pairs p = {.c = c, .baseline = baseline};
    p.times = bench_alloc(NUM_PAIR_SIDES * ROUNDS * KEPT, sizeof(double), "samples");
    bool ok = world_all(c->world, p.times != NULL) && measure(&p, out);
    if (p.graphs) graphs_close(p.graphs);
    free(p.times);
    return ok;
}
