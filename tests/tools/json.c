/* SPDX-License-Identifier: Apache-2.0 */
/* What ep_bench writes as JSON: keys, phases, and the bytes that each phase moves. */
#include "tests/tools/run_bench.h"

SoloTest(tools_bench, json_has_the_documented_keys) {
    static const char *const keys[] = {"\"format\": \"ep_bench 1\"",
                                       "\"version\"",
                                       "\"wrong\": 0",
                                       "\"config\"",
                                       "\"machine\"",
                                       "\"library_bytes\"",
                                       "\"phases\"",
                                       "\"median_us\"",
                                       "\"p99_us\"",
                                       "\"name\"",
                                       "\"remote_bytes\"",
                                       "\"prepare\"",
                                       "\"local_bytes\"",
                                       "\"floor_ratio\"",
                                       "\"zero_copy\": true",
                                       "\"floor_us\"",
                                       "\"mem_us\"",
                                       "\"memory_bytes\""};
    const char *text =
        run_json("ep_bench", QUICK "--floor 1 --threads 2 --tokens 10 --zero-copy --backend host",
                 "#wrong 0");
    check_words(text, keys, LENGTH(keys));
    CHECK(!strstr(text, "\"wire_us\""), "the host has no wire: %s", text);
}

/* The host's time of steps that each make a handle, in the output and as JSON, in both modes. */
SoloTest(tools_bench, new_handles_are_timed) {
    static const char *const modes[] = {"throughput", "latency", "latency --split",
                                        "latency --layout rank-major --quant fp8"};
    char line[256];
    for (int i = 0; i < LENGTH(modes); i++) {
        double step_us = -1, destroy_us = -1;
        snprintf(line, sizeof(line), QUICK "--threads 2 --tokens 6 -n 3 --mode %s", modes[i]);
        check_note("--mode %s", modes[i]);
        const char *text =
            run_json("ep_bench", line, "\n# tokens 6: new handle, prepare and dispatch ");
        const char *at = strstr(text, "\"new_handle\"");
        CHECK(at && sscanf(at, "\"new_handle\": { \"median_us\": %lf, \"destroy_us\": %lf }",
                           &step_us, &destroy_us) == 2,
              "no times: %s", text);
        CHECK(step_us > 0 && destroy_us >= 0, "%g and %g us", step_us, destroy_us);
    }
}

/* With --split each send and wait call is also timed alone. */
SoloTest(tools_bench, send_and_wait_are_reported) {
    static const char *const calls[] = {"\"chain\": 20", "\"name\": \"dispatch_send\"",
                                        "\"name\": \"dispatch_wait\"", "\"name\": \"combine_send\"",
                                        "\"name\": \"combine_wait\""};
    const char *text = run_json("ep_bench", QUICK "--threads 2 --tokens 4 --mode latency --split",
                                "# split: dispatch_send ");
    check_words(text, calls, LENGTH(calls));
    text = run_json("ep_bench", QUICK "--threads 2 --tokens 4 --mode latency", "#wrong 0");
    CHECK(!strstr(text, "split_phases\": [") && !strstr(text, "dispatch_send"),
          "unexpected phases: %s", text);
}

/* A pair has the bytes of dispatch and combine: 128 for each row, and a weight. */
SoloTest(tools_bench, pairs_are_reported) {
    static const char *const words[] = {"\"pairs\": {", "\"name\": \"pair\"",
                                        "\"remote_bytes\": 4160", "\"local_bytes\": 4160"};
    const char *text =
        run_json("ep_bench", QUICK "--experts 2 --top-k 2 --threads 2 --tokens 16 --pair", "pair ");
    check_words(text, words, LENGTH(words));
    CHECK(!strstr(text, "speedup"), "compared with nothing: %s", text);
}

/* The remote bytes of dispatch. */
static long long dispatch_bytes(const char *options) {
    char line[256];
    long long bytes = -1;
    snprintf(line, sizeof(line), QUICK "--threads 2 --tokens 16 %s", options);
    const char *text = run_json("ep_bench", line, "#wrong 0");
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
    char line[256];
    for (int i = 0; i < LENGTH(memory_cases); i++) {
        const MemoryCase *m = &memory_cases[i];
        snprintf(line, sizeof(line), QUICK "--routing uniform --threads 2 --tokens 16 %s",
                 m->options);
        const char *text = run_json("ep_bench", line, "#wrong 0");
        check_note("%s", m->options);
        check_memory_bytes(text, "prepare", 0);
        check_memory_bytes(text, "dispatch", m->dispatch);
        check_memory_bytes(text, "combine", m->combine);
        check_memory_bytes(text, "combine_backward", m->combine_backward);
        check_memory_bytes(text, "dispatch_backward", m->dispatch_backward);
    }
}
