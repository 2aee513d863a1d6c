/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/tools/run_bench.h"

enum { MOST_WORDS = 40 };

/* Append the words of a line, and NULL. */
static void append_words(const char **argv, const char *line) {
    static char words[2048];
    snprintf(words, sizeof(words), "%s", line);
    int count = 0;
    for (char *w = strtok(words, " "); w && count < MOST_WORDS; w = strtok(NULL, " "))
        argv[count++] = w;
    argv[count] = NULL;
}

ProcessResult run_tool(const char *tool, const char *line) {
    const char *argv[MOST_WORDS + 2] = {build_path(tool)};
    append_words(argv + 1, line);
    return process_run(argv, 0);
}

void check_mpirun(int ranks, const char *tool, const char *line, int exit_status,
                  const char *const *words, int n) {
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    const char *argv[MOST_WORDS + 2] = {build_path(tool)};
    append_words(argv + 1, line);
    ProcessResult result = mpirun_run(ranks, 60, argv);
    CHECK(result.exit_status == exit_status, "exit status %d: %s", result.exit_status, result.out);
    check_words(result.out, words, n);
    process_result_free(&result);
}

ProcessResult run_bench(const char *line) {
    return run_tool("ep_bench", line);
}

void check_tool(const char *tool, const char *line, int exit_status, const char *in_out,
                const char *in_err) {
    ProcessResult result = run_tool(tool, line);
    CHECK(result.exit_status == exit_status, "'%s' exits with %d, not %d: %s", line,
          result.exit_status, exit_status, result.err);
    if (in_out) CHECK(strstr(result.out, in_out), "'%s': no '%s' in: %s", line, in_out, result.out);
    if (in_err) CHECK(strstr(result.err, in_err), "'%s': no '%s' in: %s", line, in_err, result.err);
    if (exit_status == 2)
        CHECK(!strstr(result.out, "#wrong 0"), "'%s' claims success: %s", line, result.out);
    process_result_free(&result);
}

void check_run(const char *line, int exit_status, const char *in_out, const char *in_err) {
    check_tool("ep_bench", line, exit_status, in_out, in_err);
}

void check_bad_options(const char *tool, const BadOptions *options, int n) {
    for (int i = 0; i < n; i++)
        check_tool(tool, options[i].line, 2, NULL, options[i].message);
}

const char *run_json(const char *tool, const char *line, const char *in_out) {
    static char text[262144], words[1024];
    const char *path = temporary_file();
    snprintf(words, sizeof(words), "%s -J %s", line, path);
    check_tool(tool, words, 0, in_out, NULL);
    read_file(path, text, sizeof(text));
    unlink(path);
    return text;
}

void check_words(const char *text, const char *const *words, int n) {
    for (int i = 0; i < n; i++)
        CHECK(strstr(text, words[i]), "no %s: %s", words[i], text);
}

void write_bytes(const char *path, const char *text, size_t bytes) {
    FILE *file = fopen(path, "w");
    REQUIRE(file, "cannot write %s", path);
    fwrite(text, 1, bytes, file);
    fclose(file);
}

void write_file(const char *path, const char *text) {
    write_bytes(path, text, strlen(text));
}
