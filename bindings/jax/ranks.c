/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "bindings/jax/handlers.h"

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static JaxRank *list;

JaxRank *jax_rank_find(int64_t key, int32_t ordinal) {
    pthread_mutex_lock(&list_mutex);
    JaxRank *rank = list;
    while (rank && !(rank->key == key && rank->ordinal == ordinal))
        rank = rank->next;
    pthread_mutex_unlock(&list_mutex);
    return rank;
}

int ep_jax_rank_add(int64_t key, int32_t ordinal, int32_t number, int32_t num_ranks,
                    int32_t on_host, int32_t has_masks, EpGroup *group, EpHandle *handle) {
    JaxRank *rank = calloc(1, sizeof(*rank));
    if (!rank) return 0;
    rank->key = key, rank->ordinal = ordinal, rank->number = number, rank->on_host = on_host;
    rank->has_masks = has_masks;
    rank->group = group, rank->handle = handle, rank->num_ranks = num_ranks;
    pthread_mutex_init(&rank->mutex, NULL);
    pthread_mutex_init(&rank->queue_mutex, NULL);
    pthread_cond_init(&rank->queue_filled, NULL);
    if (on_host && num_ranks > 1 && !jax_rank_start(rank)) {
        free(rank);
        return 0;
    }
    pthread_mutex_lock(&list_mutex);
    rank->next = list;
    list = rank;
    pthread_mutex_unlock(&list_mutex);
    return 1;
}

void ep_jax_rank_count(int64_t key, int32_t ordinal, void *counters, int32_t num_local) {
    JaxRank *rank = jax_rank_find(key, ordinal);
    if (!rank) return;
    pthread_mutex_lock(&rank->mutex);
    rank->counters = counters, rank->num_local = num_local;
    pthread_mutex_unlock(&rank->mutex);
}

static struct timespec from_now(double seconds) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    double whole = floor(seconds), nanoseconds = (seconds - whole) * 1e9 + (double)time.tv_nsec;
    time.tv_sec += (time_t)whole + (nanoseconds >= 1e9);
    time.tv_nsec = (long)(nanoseconds >= 1e9 ? nanoseconds - 1e9 : nanoseconds);
    return time;
}

void ep_jax_rank_close(int64_t key, int32_t ordinal, double seconds) {
    JaxRank *rank = jax_rank_find(key, ordinal);
    if (!rank) return;
    struct timespec deadline = from_now(seconds);
    if (pthread_mutex_timedlock(&rank->mutex, &deadline) != 0) {
        ep_group_abort(rank->group, "the group was closed while a program was using it");
        pthread_mutex_lock(&rank->mutex);
    }
    rank->is_closed = 1;
    pthread_mutex_unlock(&rank->mutex);
    jax_rank_stop(rank);
}

int ep_jax_rank_waits(int64_t key, int32_t ordinal, double before) {
    JaxRank *rank = jax_rank_find(key, ordinal);
    int64_t began = rank && rank->on_host ? __atomic_load_n(&rank->began, __ATOMIC_RELAXED) : 0;
    return began && (double)began * 1e-9 < before;
}

EpStatus ep_jax_rank_mask(int64_t key, int32_t ordinal, const uint32_t *alive) {
    JaxRank *rank = jax_rank_find(key, ordinal);
    EpStatus status = EP_OK;
    if (!rank) return ep_set_last_error(EP_ERR_FOREIGN, "mask: there is no such rank");
    pthread_mutex_lock(&rank->mutex);
    const int is_alive = alive[rank->number / 32] >> rank->number % 32 & 1;
    if (rank->is_closed)
        status = ep_set_last_error(EP_ERR_DESTROYED, "mask: the group is closed");
    else if (is_alive)
        status = ep_group_mask(rank->group, alive, NULL);
    if (status == EP_OK) rank->is_masked = !is_alive;
    pthread_mutex_unlock(&rank->mutex);
    return status;
}

EpStatus ep_jax_rank_status(int64_t key, int32_t ordinal, EpFinding *out) {
    JaxRank *rank = jax_rank_find(key, ordinal);
    EpStatus status = EP_OK;
    if (!rank) return ep_set_last_error(EP_ERR_FOREIGN, "status: there is no such rank");
    pthread_mutex_lock(&rank->mutex);
    if (rank->is_closed)
        status = ep_set_last_error(EP_ERR_DESTROYED, "status: the group is closed");
    else
        status = ep_group_status(rank->group, out);
    pthread_mutex_unlock(&rank->mutex);
    return status;
}
