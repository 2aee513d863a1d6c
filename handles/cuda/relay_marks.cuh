/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_CUDA_RELAY_MARKS_CUH
#define EP_HANDLES_CUDA_RELAY_MARKS_CUH

/**
 * For kernels that read messages of other nodes. Before they read any, they compare the stamps that
 * came with them, as they check their plan:
 *
 *     EpLook look = ep_look(group, plan);
 *     ep_look_at_stamps(marks, &look);
 *     if (!ep_enter(group, plan, look, &epoch)) {
 *         ep_report_stamps(group, marks);
 *         ep_report_plan(group, plan);
 *         ...
 *     }
 *     ep_take_messages(marks);
 */

#include "bootstrap/network/cuda/mark.cuh"
#include "handles/cuda/plan.cuh"

/** Let ep_enter return 0 if a stamp differs from this rank's. By all threads of every block. */
__device__ __forceinline__ void ep_look_at_stamps(const EpMarks &m, EpLook *look) {
    if (threadIdx.x < 32 && !ep_stamps_agree(m)) look->failed = ~0u; /* before this operation */
}

/** Tell the watcher that the messages are here. By all threads of every block. */
__device__ __forceinline__ void ep_take_messages(const EpMarks &m) {
    if (blockIdx.x + threadIdx.x == 0) ep_mark(m, !m.last);
}

#endif
