/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

/** The command line. One table in options.c feeds the parser and the help. */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ep/ep.h"
#include "tools/common/option.h"

typedef enum RoutingKind {
    ROUTING_UNIFORM = 1, /**< K distinct experts, all equally likely */
    ROUTING_ZIPF,        /**< K distinct experts, likelihood 1 / (popularity rank) ^ s */
    ROUTING_ONE_HOT,     /**< every token to the same expert */
    ROUTING_FILE         /**< a trace file */
} RoutingKind;

/** What is measured: the calls of a step, or something else. */
typedef enum BenchCase {
    CASE_STEP = 1,
    CASE_CALLS,
    CASE_SUMS,
    CASE_WEIGHTS,
    CASE_DECODE,
    CASE_NCCL_EP
} BenchCase;

enum { MASK_AFTER = 8 }; /* steps after a rank's death in which the others mask it */

typedef struct Options {
    RunOptions run;
    int64_t kind;                     /**< BenchCase */
    const char *nccl_ep;              /**< CASE_NCCL_EP: the library */
    int64_t ffn;                      /**< CASE_WEIGHTS: last dimension of the weights */
    int64_t sums_kind;                /**< CASE_SUMS: of the outputs that are summed */
    int64_t processes;                /**< CASE_DECODE: ranks, which are processes */
    uint32_t mask[EP_MAX_RANKS / 32]; /**< likewise: ranks that are masked */
    int64_t kill_step, kill_rank;     /**< likewise, from 1; 0: no step */
    int64_t join_step;                /**< likewise: before it that rank is replaced; 0: never */
    int64_t late_us;                  /**< likewise: after which a late rank is cut */
    int64_t tokens_begin, tokens_end, tokens_factor; /**< sweep of tokens per rank */
    bool tokens_given;                               /**< any of -b, -e, --tokens */
    bool uneven; /**< a rank brings between half and all of the tokens */
    bool graphs;
    int64_t chain; /**< repetitions of a call in a graph; 0 until defaults are filled in */
    int64_t hidden, top_k, experts;
    int64_t alignment;   /**< 0 until defaults are filled in */
    int64_t padding;     /**< EpPadding */
    int64_t type;        /**< EpType of the rows */
    RoutingKind routing; /**< 0 until defaults are filled in */
    double zipf_exponent;
    const char *routing_path, *save_path;
    double masked; /**< share of entries without an expert */
    int64_t capacity;
    int64_t overflow; /**< EpOverflow */
    int64_t layout;   /**< EpLayout; 0 until defaults are filled in */
    int64_t rows_per_expert;
    int64_t node_rows; /**< places of a message to another node; 0: one for each token */
    int64_t weighted;
    int64_t scale_bytes;
    int64_t index_type; /**< EpType of topk_idx */
    int64_t backend;    /**< EpBackend */
    int64_t mode;       /**< EpMode */
    int64_t quant;      /**< EpQuant */
    int64_t sum_quant;  /**< EpQuant: NONE or FP8 */
    int64_t sums;       /**< EpSums */
    int64_t physical;   /**< places for copies of experts; 0: no placement */
    int32_t *map;       /**< of a file; NULL: made from the routing's loads */
    int64_t map_experts;
    int64_t choice; /**< EpCopyChoice */
    bool split;     /**< latency mode: dispatch and combine as send and wait (--split) */
    bool baseline;
    bool pair; /**< also chains of dispatch and combine (--pair) */
    int64_t num_sms;
    bool stats; /**< calls count what they do (--stats) */
    bool zero_copy;
    bool models;             /**< the shapes are those of a file (--models) */
    const char *models_path; /**< that file; NULL: the installed one */
    bool mode_given;
    const char *shape_given; /**< the last of --hidden, --top-k, --experts, or NULL */
} Options;

/** The options of the command line. */
extern const OptionTable options_table;

/** Fill in what the command line leaves open, and check the options together. False, with a
 *  message, if they are invalid. */
bool options_complete(Options *options);

/** The part of this check that concerns the numbers of tokens. */
bool options_check_sweep(const Options *options);

/** Whether --baseline also sends rows slot by slot: with MPI ranks, in throughput mode, in exactly
 *  sized expert-major slabs whose padding is zero. */
bool options_slots_baseline(const Options *options);

/** The name of an option's value as the command line spells it: "bf16" of "dtype". */
static inline const char *options_name(const Options *options, const char *name) {
    return option_value_name(&options_table, options, name);
}

/** How sums travel: "fp8", or the name of the rows' type. */
const char *options_sums_name(const Options *options);

/** "zipf:1.2", "file:trace.txt", ... */
void options_routing_name(const Options *options, char *out, size_t bytes);

#endif
