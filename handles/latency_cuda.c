/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode's buffers: a window of the handle's own. */
#include <stdlib.h>

#include "bootstrap/meet.h"
#include "handles/handle_cuda.h"
#include "runtime/cuda_limits.h"

/* ---- sizes --------------------------------------------------------------------------------- */

static int64_t take(int64_t *at, int64_t bytes) {
    int64_t offset = *at;
    *at = ep_round_up(offset + bytes, EP_STEP_BYTES);
    return offset;
}

/* Scales that the library makes take no more than the row loses by it. */
static EpBufferLayout lay_out(const EpPlanShape *shape, const EpGroupConfig *config) {
    EpPlacement placement = ep_config_placement(config, shape->num_ranks);
    int64_t at = 0, places = 2 * (int64_t)shape->num_ranks;
    int64_t words = EP_HEAD_COUNTS + ep_placement_most(&placement);
    int64_t units = ep_units(8 * (int64_t)shape->max_top_k) + ep_units(config->max_row_bytes) +
                    ep_units(config->max_scale_bytes);
    EpBufferLayout b = {.head_bytes = EP_STEP_BYTES * (int32_t)ep_steps(ep_units(4 * words)),
                        .record_bytes = EP_STEP_BYTES * (int32_t)ep_steps(units),
                        .sum_bytes = (int32_t)ep_round_up(2 * config->max_row_bytes, 128),
                        .max_tokens = shape->max_tokens};
    b.state = take(&at, sizeof(EpLatencyState));
    b.heads = take(&at, places * b.head_bytes);
    b.records = take(&at, places * b.max_tokens * b.record_bytes);
    b.sums = take(&at, (int64_t)b.max_tokens * b.sum_bytes);
    b.bytes = at;
    return b;
}

int64_t ep_cuda_buffer_bytes(const EpPlanShape *shape, const EpGroupConfig *config) {
    return lay_out(shape, config).bytes;
}

/* ---- opening ------------------------------------------------------------------------------- */

/* A block that sends has all of the rank's entries in shared memory. So a header's word has room
 * for their number beside that of an expert. */
static EpStatus check_entries(const EpHandle *handle, const EpCall *call) {
    const EpPlanShape *s = &handle->shape;
    const EpGroupConfig *config = &handle->group->config;
    int64_t entries = (int64_t)s->max_tokens * s->max_top_k;
    int64_t room = ep_cuda(handle->group)->shared_bytes - EP_STATIC_SHARED_BYTES;
    int64_t staged = config->max_row_bytes + ep_round_up(config->max_scale_bytes, 16);
    if (s->quant <= EP_QUANT_NONE) staged = 0;
    int64_t most = (room - ep_cuda_desk_layout(s, 0, staged).bytes) / (int64_t)sizeof(int16_t);
    if (entries <= most) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config",
                     "expected max_tokens * max_top_k of at most %lld in latency mode, got %d * %d",
                     (long long)most, s->max_tokens, s->max_top_k);
}

static EpStatus prepare_buffers(EpHandle *handle, const EpCall *call) {
    EP_TRY(check_entries(handle, call));
    EpCudaLatency *latency = calloc(1, sizeof(*latency));
    handle->buffer = latency;
    if (!latency) return ep_refuse(call, EP_ERR_NO_MEMORY, "buffers", "out of memory");
    latency->device.layout = lay_out(&handle->shape, &handle->group->config);
    latency->device.whole = ep_cuda(handle->group)->whole_lines;
    latency->window = (EpCudaWindow){.bytes = latency->device.layout.bytes, .owned = 1};
    return ep_cuda_order_open(handle->group, &latency->order);
}

EpStatus ep_cuda_open_buffers(EpHandle *handle, const EpCall *call, EpStatus mine) {
    EpGroup *group = handle->group;
    if (mine == EP_OK) mine = prepare_buffers(handle, call);
    EP_TRY(ep_group_agree(group, call, mine));
    EpCudaLatency *latency = ep_cuda_latency(handle);
    EP_TRY(ep_cuda_window_open(group, call, &latency->window, latency->device.window));
    latency->device.own = latency->device.window[group->rank];
    latency->device.state = (EpLatencyState *)(latency->device.own + latency->device.layout.state);
    return EP_OK;
}

/* Peers may store here until they have finished, too. */
void ep_cuda_close_buffers(EpHandle *handle) {
    EpGroup *group = handle->group;
    EpCall call = {"ep_handle_destroy", group->rank};
    EpCudaLatency *latency = ep_cuda_latency(handle);
    if (!latency) return;
    if (latency->window.memory) {
        EpStatus finished = ep_cuda_finish(group);
        ep_cuda_poll(group);
        int usable = group->failed == EP_OK && !group->lost;
        int together = usable && ep_group_agree(group, &call, finished) == EP_OK;
        ep_cuda_window_close(group, &latency->window, together);
    }
    ep_cuda_order_close(&latency->order);
    free(latency);
    handle->buffer = NULL;
}
