/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/routing.h"

#include <string.h>

#include "tools/common/layout.h"
#include "tools/common/util.h"

/* State of the walk over all entries: per expert and per rank. */
typedef struct Walk {
    const Options *options;
    const Routing *routing;
    int64_t *count;    /* [E] entries that name the expert, on all ranks */
    int64_t *start;    /* [E] first row of its slab if the capacity is unlimited */
    int64_t *next;     /* [E] row of its next slot */
    int64_t *flat;     /* [R] where rows have one slot: next free row of the rank */
    int64_t *last_row; /* [R] and the row of the current token, -1: none yet */
    Pool pool;
} Walk;

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t round_up(int64_t rows, int64_t alignment) {
    return (rows + alignment - 1) / alignment * alignment;
}

bool slots_has_rows(EpLayout layout) {
    return tool_layout(layout)->has_rows;
}

static bool has_fixed_blocks(const Slots *slots) {
    return tool_layout(slots->layout)->is_fixed;
}

int64_t slots_tag(EpLayout layout, int owner, int expert, int k) {
    return slots_has_rows(layout) ? owner : ((int64_t)expert + 1) * EP_MAX_TOP_K * 64 + k;
}

/* ---- messages between nodes ---------------------------------------------------------------- */

/* What the walk over a source's tokens knows of its messages: [R], by node or by rank. */
typedef struct Places {
    int64_t *used, *last, *last_lost; /* tokens with a place; 1 + last token that wants one; 1 +
                                         last token that lost an entry */
} Places;

/* Returns whether the token's message to a node, where it has an entry, has a place for it. */
static bool takes_place(const Places *p, int node, int64_t token, int64_t most) {
    if (p->last[node] != token + 1) p->used[node]++;
    p->last[node] = token + 1;
    return p->used[node] <= most;
}

static void lose_entry(Slots *slots, const Places *p, int owner, int64_t token) {
    bool fresh = !slots_has_rows(slots->layout) || p->last_lost[owner] != token + 1;
    p->last_lost[owner] = token + 1;
    slots->dropped += fresh && owner == slots->rank;
    slots->all_dropped += fresh;
}

static void fill_messages(const Walk *walk, const int32_t *nodes, int source, const Places *p,
                          int32_t *experts, Slots *slots) {
    const Routing *routing = walk->routing;
    for (int64_t t = 0; t < routing->tokens[source]; t++)
        for (int k = 0; k < routing->top_k; k++) {
            int32_t *expert = &experts[(routing->first[source] + t) * routing->top_k + k];
            int owner = *expert < 0 ? source : routing_owner(routing, *expert);
            if (nodes[owner] == nodes[source]) continue;
            if (takes_place(p, nodes[owner], t, walk->options->node_rows)) continue;
            lose_entry(slots, p, owner, t);
            *expert = -1;
        }
}

/* Make the walk's routing one without the entries that find no place. */
static bool limit_messages(Walk *walk, const int32_t *nodes, Routing *limited, Slots *slots) {
    size_t ranks = (size_t)walk->routing->num_ranks, each = ranks * sizeof(int64_t);
    size_t entries = (size_t)(walk->routing->first[ranks] * walk->routing->top_k);
    int32_t *experts = pool_alloc(&walk->pool, entries, sizeof(*experts), "slot map");
    int64_t *counts = pool_alloc(&walk->pool, 3 * ranks, sizeof(*counts), "slot map");
    Places p = {counts, counts + ranks, counts + 2 * ranks};
    if (walk->pool.failed) return false;
    memcpy(experts, walk->routing->experts, entries * sizeof(*experts));
    for (int r = 0; r < walk->routing->num_ranks; r++) {
        memset(counts, 0, 3 * each);
        fill_messages(walk, nodes, r, &p, experts, slots);
    }
    *limited = *walk->routing, limited->experts = experts;
    walk->routing = limited;
    return true;
}

/* ---- the row of every entry ---------------------------------------------------------------- */

static void count_entries(Walk *walk) {
    const Routing *routing = walk->routing;
    int64_t entries = routing->first[routing->num_ranks] * routing->top_k;
    for (int64_t i = 0; i < entries; i++) {
        if (routing->experts[i] >= 0) walk->count[routing->experts[i]]++;
    }
}

/* Returns the rows of a slab with `count` entries, padding included. */
static int64_t slab_rows(const Walk *walk, int64_t count) {
    return round_up(count, walk->options->alignment);
}

static int64_t largest_slab(const Walk *walk) {
    int64_t largest = 1;
    for (int e = 0; e < walk->routing->num_experts; e++) {
        if (walk->count[e] > largest) largest = walk->count[e];
    }
    return slab_rows(walk, largest);
}

static void place_slabs(Walk *walk, const Slots *slots) {
    for (int r = 0; r < walk->routing->num_ranks; r++) {
        int64_t row = 0;
        int first = routing_first_expert(walk->routing, r);
        int end = routing_first_expert(walk->routing, r + 1);
        for (int e = first; e < end; e++) {
            if (has_fixed_blocks(slots)) row = (e - first) * slots->block_rows;
            walk->start[e] = walk->next[e] = row;
            row += slab_rows(walk, walk->count[e]);
        }
    }
}

/* End of the rows that the expert's slots may take. */
static int64_t limit_of(const Walk *walk, const Slots *slots, int expert) {
    if (has_fixed_blocks(slots) && !slots_has_rows(slots->layout))
        return walk->start[expert] + slots->block_rows;
    return walk->options->capacity ? walk->options->capacity : INT64_MAX;
}

/* Where rows have one slot: the first entry that names the rank takes a row; the token's other
 * entries share it. */
static int64_t next_row(Walk *walk, const Slots *slots, int expert, int owner, bool *fresh) {
    *fresh = !slots_has_rows(slots->layout) || walk->last_row[owner] < 0;
    if (!slots_has_rows(slots->layout)) return walk->next[expert]++;
    if (*fresh) walk->last_row[owner] = walk->flat[owner]++;
    return walk->last_row[owner];
}

static void record_slot(Slots *slots, int64_t row, Row what) {
    if (slots_has_rows(slots->layout)) what.k = what.expert = -1;
    slots->rows[row] = what;
    slots->num_slots++;
}

static void place_entry(Walk *walk, Slots *slots, int source, int64_t token, int k) {
    int64_t entry = (walk->routing->first[source] + token) * walk->routing->top_k + k;
    int expert = walk->routing->experts[entry];
    slots->row_of[entry] = -1;
    if (expert < 0) return;
    int owner = routing_owner(walk->routing, expert);
    bool fresh, mine = owner == slots->rank;
    int64_t row = next_row(walk, slots, expert, owner, &fresh);
    if (row >= limit_of(walk, slots, expert)) {
        slots->dropped += mine && fresh;
        slots->all_dropped += fresh;
        return;
    }
    slots->row_of[entry] = (int32_t)row;
    if (!mine) return;
    slots->counts[expert - slots->first_expert]++;
    if (fresh) record_slot(slots, row, (Row){ROW_SLOT, source, (int32_t)token, k, expert});
}

static void place_entries(Walk *walk, Slots *slots) {
    const Routing *routing = walk->routing;
    for (int source = 0; source < routing->num_ranks; source++) {
        for (int r = 0; has_fixed_blocks(slots) && r < routing->num_ranks; r++)
            walk->flat[r] = source * slots->block_rows;
        for (int64_t t = 0; t < routing->tokens[source]; t++) {
            for (int r = 0; r < routing->num_ranks; r++)
                walk->last_row[r] = -1;
            for (int k = 0; k < routing->top_k; k++)
                place_entry(walk, slots, source, t, k);
        }
    }
}

/* ---- the state of this rank's rows --------------------------------------------------------- */

/* Number of a source's tokens that name at least one expert of this rank. */
static int64_t count_source_rows(const Routing *routing, int rank, int source) {
    int64_t rows = 0;
    for (int64_t t = routing->first[source]; t < routing->first[source + 1]; t++) {
        bool here = false;
        for (int k = 0; k < routing->top_k; k++) {
            int32_t expert = routing->experts[t * routing->top_k + k];
            here = here || (expert >= 0 && routing_owner(routing, expert) == rank);
        }
        rows += here;
    }
    return rows;
}

static int num_blocks(const Walk *walk, const Slots *slots) {
    return slots_has_rows(slots->layout) ? walk->routing->num_ranks : slots->num_local;
}

/* Rows that a block needs. */
static int64_t needed_of(const Walk *walk, const Slots *slots, int block) {
    if (slots_has_rows(slots->layout)) return count_source_rows(walk->routing, slots->rank, block);
    return slab_rows(walk, walk->count[slots->first_expert + block]);
}

static void size_rows(const Walk *walk, Slots *slots) {
    int64_t capacity = walk->options->capacity, most = 0, all = 0;
    for (int i = 0; i < num_blocks(walk, slots); i++) {
        int64_t rows = needed_of(walk, slots, i);
        most = rows > most ? rows : most;
        all += rows;
    }
    slots->needed_rows = has_fixed_blocks(slots) ? most : all;
    slots->recv_rows = capacity ? least(all, capacity) : all;
    slots->num_rows = (capacity ? capacity : slots->recv_rows) + SLOTS_TAIL;
    if (has_fixed_blocks(slots))
        slots->recv_rows = slots->num_rows = num_blocks(walk, slots) * slots->block_rows;
}

static void mark_rows(Slots *slots, int64_t from, int64_t to, RowState state) {
    for (int64_t row = from; row < to && row < slots->num_rows; row++) {
        if (slots->rows[row].state == 0) slots->rows[row].state = state;
    }
}

/* Clamp the ends of the slabs to the capacity; mark padding and tail rows. */
static void finish_slabs(const Walk *walk, Slots *slots) {
    for (int l = 0; l < slots->num_local; l++) {
        int e = slots->first_expert + l;
        int64_t end = walk->start[e] + slab_rows(walk, walk->count[e]);
        slots->offsets[l] = (int32_t)least(walk->start[e], slots->recv_rows);
        slots->padded[l] = (int32_t)(least(end, slots->recv_rows) - slots->offsets[l]);
        mark_rows(slots, slots->offsets[l], slots->offsets[l] + slots->padded[l], ROW_PADDING);
    }
    slots->offsets[slots->num_local] = (int32_t)slots->recv_rows;
    mark_rows(slots, slots->recv_rows, slots->recv_rows + SLOTS_TAIL, ROW_TAIL);
}

static void finish_fixed_slabs(const Walk *walk, Slots *slots) {
    for (int l = 0; l < slots->num_local; l++) {
        int64_t start = l * slots->block_rows;
        int64_t padded = least(slab_rows(walk, slots->counts[l]), slots->block_rows);
        int64_t end = start + slots->block_rows;
        slots->offsets[l] = (int32_t)start;
        slots->padded[l] = (int32_t)padded;
        mark_rows(slots, start, start + padded, ROW_PADDING);
        mark_rows(slots, start + padded, least(start + padded + SLOTS_TAIL, end), ROW_TAIL);
    }
    slots->offsets[slots->num_local] = (int32_t)slots->recv_rows;
}

/* Set the offsets that entries would have if they were ordered by expert. */
static void order_entries(Slots *slots) {
    for (int l = 0; l < slots->num_local; l++) {
        slots->padded[l] = slots->counts[l];
        slots->offsets[l + 1] = slots->offsets[l] + slots->counts[l];
    }
}

static void finish_rows(Slots *slots) {
    order_entries(slots);
    mark_rows(slots, slots->recv_rows, slots->recv_rows + SLOTS_TAIL, ROW_TAIL);
}

static void finish_fixed_rows(Slots *slots) {
    order_entries(slots);
    for (int64_t begin = 0; begin < slots->num_rows; begin += slots->block_rows) {
        int64_t row = begin, end = begin + slots->block_rows;
        while (row < end && slots->rows[row].state == ROW_SLOT)
            row++;
        mark_rows(slots, row, least(row + SLOTS_TAIL, end), ROW_TAIL);
    }
}

static void finish(const Walk *walk, Slots *slots) {
    if (slots_has_rows(slots->layout))
        has_fixed_blocks(slots) ? finish_fixed_rows(slots) : finish_rows(slots);
    else
        has_fixed_blocks(slots) ? finish_fixed_slabs(walk, slots) : finish_slabs(walk, slots);
    mark_rows(slots, 0, slots->num_rows, ROW_UNUSED);
}

/* ---- memory -------------------------------------------------------------------------------- */

static int64_t *numbers(Pool *pool, int count) {
    return pool_alloc(pool, (size_t)count, sizeof(int64_t), "slot map");
}

static bool walk_alloc(Walk *walk) {
    const int experts = walk->routing->num_experts, ranks = walk->routing->num_ranks;
    walk->count = numbers(&walk->pool, experts);
    walk->start = numbers(&walk->pool, experts);
    walk->next = numbers(&walk->pool, experts);
    walk->flat = numbers(&walk->pool, ranks);
    walk->last_row = numbers(&walk->pool, ranks);
    return !walk->pool.failed;
}

static bool alloc_rows(const Routing *routing, Slots *slots) {
    const size_t local = (size_t)slots->num_local, word = sizeof(int32_t);
    const size_t entries = (size_t)(routing->first[routing->num_ranks] * routing->top_k);
    Pool *pool = &slots->pool;
    slots->row_of = pool_alloc(pool, entries, word, "slot map");
    slots->rows = pool_alloc(pool, (size_t)slots->num_rows, sizeof(Row), "slot map");
    slots->counts = pool_alloc(pool, local, word, "slot map");
    slots->padded = pool_alloc(pool, local, word, "slot map");
    slots->offsets = pool_alloc(pool, local + 1, word, "slot map");
    return !pool->failed;
}

bool slots_make(const Options *options, const Routing *routing, const int32_t *nodes, int rank,
                Slots *out) {
    *out = (Slots){.layout = (EpLayout)options->layout, .rank = rank};
    out->first_expert = routing_first_expert(routing, rank);
    out->num_local = routing_first_expert(routing, rank + 1) - out->first_expert;
    Walk walk = {.options = options, .routing = routing};
    Routing limited;
    bool ok = walk_alloc(&walk) && (!nodes || limit_messages(&walk, nodes, &limited, out));
    if (ok) {
        count_entries(&walk);
        const Layout *layout = tool_layout(out->layout);
        if (layout->is_sized)
            out->block_rows =
                options->rows_per_expert ? options->rows_per_expert : largest_slab(&walk);
        else if (layout->is_fixed)
            out->block_rows = routing->max_tokens > 0 ? routing->max_tokens : 1;
        place_slabs(&walk, out);
        size_rows(&walk, out);
        ok = out->num_rows < INT32_MAX ? alloc_rows(routing, out)
                                       : bench_refuse("the receive buffer of rank %d would need "
                                                      "%lld rows, expected less than 2^31",
                                                      rank, (long long)out->num_rows);
    }
    if (ok) {
        place_entries(&walk, out);
        finish(&walk, out);
    }
    pool_free(&walk.pool);
    return ok;
}

bool slots_reserve(Slots *slots, int64_t capacity) {
    int64_t rows = capacity + SLOTS_TAIL;
    if (rows <= slots->num_rows) return true;
    if (rows >= INT32_MAX)
        return bench_refuse("the receive buffer of rank %d would have %lld rows, expected less "
                            "than 2^31",
                            slots->rank, (long long)rows);
    Row *larger = pool_alloc(&slots->pool, (size_t)rows, sizeof(Row), "slot map");
    if (!larger) return false;
    memcpy(larger, slots->rows, (size_t)slots->num_rows * sizeof(Row));
    slots->rows = larger;
    int64_t from = slots->num_rows;
    slots->num_rows = rows;
    mark_rows(slots, from, rows, ROW_UNUSED);
    return true;
}

void slots_free(Slots *slots) {
    pool_free(&slots->pool);
}
