/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of quantisation, against exhaustive search and double precision. */
#include "runtime/quant.h"
#include "runtime/host/rowmath.h"

#include <math.h>

#include "tests/harness/check.h"
#include "tests/harness/random.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Returns the code nearest to a value, found by trying all; of two equally near, the even one. */
static uint8_t search(double value) {
    if (isnan(value)) return 0x7f;
    uint8_t best = 0;
    for (int code = 1; code < 0x7f; code++) {
        double here = fabs(quant_decode((uint8_t)code) - fabs(value));
        double there = fabs(quant_decode(best) - fabs(value));
        if (here < there || (here == there && code % 2 == 0)) best = (uint8_t)code;
    }
    if (isinf(value)) best = 0x7e;
    return (uint8_t)(best | (signbit(value) ? 0x80 : 0));
}

static void check_code(float value) {
    uint8_t expected = search((double)value), got = ep_e4m3_from_float(value);
    CHECK(got == expected, "%a: 0x%02x instead of 0x%02x", (double)value, got, expected);
    CHECK(quant_encode((double)value) == expected, "%a: the oracle has 0x%02x instead of 0x%02x",
          (double)value, quant_encode((double)value), expected);
    uint8_t half = quant_encode_e2m1((double)value), got_half = ep_e2m1_from_float(value);
    CHECK(got_half == half, "%a: 0x%x instead of 0x%x", (double)value, got_half, half);
}

/* Every float whose low 16 bits are zero, and its two neighbours: all codes, the midpoints between
 * codes, and the neighbours of both. */
SoloTest(runtime_quant, codes_of_all_kinds_of_floats) {
    for (uint32_t high = 0; high < 0x10000; high++) {
        if (!isnan(from_bits(high << 16)) && fabsf(from_bits(high << 16)) > 600 && high % 64)
            continue;
        check_code(from_bits(high << 16));
        check_code(from_bits((high << 16) + 1));
        check_code(from_bits((high << 16) - 1));
    }
}

SoloTest(runtime_quant, e4m3_keeps_its_own_values) {
    for (int code = 0; code < 256; code++)
        if ((code & 0x7f) != 0x7f)
            CHECK(ep_e4m3_from_float((float)quant_decode((uint8_t)code)) == code, "0x%02x", code);
    CHECK(ep_e4m3_from_float(448.0f) == 0x7e && ep_e4m3_from_float(-1e30f) == 0xfe, "saturation");
    CHECK(ep_e4m3_from_float(-NAN) == 0x7f && ep_e4m3_from_float(NAN) == 0x7f, "NaN");
}

SoloTest(runtime_quant, values_of_all_codes) {
    for (int code = 0; code < 256; code++) {
        double expected = quant_decode((uint8_t)code);
        float got = ep_float_from_e4m3((uint8_t)code);
        if (isnan(expected))
            CHECK(isnan(got), "0x%02x: %a is no NaN", code, (double)got);
        else
            CHECK((double)got == expected && !signbit(got) == !(code & 0x80),
                  "0x%02x: %a instead of %a", code, (double)got, expected);
    }
}

enum { MOST = 300 };

static void check_row(EpQuant quant, float global, EpType type, const void *row, int n) {
    uint8_t got[MOST], expected[MOST];
    _Alignas(4) uint8_t scales[64], expected_scales[64];
    memset(scales, 0xee, sizeof(scales));
    memset(expected_scales, 0xee, sizeof(expected_scales));
    ep_quantise(ep_quant_format(quant), global, type, row, n, got, scales);
    quant_row(quant, global, type, row, n, expected, expected_scales);
    CHECK(memcmp(got, expected, (size_t)quant_bytes(quant, n)) == 0,
          "quant %d, type %d, %d elements", (int)quant, (int)type, n);
    CHECK(memcmp(scales, expected_scales, sizeof(scales)) == 0, "scales of quant %d, type %d, %d",
          (int)quant, (int)type, n);
}

/* Rows of random bits, and rows of numbers within a few powers of two. */
SoloTest(runtime_quant, random_rows) {
    for (uint64_t seed = 1; seed <= 600; seed++) {
        Random random = random_stream(seed, 3, 3);
        EpType type = (EpType)(1 + random_below(&random, 3));
        int n = 16 * (1 + (int)random_below(&random, 18));
        uint32_t row[MOST];
        for (int i = 0; i < MOST; i++)
            row[i] = (uint32_t)random_next(&random);
        uint32_t centre = (uint32_t)random_below(&random, 250);
        for (int i = 0; seed % 2 && type == EP_TYPE_FP32 && i < MOST; i++)
            row[i] = (row[i] & 0x807fffffu) | (centre + row[i] % 5) << 23;
        check_note("seed %llu", (unsigned long long)seed);
        float global = ldexpf(1 + random_unit(&random), (int)random_below(&random, 128) - 64);
        for (EpQuant quant = EP_QUANT_FP8; quant <= EP_QUANT_NVFP4; quant++)
            check_row(quant, global, type, row, n);
        check_row(EP_QUANT_NVFP4, seed % 3 ? 2688 : ldexpf(1, seed % 2 ? 64 : -64), type, row, n);
    }
}

static void check_first(EpQuant quant, float first, float second, double scale, uint8_t code) {
    float row[16] = {first, second};
    uint8_t out[16];
    _Alignas(4) uint8_t stored[4];
    ep_quantise(ep_quant_format(quant), 0, EP_TYPE_FP32, row, 16, out, stored);
    float fp32;
    memcpy(&fp32, stored, 4);
    double got = quant_scale_bytes(quant) == 4 ? (double)fp32 : ldexp(1, stored[0] - 127);
    CHECK(got == scale, "%a, %a: scale %a instead of %a", (double)first, (double)second, got,
          scale);
    CHECK(out[0] == code, "%a, %a: 0x%02x instead of 0x%02x", (double)first, (double)second, out[0],
          code);
}

/* Cases whose results are known without computation. */
SoloTest(runtime_quant, by_hand) {
    check_first(EP_QUANT_FP8, 448, 0, 1, 0x7e);
    check_first(EP_QUANT_FP8, 1, -448, 1, 0x38);
    check_first(EP_QUANT_FP8, -896, 0, 2, 0xfe);
    check_first(EP_QUANT_FP8_UE8M0, 448, 0, 1, 0x7e);
    check_first(EP_QUANT_FP8_UE8M0, 449, 0, 2, 0x76);
    check_first(EP_QUANT_FP8_POW2, 448, 0, 1, 0x7e);
    check_first(EP_QUANT_FP8_POW2, 449, 0, 2, 0x76);
    check_first(EP_QUANT_MXFP8, 224, 0, 0.5, 0x7e);
    check_first(EP_QUANT_MXFP8, 225, 0, 1, 0x76);
    /* Infinities and NaN do not affect the scale. */
    check_first(EP_QUANT_FP8, INFINITY, 448, 1, 0x7e);
    check_first(EP_QUANT_FP8, -INFINITY, 448, 1, 0xfe);
    check_first(EP_QUANT_FP8_UE8M0, -NAN, 448, 1, 0x7f);
    /* Rows of zeros. */
    check_first(EP_QUANT_FP8_UE8M0, 0, -0.0f, ldexp(1, -108), 0);
    check_first(EP_QUANT_FP8, -0.0f, 0, (double)(float)(ldexp(1, -100) / 448), 0x80);
}

/* The first two elements of a block of NVFP4 beside a 6, their byte and the scale's. */
static void check_nvfp4(float global, float first, float second, uint8_t scale, uint8_t pair) {
    float row[16] = {first, second, 6};
    uint8_t out[8], stored;
    ep_quantise(ep_quant_format(EP_QUANT_NVFP4), global, EP_TYPE_FP32, row, 16, out, &stored);
    CHECK(stored == scale && out[0] == pair, "%a, %a, %a: scale 0x%02x, 0x%02x", (double)global,
          (double)first, (double)second, stored, out[0]);
}

SoloTest(runtime_quant, nvfp4_by_hand) {
    check_nvfp4(1, 6, -3, 0x38, 0xd7);
    check_nvfp4(1, 5, 2.5f, 0x38, 0x46);
    check_nvfp4(1, 0.25f, -0.25f, 0x38, 0x80);
    check_nvfp4(448, 0.75f, 3.5f, 0x7e, 0x62);
    check_nvfp4(2688, 1, 0.5f, 0x7e, 0x57); /* the scale is at its largest, elements are too */
    check_nvfp4(0x1p-10f, 0.5f, 2, 0, 0);   /* a scale that is too small */
    check_nvfp4(1, INFINITY, -INFINITY, 0x38, 0xf7);
    check_nvfp4(1, NAN, -NAN, 0x38, 0x77);
    static const struct {
        float value;
        int is_one;
    } globals[] = {{0x1p-64f, 1},        {0x1p64f, 1},        {1, 1},        {0, 0},   {-1, 0},
                   {0x1.fffffep-65f, 0}, {0x1.000002p64f, 0}, {INFINITY, 0}, {NAN, 0}, {-0.0f, 0}};
    for (int i = 0; i < LENGTH(globals); i++)
        CHECK(ep_is_global_scale(globals[i].value) == globals[i].is_one, "%a",
              (double)globals[i].value);
}
