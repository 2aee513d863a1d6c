/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_DEVICE_STEP_LAYOUT_H
#define TESTS_GPU_DEVICE_STEP_LAYOUT_H

/**
 * Where the arrays of a device step lie, for the files that make the calls.
 *
 * Offsets depend on the case alone and are equal on all ranks. How much of an array is used depends
 * on the loaded world.
 */

#include "tests/gpu/device_step.h"

typedef enum StepInput {
    IN_INDEX,
    IN_COUNT,
    IN_TOKENS,
    IN_WEIGHTS,
    IN_SCALES,
    IN_EXPERT_OUT,
    IN_SLOT_WEIGHTS,
    IN_COMBINE_WEIGHTS, /**< as IN_WEIGHTS, for combine */
    IN_GRAD_SLOT_WEIGHTS,
    IN_GRAD_OUT,
    IN_BIAS0,
    IN_BIAS1,
    INPUTS
} StepInput;

/** Byte offset from the beginning of the device step's memory. */
size_t device_step_input_offset(const Case *c, int input);
size_t device_step_inputs_size(const Case *c);

/** Byte offset from the beginning of the outputs, which follow the inputs. */
size_t device_step_output_offset(const Case *c, int output);
size_t device_step_outputs_size(const Case *c);

/** Return a tensor of this shape over the step's own input or output. */
EpTensor device_step_from(const DeviceStep *gpu, EpTensor tensor, StepInput input);
EpTensor device_step_into(const DeviceStep *gpu, EpTensor tensor, StepOutput output);
/** Returns a tensor shaped like recv_topk_weights and its gradient. */
EpTensor device_step_weights(const DeviceStep *gpu);

const RankWorld *device_step_rank(const DeviceStep *gpu);
size_t device_step_input_bytes(const DeviceStep *gpu, StepInput input);

/** Returns an output of the loaded world in one of the copies on the host. */
Image device_step_image(const DeviceStep *gpu, char *copy, StepOutput output);

/** Poison all outputs in a copy, each at its largest size. */
void device_step_poison_copy(const Case *c, char *copy);

#endif
