/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_PHASES_H
#define MOE_PHASES_H

/** The phases of a step, in the order in which they run on one stream. */

#include "tools/moe/layer.h"

typedef enum MoePhase {
    MOE_ROUTER,
    MOE_PREPARE,
    MOE_DISPATCH,
    MOE_GATHER_W1,
    MOE_GATHER_W2,
    MOE_DEQUANTISE,
    MOE_GEMM1,
    MOE_ACTIVATION,
    MOE_GEMM2,
    MOE_COMBINE,
    MOE_COMBINE_BACKWARD,
    MOE_GATHER_W2_BACKWARD,
    MOE_GATHER_W1_BACKWARD,
    MOE_DEQUANTISE_BACKWARD,
    MOE_GEMM2_INPUT,
    MOE_GEMM2_WEIGHT,
    MOE_ACTIVATION_BACKWARD,
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

/** Queue its work: calls of weights on Layer.weights_stream, all else on the device's. False,
 *  with a message, if it fails. The layer has the phase. */
bool moe_phase_queue(Layer *layer, MoePhase phase);

/** What a phase writes, for tests that damage it; NULL: nothing that they can damage. */
const EpTensor *moe_phase_output(const Layer *layer, MoePhase phase);

/** What a phase has to do on this rank: floating-point operations, or bytes read and written. */
typedef struct MoeWork {
    int64_t flops, bytes;
} MoeWork;

MoeWork moe_phase_work(const Layer *layer, MoePhase phase);

#endif
