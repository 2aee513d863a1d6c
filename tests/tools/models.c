/* SPDX-License-Identifier: Apache-2.0 */
/* ep_bench --models: the shapes of a file, in both modes; invalid files are refused. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/tools/run_bench.h"

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
    static const char *const lines[] = {"\n# 16 tokens, throughput: median_us, ",
                                        "\n# 32 tokens, latency: median_us, ",
                                        "\n# tiny                     64     2       4   ",
                                        "\n# other                   128     1       3   "};
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
    for (int i = 0; i < LENGTH(lines); i++)
        CHECK(strstr(result.out, lines[i]), "no '%s' in: %s", lines[i], result.out);
    process_result_free(&result);
    read_file(path, text, sizeof(text));
    unlink(path);
    for (int i = 0; i < LENGTH(keys); i++)
        CHECK(strstr(text, keys[i]), "no %s: %s", keys[i], text);
}

/* Tokens of its own, with floors: the table has ratios, and the share of padding. One of 128 rows
 * of the only expert is a slot. */
SoloTest(tools_models, table_with_floors) {
    static char text[262144];
    char path[] = "/tmp/ep_tests_json_XXXXXX", line[256];
    close(mkstemp(path));
    write_file(models_path, "one 256 1 1\n");
    snprintf(line, sizeof(line), "-n 1 -w 0 --threads 1 --tokens 1 -J %s --models=%s", path,
             models_path);
    ProcessResult result = run_bench(line);
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, result.err);
    const char *row = strstr(result.out, "\n# one                     256     1       1   99.2  ");
    CHECK(row, "%s", result.out);
    double us = 0, ratio = 0;
    char bound = 0;
    CHECK(row && sscanf(strstr(row, "99.2") + 4, "%lf %lf%c", &us, &ratio, &bound) == 3 && us > 0 &&
              ratio > 0 && bound == 'm',
          "%g %g %c", us, ratio, bound);
    process_result_free(&result);
    read_file(path, text, sizeof(text));
    unlink(path);
    CHECK(strstr(text, "\"zero_bytes\": 65024"), "%s", text); /* 127 rows of 512 bytes */
    CHECK(strstr(text, "\"floor_is\": \"memory\""), "%s", text);
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

/* Read what has been written to a terminal, up to what follows `last`. The kernel passes it on in
 * its own time. */
static void read_terminal(int terminal, const char *last, char *text, size_t bytes) {
    size_t length = 0;
    struct pollfd wait = {terminal, POLLIN, 0};
    text[0] = 0;
    while (!strstr(text, last) && length + 1 < bytes && poll(&wait, 1, 10000) > 0) {
        ssize_t got = read(terminal, text + length, bytes - 1 - length);
        if (got <= 0) break;
        text[length += (size_t)got] = 0;
    }
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
    read_terminal(terminal, "8 of 8: other, latency, 8 tokens", text, sizeof(text));
    CHECK(result.exit_status == 0, "exits with %d: %s", result.exit_status, text);
    CHECK(strstr(text, "1 of 8: tiny, throughput, 4 tokens"), "%s", text);
    CHECK(strstr(text, "8 of 8: other, latency, 8 tokens"), "%s", text);
    CHECK(!strstr(result.out, " of 8: "), "%s", result.out);
    process_result_free(&result);
    close(other);
    close(terminal);
}
