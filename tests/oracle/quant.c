/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/oracle/quant.h"

#include <math.h>
#include <string.h>

#include "tests/oracle/number.h"

#define E4M3 EP_TYPE_FP8_E4M3

static const QuantForm forms[] = {
    [EP_QUANT_NONE] = {EP_TYPE_UINT8, EP_TYPE_UINT8, 0, 1, 0, 0, 0, NULL},
    [EP_QUANT_FP8] = {E4M3, EP_TYPE_FP32, 8, 128, 448, 0, 0, quant_encode},
    [EP_QUANT_FP8_UE8M0] = {E4M3, EP_TYPE_UINT8, 8, 128, 448, 1, 0, quant_encode},
    [EP_QUANT_MXFP8] = {E4M3, EP_TYPE_UINT8, 8, 32, 448, 1, 0, quant_encode},
    [EP_QUANT_FP8_POW2] = {E4M3, EP_TYPE_FP32, 8, 128, 448, 1, 0, quant_encode},
    [EP_QUANT_NVFP4] = {EP_TYPE_UINT8, EP_TYPE_UINT8, 4, 16, 6, 0, 1, quant_encode_e2m1},
};

const QuantForm *quant_form(EpQuant quant) {
    return &forms[quant ? quant : EP_QUANT_NONE];
}

int quant_scales(EpQuant quant, int elements) {
    int blocks = 0;
    while (blocks * quant_form(quant)->block < elements)
        blocks++;
    return blocks;
}

int quant_bytes(EpQuant quant, int elements) {
    return elements * quant_form(quant)->bits / 8;
}

int quant_scale_bytes(EpQuant quant) {
    return quant_form(quant)->scale_type == EP_TYPE_FP32 ? 4 : 1;
}

/* Store code i of a row: lower ones in the lower bits of a byte. */
static void put_code(uint8_t *row, int i, int bits, uint8_t code) {
    int shift = i * bits % 8;
    uint8_t *byte = row + i * bits / 8;
    *byte = (uint8_t)(shift ? *byte | code << shift : code);
}

double quant_decode(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 0x80 ? -value : value;
}

/* The step of a value is an eighth of its power of two, at least 2^-9. The value has far fewer
 * digits than a double, so only the final rounding is inexact. */
uint8_t quant_encode(double value) {
    uint8_t sign = signbit(value) ? 0x80 : 0;
    if (isnan(value)) return 0x7f;
    double magnitude = fabs(value);
    if (magnitude > 448) magnitude = 448;
    int exponent = magnitude < ldexp(1, -6) ? -6 : ilogb(magnitude);
    int steps = (int)nearbyint(ldexp(magnitude, 3 - exponent));
    int code = exponent == -6 ? steps : (exponent + 7) * 8 + steps - 8;
    return (uint8_t)(sign | code);
}

const double quant_e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

/* Of two codes that are equally near the even one is taken. */
uint8_t quant_encode_e2m1(double value) {
    uint8_t best = 0;
    if (isnan(value)) return 7;
    double magnitude = fabs(value) < 6 ? fabs(value) : 6;
    for (uint8_t code = 1; code < 8; code++) {
        double here = fabs(quant_e2m1[code] - magnitude),
               there = fabs(quant_e2m1[best] - magnitude);
        if (here < there || (here == there && code % 2 == 0)) best = code;
    }
    return (uint8_t)(best | (signbit(value) ? 8 : 0));
}

/* Returns the correctly rounded quotient or product of two floats, for which double precision
 * suffices. */
static float divide(double a, double b) {
    return (float)(a / b);
}

static float multiply(double a, double b) {
    return (float)(a * b);
}

/* Returns the factor of a block's elements, and its scale. */
static float global_inverse(double amax, float global, uint8_t *scale) {
    *scale = quant_encode((double)multiply(global, multiply(amax, divide(1, 6))));
    float step = multiply(quant_decode(*scale), divide(1, global));
    return *scale ? divide(1, step) : 0;
}

static int least_power(float scale) {
    int power = -200;
    while (ldexp(1, power) < (double)scale)
        power++;
    return power;
}

void quant_block(EpQuant quant, float global, const float *x, int n, uint8_t *out, uint8_t *scale) {
    const QuantForm *form = quant_form(quant);
    double amax = ldexp(1, -100);
    for (int i = 0; i < n; i++)
        if (isfinite(x[i]) && fabs((double)x[i]) > amax) amax = fabs((double)x[i]);
    float quotient = divide(amax, form->largest), inverse = divide(form->largest, amax);
    if (form->is_global) {
        inverse = global_inverse(amax, global, scale);
    } else if (!form->is_power) {
        memcpy(scale, &quotient, 4);
    } else {
        int power = least_power(quotient);
        float power_of_two = (float)ldexp(1, power);
        if (form->scale_type == EP_TYPE_FP32)
            memcpy(scale, &power_of_two, 4);
        else
            *scale = (uint8_t)(power + 127);
        inverse = (float)ldexp(1, -power);
    }
    for (int i = 0; i < n; i++)
        put_code(out, i, form->bits, form->encode((double)multiply(x[i], inverse)));
}

void quant_row(EpQuant quant, float global, EpType type, const void *row, int elements,
               uint8_t *out, uint8_t *scales) {
    int block = quant_form(quant)->block;
    float x[128];
    for (int b = 0; b < quant_scales(quant, elements); b++) {
        int first = b * block, n = elements - first < block ? elements - first : block;
        for (int i = 0; i < n; i++)
            x[i] = number_get(row, type, first + i);
        quant_block(quant, global, x, n, out + quant_bytes(quant, first),
                    scales + b * quant_scale_bytes(quant));
    }
}

/* The product of a scale and a code has few enough digits to be exact in double precision. */
void quant_travel(float *row, int elements) {
    for (int first = 0; first < elements; first += 128) {
        int n = elements - first < 128 ? elements - first : 128;
        uint8_t codes[128], scale[4];
        float value;
        quant_block(EP_QUANT_FP8, 0, row + first, n, codes, scale);
        memcpy(&value, scale, 4);
        for (int i = 0; i < n; i++)
            row[first + i] = (float)((double)value * quant_decode(codes[i]));
    }
}
