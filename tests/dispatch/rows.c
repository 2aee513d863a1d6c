/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are opaque bytes: types, sizes around a cache line, with and without scales and weights. */
#include "tests/cases/run.h"

Test(dispatch_rows, opaque_types, .timeout = 120) {
    for (EpType type = EP_TYPE_FP32; type <= EP_TYPE_INT64; type++) {
        Case c = case_of("ranks=3 hidden=48 row_type=%d scale_bytes=4 alignment=4", type);
        run_case_on_threads(&c);
    }
}

Test(dispatch_rows, sizes, .timeout = 120) {
    static const int hiddens[] = {8, 24, 32, 40, 72, 248, 256, 264, 1016, 4096};
    for (int i = 0; i < LENGTH(hiddens); i++) {
        Case c = case_of("ranks=2 hidden=%d weighted=1 alignment=2 row_type=%d sum_type=%d",
                         hiddens[i], 1 + i % 2, 1 + i % 2);
        run_case_on_threads(&c);
    }
}

Test(dispatch_rows, one_row_of_sixteen_bytes, .timeout = 120) {
    Case c = case_of("ranks=2 hidden=4 row_type=fp32 sum_type=fp32 max_tokens=1 top_k=1 "
                     "spread=alone weighted=1");
    run_case_on_threads(&c);
}

/* The largest rows; with INT64 elements those of dispatch are larger than those of combine. */
CasesTest(dispatch_rows, largest_row,
          run_dispatch(case_of("ranks=2 hidden=%d row_type=int64", EP_MAX_ROW_BYTES / 8)));

Test(dispatch_rows, scales, .timeout = 120) {
    static const int bytes[] = {4, 12, 16, 60, 224, 1028};
    for (int i = 0; i < LENGTH(bytes); i++)
        run_layouts(case_of("ranks=2 scale_bytes=%d weighted=%d alignment=8", bytes[i], i % 2));
}

LayoutsTest(dispatch_rows, without_weights, "ranks=3 top_k=4");
LayoutsTest(dispatch_rows, with_weights, "ranks=3 top_k=4 weighted=1");
