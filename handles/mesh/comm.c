/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ranks of a mesh, connected: a group along each list of axes that a weight needs. Groups are
 * made on demand, by all ranks together and in the same order, and live as long as the
 * communicator.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "handles/mesh/mesh.h"

/* Groups of weights have no experts. On the host backend these sizes give staging 4 MiB, which is
 * enough for its full speed. On the CUDA backend they give the rings that carry weights on one node
 * 8 MiB where there is one other rank, and 4 MiB for each of several, or less where there are more
 * than ten: what is under way while a record and its credit travel. */
#define STAGED_ROWS 64
#define PUSH_ROWS(RANKS) ((RANKS) == 2 ? 512 : 256)

/* ---- agreement ----------------------------------------------------------------------------- */

EpStatus ep_mesh_comm_gather(EpMeshComm *comm, const EpCall *call, const void *mine, size_t bytes) {
    const EpRankStatus *own = mine;
    EpStatus status = ep_bootstrap_gather(&comm->world, mine, comm->gathered, bytes, comm->timeout);
    if (status == EP_OK) return ep_rank_status_check(call, &comm->world, comm->gathered, bytes);
    /* This rank's own error takes precedence over a missing peer. */
    return own->status == EP_OK ? status : ep_fail(own->status, "%s", own->sentence);
}

static EpStatus agree(EpMeshComm *comm, const EpCall *call, EpStatus mine) {
    EpRankStatus own = ep_rank_status(mine);
    return ep_mesh_comm_gather(comm, call, &own, sizeof(own));
}

/* ---- groups -------------------------------------------------------------------------------- */

static EpMeshLink *find_link(const EpMeshComm *comm, const EpAxes *along) {
    EpMeshLink *link = comm->links;
    while (link &&
           (link->along.num != along->num ||
            memcmp(link->along.axis, along->axis, sizeof(*along->axis) * (size_t)along->num) != 0))
        link = link->next;
    return link;
}

static void close_link(EpMeshLink *link) {
    ep_group_destroy(link->group);
    ep_bootstrap_destroy(&link->bootstrap);
    free(link);
}

static EpStatus open_group(const EpMeshComm *comm, EpMeshLink *link) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = 1, config.max_top_k = 1, config.latency_sets = 0;
    int stages = comm->config.backend == EP_BACKEND_HOST;
    config.max_tokens = stages ? STAGED_ROWS : PUSH_ROWS(link->bootstrap.size);
    config.max_row_bytes = stages ? EP_MAX_ROW_BYTES : EP_PUSH_BYTES;
    config.backend = comm->config.backend, config.device = comm->config.device;
    config.timeout_seconds = comm->timeout;
    return ep_group_open(&link->bootstrap, &config, EP_FOR_WEIGHTS, &link->group);
}

/* From now on an abort reaches the group. One that came before does so now. */
static void add_link(EpMeshComm *comm, EpMeshLink *link) {
    pthread_mutex_lock(&comm->mutex);
    link->next = comm->links;
    comm->links = link;
    if (comm->aborted) (void)ep_group_abort(link->group, comm->aborted);
    pthread_mutex_unlock(&comm->mutex);
}

EpStatus ep_mesh_comm_group(EpMeshComm *comm, const EpCall *call, const EpAxes *along,
                            EpGroup **out) {
    EpMeshLink *link = find_link(comm, along);
    if (link) {
        *out = link->group;
        return EP_OK;
    }
    EpStatus status = EP_OK;
    link = calloc(1, sizeof(*link));
    if (link)
        link->along = *along, link->bootstrap = (EpBootstrap)EP_BOOTSTRAP_INIT;
    else
        status = ep_refuse(call, EP_ERR_NO_MEMORY, "comm", "out of memory");
    status = agree(comm, call, status);
    /* All ranks agree on their bootstraps. Of the groups, one along these axes may fail alone. */
    if (status == EP_OK)
        status = ep_bootstrap_mesh_within(&comm->world, &comm->mesh, along, comm->timeout,
                                          &link->bootstrap);
    if (status == EP_OK) status = agree(comm, call, open_group(comm, link));
    if (status != EP_OK) {
        if (link) close_link(link);
        return status;
    }
    add_link(comm, link);
    *out = link->group;
    return EP_OK;
}

#define MOST_LISTED 8 /* ranks in a sentence */

static const EpMeshLink *link_of(const EpMeshComm *comm, const EpGroup *group) {
    const EpMeshLink *link = comm->links;
    while (link && link->group != group)
        link = link->next;
    return link;
}

/* The ranks of a group ascend from 0 if it has all of them. */
EpStatus ep_mesh_comm_explain(const EpMeshComm *comm, const EpGroup *group, EpStatus status) {
    if (status == EP_OK || group->failed == EP_OK || group->size == comm->world.size) return status;
    const EpMeshLink *link = link_of(comm, group);
    char said[EP_SENTENCE_BYTES], axes[EP_AXES_TEXT_BYTES], list[16 * MOST_LISTED] = "";
    EpText text = {list, sizeof(list), 0};
    int32_t *ranks = malloc(sizeof(*ranks) * (size_t)group->size);
    snprintf(said, sizeof(said), "%s", ep_last_error());
    if (link && ranks &&
        ep_mesh_group(&comm->mesh, &link->along, comm->world.rank, NULL, NULL, ranks) == EP_OK) {
        for (int32_t r = 0; r < group->size && r < MOST_LISTED; r++)
            ep_text_add(&text, "%s%d", r ? ", " : "", ranks[r]);
        status = ep_fail(status, "%s; its ranks, along %s, are %s%s of the mesh", said,
                         ep_axes_text(&comm->mesh, &link->along, axes), list,
                         group->size > MOST_LISTED ? " .." : "");
    }
    free(ranks);
    return status;
}

/* ---- life ---------------------------------------------------------------------------------- */

/* Even a refused configuration sets the deadline: this rank still meets its peers within it. */
static EpStatus read_config(const EpCall *call, const EpMeshCommConfig *given,
                            EpMeshCommConfig *config, double *timeout) {
    EpSettings settings = {.timeout = EP_FALLBACK_TIMEOUT};
    EpStatus status = ep_settings_load(&settings);
    *timeout = settings.timeout;
    EP_TRY(status);
    if (given)
        EP_TRY(ep_read_struct(call, "config", given,
                              EP_FIRST_SIZE(EpMeshCommConfig, timeout_seconds), config));
    EP_TRY(ep_config_check_timeout(call, config->timeout_seconds));
    if (config->timeout_seconds > 0) *timeout = config->timeout_seconds;
    return EP_OK;
}

static EpStatus copy_mesh(const EpCall *call, const EpMesh *given, int32_t size, EpMeshComm *comm) {
    int32_t ranks;
    EP_TRY(ep_mesh_read(call, given, &comm->mesh));
    EP_TRY(ep_mesh_ranks(&comm->mesh, &ranks));
    if (ranks != size)
        return ep_refuse(call, EP_ERR_RANGE, "mesh",
                         "expected a mesh of the %d ranks of world, got %d", size, ranks);
    if (!comm->mesh.grid) return EP_OK;
    comm->grid = malloc(sizeof(*comm->grid) * (size_t)size);
    if (!comm->grid) return ep_refuse(call, EP_ERR_NO_MEMORY, "mesh.grid", "out of memory");
    memcpy(comm->grid, comm->mesh.grid, sizeof(*comm->grid) * (size_t)size);
    comm->mesh.grid = comm->grid;
    return EP_OK;
}

static EpMeshLink *take_link(EpMeshComm *comm) {
    pthread_mutex_lock(&comm->mutex);
    EpMeshLink *link = comm->links;
    comm->links = link->next;
    pthread_mutex_unlock(&comm->mutex);
    return link;
}

static void free_comm(EpMeshComm *comm) {
    for (EpMeshLink *link = comm->links; link; link = link->next)
        (void)ep_group_end(link->group);
    while (comm->links)
        close_link(take_link(comm));
    pthread_mutex_destroy(&comm->mutex);
    free(comm->gathered);
    free(comm->grid);
    free(comm->aborted);
    comm->gathered = NULL, comm->grid = NULL, comm->aborted = NULL;
    ep_object_retire(&comm->object);
}

/* Connect all ranks. That compares their meshes, and chooses the backend of all groups. The host
 * backend then connects them anew, with the staging that it needs. */
static EpStatus connect_all(EpMeshComm *comm, const EpCall *call) {
    EpAxes all = {.num = 0};
    EpGroup *group;
    for (int32_t axis = 0; axis < comm->mesh.num_axes; axis++)
        ep_axes_add(&all, axis);
    EP_TRY(ep_mesh_comm_group(comm, call, &all, &group));
    int chose_host =
        comm->config.backend == EP_BACKEND_AUTO && group->backend->id == EP_BACKEND_HOST;
    comm->config.backend = group->backend->id;
    if (chose_host) close_link(take_link(comm));
    return EP_OK;
}

/* Returns NULL when out of memory. */
static EpMeshComm *make_comm(const EpBootstrap *world) {
    EpMeshComm *comm = ep_object_create(EP_OBJECT_MESH_COMM, sizeof(*comm));
    void *gathered = calloc((size_t)world->size, EP_MESH_RENDEZVOUS_BYTES);
    if (!comm || !gathered) {
        free(comm);
        free(gathered);
        return NULL;
    }
    pthread_mutex_init(&comm->mutex, NULL);
    comm->world = *world, comm->gathered = gathered;
    return comm;
}

/* Check this rank's own arguments. The peers wait, so the caller shares the result. `comm` is NULL
 * when out of memory, which ranks tell each other first. */
static EpStatus check_own(const EpCall *call, const EpMesh *mesh, const EpMeshCommConfig *given,
                          EpMeshComm *const *out, int32_t size, EpMeshCommConfig *config,
                          double *timeout, EpMeshComm *comm) {
    EP_TRY(read_config(call, given, config, timeout));
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    return comm ? copy_mesh(call, mesh, size, comm) : EP_OK;
}

EpStatus ep_mesh_comm_create(const EpBootstrap *world, const EpMesh *mesh,
                             const EpMeshCommConfig *given, EpMeshComm **out) {
    EpCall call = {"ep_mesh_comm_create", -1};
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    double timeout;
    EP_TRY(ep_bootstrap_check(&call, world));
    call.rank = world->rank;
    EpMeshComm *comm = make_comm(world);
    EpRankStatus mine =
        ep_rank_status(check_own(&call, mesh, given, out, world->size, &config, &timeout, comm));
    EpStatus status = ep_bootstrap_enter(&call, world, EP_ENTER_COMM, comm != NULL, timeout);
    if (comm) comm->config = config, comm->timeout = timeout;
    if (status == EP_OK) status = ep_mesh_comm_gather(comm, &call, &mine, sizeof(mine));
    /* This rank's own error takes precedence over a missing peer. */
    if (status != EP_OK && mine.status != EP_OK) status = ep_fail(mine.status, "%s", mine.sentence);
    if (status == EP_OK) status = connect_all(comm, &call);
    if (status != EP_OK) {
        if (comm) free_comm(comm);
        return status;
    }
    *out = comm;
    return EP_OK;
}

EpStatus ep_mesh_comm_abort(EpMeshComm *comm, const char *sentence) {
    EpCall call = {"ep_mesh_comm_abort", -1};
    EP_TRY(ep_object_check(&call, "comm", comm, EP_OBJECT_MESH_COMM));
    call.rank = comm->world.rank;
    if (!sentence) return ep_refuse(&call, EP_ERR_NULL, "sentence", "expected a text, got NULL");
    pthread_mutex_lock(&comm->mutex);
    if (!comm->aborted) comm->aborted = strdup(sentence);
    for (EpMeshLink *link = comm->links; link; link = link->next)
        (void)ep_group_abort(link->group, sentence);
    pthread_mutex_unlock(&comm->mutex);
    return EP_OK;
}

EpStatus ep_mesh_comm_status(EpMeshComm *comm) {
    EpCall call = {"ep_mesh_comm_status", -1};
    EP_TRY(ep_object_check(&call, "comm", comm, EP_OBJECT_MESH_COMM));
    EpStatus status = EP_OK;
    for (EpMeshLink *link = comm->links; link && status == EP_OK; link = link->next)
        status = ep_mesh_comm_explain(comm, link->group, ep_group_status(link->group, NULL));
    return status;
}

void ep_mesh_comm_destroy(EpMeshComm *comm) {
    EpCall call = {"ep_mesh_comm_destroy", -1};
    if (!comm || ep_object_check(&call, "comm", comm, EP_OBJECT_MESH_COMM) != EP_OK) return;
    ep_owned_destroy_all(&comm->weights);
    free_comm(comm);
}
