/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_ROUTING_MAP_H
#define EP_HANDLES_PREPARE_ROUTING_MAP_H

/** ep_read_routing_map and ep_write_routing_map, checked and described: routing_map.c checks, the
 *  backends convert. */

#include "ep/ep.h"

typedef struct EpRoutingMap {
    int64_t num_tokens;
    int32_t num_experts, top_k;
    EpType index_type;   /**< INT32 where the map is read */
    uint8_t *map;        /**< [num_tokens, num_experts], or NULL where it is written */
    float *probs;        /**< [num_tokens, num_experts], or NULL */
    void *topk_idx;      /**< [num_tokens, top_k] */
    float *topk_weights; /**< [num_tokens, top_k], or NULL */
    EpStream stream;
} EpRoutingMap;

/** Whether an entry names an expert. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int
    ep_map_names(const EpRoutingMap *m, int64_t expert) {
    return expert >= 0 && expert < m->num_experts;
}

#endif
