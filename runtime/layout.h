/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_LAYOUT_H
#define EP_RUNTIME_LAYOUT_H

/**
 * Arithmetic that host code and kernels share: rounding, division by a constant, which rank owns
 * which expert, how memory is divided into arrays, how a token travels, and where slots lie.
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
 * Physical experts lie in contiguous blocks in rank order. The first P mod R ranks own one more.
 * Only the functions below know this rule. Which logical expert a physical one holds is another
 * matter: see the copies below.
 */
typedef struct EpPlacement {
    int32_t num_experts; /**< P */
    int32_t num_ranks;
} EpPlacement;

/** Returns P. Without a placement physical experts are the logical ones. */
static inline int32_t ep_physical_experts(const EpGroupConfig *config) {
    return config->num_physical == EP_DEFAULT ? config->num_experts : config->num_physical;
}

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

/* ---- copies of experts --------------------------------------------------------------------- */

/*
 * A group with a placement has a table of this rank's own choices. For each logical expert it lists
 * the living copies among which this rank's tokens choose, so EpCopyChoice is in the table and
 * routing need not know it. Routing alone reads the table: it turns the caller's logical experts
 * into physical ones. ep_group_place writes it, and whatever changes which ranks are alive.
 */

/** A logical expert's copies. */
typedef struct EpCopies {
    int32_t first; /**< count 1: the physical expert; more: where they begin in the list */
    int32_t count; /**< 0: no living copy */
} EpCopies;

/** What routing reads. */
typedef struct EpCopyTable {
    const EpCopies *of;  /**< [E]; NULL: the group has no placement */
    const int32_t *list; /**< [P] physical experts */
    int32_t num_logical; /**< E */
    int32_t rank;        /**< of the group */
} EpCopyTable;

/** Returns the physical expert that a token of this rank takes for logical expert 0 .. E - 1, or -1
 *  if there is none. */
EP_HOST_DEVICE static inline int32_t ep_copy_of(const EpCopyTable *t, int32_t logical,
                                                int32_t token) {
    EpCopies copies = t->of[logical];
    if (copies.count <= 1) return copies.count ? copies.first : -1;
    return t->list[copies.first + (int32_t)((uint32_t)(t->rank + token) % (uint32_t)copies.count)];
}

/** What a table is made from, and the table itself: arrays in one block of the backend's memory. */
typedef struct EpCopyMemory {
    EpCopies *of;
    int32_t *list;
    int32_t *logical_of; /**< [P] the map as it was checked: -1 for none */
    int32_t *kind;       /**< [P] EpCopyKind */
    int32_t *node_of;    /**< [R] */
    uint32_t *alive;     /**< [ceil(R / 32)] bit r % 32 of word r / 32: whether rank r is alive */
} EpCopyMemory;

typedef struct EpCopySetup {
    EpCopyMemory memory;
    EpPlacement placement; /**< of physical experts */
    int32_t num_logical, rank;
    EpCopyChoice choice;
} EpCopySetup;

/** Where a physical expert is, seen from this rank. NEAR takes the highest kind that there is. */
typedef enum EpCopyKind { EP_COPY_DEAD, EP_COPY_FAR, EP_COPY_ON_NODE, EP_COPY_HERE } EpCopyKind;

/** Locate the arrays in a block of memory (NULL: none). Returns its bytes. */
static inline int64_t ep_copies_map(EpPlacement placement, int32_t num_logical, void *memory,
                                    EpCopyMemory *out) {
    EpArena arena = {.base = (uintptr_t)memory, .unit = 64};
    int32_t physical = placement.num_experts, ranks = placement.num_ranks;
    out->of = (EpCopies *)ep_arena_array(&arena, num_logical, sizeof(*out->of));
    out->list = (int32_t *)ep_arena_array(&arena, physical, sizeof(int32_t));
    out->logical_of = (int32_t *)ep_arena_array(&arena, physical, sizeof(int32_t));
    out->kind = (int32_t *)ep_arena_array(&arena, physical, sizeof(int32_t));
    out->node_of = (int32_t *)ep_arena_array(&arena, ranks, sizeof(int32_t));
    out->alive = (uint32_t *)ep_arena_array(&arena, (ranks + 31) / 32, sizeof(uint32_t));
    return arena.bytes;
}

static inline EpCopyTable ep_copy_table(const EpCopySetup *s) {
    EpCopyTable table = {s->memory.of, s->memory.list, s->num_logical, s->rank};
    return table;
}

/** Set the kind of a physical expert. All kinds precede ep_copies_find. */
EP_HOST_DEVICE static inline void ep_copies_set_kind(const EpCopySetup *s, int32_t physical) {
    const EpCopyMemory *m = &s->memory;
    int32_t owner = ep_placement_owner(&s->placement, physical);
    EpCopyKind kind = owner == s->rank                           ? EP_COPY_HERE
                      : m->node_of[owner] == m->node_of[s->rank] ? EP_COPY_ON_NODE
                                                                 : EP_COPY_FAR;
    if (m->logical_of[physical] < 0 || !(m->alive[owner / 32] >> owner % 32 & 1))
        kind = EP_COPY_DEAD;
    m->kind[physical] = kind;
}

/** Set the copies of a logical expert. Its part of the list lies behind those of lower ones. */
EP_HOST_DEVICE static inline void ep_copies_find(const EpCopySetup *s, int32_t logical) {
    const EpCopyMemory *m = &s->memory;
    int32_t first = 0, nearest = EP_COPY_DEAD, count = 0, last = -1;
    for (int32_t p = 0; p < s->placement.num_experts; p++) {
        first += m->logical_of[p] >= 0 && m->logical_of[p] < logical;
        if (m->logical_of[p] == logical && m->kind[p] > nearest) nearest = m->kind[p];
    }
    if (nearest > EP_COPY_FAR && s->choice == EP_CHOICE_SPREAD) nearest = EP_COPY_FAR;
    for (int32_t p = 0; p < s->placement.num_experts && nearest; p++) {
        if (m->logical_of[p] != logical || m->kind[p] < nearest) continue;
        m->list[first + count++] = last = p;
    }
    m->of[logical].first = count == 1 ? last : first;
    m->of[logical].count = count;
}

/** Make the table anew from the map and from who is alive. On GPUs the threads of a block do it. */
static inline void ep_copies_build(const EpCopySetup *s) {
    for (int32_t p = 0; p < s->placement.num_experts; p++)
        ep_copies_set_kind(s, p);
    for (int32_t e = 0; e < s->num_logical; e++)
        ep_copies_find(s, e);
}

/** Returns what an entry of a map adds to the map's hash, which is their sum: so its order does not
 *  matter. */
EP_HOST_DEVICE static inline uint64_t ep_copies_hash(int32_t physical, int32_t logical) {
    uint64_t x = ((uint64_t)(uint32_t)physical << 32 | (uint32_t)logical) + 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

#define EP_COPIES_HASH_BITS 32 /* that ranks compare; with none of them set it counts as 1 */

EP_HOST_DEVICE static inline uint64_t ep_copies_hash_end(uint64_t sum) {
    uint64_t hash = sum & (((uint64_t)1 << EP_COPIES_HASH_BITS) - 1);
    return hash ? hash : 1;
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

/**
 * With sums by entry, what a rank returns of a token: the rows of its entries, entry k's row at
 * k * row_bytes (the host backend packs them, and puts the rest first); K floats, if values or
 * weights travel; and 16 bytes with a word whose bit k says whether row k is there, in place of
 * scales.
 */
#define EP_ENTRY_MASK_BYTES 16

static inline EpRecord ep_entries_record(int64_t row_bytes, int64_t top_k, int carries_values) {
    return ep_record(top_k * row_bytes, carries_values ? top_k : 0, EP_ENTRY_MASK_BYTES);
}

/* ---- nodes --------------------------------------------------------------------------------- */

/** The nodes of a group (runtime/nodes.h), as far as sizes of memory follow from them. */
typedef struct EpNodeSizes {
    int32_t nodes;   /**< of the group */
    int32_t ranks;   /**< on this rank's node */
    int32_t sources; /**< most of any rank of this node */
    int32_t most;    /**< messages that any rank of the group sends or receives at a time */
    int32_t limit;   /**< tokens of a rank that another node gets in one step (node_rows); 0: all */
    int32_t chunk;   /**< tokens of a rank that operations move at a time: see ep_config_chunks */
    int32_t message; /**< places of a message of a chunk: `chunk`, or fewer with a limit */
    int32_t latency; /**< several nodes: whether AUTO may be latency mode (LIBEP_NODE_LATENCY) */
} EpNodeSizes;

/** In a list of ranks by node, with a rank that is the lowest of its node. */
#define EP_NODE_BEGINS (1 << 30)

/* ---- plans --------------------------------------------------------------------------------- */

/*
 * The plan: ep_prepare writes it from a step's routing, into one flat block of memory. Here is the
 * common part of both backends' plans: the shape that sizes follow from, the header, and the
 * arithmetic of slabs. Each backend has arrays of its own (handles/host/plan.h,
 * runtime/cuda/plan.h). A plan holds indices, never pointers, so its bytes may be moved.
 *
 * Words: a "row" is a (token, rank) pair, which travels once. An "entry" is one (token, k): a slot
 * that an arriving row fills. Rows are ordered by (source rank, token), entries within a row by k.
 */

/** The numbers and settings that determine a plan's sizes. */
typedef struct EpPlanShape {
    int32_t num_ranks, rank;
    int32_t num_experts, num_local; /**< physical ones, P and L */
    int32_t max_tokens, max_top_k;
    EpLayout layout;    /**< the next three follow from it: see runtime/layouts.h */
    int32_t has_rows;   /**< a row has one slot, which holds all its entries; else each entry has a
                             slot of its own */
    int32_t is_fixed;   /**< each block has block_rows slots; else blocks follow one another */
    int64_t block_rows; /**< 0: not fixed; blocks of sources: max_tokens */
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
    int32_t by_entry; /**< whether sums are by entry: see EpSums */
    int32_t merges;   /**< whether an expert named twice in a row of topk_idx has one slot */
    int32_t num_sms;  /**< multiprocessors of the handle's operations, or EP_DEFAULT */
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

/** Returns whether each source has a block, whose rows tensors choose: a call's own block_rows is
 *  then at most the plan's. */
EP_HOST_DEVICE static inline int ep_has_source_blocks(const EpPlanShape *s) {
    return s->has_rows && s->is_fixed;
}

/** Returns the position of a plan's slot in tensors whose blocks of sources have `block_rows` rows,
 *  0: as in the plan. */
EP_HOST_DEVICE static inline int64_t ep_slot_position(const EpPlanShape *s, int64_t block_rows,
                                                      int64_t slot) {
    if (!block_rows || block_rows == s->block_rows) return slot;
    return slot / s->block_rows * block_rows + slot % s->block_rows;
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

/* ---- GPUs ---------------------------------------------------------------------------------- */

/* What the cuda backend requires of a GPU. Builds without that backend report it too. */

#define EP_CUDA_MAX_RANKS 72 /* on a node */

#define EP_LEAST_CAPABILITY 80 /* 8.0: copies to shared memory that complete an mbarrier */

#define EP_SCATTER_STATIC_BYTES 10240 /* room for the variables that the kernel declares */
#define EP_GATHER_STATIC_BYTES 7168
#define EP_STATIC_SHARED_BYTES EP_SCATTER_STATIC_BYTES /* of any kernel */
#define EP_WORK_TABLE_BYTES 1024     /* of a pipeline's tables, per load or store of a work item */
#define EP_LEAST_FRAGMENT_BYTES 1024 /* the smallest fragment of a row that a stage holds */

/* Bytes of a chunk of the kernels that move weights: it is a record of the group's rings, and in
 * the stage of a warp. */
#ifndef EP_PUSH_BYTES
#define EP_PUSH_BYTES 16384
#endif
#define EP_LEAST_PUSH_WARPS 2 /* of its blocks: one sends and one receives */

#define EP_PREPARE_WARPS 32       /* of a block of ep_prepare */
#define EP_RANK_TABLES_BYTES 3520 /* that a block of ep_prepare has for EP_CUDA_MAX_RANKS ranks */

/** Returns the shared memory that a block of ep_prepare allocates for the group's P experts and R
 *  ranks: for each of them a byte for each warp and two integers. */
static inline int64_t ep_cuda_prepare_shared(int32_t num_experts, int32_t num_ranks) {
    int64_t each = EP_PREPARE_WARPS + 2 * (int64_t)sizeof(int32_t);
    return EP_RANK_TABLES_BYTES + each * ((int64_t)num_experts + num_ranks);
}

/** Returns the shared memory per block that a group needs: to move rows, a stage for a row and one
 *  for each of its slots; to prepare, tables of experts and ranks; to move weights, for which the
 *  group is or which its placement allows, stages of chunks. */
static inline int64_t ep_cuda_least_shared(const EpGroupConfig *config, int32_t num_ranks,
                                           int for_weights) {
    int64_t fragment = ep_min(config->max_row_bytes, EP_LEAST_FRAGMENT_BYTES);
    int64_t stages = (1 + config->max_top_k) * (EP_WORK_TABLE_BYTES + fragment);
    if (for_weights || config->num_physical != EP_DEFAULT)
        stages = ep_max(stages, EP_LEAST_PUSH_WARPS * EP_PUSH_BYTES);
    return EP_STATIC_SHARED_BYTES +
           ep_max(stages, ep_cuda_prepare_shared(ep_physical_experts(config), num_ranks));
}

#endif
