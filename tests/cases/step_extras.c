/* SPDX-License-Identifier: Apache-2.0 */
/* The extras of calls: biases, and counters that calls add to. */
#include <stdlib.h>

#include "tests/cases/step_parts.h"
#include "tests/oracle/expect.h"

enum { EXPERT_TOKENS, PEER_ROWS, PEER_BYTES, PEER_WAIT, LONGEST_WAIT };

static const char *const names[] = {"expert_tokens", "peer_rows", "peer_bytes", "peer_wait_ns",
                                    "peer_longest_wait_ns"};

/* What counter `i` holds before the call. */
static int64_t held(int counter, int64_t i) {
    return counter == LONGEST_WAIT ? 5 : 1000 + i;
}

static int64_t get(const EpTensor *t, int64_t i) {
    return t->type == EP_TYPE_INT32 ? ((const int32_t *)t->data)[i] : ((const int64_t *)t->data)[i];
}

static void set(EpTensor *t, int64_t i, int64_t value) {
    if (t->type == EP_TYPE_INT32)
        ((int32_t *)t->data)[i] = (int32_t)value;
    else
        ((int64_t *)t->data)[i] = value;
}

static int is_given(const Step *step, unsigned counts, int counter) {
    static const unsigned kinds[] = {COUNT_EXPERTS, COUNT_ROWS, COUNT_ROWS, COUNT_WAITS,
                                     COUNT_WAITS};
    int which = step->world->c.counters;
    return which && kinds[counter] & counts && (which == 1 || counter % 2 == which % 2);
}

/* One bias is either member. */
static void set_biases(const Step *step, StepExtras *n) {
    int count = step->world->c.biases, second = count == 1 && step->world->c.seed % 2;
    n->bias[0] = step_bias(step, 0), n->bias[1] = step_bias(step, 1);
    if (count) *(second ? &n->extras.bias1 : &n->extras.bias0) = &n->bias[0];
    if (count > 1) n->extras.bias1 = &n->bias[1];
    if (count) n->given = &n->extras;
}

void step_extras_new(const Step *step, unsigned counts, int takes_bias, StepExtras *n) {
    *n = (StepExtras){.extras = EP_EXTRAS_INIT};
    const EpTensor **members[] = {&n->extras.expert_tokens, &n->extras.peer_rows,
                                  &n->extras.peer_bytes, &n->extras.peer_wait_ns,
                                  &n->extras.peer_longest_wait_ns};
    int which = step->world->c.counters;
    if (takes_bias) set_biases(step, n);
    for (int i = 0; i < STEP_COUNTERS; i++) {
        if (!is_given(step, counts, i)) continue;
        int64_t size = i == EXPERT_TOKENS ? step_mine(step)->num_experts : step->world->c.ranks;
        EpType type = i == EXPERT_TOKENS && which == 2 ? EP_TYPE_INT32 : EP_TYPE_INT64;
        void *data = malloc((size_t)(size + 1) * sizeof(int64_t));
        n->tensor[i] = ep_tensor_1d(data, type, size);
        for (int64_t at = 0; at <= size; at++)
            set(&n->tensor[i], at, held(i, at));
        *members[i] = &n->tensor[i], n->given = &n->extras;
    }
}

/* ---- what calls add ---- */

static int passes_rows_on(const Step *step) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(step->group, &info));
    return info.backend == EP_BACKEND_CUDA && info.num_nodes > 1;
}

static int64_t expect_bytes(const Step *step, StepCounted op) {
    const Case *c = &step->world->c;
    int64_t weights = c->weighted ? 4 * (int64_t)c->top_k : 0, sum = (int64_t)case_sum_bytes(c);
    if (op == COUNTED_DISPATCH)
        return (int64_t)(case_recv_bytes(c) + case_recv_scale_bytes(c)) + weights;
    if (op == COUNTED_COMBINE_BACKWARD) return sum;
    if (c->sum_quant == EP_QUANT_FP8) sum = c->hidden + (c->hidden + 127) / 128 * 4;
    return op == COUNTED_DISPATCH_BACKWARD ? sum + weights : sum;
}

/* Sums go back as the tokens came. */
static int64_t expect_sent(const Step *step, StepCounted op, int peer, int relays) {
    int back = op == COUNTED_COMBINE || op == COUNTED_DISPATCH_BACKWARD;
    int from = back ? peer : step->rank, to = back ? step->rank : peer;
    return (relays ? expect_relayed_rows : expect_rows)(step->world, from, to);
}

/* Returns whether a counter may hold `got`. A single wait is the longest one, too. */
static int is_right(const Step *step, const StepExtras *n, StepCounted op, int counter, int i,
                    int relays) {
    int64_t got = get(&n->tensor[counter], i), before = held(counter, i);
    const int64_t *waits = n->tensor[PEER_WAIT].data;
    int is_self = i == step->rank;
    switch (counter) {
    case EXPERT_TOKENS:
        return got == before + step_mine(step)->count[i];
    case PEER_ROWS:
        return got == before + expect_sent(step, op, i, relays);
    case PEER_BYTES:
        return got == before + expect_sent(step, op, i, relays) * expect_bytes(step, op);
    case PEER_WAIT:
        return is_self ? got == before : got >= before;
    default:
        if (is_self || !waits || relays)
            return got == before || (!is_self && got > before &&
                                     (!waits || got <= waits[i] - held(PEER_WAIT, i)));
        int64_t wait = waits[i] - held(PEER_WAIT, i);
        return got == (wait > before ? wait : before);
    }
}

void step_extras_check(const Step *step, StepExtras *n, StepCounted op) {
    int relays = n->given && passes_rows_on(step);
    for (int counter = 0; counter < STEP_COUNTERS; counter++) {
        const EpTensor *t = &n->tensor[counter];
        for (int i = 0; t->data && i < t->shape[0]; i++)
            CHECK(is_right(step, n, op, counter, i, relays), "%s[%d] has %lld after call %d",
                  names[counter], i, (long long)get(t, i), (int)op);
        CHECK(!t->data || get(t, t->shape[0]) == held(counter, t->shape[0]),
              "%s: written past its end", names[counter]);
    }
    for (int i = 0; i < STEP_COUNTERS; i++)
        free(n->tensor[i].data);
}
