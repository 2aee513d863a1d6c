/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the oracle and the harness: a check that never fails would hide everything. */
#include <math.h>

#include "tests/harness/image.h"
#include "tests/oracle/number.h"
#include "tests/oracle/world.h"

SoloTest(harness_check, first_failure_is_kept) {
    CHECK(1 == 2, "one %d", 1);
    CHECK(1 == 3, "two");
    bool kept = strstr(check_failure(), "1 == 2: one 1") != NULL;
    check_clear();
    CHECK(kept, "the first failure was lost");
}

SoloTest(harness_image, images_show_every_byte) {
    Image a = image_new(100, 16), b = image_new(100, 16);
    bool equal = image_check_equal(&a, &b, 10, "a"), untouched = image_check_untouched(&a, "a");
    int blind = 0;
    for (int i = -16; i < 116; i++) {
        a.data[i] ^= 1;
        blind += image_check_equal(&a, &b, 10, "a") || image_check_untouched(&a, "a");
        a.data[i] ^= 1;
    }
    check_clear();
    CHECK(equal && untouched && blind == 0, "%d changes were not seen", blind);
    image_free(&a);
    image_free(&b);
}

SoloTest(harness_number, known_values) {
    uint16_t bits[] = {0x3f80, 0x4049, 0x0001, 0x7f7f, 0xff80, 0x8000};
    static const float bf16[] = {1.0f, 3.140625f, 0x1p-133f, 0x1.fep127f, -INFINITY, -0.0f};
    for (int i = 0; i < 6; i++)
        CHECK(number_get(bits, EP_TYPE_BF16, i) == bf16[i], "%04x", bits[i]);
    uint16_t fp16_bits[] = {0x3c00, 0x4248, 0x0001, 0x7bff, 0xfc00, 0x8400};
    static const float fp16[] = {1.0f, 3.140625f, 0x1p-24f, 65504.0f, -INFINITY, -0x1p-14f};
    for (int i = 0; i < 6; i++)
        CHECK(number_get(fp16_bits, EP_TYPE_FP16, i) == fp16[i], "%04x", fp16_bits[i]);
}

SoloTest(harness_number, ties_go_to_even) {
    static const float values[] = {1.00390625f, 1.01171875f, 0x1.fffp127f, 0x1p-134f, 0x1.8p-133f};
    static const uint16_t expected[] = {0x3f80, 0x3f82, 0x7f80, 0x0000, 0x0002};
    for (int i = 0; i < 5; i++) {
        uint16_t bits;
        number_set(&bits, EP_TYPE_BF16, 0, values[i]);
        CHECK(bits == expected[i], "%a gives %04x", (double)values[i], bits);
    }
}

SoloTest(harness_number, every_pattern_survives) {
    static const EpType types[] = {EP_TYPE_BF16, EP_TYPE_FP16};
    for (int i = 0; i < 65536 * 2; i++) {
        uint16_t bits = (uint16_t)i, back;
        float value = number_get(&bits, types[i >> 16], 0);
        number_set(&back, types[i >> 16], 0, value);
        CHECK(back == bits || isnan(value), "%04x became %04x", bits, back);
    }
}

/* Slots of a small step: two ranks, three experts (0 and 1 on rank 0), alignment 2. */
SoloTest(harness_world, slots_by_hand) {
    World *world = world_new(&(Case){.ranks = 2,
                                     .experts = 3,
                                     .top_k = 2,
                                     .max_tokens = 2,
                                     .alignment = 2,
                                     .spread = SPREAD_FULL,
                                     .seed = 3});
    const RankWorld *first = &world->rank[0], *second = &world->rank[1];
    CHECK(first->num_experts == 2 && second->num_experts == 1 && second->first_expert == 2,
          "placement");
    int64_t filled = 0;
    for (int r = 0; r < 2; r++)
        for (int64_t row = 0; row < world->rank[r].buffer_rows; row++) {
            const Row *what = &world->rank[r].row[row];
            if (what->kind != ROW_FILLED) continue;
            int64_t entry = what->token * 2 + what->k;
            Position position = world->rank[what->source].position[entry];
            CHECK(position.rank == r && position.row == row, "row %lld of rank %d", (long long)row,
                  r);
            filled++;
        }
    CHECK(filled == 8, "%lld slots for 8 entries", (long long)filled);
    CHECK(first->recv_rows % 2 == 0 && second->recv_rows % 2 == 0, "padding");
    world_free(world);
}
