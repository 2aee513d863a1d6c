/* SPDX-License-Identifier: Apache-2.0 */
/* The OS threads that blocks run in; they are kept for the next grid. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/emulator/worker.h"

/* A grid under way. */
typedef struct Job {
    const EmulatedGrid *grid;
    void (*kernel)(const void *arguments);
    const void *arguments;
    uint64_t seed;
    unsigned left;
} Job;

typedef struct Worker {
    struct Worker *next;
    Job *job; /* NULL: it waits for one */
    unsigned index;
    pthread_cond_t called;
} Worker;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static Worker *idle;
static uint64_t launches;

void emulated_die(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    va_end(values);
    abort();
}

static void *work(void *context) {
    Worker *me = context;
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (!me->job)
            pthread_cond_wait(&me->called, &mutex);
        Job *job = me->job;
        pthread_mutex_unlock(&mutex);
        emulated_run_block(job->grid, me->index, job->seed + me->index, job->kernel,
                           job->arguments);
        pthread_mutex_lock(&mutex);
        me->job = NULL, me->next = idle, idle = me;
        if (--job->left == 0) pthread_cond_broadcast(&ended);
    }
    return NULL;
}

static Worker *new_worker(void) {
    pthread_t thread;
    Worker *worker = calloc(1, sizeof(*worker));
    if (!worker) emulated_die("no memory for a block");
    pthread_cond_init(&worker->called, NULL);
    if (pthread_create(&thread, NULL, work, worker)) emulated_die("no thread for a block");
    pthread_detach(thread);
    return worker;
}

static void call(Job *job, unsigned index) {
    Worker *worker = idle;
    if (worker)
        idle = worker->next;
    else
        worker = new_worker();
    worker->job = job, worker->index = index;
    pthread_cond_signal(&worker->called);
}

static uint64_t next_seed(void) {
    const char *text = getenv("EMULATED_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    return seed * 1000003 + ++launches * 1009;
}

void emulated_run_grid(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                       const void *arguments) {
    Job job = {grid, kernel, arguments, 0, grid->blocks};
    pthread_mutex_lock(&mutex);
    job.seed = next_seed();
    for (unsigned i = 0; i < grid->blocks; i++)
        call(&job, i);
    while (job.left)
        pthread_cond_wait(&ended, &mutex);
    pthread_mutex_unlock(&mutex);
}
