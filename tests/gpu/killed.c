/* SPDX-License-Identifier: Apache-2.0 */
/* A process is killed between two steps. The calls of its peers end with an error that names its
 * rank, on one node at the timeout, and the peers go on. Or it is killed while its kernels run,
 * another process takes its place, and the others replay the graphs that they have captured.
 * mpirun runs with --enable-recovery to keep them. */
#include <signal.h>

#include "ep/ep_mpi.h"
#include "tests/gpu/device_step.h"
#include "tests/harness/meeting.h"
#include "tests/harness/process.h"
#include "tests/harness/random.h"
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

/* ---- replaced ---- */

enum { MOST_ROUNDS = 2, FLIGHT = 200, STEPS = 5, MASKED_STEPS = 3 };

/* What the processes share. Some wait for others here, since MPI does not serve the living. */
typedef struct Board {
    Meeting created, joined[MOST_ROUNDS], settled[MOST_ROUNDS];
    int is_masked[MOST_ROUNDS]; /* whether the living go on without the victims */
} Board;

/* How many ranks are killed in each round, and then replaced together. */
typedef struct Kills {
    int rounds, each;
} Kills;

/* A process: those from `ranks` on wait until the first ones, from the highest place on, are
 * killed, and take their places. */
typedef struct Life {
    Case c;
    Board *board;
    Kills kills;
    int place;
    int joins, dies; /* 1 + the round; 0: the process is there from the beginning, does not die */
    Attendee attendee;
    EpBootstrap all; /* of the last meeting */
    EpGroup *group;
    DeviceStep gpu;
    cudaGraphExec_t exec;
} Life;

static void say(int number) {
    printf("rank %d has survived: %s\n", number, check_failure()[0] ? check_failure() : "well");
    fflush(stdout);
    _exit(0);
}

static void need(const Life *life, EpStatus status) {
    if (!CHECK_OK(status)) say(life->place);
}

static void meet_in(Life *life, Meeting *meeting) {
    life->attendee = (Attendee){.rank = life->place, .patience = 60};
    __atomic_store_n(&meeting->ranks, (1u << life->c.ranks) - 1, __ATOMIC_RELEASE);
    life->all = meeting_bootstrap(&life->attendee, meeting);
}

/* No rank is late because others have to prepare something. */
static void meet(const Life *life) {
    need(life, life->all.barrier(life->all.context, 60));
}

static void capture(Life *life) {
    device_step_new(&life->gpu, life->group, &life->c, life->place);
    device_step_draw(&life->gpu, &life->c);
    life->exec = device_step_capture(&life->gpu, device_step_all(&life->c));
}

static void replay_steps(Life *life, int steps) {
    for (int step = 0; step < steps; step++) {
        life->c.seed++;
        device_step_draw(&life->gpu, &life->c);
        device_step_launch(&life->gpu, life->exec, device_step_all(&life->c));
        device_step_check(&life->gpu);
    }
}

/* Replay until a replay finds that a rank is missing: at its deadline, or late. */
static void replay_until_late(Life *life) {
    EpStatus status = EP_OK;
    unsigned ops = device_step_all(&life->c);
    for (int i = 0; i < 2 * FLIGHT && status == EP_OK; i++) {
        device_step_launch(&life->gpu, life->exec, ops);
        CHECK_CUDA(cudaStreamSynchronize(life->gpu.stream));
        status = ep_group_status(life->group, NULL);
    }
    CHECK(status == (life->c.late_us ? EP_ERR_MASKED : EP_ERR_TIMEOUT), "%d: %s", (int)status,
          ep_last_error());
}

static void mask_to(const Life *life, uint32_t alive) {
    EpStatus status = EP_ERR_TIMEOUT;
    for (int i = 0; i < 20 && status == EP_ERR_TIMEOUT; i++)
        status = ep_group_mask(life->group, &alive, NULL);
    need(life, status);
}

static void die(Life *life) {
    for (int i = 0; i < FLIGHT; i++)
        device_step_launch(&life->gpu, life->exec, device_step_all(&life->c));
    Random random =
        random_stream(environment_number("LIBEP_TEST_SEED", 1), (uint64_t)life->place, 3);
    usleep((useconds_t)random_below(&random, 3000));
    raise(SIGKILL);
}

/* Go on without those that are killed in a round. */
static void go_on(Life *life, int round) {
    uint32_t alive = (1u << life->c.ranks) - 1;
    replay_until_late(life);
    memset(life->c.masked, '0', (size_t)life->c.ranks);
    for (int i = 0; i < life->kills.each; i++) {
        int place = life->c.ranks - 1 - round * life->kills.each - i;
        alive &= ~(1u << place), life->c.masked[place] = '1';
    }
    mask_to(life, alive);
    replay_steps(life, MASKED_STEPS);
    memset(life->c.masked, 0, sizeof(life->c.masked));
    __atomic_store_n(&life->board->is_masked[round], 1, __ATOMIC_RELEASE);
}

/* Some are killed, and other processes take their places. */
static void replace(Life *life, int round, const EpGroupConfig *config) {
    int joins = !life->group;
    if (!joins) meet(life);
    if (life->dies == round + 1) die(life);
    if (!joins) go_on(life, round);
    meet_in(life, &life->board->joined[round]);
    need(life, joins ? ep_group_join(&life->all, config, &life->group)
                     : ep_group_admit(life->group, &life->all));
    mask_to(life, (1u << life->c.ranks) - 1);
    if (joins) capture(life);
    meet_in(life, &life->board->settled[round]);
    meet(life);
    replay_steps(life, STEPS);
}

/* Wait until the others want this process. They have made so many steps by then. */
static void wait_for_turn(Life *life) {
    int round = life->joins - 1;
    for (int i = 0; i < 6000; i++) {
        if (__atomic_load_n(&life->board->is_masked[round], __ATOMIC_ACQUIRE)) break;
        usleep(10000);
    }
    life->c.seed += (unsigned)(life->joins * (STEPS + MASKED_STEPS));
}

static void live(Life *life) {
    EpGroupConfig config = case_group_config(&life->c);
    config.max_ranks = life->c.ranks, config.device = config.place = life->place;
    config.timeout_seconds = 5;
    if (life->joins) wait_for_turn(life);
    gpu_take(life->place);
    if (!life->joins) {
        meet_in(life, &life->board->created);
        need(life, ep_group_create(&life->all, &config, &life->group));
        capture(life);
        meet(life);
        replay_steps(life, STEPS);
    }
    for (int round = life->joins ? life->joins - 1 : 0; round < life->kills.rounds; round++)
        replace(life, round, &config);
    CHECK_OK(ep_group_status(life->group, NULL));
    ep_group_destroy(life->group);
}

static Board *share_board(int rank) {
    MPI_Win window;
    MPI_Aint bytes = rank ? 0 : (MPI_Aint)sizeof(Board);
    Board *board = NULL;
    int unit;
    MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &board, &window);
    MPI_Win_shared_query(window, 0, &bytes, &unit, &board);
    if (!rank) memset(board, 0, sizeof(*board));
    MPI_Barrier(MPI_COMM_WORLD);
    return board;
}

static void be_replaced(const EpBootstrap *bootstrap, Kills kills, const char *words) {
    int all = kills.rounds * kills.each, ranks = bootstrap->size - all, number = bootstrap->rank;
    Life life = {.kills = kills, .board = share_board(number)};
    life.c =
        case_complete(case_of("ranks=%d experts=%d max_tokens=100 spread=full masks=1 counted=1 "
                              "weighted=1 capacity=900 rows_per_expert=400 %s",
                              ranks, 2 * ranks + 1, words));
    life.joins = number < ranks ? 0 : (number - ranks) / kills.each + 1;
    life.place = number < ranks ? number : 2 * ranks - 1 - number;
    life.dies = number < ranks && number >= ranks - all ? (ranks - 1 - number) / kills.each + 1 : 0;
    live(&life);
}

/* ---- processes ---- */

/* Does not return: MPI_Finalize does not succeed after a process has died. */
static void run_rank(int nodes, EpMode mode, Kills kills, const char *words) {
    int provided;
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    int is_open = CHECK_OK(ep_bootstrap_mpi(MPI_COMM_WORLD, &bootstrap));
    if (is_open && words) be_replaced(&bootstrap, kills, words);
    if (is_open && !words) {
        gpu_take(bootstrap.rank);
        run_until_killed(&bootstrap, nodes, mode);
    }
    say(bootstrap.rank);
}

/* The last ranks are killed; of `more` processes each takes the place of one. */
static void start(const char *test, int ranks, int kills, int more) {
    const char *arguments[] = {"--enable-recovery",
                               "--mca",
                               "orte_abort_on_non_zero_status",
                               "0",
                               self_path(),
                               "-j1",
                               "--filter",
                               test,
                               NULL};
    ProcessResult result = mpirun_run(ranks + more, 60, arguments);
    for (int rank = 0; rank < ranks + more; rank++) {
        char line[64];
        if (rank >= ranks - kills && rank < ranks) continue;
        snprintf(line, sizeof(line), "rank %d has survived: well", rank);
        cr_expect(strstr(result.out, line), "no '%s' in:\n%s", line, result.out);
    }
    process_result_free(&result);
}

static void killed_peer(const char *test, int ranks, int nodes, EpMode mode) {
    if (!gpu_serve(ranks)) cr_skip_test("needs %d GPUs, there are %d", ranks, gpu_count());
    if (ranked_is()) run_rank(nodes, mode, (Kills){1, 1}, NULL);
    start(test, ranks, 1, 0);
}

static void replaced_peers(const char *test, int ranks, Kills kills, const char *words) {
    int all = kills.rounds * kills.each;
    if (ranks > gpu_count()) cr_skip_test("needs %d GPUs, there are %d", ranks, gpu_count());
    if (ranked_is()) run_rank(1, EP_MODE_AUTO, kills, words);
    start(test, ranks, all, all);
}

#define KilledTest(name, ...)                              \
    Test(mpi_gpu_killed, name, .timeout = 90) {            \
        killed_peer("mpi_gpu_killed/" #name, __VA_ARGS__); \
    }                                                      \
    struct mpi_gpu_killed_##name##_done
#define ReplacedTest(name, ranks, rounds, each, words)                                \
    Test(mpi_gpu_killed, name, .timeout = 90) {                                       \
        replaced_peers("mpi_gpu_killed/" #name, ranks, (Kills){rounds, each}, words); \
    }                                                                                 \
    struct mpi_gpu_killed_##name##_done

KilledTest(of_two, 2, 1, EP_MODE_THROUGHPUT);
KilledTest(of_four, 4, 1, EP_MODE_THROUGHPUT);
KilledTest(of_two_nodes, 2, 2, EP_MODE_THROUGHPUT);
KilledTest(of_two_nodes_that_decode, 2, 2, EP_MODE_LATENCY);
ReplacedTest(replaced_of_two, 2, 1, 1, "mode=throughput");
ReplacedTest(replaced_of_four, 4, 2, 1, "mode=throughput");
ReplacedTest(replaced_at_once_of_four, 4, 1, 2, "mode=throughput layout=flat");
ReplacedTest(replaced_of_two_that_decode, 2, 1, 1, "mode=latency layout=flat");
ReplacedTest(replaced_of_four_that_decode, 4, 2, 1, "mode=latency layout=batched late_us=2000000");
ReplacedTest(replaced_at_once_of_four_that_decode, 4, 1, 2, "mode=latency layout=flat");
