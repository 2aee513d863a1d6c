/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels divide the work: what must hold for all arguments, and what experiments found to be
 * fastest. The code under test needs no GPU; builds with emulated GPUs run this. */
#if EP_WITH_CUDA

#include <math.h>

#include "combine/cuda/gather.h"
#include "dispatch/cuda/scatter.h"

#include "runtime/cuda/tuning.h"
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
    int64_t least = ep_cuda_least_shared(&config, 1, 0);
    return (int32_t)(random_percent(random, 50) ? least : ep_max(least, H200_SHARED_BYTES));
}

static EpCudaGroup draw_group(Random *random) {
    return (EpCudaGroup){.size = 1 + (int32_t)random_below(random, 72),
                         .blocks = 2 + (int32_t)random_below(random, 160)};
}

/* Draw a constant: often one of its limits. */
static double draw_constant(Random *random, double least, double most) {
    int64_t draw = random_below(random, 100);
    double low = least > 1e-6 ? least : 1e-6;
    return draw < 30 ? least : draw > 70 ? most : low * pow(most / low, (double)(draw - 30) / 40);
}

/* Draw a table that a file may have: half of the constants are as usual. */
static EpTuning draw_tuning(Random *random) {
    EpTuning t = ep_tuning_hopper;
#define DRAW(member, value, least, most, unit, how) \
    if (random_percent(random, 50)) t.member = draw_constant(random, least, most);
    EP_TUNING_MAP(DRAW)
#undef DRAW
    if (t.many_spare <= t.few_spare) t.many_spare = t.few_spare + 1;
    return t;
}

static void check_scatter(Random *random, const EpTuning *tuning) {
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
    CHECK(ep_partition_scatter(tuning, &a, shared_bytes, 16), "refused");
    check_division(&a.group, a.receivers, a.schedulers, a.chunk);
    check_pipeline(&a.send, a.t.row_bytes, 16, 1, shared_bytes - EP_SCATTER_STATIC_BYTES);
    check_pipeline(&a.receive, a.t.row_bytes, 16, held, shared_bytes - EP_SCATTER_STATIC_BYTES);
}

static void check_gather(Random *random, const EpTuning *tuning) {
    EpGatherArgs a = {.group = draw_group(random),
                      .top_k = 1 + (int32_t)random_below(random, 32),
                      .t.type = EP_TYPE_BF16,
                      .t.row_bytes = 16 * (1 + random_below(random, 4096))};
    int32_t shared_bytes = draw_shared_bytes(random, a.t.row_bytes, a.top_k);
    check_note("%d ranks, %d blocks, top-%d, rows of %lld bytes, %d bytes", a.group.size,
               a.group.blocks, a.top_k, (long long)a.t.row_bytes, shared_bytes);
    CHECK(ep_partition_gather(tuning, &a, shared_bytes), "refused");
    check_division(&a.group, a.receivers, a.schedulers, a.chunk);
    check_pipeline(&a.pipeline, a.t.row_bytes, 16, a.top_k, shared_bytes - EP_GATHER_STATIC_BYTES);
}

/* The first two blocks are one of each kind, as many receive as shall, and the two kinds alternate:
 * no stretch of blocks has one more or less of a kind than its share, rounded. */
SoloTest(runtime_partition, roles_alternate) {
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

SoloTest(runtime_partition, whatever_is_asked) {
    Random random = random_stream(7, 0, 0);
    for (int i = 0; i < 20000 && !check_failure()[0]; i++) {
        EpTuning tuning = i % 2 ? draw_tuning(&random) : ep_tuning_hopper;
        check_scatter(&random, &tuning);
        check_gather(&random, &tuning);
    }
}

/* Tokens that are quantised are cut into fragments of whole quantisation blocks (512 bytes). */
SoloTest(runtime_partition, quantised_in_whole_blocks) {
    for (int64_t blocks = 1; blocks <= 128; blocks++) {
        EpScatterArgs a = {.group = {.size = 4, .blocks = H200_BLOCKS},
                           .top_k = 8,
                           .t.row_bytes = 128 * blocks,
                           .t.source_row_bytes = 512 * blocks,
                           .send = {.shrink = 2}};
        check_note("%lld blocks", (long long)blocks);
        CHECK(ep_partition_scatter(&ep_tuning_hopper, &a, H200_SHARED_BYTES, 512), "refused");
        check_pipeline(&a.send, a.t.source_row_bytes, 512, 1,
                       H200_SHARED_BYTES - EP_SCATTER_STATIC_BYTES);
        CHECK(a.send.shrink == 2 && a.receive.shrink == 0, "%d, %d", a.send.shrink,
              a.receive.shrink);
    }
}

/* Rows whose sums are packed are cut into fragments of whole groups of 512 elements. */
SoloTest(runtime_partition, packed_in_whole_groups) {
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
        CHECK(ep_partition_gather(&ep_tuning_hopper, &a, H200_SHARED_BYTES), "refused");
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
SoloTest(runtime_partition, packed_without_room) {
    EpGatherArgs a = {.group = {.size = 4, .blocks = H200_BLOCKS},
                      .top_k = 32,
                      .t.type = EP_TYPE_FP32,
                      .t.format = ep_quant_format(EP_QUANT_FP8),
                      .t.row_bytes = 16384};
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = 16384, config.max_top_k = 32;
    CHECK(!ep_partition_gather(&ep_tuning_hopper, &a, (int32_t)ep_cuda_least_shared(&config, 4, 0)),
          "not refused");
    CHECK(ep_partition_gather(&ep_tuning_hopper, &a, H200_SHARED_BYTES), "refused");
}

SoloTest(runtime_partition, too_little_shared_memory) {
    EpScatterArgs s = {.group = {.size = 2, .blocks = H200_BLOCKS},
                       .top_k = 8,
                       .multiplied = EP_TYPE_BF16,
                       .t.row_bytes = 14336,
                       .t.source_row_bytes = 14336};
    EpGatherArgs g = {
        .group = s.group, .top_k = 8, .t.type = EP_TYPE_BF16, .t.row_bytes = s.t.row_bytes};
    CHECK(!ep_partition_scatter(&ep_tuning_hopper, &s, EP_SCATTER_STATIC_BYTES + 16000, 16),
          "it was enough");
    CHECK(!ep_partition_gather(&ep_tuning_hopper, &g, EP_GATHER_STATIC_BYTES + 16000),
          "it was enough");
}

/* ---- what is chosen ------------------------------------------------------------------------ */

/** Of an operation: blocks that receive, warps of a block that schedule, tokens claimed at once. */
typedef struct Chosen {
    int32_t receivers, schedulers, chunk;
} Chosen;

static Chosen chosen_scatter(int32_t ranks, int32_t blocks, int32_t top_k, int64_t row_bytes,
                             int multiplies) {
    EpScatterArgs a = {.group = {.size = ranks, .blocks = blocks},
                       .top_k = top_k,
                       .zero_copy = !multiplies && ranks > 1,
                       .multiplied = multiplies ? EP_TYPE_BF16 : 0,
                       .t = {.row_bytes = row_bytes, .source_row_bytes = row_bytes}};
    a.t.takes_dots = multiplies;
    CHECK(ep_partition_scatter(&ep_tuning_hopper, &a, H200_SHARED_BYTES, 16), "refused");
    /* With one rank each row has all slots, so two large rows fit only if cut into fragments. */
    if (multiplies && top_k == 8 && row_bytes == 14336)
        CHECK(a.receive.fragments == (ranks == 1 ? 2 : 1) && (ranks > 1 || a.receive.stages >= 18),
              "%d fragments, %d stages", a.receive.fragments, a.receive.stages);
    return (Chosen){a.receivers, a.schedulers, a.chunk};
}

static EpGatherArgs divided_gather(int32_t ranks, int32_t blocks, int32_t top_k, int64_t row_bytes,
                                   int packs) {
    EpGatherArgs a = {.group = {.size = ranks, .blocks = blocks},
                      .top_k = top_k,
                      .t = {.type = EP_TYPE_BF16, .row_bytes = row_bytes}};
    if (packs) a.t.format = ep_quant_format(EP_QUANT_FP8);
    CHECK(ep_partition_gather(&ep_tuning_hopper, &a, H200_SHARED_BYTES), "refused");
    return a;
}

/** For bf16 rows: a dispatch that receives in windows, a combine, and a combine_backward with
 * weights. */
typedef struct Division {
    int32_t ranks, blocks, top_k, row_bytes;
    Chosen dispatch, combine, combine_backward;
} Division;

/* Experiments found these to be fastest, or within a few percent: see docs/notes/blocks.md. Where
 * the cost model changes, measure, and replace the rows by those that the failing test prints. */
static const Division divisions[] = {
    {1, 64, 8, 14336, {16, 1, 4}, {63, 1, 2}, {63, 1, 2}},
    {1, 132, 8, 2048, {33, 2, 2}, {131, 2, 2}, {131, 1, 4}},
    {1, 132, 8, 14336, {66, 1, 2}, {131, 1, 2}, {131, 1, 1}},
    {1, 132, 22, 8192, {66, 1, 4}, {131, 1, 2}, {131, 1, 1}},
    {2, 24, 1, 10240, {13, 2, 2}, {14, 2, 2}, {18, 1, 4}},
    {2, 24, 2, 8192, {13, 2, 2}, {13, 2, 2}, {19, 1, 4}},
    {2, 24, 4, 5760, {14, 2, 2}, {13, 2, 2}, {20, 1, 4}},
    {2, 24, 8, 6144, {12, 1, 4}, {13, 1, 4}, {21, 2, 2}},
    {2, 24, 8, 14336, {10, 1, 4}, {13, 1, 4}, {22, 2, 2}},
    {2, 24, 10, 4096, {14, 2, 2}, {13, 2, 2}, {21, 2, 2}},
    {2, 24, 22, 8192, {11, 2, 2}, {14, 2, 2}, {22, 2, 2}},
    {2, 64, 1, 10240, {36, 2, 2}, {37, 2, 2}, {48, 1, 4}},
    {2, 64, 2, 8192, {40, 1, 4}, {37, 2, 2}, {51, 1, 4}},
    {2, 64, 8, 6144, {33, 1, 4}, {35, 1, 4}, {57, 2, 2}},
    {2, 64, 8, 14336, {25, 1, 4}, {35, 1, 3}, {57, 1, 3}},
    {2, 64, 10, 4096, {39, 2, 2}, {34, 2, 2}, {57, 2, 2}},
    {2, 80, 1, 10240, {46, 1, 4}, {46, 2, 2}, {60, 1, 4}},
    {2, 80, 2, 8192, {41, 1, 4}, {46, 2, 2}, {60, 1, 4}},
    {2, 80, 8, 6144, {41, 1, 4}, {43, 1, 4}, {70, 2, 2}},
    {2, 80, 8, 14336, {41, 1, 3}, {43, 1, 2}, {66, 1, 2}},
    {2, 80, 10, 4096, {48, 2, 2}, {43, 2, 2}, {71, 2, 2}},
    {2, 80, 22, 8192, {37, 2, 2}, {42, 2, 2}, {71, 2, 1}},
    {2, 132, 1, 8192, {51, 2, 2}, {77, 2, 1}, {99, 1, 4}},
    {2, 132, 1, 10240, {64, 1, 4}, {77, 1, 2}, {99, 1, 4}},
    {2, 132, 2, 8192, {69, 1, 4}, {77, 1, 2}, {102, 1, 4}},
    {2, 132, 4, 5760, {73, 1, 4}, {74, 1, 3}, {103, 1, 4}},
    {2, 132, 8, 2048, {79, 2, 2}, {70, 2, 2}, {114, 2, 2}},
    {2, 132, 8, 4096, {82, 1, 4}, {71, 1, 4}, {108, 1, 4}},
    {2, 132, 8, 6144, {65, 1, 4}, {71, 1, 3}, {107, 1, 3}},
    {2, 132, 8, 8192, {57, 1, 4}, {71, 1, 2}, {108, 1, 2}},
    {2, 132, 8, 14336, {52, 1, 2}, {72, 1, 2}, {106, 1, 1}},
    {2, 132, 10, 4096, {85, 1, 4}, {70, 2, 2}, {109, 1, 3}},
    {2, 132, 22, 8192, {71, 1, 4}, {69, 1, 2}, {108, 1, 1}},
    {3, 132, 8, 14336, {92, 1, 2}, {57, 1, 2}, {114, 1, 1}},
    {4, 24, 1, 10240, {13, 2, 2}, {13, 2, 2}, {18, 1, 4}},
    {4, 24, 2, 8192, {14, 2, 2}, {11, 2, 2}, {19, 1, 4}},
    {4, 24, 4, 5760, {15, 2, 2}, {9, 2, 2}, {20, 2, 2}},
    {4, 24, 8, 6144, {14, 2, 2}, {9, 2, 2}, {21, 2, 2}},
    {4, 24, 8, 14336, {11, 2, 1}, {9, 2, 1}, {20, 2, 2}},
    {4, 24, 10, 4096, {17, 2, 2}, {8, 2, 2}, {21, 2, 2}},
    {4, 64, 8, 6144, {45, 2, 1}, {24, 2, 1}, {55, 2, 2}},
    {4, 64, 10, 4096, {49, 2, 2}, {23, 2, 2}, {57, 2, 2}},
    {4, 132, 1, 10240, {86, 1, 4}, {77, 1, 2}, {106, 1, 4}},
    {4, 132, 8, 2048, {105, 2, 1}, {46, 2, 2}, {111, 2, 2}},
    {4, 132, 8, 4096, {105, 2, 1}, {53, 2, 1}, {113, 2, 2}},
    {4, 132, 8, 14336, {104, 2, 1}, {67, 2, 1}, {116, 2, 1}},
    {4, 132, 10, 4096, {106, 2, 1}, {47, 2, 1}, {114, 2, 2}},
    {4, 132, 22, 8192, {101, 2, 1}, {43, 2, 1}, {118, 2, 1}},
};

static void check_chosen(const char *what, Chosen got, Chosen expected) {
    CHECK(got.receivers == expected.receivers && got.schedulers == expected.schedulers &&
              got.chunk == expected.chunk,
          "%s: {%d, %d, %d}", what, got.receivers, got.schedulers, got.chunk);
}

SoloTest(runtime_partition, divisions) {
    for (int i = 0; i < LENGTH(divisions); i++) {
        const Division *d = &divisions[i];
        int32_t ranks = d->ranks, blocks = d->blocks, top_k = d->top_k, bytes = d->row_bytes;
        EpGatherArgs g = divided_gather(ranks, blocks, top_k, bytes, 0);
        check_note("%d ranks, %d blocks, top-%d, rows of %d bytes", ranks, blocks, top_k, bytes);
        check_chosen("dispatch", chosen_scatter(ranks, blocks, top_k, bytes, 0), d->dispatch);
        check_chosen("combine", (Chosen){g.receivers, g.schedulers, g.chunk}, d->combine);
        check_chosen("combine_backward", chosen_scatter(ranks, blocks, top_k, bytes, 1),
                     d->combine_backward);
    }
}

/* Packing a sum takes a block longer than adding it up, so fewer receive. Packed sums are half as
 * long on the wire, so twice as many are under way. */
SoloTest(runtime_partition, blocks_that_pack) {
    static const struct {
        int32_t ranks, blocks, receivers, active;
    } cases[] = {{2, 24, 12, 20}, {2, 40, 20, 20}, {2, 64, 33, 20}, {2, 132, 72, 12},
                 {4, 24, 7, 20},  {4, 40, 12, 20}, {4, 64, 19, 20}, {4, 132, 48, 12}};
    for (int i = 0; i < LENGTH(cases); i++) {
        EpGatherArgs a = divided_gather(cases[i].ranks, cases[i].blocks, 8, 14336, 1);
        check_note("%d ranks, %d blocks", cases[i].ranks, cases[i].blocks);
        CHECK(a.receivers == cases[i].receivers && a.pipeline.active == cases[i].active,
              "%d receive, %d under way", a.receivers, a.pipeline.active);
    }
    EpGatherArgs plain = divided_gather(4, H200_BLOCKS, 8, 14336, 0);
    CHECK(plain.pipeline.active == 6, "%d under way", plain.pipeline.active);
}

/* Sums by entry: senders copy rows, so the least part of the blocks sends. A sender's item has a
 * stage for each of a token's rows on a rank. */
SoloTest(runtime_partition, blocks_of_entries) {
    static const struct {
        int32_t ranks, blocks, top_k, receivers;
    } cases[] = {{2, 24, 8, 10},  {2, 132, 8, 76}, {4, 24, 8, 6},
                 {4, 132, 8, 76}, {8, 132, 8, 76}, {4, 132, 32, 76}};
    for (int i = 0; i < LENGTH(cases); i++) {
        EpGatherArgs a = {.group = {.size = cases[i].ranks, .blocks = cases[i].blocks},
                          .top_k = cases[i].top_k,
                          .t = {.type = EP_TYPE_BF16, .row_bytes = 14336, .by_entry = 1}};
        CHECK(ep_partition_gather(&ep_tuning_hopper, &a, H200_SHARED_BYTES), "refused");
        check_note("%d ranks, %d blocks, top-%d", a.group.size, a.group.blocks, a.top_k);
        CHECK(a.receivers == cases[i].receivers && a.pipeline.stages >= a.top_k,
              "%d receive, with %d stages", a.receivers, a.pipeline.stages);
    }
}

/* Quantised rows need as many sending blocks as large rows do. */
SoloTest(runtime_partition, senders_of_quantised_rows) {
    EpScatterArgs s = {.group = {.size = 4, .blocks = H200_BLOCKS}, .top_k = 8, .zero_copy = 1};
    s.t.row_bytes = 7168, s.t.source_row_bytes = 14336, s.t.format = ep_quant_format(EP_QUANT_FP8);
    CHECK(ep_partition_scatter(&ep_tuning_hopper, &s, H200_SHARED_BYTES, 512), "refused");
    CHECK(s.receivers == 104, "%d", s.receivers);
}

#endif
