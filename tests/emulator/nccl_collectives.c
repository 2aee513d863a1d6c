/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives and messages on streams, and groups of calls. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/launch.h"
#include "tests/emulator/nccl_state.h"

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

/* ---- collectives on streams ---- */

static int waits(const Collective *c, int condition) {
    if (c->shared->aborted[c->rank]) return 0;
    if (condition) pthread_cond_wait(&nccl_changed, &nccl_mutex);
    return condition;
}

static void gather(const Collective *c) {
    const Shared *s = c->shared;
    for (int r = 0; r < s->size; r++) {
        char *to = (char *)c->to + (size_t)r * c->bytes;
        while ((s->bytes[r] != c->bytes || s->replayed[r] != c->replayed) && waits(c, 1))
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
        if (!s->aborted[m->peer] && s->replayed[m->peer] == c->replayed)
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

/* This rank's part of the sum of all ranks' fp32 or, where halved, bf16. */
static void reduce_scatter(const Collective *c) {
    const size_t width = c->kind == SUM_BF16 ? 2 : 4, count = c->bytes / width;
    for (size_t i = 0; i < count; i++) {
        float sum = 0, x;
        for (int r = 0; r < c->shared->size; r++) {
            uint32_t bits = 0; /* bf16 is the upper half of fp32 */
            memcpy((char *)&bits + 4 - width,
                   (const char *)c->shared->given[r] + ((size_t)c->rank * count + i) * width,
                   width);
            memcpy(&x, &bits, sizeof(x));
            sum += x;
        }
        uint32_t bits;
        memcpy(&bits, &sum, sizeof(bits));
        if (width == 2) bits += 0x7FFF + (bits >> 16 & 1); /* to nearest even */
        memcpy((char *)c->to + i * width, (char *)&bits + 4 - width, width);
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
    pthread_mutex_lock(&nccl_mutex);
    while (waits(c, s->collectives != c->number))
        ;
    s->given[c->rank] = c->kind == EXCHANGE ? (const void *)c->messages : c->from;
    s->bytes[c->rank] = c->bytes, s->replayed[c->rank] = c->replayed;
    s->present++;
    pthread_cond_broadcast(&nccl_changed);
    while (waits(c, s->present < s->size || s->any_aborted))
        ;
    if (!s->aborted[c->rank]) {
        if (reduces)
            reduce(c, reduced);
        else if (c->kind == EXCHANGE)
            receive(c);
        else if (c->kind == SUM_BF16 || c->kind == SUM_FP32)
            reduce_scatter(c);
        else
            gather(c);
        if (++s->leaving == s->size) s->present = s->leaving = 0, s->collectives++;
        pthread_cond_broadcast(&nccl_changed);
    }
    while (waits(c, s->collectives == c->number))
        ;
    if (reduces && !s->aborted[c->rank]) memcpy(c->to, reduced, c->bytes);
    s->running--;
    pthread_cond_broadcast(&nccl_changed);
    pthread_mutex_unlock(&nccl_mutex);
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
    pthread_mutex_lock(&nccl_mutex);
    c->number = c->comm->collectives++;
    c->shared->running++;
    pthread_mutex_unlock(&nccl_mutex);
    c->messages = copy_messages(c->messages);
}

/* The graph with a captured collective is gone. */
static void drop_collective(void *arguments) {
    Collective *c = arguments;
    pthread_mutex_lock(&nccl_mutex);
    c->comm->captured--;
    pthread_cond_broadcast(&nccl_changed);
    pthread_mutex_unlock(&nccl_mutex);
    free_messages(c->messages);
}

static const EmulatedReplays collective_replays = {renew_collective, drop_collective};

/* Give a collective its place in the order of the calls; replays get theirs later. The messages of
 * a captured one stay with the graph. */
static void number_collective(ncclComm_t comm, Collective *c) {
    c->comm = comm, c->shared = comm->shared, c->rank = comm->rank;
    c->replayed = emulated_captures(c->stream);
    if (c->replayed) {
        comm->captured++;
        return;
    }
    c->number = comm->collectives++;
    comm->shared->running++;
}

/* The first call on a communicator that blocks connects its ranks, and holds the thread until all
 * are there. One of EMULATED_CONNECT_FAILS does not come. With the lock. */
static ncclResult_t connect_ranks(ncclComm_t comm) {
    const char *fails = getenv("EMULATED_CONNECT_FAILS");
    if (!comm->blocking || comm->connected) return ncclSuccess;
    if (fails && atoi(fails) == comm->rank) return ncclSystemError;
    ncclResult_t result = nccl_synchronise(comm);
    comm->connected = result == ncclSuccess;
    return result;
}

/* Enqueue collectives. On a nonblocking communicator ncclCommGetAsyncError does so later, and until
 * then no other call may use the communicator. */
static ncclResult_t enqueue_all(ncclComm_t comm, const Collective *calls, int count) {
    pthread_mutex_lock(&nccl_mutex);
    int is_ready = !comm->starting && nccl_round_is_over(comm);
    ncclResult_t result = is_ready ? connect_ranks(comm) : ncclInvalidArgument;
    if (result != ncclSuccess) {
        pthread_mutex_unlock(&nccl_mutex);
        return result;
    }
    Collective *mine = malloc((size_t)count * sizeof(*mine));
    if (!mine) emulated_die("no memory for collectives");
    for (int i = 0; i < count; i++) {
        mine[i] = calls[i];
        number_collective(comm, &mine[i]);
    }
    int blocking = comm->blocking;
    if (!blocking) comm->waiting = mine, comm->num_waiting = count, comm->starting = START_LATER;
    pthread_mutex_unlock(&nccl_mutex);
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

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    int wide = type == ncclFloat32;
    if (op != ncclSum || (!wide && type != ncclBfloat16)) return ncclInvalidArgument;
    return collective(comm, &(Collective){.kind = wide ? SUM_FP32 : SUM_BF16,
                                          .from = from,
                                          .to = to,
                                          .bytes = count * (wide ? 4 : 2),
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

/* ---- nonblocking communicators ---- */

void nccl_start(ncclComm_t comm) {
    for (int i = 0; i < comm->num_waiting; i++)
        emulated_enqueue(comm->waiting[i].stream, run_collective, &collective_replays,
                         &comm->waiting[i], sizeof(comm->waiting[i]));
    pthread_mutex_lock(&nccl_mutex);
    free(comm->waiting);
    comm->waiting = NULL, comm->num_waiting = 0, comm->starting = 0;
    pthread_mutex_unlock(&nccl_mutex);
}
