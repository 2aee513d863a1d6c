/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_CASE_H
#define TESTS_CASES_CASE_H

/**
 * A case: the shape of a group and the kind of routing, which determine all inputs. case_complete
 * replaces fields that are zero by the defaults named here.
 */

#include <stddef.h>
#include <stdint.h>

#include "ep/ep.h"

typedef enum Spread {
    SPREAD_RANDOM, /**< 0 .. max_tokens on each rank */
    SPREAD_FULL,   /**< max_tokens on each */
    SPREAD_NONE,   /**< no tokens at all */
    SPREAD_HOLE,   /**< as FULL, but the middle rank has none */
    SPREAD_ALONE   /**< the last rank alone has tokens */
} Spread;

typedef enum Routing {
    ROUTING_UNIFORM,
    ROUTING_SKEWED,     /**< low experts are popular, many get nothing */
    ROUTING_ONE_EXPERT, /**< every token to the same expert */
    ROUTING_ONE_RANK,   /**< every token to the experts of one rank */
    ROUTING_NOBODY      /**< every entry masked */
} Routing;

/** Which expert each place of a group with a placement holds: what ep_group_place is called with. */
typedef enum Map {
    MAP_FIRST,      /**< that of a new group: it is not called */
    MAP_IDENTITY,   /**< the same, called */
    MAP_RANDOM,     /**< any, by map_seed: some experts have many copies and some none */
    MAP_EVERYWHERE, /**< expert 0 on each rank, the others in turn */
    MAP_HALF,       /**< odd ranks hold none */
    MAP_NOBODY      /**< nothing anywhere */
} Map;

typedef struct Case {
    int ranks;        /**< 1 */
    char nodes[24];   /**< a digit for each rank, as in "0110": its node; "": all ranks on one */
    int even_nodes;   /**< instead of `nodes`: how many divide the ranks evenly */
    int experts;      /**< 2 per rank */
    int top_k;        /**< 2 */
    int hidden;       /**< 24: bf16 rows of 48 bytes, not a multiple of a cache line */
    int max_tokens;   /**< 9: most tokens of a rank; RANK_MAJOR: tensors have as many rows for each
                           source */
    int spare_tokens; /**< by which the group's max_tokens is larger */
    Spread spread;
    Routing routing;
    int target;               /**< the expert or rank of ROUTING_ONE_... */
    int masked_percent;       /**< percentage of entries that are masked */
    int invalid_percent;      /**< percentage of entries that name an expert out of range */
    int duplicates;           /**< a token may name an expert twice */
    int strange;              /**< every third token names expert 0 in all entries, and its numbers
                                   are NaN and infinities */
    int physical;             /**< places for copies; 0: the group has no placement */
    EpCopyChoice choice;      /**< NEAR */
    Map map;
    int map_seed;
    int merged;               /**< EP_DUPLICATES_MERGE: an expert named twice gets one slot */
    EpType row_type;          /**< of dispatch; BF16 */
    EpType sum_type;          /**< of combine and gradients; BF16 */
    EpType index_type;        /**< INT32 */
    EpLayout layout;          /**< EXPERT_MAJOR */
    int alignment;            /**< 1 */
    int64_t capacity;         /**< max_recv_rows; 0: exact sizing */
    int64_t rows_per_expert;  /**< BATCHED: enough for any routing */
    EpOverflow overflow;      /**< ERROR */
    int weighted;             /**< dispatch sends topk_weights, and combine is weighted */
    int node_rows;            /**< of the group; 0 with exact sizing */
    int by_entry;             /**< EP_SUMS_BY_ENTRY; not where case_has_rows */
    int weights_at_combine;   /**< latency mode or by_entry, unless case_has_rows: combine gets
                                   topk_weights, and the case is not `weighted` */
    int scale_bytes;          /**< per row; 0: no scales */
    int counted;              /**< num_tokens is given, and input tensors have max_tokens rows */
    int spare_rows;           /**< rows of the receive buffers beyond those needed */
    int zero_tail;            /**< an EpTail; IDS where the layout has no ids: KEEP */
    EpPadding padding;        /**< ZERO */
    EpQuant sum_quant;        /**< NONE; FP8 rounds `hidden` up */
    EpQuant grad_quant;       /**< NONE; others round `hidden` up, and the case is not `weighted` */
    EpQuant quant;            /**< NONE; others round `hidden` up and produce their own scales */
    EpScaleOrder scale_order; /**< BY_ROW */
    EpMode mode;              /**< THROUGHPUT; latency mode always gets a capacity, except in
                                   RANK_MAJOR */
    int num_sms;              /**< of the handle; 0: the default */
    int sets;                 /**< of buffers of latency mode; 0: 4 */
    double timeout;           /**< of waits, in seconds; 60 */
    int id;                   /**< of the handle */
    int named;                /**< the handle has no plan of its own */
    int phases;      /**< latency mode: call dispatch and combine as send and receive phases */
    int global_ids;  /**< recv_topk_idx has global expert ids; ignored where a layout has none */
    int biases;      /**< added to the sums of combine and dispatch_backward: 0, 1 or 2 */
    int counters;    /**< calls add to counters: 1: to all, 2 or 3: to every other one */
    int block_rows;  /**< dispatch stores ready words, and combine reads done words, of blocks of so
                          many rows; 0: neither */
    int all_weights; /**< rank-major rows get all K weights; ignored in other layouts */
    uint64_t seed;
} Case;

/** Returns the case with each zero that stands for a default replaced. */
Case case_complete(Case c);

/** Returns the case that a text describes, as "ranks=3 layout=flat", with other fields zero. */
__attribute__((format(printf, 1, 2))) Case case_of(const char *format, ...);

/** Write the cases of a text whose fields may list values, and return their number. A field with
 * commas multiplies the cases: "ranks=1,2 layout=flat,batched" has four. One with bars has its next
 * value in each case: "hidden=8|16|24" has three. Seeds count from the text's. */
int cases_of(Case *cases, int most, const char *text);

/** Returns such a text, of all fields that are not zero, in static memory of the thread. */
const char *case_describe(const Case *c);

/** Returns the number of places for experts. */
int case_physical(const Case *c);

/** Returns the lowest rank on the node of a rank. */
int case_node(const Case *c, int rank);

/** How receive tensors are divided into blocks. */
typedef enum CaseBlocks {
    BLOCKS_PACKED,   /**< not at all */
    BLOCKS_OF_ROWS,  /**< of rows_per_expert */
    BLOCKS_OF_TOKENS /**< of max_tokens */
} CaseBlocks;

struct World;

/** What tests know of a layout: one line each in tests/oracle/world.c. */
typedef struct CaseLayout {
    void (*plan)(struct World *world, int rank); /**< finds the slots of a rank */
    int has_rows;  /**< a row has one slot for all its entries, in a block of its source */
    int takes_all; /**< EP_WEIGHTS_ALL is possible */
    CaseBlocks blocks;
} CaseLayout;

const CaseLayout *case_layout(const Case *c);
int case_has_rows(const Case *c);

/** Returns the rows of a block, or 0 where tensors have none. */
int64_t case_block_rows(const Case *c);

/** Return the configuration of the group and of the handle of a complete case. */
EpGroupConfig case_group_config(const Case *c);
EpHandleConfig case_handle_config(const Case *c);

/** What dispatch delivers: the type and the elements of rows, and the type and number of scales of
 * a row (0: no scales). */
EpType case_recv_type(const Case *c);
int case_recv_width(const Case *c);
EpType case_scale_type(const Case *c);
int case_scales(const Case *c);

/** What combine_backward delivers, likewise. */
EpType case_grad_type(const Case *c);
size_t case_grad_bytes(const Case *c);
size_t case_grad_scale_bytes(const Case *c);

/** Bytes of a token's row, of a received row, of its received scales, and of a row of combine and
 * gradients. */
size_t case_row_bytes(const Case *c);
size_t case_recv_bytes(const Case *c);
size_t case_recv_scale_bytes(const Case *c);
size_t case_sum_bytes(const Case *c);

#endif
