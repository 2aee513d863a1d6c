/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes one communicator: from a unique id, or split from the one that the caller lends.
 *
 * A communicator that blocks holds the thread that makes it until all ranks have come; for a split
 * the lent one decides that. A split can only be withdrawn by aborting the lent communicator, which
 * is the caller's to do. So a thread of its own makes the call.
 *
 * Splits share no resources with the lent communicator. Communicators that share are ended by the
 * same word: where the watcher ends the group's, it would end the caller's, too. It is the lent
 * communicator's configuration that decides this, by its splitShare; NCCL does not ask the new
 * one's.
 */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "runtime/wait.h"

typedef struct Making {
    EpNcclCall call;
    const EpNccl *nccl;
    ncclComm_t lent; /* NULL: from the id */
    EpNewComm new;
    ncclConfig_t config;
    ncclComm_t made;
} Making;

static ncclResult_t call_nccl(EpNcclCall *call) {
    Making *m = (Making *)call;
    EpNewComm *new = &m->new;
    if (m->lent)
        return m->nccl->ncclCommSplit(m->lent, new->color, new->rank, &m->made, &m->config);
    if (new->size == 1) return ncclSuccess;
    return m->nccl->ncclCommInitRankConfig(&m->made, new->size, new->id, new->rank, &m->config);
}

/* Wait until the communicators have settled. Returns ncclInProgress if they have not in time. */
static ncclResult_t make(Making *m, double seconds) {
    double end = ep_clock() + seconds;
    if (!ep_nccl_call(&m->call, seconds)) return ncclInProgress;
    ncclResult_t result = m->call.result;
    if (m->lent) result = ep_nccl_settle(m->nccl, m->lent, result, end - ep_clock());
    int goes_on = result == ncclSuccess || result == ncclInProgress;
    if (!goes_on || !m->made) return result;
    return ep_nccl_settle(m->nccl, m->made, result, end - ep_clock());
}

/* A failed split may have left something in `made`. NCCL wants the lent communicator to be aborted
 * before it, so it stays, too. What was made from an id is the group's to abort. While NCCL is not
 * done, it may still write into the struct, which then stays. */
static EpStatus finish(EpGroup *group, Making *m, ncclComm_t *out) {
    const char *name = m->lent ? "ncclCommSplit" : "ncclCommInitRankConfig";
    double seconds = ep_cuda_comm_timeout(group);
    (void)ep_group_await(group);
    ncclResult_t result = make(m, seconds);
    EpStatus status = ep_cuda_comm_check(group, name, result, seconds);
    (void)ep_group_await(NULL);
    int returned = __atomic_load_n(&m->call.returned, __ATOMIC_ACQUIRE);
    if (status == EP_OK || (returned && !m->lent)) *out = m->made;
    if (status != EP_OK && m->lent) ep_nccl_bootstrap_refuse(m->lent, status);
    if (result != ncclInProgress) free(m);
    return status;
}

/* All ranks have the memory, and are here, before any of them enters NCCL. */
EpStatus ep_cuda_comm_make(EpGroup *group, const EpNewComm *new, ncclComm_t *out) {
    EpCall call = {"ep_group_create", group->rank};
    Making *m = calloc(1, sizeof(*m));
    EpStatus status = ep_group_agree(
        group, &call, m ? EP_OK : ep_refuse(&call, EP_ERR_NO_MEMORY, "group", "out of memory"));
    if (status != EP_OK) {
        free(m);
        return status;
    }
    *m = (Making){.call = {.make = call_nccl, .device = ep_cuda(group)->ordinal},
                  .nccl = ep_cuda(group)->nccl,
                  .lent = group->config.nccl_comm,
                  .new = *new,
                  .config = ep_cuda_comm_config(group, new->blocks)};
    if (m->lent) m->config.splitShare = 0;
    return ep_cuda_comm_agree(group, &call, finish(group, m, out));
}
