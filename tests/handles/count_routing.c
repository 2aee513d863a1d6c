/* SPDX-License-Identifier: Apache-2.0 */
/* ep_count_routing against a count entry by entry, and what it refuses. */
#include "tests/cases/refusals.h"
#include "tests/cases/run.h"
#include "tests/harness/random.h"
#include "tests/oracle/world.h"

/* The arguments, in memory whose bytes are FILL before and behind what is written. */
typedef struct Given {
    int backend;
    EpTensor topk_idx, rank_tokens, expert_tokens, token_in_rank;
} Given;

enum { FILL = 0x5a, GUARD = 64 };

static char *filled(int64_t bytes) {
    char *memory = malloc((size_t)(bytes + GUARD));
    memset(memory, FILL, (size_t)(bytes + GUARD));
    return memory;
}

static EpStatus count(void *context, const char *call) {
    const Given *g = context;
    (void)call;
    return ep_count_routing((EpBackend)g->backend, &g->topk_idx, NULL, &g->rank_tokens,
                            &g->expert_tokens, &g->token_in_rank);
}

/* One entry in eight is negative, one in eight too large, in 64 bits by more than 32 bits hold. */
static int64_t draw(Random *random, const Case *c) {
    int64_t expert = random_below(random, c->experts), kind = random_below(random, 8);
    int64_t far = c->index_type == EP_TYPE_INT64 ? INT64_C(1) << 32 : c->experts;
    return kind == 0 ? expert - far : kind == 1 ? expert + far : expert;
}

static void check_shape(Case c) {
    int64_t tokens = c.max_tokens, k = c.top_k, ranks = c.ranks;
    int64_t sizes[] = {8 * tokens * k, 4 * ranks, 4 * c.experts, tokens * ranks};
    char *memory[4], *expected[4];
    for (int i = 0; i < 4; i++) {
        memory[i] = filled(sizes[i]), expected[i] = filled(sizes[i]);
        if (i) memset(expected[i], 0, (size_t)sizes[i]);
    }
    Random random = random_stream(7, (uint64_t)tokens, (uint64_t)c.experts);
    for (int64_t i = 0; i < tokens * k; i++) {
        int64_t expert = draw(&random, &c);
        if (c.index_type == EP_TYPE_INT64)
            ((int64_t *)memory[0])[i] = expert;
        else
            ((int32_t *)memory[0])[i] = (int32_t)expert;
        if (expert < 0 || expert >= c.experts) continue;
        char *in_rank = &expected[3][i / k * ranks + world_owner(&c, expert)];
        ((int32_t *)expected[1])[world_owner(&c, expert)] += !*in_rank;
        ((int32_t *)expected[2])[expert]++, *in_rank = 1;
    }
    Given g = {TEST_BACKEND, ep_tensor_2d(memory[0], c.index_type, tokens, k),
               ep_tensor_1d(memory[1], EP_TYPE_INT32, ranks),
               ep_tensor_1d(memory[2], EP_TYPE_INT32, c.experts),
               ep_tensor_2d(memory[3], EP_TYPE_UINT8, tokens, ranks)};
    CHECK_OK(count(&g, NULL));
    for (int i = 0; i < 4; i++) {
        CHECK(i == 0 || !memcmp(memory[i], expected[i], (size_t)(sizes[i] + GUARD)),
              "other counts, output %d", i);
        free(memory[i]);
        free(expected[i]);
    }
}

/* More tokens than a block has threads; experts and ranks that divide nothing. */
#define CASES(type)                                                  \
    "experts=13 ranks=4 top_k=3 max_tokens=1237 index_type=" type,   \
        "experts=8 ranks=2 top_k=8 max_tokens=512 index_type=" type, \
        "experts=3 ranks=5 top_k=1 max_tokens=1 index_type=" type,   \
        "experts=300 ranks=33 top_k=11 max_tokens=601 index_type=" type
TextsTest(handles_count_routing, as_counted_one_by_one, check_shape, CASES("int32"),
          CASES("int64"));

SoloTest(handles_count_routing, no_tokens) {
    Case c = {.experts = 5, .ranks = 2, .top_k = 2, .index_type = EP_TYPE_INT64};
    check_shape(c);
}

static const TextField fields[] = {TEXT_FIELD(Given, backend, NULL)};

SoloTest(handles_count_routing, refuses) {
    static const Member members[] = {{"", fields, LENGTH(fields), 0, 0},
                                     {"topk_idx", NULL, 0, offsetof(Given, topk_idx), 0},
                                     {"rank_tokens", NULL, 0, offsetof(Given, rank_tokens), 0},
                                     {"expert_tokens", NULL, 0, offsetof(Given, expert_tokens), 0},
                                     {"token_in_rank", NULL, 0, offsetof(Given, token_in_rank), 0}};
    static const Subject subject = {members, LENGTH(members), sizeof(Given), count};
    char *memory = filled(4096);
    Given g = {TEST_BACKEND, ep_tensor_2d(memory, EP_TYPE_INT64, 4, 2),
               ep_tensor_1d(memory + 1024, EP_TYPE_INT32, 2),
               ep_tensor_1d(memory + 2048, EP_TYPE_INT32, 8),
               ep_tensor_2d(memory + 3072, EP_TYPE_UINT8, 4, 2)};
    check_refusals("count_routing", &subject, &g);
    for (int i = 0; i < 4096; i++)
        CHECK(memory[i] == FILL, "a refused call has changed byte %d", i);
    free(memory);
}
