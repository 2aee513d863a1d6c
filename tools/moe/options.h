/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_OPTIONS_H
#define MOE_OPTIONS_H

/** The command line of ep_moe. */

#include <stdbool.h>
#include <stdint.h>

#include "ep/ep_weight.h"
#include "tools/common/option.h"

/** Where the weights of a token's experts are applied. */
typedef enum WeightsAt { WEIGHTS_EARLY = 1, WEIGHTS_LATE = 2 } WeightsAt;

/** What the products for gradients of weights take, where others take e4m3. */
typedef enum MoeWgrad { MOE_WGRAD_FP8 = 1, MOE_WGRAD_DTYPE = 2 } MoeWgrad;

typedef struct MoeOptions {
    RunOptions run;
    const char *mesh; /**< NULL: chosen from the number of ranks */
    const char *spec; /**< of w1 and w2; NULL: chosen from the mesh */
    int64_t tokens;   /**< per rank */
    bool uneven;
    int64_t idle; /**< the last ranks that bring no tokens */
    int64_t hidden, ffn, top_k;
    int64_t experts;    /**< 0: chosen from the number of ranks */
    int64_t type;       /**< EpType of tokens and weights */
    int64_t weights_at; /**< WeightsAt */
    int64_t quant;      /**< EpQuant of gathered weights */
    int64_t blocks;     /**< EpBlocks of gathered weights; 0 until defaults are filled in */
    int64_t layers;     /**< of a stack; 1: one layer, which is checked against a dense one */
    int64_t grouping;   /**< Grouping, on GPUs */
    int64_t wgrad;      /**< MoeWgrad; 0 where no product takes e4m3 */
    int64_t compare;    /**< 1: the layer is compared with one without --quant */
    bool forward;       /**< no backward pass; weights are gathered before */
    int64_t shared;     /**< S, inner elements of a shared expert; 0: none */
    int64_t graph;      /**< 1: steps are replayed as graphs */
    int64_t weight_sms; /**< multiprocessors that calls of weights take; 0: as libep likes */
    int64_t wire;       /**< bytes per second that a GPU sends to others, in 1e9 */
    int64_t regather;   /**< 1: w1 and w2 are gathered for backward, too */
    int64_t alignment;
    int64_t backend;
    int64_t overlap;      /**< 1: calls of w1 and w2 run beside dispatch, on a second stream */
    int fault;            /**< the MoePhase whose output is damaged, for tests; negative: none */
    int64_t gemm_threads; /**< 0: the machine's cores, divided by its ranks */
} MoeOptions;

extern const OptionTable moe_options_table;

/** Check the command line, and fill in what it leaves open. False, with a message. */
bool moe_options_check(void *options);

/** Fill in what depends on the ranks, and check it. False, with a message. */
bool moe_options_complete(MoeOptions *options, int ranks, int64_t cores);

/** Whether the products of w1 and w2 take e4m3. On the host they take what it stands for. */
bool moe_multiplies_e4m3(const MoeOptions *options);

/** The name of an option's value as the command line spells it. */
static inline const char *moe_options_name(const MoeOptions *options, const char *name) {
    return option_value_name(&moe_options_table, options, name);
}

#endif
