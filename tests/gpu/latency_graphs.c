/* SPDX-License-Identifier: Apache-2.0 */
/* Steps in latency mode that were captured once and are replayed a thousand times, each time over
 * new tokens, new routing and another T in the same buffers; whole and in halves; and the halves of
 * two handles interleaved on two streams. */
#include "tests/cases/run.h"
#include "tests/gpu/arena.h"
#include "tests/gpu/rig.h"

enum { REPLAYS = 1000, TURNS = 300 };

static void reserve(void) {
    gpu_reserve((size_t)256 << 20);
}

TestSuite(gpu_replays, .init = reserve);

/* Small, since the oracle works out every replay. The capacity is too small for some of them. */
static Case replay_case(int ranks, EpLayout layout, int halves) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 2 * ranks + 1,
                                .top_k = 3,
                                .hidden = 40,
                                .max_tokens = 9,
                                .counted = 1,
                                .weighted = 1,
                                .scale_bytes = 12,
                                .masked_percent = 10,
                                .alignment = 4,
                                .capacity = 40,
                                .rows_per_expert = 12,
                                .overflow = EP_OVERFLOW_DROP,
                                .layout = layout,
                                .mode = EP_MODE_LATENCY,
                                .halves = halves});
}

/* ---- graphs -------------------------------------------------------------------------------- */

static void begin_capture(cudaStream_t stream) {
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

static cudaGraphExec_t end_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* Inputs are brought in the graph, too, so that it can be replayed twice without a word: first
 * halves are followed by stores over them. */
static cudaGraphExec_t capture(Rig *rig) {
    begin_capture(rig->stream);
    rig_bring_inputs(rig);
    rig_issue(rig, rig_all(&rig->c));
    return end_capture(rig->stream);
}

/* A rig over a new handle, with its graph. */
typedef struct Tape {
    Rig rig;
    World *world;
    cudaGraphExec_t exec;
} Tape;

static bool tape_open(Tape *tape, EpGroup *group, const Case *c, int rank) {
    *tape = (Tape){.world = rig_world(c, 0)};
    rig_open(&tape->rig, group, rig_handle(group, c), c, rank, new_stream(), NULL);
    rig_load(&tape->rig, tape->world);
    return !check_failure()[0];
}

static void tape_close(Tape *tape) {
    if (tape->exec) CHECK_CUDA(cudaGraphExecDestroy(tape->exec));
    CHECK_CUDA(cudaStreamDestroy(tape->rig.stream));
    rig_close(&tape->rig);
    world_free(tape->world);
}

static void tape_load(Tape *tape, int step) {
    world_free(tape->world);
    tape->world = rig_world(&tape->rig.c, step);
    check_note("step %d: %s", step, case_describe(&tape->world->c));
    rig_load(&tape->rig, tape->world);
}

static void tape_play(Tape *tape, int times) {
    for (int i = 0; i < times; i++)
        CHECK_CUDA(cudaGraphLaunch(tape->exec, tape->rig.stream));
    rig_replayed(&tape->rig, rig_all(&tape->rig.c));
}

/* ---- one graph ----------------------------------------------------------------------------- */

static void replay(const EpBootstrap *bootstrap, EpLayout layout, int halves) {
    Case c = replay_case(bootstrap->size, layout, halves);
    EpGroup *group = open_group(bootstrap, &c);
    Tape tape;
    REQUIRE(group && tape_open(&tape, group, &c, bootstrap->rank), "no handle");
    tape.exec = capture(&tape.rig);
    REQUIRE(tape.exec, "no graph");
    for (int step = 0; step < REPLAYS && !check_failure()[0]; step++) {
        tape_load(&tape, step);
        tape_play(&tape, 1);
        rig_check(&tape.rig);
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    tape_close(&tape);
}

#define REPLAY(name, ranks, layout, halves)            \
    ThreadTest(gpu_replays, name, ranks) {             \
        GPU_NEEDS_LATENCY();                           \
        replay(bootstrap, EP_LAYOUT_##layout, halves); \
    }
REPLAY(expert_major_1, 1, EXPERT_MAJOR, 0)
REPLAY(expert_major_2, 2, EXPERT_MAJOR, 0)
REPLAY(expert_major_4, 4, EXPERT_MAJOR, 0)
REPLAY(batched_halves_1, 1, BATCHED, 1)
REPLAY(batched_halves_2, 2, BATCHED, 1)
REPLAY(batched_halves_4, 4, BATCHED, 1)

/* ---- several graphs by turns --------------------------------------------------------------- */

enum { TAPES = 6 };

/* One graph for each layout, whole and in halves. Now and then the same without a graph, and
 * several replays at once: ranks are not in step then. */
static void take_turn(Tape *tape, int step) {
    tape_load(tape, step);
    if (step % 5 == 4)
        rig_issue(&tape->rig, rig_all(&tape->rig.c));
    else
        tape_play(tape, 1 + step % 3);
    rig_check(&tape->rig);
}

static void by_turns(const EpBootstrap *bootstrap) {
    Tape tapes[TAPES];
    Case widest = replay_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR, 0);
    EpGroup *group = open_group(bootstrap, &widest);
    REQUIRE(group, "no group");
    for (int i = 0; i < TAPES; i++) {
        Case c = replay_case(bootstrap->size, (EpLayout)(1 + i % 3), i >= 3);
        REQUIRE(tape_open(&tapes[i], group, &c, bootstrap->rank), "no handle");
    }
    for (int i = 0; i < TAPES; i++) {
        tapes[i].exec = capture(&tapes[i].rig);
        REQUIRE(tapes[i].exec, "no graph");
    }
    for (int step = 0; step < TURNS && !check_failure()[0]; step++)
        take_turn(&tapes[step * 7 % 11 % TAPES], step);
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    for (int i = 0; i < TAPES; i++)
        tape_close(&tapes[i]);
}

ThreadTest(gpu_replays, by_turns_1, 1) {
    GPU_NEEDS_LATENCY();
    by_turns(bootstrap);
}
ThreadTest(gpu_replays, by_turns_2, 2) {
    GPU_NEEDS_LATENCY();
    by_turns(bootstrap);
}
ThreadTest(gpu_replays, by_turns_4, 4) {
    GPU_NEEDS_LATENCY();
    by_turns(bootstrap);
}

/* ---- halves of two handles on two streams -------------------------------------------------- */

/* First halves in one order on all ranks; second halves in each rank's own. */
static void interleave(Rig *a, Rig *b, int swapped) {
    Rig *first = swapped ? b : a, *second = swapped ? a : b;
    rig_issue(a, RIG_PREPARE);
    rig_issue(b, RIG_PREPARE);
    rig_issue(a, RIG_DISPATCH_SEND);
    rig_issue(b, RIG_DISPATCH_SEND);
    rig_issue(first, RIG_DISPATCH_WAIT);
    rig_issue(second, RIG_DISPATCH_WAIT);
    rig_issue(b, RIG_COMBINE_SEND);
    rig_issue(a, RIG_COMBINE_SEND);
    rig_issue(first, RIG_COMBINE_WAIT);
    rig_issue(second, RIG_COMBINE_WAIT);
}

/* The second stream joins the capture of the first and ends in it. */
static cudaGraphExec_t capture_two(Rig *a, Rig *b, int swapped) {
    cudaEvent_t forked, joined;
    CHECK_CUDA(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    begin_capture(a->stream);
    CHECK_CUDA(cudaEventRecord(forked, a->stream));
    CHECK_CUDA(cudaStreamWaitEvent(b->stream, forked, 0));
    interleave(a, b, swapped);
    CHECK_CUDA(cudaEventRecord(joined, b->stream));
    CHECK_CUDA(cudaStreamWaitEvent(a->stream, joined, 0));
    cudaGraphExec_t exec = end_capture(a->stream);
    CHECK_CUDA(cudaEventDestroy(forked));
    CHECK_CUDA(cudaEventDestroy(joined));
    return exec;
}

static void play_two(Tape *a, Tape *b, int swapped, int step) {
    tape_load(a, 2 * step);
    tape_load(b, 2 * step + 1);
    if (!a->exec || step % 5 == 4) {
        interleave(&a->rig, &b->rig, swapped);
    } else {
        CHECK_CUDA(cudaGraphLaunch(a->exec, a->rig.stream));
        CHECK_CUDA(cudaStreamSynchronize(a->rig.stream));
        rig_replayed(&a->rig, RIG_HALVES);
        rig_replayed(&b->rig, RIG_HALVES);
    }
    rig_check(&a->rig);
    rig_check(&b->rig);
}

static void two_streams(const EpBootstrap *bootstrap, int with_graph, int steps) {
    Tape a, b;
    Case c = replay_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR, 1);
    Case d = replay_case(bootstrap->size, EP_LAYOUT_BATCHED, 1);
    int rank = bootstrap->rank, swapped = rank % 2;
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group && tape_open(&a, group, &c, rank) && tape_open(&b, group, &d, rank), "no handle");
    if (with_graph) {
        a.exec = capture_two(&a.rig, &b.rig, swapped);
        REQUIRE(a.exec, "no graph");
    }
    for (int step = 0; step < steps && !check_failure()[0]; step++)
        play_two(&a, &b, swapped, step);
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    tape_close(&a);
    tape_close(&b);
}

#define TWO_STREAMS(suite, name, ranks, with_graph, steps) \
    ThreadTest(suite, name, ranks) {                       \
        GPU_NEEDS_LATENCY();                               \
        two_streams(bootstrap, with_graph, steps);         \
    }
TWO_STREAMS(gpu_replays, two_streams_1, 1, 1, TURNS)
TWO_STREAMS(gpu_replays, two_streams_2, 2, 1, REPLAYS)
TWO_STREAMS(gpu_replays, two_streams_4, 4, 1, REPLAYS)
TWO_STREAMS(gpu_latency, two_streams_1, 1, 0, 40)
TWO_STREAMS(gpu_latency, two_streams_2, 2, 0, 40)
TWO_STREAMS(gpu_latency, two_streams_4, 4, 0, 40)
