/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_STEP_H
#define MOE_STEP_H

/** Runs phases: alone, beside each other on two streams, and all as a step. */

#include "tools/moe/phases.h"

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

/** Collective: run each call of a weight once, alone, and wait until it is over on all ranks. */
bool moe_weights_warm_up(Layer *layer);

#endif
