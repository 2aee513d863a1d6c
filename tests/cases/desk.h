/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_DESK_H
#define TESTS_CASES_DESK_H

/**
 * A desk for wrong calls: a group of one rank with a prepared handle, and all tensors of the five
 * operations laid out right, with poisoned outputs. A test spoils one argument and looks how the
 * call is refused; desk_check_wrong does so for a table of them.
 */

#include "tests/cases/run.h"

typedef enum Op {
    OP_PREPARE,
    OP_DISPATCH,
    OP_COMBINE,
    OP_DISPATCH_BACKWARD,
    OP_COMBINE_BACKWARD,
    OP_DISPATCH_SEND,
    OP_DISPATCH_WAIT,
    OP_COMBINE_SEND,
    OP_COMBINE_WAIT
} Op;

/** Every tensor argument: X(constant, name in the header, output) */
#define DESK_TENSORS(X)                          \
    X(TOPK_IDX, "topk_idx", 0)                   \
    X(NUM_TOKENS, "num_tokens", 0)               \
    X(EXPERT_COUNTS, "expert_counts", 1)         \
    X(EXPERT_PADDED, "expert_padded", 1)         \
    X(EXPERT_OFFSETS, "expert_offsets", 1)       \
    X(TOTALS, "totals", 1)                       \
    X(SOURCE_COUNTS, "source_counts", 1)         \
    X(TOKENS, "tokens", 0)                       \
    X(TOPK_WEIGHTS, "topk_weights", 0)           \
    X(SCALES, "scales", 0)                       \
    X(RECV_TOKENS, "recv_tokens", 1)             \
    X(RECV_TOPK_WEIGHTS, "recv_topk_weights", 1) \
    X(RECV_SCALES, "recv_scales", 1)             \
    X(RECV_TOPK_IDX, "recv_topk_idx", 1)         \
    X(EXPERT_OUT, "expert_out", 0)               \
    X(SLOT_WEIGHTS, "slot_weights", 0)           \
    X(OUT, "out", 1)                             \
    X(GRAD_RECV_TOKENS, "grad_recv_tokens", 0)   \
    X(GRAD_RECV_WEIGHTS, "grad_slot_weights", 0) \
    X(GRAD_TOKENS, "grad_tokens", 1)             \
    X(GRAD_TOPK_WEIGHTS, "grad_topk_weights", 1) \
    X(GRAD_OUT, "grad_out", 0)                   \
    X(GRAD_EXPERT_OUT, "grad_expert_out", 1)     \
    X(GRAD_SLOT_WEIGHTS, "grad_slot_weights", 1)

typedef enum Arg {
#define DESK_ENUM(constant, name, output) constant,
    DESK_TENSORS(DESK_ENUM)
#undef DESK_ENUM
        NUM_ARGS
} Arg;

typedef struct Desk {
    EpBootstrap bootstrap;
    World *world;
    EpGroup *group;
    EpHandle *handle;
    Step step;
    Image image[NUM_ARGS];
    EpTensor tensor[NUM_ARGS];
    const EpTensor *arg[NUM_ARGS]; /**< what is passed: &tensor, or NULL */
} Desk;

/** Four experts, K 2, at most 9 tokens, of which all come; bf16 rows of 24, scales of 8 bytes. */
Case desk_case(EpLayout layout);

void desk_open(Desk *desk, const Case *c);
/** The same, and a step has been prepared. */
void desk_open_prepared(Desk *desk, const Case *c);
void desk_close(Desk *desk);

/** Lay out all arguments of all operations anew. */
void desk_reset(Desk *desk);

EpStatus desk_call(Desk *desk, Op op);

/** Call a first half, after a prepare where that is a dispatch's; plan outputs are not asked for.
 */
void desk_take_off(Desk *desk, Op half);

/** Nothing was written by any call since the last reset. */
void desk_check_untouched(const Desk *desk);

typedef enum Spoil {
    SPOIL_ABSENT, /**< the tensor is NULL */
    SPOIL_DATA,   /**< its data are NULL */
    SPOIL_SHIFT,  /**< its data are `value` bytes further */
    SPOIL_SIZE,   /**< struct_size */
    SPOIL_TYPE,
    SPOIL_NDIM,
    SPOIL_SHAPE0,
    SPOIL_SHAPE1,
    SPOIL_SHAPE2
} Spoil;

/** A wrong call, and the status and parts of the sentence that it deserves. */
typedef struct Wrong {
    Op op;
    Arg arg;
    Spoil spoil;
    int64_t value;
    EpStatus status;
    const char *parts[3];
} Wrong;

/** Each call of the table is refused as it says and writes nothing; then all are right again. In
 *  latency mode without the calls that are not there. */
void desk_check_wrong(Desk *desk, const Wrong *table, int n);

/** The same at a desk of its own, in each mode. */
void desk_check_table(Case c, const Wrong *table, int n);

/** Zeros of the tail end where the shortest of the outputs does: that is `arg`, of one float a row,
 *  which has room for the capacity alone. */
void desk_check_shorter_tail(Op op, Arg arg);

#endif
