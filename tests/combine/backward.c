/* SPDX-License-Identifier: Apache-2.0 */
/* What ep_combine_backward may be asked for: gradients of rows, of weights, or of both. */
#include <math.h>

#include "tests/cases/desk.h"
#include "tests/oracle/expect.h"

enum { RANKS = 3 };

typedef struct Backward {
    World *world;
    EpGroup *group;
    Step step;
    Image rows, expected, slots;
    EpTensor grad_out, weights, expert_out, grad_rows, grad_slots;
} Backward;

static void backward_open(Backward *b, const EpBootstrap *bootstrap, int weighted) {
    Case c = {.ranks = RANKS, .top_k = 3, .alignment = 4, .weighted = weighted, .spare_rows = 2};
    b->world = world_new(&c);
    b->group = open_group(bootstrap, &b->world->c);
    EpHandle *handle = b->group ? open_handle(b->group, &b->world->c) : NULL;
    b->step = (Step){b->group, handle, b->world, bootstrap->rank};
    size_t rows = (size_t)b->world->rank[bootstrap->rank].buffer_rows;
    size_t bytes = rows * case_sum_bytes(&b->world->c);
    b->rows = image_new(bytes, 16);
    b->expected = image_new(bytes, 16);
    b->slots = image_new(rows * 4, 4);
    b->grad_out = step_grad_out(&b->step);
    b->weights = b->grad_slots = step_slot_weights(&b->step);
    b->expert_out = b->grad_rows = step_expert_out(&b->step);
    b->grad_rows.data = b->rows.data;
    b->grad_slots.data = b->slots.data;
    if (handle) step_prepare(&b->step);
}

static void backward_close(Backward *b) {
    expect_combine_backward(b->world, b->step.rank, &b->expected);
    image_check_equal(&b->rows, &b->expected, case_sum_bytes(&b->world->c), "grad_expert_out");
    ep_group_destroy(b->group);
    image_free(&b->rows);
    image_free(&b->expected);
    image_free(&b->slots);
    world_free(b->world);
}

/* Weighted, but the weights are no parameters: no dot products, so no expert_out either. */
ThreadTest(combine_backward, rows_alone, RANKS) {
    Backward b;
    backward_open(&b, bootstrap, 1);
    CHECK_OK(ep_combine_backward(b.step.handle, &b.grad_out, &b.weights, NULL, NULL, &b.grad_rows,
                                 NULL));
    image_check_untouched(&b.slots, "grad_slot_weights");
    backward_close(&b);
}

/* Rank by rank: who asks for dot products need not be everyone. */
ThreadTest(combine_backward, weights_on_one_rank, RANKS) {
    Backward b;
    backward_open(&b, bootstrap, 1);
    int ask = bootstrap->rank == 1;
    CHECK_OK(ep_combine_backward(b.step.handle, &b.grad_out, &b.weights, ask ? &b.expert_out : NULL,
                                 NULL, &b.grad_rows, ask ? &b.grad_slots : NULL));
    if (!ask) image_check_untouched(&b.slots, "grad_slot_weights");
    backward_close(&b);
}

/* Rows of many elements: rounding errors of the sum would show. */
Test(combine_backward, long_dot_products, .timeout = 120) {
    static const EpType types[] = {EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32};
    for (int i = 0; i < 3; i++) {
        Case c = {.ranks = 2, .hidden = 4096, .max_tokens = 6, .weighted = 1};
        c.row_type = c.sum_type = types[i];
        run_case_on_threads(&c);
    }
}

/* The longest rows, of products that a sum of ones just does not notice. */
SoloTest(combine_backward, worst_dot_product) {
    enum { HIDDEN = EP_MAX_ROW_BYTES / 4, ONES = 64 };
    Desk desk;
    Case c = desk_case(EP_LAYOUT_EXPERT_MAJOR);
    c.hidden = HIDDEN, c.row_type = c.sum_type = EP_TYPE_FP32;
    desk_open(&desk, &c);
    CHECK_OK(desk_call(&desk, OP_PREPARE));
    const RankWorld *me = desk.world->rank;
    float *x = desk.tensor[EXPERT_OUT].data, *grad = desk.tensor[GRAD_OUT].data;
    for (int64_t i = 0; i < me->recv_rows * HIDDEN; i++)
        x[i] = i % HIDDEN < ONES ? 1 : 0x1p-24f;
    for (int64_t i = 0; i < (int64_t)me->rows * HIDDEN; i++)
        grad[i] = 1;
    CHECK_OK(desk_call(&desk, OP_COMBINE_BACKWARD));
    const float *got = desk.tensor[GRAD_SLOT_WEIGHTS].data;
    double exact = ONES + (HIDDEN - ONES) * 0x1p-24;
    for (int64_t row = 0; row < me->recv_rows; row++)
        if (me->row[row].kind == ROW_FILLED)
            CHECK(fabs(got[row] - exact) <= 1e-5 * exact, "row %lld: %.9g instead of %.9g",
                  (long long)row, (double)got[row], exact);
    desk_close(&desk);
}

/* Where a block has little shared memory, as in a part of the emulated tests, rows pass in many
 * pieces; and where there are few blocks, each has several at once. */
Test(combine_backward, rows_of_24_kib, .timeout = 120) {
    for (int ranks = 1; ranks <= RANKS; ranks += RANKS - 1) {
        Case c = {.ranks = ranks, .top_k = 8, .max_tokens = 32 / ranks, .weighted = 1};
        c.row_type = c.sum_type = EP_TYPE_FP32, c.hidden = 24 * 1024 / 4;
        run_case_on_threads(&c);
    }
}

SoloTest(combine_backward, tail_of_a_shorter_tensor) {
    desk_check_shorter_tail(OP_COMBINE_BACKWARD, GRAD_SLOT_WEIGHTS);
}
