/* SPDX-License-Identifier: Apache-2.0 */

/**
 * --placement: copies of experts. Every rank turns the routing of all ranks into one of physical
 * experts, as ep_group_place defines the choice, and independent of the library. From there on
 * experts are physical ones; only the indices that calls get are the router's.
 */

#include "tools/bench/placement.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/gpu.h"
#include "tools/common/util.h"

/* ---- files --------------------------------------------------------------------------------- */

/* Read the map behind the header. */
static bool read_map(FILE *file, const char *path, int64_t experts, int64_t places, int32_t *map) {
    for (int64_t p = 0; p < places; p++) {
        long long expert;
        if (fscanf(file, "%lld", &expert) != 1 || expert < -1 || expert >= experts)
            return bench_refuse("--placement: expected %lld numbers from -1 to %lld in %s, got "
                                "another one at %lld",
                                (long long)places, (long long)experts - 1, path, (long long)p);
        map[p] = (int32_t)expert;
    }
    return true;
}

bool placement_read(const char *path, Options *options) {
    long long experts, places;
    FILE *file = fopen(path, "r");
    if (!file) return bench_refuse("--placement: expected balance:N or a file, got \"%s\"", path);
    bool ok = fscanf(file, "ep-placement 1 experts %lld places %lld", &experts, &places) == 2 &&
              experts > 0 && places > 0 && places <= EP_MAX_EXPERTS;
    if (!ok)
        bench_refuse("--placement: expected \"ep-placement 1\", \"experts E places P\" and P "
                     "numbers in %s, got another begin",
                     path);
    options->map = ok ? bench_alloc((size_t)places, sizeof(int32_t), "placement") : NULL;
    options->physical = ok ? places : 0;
    ok = options->map && read_map(file, path, experts, places, options->map);
    options->map_experts = ok ? experts : 0;
    fclose(file);
    return ok;
}

/* ---- the choice ---------------------------------------------------------------------------- */

/* How near a place is to a rank: 2: on it; 1: on its node; 0: elsewhere, or it does not matter. */
static int nearness(const Case *c, const Routing *placed, int place, int rank) {
    int owner = routing_owner(placed, place);
    if (c->options->choice == EP_CHOICE_SPREAD) return 0;
    return (owner == rank) + (c->nodes[owner] == c->nodes[rank]);
}

/* List the places of an expert among which a rank's tokens choose. Returns their number. */
static int list_copies(const Case *c, const Routing *placed, int expert, int rank, int32_t *list) {
    int count = 0, best = 0;
    for (int p = 0; p < placed->num_experts; p++) {
        if (c->map[p] != expert) continue;
        int near = nearness(c, placed, p, rank);
        if (near > best) count = 0, best = near;
        if (near == best) list[count++] = p;
    }
    return count;
}

/* Turn one rank's entries for each expert into those for its copies. `copies` [E, P]. */
static void place_rank(const Case *c, Routing *placed, int rank, int32_t *copies, int32_t *counts) {
    int places = placed->num_experts;
    for (int e = 0; e < c->options->experts; e++)
        counts[e] = list_copies(c, placed, e, rank, copies + (size_t)e * (size_t)places);
    for (int64_t t = 0; t < placed->tokens[rank]; t++)
        for (int k = 0; k < placed->top_k; k++) {
            int32_t *entry = &placed->experts[(placed->first[rank] + t) * placed->top_k + k];
            if (*entry < 0) continue;
            int32_t count = counts[*entry];
            *entry = count ? copies[(size_t)*entry * (size_t)places +
                                    (size_t)((rank + t) % count)]
                           : -1;
        }
}

/* ---- the map ------------------------------------------------------------------------------- */

/* Make a map of this routing's own loads, as an engine does of those of the steps before. */
static bool balance(Case *c) {
    const Routing *r = &c->routing;
    double *load = pool_alloc(&c->pool, (size_t)r->num_experts, sizeof(double), "placement");
    if (!load) return false;
    for (int64_t i = 0; i < r->first[r->num_ranks] * r->top_k; i++)
        if (r->experts[i] >= 0) load[r->experts[i]]++;
    return bench_ok(ep_placement_balance(load, r->num_experts, (int32_t)c->options->physical,
                                         r->num_ranks, c->nodes, c->map),
                    "ep_placement_balance");
}

/* Count the slots of the rank with most of them over the mean, and the rows to other ranks. */
static void count(const Case *c, const Routing *r, int64_t *slots, double *largest, int64_t *rows) {
    int64_t all = 0, most = 0;
    memset(slots, 0, (size_t)r->num_ranks * sizeof(*slots));
    for (int rank = 0; rank < r->num_ranks; rank++)
        for (int64_t t = 0; t < r->tokens[rank]; t++)
            for (int k = 0; k < r->top_k; k++) {
                const int32_t *row = routing_row(r, rank, t);
                int owner = row[k] < 0 ? rank : routing_owner(r, row[k]), fresh = owner != rank;
                for (int i = 0; i < k; i++)
                    fresh &= row[i] < 0 || routing_owner(r, row[i]) != owner;
                slots[owner] += row[k] >= 0, all += row[k] >= 0, *rows += fresh;
            }
    for (int rank = 0; rank < c->world->size; rank++)
        most = slots[rank] > most ? slots[rank] : most;
    *largest = all ? (double)most * r->num_ranks / (double)all : 1;
}

bool placement_make(Case *c) {
    Routing *r = &c->routing;
    size_t entries = (size_t)(r->first[r->num_ranks] * r->top_k);
    size_t experts = (size_t)r->num_experts, places = (size_t)c->options->physical;
    Placed *facts = &c->placed;
    Pool pool = {.count = 0};
    int32_t *copies = pool_alloc(&pool, experts * places, sizeof(int32_t), "placement");
    int32_t *counts = pool_alloc(&pool, experts, sizeof(int32_t), "placement");
    int64_t *slots = pool_alloc(&pool, (size_t)r->num_ranks, sizeof(int64_t), "placement");
    c->map = pool_alloc(&c->pool, places, sizeof(int32_t), "placement");
    r->named = pool_alloc(&c->pool, entries, sizeof(int32_t), "placement");
    bool ok = !pool.failed && !c->pool.failed;
    if (ok) memcpy(r->named, r->experts, entries * sizeof(int32_t));
    if (ok) count(c, r, slots, &facts->largest_before, &facts->rows_before);
    if (ok && c->options->map) memcpy(c->map, c->options->map, places * sizeof(int32_t));
    if (ok && !c->options->map) ok = balance(c);
    r->num_experts = (int)places;
    for (int rank = 0; ok && rank < r->num_ranks; rank++)
        place_rank(c, r, rank, copies, counts);
    if (ok) count(c, r, slots, &facts->largest, &facts->rows);
    pool_free(&pool);
    return ok;
}

/* ---- the call ------------------------------------------------------------------------------ */

#if EP_WITH_CUDA

static bool place_on_gpu(Case *c, EpTensor map) {
    size_t bytes = (size_t)c->options->physical * sizeof(int32_t);
    if (!cuda_ok(cudaMalloc(&map.data, bytes), "cudaMalloc")) return false;
    bool ok = cuda_ok(cudaMemcpy(map.data, c->map, bytes, cudaMemcpyHostToDevice), "cudaMemcpy") &&
              bench_ok(ep_group_place(c->group, &map, NULL), "ep_group_place") &&
              cuda_ok(cudaStreamSynchronize(NULL), "cudaStreamSynchronize");
    return cuda_ok(cudaFree(map.data), "cudaFree") && ok;
}

#else
#define place_on_gpu(c, map) gpu_missing(c, map)
#endif

bool placement_call(Case *c) {
    EpTensor map = ep_tensor_1d(c->map, EP_TYPE_INT32, c->options->physical);
    if (!c->options->physical) return true;
    return c->cuda ? place_on_gpu(c, map)
                   : bench_ok(ep_group_place(c->group, &map, NULL), "ep_group_place");
}
