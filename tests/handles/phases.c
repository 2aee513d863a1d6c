/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch and combine in send and receive phases: which calls may come between them, and several
 * pending operations at once. run_case_on_threads tests what the phases write. */
#include "runtime/status.h"
#include "tests/cases/fixture.h"
#include "tests/harness/random.h"
#include "tests/harness/ranked.h"

/* ---- calls out of turn ---- */

static const StepOp phases[] = {STEP_DISPATCH_SEND, STEP_DISPATCH_WAIT, STEP_COMBINE_SEND,
                                STEP_COMBINE_WAIT};

FixtureTest(handles_phases, none_in_throughput_mode, "") {
    step_prepare(&f->step);
    for (int i = 0; i < LENGTH(phases); i++)
        CHECK_REFUSED(fixture_call(f, phases[i]), EP_ERR_UNSUPPORTED, "rank 0", "handle",
                      "latency mode", "throughput mode");
    fixture_check_untouched(f);
    step_move(&f->step);
}

FixtureTest(handles_phases, wait_without_send, "mode=latency layout=batched") {
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH_SEND), EP_ERR_NOT_PREPARED, "ep_dispatch_send",
                  "routing");
    CHECK_REFUSED(fixture_call(f, STEP_COMBINE_SEND), EP_ERR_NOT_PREPARED, "ep_combine_send",
                  "plan");
    for (int dispatched = 0; dispatched < 2; dispatched++) {
        CHECK_REFUSED(fixture_call(f, STEP_DISPATCH_WAIT), EP_ERR_ORDER, "ep_dispatch_wait: handle",
                      "expected ep_dispatch_send", "none");
        CHECK_REFUSED(fixture_call(f, STEP_COMBINE_WAIT), EP_ERR_ORDER, "ep_combine_wait: handle",
                      "expected ep_combine_send", "none");
        fixture_check_untouched(f);
        step_dispatch(&f->step);
    }
}

/* All calls but the receive phase of `pending` are refused, and the operation stays pending. */
static void refuse_while_pending(Fixture *f, StepOp pending, const char *wait, const char *send) {
    const StepOp others[] = {
        STEP_PREPARE,      STEP_DISPATCH,
        STEP_COMBINE,      STEP_DISPATCH_SEND,
        STEP_COMBINE_SEND, pending == STEP_DISPATCH_SEND ? STEP_COMBINE_WAIT : STEP_DISPATCH_WAIT};
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    fixture_reset(f);
    fixture_begin(f, pending);
    for (int i = 0; i < LENGTH(others); i++)
        CHECK_REFUSED(fixture_call(f, others[i]), EP_ERR_ORDER, "rank 0", "handle", wait, send);
    CHECK_REFUSED(ep_handle_info(f->handle, &info), EP_ERR_ORDER, "ep_handle_info", wait);
    CHECK(info.step == 0, "outputs were written");
    fixture_check_untouched(f);
    CHECK_OK(
        fixture_call(f, pending == STEP_DISPATCH_SEND ? STEP_DISPATCH_WAIT : STEP_COMBINE_WAIT));
}

FixtureTest(handles_phases, other_calls_in_between, "mode=latency layout=batched") {
    for (int round = 0; round < 2; round++) {
        refuse_while_pending(f, STEP_DISPATCH_SEND, "ep_dispatch_wait", "ep_dispatch_send");
        refuse_while_pending(f, STEP_COMBINE_SEND, "ep_combine_wait", "ep_combine_send");
    }
    step_all(&f->step);
}

/* A pending operation is dropped with its handle and with its group. */
FixtureTest(handles_phases, destroyed_while_pending, "mode=latency layout=batched") {
    fixture_begin(f, STEP_DISPATCH_SEND);
    ep_handle_destroy(f->handle);
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH_WAIT), EP_ERR_DESTROYED, "handle");
    f->handle = f->step.handle = open_handle(f->group, &f->world->c);
    step_all(&f->step);
    fixture_reset(f);
    fixture_begin(f, STEP_DISPATCH_SEND);
}

/* ---- arguments ---- */

RefusalsTest(handles_phases, wrong_tensors, "phases", "mode=latency");

/* Weights and scales that were not sent cannot be received. */
FixtureTest(handles_phases, receiving_what_was_not_sent, "mode=latency") {
    f->arg[IN_WEIGHTS] = f->arg[IN_SCALES] = NULL;
    fixture_begin(f, STEP_DISPATCH_SEND);
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH_WAIT), EP_ERR_NULL, "recv_topk_weights", "NULL");
    f->arg[OUT_WEIGHTS] = NULL;
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH_WAIT), EP_ERR_NULL, "recv_scales", "NULL");
    fixture_check_untouched(f);
    f->arg[OUT_SCALES] = NULL;
    CHECK_OK(fixture_call(f, STEP_DISPATCH_WAIT));
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
    return case_of("ranks=%d experts=9 top_k=3 hidden=48 weighted=1 mode=latency sets=%d layout=%d "
                   "masked_percent=10 global_ids=%d quant=%d",
                   RANKS, HANDLES, 1 + which % 4, which % 2, which > 2 ? which - 1 : 0);
}

static void set_open(StepSet *set, const EpBootstrap *bootstrap, uint64_t seed) {
    *set = (StepSet){.shared = random_stream(seed, 1, 0)};
    set->own = random_stream(seed, 2, (uint64_t)bootstrap->rank);
    for (int i = 0; i < HANDLES; i++) {
        Case c = case_complete(set_case(i));
        if (!set->group) set->group = open_group(bootstrap, &c);
        set->handle[i] = open_handle(set->group, &c);
    }
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
    set_open(&set, bootstrap, seed);
    for (int round = 0; round < ROUNDS; round++) {
        check_note("seed %llu, round %d", (unsigned long long)seed, round);
        for (int i = 0; i < HANDLES; i++) {
            Case c = set_case(i);
            snprintf(c.nodes, sizeof(c.nodes), "%s", nodes);
            c.seed = seed * 1000 + (uint64_t)(round * HANDLES + i);
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

ThreadTest(handles_phases, many_pending, RANKS) {
    needs_latency();
    run_overlapping(bootstrap, environment_number("LIBEP_TEST_SEED", 11), "");
}

/* Two nodes; on the host a stage so small that rows travel in many rounds. */
ThreadTest(handles_phases, many_pending_on_two_nodes, RANKS) {
    needs_latency();
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "0,1,0,1");
    if (!TESTS_ON_GPU) set_on_ranks(bootstrap, "LIBEP_STAGE_BYTES", "3000");
    run_overlapping(bootstrap, environment_number("LIBEP_TEST_SEED", 12), "0101");
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
    int mine = bootstrap->rank == 1;
    Case c = case_complete(case_of("ranks=2 experts=4 max_tokens=2 hidden=64 row_type=fp32 sets=2 "
                                   "mode=latency layout=batched rows_per_expert=4"));
    EpGroup *group = open_group(bootstrap, &c);
    EpHandle *handle = open_handle(group, &c);
    CHECK_OK(move_tokens(handle, 1, 1));
    CHECK_OK(move_tokens(handle, 0, 1));
    EpStatus status = move_tokens(handle, mine && dispatch, mine && !dispatch);
    if (status == EP_OK) status = ep_group_status(group, NULL);
    CHECK_REFUSED(status, EP_ERR_ORDER, whole, split, "expected all ranks to call it");
    ep_group_destroy(group);
}

ThreadTest(handles_phases, split_on_one_rank, 2) {
    needs_latency();
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", "/dev/null");
    split_on_one_rank(bootstrap, 1, "dispatch in latency mode", "dispatch in two phases");
    split_on_one_rank(bootstrap, 0, "combine", "combine in two phases");
}
