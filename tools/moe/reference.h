/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_REFERENCE_H
#define MOE_REFERENCE_H

/**
 * The dense layer: all tokens, all experts, one rank, plain loops in double precision. It calls
 * neither the library nor the layer, nor BLAS. It makes the inputs from the seed, and takes from
 * the layer only which experts each token chose, since rounding decides between almost equal
 * logits; it checks that choice.
 *
 * With quantised weights the products take the values that the e4m3 codes and scales stand for.
 * Gradients of weights are those of these values.
 */

#include <stdbool.h>
#include <stdint.h>

#include "tools/common/util.h"
#include "tools/moe/inputs.h"

/** Where a token comes from. */
typedef struct Origin {
    int rank;
    int64_t token;
} Origin;

typedef struct Reference {
    Pool pool;
    const MoeOptions *options;
    int64_t tokens; /**< G, of all ranks */
    Origin *origins;
    int32_t *idx;                     /**< [G, K] the layer's choice */
    float *x, *grad_out;              /**< [G, H] */
    float *weights[NUM_WEIGHTS];      /**< whole, as forward products take them */
    float *backward[NUM_WEIGHTS];     /**< as backward products do; may be the same memory */
    float *shared[2];                 /**< of the shared expert, [H, 2S] and [S, H] */
    double *out, *grad_x;             /**< [G, H] */
    double *topk;                     /**< [G, K] weights of the chosen */
    double *grads[NUM_WEIGHTS];       /**< whole */
    double *logits;                   /**< scratch [E] */
    double *z, *a, *y, *ga, *gz, *gw; /**< scratch of a token */
    int64_t bad_choices;
    char first_bad[256];
} Reference;

/** Bytes that it needs. */
int64_t reference_bytes(const MoeOptions *options, const MoeMesh *mesh, int ranks);

/** Allocate, and make the inputs. False, with a message. */
bool reference_create(const MoeOptions *options, const MoeMesh *mesh, int ranks, Reference *out);
void reference_destroy(Reference *reference);

/** Compute tokens begin .. end - 1, which adds to the gradients of weights. `idx` is filled. */
void reference_run(Reference *reference, int64_t begin, int64_t end);

/** Replace a whole weight [E, in, out] by what quantising and dequantising makes of it. */
void reference_quantise(const MoeOptions *options, bool forward, const int64_t shape[3],
                        const float *in, float *out);

#endif
