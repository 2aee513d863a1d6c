/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_SOURCES_H
#define EP_HANDLES_SOURCES_H

/** ep_plan_sources: the outputs that a backend fills from a plan. */

#include "handles/handle.h"
#include "runtime/args.h"

typedef struct EpSources {
    const EpCall *call;
    int64_t rows;
    int32_t *ranks, *tokens; /**< [rows], of the caller, on the host */
    int32_t *entries;        /**< the same; NULL: not asked for */
} EpSources;

/** Write -1 everywhere. EP_ERR_BUFFER_SIZE if there are fewer rows than the plan has. */
EpStatus ep_sources_begin(const EpSources *sources, int64_t recv_rows);

/** Write a row's source, unless there is no such row. k: -1 where the row stands for all. */
static inline void ep_sources_put(const EpSources *s, int64_t row, int32_t rank, int32_t token,
                                  int32_t k) {
    if (row < 0 || row >= s->rows) return;
    s->ranks[row] = rank, s->tokens[row] = token;
    if (s->entries) s->entries[row] = k;
}

#endif
