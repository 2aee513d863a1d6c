/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_CHECK_H
#define MOE_CHECK_H

/** Compares the layer's output and gradients with the dense reference, on rank 0. */

#include "tools/moe/layer.h"
#include "tools/moe/phases.h"
#include "tools/moe/reference.h"

typedef enum CheckId {
    CHECK_EXPERTS, /**< the choice of experts: a wrong token counts 1 */
    CHECK_TOPK,    /**< their weights */
    CHECK_OUT,
    CHECK_GRAD_TOKENS,
    CHECK_GRAD_W1,
    CHECK_GRAD_W2,
    CHECK_GRAD_ROUTER,
    NUM_CHECKS
} CheckId;

typedef struct CheckResult {
    const char *name;
    MoePhase phase;   /**< the phase that writes it */
    double bound;     /**< relative to the reference's largest magnitude */
    double worst;     /**< the largest error, likewise */
    int64_t elements; /**< compared */
    int64_t wrong;    /**< beyond the bound */
} CheckResult;

typedef struct MoeCheck {
    Layer *layer;
    Reference reference; /**< on rank 0 */
    CheckResult results[NUM_CHECKS];
    char first[256]; /**< about the first wrong element, or "" */
} MoeCheck;

/** Collective: run a step, then compute the reference for the experts that it chose. */
bool check_open(Layer *layer, MoeCheck *out);
void check_close(MoeCheck *check);

/** Collective: compare what the last step has written; adds to the results on rank 0. */
bool check_step(MoeCheck *check);

int64_t check_wrong(const MoeCheck *check);

#endif
