/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_CUDA_FP16_H
#define EMULATOR_CUDA_FP16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

static inline float __half2float(__half h) {
    int sign = h.bits >> 15, exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
    float value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                  : exponent == 0 ? ldexpf((float)mantissa, -24)
                                  : ldexpf((float)(mantissa + 1024), exponent - 25);
    return sign ? -value : value;
}

/* Rounds to nearest even: scales to multiples of the local step, which is exact, then rounds. */
static inline __half __float2half_rn(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float size = fabsf(value);
    int exponent;
    if (isnan(value)) return {0x7fff};
    if (size >= 65520) return {(uint16_t)(sign | 0x7c00)};
    frexpf(size, &exponent);
    int step = exponent - 11 > -24 ? exponent - 11 : -24;
    uint16_t steps = (uint16_t)nearbyintf(ldexpf(size, -step)); /* may round up to a power of 2 */
    return {(uint16_t)(sign | (uint16_t)(steps + (size > 0 ? (step + 24) << 10 : 0)))};
}

static inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}

#endif
