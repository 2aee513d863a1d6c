/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_quant.h"

#include <math.h>
#include <string.h>

#define LARGEST 448.0

static int64_t block_of(EpQuant quant) {
    return quant == EP_QUANT_MXFP8 ? 32 : 128;
}

int64_t quant_scales(EpQuant quant, int64_t elements) {
    return (elements + block_of(quant) - 1) / block_of(quant);
}

EpType quant_scale_type(EpQuant quant) {
    return quant == EP_QUANT_FP8 ? EP_TYPE_FP32 : EP_TYPE_UINT8;
}

/* 2^e as a double. Functions of <math.h> for this and the next would take most of a run. */
static double power_of_two(int e) {
    uint64_t bits = (uint64_t)(e + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The power of two at or below a positive number; 0 has a very low one. */
static int exponent_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (int)(bits >> 52) - 1023;
}

/* A magnitude as a whole number of steps: an eighth of the power of two below it, or 2^-9. Numbers
 * that are added to 2^52 are rounded to whole ones, ties to even. */
static uint8_t e4m3(float value) {
    double magnitude = fabs((double)value);
    magnitude = magnitude > LARGEST ? LARGEST : magnitude;
    int exponent = exponent_of(magnitude);
    exponent = exponent < -6 ? -6 : exponent;
    double whole = magnitude * power_of_two(3 - exponent) + 0x1p52;
    int code = (int)(whole - 0x1p52) + (exponent + 6) * 8;
    return (uint8_t)(code | (signbit(value) ? 0x80 : 0));
}

/* Quotients and products of floats, rounded once: double precision has digits to spare. */
static float scale_block(EpQuant quant, double amax, void *scale) {
    float stored = (float)(amax / LARGEST);
    if (quant == EP_QUANT_FP8) {
        memcpy(scale, &stored, sizeof(stored));
        return (float)(LARGEST / amax);
    }
    int exponent;
    if (frexp((double)stored, &exponent) == 0.5) exponent--;
    *(uint8_t *)scale = (uint8_t)(exponent + 127);
    return (float)ldexp(1, -exponent);
}

void quant_row(EpQuant quant, const float *row, int64_t count, void *out, void *scales) {
    size_t unit = ep_type_bytes(quant_scale_type(quant));
    for (int64_t begin = 0, b = 0; begin < count; begin += block_of(quant), b++) {
        int64_t end = begin + block_of(quant) < count ? begin + block_of(quant) : count;
        double amax = 0x1p-100;
        for (int64_t i = begin; i < end; i++) {
            double magnitude = fabs((double)row[i]);
            amax = magnitude > amax ? magnitude : amax;
        }
        float inverse = scale_block(quant, amax, (char *)scales + (size_t)b * unit);
        for (int64_t i = begin; i < end; i++)
            ((uint8_t *)out)[i] = e4m3((float)((double)row[i] * (double)inverse));
    }
}
