/* SPDX-License-Identifier: Apache-2.0 */
/* Many handles in latency mode: more live handles than a group has windows for its callers, and
 * handles that are created and destroyed between steps. */
#include <stdlib.h>

#include "tests/gpu/device_step.h"
#include "tests/harness/random.h"

enum { KINDS = 8, HANDLES = EP_MAX_WINDOWS + 10, ROUNDS = 25, LIFETIMES = EP_MAX_WINDOWS + 8 };

/* Kinds 0 to 3: each layout, whole operations. Kinds 4 to 7: the same in phases. */
static Case kind_case(int ranks, int kind) {
    Case c = {.ranks = ranks, .experts = 2 * ranks + 1, .top_k = 3, .hidden = 56, .max_tokens = 11};
    c.counted = 1, c.weighted = 1, c.scale_bytes = 8, c.masked_percent = 10, c.capacity = 60;
    c.rows_per_expert = 20, c.overflow = EP_OVERFLOW_DROP, c.layout = (EpLayout)(1 + kind % 4);
    c.mode = EP_MODE_LATENCY, c.phases = kind / 4;
    return case_complete(c);
}

static int64_t library_bytes(EpGroup *group) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(group, &info));
    return info.library_bytes;
}

/* A device step for each kind. load() gives it a handle of that kind. */
typedef struct StepSet {
    EpGroup *group;
    cudaStream_t stream;
    DeviceStep gpu[KINDS];
    void *reachable; /* memory that peers can reach, for the first device step */
    Random random;   /* the same on all ranks */
    uint64_t seed;
} StepSet;

static void set_open(StepSet *set, const EpBootstrap *bootstrap) {
    Case c = kind_case(bootstrap->size, 0);
    const char *seed = getenv("LIBEP_TEST_SEED");
    *set = (StepSet){.group = open_group(bootstrap, &c), .stream = new_stream()};
    set->seed = seed ? strtoull(seed, NULL, 10) : 1;
    set->random = random_stream(set->seed, 0, 0);
    REQUIRE(set->group, "no group");
    REQUIRE_OK(ep_mem_alloc(set->group, device_step_bytes(&c), &set->reachable));
    for (int i = 0; i < KINDS; i++) {
        c = kind_case(bootstrap->size, i);
        device_step_open(&set->gpu[i], set->group, NULL, &c, bootstrap->rank, set->stream,
                         i ? NULL : set->reachable);
    }
}

static void set_close(StepSet *set) {
    CHECK_OK(ep_group_status(set->group, NULL));
    ep_group_destroy(set->group);
    for (int i = 0; i < KINDS; i++)
        device_step_close(&set->gpu[i]);
    CHECK_CUDA(cudaStreamDestroy(set->stream));
}

/* Load a new world for a handle of this kind. */
static void load(StepSet *set, int kind, EpHandle *handle) {
    Case c = set->gpu[kind].c;
    c.seed = random_next(&set->random);
    set->gpu[kind].step.handle = handle;
    device_step_draw(&set->gpu[kind], &c);
}

static void check(StepSet *set, int kind, int round) {
    check_note("seed %llu, round %d: %s", (unsigned long long)set->seed, round,
               case_describe(&set->gpu[kind].step.world->c));
    device_step_check(&set->gpu[kind]);
}

/* ---- many handles -------------------------------------------------------------------------- */

/* Run a step of one handle of each kind, interleaved operation by operation. */
static void run_some(StepSet *set, EpHandle *const *handles, int round) {
    for (int i = 0; i < KINDS; i++)
        load(set, i, handles[i + KINDS * random_below(&set->random, HANDLES / KINDS)]);
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1)
        for (int i = 0; i < KINDS; i++)
            device_step_issue(&set->gpu[i], op & device_step_all(&set->gpu[i].c));
    for (int i = 0; i < KINDS; i++)
        check(set, i, round);
}

static void many_handles(const EpBootstrap *bootstrap) {
    StepSet set;
    EpHandle *handles[HANDLES];
    set_open(&set, bootstrap);
    REQUIRE(!check_failure()[0], "no steps");
    for (int i = 0; i < HANDLES; i++) {
        handles[i] = device_step_handle(set.group, &set.gpu[i % KINDS].c);
        REQUIRE(handles[i], "no handle %d", i);
    }
    int64_t held = library_bytes(set.group);
    for (int round = 0; round < ROUNDS && !check_failure()[0]; round++)
        run_some(&set, handles, round);
    for (int i = 0; i < HANDLES; i++)
        ep_handle_destroy(handles[i * 5 % HANDLES]);
    CHECK(library_bytes(set.group) == held, "%lld bytes instead of %lld",
          (long long)library_bytes(set.group), (long long)held);
    set_close(&set);
}

LatencyTests(gpu_latency, many_handles, many_handles(bootstrap));

/* ---- handles that come and go ---------------------------------------------------------------- */

/* `lasting` stays while two others are created and destroyed: one unused, one used and in some
 * rounds with a pending dispatch. The library reuses their memory, so it does not come to hold
 * more and more. */
static void replace_handles(StepSet *set, EpHandle *lasting, int round, int64_t *most) {
    int kind = 1 + round % (KINDS - 1);
    EpHandle *used = device_step_handle(set->group, &set->gpu[kind].c);
    EpHandle *unused = device_step_handle(set->group, &set->gpu[(round + 2) % KINDS].c);
    REQUIRE(used && unused, "no handle");
    load(set, kind, used);
    load(set, 0, lasting);
    device_step_issue(&set->gpu[0], STEP_PREPARE | STEP_DISPATCH);
    device_step_issue(&set->gpu[kind], device_step_all(&set->gpu[kind].c));
    device_step_issue(&set->gpu[0], STEP_COMBINE);
    check(set, kind, round);
    check(set, 0, round);
    device_step_poison(&set->gpu[kind]);
    if (round % 4 == 3) device_step_issue(&set->gpu[kind], STEP_DISPATCH_SEND);
    ep_handle_destroy(round % 2 ? used : unused);
    ep_handle_destroy(round % 2 ? unused : used);
    int64_t held = library_bytes(set->group);
    if (round < LIFETIMES / 2 && held > *most) *most = held;
    CHECK(held <= *most, "round %d: %lld bytes instead of %lld", round, (long long)held,
          (long long)*most);
}

static void come_and_go(const EpBootstrap *bootstrap) {
    StepSet set;
    set_open(&set, bootstrap);
    REQUIRE(!check_failure()[0], "no steps");
    EpHandle *lasting = device_step_handle(set.group, &set.gpu[0].c);
    REQUIRE(lasting, "no handle");
    int64_t most = 0;
    for (int round = 0; round < LIFETIMES && !check_failure()[0]; round++)
        replace_handles(&set, lasting, round, &most);
    set_close(&set);
}

LatencyTests(gpu_latency, come_and_go, come_and_go(bootstrap));

/* ---- too many entries ------------------------------------------------------------------------ */

static void too_many_entries(const EpBootstrap *bootstrap) {
    Case c = kind_case(bootstrap->size, 0);
    EpHandle *handle = NULL;
    c.max_tokens = 40000;
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group, "no group");
    EpHandleConfig config = case_handle_config(&c);
    CHECK_REFUSED(ep_handle_create(group, &config, &handle), EP_ERR_UNSUPPORTED, "ep_handle_create",
                  "config", "at most", "in latency mode", "got 40000 * 3");
    CHECK(handle == NULL, "a handle was made");
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
}

LatencyTest(gpu_latency, too_many_entries, 2, too_many_entries(bootstrap));
