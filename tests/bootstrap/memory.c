/* SPDX-License-Identifier: Apache-2.0 */
/* One rank has no memory, at each of its allocations in turn: no rank waits for it. */
#include "tests/cases/meshes.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"
#include "tests/harness/watch.h"

enum { RANKS = 3, MOST_ALLOCATIONS = 200 };
#define DEADLINE 20.0
#define SOON 10.0 /* half the deadline */

/* Large stages would take most of the time. */
static void make_stages_small(void) {
    setenv("LIBEP_STAGE_BYTES", "64K", 1);
}

TestSuite(bootstrap_memory, .init = make_stages_small);

/* Returns a value of the rank `from`, on all ranks. */
static int tell(const EpBootstrap *bootstrap, int from, int value) {
    int all[RANKS] = {0};
    CHECK_OK(bootstrap->allgather(bootstrap->context, &value, all, sizeof(value), 60));
    return all[from];
}

/* What a collective call makes while a rank has no memory. */
typedef enum What { GROUP, COMM, WEIGHT } What;

typedef struct Made {
    EpGroup *group;
    EpMeshComm *comm;
    EpWeight *weight;
} Made;

/* A mesh with a grid, which is copied. */
static EpMesh mesh_of_all(void) {
    static const int32_t grid[RANKS] = {2, 0, 1};
    EpMesh mesh = mesh_of("fsdp=3,expert=1");
    mesh.grid = grid;
    return mesh;
}

static EpStatus make_comm(const EpBootstrap *own, const EpMesh *mesh, EpMeshComm **out) {
    EpMeshCommConfig config = comm_config(DEADLINE);
    return ep_mesh_comm_create(own, mesh, &config, out);
}

static EpWeightConfig weight_config(const EpMesh *mesh) {
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    config.name = "w", config.shape[0] = 3, config.shape[1] = 6, config.shape[2] = 8;
    config.spec = spec_of(mesh, "(expert,fsdp),_,_");
    return config;
}

/* Make it while allocation n of rank `odd` fails. Returns 0 if it makes fewer. */
static int create(const EpBootstrap *bootstrap, const EpBootstrap *own, What what, int odd, int n) {
    EpGroupConfig config = group_config(RANKS);
    EpMesh mesh = mesh_of_all();
    EpWeightConfig weight = weight_config(&mesh);
    Made made = {.group = NULL};
    EpStatus status;
    int mine = bootstrap->rank == odd;
    config.timeout_seconds = DEADLINE;
    if (what == WEIGHT) CHECK_OK(make_comm(own, &mesh, &made.comm));
    double start = seconds_now();
    watch_fail(mine ? n : 0);
    if (what == GROUP)
        status = ep_group_create(own, &config, &made.group);
    else if (what == COMM)
        status = make_comm(own, &mesh, &made.comm);
    else
        status = ep_weight_create(made.comm, &weight, &made.weight);
    int left = watch_fail(0);
    check_note("allocation %d of rank %d", n, odd);
    CHECK(seconds_now() - start < SOON, "it took %.1f s", seconds_now() - start);
    int has = made.group || made.weight || (what == COMM && made.comm);
    CHECK((status == EP_OK) == has, "status %d, made %d", status, has);
    /* Some of hwloc's allocations are not needed. Where memory is shared, all ranks lack it. */
    CHECK(status == EP_OK || status == EP_ERR_NO_MEMORY || (!mine && status == EP_ERR_PEER),
          "status %d: %s", status, ep_last_error());
    if (status == EP_ERR_PEER) CHECK(strstr(ep_last_error(), "memory"), "%s", ep_last_error());
    int failed = tell(bootstrap, odd, status != EP_OK);
    CHECK(failed == (status != EP_OK), "status %d, but %d on rank %d", status, failed, odd);
    ep_group_destroy(made.group);
    ep_mesh_comm_destroy(made.comm);
    return tell(bootstrap, odd, left == 0);
}

static void create_without_memory(const EpBootstrap *bootstrap, const EpBootstrap *own, What what) {
    if (TESTS_SANITIZED) return;
    for (int odd = 0; odd < 2; odd++) {
        int n = 1;
        while (n < MOST_ALLOCATIONS && create(bootstrap, own, what, odd, n))
            n++;
        CHECK(n > 5 && n < MOST_ALLOCATIONS, "%d allocations", n);
    }
}

RankTest(bootstrap_memory, group_over_memory_of_the_bootstrap, RANKS,
         create_without_memory(bootstrap, bootstrap, GROUP));

ThreadTest(bootstrap_memory, group_over_posix_shared_memory, RANKS) {
    EpBootstrap own = *bootstrap;
    own.share = NULL, own.share_free = NULL;
    create_without_memory(bootstrap, &own, GROUP);
}

/* Messages of the local bootstrap need memory themselves. So the mesh's groups gather together. */
ThreadTest(bootstrap_memory, communicators_of_a_mesh, RANKS) {
    EpBootstrap own = without_messages(bootstrap);
    create_without_memory(bootstrap, &own, COMM);
}

ThreadTest(bootstrap_memory, weights, RANKS) {
    EpBootstrap own = without_messages(bootstrap);
    create_without_memory(bootstrap, &own, WEIGHT);
}

/* Groups of one rank each: none has a peer, and all of the mesh stop together. */
ThreadTest(bootstrap_memory, groups_of_a_mesh, RANKS) {
    EpBootstrap world = without_messages(bootstrap), own = EP_BOOTSTRAP_INIT;
    EpMesh mesh = mesh_of_all();
    EpAxes expert = {1, {1}};
    CHECK_OK(ep_bootstrap_mesh(&world, &mesh, &expert, &own));
    create_without_memory(bootstrap, &own, GROUP);
    ep_bootstrap_destroy(&own);
}

GroupTest(bootstrap_memory, windows, RANKS, "") {
    if (TESTS_SANITIZED) return;
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
}
