/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/bootstrap.h"

#include <string.h>

#include "runtime/names.h"

static const struct {
    const char *text;
    EpNames names;
} fields[EP_HELLO_FIELDS] = {
    {"config.num_experts", EP_NUMBERS},     {"config.max_tokens", EP_NUMBERS},
    {"config.max_top_k", EP_NUMBERS},       {"config.max_row_bytes", EP_NUMBERS},
    {"config.max_scale_bytes", EP_NUMBERS}, {"config.alignment", EP_NUMBERS},
    {"config.max_recv_rows", EP_NUMBERS},   {"config.overflow", EP_NAMES_OVERFLOW},
    {"config.backend", EP_NAMES_BACKEND},   {"LIBEP_BACKEND", EP_NAMES_BACKEND},
    {"LIBEP_STAGE_BYTES", EP_NUMBERS},      {"config.nccl_comm being given", EP_NUMBERS},
    {"config.mode", EP_NAMES_MODE},         {"config.duplicates", EP_NAMES_DUPLICATES},
    {"config.latency_sets", EP_NUMBERS},    {"config.num_nodes", EP_NUMBERS},
    {"config.sums", EP_NAMES_SUMS},         {"config.node_rows", EP_NUMBERS},
    {"config.num_physical", EP_NUMBERS},    {"config.choice", EP_NAMES_CHOICE},
    {"LIBEP_NODE_CHUNK", EP_NUMBERS},       {"LIBEP_WEIGHT_SMS", EP_NUMBERS},
    {"LIBEP_NODE_LATENCY", EP_NUMBERS},     {"config.masks", EP_NUMBERS},
    {"config.on_late", EP_NAMES_LATE},      {"config.late_us", EP_NUMBERS},
    {"config.max_ranks", EP_NUMBERS},       {"bootstrap.isend being given", EP_NUMBERS}};

void ep_hello_describe(EpHello *mine, const EpBootstrap *bootstrap, const EpGroupConfig *c,
                       const EpSettings *settings) {
    const int64_t values[EP_HELLO_FIELDS] = {c->num_experts,
                                             c->max_tokens,
                                             c->max_top_k,
                                             c->max_row_bytes,
                                             c->max_scale_bytes,
                                             c->alignment,
                                             c->max_recv_rows,
                                             c->overflow,
                                             c->backend,
                                             settings->backend,
                                             settings->stage_bytes,
                                             c->nccl_comm != NULL,
                                             c->mode,
                                             c->duplicates,
                                             c->latency_sets,
                                             c->num_nodes,
                                             c->sums,
                                             ep_config_node_rows(c),
                                             c->num_physical,
                                             c->choice,
                                             settings->node_chunk,
                                             settings->weight_sms,
                                             settings->node_latency,
                                             c->masks,
                                             c->on_late,
                                             c->late_us,
                                             c->max_ranks,
                                             !ep_config_joins(c) && bootstrap->isend};
    memcpy(mine->field, values, sizeof(values));
    mine->topology_hash = settings->topology.hash;
    memcpy(mine->topology, settings->topology.text, sizeof(mine->topology));
}

/* The order of summation follows from the nodes: if one rank lacked the setting, all ranks would
 * compute other sums, without a word. */
static EpStatus compare_topologies(const EpCall *call, const EpHello *all, int32_t size) {
    for (int32_t r = 1; r < size; r++)
        if (all[r].topology_hash != all[0].topology_hash)
            return ep_refuse(
                call, EP_ERR_MISMATCH, "LIBEP_TOPOLOGY",
                "expected one value on all ranks, got '%s' on rank %d and '%s' on rank "
                "%d%s",
                all[0].topology, all[0].place, all[r].topology, all[r].place,
                strcmp(all[r].topology, all[0].topology) ? "" : ", another one");
    return EP_OK;
}

static EpStatus check_peers(const EpCall *call, const EpHello *all, int32_t size) {
    for (int32_t r = 0; r < size; r++)
        if (all[r].status != EP_OK)
            return ep_refuse(call, EP_ERR_PEER, "bootstrap", "rank %d was refused: %s",
                             all[r].place, all[r].sentence);
    return EP_OK;
}

static EpStatus check_elsewhere(const EpCall *call, const EpBootstrap *bootstrap) {
    int32_t rank;
    const EpHello *other = ep_bootstrap_elsewhere(bootstrap, sizeof(*other), &rank);
    if (!other) return EP_OK;
    return ep_refuse(call, EP_ERR_PEER, "bootstrap", "rank %d of the mesh was refused: %.*s", rank,
                     (int)sizeof(other->sentence) - 1, other->sentence);
}

static EpStatus check_places(const EpCall *call, const EpHello *all, int32_t size, int32_t places) {
    for (int32_t r = 0, next = 0; r < size; next = all[r++].place + 1)
        if (all[r].place < next || all[r].place >= places)
            return ep_refuse(call, EP_ERR_ORDER, "config.place",
                             "expected places below %d that ascend with the ranks of the "
                             "bootstrap, got %d on rank %d",
                             places, all[r].place, r);
    return EP_OK;
}

EpStatus ep_hello_compare(const EpCall *call, const EpBootstrap *bootstrap, int32_t places,
                          const EpHello *all) {
    int32_t size = bootstrap->size;
    const EpHello *mine = &all[bootstrap->rank];
    char first[EP_NAME_BYTES], other[EP_NAME_BYTES];
    if (mine->status != EP_OK) return ep_fail(mine->status, "%s", mine->sentence);
    EP_TRY(check_peers(call, all, size));
    EP_TRY(check_elsewhere(call, bootstrap));
    for (int32_t r = 1; r < size; r++)
        for (int i = 0; i < EP_HELLO_FIELDS; i++)
            if (all[r].field[i] != all[0].field[i])
                return ep_refuse(call, EP_ERR_MISMATCH, fields[i].text,
                                 "expected one value on all ranks, got %s on rank %d and %s on "
                                 "rank %d",
                                 ep_name(fields[i].names, all[0].field[i], first), all[0].place,
                                 ep_name(fields[i].names, all[r].field[i], other), all[r].place);
    EP_TRY(check_places(call, all, size, places));
    return compare_topologies(call, all, size);
}

void ep_hello_terminate(EpHello *all, int32_t size) {
    for (int32_t r = 0; r < size; r++) {
        all[r].sentence[sizeof(all[r].sentence) - 1] = 0;
        all[r].topology[sizeof(all[r].topology) - 1] = 0;
        all[r].location.machine[sizeof(all[r].location.machine) - 1] = 0;
    }
}

void ep_hello_nodes(const EpHello *all, int32_t count, int32_t size, int32_t *nodes) {
    int32_t seen = 0, place = 0, node = 0;
    for (int32_t r = 0; r < count; r++) {
        int32_t other = 0;
        for (; place < all[r].place; place++)
            nodes[place] = node;
        while (!ep_location_same_node(&all[r].location, &all[other].location))
            other++;
        node = other < r ? nodes[all[other].place] : seen++;
        nodes[place++] = node;
    }
    for (; place < size; place++)
        nodes[place] = node;
}

/* ---- joining ------------------------------------------------------------------------------- */

static const EpHello *find_place(const EpHello *all, int32_t count, int32_t place) {
    for (int32_t r = 0; r < count; r++)
        if (all[r].place == place) return &all[r];
    return NULL;
}

/* Returns the lowest place that speaks against a rank's view of who is alive, or -1: it is alive
 * there, but does not admit, or has another view. */
static int32_t find_contradiction(const EpHello *all, int32_t count, const EpHello *view) {
    for (int32_t p = 0; p < EP_MAX_RANKS; p++) {
        if (!ep_mask_has(&view->alive, p)) continue;
        const EpHello *other = find_place(all, count, p);
        if (!other || !other->admits || memcmp(&other->alive, &view->alive, sizeof(EpMask)))
            return p;
    }
    return -1;
}

/* A rank that was masked may still see itself as alive. So the lowest consistent view counts. */
EpStatus ep_hello_living(const EpCall *call, const EpHello *all, int32_t count,
                         const EpHello **living) {
    const EpHello *first = NULL;
    *living = NULL;
    for (int32_t r = 0; r < count && !*living; r++) {
        if (!all[r].admits) continue;
        if (!first) first = &all[r];
        if (all[r].id != first->id)
            return ep_refuse(call, EP_ERR_MISMATCH, "group",
                             "expected one group on all ranks that admit, got different ones on "
                             "ranks %d and %d",
                             first->place, all[r].place);
        if (ep_mask_has(&all[r].alive, all[r].place) && find_contradiction(all, count, &all[r]) < 0)
            *living = &all[r];
    }
    if (*living || !first) return EP_OK;
    int32_t place = find_contradiction(all, count, first);
    const EpHello *other = find_place(all, count, place);
    return ep_refuse(call, EP_ERR_ORDER, "bootstrap",
                     "rank %d is alive as rank %d sees it, but %s: ep_group_mask comes first",
                     place, first->place,
                     !other          ? "is not here"
                     : other->admits ? "sees other ranks alive"
                                     : "another process wants its place");
}
