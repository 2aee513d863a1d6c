/* SPDX-License-Identifier: Apache-2.0 */
/* ep_read_routing_map and ep_write_routing_map on the host. */
#include "handles/prepare/host/routing_map.h"

#include <string.h>

#include "runtime/args.h"

static void read_token(const EpRoutingMap *m, int64_t token) {
    const uint8_t *map = m->map + token * m->num_experts;
    int32_t *topk_idx = (int32_t *)m->topk_idx + token * m->top_k, found = 0;
    float *weights = m->topk_weights ? m->topk_weights + token * m->top_k : NULL;
    for (int32_t e = 0; e < m->num_experts; e++) {
        if (!map[e]) continue;
        if (found == m->top_k) {
            topk_idx[found - 1] = m->num_experts;
            return;
        }
        if (weights) weights[found] = m->probs[token * m->num_experts + e];
        topk_idx[found++] = e;
    }
    for (; found < m->top_k; found++) {
        if (weights) weights[found] = 0;
        topk_idx[found] = -1;
    }
}

EpStatus ep_host_read_routing_map(const EpCall *call, const EpRoutingMap *m) {
    (void)call;
    for (int64_t token = 0; token < m->num_tokens; token++)
        read_token(m, token);
    return EP_OK;
}

static void write_entry(const EpRoutingMap *m, int64_t entry) {
    int64_t expert = m->index_type == EP_TYPE_INT64 ? ((const int64_t *)m->topk_idx)[entry]
                                                    : ((const int32_t *)m->topk_idx)[entry];
    int64_t at = entry / m->top_k * m->num_experts + expert;
    if (!ep_map_names(m, expert)) return;
    if (m->map) m->map[at] = 1;
    if (m->probs) m->probs[at] = m->topk_weights[entry];
}

EpStatus ep_host_write_routing_map(const EpCall *call, const EpRoutingMap *m) {
    (void)call;
    size_t places = (size_t)m->num_tokens * (size_t)m->num_experts;
    if (m->map) memset(m->map, 0, places);
    if (m->probs) memset(m->probs, 0, places * sizeof(float));
    for (int64_t entry = 0; entry < m->num_tokens * m->top_k; entry++)
        write_entry(m, entry);
    return EP_OK;
}
