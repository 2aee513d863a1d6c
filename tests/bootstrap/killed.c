/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are processes, and one of them is killed before and after each collective call of
 * ep_group_create and ep_group_destroy: the others leave no name in /dev/shm. */
#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/cases/run.h"

enum { RANKS = 3, KILLED = 1, ROOM = 4096, MOST_COLLECTIVES = 40 };
#define DEADLINE 0.3

/* ---- a bootstrap for processes that share memory ---- */

/* Contributions of two collectives: no rank is more than one ahead of another. */
typedef struct Board {
    int entered[RANKS]; /* collectives that each rank has entered */
    char bytes[2][RANKS][ROOM];
} Board;

typedef struct Rank {
    Board *board;
    int rank, collectives;
    int kill_before, kill_after; /* numbers of a collective, from 1; 0: never */
} Rank;

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static EpStatus board_gather(void *context, const void *in, void *out, size_t bytes,
                             double timeout) {
    Rank *self = context;
    int now = ++self->collectives;
    double end = seconds_now() + timeout;
    if (now == self->kill_before) kill(getpid(), SIGKILL);
    if (bytes > ROOM) return ep_set_last_error(EP_ERR_BOOTSTRAP, "too many bytes");
    memcpy(self->board->bytes[now % 2][self->rank], in, bytes);
    __atomic_store_n(&self->board->entered[self->rank], now, __ATOMIC_RELEASE);
    for (int r = 0; r < RANKS; r++) {
        while (__atomic_load_n(&self->board->entered[r], __ATOMIC_ACQUIRE) < now) {
            if (seconds_now() > end) return ep_set_last_error(EP_ERR_TIMEOUT, "a rank is missing");
            usleep(200);
        }
        memcpy((char *)out + (size_t)r * bytes, self->board->bytes[now % 2][r], bytes);
    }
    if (now == self->kill_after) kill(getpid(), SIGKILL);
    return EP_OK;
}

static EpStatus board_barrier(void *context, double timeout) {
    char mine = 0, all[RANKS];
    return board_gather(context, &mine, all, 1, timeout);
}

/* ---- processes ---- */

static void rank_main(Rank *self) {
    EpBootstrap b = EP_BOOTSTRAP_INIT;
    b.rank = self->rank, b.size = RANKS, b.context = self;
    b.allgather = board_gather, b.barrier = board_barrier;
    Case c = case_complete((Case){.ranks = RANKS});
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = DEADLINE;
    EpGroup *group = NULL;
    EpStatus status = ep_group_create(&b, &config, &group);
    int consistent = (status == EP_OK) == (group != NULL);
    ep_group_destroy(group);
    _exit(!consistent);
}

/* Run all ranks. Returns 1 if a rank was killed. */
static int run_processes(int kill_before, int kill_after) {
    Board *board =
        mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t children[RANKS];
    int killed = 0;
    for (int r = 0; r < RANKS; r++) {
        Rank self = {.board = board, .rank = r};
        if (r == KILLED) self.kill_before = kill_before, self.kill_after = kill_after;
        children[r] = fork();
        if (children[r] == 0) rank_main(&self);
    }
    for (int r = 0; r < RANKS; r++) {
        int status = 0;
        waitpid(children[r], &status, 0);
        int by_signal = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        CHECK((by_signal && r == KILLED) || (WIFEXITED(status) && WEXITSTATUS(status) == 0),
              "rank %d ended with status %#x", r, (unsigned)status);
        killed += by_signal;
    }
    munmap(board, sizeof(*board));
    return killed;
}

/* Returns the number of names of libep in the system's shared memory. */
static int names_left(void) {
    DIR *folder = opendir("/dev/shm");
    int count = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        count += strncmp(entry->d_name, "libep-", 6) == 0;
    if (folder) closedir(folder);
    return count;
}

/* Other programs of the machine have names for moments. */
static void check_no_names(int before, const char *when, int collective) {
    for (int i = 0; i < 200 && names_left() > before; i++)
        usleep(10000);
    CHECK(names_left() <= before,
          "%d names in /dev/shm, %d before rank %d was killed %s collective"
          " %d",
          names_left(), before, KILLED, when, collective);
}

SoloTest(bootstrap_killed, before_each_collective) {
    int before = names_left(), n = 1;
    for (; n < MOST_COLLECTIVES && run_processes(n, 0); n++)
        check_no_names(before, "before", n);
    CHECK(n > 5 && n < MOST_COLLECTIVES, "%d collectives", n);
}

SoloTest(bootstrap_killed, after_each_collective) {
    int before = names_left(), n = 1;
    for (; n < MOST_COLLECTIVES && run_processes(0, n); n++)
        check_no_names(before, "after", n);
    CHECK(n > 5 && n < MOST_COLLECTIVES, "%d collectives", n);
}
