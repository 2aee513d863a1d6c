/* SPDX-License-Identifier: Apache-2.0 */
/* ep_read_routing_map and ep_write_routing_map, place by place, and what they refuse. */
#include "tests/cases/refusals.h"
#include "tests/cases/run.h"
#include "tests/harness/random.h"

enum { FILL = 0x5a, GUARD = 64 };

typedef struct Given {
    int backend;
    EpTensor map, probs, topk_idx, topk_weights;
} Given;

static char *filled(size_t bytes) {
    char *memory = malloc(bytes + GUARD);
    memset(memory, FILL, bytes + GUARD);
    return memory;
}

static EpStatus convert(void *context, const char *call) {
    const Given *g = context;
    const EpTensor *given[] = {&g->map, &g->probs, &g->topk_idx, &g->topk_weights};
    for (int i = 0; i < 4; i++)
        if (given[i]->ndim == 0) given[i] = NULL;
    if (!strcmp(call, "ep_read_routing_map"))
        return ep_read_routing_map((EpBackend)g->backend, given[0], given[1], NULL, given[2],
                                   given[3]);
    return ep_write_routing_map((EpBackend)g->backend, given[2], given[3], NULL, given[0],
                                given[1]);
}

/* One token in five has one expert more than there is room for. */
static void check_shape(Case c) {
    int64_t t = c.max_tokens, k = c.top_k, e = c.experts;
    size_t sizes[] = {(size_t)(t * e), (size_t)(t * e * 4), (size_t)(t * k * 4),
                      (size_t)(t * k * 4)};
    char *memory[4], *expected[4];
    for (int i = 0; i < 4; i++)
        memory[i] = filled(sizes[i]), expected[i] = filled(sizes[i]);
    uint8_t *map = (uint8_t *)memory[0];
    float *probs = (float *)memory[1], *weights = (float *)expected[3];
    int32_t *ids = (int32_t *)expected[2];
    memset(map, 0, sizes[0]);
    Random random = random_stream(11, (uint64_t)t, (uint64_t)e);
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
    Given g = {TEST_BACKEND, ep_tensor_2d(map, EP_TYPE_UINT8, t, e),
               ep_tensor_2d(probs, EP_TYPE_FP32, t, e),
               ep_tensor_2d(memory[2], EP_TYPE_INT32, t, k),
               ep_tensor_2d(memory[3], EP_TYPE_FP32, t, k)};
    CHECK_OK(convert(&g, "ep_read_routing_map"));
    for (int i = 2; i < 4; i++)
        CHECK(!memcmp(memory[i], expected[i], sizes[i] + GUARD), "other entries, output %d", i);

    /* Back again: what had no room is gone, and so is the expert whose place was taken. */
    memset(expected[0], 0, sizes[0]);
    memset(expected[1], 0, sizes[1]);
    for (int64_t i = 0; i < t * k; i++) {
        if (ids[i] < 0 || ids[i] >= e) continue;
        expected[0][i / k * e + ids[i]] = 1;
        ((float *)expected[1])[i / k * e + ids[i]] = weights[i];
    }
    CHECK_OK(convert(&g, "ep_write_routing_map"));
    for (int i = 0; i < 4; i++) {
        CHECK(!memcmp(memory[i], expected[i], sizes[i] + GUARD), "another map, tensor %d", i);
        free(memory[i]);
        free(expected[i]);
    }
}

/* More tokens than a block has, more experts than a warp has lanes; neither divides the other. */
TextsTest(handles_routing_map, as_converted_one_by_one, check_shape,
          "experts=13 top_k=3 max_tokens=1237", "experts=300 top_k=8 max_tokens=101",
          "experts=64 top_k=32 max_tokens=33", "experts=1 top_k=1 max_tokens=7");

static const TextField fields[] = {TEXT_FIELD(Given, backend, NULL)};

SoloTest(handles_routing_map, refuses) {
    static const Member members[] = {{"", fields, LENGTH(fields), 0, 0},
                                     {"map", NULL, 0, offsetof(Given, map), 0},
                                     {"probs", NULL, 0, offsetof(Given, probs), 0},
                                     {"topk_idx", NULL, 0, offsetof(Given, topk_idx), 0},
                                     {"topk_weights", NULL, 0, offsetof(Given, topk_weights), 0}};
    static const Subject subject = {members, LENGTH(members), sizeof(Given), convert};
    char *memory = filled(4096);
    Given g = {TEST_BACKEND, ep_tensor_2d(memory, EP_TYPE_UINT8, 4, 8),
               ep_tensor_2d(memory + 1024, EP_TYPE_FP32, 4, 8),
               ep_tensor_2d(memory + 2048, EP_TYPE_INT32, 4, 2),
               ep_tensor_2d(memory + 3072, EP_TYPE_FP32, 4, 2)};
    check_refusals("routing_map", &subject, &g);
    for (int i = 0; i < 4096; i++)
        CHECK(memory[i] == FILL, "a refused call has changed byte %d", i);
    free(memory);
}
