/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A group's NCCL communicators. On one node there is one: the group's own, or one that it borrows.
 * On several nodes it owns two: one of the ranks of each node, whose windows map each other's
 * memory, and one of all ranks, by which NCCL moves data. Both are split from the one that the
 * caller lends, or made from new ids. Where ranks share GPUs, memory/cuda/ipc.c maps their memory,
 * and the communicator of all ranks remains. A group of weights on one node gets the second one
 * when NCCL first has to move a weight.
 */
#include <stdlib.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/nccl_bootstrap.h"
#include "bootstrap/network/cuda/network.h"
#include "runtime/cuda/cuda.h"
#include "runtime/log.h"
#include "runtime/wait.h"

static EpStatus check(const EpGroup *group, const char *call, ncclResult_t result) {
    if (result == ncclSuccess) return EP_OK;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: %s", group->rank, call,
                   ep_nccl_explain(ep_cuda(group)->nccl, result));
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

/* ---- making one ---------------------------------------------------------------------------- */

/* A communicator to make: this rank's number in it and how many it has; from an id or, if one was
 * lent, split from that, with the ranks of one color. */
typedef struct NewComm {
    int32_t first; /* the lowest rank of the group in it, which makes its id */
    int32_t rank, size;
    ncclUniqueId id;
    int32_t color; /* NCCL_SPLIT_NOCOLOR: none for this rank */
    int blocks;    /* whether its calls hold the thread that makes them */
} NewComm;

static ncclConfig_t config_of(const EpGroup *group, int blocks) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocks;
    if (blocks && group->nodes.sizes.nodes == 1)
        config.minCTAs = config.maxCTAs = ep_cuda_weight_ctas(group);
    return config;
}

/*
 * A communicator that blocks holds the thread that makes it until all ranks have come; for a split
 * the lent one decides that. A split can only be withdrawn by aborting the lent communicator, which
 * is the caller's to do. So a thread of its own makes the call.
 *
 * Splits share no resources with the lent communicator. Communicators that share are ended by the
 * same word: where the watcher ends the group's, it would end the caller's, too. It is the lent
 * communicator's configuration that decides this, by its splitShare; NCCL does not ask the new
 * one's.
 */
typedef struct Making {
    EpNcclCall call;
    const EpNccl *nccl;
    ncclComm_t lent; /* NULL: from the id */
    NewComm new;
    ncclConfig_t config;
    ncclComm_t made;
} Making;

static ncclResult_t call_nccl(EpNcclCall *call) {
    Making *m = (Making *)call;
    NewComm *new = &m->new;
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
    double seconds = ep_cuda_comm_timeout(group), begin = ep_clock();
    (void)ep_group_await(group);
    ncclResult_t result = make(m, seconds);
    EpStatus status = ep_cuda_comm_check(group, name, result, seconds);
    (void)ep_group_await(NULL);
    int returned = __atomic_load_n(&m->call.returned, __ATOMIC_ACQUIRE);
    if (status == EP_OK || (returned && !m->lent)) *out = m->made;
    if (status != EP_OK && m->lent) ep_nccl_bootstrap_refuse(m->lent, status);
    if (status == EP_OK)
        EP_INFO("%s of %d ranks for %s: %.0f ms", name, m->new.size,
                m->new.blocks ? "data" : "windows", 1e3 * (ep_clock() - begin));
    if (result != ncclInProgress) free(m);
    return status;
}

/* Collective: make a communicator. After a failure the borrowed one can only be aborted, and
 * bootstraps over it refuse all gathers; an own one in `out` the group is to abort. All ranks have
 * the memory, and are here, before any of them enters NCCL. */
static EpStatus make_comm(EpGroup *group, const NewComm *new, ncclComm_t *out) {
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
                  .config = config_of(group, new->blocks)};
    if (m->lent) m->config.splitShare = 0;
    return ep_cuda_comm_agree(group, &call, finish(group, m, out));
}

/* ---- the group's ---------------------------------------------------------------------------- */

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

static EpStatus gather_ids(EpGroup *group, NewComm *new, Descriptor *all) {
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

static EpStatus exchange_id(EpGroup *group, NewComm *new) {
    EpCall call = {"ep_group_create", group->rank};
    Descriptor *all = calloc((size_t)group->size, sizeof(*all));
    EpStatus status = ep_group_agree(
        group, &call, all ? EP_OK : ep_refuse(&call, EP_ERR_NO_MEMORY, "group", "out of memory"));
    if (status == EP_OK) status = gather_ids(group, new, all);
    free(all);
    return status;
}

/* All ids are exchanged before any communicator is made: a rank whose NCCL fails must not leave
 * others in the bootstrap. A rank that is alone on its node needs no communicator there, but all
 * take part. */
static EpStatus open(EpGroup *group, int has_node, int has_network) {
    EpCuda *cuda = ep_cuda(group);
    const EpNodes *n = &group->nodes;
    int needs_ids = !group->config.nccl_comm;
    NewComm node = {.first = ep_nodes_member(n, n->node, 0),
                    .rank = n->rank,
                    .size = n->sizes.ranks,
                    .color = n->sizes.ranks > 1 ? n->node : NCCL_SPLIT_NOCOLOR};
    NewComm network = {.rank = group->rank, .size = group->size, .blocks = 1};
    has_node = has_node && n->sizes.nodes < group->size;
    if (has_node && needs_ids) EP_TRY(exchange_id(group, &node));
    if (has_network && needs_ids) EP_TRY(exchange_id(group, &network));
    if (has_node) EP_TRY(make_comm(group, &node, &cuda->comm));
    return has_network ? make_comm(group, &network, &cuda->network) : EP_OK;
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
    int has_nodes = group->nodes.sizes.nodes > 1, has_node = !has_nodes || !group->choice.shared;
    int has_network = has_nodes;
    char reason[192];
    if (has_nodes) warn_of_one_core(group);
    cuda->nccl = ep_nccl_load(reason, sizeof(reason));
    if (group->config.nccl_comm) EP_TRY(check_borrowed(group, cuda));
    if (group->config.nccl_comm && !has_network) {
        cuda->comm = group->config.nccl_comm;
        return EP_OK;
    }
    cuda->owns_comm = 1;
    return open(group, has_node, has_network);
}

EpStatus ep_cuda_comm_open_network(EpGroup *group) {
    return open(group, 0, 1);
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
