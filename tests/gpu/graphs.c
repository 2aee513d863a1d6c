/* SPDX-License-Identifier: Apache-2.0 */
/* Steps that are captured once and replayed, with new tokens, new routing and another T in the same
 * buffers: all operations of throughput mode, and a thousand times those of latency mode, whole and
 * in phases. The phases of two handles are also interleaved on two streams. */
#include <unistd.h>

#include "ep/ep_weight.h"
#include "tests/gpu/device_step.h"
#include "tests/harness/ranked.h"

enum { REPLAYS = 100, LATENCY_REPLAYS = 1000, TURNS = 300 };

GpuSuite(gpu_graphs, 640);
GpuSuite(gpu_replays, 640);

/* No size is a multiple of a block's part of the work or of a cache line. The capacity is too small
 * for some steps. Small steps follow large ones: their tails are zero, or have no ids. */
static Case graph_case(int ranks, EpLayout layout) {
    Case c = {.ranks = ranks, .experts = 4 * ranks + 1, .top_k = 4, .hidden = 136};
    c.max_tokens = 299, c.counted = 1, c.biases = 2, c.weighted = 1, c.scale_bytes = 12,
    c.masked_percent = 10;
    c.alignment = 8, c.capacity = 950, c.rows_per_expert = 160, c.overflow = EP_OVERFLOW_DROP;
    c.layout = layout, c.zero_tail = layout == EP_LAYOUT_FLAT ? EP_TAIL_IDS : EP_TAIL_ZERO;
    return case_complete(c);
}

/* Small, since the oracle computes every replay. Combines in phases get topk_weights. */
static Case latency_case(int ranks, EpLayout layout, int phases) {
    Case c = graph_case(ranks, layout);
    c.mode = EP_MODE_LATENCY, c.phases = phases, c.weights_at_combine = phases;
    c.experts = 2 * ranks + 1, c.top_k = 3, c.hidden = 40, c.max_tokens = 9;
    c.alignment = 4, c.capacity = 40, c.rows_per_expert = 12;
    return case_complete(c);
}

/* A device step of a new handle, and its graph. */
typedef struct GraphStep {
    DeviceStep gpu;
    cudaGraphExec_t exec;
} GraphStep;

static void graph_step_open(GraphStep *graph, EpGroup *group, const Case *c, int rank) {
    *graph = (GraphStep){.exec = NULL};
    device_step_new(&graph->gpu, group, c, rank);
    device_step_draw_step(&graph->gpu, 0);
}

static void graph_step_close(GraphStep *graph) {
    if (graph->exec) CHECK_CUDA(cudaGraphExecDestroy(graph->exec));
    device_step_close(&graph->gpu);
}

/* In phases the graph also copies the inputs, since each send phase is followed by stores over
 * them. So it can be replayed twice without the host. */
static void graph_step_capture(GraphStep *graph) {
    graph_begin(graph->gpu.stream);
    if (graph->gpu.c.mode == EP_MODE_LATENCY) device_step_bring_inputs(&graph->gpu);
    device_step_issue(&graph->gpu, device_step_all(&graph->gpu.c));
    graph->exec = graph_end(graph->gpu.stream);
}

/* What instantiates graphs may wait for kernels of other ranks of the process. */
static void meet(const EpBootstrap *bootstrap) {
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
}

/* Draw a step and run it: by the graph, so many times without waiting, so that ranks are not in
 * step; 0: by calls. */
static void graph_step_run(GraphStep *graph, int step, int times) {
    unsigned ops = device_step_all(&graph->gpu.c);
    device_step_draw_step(&graph->gpu, step);
    if (!times) device_step_issue(&graph->gpu, ops);
    for (int i = 0; i < times; i++)
        device_step_launch(&graph->gpu, graph->exec, ops);
    device_step_check(&graph->gpu);
}

/* ---- one graph ----------------------------------------------------------------------------- */

/* In every tenth step a rank makes the calls without the graph, while the others replay it; on
 * several nodes all ranks, since NCCL wants its calls alike. */
static void replay(const EpBootstrap *bootstrap, Case c) {
    EpGroup *group = open_group(bootstrap, &c);
    GraphStep graph;
    graph_step_open(&graph, group, &c, bootstrap->rank);
    graph_step_capture(&graph);
    meet(bootstrap);
    int steps = c.mode == EP_MODE_LATENCY ? LATENCY_REPLAYS : REPLAYS;
    for (int step = 0; step < steps && !check_failure()[0]; step++)
        graph_step_run(&graph, step, (step + (c.nodes[0] ? 0 : bootstrap->rank)) % 10 != 9);
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    graph_step_close(&graph);
}

#define REPLAY(layout) replay(bootstrap, graph_case(bootstrap->size, EP_LAYOUT_##layout))
RankTests(gpu_graphs, expert_major, REPLAY(EXPERT_MAJOR));
RankTests24(gpu_graphs, flat, REPLAY(FLAT));
RankTests24(gpu_graphs, batched, REPLAY(BATCHED));

#define LATENCY_REPLAY(layout, phases) \
    replay(bootstrap, latency_case(bootstrap->size, EP_LAYOUT_##layout, phases))
LatencyTests(gpu_replays, expert_major, LATENCY_REPLAY(EXPERT_MAJOR, 0));
LatencyTests(gpu_replays, batched_phases, LATENCY_REPLAY(BATCHED, 1));
LatencyTest(gpu_replays, rank_major_1, 1, LATENCY_REPLAY(RANK_MAJOR, 0));
LatencyTest(gpu_replays, rank_major_4, 4, LATENCY_REPLAY(RANK_MAJOR, 0));
LatencyTest(gpu_replays, rank_major_phases_2, 2, LATENCY_REPLAY(RANK_MAJOR, 1));

/* ---- placements ---------------------------------------------------------------------------- */

/* Each replay has another map, which a call or the graph itself places. */
static void replay_placed(const EpBootstrap *bootstrap, Case c, int captured) {
    enum { STEPS = 12 };
    c.physical = 5 * bootstrap->size + 1, c.map = MAP_RANDOM, c.choice = EP_CHOICE_SPREAD;
    EpGroup *group = open_group(bootstrap, &c);
    GraphStep graph;
    int32_t *map = gpu_allocate_zeroed((size_t)c.physical, sizeof(*map));
    const EpTensor tensor = ep_tensor_1d(map, EP_TYPE_INT32, c.physical);
    graph_step_open(&graph, group, &c, bootstrap->rank);
    graph_begin(graph.gpu.stream);
    if (captured) CHECK_OK(ep_group_place(group, &tensor, graph.gpu.stream));
    device_step_issue(&graph.gpu, device_step_all(&c));
    graph.exec = graph_end(graph.gpu.stream);
    meet(bootstrap);
    for (int step = 0; step < STEPS && !check_failure()[0]; step++) {
        device_step_draw_step(&graph.gpu, step);
        for (int p = 0; p < c.physical; p++)
            map[p] = world_map(&graph.gpu.step.world->c, p);
        if (!captured) CHECK_OK(ep_group_place(group, &tensor, graph.gpu.stream));
        device_step_launch(&graph.gpu, graph.exec, device_step_all(&c));
        device_step_check(&graph.gpu);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    graph_step_close(&graph);
    gpu_release(map);
}

#define PLACED(make, captured) replay_placed(bootstrap, make, captured)
RankTest(gpu_graphs, placed_2, 2, PLACED(graph_case(2, EP_LAYOUT_EXPERT_MAJOR), 0));
RankTest(gpu_graphs, places_2, 2, PLACED(graph_case(2, EP_LAYOUT_FLAT), 1));
LatencyTest(gpu_graphs, placed_in_latency_2, 2, PLACED(latency_case(2, EP_LAYOUT_BATCHED, 0), 0));
LatencyTest(gpu_graphs, places_in_latency_2, 2, PLACED(latency_case(2, EP_LAYOUT_FLAT, 0), 1));

/* Each replay moves all experts on by a place. A graph moves between the ranks that it knows. */
static void replay_moves(const EpBootstrap *bootstrap, int masks) {
    enum { PLACES = 9, ROW = 3001, REPEATS = 5 };
    be_quiet();
    EpGroup *group =
        open_group_of(bootstrap, masks ? "experts=9 physical=9 masks=1" : "experts=9 physical=9");
    EpGroupInfo info = group_info(group);
    int32_t from[PLACES], to[PLACES], n = info.num_local_experts;
    EpTensor rows = ep_tensor_2d(NULL, EP_TYPE_INT32, n, ROW);
    EpTensor workspace = ep_tensor_1d(gpu_allocate(64, 1 << 14), EP_TYPE_UINT8, 1 << 14);
    int32_t *row = rows.data = gpu_allocate(64, sizeof(int32_t) * (size_t)(n * ROW));
    cudaStream_t stream = new_stream();
    for (int p = 0; p < PLACES; p++)
        from[p] = p, to[p] = (p + PLACES - 1) % PLACES;
    for (int i = 0; i < n * ROW; i++)
        row[i] = info.first_expert + i / ROW;
    graph_begin(stream);
    CHECK_OK(ep_weight_move(group, from, to, &rows, 1, &workspace, stream, NULL));
    cudaGraphExec_t exec = graph_end(stream);
    meet(bootstrap);
    for (int i = 0; i < REPEATS; i++)
        CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_OK(ep_group_status(group, NULL));
    for (int i = 0; i < n * ROW; i++)
        CHECK(row[i] == (info.first_expert + i / ROW + PLACES - REPEATS) % PLACES, "%d", row[i]);
    if (masks && bootstrap->rank < 2) {
        CHECK_OK(ep_group_mask(group, &(uint32_t){3}, stream));
        CHECK_CUDA(cudaGraphLaunch(exec, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        CHECK_REFUSED(ep_group_status(group, NULL), EP_ERR_TIMEOUT, "weight move: ", "rank 2");
    }
    meet(bootstrap);
    if (masks) CHECK_OK(ep_group_mask(group, &(uint32_t){7}, stream));
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaStreamDestroy(stream));
    ep_group_destroy(group);
    gpu_release(row), gpu_release(workspace.data);
}

RankTests24(gpu_graphs, moves, replay_moves(bootstrap, 0));
RankTest(gpu_graphs, moves_masked_3, 3, replay_moves(bootstrap, 1));

/* ---- masks --------------------------------------------------------------------------------- */

/* Replay steps of the ranks that are not masked in a case. */
static void replay_some(GraphStep *graph, Case *c, int steps) {
    unsigned ops = device_step_all(c);
    for (int step = 0; step < steps; step++) {
        c->seed++;
        device_step_draw(&graph->gpu, c);
        device_step_launch(&graph->gpu, graph->exec, ops);
        device_step_check(&graph->gpu);
    }
}

/* Ranks leave and come back between replays. The first is missed by a replay: it ends at its
 * deadline, and one after it does nothing. */
static void replay_masked(const EpBootstrap *bootstrap, Case c) {
    static const char *const sets[] = {"000", "010", "011", "100", "000"};
    GraphStep graph;
    c.masks = 1, c.timeout = 2;
    EpGroup *group = open_group(bootstrap, &c);
    unsigned ops = device_step_all(&c);
    graph_step_open(&graph, group, &c, bootstrap->rank);
    graph_step_capture(&graph);
    for (unsigned i = 0; i < sizeof(sets) / sizeof(*sets); i++) {
        uint32_t alive = 0;
        strcpy(c.masked, sets[i]);
        for (int r = 0; r < c.ranks; r++)
            alive |= (uint32_t)!case_is_masked(&c, r) << r;
        meet(bootstrap);
        if (case_is_masked(&c, bootstrap->rank)) continue;
        for (int again = 0; again < 2 && i == 1; again++) {
            device_step_launch(&graph.gpu, graph.exec, ops);
            CHECK_CUDA(cudaStreamSynchronize(graph.gpu.stream));
            CHECK_STATUS(ep_group_status(group, NULL), EP_ERR_TIMEOUT);
        }
        /* On a loaded machine a rank may come later than the short deadline. */
        EpStatus status = EP_ERR_TIMEOUT;
        for (int again = 0; again < 20 && status == EP_ERR_TIMEOUT; again++)
            status = ep_group_mask(group, &alive, graph.gpu.stream);
        REQUIRE_OK(status);
        c.seed = 10 * i;
        replay_some(&graph, &c, 2);
    }
    CHECK_OK(ep_group_status(group, NULL));
    meet(bootstrap);
    ep_group_destroy(group);
    graph_step_close(&graph);
}

RankTest(gpu_graphs, masked_3, 3, replay_masked(bootstrap, graph_case(3, EP_LAYOUT_EXPERT_MAJOR)));
LatencyTest(gpu_graphs, masked_in_latency_3, 3,
            replay_masked(bootstrap, latency_case(3, EP_LAYOUT_FLAT, 0)));
LatencyTest(gpu_graphs, masked_in_phases_3, 3,
            replay_masked(bootstrap, latency_case(3, EP_LAYOUT_BATCHED, 1)));

/* Each rank in turn leaves, and a newcomer takes its place and captures a graph of its own. The
 * others go on with the graphs that they have captured at first. */
static void replay_replaced(const EpBootstrap *bootstrap, Case c) {
    GraphStep graph;
    EpGroup *group = NULL;
    int rank = bootstrap->rank;
    uint32_t all = (1u << c.ranks) - 1;
    c.masks = 1;
    EpGroupConfig config = case_group_config(&c);
    config.max_ranks = c.ranks;
    CHECK_CUDA(cudaGetDevice(&config.device));
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    graph_step_open(&graph, group, &c, rank);
    graph_step_capture(&graph);
    for (int leaver = 0; leaver < c.ranks; leaver++) {
        uint32_t others = all & ~(1u << leaver);
        meet(bootstrap);
        replay_some(&graph, &c, 1);
        memset(c.masked, '0', (size_t)c.ranks), c.masked[leaver] = '1';
        if (rank == leaver) {
            ep_group_destroy(group), group = NULL;
            graph_step_close(&graph);
            c.seed++;
        } else {
            REQUIRE_OK(ep_group_mask(group, &others, graph.gpu.stream));
            replay_some(&graph, &c, 1);
        }
        memset(c.masked, 0, sizeof(c.masked));
        REQUIRE_OK(rank == leaver ? ep_group_join(bootstrap, &config, &group)
                                  : ep_group_admit(group, bootstrap));
        REQUIRE_OK(ep_group_mask(group, &all, NULL));
        if (rank == leaver) {
            graph_step_open(&graph, group, &c, rank);
            graph_step_capture(&graph);
        }
        meet(bootstrap);
        replay_some(&graph, &c, 2);
    }
    CHECK_OK(ep_group_status(group, NULL));
    meet(bootstrap);
    ep_group_destroy(group);
    graph_step_close(&graph);
}

#define REPLACED(make) replay_replaced(bootstrap, make)
RankTests24(gpu_graphs, replaced, REPLACED(graph_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR)));
LatencyTests24(gpu_graphs, replaced_in_latency,
               REPLACED(latency_case(bootstrap->size, EP_LAYOUT_FLAT, 0)));
LatencyTest(gpu_graphs, replaced_in_phases_3, 3, REPLACED(latency_case(3, EP_LAYOUT_BATCHED, 1)));

/* What a kernel finds while ep_group_mask waits for it ends the group. */
static void disagree_meanwhile(const EpBootstrap *bootstrap, Case c) {
    DeviceStep gpu;
    uint32_t both = 3;
    c.masks = 1;
    EpGroup *group = open_group(bootstrap, &c);
    device_step_new(&gpu, group, &c, bootstrap->rank);
    device_step_draw_step(&gpu, 0);
    device_step_issue(&gpu, STEP_PREPARE);
    CHECK_CUDA(cudaStreamSynchronize(gpu.stream));
    meet(bootstrap);
    if (bootstrap->rank) usleep(300000);
    CHECK_OK(device_step_try(&gpu, bootstrap->rank ? STEP_COMBINE : STEP_DISPATCH));
    CHECK_STATUS(ep_group_mask(group, &both, gpu.stream), EP_ERR_ORDER);
    CHECK_STATUS(ep_group_status(group, NULL), EP_ERR_ORDER);
    meet(bootstrap);
    ep_group_destroy(group);
    device_step_close(&gpu);
}

RankTest(gpu_graphs, masked_disagree_2, 2,
         disagree_meanwhile(bootstrap, graph_case(2, EP_LAYOUT_EXPERT_MAJOR)));

/* ---- counters ------------------------------------------------------------------------------ */

/* A replayed graph adds again. */
static void count_replays(const EpBootstrap *bootstrap, Case c) {
    enum { TIMES = 3 };
    c.counters = 1;
    EpGroup *group = open_group(bootstrap, &c);
    GraphStep graph;
    graph_step_open(&graph, group, &c, bootstrap->rank);
    graph.gpu.memory.counters = step_counters_new(&graph.gpu.step);
    graph_step_capture(&graph);
    meet(bootstrap);
    graph_step_run(&graph, 1, TIMES);
    step_counters_check(&graph.gpu.step, device_step_all(&c), TIMES, graph.gpu.memory.counters);
    ep_group_destroy(group);
    graph_step_close(&graph);
}

#define COUNT(make) count_replays(bootstrap, make)
RankTest(gpu_graphs, counters_2, 2, COUNT(graph_case(2, EP_LAYOUT_EXPERT_MAJOR)));
LatencyTest(gpu_graphs, counters_in_latency_2, 2, COUNT(latency_case(2, EP_LAYOUT_FLAT, 0)));
LatencyTest(gpu_graphs, counters_in_phases_2, 2, COUNT(latency_case(2, EP_LAYOUT_BATCHED, 1)));

/* The same on two nodes; others look at the steps of replays there. */
static Case on_nodes(const EpBootstrap *bootstrap, Case c) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    snprintf(c.nodes, sizeof(c.nodes), "0011");
    return c;
}

#define ON_NODES(layout, phases) \
    on_nodes(bootstrap, latency_case(bootstrap->size, EP_LAYOUT_##layout, phases))
RankTest(gpu_graphs, counters_on_nodes_4, 4, COUNT(ON_NODES(FLAT, 0)));
RankTest(gpu_graphs, counters_in_phases_on_nodes_4, 4, COUNT(ON_NODES(BATCHED, 1)));
RankTest(gpu_graphs, placed_on_nodes_4, 4, PLACED(ON_NODES(FLAT, 0), 0));
RankTest(gpu_replays, on_nodes_4, 4, replay(bootstrap, ON_NODES(BATCHED, 0)));
RankTest(gpu_replays, phases_on_nodes_4, 4, replay(bootstrap, ON_NODES(EXPERT_MAJOR, 1)));

/* ---- ranks that do not replay ---------------------------------------------------------------- */

/* Replay once on all ranks. Then the last rank stays away, and the others name it. It comes when
 * they have given up. Or the last node makes the calls without the graph (`calls`), and no rank
 * waits longer than the deadline. */
static void replay_in_part(const EpBootstrap *bootstrap, Case c, int calls) {
    enum { DEADLINE = 3, LATE = 60 };
    int absent = bootstrap->size - 1,
        odd = bootstrap->rank >= (calls ? bootstrap->size / 2 : absent);
    EpFinding found = EP_FINDING_INIT;
    GraphStep graph;
    be_quiet();
    c.timeout = DEADLINE;
    EpGroup *group = open_group(bootstrap, &c);
    graph_step_open(&graph, group, &c, bootstrap->rank);
    graph_step_capture(&graph);
    meet(bootstrap);
    graph_step_run(&graph, 1, 1);
    meet(bootstrap);
    double begin = seconds_now();
    if (odd && !calls) meet(bootstrap);
    if (odd && calls)
        device_step_issue(&graph.gpu, device_step_all(&c));
    else
        CHECK_CUDA(cudaGraphLaunch(graph.exec, graph.gpu.stream));
    CHECK_CUDA(cudaStreamSynchronize(graph.gpu.stream));
    EpStatus status = ep_group_status(group, &found);
    CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "%d: %s", (int)status,
          ep_last_error());
    CHECK(odd || calls || found.peer == absent, "%s", ep_last_error());
    CHECK(seconds_now() - begin < LATE, "it took %.1f s", seconds_now() - begin);
    if (!odd || calls) meet(bootstrap);
    ep_group_destroy(group);
    graph_step_close(&graph);
}

RankTest(gpu_graphs, absent_on_nodes_4, 4, replay_in_part(bootstrap, ON_NODES(BATCHED, 0), 0));
RankTest(gpu_graphs, absent_from_phases_on_nodes_4, 4,
         replay_in_part(bootstrap, ON_NODES(EXPERT_MAJOR, 1), 0));
/* NCCL does not promise that it finds this. The emulated one waits. */
#ifdef TESTS_EMULATED
RankTest(gpu_graphs, of_one_node_4, 4, replay_in_part(bootstrap, ON_NODES(FLAT, 0), 1));
#endif

/* ---- several graphs by turns ----------------------------------------------------------------- */

enum { GRAPHS = 8 };

/* Graphs of one handle each, replayed by turns on streams of their own, and plain calls. A group
 * keeps the order of its calls across streams, provided that the caller orders the replays. In
 * latency mode there is a graph for each layout, whole and in phases. */
static void by_turns(const EpBootstrap *bootstrap, EpMode mode, int graphs, int turns) {
    GraphStep graph[GRAPHS];
    int ranks = bootstrap->size, is_latency = mode == EP_MODE_LATENCY;
    Case plain = graph_case(ranks, EP_LAYOUT_EXPERT_MAJOR), widest = plain;
    if (is_latency) widest = latency_case(ranks, EP_LAYOUT_EXPERT_MAJOR, 0);
    EpGroup *group = open_group(bootstrap, &widest);
    for (int i = 0; i < graphs; i++) {
        Case c = is_latency ? latency_case(ranks, (EpLayout)(1 + i % 4), i >= 4) : plain;
        graph_step_open(&graph[i], group, &c, bootstrap->rank);
    }
    for (int i = 0; i < graphs; i++)
        graph_step_capture(&graph[i]);
    meet(bootstrap);
    for (int step = 0; step < turns && !check_failure()[0]; step++) {
        if (is_latency)
            graph_step_run(&graph[step * 7 % 11 % graphs], step, step % 5 == 4 ? 0 : 1 + step % 3);
        else
            graph_step_run(&graph[step % graphs], step, step % graphs < 2);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    for (int i = 0; i < graphs; i++)
        graph_step_close(&graph[i]);
}

RankTests(gpu_graphs, and_plain_calls, by_turns(bootstrap, EP_MODE_THROUGHPUT, 3, 12));
LatencyTests(gpu_replays, by_turns, by_turns(bootstrap, EP_MODE_LATENCY, GRAPHS, TURNS));

/* ---- phases of two handles on two streams ---------------------------------------------------- */

/* Send phases have one order on all ranks; receive phases have another order on odd ranks. */
static void interleave(DeviceStep *a, DeviceStep *b, int swapped) {
    DeviceStep *first = swapped ? b : a, *second = swapped ? a : b;
    device_step_issue(a, STEP_PREPARE);
    device_step_issue(b, STEP_PREPARE);
    device_step_issue(a, STEP_DISPATCH_SEND);
    device_step_issue(b, STEP_DISPATCH_SEND);
    device_step_issue(first, STEP_DISPATCH_WAIT);
    device_step_issue(second, STEP_DISPATCH_WAIT);
    device_step_issue(b, STEP_COMBINE_SEND);
    device_step_issue(a, STEP_COMBINE_SEND);
    device_step_issue(first, STEP_COMBINE_WAIT);
    device_step_issue(second, STEP_COMBINE_WAIT);
}

/* Capture both streams: b's stream forks from the capture of a's stream and joins it at the end. */
static cudaGraphExec_t capture_two(DeviceStep *a, DeviceStep *b, int swapped) {
    cudaEvent_t forked, joined;
    CHECK_CUDA(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    graph_begin(a->stream);
    CHECK_CUDA(cudaEventRecord(forked, a->stream));
    CHECK_CUDA(cudaStreamWaitEvent(b->stream, forked, 0));
    interleave(a, b, swapped);
    CHECK_CUDA(cudaEventRecord(joined, b->stream));
    CHECK_CUDA(cudaStreamWaitEvent(a->stream, joined, 0));
    cudaGraphExec_t exec = graph_end(a->stream);
    CHECK_CUDA(cudaEventDestroy(forked));
    CHECK_CUDA(cudaEventDestroy(joined));
    return exec;
}

static void run_two(GraphStep *a, GraphStep *b, int swapped, int step) {
    device_step_draw_step(&a->gpu, 2 * step);
    device_step_draw_step(&b->gpu, 2 * step + 1);
    if (step % 5 == 4) {
        interleave(&a->gpu, &b->gpu, swapped);
    } else {
        device_step_launch(&a->gpu, a->exec, STEP_PHASES);
        CHECK_CUDA(cudaStreamSynchronize(a->gpu.stream));
        device_step_replayed(&b->gpu, STEP_PHASES);
    }
    device_step_check(&a->gpu);
    device_step_check(&b->gpu);
}

static void two_streams(const EpBootstrap *bootstrap, int steps) {
    GraphStep a, b;
    Case c = latency_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR, 1);
    Case d = latency_case(bootstrap->size, EP_LAYOUT_BATCHED, 1);
    int rank = bootstrap->rank, swapped = rank % 2;
    EpGroup *group = open_group(bootstrap, &c);
    graph_step_open(&a, group, &c, rank);
    graph_step_open(&b, group, &d, rank);
    a.exec = capture_two(&a.gpu, &b.gpu, swapped);
    meet(bootstrap);
    for (int step = 0; step < steps && !check_failure()[0]; step++)
        run_two(&a, &b, swapped, step);
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    graph_step_close(&a);
    graph_step_close(&b);
}

LatencyTest(gpu_replays, two_streams_1, 1, two_streams(bootstrap, TURNS));
LatencyTests24(gpu_replays, two_streams, two_streams(bootstrap, LATENCY_REPLAYS));
