/* SPDX-License-Identifier: Apache-2.0 */
/* Plans that calls name: several of one handle, moved, saved, freed early, wrong ones. */
#include "handles/host/plan.h"
#include "tests/cases/fixture.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3, PLANS = 3 };

/* Returns a case whose calls name plans, with changes. */
static Case plain(const char *changes) {
    return case_of("ranks=3 experts=7 top_k=3 weighted=1 alignment=4 named=1 %s", changes);
}
#define ALONE "ranks=1 spread=full"

TestSuite(handles_plans, .init = be_quiet);

/* Several plans of one handle. */
typedef struct Plans {
    EpGroup *group;
    EpHandle *handle;
    World *world[PLANS];
    EpTensor plan[PLANS];
    Step step[PLANS];
} Plans;

static void plans_open(Plans *p, const EpBootstrap *bootstrap, Case c) {
    *p = (Plans){.group = NULL};
    if (c.mode == EP_MODE_LATENCY) needs_latency();
    for (int i = 0; i < PLANS; i++) {
        c.seed = 40 + (uint64_t)i;
        p->world[i] = world_new(&c);
    }
    p->group = open_group(bootstrap, &p->world[0]->c);
    p->handle = open_handle(p->group, &p->world[0]->c);
    for (int i = 0; i < PLANS; i++) {
        open_plan(p->group, &p->world[0]->c, &p->plan[i]);
        p->step[i] = (Step){p->group, p->handle, p->world[i], bootstrap->rank, &p->plan[i]};
    }
}

/* The plans' memory goes first: neither handle nor group may touch it. */
static void plans_close(Plans *p) {
    for (int i = 0; i < PLANS; i++) {
        if (p->plan[i].data) memset(p->plan[i].data, 0x5a, (size_t)p->plan[i].shape[0]);
        free(p->plan[i].data);
    }
    ep_handle_destroy(p->handle);
    ep_group_destroy(p->group);
    for (int i = 0; i < PLANS; i++)
        world_free(p->world[i]);
}

/* A test of three plans of one handle, `p`. */
#define PlansTest(name, ranks, text)                        \
    OpenTest(handles_plans, name, ranks, Plans *p, Plans p; \
             plans_open(&p, bootstrap, plain(text)), &p, plans_close(&p))

/* Move a plan's bytes, and overwrite those at the old address. */
static void move(EpTensor *plan) {
    size_t bytes = (size_t)plan->shape[0];
    char *old = plan->data;
    plan->data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memcpy(plan->data, old, bytes);
    memset(old, 0xdd, bytes);
    free(old);
}

/* A handle's own plan, which another handle names, and whose numbers stay readable. */
ThreadTest(handles_plans, own_plan_named_on_another_handle, RANKS) {
    Case c = plain("named=0");
    Step own = open_step(bootstrap, &c);
    EpHandle *owner = own.handle, *other = NULL;
    EpHandleConfig config = case_handle_config(&own.world->c);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    EpTensor plan = {0};
    config.plans = EP_PLANS_NAMED, config.zero_tail = EP_TAIL_KEEP;
    if (owner) CHECK_OK(ep_handle_create(own.group, &config, &other));
    CHECK_REFUSED(ep_handle_plan(owner, NULL), EP_ERR_NULL, "ep_handle_plan: plan");
    CHECK_REFUSED(ep_handle_plan(other, &plan), EP_ERR_UNSUPPORTED, "ep_handle_plan: handle",
                  "EP_PLANS_NAMED");
    CHECK(!plan.struct_size, "a refused call has written the tensor");
    CHECK_REFUSED(ep_handle_info(other, &info), EP_ERR_UNSUPPORTED, "named plans");
    REQUIRE_OK(ep_handle_plan(owner, &plan));
    Step named = own;
    named.handle = other, named.plan = &plan;
    step_prepare(&own);
    step_dispatch(&named);
    step_combine(&own);
    step_combine_backward(&named);
    info = handle_info(owner);
    CHECK(info.recv_rows == own.world->rank[own.rank].recv_rows, "%lld rows",
          (long long)info.recv_rows);
    ep_handle_destroy(other);
    close_step(&own);
}

static void run_interleaved(const EpBootstrap *bootstrap, Case c) {
    Plans p;
    plans_open(&p, bootstrap, c);
    for (int i = 0; i < PLANS; i++)
        step_prepare(&p.step[i]);
    for (int i = PLANS - 1; i >= 0; i--) {
        move(&p.plan[i]);
        step_dispatch(&p.step[i]);
    }
    EpHandle *other = open_handle(p.group, &p.world[0]->c);
    for (int i = 0; i < PLANS; i++) {
        move(&p.plan[i]);
        if (i == 1) p.step[i].handle = other; /* of equal configuration */
        step_combine(&p.step[i]);
    }
    ep_handle_destroy(other);
    p.step[1].handle = p.handle;
    for (int i = 0; i < PLANS && c.mode != EP_MODE_LATENCY; i++) {
        step_combine_backward(&p.step[(i + 1) % PLANS]);
        move(&p.plan[(i + 1) % PLANS]);
        step_dispatch_backward(&p.step[(i + 1) % PLANS]);
    }
    plans_close(&p);
}

ThreadTest(handles_plans, three_of_one_handle, RANKS) {
    static const char *const changes[] = {"", "layout=flat", "layout=batched"};
    for (int i = 0; i < LENGTH(changes); i++)
        run_interleaved(bootstrap, plain(changes[i]));
}

static int64_t count_dropped(const Case *c) {
    World *world = world_new(c);
    int64_t dropped = 0;
    for (int r = 0; r < c->ranks; r++)
        dropped += world->rank[r].dropped;
    world_free(world);
    return dropped;
}

/* A capacity bounds the plan as well as the rows. */
ThreadTest(handles_plans, three_with_little_room, RANKS) {
    static const int top_k[] = {6, 8, 9};
    for (int i = 0; i < 9; i++) {
        int fits = i % 2;
        Case c = plain(fits ? "experts=13 max_tokens=30 duplicates=1 masked_percent=85 "
                              "overflow=drop capacity=90 rows_per_expert=18 seed=40"
                            : "experts=13 max_tokens=30 masked_percent=30 overflow=drop "
                              "capacity=24 rows_per_expert=4 seed=40");
        c.layout = (EpLayout)(1 + i % 3), c.top_k = top_k[i / 3];
        check_note("layout %d, K %d, fits %d", (int)c.layout, c.top_k, fits);
        CHECK(fits == (count_dropped(&c) == 0), "%lld dropped", (long long)count_dropped(&c));
        run_interleaved(bootstrap, c);
    }
}

ThreadTest(handles_plans, three_in_latency_mode, RANKS) {
    needs_latency();
    run_interleaved(bootstrap, plain("mode=latency"));
    run_interleaved(bootstrap, plain("mode=latency phases=1"));
}

/* A saved plan is restored after its memory has served another step. */
PlansTest(saved_and_restored, RANKS, "") {
    size_t bytes = (size_t)p->plan[0].shape[0];
    void *saved = malloc(bytes);
    step_prepare(&p->step[0]);
    step_dispatch(&p->step[0]);
    memcpy(saved, p->plan[0].data, bytes);
    Step second = p->step[1];
    second.plan = &p->plan[0];
    step_all(&second);
    memcpy(p->plan[0].data, saved, bytes);
    step_move(&p->step[0]);
    free(saved);
}

/* A handle with a plan of its own may name others, too. */
PlansTest(beside_the_own_one, RANKS, "named=0") {
    Step own = p->step[1];
    own.plan = NULL;
    step_prepare(&own);
    step_prepare(&p->step[0]);
    step_move(&p->step[0]);
    step_move(&own);
}

/* No byte behind the plan is written. */
PlansTest(exactly_the_bytes_asked_for, 1, "ranks=1") {
    size_t bytes = (size_t)p->plan[0].shape[0];
    unsigned char *room = aligned_alloc(64, (bytes + 64 + 63) / 64 * 64 + 192);
    memset(room, 0xee, bytes + 128);
    free(p->plan[0].data);
    p->plan[0].data = room;
    step_all(&p->step[0]);
    for (size_t i = bytes; i < bytes + 128; i++)
        if (!CHECK(room[i] == 0xee, "byte %zu behind the plan was written", i - bytes)) break;
}

/* ---- named by some ranks ------------------------------------------------------------------- */

/* The handle's own plan, which the ranks that name it name in dispatch. */
static void run_named_by_some(const EpBootstrap *bootstrap, const char *nodes, int capacity,
                              int names) {
    Case c = case_of("ranks=%d capacity=%d", bootstrap->size, capacity);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", nodes);
    Step step = open_step(bootstrap, &c);
    EpTensor plan = {0};
    for (int i = 0; i < 3; i++) {
        step.plan = NULL;
        step_prepare(&step);
        CHECK_OK(ep_handle_plan(step.handle, &plan));
        if (names) step.plan = &plan;
        step_dispatch(&step);
    }
    close_step(&step);
}

ThreadTest(handles_plans, named_by_one_rank, RANKS) {
    int is_last = bootstrap->rank == RANKS - 1;
    run_named_by_some(bootstrap, "1", 0, is_last);
    run_named_by_some(bootstrap, "0,1,0", 100, is_last);
}

RankTest(handles_plans, named_by_all_ranks_on_nodes, RANKS,
         run_named_by_some(bootstrap, "0,1,0", 0, 1));

/* With exact sizing GPUs of several nodes send filled places alone, but all where a plan is named:
 * ranks must agree. The host backend always sends what is needed. */
static void run_named_alone(const EpBootstrap *bootstrap, const char *nodes) {
    Case c = case_of("ranks=%d", bootstrap->size);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", nodes);
    Step step = open_step(bootstrap, &c);
    _Alignas(16) static _Thread_local char room[1 << 14];
    EpTensor plan = {0};
    int names = bootstrap->rank == bootstrap->size - 1;
    step_prepare(&step);
    CHECK_OK(ep_handle_plan(step.handle, &plan));
    EpTensor tokens = step_tokens(&step), rows = step_recv_tokens(&step, room);
    EpStatus status = ep_dispatch(step.handle, names ? &plan : NULL, NULL, &tokens, NULL, NULL,
                                  NULL, &rows, NULL, NULL, NULL);
    if (status == EP_OK) status = ep_group_status(step.group, NULL);
    /* Who shares its node with the other rank may learn of it from a third one. */
    int compares = names || bootstrap->size == 2;
    if (!TESTS_ON_GPU)
        CHECK_OK(status);
    else if (compares || status != EP_ERR_PEER)
        CHECK_REFUSED(status, EP_ERR_ORDER, "dispatch: expected the same sizes on all ranks");
    close_step(&step);
}

RankTest(handles_plans, one_of_two_nodes_names_it, 2, run_named_alone(bootstrap, "0,1"));
RankTest(handles_plans, one_of_a_node_names_it, 4, run_named_alone(bootstrap, "0,0,1,1"));

/* ---- wrong plans --------------------------------------------------------------------------- */

/* Returns the status of an operation. On GPUs kernels look at the plan, so the group has it. */
static EpStatus outcome(const Step *step, EpStatus status) {
    return TESTS_ON_GPU && status == EP_OK ? ep_group_status(step->group, NULL) : status;
}

static EpStatus call_combine(const Step *step, const EpTensor *plan) {
    _Alignas(16) static _Thread_local char room[1 << 14];
    EpTensor rows = step_expert_out(step), out = step_grad_out(step);
    out.data = room;
    memset(room, 0x77, sizeof(room));
    EpStatus status = outcome(step, ep_combine(step->handle, plan, &rows, NULL, NULL, NULL, &out));
    for (size_t i = 0; status != EP_OK && i < sizeof(room); i++)
        if (!CHECK(room[i] == 0x77, "byte %zu was written", i)) break;
    return status;
}

typedef enum Damage { CLEARED, OTHER_END, OTHER_GROUP, OTHER_CONFIG, DAMAGES } Damage;

static const struct {
    EpStatus status;
    const char *part;
} damaged[] = {{EP_ERR_NOT_PREPARED, "other bytes"},
               {EP_ERR_HANDLE_MEMORY, "damaged end"},
               {EP_ERR_FOREIGN, "group"},
               {EP_ERR_FOREIGN, "configuration"}};

static void spoil(Plans *p, const EpBootstrap *bootstrap, Damage damage) {
    EpTensor *plan = &p->plan[0];
    size_t bytes = (size_t)plan->shape[0];
    if (damage == CLEARED) memset(plan->data, 0, bytes);
    if (damage == OTHER_END) memset((char *)plan->data + bytes / 2, 0x11, bytes - bytes / 2);
    if (damage < OTHER_GROUP) return;
    Plans q;
    Case c = p->world[0]->c;
    if (damage == OTHER_CONFIG) c.capacity = 1000;
    plans_open(&q, bootstrap, c);
    if (damage == OTHER_CONFIG) {
        ep_handle_destroy(q.handle);
        q.handle = open_handle(p->group, &c);
        q.step[0].group = p->group, q.step[0].handle = q.handle;
    }
    step_prepare(&q.step[0]);
    memcpy(plan->data, q.plan[0].data,
           bytes < (size_t)q.plan[0].shape[0] ? bytes : (size_t)q.plan[0].shape[0]);
    plans_close(&q);
}

ThreadTest(handles_plans, wrong_contents, 1) {
    for (int damage = 0; damage < DAMAGES; damage++) {
        Plans p;
        check_note("damage %d", damage);
        plans_open(&p, bootstrap, plain(ALONE));
        step_prepare(&p.step[0]);
        spoil(&p, bootstrap, (Damage)damage);
        CHECK_REFUSED(call_combine(&p.step[0], &p.plan[0]), damaged[damage].status, "rank 0",
                      "plan", damaged[damage].part);
        if (!TESTS_ON_GPU) step_all(&p.step[1]);
        plans_close(&p);
    }
}

/* A handle of another configuration makes its plan in the memory of a handle's own. */
ThreadTest(handles_plans, own_plan_overwritten, 1) {
    Case c = case_of("layout=flat top_k=4 capacity=64"), d = case_of("top_k=4 capacity=64 named=1");
    Step own = open_step(bootstrap, &c), named = own;
    d = case_complete(d), named.world = world_new(&d);
    named.handle = open_handle(own.group, &d);
    EpTensor plan = {0};
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    named.plan = &plan;
    step_prepare(&own);
    CHECK_OK(ep_handle_plan(own.handle, &plan));
    step_prepare(&named);
    CHECK_REFUSED(call_combine(&own, NULL), EP_ERR_FOREIGN, "rank 0", "plan", "configuration");
    if (!TESTS_ON_GPU) {
        CHECK_REFUSED(ep_handle_info(own.handle, &info), EP_ERR_FOREIGN, "plan", "configuration");
        step_all(&own);
    }
    world_free(named.world);
    close_step(&own);
}

/* Rows that a plan counts as sent, but not as received, have entries that nothing has checked. */
PlansTest(damaged_own_rows, 1, ALONE) {
    HOST_ONLY("the host backend checks a plan's numbers");
    EpPlan plan;
    step_prepare(&p->step[0]);
    ep_plan_map(&p->handle->shape, p->plan[0].data, &plan);
    int32_t row = plan.recv_begin[1] - 1;
    plan.recv_begin[1] = row;
    plan.row_entry[row] = 959619703;
    CHECK_REFUSED(call_combine(&p->step[0], &p->plan[0]), EP_ERR_HANDLE_MEMORY, "rank 0", "plan",
                  "damaged numbers");
}

/* A row without an entry on its rank: with many of them a token had more rows than entries. */
PlansTest(damaged_owner, 2, "ranks=2 spread=full") {
    HOST_ONLY("the host backend checks a plan's numbers");
    EpPlan plan;
    int top_k = p->world[0]->c.top_k;
    step_prepare(&p->step[0]);
    ep_plan_map(&p->handle->shape, p->plan[0].data, &plan);
    if (bootstrap->rank == 0) {
        int64_t first = (int64_t)plan.send_token[plan.send_begin[1]] * top_k;
        for (int64_t i = first; i < first + top_k; i++)
            if (plan.owner[i] == 1) plan.owner[i] = -1;
        CHECK_REFUSED(call_combine(&p->step[0], &p->plan[0]), EP_ERR_HANDLE_MEMORY, "rank 0",
                      "plan", "damaged numbers");
    }
}

static void set_tokens(Fixture *f, int64_t rows) {
    static const int of_tokens[] = {IN_TOKENS, IN_WEIGHTS, IN_SCALES, OUT_SUMS};
    fixture_reset(f);
    for (int i = 0; i < 4; i++)
        f->tensor[of_tokens[i]].shape[0] = rows;
}

/* Where the plan counts 5 of 9 tokens, the token tensors of a call have one T from 5 to 9. */
SoloTest(handles_plans, one_number_of_tokens) {
    for (int named = 0; named < 2; named++) {
        Fixture *f = fixture_new(named ? "capacity=64 named=1" : "capacity=64");
        *(int32_t *)f->tensor[IN_COUNT].data = 5;
        REQUIRE_OK(fixture_call(f, STEP_PREPARE));
        for (int64_t rows = 9; rows >= 5; rows--) {
            set_tokens(f, rows);
            CHECK_OK(fixture_call(f, STEP_DISPATCH));
            CHECK_OK(fixture_call(f, STEP_COMBINE));
        }
        set_tokens(f, 7), f->tensor[IN_WEIGHTS].shape[0] = 9;
        CHECK_REFUSED(fixture_call(f, STEP_DISPATCH), EP_ERR_SHAPE, "rank 0", "topk_weights",
                      "expected T = 7 in dimension 0, got 9");
        set_tokens(f, 10);
        CHECK_REFUSED(fixture_call(f, STEP_COMBINE), EP_ERR_TOKENS, "out",
                      "at most max_tokens = 9");
        fixture_check_untouched(f);
        set_tokens(f, 4);
        CHECK_REFUSED(outcome(&f->step, fixture_call(f, STEP_COMBINE)), EP_ERR_SHAPE, "rank 0",
                      "got 4");
        fixture_free(f);
    }
}

RefusalsTest(handles_plans, wrong_tensors, "plans", "capacity=64 named=1");

/* Ranks name plans that different operations wrote. */
static void name_different_plans(const EpBootstrap *bootstrap, const char *nodes) {
    Plans p;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", nodes);
    plans_open(&p, bootstrap, plain("spread=full"));
    step_prepare(&p.step[0]);
    step_prepare(&p.step[1]);
    const Step *step = &p.step[bootstrap->rank == 1];
    EpTensor rows = step_expert_out(step), out = step_grad_out(step);
    CHECK_REFUSED(outcome(step, ep_combine(p.handle, step->plan, &rows, NULL, NULL, NULL, &out)),
                  EP_ERR_ORDER, "the operation that wrote the plan differs");
    plans_close(&p);
}

RankTest(handles_plans, of_different_operations, RANKS, name_different_plans(bootstrap, "1"));
/* Between nodes, stamps that go with the rows tell it. */
RankTest(handles_plans, of_different_operations_on_nodes, RANKS,
         name_different_plans(bootstrap, "0,1,2"));

/* Without a top_k of the handle's own, K of a named plan is the group's max_top_k. */
PlansTest(another_k, 1, ALONE) {
    int32_t index[9 * 2] = {0};
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, 9, 2);
    CHECK_REFUSED(ep_prepare(p->handle, &p->plan[0], &topk_idx, NULL, NULL, NULL), EP_ERR_SHAPE,
                  "topk_idx", "max_top_k", "got 2");
}

/* The routing of a handle's own plan has another K than a plan that its dispatch names. */
ThreadTest(handles_plans, another_k_at_dispatch, 1) {
    needs_latency();
    EpTensor plan;
    Case c = plain(ALONE " mode=latency named=0");
    Step step = open_step(bootstrap, &c);
    EpHandle *handle = step.handle;
    c = step.world->c;
    int32_t index[9 * 2] = {0};
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, 9, 2), tokens = step_tokens(&step);
    char *received = calloc(1000, case_row_bytes(&c));
    EpTensor rows = step_recv_tokens(&step, received);
    open_plan(step.group, &c, &plan);
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    CHECK_REFUSED(
        ep_dispatch(handle, &plan, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL),
        EP_ERR_SHAPE, "ep_dispatch: plan", "is 3", "was given 2");
    CHECK_OK(ep_dispatch(handle, NULL, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL));
    close_step(&step);
    free(plan.data), free(received);
}

/* ---- handles ------------------------------------------------------------------------------- */

/* Returns the time to create and destroy a handle, in microseconds. */
static double time_handles(EpGroup *group, const EpHandleConfig *config) {
    enum { HANDLES = 100 };
    EpHandle *handle[HANDLES];
    double begin = seconds_now();
    for (int i = 0; i < HANDLES; i++)
        CHECK_OK(ep_handle_create(group, config, &handle[i]));
    for (int i = 0; i < HANDLES; i++)
        ep_handle_destroy(handle[i * 7 % HANDLES]);
    return (seconds_now() - begin) / HANDLES * 1e6;
}

/* The best of many times, since the machine may be busy. */
PlansTest(handles_cost_nothing, 1, "ranks=1") {
    EpGroupInfo before = EP_GROUP_INFO_INIT, after = before;
    EpHandleConfig config = case_handle_config(&p->world[0]->c);
    CHECK_OK(ep_group_query(p->group, &before));
    double best = 1e9;
    for (int i = 0; i < 50; i++) {
        double each = time_handles(p->group, &config);
        best = each < best ? each : best;
    }
    CHECK(best < 20, "%.1f us for each handle", best);
    CHECK_OK(ep_group_query(p->group, &after));
    CHECK(after.library_bytes == before.library_bytes, "%lld bytes more",
          (long long)(after.library_bytes - before.library_bytes));
}

/* ---- latency mode -------------------------------------------------------------------------- */

/* A dispatch that is given its routing needs no ep_prepare. */
static void dispatch_with_routing(Plans *p, int rank, int phases) {
    Step *step = &p->step[0];
    const RankWorld *me = &p->world[0]->rank[rank];
    const Case *c = &p->world[0]->c;
    _Alignas(16) static _Thread_local char room[1 << 16];
    int64_t rows = -1;
    EpTensor topk_idx = ep_tensor_2d(me->index, EP_TYPE_INT64, me->rows, c->top_k);
    EpTensor recv_rows = ep_tensor_1d(&rows, EP_TYPE_INT64, 1);
    EpTensor tokens = step_tokens(step), recv = step_recv_tokens(step, room);
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    EpPrepare prepare = EP_PREPARE_INIT;
    prepare.topk_idx = &topk_idx, prepare.out = &out, out.recv_rows = &recv_rows;
    if (phases) {
        CHECK_OK(ep_dispatch_send(p->handle, step->plan, &prepare, &tokens, NULL, NULL, NULL));
        CHECK_OK(ep_dispatch_wait(p->handle, NULL, &recv, NULL, NULL, NULL));
    } else {
        CHECK_OK(ep_dispatch(p->handle, step->plan, &prepare, &tokens, NULL, NULL, NULL, &recv,
                             NULL, NULL, NULL));
    }
    if (!TESTS_ON_GPU) CHECK(rows == me->recv_rows, "%lld rows", (long long)rows);
    step_combine(step);
}

PlansTest(dispatch_with_its_routing, RANKS, "mode=latency") {
    EpTensor tokens = step_tokens(&p->step[0]);
    CHECK_REFUSED(ep_dispatch_send(p->handle, &p->plan[0], NULL, &tokens, NULL, NULL, NULL),
                  EP_ERR_NOT_PREPARED, "routing");
    if (!TESTS_ON_GPU)
        for (int phases = 0; phases < 2; phases++)
            dispatch_with_routing(p, bootstrap->rank, phases);
}

PlansTest(routing_in_throughput_mode, 1, "ranks=1") {
    EpPrepare prepare = EP_PREPARE_INIT;
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    int32_t number = 7;
    EpTensor tokens = step_tokens(&p->step[0]), vector = ep_tensor_1d(&number, EP_TYPE_INT32, 1);
    step_prepare(&p->step[0]);
    const struct {
        const EpTensor *topk_idx, *rows, *by_source;
        EpStatus status;
        const char *argument, *text;
    } wrong[] = {{&vector, NULL, NULL, EP_ERR_UNSUPPORTED, "prepare", "throughput"},
                 {NULL, NULL, &vector, EP_ERR_UNSUPPORTED, "out.source_rows", "a plan does not"},
                 {NULL, &tokens, NULL, EP_ERR_NDIM, "out.recv_rows", "1"}};
    prepare.out = &out;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        prepare.topk_idx = wrong[i].topk_idx;
        out.recv_rows = wrong[i].rows, out.source_rows = wrong[i].by_source;
        CHECK_REFUSED(ep_dispatch(p->handle, &p->plan[0], &prepare, &tokens, NULL, NULL, NULL,
                                  &tokens, NULL, NULL, NULL),
                      wrong[i].status, wrong[i].argument, wrong[i].text);
    }
    CHECK(number == 7, "a refused call has written %d", number);
}

/* As many operations may be in flight as the group has sets of buffers. A handle that is destroyed
 * with a pending operation makes room. */
PlansTest(more_in_flight_than_sets, RANKS, "mode=latency sets=2") {
    enum { SETS = 2 };
    EpHandle *handles[PLANS];
    StepPending *pending[PLANS];
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < PLANS; i++)
            p->step[i].handle = handles[i] = open_handle(p->group, &p->world[0]->c);
        for (int i = 0; i < SETS; i++)
            pending[i] = step_dispatch_send(&p->step[i]);
        int32_t index[9 * 3] = {0};
        EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, 9, 3);
        EpTensor tokens = step_tokens(&p->step[SETS]);
        tokens.shape[0] = 9;
        CHECK_OK(ep_prepare(handles[SETS], &p->plan[SETS], &topk_idx, NULL, NULL, NULL));
        CHECK_REFUSED(
            ep_dispatch_send(handles[SETS], &p->plan[SETS], NULL, &tokens, NULL, NULL, NULL),
            EP_ERR_ORDER, "latency_sets", "2 sets");
        step_dispatch_wait(&p->step[0], pending[0]);
        pending[SETS] = step_dispatch_send(&p->step[SETS]);
        step_dispatch_wait(&p->step[1], pending[1]);
        step_dispatch_wait(&p->step[SETS], pending[SETS]);
        for (int i = 0; i < PLANS; i++)
            step_combine(&p->step[i]);
        for (int i = 0; i < PLANS; i++)
            ep_handle_destroy(handles[i]);
    }
}
