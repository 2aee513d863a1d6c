/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_LAYOUTS_H
#define EP_RUNTIME_LAYOUTS_H

/**
 * The orders of slots in the receive buffer. The table in layouts.c describes each of them. All
 * other code asks for facts and never for a layout's name.
 *
 * Slots lie in blocks. Either each local expert has a block, and each entry has a slot in the block
 * of its expert; or each source rank has a block, and a row has one slot there for all its entries.
 * Blocks follow one another (packed), or each has a fixed number of slots.
 *
 *                            packed          fixed
 *     blocks of experts      expert-major    batched
 *     blocks of sources      flat            rank-major
 */

#include "ep/ep.h"

typedef enum EpLayoutBits {
    EP_SLOTS_OF_ROWS = 1, /**< blocks of sources: a row has one slot */
    EP_SLOTS_FIXED = 2,   /**< blocks have a fixed number of slots */
    EP_SLOTS_SIZED = 4,   /**< rows_per_expert sets that number; else tensors choose one, up to
                               max_tokens, which a plan counts with */
    EP_SLOTS_WEIGHED = 8  /**< EP_WEIGHTS_ALL is possible */
} EpLayoutBits;

typedef struct EpLayoutFacts {
    const char *symbol; /**< "EP_LAYOUT_RANK_MAJOR" */
    const char *name;   /**< "rank-major" */
    uint32_t bits;      /**< of EpLayoutBits */
    const char *blocks; /**< EP_SLOTS_FIXED: what dimension 0 of receive tensors counts ... */
    const char *rows;   /**< ... and what dimension 1 does */
} EpLayoutFacts;

/** Returns the facts of a layout, or NULL if `layout` is no EpLayout. */
const EpLayoutFacts *ep_layout_facts(EpLayout layout);

static inline int ep_layout_has(EpLayout layout, EpLayoutBits bits) {
    return (ep_layout_facts(layout)->bits & bits) != 0;
}

/** Returns the last layout; the first is 1. */
EpLayout ep_layout_last(void);

/** A list of layouts, for sentences. */
typedef struct EpLayoutList {
    char text[192];
} EpLayoutList;

/** Returns the names of the layouts with all of `bits`, as in "flat and rank-major". `last` joins
 * the last two. */
EpLayoutList ep_layout_names(uint32_t bits, const char *last);

/** Returns all layouts: "1 (expert-major), ... or 4 (rank-major)". */
EpLayoutList ep_layout_choices(void);

#endif
