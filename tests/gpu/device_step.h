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

typedef enum StepOp {
    STEP_PREPARE = 1,
    STEP_DISPATCH = 2,
    STEP_COMBINE = 4,
    STEP_COMBINE_BACKWARD = 8,
    STEP_DISPATCH_BACKWARD = 16,
    STEP_DISPATCH_SEND = 32,
    STEP_DISPATCH_WAIT = 64,
    STEP_COMBINE_SEND = 128,
    STEP_COMBINE_WAIT = 256
} StepOp;

#define STEP_FORWARD (STEP_PREPARE | STEP_DISPATCH | STEP_COMBINE)
#define STEP_BACKWARD (STEP_COMBINE_BACKWARD | STEP_DISPATCH_BACKWARD)
#define STEP_ALL (STEP_FORWARD | STEP_BACKWARD)
#define STEP_SENDS (STEP_DISPATCH_SEND | STEP_COMBINE_SEND)
#define STEP_DISPATCH_PHASES (STEP_DISPATCH_SEND | STEP_DISPATCH_WAIT)
#define STEP_COMBINE_PHASES (STEP_COMBINE_SEND | STEP_COMBINE_WAIT)
#define STEP_PHASES (STEP_PREPARE | STEP_SENDS | STEP_DISPATCH_WAIT | STEP_COMBINE_WAIT)

typedef enum StepOutput {
    OUT_COUNTS,
    OUT_PADDED,
    OUT_OFFSETS,
    OUT_TOTALS,
    OUT_TOKENS,
    OUT_WEIGHTS,
    OUT_SCALES,
    OUT_INDEX,
    OUT_SUMS,
    OUT_GRAD_ROWS,
    OUT_GRAD_SLOTS,
    OUT_GRAD_TOKENS,
    OUT_GRAD_WEIGHTS,
    STEP_OUTPUTS
} StepOutput;

typedef struct DeviceStep {
    Step step; /**< its world is the one loaded last */
    Case c;
    cudaStream_t stream;
    unsigned issued; /**< operations since the outputs were poisoned */
    int spoilt;      /**< inputs were overwritten */
    char *device;    /**< inputs, then outputs */
    int owns_device, owns_stream;
    World *drawn;                           /**< by device_step_draw, or NULL */
    int without_plan;                       /**< the outputs of prepare are not asked for */
    int64_t *counters; /**< NULL, or [L + R + R]: of dispatch the tokens of experts and rows to
                            peers, then combine's rows */
    char *inputs, *poison, *expected, *got; /**< counterparts on the host, pinned */
} DeviceStep;

/** Bytes of device memory of a case's device step; equal on all ranks. */
size_t device_step_bytes(const Case *c);

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
/** Run all operations of a case on a new handle, compare every byte, and check the group's status.
 * `device`: as for device_step_open. */
void device_step_run(EpGroup *group, const Case *c, int rank, void *device);

/* ---- graphs ---- */

/** Begin to capture a stream, in the calling thread; end, and instantiate the graph. */
void graph_begin(cudaStream_t stream);
cudaGraphExec_t graph_end(cudaStream_t stream);
/** End a capture whose graph is never run. */
void graph_discard(cudaStream_t stream);
/** Capture these operations. */
cudaGraphExec_t device_step_capture(DeviceStep *gpu, unsigned ops);
/** Launch a graph of these operations on the step's stream. */
void device_step_launch(DeviceStep *gpu, cudaGraphExec_t exec, unsigned ops);

/** Returns the bytes of an output as device_step_check saw them, without guards. */
Image device_step_output(const DeviceStep *gpu, StepOutput output);

/** Check that two steps of one world have the same outputs, but for dot products if `dots` is 0. */
void device_step_check_equal(const DeviceStep *a, const DeviceStep *b, int dots, const char *what);

/* ---- groups on GPUs ---- */

/** Create a handle of a case with its static capacity. Returns NULL after a failed check. */
EpHandle *device_step_handle(EpGroup *group, const Case *c);
/** Returns that handle's configuration. */
EpHandleConfig device_step_config(const Case *c);

#define CHECK_CUDA(call) check_cuda((call), __FILE__, __LINE__, #call)
#define REQUIRE_CUDA(call)             \
    do {                               \
        if (!CHECK_CUDA(call)) return; \
    } while (0)
bool check_cuda(cudaError_t error, const char *file, int line, const char *call);

/** Returns a new stream that does not synchronize with the default stream. */
cudaStream_t new_stream(void);

/** Returns a monotonic time in seconds. */
double gpu_now(void);

/* ---- tests ---- */

/** Suites' .init: failed groups log a warning. */
void silence_log(void);

/** A test that makes this call on each of `ranks` ranks: GpuTest(suite, name, ranks, call); */
#define GpuTest(suite, name, ranks, call) \
    ThreadTest(suite, name, ranks) {      \
        call;                             \
    }                                     \
    static void suite##_##name##_body(const EpBootstrap *bootstrap, void *arg)
/** Three tests: of one, two and four ranks. */
#define GpuTests(suite, name, call)    \
    GpuTest(suite, name##_1, 1, call); \
    GpuTest(suite, name##_2, 2, call); \
    GpuTest(suite, name##_4, 4, call)

/** Likewise of latency mode: skipped where the backend has none. */
#define LatencyTest(suite, name, ranks, call) \
    GpuTest(suite, name, ranks, if (gpu_needs_latency()) call)
#define LatencyTests(suite, name, call) GpuTests(suite, name, if (gpu_needs_latency()) call)
/** Returns whether the backend has latency mode, or skips the test. */
bool gpu_needs_latency(void);

#endif
