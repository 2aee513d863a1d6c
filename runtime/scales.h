/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_SCALES_H
#define EP_RUNTIME_SCALES_H

/**
 * Where the scales of a receive row lie: the one place that computes it.
 */

#include "ep/ep.h"
#include "runtime/placement.h"

/** Shape of recv_scales. By row: [rows, count]. By column: slabs of [count, slab_rows]. */
typedef struct EpScaleMap {
    int32_t by_column;
    int32_t element_bytes;
    int64_t count;     /**< scales of a row */
    int64_t slab_rows; /**< by column: rows of the tensor; BATCHED: rows_per_expert */
} EpScaleMap;

/** Byte at which scale `i` of a receive row begins. */
EP_HOST_DEVICE static inline int64_t ep_scale_at(const EpScaleMap *map, int64_t row, int64_t i) {
    int64_t index = row * map->count + i;
    if (map->by_column)
        index = (row / map->slab_rows * map->count + i) * map->slab_rows + row % map->slab_rows;
    return index * map->element_bytes;
}

/** Bytes from a scale of a receive row to the row's next. */
EP_HOST_DEVICE static inline int64_t ep_scale_step(const EpScaleMap *map) {
    return (map->by_column ? map->slab_rows : 1) * map->element_bytes;
}

#endif
