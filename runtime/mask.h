/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_MASK_H
#define EP_RUNTIME_MASK_H

/**
 * Sets of ranks: bit r % 32 of word r / 32 is rank r's.
 */

#include <string.h>

#include "ep/ep.h"
#include "runtime/layout.h"

#define EP_MASK_WORDS (EP_MAX_RANKS / 32)

typedef struct EpMask {
    uint32_t word[EP_MASK_WORDS];
} EpMask;

/** Returns the words that hold `num_ranks` bits. */
static inline int32_t ep_mask_words(int32_t num_ranks) {
    return (num_ranks + 31) / 32;
}

static inline int ep_mask_has(const EpMask *mask, int32_t rank) {
    return mask->word[rank / 32] >> rank % 32 & 1;
}

static inline void ep_mask_add(EpMask *mask, int32_t rank) {
    mask->word[rank / 32] |= 1u << rank % 32;
}

/** Returns the lowest rank of a set that is not empty. */
static inline int32_t ep_mask_lowest(const EpMask *mask) {
    int32_t r = 0;
    while (!ep_mask_has(mask, r))
        r++;
    return r;
}

/** Returns whether no rank is in the set. */
static inline int ep_mask_is_empty(const EpMask *mask) {
    static const EpMask none = {{0}};
    return memcmp(mask, &none, sizeof(none)) == 0;
}

/** Returns the set of ranks 0 .. num_ranks - 1. */
static inline EpMask ep_mask_of_all(int32_t num_ranks) {
    EpMask mask = {{0}};
    for (int32_t r = 0; r < num_ranks; r++)
        ep_mask_add(&mask, r);
    return mask;
}

/** Returns whether the set has all ranks 0 .. num_ranks - 1. */
static inline int ep_mask_has_all(const EpMask *mask, int32_t num_ranks) {
    int32_t r = 0;
    while (r < num_ranks && ep_mask_has(mask, r))
        r++;
    return r == num_ranks;
}

/** Returns a rank's part of the digest of tickets, which is the sum of all ranks'. Another ticket
 * of any rank makes another digest: two are alike by chance once in 2^64. */
EP_HOST_DEVICE static inline uint64_t ep_mask_digest(int32_t rank, uint64_t ticket) {
    uint64_t mix = ticket * 0x9e3779b97f4a7c15u + (uint64_t)rank + 1;
    mix = (mix ^ mix >> 30) * 0xbf58476d1ce4e5b9u;
    mix = (mix ^ mix >> 27) * 0x94d049bb133111ebu;
    return mix ^ mix >> 31;
}

#endif
