/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_MOVEMENT_H
#define EP_RUNTIME_MOVEMENT_H

/**
 * What the public calls hand to a backend once their arguments are checked: a routing, or one of
 * the two movements.
 *
 *     scatter   token rows -> slots     ep_dispatch, ep_combine_backward
 *     gather    slots -> token rows     ep_combine, ep_dispatch_backward
 *
 * Kernels take the descriptions of tensors as they are.
 *
 * A flag or a size says whether an optional tensor is given: a rank without tokens or slots may
 * pass tensors whose data is NULL.
 */

#include "runtime/layout.h"
#include "runtime/quant.h"

struct EpOp;

/**
 * Latency mode: where an operation in flight lies. `slot` is its turn among the group's sets of
 * buffers, `token` the name by which its receive phase finds the set. Calls that are captured have
 * turns of their own, since a graph runs later, and other names.
 */
/** Tokens of captured operations. */
#define EP_CAPTURED_TOKENS 4096

typedef struct EpInFlight {
    int32_t slot, token;
    int32_t is_captured;
} EpInFlight;

/** Which part of an operation runs. The receive phase gets the description of its send phase with
 *  the outputs instead of the inputs. */
typedef enum EpPhase { EP_PHASE_BOTH, EP_PHASE_SEND, EP_PHASE_RECEIVE } EpPhase;

/** The block of memory that a call names for its plan, or that its handle owns. */
typedef struct EpPlanRef {
    void *memory;
    int32_t is_named; /**< whether the memory is the caller's */
} EpPlanRef;

/** What an operation counts for its caller: see EpExtras. Added to; NULL: not counted. */
typedef struct EpStatistics {
    void *expert_tokens;                    /**< [L] int64_t, or int32_t if `is_narrow` */
    int64_t *peer_rows, *peer_bytes;        /**< [R] of the group */
    int64_t *peer_wait, *peer_longest_wait; /**< [R] ns */
    int64_t row_bytes;                      /**< of a row in peer_bytes */
    int32_t is_narrow;
} EpStatistics;

static inline int ep_counts_any(const EpStatistics *s) {
    return s->expert_tokens || s->peer_rows || s->peer_bytes || s->peer_wait ||
           s->peer_longest_wait;
}

/**
 * Blocks of receive rows, each with a word: EpExtras.ready and .done. Rows lie in sections, and
 * each section is cut into blocks by itself: an expert's rows or a source's where they have a fixed
 * number, else all rows.
 */
typedef struct EpRowBlocks {
    int32_t *words;   /**< [sections, per_section]; NULL: none */
    int32_t expected; /**< done: the least value of a word */
    int32_t rows;     /**< of a block; the last one of a section may have fewer */
    int32_t sections;
    int32_t section_rows;
    int32_t per_section; /**< blocks */
} EpRowBlocks;

/** Returns the block of a row. */
EP_HOST_DEVICE static inline int32_t ep_row_block(const EpRowBlocks *b, int32_t row) {
    uint32_t section = (uint32_t)row / (uint32_t)b->section_rows;
    uint32_t in_section = (uint32_t)row - section * (uint32_t)b->section_rows;
    return (int32_t)(section * (uint32_t)b->per_section + in_section / (uint32_t)b->rows);
}

/** Returns the first row of a block, and their number. */
EP_HOST_DEVICE static inline int32_t ep_block_first(const EpRowBlocks *b, int32_t block) {
    int32_t section = block / b->per_section;
    return section * b->section_rows + block % b->per_section * b->rows;
}

EP_HOST_DEVICE static inline int32_t ep_block_size(const EpRowBlocks *b, int32_t block) {
    int32_t left = b->section_rows - block % b->per_section * b->rows;
    return left < b->rows ? left : b->rows;
}

/** A step's routing, checked. */
typedef struct EpRouting {
    EpPlanRef plan;       /**< to write */
    const void *topk_idx; /**< [num_rows, top_k] */
    EpType idx_type;
    int64_t num_rows;
    int64_t top_k;
    const void *num_tokens; /**< one integer: number of valid rows; NULL: all */
    EpType num_tokens_type;
    const EpPlanTensors *out; /**< may be NULL */
    EpStream stream;
    int64_t block_rows;    /**< blocks of sources: of the dispatch's tensors; 0: not known yet */
    const struct EpOp *op; /**< the operation that ranks announce */
    const char *call;      /**< the public call, for sentences */
    EpStatistics stats;    /**< of ep_prepare */
} EpRouting;

/* ---- scatter ------------------------------------------------------------------------------- */

/** A tile of swizzled scales: 128 rows of 4 bytes, which one word of each row fills. */
#define EP_TILE_ROWS 128
#define EP_TILE_SCALES 4
#define EP_TILE_BYTES (EP_TILE_ROWS * EP_TILE_SCALES)

/** Layout of recv_scales. By row: [rows, count]. By column: slabs of [count, slab_rows]. Swizzled:
 *  slabs of [tiles of slab_rows, tiles of count], elements of one byte. */
typedef struct EpScaleMap {
    int32_t by_column;
    int32_t element_bytes;
    int64_t count;     /**< scales of a row */
    int64_t slab_rows; /**< not by row: rows of the tensor; BATCHED: rows_per_expert; RANK_MAJOR:
                            rows of a source */
    int32_t swizzled;
} EpScaleMap;

/** Returns the byte offset of a receive row's first swizzled scale. Its words of four are
 *  EP_TILE_BYTES apart. */
EP_HOST_DEVICE static inline int64_t ep_swizzled_at(const EpScaleMap *map, int64_t row) {
    int64_t in_slab = row % map->slab_rows, in_tile = in_slab % EP_TILE_ROWS;
    int64_t slab_tiles = (map->slab_rows + EP_TILE_ROWS - 1) / EP_TILE_ROWS;
    int64_t tile = row / map->slab_rows * slab_tiles + in_slab / EP_TILE_ROWS;
    int64_t row_tiles = (map->count + EP_TILE_SCALES - 1) / EP_TILE_SCALES;
    return tile * row_tiles * EP_TILE_BYTES + in_tile % 32 * 16 + in_tile / 32 * EP_TILE_SCALES;
}

/** Returns the byte offset of scale `i` of a receive row, where scales are not swizzled. */
EP_HOST_DEVICE static inline int64_t ep_plain_scale_at(const EpScaleMap *map, int64_t row,
                                                       int64_t i) {
    int64_t index = row * map->count + i;
    if (map->by_column)
        index = (row / map->slab_rows * map->count + i) * map->slab_rows + row % map->slab_rows;
    return index * map->element_bytes;
}

/** Returns the byte offset of scale `i` of a receive row. */
EP_HOST_DEVICE static inline int64_t ep_scale_at(const EpScaleMap *map, int64_t row, int64_t i) {
    if (!map->swizzled) return ep_plain_scale_at(map, row, i);
    return ep_swizzled_at(map, row) + i / EP_TILE_SCALES * EP_TILE_BYTES + i % EP_TILE_SCALES;
}

/** Returns the distance in bytes between consecutive scales of a receive row that are not
 *  swizzled. */
EP_HOST_DEVICE static inline int64_t ep_scale_step(const EpScaleMap *map) {
    return (map->by_column ? map->slab_rows : 1) * map->element_bytes;
}

/** Returns a row's word `i` of swizzled scales: what lies behind the last scale becomes 0. */
EP_HOST_DEVICE static inline uint32_t ep_swizzled_word(const EpScaleMap *map, int64_t i,
                                                       uint32_t word) {
    int64_t left = map->count - i * EP_TILE_SCALES;
    return left < EP_TILE_SCALES ? word & ((1u << 8 * left) - 1) : word;
}

/**
 * The tensors of a scatter. Weights, scales and the derivative's parts are optional (NULL). `type`,
 * `row_bytes` and `scale_bytes` describe rows as they travel and as slots hold them. Input rows
 * have the same type and size, unless they are quantised (runtime/quant.h) before they leave.
 */
typedef struct EpScatterTensors {
    const char *rows;         /**< [T, source_row_bytes] */
    int64_t source_row_bytes; /**< of an input row */
    int64_t row_bytes;
    int64_t row_elements;
    int64_t scale_bytes;
    EpQuantFormat format;      /**< without bits: copy */
    EpType source_type;        /**< of the input rows */
    int32_t carries_weights;   /**< whether topk_weights travel; equal on all ranks */
    EpType type;               /**< of rows on their way */
    const float *topk_weights; /**< [T, K]: delivered with the rows */
    const char *scales;        /**< [T, scale_bytes]; none where rows are quantised */
    char *out_rows;
    float *out_weights; /**< [rows] ([rows, K] if flat or rank-major): topk_weights, or the dot
                             products */
    char *out_scales;
    EpScaleMap scale_map; /**< layout of out_scales */
    void *out_idx;        /**< flat and rank-major: [rows, K] experts of this rank, or -1 */
    int64_t out_capacity; /**< rows of the shortest output; zero_tail reaches up to there */
    int64_t num_slots;    /**< rows of the shortest tensor of slots, inputs included */
    int64_t block_rows;   /**< blocks of sources: rows of a block in these tensors; else 0 */
    EpType idx_type;      /**< of out_idx */
    int32_t first_id;     /**< number that out_idx has for this rank's first expert */
    EpType scale_type;
    const float *slot_weights; /**< [rows]: multiply each delivered row */
    const char *slot_rows;     /**< [rows, row_bytes]: dot product with each delivered row */
    int32_t weighs;            /**< whether slot_weights multiply */
    int32_t takes_dots;        /**< whether dot products are computed */
    const float *global_scale; /**< EP_SCALE_GLOBAL: of the rows; else NULL */
    EpRowBlocks ready;         /**< blocks whose words are stored */
} EpScatterTensors;

/** Whether a scatter quantises to NVFP4 or swizzles scales. GPUs have kernels of their own for it,
 *  so that others do without this code. */
static inline int ep_scatter_is_tiled(const EpScatterTensors *t) {
    return t->format.scaling == EP_SCALE_GLOBAL || t->scale_map.swizzled;
}

typedef struct EpScatter {
    const struct EpOp *op;
    EpPhase phase;
    EpPlanRef plan;
    int64_t top_k;
    int64_t num_rows; /**< T: rows of the token tensors */
    EpInFlight place; /**< latency mode */
    EpScatterTensors t;
    const EpRouting *routing; /**< latency mode's dispatch: makes the plan; else NULL */
    EpQuant grad_quant;       /**< combine_backward: which ranks compare; else 0 */
    EpStream stream;
    EpStatistics stats;
} EpScatter;

/** Returns fact 3 of a scatter's operation: a dispatch carries weights, and only a combine_backward
 *  has a grad_quant. `weights`: the fact where weights travel. */
static inline int64_t ep_scatter_fact(const EpScatter *s, int64_t weights) {
    return s->t.carries_weights ? weights : (int64_t)s->grad_quant;
}

/** Returns the bytes of a row as it travels: with its scales, and its K weights. */
static inline int64_t ep_scatter_row_bytes(const EpScatterTensors *t, int64_t top_k) {
    int64_t weights = t->carries_weights ? top_k * (int64_t)sizeof(float) : 0;
    return t->row_bytes + t->scale_bytes + weights;
}

/* ---- gather -------------------------------------------------------------------------------- */

#define EP_MAX_BIASES 2

/** The tensors of a gather. */
typedef struct EpGatherTensors {
    const char *rows;   /**< [rows, row_bytes] */
    int64_t num_slots;  /**< rows of the shortest tensor of slots */
    int64_t block_rows; /**< blocks of sources: rows of a block in these tensors; else 0 */
    EpType type;
    int64_t row_bytes;
    int64_t row_elements;
    EpQuantFormat format;      /**< of partial sums on their way; without bits: they have the rows'
                                    type. Equal on all ranks */
    int32_t by_entry;          /**< whether each entry's row travels, and the token's rank adds
                                    them all: see EpSums */
    int32_t weighs;            /**< whether weights multiply each row before it is added */
    int32_t weighs_entries;    /**< whether these are topk_weights, at the token's rank; equal on
                                    all ranks. Else slot_weights */
    const float *slot_weights; /**< [rows] */
    const float *topk_weights; /**< [T, K] */
    int32_t carries_values;    /**< whether slot_values travel; equal on all ranks */
    const float *slot_values;  /**< [rows] ([rows, K] if flat): carried back to [T, K]. Sums by
                                    entry: or the slot_weights, for which there is no output */
    char *out_rows;            /**< [out_num_rows, row_bytes]; zero past the step's tokens */
    int64_t out_num_rows;
    float *out_values;               /**< [T, K] */
    const char *bias[EP_MAX_BIASES]; /**< [num_biases]: rows like out_rows, added to the sums last
                                          and in this order */
    int32_t num_biases;
    EpRowBlocks done; /**< blocks whose words are waited for */
} EpGatherTensors;

typedef struct EpGather {
    const struct EpOp *op;
    EpPhase phase;
    EpPlanRef plan;
    int64_t top_k;
    int64_t num_rows; /**< T: rows of the token tensors */
    EpInFlight place; /**< latency mode */
    EpGatherTensors t;
    EpStream stream;
    EpStatistics stats;
} EpGather;

/** Returns whether the values that travel are the weights of sums by entry. */
EP_HOST_DEVICE static inline int ep_carries_weights(const EpGatherTensors *t) {
    return t->by_entry && t->carries_values && t->weighs;
}

/** Returns the bytes of a partial sum as it travels: with its scales, and its K values. Of sums by
 *  entry: of an entry's row, with its value. */
static inline int64_t ep_gather_row_bytes(const EpGatherTensors *t, int64_t top_k) {
    int64_t each = t->by_entry ? 1 : top_k;
    int64_t values = t->carries_values ? each * (int64_t)sizeof(float) : 0;
    if (!t->format.bits) return t->row_bytes + values;
    int64_t scales = ep_quant_scales(t->format, t->row_elements) * (int64_t)sizeof(float);
    return ep_quant_bytes(t->format, t->row_elements) + scales + values;
}

#endif
