/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of a step in the host's memory, and the whole step. */
#include "tests/cases/step.h"

static int is_latency(const Step *step) {
    return step->world->c.mode == EP_MODE_LATENCY;
}

/* ---- one call ---- */

/* The arrays of one call; of a deferred prepare, too. */
struct StepPending {
    const Step *step;
    unsigned ops;
    StepMemory memory;
    Image got[STEP_OUTPUTS], expected[STEP_OUTPUTS], copy[INPUTS];
};
typedef StepPending Run;

/* Make the outputs of these operations. Calls read the world's inputs. */
static Run run_new(const Step *step, unsigned ops) {
    const Case *c = &step->world->c;
    Run r = {.step = step, .ops = ops};
    for (StepInput i = 0; i < INPUTS; i++)
        r.memory.in[i] = step_input(step, i).data;
    for (StepOutput i = OUT_COUNTS; i < STEP_OUTPUTS; i++) {
        size_t bytes = step_bytes(step_output(step, i)), align = case_output_align(c, i);
        if (!(ops & (i <= OUT_SOURCES ? STEP_PREPARE : case_writers(c, i)))) continue;
        r.expected[i] = image_new(bytes, align);
        if (!case_asks(c, i)) continue;
        r.got[i] = image_new(bytes, align), r.memory.out[i] = r.got[i].data;
    }
    return r;
}

/* From now on calls read copies of these inputs. */
static void run_copy(Run *r, StepInput first, StepInput last) {
    for (StepInput i = first; i <= last; i++) {
        EpTensor t = step_input(r->step, i);
        r->copy[i] = image_new(step_bytes(t), i == IN_INDEX ? ep_type_bytes(t.type) : 16);
        step_fill(r->step, i, r->copy[i].data);
        r->memory.in[i] = r->copy[i].data;
    }
}

static int has_ended(const Step *step) {
    return step->ended && *step->ended != EP_OK;
}

/* Returns whether this rank has cut another one. */
static int has_cut(const Step *step) {
    uint32_t alive = 0, expected = 0;
    for (int i = 0; i < step->world->c.ranks; i++)
        expected |= (uint32_t)!case_is_masked(&step->world->c, i) << i;
    CHECK_OK(ep_group_alive(step->group, &alive));
    return alive != expected;
}

/* A rank tells of its cuts before it sends others rows. */
static void look_for_cuts(const Step *step) {
    int cuts = has_cut(step);
    if (cuts && step->cuts) __atomic_fetch_add(&step->cuts[step->rank], 1, __ATOMIC_RELEASE);
    for (int r = 0; r < step->world->c.ranks && step->cuts; r++)
        if (!case_is_masked(&step->world->c, r))
            cuts |= __atomic_load_n(&step->cuts[r], __ATOMIC_ACQUIRE) != step->no_cuts[r];
    if (cuts) *step->ended = EP_ERR_MASKED;
}

static void run_call(Run *r, StepOp op) {
    r->memory.counters = step_counters_new(r->step);
    EpStatus status = step_call(r->step, &r->memory, op, NULL);
    /* GPUs tell later. A cut is found below. */
    if (r->step->ended && TESTS_ON_GPU && status == EP_OK) {
        EpStatus later = ep_group_status(r->step->group, NULL);
        status = later == EP_ERR_MASKED ? EP_OK : later;
    }
    if (r->step->ended && status == EP_ERR_TIMEOUT)
        *r->step->ended = status;
    else
        CHECK_OK(status);
    if (r->step->ended && !has_ended(r->step)) look_for_cuts(r->step);
    if (has_ended(r->step))
        free(r->memory.counters);
    else
        step_counters_check(r->step, op, 1, r->memory.counters);
    r->memory.counters = NULL;
}

/* Overwrite the copies, which nothing may depend on any more, and compare the outputs. */
static void run_end(Run *r) {
    for (int i = 0; i < INPUTS; i++) {
        if (!r->copy[i].base) continue;
        memset(r->copy[i].data, 0x77, r->copy[i].bytes);
        image_free(&r->copy[i]);
    }
    step_expect(r->step, r->ops, r->expected);
    for (StepOutput i = OUT_COUNTS; i < STEP_OUTPUTS; i++) {
        if (r->got[i].base && !has_ended(r->step))
            step_compare(r->step, i, &r->got[i], &r->expected[i]);
        image_free(&r->got[i]);
        image_free(&r->expected[i]);
    }
}

static void make_call(const Step *step, StepOp op) {
    Run r = run_new(step, op);
    run_call(&r, op);
    run_end(&r);
}

/* ---- one operation each ---- */

static Run prepared(const Step *step) {
    Run r = run_new(step, STEP_PREPARE);
    run_copy(&r, IN_INDEX, IN_COUNT);
    run_call(&r, STEP_PREPARE);
    return r;
}

static void check_prepared(Run *r) {
    run_end(r);
    if (!has_ended(r->step)) step_check_info(r->step);
}

void step_prepare(const Step *step) {
    if (is_latency(step)) return;
    Run r = prepared(step);
    check_prepared(&r);
}

/* Every other pair of seeds asks for the plan's numbers again, but for those by source. */
static void dispatch_whole(const Step *step) {
    int again = step->world->c.seed / 2 % 2 && !is_latency(step);
    Run r = run_new(step, STEP_DISPATCH | (again ? STEP_PREPARE : 0));
    r.memory.numbers_again = again;
    for (int i = OUT_SOURCE_ROWS; again && i <= OUT_SOURCES; i++) {
        image_free(&r.got[i]);
        image_free(&r.expected[i]);
        r.memory.out[i] = NULL;
    }
    run_call(&r, STEP_DISPATCH);
    run_end(&r);
}

static void send(const Step *step, StepOp op, StepInput first, StepInput last) {
    Run r = run_new(step, op);
    run_copy(&r, first, last);
    run_call(&r, op);
    run_end(&r);
}

static void send_rows(const Step *step) {
    send(step, STEP_DISPATCH_SEND, IN_TOKENS, IN_SCALES);
}

static void receive_rows(const Step *step) {
    make_call(step, STEP_DISPATCH_WAIT);
    if (!has_ended(step)) step_check_sources(step);
}

static void dispatch_rows(const Step *step) {
    if (step->world->c.phases) {
        send_rows(step);
        receive_rows(step);
    } else {
        dispatch_whole(step);
        if (!has_ended(step)) step_check_sources(step);
    }
}

StepPending *step_dispatch_send(const Step *step) {
    StepPending *pending = malloc(sizeof(*pending));
    *pending = prepared(step);
    send_rows(step);
    return pending;
}

void step_dispatch_wait(const Step *step, StepPending *pending) {
    receive_rows(step);
    check_prepared(pending);
    free(pending);
}

void step_dispatch_again(const Step *step) {
    dispatch_rows(step);
    step_check_info(step);
}

void step_dispatch(const Step *step) {
    if (!is_latency(step)) {
        dispatch_rows(step);
        return;
    }
    Run plan = prepared(step);
    dispatch_rows(step);
    check_prepared(&plan);
}

void step_combine_send(const Step *step) {
    send(step, STEP_COMBINE_SEND, IN_EXPERT_OUT, IN_COMBINE_WEIGHTS);
}

void step_combine_wait(const Step *step) {
    make_call(step, STEP_COMBINE_WAIT);
}

void step_combine(const Step *step) {
    if (!step->world->c.phases) {
        make_call(step, STEP_COMBINE);
        return;
    }
    step_combine_send(step);
    step_combine_wait(step);
}

void step_combine_backward(const Step *step) {
    make_call(step, STEP_COMBINE_BACKWARD);
}

void step_combine_backward_rows(const Step *step) {
    Run r = run_new(step, STEP_COMBINE_BACKWARD);
    r.memory.out[OUT_GRAD_SLOTS] = NULL;
    run_call(&r, STEP_COMBINE_BACKWARD);
    image_free(&r.got[OUT_GRAD_SLOTS]);
    run_end(&r);
}

void step_dispatch_backward(const Step *step) {
    make_call(step, STEP_DISPATCH_BACKWARD);
}

/* ---- a whole step ---- */

static int64_t count_invalid(const Step *step, int64_t *first) {
    const RankWorld *me = step_mine(step);
    int64_t count = 0;
    for (int64_t i = 0; i < (int64_t)me->tokens * step->world->c.top_k; i++) {
        if (me->index[i] < step->world->c.experts) continue;
        if (count++ == 0) *first = i;
    }
    return count;
}

static void check_routing_finding(const Step *step, const EpFinding *found) {
    int64_t first = 0, k = step->world->c.top_k;
    int64_t count = count_invalid(step, &first), seen = step_mine(step)->index[first];
    CHECK(count > 0, "no index is out of range, yet: %s", ep_last_error());
    CHECK(found->rank == step->rank, "rank %d", (int)found->rank);
    CHECK(found->token == first / k && found->k == first % k, "token %lld, k %lld, not %lld, %lld",
          (long long)found->token, (long long)found->k, (long long)(first / k),
          (long long)(first % k));
    CHECK(found->expected == step->world->c.experts, "%lld", (long long)found->expected);
    CHECK(found->seen == seen, "%lld instead of %lld", (long long)found->seen, (long long)seen);
    CHECK(found->count == count, "%lld instead of %lld", (long long)found->count, (long long)count);
    CHECK(strcmp(found->phase, "prepare") == 0, "%s", found->phase);
}

static void check_overflow_finding(const Step *step, const EpFinding *found) {
    const Case *c = &step->world->c;
    const RankWorld *me = step_mine(step);
    int64_t capacity = case_block_rows(c) ? case_block_rows(c) : c->capacity;
    if (case_layout(c)->blocks == BLOCKS_OF_TOKENS) capacity += c->spare_tokens;
    CHECK(me->dropped > 0 && c->overflow == EP_OVERFLOW_ERROR, "unasked: %s", ep_last_error());
    CHECK(found->rank == step->rank, "rank %d", (int)found->rank);
    CHECK(found->expected == capacity, "%lld instead of %lld", (long long)found->expected,
          (long long)capacity);
    CHECK(found->seen == me->needed_rows, "%lld instead of %lld", (long long)found->seen,
          (long long)me->needed_rows);
    CHECK(found->count == me->dropped, "%lld instead of %lld", (long long)found->count,
          (long long)me->dropped);
}

void step_check_status(const Step *step) {
    int64_t first = 0;
    if (has_ended(step)) return;
    int expected = count_invalid(step, &first) > 0;
    expected += step_mine(step)->dropped > 0 && step->world->c.overflow == EP_OVERFLOW_ERROR;
    for (int i = 0; i < expected; i++) {
        EpFinding found = EP_FINDING_INIT;
        EpStatus status = ep_group_status(step->group, &found);
        CHECK(found.status == status, "%d, returned %d", (int)found.status, (int)status);
        CHECK(status == EP_ERR_ROUTING || status == EP_ERR_OVERFLOW, "%d: %s", (int)status,
              ep_last_error());
        if (status == EP_ERR_ROUTING) check_routing_finding(step, &found);
        if (status == EP_ERR_OVERFLOW) check_overflow_finding(step, &found);
    }
    CHECK_OK(ep_group_status(step->group, NULL));
}

void step_move(const Step *step) {
    step_dispatch(step);
    step_combine(step);
    if (is_latency(step)) return;
    step_combine_backward(step);
    step_dispatch_backward(step);
}

void step_all(const Step *step) {
    step_prepare(step);
    step_move(step);
    step_check_status(step);
}
