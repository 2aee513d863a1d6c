/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: queues of tasks, each with an OS thread that runs them. Under capture a stream records
 * its tasks (graph.h). */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/emulator/device.h"
#include "tests/emulator/graph.h"
#include "tests/emulator/launch.h"
#include "tests/emulator/worker.h"

enum { QUEUE = 256, ARGUMENT_BYTES = 4096 + 64 };

typedef struct Task {
    void (*run)(void *arguments);
    _Alignas(16) char arguments[ARGUMENT_BYTES];
} Task;

struct CUstream_st {
    struct CUstream_st *next;
    int device, closing, closed;
    unsigned long long id, capture; /* id: unique; capture: id of the current capture, 0: none */
    cudaGraph_t graph;              /* of that capture */
    int track;
    uint64_t begun, done; /* number of tasks enqueued and completed */
    Task task[QUEUE];
    pthread_cond_t called; /* its thread, to a task or to the end */
};

struct CUevent_st {
    uint64_t recorded, passed;  /* number of times enqueued and completed */
    struct timespec at;         /* when it was completed last */
    unsigned long long capture; /* where it was recorded last; 0: in none */
    int mark;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t passed = PTHREAD_COND_INITIALIZER,
                      changed[EMULATED_MAX_GPUS] = {[0 ... EMULATED_MAX_GPUS - 1] =
                                                        PTHREAD_COND_INITIALIZER};
static cudaStream_t streams, defaults[EMULATED_MAX_GPUS];
static unsigned long long ids, captures;
static int drains[EMULATED_MAX_GPUS]; /* threads that free memory of a device */

/* ---- queues ---- */

static void serve(void *context) {
    cudaStream_t s = context;
    cudaSetDevice(s->device);
    pthread_mutex_lock(&mutex);
    while (s->begun != s->done || !s->closing) {
        if (s->begun == s->done) {
            pthread_cond_wait(&s->called, &mutex);
            continue;
        }
        Task *task = &s->task[s->done % QUEUE];
        pthread_mutex_unlock(&mutex);
        task->run(task->arguments);
        pthread_mutex_lock(&mutex);
        s->done++;
        pthread_cond_broadcast(&changed[s->device]);
    }
    s->closed = 1;
    pthread_cond_broadcast(&changed[s->device]);
    pthread_mutex_unlock(&mutex);
}

static cudaStream_t open_stream(int device) {
    cudaStream_t s = calloc(1, sizeof(*s));
    if (!s) emulated_die("no memory for a stream");
    pthread_cond_init(&s->called, NULL);
    s->device = device, s->id = ++ids, s->next = streams, streams = s;
    emulated_start(serve, s);
    return s;
}

/* Returns the stream, or the device's default stream for NULL. The lock is held. */
static cudaStream_t resolve(cudaStream_t stream) {
    int device = emulated_device();
    if (stream) return stream;
    if (!defaults[device]) defaults[device] = open_stream(device);
    return defaults[device];
}

/* Enqueue a task. Returns the value of `done` once the task is completed. The lock is held. */
static uint64_t enqueue(cudaStream_t s, void (*run)(void *), const void *arguments, size_t bytes) {
    if (bytes > ARGUMENT_BYTES) emulated_die("%zu bytes of arguments", bytes);
    while (s->begun - s->done == QUEUE)
        pthread_cond_wait(&changed[s->device], &mutex);
    Task *task = &s->task[s->begun % QUEUE];
    task->run = run;
    memcpy(task->arguments, arguments, bytes);
    uint64_t number = ++s->begun;
    pthread_cond_signal(&s->called);
    return number;
}

static void wait_for(const struct CUstream_st *s, uint64_t number) {
    while (s->done < number)
        pthread_cond_wait(&changed[s->device], &mutex);
}

static void submit(cudaStream_t stream, void (*run)(void *), const EmulatedReplays *replays,
                   const void *arguments, size_t bytes, int waits) {
    pthread_mutex_lock(&mutex);
    cudaStream_t s = resolve(stream);
    if (s->capture) {
        emulated_graph_record(s->graph, s->track, run, replays, arguments, bytes);
    } else {
        uint64_t number = enqueue(s, run, arguments, bytes);
        if (waits) wait_for(s, number);
    }
    pthread_mutex_unlock(&mutex);
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&mutex);
    *out = open_stream(emulated_device());
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out) {
    return cudaStreamCreateWithFlags(out, 0);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    (void)priority;
    return cudaStreamCreateWithFlags(out, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!stream) return emulated_error(cudaErrorInvalidValue);
    pthread_mutex_lock(&mutex);
    stream->closing = 1;
    pthread_cond_signal(&stream->called);
    while (!stream->closed)
        pthread_cond_wait(&changed[stream->device], &mutex);
    cudaStream_t *at = &streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&mutex);
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    pthread_mutex_lock(&mutex);
    cudaStream_t s = resolve(stream);
    int can = !s->capture;
    if (can) wait_for(s, s->begun);
    pthread_mutex_unlock(&mutex);
    return can ? cudaSuccess : emulated_error(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    pthread_mutex_lock(&mutex);
    cudaStream_t s = resolve(stream);
    int busy = s->begun != s->done, can = !s->capture;
    pthread_mutex_unlock(&mutex);
    if (!can) return emulated_error(cudaErrorStreamCaptureUnsupported);
    return busy ? cudaErrorNotReady : cudaSuccess;
}

static cudaStream_t busy_stream(int device) {
    for (cudaStream_t s = streams; s; s = s->next)
        if (s->device == device && s->begun != s->done) return s;
    return NULL;
}

cudaError_t cudaDeviceSynchronize(void) {
    int device = emulated_device();
    pthread_mutex_lock(&mutex);
    while (busy_stream(device))
        pthread_cond_wait(&changed[device], &mutex);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

/* As the driver does where memory is freed: nothing is enqueued until the device is idle. */
void emulated_drain(void) {
    int device = emulated_device();
    pthread_mutex_lock(&mutex);
    drains[device]++;
    while (busy_stream(device))
        pthread_cond_wait(&changed[device], &mutex);
    drains[device]--;
    pthread_cond_broadcast(&changed[device]);
    pthread_mutex_unlock(&mutex);
}

static void await_drains(cudaStream_t stream) {
    int device = stream ? stream->device : emulated_device();
    pthread_mutex_lock(&mutex);
    while (drains[device])
        pthread_cond_wait(&changed[device], &mutex);
    pthread_mutex_unlock(&mutex);
}

/* ---- copies ---- */

typedef struct Copy {
    void *to;
    const void *from; /* NULL: fill with `value` */
    int value;
    size_t bytes;
} Copy;

static void copy(void *arguments) {
    const Copy *c = arguments;
    if (c->from)
        memcpy(c->to, c->from, c->bytes);
    else
        memset(c->to, c->value, c->bytes);
}

/* The end of a copy from pageable memory, which cudaMemcpy does not wait for. */
typedef struct LateCopy {
    char *to;
    size_t bytes;
    char data[ARGUMENT_BYTES / 2];
} LateCopy;

static void copy_late(void *arguments) {
    const struct timespec while_under_way = {0, 2000000};
    const LateCopy *l = arguments;
    nanosleep(&while_under_way, NULL);
    memcpy(l->to, l->data, l->bytes);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    (void)kind;
    int pageable = emulated_reaches(to, bytes) && !emulated_reaches(from, bytes);
    LateCopy l = {.bytes = !pageable ? 0 : bytes < sizeof(l.data) ? bytes : sizeof(l.data)};
    size_t first = bytes - l.bytes;
    if (first) submit(NULL, copy, NULL, &(Copy){to, from, 0, first}, sizeof(Copy), 1);
    if (!l.bytes) return cudaSuccess;
    l.to = (char *)to + first;
    memcpy(l.data, (const char *)from + first, l.bytes);
    submit(NULL, copy_late, NULL, &l, sizeof(l), 0);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    (void)kind;
    await_drains(stream);
    if (bytes) submit(stream, copy, NULL, &(Copy){to, from, 0, bytes}, sizeof(Copy), 0);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    if (bytes) submit(stream, copy, NULL, &(Copy){to, NULL, value, bytes}, sizeof(Copy), 0);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, NULL);
}

/* ---- events ---- */

typedef struct Mark {
    cudaEvent_t event;
    uint64_t number;
} Mark;

static void pass_mark(void *arguments) {
    const Mark *m = arguments;
    pthread_mutex_lock(&mutex);
    if (m->event->passed < m->number) m->event->passed = m->number;
    clock_gettime(CLOCK_MONOTONIC, &m->event->at);
    pthread_cond_broadcast(&passed);
    pthread_mutex_unlock(&mutex);
}

static void wait_for_mark(void *arguments) {
    const Mark *m = arguments;
    pthread_mutex_lock(&mutex);
    while (m->event->passed < m->number)
        pthread_cond_wait(&passed, &mutex);
    pthread_mutex_unlock(&mutex);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    (void)flags;
    *out = calloc(1, sizeof(**out));
    return *out ? cudaSuccess : emulated_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaEventCreate(cudaEvent_t *out) {
    return cudaEventCreateWithFlags(out, 0);
}

/* The event is not freed: a stream may still use it. */
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return event ? cudaSuccess : emulated_error(cudaErrorInvalidValue);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    pthread_mutex_lock(&mutex);
    cudaStream_t s = resolve(stream);
    event->capture = s->capture;
    if (s->capture) {
        event->mark = emulated_graph_add_mark(s->graph);
        emulated_graph_pass(s->graph, s->track, event->mark);
    } else {
        Mark mark = {event, ++event->recorded};
        enqueue(s, pass_mark, &mark, sizeof(mark));
    }
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    pthread_mutex_lock(&mutex);
    int done = begin->passed == begin->recorded && end->passed == end->recorded && end->passed;
    *ms = (float)(1e3 * (double)(end->at.tv_sec - begin->at.tv_sec) +
                  1e-6 * (double)(end->at.tv_nsec - begin->at.tv_nsec));
    pthread_mutex_unlock(&mutex);
    return done ? cudaSuccess : emulated_error(cudaErrorInvalidValue);
}

/* Returns a stream that is in this capture, or NULL if it has ended. */
static cudaStream_t capturing_stream(unsigned long long capture) {
    cudaStream_t s = streams;
    while (s && s->capture != capture)
        s = s->next;
    return s;
}

/* A stream joins the capture of the event that it waits for. Within a capture it cannot wait for an
 * event from elsewhere. */
static cudaError_t await_captured(cudaStream_t s, const struct CUevent_st *event) {
    const struct CUstream_st *other = event->capture ? capturing_stream(event->capture) : NULL;
    if (s->capture && s->capture != event->capture) return cudaErrorStreamCaptureIsolation;
    if (!other) return cudaErrorCapturedEvent;
    if (!s->capture)
        s->capture = other->capture, s->graph = other->graph,
        s->track = emulated_graph_add_track(s->graph);
    emulated_graph_await(s->graph, s->track, event->mark);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&mutex);
    cudaStream_t s = resolve(stream);
    Mark mark = {event, event->recorded};
    if (event->capture || (s->capture && event->recorded))
        error = await_captured(s, event);
    else if (!s->capture)
        enqueue(s, wait_for_mark, &mark, sizeof(mark));
    pthread_mutex_unlock(&mutex);
    return error == cudaSuccess ? cudaSuccess : emulated_error(error);
}

/* ---- kernels ---- */

typedef struct Launch {
    EmulatedGrid grid;
    void (*kernel)(const void *arguments);
    _Alignas(16) char arguments[ARGUMENT_BYTES - 64];
} Launch;

static void run_kernel(void *arguments) {
    const Launch *launch = arguments;
    emulated_run_grid(&launch->grid, launch->kernel, launch->arguments);
}

void emulated_enqueue_kernel(const EmulatedGrid *grid, void (*kernel)(const void *arguments),
                             const void *arguments, size_t bytes) {
    Launch launch = {.grid = *grid, .kernel = kernel};
    if (bytes > sizeof(launch.arguments)) emulated_die("%zu bytes of arguments", bytes);
    memcpy(launch.arguments, arguments, bytes);
    submit(grid->stream, run_kernel, NULL, &launch, sizeof(launch), 0);
}

void emulated_enqueue(cudaStream_t stream, void (*run)(void *arguments),
                      const EmulatedReplays *replays, const void *arguments, size_t bytes) {
    submit(stream, run, replays, arguments, bytes, 0);
}

/* ---- captures ---- */

int emulated_captures(cudaStream_t stream) {
    pthread_mutex_lock(&mutex);
    int captures_now = resolve(stream)->capture != 0;
    pthread_mutex_unlock(&mutex);
    return captures_now;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    pthread_mutex_lock(&mutex);
    *id = resolve(stream)->id;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const void **nodes, size_t *number) {
    (void)graph, (void)nodes, (void)number;
    pthread_mutex_lock(&mutex);
    *id = resolve(stream)->capture;
    pthread_mutex_unlock(&mutex);
    *status = *id ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)mode;
    pthread_mutex_lock(&mutex);
    cudaStream_t s = resolve(stream);
    int is_new = !s->capture;
    if (is_new) s->capture = ++captures, s->graph = emulated_graph_open(), s->track = 0;
    pthread_mutex_unlock(&mutex);
    return is_new ? cudaSuccess : emulated_error(cudaErrorIllegalState);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static __thread enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = current;
    current = *mode, *mode = before;
    return cudaSuccess;
}

/* All streams that have joined the capture leave it. */
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
    pthread_mutex_lock(&mutex);
    cudaStream_t s = resolve(stream);
    unsigned long long capture = s->capture;
    *out = capture && s->track == 0 ? s->graph : NULL;
    for (cudaStream_t other = streams; other && *out; other = other->next)
        if (other->capture == capture) other->capture = 0, other->graph = NULL;
    pthread_mutex_unlock(&mutex);
    if (!*out) return emulated_error(cudaErrorIllegalState);
    if (!emulated_graph_is_unjoined(*out)) return cudaSuccess;
    cudaGraphDestroy(*out);
    *out = NULL;
    return emulated_error(cudaErrorStreamCaptureUnjoined);
}
