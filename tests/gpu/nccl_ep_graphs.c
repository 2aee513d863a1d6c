/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of NCCL EP that are captured once and replayed with other routing, as decoding loops do. */
#include <stdlib.h>

#include "tests/gpu/devices.h"
#include "tests/gpu/nccl_ep_step.h"
#include "tests/harness/threads.h"

enum { REPLAYS = 20, FULL = 2 }; /* every eighth step from this one on has all its tokens */

static void set_up(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    gpu_reserve((size_t)256 << 20);
}

TestSuite(gpu_nccl_ep_graphs, .init = set_up);

static Case graph_case(int ranks, EpLayout layout, EpMode mode) {
    int tail = layout == EP_LAYOUT_RANK_MAJOR ? EP_TAIL_IDS : EP_TAIL_KEEP;
    return case_complete((Case){.ranks = ranks,
                                .experts = 3 * ranks + 1,
                                .top_k = 4,
                                .hidden = 256,
                                .max_tokens = 33,
                                .masked_percent = 5,
                                .merged = 1,
                                .alignment = mode == EP_MODE_LATENCY ? 1 : 8,
                                .capacity = mode == EP_MODE_LATENCY ? 0 : 33 * 4 * ranks + 64,
                                .rows_per_expert = 33 * ranks,
                                .layout = layout,
                                .mode = mode,
                                .zero_tail = tail,
                                .all_weights = 1,
                                .weighted = 1});
}

/* In low-latency mode the routing is read when the dispatch runs, and there is no backward pass. */
static void issue(NcclEpStep *s, int is_decoding) {
    if (!is_decoding) CHECK_NCCL(nccl_ep_update(s));
    CHECK_NCCL(nccl_ep_dispatch(s));
    if (s->send_only) CHECK_NCCL(nccl_ep_complete(s));
    CHECK_NCCL(nccl_ep_combine(s));
    if (s->send_only) CHECK_NCCL(nccl_ep_complete(s));
    if (is_decoding) return;
    CHECK_NCCL(nccl_ep_combine_backward(s));
    CHECK_NCCL(nccl_ep_dispatch_backward(s));
}

static cudaGraphExec_t capture(NcclEpStep *s, int is_decoding) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaStream_t stream = s->rank->stream;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    issue(s, is_decoding);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void replay(NcclEpStep *s, cudaGraphExec_t exec, unsigned dispatched, unsigned combined) {
    for (int i = 0; i < REPLAYS; i++) {
        check_note("replay %d", i);
        nccl_ep_step_reload(s, FULL + 8 * i);
        CHECK_CUDA(cudaGraphLaunch(exec, s->rank->stream));
        device_step_replayed(&s->dispatched, dispatched);
        device_step_replayed(&s->combined, combined);
        nccl_ep_step_check(s);
    }
}

static void run(const EpBootstrap *bootstrap, EpLayout layout, EpMode mode, int send_only) {
    NcclEpRank rank;
    NcclEpStep s;
    int is_decoding = mode == EP_MODE_LATENCY;
    Case c = graph_case(bootstrap->size, layout, mode);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, !is_decoding, !is_decoding);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, FULL, NULL, 0);
    s.send_only = send_only;
    nccl_ep_step_allocate(&s);
    CHECK_NCCL(nccl_ep_init(&s, c.top_k));
    if (is_decoding) CHECK_NCCL(nccl_ep_update(&s));
    cudaGraphExec_t exec = capture(&s, is_decoding);
    if (exec) {
        replay(&s, exec, STEP_DISPATCH | (is_decoding ? 0 : STEP_DISPATCH_BACKWARD),
               STEP_COMBINE | (is_decoding ? 0 : STEP_COMBINE_BACKWARD));
        CHECK_CUDA(cudaGraphExecDestroy(exec));
    }
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep_graphs, decode_expert_major_1, 1) {
    run(bootstrap, EP_LAYOUT_BATCHED, EP_MODE_LATENCY, 0);
}
ThreadTest(gpu_nccl_ep_graphs, decode_expert_major_2, 2) {
    run(bootstrap, EP_LAYOUT_BATCHED, EP_MODE_LATENCY, 0);
}
ThreadTest(gpu_nccl_ep_graphs, decode_rank_major_2, 2) {
    run(bootstrap, EP_LAYOUT_RANK_MAJOR, EP_MODE_LATENCY, 0);
}
ThreadTest(gpu_nccl_ep_graphs, decode_in_halves_2, 2) {
    run(bootstrap, EP_LAYOUT_BATCHED, EP_MODE_LATENCY, 1);
}
ThreadTest(gpu_nccl_ep_graphs, decode_expert_major_4, 4) {
    run(bootstrap, EP_LAYOUT_BATCHED, EP_MODE_LATENCY, 0);
}
ThreadTest(gpu_nccl_ep_graphs, train_2, 2) {
    run(bootstrap, EP_LAYOUT_EXPERT_MAJOR, EP_MODE_THROUGHPUT, 0);
}
ThreadTest(gpu_nccl_ep_graphs, train_4, 4) {
    run(bootstrap, EP_LAYOUT_EXPERT_MAJOR, EP_MODE_THROUGHPUT, 0);
}
