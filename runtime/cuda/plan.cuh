/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_PLAN_CUH
#define EP_RUNTIME_CUDA_PLAN_CUH

/**
 * How a kernel enters an operation, and how it reads the plan.
 */

#include "runtime/cuda/device.cuh"
#include "runtime/cuda/plan.h"
#include "runtime/quant.h"

EP_VARIANT_BEGIN

/* What is found in a plan. */
typedef struct FoundPlan {
    EpPlanMark mark;
    uint32_t generation;
    int32_t top_k, exact_rows;
    int64_t num_rows, num_tokens, recv_rows;
} FoundPlan;

/*
 * Load what is checked. All blocks read these few lines at about the same time, and the cache
 * serves a line's loads one after the other. So each load takes two words, and one thread of a
 * block loads them: at once, while plain loads would move to where their results are used. In
 * latency mode token tensors have all rows.
 */
__device__ __forceinline__ FoundPlan ep_load_plan(const EpCudaPlan &plan) {
    const uint64_t *h = (const uint64_t *)plan.header;
    const ulonglong2 id = ep_load_relaxed_gpu_pair(h), config = ep_load_relaxed_gpu_pair(h + 2),
                     rows = ep_load_relaxed_gpu_pair(h + 4), call = ep_load_relaxed_gpu_pair(h + 6);
    const uint64_t tail = ep_load_relaxed_gpu(plan.tail);
    FoundPlan found;
    found.mark = EpPlanMark{id.x, id.y, config.x, tail};
    found.generation = (uint32_t)config.y;
    found.num_tokens = (int64_t)rows.x, found.recv_rows = (int64_t)rows.y;
    found.num_rows = (int64_t)call.x;
    found.exact_rows = (int32_t)call.y, found.top_k = (int32_t)(call.y >> 32);
    return found;
}

static_assert(offsetof(EpPlanHeader, config) == 16 && offsetof(EpPlanHeader, num_tokens) == 32 &&
                  offsetof(EpPlanHeader, num_rows) == 48 &&
                  offsetof(EpPlanHeader, exact_rows) == 56,
              "see ep_load_plan");
static_assert(offsetof(EpCudaState, epoch) == 0 && offsetof(EpCudaState, failed) == 8 &&
                  offsetof(EpCudaState, sent) == 12,
              "see ep_load_header");

__device__ __forceinline__ int ep_same_mark(const EpPlanMark &a, const EpPlanMark &b) {
    return !((a.magic ^ b.magic) | (a.group ^ b.group) | (a.config ^ b.config) | (a.tail ^ b.tail));
}

/* Whether the numbers fit those of the call. Rows behind num_tokens are optional where it was
 * given, so T may be anything from there on. So num_tokens is never more than T. */
__device__ __forceinline__ int ep_fits_tokens(const EpPlanUse &use, const FoundPlan &found) {
    int64_t least = found.exact_rows ? found.num_rows : found.num_tokens;
    int has_rows = found.exact_rows ? use.num_rows == least : use.num_rows >= least;
    int is_part = (uint64_t)found.num_tokens <= (uint64_t)found.num_rows;
    return is_part & (use.num_rows < 0 || has_rows);
}

__device__ __forceinline__ int ep_fits_rows(const EpPlanUse &use, const FoundPlan &found) {
    /* Blocks of sources have their own sizes, which the host has checked. */
    return ((uint64_t)found.recv_rows <= (uint64_t)use.num_slots) | (use.block_rows != 0);
}

/* Returns whether a plan is the expected one. Without branches, since every block waits for it. */
__device__ __forceinline__ int ep_is_right(const EpPlanUse &use, const FoundPlan &found) {
    return ep_same_mark(found.mark, use.mark) & (found.top_k == use.top_k) &
           ep_fits_tokens(use, found) & ep_fits_rows(use, found);
}

/* Returns what is wrong with a plan (EpPlanFault). */
__device__ __forceinline__ int ep_find_fault(const EpPlanUse &use, const FoundPlan &found) {
    if (!ep_same_mark(found.mark, use.mark)) return EP_PLAN_MARK;
    if (found.top_k != use.top_k) return EP_PLAN_TOP_K;
    return ep_fits_tokens(use, found) ? EP_PLAN_ROWS : EP_PLAN_TOKENS;
}

/**
 * Report why ep_begin_operation has returned 0: the plan is not the expected one, unless this rank
 * has failed already. All blocks find the same. Only on a path that leaves the kernel: behind a
 * call compilers no longer know that the threads of a warp are together, and guard every later
 * branch.
 */
[[maybe_unused]] static __device__ __noinline__ void ep_report_plan(const EpCudaGroup &g,
                                                                    const EpCudaPlan &plan) {
    if (threadIdx.x || ep_failed(g)) return;
    const FoundPlan found = ep_load_plan(plan);
    int fault = ep_find_fault(plan.use, found);
    int64_t expected = plan.use.top_k, seen = found.top_k;
    if (fault == EP_PLAN_TOKENS)
        expected = found.exact_rows ? found.num_rows : found.num_tokens, seen = plan.use.num_rows;
    if (fault == EP_PLAN_ROWS) expected = found.recv_rows, seen = plan.use.num_slots;
    g.failure->mark = found.mark, g.failure->expected_config = plan.use.mark.config;
    ep_report(g, EP_FAULT_PLAN, EpAwaited{g.rank, fault, 0, (uint32_t)expected, (uint32_t)seen});
}

/** Returns whether a call's global scale is one, if it has one. */
__device__ __forceinline__ int ep_has_global(const float *global_scale) {
    return !global_scale || ep_is_global_scale(*global_scale);
}

/** Report a global scale that is none, before ep_report_plan and likewise. */
[[maybe_unused]] static __device__ __noinline__ void ep_report_global(const EpCudaGroup &g,
                                                                      const float *global_scale) {
    if (threadIdx.x || ep_failed(g) || ep_has_global(global_scale)) return;
    ep_report(g, EP_FAULT_GLOBAL, EpAwaited{g.rank, 0, 0, 0, ep_quant_bits(*global_scale)});
}

/** What thread 0 checks when its block enters an operation. */
typedef struct EpLoadedHeader {
    FoundPlan plan;
    uint32_t failed; /* see ep_failed */
    uint32_t epoch;  /* of an operation of throughput mode */
    uint32_t number; /* of an operation of latency mode that sends: see ep_sent */
} EpLoadedHeader;

/** Begin to load what ep_begin_operation checks. What a kernel does until then overlaps with the
 * loads; it may read the caller's inputs, and words of the plan that are void until
 * ep_begin_operation has returned.
 */
__device__ __forceinline__ EpLoadedHeader ep_load_header(const EpCudaGroup &g,
                                                         const EpCudaPlan &plan) {
    EpLoadedHeader header = {};
    if (threadIdx.x) return header;
    if (plan.use.is_read) header.plan = ep_load_plan(plan);
    const ulonglong2 state = ep_load_relaxed_gpu_pair((const uint64_t *)g.state);
    ep_load_alive(g); /* it waits, so it comes behind the other loads */
    header.epoch = (uint32_t)state.x + 1;
    header.failed = (uint32_t)state.y, header.number = (uint32_t)(state.y >> 32) + 1;
    return header;
}

/* Check that the operation may run, `epoch` being its number. */
__device__ __forceinline__ int ep_begin_operation_as(const EpCudaGroup &g, const EpCudaPlan &plan,
                                                     const EpLoadedHeader &header, uint32_t epoch) {
    int is_right = 1, failed = 0;
    if (threadIdx.x == 0) {
        failed = ep_failed_before(header.failed, epoch);
        is_right = (plan.use.is_read == 0) | ep_is_right(plan.use, header.plan);
        ep_set_operation(g, header.plan.generation);
    }
    return __syncthreads_and(is_right & !failed);
}

/**
 * Check that the operation may run, and give all threads its epoch. Returns 0 if nothing may be
 * read, written or sent: this rank has failed in an earlier operation, which left plan and rings
 * void; or the plan is not the expected one, which is for the caller to report (ep_report_plan). By
 * all threads of every block.
 */
__device__ __forceinline__ int ep_begin_operation(const EpCudaGroup &g, const EpCudaPlan &plan,
                                                  const EpLoadedHeader &header, uint32_t *epoch) {
    __shared__ uint32_t shared;
    if (threadIdx.x == 0) shared = header.epoch;
    int alive = ep_begin_operation_as(g, plan, header, header.epoch);
    *epoch = shared;
    return alive;
}

/* ---- messages of other nodes --------------------------------------------------------------- */

/*
 * For kernels that read messages of other nodes. Before they read any, they compare the stamps that
 * came with them, as they check their plan:
 *
 *     EpLoadedHeader header = ep_load_header(group, plan);
 *     ep_compare_stamps(marks, &header);
 *     if (!ep_begin_operation(group, plan, header, &epoch)) {
 *         ep_report_stamps(group, marks);
 *         ep_report_plan(group, plan);
 *         ...
 *     }
 *     ep_take_messages(marks);
 */

/** Let ep_begin_operation return 0 if a stamp differs from this rank's. By all threads of every
 * block. */
__device__ __forceinline__ void ep_compare_stamps(const EpMarks &m, EpLoadedHeader *header) {
    if (threadIdx.x < 32 && !ep_stamps_agree(m)) header->failed = ~0u; /* before this operation */
}

/** Tell the watcher that the messages are here. By all threads of every block. */
__device__ __forceinline__ void ep_take_messages(const EpMarks &m) {
    if (blockIdx.x + threadIdx.x == 0) ep_mark(m, !m.last);
}

/* ---- the plan's words ---------------------------------------------------------------------- */

/*
 * The words may be damaged: those that would lead outside the plan or the tensors count as none.
 */

/** Returns a slot, or -1 if the tensors have no such slot. */
__device__ __forceinline__ int32_t ep_check_slot(const EpCudaPlan &plan, int32_t slot) {
    return (uint64_t)(uint32_t)slot < (uint64_t)plan.use.num_slots ? slot : -1;
}

/** Returns a number of tokens or of rows of one source, at most max_tokens. */
__device__ __forceinline__ int32_t ep_check_count(const EpCudaGroup &g, int32_t count) {
    return min(max(count, 0), g.layout.max_tokens);
}

/** Returns the number of this rank's tokens: of the step, or of a chunk plan. */
__device__ __forceinline__ int32_t ep_num_tokens(const EpCudaPlan &plan, const EpCudaGroup &g) {
    if (plan.use.most_tokens < 0) return (int32_t)plan.header->num_tokens;
    return min(max(plan.tokens[g.rank], 0), plan.use.most_tokens);
}

/** Returns the number of a flat row among the receive rows, which may have no such slot. */
__device__ __forceinline__ int32_t ep_flat_slot(const EpCudaPlan &plan, const EpCudaGroup &g,
                                                int source, int row) {
    if (plan.sizes.form == EP_ROUTES_FLAT) return plan.flat_begin[source] + row;
    if ((uint32_t)row >= (uint32_t)g.layout.max_tokens) return -1;
    return plan.row_slots[(int64_t)source * g.layout.max_tokens + row];
}

/** Returns the position in the tensors of a source's flat row with this slot: where sources have
 *  blocks, these may be shorter than in the plan. The rows of a chunk plan come from several
 *  sources, so there the slot tells the source. */
__device__ __forceinline__ int32_t ep_flat_position(const EpCudaPlan &plan, int source, int row,
                                                    int32_t slot) {
    int rows = plan.use.block_rows, all = plan.use.plan_block_rows;
    if (!rows || slot < 0) return slot;
    if (plan.sizes.form != EP_ROUTES_LISTED) return source * rows + row;
    return slot / all * rows + slot % all;
}

/** Returns the local expert of entry k of a flat row, -1 for none: also where the row is lost. */
__device__ __forceinline__ int32_t ep_flat_expert(const EpCudaPlan &plan, const EpCudaGroup &g,
                                                  int top_k, int source, int row, int k) {
    uint32_t slot = (uint32_t)ep_flat_slot(plan, g, source, row);
    return slot < (uint32_t)plan.sizes.slots ? plan.routes[(int64_t)slot * top_k + k] : -1;
}

/** Begin to load the slot of entry k of a row; ep_follow_chain completes it. A flat row fills one
 *  slot, which belongs to k = 0. */
__device__ __forceinline__ EpChain ep_load_slot(const EpCudaPlan &plan, const EpCudaGroup &g,
                                                int top_k, int source, int row, int k) {
    EpChain chain = {-1, 0};
    if (plan.sizes.form == EP_ROUTES_FLAT || plan.sizes.form == EP_ROUTES_LISTED) {
        int slot = ep_flat_slot(plan, g, source, row);
        if (k == 0 && slot < plan.header->recv_rows)
            chain.slot = ep_flat_position(plan, source, row, slot);
        return chain;
    }
    if ((uint32_t)row >= (uint32_t)g.layout.max_tokens) return chain;
    int64_t at = (int64_t)source * g.layout.max_tokens + row;
    if (plan.sizes.form == EP_ROUTES_CHAINED) return plan.chains[at];
    chain.slot = plan.routes[at * top_k + k];
    return chain;
}

/** Returns the slot of entry k, -1 for none. Only begins to load it, so ep_check_slot is still to
 *  come. A damaged chain goes on at the last slot. */
__device__ __forceinline__ int32_t ep_follow_chain(const EpCudaPlan &plan, const EpChain &chain,
                                                   int k) {
    if (plan.sizes.form != EP_ROUTES_CHAINED) return chain.slot;
    uint32_t last = (uint32_t)plan.sizes.slots - 1;
    int32_t slot = chain.slot, left = __popc(chain.mask & ((1u << k) - 1));
    if (!(chain.mask >> k & 1)) slot = -1, left = 0;
#pragma unroll 1
    for (; left > 0; left--)
        slot = plan.next[min((uint32_t)slot, last)];
    return slot;
}

/** Returns the slot of entry k of a row, -1 for none; of a flat row only for k = 0. */
__device__ __forceinline__ int32_t ep_slot(const EpCudaPlan &plan, const EpCudaGroup &g, int top_k,
                                           int source, int row, int k) {
    EpChain chain = ep_load_slot(plan, g, top_k, source, row, k);
    return ep_check_slot(plan, ep_follow_chain(plan, chain, k));
}

EP_VARIANT_END

#endif
