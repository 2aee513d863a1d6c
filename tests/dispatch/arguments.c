/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_dispatch and ep_dispatch_backward are refused with a status and a specific
 * message, and outputs stay untouched. */
#include "tests/cases/fixture.h"

#include <stdio.h>
#include <string.h>

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

static void check_table(EpLayout layout, const Wrong *table, int n) {
    fixture_check_table(fixture_case(layout), table, n);
}

static const Wrong wrong_tensors[] = {
    {OP_DISPATCH, TOKENS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, TOKENS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, TOKENS, SPOIL_SIZE, 0, EP_ERR_STRUCT_SIZE, {"got 0"}},
    {OP_DISPATCH, TOKENS, SPOIL_SIZE, 4096, EP_ERR_STRUCT_SIZE, {"got 4096"}},
    {OP_DISPATCH, TOKENS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "got 1"}},
    {OP_DISPATCH, TOKENS, SPOIL_NDIM, 0, EP_ERR_NDIM, {"2", "got 0"}},
    {OP_DISPATCH, TOKENS, SPOIL_NDIM, 4, EP_ERR_NDIM, {"2", "got 4"}},
    {OP_DISPATCH, TOKENS, SPOIL_NDIM, -1, EP_ERR_NDIM, {"2", "got -1"}},
    {OP_DISPATCH, TOKENS, SPOIL_TYPE, 99, EP_ERR_TYPE, {"99"}},
    {OP_DISPATCH, TOKENS, SPOIL_TYPE, 0, EP_ERR_TYPE, {"0"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE0, -1, EP_ERR_RANGE, {"-1"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE1, -24, EP_ERR_RANGE, {"-24"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE0, 10, EP_ERR_SHAPE, {"9", "10"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE1, 20, EP_ERR_ROW_BYTES, {"16", "40"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE1, 0, EP_ERR_ROW_BYTES, {"0"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHAPE1, 32, EP_ERR_ROW_BYTES, {"48", "64"}},
    {OP_DISPATCH, TOKENS, SPOIL_SHIFT, 8, EP_ERR_ADDRESS, {"16"}},
    {OP_DISPATCH, TOPK_WEIGHTS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, TOPK_WEIGHTS, SPOIL_TYPE, EP_TYPE_BF16, EP_ERR_TYPE, {0}},
    {OP_DISPATCH, TOPK_WEIGHTS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "1"}},
    {OP_DISPATCH, TOPK_WEIGHTS, SPOIL_SHAPE0, 7, EP_ERR_SHAPE, {"9", "7"}},
    {OP_DISPATCH, TOPK_WEIGHTS, SPOIL_SHAPE1, 3, EP_ERR_SHAPE, {"2", "3"}},
    {OP_DISPATCH, TOPK_WEIGHTS, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"multiple of 4"}},
    {OP_DISPATCH, SCALES, SPOIL_TYPE, 77, EP_ERR_TYPE, {"77"}},
    {OP_DISPATCH, SCALES, SPOIL_SHAPE0, 7, EP_ERR_SHAPE, {"9", "7"}},
    {OP_DISPATCH, SCALES, SPOIL_SHAPE1, 6, EP_ERR_ROW_BYTES, {"4", "6"}},
    {OP_DISPATCH, SCALES, SPOIL_SHAPE1, 12, EP_ERR_ROW_BYTES, {"8", "12"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {0}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_NDIM, 3, EP_ERR_NDIM, {"2", "3"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE1, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHIFT, 4, EP_ERR_ADDRESS, {"16"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE0, 1, EP_ERR_BUFFER_SIZE, {"got 1"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_TYPE, EP_TYPE_INT32, EP_ERR_TYPE, {0}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_SHAPE0, 1, EP_ERR_BUFFER_SIZE, {"got 1"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {0}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE1, 4, EP_ERR_SHAPE, {"8", "4"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE0, 2, EP_ERR_BUFFER_SIZE, {"got 2"}},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_TOKENS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_TOKENS, SPOIL_TYPE, EP_TYPE_UINT8, EP_ERR_TYPE, {0}},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_TOKENS, SPOIL_SHAPE0, 1, EP_ERR_BUFFER_SIZE, {"got 1"}},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_TOKENS, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"16"}},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_WEIGHTS, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {0}},
    {OP_DISPATCH_BACKWARD, GRAD_TOKENS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH_BACKWARD, GRAD_TOKENS, SPOIL_TYPE, EP_TYPE_UINT8, EP_ERR_TYPE, {0}},
    {OP_DISPATCH_BACKWARD, GRAD_TOKENS, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_TOKENS, SPOIL_SHAPE1, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_DISPATCH_BACKWARD, GRAD_TOPK_WEIGHTS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH_BACKWARD, GRAD_TOPK_WEIGHTS, SPOIL_SHAPE1, 1, EP_ERR_SHAPE, {"2", "1"}},
};

SoloTest(dispatch_arguments, wrong_tensors) {
    check_table(EP_LAYOUT_EXPERT_MAJOR, wrong_tensors, LENGTH(wrong_tensors));
}

static const Wrong wrong_flat[] = {
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "1"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_SHAPE1, 3, EP_ERR_SHAPE, {"2", "3"}},
    {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {0}},
    {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_SHAPE1, 1, EP_ERR_SHAPE, {"2", "1"}},
    {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_SHAPE0, 1, EP_ERR_BUFFER_SIZE, {"9", "got 1"}},
};

SoloTest(dispatch_arguments, wrong_tensors_of_flat) {
    check_table(EP_LAYOUT_FLAT, wrong_flat, LENGTH(wrong_flat));
}

static const Wrong wrong_batched[] = {
    {OP_DISPATCH, RECV_TOKENS, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "2"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE0, 3, EP_ERR_SHAPE, {"4", "3"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE1, 8, EP_ERR_SHAPE, {"12", "8"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE2, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "1"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_SHAPE1, 3, EP_ERR_SHAPE, {"12", "3"}},
};

SoloTest(dispatch_arguments, wrong_tensors_of_batched) {
    check_table(EP_LAYOUT_BATCHED, wrong_batched, LENGTH(wrong_batched));
}

static const Wrong wrong_rank_major[] = {
    {OP_DISPATCH, RECV_TOKENS, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "2"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE0, 2, EP_ERR_SHAPE, {"ranks = 1", "got 2"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE1, 8, EP_ERR_SHAPE, {"max_tokens = 9", "got 8"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE1, 10, EP_ERR_SHAPE, {"max_tokens = 9", "got 10"}},
    {OP_DISPATCH, RECV_TOKENS, SPOIL_SHAPE2, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_ABSENT, 0, EP_ERR_NULL, {"topk_weights"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "2"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_SHAPE1, 3, EP_ERR_SHAPE, {"rows of a source = 9", "got 3"}},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS, SPOIL_SHAPE2, 3, EP_ERR_SHAPE, {"K = 2", "got 3"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "2"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE0, 3, EP_ERR_SHAPE, {"ranks = 1", "got 3"}},
    {OP_DISPATCH, RECV_SCALES, SPOIL_SHAPE2, 4, EP_ERR_SHAPE, {"S = 8", "got 4"}},
    {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {0}},
    {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "2"}},
    {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_SHAPE1, 1, EP_ERR_SHAPE, {"rows of a source = 9", "got 1"}},
    {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_SHAPE2, 1, EP_ERR_SHAPE, {"K = 2", "got 1"}},
    {OP_DISPATCH_WAIT, RECV_TOKENS, SPOIL_SHAPE1, 8, EP_ERR_SHAPE, {"max_tokens = 9", "got 8"}},
    {OP_DISPATCH_WAIT, RECV_TOPK_IDX, SPOIL_SHAPE0, 2, EP_ERR_SHAPE, {"ranks = 1", "got 2"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "2"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SHAPE1, 8, EP_ERR_SHAPE, {"max_tokens = 9", "got 8"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SHAPE2, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "1"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_SHAPE0, 2, EP_ERR_SHAPE, {"ranks = 1", "got 2"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_SHAPE1, 8, EP_ERR_SHAPE, {"rows of a source = 9", "got 8"}},
    {OP_COMBINE_SEND, EXPERT_OUT, SPOIL_SHAPE1, 8, EP_ERR_SHAPE, {"max_tokens = 9", "got 8"}},
};

SoloTest(dispatch_arguments, wrong_tensors_of_rank_major) {
    check_table(EP_LAYOUT_RANK_MAJOR, wrong_rank_major, LENGTH(wrong_rank_major));
}

/* recv_topk_idx exists in FLAT and RANK_MAJOR only. */
SoloTest(dispatch_arguments, expert_ids_in_another_layout) {
    static const Wrong wrong[] = {
        {OP_DISPATCH, RECV_TOPK_IDX, SPOIL_NDIM, 2, EP_ERR_UNSUPPORTED, {"flat", "rank-major"}},
    };
    check_table(EP_LAYOUT_EXPERT_MAJOR, wrong, LENGTH(wrong));
    check_table(EP_LAYOUT_BATCHED, wrong, LENGTH(wrong));
}

/* The message says how many rows are needed, and that many are enough. */
SoloTest(dispatch_arguments, size_needed_is_in_the_sentence) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    int64_t rows = fixture.world->rank->recv_rows;
    char needed[32];
    snprintf(needed, sizeof(needed), "%lld", (long long)rows);
    fixture.tensor[RECV_TOKENS].shape[0] = rows - 1;
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH), EP_ERR_BUFFER_SIZE, "recv_tokens", needed);
    fixture.tensor[RECV_TOKENS].shape[0] = rows;
    CHECK_OK(fixture_call(&fixture, OP_DISPATCH));
    fixture_close(&fixture);
}

/* With a static capacity the buffer must hold that many rows, even if fewer arrive. */
SoloTest(dispatch_arguments, buffer_below_the_capacity) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    c.capacity = 77;
    fixture_open(&fixture, &c);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    fixture.tensor[RECV_TOKENS].shape[0] = 76;
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH), EP_ERR_BUFFER_SIZE, "recv_tokens", "77",
                  "76");
    fixture.tensor[RECV_TOKENS].shape[0] = 77;
    CHECK_OK(fixture_call(&fixture, OP_DISPATCH));
    fixture_close(&fixture);
}

/* A refused call does not take part in the operation: the peers wait until the rank calls again. */
ThreadTest(dispatch_arguments, refused_call_is_repeated, 3) {
    Case c = {.ranks = 3, .top_k = 3, .weighted = 1, .seed = 4};
    World *world = world_new(&c);
    EpGroup *group = open_group(bootstrap, &world->c);
    EpHandle *handle = group ? open_handle(group, &world->c) : NULL;
    if (handle) {
        Step step = {group, handle, world, bootstrap->rank, NULL};
        EpTensor tokens = step_tokens(&step);
        tokens.ndim = 1;
        step_prepare(&step);
        for (int i = 0; bootstrap->rank == 1 && i < 3; i++)
            CHECK_REFUSED(ep_dispatch(handle, NULL, NULL, &tokens, NULL, NULL, NULL, &tokens, NULL,
                                      NULL, NULL),
                          EP_ERR_NDIM, "rank 1", "tokens");
        step_move(&step);
    }
    ep_group_destroy(group);
    world_free(world);
}

/* Rows of so many elements that their size in bytes overflows. */
SoloTest(dispatch_arguments, endless_rows) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open_prepared(&fixture, &c);
    fixture.tensor[TOKENS].type = fixture.tensor[RECV_TOKENS].type = EP_TYPE_FP32;
    fixture.tensor[TOKENS].shape[1] = fixture.tensor[RECV_TOKENS].shape[1] = ((int64_t)1 << 62) + 8;
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH), EP_ERR_RANGE, "tokens",
                  "expected fewer than 2^62 bytes");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}

/* Scales of any type need 4-byte alignment only. The call is refused for another argument. */
SoloTest(dispatch_arguments, scales_of_eight_bytes_on_four) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open_prepared(&fixture, &c);
    EpTensor *scales = &fixture.tensor[SCALES], *received = &fixture.tensor[RECV_SCALES];
    scales->type = received->type = EP_TYPE_INT64;
    scales->shape[1] = received->shape[1] = 1;
    received->data = (char *)received->data + (uintptr_t)received->data % 8 + 4;
    fixture.arg[RECV_TOPK_IDX] = &fixture.tensor[RECV_TOPK_IDX];
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH), EP_ERR_UNSUPPORTED, "recv_topk_idx", "flat");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}

/* Scales are refused in a group whose max_scale_bytes is 0. */
SoloTest(dispatch_arguments, scales_without_room) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    c.scale_bytes = 0;
    fixture_open_prepared(&fixture, &c);
    fixture.arg[SCALES] = fixture.arg[TOPK_WEIGHTS];
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH), EP_ERR_ROW_BYTES, "scales", "expected NULL",
                  "max_scale_bytes");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}

SoloTest(dispatch_arguments, tail_of_a_shorter_tensor) {
    fixture_check_shorter_tail(OP_DISPATCH, RECV_TOPK_WEIGHTS);
}
