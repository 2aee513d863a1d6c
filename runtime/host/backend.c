/* SPDX-License-Identifier: Apache-2.0 */
/* The host backend's table: collects its functions from all folders. */
#include <stdio.h>
#include <stdlib.h>

#include "bootstrap/host/setup.h"
#include "bootstrap/memory/host/host_memory.h"
#include "combine/host/gather.h"
#include "dispatch/host/scatter.h"
#include "handles/host/plan.h"
#include "handles/placement/host/place.h"
#include "handles/placement/place.h"
#include "handles/prepare/host/count.h"
#include "handles/prepare/host/routing_map.h"
#include "handles/weights/host/weight.h"
#include "runtime/host/host.h"

static void measure(const EpGroupConfig *config, int32_t num_ranks, const EpNodeSizes *nodes,
                    const EpSettings *settings, int64_t *shared_bytes, int64_t *private_bytes) {
    (void)nodes;
    ep_host_measure(config, num_ranks, settings, shared_bytes, private_bytes);
    *private_bytes += ep_config_copies_bytes(config, num_ranks);
    *private_bytes +=
        ep_config_latency_sets(config, EP_OFFERS_LATENCY) * ep_host_set_bytes(config, num_ranks) +
        ep_host_routes_bytes(config, num_ranks);
}

static EpStatus allocate(EpGroup *group) {
    if (ep_config_has_copies(&group->config))
        EP_TRY(ep_copies_create(group, &group->copies.memory));
    EpHost *host = ep_host(group);
    int64_t routes = ep_host_routes_bytes(&group->config, group->size);
    host->routes = routes ? malloc((size_t)routes) : NULL;
    if (routes && !host->routes)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: %s: memory: out of memory", group->rank,
                       group->call);
    if (!group->latency_sets) return EP_OK;
    host->set_bytes = ep_host_set_bytes(&group->config, group->size);
    int64_t bytes = group->latency_sets * host->set_bytes;
    host->sets = aligned_alloc(64, (size_t)bytes);
    if (host->sets) return EP_OK;
    return ep_fail(EP_ERR_NO_MEMORY,
                   "rank %d: %s: memory: expected %lld bytes for latency mode, got none",
                   group->rank, group->call, (long long)bytes);
}

static EpStatus open(EpGroup *group) {
    EP_TRY(ep_host_open(group));
    return allocate(group);
}

static EpStatus reserve(EpGroup *group) {
    EP_TRY(ep_host_reserve(group));
    return allocate(group);
}

static void close(EpGroup *group, int together) {
    EpHost *host = ep_host(group);
    if (host) free(host->sets), free(host->routes);
    free(group->copies.memory.of);
    ep_host_close(group, together);
}

/* Operations have finished when they return, and report errors themselves. */
static void poll(EpGroup *group) {
    (void)group;
}

static void give_up(EpGroup *group) {
    char why[EP_ABORT_BYTES];
    int32_t blamed = group->aborted_peer >= 0 ? group->aborted_peer : group->rank;
    snprintf(why, sizeof(why), "%s", group->peer_why);
    if (ep_abort_requested(&group->abort))
        ep_abort_compose(&group->abort, group->abort.sentence, why), blamed = group->rank;
    ep_exchange_give_up(ep_host(group)->exchange, blamed, why);
}

static int abort_group(EpGroup *group, const char *sentence, int leaving) {
    (void)leaving; /* a rank's own mapping of the shared memory lives as long as its group */
    return ep_exchange_abort(ep_host(group)->exchange, sentence);
}

/* Ranks that have masked this one do not wait for it when they destroy the group. */
static int32_t find_failed(EpGroup *group, int32_t *blamed, char why[EP_ABORT_BYTES]) {
    int masker = group->ends ? ep_exchange_find_masker(ep_host(group)->exchange) : -1;
    if (masker >= 0) snprintf(why, EP_ABORT_BYTES, "it has masked this rank");
    if (masker >= 0) return *blamed = masker;
    return ep_exchange_find_failed(ep_host(group)->exchange, group->ends, blamed, why);
}

static void refuse(EpGroup *group, const char *text) {
    ep_exchange_refuse(ep_host(group)->exchange, text);
}

static void depart(EpGroup *group, const char *why) {
    ep_exchange_depart(ep_host(group)->exchange, why);
}

/* Operations have finished when they return, so none is under way. */
static EpStatus mask(EpGroup *group, const EpMask *alive, EpStream stream) {
    (void)stream;
    EpStatus status = ep_exchange_mask(ep_host(group)->exchange, alive);
    if (status == EP_OK) ep_host_choose_copies(group);
    if (status == EP_OK) return EP_OK;
    char sentence[EP_SENTENCE_BYTES];
    snprintf(sentence, sizeof(sentence), "%s", ep_last_error());
    (void)ep_host_broken(group);
    return ep_fail(status, "%s", sentence);
}

static EpStatus cut(EpGroup *group, int32_t rank, EpStream stream) {
    (void)stream;
    ep_exchange_cut(ep_host(group)->exchange, rank);
    ep_host_choose_copies(group);
    return EP_OK;
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
                                      .measure = measure,
                                      .open = open,
                                      .reserve = reserve,
                                      .admit = ep_host_admit,
                                      .describe = ep_host_describe,
                                      .close = close,
                                      .poll = poll,
                                      .give_up = give_up,
                                      .abort = abort_group,
                                      .find_failed = find_failed,
                                      .refuse = refuse,
                                      .depart = depart,
                                      .mask = mask,
                                      .cut = cut,
                                      .finish = finish,
                                      .open_window = ep_host_open_window,
                                      .close_window = ep_host_close_window,
                                      .plan_bytes = ep_host_plan_bytes,
                                      .open_plan = ep_host_open_plan,
                                      .close_plan = ep_host_close_plan,
                                      .read_plan = ep_host_read_plan,
                                      .read_sources = ep_host_read_sources,
                                      .read_source_tokens = ep_host_read_source_tokens,
                                      .place = ep_host_place,
                                      .prepare = ep_host_prepare,
                                      .publish = ep_host_publish,
                                      .scatter = ep_host_scatter,
                                      .gather = ep_host_gather,
                                      .gather_weight = ep_host_weight_gather,
                                      .reduce_weight = ep_host_weight_reduce,
                                      .reduce_amax = ep_host_weight_amax,
                                      .move_weights = ep_host_weight_move,
                                      .measure_weight = ep_host_weight_measure,
                                      .quantise_rows = ep_host_quantise_rows,
                                      .count_routing = ep_host_count_routing,
                                      .read_routing_map = ep_host_read_routing_map,
                                      .write_routing_map = ep_host_write_routing_map,
                                      .check_pointer = check_pointer};
