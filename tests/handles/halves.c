/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch and combine in two halves each: what may come between them, what not, and several
 * handles in flight at once. That halves write what whole operations do is tested with all other
 * cases. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/cases/desk.h"
#include "tests/harness/random.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

static void desk_open_in(Desk *desk, EpMode mode, EpLayout layout) {
    Case c = desk_case(layout);
    c.mode = mode;
    c = case_complete(c);
    desk_open(desk, &c);
}

/* ---- calls out of turn ---- */

static const Op halves[] = {OP_DISPATCH_SEND, OP_DISPATCH_WAIT, OP_COMBINE_SEND, OP_COMBINE_WAIT};

SoloTest(handles_halves, none_in_throughput_mode) {
    Desk desk;
    desk_open_in(&desk, EP_MODE_THROUGHPUT, EP_LAYOUT_EXPERT_MAJOR);
    step_prepare(&desk.step);
    for (int i = 0; i < LENGTH(halves); i++)
        CHECK_REFUSED(desk_call(&desk, halves[i]), EP_ERR_UNSUPPORTED, "rank 0", "handle",
                      "latency mode", "throughput mode");
    desk_check_untouched(&desk);
    step_move(&desk.step);
    desk_close(&desk);
}

SoloTest(handles_halves, wait_without_send) {
    NEEDS_LATENCY();
    Desk desk;
    desk_open_in(&desk, EP_MODE_LATENCY, EP_LAYOUT_BATCHED);
    CHECK_REFUSED(desk_call(&desk, OP_DISPATCH_SEND), EP_ERR_NOT_PREPARED, "ep_dispatch_send",
                  "routing");
    CHECK_REFUSED(desk_call(&desk, OP_COMBINE_SEND), EP_ERR_NOT_PREPARED, "ep_combine_send",
                  "plan");
    for (int dispatched = 0; dispatched < 2; dispatched++) {
        CHECK_REFUSED(desk_call(&desk, OP_DISPATCH_WAIT), EP_ERR_ORDER, "ep_dispatch_wait: handle",
                      "expected ep_dispatch_send", "none");
        CHECK_REFUSED(desk_call(&desk, OP_COMBINE_WAIT), EP_ERR_ORDER, "ep_combine_wait: handle",
                      "expected ep_combine_send", "none");
        desk_check_untouched(&desk);
        step_dispatch(&desk.step);
    }
    desk_close(&desk);
}

/* Everything but the second half is refused, and the flight goes on. */
static void refuse_in_flight(Desk *desk, Op in_flight, const char *wait, const char *send) {
    static const Op others[] = {OP_PREPARE, OP_DISPATCH, OP_COMBINE, OP_DISPATCH_SEND,
                                OP_COMBINE_SEND};
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    Op other_wait = in_flight == OP_DISPATCH_SEND ? OP_COMBINE_WAIT : OP_DISPATCH_WAIT;
    for (int i = 0; i < LENGTH(others); i++)
        CHECK_REFUSED(desk_call(desk, others[i]), EP_ERR_ORDER, "rank 0", "handle", wait, send);
    CHECK_REFUSED(desk_call(desk, other_wait), EP_ERR_ORDER, "rank 0", "handle", wait, send);
    CHECK_REFUSED(ep_handle_info(desk->handle, &info), EP_ERR_ORDER, "ep_handle_info", wait);
    _Alignas(64) char memory[64];
    CHECK_REFUSED(ep_handle_bind(desk->handle, memory, 64), EP_ERR_ORDER, "ep_handle_bind", wait);
    CHECK(info.step == 0, "outputs were written");
    desk_check_untouched(desk);
}

SoloTest(handles_halves, other_calls_in_between) {
    NEEDS_LATENCY();
    Desk desk;
    desk_open_in(&desk, EP_MODE_LATENCY, EP_LAYOUT_BATCHED);
    for (int round = 0; round < 2; round++) {
        desk_reset(&desk);
        desk_take_off(&desk, OP_DISPATCH_SEND);
        refuse_in_flight(&desk, OP_DISPATCH_SEND, "ep_dispatch_wait", "ep_dispatch_send");
        CHECK_OK(desk_call(&desk, OP_DISPATCH_WAIT));
        desk_reset(&desk);
        desk_take_off(&desk, OP_COMBINE_SEND);
        refuse_in_flight(&desk, OP_COMBINE_SEND, "ep_combine_wait", "ep_combine_send");
        CHECK_OK(desk_call(&desk, OP_COMBINE_WAIT));
    }
    step_all(&desk.step);
    desk_close(&desk);
}

SoloTest(handles_halves, no_handle) {
    EpTensor tensor = ep_tensor_2d(NULL, EP_TYPE_BF16, 0, 16);
    CHECK_REFUSED(ep_dispatch_send(NULL, &tensor, NULL, NULL, NULL), EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_dispatch_wait(NULL, NULL, &tensor, NULL, NULL, NULL), EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_combine_send(NULL, &tensor, NULL, NULL), EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_combine_wait(NULL, NULL, &tensor), EP_ERR_NULL, "handle");
}

/* What flies is dropped with its handle, and with its group. */
SoloTest(handles_halves, destroyed_in_flight) {
    NEEDS_LATENCY();
    Desk desk;
    desk_open_in(&desk, EP_MODE_LATENCY, EP_LAYOUT_BATCHED);
    desk_take_off(&desk, OP_DISPATCH_SEND);
    EpHandle *gone = desk.handle;
    ep_handle_destroy(gone);
    CHECK_REFUSED(desk_call(&desk, OP_DISPATCH_WAIT), EP_ERR_DESTROYED, "handle");
    desk.handle = desk.step.handle = open_handle(desk.group, &desk.world->c);
    step_all(&desk.step);
    desk_reset(&desk);
    desk_take_off(&desk, OP_DISPATCH_SEND);
    desk_close(&desk);
}

/* ---- arguments ---- */

static const Wrong wrong_tensors[] = {
    {OP_DISPATCH_SEND, TOKENS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH_SEND, TOKENS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH_SEND, TOKENS, SPOIL_SIZE, 0, EP_ERR_STRUCT_SIZE, {"got 0"}},
    {OP_DISPATCH_SEND, TOKENS, SPOIL_NDIM, 1, EP_ERR_NDIM, {"2", "got 1"}},
    {OP_DISPATCH_SEND, TOKENS, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_DISPATCH_SEND, TOKENS, SPOIL_SHAPE1, 20, EP_ERR_ROW_BYTES, {"16", "40"}},
    {OP_DISPATCH_SEND, TOKENS, SPOIL_SHIFT, 8, EP_ERR_ADDRESS, {"16"}},
    {OP_DISPATCH_SEND, TOPK_WEIGHTS, SPOIL_TYPE, EP_TYPE_BF16, EP_ERR_TYPE, {"fp32"}},
    {OP_DISPATCH_SEND, TOPK_WEIGHTS, SPOIL_SHAPE1, 3, EP_ERR_SHAPE, {"2", "3"}},
    {OP_DISPATCH_SEND, SCALES, SPOIL_SHAPE1, 6, EP_ERR_ROW_BYTES, {"4", "6"}},
    {OP_DISPATCH_WAIT, RECV_TOKENS, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH_WAIT, RECV_TOKENS, SPOIL_DATA, 0, EP_ERR_NULL, {0}},
    {OP_DISPATCH_WAIT, RECV_TOKENS, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {"bf16", "fp16"}},
    {OP_DISPATCH_WAIT, RECV_TOKENS, SPOIL_SHAPE1, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_DISPATCH_WAIT, RECV_TOKENS, SPOIL_SHAPE0, 1, EP_ERR_BUFFER_SIZE, {"got 1"}},
    {OP_DISPATCH_WAIT, RECV_TOKENS, SPOIL_SHIFT, 4, EP_ERR_ADDRESS, {"16"}},
    {OP_DISPATCH_WAIT, RECV_TOPK_WEIGHTS, SPOIL_ABSENT, 0, EP_ERR_NULL, {"topk_weights"}},
    {OP_DISPATCH_WAIT, RECV_TOPK_WEIGHTS, SPOIL_TYPE, EP_TYPE_INT32, EP_ERR_TYPE, {"fp32"}},
    {OP_DISPATCH_WAIT, RECV_SCALES, SPOIL_ABSENT, 0, EP_ERR_NULL, {"scales"}},
    {OP_DISPATCH_WAIT, RECV_SCALES, SPOIL_SHAPE1, 4, EP_ERR_SHAPE, {"8", "4"}},
    {OP_DISPATCH_WAIT, RECV_SCALES, SPOIL_TYPE, EP_TYPE_FP32, EP_ERR_TYPE, {"uint8"}},
    {OP_COMBINE_SEND, EXPERT_OUT, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE_SEND, EXPERT_OUT, SPOIL_TYPE, EP_TYPE_UINT8, EP_ERR_TYPE, {"uint8"}},
    {OP_COMBINE_SEND, EXPERT_OUT, SPOIL_SHAPE0, 1, EP_ERR_BUFFER_SIZE, {"got 1"}},
    {OP_COMBINE_SEND, EXPERT_OUT, SPOIL_SHAPE1, 20, EP_ERR_ROW_BYTES, {"16", "40"}},
    {OP_COMBINE_SEND, EXPERT_OUT, SPOIL_SHIFT, 2, EP_ERR_ADDRESS, {"16"}},
    {OP_COMBINE_SEND, SLOT_WEIGHTS, SPOIL_TYPE, EP_TYPE_BF16, EP_ERR_TYPE, {"fp32"}},
    {OP_COMBINE_WAIT, OUT, SPOIL_ABSENT, 0, EP_ERR_NULL, {0}},
    {OP_COMBINE_WAIT, OUT, SPOIL_TYPE, EP_TYPE_FP16, EP_ERR_TYPE, {"bf16", "fp16"}},
    {OP_COMBINE_WAIT, OUT, SPOIL_SHAPE0, 8, EP_ERR_SHAPE, {"9", "8"}},
    {OP_COMBINE_WAIT, OUT, SPOIL_SHAPE1, 16, EP_ERR_SHAPE, {"24", "16"}},
    {OP_COMBINE_WAIT, OUT, SPOIL_SHIFT, 8, EP_ERR_ADDRESS, {"16"}},
};

SoloTest(handles_halves, wrong_tensors) {
    NEEDS_LATENCY();
    desk_check_table(desk_case(EP_LAYOUT_EXPERT_MAJOR), wrong_tensors, LENGTH(wrong_tensors));
}

/* Weights that were not sent cannot be received. */
SoloTest(handles_halves, receiving_what_was_not_sent) {
    NEEDS_LATENCY();
    Desk desk;
    desk_open_in(&desk, EP_MODE_LATENCY, EP_LAYOUT_EXPERT_MAJOR);
    desk.arg[TOPK_WEIGHTS] = desk.arg[SCALES] = NULL;
    desk_take_off(&desk, OP_DISPATCH_SEND);
    CHECK_REFUSED(desk_call(&desk, OP_DISPATCH_WAIT), EP_ERR_NULL, "recv_topk_weights", "NULL");
    desk.arg[RECV_TOPK_WEIGHTS] = NULL;
    CHECK_REFUSED(desk_call(&desk, OP_DISPATCH_WAIT), EP_ERR_NULL, "recv_scales", "NULL");
    desk_check_untouched(&desk);
    desk.arg[RECV_SCALES] = NULL;
    CHECK_OK(desk_call(&desk, OP_DISPATCH_WAIT));
    desk_close(&desk);
}

/* ---- many in flight ---- */

enum { RANKS = 4, HANDLES = 6, ROUNDS = 25 };

typedef struct Plane {
    Step step;
    World *world;
    StepFlight *flight;
} Plane;

typedef struct Fleet {
    EpGroup *group;
    EpHandle *handle[HANDLES];
    Plane plane[HANDLES];
    Random shared, own;
} Fleet;

static void dawdle(Random *random) {
    if (random_percent(random, 20)) usleep((useconds_t)random_below(random, 1500));
}

static Case plane_case(int which) {
    Case c = {.ranks = RANKS, .experts = 9, .top_k = 3, .weighted = 1, .mode = EP_MODE_LATENCY};
    c.layout = (EpLayout)(1 + which % 3), c.masked_percent = 10;
    if (which > 2 && TESTS_HAVE_QUANT) c.quant = (EpQuant)(which - 1);
    return case_complete(c);
}

static int fleet_open(Fleet *fleet, const EpBootstrap *bootstrap, uint64_t seed) {
    *fleet = (Fleet){.shared = random_stream(seed, 1, 0)};
    fleet->own = random_stream(seed, 2, (uint64_t)bootstrap->rank);
    for (int i = 0; i < HANDLES; i++) {
        Case c = plane_case(i);
        c.hidden = 48;
        if (!fleet->group) fleet->group = open_group(bootstrap, &c);
        fleet->handle[i] = fleet->group ? open_handle(fleet->group, &c) : NULL;
        if (!fleet->handle[i]) return 0;
    }
    return 1;
}

/* The same order on all ranks, or each rank's own. */
static void shuffle(int *order, Random *random) {
    for (int i = 0; i < HANDLES; i++)
        order[i] = i;
    for (int i = HANDLES - 1; i > 0; i--) {
        int j = (int)random_below(random, i + 1), kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
}

/* All take off, in one order; each rank lets them land in an order of its own. */
static void fly_all(Fleet *fleet) {
    int order[HANDLES];
    shuffle(order, &fleet->shared);
    for (int i = 0; i < HANDLES; i++, dawdle(&fleet->own))
        fleet->plane[order[i]].flight = step_dispatch_send(&fleet->plane[order[i]].step);
    shuffle(order, &fleet->own);
    for (int i = 0; i < HANDLES; i++, dawdle(&fleet->own))
        step_dispatch_wait(&fleet->plane[order[i]].step, fleet->plane[order[i]].flight);
    shuffle(order, &fleet->shared);
    for (int i = 0; i < HANDLES; i++, dawdle(&fleet->own))
        step_combine_send(&fleet->plane[order[i]].step);
    shuffle(order, &fleet->own);
    for (int i = 0; i < HANDLES; i++, dawdle(&fleet->own))
        step_combine_wait(&fleet->plane[order[i]].step);
}

/* Dispatches and combines of different handles overlap, some of them whole. */
static void fly_in_turn(Fleet *fleet) {
    Plane *p = fleet->plane;
    p[0].flight = step_dispatch_send(&p[0].step);
    p[1].flight = step_dispatch_send(&p[1].step);
    step_dispatch_wait(&p[1].step, p[1].flight);
    step_combine_send(&p[1].step);
    step_dispatch(&p[2].step);
    step_dispatch_wait(&p[0].step, p[0].flight);
    step_combine_send(&p[0].step);
    step_combine(&p[2].step);
    if (random_percent(&fleet->own, 50)) {
        step_combine_wait(&p[0].step);
        step_combine_wait(&p[1].step);
    } else {
        step_combine_wait(&p[1].step);
        step_combine_wait(&p[0].step);
    }
}

static void run_fleet(const EpBootstrap *bootstrap, uint64_t seed) {
    Fleet fleet;
    REQUIRE(fleet_open(&fleet, bootstrap, seed), "no handles");
    for (int round = 0; round < ROUNDS; round++) {
        check_note("fleet of seed %llu, round %d", (unsigned long long)seed, round);
        for (int i = 0; i < HANDLES; i++) {
            Case c = plane_case(i);
            c.hidden = 48, c.seed = seed * 1000 + (uint64_t)(round * HANDLES + i);
            Plane *plane = &fleet.plane[i];
            plane->world = world_new(&c);
            plane->step = (Step){fleet.group, fleet.handle[i], plane->world, (int)bootstrap->rank};
        }
        round % 2 ? fly_in_turn(&fleet) : fly_all(&fleet);
        for (int i = 0; i < HANDLES; i++)
            world_free(fleet.plane[i].world);
    }
    ep_group_destroy(fleet.group);
}

static uint64_t fleet_seed(void) {
    const char *given = getenv("LIBEP_TEST_SEED");
    return given ? strtoull(given, NULL, 10) : 11;
}

ThreadTest(handles_halves, many_in_flight, RANKS) {
    NEEDS_LATENCY();
    run_fleet(bootstrap, fleet_seed());
}

/* In many rounds, on two nodes. */
ThreadTest(handles_halves, many_in_flight_on_two_nodes, RANKS) {
    HOST_ONLY("GPUs of a group share a node");
    if (bootstrap->rank == 0) {
        setenv("EP_TOPOLOGY", "2", 1);
        setenv("EP_STAGE_BYTES", "3000", 1);
    }
    bootstrap->barrier(bootstrap->context, 60);
    run_fleet(bootstrap, fleet_seed() + 1);
}
