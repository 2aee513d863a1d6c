/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that turn a routing into another table: ep_count_routing, against a count entry by entry;
 * ep_read_routing_map and ep_write_routing_map, place by place; and what they refuse. */
#include "tests/cases/refusals.h"
#include "tests/cases/run.h"
#include "tests/harness/random.h"
#include "tests/oracle/world.h"

enum { FILL = 0x5a, GUARD = 64, TENSORS = 4 };

/* The four tensors of a call, in memory whose bytes are FILL behind what is written. */
typedef struct Given {
    int backend;
    EpTensor t[TENSORS];
    const EpTensor *given[TENSORS];
    char *memory[TENSORS], *expected[TENSORS];
} Given;

static int64_t bytes_of(const EpTensor *t) {
    return (int64_t)ep_type_bytes(t->type) * t->shape[0] * (t->ndim > 1 ? t->shape[1] : 1);
}

/* Fill the tensors' memory and that of what is expected; from tensor `first` on 0 is expected. */
static void given_open(Given *g, const EpTensor t[TENSORS], int first) {
    g->backend = TEST_BACKEND;
    for (int i = 0; i < TENSORS; i++) {
        size_t bytes = (size_t)bytes_of(&t[i]);
        g->t[i] = t[i], g->given[i] = &g->t[i];
        g->t[i].data = g->memory[i] = memset(malloc(bytes + GUARD), FILL, bytes + GUARD);
        g->expected[i] = memset(malloc(bytes + GUARD), FILL, bytes + GUARD);
        if (i >= first) memset(g->expected[i], 0, bytes);
    }
}

static void check_given(const Given *g, int first) {
    for (int i = first; i < TENSORS; i++)
        CHECK(!memcmp(g->memory[i], g->expected[i], (size_t)bytes_of(&g->t[i]) + GUARD),
              "other bytes in tensor %d", i);
}

static void given_close(Given *g) {
    for (int i = 0; i < TENSORS; i++)
        free(g->memory[i]), free(g->expected[i]);
}

static EpStatus convert(void *context, const char *call) {
    const Given *g = context;
    const EpBackend backend = (EpBackend)g->backend;
    const EpTensor *const *t = g->given;
    if (!strcmp(call, "ep_count_routing"))
        return ep_count_routing(backend, t[0], NULL, t[1], t[2], t[3]);
    if (!strcmp(call, "ep_read_routing_map"))
        return ep_read_routing_map(backend, t[0], t[1], NULL, t[2], t[3]);
    return ep_write_routing_map(backend, t[2], t[3], NULL, t[0], t[1]);
}

/* ---- counts -------------------------------------------------------------------------------- */

/* One entry in eight is negative, one in eight too large, in 64 bits by more than 32 bits hold. */
static int64_t draw(Random *random, const Case *c) {
    int64_t expert = random_below(random, c->experts), kind = random_below(random, 8);
    int64_t far = c->index_type == EP_TYPE_INT64 ? INT64_C(1) << 32 : c->experts;
    return kind == 0 ? expert - far : kind == 1 ? expert + far : expert;
}

static void check_counts(Case c) {
    int64_t tokens = c.max_tokens, k = c.top_k, ranks = c.ranks;
    const EpTensor tensors[] = {ep_tensor_2d(NULL, c.index_type, tokens, k),
                                ep_tensor_1d(NULL, EP_TYPE_INT32, ranks),
                                ep_tensor_1d(NULL, EP_TYPE_INT32, c.experts),
                                ep_tensor_2d(NULL, EP_TYPE_UINT8, tokens, ranks)};
    Given g;
    given_open(&g, tensors, 1);
    Random random = random_stream(7, (uint64_t)tokens, (uint64_t)c.experts);
    for (int64_t i = 0; i < tokens * k; i++) {
        int64_t expert = draw(&random, &c);
        if (c.index_type == EP_TYPE_INT64)
            ((int64_t *)g.memory[0])[i] = expert;
        else
            ((int32_t *)g.memory[0])[i] = (int32_t)expert;
        if (expert < 0 || expert >= c.experts) continue;
        char *in_rank = &g.expected[3][i / k * ranks + world_owner(&c, expert)];
        ((int32_t *)g.expected[1])[world_owner(&c, expert)] += !*in_rank;
        ((int32_t *)g.expected[2])[expert]++, *in_rank = 1;
    }
    CHECK_OK(convert(&g, "ep_count_routing"));
    check_given(&g, 1);
    given_close(&g);
}

/* More tokens than a block has threads; experts and ranks that divide nothing. */
#define CASES(type)                                                  \
    "experts=13 ranks=4 top_k=3 max_tokens=1237 index_type=" type,   \
        "experts=8 ranks=2 top_k=8 max_tokens=512 index_type=" type, \
        "experts=3 ranks=5 top_k=1 max_tokens=1 index_type=" type,   \
        "experts=300 ranks=33 top_k=11 max_tokens=601 index_type=" type
TextsTest(handles_count_routing, as_counted_one_by_one, check_counts, CASES("int32"),
          CASES("int64"), "experts=5 ranks=2 top_k=2 index_type=int64" /* no tokens */);

/* ---- maps ---------------------------------------------------------------------------------- */

/* One token in five has one expert more than there is room for. */
static void draw_map(Given *g, int64_t t, int64_t k, int64_t e) {
    uint8_t *map = (uint8_t *)g->memory[0];
    float *probs = (float *)g->memory[1], *weights = (float *)g->expected[3];
    int32_t *ids = (int32_t *)g->expected[2];
    Random random = random_stream(11, (uint64_t)t, (uint64_t)e);
    memset(map, 0, (size_t)(t * e));
    for (int64_t i = 0; i < t; i++) {
        int64_t found = 0, count = i % 5 ? random_below(&random, k + 1) : k + 1;
        for (int64_t x = 0; x < count; x++)
            map[i * e + random_below(&random, e)] = (uint8_t)(1 + random_below(&random, 255));
        for (int64_t x = 0; x < e; x++) {
            probs[i * e + x] = (float)random_below(&random, 1000);
            if (!map[i * e + x]) continue;
            if (found == k)
                ids[i * k + k - 1] = (int32_t)e;
            else
                ids[i * k + found] = (int32_t)x, weights[i * k + found++] = probs[i * e + x];
        }
        for (; found < k; found++)
            ids[i * k + found] = -1, weights[i * k + found] = 0;
    }
}

static void check_map(Case c) {
    int64_t t = c.max_tokens, k = c.top_k, e = c.experts;
    const EpTensor tensors[] = {
        ep_tensor_2d(NULL, EP_TYPE_UINT8, t, e), ep_tensor_2d(NULL, EP_TYPE_FP32, t, e),
        ep_tensor_2d(NULL, EP_TYPE_INT32, t, k), ep_tensor_2d(NULL, EP_TYPE_FP32, t, k)};
    Given g;
    given_open(&g, tensors, TENSORS);
    draw_map(&g, t, k, e);
    CHECK_OK(convert(&g, "ep_read_routing_map"));
    check_given(&g, 2);
    /* Back again: what had no room is gone, and so is the expert whose place was taken. */
    for (int i = 0; i < 2; i++)
        memset(g.expected[i], 0, (size_t)bytes_of(&g.t[i]));
    const int32_t *ids = (const int32_t *)g.expected[2];
    for (int64_t i = 0; i < t * k; i++) {
        if (ids[i] < 0 || ids[i] >= e) continue;
        g.expected[0][i / k * e + ids[i]] = 1;
        ((float *)g.expected[1])[i / k * e + ids[i]] = ((const float *)g.expected[3])[i];
    }
    CHECK_OK(convert(&g, "ep_write_routing_map"));
    check_given(&g, 0);
    given_close(&g);
}

/* More tokens than a block has, more experts than a warp has lanes; neither divides the other. */
TextsTest(handles_routing_map, as_converted_one_by_one, check_map,
          "experts=13 top_k=3 max_tokens=1237", "experts=300 top_k=8 max_tokens=101",
          "experts=64 top_k=32 max_tokens=33", "experts=1 top_k=1 max_tokens=7");

/* ---- refusals ------------------------------------------------------------------------------ */

static void check_refused_tables(const char *group, const char *const names[TENSORS],
                                 const EpTensor tensors[TENSORS]) {
    static const TextField fields[] = {TEXT_FIELD(Given, backend, NULL)};
    Member members[1 + TENSORS] = {{"", fields, LENGTH(fields), 0, 0}};
    const Subject subject = {members, LENGTH(members), sizeof(Given), convert};
    Given g;
    given_open(&g, tensors, TENSORS);
    for (int i = 0; i < TENSORS; i++)
        members[1 + i] =
            (Member){names[i], NULL, 0, offsetof(Given, t[i]), offsetof(Given, given[i])};
    check_refusals(group, &subject, &g);
    check_given(&g, 0);
    given_close(&g);
}

SoloTest(handles_count_routing, refuses) {
    static const char *const names[] = {"topk_idx", "rank_tokens", "expert_tokens",
                                        "token_in_rank"};
    const EpTensor tensors[] = {
        ep_tensor_2d(NULL, EP_TYPE_INT64, 4, 2), ep_tensor_1d(NULL, EP_TYPE_INT32, 2),
        ep_tensor_1d(NULL, EP_TYPE_INT32, 8), ep_tensor_2d(NULL, EP_TYPE_UINT8, 4, 2)};
    check_refused_tables("count_routing", names, tensors);
}

SoloTest(handles_routing_map, refuses) {
    static const char *const names[] = {"map", "probs", "topk_idx", "topk_weights"};
    const EpTensor tensors[] = {
        ep_tensor_2d(NULL, EP_TYPE_UINT8, 4, 8), ep_tensor_2d(NULL, EP_TYPE_FP32, 4, 8),
        ep_tensor_2d(NULL, EP_TYPE_INT32, 4, 2), ep_tensor_2d(NULL, EP_TYPE_FP32, 4, 2)};
    check_refused_tables("routing_map", names, tensors);
}
