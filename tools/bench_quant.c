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

/* A magnitude as a whole number of steps: an eighth of the power of two below it, or 2^-9. */
static uint8_t e4m3(float value) {
    double magnitude = fmin(fabs((double)value), LARGEST);
    int exponent;
    (void)frexp(magnitude, &exponent);
    exponent = exponent - 1 < -6 ? -6 : exponent - 1;
    int steps = (int)rint(ldexp(magnitude, 3 - exponent));
    int code = steps + (exponent + 6) * 8;
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
        for (int64_t i = begin; i < end; i++)
            amax = fmax(amax, fabs((double)row[i]));
        float inverse = scale_block(quant, amax, (char *)scales + (size_t)b * unit);
        for (int64_t i = begin; i < end; i++)
            ((uint8_t *)out)[i] = e4m3((float)((double)row[i] * (double)inverse));
    }
}
