/* SPDX-License-Identifier: Apache-2.0 */
/* A process that is killed in the middle of training: its peers' calls end at the deadline, name
 * it, and the processes live on. mpirun is told to let them. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep/ep_mpi.h"
#include "tests/cases/run.h"
#include "tests/gpu/arena.h"
#include "tests/gpu/rig.h"
#include "tests/harness/process.h"
#include "tests/harness/ranked.h"

static Case killed_case(int ranks) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 2 * ranks,
                                .max_tokens = 100,
                                .spread = SPREAD_FULL,
                                .weighted = 1,
                                .capacity = 900});
}

static void outlive(const Rig *rig, const char *gone) {
    EpStatus status = rig_try(rig, RIG_DISPATCH);
    CHECK(status == EP_OK || status == EP_ERR_TIMEOUT, "%d: %s", (int)status, ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(rig->stream));
    CHECK_REFUSED(ep_group_status(rig->step.group, NULL), EP_ERR_TIMEOUT, gone, "dispatch");
    CHECK_REFUSED(rig_try(rig, RIG_PREPARE), EP_ERR_TIMEOUT, gone);
    ep_group_destroy(rig->step.group);
}

static void play(const EpBootstrap *bootstrap) {
    Rig rig;
    char gone[32];
    Case c = killed_case(bootstrap->size);
    EpGroupConfig config = case_group_config(&c);
    EpGroup *group = NULL;
    config.timeout_seconds = 3;
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    rig_open(&rig, group, rig_handle(group, &c), &c, bootstrap->rank, new_stream(), NULL);
    rig_load(&rig, world_new(&c));
    bootstrap->barrier(bootstrap->context, 60); /* nobody is late because of what came before */
    rig_issue(&rig, RIG_ALL);
    rig_check(&rig);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == bootstrap->size - 1) raise(SIGKILL);
    snprintf(gone, sizeof(gone), "rank %d", bootstrap->size - 1);
    outlive(&rig, gone);
}

/* Never comes back: MPI cannot be left in peace where a process has died. */
static void play_rank(void) {
    int provided;
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    setenv("EP_LOG_FILE", "/dev/null", 1);
    if (CHECK_OK(ep_bootstrap_mpi(MPI_COMM_WORLD, &bootstrap))) {
        gpu_take(bootstrap.rank);
        play(&bootstrap);
    }
    printf("rank %d has survived: %s\n", bootstrap.rank,
           check_failure()[0] ? check_failure() : "well");
    fflush(stdout);
    _exit(0);
}

static void start(const char *test, const char *ranks) {
    const char *argv[] = {"mpirun",
                          "--oversubscribe",
                          "--bind-to",
                          "none",
                          "--enable-recovery",
                          "--mca",
                          "orte_abort_on_non_zero_status",
                          "0",
                          "--timeout",
                          "60",
                          "-n",
                          ranks,
                          self_path(),
                          "-j1",
                          "--filter",
                          test,
                          NULL};
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    ProcessResult result = process_run(argv, 1);
    for (int rank = 0; rank < atoi(ranks) - 1; rank++) {
        char line[64];
        snprintf(line, sizeof(line), "rank %d has survived: well", rank);
        cr_expect(strstr(result.out, line), "no '%s' in:\n%s", line, result.out);
    }
    process_result_free(&result);
}

static void killed_peer(const char *test, const char *ranks) {
    if (!gpu_serve(atoi(ranks))) cr_skip_test("needs %s GPUs, there are %d", ranks, gpu_count());
    if (ranked_is()) play_rank();
    start(test, ranks);
}

Test(mpi_gpu_killed, of_two, .timeout = 90) {
    killed_peer("mpi_gpu_killed/of_two", "2");
}
Test(mpi_gpu_killed, of_four, .timeout = 90) {
    killed_peer("mpi_gpu_killed/of_four", "4");
}
