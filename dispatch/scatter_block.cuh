/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_BLOCK_CUH
#define EP_DISPATCH_SCATTER_BLOCK_CUH

/**
 * What sending and filling blocks of dispatch_nvlink.cu share: stages in shared memory, each of
 * which holds a record while it is brought in and copied on, and how a record goes to its slots.
 */

#include "handles/plan_cuda.h"
#include "runtime/device.cuh"
#include "runtime/rows.cuh"

#define THREADS 512
#define MAX_STAGES 16
#define RANK_WORDS ((EP_CUDA_MAX_RANKS + 31) / 32)
/* Stores that may still be under way while a sender or filler goes on, where there are stages
 * enough: that many are not available to loads, and receivers learn of that many tokens later. */
#define MANY_STORES 6
#define TOKENS_PER_PUBLISH 2
#define FEW_STORES 1
#define GROUP 128 /* threads that multiply one row together */
#define GROUPS (THREADS / GROUP)
/* Records that a filler takes from one source before it looks at the next. */
#define BATCH 4

/* The ranks that a token goes to, one bit each. */
typedef struct RankSet {
    uint32_t word[RANK_WORDS];
} RankSet;

typedef struct Shared {
    uint64_t full[MAX_STAGES];
    int32_t token[MAX_STAGES];                   /* sender: what a stage holds */
    RankSet ranks[MAX_STAGES];                   /* sender: where that goes */
    int32_t entry[MAX_STAGES][EP_MAX_TOP_K];     /* of the plan's routes */
    int32_t slot[MAX_STAGES][EP_MAX_TOP_K];      /* to fill, -1 where none */
    int32_t source[MAX_STAGES], row[MAX_STAGES]; /* filler: where a stage's record is from */
    uint32_t count[EP_CUDA_MAX_RANKS]; /* records put into, or taken out of, the lane: ever */
    uint32_t seen[EP_CUDA_MAX_RANKS];  /* the other side's counter, as last read */
    uint32_t told[EP_CUDA_MAX_RANKS];  /* sender: as published */
    int32_t rows[EP_CUDA_MAX_RANKS];   /* filler: rows of this operation */
    int32_t issued[EP_CUDA_MAX_RANKS]; /* filler: of those, taken so far */
    float partial[GROUPS][EP_MAX_TOP_K][GROUP / 32]; /* dot products of a row's slots, by warp */
    int32_t alive[GROUPS];
} Shared;

__device__ __forceinline__ int stores_in_flight(const EpScatterArgs &a) {
    return a.stages >= 2 * MANY_STORES ? MANY_STORES : FEW_STORES;
}

/* Until all but those have been written. */
__device__ __forceinline__ void wait_stores(const EpScatterArgs &a) {
    if (stores_in_flight(a) == MANY_STORES)
        ep_bulk_wait<MANY_STORES>();
    else
        ep_bulk_wait<FEW_STORES>();
}

/* Until all but one less than those have been read from their stages. */
__device__ __forceinline__ void wait_stages(const EpScatterArgs &a) {
    if (stores_in_flight(a) == MANY_STORES)
        ep_bulk_wait_read<MANY_STORES - 1>();
    else
        ep_bulk_wait_read<FEW_STORES - 1>();
}

__device__ __forceinline__ char *stage_at(const EpScatterArgs &a, char *stages, int stage) {
    return stages + stage * a.record.bytes;
}

/* Spin on a local barrier; the copy it waits for cannot fail to come. */
__device__ __forceinline__ void wait_full(Shared *s, int stage, uint32_t parity) {
    while (!ep_mbarrier_try_wait(&s->full[stage], parity)) {
    }
}

/* Rows that are copied as they are go from the sender straight to the slots of its own rank. */
__device__ __forceinline__ int keeps_own_rows(const EpScatterArgs &a) {
    return a.type == 0;
}

/* Slots and entries of a row into shared memory, by the lanes of a warp. */
__device__ __forceinline__ void read_route(const EpScatterArgs &a, Shared *s, int stage, int source,
                                           int ring, int row, int lane) {
    if (lane >= a.top_k) return;
    s->entry[stage][lane] = ep_entry(a.plan, a.group, a.top_k, source, ring, row, lane);
    s->slot[stage][lane] = ep_slot(a.plan, a.group, a.shape, a.top_k, source, ring, row, lane);
}

/* A flat row tells its local experts, and their weights. */
__device__ __forceinline__ void describe_flat_row(const EpScatterArgs &a, const Shared *s,
                                                  const float *weights, int stage, int lane) {
    int64_t slot = s->slot[stage][0];
    if (slot < 0 || lane >= a.top_k) return;
    int expert = s->entry[stage][lane];
    if (a.carries_weights) a.out_weights[slot * a.top_k + lane] = expert >= 0 ? weights[lane] : 0;
    if (a.out_idx && a.idx_is_int64)
        ((int64_t *)a.out_idx)[slot * a.top_k + lane] = expert;
    else if (a.out_idx)
        ((int32_t *)a.out_idx)[slot * a.top_k + lane] = expert;
}

/* A record in a stage, to its slots: bulk copies for the row, lanes for the rest. Does not commit.
 */
__device__ __forceinline__ void copy_to_slots(const EpScatterArgs &a, const Shared *s,
                                              const char *record, int stage, int lane) {
    const int32_t *slot = s->slot[stage];
    const float *weights = (const float *)(record + a.record.weights);
    for (int k = 0; k < a.top_k && lane == 0; k++)
        if (slot[k] >= 0)
            ep_bulk_store(a.out_rows + slot[k] * a.row_bytes, record, (uint32_t)a.row_bytes);
    if (a.shape.layout == EP_LAYOUT_FLAT)
        describe_flat_row(a, s, weights, stage, lane);
    else if (a.carries_weights && lane < a.top_k && slot[lane] >= 0)
        a.out_weights[slot[lane]] = weights[lane];
    for (int k = 0; k < a.top_k && a.scale_bytes; k++)
        for (int i = lane; i < a.scale_bytes / 4 && slot[k] >= 0; i += 32)
            ((uint32_t *)(a.out_scales + slot[k] * a.scale_bytes))[i] =
                ((const uint32_t *)(record + a.record.scales))[i];
}

#endif
