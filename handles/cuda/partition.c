/* SPDX-License-Identifier: Apache-2.0 */
/* Launch heuristics of throughput mode. */
#include "handles/cuda/partition.h"

#include <math.h>

#define LARGE_ROW_BYTES 16384

/* ---- tokens and work items ----------------------------------------------------------------- */

/* At the end, each block finishes alone what it has begun, while receivers wait for it in order. So
 * as much is under way in all blocks together, however many they are: many blocks claim few tokens
 * at a time and have few items under way, few blocks have more. Of small rows more pass in the same
 * time, and scheduler warps are short of time: so blocks claim more of them. */
#define MOST_CHUNK 4
#define FULL_BLOCKS 132
_Static_assert(MOST_CHUNK <= EP_MIN_RING_DEPTH, "a claim's rows fit into a ring: see device.h");

static int32_t at_most(int32_t most, double value) {
    return value < most ? (int32_t)(value + .5) : most;
}

EpGranularity ep_granularity(int32_t blocks, int64_t row_bytes, EpGranularity large) {
    int64_t rows = ep_max(1, (LARGE_ROW_BYTES + row_bytes / 2) / row_bytes);
    double fold = blocks < FULL_BLOCKS ? (double)(rows * FULL_BLOCKS) / blocks : (double)rows;
    return (EpGranularity){at_most(MOST_CHUNK, fold * large.chunk),
                           at_most(EP_MAX_ACTIVE, fold * large.active)};
}

/* ---- blocks -------------------------------------------------------------------------------- */

EpSpread ep_spread(const EpCudaGroup *group, int32_t top_k) {
    double ranks = group->size, own = top_k / ranks, missed = 1;
    for (int32_t k = 0; k < top_k; k++)
        missed *= 1 - 1 / ranks;
    return (EpSpread){own, top_k - own, (ranks - 1) * (1 - missed), 1 - missed, own / (1 - missed)};
}

static double clamp(double value, double least, double greatest) {
    return value < least ? least : value > greatest ? greatest : value;
}

/* What a block takes for a token: for itself, for each row, and for bytes that it moves. */
typedef struct Cost {
    double token_us, row_us, bytes_per_us;
} Cost;

/* Found by experiment, on H100s and H200s. Many blocks wait: an item that is sent is under way for
 * item_us, the way from memory to a peer. Few blocks are busy all the time: loading a row to send
 * it counts, too, as `load` stores, and a token that sends little takes least_us. Many blocks that
 * multiply keep up in any case. */
typedef struct Costs {
    double item_us, least_us, load;
    Cost send_copies, receive_copies, multiply, send_sums, receive_sums;
    double values_us;  /* more for a token's sum, to store a float for each expert */
    double spare_sums; /* senders of sums, for each that the wire needs */
} Costs;

#define MANY_BLOCKS 64
#define SPARE_SENDERS 1.2 /* as the last rows leave, some blocks have none */
static const Costs OF_MANY = {.item_us = 5,
                              .send_copies = {0, 0, 49e3},
                              .receive_copies = {0, .6, 49e3},
                              .multiply = {0, 0, INFINITY},
                              .send_sums = {0, .2, 23e3},
                              .receive_sums = {.2, 0, 23e3},
                              .values_us = .3,
                              .spare_sums = SPARE_SENDERS};
static const Costs OF_FEW = {.least_us = .33,
                             .load = .8,
                             .send_copies = {0, 0, 62e3},
                             .receive_copies = {.32, .115, 100e3},
                             .multiply = {.13, .087, 97e3},
                             .send_sums = {.17, .355, 220e3},
                             .receive_sums = {.4, .03, 190e3},
                             .spare_sums = 2.5};

#define WIRE_BYTES_PER_US 350e3
#define WIDER .75 /* more for a row, each time that the lanes double */

static const Costs *costs_of(int32_t blocks) {
    return blocks < MANY_BLOCKS ? &OF_FEW : &OF_MANY;
}

static double time_of(Cost cost, double rows, double bytes) {
    return cost.token_us + rows * cost.row_us + bytes / cost.bytes_per_us;
}

void ep_send_times(int32_t blocks, int32_t active, int64_t row_bytes, double stored, double leaving,
                   EpTraffic *traffic) {
    const Costs *costs = costs_of(blocks);
    double moved = stored + costs->load * (traffic->sent - stored);
    double us =
        costs->item_us / active + time_of(costs->send_copies, moved, moved * (double)row_bytes);
    traffic->send_us = us > costs->least_us ? us : costs->least_us;
    traffic->wire_us = leaving * (double)row_bytes / WIRE_BYTES_PER_US;
    traffic->spare = SPARE_SENDERS;
}

/* A warp schedules fewer rows at once where they have more than 8 experts, each of which is a lane.
 */
double ep_copy_time(int32_t blocks, int32_t top_k, int64_t row_bytes, double arrived,
                    double copied) {
    double width = 1;
    for (int32_t lanes = 8; lanes < top_k; lanes *= 2)
        width += WIDER;
    return time_of(costs_of(blocks)->receive_copies, arrived * width, copied * (double)row_bytes);
}

double ep_multiply_time(int32_t blocks, int64_t row_bytes, double moved) {
    return time_of(costs_of(blocks)->multiply, moved, moved * (double)row_bytes);
}

void ep_sum_times(int32_t blocks, EpSpread s, int64_t row_bytes, int64_t sum_bytes,
                  int carries_values, EpTraffic *traffic) {
    const Costs *costs = costs_of(blocks);
    double sums = s.ranks * (double)sum_bytes;
    traffic->send_us = time_of(costs->send_sums, s.ranks, s.other * (double)row_bytes + sums);
    traffic->receive_us =
        time_of(costs->receive_sums, s.own + 1 + s.ranks, (s.own + 1) * (double)row_bytes + sums);
    if (carries_values) traffic->receive_us += costs->values_us;
    traffic->wire_us = sums / WIRE_BYTES_PER_US;
    traffic->spare = costs->spare_sums;
}

#define MEMORY_SENDERS 66    /* as many blocks copy rows at the rate of a GPU's memory */
#define SMALL_ROW_BYTES 4096 /* smaller rows keep blocks busy, not the wire or the memory */

/* As many blocks send as fill the wire, if the others keep up. */
static double sending_fraction(int32_t blocks, const EpTraffic *t) {
    double wanted = t->spare * t->send_us / t->wire_us / blocks;
    double balanced = t->send_us / (t->send_us + t->receive_us);
    return clamp(wanted < balanced ? wanted : balanced, t->least_send, t->most_send);
}

/* Returns the fraction of the blocks that receive; they also write zeros where nothing arrives.
 * Where nothing arrives, as many send as the memory is good for. */
static double receiving_fraction(int32_t blocks, const EpTraffic *t, int64_t row_bytes) {
    int is_small = row_bytes < SMALL_ROW_BYTES;
    if (t->received <= 0)
        return 1 - clamp((double)MEMORY_SENDERS / blocks, is_small ? .75 : .5, .75);
    if (t->sent <= 0) return 1;
    return 1 - sending_fraction(blocks, t);
}

/* Few blocks round to what makes the slower kind faster: one block less may be half as many. */
static int32_t round_receivers(int32_t blocks, double wanted, const EpTraffic *t) {
    int32_t less = (int32_t)ep_max(1, ep_min(blocks - 1, (int64_t)wanted)), more = less + 1;
    if (more >= blocks) return less;
    if (blocks >= MANY_BLOCKS || t->wire_us <= 0) return wanted + .5 < more ? less : more;
    double with_less = t->receive_us / less, with_more = t->send_us / (blocks - more);
    return with_less < with_more ? less : more;
}

/* ---- scheduler warps ----------------------------------------------------------------------- */

/* A scheduler warp takes PASS_US for a row of each of its teams, mostly waits for loads; at least
 * TOKEN_US for a token, and CLAIM_US to claim tokens. */
#define PASS_US 2.5
#define TOKEN_US .6
#define CLAIM_US 1.5
#define SINGLE .9 /* of one warp's time: what each of two takes that claim one token at a time */
#define MEMORY_BYTES_PER_US 4.3e6
#define BLOCK_BYTES_PER_US 80e3 /* of few blocks, which do not fill the memory's rate */
#define BUSY .9
#define SEVERAL_RANKS 2

/* Returns what a token takes of a block otherwise: of the wire, the memory or the block itself. */
static double moving_us(const EpTraffic *t, int32_t blocks, int64_t row_bytes) {
    double bytes = (t->sent + t->received) * (double)row_bytes;
    double memory_us = bytes / MEMORY_BYTES_PER_US, block_us = bytes / BLOCK_BYTES_PER_US;
    double slowest_us = blocks * (memory_us > t->wire_us ? memory_us : t->wire_us);
    return block_us > slowest_us ? block_us : slowest_us;
}

static double scheduling_us(const EpTraffic *t, int32_t top_k) {
    int32_t rows_of_a_pass = 32 / ep_team_width(top_k);
    double us = t->scheduled * PASS_US / rows_of_a_pass;
    return us > TOKEN_US ? us : TOKEN_US;
}

/* Two warps of a block schedule where one would be busy all the time: tokens have many experts, so
 * that a pass has few rows, or blocks are few. And where a token has rows on several ranks: two
 * keep rows better in order, if they claim one token at a time and have the time for it. Otherwise
 * a second one only puts rows out of order. */
static void divide_warps(const EpTraffic *t, int32_t blocks, int32_t top_k, int64_t row_bytes,
                         EpDivision *division) {
    double block_us = moving_us(t, blocks, row_bytes), busy_us = scheduling_us(t, top_k);
    int spreads = t->ranks >= SEVERAL_RANKS;
    division->schedulers = spreads || busy_us > BUSY * block_us ? 2 : 1;
    division->claims_one =
        t->ordered && spreads && block_us > CLAIM_US && block_us > SINGLE * busy_us;
}

EpDivision ep_divide(int32_t blocks, int32_t top_k, int64_t row_bytes, EpTraffic t) {
    double fraction = receiving_fraction(blocks, &t, row_bytes);
    int32_t receivers = round_receivers(blocks, blocks * fraction, &t);
    int32_t scheduling = t.scheduled_by_receivers ? receivers : blocks - receivers;
    EpDivision division = {.receivers = receivers};
    divide_warps(&t, scheduling, top_k, row_bytes, &division);
    return division;
}

int32_t ep_claim(EpDivision division, int32_t chunk) {
    return division.claims_one ? 1 : (chunk + division.schedulers - 1) / division.schedulers;
}

/* ---- shared memory ------------------------------------------------------------------------- */

#define WANTED_STAGES 6 /* to overlap loads with stores */

/* The factor 4 of `active`: a scheduler warp can post four rows at once, whatever their pieces. */
int ep_shape_pipeline(int64_t room, int64_t row_bytes, int64_t unit, EpWorkNeeds needs,
                      EpPipelineShape *shape) {
    room -= EP_WORK_TABLE_BYTES * needs.width;
    int64_t wanted = ep_max(needs.held, ep_max(WANTED_STAGES, ep_min(needs.wanted, EP_MAX_STAGES)));
    int64_t pieces = 1, bytes = row_bytes;
    while (room / bytes < wanted && bytes > ep_max(EP_LEAST_PIECE_BYTES, unit))
        bytes = ep_round_up((row_bytes + pieces) / (pieces + 1), unit), pieces++;
    pieces = (row_bytes + bytes - 1) / bytes;
    int64_t active = ep_min(EP_MAX_ACTIVE, ep_max(needs.active, 4 * pieces));
    *shape = (EpPipelineShape){.stages = (int32_t)ep_min(EP_MAX_STAGES, room / bytes),
                               .stage_bytes = (int32_t)bytes,
                               .width = (int32_t)needs.width,
                               .pieces = (int32_t)pieces,
                               .active = (int32_t)active,
                               .shrink = shape->shrink};
    return shape->stages >= needs.held;
}
