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

enum { MOST = 1024, WARP = 32, NAMED = 16, BUCKETS = 256, REST_AFTER = 64 };

#define STACK_BYTES ((size_t)32 << 10)
#define STACK_END 0x57ac4e4d57ac4e4dull
#define GARBAGE 0xa5

typedef struct Thread {
    Fiber fiber;
    unsigned x;
    const void *key; /* what it waits for */
    struct Thread *next;
} Thread;

/* Threads that wait for each other. */
typedef struct Meeting {
    int come, kind;
    Thread *waiting;
} Meeting;

/* Threads in any order; one is drawn. */
typedef struct Crowd {
    Thread *thread[MOST];
    int count;
} Crowd;

/* A block; the next one of the same OS thread has the same memory. */
typedef struct Block {
    Fiber outside;
    Thread thread[MOST], *running;
    int threads, ended, idle;
    Crowd ready, polling;
    Meeting warp[MOST / WARP], named[NAMED];
    uint64_t given[MOST / WARP][2][WARP]; /* two in turn: none is given anew before all have read */
    unsigned votes[MOST / WARP][2];
    unsigned turn[MOST];
    int all; /* of emulated_barrier_and */
    Thread *asleep[BUCKETS];
    uint64_t lot;
    unsigned laziness; /* of copies */
    char *stacks, *shared_end, *shared;
    void (*kernel)(const void *arguments);
    const void *arguments;
} Block;

__thread EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;
__thread char emulated_anchor;
static __thread Block *block;

/* ---- lots ---------------------------------------------------------------------------------- */

unsigned emulated_draw(unsigned n) {
    uint64_t x = block->lot;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    block->lot = x;
    return (unsigned)((x >> 32) * n >> 32);
}

int emulated_one_in(unsigned n) {
    return emulated_draw(n) == 0;
}

/* ---- who runs ------------------------------------------------------------------------------ */

static void join_crowd(Crowd *c, Thread *t) {
    c->thread[c->count++] = t;
}

static Thread *draw_from(Crowd *c) {
    unsigned i = emulated_draw((unsigned)c->count);
    Thread *t = c->thread[i];
    c->thread[i] = c->thread[--c->count];
    return t;
}

static void tell_deadlock(void) {
    for (int i = 0; i < block->threads; i += WARP)
        fprintf(stderr, "emulator: warp %d: %d threads wait at the warp's barrier\n", i / WARP,
                block->warp[i / WARP].come);
    for (int i = 0; i < NAMED; i++)
        if (block->named[i].come)
            fprintf(stderr, "emulator: %d threads wait at barrier %d\n", block->named[i].come, i);
    emulated_die("block %u: %d threads wait for each other, %d have ended", blockIdx.x,
                 block->threads - block->ended, block->ended);
}

/* All that could run only look at memory of others, and have for a while: let these have the
 * processor. */
static void rest(void) {
    struct timespec little = {0, 50000};
    if (++block->idle % REST_AFTER || block->ready.count || emulated_copy_something()) return;
    if (block->idle < 8 * REST_AFTER)
        sched_yield();
    else
        nanosleep(&little, NULL);
}

/* Copies take their time, in some blocks more than in others. */
static Thread *choose(void) {
    for (;;) {
        int lucky = emulated_one_in(16);
        if (lucky && emulated_one_in(block->laziness)) emulated_copy_something();
        if (block->ready.count && !(lucky && block->polling.count)) return draw_from(&block->ready);
        if (!block->ready.count && emulated_one_in(block->laziness) && emulated_copy_something())
            continue;
        if (block->polling.count) {
            rest();
            return draw_from(&block->polling);
        }
        if (!block->ready.count && !emulated_copy_something()) tell_deadlock();
    }
}

static void go_to(Fiber *from, Thread *t) {
    block->running = t;
    threadIdx.x = t->x;
    fiber_switch(from, &t->fiber);
}

/* The running thread lets others run; it is where it will be found again. */
static void leave(void) {
    Thread *me = block->running, *next = choose();
    if (next == me) return;
    go_to(&me->fiber, next);
}

void emulated_poll(void) {
    if (!emulated_one_in(4)) return;
    join_crowd(&block->polling, block->running);
    leave();
}

/* ---- waiting ------------------------------------------------------------------------------- */

static Thread **bucket_of(const void *key) {
    return &block->asleep[(uintptr_t)key / 8 % BUCKETS];
}

void emulated_wait_for(const void *key) {
    Thread *me = block->running, **bucket = bucket_of(key);
    me->key = key, me->next = *bucket, *bucket = me;
    leave();
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
        join_crowd(&block->ready, t);
    }
}

/* ---- meeting ------------------------------------------------------------------------------- */

static void meet(Meeting *m, int members, int kind) {
    Thread *me = block->running;
    if (m->come && m->kind != kind)
        emulated_die("block %u, thread %u: its warp is at another instruction (%d, %d)", blockIdx.x,
                     me->x, kind, m->kind);
    m->kind = kind;
    if (++m->come < members) {
        me->next = m->waiting, m->waiting = me;
        leave();
        return;
    }
    for (Thread *t = m->waiting; t; t = t->next)
        join_crowd(&block->ready, t);
    *m = (Meeting){.come = 0};
    if (emulated_one_in(2)) return;
    join_crowd(&block->ready, me);
    leave();
}

uint64_t *emulated_exchange(int instruction, uint64_t value) {
    Thread *me = block->running;
    unsigned warp = me->x / WARP;
    uint64_t *given = block->given[warp][block->turn[me->x]++ % 2];
    given[me->x % WARP] = value;
    meet(&block->warp[warp], WARP, instruction);
    return given;
}

unsigned emulated_vote(int instruction, int is) {
    Thread *me = block->running;
    unsigned warp = me->x / WARP, *votes = &block->votes[warp][block->turn[me->x]++ % 2];
    if (!block->warp[warp].come) *votes = 0;
    *votes |= (unsigned)(is != 0) << me->x % WARP;
    meet(&block->warp[warp], WARP, instruction);
    return *votes;
}

void emulated_barrier(int id, int threads) {
    meet(&block->named[id], threads, threads);
}

int emulated_barrier_and(int value) {
    emulated_barrier(0, block->threads);
    block->all = 1;
    emulated_barrier(0, block->threads);
    block->all = block->all && value;
    emulated_barrier(0, block->threads);
    return block->all;
}

/* ---- life ---------------------------------------------------------------------------------- */

void *emulated_shared(void) {
    return block->shared;
}

/* The last of the threads goes back to where the block was begun. */
static void begin(void) {
    block->kernel(block->arguments);
    Fiber gone;
    if (++block->ended == block->threads)
        fiber_switch(&gone, &block->outside);
    else
        go_to(&gone, choose());
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
    block->stacks = map(MOST * STACK_BYTES, 0);
    block->shared_end = (char *)map(shared, 4096) + shared;
}

/* Dynamic shared memory ends where the guard page begins. */
static void fill_block(const EmulatedGrid *grid, uint64_t seed) {
    size_t shared = (grid->shared + 127) & ~(size_t)127;
    block->shared = block->shared_end - shared;
    memset(block->shared, GARBAGE, shared);
    block->threads = (int)grid->threads, block->ended = 0, block->idle = 0;
    block->lot = seed * 0x9e3779b97f4a7c15ull | 1;
    block->laziness = 1u << emulated_draw(4);
    block->ready.count = block->polling.count = 0;
    memset(block->turn, 0, sizeof(block->turn));
    for (unsigned i = 0; i < grid->threads; i++) {
        Thread *t = &block->thread[i];
        char *stack = block->stacks + i * STACK_BYTES;
        t->x = i;
        *(uint64_t *)(void *)stack = STACK_END;
        fiber_init(&t->fiber, stack, STACK_BYTES, begin);
        join_crowd(&block->ready, t);
    }
}

static void close_block(void) {
    emulated_copy_everything();
    for (int i = 0; i < block->threads; i++)
        if (*(uint64_t *)(void *)(block->stacks + (size_t)i * STACK_BYTES) != STACK_END)
            emulated_die("thread %d needs a larger stack", i);
}

/* Blocks that begin late are what tests of waits need. */
static void be_late(void) {
    struct timespec t = {0, (long)emulated_draw(300000)};
    if (emulated_one_in(4)) nanosleep(&t, NULL);
}

void emulated_run_block(const EmulatedGrid *grid, unsigned index, uint64_t seed,
                        void (*kernel)(const void *arguments), const void *arguments) {
    if (!block) open_block();
    blockIdx.x = index, blockDim.x = grid->threads, gridDim.x = grid->blocks;
    block->kernel = kernel, block->arguments = arguments;
    fill_block(grid, seed);
    be_late();
    go_to(&block->outside, choose());
    close_block();
}
