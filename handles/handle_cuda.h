/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HANDLE_CUDA_H
#define EP_HANDLES_HANDLE_CUDA_H

/**
 * A handle on the CUDA backend, on the host.
 */

#include "handles/handle.h"
#include "handles/latency.h"
#include "handles/ops.h"
#include "handles/plan_cuda.h"
#include "runtime/cuda_host.h"

typedef struct EpCudaHandle {
    uint64_t *info;                 /**< pinned, [ep_info_words]: see EpInfoWord */
    int32_t *number;                /**< the same of the last step that was seen to be complete */
    int64_t step;                   /**< which that is */
    int64_t awaited;                /**< the least step that the last prepare can make which was
                                         issued outside of captures */
    int issued;                     /**< whether any was, captured ones included */
    int64_t num_rows, top_k, exact; /**< of the last one issued */
} EpCudaHandle;

/** A handle's buffers, and what its halves have in common. */
typedef struct EpCudaLatency {
    EpCudaWindow window;
    EpLatency device;
    EpCudaOrder order;   /**< of the halves of this handle's operations */
    EpPrepareArgs route; /**< of the last dispatch, for its second half */
} EpCudaLatency;

static inline EpCudaLatency *ep_cuda_latency(const EpHandle *handle) {
    return handle->buffer;
}

static inline EpCudaPlan ep_cuda_plan(const EpHandle *handle) {
    EpCudaPlan plan;
    ep_cuda_plan_map(&handle->shape, handle->memory, &plan);
    plan.mark = (EpPlanMark){EP_PLAN_MAGIC, handle->group->id, handle->bytes, handle->ordinal,
                             EP_PLAN_MAGIC};
    return plan;
}

/**
 * What ranks must share in ep_prepare, in 48 bits that go with its arrival: K, the alignment, the
 * layout, the capacity, or the rows of each expert in the batched layout, and how rows are
 * quantised. In the order of ep_op_prepare's facts.
 */
static inline uint64_t ep_facts_pack(const int64_t fact[EP_ROUND_FACTS]) {
    int log = 0;
    while ((int64_t)1 << log < fact[1])
        log++;
    return (uint64_t)(fact[0] | log << 6 | fact[2] << 11 | fact[4] << 13) | (uint64_t)fact[3] << 16;
}

static inline void ep_facts_unpack(uint64_t facts, int64_t fact[EP_ROUND_FACTS]) {
    fact[0] = (int64_t)(facts & 63);
    fact[1] = (int64_t)1 << (facts >> 6 & 31);
    fact[2] = (int64_t)(facts >> 11 & 3);
    fact[3] = (int64_t)(facts >> 16);
    fact[4] = (int64_t)(facts >> 13 & 7);
}

/** The group's and the handle's part of a routing kernel's arguments, and what ranks must share in
 *  it; digest and window are the caller's. */
void ep_cuda_describe_routing(const EpHandle *handle, const EpRouting *routing, EpPrepareArgs *args,
                              int64_t facts[EP_ROUND_FACTS]);

/** Steps of which kernels have told so far. */
int64_t ep_cuda_steps_seen(const EpHandle *handle);

/** Such a kernel is enqueued, or captured; `before`: steps that were seen before it was. */
void ep_cuda_note_routing(const EpHandle *handle, const EpRouting *routing, int captured,
                          int64_t before);

/** What must be the same on all ranks, in one word: see EpArrival. */
uint32_t ep_cuda_digest(const EpHandle *handle, const EpOp *op, const int64_t *values, int count);

/** The backend's buffers of handles in latency mode: see handles/latency.h. */
int64_t ep_cuda_buffer_bytes(const EpPlanShape *shape, const EpGroupConfig *config);
EpStatus ep_cuda_open_buffers(EpHandle *handle, const EpCall *call, EpStatus mine);
void ep_cuda_close_buffers(EpHandle *handle);

int64_t ep_cuda_plan_bytes(const EpPlanShape *shape);
EpStatus ep_cuda_format_plan(EpHandle *handle);
EpStatus ep_cuda_check_plan(const EpHandle *handle, const char *call, void *memory);
void ep_cuda_retire_plan(EpHandle *handle);
EpStatus ep_cuda_adopt_plan(EpHandle *handle);
void ep_cuda_poll(EpGroup *group);
EpStatus ep_cuda_read_plan(const EpHandle *handle, EpStep *out);

#endif
