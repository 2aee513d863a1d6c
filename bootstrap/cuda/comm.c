/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A group's NCCL communicators. On one node there is one: the group's own, or one that it borrows.
 * On several nodes it owns two: one of the ranks of each node, whose windows map each other's
 * memory, and one of all ranks, for the network. Both are split from the one that the caller lends,
 * or made from new ids (make_comm.c). Where ranks share GPUs, ipc.c maps their memory, and the
 * communicator of all ranks remains.
 */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "runtime/cuda/cuda.h"
#include "runtime/log.h"
#include "runtime/wait.h"

static EpStatus check(const EpGroup *group, const char *call, ncclResult_t result) {
    if (result == ncclSuccess) return EP_OK;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: %s", group->rank, call,
                   ep_cuda(group)->nccl->ncclGetErrorString(result));
}

double ep_cuda_comm_timeout(const EpGroup *group) {
    return group->timeout > EP_NCCL_SECONDS ? group->timeout : EP_NCCL_SECONDS;
}

EpStatus ep_cuda_comm_agree(EpGroup *group, const EpCall *call, EpStatus mine) {
    return ep_group_agree_within(group, call, mine, ep_cuda_comm_timeout(group) + group->timeout);
}

EpStatus ep_cuda_comm_check(const EpGroup *group, const char *call, ncclResult_t result,
                            double seconds) {
    if (result != ncclInProgress) return check(group, call, result);
    EP_TRY(ep_poll_abort());
    EP_INFO("%s: no answer within %g s", call, seconds);
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: %s: expected all %d ranks to come within %g s, got no answer",
                   group->rank, call, group->size, seconds);
}

/* Looking for aborts takes CUDA longer than most calls take NCCL. */
#define SECONDS_BEFORE_LOOKING 1e-3

EpStatus ep_cuda_comm_settle(EpGroup *group, ncclComm_t comm, const char *call,
                             ncclResult_t result) {
    double seconds = ep_cuda_comm_timeout(group);
    result = ep_nccl_settle(ep_cuda(group)->nccl, comm, result, SECONDS_BEFORE_LOOKING);
    if (result != ncclInProgress) return check(group, call, result);
    (void)ep_group_await(group);
    result = ep_nccl_settle(ep_cuda(group)->nccl, comm, result, seconds);
    EpStatus status = ep_cuda_comm_check(group, call, result, seconds);
    (void)ep_group_await(NULL);
    return status;
}

/* Check that a borrowed communicator numbers the ranks as the bootstrap does. */
static EpStatus check_borrowed(const EpGroup *group, const EpCuda *cuda) {
    EpCall call = {"ep_group_create", group->rank};
    ncclComm_t comm = group->config.nccl_comm;
    int size = 0, rank = -1;
    EP_TRY(check(group, "ncclCommCount", cuda->nccl->ncclCommCount(comm, &size)));
    EP_TRY(check(group, "ncclCommUserRank", cuda->nccl->ncclCommUserRank(comm, &rank)));
    if (size == group->size && rank == group->rank) return EP_OK;
    return ep_refuse(&call, EP_ERR_MISMATCH, "config.nccl_comm",
                     "expected rank %d of %d as in the bootstrap, got rank %d of %d", group->rank,
                     group->size, rank, size);
}

/** What ranks gather: the unique id of the communicator in which this rank is the first. */
typedef struct Descriptor {
    EpRankStatus status;
    ncclUniqueId id;
} Descriptor;

static EpStatus gather_ids(EpGroup *group, EpNewComm *new, Descriptor *all) {
    EpCall call = {"ep_group_create", group->rank};
    Descriptor mine = {.status = {EP_OK, ""}};
    const EpCuda *cuda = ep_cuda(group);
    if (group->rank == new->first)
        mine.status =
            ep_rank_status(check(group, "ncclGetUniqueId", cuda->nccl->ncclGetUniqueId(&mine.id)));
    EP_TRY(ep_group_gather(group, &mine, all, sizeof(mine)));
    new->id = all[new->first].id;
    return ep_rank_status_check(&call, &group->bootstrap, all, sizeof(mine));
}

static EpStatus exchange_id(EpGroup *group, EpNewComm *new) {
    EpCall call = {"ep_group_create", group->rank};
    Descriptor *all = calloc((size_t)group->size, sizeof(*all));
    EpStatus status = ep_group_agree(
        group, &call, all ? EP_OK : ep_refuse(&call, EP_ERR_NO_MEMORY, "group", "out of memory"));
    if (status == EP_OK) status = gather_ids(group, new, all);
    free(all);
    return status;
}

ncclConfig_t ep_cuda_comm_config(const EpGroup *group, int blocks) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocks;
    if (group->purpose == EP_FOR_WEIGHTS && group->nodes.sizes.nodes == 1)
        config.minCTAs = config.maxCTAs = EP_WEIGHT_CTAS;
    return config;
}

/* All ids are exchanged before any communicator is made: a rank whose NCCL fails must not leave
 * others in the bootstrap. A rank that is alone on its node needs no communicator there, but all
 * take part. */
static EpStatus open(EpGroup *group, int has_node, int has_network) {
    EpCuda *cuda = ep_cuda(group);
    const EpNodes *n = &group->nodes;
    int needs_ids = !group->config.nccl_comm;
    EpNewComm node = {.first = ep_nodes_member(n, n->node, 0),
                      .rank = n->rank,
                      .size = n->sizes.ranks,
                      .color = n->sizes.ranks > 1 ? n->node : NCCL_SPLIT_NOCOLOR};
    EpNewComm network = {
        .rank = group->rank, .size = group->size, .blocks = ep_cuda_network_blocks(group)};
    has_node = has_node && n->sizes.nodes < group->size;
    if (has_node && needs_ids) EP_TRY(exchange_id(group, &node));
    if (has_network && needs_ids) EP_TRY(exchange_id(group, &network));
    if (has_node) EP_TRY(ep_cuda_comm_make(group, &node, &cuda->comm));
    return has_network ? ep_cuda_comm_make(group, &network, &cuda->network) : EP_OK;
}

/* NCCL has threads of its own for the network. Where a process has one core, as mpirun gives to
 * each rank by default, they and the caller take turns: over sockets nothing may move for minutes.
 */
static void warn_of_one_core(const EpGroup *group) {
    if (group->cpus > 1) return;
    EP_WARN("this process may run on one CPU only, where NCCL's threads for the network want some, "
            "too: expected mpirun --bind-to none, or more CPUs for each rank");
}

EpStatus ep_cuda_comm_open(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    int has_network = group->nodes.sizes.nodes > 1,
        has_node = !has_network || !group->choice.shared;
    char reason[192];
    if (has_network) warn_of_one_core(group);
    cuda->nccl = ep_nccl_load(reason, sizeof(reason));
    if (group->config.nccl_comm) EP_TRY(check_borrowed(group, cuda));
    if (group->config.nccl_comm && !has_network) {
        cuda->comm = group->config.nccl_comm;
        return EP_OK;
    }
    cuda->owns_comm = 1;
    return open(group, has_node, has_network);
}

/* ---- the end ------------------------------------------------------------------------------- */

typedef struct Ending {
    const EpNccl *nccl;
    ncclComm_t comm;
    int device; /* of the rank: NCCL opens what is current, in a new thread the first one */
    int aborts;
} Ending;

static int endings; /* communicators that are being ended */

/* A process that exits takes down what NCCL's threads use while they end a communicator. One that
 * waits for a graph, which may never be destroyed, is not waited for for long. */
#define EXIT_SECONDS 5

static void await_endings(void) {
    EpWait wait;
    ep_wait_begin(&wait, EXIT_SECONDS, 0);
    while (__atomic_load_n(&endings, __ATOMIC_ACQUIRE) && ep_wait_pause(&wait))
        ;
}

/* Handlers run in the reverse order of their registration. NCCL has registered its own by now, so
 * this one runs first. */
static void await_endings_at_exit(void) {
    (void)atexit(await_endings);
}

static void end(const Ending *e) {
    int before = ep_cuda_use(e->device);
    (void)(e->aborts ? e->nccl->ncclCommAbort(e->comm) : e->nccl->ncclCommDestroy(e->comm));
    ep_cuda_restore(before);
    __atomic_sub_fetch(&endings, 1, __ATOMIC_RELEASE);
}

static void *end_later(void *ending) {
    end(ending);
    free(ending);
    return NULL;
}

void ep_cuda_comm_end(const EpCuda *cuda, ncclComm_t comm, int aborts) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    Ending ending = {cuda->nccl, comm, cuda->ordinal, aborts};
    Ending *later = comm && cuda->captured ? malloc(sizeof(*later)) : NULL;
    pthread_t thread;
    if (!comm) return;
    (void)pthread_once(&once, await_endings_at_exit);
    __atomic_add_fetch(&endings, 1, __ATOMIC_RELAXED);
    if (later) *later = ending;
    if (later && ep_thread_start(&thread, end_later, later) == 0) {
        (void)pthread_detach(thread);
        return;
    }
    free(later);
    end(&ending);
}

void ep_cuda_comm_close(EpGroup *group, int together) {
    EpCuda *cuda = ep_cuda(group);
    ep_cuda_comm_end(cuda, cuda->network, !together);
    if (cuda->owns_comm) ep_cuda_comm_end(cuda, cuda->comm, !together);
    cuda->comm = cuda->network = NULL, cuda->owns_comm = 0;
}
