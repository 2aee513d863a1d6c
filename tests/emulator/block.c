/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/emulator/block.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tests/emulator/fiber.h"
#include "tests/emulator/launch.h"
#include "tests/emulator/worker.h"

enum {
    MAX_THREADS = 1024,
    WARP = 32,
    WARPS = MAX_THREADS / WARP,
    NAMED = 16,
    BUCKETS = 256,
    LONGEST_BURST = 10, /* 1 to 512 switches */
    LEAST_ROUND = 16,   /* polls */
    YIELDS = 8,         /* until a block that only polls sleeps */
    NAP_NANOSECONDS = 200000,
    LONGEST_NAP = 1000000,
    SETS = 1024,
    WAYS = 4
};

/* Under the address sanitizer variables lie far apart. It knows nothing of fibers, and sees only
 * that their stacks are mapped memory. */
#ifdef __SANITIZE_ADDRESS__
#define STACK_BYTES ((size_t)256 << 10)
#else
#define STACK_BYTES ((size_t)32 << 10)
#endif
/* Stacks lie a few cache lines off a power of two, or their tops would share a few sets of the
 * cache, and each switch would miss it. */
#define STACK_STRIDE (STACK_BYTES + 320)
#define STACK_END 0x57ac4e4d57ac4e4dull
#define GARBAGE 0xa5

/* A thread that waits for a key: see emulated_wait_for. */
typedef struct Waiter {
    unsigned x;
    const void *key;
    struct Waiter *next;
} Waiter;

/* A warp. The lanes that can run do so in a random order: bit i of `ready` is lane i ^ turn. */
typedef struct Warp {
    uint32_t ready, polling;
    unsigned turn;
    /* The instruction at which lanes have arrived. Two sets of values are used alternately: lanes
     * may still read the last. */
    int arrived, kind;
    unsigned round, votes[2];
    uint64_t values[2][WARP];
} Warp;

/* A barrier of a block, with the lanes of each warp that wait at it. */
typedef struct Barrier {
    int arrived, kind;
    unsigned round;
    uint32_t waiting[WARPS];
} Barrier;

/* What was last seen of a word that others write. */
typedef struct Seen {
    const void *word;
    uint64_t value;
} Seen;

/* A block. Later blocks reuse the memory. */
typedef struct Block {
    struct Block *next; /* unused */
    Fiber outside, fiber[MAX_THREADS];
    unsigned running;        /* the thread */
    uint32_t ready, polling; /* warps with such lanes */
    unsigned burst;          /* switches until another warp may run */
    int threads, ended;
    /* Polls since the block got on, how many of them end the round, and rounds that have ended. */
    unsigned idle, round_end, rounds;
    Seen seen[SETS][WAYS];
    uint64_t random_state;
    unsigned copy_delay; /* a chance to make a bulk copy is used with probability 1 / this */
    Warp warp[WARPS];
    Barrier named[NAMED];
    int all[2]; /* of emulated_barrier_and */
    Waiter waiter[MAX_THREADS], *waiting[BUCKETS];
    char *stacks, *shared_end, *shared;
    void (*kernel)(const void *arguments);
    const void *arguments;
} Block;

__thread EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;
__thread char emulated_anchor;
static __thread Block *block;
static Block *unused;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of `unused` */

/* ---- random numbers ---- */

static inline uint32_t draw_word(void) {
    uint64_t x = block->random_state;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    block->random_state = x;
    return (uint32_t)(x >> 32);
}

unsigned emulated_draw(unsigned n) {
    return (unsigned)((uint64_t)draw_word() * n >> 32);
}

int emulated_one_in(unsigned n) {
    return emulated_draw(n) == 0;
}

/* Returns a bit of the set: the first one from a random place on. */
static unsigned draw_bit(uint32_t set) {
    unsigned from = emulated_draw(32);
    uint32_t turned = set >> from | set << (32 - from) % 32;
    return ((unsigned)__builtin_ctz(turned) + from) % 32;
}

/* ---- scheduling ---- */

static void make_ready(unsigned x) {
    Warp *w = &block->warp[x / WARP];
    w->ready |= 1u << ((x ^ w->turn) % WARP);
    block->ready |= 1u << x / WARP;
}

static unsigned take_ready(unsigned warp) {
    Warp *w = &block->warp[warp];
    unsigned at = (unsigned)__builtin_ctz(w->ready);
    w->ready &= w->ready - 1;
    if (w->ready)
        fiber_prefetch(&block->fiber[warp * WARP + ((unsigned)__builtin_ctz(w->ready) ^ w->turn)]);
    else
        block->ready &= ~(1u << warp);
    return warp * WARP + (at ^ w->turn);
}

static unsigned take_polling(void) {
    unsigned warp = draw_bit(block->polling), lane = draw_bit(block->warp[warp].polling);
    block->warp[warp].polling &= ~(1u << lane);
    if (!block->warp[warp].polling) block->polling &= ~(1u << warp);
    return warp * WARP + lane;
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

/* A round has a poll for each lane that polls. */
static void start_round(void) {
    unsigned lanes = 0;
    for (uint32_t left = block->polling; left; left &= left - 1)
        lanes += (unsigned)__builtin_popcount(block->warp[__builtin_ctz(left)].polling);
    block->round_end = block->idle + (lanes > LEAST_ROUND ? lanes : LEAST_ROUND);
}

/* All threads that can run only poll, and see nothing new: yield the processor to the blocks and
 * ranks that they wait for. */
static void back_off(void) {
    long naps = ++block->rounds - (long)YIELDS, nanoseconds = naps * NAP_NANOSECONDS;
    struct timespec nap = {0, nanoseconds < LONGEST_NAP ? nanoseconds : LONGEST_NAP};
    if (naps <= 0)
        sched_yield();
    else if (!emulated_copy_one())
        nanosleep(&nap, NULL);
    start_round();
}

/* Choose a warp for the next switches. Makes bulk copies now and then, in some blocks later than in
 * others. */
static unsigned next_burst(void) {
    block->burst = 1u << emulated_draw(LONGEST_BURST);
    if (!block->ready && ++block->idle >= block->round_end) back_off();
    for (;;) {
        if (emulated_one_in(2 * block->copy_delay)) emulated_copy_one();
        int polls = emulated_one_in(block->idle < LEAST_ROUND ? 8 : 2);
        if (block->ready && !(polls && block->polling)) return take_ready(draw_bit(block->ready));
        if (!block->ready && emulated_one_in(block->copy_delay) && emulated_copy_one()) continue;
        if (block->polling) return take_polling();
        if (!block->ready && !emulated_copy_one()) report_deadlock();
    }
}

/* Returns the thread to run next: for a while, lanes of the same warp. Some warps thus get far
 * ahead of others, which shows barriers that are missing. */
static inline unsigned next_thread(void) {
    unsigned warp = block->running / WARP;
    return block->burst-- && block->warp[warp].ready ? take_ready(warp) : next_burst();
}

static inline void switch_to(Fiber *from, unsigned x) {
    block->running = threadIdx.x = x;
    fiber_switch(from, &block->fiber[x]);
}

/* Switch to another thread. The caller has put the running one where it will be found again. */
static inline void yield(void) {
    unsigned me = block->running, next = next_thread();
    if (next != me) switch_to(&block->fiber[me], next);
}

void emulated_progress(void) {
    block->idle = block->rounds = 0, block->round_end = LEAST_ROUND;
}

/* A word that is not in its set takes the place of any other one: words that are polled by turns
 * rarely look new. */
void emulated_saw(const void *word, uint64_t value) {
    Seen *set = block->seen[((uintptr_t)word >> 3) * 0x9e3779b1u >> 10 & (SETS - 1)], *seen = set;
    while (seen < set + WAYS && seen->word != word)
        seen++;
    if (seen < set + WAYS && seen->value == value) return;
    if (seen == set + WAYS) seen = set + block->random_state % WAYS;
    *seen = (Seen){word, value};
    emulated_progress();
}

void emulated_poll(void) {
    if (!emulated_one_in(4)) return;
    unsigned warp = block->running / WARP;
    block->warp[warp].polling |= 1u << block->running % WARP;
    block->polling |= 1u << warp;
    yield();
}

/* ---- waiting ---- */

static Waiter **bucket_of(const void *key) {
    return &block->waiting[(uintptr_t)key / 8 % BUCKETS];
}

void emulated_wait_for(const void *key) {
    Waiter *me = &block->waiter[block->running], **bucket = bucket_of(key);
    *me = (Waiter){block->running, key, *bucket}, *bucket = me;
    yield();
}

void emulated_wake(const void *key) {
    emulated_progress();
    for (Waiter **at = bucket_of(key); *at;) {
        Waiter *w = *at;
        if (w->key != key) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        make_ready(w->x);
    }
}

/* ---- barriers ---- */

static void check_kind(int arrived, int *kind, int mine) {
    if (arrived && *kind != mine)
        emulated_die("block %u, thread %u: its warp is at another instruction (%d, %d)", blockIdx.x,
                     threadIdx.x, mine, *kind);
    *kind = mine;
}

/* The last lane that arrives lets all go on, in another order, or first goes on itself. */
static inline void meet_warp(Warp *w, int instruction) {
    check_kind(w->arrived, &w->kind, instruction);
    if (++w->arrived < WARP) {
        yield();
        return;
    }
    uint32_t drawn = draw_word();
    w->arrived = 0, w->round++;
    w->turn = drawn % WARP, w->ready = ~0u;
    block->ready |= 1u << block->running / WARP;
    if (drawn & WARP)
        w->ready &= ~(1u << ((block->running ^ w->turn) % WARP));
    else
        yield();
}

uint64_t *emulated_exchange(int instruction, uint64_t value) {
    Warp *w = &block->warp[block->running / WARP];
    uint64_t *values = w->values[w->round % 2];
    values[block->running % WARP] = value;
    meet_warp(w, instruction);
    return values;
}

unsigned emulated_vote(int instruction, int is) {
    Warp *w = &block->warp[block->running / WARP];
    unsigned *votes = &w->votes[w->round % 2];
    *votes = (w->arrived ? *votes : 0) | (unsigned)(is != 0) << block->running % WARP;
    meet_warp(w, instruction);
    return *votes;
}

void emulated_barrier(int id, int threads) {
    Barrier *b = &block->named[id];
    unsigned me = block->running;
    check_kind(b->arrived, &b->kind, threads);
    if (++b->arrived < threads) {
        b->waiting[me / WARP] |= 1u << me % WARP;
        yield();
        return;
    }
    b->arrived = 0, b->round++;
    emulated_progress();
    for (unsigned i = 0; i < WARPS; i++)
        for (; b->waiting[i]; b->waiting[i] &= b->waiting[i] - 1)
            make_ready(i * WARP + (unsigned)__builtin_ctz(b->waiting[i]));
    if (emulated_one_in(2)) return;
    make_ready(me);
    yield();
}

int emulated_barrier_and(int value) {
    const Barrier *b = &block->named[0];
    int *all = &block->all[b->round % 2];
    *all = value && (!b->arrived || *all);
    emulated_barrier(0, block->threads);
    return *all;
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

/* Take a block that has ended, or a new one. */
static void open_block(void) {
    size_t shared = (EMULATED_SHARED_BYTES + 4095) & ~(size_t)4095;
    pthread_mutex_lock(&mutex);
    block = unused;
    if (block) unused = block->next;
    pthread_mutex_unlock(&mutex);
    if (block) return;
    block = map(sizeof(*block), 0);
    block->stacks = map(MAX_THREADS * STACK_STRIDE, 0);
    block->shared_end = (char *)map(shared, 4096) + shared;
}

/* Reset the block for a launch. Its dynamic shared memory ends at the guard page. */
static void fill_block(const EmulatedGrid *grid, uint64_t seed) {
    size_t shared = (grid->shared + 127) & ~(size_t)127;
    block->shared = block->shared_end - shared;
    memset(block->shared, GARBAGE, shared);
    block->threads = (int)grid->threads, block->ended = 0;
    block->burst = 0;
    emulated_progress();
    block->random_state = seed * 0x9e3779b97f4a7c15ull | 1;
    block->copy_delay = 1u << emulated_draw(4);
    for (unsigned i = 0; i < grid->threads; i++) {
        char *stack = block->stacks + i * STACK_STRIDE;
        *(uint64_t *)(void *)stack = STACK_END;
        fiber_init(&block->fiber[i], stack, STACK_BYTES, begin);
        if (i % WARP == 0) block->warp[i / WARP].turn = emulated_draw(WARP);
        make_ready(i);
    }
}

static void close_block(void) {
    emulated_copy_all();
    for (int i = 0; i < block->threads; i++)
        if (*(uint64_t *)(void *)(block->stacks + (size_t)i * STACK_STRIDE) != STACK_END)
            emulated_die("thread %d needs a larger stack", i);
    pthread_mutex_lock(&mutex);
    block->next = unused, unused = block;
    pthread_mutex_unlock(&mutex);
}

/* Delay some blocks, so that others must wait for them. */
static void delay_start(void) {
    struct timespec t = {0, (long)emulated_draw(300000)};
    if (emulated_one_in(4)) nanosleep(&t, NULL);
}

void emulated_run_block(const EmulatedGrid *grid, unsigned index, uint64_t seed,
                        void (*kernel)(const void *arguments), const void *arguments) {
    open_block();
    blockIdx.x = index, blockDim.x = grid->threads, gridDim.x = grid->blocks;
    block->kernel = kernel, block->arguments = arguments;
    fill_block(grid, seed);
    delay_start();
    switch_to(&block->outside, next_thread());
    close_block();
}
