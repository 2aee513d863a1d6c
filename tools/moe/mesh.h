/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_MESH_H
#define MOE_MESH_H

/** The mesh of a run, and what the layer's weights are: names, shapes and specs. */

#include <stdbool.h>
#include <stdint.h>

#include "ep/ep_weight.h"
#include "tools/moe/options.h"

/** The layer's weights: [H, E] whole on each rank, [E, H, 2F] and [E, F, H] sharded. */
typedef enum WeightId { WEIGHT_ROUTER, WEIGHT_W1, WEIGHT_W2, NUM_WEIGHTS } WeightId;

typedef struct MoeMesh {
    EpMesh mesh;
    char text[256];                      /**< the mesh as --mesh has it */
    EpAxes expert;                       /**< the axes of the EP groups */
    int32_t ep_size;                     /**< ranks of an EP group */
    EpWeightConfig weights[NUM_WEIGHTS]; /**< EpWeightConfig.name is the weight's */
    char spec_text[256];                 /**< the spec of w1 and w2 */
} MoeMesh;

/** Choose the mesh for a number of ranks. False, with a message, if the options do not fit. Local,
 *  with the same result on every rank. */
bool moe_mesh_choose(const MoeOptions *options, int ranks, MoeMesh *out);

/** Elements of a whole weight. */
int64_t moe_weight_elements(const MoeMesh *mesh, WeightId id);

#endif
