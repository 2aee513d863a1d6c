/* SPDX-License-Identifier: Apache-2.0 */
/* The host backend's table: collects its functions from all folders. */
#include <stdlib.h>

#include "bootstrap/host/setup.h"
#include "combine/host/gather.h"
#include "dispatch/host/scatter.h"
#include "handles/host/plan.h"
#include "runtime/host/host.h"

static void *allocate(const EpGroup *group, size_t bytes) {
    (void)group;
    return aligned_alloc(64, (size_t)ep_round_up((int64_t)bytes, 64));
}

static void release(const EpGroup *group, void *memory) {
    (void)group;
    free(memory);
}

/* The backend keeps no state of a plan outside the plan's memory. */
static EpStatus adopt_plan(EpHandle *handle) {
    (void)handle;
    return EP_OK;
}

/* Operations have finished when they return, and report errors themselves. */
static void poll(EpGroup *group) {
    (void)group;
}

static void give_up(EpGroup *group) {
    ep_exchange_give_up(ep_host(group)->exchange);
}

static EpStatus finish(EpGroup *group) {
    (void)group;
    return EP_OK;
}

/* A program whose tensors are on GPUs may have got this backend by AUTO. */
static EpStatus check_pointer(const EpGroup *group, const EpCall *call, const char *argument,
                              const void *data) {
    EpDeviceOf device_of = ep_host(group)->device_of;
    int device = device_of ? device_of(data) : -1;
    if (device < 0) return EP_OK;
    return ep_refuse(call, EP_ERR_ADDRESS, argument,
                     "expected memory that CPUs reach, since the group has the host backend, got "
                     "memory of device %d at %p",
                     device, data);
}

const EpBackendOps ep_backend_host = {.id = EP_BACKEND_HOST,
                                      .name = "host",
                                      .offers = EP_OFFERS_LATENCY | EP_OFFERS_QUANT |
                                                EP_OFFERS_SCALE_COLUMNS | EP_OFFERS_SOURCE_COUNTS,
                                      .measure = ep_host_measure,
                                      .open = ep_host_open,
                                      .close = ep_host_close,
                                      .poll = poll,
                                      .give_up = give_up,
                                      .finish = finish,
                                      .open_window = ep_host_open_window,
                                      .close_window = ep_host_close_window,
                                      .allocate = allocate,
                                      .release = release,
                                      .plan_bytes = ep_host_plan_bytes,
                                      .format_plan = ep_host_format_plan,
                                      .check_plan = ep_host_check_plan,
                                      .retire_plan = ep_host_retire_plan,
                                      .adopt_plan = adopt_plan,
                                      .read_plan = ep_host_read_plan,
                                      .prepare = ep_host_prepare,
                                      .scatter = ep_host_scatter,
                                      .gather = ep_host_gather,
                                      .check_pointer = check_pointer,
                                      .buffer_bytes = ep_host_buffer_bytes,
                                      .open_buffers = ep_host_open_buffers,
                                      .close_buffers = ep_host_close_buffers};
