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
static void assert_no_failure(RankThread *threads, int ranks) {
    char text[8192] = "";
    for (int r = 0; r < ranks; r++) {
        size_t used = strlen(text);
        if (threads[r].failure[0] == 0 || used > 6000) continue;
        snprintf(text + used, sizeof(text) - used, "\nrank %d: %.1200s", r, threads[r].failure);
    }
    free(threads);
    cr_assert(text[0] == 0, "%s", text);
}

static RankThread *threads_new(int ranks, RankBody body, void *arg) {
    EpBootstrap *bootstraps = calloc((size_t)ranks, sizeof(*bootstraps));
    bootstraps[0] = (EpBootstrap)EP_BOOTSTRAP_INIT;
    cr_assert(ep_bootstrap_local(ranks, bootstraps) == EP_OK, "%s", ep_last_error());
    RankThread *threads = calloc((size_t)ranks, sizeof(*threads));
    for (int r = 0; r < ranks; r++) {
        threads[r].bootstrap = bootstraps[r];
        threads[r].body = body;
        threads[r].arg = arg;
    }
    free(bootstraps);
    return threads;
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

void run_on_threads(int ranks, RankBody body, void *arg) {
    THREADS_NEED(ranks);
    RankThread *threads = threads_new(ranks, body, arg);
    for (int r = 0; r < ranks; r++) {
        int error = pthread_create(&threads[r].thread, NULL, rank_main, &threads[r]);
        cr_assert(error == 0, "pthread_create: %s", strerror(error));
    }
    for (int r = 0; r < ranks; r++)
        pthread_join(threads[r].thread, NULL);
    for (int r = 0; r < ranks; r++)
        ep_bootstrap_destroy(&threads[r].bootstrap);
    check_skip();
    assert_no_failure(threads, ranks);
}
