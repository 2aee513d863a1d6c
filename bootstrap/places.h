/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_PLACES_H
#define EP_BOOTSTRAP_PLACES_H

/**
 * A bootstrap of the places of a group that processes may join. The caller's bootstrap has the
 * ranks that are there. Bytes of empty places are 0.
 */

#include "bootstrap/bootstrap.h"

typedef struct EpPlaces {
    EpBootstrap inner;
    int32_t size;    /**< places */
    size_t room;     /**< bytes of a rank that `memory` has place for */
    char *memory;    /**< [ranks of `inner`] of what a gathering gets */
    int32_t place[]; /**< [ranks of `inner`] ascending; the caller sets them */
} EpPlaces;

/** Returns NULL when out of memory. */
EpPlaces *ep_places_create(const EpBootstrap *inner, int32_t size, size_t room);
void ep_places_free(EpPlaces *places);

/** Returns the bootstrap for the rank at `place`: it gathers, and has no messages. It frees
 *  nothing. */
EpBootstrap ep_places_bootstrap(EpPlaces *places, int32_t place);

/** Collective, while ranks join a group with such a bootstrap: give ranks outside of `alive` the
 *  placement of the lowest rank in it, if there is one. map[P] is this rank's, in host memory. */
EpStatus ep_places_share_map(EpGroup *group, const EpCall *call, const EpMask *alive, int32_t *map);

#endif
