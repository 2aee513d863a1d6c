/* SPDX-License-Identifier: Apache-2.0 */
/* ep_prepare on several nodes: sizes its tables, launches its kernels and the exchange. */
#include "handles/nodes/cuda/route.h"

#include "handles/nodes/cuda/relay.h"

_Static_assert(sizeof(EpRoutingHead) == 64, "the routing behind it is aligned");

int64_t ep_routing_message_bytes(const EpGroupConfig *config) {
    int64_t entries = (int64_t)config->max_tokens * config->max_top_k;
    return ep_round_up((int64_t)sizeof(EpRoutingHead) + entries * (int64_t)sizeof(int32_t), 64);
}

/* ---- tables -------------------------------------------------------------------------------- */

/** What the sizes of the tables follow from. */
typedef struct Sizes {
    int64_t group, chunks, tiles, columns, ranks, others, experts;
} Sizes;

static int32_t team_shift(int64_t top_k) {
    int32_t shift = 0;
    while (1 << shift < top_k)
        shift++;
    return shift;
}

static int32_t tiles_of(int32_t chunk, int64_t top_k) {
    int32_t tokens = EP_ROUTE_THREADS >> team_shift(top_k);
    return (chunk + tokens - 1) / tokens;
}

/* Lay the tables out at `memory`. Returns the number of integers. */
static int64_t lay_counts(const Sizes *s, int32_t *memory, EpRouteCounts *out) {
    EpArena arena = {.base = (uintptr_t)memory, .unit = 64};
    int64_t tiles = s->chunks * s->tiles, chunk_plans = s->chunks * s->ranks * s->ranks;
#define TAKE(field, count) out->field = ep_arena_array(&arena, count, sizeof(int32_t))
    TAKE(before, s->group * tiles * s->columns);
    TAKE(message_slots, tiles * s->others);
    TAKE(filled, s->chunks * s->others);
    TAKE(total, s->experts + s->ranks);
    TAKE(own, chunk_plans);
    TAKE(relayed, chunk_plans);
    TAKE(needed, s->group * s->chunks);
    TAKE(lost, 1);
    TAKE(sent, 1);
#undef TAKE
    return arena.bytes / (int64_t)sizeof(int32_t);
}

/* The experts of a node are at most as many as those of its ranks if all have the most. */
int64_t ep_route_counts(const EpGroupConfig *config, int32_t num_ranks, const EpNodeSizes *nodes) {
    EpPlacement placement = ep_config_placement(config, num_ranks);
    int64_t most = (int64_t)nodes->ranks * ep_placement_most(&placement);
    EpRouteCounts counts;
    Sizes s = {.group = num_ranks,
               .chunks = (config->max_tokens + nodes->chunk - 1) / nodes->chunk,
               .tiles = tiles_of(nodes->chunk, config->max_top_k),
               .ranks = nodes->ranks,
               .others = nodes->nodes - 1,
               .experts = ep_min(most, placement.num_experts)};
    s.columns = s.experts + 2 * s.ranks + 1;
    return lay_counts(&s, NULL, &counts);
}

/* ---- description --------------------------------------------------------------------------- */

static void describe(const EpHandle *handle, const EpRouting *routing, const EpCudaRelay *relay,
                     EpRouteArgs *a) {
    const EpRelayTables *t = &relay->tables;
    int64_t facts[EP_OP_FACTS];
    ep_cuda_describe_routing(handle, routing, &a->p, facts);
    a->p.group.digest = ep_cuda_digest(handle, &ep_op_prepare, facts, EP_OP_FACTS);
    a->p.group.size = t->group;
    a->t = *t;
    a->chunk_plan[EP_CHUNK_OWN] = ep_cuda_chunk_plan(&handle->shape, &a->p.plan, EP_CHUNK_OWN, 0);
    a->chunk_plan[EP_CHUNK_RELAYED] =
        ep_cuda_chunk_plan(&handle->shape, &a->p.plan, EP_CHUNK_RELAYED, 0);
    a->chunk_stride =
        a->p.plan.chunk_plan_bytes[EP_CHUNK_OWN] + a->p.plan.chunk_plan_bytes[EP_CHUNK_RELAYED];
    a->messages = relay->routing, a->message_bytes = relay->routing_bytes;
    a->team_shift = team_shift(routing->top_k);
    a->tile_tokens = EP_ROUTE_THREADS >> a->team_shift;
    a->tiles = tiles_of(t->chunk, routing->top_k);
    a->columns = t->experts + 2 * t->ranks + 1;
    Sizes s = {t->group, t->chunks, a->tiles, a->columns, t->ranks, t->nodes - 1, t->experts};
    lay_counts(&s, relay->counts, &a->counts);
}

/* ---- launching ----------------------------------------------------------------------------- */

#define BLOCKS_PER_SM 4

/* A block for each rank elsewhere, and for each other node. */
static int lists_of(const EpRouteArgs *a) {
    return a->t.group - a->t.ranks + a->t.nodes - 1;
}

static EpStatus run_kernels(EpRelayRun *run, const EpRouteArgs *a) {
    int blocks = a->p.group.blocks * BLOCKS_PER_SM, tiles = a->t.group * a->t.chunks * a->tiles;
    int busy = (int)ep_min(blocks, tiles);
    EP_TRY(ep_relay_launch(run, ep_cuda_collect_routes, a, blocks));
    EP_TRY(ep_relay_gather(run));
    if (a->t.limit) EP_TRY(ep_relay_launch(run, ep_cuda_limit_routes, a, lists_of(a)));
    EP_TRY(ep_relay_launch(run, ep_cuda_count_routes, a, busy));
    EP_TRY(ep_relay_launch(run, ep_cuda_sum_routes, a, a->p.group.blocks));
    return ep_relay_launch(run, ep_cuda_assign_routes, a, busy);
}

EpStatus ep_cuda_route_nodes(EpHandle *handle, const EpRouting *routing) {
    EpRelayRun run;
    EpRouteArgs args;
    EpCudaOwn *own = routing->plan.is_named ? NULL : handle->own_state;
    describe(handle, routing, ep_cuda(handle->group)->relay, &args);
    /* The facts travel with the routing: who finds that they differ can say which does. */
    EpRelayCall call = {.stream = routing->stream,
                        .digest = ep_cuda_digest(handle, &ep_op_prepare, NULL, 0)};
    EP_TRY(ep_relay_begin(handle, &call, &run));
    int64_t seen = own ? ep_cuda_steps_seen(own) : 0;
    EP_TRY(run_kernels(&run, &args));
    EP_TRY(ep_relay_end(&run));
    if (own) ep_cuda_routing_issued(own, routing, run.stream.captures, seen);
    return EP_OK;
}
