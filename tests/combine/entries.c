/* SPDX-License-Identifier: Apache-2.0 */
/* Sums by entry: all of a token's rows are added on its own rank, in ascending k. */
#include <math.h>

#include "tests/cases/fixture.h"
#include "tests/harness/random.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/expect.h"
#include "tests/oracle/number.h"

/* Both layouts, in all modes: weighted by slot_weights, by topk_weights and not at all, in each
 * type, with 0, 1 and 2 biases. */
#define ENTRIES                                                       \
    "by_entry=1 layout=expert-major|batched row_type=bf16|fp16|fp32 " \
    "sum_type=bf16|fp16|fp32 weighted=1|1|0|0|0|0 weights_at_combine=0|0|1|1|0|0 biases=0|1|2|1 "
#define EntriesTest(name, ...) GridTest(combine_entries, name, ENTRIES, __VA_ARGS__)

EntriesTest(few_terms, "masked_percent=30", "ranks=2 hidden=104 max_tokens=37");
EntriesTest(many_ranks, "ranks=3 experts=23 top_k=9 max_tokens=40 hidden=312 spread=full",
            "ranks=4 experts=12 top_k=5 max_tokens=33 hidden=1032 masked_percent=20");

/* K around the units of a step in latency mode, up to EP_MAX_TOP_K. */
#define MANY "ranks=3 experts=64 max_tokens=19 masked_percent=5 "
EntriesTest(many_terms, MANY "top_k=1 hidden=232", MANY "top_k=28 hidden=240",
            MANY "top_k=32 hidden=16");

/* Masked, invalid, repeated and lost entries, tokens beyond num_tokens. */
#define DEAD                                                                                 \
    "ranks=3 experts=7 top_k=5 hidden=32 max_tokens=21 masked_percent=20 invalid_percent=5 " \
    "duplicates=1 alignment=4 capacity=70 rows_per_expert=24 overflow=drop counted=1 "       \
    "spare_rows=3 "
EntriesTest(dead_entries, DEAD, DEAD "merged=1", DEAD "capacity=9 rows_per_expert=2");

/* Ranks without tokens, without experts, and alone. */
EntriesTest(idle_ranks, "ranks=3 experts=2 spread=hole max_tokens=35",
            "ranks=3 experts=6 spread=alone max_tokens=35", "ranks=3 experts=2 spread=none",
            "ranks=3 experts=6 spread=full max_tokens=35 routing=one-rank",
            "ranks=2 routing=nobody");

EntriesTest(nodes, "ranks=4 nodes=0110 experts=12 top_k=5 max_tokens=25",
            "ranks=6 nodes=120210 experts=23 top_k=9 max_tokens=25 masked_percent=20 hidden=312",
            "ranks=4 nodes=0011 " DEAD, "nodes=012 " DEAD);

/* Stages so small that tokens travel in many rounds, or chunks. */
Test(combine_entries, many_rounds, .timeout = 240) {
    setenv(TESTS_ON_GPU ? "LIBEP_NODE_CHUNK" : "LIBEP_STAGE_BYTES", "3000", 1);
    run_grid(ENTRIES "ranks=3 experts=64 top_k=32 hidden=16 max_tokens=50");
    run_grid(ENTRIES "ranks=4 nodes=0110 experts=9 top_k=3 hidden=200 max_tokens=50");
}

/* ---- the same bits everywhere --------------------------------------------------------------- */

enum { EXPERTS = 32, TOP_K = 6, HIDDEN = 136, TOKENS = 48, ROWS = TOKENS * TOP_K };

/* A step of TOKENS tokens, how it is divided, and what comes of it. */
typedef struct Whole {
    EpSums sums;
    int ranks, every; /* the tokens that take part: each `every`-th */
    const char *nodes;
    EpMode mode;
    EpLayout layout;
    int32_t index[TOKENS][TOP_K];
    float weight[TOKENS][TOP_K];
    _Alignas(16) uint16_t out[TOKENS][HIDDEN];
} Whole;

/* What expert `e` makes of token `t`; where rows have one slot, what rank `e` does. */
static float made_of(int t, int e, int h) {
    Random random = random_stream((uint64_t)t, (uint64_t)e, (uint64_t)h);
    return number_round(EP_TYPE_BF16, (float)((int)random_below(&random, 2048) - 1024) / 37);
}

static void make_row(int t, int e, uint16_t *row) {
    for (int h = 0; h < HIDDEN; h++)
        number_set(row, EP_TYPE_BF16, h, made_of(t, e, h));
}

static void make_whole(Whole *w) {
    Random random = random_stream(11, 0, 0);
    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < TOP_K; k++) {
            w->index[t][k] = (int)random_below(&random, EXPERTS + 4) - 4;
            w->weight[t][k] = (float)random_below(&random, 1000) / 999;
        }
}

/* Returns a rank's first token. Later ranks have more, so every division cuts elsewhere. */
static int first_token(int rank, int ranks) {
    return TOKENS * rank * (rank + 1) / (ranks * (ranks + 1));
}

static int has_rows(const Whole *w) {
    return w->layout == EP_LAYOUT_FLAT || w->layout == EP_LAYOUT_RANK_MAJOR;
}

/* Blocks of the receive tensors, and the rows of each; 0: no blocks. */
static int blocks_of(const Whole *w) {
    int blocks[] = {0, 0, 0, EXPERTS / w->ranks, w->ranks};
    return blocks[w->layout];
}

static int rows_of(const Whole *w) {
    return blocks_of(w) ? TOKENS : ROWS;
}

static EpHandle *open_layer(const EpBootstrap *bootstrap, const Whole *w, EpGroup **group) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpHandleConfig layer = EP_HANDLE_CONFIG_INIT;
    config.num_experts = EXPERTS, config.max_tokens = TOKENS, config.max_top_k = TOP_K;
    config.max_row_bytes = HIDDEN * 2, config.backend = TEST_BACKEND, config.max_recv_rows = ROWS;
    config.sums = w->sums, config.latency_sets = w->mode == EP_MODE_LATENCY;
    layer.layout = w->layout, layer.mode = (int32_t)w->mode;
    if (w->layout == EP_LAYOUT_BATCHED) layer.rows_per_expert = rows_of(w);
    *group = open_group_with(bootstrap, &config);
    return open_handle_with(*group, &layer);
}

/* Let the experts of a rank work on rows that say their token's number, from 1. */
static void run_experts(const Whole *w, int rank, const int32_t *offset, const int32_t *count,
                        uint16_t (*rows)[HIDDEN]) {
    int local = EXPERTS / w->ranks, all = rows_of(w) * (blocks_of(w) ? blocks_of(w) : 1);
    for (int i = 0; i < all && has_rows(w); i++)
        if (rows[i][0]) make_row(rows[i][0] - 1, rank, rows[i]);
    for (int e = 0; e < local && !has_rows(w); e++)
        for (int i = offset[e]; i < offset[e] + count[e]; i++)
            make_row(rows[i][0] - 1, rank * local + e, rows[i]);
}

static EpTensor slots_of(const Whole *w, const void *rows) {
    int blocks = blocks_of(w);
    return blocks ? ep_tensor_3d(rows, EP_TYPE_BF16, blocks, rows_of(w), HIDDEN)
                  : ep_tensor_2d(rows, EP_TYPE_BF16, ROWS, HIDDEN);
}

/* What a rank brings and gets. */
typedef struct Share {
    int32_t index[TOKENS][TOP_K], count[EXPERTS], offset[EXPERTS + 1];
    float weight[TOKENS][TOP_K], slot_weight[EXPERTS * TOKENS];
    _Alignas(16) uint16_t sent[TOKENS][HIDDEN], out[TOKENS][HIDDEN], rows[EXPERTS * TOKENS][HIDDEN];
} Share;

static void combine_part(const EpBootstrap *bootstrap, void *arg) {
    Whole *w = arg;
    EpGroup *group;
    EpHandle *handle = open_layer(bootstrap, w, &group);
    Share *part = calloc(1, sizeof(*part));
    int rank = bootstrap->rank, end = first_token(rank + 1, w->ranks), tokens = 0;
    int local = EXPERTS / w->ranks, blocks = blocks_of(w), slabs = !has_rows(w);
    REQUIRE(part, "no memory");
    for (int t = first_token(rank, w->ranks); t < end; t++) {
        if (t % w->every) continue;
        memcpy(part->index[tokens], w->index[t], sizeof(w->index[t]));
        memcpy(part->weight[tokens], w->weight[t], sizeof(w->weight[t]));
        part->sent[tokens++][0] = (uint16_t)(1 + t);
    }
    EpTensor topk_idx = ep_tensor_2d(part->index, EP_TYPE_INT32, tokens, TOP_K);
    EpTensor topk_weights = ep_tensor_2d(part->weight, EP_TYPE_FP32, tokens, TOP_K);
    EpTensor in = ep_tensor_2d(part->sent, EP_TYPE_BF16, tokens, HIDDEN);
    EpTensor out = ep_tensor_2d(part->out, EP_TYPE_BF16, tokens, HIDDEN);
    EpTensor slots = slots_of(w, part->rows);
    EpTensor slot_weights = blocks ? ep_tensor_2d(part->slot_weight, EP_TYPE_FP32, local, TOKENS)
                                   : ep_tensor_1d(part->slot_weight, EP_TYPE_FP32, ROWS);
    EpTensor counts = ep_tensor_1d(part->count, EP_TYPE_INT32, local);
    EpTensor offsets = ep_tensor_1d(part->offset, EP_TYPE_INT32, local + 1);
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    plan.expert_counts = &counts, plan.expert_offsets = &offsets;
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, &plan));
    CHECK_OK(ep_dispatch(handle, NULL, NULL, &in, slabs ? &topk_weights : NULL, NULL, NULL, &slots,
                         slabs ? &slot_weights : NULL, NULL, NULL));
    run_experts(w, rank, part->offset, part->count, part->rows);
    CHECK_OK(ep_combine(handle, NULL, &slots, slabs ? &slot_weights : NULL, NULL, NULL, &out));
    for (int i = 0; i < tokens; i++)
        memcpy(w->out[part->sent[i][0] - 1], part->out[i], sizeof(part->out[i]));
    ep_group_destroy(group);
    free(part);
}

/* Combine a step as it is divided. Returns 0 where there is no such division. */
static int combine_whole(Whole *w) {
    int is_late = w->mode == EP_MODE_LATENCY;
    if (GPU_RANKS(w->ranks) < w->ranks) return 0;
    if (is_late && !TESTS_HAVE_LATENCY) return 0;
    setenv("LIBEP_TOPOLOGY", w->nodes, 1);
    check_note("%d ranks on %s nodes, mode %d, layout %d, sums %d", w->ranks, w->nodes,
               (int)w->mode, (int)w->layout, (int)w->sums);
    memset(w->out, 0xee, sizeof(w->out));
    run_ranks(w->ranks, combine_part, w);
    return 1;
}

static void check_whole(const Whole *w) {
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++) {
            uint16_t expected;
            float sum = 0;
            for (int k = 0; k < TOP_K; k++)
                if (w->index[t][k] >= 0)
                    sum = fmaf(w->weight[t][k], made_of(t, w->index[t][k], h), sum);
            number_set(&expected, EP_TYPE_BF16, 0, sum);
            CHECK(w->out[t][h] == expected, "token %d, element %d: %04x, not %04x", t, h,
                  w->out[t][h], expected);
        }
}

/* The same tokens and experts on more and more ranks and nodes, in both modes and layouts: every
 * division gives the bits that one loop gives. */
Test(combine_entries, the_same_bits_everywhere, .timeout = 240) {
    static const struct {
        int ranks;
        const char *nodes;
    } divisions[] = {{1, "1"}, {2, "1"}, {2, "2"}, {4, "1"},  {4, "2"},  {4, "4"},
                     {8, "1"}, {8, "2"}, {8, "4"}, {16, "1"}, {16, "2"}, {16, "4"}};
    static Whole w = {.sums = EP_SUMS_BY_ENTRY, .every = 1};
    make_whole(&w);
    for (int i = 0; i < 4 * LENGTH(divisions); i++) {
        w.ranks = divisions[i / 4].ranks, w.nodes = divisions[i / 4].nodes;
        w.mode = i % 2 ? EP_MODE_LATENCY : EP_MODE_THROUGHPUT;
        w.layout = i / 2 % 2 ? EP_LAYOUT_BATCHED : EP_LAYOUT_EXPERT_MAJOR;
        if (combine_whole(&w)) check_whole(&w);
    }
}

/* A token's sum has the same bits with other tokens beside it, with fewer of them, and at another
 * place among them: with either kind of sums, in every layout and mode, on one node and on two. */
Test(combine_entries, the_same_bits_beside_others, .timeout = 240) {
    static Whole all, some;
    make_whole(&all);
    all.ranks = 4, all.every = 1;
    for (int i = 0; i < 32; i++) {
        all.sums = i % 2 ? EP_SUMS_BY_ENTRY : EP_SUMS_BY_RANK;
        all.mode = i / 2 % 2 ? EP_MODE_LATENCY : EP_MODE_THROUGHPUT;
        all.layout = (EpLayout)(1 + i / 4 % 4), all.nodes = i / 16 ? "2" : "1";
        if ((all.sums == EP_SUMS_BY_ENTRY && has_rows(&all)) || !combine_whole(&all)) continue;
        some = all, some.every = 3;
        combine_whole(&some);
        for (int t = 0; t < TOKENS; t += 3)
            CHECK(!memcmp(all.out[t], some.out[t], sizeof(all.out[t])), "token %d", t);
    }
}

/* ---- ranks that disagree -------------------------------------------------------------------- */

/* Rank 1 alone lets slot_weights travel. */
static void disagree(const EpBootstrap *bootstrap, EpMode mode) {
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", "/dev/null");
    Case c = case_of("ranks=2 hidden=64 mode=%d capacity=60 spread=full by_entry=1", mode);
    Step step = open_step(bootstrap, &c);
    step_prepare(&step);
    step_dispatch(&step);
    static _Thread_local _Alignas(16) uint16_t sums[9 * 64];
    static const float weights[60];
    EpTensor expert_out = step_expert_out(&step);
    EpTensor slot_weights = ep_tensor_1d(weights, EP_TYPE_FP32, expert_out.shape[0]);
    EpTensor out = ep_tensor_2d(sums, EP_TYPE_BF16, 9, 64);
    EpStatus status = ep_combine(step.handle, NULL, &expert_out,
                                 bootstrap->rank ? &slot_weights : NULL, NULL, NULL, &out);
    if (TESTS_ON_GPU && status == EP_OK) status = ep_group_status(step.group, NULL);
    CHECK_REFUSED(status, EP_ERR_ORDER, "combine", TESTS_ON_GPU ? "" : "number of slot values");
    close_step(&step);
}

RankTest(combine_entries, ranks_disagree, 2, disagree(bootstrap, EP_MODE_THROUGHPUT));

LatencyTest(combine_entries, ranks_disagree_in_latency_mode, 2,
            disagree(bootstrap, EP_MODE_LATENCY));
