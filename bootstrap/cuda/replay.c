/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/cuda/replay.h"

#include <string.h>

#include "bootstrap/cuda/setup.h"
#include "bootstrap/cuda/watch_state.h"

static int32_t limit_of(const EpGroup *group) {
    int64_t limit = group->settings.node_graphs;
    return limit == EP_COUNT_AUTO ? EP_MOST_REPLAYS : (int32_t)ep_min(limit, EP_MOST_REPLAYS);
}

/* Returns an exchange that has come before. One that has not is noted, if there is room. */
static struct EpReplay *find(EpReplays *r, const EpExchange *e, int32_t limit) {
    for (int32_t i = 0; i < r->count; i++)
        if (memcmp(r->of[i].key, e->key, sizeof(e->key)) == 0) return &r->of[i];
    if (r->count < limit) memcpy(r->of[r->count++].key, e->key, sizeof(e->key));
    return NULL;
}

static EpStatus launch(const EpGroup *group, const EpExchange *e, int (*kernel)(const void *)) {
    return kernel ? ep_cuda_check(group, "kernel launch", kernel(e->context)) : EP_OK;
}

static EpStatus call(EpGroup *group, const EpCudaStream *stream, const EpExchange *e) {
    EP_TRY(ep_cuda_network_enter(group, stream));
    EP_TRY(ep_cuda_network_settle(group, e->what, e->call(e->context)));
    return launch(group, e, e->after);
}

/* NCCL is left before CUDA makes the graph, which may wait in the driver. */
static EpStatus capture(EpGroup *group, const EpExchange *e, cudaGraphExec_t *out) {
    EpCudaWatch *w = ep_cuda(group)->watch;
    cudaGraph_t graph = NULL;
    w->replays.has_graphs = 1;
    EP_TRY(ep_cuda_check(group, "cudaStreamBeginCapture",
                         cudaStreamBeginCapture(e->stream, cudaStreamCaptureModeRelaxed)));
    EpStatus status = ep_cuda_comm_settle(group, w->comm, e->what, e->call(e->context));
    ep_watch_say(w, EP_BUSY_WITH_GRAPHS);
    if (status == EP_OK) status = launch(group, e, e->after);
    cudaError_t error = cudaStreamEndCapture(e->stream, &graph);
    if (status == EP_OK) status = ep_cuda_check(group, "cudaStreamEndCapture", error);
    if (status == EP_OK)
        status = ep_cuda_check(group, "cudaGraphInstantiate", cudaGraphInstantiate(out, graph, 0));
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    return status;
}

/* A rank without a graph that the others have cannot go on: its failure is the group's. */
static EpStatus replay(EpGroup *group, const EpExchange *e, cudaGraphExec_t *graph) {
    EpCudaWatch *w = ep_cuda(group)->watch;
    if (!*graph) EP_TRY(capture(group, e, graph));
    ep_watch_say(w, EP_BUSY_WITH_GRAPHS);
    w->replays.launches++;
    return ep_cuda_check(group, "cudaGraphLaunch", cudaGraphLaunch(*graph, e->stream));
}

EpStatus ep_cuda_exchange(EpGroup *group, const EpCudaStream *stream, const EpExchange *exchange) {
    EpReplays *replays = &ep_cuda(group)->watch->replays;
    int may = !stream->captures && exchange->key[0];
    struct EpReplay *known = may ? find(replays, exchange, limit_of(group)) : NULL;
    if (!known) return call(group, stream, exchange);
    EP_TRY(ep_cuda_network_enter(group, stream));
    return ep_cuda_network_leave(group, exchange->what, replay(group, exchange, &known->graph));
}

void ep_cuda_replays_close(EpReplays *replays) {
    for (int i = 0; i < EP_MOST_REPLAYS; i++) {
        if (replays->of[i].graph) (void)cudaGraphExecDestroy(replays->of[i].graph);
        replays->of[i].graph = NULL;
    }
}
