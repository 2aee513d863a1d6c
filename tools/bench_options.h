/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

/** What the command line asks for. One table in bench_options.c feeds the parser and the help. */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ep/ep.h"

typedef enum RoutingKind {
    ROUTING_UNIFORM = 1, /**< K distinct experts, all equally likely */
    ROUTING_ZIPF,        /**< K distinct experts, likelihood 1 / (popularity rank) ^ s */
    ROUTING_ONE_HOT,     /**< every token to one and the same expert */
    ROUTING_FILE         /**< a trace file */
} RoutingKind;

typedef struct Options {
    int64_t tokens_begin, tokens_end, tokens_factor; /**< sweep of tokens per rank */
    bool tokens_given;                               /**< any of -b, -e, --tokens */
    bool uneven; /**< ranks bring between half and all of them */
    int64_t iterations, warmup;
    int64_t check;
    bool graphs;
    int64_t chain; /**< repetitions of a call in a graph */
    const char *json_path;
    int64_t hidden, top_k, experts;
    int64_t alignment; /**< 0 until it is completed, as are layout and chain */
    int64_t type;      /**< EpType of the rows */
    RoutingKind routing;
    double zipf_exponent;
    const char *routing_path, *save_path;
    double masked; /**< share of entries that name no expert */
    int64_t capacity;
    int64_t overflow; /**< EpOverflow */
    int64_t layout;   /**< EpLayout */
    int64_t rows_per_expert;
    int64_t weighted;
    int64_t scale_bytes;
    int64_t index_type; /**< EpType of topk_idx */
    int64_t backend;    /**< EpBackend */
    int64_t mode;       /**< EpMode */
    int64_t quant;      /**< EpQuant */
    bool halves;        /**< latency mode: dispatch and combine in two halves each */
    bool baseline;
    int64_t floor;
    int64_t seed;
    int64_t num_sms;
    bool zero_copy;
    int64_t threads;
    bool help, version;
} Options;

/** Defaults, then the command line. False, with a sentence, for anything that makes no sense. */
bool options_parse(Options *options, int argc, char **argv);

/** The two steps after parsing: what the command line leaves open; what does not go together. */
void options_complete(Options *options);
bool options_validate(const Options *options);

void options_print_help(FILE *out);

/** Name of a value as the command line would spell it, e.g. "bf16", "expert". */
const char *options_type_name(int64_t type);
const char *options_layout_name(int64_t layout);
const char *options_overflow_name(int64_t overflow);
const char *options_backend_name(int64_t backend);
const char *options_mode_name(int64_t mode);
const char *options_quant_name(int64_t quant);

/** "zipf:1.2", "file:trace.txt", ... */
void options_routing_name(const Options *options, char *out, size_t bytes);

#endif
