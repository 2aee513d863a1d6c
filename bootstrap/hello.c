/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/bootstrap.h"

#include <string.h>

#include "runtime/names.h"

static const struct {
    const char *text;
    EpNames names;
} fields[EP_HELLO_FIELDS] = {{"the library's version", EP_NUMBERS},
                             {"config.num_experts", EP_NUMBERS},
                             {"config.max_tokens", EP_NUMBERS},
                             {"config.max_top_k", EP_NUMBERS},
                             {"config.max_row_bytes", EP_NUMBERS},
                             {"config.max_scale_bytes", EP_NUMBERS},
                             {"config.alignment", EP_NUMBERS},
                             {"config.max_recv_rows", EP_NUMBERS},
                             {"config.overflow", EP_NAMES_OVERFLOW},
                             {"config.backend", EP_NAMES_BACKEND},
                             {"LIBEP_BACKEND", EP_NAMES_BACKEND},
                             {"LIBEP_STAGE_BYTES", EP_NUMBERS},
                             {"config.nccl_comm being given", EP_NUMBERS},
                             {"config.mode", EP_NAMES_MODE},
                             {"config.duplicates", EP_NAMES_DUPLICATES},
                             {"config.latency_sets", EP_NUMBERS},
                             {"config.num_nodes", EP_NUMBERS},
                             {"config.sums", EP_NAMES_SUMS},
                             {"config.node_rows", EP_NUMBERS},
                             {"config.num_physical", EP_NUMBERS},
                             {"config.choice", EP_NAMES_CHOICE},
                             {"LIBEP_NODE_CHUNK", EP_NUMBERS},
                             {"LIBEP_WEIGHT_SMS", EP_NUMBERS},
                             {"LIBEP_NODE_LATENCY", EP_NUMBERS},
                             {"bootstrap.isend being given", EP_NUMBERS}};

void ep_hello_describe(EpHello *mine, const EpBootstrap *bootstrap, const EpGroupConfig *c,
                       const EpSettings *settings) {
    const int64_t values[EP_HELLO_FIELDS] = {ep_version(),
                                             c->num_experts,
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
                                             bootstrap->isend != NULL};
    memcpy(mine->field, values, sizeof(values));
    mine->topology_hash = settings->topology.hash;
    memcpy(mine->topology, settings->topology.text, sizeof(mine->topology));
}

/* The order of summation follows from the nodes: if one rank lacked the setting, all ranks would
 * compute other sums, without a word. */
static EpStatus compare_topologies(const EpCall *call, const EpHello *all, int32_t size) {
    for (int32_t r = 1; r < size; r++)
        if (all[r].topology_hash != all[0].topology_hash)
            return ep_refuse(call, EP_ERR_MISMATCH, "LIBEP_TOPOLOGY",
                             "expected one value on all ranks, got '%s' on rank 0 and '%s' on rank "
                             "%d%s",
                             all[0].topology, all[r].topology, r,
                             strcmp(all[r].topology, all[0].topology) ? "" : ", another one");
    return EP_OK;
}

static EpStatus check_peers(const EpCall *call, const EpHello *all, int32_t size) {
    for (int32_t r = 0; r < size; r++)
        if (all[r].status != EP_OK)
            return ep_refuse(call, EP_ERR_PEER, "bootstrap", "rank %d was refused: %s", r,
                             all[r].sentence);
    return EP_OK;
}

static EpStatus check_elsewhere(const EpCall *call, const EpBootstrap *bootstrap) {
    int32_t rank;
    const EpHello *other = ep_bootstrap_elsewhere(bootstrap, sizeof(*other), &rank);
    if (!other) return EP_OK;
    return ep_refuse(call, EP_ERR_PEER, "bootstrap", "rank %d of the mesh was refused: %.*s", rank,
                     (int)sizeof(other->sentence) - 1, other->sentence);
}

EpStatus ep_hello_compare(const EpCall *call, const EpBootstrap *bootstrap, const EpHello *all) {
    int32_t size = bootstrap->size;
    const EpHello *mine = &all[call->rank];
    char first[EP_NAME_BYTES], other[EP_NAME_BYTES];
    if (mine->status != EP_OK) return ep_fail(mine->status, "%s", mine->sentence);
    EP_TRY(check_peers(call, all, size));
    EP_TRY(check_elsewhere(call, bootstrap));
    for (int32_t r = 1; r < size; r++)
        for (int i = 0; i < EP_HELLO_FIELDS; i++)
            if (all[r].field[i] != all[0].field[i])
                return ep_refuse(call, EP_ERR_MISMATCH, fields[i].text,
                                 "expected one value on all ranks, got %s on rank 0 and %s on "
                                 "rank %d",
                                 ep_name(fields[i].names, all[0].field[i], first),
                                 ep_name(fields[i].names, all[r].field[i], other), r);
    return compare_topologies(call, all, size);
}

void ep_hello_terminate(EpHello *all, int32_t size) {
    for (int32_t r = 0; r < size; r++) {
        all[r].sentence[sizeof(all[r].sentence) - 1] = 0;
        all[r].topology[sizeof(all[r].topology) - 1] = 0;
        all[r].location.machine[sizeof(all[r].location.machine) - 1] = 0;
    }
}

void ep_hello_nodes(const EpHello *all, int32_t size, int32_t *nodes) {
    int32_t count = 0;
    for (int32_t r = 0; r < size; r++) {
        int32_t other = 0;
        while (!ep_location_same_node(&all[r].location, &all[other].location))
            other++;
        nodes[r] = other < r ? nodes[other] : count++;
    }
}
