/* SPDX-License-Identifier: Apache-2.0 */
/* ep_bench as users run it: invalid options give exit status 2 and a message, valid runs are
 * correct, alone and under mpirun. */
#include <sys/stat.h>
#include <time.h>

#include "tests/tools/run_bench.h"

static const BadOptions bad_options[] = {
    {"--frobnicate", "--frobnicate"},
    {"-Q", "-Q"},
    {"stray", "stray"},
    {"--tokens", "--tokens"},
    {"--tokens many", "\"many\""},
    {"--tokens -1", "\"-1\""},
    {"--tokens 12abc", "\"12abc\""},
    {"--tokens 99999999999999999999", "\"99999999999999999999\""},
    {"--tokens 1e3", "\"1e3\""},
    {"--uneven=5", "--uneven"},
    {"-n 0", "\"0\""},
    {"-w -1", "\"-1\""},
    {"-c 2", "\"2\""},
    {"-b 64 -e 32", "--end"},
    {"-b 16 -e 64 -f 1", "--factor"},
    {"--hidden 0", "--hidden"},
    {"--hidden 7", "14 bytes"},
    {"--hidden 100000", "65536"},
    {"--top-k 0", "--top-k"},
    {"--top-k 33", "--top-k"},
    {"--top-k 8 --experts 4", "--top-k"},
    {"--experts 0", "--experts"},
    {"--align 48", "power of two"},
    {"--align 0", "--align"},
    {"--dtype float", "\"float\""},
    {"--routing wild", "\"wild\""},
    {"--routing zipf:x", "zipf:s"},
    {"--routing zipf:nan", "zipf:s"},
    {"--routing file:", "--routing"},
    {"--routing file:/nonexistent/trace", "/nonexistent/trace"},
    {"--masked 1.5", "--masked"},
    {"--masked nan", "--masked"},
    {"--masked -0.1", "--masked"},
    {"--capacity -5", "--capacity"},
    {"--node-rows 0", "\"0\""},
    {"--tokens 8 --node-rows 9", "--node-rows: expected at most the 8 tokens of a step, got 9"},
    {"--overflow ignore", "\"ignore\""},
    {"--layout round", "\"round\""},
    {"--layout expert-", "\"expert-\""},
    {"--chain 0 --graphs", "\"0\""},
    {"--chain 5", "--graphs"},
    {"--chain 5 --mode auto", "--graphs"},
    {"--threads 2 --mode latency --graphs --backend host", "GPU backend"},
    {"--mode latency --layout batched --capacity 9", "--rows-per-expert"},
    {"--mode latency --layout flat --rows-per-expert 9", "--layout batched"},
    {"--rows-per-expert 4", "--layout batched"},
    {"--layout batched --capacity 9", "--rows-per-expert"},
    {"--mode latency --layout rank-major --capacity 9", "rank-major, whose size is fixed"},
    {"--layout rank-major --capacity 9", "rank-major, whose size is fixed"},
    {"--mode latency --layout rank-major --rows-per-expert 9", "got --layout rank-major"},
    {"--weighted yes", "\"yes\""},
    {"--scales 6", "multiple of 4"},
    {"--idx int16", "\"int16\""},
    {"--backend tpu", "\"tpu\""},
    {"--mode fast", "\"fast\""},
    {"--quant fp4", "\"fp4\""},
    {"--split", "--mode latency"},
    {"--split --mode auto", "--mode latency"},
    {"--quant fp8 --scales 4", "--scales"},
    {"--quant mxfp8 --hidden 8", "multiple of 16"},
    {"--quant nvfp4 --hidden 48", "multiple of 32"},
    {"--baseline --quant fp8", "--quant none"},
    {"--placement balance:0", "balance:N with N places"},
    {"--placement /dev/null", "another begin"},
    {"--placement no/such", "balance:N or a file"},
    {"--placement balance:256 --case sums", "--case step without"},
    {"--choice far", "\"far\""},
    {"--threads 4 --mask 1,", "--mask: expected ranks as \"1,3\", got \"1,\""},
    {"--threads 4 --mask 4", "--mask: expected some of 4 ranks, got rank 4"},
    {"--threads 2 --mask 0,1", "--mask: expected a rank that goes on, got none"},
    {"--threads 4 --mask 0,1,2 --kill-at 4", "a rank that goes on"},
    {"--threads 4 --kill-at 0", "--kill-at: expected STEP or STEP:RANK, got \"0\""},
    {"--threads 4 --kill-at 5:x", "STEP or STEP:RANK"},
    {"--threads 4 --kill-at 1", "a step from 2 to 12, 8 before the last, got 1"},
    {"--threads 4 -n 99 --kill-at 92", "a step from 2 to 91, 8 before the last, got 92"},
    {"--threads 4 --kill-at 5:4", "one of 4 ranks that is not masked, got rank 4"},
    {"--threads 4 --kill-at 5:1 --mask 1", "one of 4 ranks that is not masked, got rank 1"},
    {"--threads 4 --join-at 9", "--join-at: expected --kill-at, got none"},
    {"--threads 4 --kill-at 5 --join-at 13", "--join-at: expected a step from 14 to 20, got 13"},
    {"--case decode", "expected --threads N with N >= 2, the processes that it starts, got none"},
    {"--case decode --threads 1", "the processes that it starts, got 1"},
    {"--threads 2 --mask 1 --mode throughput", "--case decode: expected plain rows in --mode lat"},
    {"--threads 2 --mask 1 --graphs", "and --graphs with --backend cuda alone, got another"},
    {"--threads 2 --mask 1 --routing zipf", "--case decode: expected --routing uniform without"},
    {"--threads 2 --case decode --masked 0.5", "--routing uniform without --masked, got another"},
    {"--threads 2 --case decode --masks on", "expected no --masks, since its group has them and c"},
    {"--threads 2 --late-us 0 --mask 1", "\"0\""},
    {"--sums all", "\"all\""},
    {"--sums entry --layout flat", "--layout expert or batched, got --layout flat"},
    {"--sums entry --sum-quant fp8", "--sum-quant none, got fp8"},
    {"--case sums --pair", "no --routing file, --baseline and --pair"},
    {"--case all", "\"all\""},
    {"--case calls -b 1 -e 4", "expected one size"},
    {"--case calls --routing file:x", "no --routing file"},
    {"--case sums --uneven", "even tokens"},
    {"--case sums --dtype fp32", "weighted rows of bf16"},
    {"--case sums --layout flat", "--layout expert"},
    {"--threads 2 --case sums --tokens 4 -J /nonexistent/folder/x.json", "/nonexistent/folder"},
    {"--nccl-ep x -b 1 -e 4", "expected one size"},
    {"--models --case sums", "--case: expected step with --models"},
    {"--threads 1 --case weights --hidden 7", "14 bytes"},
    {"--threads 0", "--threads"},
    {"--threads 9999", "--threads"},
    {"--threads 2 --baseline", "--baseline"},
    {"--threads 2 -J /nonexistent/folder/x.json", "/nonexistent/folder/x.json"},
    {"--threads 2 -J /tmp", "cannot write /tmp: Is a directory"},
    {"--threads 2 --save-routing /nonexistent/folder/x --tokens 4", "/nonexistent/folder/x"},
    {"--models --hidden 64", "--hidden"},
    {"--models --top-k 2", "--top-k"},
    {"--models --experts 8", "--experts"},
    {"--models --routing file:x", "--routing"},
    {"--models --save-routing x", "--save-routing"},
    {"--models --baseline", "--baseline"},
    {"--models --rows-per-expert 4", "--layout batched"},
    {"--models --mode throughput --split", "--mode latency"},
    {"--models -b 64 -e 32", "--end"},
    {"--threads 1 --models /nonexistent/models", "/nonexistent/models"},
    {"--threads 1 --models=/nonexistent/models", "/nonexistent/models"},
    {"--threads 1 --models=", "--models"},
    {"--threads 1 --models /dev/null", "at least one model"},
    {"--threads 1 --models /tmp", "/tmp"},
};

SoloCall(tools_bench, bad_options_are_refused,
         check_bad_options("ep_bench", bad_options, LENGTH(bad_options)));

SoloTest(tools_bench, help_and_version) {
    check_run("--help", 0, "--save-routing", NULL);
    check_run("--version", 0, "0.2.0", NULL);
}

/* A malformed setting is a bad request, under any number of ranks. */
SoloTest(tools_bench, malformed_settings_are_refused) {
    static const char *const settings[][2] = {{"LIBEP_TIMEOUT", "soon"},
                                              {"LIBEP_BACKEND", "gpu"},
                                              {"LIBEP_STAGE_BYTES", "12Q"},
                                              {"LIBEP_TOPOLOGY", "2/gibberish"}};
    for (int i = 0; i < LENGTH(settings); i++) {
        setenv(settings[i][0], settings[i][1], 1);
        check_run("--threads 1 --tokens 4", 2, NULL, settings[i][0]);
        check_run("--threads 2 --tokens 4", 2, NULL, settings[i][0]);
        unsetenv(settings[i][0]);
    }
}

SoloTest(tools_bench, small_runs_are_correct) {
    static const char *const lines[] = {
        QUICK "--threads 3 --tokens 20",
        QUICK "--threads 2 --tokens 0",
        QUICK "--threads 2 -b 0 -e 8 -f 4",
        QUICK "--threads 3 --tokens 20 --layout flat --dtype fp16 --routing uniform",
        QUICK "--threads 3 --tokens 20 --layout batched --dtype fp32 --routing one-hot",
        QUICK "--threads 2 --tokens 20 --masked 0.3 --idx int64 --scales 12 --weighted 0",
        QUICK "--threads 2 --tokens 20 --capacity 30 --overflow drop --align 1",
        QUICK "--threads 3 -b 0 -e 20 -f 5 --zero-copy --uneven",
        QUICK "--threads 4 -b 1 -e 8 -f 2 --mode latency",
        QUICK "--threads 3 -b 1 -e 16 -f 4 --mode latency --layout expert-major --align 8",
        QUICK "--threads 3 -b 1 -e 16 -f 4 --mode latency --layout flat --masked 0.3",
        QUICK "--threads 3 -b 0 -e 16 -f 4 --mode latency --layout rank-major --masked 0.3",
        QUICK "--threads 3 --tokens 20 --mode latency --layout rank-major --uneven --split",
        QUICK "--threads 2 --tokens 20 --mode auto --layout rank-major --quant fp8 --scales 0",
        QUICK "--threads 3 -b 0 -e 16 -f 4 --layout rank-major --masked 0.3 --idx int64 --pair",
        QUICK "--threads 2 --tokens 20 --layout rank-major --uneven --scales 12 --zero-copy",
        QUICK "--threads 3 -b 1 -e 16 -f 4 --mode latency --quant fp8 --split",
        QUICK "--threads 2 --tokens 20 --mode latency --rows-per-expert 2 --overflow drop",
        QUICK "--threads 3 -b 0 -e 20 -f 5 --mode latency --uneven --split",
        QUICK "--threads 3 --tokens 20 --mode latency --layout flat --quant mxfp8 --split",
        QUICK "--threads 3 --tokens 20 --mode latency --capacity 12 --overflow drop --align 1",
        QUICK "--threads 2 --tokens 20 --mode auto --quant fp8 --dtype fp32 --idx int64",
        QUICK "--threads 2 --tokens 20 --quant fp8-ue8m0 --dtype fp16 --layout batched",
        QUICK "--threads 2 --tokens 20 --quant mxfp8 --weighted 0 --zero-copy",
        QUICK "--threads 2 --tokens 20 --quant nvfp4 --layout flat --dtype fp16",
        QUICK "--threads 2 --tokens 20 --quant nvfp4 --mode latency --split",
    };
    for (int i = 0; i < LENGTH(lines); i++)
        check_run(lines[i], 0, "#wrong 0", NULL);
}

/* Each token goes to both experts. */
SoloTest(tools_bench, counters) {
    const char *all = "--threads 2 --tokens 20 --experts 2 --top-k 2 --routing uniform --stats ";
    char line[160];
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof(line), "%s%s%s", QUICK, all, i ? "--mode latency --split" : "");
        check_run(line, 0, "slots, the busiest expert's 1.00 times the mean; ", NULL);
    }
}

/* A file's map, in which an expert has no copy, and balanced ones. */
SoloTest(tools_bench, placement) {
    const char *all = "--threads 3 --tokens 20 --experts 5 --top-k 3 --placement ";
    char path[] = "/tmp/ep_placement_XXXXXX", line[200];
    int file = mkstemp(path);
    cr_assert(file >= 0 && dprintf(file, "ep-placement 1\nexperts 5 places 7\n"
                                         "0 0 1\n2 3 -1 3\n") > 0 && !close(file));
    for (int i = 0; i < 4; i++) {
        snprintf(line, sizeof(line), "%s%s%s %s", QUICK, all, i % 2 ? path : "balance:9",
                 i / 2 ? "--mode latency --choice spread" : "--layout flat");
        check_run(line, 0, "#wrong 0", NULL);
    }
    snprintf(line, sizeof(line), "%s--threads 3 --tokens 20 --experts 4 --placement %s", QUICK, path);
    check_run(line, 2, NULL, "a file for 4 experts");
    unlink(path);
}

/* Sums depend on nodes, and the check knows them. */
SoloTest(tools_bench, several_nodes) {
    setenv("LIBEP_TOPOLOGY", "0,1,1,0,1", 1);
    check_run(QUICK "--threads 5 --tokens 40", 0, "#wrong 0", NULL);
    check_run(QUICK "--threads 5 --tokens 40 --dtype fp16 --layout flat", 0, "#wrong 0", NULL);
    check_run(QUICK "--threads 5 --tokens 40 --mode latency --split", 0, "#wrong 0", NULL);
    check_run(QUICK "--threads 5 --tokens 40 --node-rows 9 --capacity 900 --overflow drop", 0,
              "#wrong 0", NULL);
    check_run("--threads 4 --tokens 4", 2, NULL, "each of the group's 4 ranks");
    unsetenv("LIBEP_TOPOLOGY");
}

/* The default is the shape of a decoding step, and drops no slot. */
SoloTest(tools_bench, defaults_of_latency_mode) {
    static const struct {
        const char *options, *output;
    } cases[] = {
        {"--mode latency", "alignment 1, layout batched, routing zipf:1, masked 0, even tokens"},
        {"--mode latency", "# tokens 128: 128 to 128 per rank"},
        {"--mode latency", ", dropped 0\n"},
        {"--mode latency --align 4 --layout flat", "alignment 4, layout flat"},
        {"--mode latency --layout expert-major", "alignment 1, layout expert,"},
        {"--mode latency --layout rank-major", "alignment 1, layout rank-major,"},
        {"--mode latency --capacity 3000", "alignment 1, layout expert,"},
        {"--mode latency --tokens 3 --uneven", "uneven tokens"},
        {"--padding keep --align 32", "quant none, sums bf16, padding keep"},
        {"--sum-quant fp8 --dtype fp32", "quant none, sums fp8, padding zero"},
        {"--sums entry", "quant none, sums by entry, padding zero"},
        {"--mode latency --sums entry", "quant none, sums by entry, padding zero"},
        {"--mode throughput --tokens 3", "alignment 128, layout expert,"},
        {"--mode auto --tokens 3", "alignment 128, layout expert,"},
    };
    char line[256];
    for (int i = 0; i < LENGTH(cases); i++) {
        snprintf(line, sizeof(line), QUICK "--threads 2 %s", cases[i].options);
        check_run(line, 0, cases[i].output, NULL);
    }
}

/* The other cases have a line for each figure. Sums that travel as fp8 are ten times as wrong. */
SoloTest(tools_bench, cases_with_lines) {
    double bf16 = -1, fp8 = -1;
    const char *text = run_json(
        "ep_bench", "--case sums --threads 2 --hidden 256 --experts 8 --top-k 2 --tokens 8",
        "\n heavy tails, largest, fp8 ");
    CHECK(strstr(text, "\"format\": \"ep_bench lines 1\""), "%s", text);
    const char *first = strstr(text, "\"Gaussian, rms, bf16\""),
               *second = strstr(text, "\"Gaussian, rms, fp8\"");
    CHECK(first && sscanf(strstr(first, "\"median\""), "\"median\": %lf", &bf16) == 1 && second &&
              sscanf(strstr(second, "\"median\""), "\"median\": %lf", &fp8) == 1,
          "%s", text);
    CHECK(bf16 > 1e-4 && bf16 < 5e-3 && fp8 > 3 * bf16 && fp8 < 0.1, "%g and %g", bf16, fp8);
    check_run("--case calls --threads 1 -n 1 -w 0", 0, "\n ep_weight_reduce, 1 rank ", NULL);
}

/* Ranks are processes. One is killed, the others go on, and another one takes its place. */
SoloTest(tools_bench, decoding_with_masks) {
    static const char *const cases[][2] = {
        {"--mask 1 --dtype fp32", "\n step of 3 ranks "},
        {"--kill-at 4:2 --late-us 300000", "\n step in which rank 2 dies "},
        {"--kill-at 3:0 --join-at 12 --mask 3 --late-us 300000", "\n ep_group_join to the first "},
        {"--kill-at 9 --mask 0 --late-us 300000 --tokens 0", "\n step without it, masked "}};
    char line[200];
    for (int i = 0; i < LENGTH(cases); i++) {
        snprintf(line, sizeof(line), "-n 20 -w 1 --threads 4 --hidden 264 --tokens 37 --experts 7 "
                                     "--top-k 3 %s", cases[i][0]);
        check_run(line, 0, cases[i][1], NULL);
        check_run(line, 0, "#wrong 0", NULL);
    }
    static const char *const words[] = {"\"ranks_are\": \"processes\"", "\"step of 2 ranks\""};
    check_words(run_json("ep_bench", "--case decode --threads 2 -n 2 --tokens 3", "#wrong 0"),
                words, LENGTH(words));
}

/* A capacity that is too small ends the run, unless the overflow policy is drop. */
SoloCall(tools_bench, overflow_ends_the_run,
         check_run(QUICK "--threads 2 --tokens 20 --capacity 3", 1, NULL,
                   "at most 3 receive rows"));

/* ---- under mpirun ---- */

#define SMALL "-n 1 -w 0 --hidden 64 "
SoloTest(mpi_bench, correct_with_and_without_baseline) {
    CHECK_MPIRUN(2, "ep_bench", SMALL "--tokens 16", 0, "#wrong 0");
    CHECK_MPIRUN(3, "ep_bench", SMALL "--baseline", 0, "#wrong 0");
    CHECK_MPIRUN(3, "ep_bench", SMALL "--dtype=fp16 --baseline", 0, "#wrong 0");
    CHECK_MPIRUN(2, "ep_bench", SMALL "--mode=latency --baseline", 0, "#wrong 0");
    CHECK_MPIRUN(2, "ep_bench", SMALL "--baseline --pair", 0, ": baseline pair ");
}

SoloCall(mpi_bench, bad_options_are_refused,
         CHECK_MPIRUN(2, "ep_bench", SMALL "--tokens many", 2, "\"many\""));

/* A rank is killed behind mpirun's back, once it logs that it measures. The others name it, and do
 * not wait for it again: from the library's warning on, they meet for 5 more seconds. */
SoloTest(mpi_bench, a_killed_rank_is_named_in_time) {
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    char script[4600], victims_log[64];
    const char *log = temporary_file();
    struct stat warned;
    snprintf(victims_log, sizeof(victims_log), "%s.1", log);
    snprintf(script, sizeof(script),
             "bench='%s -n 1000000 --hidden 64 --tokens 16'; log=%s; "
             "[ $OMPI_COMM_WORLD_RANK = 1 ] || exec $bench; "
             "LIBEP_LOG=trace LIBEP_LOG_FILE=$log $bench & "
             "until [ 0$(grep -sc ep_prepare $log) -ge 20 ]; do sleep 0.1; done; "
             "kill -9 $!; exec sleep 60",
             build_path("ep_bench"), victims_log);
    setenv("LIBEP_TIMEOUT", "4", 1);
    setenv("LIBEP_LOG_FILE", log, 1);
    const char *arguments[] = {"sh", "-c", script, NULL};
    ProcessResult result = mpirun_run(3, 60, arguments);
    CHECK(stat(log, &warned) == 0, "no file %s", log);
    double seconds = difftime(time(NULL), warned.st_mtime);
    unlink(log), unlink(victims_log);
    unsetenv("LIBEP_LOG_FILE");
    unsetenv("LIBEP_TIMEOUT");
    CHECK(warned.st_size > 0 && seconds < 12, "took %g s: %s", seconds, result.out);
    const char *said = strstr(result.out, "ep_bench: rank ");
    CHECK(said && strstr(said, ": rank 1 did not arrive within 4 s"), "%s", result.out);
    CHECK(!strstr(result.out, "within 9 s"), "waited twice: %s", result.out);
    process_result_free(&result);
}
