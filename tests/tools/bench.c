/* SPDX-License-Identifier: Apache-2.0 */
/* ep_bench as users run it: invalid options give exit status 2 and a message, valid runs are
 * correct, trace files survive a round trip, invalid trace files are refused. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/harness/check.h"
#include "tests/harness/process.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

enum { MOST_WORDS = 40 };

/* `line` has words separated by blanks. */
static ProcessResult run_bench(const char *line) {
    static char words[2048];
    const char *argv[MOST_WORDS + 2] = {build_path("ep_bench")};
    snprintf(words, sizeof(words), "%s", line);
    int count = 1;
    for (char *w = strtok(words, " "); w && count <= MOST_WORDS; w = strtok(NULL, " "))
        argv[count++] = w;
    return process_run(argv, 0);
}

static void check_run(const char *line, int exit_status, const char *in_out, const char *in_err) {
    ProcessResult result = run_bench(line);
    CHECK(result.exit_status == exit_status, "'%s' exits with %d, not %d: %s", line,
          result.exit_status, exit_status, result.err);
    if (in_out) CHECK(strstr(result.out, in_out), "'%s': no '%s' in: %s", line, in_out, result.out);
    if (in_err) CHECK(strstr(result.err, in_err), "'%s': no '%s' in: %s", line, in_err, result.err);
    if (exit_status == 2)
        CHECK(!strstr(result.out, "#wrong 0"), "'%s' claims success: %s", line, result.out);
    process_result_free(&result);
}

typedef struct BadOptions {
    const char *line, *message;
} BadOptions;

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
    {"--baseline --mode latency", "--mode throughput"},
    {"--baseline --quant fp8", "--quant none"},
    {"--threads 0", "--threads"},
    {"--threads 9999", "--threads"},
    {"--threads 2 --baseline", "--baseline"},
    {"--threads 2 -J /nonexistent/folder/x.json", "/nonexistent/folder/x.json"},
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

SoloTest(tools_bench, bad_options_are_refused) {
    for (int i = 0; i < LENGTH(bad_options); i++)
        check_run(bad_options[i].line, 2, NULL, bad_options[i].message);
}

SoloTest(tools_bench, help_and_version) {
    check_run("--help", 0, "--save-routing", NULL);
    check_run("--version", 0, "0.1.0", NULL);
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

/* Options of every run below: small and quick. The check is on by default. */
#define QUICK "-n 1 -w 0 --hidden 64 --experts 12 --top-k 3 --floor 0 "

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
        QUICK "--threads 3 -b 1 -e 16 -f 4 --mode latency --quant fp8 --split",
        QUICK "--threads 2 --tokens 20 --mode latency --rows-per-expert 2 --overflow drop",
        QUICK "--threads 3 -b 0 -e 20 -f 5 --mode latency --uneven --split",
        QUICK "--threads 3 --tokens 20 --mode latency --layout flat --quant mxfp8 --split",
        QUICK "--threads 3 --tokens 20 --mode latency --capacity 12 --overflow drop --align 1",
        QUICK "--threads 2 --tokens 20 --mode auto --quant fp8 --dtype fp32 --idx int64",
        QUICK "--threads 2 --tokens 20 --quant fp8-ue8m0 --dtype fp16 --layout batched",
        QUICK "--threads 2 --tokens 20 --quant mxfp8 --weighted 0 --zero-copy",
    };
    for (int i = 0; i < LENGTH(lines); i++)
        check_run(lines[i], 0, "#wrong 0", NULL);
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
        {"--mode latency --capacity 3000", "alignment 1, layout expert,"},
        {"--mode latency --tokens 3 --uneven", "uneven tokens"},
        {"--mode throughput --tokens 3", "alignment 128, layout expert,"},
        {"--mode auto --tokens 3", "alignment 128, layout expert,"},
    };
    char line[256];
    for (int i = 0; i < LENGTH(cases); i++) {
        snprintf(line, sizeof(line), QUICK "--threads 2 %s", cases[i].options);
        check_run(line, 0, cases[i].output, NULL);
    }
}

/* The output has the lines of every size, from one token on. */
SoloTest(tools_bench, latency_from_one_token) {
    ProcessResult result = run_bench(QUICK "--threads 2 -b 1 -e 512 -f 2 --mode latency");
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.err);
    for (int tokens = 1; tokens <= 512; tokens *= 2) {
        char line[64];
        snprintf(line, sizeof(line), "\n%9d  dispatch ", tokens);
        CHECK(strstr(result.out, line), "no '%s' in: %s", line, result.out);
        snprintf(line, sizeof(line), "\n# tokens %d: %d to %d per rank", tokens, tokens, tokens);
        CHECK(strstr(result.out, line), "no '%s' in: %s", line, result.out);
    }
    process_result_free(&result);
}

/* In latency mode the table has only dispatch and combine. */
SoloTest(tools_bench, phases_of_latency_mode) {
    ProcessResult result = run_bench(QUICK "--threads 2 --tokens 4 --mode latency");
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.err);
    CHECK(strstr(result.out, "mode latency, quant none"), "%s", result.out);
    CHECK(strstr(result.out, "  dispatch  ") && strstr(result.out, "  combine  "), "%s",
          result.out);
    CHECK(!strstr(result.out, "  prepare  ") && !strstr(result.out, "_backward"), "%s", result.out);
    process_result_free(&result);
}

/* A capacity that is too small ends the run, unless the overflow policy is drop. */
SoloTest(tools_bench, overflow_ends_the_run) {
    check_run(QUICK "--threads 2 --tokens 20 --capacity 3", 1, NULL, "at most 3 receive rows");
}

static void read_file(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "r");
    text[0] = 0;
    REQUIRE(file, "no file %s", path);
    text[fread(text, 1, size - 1, file)] = 0;
    fclose(file);
}

static void write_bytes(const char *path, const char *text, size_t bytes) {
    FILE *file = fopen(path, "w");
    REQUIRE(file, "cannot write %s", path);
    fwrite(text, 1, bytes, file);
    fclose(file);
}

static void write_file(const char *path, const char *text) {
    write_bytes(path, text, strlen(text));
}

SoloTest(tools_bench, json_has_the_documented_keys) {
    static const char *const keys[] = {"\"version\"",      "\"wrong\": 0",        "\"config\"",
                                       "\"machine\"",      "\"library_bytes\"",   "\"phases\"",
                                       "\"median_us\"",    "\"p99_us\"",          "\"name\"",
                                       "\"remote_bytes\"", "\"prepare\"",         "\"local_bytes\"",
                                       "\"floor_ratio\"",  "\"zero_copy\": true", "\"floor_us\"",
                                       "\"mem_us\"",       "\"memory_bytes\""};
    static char text[65536], line[256];
    char path[] = "/tmp/ep_tests_json_XXXXXX";
    close(mkstemp(path));
    snprintf(line, sizeof(line), QUICK "--floor 1 --threads 2 --tokens 10 --zero-copy -J %s", path);
    check_run(line, 0, "#wrong 0", NULL);
    read_file(path, text, sizeof(text));
    unlink(path);
    for (int i = 0; i < LENGTH(keys); i++)
        CHECK(strstr(text, keys[i]), "no %s: %s", keys[i], text);
    CHECK(!strstr(text, "\"wire_us\""), "the host has no wire: %s", text);
}

/* With --split each send and wait call is also timed alone. */
SoloTest(tools_bench, send_and_wait_are_reported) {
    static const char *const calls[] = {"dispatch_send", "dispatch_wait", "combine_send",
                                        "combine_wait"};
    static char text[65536], line[256];
    char path[] = "/tmp/ep_tests_json_XXXXXX";
    close(mkstemp(path));
    snprintf(line, sizeof(line), QUICK "--threads 2 --tokens 4 --mode latency --split -J %s", path);
    check_run(line, 0, "# split: dispatch_send ", NULL);
    read_file(path, text, sizeof(text));
    CHECK(strstr(text, "\"chain\": 20"), "no chain: %s", text);
    for (int i = 0; i < LENGTH(calls); i++) {
        snprintf(line, sizeof(line), "\"name\": \"%s\"", calls[i]);
        CHECK(strstr(text, line), "no %s: %s", line, text);
    }
    snprintf(line, sizeof(line), QUICK "--threads 2 --tokens 4 --mode latency -J %s", path);
    check_run(line, 0, "#wrong 0", NULL);
    read_file(path, text, sizeof(text));
    CHECK(!strstr(text, "split_phases\": [") && !strstr(text, "dispatch_send"),
          "unexpected phases: %s", text);
    unlink(path);
}

/* The remote bytes of dispatch. */
static long long dispatch_bytes(const char *options) {
    static char text[65536], line[256];
    char path[] = "/tmp/ep_tests_json_XXXXXX";
    long long bytes = -1;
    close(mkstemp(path));
    snprintf(line, sizeof(line), QUICK "--threads 2 --tokens 16 %s -J %s", options, path);
    check_run(line, 0, "#wrong 0", NULL);
    read_file(path, text, sizeof(text));
    unlink(path);
    const char *at = strstr(text, "\"dispatch\"");
    if (at) at = strstr(at, "\"remote_bytes\"");
    CHECK(at && sscanf(at, "\"remote_bytes\": %lld", &bytes) == 1, "no bytes: %s", text);
    return bytes;
}

/* Every token goes to the other rank once. The bytes include its weight and scales. */
SoloTest(tools_bench, weights_and_scales_are_counted) {
    static const char all[] = "--experts 2 --top-k 2 --hidden 64 --routing uniform";
    char line[160];
    static const struct {
        const char *options;
        long long bytes;
    } cases[] = {{"--weighted 0", 16 * 128},
                 {"--weighted 1", 16 * (128 + 4)},
                 {"--weighted 0 --scales 12", 16 * (128 + 12)},
                 {"--weighted 1 --scales 12", 16 * (128 + 12 + 4)}};
    for (int i = 0; i < LENGTH(cases); i++) {
        snprintf(line, sizeof(line), "%s %s", all, cases[i].options);
        long long bytes = dispatch_bytes(line);
        CHECK(bytes == cases[i].bytes, "'%s': %lld bytes", line, bytes);
    }
}

/* Rows of 128 bytes, 16 tokens on each of two ranks, half of each token's slots on either. */
typedef struct MemoryCase {
    const char *options;
    long long dispatch, combine, combine_backward, dispatch_backward; /* 0: no such phase */
} MemoryCase;

static const MemoryCase memory_cases[] = {
    /* One slot a rank: 16 rows read, 32 written; 32 read, 16 sums written and read, 16 written. */
    {"--experts 2 --top-k 2 --weighted 0 --align 1", 48 * 128, 80 * 128, 48 * 128, 80 * 128},
    /* Two slots a rank: the other rank's 16 rows are read again for their second slots. */
    {"--experts 4 --top-k 4 --weighted 0 --align 1", 96 * 128, 112 * 128, 96 * 128, 112 * 128},
    /* Flat: two entries share a slot, which has four local expert ids. */
    {"--experts 4 --top-k 4 --weighted 0 --layout flat", 48 * 128 + 32 * 16, 80 * 128, 48 * 128,
     80 * 128},
    /* Slabs of 128 rows have 96 of padding. */
    {"--experts 2 --top-k 2 --weighted 0 --align 128", 144 * 128, 80 * 128, 144 * 128, 80 * 128},
    /* Scales are part of a row. */
    {"--experts 2 --top-k 2 --weighted 0 --align 1 --scales 12", 48 * 140, 80 * 128, 48 * 128,
     80 * 128},
    /* Weights: 32 sent, 32 received; 32 of slots; gradients also on their way, and 32 written. Rows
     * that arrive are read and written once more, and 32 slots are read for the dot products. */
    {"--experts 2 --top-k 2 --align 1", 48 * 128 + 64 * 4, 80 * 128 + 32 * 4, 112 * 128 + 64 * 4,
     80 * 128 + (32 + 2 * 16 + 32) * 4},
    /* Latency mode also reads the 32 indices. */
    {"--experts 2 --top-k 2 --weighted 0 --mode latency", 48 * 128 + 32 * 4, 80 * 128, 0, 0},
    {"--experts 2 --top-k 2 --weighted 0 --mode latency --quant mxfp8",
     16 * 128 + 32 * (64 + 2) + 32 * 4, 80 * 128, 0, 0},
};

static void check_memory_bytes(const char *text, const char *phase, long long expected) {
    char name[64];
    long long bytes = 0;
    snprintf(name, sizeof(name), "\"name\": \"%s\"", phase);
    const char *at = strstr(text, name);
    const char *end = at ? strchr(at, '}') : NULL;
    if (at) at = strstr(at, "\"memory_bytes\"");
    if (at && at < end) sscanf(at, "\"memory_bytes\": %lld", &bytes);
    CHECK(bytes == expected, "%s: %lld bytes, not %lld", phase, bytes, expected);
}

/* What each phase reads from and writes to a GPU's memory follows from the routing. */
SoloTest(tools_bench, memory_bytes_are_counted) {
    static char text[65536], line[256];
    char path[] = "/tmp/ep_tests_json_XXXXXX";
    close(mkstemp(path));
    for (int i = 0; i < LENGTH(memory_cases); i++) {
        const MemoryCase *m = &memory_cases[i];
        snprintf(line, sizeof(line), QUICK "--routing uniform --threads 2 --tokens 16 %s -J %s",
                 m->options, path);
        check_run(line, 0, "#wrong 0", NULL);
        read_file(path, text, sizeof(text));
        check_note("%s", m->options);
        check_memory_bytes(text, "prepare", 0);
        check_memory_bytes(text, "dispatch", m->dispatch);
        check_memory_bytes(text, "combine", m->combine);
        check_memory_bytes(text, "combine_backward", m->combine_backward);
        check_memory_bytes(text, "dispatch_backward", m->dispatch_backward);
    }
    unlink(path);
}

/* ---- models ---- */

static char models_path[] = "/tmp/ep_tests_models_XXXXXX";

static void make_models_file(void) {
    close(mkstemp(models_path));
}

static void remove_models_file(void) {
    unlink(models_path);
}

TestSuite(tools_models, .init = make_models_file, .fini = remove_models_file);

#define TWO_MODELS "# two\n\n tiny\t64  2 4\r\nother 128 1 3 # at the end"

/* Options of every run below. */
#define MODELS "-n 1 -w 0 --floor 0 --threads 2 "

static const char *with_models(const char *options) {
    static char line[512];
    snprintf(line, sizeof(line), MODELS "%s --models %s", options, models_path);
    return line;
}

/* One table with a row for each model, mode, size and phase; one JSON file with a list. */
SoloTest(tools_models, both_modes_of_each) {
    static char text[262144], line[512];
    static const char *const rows[] = {
        "\ntiny                 throughput        16  dispatch ",
        "\ntiny                 throughput        32  combine_backward ",
        "\ntiny                 latency           32  combine ",
        "\nother                throughput        16  prepare ",
        "\nother                latency           16  dispatch ",
    };
    static const char *const keys[] = {
        "\"models\": [",         "\"model\": \"tiny\"", "\"model\": \"other\"", "\"hidden\": 128",
        "\"mode\": \"latency\"", "\"sweep\": [",        "\"wrong\": 0",         "\"models_file\""};
    char path[] = "/tmp/ep_tests_json_XXXXXX";
    close(mkstemp(path));
    write_file(models_path, TWO_MODELS);
    snprintf(line, sizeof(line), MODELS "-b 16 -e 32 -J %s --models=%s", path, models_path);
    ProcessResult result = run_bench(line);
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.err);
    CHECK(strstr(result.out, "\n#wrong 0\n"), "%s", result.out);
    CHECK(!strstr(result.out, "latency           16  prepare"), "%s", result.out);
    CHECK(result.err[0] == 0, "progress on what is no terminal: %s", result.err);
    for (int i = 0; i < LENGTH(rows); i++)
        CHECK(strstr(result.out, rows[i]), "no '%s' in: %s", rows[i], result.out);
    process_result_free(&result);
    read_file(path, text, sizeof(text));
    unlink(path);
    for (int i = 0; i < LENGTH(keys); i++)
        CHECK(strstr(text, keys[i]), "no %s: %s", keys[i], text);
}

SoloTest(tools_models, from_128_to_8192_tokens) {
    write_file(models_path, "tiny 8 1 2\n");
    ProcessResult result = run_bench(with_models("-c 0"));
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.err);
    for (int tokens = 128; tokens <= 8192; tokens *= 2) {
        char row[96];
        snprintf(row, sizeof(row), "\ntiny                 throughput %9d  dispatch ", tokens);
        CHECK(strstr(result.out, row), "no '%s' in: %s", row, result.out);
        snprintf(row, sizeof(row), "\ntiny                 latency    %9d  dispatch ", tokens);
        CHECK(strstr(result.out, row), "no '%s' in: %s", row, result.out);
    }
    CHECK(!strstr(result.out, " 16384  ") && !strstr(result.out, " 64  "), "%s", result.out);
    process_result_free(&result);
}

SoloTest(tools_models, one_mode_on_request) {
    write_file(models_path, TWO_MODELS);
    ProcessResult result = run_bench(with_models("--mode latency --split -b 8 -e 8"));
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.err);
    CHECK(strstr(result.out, "\ntiny                 latency "), "%s", result.out);
    CHECK(!strstr(result.out, "\ntiny                 throughput "), "%s", result.out);
    process_result_free(&result);
}

/* The file of this tree has the ten models, and is found without a name. */
SoloTest(tools_models, the_file_that_comes_along) {
    static const char *const names[] = {
        "deepseek-v3", "kimi-k2",         "qwen3-235b",   "gpt-oss-120b",   "glm-4.5",
        "minimax-m2",  "llama4-maverick", "mixtral-8x7b", "qwen3-next-80b", "latent-top-22"};
    ProcessResult result = run_bench("--models -b 1 -e 1 -n 1 -w 0 --floor 0 --threads 1");
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.err);
    for (int i = 0; i < LENGTH(names); i++)
        CHECK(strstr(result.out, names[i]), "no %s in: %s", names[i], result.out);
    process_result_free(&result);
}

/* A program in another folder says where it looked. */
SoloTest(tools_models, a_missing_file) {
    char folder[] = "/tmp/ep_tests_folder_XXXXXX", command[16384];
    REQUIRE(mkdtemp(folder), "no folder");
    char program[8192];
    snprintf(program, sizeof(program), "%s", build_path("ep_bench"));
    snprintf(command, sizeof(command),
             "cp %s %s/ep_bench && LD_LIBRARY_PATH=%.*s %s/ep_bench --threads 1 --models; s=$?; "
             "rm -r %s; exit $s",
             program, folder, (int)(strrchr(program, '/') - program), program, folder, folder);
    const char *argv[] = {"sh", "-c", command, NULL};
    ProcessResult result = process_run(argv, 0);
    CHECK(result.exit_status == 2, "exits with %d: %s", result.exit_status, result.err);
    CHECK(strstr(result.err, folder) && strstr(result.err, "../share/libep/models.txt") &&
              strstr(result.err, "../tools/models.txt"),
          "%s", result.err);
    process_result_free(&result);
}

typedef struct BadModels {
    const char *text;
    int line;
    const char *expected, *got;
} BadModels;

static const BadModels bad_models[] = {
    {"x 64 1\n", 1, "a number of experts from 1 to", "the end of the line"},
    {"x\n", 1, "a hidden size from 1 to", "the end of the line"},
    {"# x\nx 64 1 4 5\n", 2, "the end of the line", "\"5\""},
    {"x 64k 1 4\n", 1, "a hidden size", "\"64k\""},
    {"x 0 1 4\n", 1, "a hidden size", "\"0\""},
    {"x 64 +1 4\n", 1, "a top-k from 1 to 32", "\"+1\""},
    {"x 64 33 40\n", 1, "a top-k from 1 to 32", "\"33\""},
    {"x 64 -1 4\n", 1, "a top-k", "\"-1\""},
    {"x 64 1 99999999999999999999\n", 1, "a number of experts", "\"99999999999999999999\""},
    {"x 64 5 4\n", 1, "at most the 4 experts", "got 5"},
    {"x 64 1 4\n\nx 128 1 4\n", 3, "a name that no other line has", "\"x\""},
    {"x 7 1 4\n", 1, "a multiple of 16 bytes", "14 bytes"},
    {"x 65536 1 4\n", 1, "65536", "131072 bytes"},
    {"x\033 64 1 4\n", 1, "printable", "\"x?\""},
    {"a23456789b123456789c123456789d123456789e123456789f123456789g1234 64 1 4\n", 1,
     "at most 63 letters", "\"a2345"},
};

SoloTest(tools_models, bad_lines_are_refused) {
    for (int i = 0; i < LENGTH(bad_models); i++) {
        const BadModels *bad = &bad_models[i];
        char where[128];
        write_file(models_path, bad->text);
        snprintf(where, sizeof(where), "%s:%d: ", models_path, bad->line);
        check_note("file %d", i);
        check_run(with_models(""), 2, NULL, where);
        check_run(with_models(""), 2, NULL, bad->expected);
        check_run(with_models(""), 2, NULL, bad->got);
    }
    static const char zero[] = "x 64 1 4\0 5\n";
    write_bytes(models_path, zero, sizeof(zero) - 1);
    check_run(with_models(""), 2, NULL, "zero byte");
}

/* Where stderr is a terminal, a line says what is being measured. */
SoloTest(tools_models, progress_on_a_terminal) {
    char command[16384], text[4096];
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    REQUIRE(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0, "no terminal");
    int other = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    write_file(models_path, TWO_MODELS);
    snprintf(command, sizeof(command), "%s %s 2>%s", build_path("ep_bench"),
             with_models("-b 4 -e 8"), ptsname(terminal));
    const char *argv[] = {"sh", "-c", command, NULL};
    ProcessResult result = process_run(argv, 0);
    fcntl(terminal, F_SETFL, O_NONBLOCK);
    ssize_t bytes = read(terminal, text, sizeof(text) - 1);
    text[bytes > 0 ? bytes : 0] = 0;
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, text);
    CHECK(strstr(text, "1 of 8: tiny, throughput, 4 tokens"), "%s", text);
    CHECK(strstr(text, "8 of 8: other, latency, 8 tokens"), "%s", text);
    CHECK(!strstr(result.out, " of 8: "), "%s", result.out);
    process_result_free(&result);
    close(other);
    close(terminal);
}

/* ---- trace files ---- */

static char trace_path[] = "/tmp/ep_tests_trace_XXXXXX";

static void make_trace_file(void) {
    close(mkstemp(trace_path));
}

static void remove_trace_file(void) {
    unlink(trace_path);
}

TestSuite(tools_trace, .init = make_trace_file, .fini = remove_trace_file);

static const char *with_trace(const char *options) {
    static char line[512];
    snprintf(line, sizeof(line), QUICK "%s%s", options, trace_path);
    return line;
}

/* A trace that is saved, used and saved again is the same file. */
SoloTest(tools_trace, round_trip) {
    static char first[65536], again[65536], line[512];
    check_run(with_trace("--threads 2 --tokens 25 --uneven --masked 0.2 --save-routing "), 0,
              "#wrong 0", NULL);
    read_file(trace_path, first, sizeof(first));
    CHECK(strncmp(first, "ep-routing 1\nexperts 12 top_k 3 ranks 2\ntokens 25\n", 48) == 0, "%.80s",
          first);
    snprintf(line, sizeof(line), QUICK "--threads 2 --routing file:%s --save-routing %s",
             trace_path, trace_path);
    check_run(line, 0, "#wrong 0", NULL);
    read_file(trace_path, again, sizeof(again));
    CHECK(strcmp(first, again) == 0, "changed to: %.200s", again);
}

/* A trace written by hand, with a duplicate and masked entries. */
SoloTest(tools_trace, written_by_hand) {
    write_file(trace_path, "ep-routing 1\nexperts 12 top_k 3 ranks 2\n"
                           "tokens 2\n0 11 -1\n5 5 5\ntokens 0\n");
    check_run(with_trace("--threads 2 --routing file:"), 0, "#wrong 0", NULL);
}

typedef struct BadTrace {
    const char *text;
    int line;
    const char *message;
} BadTrace;

#define HEAD "ep-routing 1\nexperts 12 top_k 3 ranks 2\n"

static const BadTrace bad_traces[] = {
    {"", 1, "end of the file"},
    {"something else\n", 1, "something else"},
    {"ep-routing 2\n", 1, "2"},
    {"ep-routing 1\n", 2, "end of the file"},
    {"ep-routing 1\nexperts 13 top_k 3 ranks 2\n", 2, "13"},
    {"ep-routing 1\nexperts 12 top_k 4 ranks 2\n", 2, "4"},
    {"ep-routing 1\nexperts 12 top_k 3 ranks 5\n", 2, "5"},
    {HEAD, 3, "end of the file"},
    {HEAD "tokens -1\n", 3, "-1"},
    {HEAD "tokens x\n", 3, "x"},
    {HEAD "tokens 99999999999\n", 3, "99999999999"},
    {HEAD "tokens 2\n0 1 2\n", 5, "end of the file"},
    {HEAD "tokens 1\n0 1 2", 4, "end of the file"},
    {HEAD "tokens 1\n0 1\n", 4, ""},
    {HEAD "tokens 1\n0 1 2 3\n", 4, "3"},
    {HEAD "tokens 1\n0 1 12\n", 4, "12"},
    {HEAD "tokens 1\n0 1 two\n", 4, "two"},
    {HEAD "tokens 1\n0 1 2\n", 5, "end of the file"},
    {HEAD "tokens 0\ntokens 0\ntokens 0\n", 5, "more"},
    {HEAD "tokens +1\n", 3, "+1"},
    {HEAD "tokens 1\n0 +1 2\n", 4, "+1"},
    {HEAD "tokens 1\n0 - 2\n", 4, "- 2"},
    {HEAD "tokens 1\n0 -+1 2\n", 4, "-+1"},
};

/* Bytes behind a zero byte would otherwise be ignored. */
SoloTest(tools_trace, zero_bytes_are_refused) {
    static const char behind[] = HEAD "tokens 1\n0 1 2\0 3 4 5\ntokens 0\n";
    static const char last[] = HEAD "tokens 1\n0 1 2\ntokens 0\0\n";
    char where[128];
    write_bytes(trace_path, behind, sizeof(behind) - 1);
    snprintf(where, sizeof(where), "%s:4: ", trace_path);
    check_run(with_trace("--threads 2 --routing file:"), 2, NULL, where);
    check_run(with_trace("--threads 2 --routing file:"), 2, NULL, "zero byte");
    write_bytes(trace_path, last, sizeof(last) - 1);
    snprintf(where, sizeof(where), "%s:5: ", trace_path);
    check_run(with_trace("--threads 2 --routing file:"), 2, NULL, where);
}

SoloTest(tools_trace, bad_traces_are_refused) {
    for (int i = 0; i < LENGTH(bad_traces); i++) {
        char where[128];
        write_file(trace_path, bad_traces[i].text);
        snprintf(where, sizeof(where), "%s:%d: ", trace_path, bad_traces[i].line);
        check_note("trace %d", i);
        check_run(with_trace("--threads 2 --routing file:"), 2, NULL, where);
        check_run(with_trace("--threads 2 --routing file:"), 2, NULL, bad_traces[i].message);
    }
}

SoloTest(tools_trace, a_folder_is_refused) {
    check_run("--threads 2 --routing file:/tmp", 2, NULL, "/tmp");
}

/* ---- under mpirun ---- */

static void check_mpirun(int ranks, const char *option, const char *value, int exit_status,
                         const char *output) {
    char count[16];
    snprintf(count, sizeof(count), "%d", ranks);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    const char *argv[] = {"mpirun",
                          "--oversubscribe",
                          "--bind-to",
                          "none",
                          "--timeout",
                          "60",
                          "-n",
                          count,
                          build_path("ep_bench"),
                          "-n",
                          "1",
                          "-w",
                          "0",
                          "--hidden",
                          "64",
                          option,
                          value,
                          NULL};
    ProcessResult result = process_run(argv, 1);
    CHECK(result.exit_status == exit_status, "exit status %d: %s", result.exit_status, result.out);
    CHECK(strstr(result.out, output), "no '%s' in: %s", output, result.out);
    process_result_free(&result);
}

SoloTest(mpi_bench, correct_with_and_without_baseline) {
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    check_mpirun(2, "--tokens", "16", 0, "#wrong 0");
    check_mpirun(3, "--baseline", NULL, 0, "#wrong 0");
}

SoloTest(mpi_bench, bad_options_are_refused) {
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    check_mpirun(2, "--tokens", "many", 2, "\"many\"");
}

/* A rank is killed behind mpirun's back. The others name it, and do not wait for it again: from the
 * library's warning on, they meet for 5 more seconds. */
SoloTest(mpi_bench, a_killed_rank_is_named_in_time) {
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    char script[4600], log[] = "/tmp/ep_tests_log_XXXXXX";
    struct stat warned;
    close(mkstemp(log));
    snprintf(script, sizeof(script),
             "%s -n 1000000 --hidden 64 --tokens 16 & p=$!; "
             "if [ $OMPI_COMM_WORLD_RANK = 1 ]; then sleep 2; kill -9 $p; exec sleep 60; fi; "
             "wait $p",
             build_path("ep_bench"));
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("LIBEP_TIMEOUT", "9", 1);
    setenv("LIBEP_LOG_FILE", log, 1);
    const char *argv[] = {"mpirun",    "--oversubscribe",
                          "--bind-to", "none",
                          "--timeout", "60",
                          "-n",        "3",
                          "sh",        "-c",
                          script,      NULL};
    ProcessResult result = process_run(argv, 1);
    CHECK(stat(log, &warned) == 0, "no file %s", log);
    double seconds = difftime(time(NULL), warned.st_mtime);
    unlink(log);
    unsetenv("LIBEP_LOG_FILE");
    unsetenv("LIBEP_TIMEOUT");
    CHECK(warned.st_size > 0 && seconds < 12, "took %g s: %s", seconds, result.out);
    const char *said = strstr(result.out, "ep_bench: rank ");
    CHECK(said && strstr(said, ": rank 1 did not arrive within 9 s"), "%s", result.out);
    CHECK(!strstr(result.out, "within 14 s"), "waited twice: %s", result.out);
    process_result_free(&result);
}
