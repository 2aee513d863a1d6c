/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/ranked.h"

#include <stdio.h>
#include <stdlib.h>

#include "ep/ep_mpi.h"
#include "tests/harness/process.h"

static void start_mpirun(const char *test, int ranks, int seconds) {
    char count[16], limit[16];
    snprintf(count, sizeof(count), "%d", ranks);
    snprintf(limit, sizeof(limit), "%d", seconds);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    const char *argv[] = {
        "mpirun", "--oversubscribe", "--bind-to", "none", "--tag-output", "--timeout", limit, "-n",
        count,    self_path(),       "-j1",       "-S",   "--filter",     test,        NULL};
    ProcessResult result = process_run(argv, 1);
    cr_assert(result.exit_status == 0, "mpirun -n %d exits with %d:\n%s", ranks, result.exit_status,
              result.out);
    process_result_free(&result);
}

static void play_rank(int ranks, RankedBody body) {
    int provided, size;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    cr_assert(size == ranks, "%d ranks instead of %d", size, ranks);
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    EpStatus status = ep_bootstrap_mpi(MPI_COMM_WORLD, &bootstrap);
    cr_assert(status == EP_OK, "%s", ep_last_error());
    GPU_TAKE(bootstrap.rank);
    body(&bootstrap);
    /* A rank that failed must not wait in MPI_Finalize for others that wait for it. */
    check_assert();
    ep_bootstrap_destroy(&bootstrap);
    MPI_Finalize();
}

void ranked_run(const char *test, int ranks, int seconds, RankedBody body) {
    if (TESTS_SANITIZED) cr_skip_test("MPI does not run under a sanitizer");
    GPU_NEEDS(ranks);
    if (getenv("OMPI_COMM_WORLD_SIZE"))
        play_rank(ranks, body);
    else
        start_mpirun(test, ranks, seconds);
}
