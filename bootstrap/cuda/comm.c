/* SPDX-License-Identifier: Apache-2.0 */
/* A group's NCCL communicator: its own, or one that it borrows. */
#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"

static EpStatus check(const EpGroup *group, const char *call, ncclResult_t result) {
    if (result == ncclSuccess) return EP_OK;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: %s", group->rank, call,
                   ep_cuda(group)->nccl->ncclGetErrorString(result));
}

/* Returns the seconds to wait for NCCL, which may need longer than the group's timeout. */
static double nccl_timeout(const EpGroup *group) {
    return group->timeout > EP_NCCL_SECONDS ? group->timeout : EP_NCCL_SECONDS;
}

EpStatus ep_cuda_comm_agree(EpGroup *group, const EpCall *call, EpStatus mine) {
    return ep_group_agree_within(group, call, mine, nccl_timeout(group) + group->timeout);
}

EpStatus ep_cuda_comm_settle(EpGroup *group, const char *call, ncclResult_t result) {
    const EpCuda *cuda = ep_cuda(group);
    double seconds = nccl_timeout(group);
    (void)ep_group_await(group);
    result = ep_nccl_settle(cuda->nccl, cuda->comm, result, seconds);
    EpStatus status = result == ncclInProgress ? ep_poll_abort() : check(group, call, result);
    (void)ep_group_await(NULL);
    if (status != EP_OK || result != ncclInProgress) return status;
    EP_INFO("%s: no answer within %g s", call, seconds);
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: %s: expected all %d ranks to come within %g s, got no answer",
                   group->rank, call, group->size, seconds);
}

/* Check that a borrowed communicator numbers the ranks as the bootstrap does. */
static EpStatus check_borrowed(const EpGroup *group, const EpCuda *cuda) {
    EpCall call = {"ep_group_create", group->rank};
    int size = 0, rank = -1;
    EP_TRY(check(group, "ncclCommCount", cuda->nccl->ncclCommCount(cuda->comm, &size)));
    EP_TRY(check(group, "ncclCommUserRank", cuda->nccl->ncclCommUserRank(cuda->comm, &rank)));
    if (size == group->size && rank == group->rank) return EP_OK;
    return ep_refuse(&call, EP_ERR_MISMATCH, "config.nccl_comm",
                     "expected rank %d of %d as in the bootstrap, got rank %d of %d", group->rank,
                     group->size, rank, size);
}

/** What ranks gather. Rank 0's has the communicator's unique id. */
typedef struct Descriptor {
    EpRankStatus status;
    ncclUniqueId id;
} Descriptor;

static EpStatus exchange_id(EpGroup *group, const EpCuda *cuda, ncclUniqueId *id) {
    EpCall call = {"ep_group_create", group->rank};
    Descriptor mine = {.status = {EP_OK, ""}}, all[EP_CUDA_MAX_RANKS];
    if (group->rank == 0)
        mine.status =
            ep_rank_status(check(group, "ncclGetUniqueId", cuda->nccl->ncclGetUniqueId(&mine.id)));
    EP_TRY(ep_group_gather(group, &mine, all, sizeof(mine)));
    *id = all[0].id;
    return ep_rank_status_check(&call, all, sizeof(mine), group->size);
}

EpStatus ep_cuda_comm_open(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    char reason[192];
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    cuda->nccl = ep_nccl_load(reason, sizeof(reason));
    cuda->comm = group->config.nccl_comm;
    if (cuda->comm) return check_borrowed(group, cuda);
    EP_TRY(exchange_id(group, cuda, &id));
    ncclResult_t result =
        cuda->nccl->ncclCommInitRankConfig(&cuda->comm, group->size, id, group->rank, &config);
    cuda->owns_comm = cuda->comm != NULL;
    return ep_cuda_comm_settle(group, "ncclCommInitRankConfig", result);
}

void ep_cuda_comm_close(EpGroup *group, int together) {
    EpCuda *cuda = ep_cuda(group);
    if (!cuda->owns_comm) return;
    if (together)
        cuda->nccl->ncclCommDestroy(cuda->comm);
    else
        cuda->nccl->ncclCommAbort(cuda->comm);
    cuda->comm = NULL, cuda->owns_comm = 0;
}
