/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creates groups, lets ranks join them, and destroys them. Creation is collective, and so is its
 * failure: the ranks gather every error before any rank goes on, so no rank is left waiting.
 *
 * A rank that joins does what all do that create a group. Those that admit it tell it what they
 * have: configuration, id, who is alive. Their group is as it was until all ranks have succeeded.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/gpus.h"
#include "bootstrap/places.h"
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

/* With max_ranks, LIBEP_TOPOLOGY speaks of places. */
static EpStatus find_location(const EpBootstrap *bootstrap, const EpGroupConfig *config,
                              const EpSettings *settings, int32_t place, EpLocation *out) {
    int32_t rank, size;
    ep_bootstrap_place(bootstrap, &rank, &size);
    if (ep_config_joins(config)) rank = place, size = config->max_ranks;
    return ep_location_find(&settings->topology, rank, size, out);
}

static EpStatus check_places(const EpCall *call, const EpBootstrap *bootstrap, EpEntrance entrance,
                             const EpGroupConfig *config) {
    int32_t empty = ep_config_places(config, bootstrap->size) - bootstrap->size;
    if (entrance == EP_ENTER_JOIN && !ep_config_joins(config))
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.max_ranks",
                         "expected that of a group that processes may join, got EP_DEFAULT");
    if (entrance == EP_ENTER_JOIN || !empty || ep_config_has_copies(config)) return EP_OK;
    return ep_refuse(
        call, EP_ERR_RANGE, "config.num_physical",
        "expected a number, since %d of %d places are empty, whose experts others must "
        "hold (ep_group_place), got EP_DEFAULT",
        empty, config->max_ranks);
}

static EpStatus check_own(const EpCall *call, const EpBootstrap *bootstrap, EpEntrance entrance,
                          const EpGroupConfig *given, EpGroup *const *out, EpGroupConfig *config,
                          EpSettings *settings, EpHello *mine) {
    EP_TRY(ep_settings_load(settings));
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EP_TRY(ep_config_read(call, given, bootstrap->size, config));
    if (config->place != EP_DEFAULT) mine->place = config->place;
    EP_TRY(check_places(call, bootstrap, entrance, config));
    const char *contradiction = ep_backend_contradiction(config, ep_backend_wish(config, settings));
    if (contradiction)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.backend",
                         "expected one that can serve this rank: %s", contradiction);
    return find_location(bootstrap, config, settings, mine->place, &mine->location);
}

static void refuse_self(EpHello *mine, EpStatus status) {
    mine->status = status;
    snprintf(mine->sentence, sizeof(mine->sentence), "%s", ep_last_error());
}

static void describe_self(const EpCall *call, const EpBootstrap *bootstrap, EpEntrance entrance,
                          const EpGroupConfig *given, EpGroup *const *out, EpGroupConfig *config,
                          EpSettings *settings, EpHello *mine) {
    memset(mine, 0, sizeof(*mine));
    mine->id = choose_id();
    mine->place = bootstrap->rank;
    EpStatus status = check_own(call, bootstrap, entrance, given, out, config, settings, mine);
    if (status == EP_OK)
        ep_hello_describe(mine, bootstrap, config, settings);
    else
        refuse_self(mine, status);
}

/* ---- building ------------------------------------------------------------------------------ */

/** What the ranks have told each other, and agreed on, before the group exists. */
typedef struct Agreement {
    EpGroup *group;    /* with memory, but not yet filled in */
    EpHello *all;      /* [size] */
    EpGpuReport *gpus; /* [size] */
    EpPlaces *places;  /* of a group that processes may join */
    EpChoice choice;   /* with places: at first this rank's own */
    EpPurpose purpose;
    const EpHello *living; /* the lowest rank that takes part in the group already, or NULL */
} Agreement;

static void free_owned(EpGroup *group) {
    ep_nodes_free(&group->nodes);
    free(group->gathered);
    group->gathered = NULL;
}

static void agreement_free(Agreement *agreed) {
    free(agreed->all);
    free(agreed->gpus);
    ep_places_free(agreed->places);
    if (agreed->group) free_owned(agreed->group);
    free(agreed->group);
}

/* Allocate what ranks tell each other. Returns 0 when out of memory. */
static int allocate_hellos(Agreement *agreed, const EpBootstrap *bootstrap,
                           const EpGroupConfig *config) {
    enum { ROOM = 2048 }; /* for pieces of a placement */
    agreed->all = calloc((size_t)bootstrap->size, sizeof(*agreed->all));
    agreed->gpus = calloc((size_t)bootstrap->size, sizeof(*agreed->gpus));
    if (ep_config_joins(config))
        agreed->places = ep_places_create(bootstrap, config->max_ranks, ROOM);
    return agreed->all && agreed->gpus && (agreed->places || !ep_config_joins(config));
}

/* Allocate all that the rendezvous of creation need. Returns 0 when out of memory. */
static int agreement_allocate(Agreement *agreed, const EpBootstrap *bootstrap,
                              const EpGroupConfig *config) {
    size_t size = (size_t)ep_config_places(config, bootstrap->size);
    EpGroup *group = ep_object_create(EP_OBJECT_GROUP, sizeof(*group));
    agreed->group = group;
    if (!allocate_hellos(agreed, bootstrap, config) || !group) return 0;
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
    if (!group->bound || find_location(&group->bootstrap, &group->config, &group->settings,
                                       group->rank, &location) != EP_OK)
        return;
    group->numa = location.numa, group->cpus = location.cpus;
}

/* Fill in what a rank knows by itself. */
static void fill_group(EpGroup *group, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                       const EpSettings *settings, const EpHello *mine, Agreement *agreed) {
    int32_t size = ep_config_places(config, bootstrap->size), rank = mine->place;
    ep_abort_open(&group->abort);
    group->alive = group->members = group->newcomers = ep_mask_of_all(size);
    group->aborted_peer = -1;
    group->bootstrap = agreed->places ? ep_places_bootstrap(agreed->places, rank) : *bootstrap;
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
    group->numa = mine->location.numa, group->cpus = mine->location.cpus;
    group->purpose = agreed->purpose;
}

/* Fill in what the ranks have agreed on. */
static void settle_group(EpGroup *group, const Agreement *agreed) {
    int assigned = group->choice.assigned;
    group->id = agreed->living ? agreed->living->id : agreed->all[0].id;
    group->tag = (int32_t)(group->id & TAG_MASK);
    group->choice = agreed->choice;
    group->choice.assigned |= assigned;
    group->backend = ep_backend_ops(group->choice.backend);
    group->latency_sets = ep_config_latency_sets(&group->config, ep_group_offers(group));
    bind_near_gpu(group);
}

/* Places of GPUs are one node. On the host memory is reserved as if each place were a node. */
static void set_one_node(EpGroup *group) {
    memset(group->nodes.of, 0, (size_t)group->size * sizeof(*group->nodes.of));
    ep_nodes_set(&group->nodes, group->rank);
    ep_config_chunks(&group->config, &group->settings, &group->nodes.sizes);
}

/* The memory of a group that processes may join is reserved before this rank meets the others. */
static EpStatus reserve(EpGroup *group, const EpChoice *choice) {
    group->choice = *choice;
    group->backend = ep_backend_ops(choice->backend);
    if (choice->backend == EP_BACKEND_CUDA) set_one_node(group);
    group->latency_sets = ep_config_latency_sets(&group->config, ep_group_offers(group));
    int before = ep_group_enter(group, group->call);
    EpStatus status = group->backend->reserve(group);
    ep_group_leave(group, before);
    return status;
}

static void free_reserved(EpGroup *group) {
    if (!group || !group->backend) return;
    int before = ep_group_enter(group, group->call);
    group->backend->close(group, 0);
    ep_group_leave(group, before);
}

/* The set of newcomers among the ranks that meet, and of all of them. */
static void list_members(const Agreement *agreed, EpMask *members, EpMask *newcomers) {
    *members = *newcomers = (EpMask){{0}};
    for (int32_t r = 0; r < agreed->places->inner.size; r++) {
        int32_t place = agreed->places->place[r] = agreed->all[r].place;
        ep_mask_add(members, place);
        if (!agreed->all[r].admits) ep_mask_add(newcomers, place);
    }
}

/* The bootstrap serves a call alone. */
static void leave_bootstrap(EpGroup *group) {
    group->bootstrap.context = NULL, group->bootstrap.allgather = NULL;
    group->bootstrap.barrier = NULL;
    group->newcomers = (EpMask){{0}};
}

static EpStatus open_with_places(EpGroup *group, const Agreement *agreed) {
    list_members(agreed, &group->members, &group->newcomers);
    group->alive = agreed->living ? agreed->living->alive : group->members;
    int before = ep_group_enter(group, group->call);
    EpStatus status = group->backend->admit(group, &group->alive);
    ep_group_leave(group, status == EP_OK && group->choice.assigned ? EP_STAY : before);
    leave_bootstrap(group);
    if (status == EP_OK && agreed->living) ep_group_keep_out(group);
    return status;
}

static EpStatus open_backend(EpGroup *group, const EpCall *call, const Agreement *agreed) {
    if (agreed->places) return open_with_places(group, agreed);
    int before = ep_group_enter(group, call->name);
    EpStatus status = group->backend->open(group);
    /* A device that libep assigned stays current, so that the caller's allocations land on it. */
    ep_group_leave(group, status == EP_OK && group->choice.assigned ? EP_STAY : before);
    status = ep_group_agree(group, call, status);
    group->newcomers = (EpMask){{0}};
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

static EpStatus build(const EpCall *call, const EpGroupConfig *config, const EpSettings *settings,
                      Agreement *agreed, EpGroup **out) {
    EpGroup *group = agreed->group;
    double begin = ep_clock();
    agreed->group = NULL;
    settle_group(group, agreed);
    EP_INFO("backend: %s%s%s", group->choice.reason, group->choice.gpu[0] ? "; GPU: " : "",
            group->choice.gpu);
    EpStatus status = open_backend(group, call, agreed);
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

static void configure_log(const EpSettings *settings, const EpBootstrap *bootstrap,
                          const EpGroupConfig *config, int32_t place) {
    int32_t rank, size;
    ep_bootstrap_place(bootstrap, &rank, &size);
    if (ep_config_joins(config)) rank = place;
    ep_log_configure(settings->log_level, settings->log_file.text);
    ep_log_set_rank(rank);
    const char *unknown = ep_settings_unknown();
    if (unknown && rank == 0)
        EP_WARN("%s in the environment is no setting of libep (ep_info lists them)", unknown);
}

/* Compare the hellos, choose the backend and number the nodes: `nodes` has room for the group's.
 * The result is equal on all ranks. */
static EpStatus compare_and_choose(const EpCall *call, const EpBootstrap *bootstrap,
                                   const EpGroupConfig *config, const EpSettings *settings,
                                   Agreement *agreed, EpNodes *nodes) {
    int32_t size = bootstrap->size, places = ep_config_places(config, size);
    int32_t domains[EP_MAX_RANKS];
    ep_hello_terminate(agreed->all, size);
    EP_TRY(ep_hello_compare(call, bootstrap, places, agreed->all));
    EP_TRY(ep_hello_living(call, agreed->all, size, &agreed->living));
    ep_hello_nodes(agreed->all, size, places, nodes->of);
    for (int32_t r = 0; r < size; r++)
        domains[r] = nodes->of[agreed->all[r].place];
    EP_TRY(ep_backend_agree(call, bootstrap, config, settings, agreed->purpose, domains,
                            agreed->gpus, &agreed->choice));
    /* Ranks of GPUs that others may join are on one node, and so are empty places. */
    for (int32_t p = 0; p < places && agreed->choice.backend == EP_BACKEND_CUDA; p++)
        nodes->of[p] = domains[ep_config_joins(config) ? 0 : p];
    ep_nodes_set(nodes, agreed->all[bootstrap->rank].place);
    EpNodeSizes *sizes = &nodes->sizes;
    ep_config_chunks(config, settings, sizes);
    if (!config->num_nodes || config->num_nodes == sizes->nodes) return EP_OK;
    return ep_refuse(call, EP_ERR_MISMATCH, "config.num_nodes",
                     "expected the nodes that the ranks are on, %d, got %d", sizes->nodes,
                     config->num_nodes);
}

static EpStatus open_group(const EpBootstrap *bootstrap, const EpGroupConfig *given,
                           EpPurpose purpose, EpEntrance entrance, EpGroup **out) {
    EpCall call = {ep_entrance_name(entrance), -1};
    EP_TRY(ep_bootstrap_check(&call, bootstrap));
    call.rank = bootstrap->rank;
    EpSettings settings = {.timeout = EP_FALLBACK_TIMEOUT};
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpHello mine;
    Agreement agreed = {.group = NULL, .purpose = purpose};
    describe_self(&call, bootstrap, entrance, given, out, &config, &settings, &mine);
    if (mine.status == EP_OK) configure_log(&settings, bootstrap, &config, mine.place);
    double timeout = ep_config_timeout(&config, &settings);
    int has_memory = agreement_allocate(&agreed, bootstrap, &config);
    if (has_memory && mine.status == EP_OK) {
        agreed.group->call = call.name, call.rank = mine.place;
        EpStatus chosen =
            agreed.places ? ep_backend_choose(&call, &config, &settings, mine.place, &agreed.choice)
                          : EP_OK;
        fill_group(agreed.group, bootstrap, &config, &settings, &mine, &agreed);
        if (agreed.places && chosen == EP_OK) chosen = reserve(agreed.group, &agreed.choice);
        if (chosen != EP_OK) refuse_self(&mine, chosen);
    }
    EpStatus status = ep_bootstrap_enter(&call, bootstrap, entrance, has_memory, timeout);
    if (status == EP_OK)
        status = ep_bootstrap_gather(bootstrap, &mine, agreed.all, sizeof(mine), timeout);
    /* This rank's own error takes precedence over a missing peer. */
    if (status != EP_OK && mine.status != EP_OK) status = ep_fail(mine.status, "%s", mine.sentence);
    if (status == EP_OK)
        status =
            compare_and_choose(&call, bootstrap, &config, &settings, &agreed, &agreed.group->nodes);
    if (status == EP_OK) status = build(&call, &config, &settings, &agreed, out);
    free_reserved(agreed.group);
    agreement_free(&agreed);
    (void)ep_bootstrap_reserve(bootstrap, EP_RESERVED_BYTES);
    return status;
}

EpStatus ep_group_open(const EpBootstrap *bootstrap, const EpGroupConfig *given, EpPurpose purpose,
                       EpGroup **out) {
    return open_group(bootstrap, given, purpose, EP_ENTER_CREATE, out);
}

EpStatus ep_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *given, EpGroup **out) {
    return ep_group_open(bootstrap, given, EP_FOR_TOKENS, out);
}

EpStatus ep_group_join(const EpBootstrap *bootstrap, const EpGroupConfig *given, EpGroup **out) {
    return open_group(bootstrap, given, EP_FOR_TOKENS, EP_ENTER_JOIN, out);
}

/* ---- admitting ----------------------------------------------------------------------------- */

static EpStatus check_admission(const EpCall *call, EpGroup *group, const EpBootstrap *bootstrap) {
    if (!ep_config_joins(&group->config))
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "group",
                         "expected one with config.max_ranks, got one without");
    EP_TRY(ep_bootstrap_check(call, bootstrap));
    if (bootstrap->size > group->size)
        return ep_refuse(call, EP_ERR_RANGE, "bootstrap.size",
                         "expected at most the group's %d places, got %d ranks", group->size,
                         bootstrap->size);
    group->backend->poll(group);
    EpStatus status = ep_group_usable(group);
    return group->failed == EP_OK ? EP_OK : status; /* a suspended group may admit */
}

/* What cannot be found out is said to the others, who would wait else. */
static void describe_admission(EpGroup *group, const EpBootstrap *bootstrap, EpHello *mine) {
    memset(mine, 0, sizeof(*mine));
    mine->id = group->id, mine->admits = 1;
    mine->place = group->rank, mine->alive = group->alive;
    ep_hello_describe(mine, bootstrap, &group->config, &group->settings);
    EpStatus status =
        find_location(bootstrap, &group->config, &group->settings, group->rank, &mine->location);
    if (status != EP_OK) refuse_self(mine, status);
}

/* What admitting changes in a group, to be taken back if it fails. */
typedef struct Standing {
    EpNodes nodes;
    EpMask members;
    int lost, shared;
} Standing;

/* Connect to the newcomers. `nodes`: the new ones, which the group takes over. */
static EpStatus connect_newcomers(EpGroup *group, const EpCall *call, const Agreement *agreed,
                                  EpNodes *nodes) {
    Standing before = {group->nodes, group->members, group->lost, group->choice.shared};
    group->nodes = *nodes, group->call = call->name;
    group->choice.shared = agreed->choice.shared;
    group->bootstrap = ep_places_bootstrap(agreed->places, group->rank);
    list_members(agreed, &group->members, &group->newcomers);
    int device = ep_group_enter(group, call->name);
    EpStatus status = group->backend->admit(group, &agreed->living->alive);
    ep_group_leave(group, device);
    leave_bootstrap(group);
    group->lost = before.lost;
    *nodes = status == EP_OK ? before.nodes : group->nodes;
    if (status == EP_OK) return EP_OK;
    group->nodes = before.nodes, group->members = before.members;
    group->choice.shared = before.shared;
    return status;
}

/* Meet the newcomers, and find out whether all ranks fit together. */
static EpStatus meet_newcomers(EpGroup *group, const EpCall *call, const EpBootstrap *bootstrap,
                               int has_memory, const EpHello *mine, Agreement *agreed,
                               EpNodes *nodes) {
    EpStatus status = ep_group_await(group);
    if (status == EP_OK)
        status = ep_bootstrap_enter(call, bootstrap, EP_ENTER_ADMIT, has_memory, group->timeout);
    if (status == EP_OK)
        status = ep_bootstrap_gather(bootstrap, mine, agreed->all, sizeof(*mine), group->timeout);
    (void)ep_group_await(NULL);
    if (status != EP_OK) return status;
    return compare_and_choose(call, bootstrap, &group->config, &group->settings, agreed, nodes);
}

EpStatus ep_group_admit(EpGroup *group, const EpBootstrap *bootstrap) {
    EpCall call = {"ep_group_admit", -1};
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    EP_TRY(check_admission(&call, group, bootstrap));
    EpHello mine;
    EpNodes nodes;
    Agreement agreed = {.group = NULL};
    double begin = ep_clock();
    describe_admission(group, bootstrap, &mine);
    int has_memory = ep_nodes_open(group->size, &nodes);
    has_memory = allocate_hellos(&agreed, bootstrap, &group->config) && has_memory;
    EpStatus status = meet_newcomers(group, &call, bootstrap, has_memory, &mine, &agreed, &nodes);
    if (status == EP_OK) status = connect_newcomers(group, &call, &agreed, &nodes);
    if (status == EP_OK && !ep_mask_has(&agreed.living->alive, group->rank)) {
        group->alive = agreed.living->alive;
        ep_group_keep_out(group);
    }
    if (status == EP_OK) EP_INFO("ranks joined within %.0f ms", 1e3 * (ep_clock() - begin));
    ep_nodes_free(&nodes);
    agreement_free(&agreed);
    return status;
}

/* ---- the end ------------------------------------------------------------------------------- */

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
 * Ranks that are masked or cut would not come. A group that processes may join has no bootstrap any
 * more; its memory stays as long as peers map it. A rank that knows that the group has failed skips
 * the barrier; poll first, since this rank may not know it yet. Returns 1 if all ranks are there.
 */
static int meet_to_destroy(EpGroup *group) {
    int finished = ep_group_end(group);
    ep_abort_set_phase(&group->abort, EP_ABORT_LEAVING);
    int all = ep_mask_has_all(&group->alive, group->size) && ep_mask_is_empty(&group->cut) &&
              !ep_config_joins(&group->config);
    return finished && all && is_usable(group) && ep_group_meet(group) == EP_OK;
}

void ep_group_destroy(EpGroup *group) {
    EpCall call = {"ep_group_destroy", -1};
    if (!group || ep_object_check(&call, "group", group, EP_OBJECT_GROUP) != EP_OK) return;
    ep_owned_destroy_all(&group->handles);
    int together = meet_to_destroy(group);
    ep_abort_set_phase(&group->abort, EP_ABORT_CLOSED);
    free_group(group, together);
}
