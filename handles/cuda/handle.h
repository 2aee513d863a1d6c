/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_HANDLE_H
#define EP_HANDLES_CUDA_HANDLE_H

/**
 * The host's side of a handle on the CUDA backend.
 */

#include "handles/handle.h"
#include "runtime/cuda/cuda.h"
#include "runtime/cuda/latency.h"
#include "runtime/op.h"

/** A handle's own plan: what the host knows of it. It outlives the handle, as its memory does: work
 *  under way may still write there. Another handle takes both. */
typedef struct EpCudaOwn {
    struct EpCudaOwn *next; /**< in EpCuda.spare */
    void *memory;
    int64_t bytes, words;
    uint64_t *info;  /**< pinned, [ep_info_words]: see EpInfoWord */
    uint64_t *copy;  /**< [ep_info_words] of `info`, while it is checked */
    int32_t *number; /**< [ep_info_words] numbers of the last complete step seen */
    int64_t step;    /**< that step */
    int64_t first;   /**< steps of earlier handles */
    int64_t awaited; /**< lowest step that the last prepare outside captures can produce */
    int issued;      /**< whether a prepare was issued, or captured */
    int captured;    /**< whether one of them was captured: a graph may repeat it at any time */
    int64_t num_rows, top_k, exact; /**< of the last prepare issued */
} EpCudaOwn;

/** The group's buffers of latency mode. */
typedef struct EpCudaLatency {
    EpCudaWindow window;
    EpLatency device;
    uint32_t *tables;                       /**< device: of EpLatencyNodes; NULL on one node */
    EpCudaOrder order[EP_MAX_LATENCY_SETS]; /**< of the phases of the operations that take a turn */
} EpCudaLatency;

/** Returns the pointers into a plan, and what a kernel that reads it expects. `num_rows`: -1 if no
 *  tensor of tokens is given; `block_rows`: of the tensors' blocks of sources, 0: none. */
static inline EpCudaPlan ep_cuda_plan(const EpHandle *handle, EpPlanRef ref, int64_t top_k,
                                      int64_t num_rows, int64_t num_slots, int64_t block_rows) {
    EpCudaPlan plan;
    ep_cuda_plan_map(&handle->shape, ref.memory, &plan);
    EpPlanHeader mark = ep_plan_mark(handle, top_k);
    plan.use = (EpPlanUse){.mark = {mark.magic, mark.group, mark.config, EP_PLAN_MAGIC},
                           .is_read = 1,
                           .top_k = (int32_t)top_k,
                           .num_rows = num_rows,
                           .num_slots = num_slots,
                           .most_tokens = -1,
                           .block_rows = (int32_t)block_rows,
                           .plan_block_rows = handle->shape.max_tokens,
                           .fills_rest = 1};
    return plan;
}

/**
 * Pack the facts of ep_prepare, which must be equal on all ranks, into 48 bits that travel with its
 * arrival. In the order of ep_op_prepare: K, the alignment, the layout (1 .. 4 in two bits), the
 * capacity (if batched: rows per expert), the quantisation.
 */
static inline uint64_t ep_facts_pack(const int64_t fact[EP_OP_FACTS]) {
    int log = 0;
    while ((int64_t)1 << log < fact[1])
        log++;
    return (uint64_t)(fact[0] | log << 6 | (fact[2] - 1) << 11 | fact[4] << 13) | (uint64_t)fact[3]
                                                                                      << 16;
}

/** Unpack what ep_facts_pack has packed. */
static inline void ep_facts_unpack(uint64_t facts, int64_t fact[EP_OP_FACTS]) {
    fact[0] = (int64_t)(facts & 63);
    fact[1] = (int64_t)1 << (facts >> 6 & 31);
    fact[2] = (int64_t)(facts >> 11 & 3) + 1;
    fact[3] = (int64_t)(facts >> 16);
    fact[4] = (int64_t)(facts >> 13 & 7);
}

/** Parts of the backend table; see EpBackendOps. */
int64_t ep_cuda_plan_bytes(const EpPlanShape *shape);
EpStatus ep_cuda_open_plan(EpHandle *handle, const EpCall *call);
void ep_cuda_close_plan(EpHandle *handle);
EpStatus ep_cuda_read_plan(const EpHandle *handle, const EpCall *call, EpPlanRef ref, EpStep *out);
EpStatus ep_cuda_check_shape(const EpGroup *group, const EpCall *call, const EpPlanShape *shape);
void ep_cuda_poll(EpGroup *group);
EpStatus ep_cuda_read_sources(const EpHandle *handle, EpPlanRef ref, EpStream stream,
                              const struct EpSources *out);
EpStatus ep_cuda_read_source_tokens(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                                    EpStream stream, int32_t *counts);

/** ep_prepare on several nodes: handles/nodes/cuda/route.c. */
EpStatus ep_cuda_route_nodes(EpHandle *handle, const EpRouting *routing);

/** Free the plans whose handles are gone. Waits for the device. */
void ep_cuda_free_plans(EpGroup *group);

/** Wait for the numbers of the step that the handle's own plan was prepared for, outside of
 * captures: see EpInfoWord. They stay until the next call. */
EpStatus ep_cuda_await_numbers(EpHandle *handle, const int32_t **number);

/** The device is idle: steps that the plans still wait for have failed, and will never be complete. */
void ep_cuda_settle_plans(EpGroup *group);

/** Returns the number of steps that kernels have reported so far. */
int64_t ep_cuda_steps_seen(EpCudaOwn *own);

/** Note that a routing kernel was enqueued, or captured, that writes the handle's own plan.
 *  `before`: steps reported before that. */
void ep_cuda_routing_issued(EpCudaOwn *own, const EpRouting *routing, int captured, int64_t before);

/* ---- latency mode -------------------------------------------------------------------------- */

/** Returns the bytes of the buffers of latency mode; 0: the group has none. */
int64_t ep_cuda_latency_bytes(const EpGroupConfig *config, int32_t num_ranks,
                              const EpNodeSizes *nodes);

/** Collective, where the group has sets: open the buffers. Close them; `together`: whether all
 * ranks do so now. */
EpStatus ep_cuda_open_latency(EpGroup *group, const EpCall *call);
/** Local: the same for a group that processes may join. */
EpStatus ep_cuda_reserve_latency(EpGroup *group, const EpCall *call);
void ep_cuda_close_latency(EpGroup *group, int together);

/* ---- launching ----------------------------------------------------------------------------- */

/** Returns the group as this handle's kernels get it: with the handle's numbers of blocks and of
 *  partitions. */
EpCudaGroup ep_cuda_launch_group(const EpHandle *handle);

/** Set a routing kernel's arguments, all but the digest, from handle and routing. `facts`: values
 *  that must be equal on all ranks. Only the kernel that completes the plan reports to the host. */
void ep_cuda_describe_routing(const EpHandle *handle, const EpRouting *routing, EpPrepareArgs *args,
                              int64_t facts[EP_OP_FACTS]);

/** Returns a hash of the operation, the handle's id and values that must be equal on all ranks: see
 *  EpArrival. */
uint32_t ep_cuda_digest(const EpHandle *handle, const EpOp *op, const int64_t *values, int count);

/** Launches `blocks` blocks of a kernel on a cudaStream_t. Returns a cudaError_t. */
typedef int (*EpCudaLauncher)(const void *args, int blocks, void *stream);

/** Returns the kernel that serves a group: that of groups with masks, or the other one. */
static inline EpCudaLauncher ep_cuda_variant(const EpGroup *group, EpCudaLauncher plain,
                                             EpCudaLauncher masked) {
    return group->config.masks ? masked : plain;
}

/** A kernel launch. */
typedef struct EpCudaLaunch {
    EpCudaLauncher launch;
    const void *args;
    int blocks;
    EpStream stream;
    EpPhase phase;            /**< of an operation of latency mode; else EP_PHASE_BOTH */
    EpCudaOrder *own;         /**< latency mode: of the operations of this turn; else NULL */
    const EpRouting *routing; /**< of the first kernel that writes a plan; else NULL */
    int drops;                /**< an operation is dropped: also in a group that is suspended */
} EpCudaLaunch;

/** Returns EP_ERR_UNSUPPORTED: shared memory is too small for rows of this size. */
EpStatus ep_cuda_refuse_rows(const EpGroup *group, int64_t row_bytes);

/** Order a launch's stream after the operations that it must follow, and later operations after
 * what is on a stream. `launched`: a cudaError_t. */
EpStatus ep_cuda_launch_enter(const EpHandle *handle, const EpCudaLaunch *launch,
                              const EpCudaStream *stream);
EpStatus ep_cuda_launch_leave(const EpHandle *handle, const EpCudaLaunch *launch,
                              const EpCudaStream *stream, int launched);

/** Launch a kernel between the two. Operations of one kernel are launched here. */
EpStatus ep_cuda_launch(const EpHandle *handle, const EpCudaLaunch *launch);

#endif
