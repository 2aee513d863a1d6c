/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's table, which joins its parts from all folders. */
#include "combine/cuda/backend.h"
#include "bootstrap/cuda/setup.h"
#include "combine/cuda/gather.h"
#include "combine/cuda/latency_gather.h"
#include "dispatch/cuda/backend.h"
#include "dispatch/cuda/latency_scatter.h"
#include "dispatch/cuda/scatter.h"
#include "handles/cuda/handle.h"

/* Open a group, and load its kernels with their shared memory, so that no later call has to do
 * it. */
static EpStatus open(EpGroup *group) {
    EP_TRY(ep_cuda_open(group));
    int bytes = ep_cuda(group)->shared_bytes;
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_prepare(bytes)));
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_scatter(bytes)));
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_gather(bytes)));
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_latency_scatter(bytes)));
    return ep_cuda_check(group, "loading kernels", ep_cuda_open_latency_gather(bytes));
}

static void *allocate(const EpGroup *group, size_t bytes) {
    void *memory = NULL;
    return ep_cuda_check(group, "cudaMalloc", cudaMalloc(&memory, bytes)) == EP_OK ? memory : NULL;
}

static void release(const EpGroup *group, void *memory) {
    if (!ep_nccl_bootstrap_is_pending(&group->bootstrap)) (void)cudaFree(memory);
}

const EpBackendOps ep_backend_cuda = {.id = EP_BACKEND_CUDA,
                                      .name = "cuda",
                                      .offers = EP_CUDA_OFFERS,
                                      .find_gpus = ep_cuda_find_gpus,
                                      .measure = ep_cuda_measure,
                                      .open = open,
                                      .close = ep_cuda_close,
                                      .poll = ep_cuda_poll,
                                      .finish = ep_cuda_finish,
                                      .open_window = ep_cuda_open_window,
                                      .close_window = ep_cuda_close_window,
                                      .allocate = allocate,
                                      .release = release,
                                      .workspace_bytes = ep_cuda_workspace_bytes,
                                      .plan_bytes = ep_cuda_plan_bytes,
                                      .format_plan = ep_cuda_format_plan,
                                      .check_plan = ep_cuda_check_plan,
                                      .retire_plan = ep_cuda_retire_plan,
                                      .adopt_plan = ep_cuda_adopt_plan,
                                      .read_plan = ep_cuda_read_plan,
                                      .prepare = ep_cuda_prepare,
                                      .scatter = ep_cuda_scatter,
                                      .gather = ep_cuda_gather,
                                      .enter = ep_cuda_enter,
                                      .leave = ep_cuda_leave,
                                      .check_pointer = ep_cuda_check_pointer,
                                      .find_device_of = ep_cuda_find_device_of,
                                      .buffer_bytes = ep_cuda_buffer_bytes,
                                      .open_buffers = ep_cuda_open_buffers,
                                      .close_buffers = ep_cuda_close_buffers};
