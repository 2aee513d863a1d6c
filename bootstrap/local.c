/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bootstrap for ranks that are threads of one process. A rendezvous uses one state under one mutex:
 * each rank stores a pointer to its bytes, and the last to arrive completes the turn. A rank that
 * waits wakes now and then, to see whether its group was aborted. Shared memory is plain memory.
 * Messages, which only pretended nodes (LIBEP_TOPOLOGY) need, wait in a queue for each pair of
 * ranks.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bootstrap/bootstrap.h"

/* A message that was sent, copied, and waits for a matching irecv. */
typedef struct Message {
    struct Message *next;
    int32_t tag;
    size_t bytes;
    char data[];
} Message;

/* Messages from one rank to another, in order. Both fields are stored under the receiver's mutex. A
 * receiver polls hundreds of peers, so it looks at `first` without the mutex. Relaxed is enough:
 * before it reads a message it takes the mutex, which orders the message. */
typedef struct Queue {
    _Atomic(Message *) first;
    Message *last;
} Queue;

/* What a rank receives. */
typedef struct Inbox {
    pthread_mutex_t mutex;
    Queue *from; /* [size]; NULL before the first message */
} Inbox;

/* The request of an irecv. */
typedef struct Receive {
    Queue *queue;
    int32_t tag;
    void *data;
    size_t capacity;
} Receive;

/* A rank's state in the current turn. A timeout names a rank that is ABSENT rather than one that
 * GAVE_UP waiting for it. */
typedef enum Presence { ABSENT, PRESENT, GAVE_UP } Presence;

typedef struct SharedState {
    pthread_mutex_t mutex;
    pthread_cond_t turned;
    int32_t size;
    int32_t users;        /* bootstraps not yet destroyed */
    unsigned turn;        /* number of completed rendezvous */
    int32_t arrived;      /* ranks that have arrived in this turn */
    char *presence;       /* [size] Presence of each rank in this turn */
    const void **offered; /* [size] the bytes that each rank contributes */
    size_t *kind;         /* [size] kind of rendezvous that each rank has called */
    int agreed;           /* 1 if all kinds were equal in the last turn */
    int has_farewell;     /* whether a rank has given up this turn because of an abort */
    EpFarewell farewell;  /* the first of them */
    Inbox *inbox;         /* [size] */
} SharedState;

typedef struct Local {
    SharedState *state;
    int32_t rank;
} Local;

static void deadline_after(double seconds, struct timespec *out) {
    clock_gettime(CLOCK_MONOTONIC, out);
    double whole = (double)(time_t)(seconds < 1e9 ? seconds : 1e9);
    out->tv_sec += (time_t)whole;
    out->tv_nsec += (long)((seconds < 1e9 ? seconds - whole : 0) * 1e9);
    if (out->tv_nsec >= 1000000000L) out->tv_sec++, out->tv_nsec -= 1000000000L;
}

/* Of a waiting rank, at its group. Where many ranks wait, each looks less often: they share the
 * CPUs and the mutex. */
static double seconds_per_look(const SharedState *state) {
    return 2e-3 * (1 + state->size / 16);
}

static int is_before(const struct timespec *a, const struct timespec *b) {
    return a->tv_sec < b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec < b->tv_nsec);
}

/* Wait until a turn may be complete, or it is time for a look. Returns 1 after the deadline. */
static int wait_for_turn(SharedState *state, const struct timespec *deadline) {
    struct timespec look;
    deadline_after(seconds_per_look(state), &look);
    int is_last = !is_before(&look, deadline);
    return pthread_cond_timedwait(&state->turned, &state->mutex, is_last ? deadline : &look) ==
               ETIMEDOUT &&
           is_last;
}

static EpStatus fail_missing(const Local *self, double seconds) {
    const SharedState *state = self->state;
    int32_t missing = 0;
    while (missing < state->size && state->presence[missing] != ABSENT)
        missing++;
    for (int32_t r = 0; r < state->size && missing == state->size; r++)
        if (state->presence[r] == GAVE_UP) missing = r;
    return ep_fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: rank %d did not arrive within %g s",
                   self->rank, missing, seconds);
}

static int all_agree(const SharedState *state) {
    for (int32_t r = 1; r < state->size; r++)
        if (state->kind[r] != state->kind[0]) return 0;
    return 1;
}

/* Kinds of rendezvous; an allgather of n bytes has kind GATHER + n. */
enum { BARRIER, LEAVE, GATHER };

/* Ranks on other pretended nodes cannot see an abort, and a slow one may see it too late: so the
 * first rank that gives up tells all. */
static EpStatus poll_farewell(SharedState *state) {
    EpStatus status = ep_poll_abort();
    if (status == EP_OK) return state->has_farewell ? ep_abort_hear(&state->farewell) : EP_OK;
    if (!state->has_farewell) state->farewell = ep_abort_say();
    state->has_farewell = 1;
    return status;
}

/* Arrive, and wait until every rank has. The caller holds the mutex. `offer` stays readable until
 * the rank's next one, since slower ranks may still copy it. A rank that gives up withdraws its
 * arrival, so that a later rendezvous starts clean. */
static EpStatus rendezvous(const Local *self, const void *offer, size_t kind, double seconds) {
    SharedState *state = self->state;
    unsigned turn = state->turn;
    struct timespec deadline;
    deadline_after(seconds, &deadline);
    if (offer) state->offered[self->rank] = offer;
    state->presence[self->rank] = PRESENT;
    state->kind[self->rank] = kind;
    if (++state->arrived == state->size) {
        state->agreed = all_agree(state);
        state->arrived = 0;
        memset(state->presence, ABSENT, (size_t)state->size);
        state->turn++;
        state->has_farewell = 0;
        pthread_cond_broadcast(&state->turned);
    }
    while (state->turn == turn) {
        int late = wait_for_turn(state, &deadline);
        if (state->turn != turn) break;
        EpStatus status = poll_farewell(state);
        if (status == EP_OK && late) status = fail_missing(self, seconds);
        if (status == EP_OK) continue;
        state->presence[self->rank] = GAVE_UP;
        state->offered[self->rank] = NULL;
        state->arrived--;
        return status;
    }
    if (state->agreed) return EP_OK;
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: bootstrap: expected all ranks in the same call, got "
                   "different ones",
                   self->rank);
}

/* Copy the bytes of every rank. A rank that waited too long for this one to copy has withdrawn its
 * bytes, or is in another call already. */
static EpStatus copy_offers(const Local *self, void *out, size_t bytes) {
    const SharedState *state = self->state;
    for (int32_t r = 0; r < state->size; r++) {
        int is_same_call = state->kind[r] == GATHER + bytes || state->kind[r] == LEAVE;
        if ((!state->offered[r] || !is_same_call) && state->has_farewell)
            EP_TRY(ep_abort_hear(&state->farewell));
        if (!state->offered[r] || !is_same_call)
            return ep_fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: rank %d has given up waiting",
                           self->rank, r);
        memcpy((char *)out + (size_t)r * bytes, state->offered[r], bytes);
    }
    return EP_OK;
}

/* Two rendezvous: the second keeps every rank's `in` alive until all ranks have copied it. It
 * completes on all ranks or on none, so an allgather succeeds on all ranks or on none. */
static EpStatus local_allgather(void *context, const void *in, void *out, size_t bytes,
                                double seconds) {
    const Local *self = context;
    SharedState *state = self->state;
    pthread_mutex_lock(&state->mutex);
    EpStatus status = rendezvous(self, in, GATHER + bytes, seconds);
    if (status == EP_OK) status = copy_offers(self, out, bytes);
    if (status == EP_OK) status = rendezvous(self, NULL, LEAVE, seconds);
    pthread_mutex_unlock(&state->mutex);
    return status;
}

static EpStatus local_barrier(void *context, double seconds) {
    const Local *self = context;
    pthread_mutex_lock(&self->state->mutex);
    EpStatus status = rendezvous(self, NULL, BARRIER, seconds);
    pthread_mutex_unlock(&self->state->mutex);
    return status;
}

/* ---- shared memory: one block for all ranks, freed by the last ------------------------------- */

typedef struct Block {
    int32_t users;
    char *base;
} Block;

typedef struct BlockOffer {
    int32_t node;
    Block *block; /* set by rank 0 */
} BlockOffer;

static Block *block_create(size_t bytes, int32_t users) {
    Block *block = calloc(1, sizeof(*block));
    if (!block) return NULL;
    block->users = users;
    block->base = aligned_alloc(64, bytes);
    if (!block->base) {
        free(block);
        return NULL;
    }
    return block;
}

static void block_free(Block *block) {
    if (block) free(block->base);
    free(block);
}

static EpStatus local_share(void *context, int32_t node, size_t bytes, double seconds,
                            void **segments, void **memory) {
    const Local *self = context;
    int32_t size = self->state->size;
    size_t stride = (bytes + 63) / 64 * 64;
    BlockOffer mine = {.node = node}, all[EP_MAX_RANKS];
    if (self->rank == 0) mine.block = block_create(stride * (size_t)size, size);
    EpStatus status = local_allgather(context, &mine, all, sizeof(mine), seconds);
    if (status != EP_OK) {
        block_free(mine.block); /* it failed on all ranks: none uses the block */
        return status;
    }
    Block *block = all[0].block;
    if (!block)
        status = ep_fail(EP_ERR_NO_MEMORY,
                         "rank %d: bootstrap: expected %zu bytes of memory for "
                         "each of %d ranks, got none",
                         self->rank, bytes, size);
    for (int32_t r = 0; r < size && status == EP_OK; r++)
        segments[r] = all[r].node == node ? block->base + stride * (size_t)r : NULL;
    if (status == EP_OK) {
        memset(segments[self->rank], 0, stride);
        *memory = block;
        status = local_barrier(context, seconds);
    }
    return status;
}

static void local_share_free(void *context, void *memory, int together) {
    (void)together;
    SharedState *state = ((const Local *)context)->state;
    Block *block = memory;
    pthread_mutex_lock(&state->mutex);
    int last = --block->users == 0;
    pthread_mutex_unlock(&state->mutex);
    if (last) block_free(block);
}

/* ---- messages ------------------------------------------------------------------------------ */

static EpStatus no_memory(const Local *self) {
    return ep_fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
}

/* Returns the queue of messages to a rank from another, or NULL when out of memory. */
static Queue *find_queue(const SharedState *state, int32_t to, int32_t from) {
    Inbox *inbox = &state->inbox[to];
    pthread_mutex_lock(&inbox->mutex);
    if (!inbox->from) inbox->from = calloc((size_t)state->size, sizeof(*inbox->from));
    Queue *queues = inbox->from;
    pthread_mutex_unlock(&inbox->mutex);
    return queues ? &queues[from] : NULL;
}

static Message *first_of(const Queue *queue) {
    return atomic_load_explicit(&queue->first, memory_order_relaxed);
}

static void set_first(Queue *queue, Message *message) {
    atomic_store_explicit(&queue->first, message, memory_order_relaxed);
}

static EpStatus local_isend(void *context, int32_t peer, int32_t tag, const void *data,
                            size_t bytes, void **request) {
    const Local *self = context;
    Inbox *inbox = &self->state->inbox[peer];
    Queue *queue = find_queue(self->state, peer, self->rank);
    Message *message = queue ? malloc(sizeof(*message) + bytes) : NULL;
    if (!message) return no_memory(self);
    *message = (Message){.tag = tag, .bytes = bytes};
    memcpy(message->data, data, bytes);
    pthread_mutex_lock(&inbox->mutex);
    if (first_of(queue))
        queue->last->next = message;
    else
        set_first(queue, message);
    queue->last = message;
    pthread_mutex_unlock(&inbox->mutex);
    *request = NULL; /* the message is copied: nothing to wait for */
    return EP_OK;
}

static EpStatus local_irecv(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                            void **request) {
    const Local *self = context;
    Queue *queue = find_queue(self->state, self->rank, peer);
    Receive *receive = queue ? malloc(sizeof(*receive)) : NULL;
    if (!receive) return no_memory(self);
    *receive = (Receive){queue, tag, data, bytes};
    *request = receive;
    return EP_OK;
}

/* Remove the first message with a tag from a queue. Returns NULL if there is none. */
static Message *take_message(Queue *queue, int32_t tag) {
    Message *before = NULL, *message = first_of(queue);
    while (message && message->tag != tag)
        before = message, message = message->next;
    if (!message) return NULL;
    if (before)
        before->next = message->next;
    else
        set_first(queue, message->next);
    if (queue->last == message) queue->last = before;
    return message;
}

static EpStatus local_test(void *context, void **request, int *done) {
    const Local *self = context;
    Receive *receive = *request;
    pthread_mutex_t *mutex = &self->state->inbox[self->rank].mutex;
    Message *message = NULL;
    if (receive && first_of(receive->queue)) {
        pthread_mutex_lock(mutex);
        message = take_message(receive->queue, receive->tag);
        pthread_mutex_unlock(mutex);
    }
    *done = !receive || message;
    if (!message) return EP_OK;
    int fits = message->bytes <= receive->capacity;
    if (fits) memcpy(receive->data, message->data, message->bytes);
    size_t bytes = message->bytes, capacity = receive->capacity;
    free(message);
    free(receive);
    *request = NULL;
    return fits ? EP_OK
                : ep_fail(EP_ERR_ORDER,
                          "rank %d: bootstrap: expected a message of at most %zu "
                          "bytes, got %zu",
                          self->rank, capacity, bytes);
}

static void local_cancel(void *context, void **request) {
    (void)context;
    free(*request);
    *request = NULL;
}

/* ---- life ---------------------------------------------------------------------------------- */

static void inbox_close(Inbox *inbox, int32_t size) {
    for (int32_t r = 0; inbox->from && r < size; r++)
        for (Message *next, *message = first_of(&inbox->from[r]); message; message = next) {
            next = message->next;
            free(message);
        }
    free(inbox->from);
    pthread_mutex_destroy(&inbox->mutex);
}

static void state_free(SharedState *state) {
    for (int32_t r = 0; state->inbox && r < state->size; r++)
        inbox_close(&state->inbox[r], state->size);
    pthread_cond_destroy(&state->turned);
    pthread_mutex_destroy(&state->mutex);
    free(state->presence);
    free(state->offered);
    free(state->kind);
    free(state->inbox);
    free(state);
}

static SharedState *state_create(int32_t size) {
    SharedState *state = calloc(1, sizeof(*state));
    if (!state) return NULL;
    pthread_mutex_init(&state->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&state->turned, &monotonic);
    pthread_condattr_destroy(&monotonic);
    state->size = state->users = size;
    state->presence = calloc((size_t)size, 1);
    state->offered = calloc((size_t)size, sizeof(*state->offered));
    state->kind = calloc((size_t)size, sizeof(*state->kind));
    state->inbox = calloc((size_t)size, sizeof(*state->inbox));
    for (int32_t r = 0; state->inbox && r < size; r++)
        pthread_mutex_init(&state->inbox[r].mutex, NULL);
    if (state->presence && state->offered && state->kind && state->inbox) return state;
    state_free(state);
    return NULL;
}

static void local_destroy(void *context) {
    Local *self = context;
    pthread_mutex_lock(&self->state->mutex);
    int last = --self->state->users == 0;
    pthread_mutex_unlock(&self->state->mutex);
    if (last) state_free(self->state);
    free(self);
}

static EpBootstrap describe(Local *self) {
    return (EpBootstrap){.struct_size = sizeof(EpBootstrap),
                         .rank = self->rank,
                         .size = self->state->size,
                         .context = self,
                         .allgather = local_allgather,
                         .barrier = local_barrier,
                         .share = local_share,
                         .share_free = local_share_free,
                         .isend = local_isend,
                         .irecv = local_irecv,
                         .test = local_test,
                         .cancel = local_cancel,
                         .destroy = local_destroy};
}

EpStatus ep_bootstrap_local(int32_t size, EpBootstrap *out) {
    EpCall call = {"ep_bootstrap_local", -1};
    if (size < 1 || size > EP_MAX_RANKS)
        return ep_refuse(&call, EP_ERR_RANGE, "size", "expected 1 .. %d, got %d", EP_MAX_RANKS,
                         size);
    EP_TRY(ep_check_struct(&call, "out[0]", out, sizeof(*out)));
    SharedState *state = state_create(size);
    Local **contexts = calloc((size_t)size, sizeof(*contexts));
    int32_t made = 0;
    while (state && contexts && made < size && (contexts[made] = malloc(sizeof(Local))))
        *contexts[made] = (Local){state, made}, made++;
    int complete = made == size;
    for (int32_t r = 0; r < made && complete; r++)
        out[r] = describe(contexts[r]);
    for (int32_t r = 0; r < made && !complete; r++)
        free(contexts[r]);
    free(contexts);
    if (!complete && state) state_free(state);
    return complete ? EP_OK : ep_refuse(&call, EP_ERR_NO_MEMORY, "size", "out of memory");
}
