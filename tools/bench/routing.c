/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/routing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/data.h"
#include "tools/common/util.h"

/* ---- placement ----------------------------------------------------------------------------- */

int routing_first_expert(const Routing *routing, int rank) {
    int each = routing->num_experts / routing->num_ranks;
    int more = routing->num_experts % routing->num_ranks;
    return rank * each + (rank < more ? rank : more);
}

int routing_owner(const Routing *routing, int expert) {
    int each = routing->num_experts / routing->num_ranks;
    int more = routing->num_experts % routing->num_ranks;
    int in_larger = more * (each + 1);
    return expert < in_larger ? expert / (each + 1) : more + (expert - in_larger) / each;
}

/* ---- memory -------------------------------------------------------------------------------- */

bool routing_alloc(Routing *routing, int num_ranks, int top_k, int num_experts,
                   const int64_t *tokens) {
    *routing = (Routing){.num_ranks = num_ranks, .top_k = top_k, .num_experts = num_experts};
    Pool *pool = &routing->pool;
    routing->tokens = pool_alloc(pool, (size_t)num_ranks, sizeof(int64_t), "routing");
    routing->first = pool_alloc(pool, (size_t)num_ranks + 1, sizeof(int64_t), "routing");
    if (pool->failed) return false;
    for (int r = 0; r < num_ranks; r++) {
        routing->tokens[r] = tokens[r];
        routing->first[r + 1] = routing->first[r] + tokens[r];
        if (tokens[r] > routing->max_tokens) routing->max_tokens = tokens[r];
    }
    const size_t entries = (size_t)(routing->first[num_ranks] * top_k);
    routing->experts = pool_alloc(pool, entries, sizeof(int32_t), "routing");
    return !pool->failed;
}

void routing_free(Routing *routing) {
    pool_free(&routing->pool);
}

/* ---- generators ---------------------------------------------------------------------------- */

/* A shuffle scatters the popular experts over the ranks, as after training. */
typedef struct Popularity {
    double *cumulative; /* [E] */
    int32_t *expert;    /* [E] in descending popularity */
} Popularity;

static bool popularity_make(const Options *o, Pool *pool, Popularity *p) {
    int64_t count = o->experts;
    double exponent = o->routing == ROUTING_ZIPF ? o->zipf_exponent : 0, total = 0;
    p->cumulative = pool_alloc(pool, (size_t)count, sizeof(double), "routing");
    p->expert = pool_alloc(pool, (size_t)count, sizeof(int32_t), "routing");
    if (pool->failed) return false;
    for (int64_t i = 0; i < count; i++) {
        total += pow((double)(i + 1), -exponent);
        p->cumulative[i] = total;
        int64_t j =
            (int64_t)(hash_add(hash_add((uint64_t)o->run.seed, 'p'), i) % (uint64_t)(i + 1));
        p->expert[i] = p->expert[j];
        p->expert[j] = (int32_t)i;
    }
    return true;
}

static int64_t draw(const Popularity *p, int64_t count, double unit) {
    double target = unit * p->cumulative[count - 1];
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (p->cumulative[middle] > target)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static bool contains(const int32_t *row, int count, int32_t expert) {
    for (int k = 0; k < count; k++) {
        if (row[k] == expert) return true;
    }
    return false;
}

/* Draw until the expert is new. A steep distribution may repeat itself too often; then take the
 * most popular expert that is left. */
static int32_t draw_new(const Popularity *p, int64_t count, const int32_t *row, int have,
                        uint64_t *state) {
    for (int tries = 0; tries < 64; tries++) {
        *state = hash_word(*state);
        int32_t expert = p->expert[draw(p, count, hash_unit(*state))];
        if (!contains(row, have, expert)) return expert;
    }
    int64_t i = 0;
    while (contains(row, have, p->expert[i]))
        i++;
    return p->expert[i];
}

static void fill_token(const Options *o, const Popularity *p, uint64_t state, int32_t *row) {
    int top_k = (int)o->top_k;
    for (int k = 0; k < top_k; k++) {
        if (o->routing == ROUTING_ONE_HOT)
            row[k] = k == 0 ? (int32_t)(o->run.seed % o->experts) : -1;
        else
            row[k] = draw_new(p, o->experts, row, k, &state);
    }
    for (int k = 0; k < top_k && o->masked > 0; k++) {
        state = hash_word(state);
        if (hash_unit(state) < o->masked) row[k] = -1;
    }
}

static void fill(const Options *o, const Popularity *p, Routing *routing) {
    for (int r = 0; r < routing->num_ranks; r++) {
        uint64_t rank_hash = hash_add(hash_add((uint64_t)o->run.seed, 'r'), r);
        for (int64_t t = 0; t < routing->tokens[r]; t++) {
            int32_t *row = &routing->experts[(routing->first[r] + t) * routing->top_k];
            fill_token(o, p, hash_add(rank_hash, t), row);
        }
    }
}

static bool generate(const Options *o, int num_ranks, int64_t size, Routing *out) {
    Pool pool = {.count = 0};
    int64_t *tokens = pool_alloc(&pool, (size_t)num_ranks, sizeof(int64_t), "routing");
    Popularity popularity;
    bool ok = popularity_make(o, &pool, &popularity);
    /* Uneven: rank 0 brings `size` tokens, the others between half and all of that. */
    for (int r = 0; ok && r < num_ranks; r++)
        tokens[r] = size - (o->uneven ? size * ((r * 37) % 64) / 128 : 0);
    ok = ok && routing_alloc(out, num_ranks, (int)o->top_k, (int)o->experts, tokens);
    if (ok) fill(o, &popularity, out);
    pool_free(&pool);
    return ok;
}

/* ---- from a file --------------------------------------------------------------------------- */

static bool load(World *world, const Options *o, Routing *out) {
    TraceShape shape = {world->size, (int)o->top_k, (int)o->experts};
    bool ok = world->rank != 0 || trace_read(o->routing_path, &shape, out);
    if (!world_all(world, ok)) return false;
    int64_t *tokens = bench_alloc((size_t)world->size, sizeof(int64_t), "routing");
    if (tokens && world->rank == 0)
        memcpy(tokens, out->tokens, (size_t)world->size * sizeof(int64_t));
    ok = world_all(world, tokens != NULL) &&
         world_broadcast(world, tokens, (size_t)world->size * sizeof(int64_t));
    if (ok && world->rank != 0)
        ok = routing_alloc(out, world->size, (int)o->top_k, (int)o->experts, tokens);
    free(tokens);
    return world_all(world, ok) &&
           world_broadcast(world, out->experts,
                           (size_t)(out->first[world->size] * out->top_k) * sizeof(int32_t));
}

bool routing_make(World *world, const Options *options, int64_t size, Routing *out) {
    if (options->routing == ROUTING_FILE) return load(world, options, out);
    return world_all(world, generate(options, world->size, size, out));
}
