/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks as threads of one process. They meet on a board under one mutex: each writes its bytes,
 * the last to arrive opens the next turn. Shared memory is plain memory. Messages, which only
 * pretended nodes (EP_TOPOLOGY) need, go through a mailbox list under the same mutex.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bootstrap/bootstrap.h"

/* A message on its way: the sender's copy, waiting for a matching irecv. */
typedef struct Letter {
    struct Letter *next;
    int32_t from, to, tag;
    size_t bytes;
    char data[];
} Letter;

/* What an irecv waits for. */
typedef struct Expected {
    int32_t from, to, tag;
    void *data;
    size_t capacity;
} Expected;

/* A rank that gave up waiting is not the one that others miss. */
typedef enum Presence { ABSENT, PRESENT, GAVE_UP } Presence;

typedef struct Board {
    pthread_mutex_t mutex;
    pthread_cond_t turned;
    int32_t size;
    int32_t users;        /* bootstraps not yet destroyed */
    unsigned turn;        /* how often everyone has met */
    int32_t arrived;      /* in this turn */
    char *here;           /* [size] Presence of each rank in this turn */
    const void **offered; /* [size] what they offer */
    size_t *kind;         /* [size] what each believes this turn to be */
    int agreed;           /* whether all believed the same in the last turn */
    Letter *letters, **last_letter;
} Board;

typedef struct Local {
    Board *board;
    int32_t rank;
} Local;

static void deadline_after(double seconds, struct timespec *out) {
    clock_gettime(CLOCK_MONOTONIC, out);
    double whole = (double)(time_t)(seconds < 1e9 ? seconds : 1e9);
    out->tv_sec += (time_t)whole;
    out->tv_nsec += (long)((seconds < 1e9 ? seconds - whole : 0) * 1e9);
    if (out->tv_nsec >= 1000000000L) out->tv_sec++, out->tv_nsec -= 1000000000L;
}

static EpStatus fail_missing(const Local *self, double seconds) {
    const Board *board = self->board;
    int32_t missing = 0;
    while (missing < board->size && board->here[missing] != ABSENT)
        missing++;
    for (int32_t r = 0; r < board->size && missing == board->size; r++)
        if (board->here[r] == GAVE_UP) missing = r;
    return ep_fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: rank %d did not arrive within %g s",
                   self->rank, missing, seconds);
}

static int all_agree(const Board *board) {
    for (int32_t r = 1; r < board->size; r++)
        if (board->kind[r] != board->kind[0]) return 0;
    return 1;
}

/* Kinds of meeting; an allgather of n bytes is of kind GATHER + n. */
enum { BARRIER, LEAVE, GATHER };

/* With the mutex held: arrive, and wait until everyone has. What was offered stays on the board
 * until the next offer: slower ranks may still have to copy it. A rank that gives up takes its
 * arrival back, so that a later meeting starts clean. */
static EpStatus meet(const Local *self, const void *offer, size_t kind, double seconds) {
    Board *board = self->board;
    unsigned turn = board->turn;
    struct timespec deadline;
    deadline_after(seconds, &deadline);
    if (offer) board->offered[self->rank] = offer;
    board->here[self->rank] = PRESENT;
    board->kind[self->rank] = kind;
    if (++board->arrived == board->size) {
        board->agreed = all_agree(board);
        board->arrived = 0;
        memset(board->here, ABSENT, (size_t)board->size);
        board->turn++;
        pthread_cond_broadcast(&board->turned);
    }
    while (board->turn == turn) {
        int error = pthread_cond_timedwait(&board->turned, &board->mutex, &deadline);
        if (error == ETIMEDOUT && board->turn == turn) {
            EpStatus status = fail_missing(self, seconds);
            board->here[self->rank] = GAVE_UP;
            board->arrived--;
            return status;
        }
    }
    if (board->agreed) return EP_OK;
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: bootstrap: expected all ranks in the same call, got "
                   "different ones",
                   self->rank);
}

/* Two meetings: nobody's offer may go away before all have copied it. */
static EpStatus local_allgather(void *context, const void *in, void *out, size_t bytes,
                                double seconds) {
    const Local *self = context;
    Board *board = self->board;
    pthread_mutex_lock(&board->mutex);
    EpStatus status = meet(self, in, GATHER + bytes, seconds);
    for (int32_t r = 0; r < board->size && status == EP_OK; r++)
        memcpy((char *)out + (size_t)r * bytes, board->offered[r], bytes);
    if (status == EP_OK) status = meet(self, NULL, LEAVE, seconds);
    pthread_mutex_unlock(&board->mutex);
    return status;
}

static EpStatus local_barrier(void *context, double seconds) {
    const Local *self = context;
    pthread_mutex_lock(&self->board->mutex);
    EpStatus status = meet(self, NULL, BARRIER, seconds);
    pthread_mutex_unlock(&self->board->mutex);
    return status;
}

/* ---- shared memory: one block for all ranks, freed by the last ------------------------------- */

typedef struct Block {
    int32_t users;
    char *base;
} Block;

typedef struct BlockOffer {
    int32_t node;
    Block *block; /* rank 0's */
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

static EpStatus local_share(void *context, int32_t node, size_t bytes, double seconds,
                            void **segments, void **memory) {
    const Local *self = context;
    int32_t size = self->board->size;
    size_t stride = (bytes + 63) / 64 * 64;
    BlockOffer mine = {.node = node};
    BlockOffer *all = calloc((size_t)size, sizeof(*all));
    if (!all) return ep_fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
    if (self->rank == 0) mine.block = block_create(stride * (size_t)size, size);
    EpStatus status = local_allgather(context, &mine, all, sizeof(mine), seconds);
    Block *block = all[0].block;
    if (status == EP_OK && !block)
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
    free(all);
    return status;
}

static void local_share_free(void *context, void *memory, int together) {
    (void)together;
    Board *board = ((const Local *)context)->board;
    Block *block = memory;
    pthread_mutex_lock(&board->mutex);
    int last = --block->users == 0;
    pthread_mutex_unlock(&board->mutex);
    if (last) {
        free(block->base);
        free(block);
    }
}

/* ---- messages ------------------------------------------------------------------------------ */

static EpStatus local_isend(void *context, int32_t peer, int32_t tag, const void *data,
                            size_t bytes, void **request) {
    const Local *self = context;
    Letter *letter = malloc(sizeof(*letter) + bytes);
    if (!letter) return ep_fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
    *letter = (Letter){.from = self->rank, .to = peer, .tag = tag, .bytes = bytes};
    memcpy(letter->data, data, bytes);
    pthread_mutex_lock(&self->board->mutex);
    *self->board->last_letter = letter;
    self->board->last_letter = &letter->next;
    pthread_mutex_unlock(&self->board->mutex);
    *request = NULL; /* copied: nothing to wait for */
    return EP_OK;
}

static EpStatus local_irecv(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                            void **request) {
    const Local *self = context;
    Expected *expected = malloc(sizeof(*expected));
    if (!expected)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
    *expected = (Expected){peer, self->rank, tag, data, bytes};
    *request = expected;
    return EP_OK;
}

static Letter *take_letter(Board *board, const Expected *expected) {
    for (Letter **at = &board->letters; *at; at = &(*at)->next) {
        Letter *letter = *at;
        if (letter->from != expected->from || letter->to != expected->to ||
            letter->tag != expected->tag)
            continue;
        *at = letter->next;
        if (board->last_letter == &letter->next) board->last_letter = at;
        return letter;
    }
    return NULL;
}

static EpStatus local_test(void *context, void **request, int *done) {
    const Local *self = context;
    Expected *expected = *request;
    pthread_mutex_lock(&self->board->mutex);
    Letter *letter = expected ? take_letter(self->board, expected) : NULL;
    pthread_mutex_unlock(&self->board->mutex);
    *done = !expected || letter;
    if (!letter) return EP_OK;
    int fits = letter->bytes <= expected->capacity;
    if (fits) memcpy(expected->data, letter->data, letter->bytes);
    size_t bytes = letter->bytes, capacity = expected->capacity;
    free(letter);
    free(expected);
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

static void board_free(Board *board) {
    while (board->letters) {
        Letter *next = board->letters->next;
        free(board->letters);
        board->letters = next;
    }
    pthread_cond_destroy(&board->turned);
    pthread_mutex_destroy(&board->mutex);
    free(board->here);
    free(board->offered);
    free(board->kind);
    free(board);
}

static Board *board_create(int32_t size) {
    Board *board = calloc(1, sizeof(*board));
    if (!board) return NULL;
    pthread_mutex_init(&board->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&board->turned, &monotonic);
    pthread_condattr_destroy(&monotonic);
    board->size = board->users = size;
    board->last_letter = &board->letters;
    board->here = calloc((size_t)size, 1);
    board->offered = calloc((size_t)size, sizeof(*board->offered));
    board->kind = calloc((size_t)size, sizeof(*board->kind));
    if (board->here && board->offered && board->kind) return board;
    board_free(board);
    return NULL;
}

static void local_destroy(void *context) {
    Local *self = context;
    pthread_mutex_lock(&self->board->mutex);
    int last = --self->board->users == 0;
    pthread_mutex_unlock(&self->board->mutex);
    if (last) board_free(self->board);
    free(self);
}

static EpBootstrap describe(Local *self) {
    return (EpBootstrap){.struct_size = sizeof(EpBootstrap),
                         .rank = self->rank,
                         .size = self->board->size,
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
    if (!out) return ep_refuse(&call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    if (size < 1 || size > EP_MAX_RANKS)
        return ep_refuse(&call, EP_ERR_RANGE, "size", "expected 1 .. %d, got %d", EP_MAX_RANKS,
                         size);
    Board *board = board_create(size);
    Local **selves = calloc((size_t)size, sizeof(*selves));
    int32_t made = 0;
    while (board && selves && made < size && (selves[made] = malloc(sizeof(Local))))
        *selves[made] = (Local){board, made}, made++;
    int complete = made == size;
    for (int32_t r = 0; r < made && complete; r++)
        out[r] = describe(selves[r]);
    for (int32_t r = 0; r < made && !complete; r++)
        free(selves[r]);
    free(selves);
    if (!complete && board) board_free(board);
    return complete ? EP_OK : ep_refuse(&call, EP_ERR_NO_MEMORY, "size", "out of memory");
}
