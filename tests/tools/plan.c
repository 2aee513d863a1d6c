/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of ep_info: the model against the figures of docs/performance.md, and its odds. */
#include <math.h>
#include <unistd.h>

#include "tests/tools/run_bench.h"

/* Microseconds that were measured; 0: not. */
typedef struct Measured {
    const char *line, *mode; /* what is planned, and the heading of its times */
    double prepare, dispatch, combine;
} Measured;

#define ONE(ranks, experts, tokens) \
    "--ranks " #ranks " --experts " #experts " --tokens " #tokens, "  throughput\n"
#define LATENCY(ranks, experts, tokens) \
    "--ranks " #ranks " --experts " #experts " --tokens " #tokens, "  latency\n"
#define MODEL(hidden, top_k, experts)                                                      \
    "--ranks 4 --tokens 8192 --hidden " #hidden " --top-k " #top_k " --experts " #experts, \
        "  throughput\n"
#define NODES(nodes, tokens, network)                                        \
    "--ranks 4 --nodes " #nodes " --tokens " #tokens " --network " #network, \
        "static sizes, "                                                     \
        "node_rows " #tokens " (all)\n"

static const Measured measured[] = {
    {ONE(4, 256, 128), 14.8, 50, 42},           {ONE(4, 256, 256), 14.7, 52, 57},
    {ONE(4, 256, 512), 14.8, 80, 85},           {ONE(4, 256, 1024), 14.7, 139, 141},
    {ONE(4, 256, 2048), 14.7, 251, 252},        {ONE(4, 256, 4096), 15.7, 476, 475},
    {ONE(4, 256, 8192), 17.6, 922, 918},        {ONE(4, 256, 16384), 23.5, 1818, 1807},
    {ONE(2, 128, 128), 13.8, 41, 31},           {ONE(2, 128, 256), 13.9, 44, 37},
    {ONE(2, 128, 512), 13.9, 47, 50},           {ONE(2, 128, 1024), 14.0, 69, 74},
    {ONE(2, 128, 2048), 14.0, 109, 116},        {ONE(2, 128, 4096), 14.5, 190, 189},
    {ONE(2, 128, 8192), 15.5, 351, 350},        {ONE(2, 128, 16384), 20.5, 676, 673},
    {ONE(1, 256, 8192), 0, 366, 259},           {MODEL(4096, 8, 128), 0, 543, 539},
    {MODEL(2880, 4, 128), 0, 301, 300},         {MODEL(5120, 8, 160), 0, 669, 665},
    {MODEL(3072, 8, 256), 0, 413, 410},         {MODEL(5120, 1, 128), 0, 204, 202},
    {MODEL(4096, 2, 8), 0, 289, 288},           {MODEL(2048, 10, 512), 0, 303, 298},
    {MODEL(4096, 22, 512), 0, 616, 607},        {LATENCY(4, 256, 1), 0, 6.5, 5.1},
    {LATENCY(4, 256, 8), 0, 6.8, 5.9},          {LATENCY(4, 256, 16), 0, 7.0, 6.7},
    {LATENCY(4, 256, 32), 0, 8.9, 9.5},         {LATENCY(4, 256, 64), 0, 13.6, 14.0},
    {LATENCY(4, 256, 128), 0, 21.9, 22.2},      {LATENCY(4, 256, 256), 0, 38.6, 39.7},
    {LATENCY(4, 256, 512), 0, 69.6, 74.4},      {LATENCY(2, 128, 1), 0, 6.6, 5.4},
    {LATENCY(2, 128, 16), 0, 7.2, 6.2},         {LATENCY(2, 128, 32), 0, 7.3, 6.7},
    {LATENCY(2, 128, 64), 0, 9.2, 8.1},         {LATENCY(2, 128, 128), 0, 12.3, 13.4},
    {LATENCY(2, 128, 256), 0, 21.3, 20.2},      {LATENCY(2, 128, 512), 0, 38.6, 38.4},
    {NODES(2, 16, nvlink), 43, 52, 55},         {NODES(2, 128, nvlink), 52, 114, 100},
    {NODES(2, 512, nvlink), 53, 264, 222},      {NODES(4, 8192, nvlink), 0, 1639, 1617},
    {NODES(2, 8192, sockets), 0, 50100, 48000},
};

static void check_time(const char *section, const char *what, double expected) {
    const char *at = strstr(section, what);
    double us = at ? strtod(at + strlen(what), NULL) : 0;
    CHECK(!expected || fabs(us - expected) <= 0.15 * expected, "%s: %g us, measured %g", what, us,
          expected);
}

SoloTest(tools_plan, model_within_15_percent) {
    for (int i = 0; i < LENGTH(measured); i++) {
        const Measured *m = &measured[i];
        char line[200];
        snprintf(line, sizeof(line), "--plan uniform %s", m->line);
        ProcessResult result = run_tool("ep_info", line);
        const char *section = strstr(result.out, m->mode);
        check_note("%s, %s", line, m->mode);
        REQUIRE(result.exit_status == 0 && section, "%s%s", result.out, result.err);
        check_time(section, "prepare", m->prepare);
        check_time(section, "dispatch", m->dispatch);
        check_time(section, "combine", m->combine);
        process_result_free(&result);
    }
}

static void check_plan(const char *line, const char *in_out) {
    check_tool("ep_info", line, 0, in_out, NULL);
}

/* Of two experts on two nodes a token names one: a message of 3 tokens has more than 2 with odds of
 * 1/8, and any of two such messages with odds of 15/64. */
SoloTest(tools_plan, odds_and_proposals) {
    const char *coins = "--plan uniform --ranks 2 --nodes 2 --experts 2 --top-k 1 --tokens 3 "
                        "--node-rows 2";
    check_plan(coins, "node_rows 2 (given)");
    check_plan(coins, "      0.23 odds of too few places in a step; 0.25 of 6 tokens lost");
    check_plan("--plan uniform --ranks 128 --nodes 16 --tokens 8192", "(proposed)");
    check_plan("--plan uniform --ranks 4096 --nodes 512 --experts 4096", "4096 ranks on 512 nodes");
    check_plan("--plan zipf:1.2 --ranks 64 --nodes 8 --capacity 4000", "capacity of 4000 rows: ");
    /* 320 ranks in latency mode with two sets: less than 1 GB. */
    check_plan("--plan uniform --ranks 320 --nodes 40 --experts 320 --sets 2",
               "latency mode with 2 sets 316.3 MB");
}

SoloTest(tools_plan, traces) {
    const char *path = temporary_file();
    write_file(path, "ep-routing 1\nexperts 4 top_k 2 ranks 2\ntokens 3\n0 1\n2 -1\n3 2\ntokens "
                     "1\n0 2\n");
    char line[4200];
    snprintf(line, sizeof(line), "--plan %s --nodes 2", path);
    check_plan(line, "2 ranks on 2 nodes, 3 tokens a rank, top-2 of 4 experts");
    check_plan(line, "the fullest message of the trace has 2 tokens");
    snprintf(line, sizeof(line), "--plan file:%s --nodes 2 --ranks 4 --tokens 90", path);
    check_plan(line, "4 ranks on 2 nodes, 90 tokens a rank, top-2 of 4 experts");
    unlink(path);
}

static const BadOptions bad_options[] = {
    {"--plan uniform --ranks 4097", "\"4097\""},
    {"--plan uniform --ranks 6 --nodes 4", "--nodes: expected a divisor of the 6 ranks"},
    {"--plan uniform --nodes 2", "got 2"},
    {"--plan uniform --network fast", "nvlink or sockets, got \"fast\""},
    {"--plan uniform --node-rows 0", "\"0\""},
    {"--plan uniform --tokens 8 --node-rows 9", "--node-rows: expected 1 .. 8 tokens, got 9"},
    {"--plan uniform --experts 4", "--top-k: expected at most the 4 experts, got 8"},
    {"--plan zipf:x", "got \"zipf:x\""},
    {"--plan /nowhere/trace", "cannot read /nowhere/trace"},
    {"--nodes 2", "with --plan"},
    {"--ranks 1025", "expected 1 .. 1024 without --plan, got 1025"},
};

SoloCall(tools_plan, bad_options_are_refused,
         check_bad_options("ep_info", bad_options, LENGTH(bad_options)));
