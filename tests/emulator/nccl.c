/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators and windows of ranks that are threads of this process. */
#include <nccl.h>
#include <nccl_device.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/device.h"
#include "tests/emulator/launch.h"

#define EMULATOR_REAL_DLFCN
#include <dlfcn.h>
#undef dlopen
#undef dlsym

enum { MOST_RANKS = EMULATED_MOST_GPUS, VERSION = 22803 };

/* A communicator as all its ranks see it. */
typedef struct Circle {
    struct Circle *next;
    char id[NCCL_UNIQUE_ID_BYTES];
    int size, come, left; /* come: to the meeting under way */
    unsigned meetings;
    void *brought[2][MOST_RANKS]; /* in turn: the last meeting's are still read */
} Circle;

struct ncclComm {
    Circle *circle;
    int rank, device, blocking;
    int meets; /* has come to a meeting that was not over when it last looked */
    unsigned meeting;
    ncclWindow_t *window; /* where it wants a window from that */
};

struct ncclWindow_vidmem {
    int size;
    char *memory[MOST_RANKS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t met = PTHREAD_COND_INITIALIZER;
static Circle *circles;
static unsigned ids;

/* All of these under the lock. */
static void come(ncclComm_t comm, void *mine, ncclWindow_t *window) {
    Circle *c = comm->circle;
    comm->meets = 1, comm->meeting = c->meetings, comm->window = window;
    c->brought[c->meetings % 2][comm->rank] = mine;
    if (++c->come < c->size) return;
    c->come = 0, c->meetings++;
    pthread_cond_broadcast(&met);
}

static int is_over(const struct ncclComm *comm) {
    return !comm->meets || comm->circle->meetings != comm->meeting;
}

static ncclResult_t take_window(ncclComm_t comm) {
    ncclWindow_t *out = comm->window, window = out ? calloc(1, sizeof(*window)) : NULL;
    comm->meets = 0, comm->window = NULL;
    if (!out) return ncclSuccess;
    if (!window) return ncclSystemError;
    window->size = comm->circle->size;
    memcpy(window->memory, comm->circle->brought[comm->meeting % 2],
           (size_t)window->size * sizeof(void *));
    *out = window;
    return ncclSuccess;
}

/* A communicator that does not block leaves the waiting to ncclCommGetAsyncError. */
static ncclResult_t meet(ncclComm_t comm, void *mine, ncclWindow_t *window, int blocking) {
    come(comm, mine, window);
    while (blocking && !is_over(comm))
        pthread_cond_wait(&met, &mutex);
    return blocking ? take_window(comm) : ncclInProgress;
}

static Circle *find_circle(const ncclUniqueId *id, int size) {
    Circle *c = circles;
    while (c && memcmp(c->id, id->internal, sizeof(c->id)))
        c = c->next;
    if (c) return c;
    c = calloc(1, sizeof(*c));
    if (!c) emulated_die("no memory for a communicator");
    memcpy(c->id, id->internal, sizeof(c->id));
    c->size = c->left = size, c->next = circles, circles = c;
    return c;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = VERSION;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "an error of the emulated NCCL";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out) {
    *out = (ncclUniqueId){{0}};
    pthread_mutex_lock(&mutex);
    snprintf(out->internal, sizeof(out->internal), "communicator %u", ++ids);
    pthread_mutex_unlock(&mutex);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    if (size > MOST_RANKS) return ncclInvalidArgument;
    ncclComm_t comm = calloc(1, sizeof(*comm));
    if (!comm) return ncclSystemError;
    pthread_mutex_lock(&mutex);
    comm->circle = find_circle(&id, size), comm->rank = rank, comm->device = emulated_device();
    comm->blocking = config->blocking;
    *out = comm;
    ncclResult_t result = meet(comm, NULL, NULL, comm->blocking);
    pthread_mutex_unlock(&mutex);
    return result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) {
    pthread_mutex_lock(&mutex);
    *out = is_over(comm) ? take_window(comm) : ncclInProgress;
    pthread_mutex_unlock(&mutex);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *out) {
    *out = comm->circle->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out) {
    *out = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *out) {
    *out = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    pthread_mutex_lock(&mutex);
    Circle *c = comm->circle, **at = &circles;
    if (--c->left == 0) {
        while (*at != c)
            at = &(*at)->next;
        *at = c->next;
        free(c);
    }
    pthread_mutex_unlock(&mutex);
    free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    return ncclCommDestroy(comm);
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
    pthread_mutex_lock(&mutex);
    *out = NULL;
    ncclResult_t result = meet(comm, memory, out, comm->blocking);
    pthread_mutex_unlock(&mutex);
    return result == ncclInProgress ? ncclSuccess : result; /* as NCCL 2.28.9 says it */
}

/* No rank's memory goes before all have come. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    pthread_mutex_lock(&mutex);
    ncclResult_t result = meet(comm, NULL, NULL, 1);
    pthread_mutex_unlock(&mutex);
    free(window);
    return result;
}

void *ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer) {
    return peer < window->size ? window->memory[peer] + offset : NULL;
}

/* ---- as libraries ---- */

static int primary_state(int device, unsigned *flags, int *active) {
    *flags = 0, *active = emulated_is_in_use(device);
    return 0;
}

static const struct {
    const char *name;
    void *function;
} functions[] = {
#define FUNCTION(name) \
    { #name, (void *)name }
    FUNCTION(ncclGetVersion),
    FUNCTION(ncclGetErrorString),
    FUNCTION(ncclGetUniqueId),
    FUNCTION(ncclCommInitRankConfig),
    FUNCTION(ncclCommGetAsyncError),
    FUNCTION(ncclCommCount),
    FUNCTION(ncclCommUserRank),
    FUNCTION(ncclCommCuDevice),
    FUNCTION(ncclCommAbort),
    FUNCTION(ncclCommDestroy),
    FUNCTION(ncclMemAlloc),
    FUNCTION(ncclMemFree),
    FUNCTION(ncclCommWindowRegister),
    FUNCTION(ncclCommWindowDeregister),
    {"cuDevicePrimaryCtxGetState", (void *)primary_state}};

static char library;

void *emulated_dlopen(const char *name, int flags) {
    if (name && (strncmp(name, "libnccl", 7) == 0 || strncmp(name, "libcuda", 7) == 0))
        return &library;
    return dlopen(name, flags);
}

void *emulated_dlsym(void *handle, const char *name) {
    if (handle != &library) return dlsym(handle, name);
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++)
        if (strcmp(functions[i].name, name) == 0) return functions[i].function;
    return NULL;
}
