/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_CASE_H
#define BENCH_CASE_H

/**
 * One size of the sweep on one rank: its routing, its slots, the group, and the buffers.
 *
 * A buffer serves several tensors. Slot rows: `slots_in` is expert_out and grad_recv_tokens,
 * `slots_out` is recv_tokens and grad_expert_out. Token rows: `tokens_in` is tokens and grad_out,
 * `tokens_out` is out and grad_tokens.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ep/ep.h"
#include "tools/bench/options.h"
#include "tools/bench/routing.h"
#include "tools/common/util.h"
#include "tools/common/world.h"

typedef enum PhaseId {
    PHASE_PREPARE,
    PHASE_DISPATCH,
    PHASE_COMBINE,
    PHASE_COMBINE_BACKWARD,
    PHASE_DISPATCH_BACKWARD,
    NUM_PHASES
} PhaseId;

/** The send and wait calls of latency mode's two operations (--split). */
typedef enum SplitPhaseId {
    SPLIT_DISPATCH_SEND,
    SPLIT_DISPATCH_WAIT,
    SPLIT_COMBINE_SEND,
    SPLIT_COMBINE_WAIT,
    NUM_SPLIT_PHASES
} SplitPhaseId;

/** The buffers: T tokens, K entries each, `rows` slots. */
typedef struct Buffers {
    void *index;           /**< [T, K] */
    float *topk_weights;   /**< [T, K] */
    float *topk_grads;     /**< [T, K], from dispatch_backward */
    char *tokens_in;       /**< [T, H] */
    char *tokens_out;      /**< [T, H] */
    char *scales;          /**< [T, S] */
    float *global_scale;   /**< [1], of NVFP4 */
    char *slots_in;        /**< [rows, H] */
    char *slots_out;       /**< [rows, H] */
    float *recv_weights;   /**< [rows], flat: [rows, K], from dispatch */
    char *recv_scales;     /**< [rows, received S] */
    int32_t *recv_index;   /**< flat: [rows, K] */
    float *slot_weights;   /**< [rows] for combine */
    float *slot_grads_in;  /**< [rows], flat: [rows, K], for dispatch_backward */
    float *slot_grads_out; /**< [rows] from combine_backward */
    int64_t *plan;         /**< counts[L], padded[L], offsets[L + 1], totals[3] */
    char *plan_memory;     /**< [plan_bytes] of a plan that calls name */
    int64_t *counters;     /**< with --stats: see counters.c */
} Buffers;

/** How a buffer is used: the phases that write it, or as an input. */
#define BY(phase) (1 << (phase))
enum { PART_INPUT = BY(NUM_PHASES), NUM_PARTS = 18 };
enum { COUNTED = NUM_PHASES + 1 }; /* stands for a phase: what all calls add to */

/** A buffer's description. */
typedef struct Part {
    const char *what;
    size_t offset; /**< in Buffers */
    size_t count, bytes;
    int use;
    void *zero_copy; /**< peer-accessible memory that it is in; NULL: memory of its own */
} Part;

typedef struct Tensors {
    EpTensor index, topk_weights, topk_grads, tokens_in, tokens_out, scales, global_scale;
    EpTensor slots_in, slots_out, recv_tokens, recv_weights, recv_scales, recv_index;
    EpTensor slot_weights, slot_grads_in, slot_grads_out;
    EpTensor plan_counts, plan_padded, plan_offsets, plan_totals, plan_memory;
    EpTensor expert_tokens, by_rank[4]; /**< counters */
} Tensors;

typedef struct Device Device; /* see device.h */

/** What a placement does to a routing: the largest rank's slots over the mean, and rows to other
 * ranks, without copies and with them. */
typedef struct Placed {
    double largest_before, largest;
    int64_t rows_before, rows;
} Placed;

typedef struct Case {
    World *world;
    const Options *options;
    Routing routing;
    Slots slots;
    int64_t tokens;   /**< T of this rank */
    size_t row_bytes; /**< of a token or slot row */
    size_t sum_bytes; /**< of a partial sum on its way */
    EpQuant quant;    /**< of dispatch; if not NONE, received rows differ from sent rows */
    EpType recv_type, recv_scale_type;
    size_t recv_bytes, recv_scale_bytes; /**< of a row in slots_out after dispatch, of its scales */
    bool latency;      /**< the handle is in latency mode: only PHASE_DISPATCH and PHASE_COMBINE */
    int weights_width; /**< floats per row of recv_topk_weights: 1, flat: K */
    EpGroup *group;
    int32_t *nodes; /**< [size] node of each rank */
    int32_t *map;   /**< [physical] of a placement */
    Placed placed;
    EpHandle *handle;
    const EpTensor *plan;   /**< that calls name; NULL: the handle's own */
    int64_t plan_bytes;     /**< of one plan */
    int64_t promised_bytes; /**< from ep_group_memory, before any allocation */
    bool cuda;              /**< the CUDA backend serves the group */
    int64_t capacity;       /**< max_recv_rows of the group; 0: exact sizing */
    Pool pool;              /**< of the host's memory */
    Buffers buffers;        /**< on the host; inputs are made and outputs checked here */
    Device *device;         /**< NULL on the host backend */
    EpStream stream;        /**< of all calls; NULL on the host backend */
    void *zero_copy_in;     /**< with --zero-copy: slots_in in the group's peer-accessible memory */
    void *zero_copy_out;    /**< with --zero-copy: slots_out in such memory */
    Tensors tensors;        /**< of the host's buffers, or of the device's */
    EpExtras extras;        /**< of the call that is made */
} Case;

/** Collective: the backend of the largest size, and the reason. Refuses options that the backend
 *  does not support. */
bool case_ask_backend(World *world, const Options *options, EpGroupMemory *out);

/** Collective. False on every rank, with a message, if any rank fails. */
bool case_create(World *world, const Options *options, int64_t size, Case *out);
void case_destroy(Case *c);

/** Returns whether dispatch and combine_backward zero a row of the receive buffer. */
bool case_zeroes_row(const Case *c, int64_t row);

/** Returns the configuration of the case's handle. */
EpHandleConfig case_handle_config(const Case *c);

/** Collective: with --zero-copy, allocate peer-accessible memory for slots_in and slots_out. */
bool zero_copy_create(Case *c);

/** Allocate the buffers on the host, and fill the inputs. Rows without a slot are NaN. */
bool buffers_create(Case *c);

/** All buffers, and a pointer to one of them. */
void buffers_list(const Case *c, Part out[NUM_PARTS]);
void *buffers_get(const Buffers *b, const Part *part);
void buffers_set(Buffers *b, const Part *part, void *memory);

/** Poison what a phase writes. */
void buffers_poison(Case *c, PhaseId phase);

/** Point the tensors to the memory of `b`. */
void buffers_describe(Case *c, const Buffers *b);

/** Whether the mode has this phase. In latency mode dispatch also makes the plan, so there is no
 *  prepare. */
bool phase_exists(const Case *c, PhaseId phase);

/** Call once, before any other phase: in latency mode, ep_prepare records the routing's address. */
bool phase_begin(Case *c);

/** Make the phase's call, if the mode has it. Returns false, with a message, if it fails. */
bool phase_run(Case *c, PhaseId phase);
/** All phases, in order. */
bool phase_run_step(Case *c);
/** A pair, never from a graph: prepare, where the mode has it, dispatch and combine. */
bool phase_run_pair(Case *c);
const char *phase_name(PhaseId phase);

/** One send or wait call, never from a graph; call them in the order of SplitPhaseId. Returns
 *  false, with a message, if it fails. */
bool split_phase_run(Case *c, SplitPhaseId phase);
const char *split_phase_name(SplitPhaseId phase);

/** Fill what a phase writes with POISON_BYTE, so that an unwritten byte shows. */
bool phase_poison(Case *c, PhaseId phase);
/** Wait for the phase and copy what it wrote to the host's buffers. */
bool phase_fetch(Case *c, PhaseId phase);

/**
 * The bytes that a phase moves for the given numbers of rows and entries: indices in prepare, else
 * rows. Dispatch also moves the scales of each row and the top-k weight of each entry;
 * dispatch_backward moves the gradients of these weights.
 */
int64_t phase_bytes(const Case *c, PhaseId phase, int64_t rows, int64_t entries);

/** The same for rows and entries that go to other ranks, where sums may travel quantised. */
int64_t phase_remote_bytes(const Case *c, PhaseId phase, int64_t rows, int64_t entries);

/** Identities of contents, see data_id. `owner` is the rank that holds the slot. */
uint64_t case_token_id(const Case *c, int rank, int64_t token);
uint64_t case_scale_id(const Case *c, int rank, int64_t token);
uint64_t case_slot_id(const Case *c, int rank, int64_t token, int owner, int expert, int k);
float case_topk_weight(const Case *c, int rank, int64_t token, int k);
/** The weight that combine gives a slot: its top-k weight; flat: a number per (token, owner). */
float case_slot_weight(const Case *c, int rank, int64_t token, int owner, int k);
float case_slot_grad(const Case *c, int rank, int64_t token, int k);

enum { POISON_BYTE = 0xAB };

#endif
