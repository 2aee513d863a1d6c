/* SPDX-License-Identifier: Apache-2.0 */
/* ep_info as users run it. */
#include "tests/harness/check.h"
#include "tests/harness/process.h"

static void check_info(const char *const *options, int exit_status, const char *in_out,
                       const char *in_err) {
    const char *argv[16] = {build_path("ep_info")};
    for (int i = 0; options[i]; i++)
        argv[i + 1] = options[i];
    ProcessResult result = process_run(argv, 0);
    CHECK(result.exit_status == exit_status, "exits with %d: %s", result.exit_status, result.err);
    if (in_out) CHECK(strstr(result.out, in_out), "no '%s' in: %s", in_out, result.out);
    if (in_err) CHECK(strstr(result.err, in_err), "no '%s' in: %s", in_err, result.err);
    process_result_free(&result);
}

#define WITH(...) ((const char *const[]){__VA_ARGS__, NULL})

SoloTest(tools_info, prints_all_parts) {
    static const char *const none[] = {NULL};
    static const char *const parts[] = {"libep 0.2.0", "LIBEP_TIMEOUT", "LIBEP_STAGE_BYTES",
                                        "topology",    "\nbackend: ",   "bytes"};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        check_info(none, 0, parts[i], NULL);
    setenv("LIBEP_BACKEND", "host", 1);
    check_info(none, 0, "\nbackend: host", NULL);
    unsetenv("LIBEP_BACKEND");
}

SoloCall(tools_info, settings_for_a_readme,
         check_info(WITH("--settings-markdown"), 0, "| `LIBEP_TIMEOUT` |", NULL));

SoloTest(tools_info, bad_options_are_refused) {
    check_info(WITH("--frobnicate"), 2, NULL, "--frobnicate");
    check_info(WITH("--hidden", "x"), 2, NULL, "\"x\"");
    check_info(WITH("--ranks", "0"), 2, NULL, "\"0\"");
    check_info(WITH("--ranks"), 2, NULL, "--ranks");
    check_info(WITH("stray"), 2, NULL, "stray");
}

SoloTest(tools_info, mesh_and_tensor) {
    const char *mesh = "data=2,fsdp=2,expert=4";
    check_info(WITH("--mesh", mesh, "--rank", "13"), 0,
               "the EP group             1 of 4: 12 13 14 15", NULL);
    check_info(WITH("--mesh", mesh, "--spec", "(fsdp,expert),_,_"), 0,
               "gathered over (fsdp,expert) (8)", NULL);
    check_info(WITH("--mesh", mesh, "--spec", "expert,fsdp,_", "--kind", "expert-weight"), 0,
               "expert,fsdp,_ as a weight of the experts, [512, 256, 128]", NULL);
    check_info(WITH("--mesh", mesh, "--spec", "fsdp,_", "--shape", "64,7"), 0, "[32, 7]", NULL);
    check_info(WITH("--mesh", "data=1000,expert=1000"), 0, "mesh: 1000000 ranks", NULL);
}

SoloTest(tools_info, bad_meshes_are_refused) {
    check_info(WITH("--mesh", "data=2,expert"), 2, NULL, "'=' and a size");
    check_info(WITH("--mesh", "data=2", "--rank", "2"), 2, NULL, "expected 0 .. 1, got 2");
    check_info(WITH("--mesh", "data=2", "--rank", "x"), 2, NULL, "--rank: expected a rank");
    check_info(WITH("--mesh", "data=2", "--spec", "dat"), 2, NULL, "got \"dat\"");
    check_info(WITH("--mesh", "fsdp=2", "--spec", "fsdp", "--kind", "w"), 2, NULL, "got \"w\"");
    check_info(WITH("--mesh", "fsdp=2", "--spec", "fsdp", "--shape", "3"), 2, NULL, "got 3");
    check_info(WITH("--mesh", "fsdp=2", "--spec", "fsdp", "--shape", "4,4"), 2, NULL,
               "each of the 1 dimensions");
    check_info(WITH("--mesh", "fsdp=2", "--shape", "4"), 2, NULL, "with --spec");
    check_info(WITH("--spec", "fsdp"), 2, NULL, "with --mesh");
}

SoloCall(tools_info, infeasible_configuration,
         check_info(WITH("--ranks", "1024", "--tokens", "16777216"), 1, "not feasible", NULL));

SoloTest(tools_info, bad_settings) {
    setenv("LIBEP_TYPO", "1", 1);
    check_info(WITH("--hidden", "64"), 1, "topology",
               "LIBEP_TYPO"); /* ep_info still prints the rest */
    unsetenv("LIBEP_TYPO");
    setenv("LIBEP_TIMEOUT", "soon", 1);
    check_info(WITH("--hidden", "64"), 1, NULL, "LIBEP_TIMEOUT");
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
    static const char *const parts[] = {"topology: 4 ranks on 2 nodes", "between nodes",
                                        "node 0: rank   0   2\n", "node 1: rank   1   3\n"};
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    setenv("LIBEP_TOPOLOGY", "0,1,0,1", 1);
    const char *arguments[] = {
        "-x", "LIBEP_TOPOLOGY", "-x", "LIBEP_BACKEND=host", build_path("ep_info"), NULL};
    ProcessResult result = mpirun_run(4, 60, arguments);
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.out);
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
        CHECK(strstr(result.out, parts[i]), "no '%s' in: %s", parts[i], result.out);
    process_result_free(&result);
}
