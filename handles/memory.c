/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_memory: what a configuration will take, before anything exists. */
#include <stdio.h>

#include "bootstrap/gpus.h"
#include "handles/handle.h"

/* As far as one rank can tell. */
static const EpBackendOps *choose(const EpGroupConfig *config, int32_t num_ranks,
                                  const EpSettings *settings, EpGroupMemory *m) {
    EpBackend wish = ep_backend_wish(config, settings);
    const char *contradiction = ep_backend_contradiction(config, wish);
    if (contradiction) {
        snprintf(m->reason, sizeof(m->reason), "%s", contradiction);
        return NULL;
    }
    char why_not[192] = "";
    int usable =
        wish != EP_BACKEND_HOST && ep_gpus_usable_here(config, num_ranks, why_not, sizeof(why_not));
    return ep_backend_ops(ep_backend_decide(wish, usable, why_not, m->reason, sizeof(m->reason)));
}

static EpStatus measure(const EpCall *call, const EpGroupConfig *config, int32_t num_ranks,
                        const EpSettings *settings, EpGroupMemory *m) {
    const EpBackendOps *backend = choose(config, num_ranks, settings, m);
    EpPlanShape shape;
    if (!backend) return EP_OK;
    m->backend = backend->id;
    backend->measure(config, num_ranks, settings, &m->shared_bytes, &m->private_bytes);
    m->private_bytes += ep_group_own_bytes(num_ranks);
    m->feasible = 1;
    /* Then every handle has to choose a size or a layout. */
    if (config->mode == EP_MODE_LATENCY && config->max_recv_rows == 0) return EP_OK;
    /* Rank 0 has the most experts. */
    EpStatus status = ep_handle_shape(call, config, backend->offers, num_ranks, 0, NULL, &shape);
    if (status != EP_OK) {
        snprintf(m->reason, sizeof(m->reason), "%s", ep_last_error());
        m->feasible = 0;
        return EP_OK;
    }
    EpHandleCost cost = ep_handle_shape_cost(&shape, backend, config);
    m->handle_bytes = cost.plan_bytes + cost.buffer_bytes;
    return EP_OK;
}

EpStatus ep_group_memory(const EpGroupConfig *config, int32_t num_ranks, EpGroupMemory *out) {
    EpCall call = {"ep_group_memory", -1};
    EpGroupConfig read;
    EP_TRY(ep_config_read(&call, config, num_ranks, &read));
    EP_TRY(ep_check_struct(&call, "out", out, sizeof(*out)));
    EpSettings settings;
    EP_TRY(ep_settings_load(&settings));
    EpGroupMemory m = EP_GROUP_MEMORY_INIT;
    EP_TRY(measure(&call, &read, num_ranks, &settings, &m));
    *out = m;
    return EP_OK;
}
