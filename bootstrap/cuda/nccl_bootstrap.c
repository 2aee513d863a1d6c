/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bootstrap over the caller's NCCL communicator.
 *
 * A gather is a sequence of rounds. In each round every rank contributes one chunk of a fixed size:
 * a copy from pinned memory to the device, ncclAllGather, and a copy back, all on the bootstrap's
 * own stream. The fixed size means that nothing is allocated after creation, and that ranks in
 * different calls still complete the round and find the difference in the chunks' headers; NCCL
 * itself does not notice if ranks gather different sizes.
 *
 * A gather that some rank does not join cannot be withdrawn: it stays on the device until the
 * caller aborts the communicator. The bootstrap then refuses further gathers, whose rounds would
 * pair with the wrong rounds of other ranks. Its stream and buffers stay allocated while NCCL may
 * use them.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/cuda/nccl_bootstrap.h"
#include "ep/ep_nccl.h"
#include "runtime/cuda/cuda.h"
#include "runtime/wait.h"

#define CHUNK_BYTES 4096
#define BARRIER UINT64_MAX
#define SECONDS_TO_ABORT 1.0 /* how long an aborted gather may take to leave the device */

/* What a rank contributes to a round. */
typedef struct Chunk {
    uint64_t call; /* BARRIER, or the bytes that each rank gathers: must be equal on all ranks */
    char data[CHUNK_BYTES - sizeof(uint64_t)];
} Chunk;

typedef struct NcclContext {
    struct NcclContext *next;
    const EpNccl *nccl;
    ncclComm_t comm;
    int rank, size, device;
    cudaStream_t stream;
    Chunk *staging;  /* [size] pinned: this rank's chunk, then all ranks' */
    Chunk *chunks;   /* [size] device */
    int starting;    /* 1 if NCCL may still put a failed gather onto the stream */
    EpStatus failed; /* EP_OK, or why gathers are refused */
    char sentence[EP_SENTENCE_BYTES];
} NcclContext;

/* All contexts, also those left behind with a pending gather. Bootstraps of one communicator fail
 * together: the caller is to abort the communicator, and then none of them may use it. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static NcclContext *contexts;

/* ---- errors -------------------------------------------------------------------------------- */

static EpStatus check_cuda(const NcclContext *self, const char *what, cudaError_t error) {
    if (error == cudaSuccess) return EP_OK;
    (void)cudaGetLastError();
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_ERR_NO_MEMORY : EP_ERR_BOOTSTRAP,
                   "rank %d: bootstrap: %s: %s", self->rank, what, cudaGetErrorString(error));
}

static EpStatus check_nccl(const NcclContext *self, const char *what, ncclResult_t result) {
    if (result == ncclSuccess) return EP_OK;
    return ep_fail(EP_ERR_BOOTSTRAP, "rank %d: bootstrap: %s: %s", self->rank, what,
                   ep_nccl_explain(self->nccl, result));
}

/* A deadline shared by the rounds of a gather. */
typedef struct Deadline {
    double seconds, end;
} Deadline;

/* A wait has ended: at its deadline, or since the group was aborted. NCCL does not tell who is
 * missing; with two ranks it can only be the other one. */
static EpStatus fail_missing(const NcclContext *self, const char *what, const Deadline *deadline) {
    EP_TRY(ep_poll_abort());
    if (self->size == 2)
        return ep_fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: %s: rank %d did not arrive within %g s",
                       self->rank, what, 1 - self->rank, deadline->seconds);
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: bootstrap: %s: expected all %d ranks within %g s, at least one did "
                   "not arrive, and NCCL does not tell which",
                   self->rank, what, self->size, deadline->seconds);
}

/* ---- gathering ----------------------------------------------------------------------------- */

/* Wait until the communicator has finished `what`, whose call returned `result`. */
static EpStatus settle(const NcclContext *self, const char *what, ncclResult_t result,
                       const Deadline *deadline) {
    result = ep_nccl_settle(self->nccl, self->comm, result, deadline->end - ep_clock());
    if (result == ncclInProgress) return fail_missing(self, what, deadline);
    return check_nccl(self, what, result);
}

/* Enqueue the gather. A nonblocking communicator puts it onto the stream from a thread of its own:
 * until it is settled, later work on the stream may overtake it. */
static EpStatus start_gather(NcclContext *self, const Deadline *deadline) {
    EP_TRY(settle(self, "an earlier call on the communicator", ncclSuccess, deadline));
    ncclResult_t result =
        self->nccl->ncclAllGather(&self->chunks[self->rank], self->chunks, sizeof(Chunk), ncclUint8,
                                  self->comm, self->stream);
    EpStatus status = settle(self, "ncclAllGather", result, deadline);
    self->starting = status != EP_OK && status != EP_ERR_BOOTSTRAP;
    return status;
}

static EpStatus wait_for_stream(const NcclContext *self, const Deadline *deadline) {
    EpWait wait;
    cudaError_t error;
    ncclResult_t result = ncclSuccess;
    ep_wait_begin(&wait, deadline->end - ep_clock(), 0);
    while ((error = cudaStreamQuery(self->stream)) == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* else the caller's next launch may report it */
        ncclResult_t queried = self->nccl->ncclCommGetAsyncError(self->comm, &result);
        if (queried == ncclSuccess && result != ncclInProgress) queried = result;
        EP_TRY(check_nccl(self, "ncclAllGather", queried));
        if (ep_poll_abort() != EP_OK || !ep_wait_pause(&wait))
            return fail_missing(self, "ncclAllGather", deadline);
    }
    return check_cuda(self, "ncclAllGather", error);
}

/* Exchange one chunk of each rank through `staging`. */
static EpStatus run_round(NcclContext *self, const Deadline *deadline) {
    size_t all = (size_t)self->size * sizeof(Chunk);
    EP_TRY(check_cuda(self, "cudaMemcpyAsync",
                      cudaMemcpyAsync(&self->chunks[self->rank], &self->staging[self->rank],
                                      sizeof(Chunk), cudaMemcpyHostToDevice, self->stream)));
    EP_TRY(start_gather(self, deadline));
    EP_TRY(check_cuda(
        self, "cudaMemcpyAsync",
        cudaMemcpyAsync(self->staging, self->chunks, all, cudaMemcpyDeviceToHost, self->stream)));
    return wait_for_stream(self, deadline);
}

static void describe_call(uint64_t call, char *text, size_t bytes) {
    if (call == BARRIER)
        snprintf(text, bytes, "a barrier");
    else
        snprintf(text, bytes, "a gather of %llu bytes", (unsigned long long)call);
}

static EpStatus compare_calls(const NcclContext *self, uint64_t call) {
    char mine[48], other[48];
    for (int r = 0; r < self->size; r++) {
        if (self->staging[r].call == call) continue;
        describe_call(call, mine, sizeof(mine));
        describe_call(self->staging[r].call, other, sizeof(other));
        return ep_fail(EP_ERR_ORDER,
                       "rank %d: bootstrap: expected all ranks in the same call, got %s here and "
                       "%s on rank %d",
                       self->rank, mine, other, r);
    }
    return EP_OK;
}

/* The last round carries no data. A late rank completes the round in which the others gave up
 * waiting for it, but not the next one, so it does not take itself to be together with them. */
static EpStatus gather_chunks(NcclContext *self, uint64_t call, const char *in, char *out,
                              size_t bytes, const Deadline *deadline) {
    size_t at = 0;
    do {
        Chunk *mine = &self->staging[self->rank];
        size_t part = bytes - at < sizeof(mine->data) ? bytes - at : sizeof(mine->data);
        mine->call = call;
        if (part) memcpy(mine->data, in + at, part);
        EP_TRY(run_round(self, deadline));
        EP_TRY(compare_calls(self, call));
        for (int r = 0; r < self->size && part; r++)
            memcpy(out + (size_t)r * bytes + at, self->staging[r].data, part);
        at += part;
    } while (at < bytes);
    return run_round(self, deadline);
}

void ep_nccl_bootstrap_refuse(ncclComm_t comm, EpStatus status) {
    pthread_mutex_lock(&mutex);
    for (NcclContext *c = contexts; c; c = c->next) {
        if (c->comm != comm || c->failed != EP_OK) continue;
        c->failed = status;
        snprintf(c->sentence, sizeof(c->sentence), "%s", ep_last_error());
    }
    pthread_mutex_unlock(&mutex);
}

static EpStatus gather(NcclContext *self, uint64_t call, const void *in, void *out, size_t bytes,
                       double seconds) {
    if (self->failed != EP_OK) return ep_fail(self->failed, "%s", self->sentence);
    Deadline deadline = {seconds, ep_clock() + seconds};
    int before = ep_cuda_use(self->device);
    EpStatus status = gather_chunks(self, call, in, out, bytes, &deadline);
    ep_cuda_restore(before);
    if (status != EP_OK && status != EP_ERR_ORDER) ep_nccl_bootstrap_refuse(self->comm, status);
    return status;
}

static EpStatus nccl_allgather(void *context, const void *in, void *out, size_t bytes,
                               double seconds) {
    return gather(context, bytes, in, out, bytes, seconds);
}

static EpStatus nccl_barrier(void *context, double seconds) {
    return gather(context, BARRIER, NULL, NULL, 0, seconds);
}

/* ---- life ---------------------------------------------------------------------------------- */

/* Returns 1 if NCCL may still use the context's stream and buffers. */
static int is_busy(const NcclContext *self) {
    if (self->failed == EP_OK) return 0;
    if (self->starting) return 1;
    int busy = cudaStreamQuery(self->stream) == cudaErrorNotReady;
    if (busy) (void)cudaGetLastError();
    return busy;
}

/* Returns 1 if a failed gather over the communicator may still be on the device. */
static int is_pending(const NcclContext *self) {
    int pending = 0;
    pthread_mutex_lock(&mutex);
    for (const NcclContext *c = contexts; c && self->failed != EP_OK; c = c->next)
        pending |= c->comm == self->comm && is_busy(c);
    pthread_mutex_unlock(&mutex);
    return pending;
}

int ep_nccl_bootstrap_is(const EpBootstrap *bootstrap) {
    return bootstrap->allgather == nccl_allgather;
}

int ep_nccl_bootstrap_is_pending(const EpBootstrap *bootstrap) {
    return ep_nccl_bootstrap_is(bootstrap) && is_pending(bootstrap->context);
}

static void release(const NcclContext *self) {
    if (self->stream) (void)cudaStreamDestroy(self->stream);
    (void)cudaFree(self->chunks);
    (void)cudaFreeHost(self->staging);
}

static void list(NcclContext *self) {
    pthread_mutex_lock(&mutex);
    self->next = contexts, contexts = self;
    pthread_mutex_unlock(&mutex);
}

static void unlist(const NcclContext *self) {
    pthread_mutex_lock(&mutex);
    NcclContext **at = &contexts;
    while (*at != self)
        at = &(*at)->next;
    *at = self->next;
    pthread_mutex_unlock(&mutex);
}

static void nccl_destroy(void *context) {
    NcclContext *self = context;
    EpWait wait;
    ep_wait_begin(&wait, SECONDS_TO_ABORT, 0);
    while (is_pending(self) && ep_wait_pause(&wait))
        ;
    if (is_pending(self)) {
        EP_WARN("ep_bootstrap_destroy: a gather is still on the device: its buffers stay allocated "
                "(abort the communicator before you destroy the bootstrap)");
        return;
    }
    int before = ep_cuda_use(self->device);
    release(self);
    ep_cuda_restore(before);
    unlist(self);
    free(self);
}

/* Ask the communicator, once it is initialized, for the rank, the number of ranks and the device.
 */
static EpStatus read_communicator(NcclContext *self, double seconds) {
    const EpNccl *nccl = self->nccl;
    ncclResult_t result = ep_nccl_settle(nccl, self->comm, ncclSuccess, seconds);
    if (result == ncclInProgress)
        return ep_fail(EP_ERR_TIMEOUT,
                       "ep_bootstrap_nccl: comm: expected an initialized communicator within %g s, "
                       "got one that NCCL still initializes",
                       seconds);
    if (result == ncclSuccess) result = nccl->ncclCommCount(self->comm, &self->size);
    if (result == ncclSuccess) result = nccl->ncclCommUserRank(self->comm, &self->rank);
    if (result == ncclSuccess) result = nccl->ncclCommCuDevice(self->comm, &self->device);
    if (result == ncclSuccess) return EP_OK;
    return ep_fail(EP_ERR_BOOTSTRAP,
                   "ep_bootstrap_nccl: comm: expected a usable communicator, got: %s",
                   ep_nccl_explain(nccl, result));
}

static EpStatus allocate(NcclContext *self) {
    size_t bytes = (size_t)self->size * sizeof(Chunk);
    EP_TRY(check_cuda(self, "cudaStreamCreateWithFlags",
                      cudaStreamCreateWithFlags(&self->stream, cudaStreamNonBlocking)));
    EP_TRY(check_cuda(self, "cudaMalloc", cudaMalloc((void **)&self->chunks, bytes)));
    EP_TRY(check_cuda(self, "cudaHostAlloc", cudaHostAlloc((void **)&self->staging, bytes, 0)));
    memset(self->staging, 0, bytes);
    return EP_OK;
}

static EpStatus open_buffers(NcclContext *self) {
    int before = ep_cuda_use(self->device);
    EpStatus status = allocate(self);
    if (status != EP_OK) release(self);
    ep_cuda_restore(before);
    return status;
}

EpStatus ep_bootstrap_nccl(ncclComm_t comm, EpBootstrap *out) {
    EpCall call = {"ep_bootstrap_nccl", -1};
    EpSettings settings;
    char reason[192];
    EP_TRY(ep_check_struct(&call, "out", out, sizeof(*out)));
    if (!comm) return ep_refuse(&call, EP_ERR_NULL, "comm", "expected a communicator, got NULL");
    EP_TRY(ep_settings_load(&settings));
    const EpNccl *nccl = ep_nccl_load(reason, sizeof(reason));
    if (!nccl) return ep_refuse(&call, EP_ERR_UNSUPPORTED, "comm", "%s", reason);
    NcclContext *self = calloc(1, sizeof(*self));
    if (!self) return ep_refuse(&call, EP_ERR_NO_MEMORY, "out", "out of memory");
    *self = (NcclContext){.nccl = nccl, .comm = comm, .failed = EP_OK};
    EpStatus status = read_communicator(self, settings.timeout > EP_NCCL_SECONDS ? settings.timeout
                                                                                 : EP_NCCL_SECONDS);
    if (status == EP_OK) status = open_buffers(self);
    if (status != EP_OK) {
        free(self);
        return status;
    }
    list(self);
    *out = (EpBootstrap){.struct_size = sizeof(*out),
                         .rank = self->rank,
                         .size = self->size,
                         .context = self,
                         .allgather = nccl_allgather,
                         .barrier = nccl_barrier,
                         .destroy = nccl_destroy};
    return EP_OK;
}
