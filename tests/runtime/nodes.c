/* SPDX-License-Identifier: Apache-2.0 */
/* Which rank relays for which: held against the rule, rank by rank, on random nodes. */
#include "runtime/nodes.h"

#include "tests/harness/check.h"
#include "tests/harness/random.h"

enum { MOST = 24 };

/* Returns a rank's number on its node, counted anew. */
static int number_on_node(const int32_t *of, int rank) {
    int number = 0;
    for (int r = 0; r < rank; r++)
        number += of[r] == of[rank];
    return number;
}

/* Returns the rank of a node that relays for `rank`, by the rule. */
static int expected_relay(const int32_t *of, int size, int rank, int node) {
    int ranks = 0, number = number_on_node(of, rank);
    for (int r = 0; r < size; r++)
        ranks += of[r] == node;
    for (int r = 0; r < size; r++)
        if (of[r] == node && number_on_node(of, r) == number % ranks) return r;
    return -1;
}

static void check_sources(const EpNodes *n, const int32_t *of, int size, int rank) {
    int32_t sources[MOST], count = ep_nodes_sources(n, rank, sources), expected = 0;
    for (int s = 0; s < size; s++) {
        if (of[s] == of[rank] || expected_relay(of, size, s, of[rank]) != rank) continue;
        CHECK(expected < count && sources[expected] == s, "rank %d, source %d", rank, s);
        expected++;
    }
    CHECK(count == expected, "rank %d has %d sources, not %d", rank, count, expected);
}

static void check_nodes(const int32_t *of, int size, int nodes) {
    EpNodes n;
    int most_sources = 0, most = nodes - 1;
    REQUIRE(ep_nodes_open(size, &n), "no memory");
    memcpy(n.of, of, (size_t)size * sizeof(*of));
    for (int rank = 0; rank < size; rank++) {
        ep_nodes_set(&n, rank);
        CHECK(n.node == of[rank] && n.rank == number_on_node(of, rank), "rank %d", rank);
        for (int node = 0; node < nodes; node++)
            if (node != of[rank])
                CHECK(ep_nodes_relay(&n, rank, node) == expected_relay(of, size, rank, node),
                      "the relay of rank %d on node %d", rank, node);
        check_sources(&n, of, size, rank);
        int sources = ep_nodes_sources(&n, rank, NULL);
        most = sources > most ? sources : most;
        if (of[rank] == of[0]) most_sources = sources > most_sources ? sources : most_sources;
    }
    ep_nodes_set(&n, 0);
    CHECK(n.sizes.nodes == nodes && n.sizes.sources == most_sources && n.sizes.most == most,
          "%d nodes, %d sources, %d messages", n.sizes.nodes, n.sizes.sources, n.sizes.most);
    ep_nodes_free(&n);
}

/* Number the nodes by their lowest ranks, as groups do. */
static int number_nodes(int32_t *of, int size) {
    int32_t drawn[MOST], nodes = 0;
    memcpy(drawn, of, (size_t)size * sizeof(*of));
    for (int r = 0; r < size; r++) {
        int first = 0;
        while (drawn[first] != drawn[r])
            first++;
        of[r] = first < r ? of[first] : nodes++;
    }
    return nodes;
}

SoloTest(runtime_nodes, relays_and_sources) {
    for (uint64_t seed = 1; seed <= 200; seed++) {
        Random random = random_stream(seed, 0, 0);
        int size = 1 + (int)random_below(&random, MOST);
        int nodes = 1 + (int)random_below(&random, 6);
        int32_t of[MOST];
        check_note("seed %llu", (unsigned long long)seed);
        for (int r = 0; r < size; r++)
            of[r] = (int32_t)random_below(&random, nodes);
        nodes = number_nodes(of, size);
        check_nodes(of, size, nodes);
    }
}

SoloTest(runtime_nodes, even_sizes) {
    EpNodeSizes sizes = ep_node_sizes_even(16, 2);
    CHECK(sizes.nodes == 2 && sizes.ranks == 8 && sizes.sources == 1 && sizes.most == 1, "2 of 8");
    sizes = ep_node_sizes_even(3, 2);
    CHECK(sizes.nodes == 2 && sizes.ranks == 2 && sizes.sources == 1 && sizes.most == 2, "2 and 1");
    sizes = ep_node_sizes_even(4, 9);
    CHECK(sizes.nodes == 4 && sizes.ranks == 1 && sizes.sources == 3 && sizes.most == 3, "4 of 1");
    sizes = ep_node_sizes_even(5, 1);
    CHECK(sizes.nodes == 1 && sizes.ranks == 5 && sizes.sources == 0, "one");
}
