/* SPDX-License-Identifier: Apache-2.0 */
/* Masks: ranks go on without those that are absent, and take them back. Every byte is the oracle's,
 * which knows who is masked, before prepare or after it. */
#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#if EP_WITH_CUDA
#include "runtime/cuda/cuda.h"
#endif

TestSuite(handles_masks, .init = be_quiet);

#define SOON (TESTS_SANITIZED ? 3.0 : 1.0) /* a deadline that tests wait for */

/** A group with masks, and a step of it for each of the sets of ranks of a case. */
typedef struct Masked {
    Case c;
    World *all;  /* nobody is masked */
    World *some; /* the case's ranks are */
    World *late; /* likewise, after prepare */
    Step step;
    int is_masked; /* this rank */
    const EpBootstrap *bootstrap;
} Masked;

static Masked masked_open(const EpBootstrap *bootstrap, const Case *given) {
    Masked m = {.c = *given, .bootstrap = bootstrap};
    Case c = *given;
    c.masks = 1;
    m.some = world_new(&c);
    c.masked_late = 1, m.late = world_new(&c);
    memset(c.masked, 0, sizeof(c.masked)), m.all = world_new(&c);
    m.is_masked = case_is_masked(given, bootstrap->rank);
    m.step = (Step){.world = m.all, .rank = bootstrap->rank};
    m.step.group = open_group(bootstrap, &m.all->c);
    m.step.handle = open_handle(m.step.group, &m.all->c);
    if (m.all->c.map != MAP_FIRST) CHECK_OK(place_experts(m.step.group, &m.all->c));
    check_note("case: %s", case_describe(&m.some->c));
    return m;
}

static void masked_close(Masked *m) {
    ep_group_destroy(m->step.group);
    world_free(m->all), world_free(m->some), world_free(m->late);
}

static void meet(const Masked *m) {
    REQUIRE_OK(m->bootstrap->barrier(m->bootstrap->context, 60));
}

static uint32_t living(const World *world) {
    uint32_t word = 0;
    for (int r = 0; r < world->c.ranks; r++)
        word |= (uint32_t)!case_is_masked(&world->c, r) << r;
    return word;
}

/* Whether the backend has masks on these nodes. */
static int serves(const Case *c) {
    return TEST_BACKEND != EP_BACKEND_CUDA || !c->nodes[0];
}

/* Returns a call's status. GPUs tell later. */
static EpStatus end(const Masked *m, EpStatus status) {
    return status == EP_OK ? ep_group_status(m->step.group, NULL) : status;
}

static void check_alive(const Masked *m, uint32_t expected) {
    uint32_t word = 0;
    CHECK_OK(ep_group_alive(m->step.group, &word));
    CHECK(word == expected, "%#x instead of %#x", word, expected);
}

/* Leave units in the counters of ready words, as a dispatch does that has not come to its end. */
static void leave_units(const EpGroup *group) {
#if EP_WITH_CUDA
    size_t bytes = (size_t)ep_cuda_counter_bytes(group->latency_sets);
    if (TEST_BACKEND == EP_BACKEND_CUDA)
        CHECK(!cudaMemset(ep_cuda(group)->block_counters, 1, bytes), "cudaMemset failed");
#else
    (void)group;
#endif
}

/* Go on with the ranks of a world. */
static void mask(Masked *m, World *world) {
    uint32_t word = living(world);
    EpStatus status = EP_ERR_TIMEOUT;
    leave_units(m->step.group);
    /* On a loaded machine a rank may come later than a short deadline. */
    for (int i = 0; i < 20 && status == EP_ERR_TIMEOUT; i++)
        status = ep_group_mask(m->step.group, &word, NULL);
    REQUIRE_OK(status);
    check_alive(m, word);
    CHECK_OK(ep_group_status(m->step.group, NULL));
    m->step.world = world;
}

static void step_of(Masked *m, World *world) {
    m->step.world = world;
    step_all(&m->step);
}

/* ---- steps without some ranks ---- */

/* The plan that all ranks made serves the others, too. */
static void without_some(const EpBootstrap *bootstrap, void *given) {
    Masked m = masked_open(bootstrap, given);
    step_all(&m.step);
    meet(&m);
    if (!m.is_masked) {
        mask(&m, m.late);
        if (m.all->c.mode != EP_MODE_LATENCY) step_move(&m.step);
        step_of(&m, m.some);
        step_all(&m.step);
    }
    meet(&m);
    mask(&m, m.all);
    step_all(&m.step);
    masked_close(&m);
}

static void run_without(Case c) {
    if (serves(&c)) run_body_of(without_some, &c);
}

#define BOTH_MODES(name, more, ...)                                                   \
    TextsTest(handles_masks, name, run_without, more " mode=throughput " __VA_ARGS__, \
              more " mode=latency " __VA_ARGS__, more " mode=latency phases=1 " __VA_ARGS__)
BOTH_MODES(expert_major, "ranks=4 masked=0100 top_k=4", "weighted=1 alignment=8 counters=1");
BOTH_MODES(flat, "ranks=4 masked=1001 top_k=4 layout=flat", "weighted=1 scale_bytes=8");
BOTH_MODES(batched, "ranks=3 masked=010 layout=batched", "weighted=1 counters=1 zero_tail=zero");
BOTH_MODES(rank_major, "ranks=4 masked=0011 top_k=3 layout=rank-major", "zero_tail=ids biases=2");
BOTH_MODES(alone, "ranks=3 masked=110 spread=full", "weighted=1");
BOTH_MODES(on_nodes, "ranks=5 nodes=00111 masked=00100 top_k=4 spread=full", "weighted=1");
BOTH_MODES(copies, "ranks=4 nodes=0011 masked=0100 experts=5 physical=11 map=random top_k=4",
           "weighted=1 choice=spread");
BOTH_MODES(near_copies, "ranks=3 masked=001 experts=6 physical=12 map=everywhere spread=full",
           "counters=1");
BOTH_MODES(by_entry, "ranks=4 nodes=0101 masked=0010 top_k=4", "by_entry=1 weights_at_combine=1");
/* A plan's rows of ranks that were masked since are zero, and hold no token. */
TextsTest(handles_masks, words, run_without,
          "ranks=4 masked=1001 top_k=4 layout=flat mode=latency block_rows=3 spread=full",
          "ranks=4 masked=0110 top_k=4 layout=flat block_rows=7 max_tokens=100 weighted=1",
          "ranks=3 masked=010 top_k=3 alignment=4 block_rows=4 capacity=500 max_tokens=90",
          "ranks=4 masked=1000 layout=rank-major block_rows=5 top_k=3",
          "ranks=4 nodes=0011 masked=0100 layout=batched block_rows=4 top_k=4");
TextsTest(handles_masks, other_steps, run_without,
          "ranks=4 nodes=0011 masked=0001 spread=full experts=7 merged=1 duplicates=1 top_k=5",
          "ranks=4 nodes=0123 masked=1000 spread=full node_rows=4 capacity=200 counters=1",
          "ranks=4 masked=0101 masked_percent=20 invalid_percent=10 top_k=6 quant=fp8",
          "ranks=4 masked=0010 top_k=4 by_entry=1 max_tokens=300 weighted=1",
          "ranks=4 masked=1110 max_tokens=300 hidden=264 top_k=4 spread=full weighted=1",
          "ranks=3 nodes=010 masked=010 max_tokens=700 hidden=512 top_k=4 spread=full",
          "ranks=4 masked=0100 sum_quant=fp8 padding=keep alignment=4 routing=one-rank target=1",
          "ranks=3 masked=001 grad_quant=mxfp8 routing=one-rank target=2 counted=1");

/* ---- ranks that are missing ---- */

/* Every call is refused, and nobody waits again. */
static void check_suspended(const Masked *m, StepOp op) {
    EpFinding found = EP_FINDING_INIT;
    double begin = seconds_now();
    unsigned all = m->all->c.mode == EP_MODE_LATENCY ? STEP_FORWARD : STEP_ALL;
    CHECK_REFUSED(ep_group_status(m->step.group, &found), EP_ERR_TIMEOUT, "until ep_group_mask");
    CHECK(case_is_masked(&m->c, found.peer), "rank %d is blamed", (int)found.peer);
    CHECK(strcmp(found.phase, op_phase(op)) == 0, "phase %s", found.phase);
    for (unsigned again = STEP_PREPARE; again <= all; again <<= 1)
        CHECK_REFUSED(call_op(&m->step, (StepOp)again), EP_ERR_TIMEOUT, "until ep_group_mask");
    CHECK(seconds_now() - begin < 0.8 * SOON, "it took %.2f s", seconds_now() - begin);
    check_alive(m, living(m->all));
}

/* Some ranks are absent from an operation, and come too late. They learn that they are masked: from
 * ranks on their node at once, from others at their deadline. */
static void absent_from(Masked *m, StepOp op) {
    check_note("operation %d, case: %s", (int)op, case_describe(&m->some->c));
    m->step.world = m->all;
    if (op != STEP_PREPARE) CHECK_OK(call_op(&m->step, STEP_PREPARE));
    meet(m);
    if (!m->is_masked) {
        CHECK_STATUS(end(m, call_op(&m->step, op)), EP_ERR_TIMEOUT);
        check_suspended(m, op);
        mask(m, m->some);
        step_all(&m->step);
    }
    meet(m);
    if (m->is_masked) {
        EpStatus status = EP_OK;
        for (int i = 0; i < 4 && status == EP_OK; i++)
            status = end(m, call_op(&m->step, op));
        CHECK(status == EP_ERR_TIMEOUT, "%d: %s", (int)status, ep_last_error());
        CHECK_REFUSED(ep_group_status(m->step.group, NULL), EP_ERR_TIMEOUT, "until ep_group_mask");
    }
    meet(m);
    mask(m, m->all);
    step_all(&m->step);
}

static void absent_from_each(const EpBootstrap *bootstrap, void *given) {
    Case c = *(Case *)given;
    c.timeout = SOON;
    Masked m = masked_open(bootstrap, &c);
    for (int call = 0; call < NUM_CALLS; call++)
        absent_from(&m, call_number(call));
    masked_close(&m);
}

static void run_absent(Case c) {
    if (serves(&c)) run_body_of(absent_from_each, &c);
}

TextsTest(handles_masks, absent_from_each, run_absent, "ranks=3 masked=001 spread=full",
          "ranks=4 masked=0110 spread=full", "ranks=4 nodes=0011 masked=0010 spread=full",
          "ranks=3 nodes=012 masked=010 spread=full", "ranks=3 masked=110 spread=full");

static void absent_from_decoding(const EpBootstrap *bootstrap, void *given) {
    Case c = *(Case *)given;
    c.timeout = SOON;
    Masked m = masked_open(bootstrap, &c);
    meet(&m);
    if (!m.is_masked) {
        CHECK_OK(call_op(&m.step, STEP_PREPARE));
        CHECK_STATUS(end(&m, call_op(&m.step, STEP_DISPATCH)), EP_ERR_TIMEOUT);
        check_suspended(&m, STEP_DISPATCH);
        mask(&m, m.some);
        step_all(&m.step);
    }
    meet(&m);
    mask(&m, m.all);
    step_all(&m.step);
    masked_close(&m);
}

static void run_absent_from_decoding(Case c) {
    if (serves(&c)) run_body_of(absent_from_decoding, &c);
}

TextsTest(handles_masks, absent_from_decoding, run_absent_from_decoding,
          "ranks=3 masked=001 spread=full mode=latency",
          "ranks=3 nodes=001 masked=001 spread=full mode=latency phases=1");

/* ---- ranks that are late ---- */

/* So late no rank may be that only waits for a CPU. Emulated GPUs share few of them. */
#if TESTS_SANITIZED
#define LATE_SECONDS 3
#elif defined(TESTS_EMULATED)
#define LATE_SECONDS 2
#else
#define LATE_SECONDS 1
#endif
#define TEXT_OF(number) #number
#define AS_TEXT(number) TEXT_OF(number)
#define LATE "late_us=" AS_TEXT(LATE_SECONDS) "000000 spread=full mode=latency "
#define LATE_DEADLINE "late_us=60000000 timeout=" AS_TEXT(LATE_SECONDS) " spread=full mode=latency "

/* Check that these ranks are cut, which is said once. */
static void check_cut(const Masked *m, const World *world, int is_told) {
    EpFinding found = EP_FINDING_INIT;
    if (is_told) {
        CHECK_REFUSED(ep_group_status(m->step.group, &found), EP_ERR_MASKED, "late within ");
        CHECK(case_is_masked(&world->c, found.peer), "rank %d", (int)found.peer);
    }
    CHECK_OK(ep_group_status(m->step.group, NULL));
    check_alive(m, living(world));
}

/* The world of a rank that all others have cut. */
static World *alone(const Masked *m) {
    Case c = m->some->c;
    for (int r = 0; r < c.ranks; r++)
        c.masked[r] = r == m->bootstrap->rank ? '0' : '1';
    return world_new(&c);
}

/* Some ranks come neither to dispatch nor, later, to combine. The others wait once, and all their
 * bytes are those of a step without them. Then these ranks come: alone, since they were cut. */
static void late(const EpBootstrap *bootstrap, void *given) {
    Masked m = masked_open(bootstrap, given);
    World *own = alone(&m);
    Case now = m.some->c;
    now.cut_now = 1;
    World *cutting = world_new(&now);
    step_all(&m.step);
    meet(&m);
    if (!m.is_masked) {
        double begin = seconds_now();
        m.step.world = cutting;
        step_move(&m.step);
        check_cut(&m, m.some, 1);
        CHECK(seconds_now() - begin > 0.9 * LATE_SECONDS, "nobody waited");
        begin = seconds_now();
        for (int i = 0; i < 3; i++)
            step_of(&m, m.some);
        CHECK(seconds_now() - begin < 60, "it took %.1f s", seconds_now() - begin);
        check_cut(&m, m.some, 0);
    }
    meet(&m);
    if (m.is_masked) {
        /* On this node it sees that it was cut. What another node had sent before is there:
         * routing, whose rows never come. */
        now = own->c, now.cut_now = 1, now.masked_late = m.c.nodes[0] != 0;
        World *first = world_new(&now);
        m.step.world = first;
        step_move(&m.step);
        check_cut(&m, own, 1);
        step_of(&m, own);
        world_free(first);
    }
    meet(&m);
    mask(&m, m.all);
    step_all(&m.step);
    meet(&m);
    /* The plan is there, and rows have come. What the late rank has summed does not. */
    m.step.world = m.all;
    step_dispatch(&m.step);
    meet(&m);
    if (!m.is_masked) {
        m.step.world = m.late;
        step_combine(&m.step);
        check_cut(&m, m.some, 1);
    }
    meet(&m);
    mask(&m, m.all);
    step_all(&m.step);
    masked_close(&m);
    world_free(own), world_free(cutting);
}

static void run_late(Case c) {
    if (serves(&c)) run_body_of(late, &c);
}

TextsTest(handles_masks, late, run_late, LATE "ranks=3 masked=001 weighted=1",
          LATE "ranks=4 masked=0100 layout=flat top_k=4 phases=1 scale_bytes=8",
          LATE "ranks=3 nodes=001 masked=001 layout=batched phases=1 weighted=1",
          LATE "ranks=4 masked=1000 layout=rank-major top_k=4 zero_tail=ids",
          LATE_DEADLINE "ranks=3 masked=100 weighted=1",
          LATE "ranks=3 nodes=012 masked=010 weights_at_combine=1 top_k=4",
          LATE "ranks=3 masked=010 by_entry=1 weights_at_combine=1 quant=fp8 phases=1");

/* Cuts by hand need no wait. A step of throughput mode is refused until the views are equal. */
static void cut_by_hand(const EpBootstrap *bootstrap, void *given) {
    Masked m = masked_open(bootstrap, given);
    World *own = alone(&m);
    Case other = m.all->c;
    other.mode = EP_MODE_THROUGHPUT, other.phases = 0;
    EpHandle *handle = open_handle(m.step.group, &other);
    const World *view = m.is_masked ? own : m.some;
    for (int r = 0; r < m.c.ranks; r++)
        if (case_is_masked(&view->c, r)) CHECK_OK(ep_group_cut(m.step.group, r, NULL));
    CHECK_OK(ep_group_status(m.step.group, NULL));
    meet(&m);
    double begin = seconds_now();
    step_of(&m, m.is_masked ? own : m.some);
    CHECK(seconds_now() - begin < 30, "it took %.1f s", seconds_now() - begin);
    check_cut(&m, view, 0);
    Step throughput = {m.step.group, handle, m.all, bootstrap->rank, NULL};
    CHECK_REFUSED(call_op(&throughput, STEP_PREPARE), EP_ERR_TIMEOUT, "that latency mode has cut");
    meet(&m);
    mask(&m, m.all);
    step_all(&m.step);
    masked_close(&m);
    world_free(own);
}

static void run_cut_by_hand(Case c) {
    if (serves(&c)) run_body_of(cut_by_hand, &c);
}

TextsTest(handles_masks, cut_by_hand, run_cut_by_hand,
          "ranks=3 masked=001 late_us=30000000 mode=latency weighted=1",
          "ranks=3 masked=100 late_us=30000000 mode=latency physical=9 experts=4 map=random",
          "ranks=4 nodes=0011 masked=0100 late_us=30000000 mode=latency phases=1 layout=flat");

/* ---- ep_group_mask itself ---- */

/* Ranks whose sets differ are told so, and stay suspended until they agree. One that looks too late
 * finds that the other has given up. */
static _Atomic int told;
static void sets_that_differ(const EpBootstrap *bootstrap, void *given) {
    Case c = *(Case *)given;
    c.timeout = 2;
    Masked m = masked_open(bootstrap, &c);
    uint32_t wrong = bootstrap->rank == 0 ? 3 : 7, word = 0;
    step_all(&m.step);
    meet(&m);
    if (bootstrap->rank < 2) {
        EpStatus status = ep_group_mask(m.step.group, &wrong, NULL);
        CHECK(status == EP_ERR_ORDER || status == EP_ERR_TIMEOUT, "%d: %s", (int)status,
              ep_last_error());
        if (status == EP_ERR_ORDER) {
            EpFinding found = EP_FINDING_INIT;
            told += CHECK(strstr(ep_last_error(), "rank 2 as "), "%s", ep_last_error());
            CHECK(ep_group_status(m.step.group, &found) == EP_ERR_TIMEOUT, "%s", ep_last_error());
            int64_t alone = bootstrap->rank == 1 ? found.expected : found.seen;
            CHECK(alone == 2 && found.expected + found.seen == 1, "%d, %d", (int)found.expected,
                  (int)found.seen);
        }
        CHECK_OK(ep_group_alive(m.step.group, &word));
        CHECK(word == 7, "%#x", word);
        CHECK_REFUSED(call_op(&m.step, STEP_PREPARE), EP_ERR_TIMEOUT, "until ep_group_mask");
        meet(&m);
        CHECK(told, "nobody was told");
        mask(&m, m.some);
        step_all(&m.step);
    } else {
        meet(&m);
    }
    meet(&m);
    mask(&m, m.all);
    step_all(&m.step);
    masked_close(&m);
}

static void run_sets_that_differ(Case c) {
    told = 0;
    if (serves(&c)) run_body_of(sets_that_differ, &c);
}

TextsTest(handles_masks, sets_that_differ, run_sets_that_differ, "ranks=3 masked=001",
          "ranks=3 nodes=011 masked=001");

/* The others mask ranks that may still be in the step that all were in: these complete it, since
 * all rows are in their windows. */
static void masked_behind_a_step(const EpBootstrap *bootstrap, void *given) {
    if (TEST_BACKEND != EP_BACKEND_CUDA)
        check_left_out("a rank on the host reads the others' memory, and may lose the step");
    Masked m = masked_open(bootstrap, given);
    for (int i = 0; i < 12; i++) {
        step_of(&m, m.all);
        if (!m.is_masked) mask(&m, m.some);
        meet(&m);
        mask(&m, m.all);
    }
    masked_close(&m);
}

static void run_masked_behind(Case c) {
    run_body_of(masked_behind_a_step, &c);
}

TextsTest(handles_masks, masked_behind_a_step, run_masked_behind,
          "ranks=2 masked=01 mode=throughput", "ranks=2 masked=10 mode=latency phases=1",
          "ranks=3 masked=010 mode=latency", "ranks=4 masked=0110 spread=full mode=throughput");

/* A rank does not come, then one comes late. */
static void rank_that_stays_away(const EpBootstrap *bootstrap, void *given) {
    Case c = *(Case *)given;
    c.timeout = SOON;
    Masked m = masked_open(bootstrap, &c);
    uint32_t all = living(m.all);
    meet(&m);
    for (int i = 0; i < 2 && !m.is_masked; i++) {
        EpFinding found = EP_FINDING_INIT;
        CHECK_TIMEOUT(ep_group_mask(m.step.group, &all, NULL), SOON, "ep_group_mask: rank ",
                      "did not call it within");
        CHECK_STATUS(ep_group_status(m.step.group, &found), EP_ERR_TIMEOUT);
        CHECK(case_is_masked(&c, found.peer), "rank %d is blamed", (int)found.peer);
    }
    meet(&m);
    for (int i = 0; i < 20; i++) /* with no operation between */
        mask(&m, m.all);
    step_all(&m.step);
    masked_close(&m);
}

static void run_rank_that_stays_away(Case c) {
    if (serves(&c)) run_body_of(rank_that_stays_away, &c);
}

TextsTest(handles_masks, rank_that_stays_away, run_rank_that_stays_away, "ranks=2 masked=01",
          "ranks=4 masked=0100", "ranks=3 nodes=001 masked=001", "ranks=3 nodes=012 masked=100");

/* A group is suspended while operations are between their phases, one of which is dropped then. */
static void dropped(const EpBootstrap *bootstrap, void *given) {
    Case c = *(Case *)given;
    c.timeout = SOON;
    Masked m = masked_open(bootstrap, &c);
    uint32_t all = living(m.all);
    CHECK_OK(call_op(&m.step, STEP_PREPARE));
    CHECK_OK(call_op(&m.step, STEP_DISPATCH_SEND));
    meet(&m);
    if (!m.is_masked)
        CHECK_TIMEOUT(ep_group_mask(m.step.group, &all, NULL), SOON, "did not call it within");
    ep_handle_destroy(m.step.handle);
    meet(&m);
    mask(&m, m.all);
    m.step.handle = open_handle(m.step.group, &m.all->c);
    for (int i = 0; i < 5; i++) /* more than there are sets of buffers */
        step_all(&m.step);
    masked_close(&m);
}

static void run_dropped(Case c) {
    if (serves(&c)) run_body_of(dropped, &c);
}

TextsTest(handles_masks, dropped, run_dropped, LATE "ranks=2 masked=01 phases=1",
          "ranks=3 masked=010 mode=latency phases=1");

/* Ranks 0 and 2 have cut each other, and rank 1 has cut neither. So all have sent as many
 * operations, and yet the one in flight is dropped on all. */
static void cut_pairwise(const EpBootstrap *bootstrap, void *given) {
    Masked m = masked_open(bootstrap, given);
    CHECK_OK(call_op(&m.step, STEP_PREPARE));
    if (bootstrap->rank != 1) CHECK_OK(ep_group_cut(m.step.group, 2 - bootstrap->rank, NULL));
    CHECK_OK(call_op(&m.step, STEP_DISPATCH_SEND));
    meet(&m);
    mask(&m, m.all);
    CHECK_REFUSED(call_op(&m.step, STEP_DISPATCH_WAIT), EP_ERR_ORDER, "dispatch_send before it");
    for (int i = 0; i < 3; i++)
        step_all(&m.step);
    masked_close(&m);
}

static void run_cut_pairwise(Case c) {
    if (TEST_BACKEND == EP_BACKEND_CUDA) run_body_of(cut_pairwise, &c);
}

TextsTest(handles_masks, cut_pairwise, run_cut_pairwise,
          "ranks=3 late_us=30000000 spread=full mode=latency phases=1");

ThreadTest(handles_masks, refused, 2) {
    EpGroup *plain = open_group_of(bootstrap, ""), *group = open_group_of(bootstrap, "masks=1");
    EpGroup *late = open_group_of(bootstrap, "masks=1 late_us=1000 mode=latency");
    uint32_t own = 1u << bootstrap->rank, other = 3 - own, word = 0, beyond = 7;
    void *memory = NULL;
    _Alignas(4096) static char page[4096];
    EpGroupConfig config = group_config(2);
    config.masks = bootstrap->rank;
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_MISMATCH, "config.masks", "0 on rank 0", "1 on");
    CHECK_REFUSED(ep_group_mask(NULL, &own, NULL), EP_ERR_NULL, "group");
    CHECK_REFUSED(ep_group_mask(plain, &own, NULL), EP_ERR_UNSUPPORTED, "config.masks");
    CHECK_REFUSED(ep_group_mask(group, NULL, NULL), EP_ERR_NULL, "alive");
    CHECK_REFUSED(ep_group_mask(group, &other, NULL), EP_ERR_RANGE, "alive: expected this rank's");
    CHECK_REFUSED(ep_group_mask(group, &beyond, NULL), EP_ERR_RANGE, "2 ranks, got that of rank 2");
    CHECK_REFUSED(ep_group_alive(group, NULL), EP_ERR_NULL, "alive");
    CHECK_REFUSED(ep_group_cut(group, 0, NULL), EP_ERR_UNSUPPORTED, "EP_LATE_MASK");
    CHECK_REFUSED(ep_group_cut(late, bootstrap->rank, NULL), EP_ERR_RANGE, "another rank's");
    CHECK_REFUSED(ep_group_cut(late, 2, NULL), EP_ERR_RANGE, "below 2, got 2");
    CHECK_REFUSED(ep_mem_alloc(group, 64, &memory), EP_ERR_UNSUPPORTED, "config.masks");
    CHECK_REFUSED(ep_window_register(group, page, 4096), EP_ERR_UNSUPPORTED, "config.masks");
    CHECK_REFUSED(ep_window_adopt(group, page, 0, page, 64), EP_ERR_UNSUPPORTED, "config.masks");
    CHECK(!memory, "memory was made");
    CHECK_OK(ep_mem_free(group, NULL));
    CHECK_OK(ep_group_alive(plain, &word));
    CHECK(word == 3, "%#x", word);
    CHECK_OK(ep_group_alive(group, &word));
    CHECK(word == 3, "%#x", word);
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(late);
    ep_group_destroy(group);
    ep_group_destroy(plain);
}

#if EP_WITH_CUDA
/* GPUs of several domains have no masks. */
static void on_domains(const EpBootstrap *bootstrap, void *given) {
    EpGroupConfig config = group_config(2);
    (void)given, config.masks = 1;
    config.backend = EP_BACKEND_CUDA;
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_UNSUPPORTED, "needs one node", "on several");
}

static void run_on_domains(Case c) {
    if (TEST_BACKEND == EP_BACKEND_CUDA) run_body_of(on_domains, &c);
}

TextsTest(handles_masks, on_domains, run_on_domains, "ranks=2 nodes=01");
#endif

/* A rank that was masked, and not told, does not wait for the others when it destroys its group. */
static void end_untold(const EpBootstrap *bootstrap, void *given) {
    Case c = case_complete(*(const Case *)given);
    EpGroup *group = open_group(bootstrap, &c);
    double begin = seconds_now();
    if (bootstrap->rank < 2 && c.late_us) CHECK_OK(ep_group_cut(group, 2, NULL));
    if (bootstrap->rank < 2 && !c.late_us) CHECK_OK(ep_group_mask(group, &(uint32_t){3}, NULL));
    ep_group_destroy(group);
    CHECK(seconds_now() - begin < c.timeout / 2, "it took %.1f s", seconds_now() - begin);
}

static void run_end_untold(Case c) {
    GPU_NEEDS(c.ranks);
    run_body_of(end_untold, &c);
}

TextsTest(handles_masks, ends_untold, run_end_untold, "ranks=3 masks=1",
          "ranks=3 masks=1 late_us=30000000 mode=latency");

/* Nor does its abort hide that of a living rank, which ends a wait for the latter. */
ThreadTest(handles_masks, aborts_do_not_hide, 4) {
    EpGroup *group = open_group_of(bootstrap, "masks=1");
    uint32_t living = 7;
    if (bootstrap->rank < 3) CHECK_OK(ep_group_mask(group, &living, NULL));
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == 0) CHECK_OK(ep_group_abort(group, "living"));
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == 3) CHECK_OK(ep_group_abort(group, "masked"));
    bootstrap->barrier(bootstrap->context, 60);
    double begin = seconds_now();
    if (bootstrap->rank == 1 || bootstrap->rank == 2)
        CHECK_REFUSED(ep_group_mask(group, &living, NULL), EP_ERR_TIMEOUT, "rank 0 is in `alive`");
    CHECK(seconds_now() - begin < 30, "it took %.1f s", seconds_now() - begin);
    bootstrap->barrier(bootstrap->context, 60);
    ep_group_destroy(group);
}

/* An abort ends a wait in ep_group_mask, and the group. */
ThreadTest(handles_masks, aborted, 2) {
    EpGroup *group = open_group_of(bootstrap, "masks=1");
    uint32_t both = 3, own = 1u << bootstrap->rank;
    if (bootstrap->rank == 0) {
        CHECK_REFUSED(ep_group_mask(group, &both, NULL), EP_ERR_TIMEOUT, "rank 1 is in `alive`");
        CHECK_OK(ep_group_mask(group, &own, NULL));
        CHECK_OK(ep_group_status(group, NULL));
    } else {
        CHECK_OK(ep_group_abort(group, "enough"));
        CHECK_REFUSED(ep_group_mask(group, &own, NULL), EP_ERR_ABORTED, "enough");
    }
    bootstrap->barrier(bootstrap->context, 60);
    ep_group_destroy(group);
}
