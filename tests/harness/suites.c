/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/suites.h"

#include "tests/harness/check.h"

#if TESTS_OWN_RUNNER

#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include "tests/harness/bodies.h"
#include "tests/harness/process.h"
#include "tests/harness/ranked.h"

enum { MOST_TESTS = 4096, REPORT = 3, TICKETS = 4 };

/* Emulated GPUs are each process's own, so tests of a suite may run side by side. */
#ifdef TESTS_EMULATED
enum { SUITES_ARE_SHARED = 1 };
#else
enum { SUITES_ARE_SHARED = 0 };
#endif

static const char *const words[] = {"PASS", "FAIL", "SKIP"};

/* ---- one process: a test, and on GPUs others of its suite behind it ---- */

static unsigned seconds_of(const struct criterion_test *test) {
    if (!TESTS_ON_GPU) return 300;
    return test->data->timeout > 0 ? (unsigned)test->data->timeout + 1 : 120;
}

static Outcome run_one(const struct criterion_test *test) {
    double begin = seconds_now();
    alarm(seconds_of(test));
    Outcome outcome = body_run(test);
    alarm(0);
    fprintf(stderr, "[%s] %s::%s: (%.2fs)\n", words[outcome], test->category, test->name,
            seconds_now() - begin);
    return outcome;
}

/* Run the tests whose numbers are left in the pipe. */
static int run_suite(void) {
    for (int i; read(TICKETS, &i, sizeof(i)) == sizeof(i);) {
        dprintf(REPORT, "%d %d\n", i, -1);
        dprintf(REPORT, "%d %d\n", i, (int)run_one(bodies_first()[i]));
    }
    return 0;
}

/* Run, as an MPI rank, the one test that mpirun was started for. */
static int run_rank(const char *pattern) {
    int failed = 0;
    for (struct criterion_test **t = bodies_first(); t < bodies_end(); t++)
        if (*t && body_selected(*t, pattern)) failed += run_one(*t) == BODY_FAILED;
    if (!failed) ranked_leave();
    return failed != 0;
}

/* ---- all suites ---- */

typedef struct Suite {
    int test;           /* one of it */
    int tickets, users; /* a pipe with the numbers of tests that no process has taken yet */
} Suite;

typedef struct Suites {
    pthread_mutex_t mutex;
    Suite suite[MOST_TESTS];
    int count, next;
    const char *pattern, *early;
    int outcomes[BODY_SKIPPED + 1];
} Suites;

static int belongs(int test, int suite) {
    const struct criterion_test *a = bodies_first()[test], *b = bodies_first()[suite];
    return a == b || (TESTS_ON_GPU && !strcmp(a->category, b->category));
}

/* Returns the next test to run, behind `last`. Those that start early come first. */
static int next_test(const Suites *s, int *early, int last) {
    struct criterion_test **all = bodies_first();
    for (; *early >= 0; --*early, last = -1)
        for (int i = last + 1; all + i < bodies_end(); i++)
            if (all[i] && body_selected(all[i], s->pattern) &&
                body_selected(all[i], s->early) == *early)
                return i;
    return -1;
}

static void list_suites(Suites *s) {
    for (int early = 1, test = -1; (test = next_test(s, &early, test)) >= 0;) {
        int known = 0;
        for (int i = 0; i < s->count && !known; i++)
            known = belongs(test, s->suite[i].test);
        if (!known) s->suite[s->count++].test = test;
    }
}

static int open_suite(const Suites *s, Suite *suite) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return 0;
    for (int early = 1, test = -1; (test = next_test(s, &early, test)) >= 0;)
        if (belongs(test, suite->test) && write(ends[1], &test, sizeof(test)) < 0) return 0;
    close(ends[1]);
    suite->tickets = ends[0];
    return 1;
}

static int tests_left(const Suite *suite) {
    int bytes = 0;
    if (suite->users) ioctl(suite->tickets, FIONREAD, &bytes);
    return bytes / (int)sizeof(int);
}

/* Returns the next suite or, behind the last, the one of which most is left. */
static Suite *take_suite(Suites *s) {
    Suite *mine = NULL;
    pthread_mutex_lock(&s->mutex);
    if (s->next < s->count) {
        mine = &s->suite[s->next++];
        if (!open_suite(s, mine)) _exit(1);
    } else if (SUITES_ARE_SHARED) {
        for (int i = 0; i < s->count; i++)
            if (tests_left(&s->suite[i]) > (mine ? tests_left(mine) : 0)) mine = &s->suite[i];
    }
    if (mine) mine->users++;
    pthread_mutex_unlock(&s->mutex);
    return mine;
}

static void leave_suite(Suites *s, Suite *suite) {
    pthread_mutex_lock(&s->mutex);
    if (!--suite->users) close(suite->tickets);
    pthread_mutex_unlock(&s->mutex);
}

static pid_t start_process(const Suite *suite, int *report) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return -1;
    pid_t child = fork();
    if (child == 0) {
        int from = fcntl(ends[1], F_DUPFD, TICKETS + 1),
            tickets = fcntl(suite->tickets, F_DUPFD, TICKETS + 1);
        dup2(from, REPORT), dup2(tickets, TICKETS);
        close(from), close(tickets);
        execl(self_path(), self_path(), "--suite", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    *report = ends[0];
    return child;
}

static void count(Suites *s, int outcome) {
    pthread_mutex_lock(&s->mutex);
    s->outcomes[outcome]++;
    pthread_mutex_unlock(&s->mutex);
}

/* Returns whether another process can run what is left. */
static int watch_process(Suites *s, const Suite *suite) {
    int report, test, outcome, running = -1, status = 0;
    pid_t child = start_process(suite, &report);
    FILE *lines = child > 0 ? fdopen(report, "r") : NULL;
    while (lines && fscanf(lines, "%d %d", &test, &outcome) == 2) {
        running = outcome < 0 ? test : -1;
        if (outcome >= 0) count(s, outcome);
    }
    if (lines) fclose(lines);
    if (child > 0) waitpid(child, &status, 0);
    if (child > 0 && status == 0 && running < 0) return 1;
    const struct criterion_test *at = bodies_first()[running >= 0 ? running : suite->test];
    fprintf(stderr, "[FAIL] %s::%s: status %#x\n", at->category, at->name, (unsigned)status);
    count(s, BODY_FAILED);
    return running >= 0;
}

static void *work(void *context) {
    Suites *s = context;
    for (Suite *mine; (mine = take_suite(s)); leave_suite(s, mine)) {
        int can = 1;
        while (can && tests_left(mine))
            can = watch_process(s, mine);
    }
    return NULL;
}

static int run_all(Suites *s, int jobs) {
    pthread_t workers[BODIES_MOST_JOBS];
    list_suites(s);
    for (int i = 0; i < jobs; i++)
        if (pthread_create(&workers[i], NULL, work, s)) return 1;
    for (int i = 0; i < jobs; i++)
        pthread_join(workers[i], NULL);
    int passed = s->outcomes[BODY_PASSED], failed = s->outcomes[BODY_FAILED];
    printf("[====] Synthesis: Tested: %d | Passing: %d | Failing: %d | Skipped: %d\n",
           passed + failed, passed, failed, s->outcomes[BODY_SKIPPED]);
    return failed || !s->count; /* nothing matched the pattern */
}

/* Groups that say nothing of nodes are then on as many as the cases assume: see case_complete. */
static void pretend_nodes(void) {
    const char *nodes = getenv("LIBEP_TEST_NODES");
    if (nodes) setenv("LIBEP_TOPOLOGY", nodes, 1);
}

int suites_main(int argc, char **argv) {
    static Suites s = {.mutex = PTHREAD_MUTEX_INITIALIZER};
    pretend_nodes();
    s.pattern = bodies_option(argc, argv, "--filter", "*");
    s.early = bodies_option(argc, argv, "--early", "");
    if (argc > 1 && strcmp(argv[1], "--suite") == 0) return run_suite();
    if (ranked_is()) return run_rank(s.pattern);
    if (GPU_MISSING()) return 0;
    return run_all(&s, bodies_jobs(argc, argv));
}

#else

int suites_main(int argc, char **argv) {
    (void)argc;
    (void)argv;
    return 1;
}

#endif
