/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLAN_H
#define EP_HANDLES_PLAN_H

/**
 * The plan: ep_prepare writes it from a step's routing, into one flat block of memory. This
 * file has the common part of both backends' plans: the shape that sizes follow from, the header,
 * and the arithmetic of slabs. Each backend has arrays of its own (host/plan.h, cuda/plan.h).
 *
 * A plan holds indices, never pointers, so its bytes may be moved.
 *
 * Words: a "row" is a (token, rank) pair, which travels once. An "entry" is one (token, k): a slot
 * that an arriving row fills. Rows are ordered by (source rank, token), entries within a row by k.
 */

#include "runtime/layout.h"
#include "runtime/nodes.h"

/** The numbers and settings that determine a plan's sizes. */
typedef struct EpPlanShape {
    int32_t num_ranks, rank;
    int32_t num_experts, num_local;
    int32_t max_tokens, max_top_k;
    EpLayout layout;    /**< the next three follow from it: see runtime/layouts.h */
    int32_t has_rows;   /**< a row has one slot, which holds all its entries; else each entry has a
                             slot of its own */
    int32_t is_fixed;   /**< each block has block_rows slots; else blocks follow one another */
    int64_t block_rows; /**< 0: not fixed */
    int32_t alignment;
    int64_t capacity; /**< receive rows; 0: exact sizing. is_fixed: the rows of all blocks */
    EpOverflow overflow;
    EpTail tail;
    EpPadding padding;
    EpMode mode;       /**< THROUGHPUT or LATENCY */
    EpQuant quant;     /**< of dispatch */
    EpQuant sum_quant; /**< of partial sums: NONE or FP8 */
    EpScaleOrder scale_order;
    EpExpertIds expert_ids;
    EpRowWeights row_weights;
    int32_t merges;  /**< whether an expert named twice in a row of topk_idx has one slot */
    int32_t num_sms; /**< multiprocessors of the handle's operations, or EP_DEFAULT */
    EpNodeSizes nodes;
} EpPlanShape;

/** The first bytes of a plan. The first four fields, and the tail that repeats the magic, say
 *  whose it is: see ep_plan_check. */
typedef struct EpPlanHeader {
    /* CUDA kernels load these words two at a time: see ep_load_plan. */
    uint64_t magic;      /**< EP_PLAN_MAGIC once a prepare has completed */
    uint64_t group;      /**< id of the group */
    uint64_t config;     /**< see ep_plan_config */
    uint64_t generation; /**< number of the group's operation that wrote it, equal on all ranks */
    int64_t num_tokens, recv_rows;
    int64_t num_rows;   /**< rows of topk_idx; may exceed num_tokens where that was given */
    int32_t exact_rows; /**< 1: token tensors have exactly num_rows rows; 0: at least num_tokens */
    int32_t top_k;
    int64_t step; /**< number of plans written here, of a handle's own plan */
    int64_t needed_rows, dropped_slots;
    int64_t most_tokens; /**< largest T of any rank: gives the number of rounds */
    /* CUDA: rows to other ranks, from them, and rows that stay; the host counts them */
    int32_t rows_sent, rows_received, rows_kept, reserved;
} EpPlanHeader;

#define EP_PLAN_MAGIC 0x6e616c702d706532ull

/** Returns a hash of all that a plan's contents depend on besides the routing. `top_k`: K of its
 *  steps. Differs between ranks. */
uint64_t ep_plan_config(const EpPlanShape *shape, int32_t top_k);

/** Returns the largest index or slot number of this shape. It must fit an int32_t. */
int64_t ep_plan_largest_index(const EpPlanShape *shape);

/** Returns the most rows that can arrive: G = R * max_tokens, or 0 on a rank without experts. */
static inline int64_t ep_plan_max_rows(const EpPlanShape *s) {
    return s->num_local ? (int64_t)s->num_ranks * s->max_tokens : 0;
}

/* ---- blocks of slots ----------------------------------------------------------------------- */

/** Returns the rows that one block may have at most (is_fixed), or all may: 0 if that is exact. The
 *  ranks of a group agree on it; with blocks of experts they differ in the capacity, which depends
 *  on L. */
EP_HOST_DEVICE static inline int64_t ep_agreed_rows(const EpPlanShape *s) {
    return s->is_fixed ? s->block_rows : s->capacity;
}

/** Returns where block `block` begins. `packed`: the slots of the blocks before it. */
EP_HOST_DEVICE static inline int64_t ep_block_begin(const EpPlanShape *s, int32_t block,
                                                    int64_t packed) {
    return s->is_fixed ? block * s->block_rows : packed;
}

/** Returns the end of all slots, lost ones excluded. */
EP_HOST_DEVICE static inline int64_t ep_row_limit(const EpPlanShape *s) {
    return s->capacity ? s->capacity : INT32_MAX;
}

/** Returns the number of receive rows, given the end of the last block if blocks were unlimited. */
EP_HOST_DEVICE static inline int64_t ep_recv_rows(const EpPlanShape *s, int64_t end) {
    return s->is_fixed ? s->capacity : ep_min(end, ep_row_limit(s));
}

/* ---- slabs: blocks of experts -------------------------------------------------------------- */

/** Returns the rows of a slab with `count` entries, padding included. The alignment is a power of
 *  two. */
EP_HOST_DEVICE static inline int32_t ep_slab_rows(const EpPlanShape *s, int32_t count) {
    return (count + s->alignment - 1) & -s->alignment;
}

/** Returns whether slabs have padding that must be zero. */
EP_HOST_DEVICE static inline int ep_has_padding(const EpPlanShape *s) {
    return s->alignment > 1 && s->padding != EP_PADDING_KEEP;
}

/** Returns the end of the slots that entries of local expert `expert` may fill. */
EP_HOST_DEVICE static inline int64_t ep_slot_limit(const EpPlanShape *s, int32_t expert) {
    return s->is_fixed ? (expert + 1) * s->block_rows : ep_row_limit(s);
}

/** An expert's slab, cut off at the capacity. */
typedef struct EpSlab {
    int64_t offset; /**< its first slot */
    int64_t kept;   /**< entries that have a slot */
    int64_t padded; /**< rows, padding included */
} EpSlab;

/**
 * Returns the slab of local expert `expert` with `count` entries. `start`: rows of the slabs before
 * it, padding included and capacity ignored.
 */
EP_HOST_DEVICE static inline EpSlab ep_slab(const EpPlanShape *s, int32_t expert, int64_t start,
                                            int32_t count) {
    int64_t limit = ep_slot_limit(s, expert);
    start = ep_block_begin(s, expert, start);
    EpSlab slab;
    slab.offset = ep_min(start, limit);
    slab.kept = ep_max(0, ep_min(count, limit - start));
    slab.padded = ep_min(start + ep_slab_rows(s, count), limit) - slab.offset;
    return slab;
}

/** Returns the first row of a slab that must be zero, if it is below ep_padding_end: behind the
 *  slab's entries or, where padding is kept, behind the padding. `offsets`, `counts` and `padded`
 *  [L] are the plan's. */
EP_HOST_DEVICE static inline int64_t ep_padding_begin(const EpPlanShape *s, const int32_t *offsets,
                                                      const int32_t *counts, const int32_t *padded,
                                                      int32_t expert) {
    int32_t kept = s->padding == EP_PADDING_KEEP ? padded[expert] : counts[expert];
    return (int64_t)offsets[expert] + kept;
}

/**
 * Returns the end of the rows behind a slab's entries that must be zero: the slab's padding, or,
 * in slabs of fixed size with EP_TAIL_ZERO, the rest of the expert's rows. `offsets` [L + 1] and
 * `padded` [L] are the plan's.
 */
EP_HOST_DEVICE static inline int64_t ep_padding_end(const EpPlanShape *s, const int32_t *offsets,
                                                    const int32_t *padded, int32_t expert) {
    if (s->is_fixed && s->tail == EP_TAIL_ZERO) return offsets[expert + 1];
    return (int64_t)offsets[expert] + padded[expert];
}

#endif
