/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_RIG_MAP_H
#define TESTS_GPU_RIG_MAP_H

/**
 * Where the arrays of a rig lie. Inner part of rig.h.
 *
 * Offsets follow from the case alone and are equal on all ranks; how much of an array is used, from
 * the loaded world.
 */

#include "tests/gpu/rig.h"

typedef enum RigInput {
    IN_INDEX,
    IN_COUNT,
    IN_TOKENS,
    IN_WEIGHTS,
    IN_SCALES,
    IN_EXPERT_OUT,
    IN_SLOT_WEIGHTS,
    IN_GRAD_SLOT_WEIGHTS,
    IN_GRAD_OUT,
    INPUTS
} RigInput;

/** From the beginning of the rig's memory. */
size_t rig_input_offset(const Case *c, int input);
size_t rig_inputs_size(const Case *c);

/** From the beginning of the outputs, which follow the inputs. */
size_t rig_output_offset(const Case *c, int output);
size_t rig_outputs_size(const Case *c);

const RankWorld *rig_rank(const Rig *rig);
size_t rig_input_bytes(const Rig *rig, RigInput input);

/** An output of the loaded world, in one of the host's copies. */
Image rig_image(const Rig *rig, char *copy, RigOutput output);

/** Poison a copy's outputs, as large as they can be. */
void rig_poison_copy(const Case *c, char *copy);

#endif
