/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_ROUTING_H
#define BENCH_ROUTING_H

/**
 * The routing of every rank, held by every rank: what each slot of the job must hold follows from
 * it. Generated alike everywhere, or read by rank 0 from a trace file and handed to all.
 */

#include <stdbool.h>
#include <stdint.h>

#include "bench_options.h"
#include "bench_world.h"

typedef struct Routing {
    int num_ranks, top_k, num_experts;
    int64_t *tokens;    /**< [num_ranks] */
    int64_t *first;     /**< [num_ranks + 1] number of tokens before this rank's */
    int32_t *experts;   /**< [first[num_ranks], top_k]; negative: none */
    int64_t max_tokens; /**< most of any rank */
} Routing;

/** Collective. `size` is the sweep's number of tokens; ignored for a trace file. */
bool routing_make(World *world, const Options *options, int64_t size, Routing *out);

/** Allocate for the given token counts, which are copied; indices are zero. */
bool routing_alloc(Routing *routing, int num_ranks, int top_k, int num_experts,
                   const int64_t *tokens);
void routing_free(Routing *routing);

/** The top_k indices of a token. */
static inline const int32_t *routing_row(const Routing *routing, int rank, int64_t token) {
    return &routing->experts[(routing->first[rank] + token) * routing->top_k];
}

/** Where experts live: contiguous blocks, the first E % R ranks own one more. */
int routing_first_expert(const Routing *routing, int rank);
int routing_owner(const Routing *routing, int expert);

#endif
