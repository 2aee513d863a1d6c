/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BINDINGS_JAX_HANDLERS_H
#define BINDINGS_JAX_HANDLERS_H

/**
 * libep_jax.so: libep's operations as custom calls of XLA programs (XLA FFI handlers).
 *
 *     ranks.c      the ranks of this process: _ranks.py adds them, calls find them
 *     thread.c     the thread of a rank, which runs its calls on CPUs
 *     call.c       one call: attributes, buffers as tensors, errors
 *     handlers.c   the five operations
 *
 * A program knows its group by an integer, the attribute "key". The rank follows from the device on
 * which the program runs.
 *
 * Order. XLA runs independent calls of a program in any order, which may differ between devices. So
 * the first operand of each call, and its first result, is an order: a byte that nobody reads,
 * which puts a call after the one that returned it. _calls.py passes it from call to call.
 *
 * Threads. A call on CPUs waits for other ranks. On a thread of XLA it could wait for ever, if the
 * other rank's thread waits in a collective of XLA. So the handler returns a future, and the rank's
 * own thread runs the call. XLA_FFI_Future_SetAvailable goes on with the program on that thread,
 * maybe into a collective, while later calls queue. The collective needs none of these calls, so
 * each rank reaches it: only a running call waits for ranks, and no part of a program waits behind
 * it unless it needs its results.
 */

#include <pthread.h>

#include "ep/ep.h"
#include "xla/ffi/api/c_api.h"

/* ---- ranks: ranks.c ------------------------------------------------------------------------ */

/** A rank of a group, on a device of this process. Lives until the process ends. */
typedef struct JaxRank {
    struct JaxRank *next;
    int64_t key;
    int32_t ordinal; /**< XLA's number of the device */
    int32_t number;  /**< of the rank in its group */
    int32_t on_host; /**< 1: host backend, 0: CUDA backend */
    EpGroup *group;
    EpHandle *handle;
    int64_t *counters; /**< that all operations add to: [L] tokens, then [R] rows, bytes, waits and
                            longest waits; NULL: none */
    int32_t num_local, num_ranks;
    int is_closed;         /**< group and handle are gone */
    int32_t has_masks;     /**< the group's option */
    int is_masked;         /**< by ep_jax_rank_mask: its results are zero, and it calls nothing */
    pthread_mutex_t mutex; /**< held during a call on the group */
    pthread_mutex_t queue_mutex;
    int has_thread;              /**< calls wait for other ranks, and the rank's thread runs them */
    pthread_cond_t queue_filled; /**< or has_thread is no more */
    struct JaxCall *first, *last; /**< calls that the thread has not begun, oldest first */
    int64_t began; /**< when a call that is under way began, in ns of CLOCK_REALTIME; 0: none */
} JaxRank;

/** Find a rank. Returns NULL if the process has no such rank. */
JaxRank *jax_rank_find(int64_t key, int32_t ordinal);

/** Add a rank. The group and the handle stay the caller's. Returns 0 if there is no memory. */
int ep_jax_rank_add(int64_t key, int32_t ordinal, int32_t number, int32_t num_ranks,
                    int32_t on_host, int32_t has_masks, EpGroup *group, EpHandle *handle);

/** Let the operations of a rank count, in memory that its backend reaches and that stays. */
void ep_jax_rank_count(int64_t key, int32_t ordinal, void *counters, int32_t num_local);

/** ep_group_mask on a rank whose bit is set, between the calls of running programs. Another rank is
 *  masked from now on, and asks nobody. */
EpStatus ep_jax_rank_mask(int64_t key, int32_t ordinal, const uint32_t *alive);

/** Refuse calls from now on, and return once none is under way. A call that is still waiting for
 *  peers after `seconds` is aborted. The caller may then destroy group and handle. */
void ep_jax_rank_close(int64_t key, int32_t ordinal, double seconds);

/** Returns 1 if a call of the host backend is under way that began before a time, in seconds of
 *  CLOCK_REALTIME. */
int ep_jax_rank_waits(int64_t key, int32_t ordinal, double before);

/** ep_group_status, between the calls of running programs. */
EpStatus ep_jax_rank_status(int64_t key, int32_t ordinal, EpFinding *out);

/* ---- the thread of a rank: thread.c ------------------------------------------------------------
 */

/** Start the thread. Returns 0 if it cannot be started. */
int jax_rank_start(JaxRank *rank);

/** Let the thread run a copy of a call, behind the earlier ones, and give XLA its future. Returns 0
 *  if the caller is to run it, since the rank has no thread, or there is no memory. */
int jax_rank_defer(const struct JaxCall *call, XLA_FFI_CallFrame *frame);

/** Let the thread end, once it has run all calls. */
void jax_rank_stop(JaxRank *rank);

/* ---- a call: call.c ------------------------------------------------------------------------ */

/** Buffers of a call: at most so many operands or results, without the order. */
#define JAX_BUFFERS 8

typedef struct JaxCall JaxCall;
typedef EpStatus JaxOperation(JaxCall *call);

struct JaxCall {
    JaxCall *next; /**< in the queue of its rank */
    const XLA_FFI_Api *api;
    XLA_FFI_Attrs attrs;
    XLA_FFI_Future *future; /**< of a call that the rank's thread runs */
    const char *name;
    JaxOperation *operation;
    JaxRank *rank; /**< locked while the operation runs */
    EpHandle *handle;
    EpStream stream;
    int64_t num_operands, num_results;
    EpTensor operands[JAX_BUFFERS], results[JAX_BUFFERS];
    EpTensor counters[5];
};

/** Answer XLA, which asks each handler once what it is. Returns 1 if this call is that. */
int jax_answer_metadata(const XLA_FFI_CallFrame *frame);

/** A handler: run an operation, or let the rank's thread run it. Returns what the handler returns.
 */
XLA_FFI_Error *jax_call(XLA_FFI_CallFrame *frame, const char *name, JaxOperation *operation);

/** Run a call of the rank's thread, tell XLA how it ended, and free it. */
void jax_finish(JaxCall *call);

/** Set the counters of the rank, if it has any, that an operation takes. */
typedef enum JaxCounts { JAX_WAITS = 1, JAX_ROWS = 2, JAX_EXPERTS = 4 } JaxCounts;
EpExtras jax_extras(JaxCall *call, unsigned counts);

/** Returns an attribute of the call, a 64-bit integer; 0 if it has none of this name. */
int64_t jax_attribute(const JaxCall *call, const char *name);

/** An operand or a result behind the order, as a tensor; NULL if the call has fewer. */
const EpTensor *jax_operand(const JaxCall *call, int64_t index);
const EpTensor *jax_result(const JaxCall *call, int64_t index);

#endif
