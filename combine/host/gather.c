/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather on the host: slots to token rows, for ep_combine and ep_dispatch_backward.
 *
 * In each round a rank adds up the slots of every row that a peer sent it in that chunk of tokens.
 * It stores the sums, rounded to the rows' type or quantised, in the peer's region of its outbox,
 * packed in order of token. Then it reads the peers' sums for its own tokens and adds them in
 * ascending rank. Its own slots take their turn unrounded.
 *
 * The sums from the ranks of another node are added up and rounded (quantised) first, and take
 * their turn together, where the node's lowest rank stands in the group. That is what a relay on
 * that node would do, so results are those of backends that have relays.
 *
 * Sums by entry (EpSums): every entry's row is stored as it is, and the token's rank adds those of
 * all ranks in ascending k.
 *
 * Where a combine is weighted at the tokens' ranks, and sums are not by entry, two rounds
 * alternate: in the first each rank sends the weights of the rows that a peer has from it in that
 * chunk of tokens, packed in the same order, and in the second the peer sums with them. It reads
 * them in place, and releases both rounds together.
 *
 * Bytes per rank: every slot read once; R * T * (fraction received) rows written to and read from
 * staging, which stays in cache; T rows written.
 */
#include <string.h>

#include "combine/host/gather.h"
#include "handles/host/blocks.h"
#include "handles/host/plan.h"
#include "handles/host/statistics.h"
#include "runtime/host/host.h"
#include "runtime/quant.h"

typedef struct Gather {
    const EpHandle *handle;
    const EpGather *call;
    const EpGatherTensors *g;
    EpPlan plan;
    EpExchange *exchange;
    const EpRowMath *math;
    int has_rows; /* whether a row has one slot for all its entries */
    int32_t rank, size;
    EpType out_type;             /* of the sums that are written: FP32 in a send phase */
    int64_t out_bytes;           /* of a row of them */
    const int32_t *nodes;        /* [size] node of each rank */
    int32_t order[EP_MAX_RANKS]; /* the ranks in the order of summation */
    int64_t top_k;
    EpRecord record;                    /* by entry: of all K rows */
    int64_t chunk;                      /* tokens of each source in one round */
    int32_t summed[EP_MAX_RANKS];       /* rows of each source already summed */
    int32_t returned[EP_MAX_RANKS];     /* this rank's rows whose sums each rank has returned */
    int32_t weighed[EP_MAX_RANKS];      /* this rank's rows whose weights each rank has got */
    const char *back[EP_MAX_RANKS];     /* next record of this round from each rank */
    const float *weights[EP_MAX_RANKS]; /* [rows of this round, K] topk_weights of each rank */
} Gather;

/* What precedes the rows of a token's entries, and where they begin. */
typedef struct EntriesHead {
    uint32_t mask; /* bit k: entry k has a row here; rows are in ascending k */
    uint32_t reserved[3];
} EntriesHead;
_Static_assert(sizeof(EntriesHead) == EP_ENTRY_MASK_BYTES, "as the record's size counts it");

/* Partial sums of other ranks and this rank's own slots, at most K of each, and the biases. */
#define MAX_TERMS (2 * EP_MAX_TOP_K + EP_MAX_BIASES)

/* Returns the position of an entry's slot in the tensors. */
static int64_t position(const Gather *x, int64_t entry) {
    return ep_slot_position(&x->handle->shape, x->g->block_rows, x->plan.entry_slot[entry]);
}

/* Returns the weight of an entry. `weights` [K]: topk_weights of its token; NULL if not given. */
static float entry_weight(const Gather *x, int32_t entry, const float *weights) {
    if (weights) return weights[x->plan.entry_k[entry]];
    return x->g->weighs ? x->g->slot_weights[position(x, entry)] : 1;
}

/* Store the slots of a row as terms of a sum. Returns their number. */
static int list_slots(const Gather *x, int32_t row, const float *weights, EpTerm *terms) {
    int count = x->plan.row_entries[row];
    for (int i = 0; i < count; i++) {
        int32_t entry = x->plan.row_entry[row] + i;
        terms[i] = (EpTerm){x->g->rows + position(x, entry) * x->g->row_bytes,
                            entry_weight(x, entry, weights),
                            i == 0 ? EP_RUN_BEGINS : EP_RUN_GOES_ON, NULL};
    }
    return count;
}

/* Store the values of a row's entries by k; 0 for entries on other ranks and lost ones. */
static void collect_values(const Gather *x, int32_t row, float *values) {
    const EpGatherTensors *g = x->g;
    const EpPlan *plan = &x->plan;
    memset(values, 0, (size_t)x->top_k * sizeof(float));
    for (int32_t i = plan->row_entry[row]; i < plan->row_entry[row] + plan->row_entries[row]; i++) {
        int64_t slot = position(x, i);
        if (!x->has_rows) {
            values[plan->entry_k[i]] = g->slot_values[slot];
            continue;
        }
        for (int64_t k = 0; k < x->top_k; k++)
            if (plan->entry_experts[i * x->top_k + k] >= 0)
                values[k] = g->slot_values[slot * x->top_k + k];
    }
}

/* ---- on the experts' rank ------------------------------------------------------------------ */

static int is_quantised(const Gather *x) {
    return x->g->format.bits != 0;
}

/* Store a sum as it travels. */
static void store_sum(const Gather *x, char *record, const EpTerm *terms, int count) {
    const EpGatherTensors *g = x->g;
    if (is_quantised(x))
        x->math->sum_quantised(g->type, (uint8_t *)record, (float *)(record + x->record.scales),
                               g->row_elements, terms, count);
    else
        x->math->sum(g->type, record, g->row_elements, terms, count);
}

/* ---- entries ------------------------------------------------------------------------------- */

/* Returns the values in a record of entries, [K] if any travel, and where its rows begin. */
static float *entry_values(const char *record) {
    return (float *)(record + sizeof(EntriesHead));
}

static char *entry_rows(const Gather *x, const char *record) {
    return (char *)record + sizeof(EntriesHead) + (x->record.scales - x->record.weights);
}

/* Store a row's entries as they travel. Returns the end of the record. */
static char *store_entries(const Gather *x, int32_t row, char *record) {
    const EpGatherTensors *g = x->g;
    EntriesHead head = {0};
    char *to = entry_rows(x, record);
    for (int32_t i = x->plan.row_entry[row]; i < x->plan.row_entry[row] + x->plan.row_entries[row];
         i++, to += g->row_bytes) {
        head.mask |= 1u << x->plan.entry_k[i];
        memcpy(to, g->rows + position(x, i) * g->row_bytes, (size_t)g->row_bytes);
    }
    if (g->carries_values) collect_values(x, row, entry_values(record));
    memcpy(record, &head, sizeof(head));
    return to;
}

/* Store the entries of one source's rows, up to token `end`, in its region. */
static void send_entries(Gather *x, int32_t source, int64_t end) {
    char *region = ep_round_region(x->exchange, source), *record = region;
    int32_t row = x->summed[source], last = x->plan.recv_begin[source + 1];
    for (; row < last && x->plan.row_token[row] < end; row++)
        record = store_entries(x, row, record);
    x->summed[source] = row;
    ep_round_fill(x->exchange, source, record - region);
}

/* Store the sums of one source's rows, up to token `end`, in its region. */
static void sum_rows(Gather *x, int32_t source, int64_t end) {
    const EpGatherTensors *g = x->g;
    const float *weights = x->weights[source];
    char *region = ep_round_region(x->exchange, source), *record = region;
    int32_t row = x->summed[source], last = x->plan.recv_begin[source + 1];
    for (; row < last && x->plan.row_token[row] < end; row++, record += x->record.bytes) {
        EpTerm terms[MAX_TERMS];
        int count = list_slots(x, row, weights, terms);
        if (weights) weights += x->top_k;
        store_sum(x, record, terms, count);
        if (g->carries_values) collect_values(x, row, (float *)(record + x->record.weights));
    }
    x->summed[source] = row;
    ep_round_fill(x->exchange, source, record - region);
}

/* ---- on the tokens' rank ------------------------------------------------------------------- */

static int is_next_row(const Gather *x, int32_t rank, int64_t token) {
    int32_t at = x->returned[rank];
    return at < x->plan.send_begin[rank + 1] && x->plan.send_token[at] == token &&
           ep_exchange_is_alive(x->exchange, rank);
}

/* Store the values of a token's entries on `rank`. */
static void take_values(const Gather *x, int32_t rank, int64_t token, const float *values) {
    for (int64_t k = token * x->top_k; k < (token + 1) * x->top_k; k++)
        if (x->plan.owner[k] == rank) x->g->out_values[k] = values[k - token * x->top_k];
}

/* Take a token's row on this rank itself: its slots are the terms. Returns their number. */
static int take_own(Gather *x, int64_t token, EpTerm *terms) {
    int32_t row =
        x->plan.recv_begin[x->rank] + x->returned[x->rank]++ - x->plan.send_begin[x->rank];
    if (x->g->out_values) {
        float values[EP_MAX_TOP_K];
        collect_values(x, row, values);
        take_values(x, x->rank, token, values);
    }
    const float *weights = x->g->weighs_entries ? x->g->topk_weights + token * x->top_k : NULL;
    return list_slots(x, row, weights, terms);
}

/* Take a token's partial sum from another rank: one term. */
static void take_record(Gather *x, int32_t rank, int64_t token, EpRun run, EpTerm *term) {
    const char *record = x->back[rank];
    x->back[rank] += x->record.bytes;
    x->returned[rank]++;
    if (x->g->carries_values)
        take_values(x, rank, token, (const float *)(record + x->record.weights));
    const char *scales = is_quantised(x) ? record + x->record.scales : NULL;
    *term = (EpTerm){record, 1, run, (const float *)scales};
}

/* Take a token's entries on another rank: a term for each, in the place of its k. */
static void take_entries(Gather *x, int32_t rank, int64_t token, EpTerm terms[EP_MAX_TOP_K]) {
    const EpGatherTensors *g = x->g;
    const char *record = x->back[rank];
    const float *values = entry_values(record);
    const char *row = entry_rows(x, record);
    const float *weights = ep_carries_weights(g) ? values : NULL;
    EntriesHead head;
    memcpy(&head, record, sizeof(head));
    if (g->weighs_entries) weights = g->topk_weights + token * x->top_k;
    for (int64_t k = 0; k < x->top_k; k++) {
        if (!(head.mask >> k & 1)) continue;
        terms[k] = (EpTerm){row, weights ? weights[k] : 1, EP_RUN_GOES_ON, NULL};
        row += g->row_bytes;
    }
    if (g->out_values) take_values(x, rank, token, values);
    x->back[rank] = row;
    x->returned[rank]++;
}

/* Take a token's entries on this rank. */
static void take_own_entries(Gather *x, int64_t token, EpTerm terms[EP_MAX_TOP_K]) {
    EpTerm own[EP_MAX_TOP_K];
    int32_t row = x->plan.recv_begin[x->rank] + x->returned[x->rank] - x->plan.send_begin[x->rank];
    int count = take_own(x, token, own);
    for (int i = 0; i < count; i++)
        terms[x->plan.entry_k[x->plan.row_entry[row] + i]] = own[i];
}

/* List a token's entries on all ranks as one run, in ascending k. Returns their number. */
static int list_entries(Gather *x, int64_t token, EpTerm *terms) {
    EpTerm entries[EP_MAX_TOP_K] = {{0}};
    int count = 0;
    for (int32_t r = 0; r < x->size; r++) {
        if (!is_next_row(x, r, token)) continue;
        if (r == x->rank)
            take_own_entries(x, token, entries);
        else
            take_entries(x, r, token, entries);
    }
    for (int64_t k = 0; k < x->top_k; k++) {
        if (!entries[k].row) continue;
        terms[count] = entries[k];
        terms[count].run = count ? EP_RUN_GOES_ON : EP_RUN_BEGINS;
        count++;
    }
    return count;
}

/* Put the ranks into the order of summation: ascending, but all ranks of another node where its
 * lowest rank stands. Nodes are numbered in the order of their lowest ranks. */
static void order_ranks(Gather *x) {
    int32_t n = 0, nodes_seen = 0;
    for (int32_t r = 0; r < x->size; r++) {
        int is_lowest = x->nodes[r] == nodes_seen;
        nodes_seen += is_lowest;
        if (x->nodes[r] == x->nodes[x->rank])
            x->order[n++] = r;
        else if (is_lowest)
            for (int32_t s = r; s < x->size; s++)
                if (x->nodes[s] == x->nodes[r]) x->order[n++] = s;
    }
}

/* Store a token's sum. In a send phase it is not rounded, since the receive phase adds biases. */
static void write_sum(const Gather *x, int64_t token, const EpTerm *terms, int count) {
    const EpGatherTensors *g = x->g;
    char *out = g->out_rows + token * x->out_bytes;
    if (x->call->phase == EP_PHASE_SEND)
        x->math->reduce(g->type, terms, count, x->out_type, 0, out, g->row_elements);
    else
        x->math->sum(g->type, out, g->row_elements, terms, count);
}

/* List a token's sums on all ranks, in the order of summation. Returns the number of terms. */
static int list_sums(Gather *x, int64_t token, EpTerm *terms) {
    int32_t own_node = x->nodes[x->rank], last_node = own_node;
    EpRun other_node = is_quantised(x) ? EP_RUN_BEGINS_QUANTISED : EP_RUN_BEGINS_ROUNDED;
    int count = 0;
    for (int32_t i = 0; i < x->size; i++) {
        int32_t r = x->order[i], node = x->nodes[r];
        if (!is_next_row(x, r, token)) continue;
        if (r == x->rank)
            count += take_own(x, token, terms + count);
        else if (node == own_node)
            take_record(x, r, token, EP_RUN_BEGINS, terms + count++);
        else if (node != last_node)
            take_record(x, r, token, other_node, terms + count++);
        else
            take_record(x, r, token, EP_RUN_GOES_ON, terms + count++);
        last_node = node;
    }
    return count;
}

/* Write one token's sum, and its values. */
static void finish_token(Gather *x, int64_t token) {
    const EpGatherTensors *g = x->g;
    EpTerm terms[MAX_TERMS];
    if (g->out_values)
        memset(g->out_values + token * x->top_k, 0, (size_t)x->top_k * sizeof(float));
    int count = g->by_entry ? list_entries(x, token, terms) : list_sums(x, token, terms);
    for (int i = 0; i < g->num_biases; i++)
        terms[count++] = (EpTerm){g->bias[i] + token * g->row_bytes, 1, EP_RUN_BEGINS, NULL};
    write_sum(x, token, terms, count);
}

/* ---- weights of the tokens' rank ----------------------------------------------------------- */

/* Store the weights of the rows that `peer` has from this rank, up to token `end`, in its region.
 */
static void send_weights(Gather *x, int32_t peer, int64_t end) {
    float *region = ep_round_region(x->exchange, peer), *weights = region;
    int32_t at = x->weighed[peer], last = x->plan.send_begin[peer + 1];
    for (; at < last && x->plan.send_token[at] < end; at++, weights += x->top_k)
        memcpy(weights, x->g->topk_weights + x->plan.send_token[at] * x->top_k,
               (size_t)x->top_k * sizeof(float));
    x->weighed[peer] = at;
    ep_round_fill(x->exchange, peer, (char *)weights - (char *)region);
}

/* ---- rounds -------------------------------------------------------------------------------- */

static EpRoundHeader expected_header(const Gather *x) {
    const EpGatherTensors *g = x->g;
    return (EpRoundHeader){.handle = x->handle->id,
                           .plan = (uint32_t)x->plan.header->generation,
                           .fact = {g->row_bytes, g->type, g->carries_values ? x->top_k : 0,
                                    g->weighs_entries ? x->top_k : 0, g->format.quant},
                           .tokens = (int32_t)x->plan.header->num_tokens};
}

/* Exchange the weights of the tokens up to `end`. They stay with their writers, and the next round
 * releases them: the writers reuse their memory in the round after that. */
static EpStatus run_weights_round(Gather *x, int64_t end) {
    EpRoundHeader expected = expected_header(x);
    EP_TRY(ep_round_open(x->exchange, x->call->op, &expected, EP_ROUND_EACH));
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        if (ep_exchange_is_alive(x->exchange, peer)) send_weights(x, peer, end);
    }
    EP_TRY(ep_round_publish(x->exchange));
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        const void *weights;
        if (!ep_exchange_is_alive(x->exchange, peer)) continue;
        EP_TRY(ep_round_receive(x->exchange, peer, NULL, &weights));
        x->weights[peer] = weights;
    }
    return ep_round_close(x->exchange);
}

/* Returns whether all sums that were read were whole. A rank of which they were not is cut. */
static int settle(const Gather *x) {
    int whole = 1;
    for (int32_t r = 0; r < x->size; r++)
        if (r != x->rank && ep_exchange_is_alive(x->exchange, r))
            whole &= ep_round_settle(x->exchange, r);
    return whole;
}

/* Sum the tokens of a round: again, without the rank, where one went on without this one. */
static void finish_tokens(Gather *x, int64_t begin, int64_t end) {
    int32_t returned[EP_MAX_RANKS];
    const char *back[EP_MAX_RANKS];
    size_t ranks = (size_t)x->size;
    memcpy(returned, x->returned, ranks * sizeof(*returned));
    memcpy(back, x->back, ranks * sizeof(*back));
    do {
        memcpy(x->returned, returned, ranks * sizeof(*returned));
        memcpy(x->back, back, ranks * sizeof(*back));
        for (int64_t t = begin; t < end; t++)
            finish_token(x, t);
    } while (!settle(x));
}

static EpStatus run_round(Gather *x, int64_t begin) {
    EpRoundHeader expected = expected_header(x);
    int64_t end = begin + x->chunk, own_end = ep_min(end, x->plan.header->num_tokens);
    EP_TRY(ep_round_open(x->exchange, x->call->op, &expected, EP_ROUND_EACH));
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        if (!ep_exchange_is_alive(x->exchange, peer)) continue;
        if (x->g->by_entry)
            send_entries(x, peer, end);
        else
            sum_rows(x, peer, end);
    }
    EP_TRY(ep_round_publish(x->exchange));
    for (int32_t i = 1; i < x->size; i++) {
        int32_t peer = ep_round_peer(x->rank, x->size, i);
        const void *records;
        if (!ep_exchange_is_alive(x->exchange, peer)) continue;
        EP_TRY(ep_round_receive(x->exchange, peer, NULL, &records));
        x->back[peer] = records;
    }
    finish_tokens(x, begin, own_end);
    for (int32_t r = 0; r < x->size; r++)
        if (r != x->rank) ep_round_release(x->exchange, r);
    return ep_round_close(x->exchange);
}

/* Zero the output rows past this step's tokens, which have no slots. */
static void zero_unused_rows(const Gather *x) {
    const EpGatherTensors *g = x->g;
    int64_t tokens = x->plan.header->num_tokens, rows = g->out_num_rows - tokens;
    if (rows <= 0) return;
    memset(g->out_rows + tokens * x->out_bytes, 0, (size_t)(rows * x->out_bytes));
    if (g->out_values)
        memset(g->out_values + tokens * x->top_k, 0, (size_t)(rows * x->top_k) * sizeof(float));
}

static EpStatus run_rounds(Gather *x) {
    zero_unused_rows(x);
    for (int64_t begin = 0; begin < x->plan.header->most_tokens; begin += x->chunk) {
        if (x->g->weighs_entries && !x->g->by_entry) EP_TRY(run_weights_round(x, begin + x->chunk));
        EP_TRY(run_round(x, begin));
    }
    return ep_exchange_flush(x->exchange, x->call->op);
}

/* Returns the bytes of a row of sums in the handle's buffer. */
static int64_t pending_bytes(const EpGatherTensors *g) {
    return g->row_elements * (int64_t)sizeof(float);
}

/* Round the sums that the send phase stored in the handle's buffer, with their biases. Rows past
 * this step's tokens have none. */
static EpStatus finish_sums(const EpHandle *handle, const EpGather *gather) {
    const EpGatherTensors *g = &gather->t;
    const EpRowMath *math = ep_host(handle->group)->math;
    const char *sums = ep_host_set(handle->group, gather->place.slot);
    int64_t tokens = ep_host_plan(handle, gather->plan).header->num_tokens;
    for (int64_t t = 0; t < g->out_num_rows; t++, sums += pending_bytes(g)) {
        const void *bias[EP_MAX_BIASES];
        int count = t < tokens ? g->num_biases : 0;
        for (int i = 0; i < count; i++)
            bias[i] = g->bias[i] + t * g->row_bytes;
        math->finish(g->type, g->out_rows + t * g->row_bytes, (const float *)sums, bias, count,
                     g->row_elements);
    }
    return EP_OK;
}

/* Returns how a sum lies in staging. Quantised it takes no more bytes than in any type. */
static EpRecord sum_record(const EpGatherTensors *g, int64_t top_k) {
    int64_t values = g->carries_values ? top_k : 0;
    if (g->by_entry) return ep_entries_record(g->row_bytes, top_k, g->carries_values);
    if (!g->format.bits) return ep_record(g->row_bytes, values, 0);
    int64_t scales = ep_quant_scales(g->format, g->row_elements) * (int64_t)sizeof(float);
    return ep_record(ep_quant_bytes(g->format, g->row_elements), values, scales);
}

/* Count what each rank has got: its rows' sums, or entries. */
static void count_rows(const Gather *x) {
    const int32_t *begin = x->plan.recv_begin;
    int32_t entries[EP_MAX_RANKS + 1] = {0};
    for (int32_t r = 0; r < x->size && x->g->by_entry; r++) {
        entries[r + 1] = entries[r];
        for (int32_t row = begin[r]; row < begin[r + 1]; row++)
            entries[r + 1] += x->plan.row_entries[row];
    }
    ep_host_count_rows(x->handle->group, &x->call->stats, x->g->by_entry ? entries : begin);
}

static EpStatus run(EpHandle *handle, const void *call) {
    const EpGather *gather = call;
    const EpCall named = {gather->op->name, handle->group->rank, handle->group};
    EP_TRY(ep_host_check_blocks(handle, &named, gather->plan, gather->t.block_rows));
    EpGatherTensors g = gather->t;
    int sends = gather->phase == EP_PHASE_SEND;
    if (sends) g.out_rows = ep_host_set(handle->group, gather->place.slot);
    EpHost *host = ep_host(handle->group);
    Gather x = {
        .handle = handle, .call = gather, .g = &g, .exchange = host->exchange, .math = host->math};
    x.plan = ep_host_plan(handle, gather->plan);
    x.has_rows = handle->shape.has_rows;
    x.out_type = sends ? EP_TYPE_FP32 : g.type;
    x.out_bytes = sends ? pending_bytes(&g) : g.row_bytes;
    x.rank = handle->group->rank, x.size = handle->group->size;
    x.nodes = handle->group->nodes.of;
    order_ranks(&x);
    EP_TRY(ep_host_await_done(handle, &named, &x.plan, &g.done));
    x.top_k = x.plan.header->top_k;
    x.record = sum_record(&g, x.top_k);
    int64_t weights = g.weighs_entries && !g.by_entry ? x.top_k * (int64_t)sizeof(float) : 0;
    x.chunk = ep_exchange_body_bytes(x.exchange, EP_ROUND_EACH) / ep_max(x.record.bytes, weights);
    memcpy(x.weighed, x.plan.send_begin, (size_t)x.size * sizeof(int32_t));
    memcpy(x.summed, x.plan.recv_begin, (size_t)x.size * sizeof(int32_t));
    memcpy(x.returned, x.plan.send_begin, (size_t)x.size * sizeof(int32_t));
    EP_TRY_EXCHANGE(handle->group, run_rounds(&x));
    count_rows(&x);
    return EP_OK;
}

EpStatus ep_host_gather(EpHandle *handle, const EpGather *gather) {
    if (gather->phase == EP_PHASE_RECEIVE) return finish_sums(handle, gather);
    return ep_host_run(handle, &gather->stats, run, gather, gather->op->name);
}
