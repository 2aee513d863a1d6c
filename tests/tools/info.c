/* SPDX-License-Identifier: Apache-2.0 */
/* ep_info as users run it. */
#include "tests/tools/run_bench.h"

static void check_info(const char *line, const char *in_out) {
    check_tool("ep_info", line, 0, in_out, NULL);
}

SoloTest(tools_info, prints_all_parts) {
    static const char *const parts[] = {"libep 0.2.0", "LIBEP_TIMEOUT", "LIBEP_STAGE_BYTES",
                                        "topology",    "\nbackend: ",   "bytes"};
    for (int i = 0; i < LENGTH(parts); i++)
        check_info("", parts[i]);
    setenv("LIBEP_BACKEND", "host", 1);
    check_info("", "\nbackend: host");
    unsetenv("LIBEP_BACKEND");
}

SoloCall(tools_info, settings_for_a_readme,
         check_info("--settings-markdown", "| `LIBEP_TIMEOUT` |"));

SoloTest(tools_info, mesh_and_tensor) {
    check_info("--mesh data=2,fsdp=2,expert=4 --rank 13",
               "the EP group             1 of 4: 12 13 14 15");
    check_info("--mesh data=2,fsdp=2,expert=4 --spec (fsdp,expert),_,_",
               "gathered over (fsdp,expert) (8)");
    check_info("--mesh data=2,fsdp=2,expert=4 --spec expert,fsdp,_ --kind expert-weight",
               "expert,fsdp,_ as a weight of the experts, [512, 256, 128]");
    check_info("--mesh data=2,fsdp=2,expert=4 --spec fsdp,_ --shape 64,7", "[32, 7]");
    check_info("--mesh data=1000,expert=1000", "mesh: 1000000 ranks");
}

static const BadOptions bad_options[] = {
    {"--frobnicate", "--frobnicate"},
    {"--hidden x", "\"x\""},
    {"--ranks 0", "\"0\""},
    {"--ranks", "--ranks"},
    {"stray", "stray"},
    {"--mesh data=2,expert", "'=' and a size"},
    {"--mesh data=2 --rank 2", "expected 0 .. 1, got 2"},
    {"--mesh data=2 --rank x", "--rank: expected a rank"},
    {"--mesh data=2 --spec dat", "got \"dat\""},
    {"--mesh fsdp=2 --spec fsdp --kind w", "got \"w\""},
    {"--mesh fsdp=2 --spec fsdp --shape 3", "got 3"},
    {"--mesh fsdp=2 --spec fsdp --shape 4,4", "each of the 1 dimensions"},
    {"--mesh fsdp=2 --shape 4", "with --spec"},
    {"--spec fsdp", "with --mesh"},
};

SoloCall(tools_info, bad_options_are_refused,
         check_bad_options("ep_info", bad_options, LENGTH(bad_options)));

SoloCall(tools_info, infeasible_configuration,
         check_tool("ep_info", "--ranks 1024 --tokens 16777216", 1, "not feasible", NULL));

SoloTest(tools_info, bad_settings) {
    setenv("LIBEP_TYPO", "1", 1);
    check_tool("ep_info", "--hidden 64", 1, "topology",
               "LIBEP_TYPO"); /* ep_info still prints the rest */
    unsetenv("LIBEP_TYPO");
    setenv("LIBEP_TIMEOUT", "soon", 1);
    check_tool("ep_info", "--hidden 64", 1, NULL, "LIBEP_TIMEOUT");
}

/* Both programs fail if they cannot write their output. */
SoloTest(tools_info, failed_output) {
    static const char *const programs[] = {"ep_info", "ep_bench"};
    for (int i = 0; i < 2; i++) {
        char command[4300];
        snprintf(command, sizeof(command), "%s --help > /dev/full", build_path(programs[i]));
        const char *argv[] = {"sh", "-c", command, NULL};
        ProcessResult result = process_run(argv, 0);
        CHECK(result.exit_status == 1 && strstr(result.err, "standard output"), "%s: %d: %s",
              programs[i], result.exit_status, result.err);
        process_result_free(&result);
    }
}

/* Each rank is a process; the topology pretends that two machines have two of them each. */
SoloTest(mpi_info, nodes_and_their_ranks) {
    setenv("LIBEP_TOPOLOGY", "0,1,0,1", 1);
    setenv("LIBEP_BACKEND", "host", 1);
    CHECK_MPIRUN(4, "ep_info", "", 0, "topology: 4 ranks on 2 nodes", "between nodes",
                 "node 0: rank   0   2\n", "node 1: rank   1   3\n");
}
