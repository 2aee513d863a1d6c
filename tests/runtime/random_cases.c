/* SPDX-License-Identifier: Apache-2.0 */
/* Random small cases. A failure prints its case, seed included. LIBEP_TEST_SEED=N begins with case
 * N; LIBEP_TEST_CASES=M runs M cases; LIBEP_TEST_CASE runs one that was printed. */
#include "tests/cases/run.h"
#include "tests/harness/random.h"

static int pick(Random *random, const int *values, int n) {
    return values[random_below(random, n)];
}

#define PICK(random, ...) \
    pick(random, (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))

static void draw_routing(Case *c, Random *random) {
    c->spread = (Spread)PICK(random, SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_FULL,
                             SPREAD_HOLE, SPREAD_ALONE, SPREAD_NONE);
    c->routing = (Routing)PICK(random, ROUTING_UNIFORM, ROUTING_UNIFORM, ROUTING_SKEWED,
                               ROUTING_ONE_EXPERT, ROUTING_ONE_RANK);
    c->masked_percent = PICK(random, 0, 0, 10, 60);
    c->invalid_percent = PICK(random, 0, 0, 0, 5);
    c->duplicates = PICK(random, 0, 0, 1);
    c->merged = PICK(random, 0, 1);
    c->target = c->routing == ROUTING_ONE_EXPERT ? (int)random_below(random, c->experts) : 0;
    c->counted = PICK(random, 0, 0, 1);
}

static void draw_rows(Case *c, Random *random) {
    c->hidden = PICK(random, 16, 32, 48, 112, 256);
    c->row_type = (EpType)PICK(random, EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32, EP_TYPE_UINT8);
    c->sum_type = (EpType)PICK(random, EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32);
    c->weighted = PICK(random, 0, 1);
    c->scale_bytes = PICK(random, 0, 4, 20);
    c->quant = (EpQuant)PICK(random, 1, 1, 2, 3, 4, 5, 6);
    c->scale_order =
        (EpScaleOrder)PICK(random, EP_SCALES_BY_ROW, EP_SCALES_BY_COLUMN, EP_SCALES_SWIZZLED);
    if (c->scale_order == EP_SCALES_SWIZZLED) c->alignment = 128;
    if (c->quant == EP_QUANT_FP8 || c->quant == EP_QUANT_FP8_POW2)
        c->scale_order = EP_SCALES_BY_ROW + c->scale_order % 2;
}

static Case draw_case(uint64_t seed) {
    Random random = random_stream(seed, 1, 1);
    Case c = {.seed = seed};
    c.ranks = GPU_RANKS(PICK(&random, 1, 2, 2, 3, 4, 5, 8));
    c.experts = 1 + (int)random_below(&random, 20);
    c.top_k = PICK(&random, 1, 2, 3, 6, 9);
    c.max_tokens = 1 + (int)random_below(&random, 40);
    c.index_type = (EpType)PICK(&random, EP_TYPE_INT32, EP_TYPE_INT64);
    c.layout = (EpLayout)PICK(&random, 1, 1, 2, 3);
    c.alignment = PICK(&random, 1, 2, 8, 32);
    c.capacity = PICK(&random, 0, 0, 20, 100, 400);
    c.rows_per_expert = PICK(&random, 0, 0, 5, 32);
    c.overflow = (EpOverflow)PICK(&random, EP_OVERFLOW_ERROR, EP_OVERFLOW_DROP);
    c.spare_rows = PICK(&random, 0, 1, 5);
    c.zero_tail = PICK(&random, 0, 1, 2);
    c.mode = (EpMode)PICK(&random, EP_MODE_THROUGHPUT, EP_MODE_LATENCY);
    if (!TESTS_HAVE_LATENCY) c.mode = EP_MODE_THROUGHPUT;
    c.phases = PICK(&random, 0, 1);
    c.num_sms = PICK(&random, 0, 0, 2, 5);
    c.named = PICK(&random, 0, 1);
    draw_routing(&c, &random);
    draw_rows(&c, &random);
    if (random_percent(&random, 25)) c.layout = EP_LAYOUT_RANK_MAJOR;
    c.global_ids = PICK(&random, 0, 1);
    c.all_weights = PICK(&random, 0, 1);
    c.weights_at_combine = PICK(&random, 0, 0, 1);
    c.sum_quant = (EpQuant)PICK(&random, EP_QUANT_NONE, EP_QUANT_NONE, EP_QUANT_FP8);
    c.grad_quant = (EpQuant)PICK(&random, 1, 1, 1, 2, 3, 4, 5);
    if (c.scale_order == EP_SCALES_SWIZZLED && c.grad_quant != EP_QUANT_NONE)
        c.grad_quant = EP_QUANT_MXFP8;
    c.padding = (EpPadding)PICK(&random, EP_PADDING_ZERO, EP_PADDING_KEEP);
    c.biases = PICK(&random, 0, 0, 1, 2);
    c.counters = PICK(&random, 0, 1, 2, 3);
    c.spare_tokens = PICK(&random, 0, 0, 1, 7);
    c.by_entry = PICK(&random, 0, 0, 1);
    c.block_rows = PICK(&random, 0, 1, 5, c.alignment);
    if (c.layout == EP_LAYOUT_EXPERT_MAJOR && c.block_rows == 5) c.block_rows = 0;
    c.physical = PICK(&random, 0, 0, 0, 1 + (int)random_below(&random, 2 * c.experts));
    c.choice = (EpCopyChoice)PICK(&random, EP_CHOICE_NEAR, EP_CHOICE_SPREAD);
    if (c.physical) c.map = (Map)PICK(&random, MAP_FIRST, MAP_RANDOM, MAP_RANDOM, MAP_EVERYWHERE);
    return c;
}

/* Put the ranks on 2 to 4 nodes, of unequal sizes, and not in order of rank. */
static void draw_nodes(Case *c) {
    Random random = random_stream(c->seed, 1, 2);
    int nodes = PICK(&random, 2, 3, 4);
    if (c->ranks < 3) c->ranks = 3 + (int)random_below(&random, 4);
    for (int r = 0; r < c->ranks; r++)
        c->nodes[r] = (char)('0' + random_below(&random, nodes));
    c->node_rows = PICK(&random, 0, 0, 1, 1 + c->max_tokens / 3);
}

/* Each case creates a group, and on GPUs a communicator, which is slow: hence few cases there. */
static void run_cases(uint64_t salt, int several_nodes) {
    uint64_t first = environment_number("LIBEP_TEST_SEED", salt);
    uint64_t count =
        environment_number("LIBEP_TEST_CASES", TESTS_SANITIZED || TESTS_ON_GPU ? 25 : 80);
    for (uint64_t seed = first; seed < first + count; seed++) {
        Case c = draw_case(seed);
        if (several_nodes) draw_nodes(&c);
        run_case_on_threads(&c);
    }
}

CasesTest(runtime_random, default_stage, run_cases(1, 0));

Test(runtime_random, tiny_stage, .timeout = 300) {
    HOST_ONLY("no LIBEP_STAGE_BYTES on GPUs");
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    run_cases(1001, 0);
}

CasesTest(runtime_random, several_nodes, run_cases(2001, 1));

Test(runtime_random, several_nodes_and_a_tiny_stage, .timeout = 300) {
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    setenv("LIBEP_NODE_CHUNK", "3000", 1);
    run_cases(3001, 1);
}

Test(runtime_random, one_that_was_printed, .timeout = 300) {
    const char *text = getenv("LIBEP_TEST_CASE");
    Case c = case_of("%s", text ? text : "ranks=2 layout=flat");
    run_case_on_threads(&c);
}
