/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_LAYOUT_H
#define EP_RUNTIME_LAYOUT_H

/**
 * Arithmetic that host code and kernels share: rounding, division by a constant, which rank owns
 * which expert, how memory is divided into arrays, and how a token travels.
 */

#include <stdint.h>

#include "ep/ep.h"

#ifdef __CUDACC__
#define EP_HOST_DEVICE __host__ __device__
#else
#define EP_HOST_DEVICE
#endif

/* ---- integers ------------------------------------------------------------------------------ */

EP_HOST_DEVICE static inline int64_t ep_round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

EP_HOST_DEVICE static inline int64_t ep_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

EP_HOST_DEVICE static inline int64_t ep_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline int ep_is_power_of_two(int64_t value) {
    return value > 0 && (value & (value - 1)) == 0;
}

/** Returns a * b, or INT64_MAX if that is larger. Requires a >= 0 and b >= 0. */
static inline int64_t ep_saturated_product(int64_t a, int64_t b) {
    return b > 0 && a > INT64_MAX / b ? INT64_MAX : a * b;
}

/* ---- division ------------------------------------------------------------------------------ */

/**
 * Division by a number that is known before a kernel starts. It takes one multiplication, where the
 * compiler would emit thirty dependent instructions.
 *
 * With m = ceil(2^31 / d), (2n + 1) * m / 2^32 equals (2n + 1) / 2d plus an error below
 * (2n + 1) / 2^32. (2n + 1) / 2d lies at least 1 / 2d below the next whole number, so the whole
 * part is n / d as long as 2d * (2n + 1) <= 2^32. All uses stay far below that bound.
 */
typedef struct EpDivisor {
    int32_t by;
    uint32_t inverse;
} EpDivisor;

/** Requires d >= 1. */
EP_HOST_DEVICE static inline EpDivisor ep_divisor(int32_t d) {
    EpDivisor divisor = {d, (uint32_t)((0x80000000u + (uint32_t)d - 1) / (uint32_t)d)};
    return divisor;
}

/** n / d. Requires n >= 0 and n * d < 2^30 - d. */
EP_HOST_DEVICE static inline int32_t ep_quotient(int32_t n, EpDivisor d) {
    return (int32_t)((uint64_t)(2 * (uint32_t)n + 1) * d.inverse >> 32);
}

EP_HOST_DEVICE static inline int32_t ep_remainder(int32_t n, EpDivisor d) {
    return n - ep_quotient(n, d) * d.by;
}

/* ---- expert placement ---------------------------------------------------------------------- */

/**
 * Experts lie in contiguous blocks in rank order. The first E mod R ranks own one more. Only the
 * functions below know this rule, so that a placement map can replace it in one place.
 */
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

/** Returns the largest number of experts on any rank. */
EP_HOST_DEVICE static inline int32_t ep_placement_most(const EpPlacement *p) {
    return ep_placement_count(p, 0);
}

/** Returns the rank that owns an expert 0 .. E - 1. */
EP_HOST_DEVICE static inline int32_t ep_placement_owner(const EpPlacement *p, int32_t expert) {
    int32_t base = p->num_experts / p->num_ranks, larger = p->num_experts % p->num_ranks;
    int32_t in_larger = larger * (base + 1);
    if (expert < in_larger) return expert / (base + 1);
    return larger + (expert - in_larger) / base;
}

/** The placement as kernels use it, with its divisors prepared. */
typedef struct EpOwners {
    int32_t larger;    /**< number of ranks with one expert more: the first ones */
    int32_t in_larger; /**< experts on these ranks */
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

/* ---- arrays in a block of memory ----------------------------------------------------------- */

/**
 * Divides a block of memory into consecutive arrays. The base may be NULL where only the offsets
 * are needed, so addresses are computed as integers.
 */
typedef struct EpArena {
    uintptr_t base;
    int64_t bytes; /**< taken so far */
    int64_t unit;  /**< every array starts on a multiple of this offset */
} EpArena;

/** The largest size of an arena. Larger ones are cut off here: no machine can allocate it. */
#define EP_ARENA_MOST (INT64_MAX / 2)

/** Take `bytes` bytes; returns their offset. */
static inline int64_t ep_arena_offset(EpArena *arena, int64_t bytes) {
    int64_t offset = arena->bytes, room = EP_ARENA_MOST - offset;
    arena->bytes = bytes < room ? ep_round_up(offset + bytes, arena->unit) : EP_ARENA_MOST;
    return offset;
}

/** Take an array of `count` elements; returns its address. */
static inline void *ep_arena_array(EpArena *arena, int64_t count, size_t element_bytes) {
    int64_t bytes = ep_saturated_product(count, (int64_t)element_bytes);
    return (void *)(arena->base + (uintptr_t)ep_arena_offset(arena, bytes));
}

/* ---- records ------------------------------------------------------------------------------- */

/**
 * A token while it travels between ranks: its row, one float per k, its scales. Each part starts on
 * a multiple of 16 bytes. The code that writes records and the code that sizes their staging
 * buffers share this.
 */
typedef struct EpRecord {
    int64_t weights; /**< offset of the K floats; the row is at 0 */
    int64_t scales;  /**< offset of the scales */
    int64_t bytes;   /**< distance from one record to the next */
} EpRecord;

static inline EpRecord ep_record(int64_t row_bytes, int64_t num_weights, int64_t scale_bytes) {
    EpRecord r;
    r.weights = ep_round_up(row_bytes, 16);
    r.scales = r.weights + ep_round_up(num_weights * (int64_t)sizeof(float), 16);
    r.bytes = r.scales + ep_round_up(scale_bytes, 16);
    return r;
}

/* ---- GPUs ---------------------------------------------------------------------------------- */

/* What the cuda backend requires of a GPU. Builds without that backend report it too. */

#define EP_CUDA_MAX_RANKS 72 /* on a node */

#define EP_LEAST_CAPABILITY 90 /* 9.0: bulk copies between shared memory and peers */

#define EP_SCATTER_STATIC_BYTES 10240 /* room for the variables that the kernel declares */
#define EP_GATHER_STATIC_BYTES 7168
#define EP_STATIC_SHARED_BYTES EP_SCATTER_STATIC_BYTES /* of any kernel */
#define EP_WORK_TABLE_BYTES 1024  /* of a pipeline's tables, per load or store of a work item */
#define EP_LEAST_PIECE_BYTES 1024 /* the smallest piece of a row that a stage holds */

#define EP_PREPARE_WARPS 32       /* of a block of ep_prepare */
#define EP_RANK_TABLES_BYTES 3520 /* that a block of ep_prepare has for EP_CUDA_MAX_RANKS ranks */

/** Returns the shared memory that a block of ep_prepare allocates for the group's E experts and R
 *  ranks: for each of them a byte for each warp and two integers. */
static inline int64_t ep_cuda_prepare_shared(int32_t num_experts, int32_t num_ranks) {
    int64_t each = EP_PREPARE_WARPS + 2 * (int64_t)sizeof(int32_t);
    return EP_RANK_TABLES_BYTES + each * ((int64_t)num_experts + num_ranks);
}

/** Returns the shared memory per block that a group needs: to move rows, a stage for a row and one
 *  for each of its slots; to prepare, tables of experts and ranks. */
static inline int64_t ep_cuda_least_shared(const EpGroupConfig *config, int32_t num_ranks) {
    int64_t piece = ep_min(config->max_row_bytes, EP_LEAST_PIECE_BYTES);
    int64_t stages = (1 + config->max_top_k) * (EP_WORK_TABLE_BYTES + piece);
    return EP_STATIC_SHARED_BYTES +
           ep_max(stages, ep_cuda_prepare_shared(config->num_experts, num_ranks));
}

#endif
