/* SPDX-License-Identifier: Apache-2.0 */
/* Launch heuristics of throughput mode. */
#include "handles/cuda/partition.h"

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

/* Found by experiment, on H100s and H200s. An item is under way for ITEM_US beside what its stores
 * take of its block. A warp schedules fewer rows at once where they have more than 8 experts, each
 * of which is a lane. */
#define ITEM_US 5.
#define STORED_BYTES_PER_US 49e3
#define WIRE_BYTES_PER_US 350e3
#define ARRIVED_ITEM_US .6
#define WIDER_ITEM_US .45 /* more, each time that the lanes double */

void ep_send_times(int32_t active, int64_t row_bytes, double stored, double sent,
                   EpTraffic *traffic) {
    traffic->send_us = ITEM_US / active + stored * (double)row_bytes / STORED_BYTES_PER_US;
    traffic->wire_us = sent * (double)row_bytes / WIRE_BYTES_PER_US;
}

double ep_copy_time(int32_t top_k, int64_t row_bytes, double arrived, double copied) {
    double item_us = ARRIVED_ITEM_US;
    for (int32_t lanes = 8; lanes < top_k; lanes *= 2)
        item_us += WIDER_ITEM_US;
    return arrived * item_us + copied * (double)row_bytes / STORED_BYTES_PER_US;
}

#define SUM_ITEM_US .2
#define SUMMED_BYTES_PER_US 23e3 /* loaded or stored */
#define VALUES_US .3             /* more for a receiving block, to store a float for each expert */

void ep_sum_times(EpSpread s, int64_t row_bytes, int64_t sum_bytes, int carries_values,
                  EpTraffic *traffic) {
    double row_us = (double)row_bytes / SUMMED_BYTES_PER_US;
    double sums_us = s.ranks * (double)sum_bytes / SUMMED_BYTES_PER_US;
    traffic->send_us = s.ranks * SUM_ITEM_US + s.other * row_us + sums_us;
    traffic->receive_us = SUM_ITEM_US + (s.own + 1) * row_us + sums_us;
    if (carries_values) traffic->receive_us += VALUES_US;
    traffic->wire_us = s.ranks * (double)sum_bytes / WIRE_BYTES_PER_US;
}

#define MANY_BLOCKS 64
#define SPARE_SENDERS 1.2    /* as the last rows leave, some blocks have none */
#define MEMORY_SENDERS 66    /* as many blocks copy rows at the rate of a GPU's memory */
#define SMALL_ROW_BYTES 4096 /* smaller rows keep blocks busy, not the wire or the memory */

/* Of many blocks as many send as fill the wire, if the others keep up. */
static double sending_fraction(int32_t blocks, const EpTraffic *t) {
    double wanted = SPARE_SENDERS * t->send_us / t->wire_us / blocks;
    double balanced = t->send_us / (t->send_us + t->receive_us);
    return clamp(wanted < balanced ? wanted : balanced, t->least_send, t->most_send);
}

/* Returns the fraction of the blocks that receive; they also write zeros where nothing arrives. Few
 * blocks divide as the traffic does, up to most_of_few. Where nothing arrives, as many send as the
 * memory is good for. */
static double receiving_fraction(int32_t blocks, const EpTraffic *t, int64_t row_bytes) {
    int is_small = row_bytes < SMALL_ROW_BYTES;
    if (t->received <= 0)
        return 1 - clamp((double)MEMORY_SENDERS / blocks, is_small ? .75 : .5, .75);
    if (t->sent <= 0) return 1;
    if (blocks < MANY_BLOCKS)
        return clamp(t->received / (t->sent + t->received), .25, t->most_of_few);
    return 1 - sending_fraction(blocks, t);
}

/* ---- scheduler warps ----------------------------------------------------------------------- */

/* A scheduler warp takes PASS_US for a row of each of its teams, mostly waits for loads. */
#define PASS_US 2.5
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

/* Two warps of a block schedule where one would be busy all the time: tokens have many experts, so
 * that a pass has few rows, or blocks are few. And where a token has rows on several ranks: two
 * that claim half as much keep rows better in order. Otherwise a second one only puts them out of
 * order. */
static int32_t schedulers_of(const EpTraffic *t, int32_t blocks, int32_t top_k, int64_t row_bytes) {
    int32_t rows_of_a_pass = 32 / ep_team_width(top_k);
    double busy_us = t->scheduled * PASS_US / rows_of_a_pass;
    return t->ranks >= SEVERAL_RANKS || busy_us > BUSY * moving_us(t, blocks, row_bytes) ? 2 : 1;
}

EpDivision ep_divide(int32_t blocks, int32_t top_k, int64_t row_bytes, EpTraffic t) {
    double fraction = receiving_fraction(blocks, &t, row_bytes);
    int32_t receivers = (int32_t)ep_min(blocks - 1, (int64_t)(blocks * fraction + .5));
    int32_t scheduling = t.scheduled_by_receivers ? receivers : blocks - receivers;
    return (EpDivision){receivers, schedulers_of(&t, scheduling, top_k, row_bytes)};
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
