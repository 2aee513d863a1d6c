/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Communicators split from the one that the caller lends.
 *
 * They share no resources with it. Communicators that share are ended by the same word: where the
 * watcher ends the group's, it would end the caller's, too. It is the lent communicator's
 * configuration that decides this, by its splitShare; NCCL does not ask the new one's.
 *
 * The lent communicator also decides whether the call blocks. A blocking one holds the calling
 * thread until all ranks have come, without a deadline, and a split can only be withdrawn by
 * aborting the lent communicator, which is the caller's to do. So a thread of its own makes the
 * call. Where the rank gives up, the thread and its struct stay: NCCL may still write there.
 */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "runtime/thread.h"
#include "runtime/wait.h"

typedef struct Split {
    const EpNccl *nccl;
    ncclComm_t lent;
    int device; /* of the rank: NCCL opens what is current, in a new thread the first one */
    int color, key;
    ncclConfig_t config;
    ncclComm_t made;
    ncclResult_t result;
    int returned; /* stored with release, last */
} Split;

static void *call_nccl(void *argument) {
    Split *s = argument;
    int before = ep_cuda_use(s->device);
    s->result = s->nccl->ncclCommSplit(s->lent, s->color, s->key, &s->made, &s->config);
    ep_cuda_restore(before);
    __atomic_store_n(&s->returned, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Without a thread the call is made here: the other ranks are on their way into it. */
static void start(Split *s) {
    pthread_t thread;
    if (ep_thread_start(&thread, call_nccl, s) != 0)
        (void)call_nccl(s);
    else
        (void)pthread_detach(thread);
}

/* Wait until both communicators have settled. Returns ncclInProgress if they have not in time. */
static ncclResult_t await(const Split *s, double seconds) {
    EpWait wait;
    double end = ep_clock() + seconds;
    ep_wait_begin(&wait, seconds, 0);
    while (!__atomic_load_n(&s->returned, __ATOMIC_ACQUIRE))
        if (ep_poll_abort() != EP_OK || !ep_wait_pause(&wait)) return ncclInProgress;
    ncclResult_t result = ep_nccl_settle(s->nccl, s->lent, s->result, end - ep_clock());
    if (result != ncclSuccess || !s->made) return result;
    return ep_nccl_settle(s->nccl, s->made, ncclSuccess, end - ep_clock());
}

/* A failed split may have left something in `made`. NCCL wants the lent communicator to be aborted
 * before it, so it stays, too. */
static EpStatus split(EpGroup *group, Split *s, ncclComm_t *out) {
    double seconds = ep_cuda_comm_timeout(group);
    start(s);
    (void)ep_group_await(group);
    ncclResult_t result = await(s, seconds);
    EpStatus status = ep_cuda_comm_check(group, "ncclCommSplit", result, seconds);
    (void)ep_group_await(NULL);
    if (status == EP_OK) *out = s->made;
    if (result != ncclInProgress) free(s);
    if (status != EP_OK) ep_nccl_bootstrap_refuse(group->config.nccl_comm, status);
    return status;
}

/* All ranks have the memory, and are here, before any of them enters NCCL. */
EpStatus ep_cuda_comm_split(EpGroup *group, int color, ncclComm_t *out) {
    EpCall call = {"ep_group_create", group->rank};
    Split *s = calloc(1, sizeof(*s));
    EpStatus status = ep_group_agree(
        group, &call, s ? EP_OK : ep_refuse(&call, EP_ERR_NO_MEMORY, "group", "out of memory"));
    if (status != EP_OK) {
        free(s);
        return status;
    }
    *s = (Split){.nccl = ep_cuda(group)->nccl,
                 .lent = group->config.nccl_comm,
                 .device = ep_cuda(group)->ordinal,
                 .color = color,
                 .key = group->rank,
                 .config = ep_cuda_comm_config(group)};
    s->config.splitShare = 0;
    return ep_cuda_comm_agree(group, &call, split(group, s, out));
}
