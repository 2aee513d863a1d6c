/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/places.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/callback.h"

EpPlaces *ep_places_create(const EpBootstrap *inner, int32_t size, size_t room) {
    size_t ranks = (size_t)inner->size;
    EpPlaces *places = calloc(1, sizeof(*places) + ranks * sizeof(places->place[0]));
    if (!places) return NULL;
    places->inner = *inner, places->size = size, places->room = room;
    places->memory = malloc(ranks * room);
    if (places->memory) return places;
    free(places);
    return NULL;
}

void ep_places_free(EpPlaces *places) {
    if (places) free(places->memory);
    free(places);
}

static EpStatus gather(void *context, const void *in, void *out, size_t bytes, double seconds) {
    EpPlaces *self = context;
    if (bytes > self->room)
        return ep_fail(EP_ERR_BOOTSTRAP,
                       "bootstrap: expected at most %zu bytes of a place, got %zu", self->room,
                       bytes);
    EP_TRY(ep_call_allgather(&self->inner, in, self->memory, bytes, seconds));
    memset(out, 0, bytes * (size_t)self->size);
    for (int32_t r = 0; r < self->inner.size; r++)
        memcpy((char *)out + bytes * (size_t)self->place[r], self->memory + bytes * (size_t)r,
               bytes);
    return EP_OK;
}

static EpStatus meet(void *context, double seconds) {
    const EpPlaces *self = context;
    return ep_call_barrier(&self->inner, seconds);
}

EpBootstrap ep_places_bootstrap(EpPlaces *places, int32_t place) {
    EpBootstrap made = EP_BOOTSTRAP_INIT;
    made.rank = place, made.size = places->size, made.context = places;
    made.allgather = gather, made.barrier = meet;
    return made;
}

/* ---- placements ---------------------------------------------------------------------------- */

#define MAP_PIECE 512 /* experts of a placement that ranks gather at a time */

static EpStatus share_pieces(EpGroup *group, const EpMask *alive, int32_t *map, int32_t *pieces) {
    int32_t count = group->placement.num_experts, from = ep_mask_lowest(alive);
    int32_t piece[MAP_PIECE];
    for (int32_t first = 0; first < count; first += MAP_PIECE) {
        size_t bytes = sizeof(*map) * (size_t)ep_min(MAP_PIECE, count - first);
        memset(piece, 0, sizeof(piece));
        if (group->rank == from) memcpy(piece, map + first, bytes);
        EP_TRY(ep_group_gather(group, piece, pieces, sizeof(piece)));
        if (!ep_mask_has(alive, group->rank))
            memcpy(map + first, pieces + (int64_t)from * MAP_PIECE, bytes);
    }
    return EP_OK;
}

EpStatus ep_places_share_map(EpGroup *group, const EpCall *call, const EpMask *alive,
                             int32_t *map) {
    if (!ep_config_has_copies(&group->config) ||
        ep_mask_has(&group->newcomers, ep_mask_lowest(alive)))
        return EP_OK;
    int32_t *pieces = malloc(sizeof(*pieces) * MAP_PIECE * (size_t)group->size);
    EpStatus status = pieces ? EP_OK : ep_refuse(call, EP_ERR_NO_MEMORY, "group", "out of memory");
    status = ep_group_agree(group, call, status);
    if (status == EP_OK) status = share_pieces(group, alive, map, pieces);
    free(pieces);
    return status;
}
