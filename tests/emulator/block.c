/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/emulator/block.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tests/emulator/fiber.h"
#include "tests/emulator/launch.h"
#include "tests/emulator/worker.h"

enum { MAX_THREADS = 1024, WARP = 32, NAMED = 16, BUCKETS = 256, BACK_OFF_AFTER = 64 };

/* Under the address sanitizer variables lie far apart. It knows nothing of fibers, and sees only
 * that their stacks are mapped memory. */
#ifdef __SANITIZE_ADDRESS__
#define STACK_BYTES ((size_t)256 << 10)
#else
#define STACK_BYTES ((size_t)32 << 10)
#endif
#define STACK_END 0x57ac4e4d57ac4e4dull
#define GARBAGE 0xa5

typedef struct Thread {
    Fiber fiber;
    unsigned x;
    const void *key; /* the address that it waits for */
    struct Thread *next;
} Thread;

/* A barrier of a warp or of a block, with the threads that wait at it. */
typedef struct Barrier {
    int arrived, kind;
    Thread *waiting;
} Barrier;

/* A set of threads, from which one is drawn at random. */
typedef struct ThreadSet {
    Thread *thread[MAX_THREADS];
    int count;
} ThreadSet;

/* A block. The blocks that an OS thread runs one after the other reuse the memory. */
typedef struct Block {
    Fiber outside;
    Thread thread[MAX_THREADS], *running;
    int threads, ended, idle;
    ThreadSet ready, polling;
    Barrier warp[MAX_THREADS / WARP], named[NAMED];
    /* Two sets, used alternately: lanes may still read the last. */
    uint64_t values[MAX_THREADS / WARP][2][WARP];
    unsigned votes[MAX_THREADS / WARP][2];
    unsigned rounds[MAX_THREADS];
    int all; /* of emulated_barrier_and */
    Thread *waiting[BUCKETS];
    uint64_t random_state;
    unsigned copy_delay; /* a chance to make a bulk copy is used with probability 1 / this */
    char *stacks, *shared_end, *shared;
    void (*kernel)(const void *arguments);
    const void *arguments;
} Block;

__thread EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;
__thread char emulated_anchor;
static __thread Block *block;

/* ---- random numbers ---- */

unsigned emulated_draw(unsigned n) {
    uint64_t x = block->random_state;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    block->random_state = x;
    return (unsigned)((x >> 32) * n >> 32);
}

int emulated_one_in(unsigned n) {
    return emulated_draw(n) == 0;
}

/* ---- scheduling ---- */

static void add_thread(ThreadSet *c, Thread *t) {
    c->thread[c->count++] = t;
}

static Thread *draw_thread(ThreadSet *c) {
    unsigned i = emulated_draw((unsigned)c->count);
    Thread *t = c->thread[i];
    c->thread[i] = c->thread[--c->count];
    return t;
}

static void report_deadlock(void) {
    for (int i = 0; i < block->threads; i += WARP)
        fprintf(stderr, "emulator: warp %d: %d threads wait at the warp's barrier\n", i / WARP,
                block->warp[i / WARP].arrived);
    for (int i = 0; i < NAMED; i++)
        if (block->named[i].arrived)
            fprintf(stderr, "emulator: %d threads wait at barrier %d\n", block->named[i].arrived,
                    i);
    emulated_die("block %u: %d threads wait for each other, %d have ended", blockIdx.x,
                 block->threads - block->ended, block->ended);
}

/* All runnable threads only poll, and have for a while: yield the processor to the blocks and ranks
 * that they wait for. */
static void back_off(void) {
    struct timespec little = {0, 50000};
    if (++block->idle % BACK_OFF_AFTER || block->ready.count || emulated_copy_one()) return;
    if (block->idle < 8 * BACK_OFF_AFTER)
        sched_yield();
    else
        nanosleep(&little, NULL);
}

/* Returns the thread to run next. Makes bulk copies now and then, in some blocks later than in
 * others. */
static Thread *next_thread(void) {
    for (;;) {
        int lucky = emulated_one_in(16);
        if (lucky && emulated_one_in(block->copy_delay)) emulated_copy_one();
        if (block->ready.count && !(lucky && block->polling.count))
            return draw_thread(&block->ready);
        if (!block->ready.count && emulated_one_in(block->copy_delay) && emulated_copy_one())
            continue;
        if (block->polling.count) {
            back_off();
            return draw_thread(&block->polling);
        }
        if (!block->ready.count && !emulated_copy_one()) report_deadlock();
    }
}

static void switch_to(Fiber *from, Thread *t) {
    block->running = t;
    threadIdx.x = t->x;
    fiber_switch(from, &t->fiber);
}

/* Switch to another thread. The caller has put the running one where it will be found again. */
static void yield(void) {
    Thread *me = block->running, *next = next_thread();
    if (next == me) return;
    switch_to(&me->fiber, next);
}

void emulated_poll(void) {
    if (!emulated_one_in(4)) return;
    add_thread(&block->polling, block->running);
    yield();
}

/* ---- waiting ---- */

static Thread **bucket_of(const void *key) {
    return &block->waiting[(uintptr_t)key / 8 % BUCKETS];
}

void emulated_wait_for(const void *key) {
    Thread *me = block->running, **bucket = bucket_of(key);
    me->key = key, me->next = *bucket, *bucket = me;
    yield();
}

void emulated_wake(const void *key) {
    for (Thread **at = bucket_of(key); *at;) {
        Thread *t = *at;
        if (t->key != key) {
            at = &t->next;
            continue;
        }
        *at = t->next;
        block->idle = 0;
        add_thread(&block->ready, t);
    }
}

/* ---- barriers ---- */

static void arrive_and_wait(Barrier *m, int members, int kind) {
    Thread *me = block->running;
    if (m->arrived && m->kind != kind)
        emulated_die("block %u, thread %u: its warp is at another instruction (%d, %d)", blockIdx.x,
                     me->x, kind, m->kind);
    m->kind = kind;
    if (++m->arrived < members) {
        me->next = m->waiting, m->waiting = me;
        yield();
        return;
    }
    for (Thread *t = m->waiting; t; t = t->next)
        add_thread(&block->ready, t);
    *m = (Barrier){.arrived = 0};
    if (emulated_one_in(2)) return;
    add_thread(&block->ready, me);
    yield();
}

uint64_t *emulated_exchange(int instruction, uint64_t value) {
    Thread *me = block->running;
    unsigned warp = me->x / WARP;
    uint64_t *values = block->values[warp][block->rounds[me->x]++ % 2];
    values[me->x % WARP] = value;
    arrive_and_wait(&block->warp[warp], WARP, instruction);
    return values;
}

unsigned emulated_vote(int instruction, int is) {
    Thread *me = block->running;
    unsigned warp = me->x / WARP, *votes = &block->votes[warp][block->rounds[me->x]++ % 2];
    if (!block->warp[warp].arrived) *votes = 0;
    *votes |= (unsigned)(is != 0) << me->x % WARP;
    arrive_and_wait(&block->warp[warp], WARP, instruction);
    return *votes;
}

void emulated_barrier(int id, int threads) {
    arrive_and_wait(&block->named[id], threads, threads);
}

int emulated_barrier_and(int value) {
    emulated_barrier(0, block->threads);
    block->all = 1;
    emulated_barrier(0, block->threads);
    block->all = block->all && value;
    emulated_barrier(0, block->threads);
    return block->all;
}

/* ---- start and end ---- */

void *emulated_shared(void) {
    return block->shared;
}

/* Run the kernel on a new fiber. The last thread to end returns to emulated_run_block. */
static void begin(void) {
    block->kernel(block->arguments);
    Fiber gone;
    if (++block->ended == block->threads)
        fiber_switch(&gone, &block->outside);
    else
        switch_to(&gone, next_thread());
}

static void *map(size_t bytes, size_t guard) {
    char *memory = mmap(NULL, bytes + guard, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || (guard && mprotect(memory + bytes, guard, PROT_NONE)))
        emulated_die("no memory for a block");
    return memory;
}

static void open_block(void) {
    size_t shared = (EMULATED_SHARED_BYTES + 4095) & ~(size_t)4095;
    block = map(sizeof(*block), 0);
    block->stacks = map(MAX_THREADS * STACK_BYTES, 0);
    block->shared_end = (char *)map(shared, 4096) + shared;
}

/* Reset the block for a launch. Its dynamic shared memory ends at the guard page. */
static void fill_block(const EmulatedGrid *grid, uint64_t seed) {
    size_t shared = (grid->shared + 127) & ~(size_t)127;
    block->shared = block->shared_end - shared;
    memset(block->shared, GARBAGE, shared);
    block->threads = (int)grid->threads, block->ended = 0, block->idle = 0;
    block->random_state = seed * 0x9e3779b97f4a7c15ull | 1;
    block->copy_delay = 1u << emulated_draw(4);
    block->ready.count = block->polling.count = 0;
    memset(block->rounds, 0, sizeof(block->rounds));
    for (unsigned i = 0; i < grid->threads; i++) {
        Thread *t = &block->thread[i];
        char *stack = block->stacks + i * STACK_BYTES;
        t->x = i;
        *(uint64_t *)(void *)stack = STACK_END;
        fiber_init(&t->fiber, stack, STACK_BYTES, begin);
        add_thread(&block->ready, t);
    }
}

static void close_block(void) {
    emulated_copy_all();
    for (int i = 0; i < block->threads; i++)
        if (*(uint64_t *)(void *)(block->stacks + (size_t)i * STACK_BYTES) != STACK_END)
            emulated_die("thread %d needs a larger stack", i);
}

/* Delay some blocks, so that others must wait for them. */
static void delay_start(void) {
    struct timespec t = {0, (long)emulated_draw(300000)};
    if (emulated_one_in(4)) nanosleep(&t, NULL);
}

void emulated_run_block(const EmulatedGrid *grid, unsigned index, uint64_t seed,
                        void (*kernel)(const void *arguments), const void *arguments) {
    if (!block) open_block();
    blockIdx.x = index, blockDim.x = grid->threads, gridDim.x = grid->blocks;
    block->kernel = kernel, block->arguments = arguments;
    fill_block(grid, seed);
    delay_start();
    switch_to(&block->outside, next_thread());
    close_block();
}
