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
    int rank, device;
};

struct ncclWindow_vidmem {
    int size;
    char *memory[MOST_RANKS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t met = PTHREAD_COND_INITIALIZER;
static Circle *circles;
static unsigned ids;

/* Under the lock. Returns what every rank has brought. */
static void **meet(Circle *c, int rank, void *mine) {
    unsigned meeting = c->meetings;
    void **all = c->brought[meeting % 2];
    all[rank] = mine;
    if (++c->come == c->size) {
        c->come = 0, c->meetings++;
        pthread_cond_broadcast(&met);
    }
    while (c->meetings == meeting)
        pthread_cond_wait(&met, &mutex);
    return all;
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

ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
    if (size > MOST_RANKS) return ncclInvalidArgument;
    ncclComm_t comm = calloc(1, sizeof(*comm));
    if (!comm) return ncclSystemError;
    pthread_mutex_lock(&mutex);
    comm->circle = find_circle(&id, size), comm->rank = rank, comm->device = emulated_device();
    meet(comm->circle, rank, NULL);
    pthread_mutex_unlock(&mutex);
    *out = comm;
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
    ncclWindow_t window = calloc(1, sizeof(*window));
    if (!window) return ncclSystemError;
    pthread_mutex_lock(&mutex);
    window->size = comm->circle->size;
    memcpy(window->memory, meet(comm->circle, comm->rank, memory),
           (size_t)window->size * sizeof(void *));
    pthread_mutex_unlock(&mutex);
    *out = window;
    return ncclSuccess;
}

/* No rank's memory goes before all have come. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    pthread_mutex_lock(&mutex);
    meet(comm->circle, comm->rank, NULL);
    pthread_mutex_unlock(&mutex);
    free(window);
    return ncclSuccess;
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
#define FUNCTION(name) {#name, (void *)name}
    FUNCTION(ncclGetVersion),          FUNCTION(ncclGetErrorString),
    FUNCTION(ncclGetUniqueId),         FUNCTION(ncclCommInitRank),
    FUNCTION(ncclCommCount),           FUNCTION(ncclCommUserRank),
    FUNCTION(ncclCommCuDevice),        FUNCTION(ncclCommAbort),
    FUNCTION(ncclCommDestroy),         FUNCTION(ncclMemAlloc),
    FUNCTION(ncclMemFree),             FUNCTION(ncclCommWindowRegister),
    FUNCTION(ncclCommWindowDeregister), {"cuDevicePrimaryCtxGetState", (void *)primary_state}};

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
