/* SPDX-License-Identifier: Apache-2.0 */
/* One rank has no memory, at each of its allocations in turn: no rank waits for it. */
#include <string.h>
#include <time.h>

#include "tests/cases/run.h"
#include "tests/harness/watch.h"

enum { RANKS = 3, MOST_ALLOCATIONS = 200 };
#define DEADLINE 20.0
#define SOON 10.0 /* half the deadline */

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Returns a value of the rank `from`, on all ranks. */
static int tell(const EpBootstrap *bootstrap, int from, int value) {
    int all[RANKS] = {0};
    CHECK_OK(bootstrap->allgather(bootstrap->context, &value, all, sizeof(value), 60));
    return all[from];
}

/* Create a group while allocation n of rank `odd` fails. Returns 0 if it makes fewer. */
static int create(const EpBootstrap *bootstrap, const EpBootstrap *own, int odd, int n) {
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = DEADLINE;
    EpGroup *group = NULL;
    int mine = bootstrap->rank == odd;
    double start = seconds_now();
    watch_fail(mine ? n : 0);
    EpStatus status = ep_group_create(own, &config, &group);
    int left = watch_fail(0);
    check_note("allocation %d of rank %d", n, odd);
    CHECK(seconds_now() - start < SOON, "it took %.1f s", seconds_now() - start);
    CHECK((status == EP_OK) == (group != NULL), "status %d, group %p", status, (void *)group);
    /* Some of hwloc's allocations are not needed. Where memory is shared, all ranks lack it. */
    CHECK(status == EP_OK || status == EP_ERR_NO_MEMORY || (!mine && status == EP_ERR_PEER),
          "status %d: %s", status, ep_last_error());
    if (status == EP_ERR_PEER) CHECK(strstr(ep_last_error(), "memory"), "%s", ep_last_error());
    int failed = tell(bootstrap, odd, status != EP_OK);
    CHECK(failed == (status != EP_OK), "status %d, but %d on rank %d", status, failed, odd);
    ep_group_destroy(group);
    return tell(bootstrap, odd, left == 0);
}

static void create_without_memory(const EpBootstrap *bootstrap, const EpBootstrap *own) {
    if (TESTS_SANITIZED) return;
    for (int odd = 0; odd < 2; odd++) {
        int n = 1;
        while (n < MOST_ALLOCATIONS && create(bootstrap, own, odd, n))
            n++;
        CHECK(n > 5 && n < MOST_ALLOCATIONS, "%d allocations", n);
    }
}

ThreadTest(bootstrap_memory, group_over_memory_of_the_bootstrap, RANKS) {
    create_without_memory(bootstrap, bootstrap);
}

ThreadTest(bootstrap_memory, group_over_posix_shared_memory, RANKS) {
    EpBootstrap own = *bootstrap;
    own.share = NULL, own.share_free = NULL;
    create_without_memory(bootstrap, &own);
}

ThreadTest(bootstrap_memory, windows, RANKS) {
    if (TESTS_SANITIZED) return;
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroup *group = open_group(bootstrap, &c);
    void *memory = &group;
    int mine = bootstrap->rank == 1;
    watch_fail(mine ? 1 : 0);
    EpStatus status = ep_mem_alloc(group, 64, &memory);
    watch_fail(0);
    CHECK_REFUSED(status, mine ? EP_ERR_NO_MEMORY : EP_ERR_PEER, "ep_mem_alloc", "bytes", "128");
    CHECK(memory == &group, "an output was written");
    CHECK_OK(ep_mem_alloc(group, 64, &memory));
    watch_fail(mine ? 1 : 0);
    CHECK_OK(ep_mem_free(group, memory));
    CHECK(watch_fail(0) == mine, "ep_mem_free allocates");
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
}
