/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are processes, and one of them is killed or stopped: before and after each collective call
 * of ep_group_create and ep_group_destroy, and at random moments in each phase of a group's life,
 * on one node and on several. The others leave no name in /dev/shm, and name the rank that is lost,
 * within the deadline. LIBEP_TEST_SEED=N draws other moments; LIBEP_TEST_CASES=M loses M ranks. */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#include "tests/harness/meeting.h"
#include "tests/harness/names.h"
#include "tests/harness/random.h"

enum { RANKS = 3, MOST_COLLECTIVES = 40 };

/* Forks of a process that has asked for GPUs have none. Those of emulated GPUs share the memory of
 * groups that processes may join, and nothing else. */
#define APART "ranks are forks, which do not share GPUs"
#ifdef TESTS_EMULATED
#include <cuda_runtime_api.h>
#define IS_FORKED 1
#define TAKE_GPU(rank) \
    (GPU_TAKE(0), (void)cudaSetDevice(rank)) /* else it follows from the process */
#else
#define IS_FORKED !TESTS_ON_GPU
#define TAKE_GPU(rank) GPU_TAKE(rank)
#endif

/* ---- memory that processes share ---- */

/* The phases of a group's life: the five operations lie between. */
enum { CREATE, OPERATIONS, DESTROY = OPERATIONS + NUM_CALLS, NUM_PHASES };

/* What a rank tells the test. */
typedef struct Report {
    double seconds[NUM_PHASES]; /* that each has taken, the last time */
    int calls;                  /* operations entered */
    EpStatus status;            /* of the call that failed, else EP_OK */
    double longest;             /* seconds of a call */
    char sentence[512];
} Report;

/* An admission. */
typedef struct Admission {
    Meeting meeting;
    int result[RANKS]; /* a MeetingResult */
} Admission;

typedef enum MeetingResult { PENDING, SUCCEEDED, FAILED } MeetingResult;

enum { MOST_MEETINGS = 64 };

typedef struct Board {
    Report report[RANKS];
    /* of groups with masks */
    uint32_t alive;          /* as the test sees it */
    int32_t cuts[RANKS];     /* how often a rank has cut others */
    int32_t cuts_met[RANKS]; /* and how often when it went to its last meeting */
    uint32_t awaited;        /* places of ranks that were killed, until others have joined */
    int is_done[RANKS];      /* whether a rank has nothing left but to meet the others */
    int recovered[RANKS];
    int admissions;                     /* the last meeting, of ranks that admit others; 0: none */
    Admission admission[MOST_MEETINGS]; /* the first meeting is of ep_group_create */
} Board;

typedef struct Rank {
    Board *board;
    Attendee attendee;
    int rank;
    int attended; /* the last admission */
    int joins;    /* it is a newcomer; the group's ranks may be replaced */
    int is_replaced;
    int32_t no_cuts[RANKS]; /* cuts of each rank before the last meeting */
    double timeout;
    int phase;         /* in which it is lost; -1: none */
    int step;          /* and the step, if the phase is an operation */
    int signal;        /* SIGKILL or SIGSTOP; 0: it will not be lost, or no longer */
    double delay;      /* seconds after the phase's begin */
    const char *nodes; /* LIBEP_TOPOLOGY */
} Rank;

/* ---- processes ---- */

static EpBootstrap board_bootstrap(Rank *self, int meeting) {
    self->attendee.rank = self->rank;
    return meeting_bootstrap(&self->attendee, &self->board->admission[meeting].meeting);
}

/* A rank ends with its test, which may reach its time limit. */
static pid_t fork_rank(void) {
    pid_t child = fork();
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return child;
}

static Board *board_open(void) {
    Board *board =
        mmap(NULL, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    board->admission[0].meeting.ranks = (1 << RANKS) - 1;
    return board;
}

/* ---- random moments ---- */

enum { STEPS = 8, CALLS = STEPS * NUM_CALLS };
/* On a busy machine a rank that waits for the victim may seem late itself. */
#define LIFE_DEADLINE 1.5
#define LATE 3.0 /* more than a deadline: other programs of the machine need time, too */

static const char *const topologies[] = {"", "0,0,1", "0,1,0", "0,1,2"};

static void *lose(void *context) {
    Rank *self = context;
    usleep((useconds_t)(1e6 * self->delay));
    kill(getpid(), self->signal);
    __atomic_store_n(&self->signal, 0, __ATOMIC_RELEASE); /* it was stopped, and goes on */
    return NULL;
}

/* Returns when the phase has begun. */
static double begin_phase(Rank *self, int phase, int step) {
    pthread_t thread;
    if (self->phase == phase && self->step == step) pthread_create(&thread, NULL, lose, self);
    return seconds_now();
}

/* Note how long a phase took, and whether it failed. */
static EpStatus end_phase(Rank *self, int phase, double begin, EpStatus status) {
    Report *report = &self->board->report[self->rank];
    double seconds = report->seconds[phase] = seconds_now() - begin;
    if (seconds > report->longest) report->longest = seconds;
    if (status == EP_OK) return EP_OK;
    report->status = status;
    snprintf(report->sentence, sizeof(report->sentence), "%s", ep_last_error());
    return status;
}

static void run_steps(Rank *self, const Step *step) {
    Report *report = &self->board->report[self->rank];
    EpStatus status = EP_OK;
    while (status == EP_OK && report->calls < CALLS) {
        int call = report->calls % NUM_CALLS;
        double begin = begin_phase(self, OPERATIONS + call, report->calls++ / NUM_CALLS);
        status = end_phase(self, OPERATIONS + call, begin, call_op(step, call_number(call)));
    }
}

/* Live a group's life. A rank that shall be lost waits for that at its end. */
static void live(Rank *self) {
    Case c = {.ranks = RANKS, .spread = SPREAD_FULL, .experts = 6, .top_k = 3};
    World *world = world_new(&c);
    EpBootstrap b = board_bootstrap(self, 0);
    EpGroupConfig config = case_group_config(&world->c);
    EpGroup *group = NULL;
    config.timeout_seconds = self->timeout;
    setenv("LIBEP_TOPOLOGY", self->nodes, 1);
    double begin = begin_phase(self, CREATE, 0);
    if (end_phase(self, CREATE, begin, ep_group_create(&b, &config, &group)) == EP_OK) {
        Step step = {group, open_handle(group, &world->c), world, self->rank, NULL};
        run_steps(self, &step);
    }
    begin = begin_phase(self, DESTROY, 0);
    ep_group_destroy(group);
    (void)end_phase(self, DESTROY, begin, EP_OK);
    while (self->phase >= 0)
        pause();
    _exit(0);
}

/* One group's life, in which one rank is lost, or none. */
typedef struct Life {
    Board *board;
    int victim; /* -1: none */
    Rank lost;  /* of the victim: how it is lost */
    pid_t children[RANKS];
} Life;

static void life_begin(Life *life, double timeout) {
    life->board = board_open();
    for (int r = 0; r < RANKS; r++) {
        Rank self = {.phase = -1};
        if (r == life->victim) self = life->lost;
        self.board = life->board, self.rank = r, self.timeout = timeout;
        self.nodes = life->lost.nodes;
        life->children[r] = fork_rank();
        if (life->children[r] == 0) live(&self);
    }
}

/* A survivor may complete everything only if the victim had entered its last operation. */
static void check_survivor(const Life *life, int rank) {
    char victim[16];
    const Report *report = &life->board->report[rank];
    snprintf(victim, sizeof(victim), "rank %d", life->victim);
    CHECK(report->longest < LIFE_DEADLINE + LATE, "a call of rank %d took %.2f s", rank,
          report->longest);
    if (report->status != EP_OK)
        CHECK(strstr(report->sentence, victim), "%s is not named: %s", victim, report->sentence);
    else
        CHECK(life->board->report[life->victim].calls == CALLS, "rank %d noticed nothing", rank);
}

/* Wait for a life's processes, and check what they have left. Returns whether a rank was lost. */
static int life_end(Life *life) {
    int status = 0;
    for (int r = 0; r < RANKS; r++) {
        if (r == life->victim) continue;
        waitpid(life->children[r], &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d ended with status %#x", r,
              (unsigned)status);
        if (life->victim >= 0) check_survivor(life, r);
    }
    if (life->victim < 0) return 0;
    if (life->lost.signal == SIGSTOP) kill(life->children[life->victim], SIGKILL);
    waitpid(life->children[life->victim], &status, 0);
    int is_lost = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    CHECK(is_lost || life->lost.phase < 0, "status %#x", (unsigned)status);
    munmap(life->board, sizeof(Board));
    return is_lost;
}

/* Draw a victim, its nodes and a moment in a phase. Some moments lie in the next one. */
static Life draw_life(uint64_t seed, uint64_t number, int signal, const Report *usual) {
    Random random = random_stream(seed, number, 0);
    Life life = {.victim = (int)random_below(&random, RANKS)};
    Rank *lost = &life.lost;
    lost->signal = signal, lost->phase = (int)(number % NUM_PHASES);
    int is_operation = lost->phase >= OPERATIONS && lost->phase < DESTROY;
    lost->step = is_operation ? (int)random_below(&random, STEPS) : 0;
    lost->nodes = topologies[random_below(&random, sizeof(topologies) / sizeof(*topologies))];
    lost->delay = 1.2 * usual->seconds[lost->phase] * (double)random_below(&random, 1000000) * 1e-6;
    return life;
}

static Report measure_usual_life(void) {
    Life usual = {.victim = -1, .lost = {.nodes = "0,1,2"}};
    life_begin(&usual, 60);
    life_end(&usual);
    Report report = usual.board->report[0];
    CHECK(report.status == EP_OK, "%s", report.sentence);
    munmap(usual.board, sizeof(Board));
    return report;
}

static void check_no_names(time_t since) {
    int left = names_that_stay(since);
    CHECK(left == 0, "%d names in /dev/shm", left);
}

/* Lives that lose a rank before, or after, each collective of ep_group_create and _destroy: some at
 * the same time, since survivors mostly wait. */
static void lose_at_each_collective(int before) {
    enum { LIVES = 6 };
    HOST_ONLY(APART);
    time_t begin = time(NULL);
    int n = 1, is_lost = 1;
    be_quiet();
    while (n < MOST_COLLECTIVES && is_lost) {
        Life lives[LIVES];
        for (int i = 0; i < LIVES; i++) {
            lives[i] = (Life){.victim = 1, .lost = {.phase = -1, .nodes = ""}};
            *(before ? &lives[i].lost.attendee.kill_before : &lives[i].lost.attendee.kill_after) =
                n + i;
            life_begin(&lives[i], LIFE_DEADLINE);
        }
        for (int i = 0; i < LIVES; i++, n++) {
            check_note("killed %s collective %d", before ? "before" : "after", n);
            is_lost = life_end(&lives[i]);
        }
        check_no_names(begin);
    }
    CHECK(n > 6 && n < MOST_COLLECTIVES, "%d collectives", n);
}

SoloCall(bootstrap_killed, before_each_collective, lose_at_each_collective(1));
SoloCall(bootstrap_killed, after_each_collective, lose_at_each_collective(0));

/* Lives that lose a rank in each phase, at the same time. */
static void lose_in_each_phase(uint64_t seed, uint64_t first, int signal, const Report *usual) {
    Life lives[NUM_PHASES];
    for (int i = 0; i < NUM_PHASES; i++) {
        lives[i] = draw_life(seed, first + (uint64_t)i, signal, usual);
        life_begin(&lives[i], LIFE_DEADLINE);
    }
    for (int i = 0; i < NUM_PHASES; i++) {
        const Rank *lost = &lives[i].lost;
        check_note("seed %d, number %d: signal %d for rank %d in phase %d, step %d, after %.0f us, "
                   "nodes %s",
                   (int)seed, (int)first + i, signal, lives[i].victim, lost->phase, lost->step,
                   1e6 * lost->delay, lost->nodes);
        life_end(&lives[i]);
    }
}

static void lose_at_random_moments(int signal) {
    HOST_ONLY(APART);
    uint64_t seed = environment_number("LIBEP_TEST_SEED", 1);
    uint64_t losses = environment_number("LIBEP_TEST_CASES", 2 * NUM_PHASES);
    time_t begin = time(NULL);
    be_quiet();
    setenv("LIBEP_INTERFACE", "lo", 1);
    Report usual = measure_usual_life();
    for (uint64_t first = 0; first < losses && !check_failure()[0]; first += NUM_PHASES) {
        lose_in_each_phase(seed, first, signal, &usual);
        check_no_names(begin);
    }
}

SoloCall(bootstrap_killed, at_random_moments, lose_at_random_moments(SIGKILL));
SoloCall(bootstrap_killed, stopped_at_random_moments, lose_at_random_moments(SIGSTOP));

/* ---- groups with masks: the others go on ---- */

enum { RECOVERY = NUM_PHASES, ALL_RANKS = (1 << RANKS) - 1, MOST_SECONDS = 60 };

static uint32_t alive_on(const Board *board) {
    return __atomic_load_n(&board->alive, __ATOMIC_ACQUIRE);
}

/* Arm what shall lose this rank, if this is the moment. */
static void pass(Rank *self, int phase, int step) {
    (void)begin_phase(self, phase, step);
    if (self->phase == phase && self->step == step) self->phase = -1;
}

static void give_up_life(Rank *self, const char *why) {
    snprintf(self->board->report[self->rank].sentence, sizeof(self->board->report[0].sentence),
             "%s", why);
    _exit(1);
}

static EpGroupConfig masked_config(const Rank *self, const Case *c) {
    EpGroupConfig config = case_group_config(c);
    config.timeout_seconds = self->timeout;
    if (self->is_replaced) config.max_ranks = RANKS, config.place = self->rank;
    return config;
}

/* Take part in an admission, as one who joins or admits. Others may be killed meanwhile. */
static void attend(Rank *self, const Case *c, EpGroup **group) {
    Admission *admission = &self->board->admission[self->attended];
    EpBootstrap b = board_bootstrap(self, self->attended);
    EpGroupConfig config = masked_config(self, c);
    int joins = !*group;
    self->attendee.patience = 0;
    EpStatus status = joins ? ep_group_join(&b, &config, group) : ep_group_admit(*group, &b);
    /* A lost rank is missing, or was refused, or the ranks have to mask it first. */
    int is_usual = status == EP_OK || status == EP_ERR_TIMEOUT || status == EP_ERR_PEER ||
                   status == EP_ERR_ORDER;
    if (!is_usual) give_up_life(self, ep_last_error());
    __atomic_store_n(&admission->result[self->rank], status == EP_OK ? SUCCEEDED : FAILED,
                     __ATOMIC_RELEASE);
    if (!joins) return;
    /* The test says whether all have succeeded. */
    while (status == EP_OK && !(alive_on(self->board) >> self->rank & 1) &&
           __atomic_load_n(&self->board->admissions, __ATOMIC_ACQUIRE) == self->attended)
        usleep(1000);
    if (status != EP_OK || alive_on(self->board) >> self->rank & 1) return;
    ep_group_destroy(*group);
    *group = NULL;
}

/* Returns whether there is an admission in which this rank has not been. */
static int is_called(Rank *self) {
    int last = __atomic_load_n(&self->board->admissions, __ATOMIC_ACQUIRE);
    if (last == self->attended) return 0;
    self->attended = last;
    return self->board->admission[last].meeting.ranks >> self->rank & 1;
}

/* All ranks leave a meeting with the same counts of cuts. A rank does not write its count again
 * before the others have read it: they must have begun the next step for it to end that step. */
static EpStatus meet_masked(Rank *self, EpGroup *group, uint32_t alive) {
    Board *board = self->board;
    __atomic_store_n(&board->cuts_met[self->rank], board->cuts[self->rank], __ATOMIC_RELEASE);
    EpStatus status = ep_group_mask(group, &alive, NULL);
    for (int r = 0; r < RANKS; r++)
        self->no_cuts[r] = __atomic_load_n(&board->cuts_met[r], __ATOMIC_ACQUIRE);
    return status;
}

/* Meet the ranks that the test knows to be alive, as often as it takes. Returns them. */
static uint32_t recover(Rank *self, const Case *c, EpGroup **group) {
    double end = seconds_now() + MOST_SECONDS;
    for (;;) {
        uint32_t alive = alive_on(self->board);
        int takes_part = *group && alive >> self->rank & 1;
        EpStatus status = EP_ERR_TIMEOUT;
        pass(self, RECOVERY, 0);
        if (takes_part)
            status = meet_masked(self, *group, alive);
        else
            usleep(1000);
        /* One that missed an admission does not know the newcomer's place. */
        int is_usual = status == EP_OK || status == EP_ERR_TIMEOUT || status == EP_ERR_ORDER;
        if (!is_usual) give_up_life(self, ep_last_error());
        if ((status == EP_OK || !takes_part) && is_called(self))
            attend(self, c, group);
        else if (status == EP_OK)
            return alive;
        if (seconds_now() > end) give_up_life(self, ep_last_error());
    }
}

static int are_done(const Board *board, uint32_t alive) {
    if (__atomic_load_n(&board->awaited, __ATOMIC_ACQUIRE)) return 0;
    for (int r = 0; r < RANKS; r++)
        if (alive >> r & 1 && !__atomic_load_n(&board->is_done[r], __ATOMIC_ACQUIRE)) return 0;
    return 1;
}

/* One step of the ranks that are alive. Returns whether it was complete. */
static int run_masked_step(const Rank *self, EpGroup *group, Case c, uint32_t alive) {
    EpStatus ended = EP_OK;
    for (int r = 0; r < RANKS; r++)
        c.masked[r] = alive >> r & 1 ? '0' : '1';
    World *world = world_new(&c);
    EpHandle *handle = open_handle(group, &world->c);
    Step step = {group, handle, world, self->rank, NULL, &ended, self->board->cuts, self->no_cuts};
    check_note("alive %x, case: %s", alive, case_describe(&world->c));
    step_all(&step);
    ep_handle_destroy(handle);
    world_free(world);
    return ended == EP_OK;
}

/* Make steps, and begin again with those that are left whenever a rank is missing or back. Steps
 * count from the last time that the ranks met, so they agree on the next one. */
static void live_masked(Rank *self, const Case *c) {
    Board *board = self->board;
    TAKE_GPU(self->rank);
    EpBootstrap b = board_bootstrap(self, 0);
    EpGroupConfig config = masked_config(self, c);
    EpGroup *group = NULL;
    uint32_t alive = ALL_RANKS;
    setenv("LIBEP_TOPOLOGY", self->nodes, 1);
    if (self->joins)
        alive = recover(self, c, &group);
    else if (ep_group_create(&b, &config, &group) != EP_OK)
        give_up_life(self, ep_last_error());
    self->attendee.patience = 0; /* others may leave before this rank */
    for (int count = 0;;) {
        Case now = *c;
        now.seed += (uint64_t)count;
        pass(self, OPERATIONS, count);
        int is_whole = run_masked_step(self, group, now, alive);
        if (check_failure()[0]) give_up_life(self, check_failure());
        int is_last = is_whole && ++count == STEPS;
        int is_left = __atomic_load_n(&board->admissions, __ATOMIC_ACQUIRE) == self->attended;
        if (is_whole && !is_last && is_left && alive_on(board) == alive) continue;
        int is_done = is_last && !__atomic_load_n(&self->signal, __ATOMIC_ACQUIRE);
        __atomic_store_n(&board->is_done[self->rank], is_done, __ATOMIC_RELEASE);
        alive = recover(self, c, &group);
        board->recovered[self->rank]++;
        if (are_done(board, alive)) break;
        count = 0;
    }
    ep_group_destroy(group);
    _exit(0);
}

/* A life in which some ranks are killed, or stopped for a while. */
typedef struct MaskedLife {
    Case c;
    Board *board;
    Rank rank[RANKS];
    pid_t child[RANKS];
    double resume[RANKS], pause[RANKS]; /* when a stopped rank goes on; 0: not stopped */
    const char *nodes;
    int replaces;             /* killed ranks are replaced */
    int replacements, joined; /* so far */
    uint32_t living;          /* processes */
    Random random;
} MaskedLife;

static void begin_rank(MaskedLife *life, int r) {
    Rank *rank = &life->rank[r];
    rank->board = life->board, rank->rank = r;
    rank->timeout = TESTS_SANITIZED || TESTS_ON_GPU ? 3 : 1, rank->attendee.patience = MOST_SECONDS;
    rank->nodes = life->nodes, rank->is_replaced = life->replaces;
    rank->attended = life->board->admissions;
    life->living |= 1u << r;
    life->child[r] = fork_rank();
    if (life->child[r] == 0) live_masked(rank, &life->c);
}

/* Start another process in a rank's place. It may be killed, too: while it joins, or later. */
static void replace(MaskedLife *life, int r) {
    life->rank[r] = (Rank){.phase = -1, .joins = 1};
    if (life->replacements++ < 3 && random_below(&life->random, 2)) {
        life->rank[r].phase = random_below(&life->random, 3) ? RECOVERY : OPERATIONS;
        life->rank[r].signal = SIGKILL;
        life->rank[r].delay = (double)random_below(&life->random, 20000) * 1e-6;
    }
    begin_rank(life, r);
}

/* Let ranks join once the last admission is over. */
static void admit(MaskedLife *life) {
    Board *board = life->board;
    uint32_t waiting = board->awaited & life->living;
    const Admission *last = &board->admission[board->admissions];
    int failed = 0;
    for (int r = 0; r < RANKS && board->admissions; r++) {
        int result = __atomic_load_n(&last->result[r], __ATOMIC_ACQUIRE);
        if (!(last->meeting.ranks >> r & 1)) continue;
        if (result == PENDING) return;
        failed |= result != SUCCEEDED;
    }
    uint32_t joined =
        board->admissions && !failed ? last->meeting.ranks & waiting & ~alive_on(board) : 0;
    if (joined) {
        life->joined++;
        __atomic_fetch_or(&board->alive, joined, __ATOMIC_RELEASE);
        __atomic_fetch_and(&board->awaited, ~joined, __ATOMIC_RELEASE);
    } else if (waiting && alive_on(board) && board->admissions + 1 < MOST_MEETINGS) {
        board->admission[board->admissions + 1].meeting.ranks = waiting | alive_on(board);
        __atomic_fetch_add(&board->admissions, 1, __ATOMIC_RELEASE);
    }
    /* Nobody is left to admit them. */
    for (int r = 0; r < RANKS && !alive_on(board); r++)
        if (waiting >> r & 1) life->rank[r].signal = SIGKILL, kill(life->child[r], SIGKILL);
}

/* Look at a process. Returns whether it has ended. */
static int watch(MaskedLife *life, int r) {
    int status;
    uint32_t bit = 1u << r;
    if (life->resume[r] && seconds_now() > life->resume[r]) {
        life->resume[r] = 0;
        __atomic_fetch_or(&life->board->alive, bit, __ATOMIC_RELEASE);
        kill(life->child[r], SIGCONT);
    }
    if (waitpid(life->child[r], &status, WNOHANG | WUNTRACED) <= 0) return 0;
    __atomic_fetch_and(&life->board->alive, ~bit, __ATOMIC_RELEASE);
    if (WIFSTOPPED(status)) life->resume[r] = seconds_now() + life->pause[r];
    if (WIFSTOPPED(status)) return 0;
    life->living &= ~bit;
    __atomic_store_n(&life->board->admission[life->board->admissions].result[r], FAILED,
                     __ATOMIC_RELEASE);
    int is_lost = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    int others = (alive_on(life->board) & life->living) != 0;
    __atomic_fetch_and(&life->board->awaited, ~bit, __ATOMIC_RELEASE);
    if (is_lost && life->replaces && others) {
        __atomic_fetch_or(&life->board->awaited, bit, __ATOMIC_RELEASE);
        replace(life, r);
        return 0;
    }
    CHECK(is_lost ? life->rank[r].signal == SIGKILL : WIFEXITED(status) && !WEXITSTATUS(status),
          "rank %d ended with status %#x: %s", r, (unsigned)status,
          life->board->report[r].sentence);
    return 1;
}

static void run_masked_life(MaskedLife *life) {
    double end = seconds_now() + 2 * MOST_SECONDS;
    int ended[RANKS] = {0}, left = RANKS;
    life->board = board_open();
    life->board->alive = ALL_RANKS;
    for (int r = 0; r < RANKS; r++)
        begin_rank(life, r);
    for (; left && seconds_now() < end; usleep(500)) {
        for (int r = 0; r < RANKS; r++)
            if (!ended[r] && watch(life, r)) ended[r] = 1, left--;
        if (life->replaces) admit(life);
    }
    for (int r = 0; r < RANKS; r++)
        if (!ended[r]) {
            CHECK(false, "rank %d goes on for ever", r);
            kill(life->child[r], SIGKILL);
            waitpid(life->child[r], NULL, 0);
        }
    munmap(life->board, sizeof(Board));
}

static const char *const masked_cases[] = {
    "mode=throughput weighted=1",
    "mode=latency weighted=1",
    "mode=latency phases=1 layout=flat",
    "mode=latency late_us=300000 phases=1",
    "mode=throughput layout=batched by_entry=1",
    "mode=latency late_us=300000 layout=batched weighted=1",
    "mode=throughput layout=rank-major hidden=256",
};

/* Draw up to RANKS - 1 victims, and when each is lost: in a step, or while others meet. */
static MaskedLife draw_masked_life(uint64_t seed, uint64_t number, int signal, int replaces) {
    Random random = random_stream(seed, number, 7);
    MaskedLife life = {.replaces = replaces};
    life.nodes = topologies[TESTS_ON_GPU ? 0 : random_below(&random, LENGTH(topologies))];
    int victims = 1 + (int)random_below(&random, RANKS - 1);
    int first = (int)random_below(&random, RANKS);
    life.c =
        case_complete(case_of("ranks=%d experts=7 top_k=4 masks=1 seed=%d %s", RANKS,
                              (int)(100 * number), masked_cases[number % LENGTH(masked_cases)]));
    for (int r = 0; r < RANKS; r++) {
        Rank *rank = &life.rank[r];
        if (life.nodes[0]) life.c.nodes[r] = life.nodes[2 * r];
        rank->phase = -1;
        if ((r - first + RANKS) % RANKS >= victims) continue;
        rank->signal = signal;
        rank->phase = r != first && random_below(&random, 2) ? RECOVERY : OPERATIONS;
        rank->step = rank->phase == RECOVERY ? 0 : (int)random_below(&random, STEPS - 1);
        rank->delay = (double)random_below(&random, 20000) * 1e-6;
        life.pause[r] = (double)random_below(&random, 1000) * 1e-3;
    }
    life.random = random;
    return life;
}

static void lose_and_go_on(int signal, int replaces) {
    if (!replaces) HOST_ONLY(APART);
    if (!IS_FORKED) HOST_ONLY(APART);
    uint64_t seed = environment_number("LIBEP_TEST_SEED", 1);
    int usual = replaces ? 5 : TESTS_SANITIZED ? 10 : 20;
    uint64_t lives = environment_number("LIBEP_TEST_CASES", (uint64_t)usual);
    be_quiet();
    setenv("LIBEP_INTERFACE", "lo", 1);
    int joined = 0;
    for (uint64_t i = 0; i < lives && !check_failure()[0]; i++) {
        MaskedLife life = draw_masked_life(seed, i, signal, replaces);
        check_note("seed %d, number %d, nodes '%s'", (int)seed, (int)i, life.nodes);
        run_masked_life(&life);
        joined += life.joined;
    }
    if (replaces) CHECK(joined > 0, "nobody has joined");
}

SoloCall(bootstrap_killed, others_go_on, lose_and_go_on(SIGKILL, 0));
SoloCall(bootstrap_killed, stopped_ones_come_back, lose_and_go_on(SIGSTOP, 0));
SoloCall(bootstrap_killed, killed_ones_are_replaced, lose_and_go_on(SIGKILL, 1));
