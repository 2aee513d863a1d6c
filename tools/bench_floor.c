/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_floor.h"

#include <stdlib.h>
#include <string.h>

#include "bench_error.h"

enum { COPY_INDEX, COPY_ROWS, NUM_COPIES };

typedef struct Floor {
    Case *c;
    void *index; /* where the indices go */
} Floor;

static bool copy(void *context, int which) {
    Floor *floor = context;
    Case *c = floor->c;
    if (which == COPY_INDEX) {
        size_t entries = (size_t)(c->tokens * c->options->top_k);
        memcpy(floor->index, c->buffers.index,
               entries * ep_type_bytes((EpType)c->options->index_type));
        return true;
    }
    for (int64_t i = 0; i < c->slots.num_slots; i++)
        memcpy(c->buffers.slots_out + (size_t)i * c->row_bytes,
               c->buffers.slots_in + (size_t)i * c->row_bytes, c->row_bytes);
    return true;
}

bool floor_measure(Case *c, Quantiles out[NUM_PHASES]) {
    Quantiles copies[NUM_COPIES];
    Floor floor = {c,
                   bench_alloc((size_t)(c->tokens * c->options->top_k), sizeof(int64_t), "floor")};
    bool ok = world_all(c->world, floor.index != NULL) &&
              time_calls(c->world, 1, c->options->iterations, copy, &floor, NUM_COPIES, copies);
    for (int p = 0; ok && p < NUM_PHASES; p++)
        out[p] = copies[p == PHASE_PREPARE ? COPY_INDEX : COPY_ROWS];
    free(floor.index);
    return ok;
}
