/* SPDX-License-Identifier: Apache-2.0 */
/* OS threads, which are kept for the next use; grids, whose blocks they run. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/emulator/device.h"
#include "tests/emulator/worker.h"

typedef struct Worker {
    struct Worker *next;
    void (*run)(void *context); /* NULL: idle */
    void *context;
    pthread_cond_t called;
} Worker;

/* A grid that is running. */
typedef struct GridRun {
    const EmulatedGrid *grid;
    void (*kernel)(const void *arguments);
    const void *arguments;
    uint64_t seed;
    unsigned next, left; /* block to start next; blocks that have not ended */
    int device;
    pthread_cond_t over;
} GridRun;

/* A block of it, and those that its thread runs behind it. */
typedef struct BlockRun {
    GridRun *run;
    unsigned index;
} BlockRun;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER, pool = PTHREAD_MUTEX_INITIALIZER;
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

/* ---- threads ------------------------------------------------------------------------------- */

static void *work(void *context) {
    Worker *me = context;
    pthread_mutex_lock(&pool);
    for (;;) {
        while (!me->run)
            pthread_cond_wait(&me->called, &pool);
        pthread_mutex_unlock(&pool);
        me->run(me->context);
        pthread_mutex_lock(&pool);
        me->run = NULL, me->next = idle, idle = me;
    }
    return NULL;
}

static Worker *new_worker(void) {
    pthread_t thread;
    Worker *worker = calloc(1, sizeof(*worker));
    if (!worker) emulated_die("no memory for a thread");
    pthread_cond_init(&worker->called, NULL);
    if (pthread_create(&thread, NULL, work, worker)) emulated_die("no thread");
    pthread_detach(thread);
    return worker;
}

void emulated_start(void (*run)(void *context), void *context) {
    pthread_mutex_lock(&pool);
    Worker *worker = idle;
    if (worker)
        idle = worker->next;
    else
        worker = new_worker();
    worker->context = context, worker->run = run;
    pthread_cond_signal(&worker->called);
    pthread_mutex_unlock(&pool);
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

static void run_blocks(void *context) {
    BlockRun *b = context;
    GridRun *run = b->run;
    for (int more = 1; more;) {
        emulated_run_block(run->grid, b->index, run->seed + b->index, run->kernel, run->arguments);
        pthread_mutex_lock(&mutex);
        run->left--;
        more = run->next < run->grid->blocks;
        if (more) b->index = run->next++;
        if (!more) leave(run->device);
        if (!run->left) pthread_cond_signal(&run->over);
        pthread_mutex_unlock(&mutex);
    }
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

/* The calling thread runs the block that is started last. */
void emulated_run_grid(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                       const void *arguments) {
    GridRun run = {grid, kernel,       arguments,         0,
                   0,    grid->blocks, emulated_device(), PTHREAD_COND_INITIALIZER};
    BlockRun *blocks = calloc(grid->blocks, sizeof(*blocks));
    if (!blocks) emulated_die("no memory for a grid");
    pthread_mutex_lock(&mutex);
    run.seed = next_seed();
    while (run.left) {
        if (run.next == grid->blocks || run.next >= most_resident()) {
            pthread_cond_wait(&run.over, &mutex);
        } else if (taken[run.device] >= places()) {
            pthread_cond_wait(&ended, &mutex);
        } else {
            BlockRun *b = &blocks[run.next];
            *b = (BlockRun){&run, run.next++};
            taken[run.device]++;
            if (run.next < grid->blocks) {
                emulated_start(run_blocks, b);
                continue;
            }
            pthread_mutex_unlock(&mutex);
            run_blocks(b);
            pthread_mutex_lock(&mutex);
        }
    }
    pthread_mutex_unlock(&mutex);
    free(blocks);
}
