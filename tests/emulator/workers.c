/* SPDX-License-Identifier: Apache-2.0 */
/* OS threads that run blocks. They are kept for the next grid. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/emulator/device.h"
#include "tests/emulator/worker.h"

/* A grid that is running. */
typedef struct GridRun {
    const EmulatedGrid *grid;
    void (*kernel)(const void *arguments);
    const void *arguments;
    uint64_t seed;
    unsigned next, left; /* block to start next; blocks that have not ended */
    int device;
} GridRun;

typedef struct Worker {
    struct Worker *next;
    GridRun *run; /* NULL: idle */
    unsigned index;
    pthread_cond_t called;
} Worker;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static Worker *idle;
static uint64_t launches;
static int taken[EMULATED_MAX_GPUS]; /* places of each GPU */

void emulated_die(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    va_end(values);
    abort();
}

/* ---- places -------------------------------------------------------------------------------- */

/* A GPU has places for so many blocks at a time, of all its kernels together. */
static int places(void) {
    const char *text = getenv("EMULATED_PLACES");
    return text ? atoi(text) : 1 << 30;
}

static void leave(int device) {
    taken[device]--;
    pthread_cond_broadcast(&ended);
}

/* One by one: a kernel that waits for the rest of its places keeps those that it has. */
void emulated_take_places(int device, int count) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < count; taken[device]++, i++)
        while (taken[device] >= places())
            pthread_cond_wait(&ended, &mutex);
    pthread_mutex_unlock(&mutex);
}

void emulated_leave_places(int device, int count) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < count; i++)
        leave(device);
    pthread_mutex_unlock(&mutex);
}

/* ---- grids --------------------------------------------------------------------------------- */

static void *work(void *context) {
    Worker *me = context;
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (!me->run)
            pthread_cond_wait(&me->called, &mutex);
        GridRun *run = me->run;
        pthread_mutex_unlock(&mutex);
        emulated_run_block(run->grid, me->index, run->seed + me->index, run->kernel,
                           run->arguments);
        pthread_mutex_lock(&mutex);
        if (--run->left == 0) pthread_cond_broadcast(&ended);
        if (run->left && run->next < run->grid->blocks) {
            me->index = run->next++;
        } else {
            leave(run->device);
            me->run = NULL, me->next = idle, idle = me;
        }
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

static void call(GridRun *run, unsigned index) {
    Worker *worker = idle;
    if (worker)
        idle = worker->next;
    else
        worker = new_worker();
    worker->run = run, worker->index = index;
    pthread_cond_signal(&worker->called);
}

static uint64_t next_seed(void) {
    const char *text = getenv("EMULATED_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    return seed * 1000003 + ++launches * 1009;
}

/* Blocks of a grid that run at a time; the others follow, in order, as these end. */
static unsigned most_resident(void) {
    const char *text = getenv("EMULATED_RESIDENT");
    return text ? (unsigned)atoi(text) : ~0u;
}

void emulated_run_grid(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                       const void *arguments) {
    GridRun run = {grid, kernel, arguments, 0, 0, grid->blocks, emulated_device()};
    unsigned resident = most_resident();
    pthread_mutex_lock(&mutex);
    run.seed = next_seed();
    while (run.left) {
        if (run.next < grid->blocks && run.next < resident && taken[run.device] < places())
            taken[run.device]++, call(&run, run.next++);
        else
            pthread_cond_wait(&ended, &mutex);
    }
    pthread_mutex_unlock(&mutex);
}
