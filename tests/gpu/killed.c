/* SPDX-License-Identifier: Apache-2.0 */
/* A process is killed between two steps. The calls of its peers end with an error that names its
 * rank, on one node at the timeout, and the peers go on. mpirun runs with --enable-recovery to keep
 * them. */
#include <signal.h>

#include "ep/ep_mpi.h"
#include "tests/gpu/device_step.h"
#include "tests/harness/process.h"
#include "tests/harness/ranked.h"

static Case killed_case(int ranks, EpMode mode) {
    Case c = {.ranks = ranks, .experts = 2 * ranks, .max_tokens = 100, .spread = SPREAD_FULL};
    c.weighted = 1, c.capacity = 900, c.mode = mode;
    return case_complete(c);
}

/* The killed rank's peers get an error in dispatch, and every later call is refused. */
static void check_survivor(const DeviceStep *gpu, int nodes, const char *gone) {
    EpStatus expected = nodes > 1 ? EP_ERR_PEER : EP_ERR_TIMEOUT;
    EpStatus status = device_step_try(gpu, STEP_DISPATCH);
    CHECK(status == EP_OK || status == expected, "%d: %s", (int)status, ep_last_error());
    CHECK_CUDA(cudaStreamSynchronize(gpu->stream));
    CHECK_REFUSED(ep_group_status(gpu->step.group, NULL), expected, gone,
                  nodes > 1 ? "closed its connection" : "dispatch");
    CHECK_REFUSED(device_step_try(gpu, STEP_PREPARE), expected, gone);
    ep_group_destroy(gpu->step.group);
}

static void run_until_killed(const EpBootstrap *bootstrap, int nodes, EpMode mode) {
    DeviceStep gpu;
    char gone[32];
    Case c = killed_case(bootstrap->size, mode);
    if (nodes > 1) {
        setenv("LIBEP_TOPOLOGY", "2", 1);
        snprintf(c.nodes, sizeof(c.nodes), "01");
    }
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = 3;
    EpGroup *group = open_group_with(bootstrap, &config);
    device_step_new(&gpu, group, &c, bootstrap->rank);
    for (int step = 0; step < 3; step++) {
        device_step_draw(&gpu, &c);
        bootstrap->barrier(bootstrap->context, 60); /* no rank is late because of setup */
        device_step_issue(&gpu, device_step_all(&c));
        device_step_check(&gpu);
    }
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == bootstrap->size - 1) raise(SIGKILL);
    snprintf(gone, sizeof(gone), "rank %d", bootstrap->size - 1);
    check_survivor(&gpu, nodes, gone);
}

/* Does not return: MPI_Finalize does not succeed after a process has died. */
static void run_rank(int nodes, EpMode mode) {
    int provided;
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    if (CHECK_OK(ep_bootstrap_mpi(MPI_COMM_WORLD, &bootstrap))) {
        gpu_take(bootstrap.rank);
        run_until_killed(&bootstrap, nodes, mode);
    }
    printf("rank %d has survived: %s\n", bootstrap.rank,
           check_failure()[0] ? check_failure() : "well");
    fflush(stdout);
    _exit(0);
}

static void start(const char *test, const char *ranks) {
    const char *arguments[] = {"--enable-recovery",
                               "--mca",
                               "orte_abort_on_non_zero_status",
                               "0",
                               self_path(),
                               "-j1",
                               "--filter",
                               test,
                               NULL};
    ProcessResult result = mpirun_run(atoi(ranks), 60, arguments);
    for (int rank = 0; rank < atoi(ranks) - 1; rank++) {
        char line[64];
        snprintf(line, sizeof(line), "rank %d has survived: well", rank);
        cr_expect(strstr(result.out, line), "no '%s' in:\n%s", line, result.out);
    }
    process_result_free(&result);
}

static void killed_peer(const char *test, const char *ranks, int nodes, EpMode mode) {
    if (!gpu_serve(atoi(ranks))) cr_skip_test("needs %s GPUs, there are %d", ranks, gpu_count());
    if (ranked_is()) run_rank(nodes, mode);
    start(test, ranks);
}

Test(mpi_gpu_killed, of_two, .timeout = 90) {
    killed_peer("mpi_gpu_killed/of_two", "2", 1, EP_MODE_THROUGHPUT);
}
Test(mpi_gpu_killed, of_four, .timeout = 90) {
    killed_peer("mpi_gpu_killed/of_four", "4", 1, EP_MODE_THROUGHPUT);
}
Test(mpi_gpu_killed, of_two_nodes, .timeout = 90) {
    killed_peer("mpi_gpu_killed/of_two_nodes", "2", 2, EP_MODE_THROUGHPUT);
}

Test(mpi_gpu_killed, of_two_nodes_that_decode, .timeout = 90) {
    killed_peer("mpi_gpu_killed/of_two_nodes_that_decode", "2", 2, EP_MODE_LATENCY);
}
