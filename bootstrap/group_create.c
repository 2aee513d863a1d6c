/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a group comes and goes. Creating one is collective, and so is its failure: whatever goes
 * wrong on one rank is gathered before anybody proceeds, so that no rank is left waiting.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "bootstrap/agree.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/meet.h"
#include "runtime/group.h"
#include "runtime/log.h"

/* Where neither configuration nor settings can be read, peers are still told so within this. */
#define FALLBACK_TIMEOUT 100

/* A group's id tells its handle memory from other groups', and its low bits are the tag of its
 * messages: counted by rank 0, so that groups of one bootstrap never share one. */
#define TAG_MASK 0x3fffu

static uint64_t choose_id(void) {
    static _Atomic uint32_t created;
    uint64_t nonce = 0;
    if (getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce))
        nonce = (uint64_t)(uintptr_t)&nonce * 0x9e3779b97f4a7c15u;
    return (nonce & ~(uint64_t)TAG_MASK) | (created++ & TAG_MASK);
}

/* ---- introductions ------------------------------------------------------------------------- */

static EpStatus check_own(const EpCall *call, const EpBootstrap *bootstrap,
                          const EpGroupConfig *config, EpGroup *const *out, EpSettings *settings,
                          EpIntroduction *mine) {
    char reason[256];
    EP_TRY(ep_settings_load(settings));
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EP_TRY(ep_config_check(call, config, bootstrap->size));
    EP_TRY(ep_place_find(&settings->topology, bootstrap->rank, bootstrap->size, &mine->place));
    const EpBackendOps *backend =
        ep_backend_choose(config, bootstrap->size, settings, reason, sizeof(reason));
    if (!backend)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.backend",
                         "expected one that can serve this rank: %s", reason);
    mine->backend = backend->id;
    return EP_OK;
}

static void introduce(const EpCall *call, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                      EpGroup *const *out, EpSettings *settings, EpIntroduction *mine) {
    memset(mine, 0, sizeof(*mine));
    mine->id = choose_id();
    mine->status = check_own(call, bootstrap, config, out, settings, mine);
    if (mine->status == EP_OK)
        ep_introduce_config(mine, config, bootstrap->size, settings);
    else
        snprintf(mine->sentence, sizeof(mine->sentence), "%s", ep_last_error());
}

/* ---- building ------------------------------------------------------------------------------ */

static EpStatus choose_backend(EpGroup *group, const EpIntroduction *all) {
    EpCall call = {"ep_group_create", group->rank};
    EpBackend backend = ep_introductions_backend(all, group->size, group->num_nodes);
    if (backend == EP_BACKEND_HOST &&
        ep_backend_wish(&group->config, &group->settings) == EP_BACKEND_CUDA)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "config.backend",
                         "expected all ranks on one node for the cuda backend, got %d nodes",
                         group->num_nodes);
    group->backend = &ep_backend_host;
#if EP_WITH_CUDA
    if (backend == EP_BACKEND_CUDA) group->backend = &ep_backend_cuda;
#endif
    return EP_OK;
}

static EpStatus fill_group(EpGroup *group, const EpBootstrap *bootstrap,
                           const EpGroupConfig *config, const EpSettings *settings,
                           const EpIntroduction *all) {
    int32_t size = bootstrap->size, rank = bootstrap->rank;
    group->bootstrap = *bootstrap;
    group->config = *config;
    group->settings = *settings;
    group->rank = rank, group->size = size;
    group->placement = ep_config_placement(config, size);
    group->first_expert = ep_placement_first(&group->placement, rank);
    group->num_local = ep_placement_count(&group->placement, rank);
    group->timeout = ep_config_timeout(config, settings);
    group->id = all[0].id;
    group->tag = (int32_t)(all[0].id & TAG_MASK);
    group->numa = all[rank].place.numa, group->cpus = all[rank].place.cpus;
    group->nodes = calloc((size_t)size, sizeof(*group->nodes));
    EpPlace *places = calloc((size_t)size, sizeof(*places));
    int complete = group->nodes && places;
    for (int32_t r = 0; r < size && complete; r++)
        places[r] = all[r].place;
    if (complete) group->num_nodes = ep_nodes_number(places, size, group->nodes);
    free(places);
    if (!complete)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out: out of memory", rank);
    return choose_backend(group, all);
}

static void free_group(EpGroup *group, int together) {
    for (int i = 0; i < EP_MAX_WINDOWS; i++)
        if (group->windows[i].memory)
            group->backend->close_window(group, &group->windows[i], together);
    if (group->backend) group->backend->close(group, together);
    free(group->nodes);
    group->nodes = NULL;
    ep_object_retire(&group->object);
}

static void account(EpGroup *group) {
    int64_t shared, private;
    group->backend->measure(&group->config, group->size, &group->settings, &shared, &private);
    group->library_bytes = shared + private + ep_group_own_bytes(group->size);
}

static EpStatus build(const EpCall *call, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                      const EpSettings *settings, const EpIntroduction *all, EpGroup **out) {
    EpGroup *group = ep_object_create(EP_OBJECT_GROUP, sizeof(*group));
    if (!group) return ep_refuse(call, EP_ERR_NO_MEMORY, "out", "out of memory");
    EpStatus status = fill_group(group, bootstrap, config, settings, all);
    if (status == EP_OK) status = group->backend->open(group);
    status = ep_group_agree(group, call, status);
    if (status != EP_OK) {
        free_group(group, 0);
        return status;
    }
    account(group);
    *out = group;
    return EP_OK;
}

static void configure_log(const EpSettings *settings, int32_t rank) {
    ep_log_configure(settings->log_level, settings->log_file.text);
    ep_log_set_rank(rank);
    const char *unknown = ep_settings_unknown();
    if (unknown && rank == 0)
        EP_WARN("%s in the environment is no setting of libep (ep_info lists them)", unknown);
}

EpStatus ep_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpGroup **out) {
    EpCall call = {"ep_group_create", -1};
    EP_TRY(ep_bootstrap_check(&call, bootstrap));
    call.rank = bootstrap->rank;
    EpSettings settings = {.timeout = FALLBACK_TIMEOUT};
    EpIntroduction mine, *all = calloc((size_t)bootstrap->size, sizeof(*all));
    if (!all) return ep_refuse(&call, EP_ERR_NO_MEMORY, "bootstrap", "out of memory");
    introduce(&call, bootstrap, config, out, &settings, &mine);
    double timeout = settings.timeout;
    if (mine.status == EP_OK) {
        configure_log(&settings, bootstrap->rank);
        timeout = ep_config_timeout(config, &settings);
    }
    EpStatus status = bootstrap->allgather(bootstrap->context, &mine, all, sizeof(mine), timeout);
    if (status == EP_OK) status = ep_introductions_check(&call, all, bootstrap->size);
    if (status == EP_OK) status = build(&call, bootstrap, config, &settings, all, out);
    free(all);
    return status;
}

void ep_group_destroy(EpGroup *group) {
    EpCall call = {"ep_group_destroy", -1};
    if (!group || ep_object_check(&call, "group", group, EP_OBJECT_GROUP) != EP_OK) return;
    while (group->handles)
        ep_handle_destroy(group->handles);
    /* Peers may still store into this rank's memory until they have finished, too. */
    int together = group->failed == EP_OK && group->backend->finish(group) == EP_OK &&
                   group->bootstrap.barrier(group->bootstrap.context, group->timeout) == EP_OK;
    free_group(group, together);
}
