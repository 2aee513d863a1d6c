/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_CASE_H
#define BENCH_CASE_H

/**
 * One size of the sweep on one rank: its routing, what its slots must be, the group, and buffers
 * that play several parts. Slot rows: `slots_in` is expert_out and grad_recv_tokens, `slots_out`
 * recv_tokens and grad_expert_out. Token rows: `tokens_in` is tokens and grad_out, `tokens_out` out
 * and grad_tokens.
 */

#include <stdbool.h>
#include <stdint.h>

#include "bench_options.h"
#include "bench_routing.h"
#include "bench_slots.h"
#include "bench_world.h"
#include "ep/ep.h"

typedef enum PhaseId {
    PHASE_PREPARE,
    PHASE_DISPATCH,
    PHASE_COMBINE,
    PHASE_COMBINE_BACKWARD,
    PHASE_DISPATCH_BACKWARD,
    NUM_PHASES
} PhaseId;

/** What the two operations of latency mode are divided into. */
typedef enum HalfId {
    HALF_DISPATCH_SEND,
    HALF_DISPATCH_WAIT,
    HALF_COMBINE_SEND,
    HALF_COMBINE_WAIT,
    NUM_HALVES
} HalfId;

/** Memory of the buffers. T tokens, K entries each, `rows` slots. */
typedef struct Buffers {
    void *index;           /**< [T, K] */
    float *topk_weights;   /**< [T, K] */
    float *topk_grads;     /**< [T, K] from dispatch_backward */
    char *tokens_in;       /**< [T, H] */
    char *tokens_out;      /**< [T, H] */
    char *scales;          /**< [T, S] */
    char *slots_in;        /**< [rows, H] */
    char *slots_out;       /**< [rows, H] */
    float *recv_weights;   /**< [rows], flat: [rows, K], from dispatch */
    char *recv_scales;     /**< [rows, received S] */
    int32_t *recv_index;   /**< flat: [rows, K] */
    float *slot_weights;   /**< [rows] for combine */
    float *slot_grads_in;  /**< [rows], flat: [rows, K], for dispatch_backward */
    float *slot_grads_out; /**< [rows] from combine_backward */
    int64_t *plan;         /**< counts[L], padded[L], offsets[L + 1], totals[3] */
} Buffers;

typedef struct Tensors {
    EpTensor index, topk_weights, topk_grads, tokens_in, tokens_out, scales;
    EpTensor slots_in, slots_out, recv_tokens, recv_weights, recv_scales, recv_index;
    EpTensor slot_weights, slot_grads_in, slot_grads_out;
    EpTensor plan_counts, plan_padded, plan_offsets, plan_totals;
} Tensors;

typedef struct Device Device; /* bench_device.h */

typedef struct Case {
    World *world;
    const Options *options;
    Routing routing;
    Slots slots;
    int64_t tokens;   /**< T of this rank */
    size_t row_bytes; /**< of a token or slot row */
    EpQuant quant; /**< whether dispatch quantises; then what it delivers is not what was sent: */
    EpType recv_type, recv_scale_type;
    size_t recv_bytes, recv_scale_bytes; /**< of a row in slots_out after dispatch, of its scales */
    bool latency;      /**< the handle is in latency mode: PHASE_DISPATCH and PHASE_COMBINE alone */
    int weights_width; /**< floats per row of recv_topk_weights: 1, flat: K */
    EpGroup *group;
    EpHandle *handle;
    int64_t promised_bytes; /**< what ep_group_memory said before anything was allocated */
    bool cuda;              /**< the CUDA backend serves the group */
    int64_t capacity;       /**< max_recv_rows of the group; 0: exact sizing */
    Buffers buffers;        /**< on the host: where inputs are made and outputs are checked */
    Device *device;         /**< device memory and more; NULL on the host backend */
    EpStream stream;        /**< of all calls; NULL on the host backend */
    void *reachable_in;  /**< with --zero-copy: slots_in and slots_out where the library works, */
    void *reachable_out; /**< in memory that peers reach; the group's */
    Tensors tensors;     /**< of the host's buffers, or of the device's */
} Case;

/** Who would move the bytes of the largest size, and why; refuses what the backend cannot do. */
bool case_ask_backend(World *world, const Options *options, EpGroupMemory *out);

/** Collective. False, everywhere, with a sentence, if any rank cannot have it. */
bool case_create(World *world, const Options *options, int64_t size, Case *out);
void case_destroy(Case *c);

/** Collective: where it is asked for, memory that peers reach for slots_in and slots_out. */
bool reachable_create(Case *c);

/** Allocate the buffers and fill the inputs. Rows that no slot is in are NaN. */
bool buffers_create(Case *c);
void buffers_destroy(Case *c);

/** Point the tensors to the memory of `b`. */
void buffers_describe(Case *c, const Buffers *b);

/** Whether the phase is there to be timed. In latency mode dispatch makes the plan: it stands for
 *  prepare, too. */
bool phase_is_there(const Case *c, PhaseId phase);

/** Once, before any other phase: in latency mode, record where the routing lies. */
bool phase_begin(Case *c);

/** One call of the library, none where the phase is not there. Returns false, with its sentence, if
 * it fails. */
bool phase_run(Case *c, PhaseId phase);
/** All of them, in order. */
bool phase_run_step(Case *c);
const char *phase_name(PhaseId phase);

/** One half, never from a graph; in the order above. Returns false, with its sentence, if it fails.
 */
bool half_run(Case *c, HalfId half);
const char *half_name(HalfId half);

/** Fill what a phase writes with a pattern, so that a byte not written shows. */
bool phase_poison(Case *c, PhaseId phase);
/** Wait for it, and bring what it wrote to the host's buffers. */
bool phase_fetch(Case *c, PhaseId phase);

/**
 * The bytes that a phase moves where so many rows with so many entries do: indices, or rows with
 * what travels beside them. Dispatch has scales, one for each row, and top-k weights, one for each
 * entry; dispatch_backward the gradients of these.
 */
int64_t phase_bytes(const Case *c, PhaseId phase, int64_t rows, int64_t entries);

/** Identities of contents, see bench_data.h. `owner` is the rank that holds the slot. */
uint64_t case_token_id(const Case *c, int rank, int64_t token);
uint64_t case_scale_id(const Case *c, int rank, int64_t token);
uint64_t case_slot_id(const Case *c, int rank, int64_t token, int owner, int expert, int k);
float case_topk_weight(const Case *c, int rank, int64_t token, int k);
/** The weight that combine gives a slot: its top-k weight; flat: a number per (token, owner). */
float case_slot_weight(const Case *c, int rank, int64_t token, int owner, int k);
float case_slot_grad(const Case *c, int rank, int64_t token, int k);

enum { POISON_BYTE = 0xAB };

#endif
