/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creates and destroys groups. Creation is collective, and so is its failure: the ranks gather
 * every error before any rank goes on, so no rank is left waiting.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/gpus.h"
#include "runtime/wait.h"

/* A group's id identifies the handle memory that belongs to it. Its low bits are the tag of the
 * group's messages: rank 0 counts them, so that groups of one bootstrap have different tags. */
#define TAG_MASK 0x3fffu

static uint64_t choose_id(void) {
    static _Atomic uint32_t created; /* relaxed: only the number counts */
    uint64_t nonce = 0;
    if (getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce))
        nonce = (uint64_t)(uintptr_t)&nonce * 0x9e3779b97f4a7c15u;
    return (nonce & ~(uint64_t)TAG_MASK) |
           (atomic_fetch_add_explicit(&created, 1, memory_order_relaxed) & TAG_MASK);
}

/* ---- hello --------------------------------------------------------------------------------- */

static EpStatus find_location(const EpBootstrap *bootstrap, const EpSettings *settings,
                              EpLocation *out) {
    int32_t rank, size;
    ep_bootstrap_place(bootstrap, &rank, &size);
    return ep_location_find(&settings->topology, rank, size, out);
}

static EpStatus check_own(const EpCall *call, const EpBootstrap *bootstrap,
                          const EpGroupConfig *given, EpGroup *const *out, EpGroupConfig *config,
                          EpSettings *settings, EpHello *mine) {
    EP_TRY(ep_settings_load(settings));
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EP_TRY(ep_config_read(call, given, bootstrap->size, config));
    const char *contradiction = ep_backend_contradiction(config, ep_backend_wish(config, settings));
    if (contradiction)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.backend",
                         "expected one that can serve this rank: %s", contradiction);
    return find_location(bootstrap, settings, &mine->location);
}

static void describe_self(const EpCall *call, const EpBootstrap *bootstrap,
                          const EpGroupConfig *given, EpGroup *const *out, EpGroupConfig *config,
                          EpSettings *settings, EpHello *mine) {
    memset(mine, 0, sizeof(*mine));
    mine->id = choose_id();
    mine->status = check_own(call, bootstrap, given, out, config, settings, mine);
    if (mine->status == EP_OK)
        ep_hello_describe(mine, bootstrap, config, settings);
    else
        snprintf(mine->sentence, sizeof(mine->sentence), "%s", ep_last_error());
}

/* ---- building ------------------------------------------------------------------------------ */

/** What the ranks have told each other, and agreed on, before the group exists. */
typedef struct Agreement {
    EpGroup *group;    /* with memory, but not yet filled in */
    EpHello *all;      /* [size] */
    EpGpuReport *gpus; /* [size] */
    EpChoice choice;
    EpPurpose purpose;
} Agreement;

static void free_owned(EpGroup *group) {
    ep_nodes_free(&group->nodes);
    free(group->gathered);
    group->gathered = NULL;
}

static void agreement_free(Agreement *agreed) {
    free(agreed->all);
    free(agreed->gpus);
    if (agreed->group) free_owned(agreed->group);
    free(agreed->group);
}

/* Allocate all that the rendezvous of creation need. Returns 0 when out of memory. */
static int agreement_allocate(Agreement *agreed, const EpBootstrap *bootstrap) {
    size_t size = (size_t)bootstrap->size;
    EpGroup *group = ep_object_create(EP_OBJECT_GROUP, sizeof(*group));
    agreed->group = group;
    agreed->all = calloc(size, sizeof(*agreed->all));
    agreed->gpus = calloc(size, sizeof(*agreed->gpus));
    if (!group || !agreed->all || !agreed->gpus) return 0;
    group->gathered = calloc(size, EP_RENDEZVOUS_BYTES);
    return ep_nodes_open((int32_t)size, &group->nodes) && group->gathered &&
           ep_bootstrap_reserve(bootstrap, ep_max(sizeof(EpHello), sizeof(EpGpuReport)));
}

/* Bind this rank to the CPUs near its GPU, if LIBEP_BIND=gpu. This precedes all pinned and shared
 * allocations, so that their memory lies near those CPUs. */
static void bind_near_gpu(EpGroup *group) {
    char path[64], said[160] = "expected a GPU, got none on the host backend";
    EpLocation location;
    if (group->settings.bind != EP_BIND_GPU) return;
    if (group->choice.backend == EP_BACKEND_CUDA) {
        ep_bind_list_path(group->choice.bus, path, sizeof(path));
        group->bound = ep_bind_to_list(path, group->choice.alone, said, sizeof(said));
    }
    EP_LOG_AT(group->bound ? EP_LOG_INFO : EP_LOG_WARN, "LIBEP_BIND=gpu: %s", said);
    if (!group->bound || find_location(&group->bootstrap, &group->settings, &location) != EP_OK)
        return;
    group->numa = location.numa, group->cpus = location.cpus;
}

static void fill_group(EpGroup *group, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                       const EpSettings *settings, const Agreement *agreed) {
    int32_t size = bootstrap->size, rank = bootstrap->rank;
    ep_abort_open(&group->abort);
    group->aborted_peer = -1;
    group->bootstrap = *bootstrap;
    group->config = *config;
    group->settings = *settings;
    group->rank = rank, group->size = size;
    group->placement = ep_config_placement(config, size);
    group->first_expert = ep_placement_first(&group->placement, rank);
    group->num_local = ep_placement_count(&group->placement, rank);
    group->copies = (EpCopySetup){.placement = group->placement,
                                  .num_logical = config->num_experts,
                                  .rank = rank,
                                  .choice = config->choice};
    group->timeout = ep_config_timeout(config, settings);
    group->id = agreed->all[0].id;
    group->tag = (int32_t)(group->id & TAG_MASK);
    group->numa = agreed->all[rank].location.numa, group->cpus = agreed->all[rank].location.cpus;
    group->choice = agreed->choice, group->purpose = agreed->purpose;
    group->backend = ep_backend_ops(group->choice.backend);
    unsigned offers = ep_backend_offers(group->backend, &group->nodes.sizes);
    group->latency_sets = ep_config_latency_sets(config, offers);
    bind_near_gpu(group);
}

static EpStatus open_backend(EpGroup *group) {
    int before = ep_group_enter(group, "ep_group_create");
    EpStatus status = group->backend->open(group);
    /* A device that libep assigned stays current, so that the caller's allocations land on it. */
    ep_group_leave(group, status == EP_OK && group->choice.assigned ? EP_STAY : before);
    return status;
}

static void free_group(EpGroup *group, int together) {
    int before = ep_group_enter(group, "ep_group_destroy");
    for (int i = 0; i < EP_MAX_WINDOWS; i++)
        if (group->windows[i].memory)
            group->backend->close_window(group, &group->windows[i], together);
    group->backend->close(group, together);
    ep_group_leave(group, before);
    free_owned(group);
    ep_object_retire(&group->object);
}

static EpStatus build(const EpCall *call, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                      const EpSettings *settings, Agreement *agreed, EpGroup **out) {
    EpGroup *group = agreed->group;
    double begin = ep_clock();
    agreed->group = NULL;
    fill_group(group, bootstrap, config, settings, agreed);
    EP_INFO("backend: %s%s%s", group->choice.reason, group->choice.gpu[0] ? "; GPU: " : "",
            group->choice.gpu);
    EpStatus status = ep_group_agree(group, call, open_backend(group));
    if (status != EP_OK) {
        free_group(group, 0);
        return status;
    }
    int64_t shared, private;
    group->backend->measure(config, group->size, &group->nodes.sizes, settings, &shared, &private);
    group->library_bytes = shared + private + ep_group_own_bytes(group->size);
    ep_abort_set_phase(&group->abort, EP_ABORT_OPEN);
    EP_INFO("a group of %d ranks%s opened in %.0f ms", group->size,
            group->purpose == EP_FOR_WEIGHTS ? " for weights" : "", 1e3 * (ep_clock() - begin));
    *out = group;
    return EP_OK;
}

static void configure_log(const EpSettings *settings, const EpBootstrap *bootstrap) {
    int32_t rank, size;
    ep_bootstrap_place(bootstrap, &rank, &size);
    ep_log_configure(settings->log_level, settings->log_file.text);
    ep_log_set_rank(rank);
    const char *unknown = ep_settings_unknown();
    if (unknown && rank == 0)
        EP_WARN("%s in the environment is no setting of libep (ep_info lists them)", unknown);
}

/* Compare the hellos, choose the backend and number the nodes. The result is equal on all ranks. */
static EpStatus compare_and_choose(const EpCall *call, const EpBootstrap *bootstrap,
                                   const EpGroupConfig *config, const EpSettings *settings,
                                   Agreement *agreed) {
    EpGroup *group = agreed->group;
    ep_hello_terminate(agreed->all, bootstrap->size);
    EP_TRY(ep_hello_compare(call, bootstrap, agreed->all));
    ep_hello_nodes(agreed->all, bootstrap->size, group->nodes.of);
    EP_TRY(ep_backend_agree(call, bootstrap, config, settings, group->nodes.of, agreed->gpus,
                            &agreed->choice));
    ep_nodes_set(&group->nodes, bootstrap->rank);
    EpNodeSizes *sizes = &group->nodes.sizes;
    ep_config_chunks(config, settings, sizes);
    if (!config->num_nodes || config->num_nodes == sizes->nodes) return EP_OK;
    return ep_refuse(call, EP_ERR_MISMATCH, "config.num_nodes",
                     "expected the nodes that the ranks are on, %d, got %d", sizes->nodes,
                     config->num_nodes);
}

EpStatus ep_group_open(const EpBootstrap *bootstrap, const EpGroupConfig *given, EpPurpose purpose,
                       EpGroup **out) {
    EpCall call = {"ep_group_create", -1};
    EP_TRY(ep_bootstrap_check(&call, bootstrap));
    call.rank = bootstrap->rank;
    EpSettings settings = {.timeout = EP_FALLBACK_TIMEOUT};
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpHello mine;
    Agreement agreed = {.group = NULL, .purpose = purpose};
    describe_self(&call, bootstrap, given, out, &config, &settings, &mine);
    if (mine.status == EP_OK) configure_log(&settings, bootstrap);
    double timeout = ep_config_timeout(&config, &settings);
    int has_memory = agreement_allocate(&agreed, bootstrap);
    EpStatus status = ep_bootstrap_agree_on_memory(&call, bootstrap, has_memory, timeout);
    if (status == EP_OK)
        status = ep_bootstrap_gather(bootstrap, &mine, agreed.all, sizeof(mine), timeout);
    /* This rank's own error takes precedence over a missing peer. */
    if (status != EP_OK && mine.status != EP_OK) status = ep_fail(mine.status, "%s", mine.sentence);
    if (status == EP_OK) status = compare_and_choose(&call, bootstrap, &config, &settings, &agreed);
    if (status == EP_OK) status = build(&call, bootstrap, &config, &settings, &agreed, out);
    agreement_free(&agreed);
    (void)ep_bootstrap_reserve(bootstrap, EP_RESERVED_BYTES);
    return status;
}

EpStatus ep_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *given, EpGroup **out) {
    return ep_group_open(bootstrap, given, EP_FOR_TOKENS, out);
}

static int is_usable(EpGroup *group) {
    return group->failed == EP_OK && ep_group_usable(group) == EP_OK;
}

int ep_group_end(EpGroup *group) {
    int first = !group->ends;
    group->ends = 1;
    int finished = is_usable(group) && group->backend->finish(group) == EP_OK;
    group->backend->poll(group);
    finished = finished && is_usable(group);
    if (finished && first) ep_group_depart(group);
    return finished;
}

/* Peers may store into this rank's memory until they have finished too, so meet them in a barrier.
 * A rank that knows that the group has failed skips the barrier; poll first, since this rank may
 * not know it yet. Returns 1 if all ranks are there. */
static int meet_to_destroy(EpGroup *group) {
    int finished = ep_group_end(group);
    ep_abort_set_phase(&group->abort, EP_ABORT_LEAVING);
    return finished && is_usable(group) && ep_group_meet(group) == EP_OK;
}

void ep_group_destroy(EpGroup *group) {
    EpCall call = {"ep_group_destroy", -1};
    if (!group || ep_object_check(&call, "group", group, EP_OBJECT_GROUP) != EP_OK) return;
    ep_owned_destroy_all(&group->handles);
    int together = meet_to_destroy(group);
    ep_abort_set_phase(&group->abort, EP_ABORT_CLOSED);
    free_group(group, together);
}
