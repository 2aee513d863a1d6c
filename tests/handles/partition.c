/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels divide the work: what must hold for all arguments, and what experiments found to be
 * fastest. The code under test needs no GPU; builds with emulated GPUs run this. */
#if EP_WITH_CUDA

#include "combine/cuda/gather.h"
#include "dispatch/cuda/scatter.h"

#include "runtime/layout.h"
#include "tests/harness/check.h"
#include "tests/harness/random.h"

#define H200_SHARED_BYTES 232448
#define H200_BLOCKS 132

/* ---- invariants ---------------------------------------------------------------------------- */

/* The stages fit in `room`, suffice for an item that holds `held` of them, and cut a row
 * into no more fragments than necessary, of multiples of `unit` bytes. */
static void check_pipeline(const EpPipelineShape *s, int64_t row_bytes, int64_t unit, int held,
                           int64_t room) {
    room -= EP_WORK_TABLE_BYTES * s->width;
    CHECK((int64_t)s->stages * s->stage_bytes <= room, "%d stages of %d bytes in %lld", s->stages,
          s->stage_bytes, (long long)room);
    CHECK(s->stages >= held, "%d stages, an item holds %d", s->stages, held);
    CHECK((int64_t)s->fragments * s->stage_bytes >= row_bytes &&
              (int64_t)(s->fragments - 1) * s->stage_bytes < row_bytes,
          "%d fragments of %d bytes of %lld", s->fragments, s->stage_bytes, (long long)row_bytes);
    CHECK(s->fragments == 1 || s->stage_bytes % unit == 0, "fragments of %d bytes, unit %lld",
          s->stage_bytes, (long long)unit);
    CHECK(s->active >= 1 && s->active <= EP_MAX_ACTIVE, "%d items under way", s->active);
}

static void check_division(const EpCudaGroup *group, int32_t receivers, int32_t schedulers,
                           int32_t chunk) {
    CHECK(schedulers == 1 || schedulers == 2, "%d warps schedule", schedulers);
    CHECK(receivers >= 1 && receivers < group->blocks, "%d of %d blocks receive", receivers,
          group->blocks);
    CHECK(chunk >= 1 && chunk <= 4, "%d tokens at once", chunk);
}

/* Draw the least shared memory that a group may have, or that of an H200. */
static int32_t draw_shared_bytes(Random *random, int64_t row_bytes, int32_t top_k) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = row_bytes, config.max_top_k = top_k;
    int64_t least = ep_cuda_least_shared(&config, 1);
    return (int32_t)(random_percent(random, 50) ? least : ep_max(least, H200_SHARED_BYTES));
}

static EpCudaGroup draw_group(Random *random) {
    return (EpCudaGroup){.size = 1 + (int32_t)random_below(random, 72),
                         .blocks = 2 + (int32_t)random_below(random, 160)};
}

static void check_scatter(Random *random) {
    int multiplies = random_percent(random, 50);
    EpScatterArgs a = {.group = draw_group(random),
                       .top_k = 1 + (int32_t)random_below(random, 32),
                       .multiplied = multiplies ? EP_TYPE_BF16 : 0,
                       .t.takes_dots = multiplies && random_percent(random, 50),
                       .zero_copy = !multiplies && random_percent(random, 50),
                       .t.row_bytes = 16 * (1 + random_below(random, 4096))};
    int held = multiplies ? 1 + a.top_k : 1;
    a.t.source_row_bytes = a.t.row_bytes;
    int32_t shared_bytes = draw_shared_bytes(random, a.t.row_bytes, a.top_k);
    check_note("%d ranks, %d blocks, top-%d, type %d, rows of %lld bytes, %d bytes", a.group.size,
               a.group.blocks, a.top_k, a.multiplied, (long long)a.t.row_bytes, shared_bytes);
    CHECK(ep_partition_scatter(&a, shared_bytes, 16), "refused");
    check_division(&a.group, a.receivers, a.schedulers, a.chunk);
    check_pipeline(&a.send, a.t.row_bytes, 16, 1, shared_bytes - EP_SCATTER_STATIC_BYTES);
    check_pipeline(&a.receive, a.t.row_bytes, 16, held, shared_bytes - EP_SCATTER_STATIC_BYTES);
}

static void check_gather(Random *random) {
    EpGatherArgs a = {.group = draw_group(random),
                      .top_k = 1 + (int32_t)random_below(random, 32),
                      .t.type = EP_TYPE_BF16,
                      .t.row_bytes = 16 * (1 + random_below(random, 4096))};
    int32_t shared_bytes = draw_shared_bytes(random, a.t.row_bytes, a.top_k);
    check_note("%d ranks, %d blocks, top-%d, rows of %lld bytes, %d bytes", a.group.size,
               a.group.blocks, a.top_k, (long long)a.t.row_bytes, shared_bytes);
    CHECK(ep_partition_gather(&a, shared_bytes), "refused");
    check_division(&a.group, a.receivers, a.schedulers, a.chunk);
    check_pipeline(&a.pipeline, a.t.row_bytes, 16, a.top_k, shared_bytes - EP_GATHER_STATIC_BYTES);
}

/* The first two blocks are one of each kind, as many receive as shall, and the two kinds alternate:
 * no stretch of blocks has one more or less of a kind than its share, rounded. */
SoloTest(handles_partition, roles_alternate) {
    for (int32_t blocks = 2; blocks <= 160; blocks++)
        for (int32_t receivers = 1; receivers < blocks; receivers++) {
            check_note("%d of %d blocks", receivers, blocks);
            CHECK(ep_receivers_before(0, blocks, receivers) == 0, "before the first");
            CHECK(ep_receivers_before(1, blocks, receivers) == 0, "the first receives");
            CHECK(ep_receivers_before(2, blocks, receivers) == 1, "the second sends");
            CHECK(ep_receivers_before(blocks, blocks, receivers) == receivers, "%d in all",
                  ep_receivers_before(blocks, blocks, receivers));
            for (int32_t b = 2; b <= blocks; b++) {
                int32_t two = ep_receivers_before(b, blocks, receivers) -
                              ep_receivers_before(b - 2, blocks, receivers);
                int32_t share = 2 * receivers / blocks;
                CHECK(two == share || two == share + 1, "%d of blocks %d and %d", two, b - 2,
                      b - 1);
            }
        }
}

SoloTest(handles_partition, whatever_is_asked) {
    Random random = random_stream(7, 0, 0);
    for (int i = 0; i < 20000 && !check_failure()[0]; i++) {
        check_scatter(&random);
        check_gather(&random);
    }
}

/* Tokens that are quantised are cut into fragments of whole quantisation blocks (512 bytes). */
SoloTest(handles_partition, quantised_in_whole_blocks) {
    for (int64_t blocks = 1; blocks <= 128; blocks++) {
        EpScatterArgs a = {.group = {.size = 4, .blocks = H200_BLOCKS},
                           .top_k = 8,
                           .t.row_bytes = 128 * blocks,
                           .t.source_row_bytes = 512 * blocks,
                           .send = {.shrink = 2}};
        check_note("%lld blocks", (long long)blocks);
        CHECK(ep_partition_scatter(&a, H200_SHARED_BYTES, 512), "refused");
        check_pipeline(&a.send, a.t.source_row_bytes, 512, 1,
                       H200_SHARED_BYTES - EP_SCATTER_STATIC_BYTES);
        CHECK(a.send.shrink == 2 && a.receive.shrink == 0, "%d, %d", a.send.shrink,
              a.receive.shrink);
    }
}

/* Rows whose sums are packed are cut into fragments of whole groups of 512 elements. */
SoloTest(handles_partition, packed_in_whole_groups) {
    Random random = random_stream(8, 0, 0);
    for (int64_t elements = 16; elements <= 32768; elements += 16) {
        EpCudaGroup group = draw_group(&random);
        EpGatherArgs a = {.group = group,
                          .top_k = 8,
                          .t.type = EP_TYPE_BF16,
                          .t.format = ep_quant_format(EP_QUANT_FP8),
                          .t.row_bytes = 2 * elements};
        check_note("%lld elements, %d ranks, %d blocks", (long long)elements, group.size,
                   group.blocks);
        CHECK(ep_partition_gather(&a, H200_SHARED_BYTES), "refused");
        check_division(&a.group, a.receivers, a.schedulers, a.chunk);
        check_pipeline(&a.pipeline, a.t.row_bytes, 1024, 8,
                       H200_SHARED_BYTES - EP_GATHER_STATIC_BYTES);
        int64_t groups = (a.pipeline.stage_bytes / 2 + 511) / 512;
        CHECK(a.packed_stride == a.pipeline.stage_bytes / 2 + 16 * groups, "%d bytes of %d",
              a.packed_stride, a.pipeline.stage_bytes);
    }
}

/* FP32 needs twice the shared memory for a group: with the least that a group may have, and many
 * experts per token, it is refused. */
SoloTest(handles_partition, packed_without_room) {
    EpGatherArgs a = {.group = {.size = 4, .blocks = H200_BLOCKS},
                      .top_k = 32,
                      .t.type = EP_TYPE_FP32,
                      .t.format = ep_quant_format(EP_QUANT_FP8),
                      .t.row_bytes = 16384};
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = 16384, config.max_top_k = 32;
    CHECK(!ep_partition_gather(&a, (int32_t)ep_cuda_least_shared(&config, 4)), "not refused");
    CHECK(ep_partition_gather(&a, H200_SHARED_BYTES), "refused");
}

SoloTest(handles_partition, too_little_shared_memory) {
    EpScatterArgs s = {.group = {.size = 2, .blocks = H200_BLOCKS},
                       .top_k = 8,
                       .multiplied = EP_TYPE_BF16,
                       .t.row_bytes = 14336,
                       .t.source_row_bytes = 14336};
    EpGatherArgs g = {
        .group = s.group, .top_k = 8, .t.type = EP_TYPE_BF16, .t.row_bytes = s.t.row_bytes};
    CHECK(!ep_partition_scatter(&s, EP_SCATTER_STATIC_BYTES + 16000, 16), "it was enough");
    CHECK(!ep_partition_gather(&g, EP_GATHER_STATIC_BYTES + 16000), "it was enough");
}

/* ---- measured to be fastest ---------------------------------------------------------------- */

typedef struct Divided {
    EpScatterArgs dispatch, combine_backward;
    EpGatherArgs combine;
} Divided;

/* Divide a dispatch that receives in windows, a combine, and a combine_backward with weights, all
 * of bf16. */
static Divided divide(int32_t ranks, int32_t blocks, int32_t top_k, int64_t row_bytes) {
    EpCudaGroup group = {.size = ranks, .blocks = blocks};
    Divided d = {.dispatch = {.group = group,
                              .top_k = top_k,
                              .zero_copy = ranks > 1,
                              .t = {.row_bytes = row_bytes, .source_row_bytes = row_bytes}},
                 .combine = {.group = group,
                             .top_k = top_k,
                             .t = {.type = EP_TYPE_BF16, .row_bytes = row_bytes}}};
    d.combine_backward = d.dispatch, d.combine_backward.zero_copy = 0;
    d.combine_backward.multiplied = EP_TYPE_BF16, d.combine_backward.t.takes_dots = 1;
    CHECK(ep_partition_scatter(&d.dispatch, H200_SHARED_BYTES, 16), "dispatch is refused");
    CHECK(ep_partition_gather(&d.combine, H200_SHARED_BYTES), "combine is refused");
    CHECK(ep_partition_scatter(&d.combine_backward, H200_SHARED_BYTES, 16),
          "combine_backward is refused");
    return d;
}

/* Rows of 7168 elements of two bytes, top-8, with weights. */
typedef struct Measured {
    int32_t ranks, blocks;
    int32_t dispatch, combine, combine_backward; /* blocks that receive */
} Measured;

static const Measured measured[] = {
    {1, 132, 66, 131, 131}, /* own tokens go directly to their slots, or nothing is sent */
    {2, 132, 52, 72, 106},  /* the wire decides, and multiplying takes more than three quarters */
    {4, 132, 104, 67, 116}, /* more rows of a token travel: fewer blocks fill the wire */
    {1, 64, 16, 63, 63},    /* of fewer blocks, most are needed for the copies */
    {2, 24, 10, 13, 22},    {4, 24, 11, 9, 20},
};

SoloTest(handles_partition, blocks_that_receive) {
    for (size_t i = 0; i < sizeof(measured) / sizeof(*measured); i++) {
        const Measured *m = &measured[i];
        Divided d = divide(m->ranks, m->blocks, 8, 14336);
        int32_t multiply = d.combine_backward.receivers;
        check_note("%d ranks, %d blocks", m->ranks, m->blocks);
        CHECK(d.dispatch.receivers == m->dispatch, "dispatch: %d", d.dispatch.receivers);
        CHECK(d.combine.receivers == m->combine, "combine: %d", d.combine.receivers);
        CHECK(multiply == m->combine_backward, "combine_backward: %d", multiply);
    }
}

/* Of 24 blocks those that received where dispatch and combine took no more than 8 % longer than at
 * best. */
static const struct {
    int32_t ranks, top_k;
    int64_t row_bytes;
    int32_t least, most, least_sum, most_sum;
} few[] = {
    {2, 1, 10240, 13, 14, 13, 14}, {2, 2, 8192, 13, 14, 12, 13},  {2, 4, 5760, 13, 15, 13, 13},
    {2, 8, 6144, 12, 13, 12, 13},  {2, 10, 4096, 13, 14, 12, 13}, {4, 1, 10240, 13, 14, 12, 13},
    {4, 2, 8192, 13, 14, 11, 11},  {4, 4, 5760, 13, 15, 9, 11},   {4, 8, 6144, 14, 15, 8, 9},
    {4, 10, 4096, 16, 18, 8, 9}, /* rows of many experts take the warps that schedule them longer */
};

SoloTest(handles_partition, few_blocks) {
    for (size_t i = 0; i < sizeof(few) / sizeof(*few); i++) {
        Divided d = divide(few[i].ranks, 24, few[i].top_k, few[i].row_bytes);
        int32_t receive = d.dispatch.receivers, receive_sums = d.combine.receivers;
        check_note("%d ranks, top-%d, rows of %lld bytes", few[i].ranks, few[i].top_k,
                   (long long)few[i].row_bytes);
        CHECK(receive >= few[i].least && receive <= few[i].most, "dispatch: %d, expected %d to %d",
              receive, few[i].least, few[i].most);
        CHECK(receive_sums >= few[i].least_sum && receive_sums <= few[i].most_sum,
              "combine: %d, expected %d to %d", receive_sums, few[i].least_sum, few[i].most_sum);
    }
}

/* Two ranks: multiplying takes most of the time, but two of 24 blocks are too few to send. */
SoloTest(handles_partition, few_blocks_that_multiply) {
    static const struct {
        int32_t top_k, row_bytes, receive;
    } cases[] = {{8, 6144, 21}, {10, 4096, 21}, {4, 5760, 20}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        Divided d = divide(2, 24, cases[i].top_k, cases[i].row_bytes);
        int32_t multiply = d.combine_backward.receivers;
        CHECK(multiply == cases[i].receive, "top-%d: %d blocks", cases[i].top_k, multiply);
    }
}

/* Where a token has rows on several ranks, two warps of a block claim one token at a time. Fewer
 * blocks have no time for that if rows are small or have many experts. */
SoloTest(handles_partition, claims) {
    static const struct {
        int32_t ranks, blocks, top_k, row_bytes, schedulers, dispatch, combine;
    } cases[] = {
        {4, 132, 8, 14336, 2, 1, 1}, {4, 132, 10, 4096, 2, 1, 1}, {2, 132, 4, 5760, 1, 4, 3},
        {4, 64, 10, 4096, 2, 2, 2},  {4, 64, 8, 6144, 2, 1, 1},   {2, 72, 1, 10240, 2, 2, 2},
        {4, 24, 8, 14336, 2, 1, 1},  {4, 24, 10, 4096, 2, 2, 2},  {4, 24, 1, 10240, 2, 2, 2},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        Divided d = divide(cases[i].ranks, cases[i].blocks, cases[i].top_k, cases[i].row_bytes);
        const EpScatterArgs *s = &d.dispatch;
        const EpGatherArgs *g = &d.combine;
        check_note("%d ranks, %d blocks, top-%d", s->group.size, s->group.blocks, s->top_k);
        CHECK(s->schedulers == cases[i].schedulers, "%d schedule", s->schedulers);
        CHECK(g->schedulers == cases[i].schedulers, "%d schedule sums", g->schedulers);
        CHECK(s->chunk == cases[i].dispatch, "dispatch claims %d", s->chunk);
        CHECK(g->chunk == cases[i].combine, "combine claims %d", g->chunk);
    }
}

/* Of two ranks' blocks those that received where an operation took little longer than at best. */
typedef struct Range {
    int32_t blocks, top_k, row_bytes, least, most;
} Range;

static void check_range(const Range *r, const EpScatterArgs *divided) {
    check_note("%d blocks, top-%d, rows of %d bytes", r->blocks, r->top_k, r->row_bytes);
    CHECK(divided->receivers >= r->least && divided->receivers <= r->most,
          "%d receive, expected %d to %d", divided->receivers, r->least, r->most);
}

/* In dispatch no more than 4 % longer. The more of the blocks copies need, the fewer are left to
 * send. */
SoloTest(handles_partition, many_blocks_that_copy) {
    static const Range ranges[] = {
        {64, 1, 10240, 36, 37}, {72, 1, 10240, 36, 45}, {80, 1, 10240, 37, 47},
        {88, 1, 10240, 44, 49}, {64, 2, 8192, 39, 41},  {72, 2, 8192, 40, 45},
        {80, 2, 8192, 40, 50},  {88, 2, 8192, 40, 52},  {88, 4, 5760, 50, 57},
        {64, 10, 4096, 39, 39}, {80, 10, 4096, 48, 48}, {64, 8, 14336, 25, 25},
        {80, 8, 14336, 32, 41},
    };
    for (size_t i = 0; i < sizeof(ranges) / sizeof(*ranges); i++) {
        const Range *r = &ranges[i];
        Divided d = divide(2, r->blocks, r->top_k, r->row_bytes);
        check_range(r, &d.dispatch);
    }
}

/* Packing a sum takes a block longer than adding it up, so fewer receive. Those with which combine
 * of 7168 elements, top-8, takes no more than 6 % longer than at best. */
SoloTest(handles_partition, few_blocks_that_pack) {
    static const struct {
        int32_t ranks, blocks, least, most;
    } cases[] = {{2, 24, 12, 12}, {2, 40, 20, 20}, {2, 64, 31, 33},
                 {4, 24, 7, 8},   {4, 40, 12, 13}, {4, 64, 19, 21}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        EpGatherArgs a = {.group = {.size = cases[i].ranks, .blocks = cases[i].blocks},
                          .top_k = 8,
                          .t = {.type = EP_TYPE_BF16,
                                .format = ep_quant_format(EP_QUANT_FP8),
                                .row_bytes = 14336}};
        check_note("%d ranks, %d blocks", cases[i].ranks, cases[i].blocks);
        CHECK(ep_partition_gather(&a, H200_SHARED_BYTES), "refused");
        CHECK(a.receivers >= cases[i].least && a.receivers <= cases[i].most, "%d receive",
              a.receivers);
    }
}

/* In combine_backward no more than 4 % longer. The more blocks, the busier the memory, and the
 * longer senders wait. */
SoloTest(handles_partition, many_blocks_that_multiply) {
    static const Range ranges[] = {
        {64, 8, 14336, 57, 58},   {80, 8, 14336, 65, 73}, {96, 8, 14336, 74, 75},
        {64, 8, 6144, 57, 58},    {80, 8, 6144, 70, 73},  {96, 8, 6144, 81, 87},
        {64, 10, 4096, 57, 57},   {80, 10, 4096, 71, 71}, {96, 10, 4096, 84, 84},
        {132, 10, 4096, 99, 110}, {80, 22, 8192, 71, 72},
    };
    for (size_t i = 0; i < sizeof(ranges) / sizeof(*ranges); i++) {
        const Range *r = &ranges[i];
        Divided d = divide(2, r->blocks, r->top_k, r->row_bytes);
        check_range(r, &d.combine_backward);
    }
}

/* Two ranks with 132 blocks: for one expert of each token fewer blocks multiply. */
SoloTest(handles_partition, blocks_that_multiply_for_few_experts) {
    static const struct {
        int32_t top_k, receives;
    } cases[] = {
        {1, 99},
        {2, 102},
        {8, 108},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        Divided d = divide(2, H200_BLOCKS, cases[i].top_k, 8192);
        int32_t multiply = d.combine_backward.receivers;
        CHECK(multiply == cases[i].receives, "top-%d: %d blocks", cases[i].top_k, multiply);
    }
}

/* Two ranks with 132 blocks: the blocks that received where a dispatch took no more than 3 % longer
 * than at best. */
static const struct {
    int32_t top_k;
    int64_t row_bytes;
    int32_t least, most;
} dispatched[] = {
    {1, 10240, 46, 73}, /* a row leaves for each that is copied here: many blocks fill the wire */
    {2, 8192, 59, 86},  /* fewer do */
    {4, 5760, 66, 86},  /* where more slots are here */
    {8, 6144, 46, 73},  {8, 8192, 46, 86},
    {10, 4096, 83, 99}, /* receiving blocks have the most to do with small rows of many slots */
};

SoloTest(handles_partition, senders_of_other_shapes) {
    for (size_t i = 0; i < sizeof(dispatched) / sizeof(*dispatched); i++) {
        Divided d = divide(2, H200_BLOCKS, dispatched[i].top_k, dispatched[i].row_bytes);
        int32_t receive = d.dispatch.receivers, receive_sums = d.combine.receivers;
        check_note("top-%d, rows of %lld bytes", dispatched[i].top_k,
                   (long long)dispatched[i].row_bytes);
        CHECK(receive >= dispatched[i].least && receive <= dispatched[i].most,
              "dispatch: %d, expected %d to %d", receive, dispatched[i].least, dispatched[i].most);
        CHECK(receive_sums >= 70 && receive_sums <= 79, "combine: %d", receive_sums);
    }
}

/* Small rows and quantised rows need as many sending blocks as large rows do. */
SoloTest(handles_partition, senders_of_smaller_rows) {
    EpScatterArgs s = {.group = {.size = 4, .blocks = H200_BLOCKS},
                       .top_k = 8,
                       .zero_copy = 1,
                       .t.row_bytes = 2048,
                       .t.source_row_bytes = 2048};
    CHECK(ep_partition_scatter(&s, H200_SHARED_BYTES, 16), "refused");
    CHECK(s.receivers == 105, "rows of 2 KiB: %d", s.receivers);
    EpScatterArgs alone = s;
    alone.group.size = 1, alone.zero_copy = 0;
    CHECK(ep_partition_scatter(&alone, H200_SHARED_BYTES, 16), "refused");
    CHECK(alone.receivers == 33, "on one rank: %d", alone.receivers);
    s.t.row_bytes = 7168, s.t.source_row_bytes = 14336, s.t.format = ep_quant_format(EP_QUANT_FP8);
    CHECK(ep_partition_scatter(&s, H200_SHARED_BYTES, 512), "refused");
    CHECK(s.receivers == 104, "quantised: %d", s.receivers);
}

/* With small rows the sums take the time, not the wire. */
SoloTest(handles_partition, sums_of_small_rows) {
    EpGatherArgs g = {.group = {.size = 4, .blocks = H200_BLOCKS},
                      .top_k = 8,
                      .t.type = EP_TYPE_BF16,
                      .t.row_bytes = 4096};
    CHECK(ep_partition_gather(&g, H200_SHARED_BYTES), "refused");
    CHECK(g.receivers == 53, "rows of 4 KiB: %d", g.receivers);
    g.t.row_bytes = 2048;
    CHECK(ep_partition_gather(&g, H200_SHARED_BYTES), "refused");
    CHECK(g.receivers == 46, "rows of 2 KiB: %d", g.receivers);
}

/* Four ranks, 22 experts for each token: a sum has more terms where it is sent than where it
 * arrives. */
SoloTest(handles_partition, sums_of_many_experts) {
    EpGatherArgs g = {.group = {.size = 4, .blocks = H200_BLOCKS},
                      .top_k = 22,
                      .t = {.type = EP_TYPE_BF16, .row_bytes = 8192}};
    CHECK(ep_partition_gather(&g, H200_SHARED_BYTES), "refused");
    CHECK(g.receivers == 43, "%d blocks receive", g.receivers);
}

/* Packed sums are half as long on the wire, so twice as many are under way. */
SoloTest(handles_partition, packed_sums_under_way) {
    EpGatherArgs g = {.group = {.size = 4, .blocks = H200_BLOCKS},
                      .top_k = 8,
                      .t = {.type = EP_TYPE_BF16, .row_bytes = 14336}};
    EpGatherArgs packed = g;
    packed.t.format = ep_quant_format(EP_QUANT_FP8);
    CHECK(ep_partition_gather(&g, H200_SHARED_BYTES) &&
              ep_partition_gather(&packed, H200_SHARED_BYTES),
          "refused");
    CHECK(g.pipeline.active == 6 && packed.pipeline.active == 12, "%d, packed %d",
          g.pipeline.active, packed.pipeline.active);
    CHECK(packed.receivers == 48, "%d blocks receive", packed.receivers);
}

/* With one rank each row has all eight slots, so two rows fit only if they are cut into fragments.
 */
SoloTest(handles_partition, room_for_two_rows) {
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
        EpScatterArgs a = divide(ranks, H200_BLOCKS, 8, 14336).combine_backward;
        CHECK(a.receive.fragments == (ranks == 1 ? 2 : 1), "%d ranks: %d fragments", ranks,
              a.receive.fragments);
        CHECK(ranks > 1 || a.receive.stages >= 18, "%d stages", a.receive.stages);
    }
}

/* One warp of a block schedules or two: dispatch, combine, combine_backward. */
SoloTest(handles_partition, warps_that_schedule) {
    static const struct {
        int32_t ranks, blocks, top_k;
        int64_t row_bytes;
        int32_t dispatch, combine, combine_backward;
    } cases[] = {
        {2, 132, 8, 14336, 1, 1, 1}, {2, 132, 22, 8192, 1, 1, 1}, /* the memory decides */
        {2, 132, 10, 4096, 1, 2, 1},                              /* or nearly does */
        {4, 132, 8, 14336, 2, 2, 2}, {4, 132, 22, 8192, 2, 2, 2}, /* rows on three ranks */
        {4, 132, 1, 10240, 1, 1, 1},                              /* on one */
        {2, 24, 8, 14336, 1, 1, 2},  {2, 24, 10, 4096, 2, 2, 2},  /* blocks are few */
        {2, 24, 22, 8192, 2, 2, 2},  {1, 132, 22, 8192, 1, 1, 1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        Divided d = divide(cases[i].ranks, cases[i].blocks, cases[i].top_k, cases[i].row_bytes);
        int32_t dispatch = d.dispatch.schedulers, combine = d.combine.schedulers;
        int32_t backward = d.combine_backward.schedulers;
        check_note("%d ranks, %d blocks, top-%d", cases[i].ranks, cases[i].blocks, cases[i].top_k);
        CHECK(dispatch == cases[i].dispatch, "dispatch: %d", dispatch);
        CHECK(combine == cases[i].combine, "combine: %d", combine);
        CHECK(backward == cases[i].combine_backward, "combine_backward: %d", backward);
    }
}

/* Blocks claim large rows by one or two, small rows by four; few blocks claim by four, and where a
 * warp does not keep up otherwise, others claim more, too. Two warps of a block claim half as many
 * each. */
SoloTest(handles_partition, tokens_at_once) {
    static const struct {
        int64_t row_bytes;
        int32_t top_k, blocks, dispatch, combine, combine_backward;
    } cases[] = {
        {14336, 8, 132, 2, 2, 1}, {8192, 8, 132, 4, 2, 2}, {5760, 4, 132, 4, 3, 4},
        {4096, 8, 132, 4, 4, 4},  {2048, 8, 132, 2, 2, 2}, {14336, 8, 24, 4, 4, 2},
        {14336, 8, 64, 4, 3, 3},  {14336, 8, 56, 4, 3, 4}, {14336, 8, 80, 3, 2, 2},
        {14336, 8, 48, 4, 4, 2},  {8192, 2, 132, 4, 2, 4}, {10240, 1, 132, 4, 2, 4},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        Divided d = divide(2, cases[i].blocks, cases[i].top_k, cases[i].row_bytes);
        int32_t dispatch = d.dispatch.chunk, combine = d.combine.chunk;
        int32_t backward = d.combine_backward.chunk;
        check_note("rows of %lld bytes, top-%d, %d blocks", (long long)cases[i].row_bytes,
                   cases[i].top_k, cases[i].blocks);
        CHECK(dispatch == cases[i].dispatch, "dispatch: %d", dispatch);
        CHECK(combine == cases[i].combine, "combine: %d", combine);
        CHECK(backward == cases[i].combine_backward, "combine_backward: %d", backward);
    }
}

#endif
