/* SPDX-License-Identifier: Apache-2.0 */
/* POSIX shared memory of bootstraps without `share`: a segment that is not what its rank has
 * created is refused before it is used. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"

/* What ranks gather in bootstrap/memory/host/posix_memory.c, recognised here by its size. */
typedef uint64_t Name;

typedef struct Creation {
    int32_t error, pid, fd, reserved;
    uint64_t proof;
} Creation;

/* Changes what its rank sees of rank 1. */
typedef struct Tampering {
    void (*tamper)(const char *name, Creation *creation);
    char name[48]; /* of rank 1's object */
} Tampering;

static EpStatus tampering_gather(void *test, const Wrapped *wrapped, const void *in, void *out,
                                 size_t bytes, double timeout) {
    Tampering *t = test;
    EpStatus status = forward_gather(wrapped, in, out, bytes, timeout);
    if (bytes == sizeof(Name))
        snprintf(t->name, sizeof(t->name), "/libep-%016llx-1",
                 (unsigned long long)((Name *)out)[1]);
    if (bytes == sizeof(Creation)) t->tamper(t->name, &((Creation *)out)[1]);
    return status;
}

/* Rank 0 sees another segment of rank 1 than the one that rank 1 has created. */
static void check_tampered(const EpBootstrap *bootstrap,
                           void (*tamper)(const char *name, Creation *creation),
                           const char *expected, const char *got) {
    Tampering t = {.tamper = tamper};
    Wrapped wrapped = {.gather = tampering_gather, .test = &t};
    EpBootstrap own = gathers_alone(bootstrap);
    if (bootstrap->rank == 0) wrap_bootstrap(&own, &wrapped);
    Case c = case_complete((Case){.ranks = 2});
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    EpStatus status = ep_group_create(&own, &config, &group);
    CHECK_REFUSED(status, bootstrap->rank ? EP_ERR_PEER : EP_ERR_SYSTEM,
                  "cannot map the shared memory of rank 1", expected, got);
    CHECK(group == NULL, "a group was made");
}

static void shorten(const char *name, Creation *creation) {
    (void)creation;
    int fd = shm_open(name, O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 100) == 0, "no object %s", name);
    close(fd);
}

RankTest(bootstrap_segments, shorter_segment, 2,
         check_tampered(bootstrap, shorten, "expected a file of", "got one of 100"));

/* In another PID namespace, /proc/PID/fd/N of a rank is another process's file. */
static void replace(const char *name, Creation *creation) {
    struct stat file;
    int fd = shm_open(name, O_RDWR, 0600), other = memfd_create("other", 0);
    CHECK(fd >= 0 && other >= 0 && fstat(fd, &file) == 0 && ftruncate(other, file.st_size) == 0,
          "no object %s", name);
    close(fd);
    creation->pid = (int32_t)getpid(), creation->fd = other;
}

RankTest(bootstrap_segments, file_of_another_process, 2,
         check_tampered(bootstrap, replace, "expected the number that this rank has drawn",
                        "another"));

static void point_to_a_folder(const char *name, Creation *creation) {
    (void)name;
    creation->pid = (int32_t)getpid(), creation->fd = open("/", O_RDONLY | O_DIRECTORY);
}

RankTest(bootstrap_segments, no_file, 2,
         check_tampered(bootstrap, point_to_a_folder, "on the same node: ", "Is a directory"));
