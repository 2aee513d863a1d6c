/* SPDX-License-Identifier: Apache-2.0 */
/* Experts that move to another placement. Each copy has bytes of its own, so that what comes tells
 * which copy it was. Walking over the places finds it by the rule of ep_weight.h. */
#include "ep/ep_weight.h"
#include "tests/cases/refusals.h"
#include "tests/cases/run.h"

TestSuite(handles_move, .init = be_quiet);

enum { TENSORS = 3, MOST_PLACES = 640, POISON = 0x5a, GUARD = 64 };

/** The maps of a move, and the place that each one's row comes from; -1: none does. */
typedef struct Moving {
    const Case *c;
    int32_t from[MOST_PLACES], to[MOST_PLACES];
    int source[MOST_PLACES], twin[MOST_PLACES];
    int given[16];
} Moving;

static int owner(const Moving *m, int place) {
    return world_owner(m->c, place);
}

static int lives(const Moving *m, int place) {
    return !case_is_masked(m->c, owner(m, place));
}

static int has_copy(const Moving *m, int expert) {
    int found = 0;
    for (int p = 0; p < m->c->physical; p++)
        found |= m->from[p] == expert && lives(m, p);
    return found;
}

static int nearest(const Moving *m, int place) {
    int best = -1, best_near = -1;
    for (int p = 0; p < m->c->physical; p++) {
        int a = owner(m, p), b = owner(m, place);
        int near = a == b ? 2 : case_node(m->c, a) == case_node(m->c, b);
        if (m->from[p] != m->to[place] || !lives(m, p)) continue;
        int fewer = near == best_near && m->given[a] < m->given[owner(m, best)];
        if (near > best_near || fewer) best = p, best_near = near;
    }
    return best;
}

static void find_sources(Moving *m) {
    memset(m->given, 0, sizeof(m->given));
    for (int p = 0; p < m->c->physical; p++) {
        m->source[p] = -1;
        if (m->to[p] >= 0 && lives(m, p)) m->source[p] = m->from[p] == m->to[p] ? p : -2;
        for (int q = 0; q < p && m->source[p] == -2; q++)
            if (m->to[q] == m->to[p] && owner(m, q) == owner(m, p) && m->source[q] >= 0 &&
                owner(m, m->source[q]) != owner(m, q))
                m->source[p] = m->source[q];
        if (m->source[p] != -2) continue;
        m->source[p] = nearest(m, p);
        if (owner(m, m->source[p]) != owner(m, p)) m->given[owner(m, m->source[p])]++;
    }
}

static void draw_maps(Moving *m, const Case *c, Map from, Map to, int seed) {
    Case a = *c, b = *c;
    a.map = from, b.map = to, a.map_seed = seed, b.map_seed = seed + 1;
    m->c = c;
    for (int p = 0; p < c->physical; p++)
        m->from[p] = world_map(&a, p), m->to[p] = world_map(&b, p);
    for (int p = 0; p < c->physical; p++)
        if (m->to[p] >= 0 && !has_copy(m, m->to[p])) m->to[p] = -1;
    find_sources(m);
}

/* ---- tensors ------------------------------------------------------------------------------- */

/** Rows of odd lengths; the first has more chunks than a ring has records. */
static const struct {
    EpType type;
    int ndim;
    int64_t shape[3], bytes;
} shapes[TENSORS] = {{EP_TYPE_BF16, 3, {0, 131, 33}, 2 * 131 * 33},
                     {EP_TYPE_UINT8, 2, {0, 773}, 773},
                     {EP_TYPE_FP32, 1, {0}, 4}};

/* Quick, since all bytes are drawn thrice. */
static unsigned char byte_of(int place, int tensor, int64_t at) {
    uint32_t x = (uint32_t)at * 2654435761u + (uint32_t)(place * TENSORS + tensor) * 0x9e3779b9u;
    return (unsigned char)(((x ^ x >> 15) * 0x85ebca6bu) >> 24);
}

static EpTensor open_tensor(int tensor, int places, int shift) {
    int64_t bytes = places * shapes[tensor].bytes;
    EpTensor t = ep_tensor_3d(NULL, shapes[tensor].type, places, shapes[tensor].shape[1],
                              shapes[tensor].shape[2]);
    char *memory = aligned_alloc(64, (size_t)(bytes + shift + GUARD + 63) / 64 * 64);
    memset(memory, POISON, (size_t)(bytes + shift + GUARD));
    t.ndim = shapes[tensor].ndim, t.data = memory + shift;
    return t;
}

/** One rank's tensors; those of `out` start on few bytes. */
typedef struct Held {
    EpTensor weights[TENSORS], out[TENSORS];
    int first, places;
} Held;

static Held hold(const EpGroup *group) {
    EpGroupInfo info = group_info(group);
    Held h = {.first = info.first_expert, .places = info.num_local_experts};
    for (int t = 0; t < TENSORS; t++) {
        h.weights[t] = open_tensor(t, h.places, 0), h.out[t] = open_tensor(t, h.places, 4);
        for (int64_t at = 0; at < h.places * shapes[t].bytes; at++)
            ((unsigned char *)h.weights[t].data)[at] =
                byte_of(h.first + (int)(at / shapes[t].bytes), t, at % shapes[t].bytes);
    }
    return h;
}

static void drop(Held *h) {
    for (int t = 0; t < TENSORS; t++)
        free(h->weights[t].data), free((char *)h->out[t].data - 4);
}

/* Check rows and guards. A place without a source (NULL: all) has its own row, if these are `kept`.
 */
static void check_rows(const Held *h, const EpTensor *tensors, const int *source, int kept) {
    for (int t = 0; t < TENSORS; t++) {
        const unsigned char *data = tensors[t].data;
        int64_t bytes = shapes[t].bytes, all = h->places * bytes, wrong = 0;
        for (int64_t at = 0; at < all + GUARD; at++) {
            int place = at < all ? h->first + (int)(at / bytes) : -1;
            int from = place < 0 || !source ? -1 : source[place];
            if (from < 0 && kept) from = place;
            wrong += data[at] != (from < 0 ? POISON : byte_of(from, t, at % bytes));
        }
        CHECK(!wrong, "tensor %d: %lld wrong bytes", t, (long long)wrong);
    }
}

/* On a loaded machine a rank may come later than a short deadline. */
static EpStatus mask_soon(EpGroup *group, const uint32_t *alive) {
    EpStatus status = EP_ERR_TIMEOUT;
    for (int i = 0; i < 20 && status == EP_ERR_TIMEOUT; i++)
        status = ep_group_mask(group, alive, NULL);
    return status;
}

/* ---- moves --------------------------------------------------------------------------------- */

static void move_once(EpGroup *group, const Moving *m, int in_place) {
    int most = (m->c->physical + m->c->ranks - 1) / m->c->ranks;
    int64_t bytes = (in_place == 2 ? 900 : 64) * most;
    Held h = hold(group);
    EpTensor workspace =
        ep_tensor_1d(aligned_alloc(64, (size_t)(bytes / 64 + 2) * 64), EP_TYPE_UINT8, bytes);
    memset(workspace.data, POISON, (size_t)bytes + GUARD);
    CHECK_OK(ep_weight_move(group, m->from, m->to, h.weights, TENSORS, in_place ? &workspace : NULL,
                            NULL, in_place ? NULL : h.out));
    check_rows(&h, h.weights, in_place ? m->source : NULL, 1);
    if (!in_place) check_rows(&h, h.out, m->source, 0);
    for (int i = 0; i < GUARD; i++)
        CHECK(((char *)workspace.data)[bytes + i] == POISON, "past the workspace");
    CHECK_OK(ep_group_status(group, NULL));
    free(workspace.data);
    drop(&h);
}

static void move_often(const EpBootstrap *bootstrap, void *given) {
    static const Map maps[][2] = {{MAP_IDENTITY, MAP_RANDOM},   {MAP_RANDOM, MAP_RANDOM},
                                  {MAP_RANDOM, MAP_EVERYWHERE}, {MAP_EVERYWHERE, MAP_HALF},
                                  {MAP_HALF, MAP_EVERYWHERE},   {MAP_EVERYWHERE, MAP_EVERYWHERE},
                                  {MAP_HALF, MAP_NOBODY}};
    Case c = case_complete(*(const Case *)given);
    EpGroup *group = open_group(bootstrap, &c);
    Moving *m = calloc(1, sizeof(*m));
    uint32_t alive = 0, all = (1u << c.ranks) - 1;
    for (int r = 0; r < c.ranks; r++)
        alive |= (uint32_t)!case_is_masked(&c, r) << r;
    int takes_part = !case_is_masked(&c, bootstrap->rank);
    if (c.masks && takes_part) REQUIRE_OK(mask_soon(group, &alive));
    int moves = c.physical > 100 ? 1 : (int)LENGTH(maps);
    for (int i = 0; i < moves && takes_part && !check_failure()[0]; i++) {
        draw_maps(m, &c, maps[i][0], maps[i][1], (int)c.seed + i);
        check_note("move %d of %s", i, case_describe(&c));
        for (int in_place = 0; in_place < 3; in_place++)
            move_once(group, m, in_place);
    }
    free(m);
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    if (c.masks) CHECK_OK(mask_soon(group, &all));
    ep_group_destroy(group);
}

static void run_moves(Case c) {
    if (c.masks && c.nodes[0] && TEST_BACKEND == EP_BACKEND_CUDA) return; /* refused at create */
    GPU_NEEDS(c.ranks);
    run_body_of(move_often, &c);
}

/* Fewer places than ranks, numbers that ranks do not divide, more rows than a batch has. */
TextsTest(handles_move, one_node, run_moves, "ranks=3 experts=7 physical=11",
          "ranks=1 experts=5 physical=9", "ranks=4 experts=3 physical=8",
          "ranks=3 experts=2 physical=2",
          "ranks=4 experts=16 physical=18 max_tokens=200 hidden=64");
TextsTest(handles_move, more_than_a_batch, run_moves, "ranks=2 experts=560 physical=601");
TextsTest(handles_move, nodes, run_moves, "ranks=4 nodes=0011 experts=7 physical=15",
          "ranks=4 nodes=0101 experts=9 physical=22", "ranks=3 nodes=010 experts=4 physical=10");
TextsTest(handles_move, masked, run_moves, "ranks=4 experts=5 physical=13 masks=1 masked=0100",
          "ranks=3 experts=16 physical=18 masks=1 masked=100 max_tokens=200 hidden=64 by_entry=1",
          "ranks=4 nodes=0011 experts=5 physical=11 masks=1 masked=1001");

/* A rank does not come. The others mask it, and restore its experts from their copies. The deadline
 * is that of the second move, too. */
GroupTest(handles_move, goes_on_without_a_rank, 3, "experts=4 physical=9 masks=1 timeout=5") {
    Case c = case_complete(case_of("ranks=3 experts=4 physical=9 masks=1 masked=001"));
    Moving *m = calloc(1, sizeof(*m));
    const int32_t from[] = {0, 1, 2, 3, 0, 1, 3, 2, 1}, to[] = {3, 2, 1, 0, 2, 3, 0, 1, 2};
    const uint32_t alive = 3, all = 7;
    m->c = &c;
    memcpy(m->from, from, sizeof(from)), memcpy(m->to, to, sizeof(to));
    find_sources(m);
    for (int i = 0; i < 2 && bootstrap->rank < 2; i++) {
        Held h = hold(group);
        EpStatus status = ep_weight_move(group, from, to, h.weights, TENSORS, NULL, NULL, h.out);
        if (status == EP_OK) status = ep_group_status(group, NULL); /* GPUs tell later */
        CHECK(status == (i ? EP_OK : EP_ERR_TIMEOUT), "%s", ep_last_error());
        check_rows(&h, h.weights, NULL, 1);
        if (i) check_rows(&h, h.out, m->source, 0);
        if (!i) REQUIRE_OK(mask_soon(group, &alive));
        drop(&h);
    }
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    REQUIRE_OK(mask_soon(group, &all));
    free(m);
}

static void in_short_messages(void) {
    HOST_ONLY("no LIBEP_STAGE_BYTES on GPUs");
    setenv("LIBEP_STAGE_BYTES", "3000", 1);
    run_moves(case_of("ranks=3 nodes=001 experts=7 physical=11"));
    unsetenv("LIBEP_STAGE_BYTES");
}
CasesTest(handles_move, short_messages, in_short_messages());

/* ---- refused ------------------------------------------------------------------------------- */

/** Arguments of a group with 3 experts in 4 places, with the memory that they name. */
typedef struct Arguments {
    EpGroup *group;
    int32_t from[4], to[4], num_weights, has_maps;
    EpTensor weights[2], out[2], workspace;
    const EpTensor *weights_given, *out_given, *workspace_given;
    _Alignas(64) uint8_t memory[3][512];
} Arguments;

static EpStatus move(void *context, const char *call) {
    Arguments *a = context;
    (void)call;
    return ep_weight_move(a->group, a->has_maps & 1 ? a->from : NULL,
                          a->has_maps & 2 ? a->to : NULL, a->weights_given, a->num_weights,
                          a->workspace_given, NULL, a->out_given);
}

GroupTest(handles_move, refuses, 1, "experts=3 physical=4") {
    static const TextField fields[] = {
        TEXT_FIELD(Arguments, from[0], NULL),     TEXT_FIELD(Arguments, from[2], NULL),
        TEXT_FIELD(Arguments, to[1], NULL),       TEXT_FIELD(Arguments, to[3], NULL),
        TEXT_FIELD(Arguments, num_weights, NULL), TEXT_FIELD(Arguments, has_maps, NULL)};
    static const Member members[] = {{"", fields, LENGTH(fields), 0, 0},
                                     TENSOR("weights[0]", Arguments, weights[0], weights_given),
                                     TENSOR("out[0]", Arguments, out[0], out_given),
                                     {"weights[1]", NULL, 0, offsetof(Arguments, weights[1]), 0},
                                     {"out[1]", NULL, 0, offsetof(Arguments, out[1]), 0},
                                     TENSOR("workspace", Arguments, workspace, workspace_given)};
    const Subject subject = {members, LENGTH(members), sizeof(Arguments), move};
    Arguments *a = aligned_alloc(64, sizeof(*a));
    *a = (Arguments){group, {0, 1, 2, -1}, {2, 2, 1, 0}, 2, 3};
    a->weights[0] = ep_tensor_3d(a->memory[0], EP_TYPE_BF16, 4, 6, 8);
    a->weights[1] = ep_tensor_1d(a->memory[0] + 448, EP_TYPE_FP32, 4);
    a->out[0] = ep_tensor_3d(a->memory[1], EP_TYPE_BF16, 4, 6, 8);
    a->out[1] = ep_tensor_1d(a->memory[1] + 448, EP_TYPE_FP32, 4);
    a->workspace = ep_tensor_1d(a->memory[2], EP_TYPE_UINT8, 512);
    a->weights_given = a->weights, a->workspace_given = &a->workspace;
    check_refusals("move_in_place", &subject, a);
    CHECK_OK(move(a, NULL));
    a->out_given = a->out, a->workspace_given = NULL;
    check_refusals("move", &subject, a);
    CHECK_OK(move(a, NULL));
    EpGroup *other = open_group_of(bootstrap, "experts=4");
    a->group = other;
    CHECK_REFUSED(move(a, NULL), EP_ERR_UNSUPPORTED,
                  "group: expected one with config.num_physical");
    ep_group_destroy(other);
    free(a);
}

#define DIFFERS "experts=5 physical=9"

static EpStatus move_and_wait(const EpBootstrap *bootstrap, EpGroup *group, int seed, int bytes) {
    Case c = case_complete(case_of("ranks=%d %s", bootstrap->size, DIFFERS));
    Moving *m = calloc(1, sizeof(*m));
    Held h = hold(group);
    EpTensor workspace = ep_tensor_1d(aligned_alloc(64, 4096), EP_TYPE_UINT8, bytes);
    draw_maps(m, &c, MAP_IDENTITY, MAP_RANDOM, seed);
    EpStatus status =
        ep_weight_move(group, m->from, m->to, h.weights, TENSORS, &workspace, NULL, NULL);
    if (status == EP_OK) status = ep_group_status(group, NULL);
    free(workspace.data), free(m);
    drop(&h);
    return status;
}

GroupTest(handles_move, maps_differ, 3, DIFFERS) {
    CHECK_REFUSED(move_and_wait(bootstrap, group, bootstrap->rank == 2, 1024), EP_ERR_ORDER,
                  "weight move: ", "rank 2");
}
GroupTest(handles_move, workspaces_differ, 3, DIFFERS) {
    CHECK_REFUSED(move_and_wait(bootstrap, group, 0, bootstrap->rank == 1 ? 2048 : 1024),
                  EP_ERR_ORDER, "weight move: ", "rank 1");
}
