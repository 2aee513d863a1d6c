/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_combine and ep_combine_backward: refusals.def, and calls that it cannot
 * say. */
#include "tests/cases/fixture.h"

RefusalsTest(combine_arguments, wrong_tensors, "combine", "");
RefusalsTest(combine_arguments, wrong_tensors_of_batched, "combine_batched", "layout=batched");

/* Rows of equal length on both sides, but of a length that is not supported. */
FixtureTest(combine_arguments, row_bytes, "") {
    static const int64_t hiddens[] = {0, 12, 23, 64};
    static const char *const bytes[] = {"got 0", "got 24", "got 46", "got 128"};
    CHECK_OK(fixture_call(f, STEP_PREPARE));
    for (int i = 0; i < LENGTH(hiddens); i++) {
        fixture_reset(f);
        f->tensor[IN_EXPERT_OUT].shape[1] = f->tensor[OUT_SUMS].shape[1] = hiddens[i];
        f->tensor[OUT_GRAD_ROWS].shape[1] = f->tensor[IN_GRAD_OUT].shape[1] = hiddens[i];
        CHECK_REFUSED(fixture_call(f, STEP_COMBINE), EP_ERR_ROW_BYTES, "ep_combine", bytes[i]);
        CHECK_REFUSED(fixture_call(f, STEP_COMBINE_BACKWARD), EP_ERR_ROW_BYTES,
                      "ep_combine_backward", bytes[i]);
        fixture_check_untouched(f);
    }
}

/* The message says how many rows are needed. */
SoloTest(combine_arguments, rows_below_the_capacity) {
    Fixture *f = fixture_new_prepared("layout=flat");
    f->tensor[IN_EXPERT_OUT].shape[0] = 8;
    CHECK_REFUSED(fixture_call(f, STEP_COMBINE), EP_ERR_BUFFER_SIZE, "expert_out", "9", "got 8");
    fixture_check_untouched(f);
    fixture_free(f);
}
