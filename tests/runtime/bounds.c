/* SPDX-License-Identifier: Apache-2.0 */
/* Placement of experts, and the bound of received rows. */
#include "tests/cases/run.h"
#include "tests/harness/random.h"

/* ---- ep_expert_range ---- */

static void check_placement(int experts, int ranks) {
    int next = 0, smallest = experts, largest = 0;
    for (int r = 0; r < ranks; r++) {
        int32_t first = -1, count = -1;
        CHECK_OK(ep_expert_range(experts, ranks, r, &first, &count));
        CHECK(first == next, "E %d, R %d, rank %d begins at %d, not %d", experts, ranks, r, first,
              next);
        CHECK(r == 0 || count <= smallest, "E %d, R %d: rank %d has more than one before it",
              experts, ranks, r);
        smallest = count < smallest ? count : smallest;
        largest = count > largest ? count : largest;
        next = first + count;
    }
    CHECK(next == experts, "E %d, R %d: %d experts are placed", experts, ranks, next);
    CHECK(largest - smallest <= 1, "E %d, R %d: %d and %d", experts, ranks, smallest, largest);
}

SoloTest(runtime_bounds, placement_covers_all_experts_in_order) {
    for (int experts = 1; experts < 40; experts++)
        for (int ranks = 1; ranks < 20; ranks++)
            check_placement(experts, ranks);
    check_placement(100003, 1024);
}

SoloTest(runtime_bounds, placement_of_a_huge_number_of_experts) {
    int32_t first, count;
    CHECK_OK(ep_expert_range(INT32_MAX, 1024, 1023, &first, &count));
    CHECK((int64_t)first + count == INT32_MAX, "%d + %d", first, count);
}

SoloTest(runtime_bounds, placement_refuses) {
    int32_t first = -7, count = -7;
    CHECK_REFUSED(ep_expert_range(0, 1, 0, &first, &count), EP_ERR_RANGE, "num_experts", "0");
    CHECK_REFUSED(ep_expert_range(4, 0, 0, &first, &count), EP_ERR_RANGE, "num_ranks", "0");
    CHECK_REFUSED(ep_expert_range(4, 2, 2, &first, &count), EP_ERR_RANGE, "rank", "2");
    CHECK_REFUSED(ep_expert_range(4, 2, -1, &first, &count), EP_ERR_RANGE, "rank", "-1");
    CHECK(first == -7 && count == -7, "outputs were written");
    CHECK_REFUSED(ep_expert_range(4, 2, 0, NULL, &count), EP_ERR_NULL, "first");
    CHECK_REFUSED(ep_expert_range(4, 2, 0, &first, NULL), EP_ERR_NULL, "count");
}

/* ---- ep_max_recv_rows ---- */

static int64_t rows_bound(const Case *c, int rank) {
    EpGroupConfig config = case_group_config(c);
    int64_t rows = -1;
    unsigned flags = c->duplicates ? EP_ROWS_DUPLICATES : 0;
    CHECK_OK(ep_max_recv_rows(&config, c->ranks, rank, c->layout, flags, &rows));
    return rows;
}

/* The formula of ep_max_recv_rows in the header, for a rank of L experts. */
static int64_t formula(const Case *c, int64_t local) {
    int64_t g = (int64_t)c->ranks * c->max_tokens, a = c->alignment, k = c->top_k;
    int64_t per_expert = c->duplicates ? g * k : g;
    int64_t slots = g * (c->duplicates || k < local ? k : local);
    if (c->layout == EP_LAYOUT_RANK_MAJOR) return g;
    if (local == 0) return 0;
    if (c->layout == EP_LAYOUT_FLAT) return g;
    if (c->layout == EP_LAYOUT_BATCHED) return (per_expert + a - 1) / a * a;
    int64_t used = local < slots ? local : slots;
    int64_t by_expert = local * ((per_expert + a - 1) / a) * a;
    int64_t by_slots = (slots + (a - 1) * used + a - 1) / a * a;
    return by_expert < by_slots ? by_expert : by_slots;
}

static Case random_shape(Random *random) {
    Case c = {.ranks = 1 + (int)random_below(random, 4),
              .experts = 1 + (int)random_below(random, 9),
              .top_k = 1 + (int)random_below(random, 5),
              .max_tokens = 1 + (int)random_below(random, 6),
              .alignment = 1 << random_below(random, 5),
              .layout = (EpLayout)(1 + random_below(random, 4)),
              .duplicates = (int)random_below(random, 2),
              .spread = (Spread)random_below(random, 2),
              .routing = (Routing)random_below(random, 4)};
    c.target = c.routing == ROUTING_ONE_EXPERT ? (int)random_below(random, c.experts) : 0;
    c.rows_per_expert = 256;
    c.seed = random_next(random);
    return case_complete(c);
}

SoloTest(runtime_bounds, no_routing_exceeds_the_bound) {
    Random random = {1};
    for (int i = 0; i < 2000; i++) {
        Case c = random_shape(&random);
        World *world = world_new(&c);
        for (int r = 0; r < c.ranks; r++) {
            const RankWorld *rank = &world->rank[r];
            int64_t bound = rows_bound(&c, r), expected = formula(&c, rank->num_experts);
            check_note("%s", case_describe(&c));
            CHECK(bound == expected, "rank %d: %lld is not the formula's %lld", r, (long long)bound,
                  (long long)expected);
            CHECK(rank->needed_rows <= bound, "rank %d: %lld rows, bound %lld", r,
                  (long long)rank->needed_rows, (long long)bound);
        }
        world_free(world);
    }
}

static void check_attained(Case c) {
    c = case_complete(c);
    World *world = world_new(&c);
    int64_t rows = world->rank[c.target].needed_rows, bound = rows_bound(&c, c.target);
    CHECK(rows == bound, "%lld rows, bound %lld: %s", (long long)rows, (long long)bound,
          case_describe(&c));
    world_free(world);
}

SoloTest(runtime_bounds, attained) {
    /* Every token goes to all experts of one rank: L * ceil(G / A) * A rows. */
    for (int alignment = 1; alignment <= 64; alignment *= 2)
        check_attained(case_of("ranks=3 experts=6 max_tokens=7 alignment=%d spread=full "
                               "routing=one-rank target=1",
                               alignment));
    /* Every token names the same expert K times. */
    check_attained(case_of("ranks=2 experts=2 top_k=4 max_tokens=5 alignment=8 spread=full "
                           "routing=one-expert target=1 duplicates=1"));
    for (int layout = EP_LAYOUT_FLAT; layout <= EP_LAYOUT_BATCHED; layout++)
        check_attained(case_of("ranks=3 experts=3 top_k=1 max_tokens=7 alignment=4 layout=%d "
                               "spread=full routing=one-expert target=2 rows_per_expert=64",
                               layout));
}

/* Each slab holds one slot more than a multiple of A: ceil((M + (A - 1) * n) / A) * A rows. Eight
 * tokens go to four experts as 5 + 1 + 1 + 1, with alignment 4. */
ThreadTest(runtime_bounds, attained_by_padding, 1) {
    Case c = case_complete(case_of("experts=4 top_k=1 max_tokens=8 alignment=4"));
    Step step = open_step(bootstrap, &c);
    EpHandle *handle = step.handle;
    int32_t index[8] = {0, 0, 0, 0, 0, 1, 2, 3};
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, 8, 1);
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    EpHandleInfo info = handle_info(handle);
    int64_t bound = rows_bound(&c, 0);
    CHECK(info.needed_rows == bound && bound == 20, "%lld rows, bound %lld",
          (long long)info.needed_rows, (long long)bound);
    close_step(&step);
}

/* The largest allowed numbers do not overflow, and are refused where they do not fit 31 bits. */
SoloTest(runtime_bounds, huge_configurations) {
    Case c = case_complete(case_of("ranks=1024 experts=%d top_k=32 max_tokens=%d alignment=%d",
                                   EP_MAX_EXPERTS, INT32_MAX, 1 << 20));
    __int128 g = (__int128)c.ranks * c.max_tokens, m = g * 32, local = EP_MAX_EXPERTS / 1024,
             a = c.alignment;
    __int128 by_expert = local * ((g + a - 1) / a) * a;
    __int128 by_slots = (m + (a - 1) * local + a - 1) / a * a;
    long long expected = (long long)(by_expert < by_slots ? by_expert : by_slots);
    char got[64];
    int64_t rows = -7;
    EpGroupConfig config = case_group_config(&c);
    snprintf(got, sizeof(got), "got up to %lld", expected);
    for (unsigned flags = 0; flags <= EP_ROWS_DUPLICATES; flags++)
        CHECK_REFUSED(ep_max_recv_rows(&config, 1024, 0, EP_LAYOUT_EXPERT_MAJOR, flags, &rows),
                      EP_ERR_RANGE, "config", "at most 2147483647 rows", got);
    for (int layout = EP_LAYOUT_FLAT; layout <= EP_LAYOUT_RANK_MAJOR; layout++)
        CHECK_REFUSED(ep_max_recv_rows(&config, 1024, 0, (EpLayout)layout, 0, &rows), EP_ERR_RANGE,
                      "config", "at most 2147483647 rows");
    CHECK(rows == -7, "the output was written");
    config.max_row_bytes = config.max_scale_bytes = 65536, config.alignment = 1 << 30;
    config.latency_sets = EP_MAX_LATENCY_SETS;
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    CHECK_OK(ep_group_memory(&config, 1024, &memory));
    CHECK(!memory.feasible && strstr(memory.reason, "at most 2147483647 slots"), "%s",
          memory.reason);
    CHECK(memory.shared_bytes > 0 && memory.private_bytes > 0, "negative sizes");
    config.alignment = 1, config.max_tokens = INT32_MAX, config.max_top_k = 1;
    CHECK_OK(ep_max_recv_rows(&config, 1, 0, EP_LAYOUT_FLAT, 0, &rows));
    CHECK(rows == INT32_MAX, "%lld", (long long)rows);
}

SoloTest(runtime_bounds, bound_refuses) {
    Case c = case_complete((Case){.ranks = 2});
    EpGroupConfig config = case_group_config(&c);
    int64_t rows = -7;
    CHECK_REFUSED(ep_max_recv_rows(NULL, 2, 0, EP_LAYOUT_FLAT, 0, &rows), EP_ERR_NULL, "config");
    CHECK_REFUSED(ep_max_recv_rows(&config, 2, 0, EP_LAYOUT_FLAT, 0, NULL), EP_ERR_NULL, "rows");
    CHECK_REFUSED(ep_max_recv_rows(&config, 0, 0, EP_LAYOUT_FLAT, 0, &rows), EP_ERR_RANGE,
                  "num_ranks", "0");
    CHECK_REFUSED(ep_max_recv_rows(&config, 2, 2, EP_LAYOUT_FLAT, 0, &rows), EP_ERR_RANGE, "rank",
                  "2");
    CHECK_REFUSED(ep_max_recv_rows(&config, 2, 0, (EpLayout)9, 0, &rows), EP_ERR_RANGE, "layout",
                  "9");
    CHECK_REFUSED(ep_max_recv_rows(&config, 2, 0, EP_LAYOUT_FLAT, 6, &rows), EP_ERR_RANGE, "flags",
                  "6");
    config.num_experts = INT32_MAX - 1;
    CHECK_REFUSED(ep_max_recv_rows(&config, 2, 0, EP_LAYOUT_FLAT, 0, &rows), EP_ERR_RANGE,
                  "num_experts", "16777216", "got 2147483646");
    config = case_group_config(&c);
    config.alignment = 24;
    CHECK_REFUSED(ep_max_recv_rows(&config, 2, 0, EP_LAYOUT_FLAT, 0, &rows), EP_ERR_ALIGNMENT,
                  "alignment", "24");
    CHECK(rows == -7, "the output was written");
}
