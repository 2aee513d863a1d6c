/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/suites.h"

#include "tests/harness/check.h"

#if TESTS_OWN_RUNNER

#include <pthread.h>
#include <sys/wait.h>

#include "tests/harness/bodies.h"
#include "tests/harness/process.h"
#include "tests/harness/ranked.h"

enum { MOST_TESTS = 4096, REPORT = 3 };

static const char *const words[] = {"PASS", "FAIL", "SKIP"};

/* ---- one process: a test, and on GPUs those of its suite behind it ---- */

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

static int belongs(const struct criterion_test *test, const struct criterion_test *first,
                   const char *pattern) {
    if (!test || !body_selected(test, pattern)) return 0;
    return test == first || (TESTS_ON_GPU && !strcmp(test->category, first->category));
}

static int run_suite(int first, int from, const char *pattern) {
    struct criterion_test **all = bodies_first();
    for (int i = from; all + i < bodies_end(); i++) {
        if (!belongs(all[i], all[first], pattern)) continue;
        dprintf(REPORT, "%d %d\n", i, -1);
        dprintf(REPORT, "%d %d\n", i, (int)run_one(all[i]));
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

typedef struct Suites {
    pthread_mutex_t mutex;
    int first[MOST_TESTS]; /* test of each */
    int count, next;
    const char *pattern;
    int outcomes[BODY_SKIPPED + 1];
} Suites;

static int has_suite(const Suites *s, const struct criterion_test *test) {
    for (int i = 0; i < s->count; i++)
        if (belongs(test, bodies_first()[s->first[i]], s->pattern)) return 1;
    return 0;
}

static pid_t start_suite(const Suites *s, int first, int from, int *report) {
    int ends[2];
    char name[16], number[16];
    snprintf(name, sizeof(name), "%d", first);
    snprintf(number, sizeof(number), "%d", from);
    if (pipe(ends)) return -1;
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], REPORT);
        if (ends[0] != REPORT) close(ends[0]);
        if (ends[1] != REPORT) close(ends[1]);
        execl(self_path(), self_path(), "--suite", name, "--from", number, "--filter", s->pattern,
              (char *)NULL);
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

/* Returns the test after which the suite must continue, or -1 when it is complete. */
static int watch_suite(Suites *s, int first, int from) {
    int report, test, outcome, running = -1, status = 0;
    pid_t child = start_suite(s, first, from, &report);
    FILE *lines = child > 0 ? fdopen(report, "r") : NULL;
    while (lines && fscanf(lines, "%d %d", &test, &outcome) == 2) {
        running = outcome < 0 ? test : -1;
        if (outcome >= 0) count(s, outcome);
    }
    if (lines) fclose(lines);
    if (child > 0) waitpid(child, &status, 0);
    if (child > 0 && status == 0 && running < 0) return -1;
    const struct criterion_test *at = bodies_first()[running >= 0 ? running : first];
    fprintf(stderr, "[FAIL] %s::%s: status %#x\n", at->category, at->name, (unsigned)status);
    count(s, BODY_FAILED);
    return running;
}

static void *work(void *context) {
    Suites *s = context;
    for (;;) {
        pthread_mutex_lock(&s->mutex);
        int mine = s->next++;
        pthread_mutex_unlock(&s->mutex);
        if (mine >= s->count) return NULL;
        for (int from = s->first[mine]; from >= 0;) {
            int stopped = watch_suite(s, s->first[mine], from);
            from = stopped < 0 ? -1 : stopped + 1;
        }
    }
}

static int run_all(const char *pattern, int jobs) {
    static Suites s = {.mutex = PTHREAD_MUTEX_INITIALIZER};
    pthread_t workers[BODIES_MOST_JOBS];
    s.pattern = pattern;
    for (struct criterion_test **t = bodies_first(); t < bodies_end(); t++)
        if (*t && body_selected(*t, pattern) && !has_suite(&s, *t))
            s.first[s.count++] = (int)(t - bodies_first());
    for (int i = 0; i < jobs; i++)
        if (pthread_create(&workers[i], NULL, work, &s)) return 1;
    for (int i = 0; i < jobs; i++)
        pthread_join(workers[i], NULL);
    int passed = s.outcomes[BODY_PASSED], failed = s.outcomes[BODY_FAILED];
    printf("[====] Synthesis: Tested: %d | Passing: %d | Failing: %d | Skipped: %d\n",
           passed + failed, passed, failed, s.outcomes[BODY_SKIPPED]);
    return failed || !s.count; /* nothing matched the pattern */
}

/* Groups that say nothing of nodes are then on as many as the cases assume: see case_complete. */
static void pretend_nodes(void) {
    const char *nodes = getenv("LIBEP_TEST_NODES");
    if (nodes) setenv("LIBEP_TOPOLOGY", nodes, 1);
}

int suites_main(int argc, char **argv) {
    pretend_nodes();
    const char *pattern = bodies_option(argc, argv, "--filter", "*");
    const char *suite = bodies_option(argc, argv, "--suite", NULL);
    const char *from = bodies_option(argc, argv, "--from", "0");
    if (suite) return run_suite(atoi(suite), atoi(from), pattern);
    if (ranked_is()) return run_rank(pattern);
    if (GPU_MISSING()) return 0;
    return run_all(pattern, bodies_jobs(argc, argv));
}

#else

int suites_main(int argc, char **argv) {
    (void)argc;
    (void)argv;
    return 1;
}

#endif
