/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies to and from shared memory. A copy is made at a random time until a thread has waited for
 * it: a kernel that does not wait reads old data or finds its stage overwritten.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/block.h"
#include "tests/emulator/launch.h"

#define MAX_COPIES 4096
#define THREADS 1024 /* of a block */

typedef struct Load {
    char *to;
    const char *from;
    uint32_t bytes;
    uint64_t *barrier;
} Load;

typedef struct Store {
    char *to;
    const char *from;
    uint32_t bytes;
    unsigned thread, group;
    char *data; /* the source's contents, once read */
} Store;

/* A thread's loads without bulk copies, and its arrivals behind them. */
typedef struct Queue {
    Load *load; /* one without bytes is an arrival */
    int loads, capacity;
} Queue;

typedef struct Copies {
    Queue queue[THREADS];
    int queued; /* loads of all queues */
    Load load[MAX_COPIES];
    Store store[MAX_COPIES];
    int loads, stores;
    unsigned group[THREADS]; /* of each thread: the group that it fills now */
} Copies;

static __thread Copies *copies;

static Copies *mine(void) {
    if (!copies) copies = calloc(1, sizeof(*copies));
    return copies;
}

static void check(const void *global, const void *smem, uint32_t bytes) {
    if (((uintptr_t)global | (uintptr_t)smem | bytes) % 16)
        emulated_die("a bulk copy of %u bytes between %p and %p is not aligned", bytes, global,
                     smem);
    if (!emulated_reaches(global, bytes))
        emulated_die("a bulk copy of %u bytes leaves its allocation at %p", bytes, global);
}

/* ---- loads ---- */

static void make_load(Copies *c, int i) {
    Load load = c->load[i];
    c->load[i] = c->load[--c->loads];
    memcpy(load.to, load.from, load.bytes);
    emulated_mbarrier_complete(load.barrier, load.bytes);
}

void emulated_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    Copies *c = mine();
    emulated_need_bulk("a bulk copy");
    check(from, to, bytes);
    if (c->loads == MAX_COPIES) make_load(c, 0);
    c->load[c->loads++] = (Load){to, from, bytes, barrier};
}

static void enqueue(Load load) {
    Queue *q = &mine()->queue[threadIdx.x];
    if (q->loads == q->capacity) {
        q->capacity = q->capacity ? 2 * q->capacity : 64;
        q->load = realloc(q->load, (size_t)q->capacity * sizeof(*q->load));
        if (!q->load) emulated_die("no memory");
    }
    q->load[q->loads++] = load;
    mine()->queued++;
}

void emulated_async_load(void *to, const void *from) {
    check(from, to, 16);
    enqueue((Load){to, from, 16, NULL});
}

void emulated_async_arrive(uint64_t *barrier) {
    enqueue((Load){.barrier = barrier});
}

/* Make the loads of some thread until its next arrival, and arrive. */
static void make_queued(Copies *c) {
    unsigned thread = emulated_draw(THREADS);
    while (!c->queue[thread].loads)
        thread = (thread + 1) % THREADS;
    Queue *q = &c->queue[thread];
    int made = 0;
    while (made < q->loads && q->load[made].bytes) {
        memcpy(q->load[made].to, q->load[made].from, 16);
        made++;
    }
    if (made < q->loads) emulated_mbarrier_arrive(q->load[made++].barrier, 0);
    memmove(q->load, q->load + made, (size_t)(q->loads -= made) * sizeof(*q->load));
    c->queued -= made;
}

/* ---- stores ---- */

static void read_store(Store *s) {
    if (s->data) return;
    s->data = malloc(s->bytes ? s->bytes : 1);
    if (!s->data) emulated_die("no memory");
    memcpy(s->data, s->from, s->bytes);
}

static void write_store(Copies *c, int i) {
    Store store = c->store[i];
    read_store(&store);
    memcpy(store.to, store.data, store.bytes);
    free(store.data);
    c->store[i] = c->store[--c->stores];
}

void emulated_bulk_store(void *to, const void *from, uint32_t bytes) {
    Copies *c = mine();
    emulated_need_bulk("a bulk copy");
    check(to, from, bytes);
    if (c->stores == MAX_COPIES) emulated_die("stores are not waited for");
    emulated_progress();
    c->store[c->stores++] = (Store){to, from, bytes, threadIdx.x, c->group[threadIdx.x], NULL};
}

void emulated_bulk_commit(void) {
    mine()->group[threadIdx.x]++;
}

void emulated_bulk_wait(int youngest, int written) {
    Copies *c = mine();
    if (emulated_one_in(2)) emulated_poll();
    for (int i = c->stores - 1; i >= 0; i--) {
        Store *s = &c->store[i];
        int age = (int)(c->group[threadIdx.x] - s->group); /* 1: the youngest committed group */
        if (s->thread != threadIdx.x || age <= youngest) continue;
        if (written)
            write_store(c, i);
        else
            read_store(s);
    }
}

/* ---- at random times ---- */

int emulated_copy_one(void) {
    Copies *c = mine();
    if (c->queued) return make_queued(c), 1;
    if (!c->loads && !c->stores) return 0;
    int i = (int)emulated_draw((unsigned)(c->loads + c->stores));
    if (i < c->loads)
        make_load(c, i);
    else if (emulated_one_in(2))
        write_store(c, i - c->loads);
    else
        read_store(&c->store[i - c->loads]);
    return 1;
}

void emulated_copy_all(void) {
    Copies *c = mine();
    while (c->stores)
        write_store(c, 0);
    if (c->loads + c->queued)
        emulated_die("a block has ended with %d loads under way", c->loads + c->queued);
    memset(c->group, 0, sizeof(c->group));
}
