/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PLAN_H
#define EP_HANDLES_PLAN_H

/**
 * The plan: what ep_prepare makes of a step's routing, in one flat block of handle memory. This is
 * the one place that knows where anything lies in it; sizes, code and tests ask ep_plan_map.
 *
 * The plan holds indices, never pointers, so its bytes may be moved. It has three parts:
 *
 *   what users see    counts, padded counts and offsets of the local experts, and totals
 *   as a source       which of this rank's tokens go to which rank
 *   as a receiver     which rows come from which rank, and to which slots each goes
 *
 * Words: a "row" is a (token, rank) pair, what travels once; an "entry" is one slot that a row
 * fills on its arrival. Rows are ordered by (source rank, token), entries within a row by k.
 */

#include "runtime/config.h"

/** What the sizes of a plan depend on. */
typedef struct EpPlanShape {
    int32_t num_ranks, rank;
    int32_t num_experts, num_local;
    int32_t max_tokens, max_top_k;
    EpLayout layout;
    int32_t alignment;
    int64_t capacity;        /**< receive rows; 0: exact sizing. BATCHED: L * rows_per_expert */
    int64_t rows_per_expert; /**< BATCHED, else 0 */
    EpOverflow overflow;
    int32_t zero_tail;
    EpMode mode; /**< THROUGHPUT or LATENCY */
    EpQuant quant;
    EpScaleOrder scale_order;
} EpPlanShape;

/** First bytes of handle memory. */
typedef struct EpPlanHeader {
    uint64_t magic;   /**< EP_PLAN_MAGIC; EP_PLAN_DEAD after destroy */
    uint64_t group;   /**< id of the group */
    int32_t handle;   /**< ordinal of the handle in its group */
    int32_t prepared; /**< 0 until a prepare has completed */
    int64_t bytes;    /**< of the block; the last eight repeat the magic */
    int64_t step;     /**< generation: completed prepares */
    int64_t num_tokens, top_k;
    int64_t num_rows;   /**< rows of topk_idx; more than num_tokens where those were given apart */
    int64_t exact_rows; /**< 1: token tensors have exactly num_rows rows; 0: at least num_tokens */
    int64_t recv_rows, needed_rows, dropped_slots;
    int64_t most_tokens; /**< largest T of any rank: how many rounds there are */
    /* CUDA: rows to other ranks, from them, and those that stay; the host counts them */
    int32_t rows_sent, rows_received, rows_kept, reserved;
} EpPlanHeader;

#define EP_PLAN_MAGIC 0x6e616c702d706531ull
#define EP_PLAN_DEAD 0x646165642d706531ull

/** The plan's arrays, located. G = R * max_tokens, K = max_top_k. */
typedef struct EpPlan {
    EpPlanHeader *header;
    /* what users see */
    int32_t *expert_counts;  /* [L] */
    int32_t *expert_padded;  /* [L] */
    int32_t *expert_offsets; /* [L + 1] */
    /* as a source */
    int32_t *send_counts; /* [E] entries of this rank for each expert */
    int16_t *owner;       /* [max_tokens, K] rank of each entry's expert, -1 if dead */
    int32_t *send_begin;  /* [R + 1] this rank's rows for each rank, as ranges of send_token */
    int32_t *send_token;  /* [max_tokens * min(K, R)] */
    /* as a receiver */
    int32_t *rank_tokens;   /* [R] T of each rank */
    int32_t *source_counts; /* [R, L] entries of each rank for each local expert */
    int32_t *next_slot;     /* [R, L] scratch of prepare: slot of the next such entry */
    int32_t *next_row;      /* [R] scratch of prepare */
    int32_t *next_entry;    /* [R] scratch of prepare */
    int32_t *recv_begin;    /* [R + 1] rows of each rank, as ranges of the row arrays */
    int32_t *row_token;     /* [G] */
    int32_t *row_entry;     /* [G] first entry of each row */
    uint8_t *row_entries;   /* [G] how many; fewer than were routed where slots were dropped */
    int32_t *entry_slot;    /* [entries] */
    uint8_t *entry_k;       /* [entries]; not FLAT, where a row's one entry stands for all k */
    int32_t *row_experts;   /* FLAT: [rows, K] local expert or -1 */
    uint64_t *tail;         /* canary */
} EpPlan;

/** Locate the arrays of the plan at `memory` and return its bytes; with NULL, for the bytes alone.
 */
int64_t ep_plan_map(const EpPlanShape *shape, void *memory, EpPlan *plan);

/** Most entries, the bound of every index in the plan. */
int64_t ep_plan_max_entries(const EpPlanShape *shape);

/** Largest number that an index or slot of this shape can reach; must fit an int32_t. */
int64_t ep_plan_largest_index(const EpPlanShape *shape);

/**
 * From source_counts to slots: fills expert_counts, expert_padded, expert_offsets, next_slot and
 * the header's totals. FLAT needs recv_begin as well, and leaves expert_counts at zero.
 */
void ep_plan_lay_slabs(const EpPlanShape *shape, EpPlan *plan);

/** First slot that an expert's entries may not fill. */
int64_t ep_plan_slot_limit(const EpPlanShape *shape, int32_t expert);

/** How many rows of slab `expert` are filled, and where the slab, padding included, ends. */
static inline int64_t ep_plan_slab_end(const EpPlan *plan, int32_t expert) {
    return (int64_t)plan->expert_offsets[expert] + plan->expert_padded[expert];
}

#endif
