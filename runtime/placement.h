/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_PLACEMENT_H
#define EP_RUNTIME_PLACEMENT_H

/**
 * Which rank owns which expert: contiguous blocks in rank order, the first E mod R one larger.
 * Everything that asks does so here, so that a placement map has one place to go.
 */

#include "runtime/divide.h"

typedef struct EpPlacement {
    int32_t num_experts;
    int32_t num_ranks;
} EpPlacement;

EP_HOST_DEVICE static inline int32_t ep_placement_count(const EpPlacement *p, int32_t rank) {
    return p->num_experts / p->num_ranks + (rank < p->num_experts % p->num_ranks);
}

EP_HOST_DEVICE static inline int32_t ep_placement_first(const EpPlacement *p, int32_t rank) {
    int32_t larger = p->num_experts % p->num_ranks;
    return rank * (p->num_experts / p->num_ranks) + (rank < larger ? rank : larger);
}

/** Most experts that any rank owns. */
EP_HOST_DEVICE static inline int32_t ep_placement_most(const EpPlacement *p) {
    return ep_placement_count(p, 0);
}

/** Owner of expert 0 <= e < E. */
EP_HOST_DEVICE static inline int32_t ep_placement_owner(const EpPlacement *p, int32_t expert) {
    int32_t base = p->num_experts / p->num_ranks, larger = p->num_experts % p->num_ranks;
    int32_t in_larger = larger * (base + 1);
    if (expert < in_larger) return expert / (base + 1);
    return larger + (expert - in_larger) / base;
}

/** The same for kernels, which divide by what they find here. */
typedef struct EpOwners {
    int32_t larger;    /**< ranks with one expert more, the first ones */
    int32_t in_larger; /**< their experts */
    EpDivisor more, base;
} EpOwners;

static inline EpOwners ep_placement_owners(const EpPlacement *p) {
    int32_t base = p->num_experts / p->num_ranks, larger = p->num_experts % p->num_ranks;
    EpOwners owners = {larger, larger * (base + 1), ep_divisor(base + 1),
                       ep_divisor(base > 1 ? base : 1)};
    return owners;
}

EP_HOST_DEVICE static inline int32_t ep_owner(const EpOwners *o, int32_t expert) {
    int larger = expert < o->in_larger;
    EpDivisor by = larger ? o->more : o->base;
    return (larger ? 0 : o->larger) + ep_quotient(expert - (larger ? 0 : o->in_larger), by);
}

EP_HOST_DEVICE static inline int32_t ep_owner_first(const EpOwners *o, int32_t rank) {
    return rank * (o->more.by - 1) + (rank < o->larger ? rank : o->larger);
}

EP_HOST_DEVICE static inline int32_t ep_owner_count(const EpOwners *o, int32_t rank) {
    return o->more.by - 1 + (rank < o->larger);
}

#endif
