/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_PHASES_H
#define MOE_PHASES_H

/** The phases of a step, alone, beside each other on two streams, and all together. */

#include "tools/moe/layer.h"

/** In the order in which they run on one stream. */
typedef enum MoePhase {
    MOE_ROUTER,
    MOE_PREPARE,
    MOE_SHARED,
    MOE_DISPATCH,
    MOE_GATHER_W1,
    MOE_GATHER_W2,
    MOE_DEQUANTISE,
    MOE_TRANSPOSE_W1,
    MOE_QUANTISE_ROWS,
    MOE_GEMM1,
    MOE_ACTIVATION,
    MOE_QUANTISE_ACTIVATION,
    MOE_TRANSPOSE_W2,
    MOE_GEMM2,
    MOE_COMBINE,
    MOE_COMBINE_BACKWARD,
    MOE_GATHER_W2_BACKWARD,
    MOE_GATHER_W1_BACKWARD,
    MOE_DEQUANTISE_BACKWARD,
    MOE_QUANTISE_GRAD_Y,
    MOE_GEMM2_INPUT,
    MOE_GEMM2_WEIGHT,
    MOE_ACTIVATION_BACKWARD,
    MOE_QUANTISE_GRAD_Z,
    MOE_GEMM1_INPUT,
    MOE_GEMM1_WEIGHT,
    MOE_DISPATCH_BACKWARD,
    MOE_ROUTER_BACKWARD,
    MOE_REDUCE_W2,
    MOE_REDUCE_W1,
    MOE_REDUCE_ROUTER,
    NUM_MOE_PHASES
} MoePhase;

const char *moe_phase_name(MoePhase phase);

/** Whether the layer has the phase: some exist only for quantised weights. */
bool moe_phase_exists(const Layer *layer, MoePhase phase);

/** Whether it gathers a weight or reduces a gradient. */
bool moe_phase_travels(MoePhase phase);

/** Queue its work: calls of weights on Layer.weights_stream, all else on the device's. False,
 *  with a message, if it fails. The layer has the phase. */
bool moe_phase_queue(Layer *layer, MoePhase phase);

/** What a phase writes, for tests that damage it; NULL: nothing that they can damage. */
const EpTensor *moe_phase_output(Layer *layer, MoePhase phase);

/** A product of e4m3: c by groups of rows of `a` and of `c`, or, where it sums over rows, of each
 *  group. See MoeDevice. */
typedef struct MoeProduct {
    Scaled a, b;
    EpTensor c;
    bool sums_rows;
} MoeProduct;

/** Describe a phase's product. False: it has none, or not of e4m3. */
bool moe_phase_product(const Layer *layer, MoePhase phase, MoeProduct *out);

/** What a phase has to do on this rank: floating-point operations, or bytes read and written. */
typedef struct MoeWork {
    int64_t flops, bytes;
    int64_t remote; /**< bytes that travel to other GPUs, of weights */
} MoeWork;

MoeWork moe_phase_work(Layer *layer, MoePhase phase);

/* ---- running (step.c) ---------------------------------------------------------------------- */

/** The phases that calls of w1 and w2 run beside, where Layer.overlaps. */
typedef enum MoeOverlapId {
    MOE_OVERLAP_FORWARD,  /**< dispatch, and the weights gathered for the forward products */
    MOE_OVERLAP_BACKWARD, /**< combine_backward, and the weights gathered for backward products */
    MOE_OVERLAP_REDUCE,   /**< dispatch_backward, and the weights' gradients */
    NUM_MOE_OVERLAPS
} MoeOverlapId;

enum { MOE_BESIDE = 2 };

typedef struct MoeOverlap {
    MoePhase phase;              /**< on the device's stream */
    MoePhase beside[MOE_BESIDE]; /**< on its second stream */
    const char *moves;           /**< what they do: "gather" or "reduce" */
} MoeOverlap;

const MoeOverlap *moe_overlap(MoeOverlapId id);
bool moe_overlap_exists(const Layer *layer, MoeOverlapId id);

/** Run its phases beside each other, or one after the other on one stream. False, with a message,
 *  if one fails. Does nothing where it does not exist. */
bool moe_overlap_run(Layer *layer, MoeOverlapId id);
bool moe_overlap_run_apart(Layer *layer, MoeOverlapId id);

/** False, with a message, if it fails. Does nothing where the layer does not have the phase. */
bool moe_phase_run(Layer *layer, MoePhase phase);

bool moe_step_run(Layer *layer);

/** Gather w1 and w2 as forward products take them, for a step that does not. */
bool moe_weights_load(Layer *layer);

/** Collective: run each call of a weight once, alone, and wait until it is over on all ranks. */
bool moe_weights_warm_up(Layer *layer);

/** LIBEP_TEST_MOE_FAULT=PHASE damages one element of what that phase writes on rank 0, each time
 * that it runs, so that tests see the check find it. Returns that phase, or a negative number. */
int moe_fault_phase(void);

#endif
