/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/ranked.h"

#include "ep/ep_mpi.h"
#include "tests/harness/bodies.h"
#include "tests/harness/process.h"

static void start_mpirun(const char *test, int ranks, int seconds) {
    const char *arguments[] = {"--tag-output", self_path(), "-j1", "-S", "--filter", test, NULL};
    ProcessResult result = mpirun_run(ranks, seconds, arguments);
    cr_assert(result.exit_status == 0, "mpirun -n %d exits with %d:\n%s", ranks, result.exit_status,
              result.out);
    bool left_out = strstr(result.out, "[SKIP]") != NULL;
    process_result_free(&result);
    if (left_out) cr_skip_test("left out by its ranks");
}

static EpBootstrap world;
static bool entered;

bool ranked_is(void) {
    return getenv("OMPI_COMM_WORLD_SIZE") != NULL;
}

/* No thread may look into the environment while another one changes it, so all look before the
 * barrier. */
void set_on_ranks(const EpBootstrap *bootstrap, const char *name, const char *value) {
    bool sets = bootstrap->rank == 0 || ranked_is();
    bootstrap->barrier(bootstrap->context, 60);
    if (sets) setenv(name, value, 1);
    bootstrap->barrier(bootstrap->context, 60);
}

/* NCCL connects ranks that share a GPU if it takes each for a host of its own. */
static void part_hosts(void) {
#if TESTS_ON_GPU
    if (gpu_shares(atoi(getenv("OMPI_COMM_WORLD_SIZE"))))
        setenv("NCCL_HOSTID", getenv("OMPI_COMM_WORLD_RANK"), 1);
#endif
}

static const EpBootstrap *enter(void) {
    int provided;
    if (entered) return &world;
    part_hosts();
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    world = (EpBootstrap)EP_BOOTSTRAP_INIT;
    EpStatus status = ep_bootstrap_mpi(MPI_COMM_WORLD, &world);
    cr_assert(status == EP_OK, "%s", ep_last_error());
    entered = true;
    GPU_TAKE(world.rank);
    return &world;
}

void ranked_leave(void) {
    if (!entered) return;
    ep_bootstrap_destroy(&world);
    MPI_Finalize();
    entered = false;
}

/* Start mpirun, or run the body under it. A failed rank asserts before MPI_Finalize, where it would
 * wait for ranks that wait for it. */
void ranked_run(const char *test, int ranks, int seconds, RankBody body) {
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    GPU_NEEDS(ranks);
    if (!ranked_is()) {
        start_mpirun(test, ranks, seconds);
        return;
    }
    const EpBootstrap *bootstrap = enter();
    cr_assert(bootstrap->size == ranks, "%d ranks instead of %d", bootstrap->size, ranks);
    run_body(body, bootstrap, NULL);
    check_assert();
    ranked_leave();
}

#if TESTS_ON_GPU

#define SHARED_SECONDS 110 /* for tests with a timeout of 120 s */

static void start_once(const char *test, int ranks) {
    static char started_test[256];
    static uint64_t started; /* bit r: started with r ranks */
    if (strcmp(started_test, test) != 0) started = 0;
    snprintf(started_test, sizeof(started_test), "%s", test);
    if (!(started >> ranks & 1)) start_mpirun(test, ranks, SHARED_SECONDS);
    started |= 1ull << ranks;
}

void ranked_instead(int ranks, RankBody body, void *arg) {
    if (!ranked_is()) {
        start_once(body_name(), ranks);
        return;
    }
    const EpBootstrap *bootstrap = enter();
    if (bootstrap->size == ranks) run_body(body, bootstrap, arg);
    check_skip();
    check_assert();
}

#endif
