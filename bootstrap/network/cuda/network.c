/* SPDX-License-Identifier: Apache-2.0 */
/* The group's thread: it opens and closes the watcher, calls NCCL beside it, and takes what it has
 * found. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/network/cuda/watch.h"
#include "bootstrap/network/sockets.h"
#include "runtime/cuda/digest.h"
#include "runtime/log.h"
#include "runtime/op.h"
#include "runtime/wait.h"

#define MOST_BEAT_SECONDS 1.0
/* Of EpCudaState.failed: no operation has this number. */
#define FAILED_FOREVER ~0u

/* ---- opening ------------------------------------------------------------------------------- */

static EpStatus allocate(EpCudaWatch *w) {
    const EpGroup *group = w->group;
    w->peers = calloc((size_t)group->size, sizeof(*w->peers));
    if (!w->peers)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    for (int32_t r = 0; r < group->size; r++)
        if (ep_sockets_connect(group, r))
            w->peers[w->num_peers++] = (EpWatchPeer){.rank = r, .heard = ep_clock()};
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&w->marks, sizeof(*w->marks), 0)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&w->failed, sizeof(*w->failed), 0)));
    EP_TRY(ep_cuda_check(group, "cudaMalloc",
                         cudaMalloc((void **)&w->counts, 2 * sizeof(*w->counts))));
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(w->counts, 0, 2 * sizeof(*w->counts))));
    size_t stamps = (size_t)(1 + group->size) * sizeof(*w->stamps);
    if (group->purpose == EP_FOR_WEIGHTS) {
        EP_TRY(ep_cuda_check(group, "cudaMalloc", cudaMalloc((void **)&w->stamps, stamps)));
        EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(w->stamps, 0, stamps)));
    }
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_mark()));
    memset(w->marks, 0, sizeof(*w->marks));
    *w->failed = FAILED_FOREVER;
    return ep_cuda_open_stream(group, 0, &w->stream);
}

EpStatus ep_cuda_watch_open(EpGroup *group) {
    EpCall call = {"ep_group_create", group->rank};
    if (!ep_cuda_group_comm(ep_cuda(group)) ||
        (group->nodes.sizes.nodes == 1 && group->purpose == EP_FOR_TOKENS))
        return EP_OK;
    EpCudaWatch *w = calloc(1, sizeof(*w));
    ep_cuda(group)->watch = w;
    EpStatus status = EP_OK;
    if (!w)
        status = ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    EP_TRY(ep_group_agree(group, &call, status));
    w->group = group, w->cuda = ep_cuda(group), w->comm = w->cuda->network;
    w->rank = group->rank, w->timeout = group->timeout;
    w->beat = group->timeout / 4 < MOST_BEAT_SECONDS ? group->timeout / 4 : MOST_BEAT_SECONDS;
    EP_TRY(ep_group_agree(group, &call, allocate(w)));
    status = ep_sockets_open(group, &w->messages);
    w->has_messages = status == EP_OK;
    EP_TRY(ep_group_agree(group, &call, status));
    return ep_group_agree(group, &call, ep_watch_start(w));
}

void ep_cuda_watch_close(EpGroup *group, int together) {
    EpCuda *cuda = ep_cuda(group);
    EpCudaWatch *w = cuda->watch;
    if (!w) return;
    __atomic_store_n(&w->stop, together ? EP_STOP_TOGETHER : EP_STOP_ALONE, __ATOMIC_RELEASE);
    if (w->started) pthread_join(w->thread, NULL);
    if (w->is_ended) cuda->network = NULL;
    if (w->has_messages) ep_bootstrap_destroy(&w->messages);
    if (w->stream) (void)cudaStreamDestroy(w->stream);
    (void)cudaFreeHost(w->marks);
    (void)cudaFreeHost(w->failed);
    (void)cudaFree(w->counts);
    (void)cudaFree(w->stamps);
    free(w->peers);
    free(w);
    cuda->watch = NULL;
}

/* A watcher that has lost something by now ends none: the group does, when it is destroyed. */
void ep_cuda_watch_comm(EpGroup *group) {
    const EpCuda *cuda = ep_cuda(group);
    __atomic_store_n(&cuda->watch->comm, cuda->network, __ATOMIC_RELEASE);
}

/* Aborting the communicator frees memory, which may wait for the device: a watcher that does so
 * already is left to it. From then on it needs the group no more. */
void ep_cuda_watch_abandon(EpGroup *group) {
    EpCudaWatch *w = ep_cuda(group)->watch;
    const struct timespec tick = {.tv_nsec = EP_WATCH_TICK_NANOSECONDS};
    if (!w || !w->started) return;
    __atomic_store_n(&w->stop, EP_STOP_ABANDONED, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&w->done, __ATOMIC_ACQUIRE) &&
           !__atomic_load_n(&w->ending, __ATOMIC_ACQUIRE))
        nanosleep(&tick, NULL);
    if (!__atomic_load_n(&w->done, __ATOMIC_ACQUIRE)) {
        (void)pthread_detach(w->thread);
        return;
    }
    pthread_join(w->thread, NULL);
    ep_bootstrap_destroy(&w->messages);
}

/* ---- the group's thread -------------------------------------------------------------------- */

/* Either this thread sees the loss, or the watcher sees `busy`: both words are in one order. The
 * same holds for `looks`. */
EpStatus ep_cuda_network_enter(EpGroup *group, const EpCudaStream *stream) {
    EpCuda *cuda = ep_cuda(group);
    EpCudaWatch *w = cuda->watch;
    if (!w) return EP_OK;
    ep_watch_say(w, 1);
    cuda->captured |= stream->captures;
    while (__atomic_load_n(&w->looks, __ATOMIC_SEQ_CST))
        sched_yield();
    if (!__atomic_load_n(&w->loss.kind, __ATOMIC_SEQ_CST)) return EP_OK;
    ep_watch_say(w, 0);
    group->backend->poll(group);
    EP_TRY(ep_group_usable(group));
    return ep_fail(EP_ERR_SYSTEM, "rank %d: the communicator of all ranks has ended", group->rank);
}

/* The watcher may hear why NCCL fails. */
static void await_explanation(const EpCudaWatch *w) {
    EpWait wait;
    ep_wait_begin(&wait, EP_EXPLAIN_SECONDS, 0);
    while (w && !ep_watch_lost(w) && ep_wait_pause(&wait))
        ;
}

EpStatus ep_cuda_network_give_up(EpGroup *group, const char *phase, EpStatus status) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = status, finding.rank = group->rank, finding.count = 1;
    if (status == EP_ERR_PEER) finding.peer = group->aborted_peer;
    strncpy(finding.phase, phase, sizeof(finding.phase) - 1);
    group->backend->poll(group);
    return group->failed != EP_OK ? ep_group_usable(group) : ep_group_fail(group, &finding);
}

EpStatus ep_cuda_network_leave(EpGroup *group, const char *what, EpStatus status) {
    EpCudaWatch *w = ep_cuda(group)->watch;
    if (w) ep_watch_say(w, 0);
    if (status == EP_OK) return EP_OK;
    if (status == EP_ERR_SYSTEM) await_explanation(w);
    return ep_cuda_network_give_up(group, what, status);
}

/* A communicator that blocks has enqueued a call that succeeds. */
EpStatus ep_cuda_network_settle(EpGroup *group, const char *what, ncclResult_t result) {
    ncclComm_t comm = ep_cuda_group_comm(ep_cuda(group));
    if (result == ncclSuccess && ep_cuda_network_blocks(group))
        return ep_cuda_network_leave(group, what, EP_OK);
    return ep_cuda_network_leave(group, what, ep_cuda_comm_settle(group, comm, what, result));
}

/* ---- the first call ------------------------------------------------------------------------ */

/* NCCL holds a thread until its peers are connected. One that it still holds at the deadline leaves
 * once the group's end aborts the communicator. */
static EpStatus call_once(EpGroup *group, EpNcclCall *call, double seconds) {
    const EpNccl *nccl = ep_cuda(group)->nccl;
    ncclComm_t comm = ep_cuda_group_comm(ep_cuda(group));
    const EpCudaStream stream = {.captures = 0};
    ncclResult_t result = ncclInProgress;
    (void)ep_group_await(group);
    EpStatus status = ep_cuda_network_enter(group, &stream);
    int entered = status == EP_OK;
    if (entered) {
        if (ep_nccl_call(call, seconds)) result = ep_nccl_settle(nccl, comm, call->result, seconds);
        status = ep_cuda_comm_check(group, "ncclGroupEnd", result, seconds);
        status = ep_cuda_network_leave(group, "ep_group_create", status);
    }
    (void)ep_group_await(NULL);
    if (!entered || result != ncclInProgress) free(call);
    return status;
}

/* A rank that waits in vain ends the group: then the watcher ends the communicator, whose messages
 * would keep the GPU busy, and this rank waiting, until the missing rank comes. */
static EpStatus await_once(EpGroup *group, cudaStream_t wire, double seconds) {
    EpWait wait;
    cudaError_t error;
    ep_wait_begin(&wait, seconds, 0);
    while ((error = cudaStreamQuery(wire)) == cudaErrorNotReady) {
        (void)cudaGetLastError();
        if (!ep_wait_pause(&wait))
            return ep_cuda_network_give_up(
                group, "ep_group_create",
                ep_fail(EP_ERR_TIMEOUT,
                        "rank %d: ep_group_create: expected NCCL's first messages within %g s, got "
                        "none",
                        group->rank, wait.timeout));
    }
    group->backend->poll(group);
    EP_TRY(ep_group_usable(group));
    return ep_cuda_check(group, "NCCL's first messages", error);
}

EpStatus ep_cuda_network_connect(EpGroup *group, EpNcclCall *call, cudaStream_t wire) {
    double seconds = ep_cuda_comm_timeout(group), begin = ep_clock();
    EP_TRY(call_once(group, call, seconds));
    EP_TRY(await_once(group, wire, seconds));
    EP_INFO("NCCL's first calls: %.0f ms", 1e3 * (ep_clock() - begin));
    return EP_OK;
}

void ep_cuda_watch_describe(const EpGroup *group, EpMarkArgs *args) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    EpMarks *marks = &args->marks;
    marks->watch = w->marks, marks->counts = w->counts;
    if (w->stamps) marks->own = w->stamps, marks->theirs = w->stamps + 1;
}

/* Whether the group does not learn of a loss in other ways. */
static int is_others(int kind) {
    return kind != EP_LOSS_NONE && kind != EP_LOSS_OWN;
}

int ep_cuda_watch_explains(const EpGroup *group) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    await_explanation(w);
    return w && is_others(ep_watch_lost(w));
}

static EpStatus report_late(const EpGroup *group, const EpLoss *loss, const char *phase) {
    if (loss->blamed < 0)
        return ep_fail(EP_ERR_TIMEOUT,
                       "rank %d: %s: expected an exchange over NCCL to end within %g s, and all "
                       "ranks are in it; NCCL wants it captured in graphs on all or on none",
                       group->rank, phase, group->timeout);
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: %s: rank %d did not arrive within %g s (waiting for data by NCCL)%s%s",
                   group->rank, phase, loss->blamed, group->timeout, loss->why[0] ? "; " : "",
                   loss->why);
}

static EpStatus report(const EpGroup *group, const EpLoss *loss, const char *phase) {
    if (loss->kind == EP_LOSS_FAILED)
        return ep_fail_peer(group->rank, phase, loss->peer, loss->blamed, loss->why);
    if (loss->kind == EP_LOSS_CLOSED)
        return ep_fail(
            EP_ERR_PEER,
            "rank %d: %s: rank %d has closed its connection, as a process does that ends%s%s",
            group->rank, phase, loss->peer, loss->why[0] ? "; " : "", loss->why);
    if (loss->kind == EP_LOSS_ORDER)
        return ep_fail_digests(group->rank, loss->own, loss->peer, loss->other);
    if (loss->kind == EP_LOSS_LATE) return report_late(group, loss, phase);
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: NCCL: %s", group->rank, phase,
                   ep_nccl_explain(ep_cuda(group)->nccl, loss->result));
}

void ep_cuda_watch_poll(EpGroup *group) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    if (!w || group->failed != EP_OK) return;
    if (!is_others(ep_watch_lost(w))) return;
    EpFinding finding = EP_FINDING_INIT;
    const char *phase = w->loss.own ? ep_op_find(EP_DIGEST_OP(w->loss.own))->name : "network";
    finding.rank = group->rank, finding.peer = w->loss.blamed, finding.count = 1;
    strncpy(finding.phase, phase, sizeof(finding.phase) - 1);
    finding.status = report(group, &w->loss, phase);
    ep_group_fail(group, &finding);
}

int32_t ep_cuda_watch_find(const EpGroup *group, int32_t *blamed, char why[EP_ABORT_BYTES]) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    if (!w || !ep_watch_lost(w)) return -1;
    memcpy(why, w->loss.why, EP_ABORT_BYTES);
    *blamed = w->loss.blamed >= 0 ? w->loss.blamed : w->loss.peer;
    return w->loss.peer;
}

void ep_cuda_watch_refuse(EpGroup *group, const char *text, int departs) {
    EpCudaWatch *w = ep_cuda(group)->watch;
    if (!w) return;
    memcpy(w->refusal, text, EP_ABORT_BYTES);
    w->refusals++;
    w->departs |= departs;
}
