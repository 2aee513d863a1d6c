/* SPDX-License-Identifier: Apache-2.0 */
#include "dispatch/shares.h"

#include "runtime/cuda_limits.h"

#define MANY_BLOCKS 64

/* ---- tokens and jobs ----------------------------------------------------------------------- */

#define LARGE_ROW_BYTES 16384

/* How finely blocks divide the work. Where there are many blocks, what each has begun when no
 * tokens are left it ends alone, and what all of them have begun arrives at about the same time,
 * while it is waited for in order: so they claim few tokens at once and have few jobs under way.
 * Few blocks have planners that are short of time, and claim as many tokens as these plan at once;
 * so have those of small rows, of which there are more in the same time. */
typedef struct Grain {
    int32_t chunk, ahead; /* tokens, jobs */
} Grain;

static const Grain copied = {2, 4}, summed = {1, 8}, most = {4, EP_MOST_AHEAD};

static Grain grain_of(int32_t blocks, Grain large, int64_t row_bytes) {
    int64_t fold = ep_max(1, (LARGE_ROW_BYTES + row_bytes / 2) / row_bytes);
    if (blocks < MANY_BLOCKS) return most;
    return (Grain){(int32_t)ep_min(most.chunk, fold * large.chunk),
                   (int32_t)ep_min(most.ahead, fold * large.ahead)};
}

/* ---- blocks -------------------------------------------------------------------------------- */

/* A token's entries where routing is uniform: those of experts here and those of others; of how
 * many other ranks these are; and the entries of a row, that is, of those that have the same rank.
 */
typedef struct Spread {
    double own, other, ranks, row;
} Spread;

static Spread spread_of(const EpCudaGroup *group, int32_t top_k) {
    double ranks = group->size, own = top_k / ranks, missed = 1;
    for (int32_t k = 0; k < top_k; k++)
        missed *= 1 - 1 / ranks;
    return (Spread){own, top_k - own, (ranks - 1) * (1 - missed), own / (1 - missed)};
}

/* How many rows a token moves through each kind of block, in loads and stores. */
typedef struct Moves {
    double sent, received;
    double stores; /* of a sender for each row that leaves, where rows are only copied; else 0 */
} Moves;

/* Own rows that are multiplied are the receiver's: where there is no other rank, nothing is sent.
 */
static Moves scatter_moves(const EpScatterArgs *a) {
    Spread t = spread_of(&a->group, a->top_k);
    double multiplied = a->takes_dots ? 2 * a->top_k : a->top_k;
    double loaded = (double)a->source_row_bytes / (double)a->row_bytes;
    if (a->type) return (Moves){t.ranks > 0 ? 1 + t.ranks : 0, 1 + t.ranks + multiplied, 0};
    return (Moves){loaded + t.own + t.ranks, t.other + (a->lands ? 0 : t.ranks),
                   t.ranks > 0 ? (t.own + t.ranks) / t.ranks : 0};
}

static Moves gather_moves(const EpGatherArgs *a) {
    Spread t = spread_of(&a->group, a->top_k);
    return (Moves){t.other + t.ranks, t.own + t.ranks + 1, 0};
}

static double clamp(double value, double least, double greatest) {
    return value < least ? least : value > greatest ? greatest : value;
}

#define SENDERS_PER_STORE .12 /* share of the blocks, for each store of a row that leaves */
#define SMALL_SUM_BYTES 4096  /* of smaller rows, adding up takes longer than the wire */

/* Share of the blocks that receive, and also write zeros, where nothing comes. Few divide the work
 * as it is. Of many, where rows are only copied, as many send as fill the wire, which are the more,
 * the more they store for each row that leaves. Where rows are added up or multiplied, a quarter
 * send at least, and of large rows no more than half. */
static double share_of_receivers(int32_t blocks, Moves moves, int64_t row_bytes) {
    double received = moves.received / (moves.sent + moves.received);
    if (blocks < MANY_BLOCKS || moves.sent <= 0) return clamp(received, .25, 1);
    if (moves.stores > 0) return 1 - clamp(SENDERS_PER_STORE * moves.stores, .2, .5);
    return clamp(received, row_bytes < SMALL_SUM_BYTES ? .25 : .5, .75);
}

static int32_t share_blocks(int32_t blocks, Moves moves, int64_t row_bytes) {
    double share = share_of_receivers(blocks, moves, row_bytes);
    return (int32_t)ep_min(blocks - 1, (int64_t)(blocks * share + .5));
}

/* ---- shared memory ------------------------------------------------------------------------- */

#define WANTED_STAGES 6 /* to overlap loads with stores */

/* What jobs of a pipe ask of its shape. */
typedef struct Jobs {
    int64_t width;  /* most loads or stores of one */
    int64_t held;   /* most stages that one holds at once */
    int64_t wanted; /* stages to overlap jobs, if pieces can be made that small */
    int32_t ahead;  /* how many are under way */
} Jobs;

/* Stages of whole rows, if that makes enough of them, or of pieces, multiples of `unit` bytes. A
 * planner posts up to four rows at once. */
static int shape_pipe(int32_t shared_bytes, int64_t row_bytes, int64_t unit, Jobs jobs,
                      EpPipeShape *shape) {
    int64_t room = shared_bytes - EP_STATIC_SHARED_BYTES - EP_JOB_TABLE_BYTES * jobs.width;
    int64_t wanted = ep_max(jobs.held, ep_max(WANTED_STAGES, ep_min(jobs.wanted, EP_MOST_STAGES)));
    int64_t pieces = 1, bytes = row_bytes;
    while (room / bytes < wanted && bytes > EP_LEAST_PIECE_BYTES)
        bytes = ep_round_up((row_bytes + pieces) / (pieces + 1), unit), pieces++;
    pieces = (row_bytes + bytes - 1) / bytes;
    *shape = (EpPipeShape){.stages = (int32_t)ep_min(EP_MOST_STAGES, room / bytes),
                           .stage_bytes = (int32_t)bytes,
                           .width = (int32_t)jobs.width,
                           .pieces = (int32_t)pieces,
                           .ahead = (int32_t)ep_min(EP_MOST_AHEAD, ep_max(jobs.ahead, 4 * pieces)),
                           .shrink = shape->shrink};
    return shape->stages >= jobs.held;
}

/* What a filling block does. Where rows are multiplied a job has a stage for each slot, too, which
 * are loaded together: there should be room for two rows of the usual number of slots. */
static Jobs jobs_to_fill(const EpScatterArgs *a, int32_t ahead) {
    int64_t stages = 1 + a->top_k;
    double usual = 1 + spread_of(&a->group, a->top_k).row;
    if (!a->type) return (Jobs){a->top_k, 1, 1, ahead};
    return (Jobs){stages, stages, (int64_t)(2 * usual + .5), ahead};
}

/* ---- kernels ------------------------------------------------------------------------------- */

int ep_share_scatter(EpScatterArgs *args, int32_t shared_bytes, int64_t unit) {
    int32_t blocks = args->group.blocks;
    /* What is multiplied keeps workers busy rather than planners, however small its rows are. */
    int64_t bytes = args->type ? LARGE_ROW_BYTES : args->row_bytes;
    Grain send = grain_of(blocks, args->type ? summed : copied, bytes);
    Grain fill = grain_of(blocks, summed, bytes);
    Jobs sends = {args->top_k, 1, 1, send.ahead}, fills = jobs_to_fill(args, fill.ahead);
    args->chunk = send.chunk;
    args->receivers = share_blocks(blocks, scatter_moves(args), args->row_bytes);
    return shape_pipe(shared_bytes, args->source_row_bytes, unit, sends, &args->send) &&
           shape_pipe(shared_bytes, args->row_bytes, 16, fills, &args->fill);
}

int ep_share_gather(EpGatherArgs *args, int32_t shared_bytes) {
    int32_t blocks = args->group.blocks;
    Grain grain = grain_of(blocks, summed, args->row_bytes);
    Jobs jobs = {args->top_k, args->top_k, 1, grain.ahead};
    args->chunk = grain.chunk;
    args->receivers = share_blocks(blocks, gather_moves(args), args->row_bytes);
    return shape_pipe(shared_bytes, args->row_bytes, 16, jobs, &args->pipe);
}
