/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are opaque bytes: types, sizes around a cache line, with and without scales and weights. */
#include "tests/cases/run.h"

GridTest(dispatch_rows, opaque_types, "ranks=3 hidden=48 scale_bytes=4 alignment=4",
         "row_type=fp32,fp8_e4m3,fp8_e5m2,uint8,int32,int64");
GridTest(dispatch_rows, sizes,
         "ranks=2 weighted=1 alignment=2 row_type=bf16|fp16 sum_type=bf16|fp16",
         "hidden=8,24,32,40,72,248,256,264,1016,4096");
GridTest(dispatch_rows, one_row_of_sixteen_bytes,
         "ranks=2 hidden=4 max_tokens=1 top_k=1 weighted=1",
         "row_type=fp32 sum_type=fp32 spread=alone");

/* The largest rows; with INT64 elements those of dispatch are larger than those of combine. */
CasesTest(dispatch_rows, largest_row,
          run_dispatch(case_of("ranks=2 hidden=%d row_type=int64", EP_MAX_ROW_BYTES / 8)));

GridTest(dispatch_rows, scales, EACH_LAYOUT "ranks=2 alignment=8",
         "scale_bytes=4,12,16,60,224,1028 weighted=0|0|0|0|0|0|1|1|1|1|1|1");
GridTest(dispatch_rows, without_weights, EACH_LAYOUT, "ranks=3 top_k=4");
GridTest(dispatch_rows, with_weights, EACH_LAYOUT, "ranks=3 top_k=4 weighted=1");
