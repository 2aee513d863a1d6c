/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_COMPARE_H
#define MOE_COMPARE_H

/** What --quant costs: the layer against the same layer without it, and its products of e4m3
 *  against sums in double precision. At any size, other than the dense layer of check.h. */

#include "tools/moe/layer.h"
#include "tools/moe/phases.h"

enum { MOE_COMPARED = 4 }; /* results of the layer */

/** A result that differs: |with - without| / |without|, of Euclidean norms, on the worst rank. */
typedef struct CompareResult {
    const char *name;
    double error, bound;
} CompareResult;

/** Elements of a phase's product that were computed again. */
typedef struct ProductResult {
    int64_t elements; /**< of all ranks; 0: the phase has no product of e4m3 */
    double worst;     /**< the largest error, as a fraction of its bound */
} ProductResult;

typedef struct MoeComparison {
    bool exists;
    CompareResult results[MOE_COMPARED];
    ProductResult products[NUM_MOE_PHASES];
    char first[160]; /**< about the first that is beyond its bound, or "" */
} MoeComparison;

/** Collective: run a step of both layers, and compare. */
bool moe_compare(Layer *layer, MoeComparison *out);

/** Collective: check the products of the last step (products.c). */
bool moe_check_products(Layer *layer, ProductResult *out);

#endif
