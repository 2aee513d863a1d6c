/* SPDX-License-Identifier: Apache-2.0 */
/* Trace files of ep_bench survive a round trip; invalid ones are refused. */
#include "tests/tools/run_bench.h"

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

/* /dev/zero is one line without an end. */
SoloCall(tools_trace, endless_lines_are_refused,
         check_run("--threads 2 --routing file:/dev/zero", 2, NULL, "a line of less than 4096"));
SoloCall(tools_trace, a_folder_is_refused,
         check_run("--threads 2 --routing file:/tmp", 2, NULL, "/tmp"));
