/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/host/statistics.h"

#include <string.h>

#include "handles/handle.h"

EpStatus ep_host_run(EpHandle *handle, const EpStatistics *stats, EpHostRun *run,
                     const void *call) {
    const EpGroup *group = handle->group;
    double waited[EP_MAX_RANKS];
    if (!stats->peer_wait && !stats->peer_longest_wait) return run(handle, call);
    memset(waited, 0, (size_t)group->size * sizeof(*waited));
    ep_exchange_measure(ep_host(group)->exchange, waited);
    EpStatus status = run(handle, call);
    ep_exchange_measure(ep_host(group)->exchange, NULL);
    for (int32_t r = 0; r < group->size && status == EP_OK; r++) {
        int64_t wait = (int64_t)(waited[r] * 1e9);
        if (stats->peer_wait) stats->peer_wait[r] += wait;
        if (stats->peer_longest_wait)
            stats->peer_longest_wait[r] = ep_max(stats->peer_longest_wait[r], wait);
    }
    return status;
}

void ep_host_count_rows(const EpGroup *group, const EpStatistics *stats, const int32_t *begin) {
    for (int32_t r = 0; r < group->size; r++) {
        int64_t rows = ep_mask_has(&group->alive, r) ? begin[r + 1] - begin[r] : 0;
        if (stats->peer_rows) stats->peer_rows[r] += rows;
        if (stats->peer_bytes) stats->peer_bytes[r] += rows * stats->row_bytes;
    }
}

void ep_host_count_experts(const EpStatistics *stats, const int32_t *counts, int32_t num_local) {
    for (int32_t e = 0; stats->expert_tokens && e < num_local; e++) {
        if (stats->is_narrow)
            ((int32_t *)stats->expert_tokens)[e] += counts[e];
        else
            ((int64_t *)stats->expert_tokens)[e] += counts[e];
    }
}
