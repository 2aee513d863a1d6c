/* SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <stdlib.h>

#include "bindings/jax/handlers.h"

/* Returns the oldest call, or NULL once the rank is closed and has none. */
static JaxCall *take(JaxRank *rank) {
    pthread_mutex_lock(&rank->queue_mutex);
    while (!rank->first && rank->has_thread)
        pthread_cond_wait(&rank->queue_filled, &rank->queue_mutex);
    JaxCall *call = rank->first;
    if (call) rank->first = call->next;
    pthread_mutex_unlock(&rank->queue_mutex);
    return call;
}

static void *run(void *rank) {
    for (JaxCall *call; (call = take(rank)) != NULL;)
        jax_finish(call);
    return NULL;
}

int jax_rank_start(JaxRank *rank) {
    /* Signals are for the threads of Python. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_t thread;
    rank->has_thread = 1; /* before the thread looks */
    if (pthread_create(&thread, NULL, run, rank) != 0) rank->has_thread = 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    /* It may be in a program when the rank is closed, so nobody waits for its end. */
    if (rank->has_thread) pthread_detach(thread);
    return rank->has_thread;
}

/* Returns a copy of a call with a future; NULL if there is no memory for it. */
static JaxCall *copy(const JaxCall *call) {
    XLA_FFI_Future_Create_Args args = {XLA_FFI_Future_Create_Args_STRUCT_SIZE, NULL, NULL};
    JaxCall *own = malloc(sizeof(*own));
    if (!own || call->api->XLA_FFI_Future_Create(&args) != NULL) {
        free(own);
        return NULL;
    }
    *own = *call;
    own->future = args.future;
    return own;
}

int jax_rank_defer(const JaxCall *call, XLA_FFI_CallFrame *frame) {
    JaxRank *rank = call->rank;
    pthread_mutex_lock(&rank->queue_mutex);
    JaxCall *own = rank->has_thread ? copy(call) : NULL;
    if (own) {
        frame->future = own->future;
        *(rank->first ? &rank->last->next : &rank->first) = own;
        rank->last = own;
        pthread_cond_signal(&rank->queue_filled);
    }
    pthread_mutex_unlock(&rank->queue_mutex);
    return own != NULL;
}

void jax_rank_stop(JaxRank *rank) {
    pthread_mutex_lock(&rank->queue_mutex);
    rank->has_thread = 0;
    pthread_cond_signal(&rank->queue_filled);
    pthread_mutex_unlock(&rank->queue_mutex);
}
