/* SPDX-License-Identifier: Apache-2.0 */
/* Windows: memory that peers can access, allocated and freed on several ranks, and every refused
 * call, after which the state is unchanged. */
#include <stdint.h>

#include "tests/cases/run.h"

enum { RANKS = 3, PAGE = 4096 };

TestSuite(bootstrap_windows, .init = be_quiet);

static _Thread_local _Alignas(PAGE) char pages[4 * PAGE]; /* of the caller */

/* Allocate memory; check that it is zeroed and aligned, and write all of it. */
static char *take(EpGroup *group, size_t bytes) {
    void *memory = NULL;
    CHECK_OK(ep_mem_alloc(group, bytes, &memory));
    char *data = memory;
    CHECK((uintptr_t)data % 128 == 0, "memory at %p", memory);
    for (size_t i = 0; data && i < bytes; i++)
        if (data[i] != 0) CHECK(data[i] == 0, "byte %zu is %d", i, data[i]);
    if (data) memset(data, 0x5a, bytes);
    return data;
}

/* ---- allocation and registration ---- */

GroupTest(bootstrap_windows, sizes_may_differ, RANKS, "") {
    int64_t before = group_info(group).library_bytes;
    for (size_t unit = 1; unit < 100000; unit *= 10) {
        char *memory = take(group, unit * (size_t)(bootstrap->rank + 1));
        CHECK(group_info(group).library_bytes == before, "memory of the caller is counted");
        CHECK_OK(ep_mem_free(group, memory));
    }
}

/* Memory is freed in any order and allocated again; the rest keeps its contents. Steps run between
 * two changes. */
StepTest(bootstrap_windows, freed_in_the_middle, RANKS, "weighted=1 seed=3") {
    static const int order[] = {2, 0, 4, 2, 3, 2, 0, 1};
    char *memory[5];
    for (int i = 0; i < 5; i++)
        memory[i] = take(step->group, 1000), memset(memory[i], i, 1000);
    for (int i = 0; i < 8; i++) {
        int which = order[i];
        CHECK_OK(ep_mem_free(step->group, memory[which]));
        step_all(step);
        memory[which] = take(step->group, 1000);
        memset(memory[which], which, 1000);
        for (int k = 0; k < 5000; k++)
            if (memory[k / 1000][k % 1000] != k / 1000)
                CHECK(false, "memory %d has lost byte %d", k / 1000, k % 1000);
    }
    for (int i = 4; i >= 0; i--)
        CHECK_OK(ep_mem_free(step->group, memory[i]));
}

/* Destroying the group frees what is left. The address sanitizer would report a leak. */
ThreadTest(bootstrap_windows, left_to_the_group, RANKS) {
    EpGroup *group = open_group_of(bootstrap, "");
    take(group, 12345);
    CHECK_OK(ep_window_register(group, pages, 2 * PAGE));
    take(group, 1);
    ep_group_destroy(group);
    memset(pages, 1, 2 * PAGE);
}

GroupTest(bootstrap_windows, registered_memory_keeps_its_contents, RANKS, "") {
    memset(pages, 0x33, 3 * PAGE);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(ep_window_register(group, pages, PAGE));
        CHECK_OK(ep_window_register(group, pages + PAGE, 2 * PAGE));
        CHECK_OK(ep_window_deregister(group, pages));
        CHECK_OK(ep_window_deregister(group, pages + PAGE));
    }
    for (int i = 0; i < 3 * PAGE; i++)
        if (pages[i] != 0x33) CHECK(false, "byte %d was written", i);
}

/* Two groups of a rank have separate windows. */
ThreadTest(bootstrap_windows, of_another_group, 2) {
    EpGroup *one = open_group_of(bootstrap, ""), *two = open_group_of(bootstrap, "");
    char *memory = take(one, 64);
    CHECK_REFUSED(ep_mem_free(two, memory), EP_ERR_FOREIGN, "ep_mem_free", "memory");
    CHECK_OK(ep_mem_free(one, memory));
    ep_group_destroy(one);
    ep_group_destroy(two);
}

/* ---- refused calls ---- */

ThreadTest(bootstrap_windows, no_live_group, 1) {
    EpGroup *group = open_group_of(bootstrap, "");
    void *out = &group;
    ep_group_destroy(group);
    EpGroup *const groups[] = {NULL, group};
    for (int i = 0; i < 2; i++) {
        EpStatus status = i ? EP_ERR_DESTROYED : EP_ERR_NULL;
        CHECK_REFUSED(ep_mem_alloc(groups[i], 64, &out), status, "ep_mem_alloc", "group");
        CHECK_REFUSED(ep_mem_free(groups[i], out), status, "ep_mem_free", "group");
        CHECK_REFUSED(ep_mem_free(groups[i], NULL), status, "ep_mem_free", "group");
        CHECK_REFUSED(ep_window_register(groups[i], out, PAGE), status, "ep_window_register",
                      "group");
        CHECK_REFUSED(ep_window_deregister(groups[i], out), status, "ep_window_deregister",
                      "group");
    }
    CHECK(out == &group, "an output was written");
    int other[16] = {0};
    CHECK_REFUSED(ep_mem_alloc((EpGroup *)(void *)other, 64, &out), EP_ERR_FOREIGN, "group");
}

GroupTest(bootstrap_windows, wrong_arguments_of_alloc, 2, "") {
    void *out = &group;
    CHECK_REFUSED(ep_mem_alloc(group, 64, NULL), EP_ERR_NULL, "ep_mem_alloc", "out", "NULL");
    CHECK_REFUSED(ep_mem_alloc(group, 0, &out), EP_ERR_RANGE, "ep_mem_alloc", "bytes", "got 0");
    CHECK_REFUSED(ep_mem_alloc(group, SIZE_MAX, &out), EP_ERR_RANGE, "ep_mem_alloc", "bytes",
                  "got 18446744073709551615");
    CHECK(out == &group, "an output was written");
    CHECK_OK(ep_mem_free(group, take(group, 64)));
}

GroupTest(bootstrap_windows, wrong_arguments_of_register, 2, "") {
    char *taken = take(group, 64);
    CHECK_OK(ep_window_register(group, pages + PAGE, PAGE));
    CHECK_REFUSED(ep_window_register(group, NULL, PAGE), EP_ERR_NULL, "ep_window_register",
                  "memory", "NULL");
    CHECK_REFUSED(ep_window_register(group, pages + 128, PAGE), EP_ERR_ADDRESS, "memory", "4096");
    CHECK_REFUSED(ep_window_register(group, pages, 0), EP_ERR_RANGE, "bytes", "got 0");
    CHECK_REFUSED(ep_window_register(group, pages, PAGE - 1), EP_ERR_RANGE, "bytes", "got 4095");
    CHECK_REFUSED(ep_window_register(group, pages, SIZE_MAX), EP_ERR_RANGE, "bytes");
    CHECK_REFUSED(ep_window_register(group, pages + PAGE, PAGE), EP_ERR_RANGE, "memory",
                  "overlaps");
    CHECK_REFUSED(ep_window_register(group, pages, 2 * PAGE), EP_ERR_RANGE, "overlaps the 4096");
    CHECK_REFUSED(ep_mem_free(group, pages + PAGE), EP_ERR_FOREIGN, "ep_mem_alloc");
    CHECK_REFUSED(ep_window_deregister(group, taken), EP_ERR_FOREIGN, "ep_window_register");
    /* Adjacent windows do not overlap. */
    CHECK_OK(ep_window_register(group, pages, PAGE));
    CHECK_OK(ep_window_register(group, pages + 2 * PAGE, 2 * PAGE));
}

GroupTest(bootstrap_windows, memory_that_is_none, 2, "") {
    char *memory = take(group, 256);
    CHECK_REFUSED(ep_mem_free(group, &group), EP_ERR_FOREIGN, "ep_mem_free", "memory");
    CHECK_REFUSED(ep_mem_free(group, memory + 128), EP_ERR_FOREIGN, "ep_mem_free", "memory");
    CHECK_OK(ep_mem_free(group, NULL));
    CHECK_OK(ep_mem_free(group, memory));
    CHECK_REFUSED(ep_mem_free(group, memory), EP_ERR_FOREIGN, "not given back yet");
    CHECK_REFUSED(ep_window_deregister(group, NULL), EP_ERR_NULL, "ep_window_deregister", "NULL");
    CHECK_REFUSED(ep_window_deregister(group, pages), EP_ERR_FOREIGN, "ep_window_deregister");
    CHECK_OK(ep_window_register(group, pages, PAGE));
    CHECK_OK(ep_window_deregister(group, pages));
    CHECK_REFUSED(ep_window_deregister(group, pages), EP_ERR_FOREIGN, "memory");
}

GroupTest(bootstrap_windows, too_many, 2, "") {
    char *memory[EP_MAX_WINDOWS];
    void *out = &group;
    for (int i = 0; i < EP_MAX_WINDOWS; i++)
        memory[i] = take(group, 10);
    CHECK_REFUSED(ep_mem_alloc(group, 10, &out), EP_ERR_RANGE, "at most 32 windows", "got 33");
    CHECK_REFUSED(ep_window_register(group, pages, PAGE), EP_ERR_RANGE, "at most 32 windows");
    CHECK(out == &group, "an output was written");
    CHECK_OK(ep_mem_free(group, memory[17]));
    CHECK_OK(ep_window_register(group, pages, PAGE));
    CHECK_REFUSED(ep_mem_alloc(group, 10, &out), EP_ERR_RANGE, "at most 32 windows");
    CHECK_OK(ep_window_deregister(group, pages));
    take(group, 10);
}

/* ---- refused on one rank, an error on all ---- */

static void check_wrong_on_rank_1(const EpBootstrap *bootstrap, EpStatus got, EpStatus expected,
                                  const char *word) {
    int mine = bootstrap->rank == 1;
    CHECK(got == (mine ? expected : EP_ERR_PEER), "status %d: %s", (int)got, ep_last_error());
    CHECK(strstr(ep_last_error(), "rank 1"), "%s", ep_last_error());
    CHECK(strstr(ep_last_error(), word), "no '%s' in: %s", word, ep_last_error());
}

GroupTest(bootstrap_windows, mistake_of_one_rank, RANKS, "") {
    char *memory = take(group, 64);
    void *out = &group;
    int wrong = bootstrap->rank == 1;
    check_wrong_on_rank_1(bootstrap, ep_mem_alloc(group, wrong ? 0 : 64, &out), EP_ERR_RANGE,
                          "bytes");
    check_wrong_on_rank_1(bootstrap, ep_mem_free(group, wrong ? pages : memory), EP_ERR_FOREIGN,
                          "memory");
    check_wrong_on_rank_1(bootstrap, ep_window_register(group, wrong ? NULL : pages, PAGE),
                          EP_ERR_NULL, "memory");
    CHECK(out == &group, "an output was written");
    /* Nothing has changed, and the ranks are still in step. */
    CHECK(memory[0] == 0x5a, "memory was freed");
    CHECK_OK(ep_window_register(group, pages, PAGE));
    check_wrong_on_rank_1(bootstrap, ep_window_deregister(group, wrong ? memory : pages),
                          EP_ERR_FOREIGN, "memory");
    CHECK_OK(ep_window_deregister(group, pages));
    CHECK_OK(ep_mem_free(group, memory));
    CHECK_OK(ep_group_status(group, NULL));
}

/* The ranks whose allocation succeeded free it again. */
ThreadTest(bootstrap_windows, no_memory_on_one_rank, RANKS) {
    if (TESTS_SANITIZED) return; /* sanitizers abort the process instead */
    EpGroup *group = open_group_of(bootstrap, "");
    void *out = &group;
    size_t bytes = bootstrap->rank == 1 ? (size_t)1 << 62 : 64;
    for (int i = 0; i < EP_MAX_WINDOWS + 1; i++)
        check_wrong_on_rank_1(bootstrap, ep_mem_alloc(group, bytes, &out), EP_ERR_NO_MEMORY,
                              "bytes");
    CHECK(out == &group, "an output was written");
    CHECK_OK(ep_mem_free(group, take(group, 64)));
    ep_group_destroy(group);
}

GroupTest(bootstrap_windows, ranks_that_differ, RANKS, "") {
    char *one = take(group, 64), *two = take(group, 64);
    void *out = &group;
    int odd = bootstrap->rank == 2;
    CHECK_REFUSED(ep_window_register(group, pages, odd ? 2 * PAGE : PAGE), EP_ERR_MISMATCH,
                  "ep_window_register", "bytes", "4096 on rank 0", "8192 on rank 2");
    CHECK_REFUSED(ep_mem_free(group, odd ? two : one), EP_ERR_ORDER, "ep_mem_free",
                  "number 0 on rank 0", "number 1 on rank 2");
    CHECK_REFUSED(odd ? ep_mem_free(group, one) : ep_mem_alloc(group, 64, &out), EP_ERR_ORDER,
                  "ep_mem_alloc on rank 0", "ep_mem_free on rank 2");
    CHECK(out == &group, "an output was written");
    CHECK_OK(ep_mem_free(group, two));
    CHECK_OK(ep_mem_free(group, one));
}

static int gave_up; /* number of ranks */

/* A rank does not call: the other ranks' errors name it, and their group has failed. */
GroupTest(bootstrap_windows, absent_rank, RANKS, "timeout=2") {
    char *memory = take(group, 64);
    void *out = &group;
    EpFinding finding = EP_FINDING_INIT;
    if (bootstrap->rank != 2) {
        CHECK_TIMEOUT(ep_mem_alloc(group, 64, &out), 2.0, "rank 2", "2 s");
        CHECK_STATUS(ep_group_status(group, &finding), EP_ERR_TIMEOUT);
        CHECK(strcmp(finding.phase, "mem_alloc") == 0, "phase %s", finding.phase);
        CHECK_REFUSED(ep_mem_alloc(group, 64, &out), EP_ERR_TIMEOUT, "rank 2");
        CHECK_REFUSED(ep_mem_free(group, memory), EP_ERR_TIMEOUT, "rank 2");
        CHECK_REFUSED(ep_window_register(group, pages, PAGE), EP_ERR_TIMEOUT, "rank 2");
        CHECK_REFUSED(ep_window_deregister(group, pages), EP_ERR_TIMEOUT, "rank 2");
        CHECK(out == &group && memory[0] == 0x5a, "an output was written");
        __atomic_add_fetch(&gave_up, 1, __ATOMIC_SEQ_CST);
    }
    while (__atomic_load_n(&gave_up, __ATOMIC_SEQ_CST) < 2)
        usleep(1000);
}

/* A rank calls an operation after the others have given up waiting for it in a collective call. */
ThreadTest(bootstrap_windows, late_rank_learns_of_the_failure, RANKS) {
    HOST_ONLY("waits on devices end by their own deadline");
    EpGroup *group = open_group_of(bootstrap, bootstrap->rank == 2 ? "" : "timeout=2");
    void *out = &group;
    EpTensor topk_idx = ep_tensor_2d((int32_t[2]){0, 1}, EP_TYPE_INT32, 1, 2);
    EpHandle *handle = open_handle_with(group, NULL);
    if (bootstrap->rank == 2) {
        while (__atomic_load_n(&gave_up, __ATOMIC_SEQ_CST) < 2)
            usleep(1000);
        CHECK_REFUSED(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL), EP_ERR_PEER,
                      "for a reason of its own");
    } else {
        CHECK_STATUS(ep_mem_alloc(group, 64, &out), EP_ERR_TIMEOUT);
        __atomic_add_fetch(&gave_up, 1, __ATOMIC_SEQ_CST);
    }
    ep_group_destroy(group);
}

/* One rank destroys its group instead: the others get an error either way, and their group has
 * failed. */
GroupTest(bootstrap_windows, group_destroyed_by_one_rank, RANKS, "timeout=2") {
    void *out = &group;
    if (bootstrap->rank != 2) {
        EpStatus status = ep_mem_alloc(group, 64, &out);
        CHECK(status == EP_ERR_ORDER || status == EP_ERR_TIMEOUT, "%d: %s", (int)status,
              ep_last_error());
        CHECK_STATUS(ep_group_status(group, NULL), status);
        CHECK(out == &group, "an output was written");
    }
}
