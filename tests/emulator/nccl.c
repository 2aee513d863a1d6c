/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators and windows of ranks that are threads of this process. */
#include <nccl_device.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/emulator/launch.h"
#include "tests/emulator/nccl_state.h"

pthread_mutex_t nccl_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t nccl_changed = PTHREAD_COND_INITIALIZER;
static Shared *all_shared;
static unsigned ids;

/* Arrive in the current round with a value; the last rank to arrive ends the round. The lock is
 * held here and in the functions below that take no lock. */
static void arrive(ncclComm_t comm, void *mine, ncclWindow_t *window) {
    Shared *c = comm->shared;
    comm->pending = 1, comm->round = c->rounds, comm->window = window;
    c->values[c->rounds % 2][comm->rank] = mine;
    if (++c->arrived < c->size) return;
    c->arrived = 0, c->rounds++;
    pthread_cond_broadcast(&nccl_changed);
}

static Shared *find_shared(const ncclUniqueId *id, int size) {
    Shared *c = all_shared;
    while (c && memcmp(c->id, id->internal, sizeof(c->id)))
        c = c->next;
    if (c) return c;
    c = calloc(1, sizeof(*c));
    if (!c) emulated_die("no memory for a communicator");
    memcpy(c->id, id->internal, sizeof(c->id));
    c->size = c->members = size, c->next = all_shared, all_shared = c;
    return c;
}

/* Make this rank's communicator of a split. Ranks of a color are numbered by key, then by rank. */
static void take_part(ncclComm_t comm) {
    const Part *all = comm->shared->parts[comm->round % 2], *own = &all[comm->rank];
    ncclComm_t *out = comm->part, made = calloc(1, sizeof(*made));
    ncclUniqueId id = {{0}};
    int size = 0, rank = 0;
    if (!made) emulated_die("no memory for a communicator");
    for (int r = 0; r < comm->shared->size; r++) {
        if (all[r].color != own->color) continue;
        size++;
        rank += all[r].key < own->key || (all[r].key == own->key && r < comm->rank);
    }
    snprintf(id.internal, sizeof(id.internal), "%.90s, round %u, color %d", comm->shared->id,
             comm->round, own->color);
    made->shared = find_shared(&id, size), made->rank = rank, made->device = comm->device;
    made->blocking = comm->part_blocking;
    *out = made;
}

/* Finish the round: hand out what it has made. */
static ncclResult_t take_result(ncclComm_t comm) {
    ncclWindow_t *out = comm->window, window = NULL;
    comm->pending = 0, comm->window = NULL;
    if (comm->part) take_part(comm);
    comm->part = NULL;
    if (!out) return ncclSuccess;
    if (cudaMalloc((void **)&window, sizeof(*window)) != cudaSuccess) return ncclSystemError;
    memset(window, 0, sizeof(*window));
    window->size = comm->shared->size, window->rank = comm->rank;
    memcpy(window->memory, comm->shared->values[comm->round % 2],
           (size_t)window->size * sizeof(void *));
    *out = window;
    return ncclSuccess;
}

/* Take part in a round. With `blocking` 0 return at once: ncclCommGetAsyncError completes the
 * round. */
static ncclResult_t synchronise(ncclComm_t comm, void *mine, ncclWindow_t *window, int blocking) {
    const Shared *c = comm->shared;
    arrive(comm, mine, window);
    comm->inside = blocking;
    while (blocking && !nccl_round_is_over(comm) && !c->aborted[comm->rank])
        pthread_cond_wait(&nccl_changed, &nccl_mutex);
    comm->inside = 0;
    if (!blocking) return ncclInProgress;
    pthread_cond_broadcast(&nccl_changed);
    return c->aborted[comm->rank] ? ncclSystemError : take_result(comm);
}

ncclResult_t nccl_synchronise(ncclComm_t comm) {
    return synchronise(comm, NULL, NULL, 1);
}

/* ---- communicators ---- */

ncclResult_t ncclGetVersion(int *version) {
    const char *other = getenv("EMULATED_NCCL");
    *version = other ? atoi(other) : VERSION;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "an error of the emulated NCCL";
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "Cuda failure 35 of the emulated NCCL";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out) {
    *out = (ncclUniqueId){{0}};
    pthread_mutex_lock(&nccl_mutex);
    snprintf(out->internal, sizeof(out->internal), "communicator %u", ++ids);
    pthread_mutex_unlock(&nccl_mutex);
    return ncclSuccess;
}

/* Like NCCL's threads, an end that is under way needs what the process takes down when it exits. */
static int being_torn_down;

static void find_torn_down(void) {
    if (!__atomic_load_n(&being_torn_down, __ATOMIC_ACQUIRE)) return;
    fprintf(stderr, "emulated NCCL: the process exits while a communicator ends\n");
    abort();
}

static void look_at_exit(void) {
    (void)atexit(find_torn_down);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    if (size > MAX_RANKS) return ncclInvalidArgument;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    ncclComm_t comm = calloc(1, sizeof(*comm));
    if (!comm) return ncclSystemError;
    (void)pthread_once(&once, look_at_exit);
    pthread_mutex_lock(&nccl_mutex);
    comm->shared = find_shared(&id, size), comm->rank = rank, comm->device = emulated_device();
    comm->blocking = config->blocking;
    *out = comm;
    ncclResult_t result = synchronise(comm, NULL, NULL, comm->blocking);
    pthread_mutex_unlock(&nccl_mutex);
    return result;
}

/* NCCL opens the device that is current in some calls, with hundreds of megabytes of its memory. */
static void check_device(const struct ncclComm *comm) {
    if (emulated_device() == comm->device) return;
    fprintf(stderr, "emulated NCCL: device %d is current in a call for device %d\n",
            emulated_device(), comm->device);
    abort();
}

/* Returns whether this rank's split shall fail, as EMULATED_SPLIT_FAILS says. */
static int fails_to_split(const struct ncclComm *comm) {
    const char *rank = getenv("EMULATED_SPLIT_FAILS");
    return rank && atoi(rank) == comm->rank;
}

/* Only the communicator that is split says when a split is complete, and whether it blocks. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config) {
    *out = NULL;
    check_device(comm);
    if (fails_to_split(comm)) return ncclSystemError;
    pthread_mutex_lock(&nccl_mutex);
    ncclResult_t result = ncclInvalidArgument;
    if (nccl_round_is_over(comm) && !comm->starting) {
        comm->shared->parts[comm->shared->rounds % 2][comm->rank] = (Part){color, key};
        comm->part = color == NCCL_SPLIT_NOCOLOR ? NULL : out;
        comm->part_blocking = config->blocking;
        result = synchronise(comm, NULL, NULL, comm->blocking);
    }
    pthread_mutex_unlock(&nccl_mutex);
    return result;
}

/* Returns whether a collective of this rank can never complete, because a peer has aborted. NCCL
 * notices that as the peer closes its connections, before anything else may tell the rank. */
static int is_forsaken(const struct ncclComm *comm) {
    const Shared *c = comm->shared;
    return c->any_aborted && c->collectives < comm->collectives;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) {
    pthread_mutex_lock(&nccl_mutex);
    *out = nccl_round_is_over(comm) ? take_result(comm) : ncclInProgress;
    if (*out == ncclSuccess && is_forsaken(comm)) *out = ncclRemoteError;
    int starts = comm->starting == START_NEXT;
    if (comm->starting && !starts) *out = ncclInProgress;
    if (comm->starting > START_NEXT) comm->starting--;
    if (starts) comm->starting = START_NOW;
    pthread_mutex_unlock(&nccl_mutex);
    if (starts) nccl_start(comm);
    return ncclSuccess;
}

/* Refuse a communicator that is still at work, as NCCL does. */
static ncclResult_t check_ready(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    int ready = nccl_round_is_over(comm) && !comm->starting;
    pthread_mutex_unlock(&nccl_mutex);
    return ready ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *out) {
    *out = comm->shared->size;
    return check_ready(comm);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out) {
    *out = comm->rank;
    return check_ready(comm);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *out) {
    *out = comm->device;
    return check_ready(comm);
}

/* It takes a while where graphs have put it off. */
static void tear_down(void) {
    __atomic_add_fetch(&being_torn_down, 1, __ATOMIC_RELAXED);
    usleep(20000);
    __atomic_sub_fetch(&being_torn_down, 1, __ATOMIC_RELEASE);
}

/* Like NCCL, wait until the graphs are gone which its collectives were captured in. */
static ncclResult_t destroy(ncclComm_t comm, int abort) {
    check_device(comm);
    pthread_mutex_lock(&nccl_mutex);
    Shared *c = comm->shared, **at = &all_shared;
    int graphs = comm->captured;
    if (comm->starting) c->running -= comm->num_waiting; /* nothing will enqueue them now */
    c->aborted[comm->rank] = abort, c->any_aborted |= abort;
    pthread_cond_broadcast(&nccl_changed);
    while (comm->inside || comm->captured)
        pthread_cond_wait(&nccl_changed, &nccl_mutex);
    if (--c->members == 0) {
        while (c->running)
            pthread_cond_wait(&nccl_changed, &nccl_mutex);
        while (*at != c)
            at = &(*at)->next;
        *at = c->next;
        free(c);
    }
    pthread_mutex_unlock(&nccl_mutex);
    if (graphs) tear_down();
    free(comm->waiting);
    free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    return destroy(comm, 0);
}

/* Ends the rank's collectives on streams, too. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    return destroy(comm, 1);
}

ncclResult_t ncclMemAlloc(void **out, size_t bytes) {
    return cudaMalloc(out, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *memory) {
    return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *memory, size_t bytes, ncclWindow_t *out,
                                    int flags) {
    (void)flags;
    if (!emulated_reaches(memory, bytes)) return ncclInvalidArgument;
    pthread_mutex_lock(&nccl_mutex);
    *out = NULL;
    ncclResult_t result = synchronise(comm, memory, out, comm->blocking);
    pthread_mutex_unlock(&nccl_mutex);
    return result == ncclInProgress ? ncclSuccess : result; /* as NCCL 2.28.9 does */
}

/* Wait until all ranks deregister: none may free its memory before. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    pthread_mutex_lock(&nccl_mutex);
    ncclResult_t result = synchronise(comm, NULL, NULL, 1);
    pthread_mutex_unlock(&nccl_mutex);
    return cudaFree(window) == cudaSuccess ? result : ncclUnhandledCudaError;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **out) {
    if (!emulated_reaches(window, sizeof(*window)) || window->size != comm->shared->size)
        return ncclInvalidArgument;
    *out = window->memory[window->rank];
    return ncclSuccess;
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **out) {
    if (!emulated_reaches(window, sizeof(*window)) || peer >= window->size)
        return ncclInvalidArgument;
    *out = window->memory[peer] + offset;
    return ncclSuccess;
}

void *ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer) {
    return peer < window->size ? window->memory[peer] + offset : NULL;
}
