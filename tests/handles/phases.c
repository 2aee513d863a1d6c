/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch and combine in send and receive phases: which calls may come between them, and several
 * pending operations at once. run_case_on_threads tests what the phases write. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/status.h"
#include "tests/cases/fixture.h"
#include "tests/harness/random.h"
#include "tests/harness/ranked.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

static void fixture_open_in(Fixture *fixture, EpMode mode, EpLayout layout) {
    Case c = fixture_case(layout);
    c.mode = mode;
    c = case_complete(c);
    fixture_open(fixture, &c);
}

/* ---- calls out of turn ---- */

static const Op phases[] = {OP_DISPATCH_SEND, OP_DISPATCH_WAIT, OP_COMBINE_SEND, OP_COMBINE_WAIT};

SoloTest(handles_phases, none_in_throughput_mode) {
    Fixture fixture;
    fixture_open_in(&fixture, EP_MODE_THROUGHPUT, EP_LAYOUT_EXPERT_MAJOR);
    step_prepare(&fixture.step);
    for (int i = 0; i < LENGTH(phases); i++)
        CHECK_REFUSED(fixture_call(&fixture, phases[i]), EP_ERR_UNSUPPORTED, "rank 0", "handle",
                      "latency mode", "throughput mode");
    fixture_check_untouched(&fixture);
    step_move(&fixture.step);
    fixture_close(&fixture);
}

SoloTest(handles_phases, wait_without_send) {
    NEEDS_LATENCY();
    Fixture fixture;
    fixture_open_in(&fixture, EP_MODE_LATENCY, EP_LAYOUT_BATCHED);
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH_SEND), EP_ERR_NOT_PREPARED, "ep_dispatch_send",
                  "routing");
    CHECK_REFUSED(fixture_call(&fixture, OP_COMBINE_SEND), EP_ERR_NOT_PREPARED, "ep_combine_send",
                  "plan");
    for (int dispatched = 0; dispatched < 2; dispatched++) {
        CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH_WAIT), EP_ERR_ORDER,
                      "ep_dispatch_wait: handle", "expected ep_dispatch_send", "none");
        CHECK_REFUSED(fixture_call(&fixture, OP_COMBINE_WAIT), EP_ERR_ORDER,
                      "ep_combine_wait: handle", "expected ep_combine_send", "none");
        fixture_check_untouched(&fixture);
        step_dispatch(&fixture.step);
    }
    fixture_close(&fixture);
}

/* All calls but the receive phase of `pending` are refused, and the operation stays pending. */
static void refuse_while_pending(Fixture *fixture, Op pending, const char *wait, const char *send) {
    static const Op others[] = {OP_PREPARE, OP_DISPATCH, OP_COMBINE, OP_DISPATCH_SEND,
                                OP_COMBINE_SEND};
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    Op other_wait = pending == OP_DISPATCH_SEND ? OP_COMBINE_WAIT : OP_DISPATCH_WAIT;
    for (int i = 0; i < LENGTH(others); i++)
        CHECK_REFUSED(fixture_call(fixture, others[i]), EP_ERR_ORDER, "rank 0", "handle", wait,
                      send);
    CHECK_REFUSED(fixture_call(fixture, other_wait), EP_ERR_ORDER, "rank 0", "handle", wait, send);
    CHECK_REFUSED(ep_handle_info(fixture->handle, &info), EP_ERR_ORDER, "ep_handle_info", wait);
    CHECK(info.step == 0, "outputs were written");
    fixture_check_untouched(fixture);
}

SoloTest(handles_phases, other_calls_in_between) {
    NEEDS_LATENCY();
    Fixture fixture;
    fixture_open_in(&fixture, EP_MODE_LATENCY, EP_LAYOUT_BATCHED);
    for (int round = 0; round < 2; round++) {
        fixture_reset(&fixture);
        fixture_begin(&fixture, OP_DISPATCH_SEND);
        refuse_while_pending(&fixture, OP_DISPATCH_SEND, "ep_dispatch_wait", "ep_dispatch_send");
        CHECK_OK(fixture_call(&fixture, OP_DISPATCH_WAIT));
        fixture_reset(&fixture);
        fixture_begin(&fixture, OP_COMBINE_SEND);
        refuse_while_pending(&fixture, OP_COMBINE_SEND, "ep_combine_wait", "ep_combine_send");
        CHECK_OK(fixture_call(&fixture, OP_COMBINE_WAIT));
    }
    step_all(&fixture.step);
    fixture_close(&fixture);
}

SoloTest(handles_phases, no_handle) {
    EpTensor tensor = ep_tensor_2d(NULL, EP_TYPE_BF16, 0, 16);
    CHECK_REFUSED(ep_dispatch_send(NULL, NULL, NULL, &tensor, NULL, NULL, NULL), EP_ERR_NULL,
                  "handle");
    CHECK_REFUSED(ep_dispatch_wait(NULL, NULL, &tensor, NULL, NULL, NULL), EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_combine_send(NULL, NULL, &tensor, NULL, NULL, NULL), EP_ERR_NULL, "handle");
    CHECK_REFUSED(ep_combine_wait(NULL, NULL, &tensor), EP_ERR_NULL, "handle");
}

/* A pending operation is dropped with its handle and with its group. */
SoloTest(handles_phases, destroyed_while_pending) {
    NEEDS_LATENCY();
    Fixture fixture;
    fixture_open_in(&fixture, EP_MODE_LATENCY, EP_LAYOUT_BATCHED);
    fixture_begin(&fixture, OP_DISPATCH_SEND);
    EpHandle *gone = fixture.handle;
    ep_handle_destroy(gone);
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH_WAIT), EP_ERR_DESTROYED, "handle");
    fixture.handle = fixture.step.handle = open_handle(fixture.group, &fixture.world->c);
    step_all(&fixture.step);
    fixture_reset(&fixture);
    fixture_begin(&fixture, OP_DISPATCH_SEND);
    fixture_close(&fixture);
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

SoloTest(handles_phases, wrong_tensors) {
    NEEDS_LATENCY();
    fixture_check_table(fixture_case(EP_LAYOUT_EXPERT_MAJOR), wrong_tensors, LENGTH(wrong_tensors));
}

/* Weights and scales that were not sent cannot be received. */
SoloTest(handles_phases, receiving_what_was_not_sent) {
    NEEDS_LATENCY();
    Fixture fixture;
    fixture_open_in(&fixture, EP_MODE_LATENCY, EP_LAYOUT_EXPERT_MAJOR);
    fixture.arg[TOPK_WEIGHTS] = fixture.arg[SCALES] = NULL;
    fixture_begin(&fixture, OP_DISPATCH_SEND);
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH_WAIT), EP_ERR_NULL, "recv_topk_weights",
                  "NULL");
    fixture.arg[RECV_TOPK_WEIGHTS] = NULL;
    CHECK_REFUSED(fixture_call(&fixture, OP_DISPATCH_WAIT), EP_ERR_NULL, "recv_scales", "NULL");
    fixture_check_untouched(&fixture);
    fixture.arg[RECV_SCALES] = NULL;
    CHECK_OK(fixture_call(&fixture, OP_DISPATCH_WAIT));
    fixture_close(&fixture);
}

/* ---- many pending operations ---- */

enum { RANKS = 4, HANDLES = 6, ROUNDS = 25 };

typedef struct PendingStep {
    Step step;
    World *world;
    StepPending *sent;
} PendingStep;

typedef struct StepSet {
    EpGroup *group;
    EpHandle *handle[HANDLES];
    PendingStep pending[HANDLES];
    Random shared, own;
} StepSet;

static void delay(Random *random) {
    if (random_percent(random, 20)) usleep((useconds_t)random_below(random, 1500));
}

static Case set_case(int which) {
    Case c = {.ranks = RANKS,
              .experts = 9,
              .top_k = 3,
              .weighted = 1,
              .mode = EP_MODE_LATENCY,
              .sets = HANDLES};
    c.layout = (EpLayout)(1 + which % 4), c.masked_percent = 10, c.global_ids = which % 2;
    if (which > 2 && TESTS_HAVE_QUANT) c.quant = (EpQuant)(which - 1);
    return case_complete(c);
}

static int set_open(StepSet *set, const EpBootstrap *bootstrap, uint64_t seed) {
    *set = (StepSet){.shared = random_stream(seed, 1, 0)};
    set->own = random_stream(seed, 2, (uint64_t)bootstrap->rank);
    for (int i = 0; i < HANDLES; i++) {
        Case c = set_case(i);
        c.hidden = 48;
        if (!set->group) set->group = open_group(bootstrap, &c);
        set->handle[i] = set->group ? open_handle(set->group, &c) : NULL;
        if (!set->handle[i]) return 0;
    }
    return 1;
}

/* Shuffle the handles. With `shared` draws all ranks get the same order. */
static void shuffle(int *order, Random *random) {
    for (int i = 0; i < HANDLES; i++)
        order[i] = i;
    for (int i = HANDLES - 1; i > 0; i--) {
        int j = (int)random_below(random, i + 1), kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
}

/* All handles are pending at once. Send phases have one order on all ranks, receive phases an order
 * of each rank. */
static void overlap_all(StepSet *set) {
    int order[HANDLES];
    shuffle(order, &set->shared);
    for (int i = 0; i < HANDLES; i++, delay(&set->own))
        set->pending[order[i]].sent = step_dispatch_send(&set->pending[order[i]].step);
    shuffle(order, &set->own);
    for (int i = 0; i < HANDLES; i++, delay(&set->own))
        step_dispatch_wait(&set->pending[order[i]].step, set->pending[order[i]].sent);
    shuffle(order, &set->shared);
    for (int i = 0; i < HANDLES; i++, delay(&set->own))
        step_combine_send(&set->pending[order[i]].step);
    shuffle(order, &set->own);
    for (int i = 0; i < HANDLES; i++, delay(&set->own))
        step_combine_wait(&set->pending[order[i]].step);
}

/* Dispatches and combines of different handles overlap. One handle has whole operations. */
static void overlap_some(StepSet *set) {
    PendingStep *p = set->pending;
    p[0].sent = step_dispatch_send(&p[0].step);
    p[1].sent = step_dispatch_send(&p[1].step);
    step_dispatch_wait(&p[1].step, p[1].sent);
    step_combine_send(&p[1].step);
    step_dispatch(&p[2].step);
    step_dispatch_wait(&p[0].step, p[0].sent);
    step_combine_send(&p[0].step);
    step_combine(&p[2].step);
    if (random_percent(&set->own, 50)) {
        step_combine_wait(&p[0].step);
        step_combine_wait(&p[1].step);
    } else {
        step_combine_wait(&p[1].step);
        step_combine_wait(&p[0].step);
    }
}

static void run_overlapping(const EpBootstrap *bootstrap, uint64_t seed, const char *nodes) {
    StepSet set;
    REQUIRE(set_open(&set, bootstrap, seed), "no handles");
    for (int round = 0; round < ROUNDS; round++) {
        check_note("seed %llu, round %d", (unsigned long long)seed, round);
        for (int i = 0; i < HANDLES; i++) {
            Case c = set_case(i);
            snprintf(c.nodes, sizeof(c.nodes), "%s", nodes);
            c.hidden = 48, c.seed = seed * 1000 + (uint64_t)(round * HANDLES + i);
            PendingStep *pending = &set.pending[i];
            pending->world = world_new(&c);
            pending->step =
                (Step){set.group, set.handle[i], pending->world, (int)bootstrap->rank, NULL};
        }
        round % 2 ? overlap_some(&set) : overlap_all(&set);
        for (int i = 0; i < HANDLES; i++)
            world_free(set.pending[i].world);
    }
    ep_group_destroy(set.group);
}

static uint64_t test_seed(void) {
    const char *given = getenv("LIBEP_TEST_SEED");
    return given ? strtoull(given, NULL, 10) : 11;
}

ThreadTest(handles_phases, many_pending, RANKS) {
    NEEDS_LATENCY();
    run_overlapping(bootstrap, test_seed(), "");
}

/* Two nodes, and a stage so small that rows travel in many rounds. */
ThreadTest(handles_phases, many_pending_on_two_nodes, RANKS) {
    HOST_ONLY("GPUs of a group share a node");
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "0,1,0,1");
    set_on_ranks(bootstrap, "LIBEP_STAGE_BYTES", "3000");
    run_overlapping(bootstrap, test_seed() + 1, "0101");
}

/* ---- ranks that split an operation, and ranks that do not ---- */

/* Dispatch and then combine, all of them whole or each in two phases. Returns the first error. */
static EpStatus move_tokens(EpHandle *handle, int splits_dispatch, int splits_combine) {
    enum { H = 64, ROWS = 4 };
    _Alignas(16) static _Thread_local float in[H], rows[2 * ROWS * H], out[H];
    EpTensor topk_idx = ep_tensor_2d((int32_t[2]){0, 2}, EP_TYPE_INT32, 1, 2);
    EpTensor tokens = ep_tensor_2d(in, EP_TYPE_FP32, 1, H), sums = tokens;
    EpTensor slots = ep_tensor_3d(rows, EP_TYPE_FP32, 2, ROWS, H);
    sums.data = out;
    EP_TRY(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    if (splits_dispatch) {
        EP_TRY(ep_dispatch_send(handle, NULL, NULL, &tokens, NULL, NULL, NULL));
        EP_TRY(ep_dispatch_wait(handle, NULL, &slots, NULL, NULL, NULL));
    } else {
        EP_TRY(
            ep_dispatch(handle, NULL, NULL, &tokens, NULL, NULL, NULL, &slots, NULL, NULL, NULL));
    }
    if (!splits_combine) return ep_combine(handle, NULL, &slots, NULL, NULL, NULL, &sums);
    EP_TRY(ep_combine_send(handle, NULL, &slots, NULL, NULL, NULL));
    return ep_combine_wait(handle, NULL, &sums);
}

static void split_on_one_rank(const EpBootstrap *bootstrap, int dispatch, const char *whole,
                              const char *split) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpHandleConfig of_handle = EP_HANDLE_CONFIG_INIT;
    EpGroup *group = NULL;
    EpHandle *handle = NULL;
    int mine = bootstrap->rank == 1;
    config.num_experts = 4, config.max_tokens = 2, config.max_top_k = 2, config.latency_sets = 2;
    config.max_row_bytes = 256, config.backend = TEST_BACKEND, config.timeout_seconds = 20;
    of_handle.mode = EP_MODE_LATENCY, of_handle.layout = EP_LAYOUT_BATCHED;
    of_handle.rows_per_expert = 4;
    CHECK_OK(ep_group_create(bootstrap, &config, &group));
    REQUIRE(group, "no group");
    CHECK_OK(ep_handle_create(group, &of_handle, &handle));
    CHECK_OK(move_tokens(handle, 1, 1));
    CHECK_OK(move_tokens(handle, 0, 1));
    EpStatus status = move_tokens(handle, mine && dispatch, mine && !dispatch);
    if (status == EP_OK) status = ep_group_status(group, NULL);
    CHECK_REFUSED(status, EP_ERR_ORDER, whole, split, "expected all ranks to call it");
    ep_group_destroy(group);
}

ThreadTest(handles_phases, split_dispatch_on_one_rank, 2) {
    NEEDS_LATENCY();
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", "/dev/null");
    split_on_one_rank(bootstrap, 1, "dispatch in latency mode", "dispatch in two phases");
}

ThreadTest(handles_phases, split_combine_on_one_rank, 2) {
    NEEDS_LATENCY();
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", "/dev/null");
    split_on_one_rank(bootstrap, 0, "combine", "combine in two phases");
}
