/* SPDX-License-Identifier: Apache-2.0 */
/* Adopted windows on the host backend, which uses all memory in place: the checks of arguments, and
 * that ranks need not call at the same time. tests/gpu/adopt.c has the CUDA backend's. */
#include <stdint.h>

#include "tests/cases/run.h"

enum { RANKS = 2, PAGE = 4096 };

/* Each rank adopts on its own, in its own order; then a whole step. */
StepTest(bootstrap_adopt, local_at_any_time, RANKS, "weighted=1 seed=7") {
    EpGroup *group = step->group;
    static _Alignas(16) char memory[RANKS][4 * PAGE];
    char *mine = memory[bootstrap->rank];
    for (int32_t i = 0; i < 4; i++) {
        int32_t id = bootstrap->rank ? 3 - i : i;
        CHECK_OK(ep_window_adopt(group, NULL, id, mine + id * PAGE, PAGE));
        step_all(step);
    }
    if (bootstrap->rank == 0) CHECK_OK(ep_window_release(group, mine + PAGE));
    if (bootstrap->rank == 0) CHECK_OK(ep_window_adopt(group, NULL, 63, mine + PAGE, 1));
}

GroupTest(bootstrap_adopt, wrong_arguments, 1, "") {
    static _Alignas(PAGE) char memory[4 * PAGE];
    void *allocated = NULL;
    CHECK_REFUSED(ep_window_adopt(group, NULL, -2, memory, PAGE), EP_ERR_RANGE, "rank 0",
                  "ep_window_adopt", "id", "expected 0 .. 63 or EP_WINDOW_PAIRED (-1)", "got -2");
    CHECK_REFUSED(ep_window_adopt(group, NULL, INT32_MIN, memory, PAGE), EP_ERR_RANGE, "id");
    CHECK_REFUSED(ep_window_adopt(group, NULL, 64, memory, PAGE), EP_ERR_RANGE, "id", "got 64");
    CHECK_REFUSED(ep_window_adopt(group, NULL, INT32_MAX, memory, PAGE), EP_ERR_RANGE, "id");
    CHECK_REFUSED(ep_window_adopt(group, NULL, 0, NULL, PAGE), EP_ERR_NULL, "memory", "NULL");
    CHECK_REFUSED(ep_window_adopt(group, NULL, 0, memory + 8, PAGE), EP_ERR_ADDRESS, "memory",
                  "multiple of 16");
    CHECK_REFUSED(ep_window_adopt(group, NULL, 0, memory, 0), EP_ERR_RANGE, "bytes", "got 0");
    CHECK_REFUSED(ep_window_adopt(group, NULL, 0, memory, SIZE_MAX), EP_ERR_RANGE, "bytes");
    CHECK_OK(ep_window_adopt(group, NULL, 5, memory + PAGE, PAGE));
    CHECK_REFUSED(ep_window_adopt(group, NULL, 5, memory, 16), EP_ERR_RANGE, "id", "not in use",
                  "got 5", "4096 bytes");
    CHECK_REFUSED(ep_window_adopt(group, NULL, 6, memory, PAGE + 1), EP_ERR_RANGE, "memory",
                  "overlaps the 4096");
    CHECK_REFUSED(ep_window_adopt(group, NULL, 6, memory + 2 * PAGE - 16, 64), EP_ERR_RANGE,
                  "overlaps");
    CHECK_OK(ep_window_adopt(group, NULL, 6, memory, PAGE)); /* adjacent */
    CHECK_OK(ep_mem_alloc(group, 1000, &allocated));
    CHECK_REFUSED(ep_window_adopt(group, NULL, 7, allocated, 1), EP_ERR_RANGE, "overlaps the 1000");
    CHECK_OK(ep_mem_free(group, allocated));
}

/* The calls that undo one kind of window do not take the other kind. */
ThreadTest(bootstrap_adopt, kinds_stay_apart, 1) {
    EpGroup *group = open_group_of(bootstrap, "");
    static _Alignas(PAGE) char memory[4 * PAGE];
    CHECK_OK(ep_window_adopt(group, NULL, 0, memory, PAGE));
    CHECK_OK(ep_window_register(group, memory + PAGE, PAGE));
    CHECK_REFUSED(ep_window_register(group, memory, PAGE), EP_ERR_RANGE, "overlaps");
    CHECK_REFUSED(ep_window_deregister(group, memory), EP_ERR_FOREIGN, "ep_window_register");
    CHECK_REFUSED(ep_mem_free(group, memory), EP_ERR_FOREIGN, "ep_mem_alloc");
    CHECK_REFUSED(ep_window_release(group, memory + PAGE), EP_ERR_FOREIGN, "rank 0",
                  "ep_window_release", "memory", "ep_window_adopt on this group");
    CHECK_REFUSED(ep_window_release(group, memory + 16), EP_ERR_FOREIGN, "memory");
    CHECK_REFUSED(ep_window_release(group, NULL), EP_ERR_NULL, "memory", "NULL");
    CHECK_OK(ep_window_release(group, memory));
    CHECK_REFUSED(ep_window_release(group, memory), EP_ERR_FOREIGN, "not released yet");
    CHECK_OK(ep_window_register(group, memory, PAGE));
    CHECK_OK(ep_window_deregister(group, memory));
    ep_group_destroy(group);
    CHECK_REFUSED(ep_window_adopt(group, NULL, 0, memory, PAGE), EP_ERR_DESTROYED, "group");
    CHECK_REFUSED(ep_window_release(group, memory), EP_ERR_DESTROYED, "group");
    CHECK_REFUSED(ep_window_adopt(NULL, NULL, 0, memory, PAGE), EP_ERR_NULL, "group");
    CHECK_REFUSED(ep_window_release(NULL, memory), EP_ERR_NULL, "group");
}

/* All ids at once, beside all windows that ranks make together. */
ThreadTest(bootstrap_adopt, all_ids, 1) {
    EpGroup *group = open_group_of(bootstrap, "");
    static _Alignas(PAGE) char memory[EP_MAX_ADOPTED_WINDOWS][PAGE];
    void *allocated[EP_MAX_WINDOWS];
    for (int32_t id = EP_MAX_ADOPTED_WINDOWS - 1; id >= 0; id--)
        CHECK_OK(ep_window_adopt(group, NULL, id, memory[id], PAGE));
    for (int i = 0; i < EP_MAX_WINDOWS; i++)
        CHECK_OK(ep_mem_alloc(group, 100, &allocated[i]));
    for (int32_t id = 0; id < EP_MAX_ADOPTED_WINDOWS; id += 2)
        CHECK_OK(ep_window_release(group, memory[id]));
    for (int i = 0; i < EP_MAX_WINDOWS; i++)
        CHECK_OK(ep_mem_free(group, allocated[i]));
    ep_group_destroy(group); /* gives the rest up */
    memset(memory, 1, sizeof(memory));
}
