/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/threads.h"

#include <pthread.h>

#include "tests/harness/ranked.h"

typedef struct OneRank {
    const EpBootstrap *bootstrap;
    RankBody body;
    void *arg;
} OneRank;

static void call_rank(void *context) {
    const OneRank *rank = context;
    rank->body(rank->bootstrap, rank->arg);
}

void run_body(RankBody body, const EpBootstrap *bootstrap, void *arg) {
    check_body(call_rank, &(OneRank){bootstrap, body, arg});
}

typedef struct RankThread {
    pthread_t thread;
    EpBootstrap bootstrap;
    RankBody body;
    void *arg;
    char failure[2048];
} RankThread;

/* A rank that fails says so at once: others may wait for it until the test's time is up. */
static void *rank_main(void *context) {
    RankThread *rank = context;
    GPU_TAKE(rank->bootstrap.rank);
    run_body(rank->body, &rank->bootstrap, rank->arg);
    snprintf(rank->failure, sizeof(rank->failure), "%s", check_failure());
    if (rank->failure[0])
        fprintf(stderr, "rank %d failed: %s\n", rank->bootstrap.rank, rank->failure);
    return NULL;
}

/* Assert that no rank failed. Frees the threads first, because an assertion does not return. */
static void assert_no_failure(RankThread *threads, int count) {
    char text[8192] = "";
    for (int i = 0; i < count; i++) {
        size_t used = strlen(text);
        if (threads[i].failure[0] == 0 || used > 6000) continue;
        snprintf(text + used, sizeof(text) - used, "\nrank %d: %.1200s", threads[i].bootstrap.rank,
                 threads[i].failure);
    }
    free(threads);
    cr_assert(text[0] == 0, "%s", text);
}

static void threads_open(RankThread *threads, int ranks, RankBody body, void *arg) {
    EpBootstrap *bootstraps = calloc((size_t)ranks, sizeof(*bootstraps));
    bootstraps[0] = (EpBootstrap)EP_BOOTSTRAP_INIT;
    cr_assert(ep_bootstrap_local(ranks, bootstraps) == EP_OK, "%s", ep_last_error());
    for (int r = 0; r < ranks; r++)
        threads[r].bootstrap = bootstraps[r], threads[r].body = body, threads[r].arg = arg;
    free(bootstraps);
}

void run_ranks(int ranks, RankBody body, void *arg) {
#if TESTS_ON_GPU
    if (gpu_shares(ranks)) {
        ranked_instead(ranks, body, arg);
        return;
    }
    if (ranked_is()) return; /* the process that started the ranks has run these */
#endif
    run_on_threads(ranks, body, arg);
}

static void run_groups(int groups, int ranks, RankBody body, char *args, size_t bytes) {
    int count = groups * ranks;
    THREADS_NEED(ranks);
    RankThread *threads = calloc((size_t)count, sizeof(*threads));
    for (int g = 0; g < groups; g++)
        threads_open(threads + g * ranks, ranks, body, args ? args + (size_t)g * bytes : NULL);
    for (int i = 0; i < count; i++) {
        int error = pthread_create(&threads[i].thread, NULL, rank_main, &threads[i]);
        cr_assert(error == 0, "pthread_create: %s", strerror(error));
    }
    for (int i = 0; i < count; i++)
        pthread_join(threads[i].thread, NULL);
    for (int i = 0; i < count; i++)
        ep_bootstrap_destroy(&threads[i].bootstrap);
    check_skip();
    assert_no_failure(threads, count);
}

void run_on_threads(int ranks, RankBody body, void *arg) {
    run_groups(1, ranks, body, arg, 0);
}

void run_side_by_side(int groups, int ranks, RankBody body, void *args, size_t bytes) {
    if (!TESTS_ON_GPU) run_groups(groups, ranks, body, args, bytes);
    for (int g = 0; g < groups && TESTS_ON_GPU; g++)
        run_on_threads(ranks, body, (char *)args + (size_t)g * bytes);
}
