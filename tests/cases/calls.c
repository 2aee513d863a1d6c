/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/calls.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A piece of memory of a thread. Its end frees them all: a failed operation may have begun to
 * write. */
typedef struct Piece {
    struct Piece *older;
    _Alignas(64) char bytes[];
} Piece;

static pthread_key_t newest_piece;

static void free_pieces(void *newest) {
    for (Piece *piece = newest, *older; piece; piece = older)
        older = piece->older, free(piece);
}

static void make_key(void) {
    (void)pthread_key_create(&newest_piece, free_pieces);
}

static char *allocate_piece(size_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, make_key);
    Piece *piece = aligned_alloc(64, (sizeof(*piece) + bytes + 63) / 64 * 64);
    piece->older = pthread_getspecific(newest_piece);
    (void)pthread_setspecific(newest_piece, piece);
    return memset(piece->bytes, 0, bytes);
}

EpStatus call_op(const Step *step, StepOp op) {
    static const StepOutput written[] = {OUT_TOKENS, OUT_SUMS, OUT_GRAD_ROWS, OUT_GRAD_TOKENS};
    StepMemory memory = {.counters = NULL};
    for (StepInput i = 0; i < INPUTS; i++)
        memory.in[i] = step_input(step, i).data;
    char *index = allocate_piece(step_bytes(step_input(step, IN_INDEX)));
    step_fill(step, IN_INDEX, index), memory.in[IN_INDEX] = index;
    for (int i = 0; i < LENGTH(written); i++)
        memory.out[written[i]] = allocate_piece(step_bytes(step_output(step, written[i])));
    return step_call(step, &memory, op, NULL);
}

EpStatus call_ops(const Step *step, unsigned ops) {
    EpStatus first = EP_OK;
    for (unsigned op = STEP_PREPARE; op <= ops; op <<= 1) {
        if (!(ops & op)) continue;
        GPU_ENQUEUES(ops >= 2 * op && op != STEP_PREPARE);
        EpStatus status = call_op(step, (StepOp)op);
        if (first == EP_OK) first = status;
    }
    GPU_ENQUEUES(0);
    return first == EP_OK && TESTS_ON_GPU ? ep_group_status(step->group, NULL) : first;
}

const char *op_phase(StepOp op) {
    return op == STEP_PREPARE                            ? "prepare"
           : op & (STEP_DISPATCH | STEP_DISPATCH_PHASES) ? "dispatch"
           : op & (STEP_COMBINE | STEP_COMBINE_PHASES)   ? "combine"
           : op == STEP_COMBINE_BACKWARD                 ? "combine backward"
                                                         : "dispatch backward";
}
