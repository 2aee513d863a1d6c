/* SPDX-License-Identifier: Apache-2.0 */
/* Counters that calls of a step add to. */
#include "tests/cases/step.h"
#include "tests/oracle/expect.h"

enum { EXPERTS = 1, ROWS = 2, BYTES = 4, WAITS = 24, OF_FIXTURE = 4 };

/* Returns the counters that a call takes. */
static int taken(const Step *step, StepOp op) {
    if (op == STEP_PREPARE) return step->world->c.mode == EP_MODE_LATENCY ? 0 : WAITS;
    if (op == STEP_DISPATCH) return EXPERTS | ROWS | BYTES | WAITS;
    if (op == STEP_DISPATCH_WAIT) return EXPERTS | WAITS;
    return op == STEP_COMBINE_WAIT ? WAITS : ROWS | BYTES | WAITS;
}

int step_counts(const Step *step, StepOp op, StepCounter counter) {
    if (counter == READY_WORDS)
        return step->world->c.block_rows && op & (STEP_DISPATCH | STEP_DISPATCH_WAIT);
    if (counter == DONE_WORDS)
        return step->world->c.block_rows && op & (STEP_COMBINE | STEP_COMBINE_SEND);
    int which = step->world->c.counters, number = (int)counter - EXPERT_TOKENS;
    return which && taken(step, op) >> number & 1 && (which == 1 || number % 2 == which % 2);
}

/* How receive rows are cut into blocks. */
typedef struct Cut {
    int64_t rows, section_rows, per_section, sections;
} Cut;

static Cut cut_rows(const Step *step) {
    const Case *c = &step->world->c;
    const RankWorld *me = step_mine(step);
    int64_t fixed = case_block_rows(c), rows = c->block_rows ? c->block_rows : OF_FIXTURE;
    int64_t all = fixed ? fixed : me->buffer_rows;
    int64_t sections = !fixed ? 1 : case_has_rows(c) ? c->ranks : me->num_experts;
    return (Cut){rows, all, (all + rows - 1) / rows, sections};
}

/* Returns what the word of a block becomes. */
static int64_t expect_word(const Step *step, int64_t block) {
    const RankWorld *me = step_mine(step);
    Cut cut = cut_rows(step);
    int64_t begin = block % cut.per_section * cut.rows, end = begin + cut.rows, word = 1;
    for (int64_t i = begin; i < end && i < cut.section_rows; i++)
        word += world_has_token(&me->row[block / cut.per_section * cut.section_rows + i]);
    return word;
}

EpTensor step_counter(const Step *step, int64_t *counters, StepCounter counter) {
    int64_t experts = step_mine(step)->num_experts, ranks = step->world->c.ranks;
    EpType type = step->world->c.counters == 2 ? EP_TYPE_INT32 : EP_TYPE_INT64;
    if (counter == EXPERT_TOKENS) return ep_tensor_1d(counters, type, experts);
    if (counter >= READY_WORDS) {
        Cut cut = cut_rows(step);
        int64_t words = cut.per_section * cut.sections;
        if (counters) counters += experts + 4 * ranks + (counter - READY_WORDS) * (words / 2 + 1);
        return ep_tensor_1d(counters, EP_TYPE_INT32, words);
    }
    if (counters) counters += experts + (counter - PEER_ROWS) * ranks;
    return ep_tensor_1d(counters, EP_TYPE_INT64, ranks);
}

/* ---- contents ------------------------------------------------------------------------------ */

/* What a counter holds before the first call. */
static int64_t held(StepCounter counter, int64_t i) {
    if (counter >= READY_WORDS) return counter == DONE_WORDS ? 1 + i % 3 : 0;
    return counter == LONGEST_WAIT ? 5 : 1000 + i;
}

static int64_t get(const EpTensor *t, int64_t i) {
    return t->type == EP_TYPE_INT32 ? ((const int32_t *)t->data)[i] : ((const int64_t *)t->data)[i];
}

int64_t *step_counters_new(const Step *step) {
    const Case *c = &step->world->c;
    int64_t count = step_mine(step)->num_experts + 4 * (int64_t)c->ranks;
    if (!c->counters && !c->block_rows) return NULL;
    count += step_counter(step, NULL, READY_WORDS).shape[0] + 2;
    int64_t *counters = calloc((size_t)count, sizeof(*counters));
    for (StepCounter counter = EXPERT_TOKENS; counter < STEP_ARRAYS; counter++) {
        EpTensor t = step_counter(step, counters, counter);
        for (int64_t i = 0; i < t.shape[0]; i++) {
            if (t.type == EP_TYPE_INT32)
                ((int32_t *)t.data)[i] = (int32_t)held(counter, i);
            else
                ((int64_t *)t.data)[i] = held(counter, i);
        }
    }
    return counters;
}

/* ---- what calls add ------------------------------------------------------------------------ */

static int passes_rows_on(const Step *step) {
    EpGroupInfo info = group_info(step->group);
    return info.backend == EP_BACKEND_CUDA && info.num_nodes > 1;
}

static int64_t row_bytes(const Step *step, StepOp op) {
    const Case *c = &step->world->c;
    int64_t weights = c->weighted ? 4 * (int64_t)c->top_k : 0, sum = (int64_t)case_sum_bytes(c);
    if (op & (STEP_DISPATCH | STEP_DISPATCH_SEND))
        return (int64_t)(case_recv_bytes(c) + case_recv_scale_bytes(c)) + weights;
    if (op == STEP_COMBINE_BACKWARD)
        return (int64_t)(case_grad_bytes(c) + case_grad_scale_bytes(c));
    if (c->by_entry) return sum + (c->weighted ? 4 : 0);
    if (c->sum_quant == EP_QUANT_FP8) sum = c->hidden + (c->hidden + 127) / 128 * 4;
    return op == STEP_DISPATCH_BACKWARD ? sum + weights : sum;
}

/* Sums go back as the tokens came. */
static int64_t rows_sent(const Step *step, StepOp op, int peer, int relays) {
    int back = !!(op & (STEP_COMBINE | STEP_COMBINE_SEND | STEP_DISPATCH_BACKWARD));
    int from = back ? peer : step->rank, to = back ? step->rank : peer;
    int entries = back && step->world->c.by_entry;
    return (relays ? expect_relayed_rows : expect_rows)(step->world, from, to, entries);
}

static int64_t added(const Step *step, StepOp op, StepCounter counter, int i, int relays) {
    if (!step_counts(step, op, counter) || counter == DONE_WORDS) return 0;
    if (counter == READY_WORDS) return expect_word(step, i);
    if (counter == EXPERT_TOKENS) return step_mine(step)->count[i];
    int64_t rows = rows_sent(step, op, i, relays);
    return counter == PEER_ROWS ? rows : rows * row_bytes(step, op);
}

static int64_t added_by_all(const Step *step, unsigned ops, StepCounter counter, int i,
                            int relays) {
    int64_t sum = 0;
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1)
        if (ops & op) sum += added(step, (StepOp)op, counter, i, relays);
    return sum;
}

static int any_given(const Step *step, unsigned ops, StepCounter counter) {
    int given = 0;
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1)
        given |= ops & op && step_counts(step, (StepOp)op, counter);
    return given;
}

/* Whether the waits for a rank may be what they are. Alone, a call's wait is the longest one. */
static int are_waits_right(const Step *step, unsigned ops, int64_t *counters, int i, int is_alone) {
    EpTensor sums = step_counter(step, counters, PEER_WAIT);
    EpTensor most = step_counter(step, counters, LONGEST_WAIT);
    int64_t sum = get(&sums, i) - held(PEER_WAIT, i), longest = get(&most, i);
    int64_t least = held(LONGEST_WAIT, i), most_possible = sum > least ? sum : least;
    int is_self = i == step->rank;
    int has_sum = !is_self && any_given(step, ops, PEER_WAIT);
    int has_longest = !is_self && any_given(step, ops, LONGEST_WAIT);
    if (has_sum ? sum < 0 : sum != 0) return 0;
    if (has_longest ? longest < least : longest != least) return 0;
    if (!has_sum || !has_longest) return 1;
    return is_alone ? longest == most_possible : longest <= most_possible;
}

void step_counters_check(const Step *step, unsigned ops, int times, int64_t *counters) {
    int relays = counters && passes_rows_on(step);
    int is_alone = times == 1 && !(ops & (ops - 1)) && !relays;
    for (StepCounter counter = EXPERT_TOKENS; counters && counter < STEP_ARRAYS; counter++) {
        EpTensor t = step_counter(step, counters, counter);
        if (counter == PEER_WAIT || counter == LONGEST_WAIT) continue;
        for (int i = 0; i < t.shape[0]; i++) {
            int64_t seen = get(&t, i) - held(counter, i);
            int64_t expected =
                (counter == READY_WORDS ? 1 : times) * added_by_all(step, ops, counter, i, relays);
            CHECK(seen == expected, "%s[%d]: calls %x added %lld, not %lld",
                  step_array_name(counter), i, ops, (long long)seen, (long long)expected);
        }
    }
    for (int i = 0; counters && i < step->world->c.ranks; i++)
        CHECK(are_waits_right(step, ops, counters, i, is_alone), "waits of calls %x for rank %d",
              ops, i);
    free(counters);
}
