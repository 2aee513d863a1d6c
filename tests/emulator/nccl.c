/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators and windows of ranks that are threads of this process. */
#include <cublas_v2.h>
#include <cuda.h>
#include <nccl.h>
#include <nccl_device.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/device.h"
#include "tests/emulator/launch.h"

#define EMULATOR_REAL_DLFCN
#include <dlfcn.h>
#undef dlopen
#undef dlsym

enum { MAX_RANKS = EMULATED_MAX_GPUS, VERSION = 22803 }; /* or EMULATED_NCCL */

/* What a rank says in a split. */
typedef struct Part {
    int color, key;
} Part;

/* The state of a communicator that its ranks share. Collective calls are rounds: a round is over
 * when all ranks have arrived. */
typedef struct Shared {
    struct Shared *next;
    char id[NCCL_UNIQUE_ID_BYTES];
    int size;
    int arrived; /* in the current round */
    int members; /* ranks that have not destroyed it */
    unsigned rounds;
    void *values[2][MAX_RANKS]; /* of the current and the previous round, which may still be read */
    Part parts[2][MAX_RANKS];   /* likewise, if the round is a split */
    /* Collectives on streams. */
    int running;                  /* tasks on streams that use this struct */
    int present, leaving;         /* ranks in the current collective; of these, who has copied */
    unsigned collectives;         /* completed */
    const void *given[MAX_RANKS]; /* each rank's data in the current collective */
    size_t bytes[MAX_RANKS];
    int aborted[MAX_RANKS], any_aborted; /* then no collective completes */
} Shared;

typedef enum Kind { GATHER, SUM, MAX, EXCHANGE } Kind;

/* A send or receive of an exchange. */
typedef struct Message {
    int peer, is_send;
    void *memory;
    size_t bytes;
    struct Message *next; /* in the order of the calls */
} Message;

/* One rank's part in a collective on a stream. */
typedef struct Collective {
    ncclComm_t comm; /* where it is captured: its replays are numbered when they are launched */
    Shared *shared;
    int rank;
    Kind kind;
    unsigned number; /* of the collective; equal on all ranks */
    const void *from;
    void *to;
    size_t bytes;
    cudaStream_t stream;
    Message *messages; /* of an exchange */
} Collective;

enum { MOST_GROUPED = 4096 };

/* The calls between ncclGroupStart and ncclGroupEnd, of one communicator. */
typedef struct Group {
    int open, count;
    ncclComm_t comm;
    Collective calls[MOST_GROUPED];
    Message *first, **end; /* one exchange has all messages */
    cudaStream_t stream;
} Group;

static __thread Group *group;

/* Which ncclCommGetAsyncError enqueues what waits in a nonblocking communicator: one that is in
 * it now, the next one, the one after that. */
enum Starting { START_NOW = 1, START_NEXT, START_LATER };

struct ncclComm {
    Shared *shared;
    int rank, device, blocking;
    int pending; /* has arrived in a round that was not over at the last check */
    unsigned round;
    ncclWindow_t *window; /* output for the window of that round, or NULL */
    ncclComm_t *part;     /* output for the communicator of that round, or NULL */
    int part_blocking;
    int inside;           /* whether a call waits for the round */
    unsigned collectives; /* number of collectives called */
    int captured;         /* of these, those in graphs that are still there */
    int starting;         /* Starting; 0: nothing waits */
    int num_waiting;
    Collective *waiting;
};

/* In memory of the rank's device, as NCCL's. */
struct ncclWindow_vidmem {
    int size, rank;
    char *memory[MAX_RANKS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t round_over = PTHREAD_COND_INITIALIZER;
static Shared *all_shared;
static unsigned ids;

/* Arrive in the current round with a value; the last rank to arrive ends the round. The lock is
 * held here and in the functions below that take no lock. */
static void arrive(ncclComm_t comm, void *mine, ncclWindow_t *window) {
    Shared *c = comm->shared;
    comm->pending = 1, comm->round = c->rounds, comm->window = window;
    c->values[c->rounds % 2][comm->rank] = mine;
    if (++c->arrived < c->size) return;
    c->arrived = 0, c->rounds++;
    pthread_cond_broadcast(&round_over);
}

static int has_finished(const struct ncclComm *comm) {
    return !comm->pending || comm->shared->rounds != comm->round;
}

static Shared *find_shared(const ncclUniqueId *id, int size) {
    Shared *c = all_shared;
    while (c && memcmp(c->id, id->internal, sizeof(c->id)))
        c = c->next;
    if (c) return c;
    c = calloc(1, sizeof(*c));
    if (!c) emulated_die("no memory for a communicator");
    memcpy(c->id, id->internal, sizeof(c->id));
    c->size = c->members = size, c->next = all_shared, all_shared = c;
    return c;
}

/* Make this rank's communicator of a split. Ranks of a color are numbered by key, then by rank. */
static void take_part(ncclComm_t comm) {
    const Part *all = comm->shared->parts[comm->round % 2], *own = &all[comm->rank];
    ncclComm_t *out = comm->part, made = calloc(1, sizeof(*made));
    ncclUniqueId id = {{0}};
    int size = 0, rank = 0;
    if (!made) emulated_die("no memory for a communicator");
    for (int r = 0; r < comm->shared->size; r++) {
        if (all[r].color != own->color) continue;
        size++;
        rank += all[r].key < own->key || (all[r].key == own->key && r < comm->rank);
    }
    snprintf(id.internal, sizeof(id.internal), "%.90s, round %u, color %d", comm->shared->id,
             comm->round, own->color);
    made->shared = find_shared(&id, size), made->rank = rank, made->device = comm->device;
    made->blocking = comm->part_blocking;
    *out = made;
}

/* Finish the round: hand out what it has made. */
static ncclResult_t take_result(ncclComm_t comm) {
    ncclWindow_t *out = comm->window, window = NULL;
    comm->pending = 0, comm->window = NULL;
    if (comm->part) take_part(comm);
    comm->part = NULL;
    if (!out) return ncclSuccess;
    if (cudaMalloc((void **)&window, sizeof(*window)) != cudaSuccess) return ncclSystemError;
    memset(window, 0, sizeof(*window));
    window->size = comm->shared->size, window->rank = comm->rank;
    memcpy(window->memory, comm->shared->values[comm->round % 2],
           (size_t)window->size * sizeof(void *));
    *out = window;
    return ncclSuccess;
}

/* Take part in a round. With `blocking` 0 return at once: ncclCommGetAsyncError completes the
 * round. */
static ncclResult_t synchronise(ncclComm_t comm, void *mine, ncclWindow_t *window, int blocking) {
    const Shared *c = comm->shared;
    arrive(comm, mine, window);
    comm->inside = blocking;
    while (blocking && !has_finished(comm) && !c->aborted[comm->rank])
        pthread_cond_wait(&round_over, &mutex);
    comm->inside = 0;
    if (!blocking) return ncclInProgress;
    pthread_cond_broadcast(&round_over);
    return c->aborted[comm->rank] ? ncclSystemError : take_result(comm);
}

/* ---- collectives on streams ---- */

static int waits(const Collective *c, int condition) {
    if (c->shared->aborted[c->rank]) return 0;
    if (condition) pthread_cond_wait(&round_over, &mutex);
    return condition;
}

static void gather(const Collective *c) {
    const Shared *s = c->shared;
    for (int r = 0; r < s->size; r++) {
        char *to = (char *)c->to + (size_t)r * c->bytes;
        while (s->bytes[r] != c->bytes && waits(c, 1))
            ; /* NCCL does not find out, and never ends */
        if (s->aborted[c->rank]) return;
        if (to != s->given[r]) memcpy(to, s->given[r], c->bytes);
    }
}

/* Returns the n-th send of a rank to another one. */
static const Message *find_send(const Message *m, int to, int n) {
    for (; m; m = m->next)
        if (m->is_send && m->peer == to && n-- == 0) return m;
    return NULL;
}

/* Returns how many receives from the same rank precede this one. */
static int count_before(const Message *first, const Message *m) {
    int count = 0;
    for (; first != m; first = first->next)
        count += !first->is_send && first->peer == m->peer;
    return count;
}

static void receive(const Collective *c) {
    const Shared *s = c->shared;
    for (const Message *m = c->messages; m; m = m->next) {
        if (m->is_send) continue;
        const Message *sent = NULL; /* of a rank that aborts, they are freed */
        if (!s->aborted[m->peer])
            sent = find_send(s->given[m->peer], c->rank, count_before(c->messages, m));
        while ((s->aborted[m->peer] || !sent || sent->bytes != m->bytes) && waits(c, 1))
            ; /* NCCL does not find out, and never ends */
        if (s->aborted[c->rank]) return;
        memcpy(m->memory, sent->memory, m->bytes);
    }
}

/* A reduction of 32-bit numbers, computed before it is stored, since it may be in place. */
static void reduce(const Collective *c, uint32_t *out) {
    for (size_t i = 0; i < c->bytes / sizeof(*out); i++)
        for (int r = 0; r < c->shared->size; r++) {
            uint32_t x = ((const uint32_t *)c->shared->given[r])[i];
            out[i] = c->kind == SUM ? out[i] + x : x > out[i] ? x : out[i];
        }
}

static void free_messages(Message *m) {
    while (m) {
        Message *next = m->next;
        free(m);
        m = next;
    }
}

/* Blocks of a kernel of NCCL: EMULATED_NCCL_BLOCKS (1). */
static int count_blocks(void) {
    const char *text = getenv("EMULATED_NCCL_BLOCKS");
    return text ? atoi(text) : 1;
}

/* Runs on the stream's thread. Collectives of a communicator take turns, on all streams. A rank
 * stays until all ranks have read its data. */
static void run_collective(void *arguments) {
    const Collective *c = arguments;
    Shared *s = c->shared;
    int reduces = c->kind == SUM || c->kind == MAX;
    uint32_t *reduced = reduces ? calloc(1, c->bytes) : NULL;
    emulated_take_places(emulated_device(), count_blocks());
    pthread_mutex_lock(&mutex);
    while (waits(c, s->collectives != c->number))
        ;
    s->given[c->rank] = c->kind == EXCHANGE ? (const void *)c->messages : c->from;
    s->bytes[c->rank] = c->bytes;
    s->present++;
    pthread_cond_broadcast(&round_over);
    while (waits(c, s->present < s->size || s->any_aborted))
        ;
    if (!s->aborted[c->rank]) {
        if (reduces)
            reduce(c, reduced);
        else if (c->kind == EXCHANGE)
            receive(c);
        else
            gather(c);
        if (++s->leaving == s->size) s->present = s->leaving = 0, s->collectives++;
        pthread_cond_broadcast(&round_over);
    }
    while (waits(c, s->collectives == c->number))
        ;
    if (reduces && !s->aborted[c->rank]) memcpy(c->to, reduced, c->bytes);
    s->running--;
    pthread_cond_broadcast(&round_over);
    pthread_mutex_unlock(&mutex);
    emulated_leave_places(emulated_device(), count_blocks());
    free(reduced);
    free_messages(c->messages);
}

static Message *copy_messages(const Message *m) {
    Message *first = NULL, **end = &first;
    for (; m; m = m->next, end = &(*end)->next) {
        *end = malloc(sizeof(**end));
        if (!*end) emulated_die("no memory for messages");
        **end = *m, (*end)->next = NULL;
    }
    return first;
}

/* A replay of a captured collective is launched. */
static void renew_collective(void *arguments) {
    Collective *c = arguments;
    pthread_mutex_lock(&mutex);
    c->number = c->comm->collectives++;
    c->shared->running++;
    pthread_mutex_unlock(&mutex);
    c->messages = copy_messages(c->messages);
}

/* The graph with a captured collective is gone. */
static void drop_collective(void *arguments) {
    Collective *c = arguments;
    pthread_mutex_lock(&mutex);
    c->comm->captured--;
    pthread_cond_broadcast(&round_over);
    pthread_mutex_unlock(&mutex);
    free_messages(c->messages);
}

static const EmulatedReplays collective_replays = {renew_collective, drop_collective};

/* Give a collective its place in the order of the calls; replays get theirs later. The messages of
 * a captured one stay with the graph. */
static void number_collective(ncclComm_t comm, Collective *c) {
    c->comm = comm, c->shared = comm->shared, c->rank = comm->rank;
    if (emulated_captures(c->stream)) {
        comm->captured++;
        return;
    }
    c->number = comm->collectives++;
    comm->shared->running++;
}

/* Enqueue collectives. On a nonblocking communicator ncclCommGetAsyncError does so later, and until
 * then no other call may use the communicator. */
static ncclResult_t enqueue_all(ncclComm_t comm, const Collective *calls, int count) {
    pthread_mutex_lock(&mutex);
    if (comm->starting || !has_finished(comm)) {
        pthread_mutex_unlock(&mutex);
        return ncclInvalidArgument;
    }
    Collective *mine = malloc((size_t)count * sizeof(*mine));
    if (!mine) emulated_die("no memory for collectives");
    for (int i = 0; i < count; i++) {
        mine[i] = calls[i];
        number_collective(comm, &mine[i]);
    }
    int blocking = comm->blocking;
    if (!blocking) comm->waiting = mine, comm->num_waiting = count, comm->starting = START_LATER;
    pthread_mutex_unlock(&mutex);
    if (!blocking) return ncclInProgress;
    for (int i = 0; i < count; i++)
        emulated_enqueue(mine[i].stream, run_collective, &collective_replays, &mine[i],
                         sizeof(mine[i]));
    free(mine);
    return ncclSuccess;
}

static ncclResult_t collective(ncclComm_t comm, const Collective *c) {
    if (!group || !group->open) return enqueue_all(comm, c, 1);
    if (group->count == MOST_GROUPED || (group->comm && group->comm != comm))
        return ncclInvalidArgument;
    group->comm = comm;
    group->calls[group->count++] = *c;
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    if (type != ncclUint8) return ncclInvalidArgument;
    return collective(comm,
                      &(Collective){.from = from, .to = to, .bytes = count, .stream = stream});
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    int sums = type == ncclInt32 && op == ncclSum;
    if (!sums && (type != ncclUint32 || op != ncclMax)) return ncclInvalidArgument;
    return collective(comm, &(Collective){.kind = sums ? SUM : MAX,
                                          .from = from,
                                          .to = to,
                                          .bytes = count * sizeof(int),
                                          .stream = stream});
}

/* ---- groups of calls ---- */

/* A group of another thread is another group. Messages outside of a group are not supported. */
ncclResult_t ncclGroupStart(void) {
    if (!group) group = calloc(1, sizeof(*group));
    if (!group) emulated_die("no memory for a group");
    group->open = 1, group->count = 0, group->comm = NULL;
    group->first = NULL, group->end = &group->first;
    return ncclSuccess;
}

static ncclResult_t add_message(int is_send, const void *memory, size_t bytes, int peer,
                                ncclComm_t comm, cudaStream_t stream) {
    Message *m = calloc(1, sizeof(*m));
    if (!m || !group || !group->open) return ncclInvalidArgument;
    *m = (Message){peer, is_send, (void *)(uintptr_t)memory, bytes, NULL};
    group->comm = comm, group->stream = stream;
    *group->end = m, group->end = &m->next;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    if (type != ncclUint8) return ncclInvalidArgument;
    return add_message(1, from, count, peer, comm, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    if (type != ncclUint8) return ncclInvalidArgument;
    return add_message(0, to, count, peer, comm, stream);
}

ncclResult_t ncclGroupEnd(void) {
    if (!group || !group->open) return ncclInvalidArgument;
    group->open = 0;
    if (group->first)
        group->calls[group->count++] =
            (Collective){.kind = EXCHANGE, .messages = group->first, .stream = group->stream};
    return group->count ? enqueue_all(group->comm, group->calls, group->count) : ncclSuccess;
}

/* ---- communicators ---- */

ncclResult_t ncclGetVersion(int *version) {
    const char *other = getenv("EMULATED_NCCL");
    *version = other ? atoi(other) : VERSION;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "an error of the emulated NCCL";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out) {
    *out = (ncclUniqueId){{0}};
    pthread_mutex_lock(&mutex);
    snprintf(out->internal, sizeof(out->internal), "communicator %u", ++ids);
    pthread_mutex_unlock(&mutex);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    if (size > MAX_RANKS) return ncclInvalidArgument;
    ncclComm_t comm = calloc(1, sizeof(*comm));
    if (!comm) return ncclSystemError;
    pthread_mutex_lock(&mutex);
    comm->shared = find_shared(&id, size), comm->rank = rank, comm->device = emulated_device();
    comm->blocking = config->blocking;
    *out = comm;
    ncclResult_t result = synchronise(comm, NULL, NULL, comm->blocking);
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Returns whether this rank's split shall fail, as EMULATED_SPLIT_FAILS says. */
static int fails_to_split(const struct ncclComm *comm) {
    const char *rank = getenv("EMULATED_SPLIT_FAILS");
    return rank && atoi(rank) == comm->rank;
}

/* Only the communicator that is split says when a split is complete, and whether it blocks. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config) {
    *out = NULL;
    if (fails_to_split(comm)) return ncclSystemError;
    pthread_mutex_lock(&mutex);
    ncclResult_t result = ncclInvalidArgument;
    if (has_finished(comm) && !comm->starting) {
        comm->shared->parts[comm->shared->rounds % 2][comm->rank] = (Part){color, key};
        comm->part = color == NCCL_SPLIT_NOCOLOR ? NULL : out;
        comm->part_blocking = config->blocking;
        result = synchronise(comm, NULL, NULL, comm->blocking);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Enqueue what waits. Other threads may ask meanwhile. */
static void start(ncclComm_t comm) {
    for (int i = 0; i < comm->num_waiting; i++)
        emulated_enqueue(comm->waiting[i].stream, run_collective, &collective_replays,
                         &comm->waiting[i], sizeof(comm->waiting[i]));
    pthread_mutex_lock(&mutex);
    free(comm->waiting);
    comm->waiting = NULL, comm->num_waiting = 0, comm->starting = 0;
    pthread_mutex_unlock(&mutex);
}

/* Returns whether a collective of this rank can never complete, because a peer has aborted. NCCL
 * notices that as the peer closes its connections, before anything else may tell the rank. */
static int is_forsaken(const struct ncclComm *comm) {
    const Shared *c = comm->shared;
    return c->any_aborted && c->collectives < comm->collectives;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) {
    pthread_mutex_lock(&mutex);
    *out = has_finished(comm) ? take_result(comm) : ncclInProgress;
    if (*out == ncclSuccess && is_forsaken(comm)) *out = ncclRemoteError;
    int starts = comm->starting == START_NEXT;
    if (comm->starting && !starts) *out = ncclInProgress;
    if (comm->starting > START_NEXT) comm->starting--;
    if (starts) comm->starting = START_NOW;
    pthread_mutex_unlock(&mutex);
    if (starts) start(comm);
    return ncclSuccess;
}

/* Refuse a communicator that is still at work, as NCCL does. */
static ncclResult_t check_ready(ncclComm_t comm) {
    pthread_mutex_lock(&mutex);
    int ready = has_finished(comm) && !comm->starting;
    pthread_mutex_unlock(&mutex);
    return ready ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *out) {
    *out = comm->shared->size;
    return check_ready(comm);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out) {
    *out = comm->rank;
    return check_ready(comm);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *out) {
    *out = comm->device;
    return check_ready(comm);
}

/* Like NCCL, wait until the graphs are gone which its collectives were captured in. */
static ncclResult_t destroy(ncclComm_t comm, int abort) {
    pthread_mutex_lock(&mutex);
    Shared *c = comm->shared, **at = &all_shared;
    if (comm->starting) c->running -= comm->num_waiting; /* nothing will enqueue them now */
    c->aborted[comm->rank] = abort, c->any_aborted |= abort;
    pthread_cond_broadcast(&round_over);
    while (comm->inside || comm->captured)
        pthread_cond_wait(&round_over, &mutex);
    if (--c->members == 0) {
        while (c->running)
            pthread_cond_wait(&round_over, &mutex);
        while (*at != c)
            at = &(*at)->next;
        *at = c->next;
        free(c);
    }
    pthread_mutex_unlock(&mutex);
    free(comm->waiting);
    free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    return destroy(comm, 0);
}

/* Ends the rank's collectives on streams, too. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    return destroy(comm, 1);
}

ncclResult_t ncclMemAlloc(void **out, size_t bytes) {
    return cudaMalloc(out, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *memory) {
    return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *memory, size_t bytes, ncclWindow_t *out,
                                    int flags) {
    (void)flags;
    if (!emulated_reaches(memory, bytes)) return ncclInvalidArgument;
    pthread_mutex_lock(&mutex);
    *out = NULL;
    ncclResult_t result = synchronise(comm, memory, out, comm->blocking);
    pthread_mutex_unlock(&mutex);
    return result == ncclInProgress ? ncclSuccess : result; /* as NCCL 2.28.9 does */
}

/* Wait until all ranks deregister: none may free its memory before. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    pthread_mutex_lock(&mutex);
    ncclResult_t result = synchronise(comm, NULL, NULL, 1);
    pthread_mutex_unlock(&mutex);
    return cudaFree(window) == cudaSuccess ? result : ncclUnhandledCudaError;
}

/* NCCL has this from 2.29 on. */
static ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **out) {
    if (!emulated_reaches(window, sizeof(*window)) || window->size != comm->shared->size)
        return ncclInvalidArgument;
    *out = window->memory[window->rank];
    return ncclSuccess;
}

/* NCCL has this from 2.30 on. */
static ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer,
                                             void **out) {
    if (!emulated_reaches(window, sizeof(*window)) || peer >= window->size)
        return ncclInvalidArgument;
    *out = window->memory[peer] + offset;
    return ncclSuccess;
}

void *ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer) {
    return peer < window->size ? window->memory[peer] + offset : NULL;
}

/* ---- dlopen and dlsym ---- */

static int primary_state(int device, unsigned *flags, int *active) {
    *flags = 0, *active = emulated_is_in_use(device);
    return 0;
}

static int pointer_attribute(void *out, int what, unsigned long long address) {
    struct cudaPointerAttributes a;
    if (cudaPointerGetAttributes(&a, (const void *)(uintptr_t)address) != cudaSuccess ||
        a.type == cudaMemoryTypeUnregistered)
        return CUDA_ERROR_INVALID_VALUE;
    int type = a.type == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    *(int *)out = what == CU_POINTER_ATTRIBUTE_MEMORY_TYPE  ? type
                  : what == CU_POINTER_ATTRIBUTE_IS_MANAGED ? 0
                                                            : a.device;
    return 0;
}

static int address_range(unsigned long long *begin, size_t *bytes, unsigned long long address) {
    void *start = NULL;
    if (!emulated_allocation((const void *)(uintptr_t)address, &start, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    *begin = (unsigned long long)(uintptr_t)start;
    return 0;
}

/* The start of an allocation serves as its handle. */
static int retain_handle(unsigned long long *out, void *address) {
    size_t bytes;
    return address_range(out, &bytes, (unsigned long long)(uintptr_t)address);
}

static int release_handle(unsigned long long handle) {
    (void)handle;
    return 0;
}

/* Not in stream order: the stream's work ends first. */
static int set_words(unsigned long long address, unsigned value, size_t words,
                     cudaStream_t stream) {
    unsigned *word = (unsigned *)(uintptr_t)address;
    if (cudaStreamSynchronize(stream) != cudaSuccess || !emulated_reaches(word, words * 4))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < words; i++)
        word[i] = value;
    return 0;
}

static const struct {
    const char *name;
    void *function;
} functions[] = {
#define FUNCTION(name) \
    { #name, (void *)name }
    FUNCTION(ncclGetVersion),
    FUNCTION(ncclGetErrorString),
    FUNCTION(ncclGetUniqueId),
    FUNCTION(ncclCommInitRankConfig),
    FUNCTION(ncclCommSplit),
    FUNCTION(ncclCommGetAsyncError),
    FUNCTION(ncclCommCount),
    FUNCTION(ncclCommUserRank),
    FUNCTION(ncclCommCuDevice),
    FUNCTION(ncclAllGather),
    FUNCTION(ncclAllReduce),
    FUNCTION(ncclSend),
    FUNCTION(ncclRecv),
    FUNCTION(ncclGroupStart),
    FUNCTION(ncclGroupEnd),
    FUNCTION(ncclCommAbort),
    FUNCTION(ncclCommDestroy),
    FUNCTION(ncclMemAlloc),
    FUNCTION(ncclMemFree),
    FUNCTION(ncclCommWindowRegister),
    FUNCTION(ncclCommWindowDeregister),
    FUNCTION(ncclWinGetUserPtr),
    FUNCTION(ncclGetPeerDevicePointer),
    {"cuDevicePrimaryCtxGetState", (void *)primary_state},
    {"cuMemGetAddressRange_v2", (void *)address_range},
    {"cuMemRetainAllocationHandle", (void *)retain_handle},
    {"cuMemRelease", (void *)release_handle},
    {"cuMemsetD32Async", (void *)set_words},
    {"cuPointerGetAttribute", (void *)pointer_attribute}};

static char library, blas;

void *emulated_dlopen(const char *name, int flags) {
    if (name && (strncmp(name, "libnccl", 7) == 0 || strncmp(name, "libcuda", 7) == 0))
        return &library;
    if (name && strncmp(name, "libcublas", 9) == 0) return &blas;
    return dlopen(name, flags);
}

void *emulated_dlsym(void *handle, const char *name) {
    int version = VERSION;
    if (handle == &blas) return emulated_cublas(name);
    if (handle != &library) return dlsym(handle, name);
    ncclGetVersion(&version);
    if (version < 22900 && strcmp(name, "ncclWinGetUserPtr") == 0) return NULL;
    if (version < 23000 && strcmp(name, "ncclGetPeerDevicePointer") == 0) return NULL;
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++)
        if (strcmp(functions[i].name, name) == 0) return functions[i].function;
    return NULL;
}
