/* SPDX-License-Identifier: Apache-2.0 */
/* ep_moe as users run it: a whole MoE layer that agrees with a dense one, and a check that finds
 * what is wrong. */
#include "tests/tools/run_bench.h"

/* Small layers. The last of two equal options counts. */
#define SMALL "-n 1 -w 0 --floor 0 --hidden 64 --ffn 48 --tokens 24 --top-k 3 "

SoloTest(tools_moe, layers_agree_with_a_dense_one) {
    static const char *const lines[] = {
        "--threads 1 --dtype fp32",
        "--threads 4 --mesh expert=4 --dtype fp32",
        "--threads 4 --mesh expert=4 --dtype fp32 --weights early --align 8",
        "--threads 4 --mesh fsdp=2,expert=2 --weights early",
        "--threads 4 --mesh fsdp=2,expert=2 --dtype fp32 --regather 1",
        "--threads 2 --regather 1",
        "--threads 6 --mesh fsdp=2,expert=3 --dtype fp16 --uneven",
        "--threads 8 --mesh data=2,fsdp=2,expert=2 --dtype fp32 --uneven --idle 2",
        "--threads 8 --mesh expert=2,data=2,fsdp=2 --dtype fp16 --weights early",
        "--threads 8 --mesh fsdp=4,expert=2 --spec (expert,fsdp),_,_ --dtype fp32",
        "--threads 4 --mesh fsdp=2,expert=2 --spec expert,_,fsdp --dtype fp32 --align 4",
        "--threads 8 --mesh outer:expert=2,fsdp=2,inner:expert=2 --dtype fp32",
        "--threads 4 --mesh fsdp=4 --dtype fp32",
        "--threads 3 --mesh data=3",
        "--threads 4 --idle 4 --dtype fp32",
        "--threads 2 --tokens 0",
        "--threads 2 --tokens 1 --dtype fp32 --top-k 16",
        "--threads 4 --layers 4",
        "--threads 2 --mesh fsdp=2 --layers 4 --regather 1",
        "--threads 4 --forward --shared 32 --weights early --dtype fp32",
        "--threads 4 --mesh fsdp=2,expert=2 --forward --quant fp8 --shared 16 --uneven",
        "--threads 2 --mesh fsdp=2 --layers 3 --quant fp8 --blocks rows --uneven",
    };
    char line[320];
    for (int i = 0; i < LENGTH(lines); i++) {
        snprintf(line, sizeof(line), SMALL "%s", lines[i]);
        check_tool("ep_moe", line, 0, "\n#wrong 0\n", NULL);
    }
}

/* The reference quantises, too, by blocks of its own. Blocks here straddle shards and end early. */
SoloTest(tools_moe, quantised_weights) {
    static const char *const lines[] = {
        "--quant fp8 --hidden 144",
        "--quant fp8 --blocks rows --weights early",
        "--quant fp8-pow2 --hidden 272 --regather 1",
        "--quant fp8-ue8m0 --blocks rows",
        "--quant mxfp8 --dtype bf16",
        "--quant fp8-ue8m0 --dtype fp16",
        "--quant fp8 --blocks rows --spec (expert,fsdp),_,_",
    };
    char line[320];
    for (int i = 0; i < LENGTH(lines); i++) {
        snprintf(line, sizeof(line), SMALL "--threads 4 --mesh fsdp=2,expert=2 --dtype fp32 %s",
                 lines[i]);
        check_tool("ep_moe", line, 0, "\n#wrong 0\n", NULL);
    }
    check_tool("ep_moe", SMALL "--threads 2 --quant fp8", 0, "\n# compare: grad_w2 ", NULL);
}

/* Sums over nodes have other roundings. */
SoloTest(tools_moe, several_nodes) {
    setenv("LIBEP_TOPOLOGY", "0,0,1,1", 1);
    check_tool("ep_moe", SMALL "--threads 4 --mesh expert=4", 0, "\n#wrong 0\n", NULL);
    check_tool("ep_moe", SMALL "--threads 4 --mesh fsdp=2,expert=2 --dtype fp32", 0, "\n#wrong 0\n",
               NULL);
    unsetenv("LIBEP_TOPOLOGY");
}

/* What any phase writes matters to some result, and the check sees it. */
SoloTest(tools_moe, faults_are_found) {
    char phases[] = "router dispatch gather_w1 gather_w2 gemm1 activation gemm2 combine reduce_w1 "
                    "combine_backward gather_w2_backward gather_w1_backward gemm2_grad_input "
                    "gemm2_grad_weight reduce_w2 gemm1_grad_input activation_backward "
                    "gemm1_grad_weight dequantise dispatch_backward router_backward "
                    "dequantise_backward reduce_router shared_expert";
    char *rest = phases, *phase;
    while ((phase = strsep(&rest, " "))) {
        const char *quant = strstr(phase, "dequantise") ? "--quant fp8 --blocks rows"
                            : strstr(phase, "shared")   ? "--regather 0 --forward --shared 16"
                                                        : "";
        char line[320];
        snprintf(line, sizeof(line),
                 SMALL
                 "--threads 4 --mesh fsdp=2,expert=2 --experts 4 --dtype fp32 --regather 1 %s",
                 quant);
        setenv("LIBEP_TEST_MOE_FAULT", phase, 1);
        check_note("a fault in %s", phase);
        check_tool("ep_moe", line, 1, "\n# wrong: ", "elements are wrong");
    }
    setenv("LIBEP_TEST_MOE_FAULT", "reduce_w2", 1);
    check_tool("ep_moe", SMALL "--threads 2 --quant fp8 -c 0 --experts 4 --hidden 8 --ffn 2", 1,
               "\n# wrong: grad_w2: expected at most 0.0884 off", "off the layer without --quant");
    setenv("LIBEP_TEST_MOE_FAULT", "gemm1_grad_weight", 1);
    check_tool("ep_moe", SMALL "--threads 2 --layers 3", 1, "\n#wrong ", "elements are wrong");
    unsetenv("LIBEP_TEST_MOE_FAULT");
}

static const BadOptions bad_options[] = {
    {"--frobnicate", "an option of ep_moe"},
    {"stray", "stray"},
    {"--tokens many", "\"many\""},
    {"-n 0", "\"0\""},
    {"--hidden 7", "14 bytes"},
    {"--ffn 0", "--ffn"},
    {"--threads 2 --top-k 8 --experts 4", "--top-k: expected at most the 4 experts"},
    {"--align 3", "power of two"},
    {"--dtype fp8", "\"fp8\""},
    {"--weights often", "\"often\""},
    {"--blocks tiles", "--quant"},
    {"--layers 0", "\"0\""},
    {"--layers 2 --quant fp8 --compare 1", "--compare: expected one layer with it, got --layers 2"},
    {"--threads 2 --layers 2 --hidden 8192 --ffn 1048576 --experts 64", "--layers: expected room"},
    {"--gemms two", "\"two\""},
    {"--forward --layers 2", "--forward: expected one layer with it, got --layers 2"},
    {"--forward --regather 1", "--forward: expected no --regather 1 with it"},
    {"--forward --quant fp8 --backend cuda --wgrad fp8", "--forward: expected no --wgrad with it"},
    {"--forward --overlap 1 --backend cuda", "--overlap: expected 0 with --forward"},
    {"--graph 1", "--graph: expected 0 on the host, got 1"},
    {"--shared 16", "--shared: expected --forward with it"},
    {"--forward --shared 7", "14 bytes"},
    {"--compare 1", "--compare: expected --quant"},
    {"--wgrad dtype", "--wgrad: expected --quant and --backend cuda"},
    {"--quant fp8 --wgrad fp8", "--wgrad: expected --quant and --backend cuda"},
    {"--quant mxfp8 --backend cuda", "fp8 or fp8-pow2 on GPUs"},
    {"--quant fp8-ue8m0 --backend cuda", "got fp8-ue8m0"},
    {"--quant fp8 --backend cuda --hidden 72", "got 72 and 256"},
    {"--quant fp8 --backend cuda --ffn 8", "got 256 and 8"},
    {"--quant fp8 --backend cuda --align 64", "--wgrad fp8: expected --align of a multiple of 128"},
    {"--quant mxfp8 --blocks tiles", "rows with --quant mxfp8"},
    {"--backend tpu", "\"tpu\""},
    {"--regather 2", "--regather"},
    {"--overlap 2", "--overlap: "},
    {"--overlap yes", "\"yes\""},
    {"--overlap 1", "--overlap: expected 0 on the host, whose calls have finished"},
    {"--backend host --overlap 1", "--overlap: expected 0 on the host"},
    {"--threads 2 --idle 3", "at most the 2 ranks"},
    {"--threads 2 --mesh expert=4", "a mesh of the 2 ranks, got expert=4 of 4"},
    {"--threads 2 --mesh expert", "--mesh: "},
    {"--threads 2 --mesh tensor=2", "the roles data, fsdp and expert, got tensor"},
    {"--threads 2 --experts 5", "w1: expected a multiple of the 2 ranks of expert"},
    {"--threads 2 --spec expert,_", "3 dimensions"},
    {"--threads 4 --spec fsdp,_,_", "--spec: "},
    {"--threads 4 --spec (fsdp,expert),_,_", "--spec: "},
    {"--threads 2 -J /nonexistent/folder/x.json", "/nonexistent/folder/x.json"},
};

SoloCall(tools_moe, bad_options_are_refused,
         check_bad_options("ep_moe", bad_options, LENGTH(bad_options)));

SoloTest(tools_moe, help_and_version) {
    check_tool("ep_moe", "--help", 0, "--gemm-threads", NULL);
    check_tool("ep_moe", "--help", 0, "--overlap", NULL);
    check_tool("ep_moe", "--version", 0, "ep_moe 0.2.0", NULL);
}

SoloTest(tools_moe, json_has_the_documented_keys) {
    static const char *const keys[] = {"\"format\": \"ep_moe 1\"",
                                       "\"version\"",
                                       "\"wrong\": 0",
                                       "\"mesh\": \"expert=2\"",
                                       "\"machine\"",
                                       "\"median_us\"",
                                       "\"name\": \"gemm1_grad_input\"",
                                       "\"floor_us\"",
                                       "\"floor_ratio\"",
                                       "\"spec\": \"expert,_,_\"",
                                       "\"bytes\"",
                                       "\"flops\": ",
                                       "\"gemm_flops_per_second\"",
                                       "\"overlap\": false",
                                       "\"overlaps\"",
                                       "\"step\"",
                                       "\"gemm_calls\": ",
                                       "\"checks\"",
                                       "\"largest_error\""};
    check_words(run_json("ep_moe", SMALL "--threads 2 --floor 1", "\n#wrong 0\n"), keys,
                LENGTH(keys));
}

static long long number_of(const char *text, const char *key) {
    const char *at = strstr(text, key);
    return at ? strtoll(at + strlen(key), NULL, 10) : -1;
}

/* What the EP group and its plan take was promised. */
SoloTest(tools_moe, memory_is_as_promised) {
    const char *text = run_json("ep_moe", SMALL "--threads 4 --mesh data=2,expert=2",
                                "\n# memory: EP group and plan, promised ");
    long long taken = number_of(text, "\"library_bytes\": ");
    CHECK(taken > 0 && taken == number_of(text, "\"promised_bytes\": "), "%s", text);
    /* The router is the same on four ranks, which divide its gradient's sum: 16 x 64 in fp32. */
    CHECK(number_of(text, "\"workspace_bytes\": ") >= 16 * 64, "%s", text);
    text = run_json("ep_moe", SMALL "--threads 2 --mesh fsdp=2 --layers 3", "\n# stack: 3 layers");
    taken = number_of(text, "\"buffers_taken_bytes\": ");
    CHECK(taken > 0 && taken == number_of(text, "\"buffers_promised_bytes\": "), "%s", text);
}

/* Without a check nothing is claimed. */
SoloCall(tools_moe, unchecked_runs_say_so,
         check_tool("ep_moe", SMALL "--threads 2 -c 0", 0, "\n#wrong - (not checked)\n", NULL));

SoloCall(mpi_moe, default_run_under_mpirun,
         CHECK_MPIRUN(4, "ep_moe", "-n 1 -w 0", 0, "# mesh:    fsdp=2,expert=2: 4 ranks (MPI)",
                      "\n#wrong 0\n"));
