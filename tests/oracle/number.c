/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/oracle/number.h"

#include <math.h>
#include <string.h>

typedef struct Format {
    int bytes, mantissa_bits, bias, max_exponent;
} Format;

static Format format_of(EpType type) {
    if (type == EP_TYPE_BF16) return (Format){2, 7, 127, 255};
    if (type == EP_TYPE_FP16) return (Format){2, 10, 15, 31};
    return (Format){4, 23, 127, 255};
}

static uint32_t load(const void *array, int bytes, int64_t i) {
    uint32_t bits = 0;
    memcpy(&bits, (const char *)array + i * bytes, (size_t)bytes);
    return bits;
}

static float decode(Format f, uint32_t bits) {
    int sign = (int)(bits >> (f.bytes * 8 - 1));
    int exponent = (int)(bits >> f.mantissa_bits) & f.max_exponent;
    uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1);
    double value;
    if (exponent == f.max_exponent)
        value = mantissa ? NAN : INFINITY;
    else if (exponent == 0)
        value = ldexp(mantissa, 1 - f.bias - f.mantissa_bits);
    else
        value =
            ldexp((double)(mantissa | 1u << f.mantissa_bits), exponent - f.bias - f.mantissa_bits);
    return (float)(sign ? -value : value);
}

/* Encode a finite `value` >= 0. A mantissa that rounds up to the next power of two carries into the
 * exponent, up to infinity. */
static uint32_t encode_magnitude(Format f, double value) {
    if (value == 0) return 0;
    int exponent = ilogb(value);
    if (exponent < 1 - f.bias) exponent = 1 - f.bias;
    uint32_t mantissa = (uint32_t)nearbyint(ldexp(value, f.mantissa_bits - exponent));
    uint32_t bits = ((uint32_t)(exponent + f.bias - 1) << f.mantissa_bits) + mantissa;
    uint32_t infinity = (uint32_t)f.max_exponent << f.mantissa_bits;
    return bits > infinity ? infinity : bits;
}

static uint32_t encode(Format f, float value) {
    uint32_t sign = signbit(value) ? 1u << (f.bytes * 8 - 1) : 0;
    uint32_t infinity = (uint32_t)f.max_exponent << f.mantissa_bits;
    if (isnan(value)) return sign | infinity | 1u << (f.mantissa_bits - 1);
    if (isinf(value)) return sign | infinity;
    return sign | encode_magnitude(f, fabs((double)value));
}

/* Most numbers are bf16: the upper half of a float. */
float number_get(const void *array, EpType type, int64_t i) {
    Format f = format_of(type);
    if (type == EP_TYPE_FP16) return decode(f, load(array, f.bytes, i));
    uint32_t bits = load(array, f.bytes, i) << (type == EP_TYPE_BF16 ? 16 : 0);
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

void number_set(void *array, EpType type, int64_t i, float value) {
    Format f = format_of(type);
    uint32_t bits;
    if (type == EP_TYPE_FP32)
        memcpy(&bits, &value, 4);
    else
        bits = encode(f, value);
    memcpy((char *)array + i * f.bytes, &bits, (size_t)f.bytes);
}

float number_round(EpType type, float value) {
    uint32_t bits;
    number_set(&bits, type, 0, value);
    return number_get(&bits, type, 0);
}

uint32_t number_bits(EpType type, uint64_t random) {
    Format f = format_of(type);
    uint32_t sign = (uint32_t)(random & 1) << (f.bytes * 8 - 1);
    if ((random >> 1 & 15) == 0) return sign;
    uint32_t exponent = (uint32_t)(f.bias - 8 + (int)((random >> 5) % 12));
    uint32_t mantissa = (uint32_t)(random >> 32) & ((1u << f.mantissa_bits) - 1);
    return sign | exponent << f.mantissa_bits | mantissa;
}
