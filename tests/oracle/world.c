/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/oracle/world.h"

#include "tests/harness/random.h"
#include "tests/oracle/inputs.h"

/* Walk the ranks in order. Each takes its part of the remaining experts, rounded up. */
static int walk_owner(const Case *c, int64_t expert) {
    int64_t left = case_physical(c), end = 0;
    for (int rank = 0; rank < c->ranks; rank++) {
        int64_t ranks_left = c->ranks - rank;
        int64_t count = (left + ranks_left - 1) / ranks_left;
        left -= count;
        end += count;
        if (expert < end) return rank;
    }
    abort();
}

/* A thread keeps the owners of the case that it asked for last: walks of a thousand ranks are long.
 */
int world_owner(const Case *c, int64_t expert) {
    enum { MOST = 2048 };
    static _Thread_local int ranks, experts, owner[MOST];
    int all = case_physical(c);
    if (all > MOST) return walk_owner(c, expert);
    for (int e = 0; (ranks != c->ranks || experts != all) && e < all; e++)
        owner[e] = walk_owner(c, e);
    ranks = c->ranks, experts = all;
    return owner[expert];
}

int world_map(const Case *c, int place) {
    Random random = random_stream((uint64_t)c->map_seed, (uint64_t)place, 0);
    int rank = world_owner(c, place), drawn = (int)random_below(&random, c->experts + 2);
    switch (c->map) {
    case MAP_RANDOM:
        return drawn < c->experts ? drawn : -1;
    case MAP_EVERYWHERE:
        return place == 0 || world_owner(c, place - 1) != rank ? 0 : place % c->experts;
    case MAP_HALF:
        return rank % 2 ? -1 : (place + c->map_seed) % c->experts;
    case MAP_NOBODY:
        return -1;
    default:
        return place < c->experts ? place : -1;
    }
}

/* How near a place is to a rank: on it, on its node, elsewhere. */
static int nearness(const Case *c, int place, int rank) {
    int owner = world_owner(c, place);
    if (c->choice == EP_CHOICE_SPREAD) return 0;
    return (owner == rank) + (case_node(c, owner) == case_node(c, rank));
}

/* Number the copies of an expert that are as near as any, in order, and take one. */
static int64_t take_copy(const Case *c, int64_t expert, int rank, int token) {
    int best = -1, copies = 0;
    for (int p = 0; p < case_physical(c); p++)
        if (world_map(c, p) == expert && nearness(c, p, rank) > best)
            best = nearness(c, p, rank), copies = 0;
    for (int p = 0; p < case_physical(c); p++)
        copies += world_map(c, p) == expert && nearness(c, p, rank) == best;
    int left = copies ? (rank + token) % copies : -1;
    for (int p = 0; p < case_physical(c) && copies; p++)
        if (world_map(c, p) == expert && nearness(c, p, rank) == best && left-- == 0) return p;
    return -1;
}

static void take_copies(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    int64_t entries = (int64_t)me->rows * c->top_k;
    me->taken = calloc((size_t)entries + 1, sizeof(int64_t));
    for (int64_t i = 0; i < entries; i++) {
        int is_expert = me->index[i] >= 0 && me->index[i] < c->experts;
        me->taken[i] = !is_expert    ? -1
                       : c->physical ? take_copy(c, me->index[i], rank, (int)(i / c->top_k))
                                     : me->index[i];
    }
}

int world_is_strange(const World *world, int token) {
    return world->c.strange && token % 3 == 1;
}

int world_live(const World *world, int rank, int token, int k) {
    const RankWorld *me = &world->rank[rank];
    const int64_t *named = me->index + (int64_t)token * world->c.top_k;
    int64_t expert = named[k];
    for (int lower = 0; world->c.merged && lower < k; lower++)
        if (named[lower] == expert) return 0;
    return token < me->tokens && me->taken[(int64_t)token * world->c.top_k + k] >= 0 &&
           !(me->lost && me->lost[(int64_t)token * world->c.top_k + k]);
}

/* Lose a token's entries on a node, named by its lowest rank, and count them as their ranks do. */
static void lose_token(World *world, int rank, int token, int node) {
    RankWorld *me = &world->rank[rank];
    int last = -1;
    for (int owner = 0; owner < world->c.ranks; owner++)
        for (int k = 0; k < world->c.top_k && case_node(&world->c, owner) == node; k++) {
            int64_t at = (int64_t)token * world->c.top_k + k;
            if (!world_live(world, rank, token, k)) continue;
            if (world_owner(&world->c, me->taken[at]) != owner) continue;
            world->rank[owner].dropped += !case_has_rows(&world->c) || last != owner;
            me->lost[at] = 1, last = owner;
        }
}

static int needs_node(const World *world, int rank, int token, int node) {
    const int64_t *named = world->rank[rank].taken + (int64_t)token * world->c.top_k;
    for (int k = 0; k < world->c.top_k; k++)
        if (world_live(world, rank, token, k) &&
            case_node(&world->c, world_owner(&world->c, named[k])) == node)
            return 1;
    return 0;
}

/* Lose what the messages of one rank have no room for. */
static void fill_messages(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    me->lost = calloc((size_t)me->rows * (size_t)c->top_k + 1, 1);
    for (int node = 0; node < c->ranks && c->node_rows; node++) {
        int places = c->node_rows;
        if (case_node(c, node) != node || case_node(c, rank) == node) continue;
        for (int t = 0; t < me->tokens; t++)
            if (needs_node(world, rank, t, node) && places-- <= 0) lose_token(world, rank, t, node);
    }
}

int world_writes(const World *world, const Row *row) {
    if (row->kind == ROW_TAIL) return world->c.zero_tail == EP_TAIL_ZERO;
    return row->kind == ROW_FILLED || world->c.padding != EP_PADDING_KEEP;
}

int world_row_weights(const Case *c) {
    return case_has_rows(c) ? c->top_k : 1;
}

static void find_experts(World *world, int rank) {
    RankWorld *me = &world->rank[rank];
    me->first_expert = -1;
    for (int e = 0; e < case_physical(&world->c); e++) {
        if (world_owner(&world->c, e) != rank) continue;
        if (me->first_expert < 0) me->first_expert = e;
        me->num_experts++;
    }
}

/* Walk the receiving rank's slots in order; call `visit` for each live entry of an expert. */
typedef void (*Visit)(World *world, int rank, int local_expert, int source, int token, int k,
                      void *context);

static void walk_expert(World *world, int rank, int local, Visit visit, void *context) {
    int64_t expert = world->rank[rank].first_expert + local;
    for (int source = 0; source < world->c.ranks; source++) {
        const RankWorld *from = &world->rank[source];
        for (int t = 0; t < from->tokens; t++)
            for (int k = 0; k < world->c.top_k; k++)
                if (from->taken[(int64_t)t * world->c.top_k + k] == expert &&
                    world_live(world, source, t, k))
                    visit(world, rank, local, source, t, k, context);
    }
}

/* Rows of one slab: `next` is the first free one. Rows from `limit` on are dropped. */
typedef struct Slab {
    int64_t next, limit;
} Slab;

static void assign_slot(World *world, int rank, int local, int source, int token, int k,
                        void *context) {
    Slab *slab = context;
    RankWorld *me = &world->rank[rank];
    int64_t row = slab->next++;
    if (row >= slab->limit) {
        me->dropped++;
        return;
    }
    me->count[local]++;
    me->from[(int64_t)local * world->c.ranks + source]++;
    me->row[row] = (Row){ROW_FILLED, source, token, k};
    world->rank[source].position[(int64_t)token * world->c.top_k + k] = (Position){rank, row};
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t pad(int64_t rows, int64_t alignment) {
    while (rows % alignment)
        rows++;
    return rows;
}

static void mark_padding(RankWorld *me, int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++)
        me->row[row].kind = ROW_PADDING;
}

static void plan_expert_major(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    int64_t limit = c->capacity ? c->capacity : INT64_MAX, start = 0;
    for (int e = 0; e < me->num_experts; e++) {
        Slab slab = {start, limit};
        walk_expert(world, rank, e, assign_slot, &slab);
        int64_t end = start + pad(slab.next - start, c->alignment);
        mark_padding(me, slab.next, least(end, limit));
        me->offset[e] = least(start, limit);
        me->padded[e] = least(end, limit) - me->offset[e];
        start = end;
    }
    me->offset[me->num_experts] = least(start, limit);
    me->needed_rows = start;
    me->recv_rows = least(start, limit);
}

static void plan_batched(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    for (int e = 0; e < me->num_experts; e++) {
        int64_t start = e * c->rows_per_expert, end = start + c->rows_per_expert;
        Slab slab = {start, end};
        walk_expert(world, rank, e, assign_slot, &slab);
        int64_t needed = pad(slab.next - start, c->alignment);
        int64_t padded = least(pad(me->count[e], c->alignment), c->rows_per_expert);
        mark_padding(me, start + me->count[e], start + padded);
        me->offset[e] = start;
        me->padded[e] = padded;
        if (needed > me->needed_rows) me->needed_rows = needed;
    }
    me->recv_rows = me->num_experts * c->rows_per_expert;
    me->offset[me->num_experts] = me->recv_rows;
}

/* Assign a row to a token's entries on a rank; a row from `limit` on is dropped. Returns whether
 * the token has any entries there. */
static int assign_flat_row(World *world, int rank, int source, int token, int64_t row,
                           int64_t limit) {
    RankWorld *me = &world->rank[rank];
    int entries = 0;
    for (int k = 0; k < world->c.top_k; k++) {
        int64_t i = (int64_t)token * world->c.top_k + k, expert = world->rank[source].taken[i];
        if (!world_live(world, source, token, k) || world_owner(&world->c, expert) != rank)
            continue;
        entries++;
        if (row >= limit) continue;
        me->count[expert - me->first_expert]++;
        me->from[(expert - me->first_expert) * world->c.ranks + source]++;
        me->row[row] = (Row){ROW_FILLED, source, token, -1};
        world->rank[source].position[i] = (Position){rank, row};
    }
    if (entries && row >= limit) me->dropped++;
    return entries > 0;
}

/* Set the offsets that entries would have if they were ordered by expert. */
static void order_entries(RankWorld *me) {
    for (int e = 0; e < me->num_experts; e++) {
        me->padded[e] = me->count[e];
        me->offset[e + 1] = me->offset[e] + me->count[e];
    }
}

static void plan_flat(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    int64_t limit = c->capacity ? c->capacity : INT64_MAX;
    for (int source = 0; source < c->ranks; source++)
        for (int t = 0; t < world->rank[source].tokens; t++)
            me->needed_rows += assign_flat_row(world, rank, source, t, me->needed_rows, limit);
    me->recv_rows = least(me->needed_rows, limit);
    order_entries(me);
}

static void plan_rank_major(World *world, int rank) {
    const Case *c = &world->c;
    RankWorld *me = &world->rank[rank];
    me->recv_rows = (int64_t)c->ranks * (c->max_tokens + c->spare_tokens);
    for (int source = 0; source < c->ranks; source++) {
        int64_t begin = (int64_t)source * c->max_tokens, row = begin;
        for (int t = 0; t < world->rank[source].tokens; t++)
            row += assign_flat_row(world, rank, source, t, row, INT64_MAX);
        if (row - begin > me->needed_rows) me->needed_rows = row - begin;
    }
    order_entries(me);
}

static const CaseLayout layouts[] = {
    [EP_LAYOUT_EXPERT_MAJOR] = {plan_expert_major, .blocks = BLOCKS_PACKED},
    [EP_LAYOUT_FLAT] = {plan_flat, .has_rows = 1, .blocks = BLOCKS_PACKED},
    [EP_LAYOUT_BATCHED] = {plan_batched, .blocks = BLOCKS_OF_ROWS},
    [EP_LAYOUT_RANK_MAJOR] = {plan_rank_major, 1, 1, BLOCKS_OF_TOKENS},
};

const CaseLayout *case_layout(const Case *c) {
    return &layouts[c->layout];
}

static void count_sources(const World *world, RankWorld *me) {
    me->from_rows = calloc((size_t)world->c.ranks, sizeof(int64_t));
    for (int64_t row = 0; row < me->buffer_rows; row++)
        if (me->row[row].kind == ROW_FILLED) me->from_rows[me->row[row].source]++;
}

/* Returns an upper bound of the rows of any plan. */
static int64_t most_rows(const World *world, const RankWorld *me) {
    const Case *c = &world->c;
    if (case_block_rows(c))
        return (case_has_rows(c) ? c->ranks : me->num_experts) * case_block_rows(c);
    int64_t entries = 0;
    for (int r = 0; r < c->ranks; r++)
        entries += (int64_t)world->rank[r].rows * c->top_k;
    return entries + (int64_t)me->num_experts * c->alignment + c->capacity;
}

static int64_t buffer_rows(const World *world, const RankWorld *me) {
    const Case *c = &world->c;
    if (case_block_rows(c))
        return (case_has_rows(c) ? c->ranks : me->num_experts) * case_block_rows(c);
    return (c->capacity ? c->capacity : me->recv_rows) + c->spare_rows;
}

static void plan_allocate(World *world, int rank) {
    RankWorld *me = &world->rank[rank];
    size_t experts = (size_t)me->num_experts + 1;
    size_t entries = (size_t)me->rows * (size_t)world->c.top_k + 1;
    me->count = calloc(experts, sizeof(int64_t));
    me->padded = calloc(experts, sizeof(int64_t));
    me->from = calloc(experts * (size_t)world->c.ranks, sizeof(int64_t));
    me->offset = calloc(experts, sizeof(int64_t));
    int64_t rows = most_rows(world, me) + world->c.spare_rows;
    me->row = calloc((size_t)rows + 1, sizeof(Row));
    me->position = calloc(entries, sizeof(Position));
    for (size_t i = 0; i < entries; i++)
        me->position[i].row = -1;
}

World *world_new(const Case *c) {
    World *world = calloc(1, sizeof(*world));
    world->c = case_complete(*c);
    world->rank = calloc((size_t)world->c.ranks, sizeof(*world->rank));
    for (int r = 0; r < world->c.ranks; r++)
        find_experts(world, r);
    for (int r = 0; r < world->c.ranks; r++)
        inputs_make_tokens(world, r);
    for (int r = 0; r < world->c.ranks; r++)
        take_copies(world, r), fill_messages(world, r);
    for (int r = 0; r < world->c.ranks; r++)
        plan_allocate(world, r);
    for (int r = 0; r < world->c.ranks; r++)
        case_layout(&world->c)->plan(world, r);
    for (int r = 0; r < world->c.ranks; r++) {
        world->rank[r].buffer_rows = buffer_rows(world, &world->rank[r]);
        count_sources(world, &world->rank[r]);
        inputs_spoil_weights(world, r);
        inputs_make_rows(world, r);
    }
    return world;
}

void world_free(const World *world) {
    for (int r = 0; r < world->c.ranks; r++) {
        const RankWorld *me = &world->rank[r];
        void *owned[] = {me->index,     me->token,      me->scale,       me->weight,
                         me->sent,      me->sent_scale, me->count,       me->from,
                         me->padded,    me->offset,     me->row,         me->position,
                         me->grad_out,  me->expert_out, me->slot_weight, me->grad_slot_weight,
                         me->from_rows, me->lost,       me->bias[0],     me->bias[1],
                         me->taken};
        for (size_t i = 0; i < sizeof(owned) / sizeof(owned[0]); i++)
            free(owned[i]);
    }
    free(world->rank);
    free((void *)(uintptr_t)world);
}
