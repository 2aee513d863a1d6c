/* SPDX-License-Identifier: Apache-2.0 */
/* Latency mode: opens the group's buffers, which are a window of their own. */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/memory/cuda/cuda_memory.h"
#include "handles/cuda/handle.h"

int64_t ep_cuda_latency_bytes(const EpGroupConfig *config, int32_t num_ranks,
                              const EpNodeSizes *nodes) {
    return ep_config_latency_sets(config, ep_latency_offers(nodes))
               ? ep_latency_layout(config, num_ranks, nodes).bytes
               : 0;
}

/* Refuse more entries than fit into a sending block's shared memory, which holds all of the rank's.
 * So a word of a record's header can hold both an expert and a number of entries. */
EpStatus ep_cuda_check_shape(const EpGroup *group, const EpCall *call, const EpPlanShape *s) {
    const EpGroupConfig *config = &group->config;
    if (s->mode != EP_MODE_LATENCY) return EP_OK;
    if (s->num_experts > INT16_MAX)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config",
                         "expected at most %d experts in latency mode, where an entry's expert has "
                         "two bytes, got %d",
                         INT16_MAX, s->num_experts);
    int64_t entries = (int64_t)s->max_tokens * s->max_top_k;
    int64_t room = ep_cuda(group)->shared_bytes - EP_STATIC_SHARED_BYTES;
    int64_t staged = config->max_row_bytes + ep_round_up(config->max_scale_bytes, 16);
    if (!ep_quant_format(s->quant).bits) staged = 0;
    int64_t most = (room - ep_workspace_layout(s, 0, staged).bytes) / (int64_t)sizeof(int16_t);
    if (entries <= most) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config",
                     "expected max_tokens * max_top_k of at most %lld in latency mode with %d "
                     "experts, got %d * %d",
                     (long long)ep_max(0, most), s->num_experts, s->max_tokens, s->max_top_k);
}

/* Allocate and describe the buffers, all but the window. */
static EpStatus prepare_buffers(EpGroup *group, const EpCall *call) {
    EpCudaLatency *latency = calloc(1, sizeof(*latency));
    ep_cuda(group)->latency = latency;
    if (!latency) return ep_refuse(call, EP_ERR_NO_MEMORY, "config", "out of memory");
    latency->device.layout = ep_latency_layout(&group->config, group->size, &group->nodes.sizes);
    latency->device.whole = ep_cuda(group)->whole_lines;
    latency->device.sets = group->latency_sets;
    latency->window = (EpCudaWindow){.bytes = latency->device.layout.bytes, .owned = 1};
    for (int32_t i = 0; i < group->latency_sets; i++)
        EP_TRY(ep_cuda_order_open(group, &latency->order[i]));
    return EP_OK;
}

static void find_own(EpGroup *group) {
    EpCudaLatency *latency = ep_cuda(group)->latency;
    latency->device.own = latency->device.window[ep_cuda(group)->device.rank];
    latency->device.state = (EpLatencyState *)(latency->device.own + latency->device.layout.state);
}

EpStatus ep_cuda_open_latency(EpGroup *group, const EpCall *call) {
    if (!group->latency_sets) return EP_OK;
    EP_TRY(ep_group_agree(group, call, prepare_buffers(group, call)));
    EpCudaLatency *latency = ep_cuda(group)->latency;
    EP_TRY(ep_cuda_window_open(group, call, &latency->window, latency->device.window));
    find_own(group);
    return EP_OK;
}

EpStatus ep_cuda_reserve_latency(EpGroup *group, const EpCall *call) {
    if (!group->latency_sets) return EP_OK;
    EP_TRY(prepare_buffers(group, call));
    EpCudaLatency *latency = ep_cuda(group)->latency;
    EP_TRY(ep_cuda_window_reserve(group, call, &latency->window, latency->device.window));
    find_own(group);
    return EP_OK;
}

void ep_cuda_close_latency(EpGroup *group, int together) {
    EpCudaLatency *latency = ep_cuda(group)->latency;
    if (!latency) return;
    if (latency->window.memory) ep_cuda_window_close(group, &latency->window, together);
    for (int32_t i = 0; i < group->latency_sets; i++)
        ep_cuda_order_close(&latency->order[i]);
    free(latency);
    ep_cuda(group)->latency = NULL;
}
