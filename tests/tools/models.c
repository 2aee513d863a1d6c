/* SPDX-License-Identifier: Apache-2.0 */
/* ep_bench --models: the shapes of a file, in both modes; invalid files are refused. */
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

/* A row for each model, mode, size and phase; one JSON file with a list. One mode on request. */
SoloTest(tools_models, both_modes_of_each) {
    static const char *const keys[] = {
        "\"models\": [",         "\"model\": \"tiny\"", "\"model\": \"other\"", "\"hidden\": 128",
        "\"mode\": \"latency\"", "\"sweep\": [",        "\"wrong\": 0",         "\"models_file\""};
    write_file(models_path, TWO_MODELS);
    check_words(run_json("ep_bench", with_models("-b 16 -e 32"), "\n#wrong 0\n"), keys,
                LENGTH(keys));
    const char *text =
        run_json("ep_bench", with_models("--mode latency --split -b 8 -e 8"), "\n#wrong 0\n");
    CHECK(strstr(text, "\"latency\"") && !strstr(text, "\"throughput\""), "%s", text);
}

/* Tokens of its own, with floors. Of 128 rows of the only expert one is a slot: 127 of 512 bytes
 * are padding. */
SoloTest(tools_models, floors) {
    static const char *const keys[] = {"\"zero_bytes\": 65024", "\"floor_is\": \"memory\""};
    char line[256];
    write_file(models_path, "one 256 1 1\n");
    snprintf(line, sizeof(line), "-n 1 -w 0 --threads 1 --tokens 1 --models=%s", models_path);
    check_words(run_json("ep_bench", line, NULL), keys, LENGTH(keys));
}

SoloTest(tools_models, from_128_to_8192_tokens) {
    static const char *const keys[] = {"\"tokens\": 128", "\"tokens\": 1024", "\"tokens\": 8192"};
    write_file(models_path, "tiny 8 1 2\n");
    const char *text = run_json("ep_bench", with_models("-c 0"), NULL);
    check_words(text, keys, LENGTH(keys));
    CHECK(!strstr(text, "\"tokens\": 64,") && !strstr(text, "\"tokens\": 16384"), "%s", text);
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
