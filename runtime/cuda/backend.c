/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's table, which joins its parts from all folders. */
#include "combine/cuda/backend.h"

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/nccl_bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "bootstrap/memory/cuda/cuda_memory.h"
#include "bootstrap/network/cuda/network.h"
#include "combine/cuda/gather.h"
#include "combine/cuda/latency_gather.h"
#include "dispatch/cuda/backend.h"
#include "dispatch/cuda/latency_scatter.h"
#include "dispatch/cuda/pack.h"
#include "dispatch/cuda/scatter.h"
#include "handles/cuda/handle.h"
#include "handles/masks/cuda/mask.h"
#include "handles/nodes/cuda/forward.h"
#include "handles/nodes/cuda/latency_nodes.h"
#include "handles/nodes/cuda/relay.h"
#include "handles/nodes/cuda/route.h"
#include "handles/placement/cuda/place.h"
#include "handles/prepare/cuda/count.h"
#include "handles/prepare/cuda/prepare.h"
#include "handles/prepare/cuda/routing_map.h"
#include "handles/weights/cuda/push.h"
#include "handles/weights/cuda/quantise.h"
#include "handles/weights/cuda/slices.h"
#include "handles/weights/cuda/weight.h"

static void measure(const EpGroupConfig *config, int32_t num_ranks, const EpNodeSizes *nodes,
                    const EpSettings *settings, int64_t *shared_bytes, int64_t *private_bytes) {
    ep_cuda_measure(config, nodes, settings, shared_bytes, private_bytes);
    *shared_bytes += ep_cuda_latency_bytes(config, num_ranks, nodes);
    *private_bytes += ep_cuda_workspace_bytes(config);
    *private_bytes += ep_config_copies_bytes(config, num_ranks);
    int32_t sets = ep_config_latency_sets(config, ep_latency_offers(nodes));
    *private_bytes += ep_cuda_counter_bytes(sets);
    *private_bytes += ep_latency_tables_bytes(config, num_ranks, nodes);
    *private_bytes += ep_cuda_relay_bytes(config, num_ranks, nodes);
    if (config->masks) *private_bytes += (int64_t)sizeof(EpMaskResult);
}

/* A function that loads kernels, to run with so many bytes of shared memory. */
typedef int LoadKernels(int shared_bytes);

static EpStatus load_all(const EpGroup *group, LoadKernels *const *load, size_t count) {
    for (size_t i = 0; i < count; i++)
        EP_TRY(ep_cuda_check(group, "loading kernels", load[i](ep_cuda(group)->shared_bytes)));
    return EP_OK;
}

#define LOAD(group, ...)                                 \
    load_all(group, (LoadKernels *const[]){__VA_ARGS__}, \
             sizeof((LoadKernels *const[]){__VA_ARGS__}) / sizeof(LoadKernels *))

/* Load the kernels with their shared memory, so that no later call has to do it. */
static EpStatus load_kernels(const EpGroup *group) {
    EP_TRY(LOAD(group, ep_cuda_open_numbers, ep_cuda_open_quantise));
    int has_copies = ep_config_has_copies(&group->config);
    if (group->config.masks && has_copies) EP_TRY(LOAD(group, ep_cuda_open_push_rows_masked));
    if (group->config.masks)
        return LOAD(group, ep_cuda_open_mask, ep_cuda_open_prepare_masked,
                    ep_cuda_open_place_masked, ep_cuda_open_scatter_masked,
                    ep_cuda_open_gather_masked, ep_cuda_open_latency_scatter_masked,
                    ep_cuda_open_latency_gather_masked);
    EP_TRY(LOAD(group, ep_cuda_open_prepare, ep_cuda_open_place, ep_cuda_open_scatter,
                ep_cuda_open_gather, ep_cuda_open_route, ep_cuda_open_pack, ep_cuda_open_check,
                ep_cuda_open_latency_scatter, ep_cuda_open_latency_gather));
    if (has_copies) EP_TRY(LOAD(group, ep_cuda_open_push_rows));
    if (!group->latency_sets || group->nodes.sizes.nodes == 1) return EP_OK;
    return LOAD(group, ep_cuda_open_forward, ep_cuda_open_latency_scatter_nodes,
                ep_cuda_open_latency_gather_nodes);
}

static EpTuningLinks links_of(const EpGroup *group) {
    if (group->nodes.sizes.ranks == 1) return EP_LINKS_NONE;
    return ep_cuda(group)->linked ? EP_LINKS_NVLINK : EP_LINKS_PEER;
}

static EpStatus open_own(EpGroup *group) {
    size_t bytes = (size_t)ep_cuda_workspace_bytes(&group->config);
    EpCuda *cuda = ep_cuda(group);
    EP_TRY(ep_tuning_open(group, links_of(group), &cuda->tuned));
    size_t counters = (size_t)ep_cuda_counter_bytes(group->latency_sets);
    EP_TRY(ep_cuda_open_copies(group));
    EP_TRY(ep_cuda_open_masks(group));
    EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&cuda->workspace, bytes)));
    EP_TRY(
        ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&cuda->block_counters, counters)));
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(cuda->block_counters, 0, counters)));
    EP_TRY(ep_cuda_check(group, "cudaStreamCreate",
                         cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking)));
    return load_kernels(group);
}

static size_t write_tuning(const EpGroup *group, char *text, size_t bytes) {
    const EpTuned *tuned = &ep_cuda(group)->tuned;
    return ep_tuning_write(&tuned->constants, &tuned->key, text, bytes);
}

static EpStatus open(EpGroup *group) {
    EpCall call = {"ep_group_create", group->rank};
    EP_TRY(ep_cuda_open(group));
    EP_TRY(ep_group_agree(group, &call, open_own(group)));
    EP_TRY(ep_group_agree(group, &call, ep_cuda_relay_open(group)));
    EP_TRY(ep_group_agree(group, &call, ep_cuda_slices_open(group)));
    EP_TRY(ep_cuda_comm_agree(group, &call, ep_cuda_relay_connect(group)));
    EP_TRY(ep_cuda_comm_agree(group, &call, ep_cuda_slices_connect(group)));
    EP_TRY(ep_cuda_open_latency(group, &call));
    return ep_group_agree(group, &call, ep_latency_nodes_open(group));
}

static EpStatus reserve(EpGroup *group) {
    EpCall call = {group->call, group->rank};
    EP_TRY(ep_cuda_reserve(group));
    EP_TRY(open_own(group));
    return ep_cuda_reserve_latency(group, &call);
}

/* A gather of the bootstrap that is still on the device would make the calls wait that free memory:
 * then all of it stays. */
static void close(EpGroup *group, int together) {
    EpCuda *cuda = ep_cuda(group);
    if (!cuda) return;
    if (ep_nccl_bootstrap_is_pending(&group->bootstrap)) {
        EP_WARN("a gather of the bootstrap is still on the device: the group's memory stays");
        ep_cuda_watch_abandon(group);
        group->backend_state = NULL;
        return;
    }
    (void)cudaDeviceSynchronize();
    ep_latency_nodes_close(group);
    ep_cuda_close_latency(group, together);
    ep_cuda_relay_close(group);
    ep_cuda_slices_close(group);
    ep_cuda_free_plans(group);
    ep_cuda_close_copies(group);
    ep_cuda_close_masks(group);
    (void)cudaFree(cuda->workspace);
    (void)cudaFree(cuda->block_counters);
    if (cuda->stream) (void)cudaStreamDestroy(cuda->stream);
    ep_cuda_close(group, together);
}

/* A rank of another node lets the watcher know, one of this node its window. */
static int32_t find_failed(EpGroup *group, int32_t *blamed, char why[EP_ABORT_BYTES]) {
    int32_t rank = ep_cuda_watch_find(group, blamed, why);
    return rank >= 0 ? rank : ep_cuda_find_failed(group, blamed, why);
}

static void refuse(EpGroup *group, const char *text) {
    ep_cuda_tell_refusal(group, text);
    ep_cuda_watch_refuse(group, text, 0);
}

static void depart(EpGroup *group, const char *why) {
    EpCuda *cuda = ep_cuda(group);
    int before = ep_group_enter(group, "ep_group_destroy");
    ep_cuda_tell_refusal(group, why); /* the word comes after the sentence */
    EpCudaGroup reached = cuda->device;
    /* In place of a window that is not mapped, this rank's own gets the words. */
    for (int32_t r = 0; r < reached.size; r++)
        if (!ep_mask_has(&cuda->reached, r)) reached.window[r] = reached.window[reached.rank];
    (void)ep_cuda_launch_depart(&reached, cuda->notes.stream);
    ep_cuda_settle_notes(group);
    ep_cuda_watch_refuse(group, why, 1);
    ep_group_leave(group, before);
}

const EpBackendOps ep_backend_cuda = {.id = EP_BACKEND_CUDA,
                                      .name = "cuda",
                                      .offers = EP_CUDA_OFFERS,
                                      .find_gpus = ep_cuda_find_gpus,
                                      .measure = measure,
                                      .open = open,
                                      .close = close,
                                      .reserve = reserve,
                                      .admit = ep_cuda_admit,
                                      .poll = ep_cuda_poll,
                                      .abort = ep_cuda_abort,
                                      .find_failed = find_failed,
                                      .refuse = refuse,
                                      .depart = depart,
                                      .mask = ep_cuda_mask,
                                      .cut = ep_cuda_cut,
                                      .finish = ep_cuda_finish,
                                      .open_window = ep_cuda_open_window,
                                      .close_window = ep_cuda_close_window,
                                      .adopt_window = ep_cuda_adopt_window,
                                      .release_window = ep_cuda_release_window,
                                      .locate_window = ep_cuda_locate_window,
                                      .describe = ep_cuda_describe,
                                      .write_tuning = write_tuning,
                                      .plan_bytes = ep_cuda_plan_bytes,
                                      .open_plan = ep_cuda_open_plan,
                                      .close_plan = ep_cuda_close_plan,
                                      .read_plan = ep_cuda_read_plan,
                                      .read_sources = ep_cuda_read_sources,
                                      .read_source_tokens = ep_cuda_read_source_tokens,
                                      .check_shape = ep_cuda_check_shape,
                                      .captures = ep_cuda_captures,
                                      .drop = ep_cuda_drop,
                                      .place = ep_cuda_place,
                                      .prepare = ep_cuda_prepare,
                                      .publish = ep_cuda_publish,
                                      .scatter = ep_cuda_scatter,
                                      .gather = ep_cuda_gather,
                                      .open_weight = ep_cuda_weight_open,
                                      .gather_weight = ep_cuda_weight_gather,
                                      .reduce_weight = ep_cuda_weight_reduce,
                                      .reduce_amax = ep_cuda_weight_amax,
                                      .move_weights = ep_cuda_weight_move,
                                      .measure_weight = ep_cuda_weight_measure,
                                      .quantise_rows = ep_cuda_quantise_rows,
                                      .count_routing = ep_cuda_count_routing,
                                      .read_routing_map = ep_cuda_read_routing_map,
                                      .write_routing_map = ep_cuda_write_routing_map,
                                      .enter = ep_cuda_enter,
                                      .leave = ep_cuda_leave,
                                      .check_pointer = ep_cuda_check_pointer,
                                      .find_device_of = ep_cuda_find_device_of};
