/* SPDX-License-Identifier: Apache-2.0 */
/* The watcher's thread: see network.h. */
#include <string.h>
#include <time.h>

#include "bootstrap/network/cuda/watch.h"
#include "runtime/callback.h"
#include "runtime/cuda/cuda.h"
#include "runtime/cuda/digest.h"
#include "runtime/wait.h"

/* A rank that is not heard for so many beats is not there. */
#define SILENT_BEATS 4
/* Ranks that know whom to blame get this time to say so: their waits end together with this one's.
 */
#define GRACE_SECONDS 0.5
/* For a word to reach this rank's kernels. */
#define STOP_SECONDS 0.25
/* To send what the others must know, before the connections close. */
#define FLUSH_SECONDS 1.0

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static uint64_t begun(const EpCudaWatch *w) {
    return load(&w->marks->begun);
}

static uint32_t number_of(uint64_t begun) {
    return (uint32_t)(begun >> 32);
}

static EpWatchStop stops(const EpCudaWatch *w) {
    return (EpWatchStop)__atomic_load_n(&w->stop, __ATOMIC_ACQUIRE);
}

/* ---- telling the others -------------------------------------------------------------------- */

/* Returns whether the note is on its way; not where the last one is still being sent. */
static int tell(EpCudaWatch *w, EpWatchPeer *p, EpNoteKind kind) {
    const EpBootstrap *m = &w->messages;
    int done = 1;
    if (p->sending && ep_call_test(m, &p->sending, &done) != EP_OK) return 1;
    if (!done) return 0;
    int32_t by = w->loss.kind == EP_LOSS_FAILED ? w->loss.peer : w->rank;
    p->out = (EpNote){.kind = kind, .by = by, .blamed = w->loss.blamed, .begun = begun(w)};
    int refuses = kind == EP_NOTE_REFUSED || kind == EP_NOTE_DEPARTED;
    memcpy(p->out.why, refuses ? w->told.why : w->loss.why, sizeof(p->out.why));
    (void)ep_call_isend(m, p->rank, 0, &p->out, sizeof(p->out), &p->sending);
    return 1;
}

static void tell_all(EpCudaWatch *w) {
    int loses = ep_watch_lost(w), beats = !loses && ep_clock() >= w->next_beat;
    if (beats) w->next_beat = ep_clock() + w->beat;
    for (int32_t i = 0; i < w->num_peers; i++) {
        EpWatchPeer *p = &w->peers[i];
        if (p->left) continue;
        if (beats) (void)tell(w, p, EP_NOTE_BEAT);
        if (p->refusals != w->refusals_told && tell(w, p, (EpNoteKind)w->told.kind))
            p->refusals = w->refusals_told;
        if (loses && !p->told) p->told = tell(w, p, EP_NOTE_FAILED);
    }
}

/* ---- ending this rank's part --------------------------------------------------------------- */

/* Kernels that run look at the word where they wait, later ones first. Other threads may be
 * capturing, which this copy has nothing to do with. A thread of its own, since any call may wait
 * in the driver: a thread that frees memory holds a lock there until the GPU is idle. */
static void *stop_kernels(void *watch) {
    EpCudaWatch *w = watch;
    int before = ep_cuda_use(w->cuda->ordinal);
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    uint32_t *word = &w->cuda->device.state->failed;
    EpWait wait;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaMemcpyAsync(word, w->failed, sizeof(*word), cudaMemcpyHostToDevice, w->stream);
    ep_wait_begin(&wait, STOP_SECONDS, 0);
    while (cudaStreamQuery(w->stream) == cudaErrorNotReady && ep_wait_pause(&wait))
        ;
    (void)cudaGetLastError();
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    ep_cuda_restore(before);
    __atomic_store_n(&w->stopped, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void begin_to_stop(EpCudaWatch *w) {
    w->has_stopper = ep_thread_start(&w->stopper, stop_kernels, w) == 0;
    if (!w->has_stopper) (void)stop_kernels(w);
}

/* The word should be there before the communicator ends: kernels then do nothing with what has not
 * arrived, instead of finding that its stamps are wrong. */
static void await_stopped(const EpCudaWatch *w) {
    EpWait wait;
    ep_wait_begin(&wait, STOP_SECONDS, 0);
    while (!__atomic_load_n(&w->stopped, __ATOMIC_ACQUIRE) && ep_wait_pause(&wait))
        ;
}

/* The group's thread sees the loss and leaves, or has not entered: see ep_cuda_network_enter. One
 * that does not leave is held by NCCL: CUDA takes no more launches until kernels end that wait for
 * a lost rank. The abort ends them. */
static void await_leaving(const EpCudaWatch *w) {
    EpWait wait;
    ep_wait_begin(&wait, w->timeout, 0);
    while (__atomic_load_n(&w->busy, __ATOMIC_SEQ_CST) && ep_wait_pause(&wait))
        ;
}

static void end_communicator(EpCudaWatch *w) {
    await_leaving(w);
    ncclComm_t comm = __atomic_load_n(&w->comm, __ATOMIC_ACQUIRE);
    if (!comm || stops(w) == EP_STOP_ABANDONED) return;
    __atomic_store_n(&w->ending, 1, __ATOMIC_RELEASE);
    ep_cuda_comm_end(w->cuda, comm, 1);
    w->is_ended = 1;
}

static void lose(EpCudaWatch *w, EpLossKind kind, int32_t peer, int32_t blamed, const char *why) {
    if (w->loss.kind) return;
    w->loss.peer = peer, w->loss.blamed = blamed;
    w->loss.own = (uint32_t)begun(w);
    memcpy(w->loss.why, why, strnlen(why, EP_ABORT_BYTES - 1));
    __atomic_store_n(&w->loss.kind, (int)kind, __ATOMIC_SEQ_CST);
    begin_to_stop(w);
    await_stopped(w);
    tell_all(w); /* before they see that the communicator has ended */
    end_communicator(w);
}

/* What is known of a rank's last call, if that was refused, else "". */
static const char *refusal_of(const EpCudaWatch *w, int32_t rank) {
    for (int32_t i = 0; i < w->num_peers; i++)
        if (w->peers[i].rank == rank) return w->peers[i].refusal;
    return "";
}

static void lose_late(EpCudaWatch *w, int32_t peer, int32_t blamed) {
    lose(w, EP_LOSS_LATE, peer, blamed, refusal_of(w, blamed));
}

/* ---- hearing from the others --------------------------------------------------------------- */

/* Returns whether this rank's exchange has not moved for the timeout and `grace` seconds more. */
static int is_late(EpCudaWatch *w, double grace) {
    uint64_t moved = load(&w->marks->moved);
    double now = ep_clock();
    if (moved != w->moved || !(moved & 1)) w->since = now;
    w->moved = moved;
    return now - w->since >= w->timeout + grace;
}

/* A rank that is in an operation of the same number must be in the same one. */
static void compare(EpCudaWatch *w, const EpWatchPeer *p) {
    uint64_t own = begun(w);
    if (number_of(own) != number_of(p->begun) ||
        ep_same_operation((uint32_t)own, (uint32_t)p->begun))
        return;
    w->loss.other = (uint32_t)p->begun;
    lose(w, EP_LOSS_ORDER, p->rank, p->rank, "");
}

static void take_note(EpCudaWatch *w, EpWatchPeer *p) {
    EpNote note = p->in;
    note.why[sizeof(note.why) - 1] = 0;
    p->heard = ep_clock(), p->begun = note.begun;
    if (note.kind == EP_NOTE_LEAVING) p->left = 1;
    p->departed |= note.kind == EP_NOTE_DEPARTED;
    if (note.kind == EP_NOTE_REFUSED || note.kind == EP_NOTE_DEPARTED)
        memcpy(p->refusal, note.why, sizeof(p->refusal));
    if (note.kind != EP_NOTE_LEAVING) compare(w, p);
    if (note.kind == EP_NOTE_FAILED && is_late(w, 0) && note.blamed >= 0)
        lose_late(w, note.blamed, note.blamed); /* this rank has waited as long */
    else if (note.kind == EP_NOTE_FAILED)
        lose(w, EP_LOSS_FAILED, note.by, note.blamed, note.why);
}

/* A rank of another node that has left or failed closes its connection, too. */
static void listen_to(EpCudaWatch *w, EpWatchPeer *p) {
    const EpBootstrap *m = &w->messages;
    int done = 1;
    EpStatus status = EP_OK;
    while (!p->left && done && status == EP_OK) {
        if (!p->receiving)
            status = ep_call_irecv(m, p->rank, 0, &p->in, sizeof(p->in), &p->receiving);
        if (status == EP_OK) status = ep_call_test(m, &p->receiving, &done);
        if (status == EP_OK && done) take_note(w, p);
    }
    if (status == EP_OK) return;
    p->left = 1;
    lose(w, EP_LOSS_CLOSED, p->rank, p->rank, p->refusal);
}

/* ---- watching this rank -------------------------------------------------------------------- */

/* Returns whether others have had time to say what they know. */
static int gave_time(double *since) {
    if (*since == 0) *since = ep_clock();
    return ep_clock() - *since > EP_EXPLAIN_SECONDS;
}

/* Another thread has the lock of the group's aborts. One that aborts tells the peers of the node
 * first, with calls of CUDA, which hang while yet another thread waits for the GPU to free memory.
 * What keeps the GPU busy may be the communicator, which this rank is to end. Kernels then end
 * without what has not arrived, so from here on the group counts as aborted. */
static void look_at_abort(EpCudaWatch *w, EpAbort *abort) {
    if (!__atomic_load_n(&abort->asked, __ATOMIC_ACQUIRE) || !gave_time(&w->abort_hangs)) return;
    ep_abort_hangs(abort);
    lose(w, EP_LOSS_OWN, w->rank, w->rank, abort->sentence);
}

/* The group's thread, an abort, or kernels may have found a failure. */
static void look_at_group(EpCudaWatch *w) {
    EpAbort *abort = &w->group->abort;
    const EpCudaFailure *f = w->cuda->device.failure;
    const EpFinding *failure = &w->group->failure;
    char told[EP_ABORT_BYTES];
    const char *why = "";
    int32_t blamed = w->rank;
    if (pthread_mutex_trylock(&abort->mutex)) {
        look_at_abort(w, abort);
        return;
    }
    int failed = abort->failed, aborted = ep_abort_requested(abort);
    w->refusals_told = w->refusals;
    w->told.kind = w->departs ? EP_NOTE_DEPARTED : EP_NOTE_REFUSED;
    memcpy(w->told.why, w->refusal, sizeof(w->told.why));
    if (aborted) ep_abort_compose(abort, abort->sentence, told);
    if (failed && failure->peer >= 0) blamed = failure->peer;
    if (failed && failure->status == EP_ERR_PEER) why = w->group->failure_sentence;
    pthread_mutex_unlock(&abort->mutex);
    int fault = __atomic_load_n(&f->fault, __ATOMIC_ACQUIRE);
    int others_know = fault == EP_FAULT_ORDER || (fault == EP_FAULT_PEER && !f->why[0]);
    if (others_know && !aborted && !gave_time(&w->unsaid)) return;
    if (fault && !failed && !aborted && fault != EP_FAULT_PLAN && fault != EP_FAULT_FLIGHT)
        blamed = fault == EP_FAULT_PEER ? (int32_t)f->seen : f->peer;
    if (fault == EP_FAULT_PEER && !failed) why = (const char *)f->why;
    if (aborted || failed || fault) lose(w, EP_LOSS_OWN, w->rank, blamed, aborted ? told : why);
}

/* This rank has begun an operation which one that has departed never will. */
static void look_at_departed(EpCudaWatch *w) {
    for (int32_t i = 0; i < w->num_peers; i++) {
        const EpWatchPeer *p = &w->peers[i];
        if (p->departed && (int32_t)(number_of(begun(w)) - number_of(p->begun)) > 0)
            lose(w, EP_LOSS_FAILED, p->rank, p->rank, p->refusal);
    }
}

/* Returns the rank to blame for an exchange that is late, or -1. */
static int32_t find_late(const EpCudaWatch *w) {
    uint32_t least = number_of(begun(w));
    int32_t blamed = -1;
    for (int32_t i = 0; i < w->num_peers; i++) {
        const EpWatchPeer *p = &w->peers[i];
        if (ep_clock() - p->heard > SILENT_BEATS * w->beat) return p->rank;
        if (number_of(p->begun) >= least) continue;
        least = number_of(p->begun), blamed = p->rank;
    }
    return blamed;
}

static void look_at_exchange(EpCudaWatch *w) {
    if (!is_late(w, GRACE_SECONDS)) {
        w->unexplained = 0;
        return;
    }
    int32_t blamed = find_late(w);
    if (blamed < 0 && !gave_time(&w->unexplained)) return; /* a rank of this node may be absent */
    lose_late(w, blamed >= 0 ? blamed : w->rank, blamed);
}

/* In a nonblocking communicator ncclCommGetAsyncError also takes the end of a call that NCCL
 * enqueues in the background, and frees what belongs to it. So only one thread may ask at a time:
 * not this one while the group's thread is in a call. That thread will see an error itself, or the
 * next look does. */
static ncclResult_t ask_nccl(EpCudaWatch *w) {
    ncclResult_t result = ncclSuccess;
    ncclComm_t comm = __atomic_load_n(&w->comm, __ATOMIC_ACQUIRE);
    if (!comm) return result;
    __atomic_store_n(&w->looks, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&w->busy, __ATOMIC_SEQ_CST) ||
        w->cuda->nccl->ncclCommGetAsyncError(comm, &result) != ncclSuccess)
        result = ncclSuccess;
    __atomic_store_n(&w->looks, 0, __ATOMIC_SEQ_CST);
    return result;
}

static void look_at_nccl(EpCudaWatch *w) {
    ncclResult_t result = ask_nccl(w);
    if (result == ncclSuccess || result == ncclInProgress || !gave_time(&w->nccl_fails)) return;
    w->loss.result = result;
    lose(w, EP_LOSS_NCCL, w->rank, w->rank, "");
}

/* ---- the thread ---------------------------------------------------------------------------- */

/* Tell all that this rank leaves, or fails, and wait for what is being sent. */
static void say_goodbye(EpCudaWatch *w) {
    double end = ep_clock() + FLUSH_SECONDS;
    int lost = ep_watch_lost(w), busy = 1;
    while (busy && ep_clock() < end) {
        busy = 0;
        for (int32_t i = 0; i < w->num_peers; i++) {
            EpWatchPeer *p = &w->peers[i];
            int done = 1;
            if (p->left) continue;
            if (!p->told) p->told = tell(w, p, lost ? EP_NOTE_FAILED : EP_NOTE_LEAVING);
            if (p->sending && ep_call_test(&w->messages, &p->sending, &done) != EP_OK) p->left = 1;
            busy |= !p->left && (!p->told || !done);
        }
    }
}

static void *watch(void *context) {
    EpCudaWatch *w = context;
    const struct timespec tick = {.tv_nsec = EP_WATCH_TICK_NANOSECONDS};
    int before = ep_cuda_use(w->cuda->ordinal);
    while (stops(w) == EP_STOP_NOT) {
        for (int32_t i = 0; i < w->num_peers && !ep_watch_lost(w); i++)
            listen_to(w, &w->peers[i]);
        if (!ep_watch_lost(w)) look_at_group(w);
        if (!ep_watch_lost(w)) look_at_departed(w);
        if (!ep_watch_lost(w)) look_at_exchange(w);
        if (!ep_watch_lost(w)) look_at_nccl(w);
        tell_all(w);
        nanosleep(&tick, NULL);
    }
    if (!ep_watch_lost(w)) look_at_group(w); /* the group may have failed a moment ago */
    while (!ep_watch_lost(w) && w->unsaid > 0) {
        nanosleep(&tick, NULL);
        look_at_group(w);
    }
    if (stops(w) == EP_STOP_TOGETHER || ep_watch_lost(w)) say_goodbye(w);
    if (w->has_stopper) pthread_join(w->stopper, NULL);
    ep_cuda_restore(before);
    __atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

EpStatus ep_watch_start(EpCudaWatch *w) {
    int error = ep_thread_start(&w->thread, watch, w);
    w->started = !error;
    if (!error) return EP_OK;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: ep_group_create: starting a thread: %s", w->rank,
                   strerror(error));
}
