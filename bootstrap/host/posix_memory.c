/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory for bootstraps without `share`. Each rank creates a POSIX shared memory object or,
 * if /dev/shm is too small, a nameless file. Each rank maps the segments of its node. Names are
 * removed before any rank returns, so nothing stays behind however the processes end.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "bootstrap/host/setup.h"

typedef struct MemoryName {
    char name[48]; /* of a shared memory object, or a path */
    int32_t error; /* errno of its creator, 0 if it exists */
} MemoryName;

typedef struct PosixMemory {
    size_t bytes;
    int32_t size;
    void *mapped[];
} PosixMemory;

/* Map `bytes` bytes of a file, which is allocated first if this rank `creates` it. Closes the file,
 * or leaves it open in *kept if `kept` is given. Returns NULL, with errno, on failure. */
static void *map_file(int fd, int creates, size_t bytes, int *kept) {
    if (fd < 0) return NULL;
    /* posix_fallocate fails at once if /dev/shm is full; ftruncate would cause SIGBUS later. */
    int error = creates ? posix_fallocate(fd, 0, (off_t)bytes) : 0;
    void *address = MAP_FAILED;
    if (!error) address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!error && address == MAP_FAILED) error = errno;
    if (kept && !error)
        *kept = fd;
    else
        close(fd);
    errno = error;
    return error ? NULL : address;
}

static void *open_segment(const char *name, size_t bytes) {
    int is_path = strncmp(name, "/proc/", 6) == 0;
    return map_file(is_path ? open(name, O_RDWR | O_CLOEXEC) : shm_open(name, O_RDWR, 0600), 0,
                    bytes, NULL);
}

static void *create_object(MemoryName *mine, int32_t rank, size_t bytes) {
    uint64_t nonce = 0;
    if (getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce))
        nonce = (uint64_t)getpid() << 32 ^ (uint64_t)(uintptr_t)mine;
    snprintf(mine->name, sizeof(mine->name), "/libep-%016llx-%d", (unsigned long long)nonce, rank);
    void *memory = map_file(shm_open(mine->name, O_RDWR | O_CREAT | O_EXCL, 0600), 1, bytes, NULL);
    int error = errno;
    if (!memory) shm_unlink(mine->name);
    errno = error;
    return memory;
}

/* Create a nameless file, for containers whose /dev/shm is small: only memory limits it. Peers open
 * it through /proc/PID/fd, until this process closes it. */
static void *create_nameless(MemoryName *mine, size_t bytes, int *fd) {
    void *memory = map_file(memfd_create("libep", MFD_CLOEXEC), 1, bytes, fd);
    if (memory) snprintf(mine->name, sizeof(mine->name), "/proc/%d/fd/%d", (int)getpid(), *fd);
    return memory;
}

static void *create_segment(MemoryName *mine, int32_t rank, size_t bytes, int *fd) {
    *mine = (MemoryName){.error = 0};
    void *memory = create_object(mine, rank, bytes);
    if (!memory) memory = create_nameless(mine, bytes, fd);
    if (!memory) mine->error = errno ? errno : ENOMEM;
    return memory;
}

static void forget_name(const MemoryName *mine, int fd) {
    if (fd >= 0)
        close(fd);
    else
        shm_unlink(mine->name);
}

/* Map every segment of this node. Returns 0, or 1 + the rank whose segment cannot be mapped. */
static int32_t map_peers(const EpBootstrap *b, const int32_t *nodes, const MemoryName *names,
                         PosixMemory *posix) {
    for (int32_t r = 0; r < b->size; r++) {
        if (nodes[r] != nodes[b->rank] || posix->mapped[r]) continue;
        posix->mapped[r] = open_segment(names[r].name, posix->bytes);
        if (!posix->mapped[r]) return r + 1;
    }
    return 0;
}

static EpStatus exchange_and_map(const EpBootstrap *b, const int32_t *nodes, double timeout,
                                 MemoryName *names, PosixMemory *posix) {
    MemoryName mine;
    int fd = -1;
    posix->mapped[b->rank] = create_segment(&mine, b->rank, posix->bytes, &fd);
    EpStatus status = b->allgather(b->context, &mine, names, sizeof(mine), timeout);
    int32_t unmapped = 0;
    for (int32_t r = 0; r < b->size && status == EP_OK; r++)
        if (names[r].error)
            status = ep_fail(EP_ERR_NO_MEMORY,
                             "rank %d: ep_group_create: %zu bytes of shared "
                             "memory on rank %d: %s",
                             b->rank, posix->bytes, r, strerror(names[r].error));
    if (status == EP_OK) unmapped = map_peers(b, nodes, names, posix);
    int error = errno;
    /* No rank may remove its name before all ranks have opened it. */
    EpStatus arrived = status == EP_OK ? b->barrier(b->context, timeout) : status;
    forget_name(&mine, fd);
    if (unmapped)
        return ep_fail(EP_ERR_SYSTEM,
                       "rank %d: ep_group_create: cannot map the shared memory of "
                       "rank %d, said to be on the same node: %s",
                       b->rank, unmapped - 1, strerror(error));
    return arrived;
}

EpStatus ep_posix_share(const EpBootstrap *b, const int32_t *nodes, size_t bytes, double timeout,
                        void **segments, void **memory) {
    size_t size = (size_t)b->size;
    PosixMemory *posix = calloc(1, sizeof(*posix) + size * sizeof(void *));
    MemoryName *names = calloc(size, sizeof(*names));
    EpStatus status;
    if (posix && names) {
        posix->bytes = bytes, posix->size = b->size;
        status = exchange_and_map(b, nodes, timeout, names, posix);
    } else {
        status = ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", b->rank);
    }
    free(names);
    if (status != EP_OK) {
        ep_posix_share_free(posix);
        return status;
    }
    memcpy(segments, posix->mapped, size * sizeof(void *));
    *memory = posix;
    return EP_OK;
}

void ep_posix_share_free(void *memory) {
    PosixMemory *posix = memory;
    for (int32_t r = 0; posix && r < posix->size; r++)
        if (posix->mapped[r]) munmap(posix->mapped[r], posix->bytes);
    free(posix);
}
