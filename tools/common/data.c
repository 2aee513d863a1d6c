/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/data.h"

#include <math.h>
#include <string.h>

#include "tools/common/option.h"

uint64_t data_id(int64_t seed, DataKind kind, int rank, int64_t token, int64_t tag) {
    uint64_t hash = hash_add((uint64_t)seed, (int64_t)kind);
    return hash_add(hash_add(hash, ((int64_t)rank << 32) ^ token), tag);
}

float data_weight(uint64_t id) {
    return (float)((id >> 40) + 1) * 0x1p-24f;
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* It uses 32-bit arithmetic only, since 64-bit products do not vectorise before AVX-512. */
BENCH_WIDE static void fill_words(uint32_t *words, size_t count, uint64_t id, uint32_t keep,
                                  uint32_t base) {
    uint32_t low = (uint32_t)id, high = (uint32_t)(id >> 32);
    for (uint32_t i = 0; i < (uint32_t)count; i++) {
        uint32_t h = (i * 0x9E3779B1u) ^ low;
        h = (h ^ (h >> 15)) * 0x85EBCA6Bu + high;
        h = (h ^ (h >> 13)) * 0xC2B2AE35u;
        h ^= h >> 16;
        words[i] = (h & keep) | base;
    }
}

/* Keep sign, mantissa and the two low bits of the exponent. The base sets the exponent's other
 * bits, so that it is 2^-3 .. 2^0. */
void data_row(EpType type, uint64_t id, void *row, size_t bytes) {
    uint32_t keep = 0xFFFFFFFFu, base = 0;
    if (type == EP_TYPE_BF16)
        keep = 0x81FF81FFu, base = 0x3E003E00u;
    else if (type == EP_TYPE_FP16)
        keep = 0x8FFF8FFFu, base = 0x30003000u;
    else if (type == EP_TYPE_FP32)
        keep = 0x81FFFFFFu, base = 0x3E000000u;
    fill_words(row, bytes / sizeof(uint32_t), id, keep, base);
}

/* ---- formats ------------------------------------------------------------------------------- */

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline uint16_t bf16_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

/* The product adjusts the exponent and turns half's subnormals into normal floats, exactly. */
static inline float float_of_half(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13;
    uint32_t finite = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
    uint32_t special = magnitude | 0x7F800000;
    uint32_t bits = magnitude >= 0x0F800000 ? special : finite;
    return float_of_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

/* Below 2^-14 the sum with 1/2 rounds to a multiple of 2^-24, half's smallest step. */
static inline uint16_t half_of_float(float value) {
    uint32_t bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFF;
    uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000;
    uint32_t half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x47800000 ? 0x7C00 : half;
    half = magnitude > 0x7F800000 ? 0x7E00 : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

BENCH_WIDE static void floats_of_bf16(const uint16_t *in, float *out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        out[i] = float_of_bits((uint32_t)in[i] << 16);
}

BENCH_WIDE static void floats_of_half(const uint16_t *in, float *out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        out[i] = float_of_half(in[i]);
}

BENCH_WIDE static void bf16_of_floats(const float *in, uint16_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        out[i] = bf16_of_float(in[i]);
}

BENCH_WIDE static void half_of_floats(const float *in, uint16_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        out[i] = half_of_float(in[i]);
}

void data_to_float(EpType type, const void *row, float *out, int64_t count) {
    if (type == EP_TYPE_BF16)
        floats_of_bf16(row, out, count);
    else if (type == EP_TYPE_FP16)
        floats_of_half(row, out, count);
    else
        memcpy(out, row, (size_t)count * sizeof(float));
}

void data_from_float(EpType type, const float *in, void *row, int64_t count) {
    if (type == EP_TYPE_BF16)
        bf16_of_floats(in, row, count);
    else if (type == EP_TYPE_FP16)
        half_of_floats(in, row, count);
    else
        memcpy(row, in, (size_t)count * sizeof(float));
}

/* ---- sums ---------------------------------------------------------------------------------- */

BENCH_WIDE void data_add(float *acc, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        acc[i] += x[i];
}

BENCH_WIDE void data_fma(float *acc, float w, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        acc[i] = fmaf(w, x[i], acc[i]);
}

BENCH_WIDE static void fma_bf16(float *acc, float w, const uint16_t *row, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        acc[i] = fmaf(w, float_of_bits((uint32_t)row[i] << 16), acc[i]);
}

BENCH_WIDE static void fma_half(float *acc, float w, const uint16_t *row, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        acc[i] = fmaf(w, float_of_half(row[i]), acc[i]);
}

void data_fma_row(EpType type, float *acc, float w, const void *row, int64_t count) {
    if (type == EP_TYPE_BF16)
        fma_bf16(acc, w, row, count);
    else if (type == EP_TYPE_FP16)
        fma_half(acc, w, row, count);
    else
        data_fma(acc, w, row, count);
}

BENCH_WIDE void data_scale(float *x, float w, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        x[i] *= w;
}

/* ---- quantisation -------------------------------------------------------------------------- */

#define LARGEST 448.0

static const QuantFormat formats[] = {
    {EP_QUANT_FP8, 8, EP_TYPE_FP8_E4M3, EP_TYPE_FP32, 128, false, true},
    {EP_QUANT_FP8_UE8M0, 8, EP_TYPE_FP8_E4M3, EP_TYPE_UINT8, 128, true, true},
    {EP_QUANT_MXFP8, 8, EP_TYPE_FP8_E4M3, EP_TYPE_UINT8, 32, true, false},
    {EP_QUANT_FP8_POW2, 8, EP_TYPE_FP8_E4M3, EP_TYPE_FP32, 128, true, true},
    {EP_QUANT_NVFP4, 4, EP_TYPE_UINT8, EP_TYPE_UINT8, 16, false, false},
    {EP_QUANT_NONE, 0, EP_TYPE_UINT8, EP_TYPE_UINT8, 1, false, false},
};

const Choice option_quants[] = {{"none", EP_QUANT_NONE},           {"fp8", EP_QUANT_FP8},
                                {"fp8-ue8m0", EP_QUANT_FP8_UE8M0}, {"mxfp8", EP_QUANT_MXFP8},
                                {"fp8-pow2", EP_QUANT_FP8_POW2},   {NULL, 0}};

const QuantFormat *quant_format(int64_t quant) {
    const QuantFormat *f = formats;
    while (f->bits && f->quant != (EpQuant)quant)
        f++;
    return f;
}

int64_t quant_scales(EpQuant quant, int64_t elements) {
    int64_t block = quant_format(quant)->block;
    return (elements + block - 1) / block;
}

int64_t quant_bytes(EpQuant quant, int64_t elements) {
    return elements * quant_format(quant)->bits / 8;
}

/* 2^e as a double. <math.h> functions here and in exponent_of would take most of the run time. */
static double power_of_two(int e) {
    uint64_t bits = (uint64_t)(e + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Exponent of the power of two at or below a positive number; very low for 0. */
static int exponent_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (int)(bits >> 52) - 1023;
}

/* Round a magnitude to a whole number of steps; a step is an eighth of the power of two below it,
 * at least 2^-9. Adding 2^52 rounds a number to a whole one, ties to even. */
static uint8_t e4m3(float value) {
    double magnitude = fabs((double)value);
    magnitude = magnitude > LARGEST ? LARGEST : magnitude;
    int exponent = exponent_of(magnitude);
    exponent = exponent < -6 ? -6 : exponent;
    double whole = magnitude * power_of_two(3 - exponent) + 0x1p52;
    int code = (int)(whole - 0x1p52) + (exponent + 6) * 8;
    return (uint8_t)(code | (signbit(value) ? 0x80 : 0));
}

/* The codes of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, by the midpoints: one that lies on a midpoint goes to
 * the even code. */
static uint8_t e2m1(float value) {
    static const float middle[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    uint8_t code = 0;
    for (int i = 0; i < 7; i++)
        code += i % 2 ? fabsf(value) >= middle[i] : fabsf(value) > middle[i];
    return (uint8_t)(code | (signbit(value) ? 8 : 0));
}

/* As scale_block for NVFP4. */
static float scale_nvfp4(double amax, uint8_t *scale) {
    double sixth = (double)(float)(1 / 6.0), product = (double)(float)(amax * sixth);
    *scale = e4m3((float)((double)DATA_GLOBAL_SCALE * product));
    double inverse = (double)(float)(1 / (double)DATA_GLOBAL_SCALE);
    float step = (float)((double)e4m3_value(*scale) * inverse);
    return *scale ? (float)(1 / (double)step) : 0;
}

/* Store the scale, return its inverse. Quotients and products of floats are computed in double,
 * whose precision suffices for rounding once. */
static float scale_block(const QuantFormat *format, double amax, void *scale) {
    if (format->bits == 4) return scale_nvfp4(amax, scale);
    float stored = (float)(amax / LARGEST);
    if (!format->is_power) {
        memcpy(scale, &stored, sizeof(stored));
        return (float)(LARGEST / amax);
    }
    int exponent;
    if (frexp((double)stored, &exponent) == 0.5) exponent--;
    if (format->scale_type == EP_TYPE_FP32) {
        stored = (float)ldexp(1, exponent);
        memcpy(scale, &stored, sizeof(stored));
    } else {
        *(uint8_t *)scale = (uint8_t)(exponent + 127);
    }
    return (float)ldexp(1, -exponent);
}

void quant_row(EpQuant quant, const float *row, int64_t count, void *out, void *scales) {
    const QuantFormat *format = quant_format(quant);
    size_t unit = ep_type_bytes(format->scale_type);
    for (int64_t begin = 0, b = 0; begin < count; begin += format->block, b++) {
        int64_t end = begin + format->block < count ? begin + format->block : count;
        double amax = 0x1p-100;
        for (int64_t i = begin; i < end; i++) {
            double magnitude = fabs((double)row[i]);
            amax = magnitude > amax ? magnitude : amax;
        }
        float inverse = scale_block(format, amax, (char *)scales + (size_t)b * unit);
        for (int64_t i = begin; i < end; i++) {
            float value = (float)((double)row[i] * (double)inverse);
            if (format->bits == 8)
                ((uint8_t *)out)[i] = e4m3(value);
            else if (i % 2)
                ((uint8_t *)out)[i / 2] |= (uint8_t)(e2m1(value) << 4);
            else
                ((uint8_t *)out)[i / 2] = e2m1(value);
        }
    }
}

float e4m3_value(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double value =
        exponent ? (8 + mantissa) * power_of_two(exponent - 10) : mantissa * power_of_two(-9);
    if ((code & 0x7f) == 0x7f) value = NAN;
    return (float)(code & 0x80 ? -value : value);
}

void quant_to_float(const void *row, const void *scales, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) {
        float scale = ((const float *)scales)[i / quant_format(EP_QUANT_FP8)->block];
        out[i] = (float)((double)scale * (double)e4m3_value(((const uint8_t *)row)[i]));
    }
}
