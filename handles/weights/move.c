/* SPDX-License-Identifier: Apache-2.0 */
/* ep_weight_move: checks the arguments, plans, and goes through the rows. */
#include "handles/weights/move.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep/ep_weight.h"
#include "handles/operation.h"

#define WORKSPACE_ALIGNMENT 64
#define SLOT_UNIT 64

/* ---- plan ---------------------------------------------------------------------------------- */

/** What the plan is made from. */
typedef struct Planning {
    const EpGroup *group;
    EpMovePlan *plan;
    const int32_t *to;
    int32_t *begin;  /* [E + 1] where the copies of each expert begin in `copies` */
    int32_t *copies; /* [P] living places by expert, ascending */
    int32_t *latest; /* [E] the latest place that gets the expert from another rank, or -1 */
    int32_t *given;  /* [R] rows that each rank gives */
} Planning;

static int32_t owner_of(const EpMovePlan *plan, int32_t place) {
    return ep_placement_owner(&plan->placement, place);
}

static int takes_part(const Planning *p, int32_t place) {
    return ep_mask_has(&p->group->alive, owner_of(p->plan, place));
}

static void list_copies(const Planning *p, const int32_t *from) {
    int32_t experts = p->group->config.num_experts, places = p->plan->placement.num_experts;
    for (int32_t i = 0; i < places; i++)
        if (from[i] >= 0 && takes_part(p, i)) p->begin[from[i] + 1]++;
    for (int32_t e = 0; e < experts; e++)
        p->begin[e + 1] += p->begin[e], p->latest[e] = p->begin[e];
    for (int32_t i = 0; i < places; i++)
        if (from[i] >= 0 && takes_part(p, i)) p->copies[p->latest[from[i]]++] = i;
    memset(p->latest, 0xff, (size_t)experts * sizeof(*p->latest));
}

/* How good a copy is for a rank: on it, on its node, elsewhere. */
static int nearness(const Planning *p, int32_t owner, int32_t rank) {
    const int32_t *node = p->group->nodes.of;
    return (owner == rank) + (node[owner] == node[rank]);
}

/* Returns the copy of an expert that a place gets: the nearest, of those the one of the rank that
 * gives fewest, of those the lowest; -1: there is none. */
static int32_t choose_copy(const Planning *p, int32_t expert, int32_t place) {
    int32_t rank = owner_of(p->plan, place), best = -1, best_nearness = -1, fewest = 0;
    for (int32_t i = p->begin[expert]; i < p->begin[expert + 1]; i++) {
        int32_t owner = owner_of(p->plan, p->copies[i]);
        int near = nearness(p, owner, rank);
        if (near < best_nearness || (near == best_nearness && p->given[owner] >= fewest)) continue;
        best = p->copies[i], best_nearness = near, fewest = p->given[owner];
    }
    return best;
}

static int32_t choose_source(const Planning *p, const int32_t *from, int32_t place) {
    int32_t expert = p->to[place], twin = p->latest[expert];
    EpMovePlan *plan = p->plan;
    if (from[place] == expert) return place;
    if (twin >= 0 && owner_of(plan, twin) == owner_of(plan, place)) {
        plan->twin[place] = twin;
        return plan->source[twin];
    }
    int32_t source = choose_copy(p, expert, place);
    if (source < 0 || owner_of(plan, source) == owner_of(plan, place)) return source;
    p->given[owner_of(plan, source)]++;
    p->latest[expert] = place;
    plan->moved[plan->num_moved++] = place;
    return source;
}

static void number_slots(EpMovePlan *plan) {
    const EpPlacement *placement = &plan->placement;
    for (int32_t rank = 0; rank < placement->num_ranks; rank++) {
        int32_t slots = 0, first = ep_placement_first(placement, rank);
        for (int32_t p = first; p < first + ep_placement_count(placement, rank); p++) {
            int changes = plan->source[p] >= 0 && plan->source[p] != p;
            plan->slot[p] = changes && plan->twin[p] < 0 ? slots++ : -1;
        }
        plan->slots = (int32_t)ep_max(plan->slots, slots);
    }
}

static EpStatus choose_sources(const EpCall *call, const Planning *p, const int32_t *from) {
    EpMovePlan *plan = p->plan;
    for (int32_t i = 0; i < plan->placement.num_experts; i++) {
        plan->source[i] = plan->twin[i] = -1;
        if (p->to[i] < 0 || !takes_part(p, i)) continue;
        plan->source[i] = choose_source(p, from, i);
        if (plan->source[i] < 0)
            return ep_refuse(call, EP_ERR_ROUTING, "from",
                             "expected a copy of expert %d, which `to` names at %d, on a rank that "
                             "takes part, got none",
                             p->to[i], i);
    }
    number_slots(plan);
    return EP_OK;
}

/* Lay the arrays out in one block, which the plan begins with: plan->source. */
static int64_t lay_out(const EpGroup *group, void *block, Planning *p) {
    EpArena arena = {.base = (uintptr_t)block, .unit = 64};
    int32_t places = group->placement.num_experts, experts = group->config.num_experts;
    p->plan->source = ep_arena_array(&arena, places, sizeof(int32_t));
    p->plan->twin = ep_arena_array(&arena, places, sizeof(int32_t));
    p->plan->slot = ep_arena_array(&arena, places, sizeof(int32_t));
    p->plan->moved = ep_arena_array(&arena, places, sizeof(int32_t));
    p->plan->counts = ep_arena_array(&arena, group->size, 4 * sizeof(int32_t));
    p->copies = ep_arena_array(&arena, places, sizeof(int32_t));
    p->begin = ep_arena_array(&arena, experts + 1, sizeof(int32_t));
    p->latest = ep_arena_array(&arena, experts, sizeof(int32_t));
    p->given = ep_arena_array(&arena, group->size, sizeof(int32_t));
    return arena.bytes;
}

/* On success the caller frees plan->source. */
static EpStatus make_plan(const EpCall *call, const EpGroup *group, const int32_t *from,
                          const int32_t *to, EpMovePlan *plan) {
    *plan = (EpMovePlan){.placement = group->placement};
    Planning p = {.group = group, .plan = plan, .to = to};
    void *block = calloc(1, (size_t)lay_out(group, NULL, &p));
    if (!block)
        return ep_refuse(call, EP_ERR_NO_MEMORY, "to", "expected memory for a plan, got none");
    (void)lay_out(group, block, &p);
    list_copies(&p, from);
    EpStatus status = choose_sources(call, &p, from);
    if (status != EP_OK) free(block);
    return status;
}

/* ---- batches ------------------------------------------------------------------------------- */

/* Returns whether the limits of a batch leave room for one more row, and counts it. */
static int has_room(int32_t *sent, int32_t *got) {
    if (*sent == EP_MOVE_ROWS || *got == EP_MOVE_ROWS) return 0;
    ++*sent, ++*got;
    return 1;
}

/* Returns where the batch ends that begins at number `begin` of the moved places. Receivers come in
 * ascending order, so a pair's rows lie between two changes of the receiver. */
static int32_t end_batch(const EpMovePlan *plan, int32_t begin, int32_t *most) {
    int32_t ranks = plan->placement.num_ranks, at = begin, receiver = -1;
    int32_t *sent = plan->counts, *got = sent + ranks, *pair = got + ranks, *of = pair + ranks;
    memset(sent, 0, 4 * (size_t)ranks * sizeof(*sent));
    *most = 0;
    for (; at < plan->num_moved; at++) {
        int32_t place = plan->moved[at], source = owner_of(plan, plan->source[place]);
        receiver = owner_of(plan, place);
        if (!has_room(&sent[source], &got[receiver])) break;
        if (of[source] != receiver + 1) of[source] = receiver + 1, pair[source] = 0;
        *most = (int32_t)ep_max(*most, ++pair[source]);
    }
    return at;
}

/** A row that this rank sends to a peer, or gets from it. */
typedef struct PeerRow {
    int32_t peer, row;
} PeerRow;

/* Rows of a pair keep their order, which is the same at both ends. */
static void sort_by_peer(const PeerRow *given, int32_t count, int32_t ranks, EpMoveRows *rows) {
    int32_t at[EP_MAX_RANKS];
    rows->count = count;
    memset(rows->begin, 0, ((size_t)ranks + 1) * sizeof(*rows->begin));
    for (int32_t i = 0; i < count; i++)
        rows->begin[given[i].peer + 1]++;
    for (int32_t r = 0; r < ranks; r++)
        at[r] = rows->begin[r], rows->begin[r + 1] += at[r];
    for (int32_t i = 0; i < count; i++)
        rows->row[at[given[i].peer]++] = given[i].row;
}

static void list_rows(const EpMove *move, int32_t begin, int32_t end, EpMoveBatch *batch) {
    const EpMovePlan *plan = &move->plan;
    const EpGroup *group = move->group;
    PeerRow sent[EP_MOVE_ROWS], got[EP_MOVE_ROWS];
    int32_t num_sent = 0, num_got = 0;
    for (int32_t i = begin; i < end; i++) {
        int32_t place = plan->moved[i], source = plan->source[place];
        int32_t giver = owner_of(plan, source), receiver = owner_of(plan, place);
        int32_t row = move->in_place ? plan->slot[place] : place - group->first_expert;
        if (giver == group->rank)
            sent[num_sent++] = (PeerRow){receiver, source - group->first_expert};
        if (receiver == group->rank) got[num_got++] = (PeerRow){giver, row};
    }
    sort_by_peer(sent, num_sent, group->size, &batch->sent);
    sort_by_peer(got, num_got, group->size, &batch->got);
}

/* There is at least one batch, in which ranks compare what they are in. */
static EpStatus exchange_slice(const EpMove *move, const EpMover *mover, const EpMoveSlice *slice) {
    EpMoveBatch batch;
    int32_t begin = 0;
    do {
        int32_t end = end_batch(&move->plan, begin, &batch.most);
        list_rows(move, begin, end, &batch);
        EP_TRY(mover->exchange(mover->context, slice, &batch));
        begin = end;
    } while (begin < move->plan.num_moved);
    return EP_OK;
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* What this rank's places get of its own rows: with `out` all of it, in place to the workspace. */
static EpStatus copy_own(const EpMove *move, const EpMover *mover, const EpMoveSlice *s) {
    const EpMovePlan *plan = &move->plan;
    int32_t first = move->group->first_expert;
    for (int32_t i = 0; i < move->group->num_local; i++) {
        int32_t place = first + i, source = plan->source[place];
        int is_own = source >= 0 && owner_of(plan, source) == move->group->rank;
        if (!is_own || (move->in_place && source == place)) continue;
        int32_t row = move->in_place ? plan->slot[place] : i;
        EP_TRY(mover->copy(mover->context, s->to + row * s->to_step,
                           s->from + (source - first) * s->from_step, s->bytes));
    }
    return EP_OK;
}

/* In place: from the workspace to the places. With `out`: to those that have a twin. */
static EpStatus copy_on(const EpMove *move, const EpMover *mover, const EpMoveSlice *s,
                        char *rows) {
    const EpMovePlan *plan = &move->plan;
    int32_t first = move->group->first_expert;
    for (int32_t i = 0; i < move->group->num_local; i++) {
        int32_t place = first + i, twin = plan->twin[place];
        if (!move->in_place && twin < 0) continue;
        if (plan->source[place] < 0 || plan->source[place] == place) continue;
        int32_t row = move->in_place ? plan->slot[twin < 0 ? place : twin] : twin - first;
        EP_TRY(mover->copy(mover->context, rows + i * s->from_step, s->to + row * s->to_step,
                           s->bytes));
    }
    return EP_OK;
}

static EpStatus move_slice(const EpMove *move, const EpMover *mover, const EpMovedTensor *t,
                           int64_t at, int64_t bytes) {
    char *rows = move->in_place ? t->rows : t->out;
    EpMoveSlice slice = {.from = t->rows + at,
                         .to = move->in_place ? move->workspace : t->out + at,
                         .from_step = t->row,
                         .to_step = move->in_place ? move->slot_bytes : t->row,
                         .bytes = bytes};
    EP_TRY(exchange_slice(move, mover, &slice));
    EP_TRY(copy_own(move, mover, &slice));
    return copy_on(move, mover, &slice, rows + at);
}

EpStatus ep_move_run(const EpMove *move, const EpMover *mover) {
    int64_t most = move->in_place && move->plan.slots ? move->slot_bytes : INT64_MAX;
    most = ep_min(most, mover->most_bytes);
    for (const EpMovedTensor *t = move->tensors; t < move->tensors + move->num_tensors; t++) {
        int64_t at = 0;
        do {
            EP_TRY(move_slice(move, mover, t, at, ep_min(most, t->row - at)));
            at += most;
        } while (at < t->row);
    }
    return EP_OK;
}

/* ---- arguments ----------------------------------------------------------------------------- */

static EpStatus check_map(const EpCall *call, const EpGroup *group, const char *argument,
                          const int32_t *map, int64_t *hash) {
    uint64_t sum = 0;
    if (!map) return ep_refuse(call, EP_ERR_NULL, argument, "expected a map, got NULL");
    for (int32_t p = 0; p < group->placement.num_experts; p++) {
        if (map[p] < -1 || map[p] >= group->config.num_experts)
            return ep_refuse(call, EP_ERR_RANGE, argument, "expected -1 .. %d, got %d at %d",
                             group->config.num_experts - 1, map[p], p);
        sum += ep_copies_hash(p, map[p]);
    }
    *hash = (int64_t)ep_copies_hash_end(sum);
    return EP_OK;
}

/* Rows may have any number of bytes, and tensors begin at any element. */
static EpStatus check_rows(const EpCall *call, const EpGroup *group, const char *argument,
                           const EpTensor *t) {
    if (t->struct_size == sizeof(*t) && (t->ndim < 1 || t->ndim > EP_MAX_DIMS))
        return ep_refuse(call, EP_ERR_NDIM, argument, "expected 1 .. %d dimensions, got %d",
                         EP_MAX_DIMS, t->ndim);
    EP_TRY(ep_arg_tensor(call, argument, t, t->ndim));
    EP_TRY(ep_arg_dim(call, argument, t, 0, group->num_local, "L"));
    EP_TRY(ep_arg_alignment(call, argument, t, (int64_t)ep_type_bytes(t->type)));
    return ep_arg_memory(call, group, argument, t);
}

static EpStatus check_out(const EpCall *call, const EpGroup *group, const char *argument,
                          const EpTensor *out, const EpTensor *weight) {
    EP_TRY(check_rows(call, group, argument, out));
    EP_TRY(ep_arg_type(call, argument, out, weight->type));
    if (out->ndim != weight->ndim)
        return ep_refuse(call, EP_ERR_NDIM, argument, "expected %d dimensions, got %d",
                         weight->ndim, out->ndim);
    for (int32_t d = 1; d < out->ndim; d++)
        EP_TRY(ep_arg_dim(call, argument, out, d, weight->shape[d], "size"));
    return EP_OK;
}

static int64_t row_bytes(const EpTensor *t) {
    int64_t bytes = (int64_t)ep_type_bytes(t->type);
    for (int32_t d = 1; d < t->ndim; d++)
        bytes *= t->shape[d];
    return bytes;
}

static int overlap(const char *a, int64_t a_bytes, const char *b, int64_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && (uintptr_t)a < (uintptr_t)b + (uintptr_t)b_bytes &&
           (uintptr_t)b < (uintptr_t)a + (uintptr_t)a_bytes;
}

/* What a move writes lies apart from all else that it reads and writes. */
static EpStatus check_apart(const EpCall *call, const EpGroup *group, const EpMovedTensor *tensors,
                            int32_t count, int in_place) {
    char argument[32];
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = 0; j < count; j++) {
            const EpMovedTensor *a = &tensors[i], *b = &tensors[j];
            const char *written = in_place ? a->rows : a->out, *other = NULL;
            int64_t a_bytes = group->num_local * a->row, b_bytes = group->num_local * b->row;
            if (!in_place && j < i && overlap(written, a_bytes, b->out, b_bytes)) other = "out";
            if ((!in_place || j < i) && overlap(written, a_bytes, b->rows, b_bytes))
                other = "weights";
            if (!other) continue;
            snprintf(argument, sizeof(argument), "%s[%d]", in_place ? "weights" : "out", i);
            return ep_refuse(call, EP_ERR_ADDRESS, argument,
                             "expected other memory than %s[%d]'s, got some of it", other, j);
        }
    return EP_OK;
}

static EpStatus check_tensors(const EpCall *call, const EpGroup *group, const EpTensor *weights,
                              int32_t count, const EpTensor *out, EpMovedTensor *tensors) {
    char argument[32];
    if (!weights) return ep_refuse(call, EP_ERR_NULL, "weights[0]", "expected a tensor, got NULL");
    if (count < 1 || count > EP_MAX_MOVED)
        return ep_refuse(call, EP_ERR_RANGE, "num_weights", "expected 1 .. %d, got %d",
                         EP_MAX_MOVED, count);
    for (int32_t i = 0; i < count; i++) {
        snprintf(argument, sizeof(argument), "weights[%d]", i);
        EP_TRY(check_rows(call, group, argument, &weights[i]));
        tensors[i] = (EpMovedTensor){weights[i].data, NULL, row_bytes(&weights[i])};
        if (!out) continue;
        snprintf(argument, sizeof(argument), "out[%d]", i);
        EP_TRY(check_out(call, group, argument, &out[i], &weights[i]));
        tensors[i].out = out[i].data;
    }
    return check_apart(call, group, tensors, count, out == NULL);
}

static EpStatus check_workspace(const EpCall *call, const EpTensor *t, EpMove *move) {
    int64_t needed = (int64_t)move->plan.slots * SLOT_UNIT;
    if (!move->in_place) return EP_OK;
    EP_TRY(ep_arg_tensor(call, "workspace", t, 1));
    EP_TRY(ep_arg_type(call, "workspace", t, EP_TYPE_UINT8));
    if (t->shape[0] < needed)
        return ep_refuse(call, EP_ERR_BUFFER_SIZE, "workspace",
                         "expected at least %lld bytes, %d for each place that changes, got %lld",
                         (long long)needed, SLOT_UNIT, (long long)t->shape[0]);
    EP_TRY(ep_arg_alignment(call, "workspace", t, WORKSPACE_ALIGNMENT));
    EP_TRY(ep_arg_memory(call, move->group, "workspace", t));
    move->workspace = t->data, move->fact[3] = t->shape[0];
    if (move->plan.slots) move->slot_bytes = t->shape[0] / move->plan.slots / SLOT_UNIT * SLOT_UNIT;
    return EP_OK;
}

/* Ranks compare them. Who takes part belongs to what they move. */
static void hash_sizes(const EpGroup *group, EpMove *move) {
    uint64_t sum = 0;
    for (int32_t w = 0; w < ep_mask_words(group->size); w++)
        sum += ep_copies_hash(-1 - w, (int32_t)group->alive.word[w]);
    for (int32_t i = 0; i < move->num_tensors; i++)
        sum += ep_copies_hash(2 * i, (int32_t)move->tensors[i].row) +
               ep_copies_hash(2 * i + 1, (int32_t)(move->tensors[i].row >> 31));
    move->fact[2] = (int64_t)ep_copies_hash_end(sum);
}

EpStatus ep_weight_move(EpGroup *group, const int32_t *from, const int32_t *to,
                        const EpTensor *weights, int32_t num_weights, const EpTensor *workspace,
                        EpStream stream, const EpTensor *out) {
    EpCall call = {"ep_weight_move", -1};
    EpMovedTensor tensors[EP_MAX_MOVED];
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    call.rank = group->rank;
    EP_TRY(ep_group_usable(group));
    call.group = group;
    EpMove move = {.group = group,
                   .tensors = tensors,
                   .num_tensors = num_weights,
                   .in_place = out == NULL,
                   .stream = stream};
    if (group->config.num_physical == EP_DEFAULT)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "group",
                         "expected one with config.num_physical, got one without");
    EP_TRY(check_map(&call, group, "from", from, &move.fact[0]));
    EP_TRY(check_map(&call, group, "to", to, &move.fact[1]));
    EP_TRY(check_tensors(&call, group, weights, num_weights, out, tensors));
    hash_sizes(group, &move);
    EP_TRY(make_plan(&call, group, from, to, &move.plan));
    EpStatus status = check_workspace(&call, workspace, &move);
    if (status == EP_OK) {
        int before = ep_group_start(group, &(EpActivity){call.name, "group", 0, -1});
        status = group->backend->move_weights(&move);
        ep_group_stop(group, before, status);
    }
    free(move.plan.source);
    return status;
}
