/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/emulator/graph.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/device.h"
#include "tests/emulator/launch.h"
#include "tests/emulator/worker.h"

enum { MOST_TRACKS = 16 };

typedef enum ItemKind { TASK, PASS, AWAIT } ItemKind;

typedef struct Item {
    ItemKind kind;
    int track, mark;
    void (*run)(void *arguments);
    EmulatedReplays replays;
    void *arguments;
    size_t bytes;
} Item;

/* Also its executable form: a graph does not change once its capture has ended. */
struct CUgraph_st {
    int owners; /* graph and executable graphs */
    int tracks, marks, count, room;
    Item *item;
};

/* A replay: copies of the items' arguments, and the marks that have been passed. */
typedef struct Replay {
    cudaGraph_t graph;
    void **arguments;    /* [count] */
    char *passed;        /* [marks] */
    int device, running; /* tracks that have not ended */
} Replay;

typedef struct Track {
    Replay *replay;
    int number;
} Track;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) emulated_die("no memory for a graph");
    return memory;
}

/* ---- recording ---- */

cudaGraph_t emulated_graph_open(void) {
    cudaGraph_t graph = allocate(sizeof(*graph));
    graph->owners = graph->tracks = 1;
    return graph;
}

int emulated_graph_add_track(cudaGraph_t graph) {
    if (graph->tracks == MOST_TRACKS)
        emulated_die("more than %d streams in a capture", MOST_TRACKS);
    return graph->tracks++;
}

int emulated_graph_add_mark(cudaGraph_t graph) {
    return graph->marks++;
}

static void add(cudaGraph_t graph, Item item) {
    if (graph->count == graph->room) {
        graph->room = 2 * graph->room + 16;
        graph->item = realloc(graph->item, (size_t)graph->room * sizeof(*graph->item));
        if (!graph->item) emulated_die("no memory for a graph");
    }
    graph->item[graph->count++] = item;
}

void emulated_graph_record(cudaGraph_t graph, int track, void (*run)(void *arguments),
                           const EmulatedReplays *replays, const void *arguments, size_t bytes) {
    static const EmulatedReplays none;
    void *copy = allocate(bytes);
    memcpy(copy, arguments, bytes);
    add(graph, (Item){TASK, track, 0, run, replays ? *replays : none, copy, bytes});
}

void emulated_graph_pass(cudaGraph_t graph, int track, int mark) {
    add(graph, (Item){.kind = PASS, .track = track, .mark = mark});
}

void emulated_graph_await(cudaGraph_t graph, int track, int mark) {
    add(graph, (Item){.kind = AWAIT, .track = track, .mark = mark});
}

/* Whether track 0 waits, perhaps through other tracks, for all that precedes the item. */
static int is_joined(const struct CUgraph_st *graph, int at) {
    int track = graph->item[at].track;
    if (track == 0) return 1;
    for (int i = at + 1; i < graph->count; i++) {
        const Item *mark = &graph->item[i];
        if (mark->track != track || mark->kind != PASS) continue;
        for (int j = i + 1; j < graph->count; j++) {
            const Item *wait = &graph->item[j];
            int waits = wait->kind == AWAIT && wait->mark == mark->mark && wait->track != track;
            if (waits && is_joined(graph, j)) return 1;
        }
    }
    return 0;
}

int emulated_graph_is_unjoined(const struct CUgraph_st *graph) {
    for (int i = 0; i < graph->count; i++)
        if (graph->item[i].kind == TASK && !is_joined(graph, i)) return 1;
    return 0;
}

/* ---- replaying ---- */

static void run_item(Replay *r, int i) {
    const Item *item = &r->graph->item[i];
    if (item->kind == TASK) {
        item->run(r->arguments[i]);
        return;
    }
    pthread_mutex_lock(&mutex);
    if (item->kind == PASS) r->passed[item->mark] = 1;
    if (item->kind == PASS) pthread_cond_broadcast(&changed);
    while (!r->passed[item->mark])
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

static void run_track(void *context) {
    const Track *track = context;
    const struct CUgraph_st *graph = track->replay->graph;
    cudaSetDevice(track->replay->device);
    for (int i = 0; i < graph->count; i++)
        if (graph->item[i].track == track->number) run_item(track->replay, i);
    pthread_mutex_lock(&mutex);
    track->replay->running--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

static void release(cudaGraph_t graph) {
    pthread_mutex_lock(&mutex);
    int left = --graph->owners;
    pthread_mutex_unlock(&mutex);
    if (left) return;
    for (int i = 0; i < graph->count; i++) {
        const Item *item = &graph->item[i];
        if (item->replays.drop) item->replays.drop(item->arguments);
        free(item->arguments);
    }
    free(graph->item);
    free(graph);
}

/* Runs on the thread of the stream. */
static void run_replay(void *arguments) {
    Replay *r = *(Replay **)arguments;
    Track track[MOST_TRACKS];
    r->running = r->graph->tracks;
    for (int i = 0; i < r->graph->tracks; i++)
        track[i] = (Track){r, i};
    for (int i = 1; i < r->graph->tracks; i++)
        emulated_start(run_track, &track[i]);
    run_track(&track[0]);
    pthread_mutex_lock(&mutex);
    while (r->running)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < r->graph->count; i++)
        free(r->arguments[i]);
    release(r->graph);
    free(r->arguments);
    free(r->passed);
    free(r);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags) {
    (void)flags;
    if (!graph) return emulated_error(cudaErrorInvalidValue);
    pthread_mutex_lock(&mutex);
    graph->owners++;
    pthread_mutex_unlock(&mutex);
    *out = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    (void)exec, (void)stream;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void *nodes, size_t *count) {
    (void)nodes;
    *count = 0;
    for (int i = 0; i < graph->count; i++)
        *count += graph->item[i].kind == TASK;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    cudaGraph_t graph = (cudaGraph_t)exec;
    if (!graph) return emulated_error(cudaErrorInvalidValue);
    Replay *r = allocate(sizeof(*r));
    *r = (Replay){.graph = graph, .device = emulated_device()};
    r->arguments = allocate((size_t)graph->count * sizeof(*r->arguments));
    r->passed = allocate((size_t)graph->marks);
    for (int i = 0; i < graph->count; i++) {
        const Item *item = &graph->item[i];
        if (item->kind != TASK) continue;
        r->arguments[i] = allocate(item->bytes);
        memcpy(r->arguments[i], item->arguments, item->bytes);
        if (item->replays.renew) item->replays.renew(r->arguments[i]);
    }
    pthread_mutex_lock(&mutex);
    graph->owners++;
    pthread_mutex_unlock(&mutex);
    emulated_enqueue(stream, run_replay, NULL, &r, sizeof(r));
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    if (graph) release(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    if (exec) release((cudaGraph_t)exec);
    return cudaSuccess;
}
