/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_DEVICE_STEP_H
#define TESTS_GPU_DEVICE_STEP_H

/**
 * A step in device memory: inputs of a world, and poisoned outputs with guards, for the operations
 * of one handle on one stream, whole or in phases. Operations are only enqueued. device_step_check
 * waits and compares every byte with the oracle; outputs that were not requested must be untouched.
 * So many steps can be under way at once, and calls can be captured into a graph.
 *
 * After each send phase its inputs are overwritten: the library must have read them by then.
 *
 * All addresses and shapes depend on the case alone, whose capacity must be static. Where the world
 * changes between replays of a graph, the case must be `counted`.
 */

#include <cuda_runtime_api.h>

#include "tests/cases/run.h"
#include "tests/gpu/devices.h"

typedef struct DeviceStep {
    Step step; /**< its world is the one loaded last */
    Case c;
    cudaStream_t stream;
    unsigned issued; /**< operations since the outputs were poisoned */
    int spoilt;      /**< inputs were overwritten */
    char *device;    /**< inputs, then outputs */
    StepMemory memory;
    int owns_device, owns_stream;
    World *drawn;                           /**< by device_step_draw, or NULL */
    int without_plan;                       /**< the outputs of prepare are not asked for */
    char *inputs, *poison, *expected, *got; /**< counterparts on the host, pinned */
} DeviceStep;

/** Bytes of device memory of a case's device step, and of its inputs and outputs; equal on all
 * ranks. */
size_t device_step_bytes(const Case *c);
size_t device_step_inputs_size(const Case *c);
size_t device_step_outputs_size(const Case *c);

/** `device`: the caller's memory, device_step_bytes bytes, 128-byte aligned. If NULL, the step
 * allocates its own with cudaMalloc. If `stream` is NULL, it makes its own stream. */
void device_step_open(DeviceStep *gpu, EpGroup *group, EpHandle *handle, const Case *c, int rank,
                      cudaStream_t stream, void *device);
/** Likewise with a new handle, and stream and memory of its own. */
void device_step_new(DeviceStep *gpu, EpGroup *group, const Case *c, int rank);
void device_step_close(DeviceStep *gpu);

/** Returns a new world of a case. Tokens and routing change from step to step; some steps have no
 * tokens. */
World *device_step_world(const Case *shape, int step);

/** Load the inputs of a world of the device step's case and poison the outputs. Waits for the
 * stream. */
void device_step_load(DeviceStep *gpu, const World *world);
/** Load a new world of this case, and note it. The device step frees it. */
void device_step_draw(DeviceStep *gpu, const Case *c);
/** Load the world of a step: see device_step_world. The device step frees it. */
void device_step_draw_step(DeviceStep *gpu, int step);
/** Enqueue: poison the outputs again, and restore inputs that were overwritten. */
void device_step_poison(DeviceStep *gpu);
/** Enqueue: copy the inputs loaded last to the device; in a graph, at each replay. */
void device_step_bring_inputs(DeviceStep *gpu);
/** Returns all operations of the case's mode, in phases if the case has `phases`. */
unsigned device_step_all(const Case *c);
/** Enqueue these operations in the order of StepOp. In latency mode the dispatch writes the outputs
 * of STEP_PREPARE. */
void device_step_issue(DeviceStep *gpu, unsigned ops);
/** Record that a graph has performed these operations. */
void device_step_replayed(DeviceStep *gpu, unsigned ops);
/** Make one call and return its status. Its outputs cannot be checked afterwards. */
EpStatus device_step_try(const DeviceStep *gpu, StepOp op);
/** Wait for the stream and compare all outputs with those of the issued operations. */
void device_step_check(DeviceStep *gpu);
/** Copy the outputs to the host, without a check. */
void device_step_fetch(const DeviceStep *gpu);
/** Run all operations of a case on a new handle, compare every byte, and check the group's status.
 * `device`: as for device_step_open. */
void device_step_run(EpGroup *group, const Case *c, int rank, void *device);

/** Return a tensor of the step's own input or output. */
EpTensor device_step_from(const DeviceStep *gpu, StepInput input);
EpTensor device_step_into(const DeviceStep *gpu, StepOutput output);
const RankWorld *device_step_rank(const DeviceStep *gpu);
/** Returns an output of the loaded world in one of the copies on the host. */
Image device_step_image(const DeviceStep *gpu, char *copy, StepOutput output);

/** Check that two steps of one world have the same outputs, but for dot products if `dots` is 0. */
void device_step_check_equal(const DeviceStep *a, const DeviceStep *b, int dots, const char *what);

/** Begin to capture a stream, in the calling thread; end, and instantiate the graph. */
void graph_begin(cudaStream_t stream);
cudaGraphExec_t graph_end(cudaStream_t stream);
/** End a capture whose graph is never run. */
void graph_discard(cudaStream_t stream);
/** Capture these operations. */
cudaGraphExec_t device_step_capture(DeviceStep *gpu, unsigned ops);
/** Launch a graph of these operations on the step's stream. */
void device_step_launch(DeviceStep *gpu, cudaGraphExec_t exec, unsigned ops);

#define CHECK_CUDA(call) check_cuda((call), __FILE__, __LINE__, #call)
#define REQUIRE_CUDA(call)                    \
    do {                                      \
        if (!CHECK_CUDA(call)) check_leave(); \
    } while (0)
bool check_cuda(cudaError_t error, const char *file, int line, const char *call);

/** Returns a new stream that does not synchronize with the default stream. */
cudaStream_t new_stream(void);

#endif
