/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_prepare on the host. Each rank sorts its routing by destination. It sends every other rank the
 * number of entries for each of that rank's experts and, for each token that goes there, the local
 * experts by k. From the counts of all sources a receiver computes where every slab begins, and
 * where every source begins in it. So it can number slots while routes arrive in any order.
 */
#include <string.h>

#include "handles/host/plan.h"
#include "handles/host/statistics.h"
#include "runtime/host/host.h"

typedef struct Prepare {
    const EpHandle *handle;
    EpGroup *group;
    const EpPlanShape *shape;
    const EpRouting *routing;
    EpCopyTable copies;
    EpPlan plan;
    EpExchange *exchange;
    int64_t num_tokens;
    int64_t chunk;              /* tokens of each source in one round */
    uint64_t generation;        /* number of the first round, which is equal on all ranks */
    int64_t most_entries;       /* that the plan holds */
    int64_t rounds;             /* 1 until all messages of the first have arrived */
    int32_t sent[EP_MAX_RANKS]; /* rows already sent to each rank */
    /* node_rows */
    int32_t needed[EP_MAX_RANKS];     /* tokens so far that need each node */
    int32_t needed_by[EP_MAX_RANKS];  /* 1 + the last of them */
    int32_t lost[EP_MAX_RANKS];       /* slots lost on each rank */
    int32_t last_lost[EP_MAX_RANKS];  /* 1 + the last token that lost one there */
} Prepare;

/* ---- as a source --------------------------------------------------------------------------- */

static int64_t load_integer(const void *data, EpType type, int64_t i) {
    return type == EP_TYPE_INT64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
}

/* Set and check this rank's number of tokens. */
static EpStatus count_tokens(Prepare *p) {
    const EpRouting *routing = p->routing;
    EpCall call = {routing->call, p->group->rank};
    p->num_tokens = routing->num_rows;
    if (routing->num_tokens)
        p->num_tokens = load_integer(routing->num_tokens, routing->num_tokens_type, 0);
    if (p->num_tokens < 0 || p->num_tokens > routing->num_rows)
        return ep_refuse(&call, EP_ERR_RANGE, "num_tokens", "expected 0 .. %lld, got %lld",
                         (long long)routing->num_rows, (long long)p->num_tokens);
    return EP_OK;
}

static void record_bad_index(Prepare *p, int64_t entry, int64_t index) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_ROUTING;
    finding.rank = p->group->rank;
    finding.token = entry / p->routing->top_k, finding.k = entry % p->routing->top_k;
    finding.expected = p->group->config.num_experts, finding.seen = index;
    finding.count = 1;
    strcpy(finding.phase, "prepare");
    ep_group_record(&p->group->routing, &finding);
}

/* Returns whether the token names the expert at a lower k. */
static int is_repeated(const Prepare *p, int64_t entry, int64_t expert) {
    for (int64_t i = entry - entry % p->routing->top_k; i < entry; i++)
        if (load_integer(p->routing->topk_idx, p->routing->idx_type, i) == expert) return 1;
    return 0;
}

/* Returns whether the message to a node has a place for a token, which has an entry there. Tokens
 * come in ascending order. */
static int has_place(Prepare *p, int32_t node, int32_t token) {
    int32_t limit = p->shape->nodes.limit;
    if (!limit || node == p->group->nodes.node) return 1;
    if (p->needed_by[node] != token + 1) p->needed[node]++;
    p->needed_by[node] = token + 1;
    return p->needed[node] <= limit;
}

/* Count a lost entry, or the lost row of the token's entries on that rank. */
static void lose_entry(Prepare *p, int32_t owner, int32_t token) {
    p->lost[owner] += !p->shape->has_rows || p->last_lost[owner] != token + 1;
    p->last_lost[owner] = token + 1;
}

/* Returns the physical expert of an entry that names an expert of the group, -1: no copy lives. */
static int32_t place_entry(const Prepare *p, int32_t token, int64_t expert) {
    return p->copies.of ? ep_copy_of(&p->copies, (int32_t)expert, token) : (int32_t)expert;
}

/* Set one entry's owner and count it. `last_token`: the last token counted for each rank. */
static void sort_entry(Prepare *p, EpPlacement placement, int32_t token, int64_t entry,
                       int32_t *last_token) {
    EpPlan *plan = &p->plan;
    int64_t expert = load_integer(p->routing->topk_idx, p->routing->idx_type, entry);
    int32_t most = p->group->config.num_experts;
    plan->owner[entry] = -1;
    if (expert >= most) record_bad_index(p, entry, expert);
    if (expert < 0 || expert >= most) return;
    if (p->shape->merges && is_repeated(p, entry, expert)) return;
    int32_t physical = place_entry(p, token, expert);
    if (physical < 0) return;
    int32_t owner = ep_placement_owner(&placement, physical);
    if (!ep_exchange_is_alive(p->exchange, owner)) return;
    if (!has_place(p, p->group->nodes.of[owner], token)) {
        lose_entry(p, owner, token);
        return;
    }
    plan->owner[entry] = (int16_t)owner;
    plan->send_counts[physical]++;
    plan->send_begin[owner + 1] += last_token[owner] != token;
    last_token[owner] = token;
}

/* Set the owner of every entry. Count entries per expert in send_counts, and rows per rank in
 * send_begin[rank + 1]. */
static void sort_entries(Prepare *p) {
    EpPlan *plan = &p->plan;
    int32_t *last_token = plan->next_row; /* free for use until messages arrive */
    int64_t entry = 0, k = p->routing->top_k;
    memset(plan->send_counts, 0, (size_t)p->shape->num_experts * sizeof(int32_t));
    memset(plan->send_begin, 0, (size_t)(p->shape->num_ranks + 1) * sizeof(int32_t));
    memset(last_token, 0xff, (size_t)p->shape->num_ranks * sizeof(int32_t));
    for (int32_t token = 0; token < p->num_tokens; token++)
        for (int64_t end = entry + k; entry < end; entry++)
            sort_entry(p, p->group->placement, token, entry, last_token);
}

/* Turn send_begin into ranges, and list the rows to each rank in order of token. */
static void list_rows(Prepare *p) {
    EpPlan *plan = &p->plan;
    int32_t ranks = p->shape->num_ranks, *next = plan->next_row;
    for (int32_t r = 0; r < ranks; r++) {
        plan->send_begin[r + 1] += plan->send_begin[r];
        next[r] = plan->send_begin[r];
    }
    int64_t entry = 0, k = p->routing->top_k;
    for (int32_t token = 0; token < p->num_tokens; token++)
        for (int64_t end = entry + k; entry < end; entry++) {
            int32_t owner = plan->owner[entry];
            if (owner < 0) continue;
            int32_t at = next[owner];
            if (at > plan->send_begin[owner] && plan->send_token[at - 1] == token) continue;
            plan->send_token[at] = token;
            next[owner] = at + 1;
        }
}

/* Write one token's routing to one rank: the token, then K local experts or -1. */
static void write_route(const Prepare *p, int32_t rank, int32_t token, int32_t *out) {
    int64_t k = p->routing->top_k, first = ep_placement_first(&p->group->placement, rank);
    out[0] = token;
    for (int64_t j = 0; j < k; j++) {
        int64_t entry = token * k + j;
        int64_t expert = load_integer(p->routing->topk_idx, p->routing->idx_type, entry);
        out[1 + j] = -1;
        if (p->plan.owner[entry] == rank)
            out[1 + j] = (int32_t)(place_entry(p, token, expert) - first);
    }
}

/* Returns the words before the routes in a message to `rank`. */
static int64_t head_words(const Prepare *p, int32_t rank) {
    return EP_ROUTE_HEAD_WORDS + ep_placement_count(&p->group->placement, rank);
}

/* Write the message to one rank: head, counts for its experts, routes of this round's tokens. */
static void write_routes(Prepare *p, int32_t rank, int64_t end_token) {
    const EpPlan *plan = &p->plan;
    int32_t *words = ep_round_region(p->exchange, rank);
    int32_t *route = words + head_words(p, rank);
    int32_t at = p->sent[rank], end = plan->send_begin[rank + 1], start = at;
    for (; at < end && plan->send_token[at] < end_token; at++) {
        write_route(p, rank, plan->send_token[at], route);
        route += ep_route_words(p->routing->top_k);
    }
    words[0] = at - start;
    words[1] = end - plan->send_begin[rank];
    words[2] = p->lost[rank];
    memcpy(words + EP_ROUTE_HEAD_WORDS,
           plan->send_counts + ep_placement_first(&p->group->placement, rank),
           (size_t)ep_placement_count(&p->group->placement, rank) * sizeof(int32_t));
    p->sent[rank] = at;
    ep_round_fill(p->exchange, rank, (char *)route - (char *)words);
}

/* ---- as a receiver ------------------------------------------------------------------------- */

/* Set where each source's rows and entries begin. Entries past the capacity are lost and take no
 * room: an expert keeps the entries whose slot is below its limit. */
static void number_rows(Prepare *p) {
    const EpPlanShape *shape = p->shape;
    EpPlan *plan = &p->plan;
    int64_t entries = 0, local = shape->num_local;
    int has_rows = shape->has_rows;
    for (int32_t r = 0; r < shape->num_ranks; r++) {
        plan->next_row[r] = plan->recv_begin[r];
        if (has_rows) entries = ep_min(plan->recv_begin[r], plan->header->recv_rows);
        plan->next_entry[r] = (int32_t)entries;
        for (int32_t e = 0; e < local && !has_rows; e++) {
            int64_t room = ep_slot_limit(shape, e) - plan->next_slot[r * local + e];
            entries += ep_max(0, ep_min(room, plan->source_counts[r * local + e]));
        }
    }
}

/* A rank that is masked reads what may be anything, until it notices: see runtime/host/exchange.h.
 * So each number that it uses as a size or an index is bounded here. */
static int32_t bounded(int64_t value, int64_t most) {
    return (int32_t)ep_max(0, ep_min(value, most));
}

/* Read the heads of the first round, which determine all sizes. A masked rank has none. */
static void read_heads(Prepare *p, const int32_t *const *messages) {
    const EpPlanShape *shape = p->shape;
    EpPlan *plan = &p->plan;
    size_t local = (size_t)shape->num_local;
    plan->recv_begin[0] = 0;
    for (int32_t r = 0; r < shape->num_ranks; r++) {
        int32_t *counts = plan->source_counts + (size_t)r * local;
        int32_t rows = messages[r] ? bounded(messages[r][1], shape->max_tokens) : 0;
        plan->recv_begin[r + 1] = plan->recv_begin[r] + rows;
        memset(counts, 0, local * sizeof(int32_t));
        for (size_t e = 0; messages[r] && e < local; e++)
            counts[e] = bounded(messages[r][EP_ROUTE_HEAD_WORDS + e],
                                (int64_t)shape->max_tokens * p->routing->top_k);
    }
    ep_plan_lay_slabs(shape, plan);
    for (int32_t r = 0; r < shape->num_ranks; r++)
        if (messages[r]) plan->header->dropped_slots += messages[r][2];
    number_rows(p);
}

/* Append an entry to the source's entries. */
static void add_entry(const Prepare *p, int32_t source, int64_t slot, int64_t k) {
    const EpPlan *plan = &p->plan;
    int32_t at = plan->next_entry[source];
    if (at >= p->most_entries) return;
    plan->next_entry[source]++;
    plan->entry_slot[at] = (int32_t)slot;
    plan->entry_k[at] = (uint8_t)k;
}

/* Number the slots of one row in order of k. Slots at or past the limit are lost. */
static void fill_slots(Prepare *p, int32_t source, const int32_t *experts) {
    EpPlan *plan = &p->plan;
    for (int64_t j = 0; j < p->routing->top_k; j++) {
        if (experts[j] < 0 || experts[j] >= p->shape->num_local) continue;
        int64_t slot = plan->next_slot[(int64_t)source * p->shape->num_local + experts[j]]++;
        if (slot < ep_slot_limit(p->shape, experts[j])) add_entry(p, source, slot, j);
    }
}

/* Add the one entry of a row that has one slot. */
static void fill_row(Prepare *p, int32_t source, int32_t row, const int32_t *experts) {
    EpPlan *plan = &p->plan;
    int64_t k = p->routing->top_k;
    int32_t begin = plan->recv_begin[source];
    if (row >= plan->header->recv_rows || plan->next_entry[source] >= p->most_entries) return;
    int32_t slot = (int32_t)ep_block_begin(p->shape, source, begin) + row - begin;
    int32_t entry = plan->next_entry[source]++;
    plan->entry_slot[entry] = slot;
    memcpy(plan->entry_experts + entry * k, experts, (size_t)k * sizeof(int32_t));
    for (int64_t j = 0; j < k; j++)
        if (experts[j] >= 0 && experts[j] < p->shape->num_local) plan->expert_counts[experts[j]]++;
}

/* Add the rows of one source's message of this round. */
static void read_routes(Prepare *p, int32_t source, const int32_t *words) {
    EpPlan *plan = &p->plan;
    const int32_t *route = words + head_words(p, p->shape->rank);
    int32_t left = plan->recv_begin[source + 1] - plan->next_row[source];
    int32_t routes = bounded(words[0], ep_min(left, p->chunk));
    for (int32_t i = 0; i < routes; i++, route += ep_route_words(p->routing->top_k)) {
        int32_t row = plan->next_row[source]++;
        plan->row_token[row] = route[0];
        plan->row_entry[row] = plan->next_entry[source];
        if (p->shape->has_rows)
            fill_row(p, source, row, route + 1);
        else
            fill_slots(p, source, route + 1);
        plan->row_entries[row] = (uint8_t)(plan->next_entry[source] - plan->row_entry[row]);
    }
}

/* ---- rounds -------------------------------------------------------------------------------- */

static EpRoundHeader expected_header(const Prepare *p) {
    const EpPlanShape *s = p->shape;
    return (EpRoundHeader){
        .handle = p->handle->id,
        .fact = {p->routing->top_k, s->alignment, s->layout,
                 p->routing->block_rows ? p->routing->block_rows : ep_agreed_rows(s), s->quant},
        .tokens = (int32_t)p->num_tokens};
}

/* Copy a message, since its writer may go on without this rank. Returns NULL if it has. */
static const int32_t *keep_message(Prepare *p, int32_t peer, const void *body) {
    const EpGroup *group = p->group;
    int64_t stride = ep_host_route_bytes(&group->config, group->size);
    int64_t words = head_words(p, group->rank) +
                    p->shape->max_tokens * ep_route_words(p->routing->top_k);
    char *copy = ep_host(group)->routes + peer * stride;
    if (!ep_exchange_on_node(p->exchange, peer)) return body;
    memcpy(copy, body, (size_t)words * sizeof(int32_t));
    return ep_round_settle(p->exchange, peer) ? (const int32_t *)copy : NULL;
}

/* Wait for all messages of this round. `messages` [R]: their bodies, this rank's own included; NULL
 * from ranks that are masked or cut. */
static EpStatus receive_all(Prepare *p, const int32_t **messages) {
    int32_t rank = p->group->rank, size = p->group->size;
    messages[rank] = ep_round_region(p->exchange, rank);
    p->plan.rank_tokens[rank] = (int32_t)p->num_tokens;
    for (int32_t i = 1; i < size; i++) {
        int32_t peer = ep_round_peer(rank, size, i);
        const EpRoundHeader *header;
        const void *body;
        messages[peer] = NULL;
        p->plan.rank_tokens[peer] = 0;
        if (!ep_exchange_is_alive(p->exchange, peer)) continue;
        EP_TRY(ep_round_receive(p->exchange, peer, &header, &body));
        if (!body) continue;
        int32_t tokens = bounded(header->tokens, p->shape->max_tokens);
        messages[peer] = ep_exchange_cuts_late(p->exchange) ? keep_message(p, peer, body) : body;
        if (messages[peer]) p->plan.rank_tokens[peer] = tokens;
    }
    return EP_OK;
}

static void count_rounds(Prepare *p) {
    EpPlanHeader *header = p->plan.header;
    header->most_tokens = 0;
    for (int32_t r = 0; r < p->group->size; r++)
        header->most_tokens = ep_max(header->most_tokens, p->plan.rank_tokens[r]);
    /* Ranks that have cut different ones still have as many rounds. */
    if (ep_exchange_cuts_late(p->exchange)) header->most_tokens = p->shape->max_tokens;
    p->rounds = ep_max(1, (header->most_tokens + p->chunk - 1) / p->chunk);
}

static EpStatus run_round(Prepare *p, int64_t round) {
    const int32_t *messages[EP_MAX_RANKS];
    EpRoundHeader expected = expected_header(p);
    EP_TRY(ep_round_open(p->exchange, p->routing->op, &expected, EP_ROUND_EACH));
    for (int32_t r = 0; r < p->group->size; r++)
        if (ep_exchange_is_alive(p->exchange, r)) write_routes(p, r, (round + 1) * p->chunk);
    EP_TRY(ep_round_publish(p->exchange));
    EP_TRY(receive_all(p, messages));
    if (round == 0) {
        count_rounds(p);
        read_heads(p, messages);
    }
    for (int32_t r = 0; r < p->group->size; r++) {
        if (!messages[r]) continue;
        read_routes(p, r, messages[r]);
        if (r != p->group->rank) ep_round_release(p->exchange, r);
    }
    return ep_round_close(p->exchange);
}

static EpStatus run_rounds(Prepare *p) {
    EpPlacement *placement = &p->group->placement;
    int64_t head = 4 * (EP_ROUTE_HEAD_WORDS + ep_placement_most(placement));
    p->chunk = (ep_exchange_body_bytes(p->exchange, EP_ROUND_EACH) - head) /
               (4 * ep_route_words(p->routing->top_k));
    p->rounds = 1;
    for (int64_t round = 0; round < p->rounds; round++)
        EP_TRY(run_round(p, round));
    return ep_exchange_flush(p->exchange, p->routing->op);
}

/* ---- results ------------------------------------------------------------------------------- */

/* Rows with one slot are ordered by source. Set the offsets that their entries would have if
 * ordered by expert. */
static void describe_row_experts(Prepare *p) {
    EpPlan *plan = &p->plan;
    int32_t offset = 0;
    for (int32_t e = 0; e < p->shape->num_local; e++) {
        plan->expert_padded[e] = plan->expert_counts[e];
        plan->expert_offsets[e] = offset;
        offset += plan->expert_counts[e];
    }
    plan->expert_offsets[p->shape->num_local] = offset;
}

static void store_integer(const EpTensor *t, int64_t i, int64_t value) {
    if (t->type == EP_TYPE_INT64)
        ((int64_t *)t->data)[i] = value;
    else
        ((int32_t *)t->data)[i] = (int32_t)value;
}

static void publish_vector(const EpTensor *t, const int32_t *values) {
    for (int64_t i = 0; t && i < t->shape[0]; i++)
        store_integer(t, i, values[i]);
}

/* Returns how many slots of one expert are filled from one source. All its entries are numbered by
 * now, so next_slot is behind the last of them. */
static int64_t count_slots(const Prepare *p, int32_t expert, int32_t source) {
    int64_t at = (int64_t)source * p->shape->num_local + expert;
    int64_t end = p->plan.next_slot[at], begin = end - p->plan.source_counts[at];
    return ep_max(0, ep_min(end, ep_slot_limit(p->shape, expert)) - begin);
}

/* Returns how many kept entries of one source name an expert, where a row has one slot and several
 * entries. */
static int64_t count_row_entries(const Prepare *p, int32_t expert, int32_t source) {
    const EpPlan *plan = &p->plan;
    int64_t k = p->routing->top_k, count = 0;
    int64_t end = ep_min(plan->recv_begin[source + 1], plan->header->recv_rows);
    for (int64_t i = plan->recv_begin[source] * k; i < end * k; i++)
        count += plan->entry_experts[i] == expert;
    return count;
}

static void publish_source_counts(const Prepare *p, const EpTensor *t) {
    int32_t ranks = p->shape->num_ranks;
    int has_rows = p->shape->has_rows;
    for (int32_t e = 0; t && e < p->shape->num_local; e++)
        for (int32_t r = 0; r < ranks; r++)
            store_integer(t, (int64_t)e * ranks + r,
                          has_rows ? count_row_entries(p, e, r) : count_slots(p, e, r));
}

/* Returns the receive rows that a source's tokens fill. */
static int64_t count_source_rows(const Prepare *p, int32_t source) {
    const EpPlan *plan = &p->plan;
    int64_t kept = plan->header->recv_rows, rows = 0;
    if (p->shape->has_rows)
        return ep_min(kept, plan->recv_begin[source + 1]) - ep_min(kept, plan->recv_begin[source]);
    for (int32_t e = 0; e < p->shape->num_local; e++)
        rows += count_slots(p, e, source);
    return rows;
}

/* Write the caller's optional outputs that the plan holds. */
static void publish_plan(const EpPlan *plan, const EpPlanTensors *out) {
    const EpPlanHeader *header = plan->header;
    int32_t totals[] = {(int32_t)header->recv_rows, (int32_t)header->needed_rows,
                        (int32_t)header->dropped_slots};
    publish_vector(out->expert_counts, plan->expert_counts);
    publish_vector(out->expert_padded, plan->expert_padded);
    publish_vector(out->expert_offsets, plan->expert_offsets);
    publish_vector(out->totals, totals);
    publish_vector(out->recv_rows, &totals[0]);
    publish_vector(out->needed_rows, &totals[1]);
    publish_vector(out->dropped_slots, &totals[2]);
}

/* Write all of them. */
static void publish(const Prepare *p) {
    const EpPlanTensors *out = p->routing->out;
    if (!out) return;
    publish_plan(&p->plan, out);
    publish_source_counts(p, out->source_counts);
    for (int32_t r = 0; out->source_rows && r < p->shape->num_ranks; r++)
        store_integer(out->source_rows, r, count_source_rows(p, r));
}

static void record_overflow(Prepare *p) {
    const EpPlanShape *shape = p->shape;
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_OVERFLOW;
    finding.rank = p->group->rank;
    finding.expected = ep_agreed_rows(shape);
    finding.seen = p->plan.header->needed_rows;
    finding.count = p->plan.header->dropped_slots;
    strcpy(finding.phase, "prepare");
    if (finding.count && shape->overflow == EP_OVERFLOW_ERROR)
        ep_group_record(&p->group->overflow, &finding);
}

static void complete_plan(Prepare *p) {
    EpPlanHeader *header = p->plan.header;
    if (p->shape->has_rows) describe_row_experts(p);
    header->num_tokens = p->num_tokens;
    header->num_rows = p->routing->num_rows;
    header->exact_rows = p->routing->num_tokens == NULL;
    header->top_k = p->routing->top_k;
    header->step = p->routing->plan.is_named ? 0 : header->step + 1;
    header->group = p->group->id;
    header->config = ep_plan_config(p->shape, header->top_k);
    header->generation = p->generation;
    *p->plan.tail = EP_PLAN_MAGIC;
    header->magic = EP_PLAN_MAGIC;
    record_overflow(p);
    publish(p);
}

static EpStatus run(EpHandle *handle, const void *call) {
    const EpRouting *routing = call;
    Prepare p = {
        .handle = handle, .group = handle->group, .shape = &handle->shape, .routing = routing};
    p.copies = ep_copy_table(&handle->group->copies);
    p.plan = ep_host_plan(handle, routing->plan);
    p.exchange = ep_host(handle->group)->exchange;
    p.most_entries = ep_plan_max_entries(p.shape);
    EP_TRY(count_tokens(&p));
    p.plan.header->magic = 0;
    p.generation = ep_exchange_round(p.exchange) + 1;
    sort_entries(&p);
    list_rows(&p);
    memcpy(p.sent, p.plan.send_begin, (size_t)p.group->size * sizeof(int32_t));
    EP_TRY_EXCHANGE(handle->group, run_rounds(&p));
    complete_plan(&p);
    return EP_OK;
}

EpStatus ep_host_prepare(EpHandle *handle, const EpRouting *routing) {
    return ep_host_run(handle, &routing->stats, run, routing, routing->op->name);
}

EpStatus ep_host_publish(EpHandle *handle, const EpRouting *routing) {
    EpPlan plan = ep_host_plan(handle, routing->plan);
    publish_plan(&plan, routing->out);
    return EP_OK;
}
