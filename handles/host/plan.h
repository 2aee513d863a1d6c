/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HOST_PLAN_H
#define EP_HANDLES_HOST_PLAN_H

/**
 * The host backend's plan. Only ep_plan_map knows its layout: sizes, code and tests call it. The
 * plan has three parts:
 *
 *   for users         counts, padded counts and offsets of the local experts, and totals
 *   as a source       which of this rank's tokens go to which rank
 *   as a receiver     which rows arrive from which rank, and which slots each of them fills
 */

#include "handles/handle.h"

/** Pointers to the plan's arrays. G = R * max_tokens, K = max_top_k. */
typedef struct EpPlan {
    EpPlanHeader *header;
    /* for users */
    int32_t *expert_counts;  /* [L] */
    int32_t *expert_padded;  /* [L] */
    int32_t *expert_offsets; /* [L + 1] */
    /* as a source */
    int32_t *send_counts; /* [E] this rank's entries for each expert */
    int16_t *owner;       /* [max_tokens, K] rank of each entry's expert; -1: none */
    int32_t *send_begin;  /* [R + 1] this rank's rows for each rank, as ranges of send_token */
    int32_t *send_token;  /* [max_tokens * min(K, R)] token of each row that this rank sends */
    /* as a receiver */
    int32_t *rank_tokens;   /* [R] number of tokens of each rank */
    int32_t *source_counts; /* [R, L] each rank's entries for each local expert */
    int32_t *next_slot;     /* [R, L] scratch of prepare: slot of the next of these entries */
    int32_t *next_row;      /* [R] scratch of prepare: next row of each rank */
    int32_t *next_entry;    /* [R] scratch of prepare: next entry of each rank */
    int32_t *recv_begin;    /* [R + 1] rows of each rank, as ranges of the row arrays */
    int32_t *row_token;     /* [G] the row's token on its source rank */
    int32_t *row_entry;     /* [G] first entry of each row */
    uint8_t *row_entries;   /* [G] number of entries that have a slot */
    int32_t *entry_slot;    /* [entries] the slot that the entry fills */
    uint8_t *entry_k;       /* [entries]; none if rows have one slot: its entry stands for all k */
    int32_t *entry_experts; /* if rows have one slot: [entries, K] local expert or -1 */
    uint64_t *tail;         /* repeats the magic; the last array, one unit of 64 bytes */
} EpPlan;

/** Locate the arrays of the plan at `memory` (NULL: none). Returns the plan's bytes. */
int64_t ep_plan_map(const EpPlanShape *shape, void *memory, EpPlan *plan);

/** Returns the pointers into a handle's plan at `ref`. */
static inline EpPlan ep_host_plan(const EpHandle *handle, EpPlanRef ref) {
    EpPlan plan;
    ep_plan_map(&handle->shape, ref.memory, &plan);
    return plan;
}

/** Returns the most entries that a plan of this shape holds. */
int64_t ep_plan_max_entries(const EpPlanShape *shape);

/**
 * Lay out the slabs from source_counts: sets expert_counts, expert_padded, expert_offsets,
 * next_slot and the header's totals. FLAT and RANK_MAJOR: sets the totals from recv_begin, and
 * expert_counts to zero.
 */
void ep_plan_lay_slabs(const EpPlanShape *shape, EpPlan *plan);

/** Parts of the backend table; see EpBackendOps. */
int64_t ep_host_plan_bytes(const EpPlanShape *shape);
EpStatus ep_host_open_plan(EpHandle *handle, const EpCall *call);
void ep_host_close_plan(EpHandle *handle);
EpStatus ep_host_read_plan(const EpHandle *handle, const EpCall *call, EpPlanRef ref, EpStep *out);
EpStatus ep_host_read_sources(const EpHandle *handle, EpPlanRef ref, EpStream stream,
                              const struct EpSources *out);
EpStatus ep_host_read_source_tokens(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                                    EpStream stream, int32_t *counts);

/** Check that a plan is of the handle, with this K, and that its numbers lead nowhere outside of
 *  what belongs to it: EP_ERR_NOT_PREPARED, EP_ERR_FOREIGN, EP_ERR_HANDLE_MEMORY. */
EpStatus ep_host_check_plan(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                            int64_t top_k);

/** Check that tensors whose blocks of sources have `block_rows` rows hold the rows of a checked
 *  plan. */
EpStatus ep_host_check_blocks(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                              int64_t block_rows);
EpStatus ep_host_prepare(EpHandle *handle, const EpRouting *routing);
EpStatus ep_host_publish(EpHandle *handle, const EpRouting *routing);

/** Returns the bytes of a set of buffers of latency mode: between the phases they hold the rows
 *  that a dispatch has received, or a combine's sums for this rank's tokens. */
int64_t ep_host_set_bytes(const EpGroupConfig *config, int32_t num_ranks);

#endif
