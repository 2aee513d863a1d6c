/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory for bootstraps without `share`. Each rank creates a POSIX shared memory object or,
 * if /dev/shm is too small or it is alone on its node, a nameless file. Each rank maps the segments
 * of its node. Since a rank may be killed at any moment, its peers remove its name too:
 *
 *   1. The ranks gather names. No object exists yet.
 *   2. Each rank creates its object. The ranks gather the results.
 *   3. Each rank opens, verifies and maps the segments of its node. The ranks meet in a barrier.
 *   4. Each rank removes all names of its node, also if step 2 or 3 fails.
 *
 * Names exist in steps 2 and 3 alone, and every rank that has got so far knows all of them. A name
 * stays in /dev/shm only if all ranks of the node that know it are killed before their step 4, or
 * if a rank creates its object so late that its peers have given up waiting for it, and is killed
 * before its own step 4. After step 4 nothing stays, however the processes end.
 *
 * In a group that processes may join, all segments are nameless files, which stay open as long as
 * the group: a newcomer maps those of the living, and they map its own. It creates that before it
 * meets them. So nothing can stay, and steps 1 and 4 are left out.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/memory/host/host_memory.h"

/* Signals wait while a part of a segment is allocated. */
#define PART_BYTES ((size_t)64 << 20)

/* What the ranks gather in step 2. */
typedef struct Creation {
    int32_t error;   /* errno, 0 if the segment exists */
    int32_t pid, fd; /* of a nameless file; fd is -1 for an object with a name */
    int32_t reserved;
    uint64_t proof; /* last word of the segment, random, by which peers recognise it */
} Creation;

typedef struct PosixMemory {
    size_t bytes; /* of each segment, with the proof */
    int32_t size;
    Creation own; /* of this rank's, where its file stays open; else fd is -1 */
    void *mapped[];
} PosixMemory;

/* One call of ep_posix_share. It is on the stack, so a rank without memory can tell its peers. */
typedef struct Sharing {
    EpGroup *group;
    size_t bytes;                 /* of each segment, with the proof */
    PosixMemory *posix;           /* NULL: out of memory */
    int nameless;                 /* this rank's nameless file, or -1 */
    uint64_t names[EP_MAX_RANKS]; /* gathered in step 1: random numbers, which name the objects */
    Creation creations[EP_MAX_RANKS];
    char why_not[128]; /* why a peer's segment cannot be mapped */
} Sharing;

typedef struct ObjectName {
    char text[48];
} ObjectName;

static ObjectName name_of(const Sharing *s, int32_t rank) {
    ObjectName name;
    snprintf(name.text, sizeof(name.text), "/libep-%016llx-%d", (unsigned long long)s->names[rank],
             (int)rank);
    return name;
}

static int is_here(const Sharing *s, int32_t rank) {
    return s->group->nodes.of[rank] == s->group->nodes.of[s->group->rank];
}

static char *proof_in(const Sharing *s, void *segment) {
    return (char *)segment + s->bytes - sizeof(uint64_t);
}

/* ---- this rank's segment ------------------------------------------------------------------- */

/* Returns NULL, with errno, on failure. */
static void *map_file(int fd, size_t bytes) {
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return address == MAP_FAILED ? NULL : address;
}

/* Take back the SIGXFSZ that a file beyond RLIMIT_FSIZE has caused: unblocked, it would end the
 * process. */
static void consume_sigxfsz(void) {
    const struct timespec at_once = {0, 0};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    while (sigtimedwait(&set, NULL, &at_once) < 0 && errno == EINTR)
        ;
}

/* Allocate a part of a file, with the thread's signals blocked: a signal would undo the part, so a
 * frequent one (of a profiler) would stop all progress. Returns 0 or errno. */
static int allocate_part(int fd, size_t offset, size_t bytes) {
    sigset_t all, before, pending;
    int error;
    sigfillset(&all);
    sigemptyset(&pending);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    sigpending(&pending);
    do /* signals that libc uses itself stay unblocked */
        error = posix_fallocate(fd, (off_t)offset, (off_t)bytes);
    while (error == EINTR);
    if (error == EFBIG && !sigismember(&pending, SIGXFSZ)) consume_sigxfsz();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Allocate and map the bytes of a new file. Returns NULL, with errno, on failure. */
static void *fill_file(int fd, size_t bytes) {
    int error = 0;
    /* posix_fallocate fails at once if /dev/shm is full; ftruncate would cause SIGBUS later. */
    for (size_t at = 0; at < bytes && !error; at += PART_BYTES)
        error = allocate_part(fd, at, bytes - at < PART_BYTES ? bytes - at : PART_BYTES);
    errno = error;
    return error ? NULL : map_file(fd, bytes);
}

static void *create_object(const Sharing *s) {
    ObjectName name = name_of(s, s->group->rank);
    int fd = shm_open(name.text, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0) return NULL;
    void *memory = fill_file(fd, s->bytes);
    int error = errno;
    if (!memory) shm_unlink(name.text);
    close(fd);
    errno = error;
    return memory;
}

/* Create a nameless file, for containers whose /dev/shm is small: only memory limits it. Peers open
 * it through /proc/PID/fd, until this process closes it. */
static void *create_nameless(Sharing *s) {
    int fd = memfd_create("libep", MFD_CLOEXEC);
    if (fd < 0) return NULL;
    void *memory = fill_file(fd, s->bytes);
    int error = errno;
    if (memory)
        s->nameless = fd;
    else
        close(fd);
    errno = error;
    return memory;
}

/* Returns whether no other rank is on this node: no peer could remove a name. */
static int is_alone(const Sharing *s) {
    int32_t here = 0;
    for (int32_t r = 0; r < s->group->size; r++)
        here += is_here(s, r);
    return here == 1;
}

static uint64_t draw(const void *salt) {
    uint64_t drawn;
    if (getrandom(&drawn, sizeof(drawn), 0) == (ssize_t)sizeof(drawn)) return drawn;
    return (uint64_t)getpid() << 32 ^ (uint64_t)(uintptr_t)salt;
}

static int joins(const Sharing *s) {
    return ep_config_joins(&s->group->config);
}

static Creation create_segment(Sharing *s) {
    if (!s->posix) return (Creation){.error = ENOMEM, .fd = -1};
    void *memory = joins(s) || is_alone(s) ? NULL : create_object(s);
    if (!memory) memory = create_nameless(s);
    if (!memory) return (Creation){.error = errno ? errno : ENOMEM, .fd = -1};
    Creation made = {.pid = (int32_t)getpid(), .fd = s->nameless, .proof = draw(memory)};
    memcpy(proof_in(s, memory), &made.proof, sizeof(made.proof));
    s->posix->mapped[s->group->rank] = memory;
    return made;
}

/* ---- the peers' segments ------------------------------------------------------------------- */

static int open_segment(const Sharing *s, int32_t rank) {
    const Creation *creation = &s->creations[rank];
    char path[48];
    if (creation->fd < 0) return shm_open(name_of(s, rank).text, O_RDWR, 0600);
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)creation->pid, (int)creation->fd);
    return open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
}

static void *refuse_file(Sharing *s, int error) {
    snprintf(s->why_not, sizeof(s->why_not), "%s", strerror(error));
    return NULL;
}

/* Ranks whose machines have one name and boot id count as one node, containers among them. */
static void *refuse_opening(Sharing *s, int32_t rank, int error) {
    if (s->creations[rank].fd >= 0)
        snprintf(s->why_not, sizeof(s->why_not),
                 "%.40s: containers with one host name must share processes or a large /dev/shm",
                 strerror(error));
    else if (error == ENOENT)
        snprintf(s->why_not, sizeof(s->why_not),
                 "its object is not in /dev/shm here: containers with one host name must share it");
    else
        return refuse_file(s, error);
    return NULL;
}

/* Map the file if it has a segment's size: beyond the end of a shorter one, a load is a SIGBUS. */
static void *map_checked(Sharing *s, int fd) {
    struct stat file;
    if (fstat(fd, &file)) return refuse_file(s, errno);
    if (!S_ISREG(file.st_mode) || file.st_size != (off_t)s->bytes) {
        snprintf(s->why_not, sizeof(s->why_not), "expected a file of %zu bytes, got one of %lld",
                 s->bytes, (long long)file.st_size);
        return NULL;
    }
    void *memory = map_file(fd, s->bytes);
    return memory ? memory : refuse_file(s, errno);
}

/* Map a rank's segment, and verify that it is this rank's: another PID namespace has other
 * processes under the same numbers, and another /dev/shm has other objects. Returns 0, with
 * `why_not` and *error (0 or errno of the opening), on failure. */
static int map_segment(Sharing *s, int32_t rank, int *error) {
    int fd = open_segment(s, rank);
    *error = fd < 0 ? errno : 0;
    void *memory = fd < 0 ? refuse_opening(s, rank, *error) : map_checked(s, fd);
    if (fd >= 0) close(fd);
    s->posix->mapped[rank] = memory;
    if (!memory) return 0;
    if (!memcmp(proof_in(s, memory), &s->creations[rank].proof, sizeof(uint64_t))) return 1;
    snprintf(s->why_not, sizeof(s->why_not), "%s",
             "expected the number that this rank has drawn at its end, got another file");
    return 0;
}

/* Map every segment of this node. Returns 0, or 1 + the rank whose segment cannot be mapped. */
static int32_t map_peers(Sharing *s, int *error) {
    for (int32_t r = 0; r < s->group->size; r++)
        if (is_here(s, r) && ep_group_connects(s->group, r) && !map_segment(s, r, error))
            return r + 1;
    return 0;
}

/* ---- sharing ------------------------------------------------------------------------------- */

static EpStatus gather_names(Sharing *s) {
    uint64_t mine = draw(s);
    return ep_group_gather(s->group, &mine, s->names, sizeof(mine));
}

static const char *reason(int error) {
    return error == EFBIG ? "more than the limit on the size of files, RLIMIT_FSIZE"
                          : strerror(error);
}

static EpStatus fail_memory(const EpGroup *group, size_t bytes, int32_t rank, int error) {
    return ep_fail(EP_ERR_NO_MEMORY, "rank %d: %s: %zu bytes of shared memory on rank %d: %s",
                   group->rank, group->call, bytes, rank, reason(error));
}

static EpStatus gather_creations(Sharing *s, const Creation *mine) {
    EP_TRY(ep_group_gather(s->group, mine, s->creations, sizeof(*mine)));
    for (int32_t r = 0; r < s->group->size; r++)
        if (s->creations[r].error) return fail_memory(s->group, s->bytes, r, s->creations[r].error);
    int32_t rank;
    const Creation *other = ep_bootstrap_elsewhere(&s->group->bootstrap, sizeof(*other), &rank);
    if (!other) return EP_OK;
    return ep_fail(EP_ERR_NO_MEMORY, "rank %d: %s: shared memory on rank %d of the mesh: %s",
                   s->group->rank, s->group->call, rank, reason(other->error));
}

static EpStatus map_and_meet(Sharing *s) {
    int error = 0;
    int32_t unmapped = map_peers(s, &error);
    /* No rank may remove a name before all ranks have opened it. */
    EpStatus arrived = ep_group_meet(s->group);
    /* A rank that gives up removes the names of all, and one that ends closes its file. Then the
     * barrier's error, which names the missing rank, is the cause. */
    if (unmapped && (arrived == EP_OK || (error != ENOENT && !joins(s))))
        return ep_fail(EP_ERR_SYSTEM,
                       "rank %d: %s: cannot map the shared memory of rank %d, said to be on the "
                       "same node: %s",
                       s->group->rank, s->group->call, unmapped - 1, s->why_not);
    return arrived;
}

static void remove_names(const Sharing *s) {
    for (int32_t r = 0; r < s->group->size; r++)
        if (is_here(s, r)) shm_unlink(name_of(s, r).text);
}

static EpStatus create_and_map(Sharing *s) {
    EP_TRY(gather_names(s));
    Creation mine = create_segment(s);
    EpStatus status = gather_creations(s, &mine);
    if (status == EP_OK) status = map_and_meet(s);
    remove_names(s);
    if (s->nameless >= 0) close(s->nameless);
    return status;
}

/* Begin to share segments of so many bytes. */
static void open_sharing(Sharing *s, EpGroup *group, size_t bytes) {
    size_t size = (size_t)group->size;
    s->group = group, s->nameless = -1, s->bytes = bytes;
    s->posix = calloc(1, sizeof(*s->posix) + size * sizeof(void *));
    if (s->posix) s->posix->bytes = bytes, s->posix->size = group->size, s->posix->own.fd = -1;
}

/* Returns the bytes of a segment with its proof. */
static size_t whole_bytes(size_t bytes) {
    return (bytes + 63) / 64 * 64 + sizeof(uint64_t);
}

EpStatus ep_posix_share(EpGroup *group, size_t bytes, void **segments, void **memory) {
    Sharing s = {.group = NULL};
    open_sharing(&s, group, whole_bytes(bytes));
    EpStatus status = create_and_map(&s);
    if (status != EP_OK) {
        ep_posix_share_free(s.posix);
        return status;
    }
    memcpy(segments, s.posix->mapped, (size_t)group->size * sizeof(void *));
    *memory = s.posix;
    return EP_OK;
}

void ep_posix_share_free(void *memory) {
    PosixMemory *posix = memory;
    for (int32_t r = 0; posix && r < posix->size; r++)
        if (posix->mapped[r]) munmap(posix->mapped[r], posix->bytes);
    if (posix && posix->own.fd >= 0) close(posix->own.fd);
    free(posix);
}

/* ---- groups that processes may join -------------------------------------------------------- */

EpStatus ep_posix_reserve(EpGroup *group, size_t bytes, void **segment, void **memory) {
    Sharing s = {.group = NULL};
    open_sharing(&s, group, whole_bytes(bytes));
    Creation own = create_segment(&s);
    if (own.error) {
        ep_posix_share_free(s.posix);
        return fail_memory(group, s.bytes, group->rank, own.error);
    }
    s.posix->own = own;
    *segment = s.posix->mapped[group->rank];
    *memory = s.posix;
    return EP_OK;
}

uint64_t ep_posix_proof(const void *memory) {
    return ((const PosixMemory *)memory)->own.proof;
}

EpStatus ep_posix_connect(EpGroup *group, const void *memory, void **segments, void **found) {
    const PosixMemory *posix = memory;
    Sharing s = {.group = NULL};
    Creation mine = posix->own;
    open_sharing(&s, group, posix->bytes);
    if (!s.posix) mine.error = ENOMEM;
    EpStatus status = gather_creations(&s, &mine);
    if (status == EP_OK) status = map_and_meet(&s);
    *found = s.posix;
    if (s.posix) memcpy(segments, s.posix->mapped, (size_t)group->size * sizeof(void *));
    return status;
}

void ep_posix_adopt(void *memory, void *found, const EpMask *changed) {
    PosixMemory *posix = memory, *from = found;
    for (int32_t r = 0; r < posix->size; r++) {
        void *old = posix->mapped[r];
        if (!ep_mask_has(changed, r)) continue;
        posix->mapped[r] = from->mapped[r], from->mapped[r] = old;
    }
}
