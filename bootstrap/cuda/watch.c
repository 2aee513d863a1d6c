/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/cuda/watch.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/setup.h"
#include "bootstrap/sockets.h"
#include "runtime/cuda/digest.h"
#include "runtime/op.h"
#include "runtime/wait.h"

#define TICK_NANOSECONDS 2000000
#define MOST_BEAT_SECONDS 1.0
/* A rank that is not heard for so many beats is not there. */
#define SILENT_BEATS 4
/* Ranks that know whom to blame get this time to say so: their waits end together with this one's.
 */
#define GRACE_SECONDS 0.5
/* A rank that has found a failure itself gives others this time, on a busy machine. Ranks that
 * disagree all find it, and say what differs. NCCL knows that a peer is gone, who knows why. */
#define EXPLAIN_SECONDS 2.0
/* To send what the others must know, before the connections close. */
#define FLUSH_SECONDS 1.0
/* Of EpCudaState.failed: no operation has this number. */
#define FAILED_FOREVER ~0u

/* ---- what watchers tell each other --------------------------------------------------------- */

typedef enum NoteKind { NOTE_BEAT = 1, NOTE_FAILED, NOTE_LEAVING } NoteKind;

typedef struct Note {
    int32_t kind;
    int32_t by, blamed; /* who has given up first, and because of whom */
    uint64_t begun;     /* as in EpWatchMarks */
    char why[EP_ABORT_BYTES];
} Note;

/** Another rank, which this one is connected with. */
typedef struct Peer {
    int32_t rank;
    Note in, out;
    void *receiving, *sending; /* requests, NULL: none */
    int told;                  /* whether it was told that this rank fails or leaves */
    int left;                  /* whether it leaves */
    double heard;              /* when, last */
    uint64_t begun;
} Peer;

/** Why the group cannot go on. */
typedef enum LossKind {
    LOSS_NONE,
    LOSS_OWN,    /* this rank fails, as its group learns in other ways */
    LOSS_FAILED, /* `peer` has given up on the group because of `blamed` */
    LOSS_CLOSED, /* `peer` has closed its connection */
    LOSS_LATE,   /* an exchange is late because of `blamed`, -1: not known */
    LOSS_ORDER,  /* `peer` is in another operation */
    LOSS_NCCL    /* NCCL reports `result` */
} LossKind;

typedef struct Loss {
    int kind; /* LossKind; stored with release, last */
    int32_t peer, blamed;
    uint32_t own, other; /* digests: of this rank's operation; LOSS_ORDER: of the peer's */
    ncclResult_t result;
    char why[EP_ABORT_BYTES];
} Loss;

/** How the watcher stops. */
typedef enum Stop {
    STOP_NOT,
    STOP_TOGETHER,
    STOP_ALONE,     /* without a word, unless something is lost */
    STOP_ABANDONED, /* likewise; the communicator stays, and so does the watcher if it hangs */
} Stop;

typedef struct EpCudaWatch {
    EpGroup *group; /* its failures alone: the watcher may outlive it */
    const EpCuda *cuda;
    int32_t rank;
    double timeout;
    EpBootstrap messages;
    int has_messages, started;
    pthread_t thread;
    int stop;        /* Stop */
    ncclComm_t comm; /* of all ranks */
    int busy;        /* whether the group's thread is in a call of NCCL on it */
    int looks;       /* whether the watcher is, which ends soon */
    int ending;      /* whether the thread aborts the communicator, or has done so */
    int is_ended;    /* whether the communicator was aborted */
    int done;        /* the thread has ended */
    Loss loss;
    Peer *peers;
    int32_t num_peers;
    double beat, next_beat;
    double since; /* nothing has moved */
    double disagrees;    /* since when this rank has found that; 0: it has not */
    double nccl_fails;   /* since when NCCL reports an error; 0: it does not */
    EpWatchMarks *marks; /* pinned */
    uint64_t *counts;    /* device */
    EpStamp *stamps;     /* device [1 + ranks], in a group of weights; else NULL */
    uint64_t moved;      /* as seen last */
    cudaStream_t stream;
    uint32_t *failed; /* pinned: FAILED_FOREVER */
} EpCudaWatch;

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static uint64_t begun(const EpCudaWatch *w) {
    return load(&w->marks->begun);
}

static uint32_t number_of(uint64_t begun) {
    return (uint32_t)(begun >> 32);
}

static int is_lost(const EpCudaWatch *w) {
    return __atomic_load_n(&w->loss.kind, __ATOMIC_ACQUIRE);
}

static Stop stops(const EpCudaWatch *w) {
    return (Stop)__atomic_load_n(&w->stop, __ATOMIC_ACQUIRE);
}

/* ---- telling the others -------------------------------------------------------------------- */

/* Returns whether the note is on its way; not where the last one is still being sent. */
static int tell(EpCudaWatch *w, Peer *p, NoteKind kind) {
    const EpBootstrap *m = &w->messages;
    int done = 1;
    if (p->sending && m->test(m->context, &p->sending, &done) != EP_OK) return 1;
    if (!done) return 0;
    int32_t by = w->loss.kind == LOSS_FAILED ? w->loss.peer : w->rank;
    p->out = (Note){.kind = kind, .by = by, .blamed = w->loss.blamed, .begun = begun(w)};
    memcpy(p->out.why, w->loss.why, sizeof(p->out.why));
    (void)m->isend(m->context, p->rank, 0, &p->out, sizeof(p->out), &p->sending);
    return 1;
}

static void tell_all(EpCudaWatch *w) {
    int loses = is_lost(w), beats = !loses && ep_clock() >= w->next_beat;
    if (beats) w->next_beat = ep_clock() + w->beat;
    for (int32_t i = 0; i < w->num_peers; i++) {
        Peer *p = &w->peers[i];
        if (p->left) continue;
        if (beats) (void)tell(w, p, NOTE_BEAT);
        if (loses && !p->told) p->told = tell(w, p, NOTE_FAILED);
    }
}

/* ---- ending this rank's part --------------------------------------------------------------- */

/* Kernels that run look at the word where they wait, later ones first. It is there before the
 * communicator ends: nothing is done with what has not arrived. Other threads may be capturing,
 * which this copy has nothing to do with. */
static void stop_kernels(EpCudaWatch *w) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    uint32_t *word = &w->cuda->device.state->failed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaMemcpyAsync(word, w->failed, sizeof(*word), cudaMemcpyHostToDevice, w->stream);
    (void)cudaStreamSynchronize(w->stream);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

/* The group's thread sees the loss and leaves, or has not entered: see ep_cuda_network_enter. */
static void end_communicator(EpCudaWatch *w) {
    EpWait wait;
    ep_wait_begin(&wait, w->timeout, 0);
    while (__atomic_load_n(&w->busy, __ATOMIC_SEQ_CST))
        if (!ep_wait_pause(&wait)) return;
    if (stops(w) == STOP_ABANDONED) return;
    __atomic_store_n(&w->ending, 1, __ATOMIC_RELEASE);
    ep_cuda_comm_end(w->cuda, w->comm, 1);
    w->is_ended = 1;
}

static void lose(EpCudaWatch *w, LossKind kind, int32_t peer, int32_t blamed, const char *why) {
    if (w->loss.kind) return;
    w->loss.peer = peer, w->loss.blamed = blamed;
    w->loss.own = (uint32_t)begun(w);
    memcpy(w->loss.why, why, strnlen(why, EP_ABORT_BYTES - 1));
    __atomic_store_n(&w->loss.kind, (int)kind, __ATOMIC_SEQ_CST);
    stop_kernels(w);
    tell_all(w); /* before they see that the communicator has ended */
    end_communicator(w);
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
static void compare(EpCudaWatch *w, const Peer *p) {
    uint64_t own = begun(w);
    if (number_of(own) != number_of(p->begun) ||
        ep_same_operation((uint32_t)own, (uint32_t)p->begun))
        return;
    w->loss.other = (uint32_t)p->begun;
    lose(w, LOSS_ORDER, p->rank, p->rank, "");
}

static void take_note(EpCudaWatch *w, Peer *p) {
    Note note = p->in;
    note.why[sizeof(note.why) - 1] = 0;
    p->heard = ep_clock(), p->begun = note.begun;
    if (note.kind == NOTE_LEAVING) p->left = 1;
    if (note.kind == NOTE_BEAT) compare(w, p);
    if (note.kind == NOTE_FAILED && is_late(w, 0) && note.blamed >= 0)
        lose(w, LOSS_LATE, note.blamed, note.blamed, ""); /* this rank has waited as long */
    else if (note.kind == NOTE_FAILED)
        lose(w, LOSS_FAILED, note.by, note.blamed, note.why);
}

/* A rank of another node that has left or failed closes its connection, too. */
static void listen_to(EpCudaWatch *w, Peer *p) {
    const EpBootstrap *m = &w->messages;
    int done = 1;
    EpStatus status = EP_OK;
    while (!p->left && done && status == EP_OK) {
        if (!p->receiving)
            status = m->irecv(m->context, p->rank, 0, &p->in, sizeof(p->in), &p->receiving);
        if (status == EP_OK) status = m->test(m->context, &p->receiving, &done);
        if (status == EP_OK && done) take_note(w, p);
    }
    if (status == EP_OK) return;
    p->left = 1;
    lose(w, LOSS_CLOSED, p->rank, p->rank, "");
}

/* ---- watching this rank -------------------------------------------------------------------- */

/* Returns whether others have had time to say what they know. */
static int gave_time(double *since) {
    if (*since == 0) *since = ep_clock();
    return ep_clock() - *since > EXPLAIN_SECONDS;
}

/* The group's thread, an abort, or kernels may have found a failure. */
static void look_at_group(EpCudaWatch *w) {
    EpAbort *abort = &w->group->abort;
    const EpCudaFailure *f = w->cuda->device.failure;
    const EpFinding *failure = &w->group->failure;
    const char *why = "";
    int32_t blamed = w->rank;
    pthread_mutex_lock(&abort->mutex);
    int failed = abort->failed, aborted = abort->requested;
    if (failed && failure->peer >= 0) blamed = failure->peer;
    if (failed && failure->status == EP_ERR_PEER) why = w->group->failure_sentence;
    pthread_mutex_unlock(&abort->mutex);
    int fault = __atomic_load_n(&f->fault, __ATOMIC_ACQUIRE);
    if (fault == EP_FAULT_ORDER && !aborted && !gave_time(&w->disagrees)) return;
    if (fault && !failed && !aborted && fault != EP_FAULT_PLAN && fault != EP_FAULT_FLIGHT)
        blamed = fault == EP_FAULT_PEER ? (int32_t)f->seen : f->peer;
    if (fault == EP_FAULT_PEER && !failed) why = (const char *)f->why;
    if (aborted || failed || fault)
        lose(w, LOSS_OWN, w->rank, blamed, aborted ? abort->sentence : why);
}

/* Returns the rank to blame for an exchange that is late, or -1. */
static int32_t find_late(const EpCudaWatch *w) {
    uint32_t least = number_of(begun(w));
    int32_t blamed = -1;
    for (int32_t i = 0; i < w->num_peers; i++) {
        const Peer *p = &w->peers[i];
        if (ep_clock() - p->heard > SILENT_BEATS * w->beat) return p->rank;
        if (number_of(p->begun) >= least) continue;
        least = number_of(p->begun), blamed = p->rank;
    }
    return blamed;
}

static void look_at_exchange(EpCudaWatch *w) {
    if (!is_late(w, GRACE_SECONDS)) return;
    int32_t blamed = find_late(w);
    lose(w, LOSS_LATE, blamed >= 0 ? blamed : w->rank, blamed, "");
}

/* In a nonblocking communicator ncclCommGetAsyncError also takes the end of a call that NCCL
 * enqueues in the background, and frees what belongs to it. So only one thread may ask at a time:
 * not this one while the group's thread is in a call. That thread will see an error itself, or the
 * next look does. */
static ncclResult_t ask_nccl(EpCudaWatch *w) {
    ncclResult_t result = ncclSuccess;
    __atomic_store_n(&w->looks, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&w->busy, __ATOMIC_SEQ_CST) ||
        w->cuda->nccl->ncclCommGetAsyncError(w->comm, &result) != ncclSuccess)
        result = ncclSuccess;
    __atomic_store_n(&w->looks, 0, __ATOMIC_SEQ_CST);
    return result;
}

static void look_at_nccl(EpCudaWatch *w) {
    ncclResult_t result = ask_nccl(w);
    if (result == ncclSuccess || result == ncclInProgress || !gave_time(&w->nccl_fails)) return;
    w->loss.result = result;
    lose(w, LOSS_NCCL, w->rank, w->rank, "");
}

/* ---- the thread ---------------------------------------------------------------------------- */

/* Tell all that this rank leaves, or fails, and wait for what is being sent. */
static void say_goodbye(EpCudaWatch *w) {
    double end = ep_clock() + FLUSH_SECONDS;
    int lost = is_lost(w), busy = 1;
    while (busy && ep_clock() < end) {
        busy = 0;
        for (int32_t i = 0; i < w->num_peers; i++) {
            Peer *p = &w->peers[i];
            int done = 1;
            if (p->left) continue;
            if (!p->told) p->told = tell(w, p, lost ? NOTE_FAILED : NOTE_LEAVING);
            if (p->sending && w->messages.test(w->messages.context, &p->sending, &done) != EP_OK)
                p->left = 1;
            busy |= !p->left && (!p->told || !done);
        }
    }
}

static void *watch(void *context) {
    EpCudaWatch *w = context;
    const struct timespec tick = {.tv_nsec = TICK_NANOSECONDS};
    int before = ep_cuda_use(w->cuda->ordinal);
    while (stops(w) == STOP_NOT) {
        for (int32_t i = 0; i < w->num_peers && !is_lost(w); i++)
            listen_to(w, &w->peers[i]);
        if (!is_lost(w)) look_at_group(w);
        if (!is_lost(w)) look_at_exchange(w);
        if (!is_lost(w)) look_at_nccl(w);
        tell_all(w);
        nanosleep(&tick, NULL);
    }
    if (!is_lost(w)) look_at_group(w); /* the group may have failed a moment ago */
    while (!is_lost(w) && w->disagrees > 0) {
        nanosleep(&tick, NULL);
        look_at_group(w);
    }
    if (stops(w) == STOP_TOGETHER || is_lost(w)) say_goodbye(w);
    ep_cuda_restore(before);
    __atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Signals are for the threads of the program. */
static EpStatus start(EpCudaWatch *w) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&w->thread, NULL, watch, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    w->started = !error;
    if (!error) return EP_OK;
    return ep_fail(EP_ERR_SYSTEM, "rank %d: ep_group_create: starting a thread: %s", w->rank,
                   strerror(error));
}

/* ---- opening ------------------------------------------------------------------------------- */

static EpStatus allocate(EpCudaWatch *w) {
    const EpGroup *group = w->group;
    w->peers = calloc((size_t)group->size, sizeof(*w->peers));
    if (!w->peers)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    for (int32_t r = 0; r < group->size; r++)
        if (ep_sockets_connect(group, r))
            w->peers[w->num_peers++] = (Peer){.rank = r, .heard = ep_clock()};
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&w->marks, sizeof(*w->marks), 0)));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&w->failed, sizeof(*w->failed), 0)));
    EP_TRY(ep_cuda_check(group, "cudaMalloc",
                         cudaMalloc((void **)&w->counts, 2 * sizeof(*w->counts))));
    EP_TRY(ep_cuda_check(group, "cudaMemset", cudaMemset(w->counts, 0, 2 * sizeof(*w->counts))));
    if (group->purpose == EP_FOR_WEIGHTS)
        EP_TRY(ep_cuda_check(
            group, "cudaMalloc",
            cudaMalloc((void **)&w->stamps, (size_t)(1 + group->size) * sizeof(*w->stamps))));
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_cuda_open_mark()));
    memset(w->marks, 0, sizeof(*w->marks));
    *w->failed = FAILED_FOREVER;
    return ep_cuda_check(group, "cudaStreamCreate",
                         cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
}

EpStatus ep_cuda_watch_open(EpGroup *group) {
    EpCall call = {"ep_group_create", group->rank};
    ncclComm_t comm = ep_cuda_group_comm(ep_cuda(group));
    if (!comm || (group->nodes.sizes.nodes == 1 && group->purpose == EP_FOR_TOKENS)) return EP_OK;
    EpCudaWatch *w = calloc(1, sizeof(*w));
    ep_cuda(group)->watch = w;
    EpStatus status = EP_OK;
    if (!w)
        status = ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    EP_TRY(ep_group_agree(group, &call, status));
    w->group = group, w->cuda = ep_cuda(group), w->comm = comm;
    w->rank = group->rank, w->timeout = group->timeout;
    w->beat = group->timeout / 4 < MOST_BEAT_SECONDS ? group->timeout / 4 : MOST_BEAT_SECONDS;
    EP_TRY(ep_group_agree(group, &call, allocate(w)));
    status = ep_sockets_open(group, &w->messages);
    w->has_messages = status == EP_OK;
    EP_TRY(ep_group_agree(group, &call, status));
    return ep_group_agree(group, &call, start(w));
}

void ep_cuda_watch_close(EpGroup *group, int together) {
    EpCuda *cuda = ep_cuda(group);
    EpCudaWatch *w = cuda->watch;
    if (!w) return;
    __atomic_store_n(&w->stop, together ? STOP_TOGETHER : STOP_ALONE, __ATOMIC_RELEASE);
    if (w->started) pthread_join(w->thread, NULL);
    if (w->is_ended && w->comm == cuda->network) cuda->network = NULL;
    if (w->is_ended && w->comm == cuda->comm) cuda->comm = NULL;
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

/* Aborting the communicator frees memory, which may wait for the device: a watcher that does so
 * already is left to it. From then on it needs the group no more. */
void ep_cuda_watch_abandon(EpGroup *group) {
    EpCudaWatch *w = ep_cuda(group)->watch;
    const struct timespec tick = {.tv_nsec = TICK_NANOSECONDS};
    if (!w || !w->started) return;
    __atomic_store_n(&w->stop, STOP_ABANDONED, __ATOMIC_RELEASE);
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

static void leave(EpCudaWatch *w) {
    if (w) __atomic_store_n(&w->busy, 0, __ATOMIC_SEQ_CST);
}

/* Either this thread sees the loss, or the watcher sees `busy`: both words are in one order. The
 * same holds for `looks`. */
EpStatus ep_cuda_network_enter(EpGroup *group, const EpCudaStream *stream) {
    EpCuda *cuda = ep_cuda(group);
    EpCudaWatch *w = cuda->watch;
    if (!w) return EP_OK;
    __atomic_store_n(&w->busy, 1, __ATOMIC_SEQ_CST);
    cuda->captured |= stream->captures;
    while (__atomic_load_n(&w->looks, __ATOMIC_SEQ_CST))
        sched_yield();
    if (!__atomic_load_n(&w->loss.kind, __ATOMIC_SEQ_CST)) return EP_OK;
    leave(w);
    group->backend->poll(group);
    EP_TRY(ep_group_usable(group));
    return ep_fail(EP_ERR_SYSTEM, "rank %d: the communicator of all ranks has ended", group->rank);
}

/* The watcher may hear why NCCL fails. */
static void await_explanation(const EpCudaWatch *w) {
    EpWait wait;
    ep_wait_begin(&wait, EXPLAIN_SECONDS, 0);
    while (w && !is_lost(w) && ep_wait_pause(&wait))
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

EpStatus ep_cuda_network_settle(EpGroup *group, const char *what, ncclResult_t result) {
    EpCuda *cuda = ep_cuda(group);
    EpStatus status = ep_cuda_comm_settle(group, ep_cuda_group_comm(cuda), what, result);
    leave(cuda->watch);
    if (status == EP_OK) return EP_OK;
    if (status == EP_ERR_SYSTEM) await_explanation(cuda->watch);
    return ep_cuda_network_give_up(group, what, status);
}

void ep_cuda_watch_describe(const EpGroup *group, EpMarkArgs *args) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    args->marks = w->marks, args->counts = w->counts;
    if (w->stamps) args->stamps = w->stamps;
}

/* Whether the group does not learn of a loss in other ways. */
static int is_others(int kind) {
    return kind != LOSS_NONE && kind != LOSS_OWN;
}

static EpStatus report_late(const EpGroup *group, const Loss *loss, const char *phase) {
    if (loss->blamed < 0)
        return ep_fail(EP_ERR_TIMEOUT,
                       "rank %d: %s: expected an exchange over NCCL to end within %g s, and all "
                       "ranks are in it",
                       group->rank, phase, group->timeout);
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: %s: rank %d did not arrive within %g s (waiting for data by NCCL)",
                   group->rank, phase, loss->blamed, group->timeout);
}

static EpStatus report(const EpGroup *group, const Loss *loss, const char *phase) {
    if (loss->kind == LOSS_FAILED)
        return ep_fail_peer(group->rank, phase, loss->peer, loss->blamed, loss->why);
    if (loss->kind == LOSS_CLOSED)
        return ep_fail(
            EP_ERR_PEER,
            "rank %d: %s: rank %d has closed its connection, as a process does that ends",
            group->rank, phase, loss->peer);
    if (loss->kind == LOSS_ORDER)
        return ep_fail_digests(group->rank, loss->own, loss->peer, loss->other);
    if (loss->kind == LOSS_LATE) return report_late(group, loss, phase);
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: NCCL: %s", group->rank, phase,
                   ep_cuda(group)->nccl->ncclGetErrorString(loss->result));
}

void ep_cuda_watch_poll(EpGroup *group) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    if (!w || group->failed != EP_OK) return;
    if (!is_others(is_lost(w))) return;
    EpFinding finding = EP_FINDING_INIT;
    const char *phase = w->loss.own ? ep_op_find(EP_DIGEST_OP(w->loss.own))->name : "network";
    finding.rank = group->rank, finding.peer = w->loss.blamed, finding.count = 1;
    strncpy(finding.phase, phase, sizeof(finding.phase) - 1);
    finding.status = report(group, &w->loss, phase);
    ep_group_fail(group, &finding);
}

int32_t ep_cuda_watch_find(const EpGroup *group, char sentence[EP_ABORT_BYTES]) {
    const EpCudaWatch *w = ep_cuda(group)->watch;
    if (!w || !is_lost(w)) return -1;
    memcpy(sentence, w->loss.why, EP_ABORT_BYTES);
    return w->loss.peer;
}
