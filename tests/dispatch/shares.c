/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels divide the work: what must hold for whatever is asked of them, and what was found to
 * be fastest. */
#include "dispatch/shares.h"

#include "runtime/cuda_limits.h"
#include "tests/harness/check.h"
#include "tests/harness/random.h"

#define H200_SHARED_BYTES 232448
#define H200_BLOCKS 132

/* ---- what must hold ------------------------------------------------------------------------ */

static void check_pipe(const EpPipeShape *s, int64_t row_bytes, int64_t unit, int held,
                       int64_t shared_bytes) {
    int64_t room = shared_bytes - EP_STATIC_SHARED_BYTES - EP_JOB_TABLE_BYTES * s->width;
    CHECK((int64_t)s->stages * s->stage_bytes <= room, "%d stages of %d bytes in %lld", s->stages,
          s->stage_bytes, (long long)room);
    CHECK(s->stages >= held, "%d stages, a job holds %d", s->stages, held);
    CHECK((int64_t)s->pieces * s->stage_bytes >= row_bytes &&
              (int64_t)(s->pieces - 1) * s->stage_bytes < row_bytes,
          "%d pieces of %d bytes of %lld", s->pieces, s->stage_bytes, (long long)row_bytes);
    CHECK(s->pieces == 1 || s->stage_bytes % unit == 0, "pieces of %d bytes, unit %lld",
          s->stage_bytes, (long long)unit);
    CHECK(s->ahead >= 1 && s->ahead <= EP_MOST_AHEAD, "%d jobs ahead", s->ahead);
}

static void check_division(const EpCudaGroup *group, int32_t receivers, int32_t chunk) {
    CHECK(receivers >= 1 && receivers < group->blocks, "%d of %d blocks receive", receivers,
          group->blocks);
    CHECK(chunk >= 1 && chunk <= 4, "%d tokens at once", chunk);
}

/* As little shared memory as a group may have, or as much as there is. */
static int32_t draw_shared_bytes(Random *random, int64_t row_bytes, int32_t top_k) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = row_bytes, config.max_top_k = top_k;
    int64_t least = ep_cuda_least_shared(&config);
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
                       .type = multiplies ? EP_TYPE_BF16 : 0,
                       .takes_dots = multiplies && random_percent(random, 50),
                       .lands = !multiplies && random_percent(random, 50),
                       .row_bytes = 16 * (1 + random_below(random, 4096))};
    int held = multiplies ? 1 + a.top_k : 1;
    a.source_row_bytes = a.row_bytes;
    int32_t shared_bytes = draw_shared_bytes(random, a.row_bytes, a.top_k);
    check_note("%d ranks, %d blocks, top-%d, type %d, rows of %lld bytes, %d bytes", a.group.size,
               a.group.blocks, a.top_k, a.type, (long long)a.row_bytes, shared_bytes);
    CHECK(ep_share_scatter(&a, shared_bytes, 16), "refused");
    check_division(&a.group, a.receivers, a.chunk);
    check_pipe(&a.send, a.row_bytes, 16, 1, shared_bytes);
    check_pipe(&a.fill, a.row_bytes, 16, held, shared_bytes);
}

static void check_gather(Random *random) {
    EpGatherArgs a = {.group = draw_group(random),
                      .top_k = 1 + (int32_t)random_below(random, 32),
                      .type = EP_TYPE_BF16,
                      .row_bytes = 16 * (1 + random_below(random, 4096))};
    int32_t shared_bytes = draw_shared_bytes(random, a.row_bytes, a.top_k);
    check_note("%d ranks, %d blocks, top-%d, rows of %lld bytes, %d bytes", a.group.size,
               a.group.blocks, a.top_k, (long long)a.row_bytes, shared_bytes);
    CHECK(ep_share_gather(&a, shared_bytes), "refused");
    check_division(&a.group, a.receivers, a.chunk);
    check_pipe(&a.pipe, a.row_bytes, 16, a.top_k, shared_bytes);
}

SoloTest(dispatch_shares, whatever_is_asked) {
    Random random = random_stream(7, 0, 0);
    for (int i = 0; i < 20000 && !check_failure()[0]; i++) {
        check_scatter(&random);
        check_gather(&random);
    }
}

/* Tokens that are quantised go in pieces of whole blocks of theirs. */
SoloTest(dispatch_shares, quantised_in_whole_blocks) {
    for (int64_t blocks = 1; blocks <= 128; blocks++) {
        EpScatterArgs a = {.group = {.size = 4, .blocks = H200_BLOCKS},
                           .top_k = 8,
                           .row_bytes = 128 * blocks,
                           .source_row_bytes = 512 * blocks,
                           .send = {.shrink = 2}};
        check_note("%lld blocks", (long long)blocks);
        CHECK(ep_share_scatter(&a, H200_SHARED_BYTES, 512), "refused");
        check_pipe(&a.send, a.source_row_bytes, 512, 1, H200_SHARED_BYTES);
        CHECK(a.send.shrink == 2 && a.fill.shrink == 0, "%d, %d", a.send.shrink, a.fill.shrink);
    }
}

SoloTest(dispatch_shares, too_little_shared_memory) {
    EpScatterArgs s = {.group = {.size = 2, .blocks = H200_BLOCKS},
                       .top_k = 8,
                       .type = EP_TYPE_BF16,
                       .row_bytes = 14336,
                       .source_row_bytes = 14336};
    EpGatherArgs g = {.group = s.group, .top_k = 8, .type = EP_TYPE_BF16, .row_bytes = s.row_bytes};
    CHECK(!ep_share_scatter(&s, EP_STATIC_SHARED_BYTES + 16000, 16), "it was enough");
    CHECK(!ep_share_gather(&g, EP_STATIC_SHARED_BYTES + 16000), "it was enough");
}

/* ---- what was found to be fastest ---------------------------------------------------------- */

/* Rows of 7168 elements of two bytes, top-8; weights travel. */
typedef struct Measured {
    int32_t ranks, blocks;
    int32_t dispatch, combine, combine_backward; /* blocks that receive */
} Measured;

static const Measured measured[] = {
    {1, 132, 66, 131, 131}, /* own tokens go straight to their slots, or nothing is sent */
    {2, 132, 66, 72, 99},   /* the wire decides, and multiplying takes three quarters */
    {4, 132, 104, 66, 99},  /* more rows of a token travel: fewer blocks fill the wire */
    {2, 24, 10, 13, 22},    {4, 24, 12, 9, 20},
};

SoloTest(dispatch_shares, blocks_that_receive) {
    for (size_t i = 0; i < sizeof(measured) / sizeof(*measured); i++) {
        const Measured *m = &measured[i];
        EpScatterArgs s = {.group = {.size = m->ranks, .blocks = m->blocks},
                           .top_k = 8,
                           .lands = m->ranks > 1,
                           .row_bytes = 14336,
                           .source_row_bytes = 14336};
        EpScatterArgs b = s;
        EpGatherArgs g = {.group = s.group, .top_k = 8, .type = EP_TYPE_BF16, .row_bytes = 14336};
        b.lands = 0, b.type = EP_TYPE_BF16, b.takes_dots = 1;
        CHECK(ep_share_scatter(&s, H200_SHARED_BYTES, 16) &&
                  ep_share_scatter(&b, H200_SHARED_BYTES, 16) &&
                  ep_share_gather(&g, H200_SHARED_BYTES),
              "refused");
        check_note("%d ranks, %d blocks", m->ranks, m->blocks);
        CHECK(s.receivers == m->dispatch, "dispatch: %d", s.receivers);
        CHECK(g.receivers == m->combine, "combine: %d", g.receivers);
        CHECK(b.receivers == m->combine_backward, "combine_backward: %d", b.receivers);
    }
}

/* As many blocks fill the wire with small rows, and where they quantise. */
SoloTest(dispatch_shares, senders_of_smaller_rows) {
    EpScatterArgs s = {.group = {.size = 4, .blocks = H200_BLOCKS},
                       .top_k = 8,
                       .lands = 1,
                       .row_bytes = 2048,
                       .source_row_bytes = 2048};
    CHECK(ep_share_scatter(&s, H200_SHARED_BYTES, 16), "refused");
    CHECK(s.receivers == 104, "rows of 2 KiB: %d", s.receivers);
    s.row_bytes = 7168, s.source_row_bytes = 14336, s.quant = EP_QUANT_FP8;
    CHECK(ep_share_scatter(&s, H200_SHARED_BYTES, 512), "refused");
    CHECK(s.receivers == 104, "quantised: %d", s.receivers);
}

/* With small rows it is not the wire that takes the time, but adding up. */
SoloTest(dispatch_shares, sums_of_small_rows) {
    EpGatherArgs g = {.group = {.size = 4, .blocks = H200_BLOCKS},
                      .top_k = 8,
                      .type = EP_TYPE_BF16,
                      .row_bytes = 4096};
    CHECK(ep_share_gather(&g, H200_SHARED_BYTES), "refused");
    CHECK(g.receivers == 66, "rows of 4 KiB: %d", g.receivers);
    g.row_bytes = 2048;
    CHECK(ep_share_gather(&g, H200_SHARED_BYTES), "refused");
    CHECK(g.receivers == 52, "rows of 2 KiB: %d", g.receivers);
}

/* Where a rank is alone, each row has all eight slots: in halves two of them have room. */
SoloTest(dispatch_shares, room_for_two_rows) {
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
        EpScatterArgs a = {.group = {.size = ranks, .blocks = H200_BLOCKS},
                           .top_k = 8,
                           .type = EP_TYPE_BF16,
                           .takes_dots = 1,
                           .row_bytes = 14336,
                           .source_row_bytes = 14336};
        CHECK(ep_share_scatter(&a, H200_SHARED_BYTES, 16), "refused");
        CHECK(a.fill.pieces == (ranks == 1 ? 2 : 1), "%d ranks: %d pieces", ranks, a.fill.pieces);
        CHECK(ranks > 1 || a.fill.stages >= 18, "%d stages", a.fill.stages);
    }
}

/* Large rows are claimed by one or two, small ones and those of few blocks by four. */
SoloTest(dispatch_shares, tokens_at_once) {
    static const struct {
        int64_t row_bytes;
        int32_t blocks, dispatch, combine;
    } cases[] = {
        {14336, 132, 2, 1}, {8192, 132, 4, 2}, {4096, 132, 4, 4},
        {2048, 132, 4, 4},  {14336, 24, 4, 4},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        EpScatterArgs s = {.group = {.size = 2, .blocks = cases[i].blocks},
                           .top_k = 8,
                           .row_bytes = cases[i].row_bytes,
                           .source_row_bytes = cases[i].row_bytes};
        EpGatherArgs g = {
            .group = s.group, .top_k = 8, .type = EP_TYPE_BF16, .row_bytes = s.row_bytes};
        CHECK(ep_share_scatter(&s, H200_SHARED_BYTES, 16) && ep_share_gather(&g, H200_SHARED_BYTES),
              "refused");
        check_note("rows of %lld bytes, %d blocks", (long long)s.row_bytes, cases[i].blocks);
        CHECK(s.chunk == cases[i].dispatch, "dispatch: %d", s.chunk);
        CHECK(g.chunk == cases[i].combine, "combine: %d", g.chunk);
    }
}
