/* SPDX-License-Identifier: Apache-2.0 */
/* More ranks and nodes than cores: all layouts, one to three tokens on a rank, both modes. */
#include "tests/cases/run.h"

/* Few rows fit everywhere, so that a thousand ranks fit on a machine. */
static void run_crowd(int ranks, int nodes, int tokens) {
    Case cases[4];
    HOST_ONLY("more ranks than GPUs serve");
    if ((ranks > 129 || TESTS_SANITIZED) && !getenv("LIBEP_TEST_CROWDS"))
        check_left_out("it takes a minute: LIBEP_TEST_CROWDS=1");
    for (int i = 0; i < LENGTH(cases); i++) {
        cases[i] = case_of("ranks=%d even_nodes=%d experts=%d top_k=3 hidden=8 max_tokens=%d "
                           "capacity=40 rows_per_expert=6 overflow=drop weighted=1 node_rows=%d "
                           "masked_percent=10 timeout=600 mode=%s seed=%d",
                           ranks, nodes, ranks + 3, tokens, tokens > 1 ? tokens - 1 : 0,
                           i % 2 ? "latency" : "throughput", i);
        cases[i].layout = EP_LAYOUT_EXPERT_MAJOR + i, cases[i].phases = i / 2;
    }
    run_cases_on_threads(cases, LENGTH(cases));
}

#define CrowdTest(ranks, nodes, tokens)                                   \
    Test(handles_crowds, ranks_##ranks##_nodes_##nodes, .timeout = 600) { \
        run_crowd(ranks, nodes, tokens);                                  \
    }

CrowdTest(129, 2, 1);
CrowdTest(129, 16, 2);
CrowdTest(129, 129, 3);
CrowdTest(257, 2, 2);
CrowdTest(257, 16, 3);
CrowdTest(257, 128, 1);
CrowdTest(257, 257, 2);
CrowdTest(512, 2, 3);
CrowdTest(512, 16, 1);
CrowdTest(512, 128, 2);
CrowdTest(1024, 2, 1);
CrowdTest(1024, 16, 2);
CrowdTest(1024, 128, 3);
