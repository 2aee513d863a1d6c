/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_combine and ep_combine_backward. */
#include "tests/cases/fixture.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

static const Wrong wrong_tensors[] = {
    {OP_COMBINE, EXPERT_OUT, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SIZE, 8, EP_ERR_STRUCT_SIZE, {"got 8"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_NDIM, 3, EP_ERR_NDIM, {"2", "got 3"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_TYPE, EP_TYPE_FP8_E4M3, EP_ERR_TYPE, {0}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_TYPE, EP_TYPE_INT32, EP_ERR_TYPE, {0}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SHAPE0, -3, EP_ERR_RANGE, {"-3"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SHAPE0, 2, EP_ERR_BUFFER_SIZE, {"got 2"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"16"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_TYPE, EP_TYPE_BF16, EP_ERR_TYPE, {0}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_NDIM, 2, EP_ERR_NDIM, {"1", "got 2"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_SHAPE0, 3, EP_ERR_BUFFER_SIZE, {"got 3"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"multiple of 4"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE, OUT, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE, OUT, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE, OUT, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {0}},
    {OP_COMBINE, OUT, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "got 1"}},
    {OP_COMBINE, OUT, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_COMBINE, OUT, SPOIL_SHAPE0, 10, EP_ERR_SHAPE, {"9", "10"}},
    {OP_COMBINE, OUT, SPOIL_SHAPE1, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_COMBINE, OUT, SPOIL_SHIFT, 8, EP_ERR_ADDRESS, {"16"}},
    {OP_COMBINE_BACKWARD, GRAD_OUT, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE_BACKWARD, GRAD_OUT, SPOIL_TYPE, EP_TYPE_UINT8, EP_ERR_TYPE, {0}},
    {OP_COMBINE_BACKWARD, GRAD_OUT, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_COMBINE_BACKWARD, SLOT_WEIGHTS, SPOIL_TYPE, EP_TYPE_INT64, EP_ERR_TYPE, {0}},
    {OP_COMBINE_BACKWARD, EXPERT_OUT, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE_BACKWARD, EXPERT_OUT, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {0}},
    {OP_COMBINE_BACKWARD, EXPERT_OUT, SPOIL_SHAPE0, 2, EP_ERR_BUFFER_SIZE, {"got 2"}},
    {OP_COMBINE_BACKWARD, GRAD_EXPERT_OUT, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE_BACKWARD, GRAD_EXPERT_OUT, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {0}},
    {OP_COMBINE_BACKWARD, GRAD_EXPERT_OUT, SPOIL_SHAPE0, 2, EP_ERR_BUFFER_SIZE, {"got 2"}},
    {OP_COMBINE_BACKWARD, GRAD_EXPERT_OUT, SPOIL_SHAPE1, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_COMBINE_BACKWARD, GRAD_SLOT_WEIGHTS, SPOIL_TYPE, EP_TYPE_BF16, EP_ERR_TYPE, {0}},
    {OP_COMBINE_BACKWARD, GRAD_SLOT_WEIGHTS, SPOIL_SHAPE0, 2, EP_ERR_BUFFER_SIZE, {"got 2"}},
};

SoloTest(combine_arguments, wrong_tensors) {
    fixture_check_table(fixture_case(EP_LAYOUT_EXPERT_MAJOR), wrong_tensors, LENGTH(wrong_tensors));
}

static const Wrong wrong_batched[] = {
    {OP_COMBINE, EXPERT_OUT, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "got 2"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SHAPE0, 5, EP_ERR_SHAPE, {"4", "5"}},
    {OP_COMBINE, EXPERT_OUT, SPOIL_SHAPE1, 11, EP_ERR_SHAPE, {"12", "11"}},
    {OP_COMBINE, SLOT_WEIGHTS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "got 1"}},
    {OP_COMBINE_BACKWARD, GRAD_EXPERT_OUT, SPOIL_NDIM, 2, EP_ERR_NDIM, {"3", "got 2"}},
};

SoloTest(combine_arguments, wrong_tensors_of_batched) {
    fixture_check_table(fixture_case(EP_LAYOUT_BATCHED), wrong_batched, LENGTH(wrong_batched));
}

/* Rows of equal length on both sides, but of a length that is not supported. */
SoloTest(combine_arguments, row_bytes) {
    static const int64_t hiddens[] = {0, 12, 23, 64};
    static const char *const bytes[] = {"got 0", "got 24", "got 46", "got 128"};
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    for (int i = 0; i < LENGTH(hiddens); i++) {
        fixture_reset(&fixture);
        fixture.tensor[EXPERT_OUT].shape[1] = fixture.tensor[OUT].shape[1] = hiddens[i];
        fixture.tensor[GRAD_EXPERT_OUT].shape[1] = fixture.tensor[GRAD_OUT].shape[1] = hiddens[i];
        CHECK_REFUSED(fixture_call(&fixture, OP_COMBINE), EP_ERR_ROW_BYTES, "ep_combine", bytes[i]);
        CHECK_REFUSED(fixture_call(&fixture, OP_COMBINE_BACKWARD), EP_ERR_ROW_BYTES,
                      "ep_combine_backward", bytes[i]);
        fixture_check_untouched(&fixture);
    }
    fixture_close(&fixture);
}

/* The message says how many rows are needed. */
SoloTest(combine_arguments, rows_below_the_capacity) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_FLAT);
    fixture_open_prepared(&fixture, &c);
    fixture.tensor[EXPERT_OUT].shape[0] = 8;
    CHECK_REFUSED(fixture_call(&fixture, OP_COMBINE), EP_ERR_BUFFER_SIZE, "expert_out", "9",
                  "got 8");
    fixture_check_untouched(&fixture);
    fixture_close(&fixture);
}
