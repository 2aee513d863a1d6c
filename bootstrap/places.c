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
