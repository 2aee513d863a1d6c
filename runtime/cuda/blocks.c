/* SPDX-License-Identifier: Apache-2.0 */
/* Launch heuristics of throughput mode. */
#include "runtime/cuda/blocks.h"

#include <math.h>

#define LARGE_ROW_BYTES 16384

/* ---- tokens and work items ----------------------------------------------------------------- */

/* At the end, each block finishes alone what it has begun, while receivers wait for it in order. So
 * as much is under way in all blocks together, however many they are: many blocks claim few tokens
 * at a time and have few items under way, few blocks have more. Of small rows more pass in the same
 * time, and scheduler warps are short of time: so blocks claim more of them. */
#define MOST_CHUNK 4
_Static_assert(MOST_CHUNK <= EP_MIN_RING_DEPTH, "a claim's rows fit into a ring: see device.h");

static int32_t at_most(int32_t most, double value) {
    return value < most ? (int32_t)(value + .5) : most;
}

EpGranularity ep_granularity(const EpTuning *tuning, int32_t blocks, int64_t row_bytes,
                             EpFineness large) {
    double rows = (double)ep_max(1, (LARGE_ROW_BYTES + row_bytes / 2) / row_bytes);
    double full = tuning->full_blocks, fold = blocks < full ? rows * full / blocks : rows;
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

static double larger(double a, double b) {
    return a > b ? a : b;
}

static double clamp(double value, double least, double most) {
    return value < least ? least : value > most ? most : value;
}

static double mix(double a, double b, double part_of_b) {
    return a + (b - a) * part_of_b;
}

/* Many blocks wait: an item that is sent is under way for item_us, the way from memory to a peer.
 * Few blocks are busy all the time: loading a row to send it counts, too, and a token that sends
 * little takes as long as its warps need to post it: post_us, and post_pass_us for each pass, of as
 * many rows as a warp has teams. */

/* Returns how many rows a scheduler warp passes on at once: as many as it has teams of lanes. */
static int32_t rows_of_a_pass(int32_t top_k) {
    return 32 / ep_team_width(top_k);
}

static double time_of(EpCost cost, double rows, double bytes) {
    return cost.token_us + rows * cost.row_us + bytes / cost.bytes_per_us;
}

/* Returns what a token takes of the wire or of the memory, whichever takes longer. */
static double shared_us(const EpTraffic *t, int64_t row_bytes) {
    return larger(t->wire_us,
                  (t->sent + t->received) * (double)row_bytes / t->tuning->memory_bytes_per_us);
}

/* Returns how long one of many blocks has a token under way that it stores `stored` times. */
static double waiting_us(const EpTraffic *t, int32_t active, int64_t row_bytes, double stored) {
    return t->tuning->item_us / active +
           time_of(t->tuning->many.send_copies, stored, stored * (double)row_bytes);
}

/* Returns how long one of few blocks is busy with it. `crowd`: how much longer the memory makes it
 * to post the token. */
static double sending_us(const EpTraffic *t, int32_t top_k, int64_t row_bytes, double stored,
                         double crowd) {
    double moved = stored + t->tuning->load * (t->sent - stored);
    double us = time_of(t->tuning->few.send_copies, moved, moved * (double)row_bytes);
    double posting_us = t->tuning->post_us + t->tuning->post_pass_us / rows_of_a_pass(top_k);
    return larger(us, larger(t->tuning->least_send_us, posting_us * crowd));
}

/* Returns where blocks that copy lie between few (0) and many (1), given their times as few. */
static double many_part(int32_t blocks, const EpTraffic *t, int64_t row_bytes) {
    if (blocks < t->tuning->many_blocks) return 0;
    double spare = blocks * shared_us(t, row_bytes) / (t->send_us + t->receive_us);
    return clamp((spare - t->tuning->few_spare) / (t->tuning->many_spare - t->tuning->few_spare), 0,
                 1);
}

/* A warp schedules fewer rows at once where they have more than 8 experts, each of which is a lane.
 */
void ep_copy_times(int32_t blocks, int32_t active, int32_t top_k, int64_t row_bytes, double stored,
                   double copied, EpTraffic *t) {
    double width = 1, bytes = copied * (double)row_bytes;
    for (int32_t lanes = 8; lanes < top_k; lanes *= 2)
        width += t->tuning->wider;
    t->wire_us = t->ranks * (double)row_bytes / t->tuning->wire_bytes_per_us;
    t->spare = t->tuning->spare_senders;
    t->send_us = sending_us(t, top_k, row_bytes, stored, 1);
    t->receive_us = time_of(t->tuning->few.receive_copies, t->ranks * width, bytes);
    double many = many_part(blocks, t, row_bytes);
    t->busy = many <= 0;
    t->send_us = mix(t->send_us, waiting_us(t, active, row_bytes, stored), many);
    t->receive_us =
        mix(t->receive_us, time_of(t->tuning->many.receive_copies, t->ranks * width, bytes), many);
}

/* Multiplying takes most of the time. Where that leaves blocks over, they send, as many as the wire
 * has use for. The busier the memory, the longer senders wait for it. */
void ep_multiply_times(int32_t blocks, int32_t active, int32_t top_k, int64_t row_bytes,
                       EpTraffic *t) {
    t->busy = 1, t->spare = t->tuning->spare_senders;
    t->wire_us = t->ranks * (double)row_bytes / t->tuning->wire_bytes_per_us;
    t->send_us = sending_us(t, top_k, row_bytes, t->ranks, 1);
    t->receive_us = time_of(t->tuning->multiply, t->received, t->received * (double)row_bytes);
    if (t->sent <= 0) return;
    double limit_us = shared_us(t, row_bytes);
    double load = clamp(limit_us * blocks / (t->send_us + t->receive_us), 0, 1);
    t->send_us = sending_us(t, top_k, row_bytes, t->ranks, 1 + t->tuning->crowded * pow(load, 4));
    double wanted = t->spare * waiting_us(t, active, row_bytes, t->ranks) / t->wire_us / blocks;
    double left_over = 1 - t->receive_us / limit_us / blocks;
    t->most_send = clamp(wanted, t->least_send, t->most_send);
    t->least_send = clamp(left_over, t->least_send, t->most_send);
}

static void set_sum_times(const EpRoleCosts *costs, EpSpread s, int64_t row_bytes, double sums,
                          EpTraffic *t) {
    double own = s.own + 1;
    t->send_us = time_of(costs->send_sums, s.ranks, s.other * (double)row_bytes + sums);
    t->receive_us = time_of(costs->receive_sums, own + s.ranks, own * (double)row_bytes + sums);
    t->spare = costs->spare_sums;
}

/* Packing takes long: many_blocks are still busy, until the wire or the memory takes longer. */
void ep_sum_times(int32_t blocks, EpSpread s, int64_t row_bytes, int64_t sum_bytes,
                  int carries_values, EpTraffic *t) {
    double sums = s.ranks * (double)sum_bytes;
    int packs = sum_bytes < row_bytes;
    t->wire_us = sums / t->tuning->wire_bytes_per_us;
    set_sum_times(packs ? &t->tuning->packing : &t->tuning->few, s, row_bytes, sums, t);
    t->busy = blocks < t->tuning->many_blocks ||
              (packs && t->send_us + t->receive_us > blocks * shared_us(t, row_bytes));
    if (t->busy) return;
    set_sum_times(&t->tuning->many, s, row_bytes, sums, t);
    if (carries_values) t->receive_us += t->tuning->many.values_us;
}

/* As rows that blocks copy, one of many or not: what a sender has under way for a rank are the rows
 * of all entries there. */
void ep_entry_times(EpSpread s, int64_t row_bytes, EpTraffic *t) {
    double other = s.other * (double)row_bytes, all = (s.own + 1) * (double)row_bytes + other;
    t->wire_us = other / t->tuning->wire_bytes_per_us;
    t->send_us =
        s.ranks * t->tuning->entry_item_us + time_of(t->tuning->many.send_copies, s.other, other);
    t->receive_us = time_of(t->tuning->few.receive_sums, s.own + 1 + s.other, all);
    t->spare = t->tuning->spare_senders, t->busy = 1;
}

/* As many blocks send as fill the wire, if the others keep up. */
static double sending_fraction(int32_t blocks, const EpTraffic *t) {
    double wanted = t->spare * t->send_us / t->wire_us / blocks;
    double balanced = t->send_us / (t->send_us + t->receive_us);
    return clamp(wanted < balanced ? wanted : balanced, t->least_send, t->most_send);
}

/* Returns the fraction of the blocks that receive; they also write zeros where nothing arrives.
 * Where nothing arrives, as many send as the memory is good for. */
static double receiving_fraction(int32_t blocks, const EpTraffic *t, int64_t row_bytes) {
    EpSenders alone = t->tuning->alone_sent;
    int is_small = (double)row_bytes < t->tuning->small_row_bytes;
    double least = is_small ? t->tuning->alone_small_sent : alone.least;
    if (t->received <= 0) return 1 - clamp(t->tuning->memory_senders / blocks, least, alone.most);
    if (t->sent <= 0) return 1;
    return 1 - sending_fraction(blocks, t);
}

/* Few blocks round to what makes the slower kind faster: one block less may be half as many. */
static int32_t round_receivers(int32_t blocks, double wanted, const EpTraffic *t) {
    int32_t less = (int32_t)ep_max(1, ep_min(blocks - 1, (int64_t)wanted)), more = less + 1;
    if (more >= blocks) return less;
    if (!t->busy || t->wire_us <= 0) return wanted + .5 < more ? less : more;
    double with_less = t->receive_us / less, with_more = t->send_us / (blocks - more);
    return with_less < with_more ? less : more;
}

/* ---- scheduler warps ----------------------------------------------------------------------- */

/* A scheduler warp takes pass_us for a row of each of its teams, mostly waits for loads; at least
 * token_us for a token, and claim_us to claim tokens. Where the other blocks schedule those that
 * arrive, one that posts its rank's own tokens takes less: own_pass_us and own_claim_us. */

/* Returns what a token takes of a block otherwise: of the wire, the memory or the block itself. */
static double moving_us(const EpTraffic *t, int32_t blocks, int64_t row_bytes) {
    double block_us = (t->sent + t->received) * (double)row_bytes / t->tuning->block_bytes_per_us;
    return larger(block_us, blocks * shared_us(t, row_bytes));
}

/* Returns what a token takes of the GPU: of the wire, the memory or the slower kind of block. */
static double token_us(const EpTraffic *t, int32_t blocks, int32_t receivers, int64_t row_bytes) {
    double us = shared_us(t, row_bytes);
    if (!t->busy) return us;
    return larger(us, larger(t->receive_us / receivers, t->send_us / (blocks - receivers)));
}

/* Returns what a token takes on average, since some have no row for another rank: the part of what
 * one takes that has. */
static double mean_part(const EpTraffic *t) {
    if (t->ranks <= 0) return 0; /* nothing arrives */
    return t->ranks < 1 ? t->tuning->no_row + (1 - t->tuning->no_row) * t->ranks : 1;
}

static double scheduling_us(const EpTraffic *t, int32_t top_k) {
    return larger(t->tuning->token_us, t->scheduled * t->tuning->pass_us / rows_of_a_pass(top_k));
}

/* Returns what a token takes a warp that posts own ones, if it claims `each` at a time. */
static double posting_us(const EpTraffic *t, int32_t top_k, int32_t each) {
    if (!t->scheduled_by_receivers) return 0; /* senders schedule what arrives */
    return mean_part(t) *
           (t->tuning->own_pass_us / rows_of_a_pass(top_k) + t->tuning->own_claim_us / each);
}

/* Returns how many tokens each warp claims: its part of `chunk`, or more, until it keeps up with
 * what a token takes otherwise of a block that schedules (block_us) and of one that sends. */
static int32_t claim(const EpTraffic *t, int32_t blocks, int32_t top_k, int32_t chunk,
                     double block_us, double sender_us, int32_t warps) {
    int32_t each = (chunk + warps - 1) / warps;
    int64_t most = ep_min(MOST_CHUNK, (int64_t)(t->tuning->most_claimed / blocks)) / warps;
    double busy_us = scheduling_us(t, top_k);
    while (each < most && (mean_part(t) * (busy_us + t->tuning->claim_us / each) >
                               t->tuning->cramped * block_us * warps ||
                           posting_us(t, top_k, each) > t->tuning->cramped * sender_us * warps))
        each++;
    return each;
}

/* Two warps of a block schedule where one would be busy all the time: tokens have many experts, so
 * that a pass has few rows, or blocks are few. And where a token has rows on several ranks: two
 * keep rows better in order, if they claim one token at a time and have the time for it. Otherwise
 * a second one only puts rows out of order. */
static void divide_warps(const EpTraffic *t, int32_t blocks, int32_t top_k, int64_t row_bytes,
                         int32_t chunk, EpDivision *division) {
    int32_t receivers = division->receivers, senders = blocks - receivers;
    int32_t scheduling = t->scheduled_by_receivers ? receivers : senders;
    double us = token_us(t, blocks, receivers, row_bytes), sender_us = senders * us;
    double block_us = moving_us(t, scheduling, row_bytes), busy_us = scheduling_us(t, top_k);
    int spreads = t->ranks >= t->tuning->several_ranks;
    int lags = busy_us > t->tuning->busy * block_us || posting_us(t, top_k, MOST_CHUNK) > sender_us;
    int single = t->ordered && spreads && block_us > t->tuning->claim_us &&
                 block_us > t->tuning->single * busy_us;
    int32_t warps = spreads || lags ? 2 : 1;
    division->schedulers = warps;
    division->claim =
        single ? 1 : claim(t, blocks, top_k, chunk, scheduling * us, sender_us, warps);
}

EpDivision ep_divide(int32_t blocks, int32_t top_k, int64_t row_bytes, int32_t chunk, EpTraffic t) {
    double fraction = receiving_fraction(blocks, &t, row_bytes);
    EpDivision division = {.receivers = round_receivers(blocks, blocks * fraction, &t)};
    divide_warps(&t, blocks, top_k, row_bytes, chunk, &division);
    return division;
}

/* ---- shared memory ------------------------------------------------------------------------- */

/* The factor 4 of `active`: a scheduler warp can post four rows at once, whatever their fragments.
 */
int ep_shape_pipeline(const EpTuning *tuning, int64_t room, int64_t row_bytes, int64_t unit,
                      EpWorkNeeds needs, EpPipelineShape *shape) {
    room -= EP_WORK_TABLE_BYTES * needs.width;
    int64_t wanted = ep_max(
        needs.held, ep_max((int64_t)tuning->wanted_stages, ep_min(needs.wanted, EP_MAX_STAGES)));
    int64_t fragments = 1, bytes = row_bytes;
    while (room / bytes < wanted && bytes > ep_max(EP_LEAST_FRAGMENT_BYTES, unit))
        bytes = ep_round_up((row_bytes + fragments) / (fragments + 1), unit), fragments++;
    fragments = (row_bytes + bytes - 1) / bytes;
    int64_t active = ep_min(EP_MAX_ACTIVE, ep_max(needs.active, 4 * fragments));
    *shape = (EpPipelineShape){.stages = (int32_t)ep_min(EP_MAX_STAGES, room / bytes),
                               .stage_bytes = (int32_t)bytes,
                               .width = (int32_t)needs.width,
                               .fragments = (int32_t)fragments,
                               .active = (int32_t)active,
                               .shrink = shape->shrink};
    return shape->stages >= needs.held;
}
