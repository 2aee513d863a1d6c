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
    return (EpSpread){own, top_k - own, (ranks - 1) * (1 - missed), own / (1 - missed)};
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
#define SPARE_SENDERS 1.2 /* as the last rows leave, some blocks have none */

void ep_copy_times(int32_t active, int32_t top_k, int64_t row_bytes, double stored, double arrived,
                   double copied, EpTraffic *traffic) {
    double row_us = (double)row_bytes / STORED_BYTES_PER_US, item_us = ARRIVED_ITEM_US;
    for (int32_t lanes = 8; lanes < top_k; lanes *= 2)
        item_us += WIDER_ITEM_US;
    traffic->send_us = ITEM_US / active + stored * row_us;
    traffic->receive_us = arrived * item_us + copied * row_us;
    traffic->wire_us = arrived * (double)row_bytes / WIRE_BYTES_PER_US;
}

#define MANY_BLOCKS 64
#define LEAST_SENDERS .2
#define MEMORY_SENDERS 66    /* as many blocks copy rows at the rate of a GPU's memory */
#define SMALL_ROW_BYTES 4096 /* smaller rows keep blocks busy, not the wire or the memory */

/* Of many blocks that only copy rows, as many send as fill the wire, if the others keep up. */
static double copying_fraction(int32_t blocks, const EpTraffic *t) {
    double wanted = SPARE_SENDERS * t->send_us / t->wire_us / blocks;
    double balanced = t->send_us / (t->send_us + t->receive_us);
    return 1 - clamp(wanted < balanced ? wanted : balanced, LEAST_SENDERS, 1 - LEAST_SENDERS);
}

/* Returns the fraction of the blocks that receive; they also write zeros where nothing arrives. Few
 * blocks divide as the traffic does, up to most_of_few. Where nothing arrives, as many send as the
 * memory is good for. Where rows are summed or multiplied, up to `most` receive, and of large rows
 * at least half. */
static double receiving_fraction(int32_t blocks, EpTraffic traffic, int64_t row_bytes) {
    double received = traffic.received / (traffic.sent + traffic.received);
    int is_small = row_bytes < SMALL_ROW_BYTES;
    if (traffic.received <= 0)
        return 1 - clamp((double)MEMORY_SENDERS / blocks, is_small ? .75 : .5, .75);
    if (traffic.sent <= 0) return 1;
    if (blocks < MANY_BLOCKS) return clamp(received, .25, traffic.most_of_few);
    if (traffic.wire_us > 0) return copying_fraction(blocks, &traffic);
    return clamp(received, is_small ? .25 : .5, traffic.most);
}

int32_t ep_receiving_blocks(int32_t blocks, EpTraffic traffic, int64_t row_bytes) {
    double fraction = receiving_fraction(blocks, traffic, row_bytes);
    return (int32_t)ep_min(blocks - 1, (int64_t)(blocks * fraction + .5));
}

/* ---- shared memory ------------------------------------------------------------------------- */

#define WANTED_STAGES 6 /* to overlap loads with stores */

/* The factor 4 of `active`: a scheduler warp can post four rows at once, whatever their pieces. */
int ep_shape_pipeline(int32_t shared_bytes, int64_t row_bytes, int64_t unit, EpWorkNeeds needs,
                      EpPipelineShape *shape) {
    int64_t room = shared_bytes - EP_STATIC_SHARED_BYTES - EP_WORK_TABLE_BYTES * needs.width;
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
