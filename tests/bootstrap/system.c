/* SPDX-License-Identifier: Apache-2.0 */
/* What the system refuses while a group is created: limits on files and descriptors, interrupted
 * calls, long host names. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>

#include "bootstrap/bootstrap.h"
#include "tests/cases/run.h"

static _Thread_local int interruptions; /* calls of posix_fallocate that are to be interrupted */
static _Thread_local const char *host_name; /* NULL: the machine's */

int posix_fallocate(int fd, off_t offset, off_t bytes) {
    if (interruptions > 0) return interruptions--, EINTR;
    return syscall(SYS_fallocate, fd, 0, offset, bytes) ? errno : 0;
}

int gethostname(char *name, size_t bytes) {
    struct utsname machine;
    if (uname(&machine)) return -1;
    const char *got = host_name ? host_name : machine.nodename;
    strncpy(name, got, bytes);
    if (strlen(got) < bytes) return 0;
    errno = ENAMETOOLONG;
    return -1;
}

static EpStatus create(const EpBootstrap *bootstrap, EpGroup **group) {
    EpBootstrap own = *bootstrap;
    own.share = NULL, own.share_free = NULL;
    EpGroupConfig config = group_config(bootstrap->size);
    return ep_group_create(&own, &config, group);
}

ThreadTest(bootstrap_system, interrupted_allocation, 3) {
    EpGroup *group = NULL;
    interruptions = bootstrap->rank == 1 ? 5 : 0;
    CHECK_OK(create(bootstrap, &group));
    CHECK(interruptions == 0, "%d interruptions are left", interruptions);
    ep_group_destroy(group);
}

static void limit(const EpBootstrap *bootstrap, int resource, rlim_t most, struct rlimit *before) {
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == 0) {
        getrlimit(resource, before);
        struct rlimit now = {most, before->rlim_max};
        CHECK(setrlimit(resource, &now) == 0, "cannot set the limit");
    }
    bootstrap->barrier(bootstrap->context, 60);
}

static void restore(const EpBootstrap *bootstrap, int resource, const struct rlimit *before) {
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == 0) setrlimit(resource, before);
    bootstrap->barrier(bootstrap->context, 60);
}

/* Beyond RLIMIT_FSIZE the system sends SIGXFSZ, which ends a process by default. */
ThreadTest(bootstrap_system, limit_on_the_size_of_files, 2) {
    struct rlimit before;
    EpGroup *group = NULL;
    sigset_t pending, mask;
    limit(bootstrap, RLIMIT_FSIZE, 100, &before);
    EpStatus status = create(bootstrap, &group);
    CHECK_REFUSED(status, EP_ERR_NO_MEMORY, "bytes of shared memory on rank 0", "RLIMIT_FSIZE");
    CHECK(group == NULL, "a group was made");
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    CHECK(!sigismember(&mask, SIGXFSZ) && !sigismember(&mask, SIGINT), "signals stay blocked");
    sigpending(&pending);
    CHECK(!sigismember(&pending, SIGXFSZ), "SIGXFSZ is pending");
    restore(bootstrap, RLIMIT_FSIZE, &before);
}

/* A SIGXFSZ that the caller has blocked, and that was pending before, stays. */
ThreadTest(bootstrap_system, signal_of_the_caller, 1) {
    struct rlimit before;
    EpGroup *group = NULL;
    sigset_t set, pending;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    pthread_kill(pthread_self(), SIGXFSZ);
    limit(bootstrap, RLIMIT_FSIZE, 100, &before);
    CHECK_REFUSED(create(bootstrap, &group), EP_ERR_NO_MEMORY, "RLIMIT_FSIZE");
    restore(bootstrap, RLIMIT_FSIZE, &before);
    sigpending(&pending);
    CHECK(sigismember(&pending, SIGXFSZ), "the signal is gone");
    CHECK(sigtimedwait(&set, NULL, &(struct timespec){0, 0}) == SIGXFSZ, "no signal");
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

/* A rank that cannot open a file does not count as a machine of its own. */
ThreadTest(bootstrap_system, no_file_descriptor, 2) {
    struct rlimit before;
    EpGroup *group = NULL;
    limit(bootstrap, RLIMIT_NOFILE, 0, &before);
    EpStatus status = create(bootstrap, &group);
    restore(bootstrap, RLIMIT_NOFILE, &before);
    CHECK_REFUSED(status, EP_ERR_SYSTEM, "ep_group_create", "boot_id", strerror(EMFILE));
    CHECK(group == NULL, "a group was made");
}

static EpLocation locate(const char *host) {
    EpLocation location;
    host_name = host;
    CHECK_OK(ep_location_find(&(EpSettingTopology){.nodes = 0}, 0, 1, &location));
    host_name = NULL;
    return location;
}

/* Containers of one machine have one boot id; their names may differ at the end. */
SoloTest(bootstrap_system, long_host_names) {
    char one[65], two[65];
    memset(one, 'h', 64), one[64] = 0;
    memcpy(two, one, sizeof(two));
    two[63] = 'i';
    EpLocation a = locate(one), b = locate(two), c = locate(one);
    CHECK(ep_location_same_node(&a, &c), "%s and %s", a.machine, c.machine);
    CHECK(!ep_location_same_node(&a, &b), "%s and %s", a.machine, b.machine);
}
