/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that call different operations, on other handles or with other sizes: every rank gets an
 * error soon, and the group returns it from then on. */
#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

enum { RANKS = 3, ODD = 2 };
#define LATE 30.0

TestSuite(runtime_disagree, .init = be_quiet);

/** What rank 2, which deviates, and the others call after a plan is made. */
typedef struct Disagreement {
    unsigned odd, others;
    const char *tensors, *handle; /* changes of the case; a new handle if those of the handle */
    int by_turns;                 /* a second time all others deviate from rank 2 */
    const char *words[2];         /* in the sentence of throughput mode */
    int agrees;
} Disagreement;

static unsigned ops_for_plan(const Step *step) {
    return step->world->c.mode == EP_MODE_LATENCY ? STEP_PREPARE | STEP_DISPATCH : STEP_PREPARE;
}

/* Open the step of the ranks that deviate. A handle of the other mode has a plan. */
static Step open_odd(const Step *step, const char *group, const Disagreement *d) {
    Step odd = *step;
    Case c = case_of("%s %s %s", group, d->tensors ? d->tensors : "", d->handle ? d->handle : "");
    odd.world = world_new(&c);
    if (d->handle) odd.handle = open_handle(step->group, &odd.world->c);
    if (odd.world->c.mode != step->world->c.mode)
        CHECK_OK(call_ops(&odd, STEP_PREPARE | STEP_DISPATCH));
    return odd;
}

/* Errors of throughput mode name both operations. */
static void check_names(const Disagreement *d, int deviates) {
    char own[48], other[48];
    unsigned mine = deviates ? d->odd : d->others, theirs = deviates ? d->others : d->odd;
    snprintf(own, sizeof(own), ": %s: expected", op_phase((StepOp)mine));
    snprintf(other, sizeof(other), "called %s on handle", op_phase((StepOp)theirs));
    CHECK(mine == theirs || (strstr(ep_last_error(), own) && strstr(ep_last_error(), other)), "%s",
          ep_last_error());
    for (int i = 0; i < 2 && d->words[i]; i++)
        CHECK(strstr(ep_last_error(), d->words[i]), "%s", ep_last_error());
}

/* On GPUs ranks of latency mode also find other sizes, and those of other nodes may hear first that
 * another rank has found it. */
static void disagree(const EpBootstrap *bootstrap, const char *group, const Disagreement *d,
                     int steps, int others_deviate) {
    Case c = case_of("%s", group);
    Step step = open_step(bootstrap, &c);
    int deviates = (bootstrap->rank == ODD) != others_deviate;
    int throughput = step.world->c.mode == EP_MODE_THROUGHPUT;
    for (int i = 0; i < steps; i++)
        step_all(&step);
    CHECK_OK(call_ops(&step, ops_for_plan(&step)));
    Step odd = open_odd(&step, group, d);
    double begin = seconds_now();
    EpStatus status = call_ops(deviates ? &odd : &step, deviates ? d->odd : d->others);
    if (status == EP_OK) status = ep_group_status(step.group, NULL);
    CHECK(seconds_now() - begin < LATE, "it took %.1f s", seconds_now() - begin);
    CHECK(status == (d->agrees ? EP_OK : EP_ERR_ORDER) ||
              (TESTS_ON_GPU && !throughput && status == EP_ERR_MISMATCH) ||
              (TESTS_ON_GPU && c.nodes[0] && status == EP_ERR_PEER &&
               strstr(ep_last_error(), "because of rank")),
          "%d: %s", (int)status, ep_last_error());
    if (status != EP_OK && throughput) check_names(d, deviates);
    for (int i = 0; i < NUM_CALLS && status != EP_OK; i++)
        CHECK_REFUSED(call_op(&step, call_number(i)), status, "rank");
    world_free((World *)odd.world);
    close_step(&step);
}

static void disagree_each(const EpBootstrap *bootstrap, const char *changes, const Disagreement *d,
                          int count) {
    char group[128];
    snprintf(group, sizeof(group), "ranks=%d spread=full experts=6 top_k=3 id=1 timeout=60 %s",
             RANKS, changes);
    for (int i = 0; i < count; i++)
        for (int others_deviate = 0; others_deviate <= d[i].by_turns; others_deviate++) {
            check_note("disagreement %d, others deviate: %d", i, others_deviate);
            disagree(bootstrap, group, &d[i], i % 3, others_deviate);
            bootstrap->barrier(bootstrap->context, 60);
        }
}

#define DISAGREE(name, changes, ...)                         \
    static const Disagreement name##_rows[] = {__VA_ARGS__}; \
    RankTest(runtime_disagree, name, RANKS,                  \
             disagree_each(bootstrap, changes, name##_rows, LENGTH(name##_rows)))
#define BOTH(ops, ...) \
    { ops, ops, __VA_ARGS__ }
#define ROUTED (STEP_PREPARE | STEP_DISPATCH)

DISAGREE(operations, "", {STEP_COMBINE, STEP_DISPATCH}, {STEP_DISPATCH_BACKWARD, STEP_COMBINE},
         {STEP_PREPARE, STEP_DISPATCH}, {STEP_PREPARE, STEP_COMBINE_BACKWARD});
/* A handle without an id matches any. */
DISAGREE(handles, "", BOTH(STEP_PREPARE, .handle = "id=0", .agrees = 1),
         BOTH(STEP_PREPARE, .handle = "id=4095", .words = {"id differs", "has 4095"}));
DISAGREE(sizes, "", BOTH(STEP_DISPATCH, "hidden=16"), BOTH(STEP_DISPATCH, "row_type=fp16"),
         BOTH(STEP_PREPARE, "top_k=2"));

DISAGREE(operations_in_latency_mode, "mode=latency", {STEP_COMBINE, STEP_DISPATCH},
         {STEP_DISPATCH, STEP_COMBINE}, {STEP_COMBINE_PHASES, STEP_DISPATCH_PHASES},
         BOTH(ROUTED, .handle = "id=4095"));
DISAGREE(sizes_in_latency_mode, "mode=latency capacity=100", BOTH(ROUTED, "top_k=2"),
         BOTH(ROUTED, "hidden=16"), BOTH(ROUTED, "row_type=fp16"),
         BOTH(STEP_COMBINE, "sum_type=fp16"),
         BOTH(STEP_COMBINE, "weights_at_combine=1", .by_turns = 1),
         BOTH(STEP_COMBINE_PHASES, "weights_at_combine=1", .by_turns = 1));
/* The same where each rank is a node. */
#define ON_NODES(name, changes)                                                           \
    RankTest(runtime_disagree, name##_on_nodes, RANKS, {                                  \
        needs_latency();                                                                  \
        set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "0,1,2");                               \
        disagree_each(bootstrap, changes " nodes=012", name##_rows, LENGTH(name##_rows)); \
    })
ON_NODES(operations_in_latency_mode, "mode=latency");
ON_NODES(sizes_in_latency_mode, "mode=latency capacity=100");
#define OTHER_MODE .handle = "mode=throughput", .by_turns = 1
DISAGREE(modes, "mode=latency", {STEP_PREPARE, STEP_DISPATCH, OTHER_MODE},
         BOTH(STEP_DISPATCH, OTHER_MODE), BOTH(STEP_COMBINE, OTHER_MODE),
         {STEP_DISPATCH_BACKWARD, STEP_COMBINE, OTHER_MODE});
/* Sums wait for the weights of a rank that has called something else. If all tokens go to rank
 * 1, others wait for its sums, and their send phases alone wait for nothing. */
#define WEIGHS "mode=latency weights_at_combine=1 "
DISAGREE(others_than_weights, WEIGHS, {STEP_DISPATCH, STEP_COMBINE}, {STEP_COMBINE, STEP_DISPATCH},
         {STEP_DISPATCH_PHASES, STEP_COMBINE_PHASES}, {STEP_DISPATCH, STEP_COMBINE_SEND});
DISAGREE(others_than_weights_of_one_rank, WEIGHS "routing=3 target=1",
         {STEP_DISPATCH, STEP_COMBINE}, {STEP_COMBINE, STEP_DISPATCH},
         {STEP_DISPATCH_PHASES, STEP_COMBINE_PHASES});
/* Send phases find the disagreement, too. */
DISAGREE(weights_in_other_modes, WEIGHS, {STEP_PREPARE, STEP_COMBINE, OTHER_MODE},
         BOTH(STEP_COMBINE, OTHER_MODE), {STEP_PREPARE, STEP_COMBINE_SEND, OTHER_MODE});
