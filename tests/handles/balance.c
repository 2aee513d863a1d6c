/* SPDX-License-Identifier: Apache-2.0 */
/* ep_placement_balance: what its maps promise, how balanced they are, and what it refuses. */
#include <math.h>

#include "tests/cases/refusals.h"
#include "tests/harness/random.h"

enum { MOST = 4096, RANKS = 64 };

/** A call, and the largest load of a rank over the mean that its map may have. */
typedef struct Balance {
    int32_t experts, physical, ranks, nodes;
    double exponent; /**< of zipf loads; 0: equal ones; below 0: random ones, many of them zero */
    double worst;
    int divides; /**< whether experts are divided among the nodes */
    double *load;
    int32_t *node, *map, *given;
} Balance;

static void draw(Balance *b, double load[MOST], int32_t node[RANKS]) {
    Random random = random_stream((uint64_t)b->experts, (uint64_t)b->physical, 0);
    for (int e = 0; e < b->experts; e++)
        load[e] = b->exponent < 0 ? (double)random_below(&random, 5) * (e % 3)
                                  : 1000 * pow(1 + (e * 77 + 5) % b->experts, -b->exponent);
    for (int r = 0; r < b->ranks; r++) /* ranks of a node need not follow each other */
        node[r] = b->nodes ? r % b->nodes : 0;
}

static EpStatus call(const Balance *b, int32_t *map) {
    return ep_placement_balance(b->load, b->experts, b->physical, b->ranks,
                                b->nodes ? b->node : NULL, map);
}

/* Count the copies of each expert, and in how many ranks and on which nodes they are. */
static void check_copies(const Balance *b, const int32_t *map, int copies[MOST]) {
    static int ranks[MOST], first_node[MOST];
    int each = b->physical / b->ranks;
    memset(ranks, 0, sizeof(ranks));
    for (int p = 0; p < b->physical; p++) {
        int rank = p / each, node = b->node[rank], e = map[p], again = 0;
        REQUIRE(e >= 0 && e < b->experts, "place %d holds %d", p, e);
        for (int q = rank * each; q < p; q++)
            again |= map[q] == e;
        if (!copies[e]++) first_node[e] = node;
        ranks[e] += !again;
        CHECK(!b->divides || node == first_node[e], "expert %d is on nodes %d and %d", e,
              first_node[e], node);
    }
    for (int e = 0; e < b->experts; e++)
        CHECK(copies[e] >= 1 && (ranks[e] == copies[e] || copies[e] > b->ranks),
              "expert %d: %d copies on %d ranks", e, copies[e], ranks[e]);
}

static void check_balance(Balance b) {
    static double load[MOST];
    static int32_t node[RANKS], map[MOST], again[MOST];
    static int copies[MOST];
    double sum = 0, most = 0;
    b.load = load, b.node = node;
    draw(&b, load, node);
    memset(copies, 0, sizeof(copies));
    CHECK_OK(call(&b, map));
    CHECK_OK(call(&b, again));
    CHECK(!memcmp(map, again, (size_t)b.physical * sizeof(*map)), "two maps differ");
    check_copies(&b, map, copies);
    for (int r = 0; r < b.ranks; r++) {
        double mine = 0;
        for (int p = r * (b.physical / b.ranks); p < (r + 1) * (b.physical / b.ranks); p++)
            mine += load[map[p]] / copies[map[p]];
        sum += mine, most = fmax(most, mine);
    }
    CHECK(most * b.ranks <= sum * b.worst, "%d experts on %d ranks: %.4f", b.experts, b.ranks,
          most * b.ranks / sum);
}

SoloTest(handles_balance, keeps_promises) {
    static const Balance each[] = {{256, 280, 4, 0, 1, 1.01},      {256, 280, 8, 0, 1, 1.01},
                                   {256, 320, 8, 2, 1, 1.05, 1},   {256, 288, 8, 2, 1, 1.10, 1},
                                   {255, 272, 8, 2, 1, 1.01},      {256, 256, 8, 0, 0, 1.0},
                                   {64, 64, 8, 0, 1, 2.0},         {8, 64, 8, 0, 1.5, 1.1},
                                   {3, 32, 8, 0, 2, 1.5},          {1, 6, 3, 0, 0, 1.0},
                                   {1000, 1500, 50, 0, -1, 1.05},  {60, 96, 24, 3, -1, 1.6, 1},
                                   {4096, 4096, 64, 8, 1, 7.31, 1}, {5, 5, 1, 0, 1, 1.0}};
    for (int i = 0; i < LENGTH(each); i++)
        check_balance(each[i]);
}

static EpStatus call_by_name(void *context, const char *name) {
    Balance *b = context;
    (void)name;
    return call(b, b->given);
}

SoloTest(handles_balance, refuses) {
    static const TextField fields[] = {TEXT_FIELD(Balance, experts, NULL),
                                       TEXT_FIELD(Balance, physical, NULL),
                                       TEXT_FIELD(Balance, ranks, NULL)};
    static const Member members[] = {MEMBER("", fields, Balance, experts)};
    static double load[16];
    static int32_t node[4], map[16];
    const Subject subject = {members, LENGTH(members), sizeof(Balance), call_by_name};
    Balance b = {8, 16, 4, .nodes = 1, .load = load, .node = node, .given = map};
    memset(map, 0x55, sizeof(map));
    check_refusals("balance", &subject, &b);
    const double bad[] = {-1, NAN, INFINITY};
    for (int i = 0; i < LENGTH(bad); i++) {
        load[5] = bad[i];
        CHECK_REFUSED(call(&b, map), EP_ERR_RANGE, "load: expected finite numbers", "expert 5");
    }
    load[5] = 1, node[2] = 4;
    CHECK_REFUSED(call(&b, map), EP_ERR_RANGE, "nodes: expected 0 .. 3, got 4 of rank 2");
    CHECK_REFUSED(call(&b, NULL), EP_ERR_NULL, "map");
    b.load = NULL;
    CHECK_REFUSED(call(&b, map), EP_ERR_NULL, "load");
    for (int i = 0; i < 16; i++)
        CHECK(map[i] == 0x55555555, "%d was written", i);
}
