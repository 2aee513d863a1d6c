/* SPDX-License-Identifier: Apache-2.0 */
/* GPUs that count as if they did not reach each other's memory: each is a node of its own. */
#if TESTS_ON_GPU

#include "tests/cases/run.h"

/* An empty topology is the machine's own: the case's nodes must follow from the GPUs. */
static void run_apart(const char *setting, const char *value, const char *more) {
    static const char *const texts[] = {
        "layout=expert-major weighted=0|1 mode=throughput",
        "layout=flat capacity=600",
        "layout=expert-major sum_quant=fp8 row_type=bf16 hidden=1040",
        "layout=batched rows_per_expert=40 mode=latency",
        "layout=expert-major by_entry=1",
        NULL};
    setenv("LIBEP_TOPOLOGY", "", 1);
    setenv(setting, value, 1);
    run_texts(NULL, more, texts);
}

#define MANY "max_tokens=67 experts=10 top_k=3 hidden=104 "
CasesTest(bootstrap_apart, two, run_apart("LIBEP_PEERS", "none", MANY "ranks=2 nodes=01 "));
CasesTest(bootstrap_apart, four, run_apart("LIBEP_PEERS", "none", MANY "ranks=4 nodes=0123 "));
CasesTest(bootstrap_apart, by_nccl, run_apart("NCCL_P2P_DISABLE", "1", MANY "ranks=2 nodes=01 "));

#endif
