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
#include "bootstrap/bind.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/choose.h"
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
                          const EpGroupConfig *given, EpGroup *const *out, EpGroupConfig *config,
                          EpSettings *settings, EpIntroduction *mine) {
    EP_TRY(ep_settings_load(settings));
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EP_TRY(ep_config_read(call, given, bootstrap->size, config));
    const char *contradiction = ep_backend_contradiction(config, ep_backend_wish(config, settings));
    if (contradiction)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.backend",
                         "expected one that can serve this rank: %s", contradiction);
    return ep_place_find(&settings->topology, bootstrap->rank, bootstrap->size, &mine->place);
}

static void introduce(const EpCall *call, const EpBootstrap *bootstrap, const EpGroupConfig *given,
                      EpGroup *const *out, EpGroupConfig *config, EpSettings *settings,
                      EpIntroduction *mine) {
    memset(mine, 0, sizeof(*mine));
    mine->id = choose_id();
    mine->status = check_own(call, bootstrap, given, out, config, settings, mine);
    if (mine->status == EP_OK)
        ep_introduce_config(mine, config, bootstrap->size, settings);
    else
        snprintf(mine->sentence, sizeof(mine->sentence), "%s", ep_last_error());
}

/* ---- building ------------------------------------------------------------------------------ */

/** What is known once ranks have met. */
typedef struct Meeting {
    EpIntroduction *all; /* [size] */
    EpGpuReport *gpus;   /* [size] */
    int32_t *nodes;      /* [size] */
    int32_t num_nodes;
    EpChoice choice;
} Meeting;

static void meeting_free(Meeting *m) {
    free(m->all);
    free(m->gpus);
    free(m->nodes);
}

static int meeting_allocate(Meeting *m, size_t size) {
    m->all = calloc(size, sizeof(*m->all));
    m->gpus = calloc(size, sizeof(*m->gpus));
    m->nodes = calloc(size, sizeof(*m->nodes));
    if (m->all && m->gpus && m->nodes) return 1;
    meeting_free(m);
    return 0;
}

/* Before anything is pinned or shared, so that it lies where the rank will run. */
static void bind_near_gpu(EpGroup *group) {
    char path[64], said[160] = "expected a GPU, got none on the host backend";
    EpPlace place;
    if (group->settings.bind != EP_BIND_GPU) return;
    if (group->choice.backend == EP_BACKEND_CUDA) {
        ep_bind_list_path(group->choice.bus, path, sizeof(path));
        group->bound = ep_bind_to_list(path, group->choice.alone, said, sizeof(said));
    }
    EP_LOG_AT(group->bound ? EP_LOG_INFO : EP_LOG_WARN, "EP_BIND=gpu: %s", said);
    if (!group->bound ||
        ep_place_find(&group->settings.topology, group->rank, group->size, &place) != EP_OK)
        return;
    group->numa = place.numa, group->cpus = place.cpus;
}

/* Takes over the meeting's list of nodes. */
static void fill_group(EpGroup *group, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                       const EpSettings *settings, Meeting *m) {
    int32_t size = bootstrap->size, rank = bootstrap->rank;
    group->bootstrap = *bootstrap;
    group->config = *config;
    group->settings = *settings;
    group->rank = rank, group->size = size;
    group->placement = ep_config_placement(config, size);
    group->first_expert = ep_placement_first(&group->placement, rank);
    group->num_local = ep_placement_count(&group->placement, rank);
    group->timeout = ep_config_timeout(config, settings);
    group->id = m->all[0].id;
    group->tag = (int32_t)(group->id & TAG_MASK);
    group->numa = m->all[rank].place.numa, group->cpus = m->all[rank].place.cpus;
    group->nodes = m->nodes, group->num_nodes = m->num_nodes;
    m->nodes = NULL;
    group->choice = m->choice;
    group->backend = ep_backend_ops(group->choice.backend);
    bind_near_gpu(group);
}

static EpStatus open_backend(EpGroup *group) {
    int before = ep_group_enter(group, "ep_group_create");
    EpStatus status = group->backend->open(group);
    /* A device that nobody had chosen stays current: what the caller allocates next is for it. */
    ep_group_leave(group, status == EP_OK && group->choice.dealt ? EP_STAY : before);
    return status;
}

static void free_group(EpGroup *group, int together) {
    int before = ep_group_enter(group, "ep_group_destroy");
    for (int i = 0; i < EP_MAX_WINDOWS; i++)
        if (group->windows[i].memory)
            group->backend->close_window(group, &group->windows[i], together);
    group->backend->close(group, together);
    ep_group_leave(group, before);
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
                      const EpSettings *settings, Meeting *m, EpGroup **out) {
    EpGroup *group = ep_object_create(EP_OBJECT_GROUP, sizeof(*group));
    if (!group) return ep_refuse(call, EP_ERR_NO_MEMORY, "out", "out of memory");
    fill_group(group, bootstrap, config, settings, m);
    EP_INFO("backend: %s%s%s", group->choice.reason, group->choice.gpu[0] ? "; GPU: " : "",
            group->choice.gpu);
    EpStatus status = ep_group_agree(group, call, open_backend(group));
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

/* Number the nodes and choose the backend, all ranks alike. */
static EpStatus meet(const EpCall *call, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                     const EpSettings *settings, Meeting *m) {
    EP_TRY(ep_introductions_check(call, m->all, bootstrap->size));
    m->num_nodes = ep_introductions_nodes(m->all, bootstrap->size, m->nodes);
    return ep_backend_agree(call, bootstrap, config, settings, m->nodes, m->gpus, &m->choice);
}

EpStatus ep_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *given, EpGroup **out) {
    EpCall call = {"ep_group_create", -1};
    EP_TRY(ep_bootstrap_check(&call, bootstrap));
    call.rank = bootstrap->rank;
    EpSettings settings = {.timeout = FALLBACK_TIMEOUT};
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpIntroduction mine;
    Meeting m;
    if (!meeting_allocate(&m, (size_t)bootstrap->size))
        return ep_refuse(&call, EP_ERR_NO_MEMORY, "bootstrap", "out of memory");
    introduce(&call, bootstrap, given, out, &config, &settings, &mine);
    if (mine.status == EP_OK) configure_log(&settings, bootstrap->rank);
    EpStatus status = bootstrap->allgather(bootstrap->context, &mine, m.all, sizeof(mine),
                                           ep_config_timeout(&config, &settings));
    /* What is wrong here comes before who is missing. */
    if (status != EP_OK && mine.status != EP_OK) status = ep_fail(mine.status, "%s", mine.sentence);
    if (status == EP_OK) status = meet(&call, bootstrap, &config, &settings, &m);
    if (status == EP_OK) status = build(&call, bootstrap, &config, &settings, &m, out);
    meeting_free(&m);
    return status;
}

void ep_group_destroy(EpGroup *group) {
    EpCall call = {"ep_group_destroy", -1};
    if (!group || ep_object_check(&call, "group", group, EP_OBJECT_GROUP) != EP_OK) return;
    while (group->handles)
        ep_handle_destroy(group->handles);
    /* Peers may still store into this rank's memory until they have finished, too. Nobody comes who
     * has found that the group has failed, of which this rank may not have heard. */
    int together = group->failed == EP_OK && group->backend->finish(group) == EP_OK;
    group->backend->poll(group);
    together = together && group->failed == EP_OK &&
               group->bootstrap.barrier(group->bootstrap.context, group->timeout) == EP_OK;
    free_group(group, together);
}
