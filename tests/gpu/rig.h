/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_RIG_H
#define TESTS_GPU_RIG_H

/**
 * A step in device memory: inputs of a world, and poisoned outputs with guards, for the operations
 * of one handle on one stream, whole or in halves. Operations are only enqueued; rig_check waits
 * and compares every byte with the oracle, also that what was not asked for was left alone. So many
 * rigs can be under way at once, and calls can be captured into a graph.
 *
 * First halves are followed by stores over their inputs, which must not matter any more.
 *
 * All addresses and shapes follow from the case, whose capacity must be static, and not from the
 * world, whose tokens must be `counted` where it is to be changed between replays of a graph.
 */

#include <cuda_runtime_api.h>

#include "tests/cases/step.h"
#include "tests/gpu/has.h"

typedef enum RigOp {
    RIG_PREPARE = 1,
    RIG_DISPATCH = 2,
    RIG_COMBINE = 4,
    RIG_COMBINE_BACKWARD = 8,
    RIG_DISPATCH_BACKWARD = 16,
    RIG_DISPATCH_SEND = 32,
    RIG_DISPATCH_WAIT = 64,
    RIG_COMBINE_SEND = 128,
    RIG_COMBINE_WAIT = 256
} RigOp;

#define RIG_FORWARD (RIG_PREPARE | RIG_DISPATCH | RIG_COMBINE)
#define RIG_BACKWARD (RIG_COMBINE_BACKWARD | RIG_DISPATCH_BACKWARD)
#define RIG_ALL (RIG_FORWARD | RIG_BACKWARD)
#define RIG_SENDS (RIG_DISPATCH_SEND | RIG_COMBINE_SEND)
#define RIG_HALVES (RIG_PREPARE | RIG_SENDS | RIG_DISPATCH_WAIT | RIG_COMBINE_WAIT)

typedef enum RigOutput {
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
    RIG_OUTPUTS
} RigOutput;

typedef struct Rig {
    Step step; /**< its world is what was loaded last */
    Case c;
    cudaStream_t stream;
    unsigned issued; /**< operations since the outputs were poisoned */
    int spoilt;      /**< inputs were stored over */
    char *device;    /**< inputs, then outputs */
    int owns_device;
    char *inputs, *poison, *expected, *got; /**< their counterparts on the host, pinned */
} Rig;

/** Bytes of device memory that a rig of a case takes; equal on all ranks. */
size_t rig_bytes(const Case *c);

/** `device`: memory of the caller's of rig_bytes, 128-byte aligned, or NULL: from cudaMalloc. */
void rig_open(Rig *rig, EpGroup *group, EpHandle *handle, const Case *c, int rank,
              cudaStream_t stream, void *device);
void rig_close(Rig *rig);

/** A world of a case whose tokens and routing change from step to step, some of them without any.
 */
World *rig_world(const Case *shape, int step);

/** Take the inputs of a world of the rig's case, and poison the outputs. Waits for the stream. */
void rig_load(Rig *rig, const World *world);
/** Enqueue: poison the outputs anew, and bring back inputs that were stored over. */
void rig_poison(Rig *rig);
/** Enqueue: bring the inputs that were loaded last to the device. In a graph: at each replay. */
void rig_bring_inputs(Rig *rig);
/** All that a handle of a mode has, as the case's `halves` says. */
unsigned rig_all(const Case *c);
/** Enqueue these operations, in the order of RigOp. In latency mode the outputs of RIG_PREPARE are
 *  the dispatch's. */
void rig_issue(Rig *rig, unsigned ops);
/** What rig_issue does for operations that a graph performs. */
void rig_replayed(Rig *rig, unsigned ops);
/** Make one call, whatever comes of it. Its outputs cannot be checked afterwards. */
EpStatus rig_try(const Rig *rig, RigOp op);
/** Wait for the stream and compare all outputs with what was issued. */
void rig_check(Rig *rig);

/** The bytes of an output as rig_check saw them, without guards. */
Image rig_output(const Rig *rig, RigOutput output);

/* ---- groups on GPUs ---- */

/** A handle of a case with its static capacity, or NULL after a failed check. Collective in latency
 *  mode. */
EpHandle *rig_handle(EpGroup *group, const Case *c);

#define CHECK_CUDA(call) check_cuda((call), __FILE__, __LINE__, #call)
#define REQUIRE_CUDA(call)             \
    do {                               \
        if (!CHECK_CUDA(call)) return; \
    } while (0)
bool check_cuda(cudaError_t error, const char *file, int line, const char *call);

/** A stream that waits for no other. */
cudaStream_t new_stream(void);

#endif
