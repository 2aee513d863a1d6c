/* SPDX-License-Identifier: Apache-2.0 */
/* The host backend's table: the place where its parts, from all folders, come together. */
#include <stdlib.h>

#include "handles/handle.h"
#include "runtime/config.h"
#include "runtime/host.h"

static void *allocate(const EpGroup *group, size_t bytes) {
    (void)group;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void release(const EpGroup *group, void *memory) {
    (void)group;
    free(memory);
}

/* Nothing is known of a plan but what is in it. */
static EpStatus adopt_plan(EpHandle *handle) {
    (void)handle;
    return EP_OK;
}

/* Operations have finished when they return, and have put their findings where they belong. */
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
                                      .buffer_bytes = ep_host_buffer_bytes,
                                      .open_buffers = ep_host_open_buffers,
                                      .close_buffers = ep_host_close_buffers};
