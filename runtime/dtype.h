/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_DTYPE_H
#define EP_RUNTIME_DTYPE_H

/**
 * Number formats: conversions between the 16-bit types and float. They round to nearest even, and
 * have no branches, so that compilers vectorize loops that call them. Every NaN becomes 0x7fff, as
 * in the GPU's conversions, so backends agree to the bit.
 */

#include <stdint.h>
#include <string.h>

#include "ep/ep.h"

static inline float ep_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t ep_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float ep_float_from_bf16(uint16_t x) {
    return ep_float_from_bits((uint32_t)x << 16);
}

static inline uint16_t ep_bf16_from_float(float value) {
    uint32_t bits = ep_float_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

/* Shifts exponent and mantissa into place and rebiases; a floating-point subtraction, which is
 * exact, normalizes subnormals. */
static inline float ep_float_from_fp16(uint16_t x) {
    uint32_t magnitude = ((uint32_t)x & 0x7fffu) << 13;
    uint32_t exponent = magnitude & 0x0f800000u;
    uint32_t normal = magnitude + (112u << 23);
    uint32_t special = normal + (112u << 23);
    float subnormal = ep_float_from_bits(normal + (1u << 23)) - ep_float_from_bits(113u << 23);
    uint32_t bits = exponent == 0x0f800000u ? special : normal;
    bits = exponent == 0 ? ep_float_bits(subnormal) : bits;
    return ep_float_from_bits(bits | ((uint32_t)x & 0x8000u) << 16);
}

/* Rounds values below the smallest normal by adding 0.5, whose last place is exactly the
 * subnormals' step, and normal values by integer arithmetic on the float's bits. */
static inline uint16_t ep_fp16_from_float(float value) {
    uint32_t bits = ep_float_bits(value), sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t small = ep_float_bits(ep_float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    uint32_t half = magnitude < (113u << 23) ? small : normal;
    half = magnitude >= (143u << 23) ? 0x7c00u : half;
    return (uint16_t)(magnitude > 0x7f800000u ? 0x7fffu : half | sign);
}

static inline int ep_type_is_summable(EpType type) {
    return type == EP_TYPE_BF16 || type == EP_TYPE_FP16 || type == EP_TYPE_FP32;
}

static inline int ep_type_is_index(EpType type) {
    return type == EP_TYPE_INT32 || type == EP_TYPE_INT64;
}

/** Returns a type's name, as in "bf16"; "no type" for a value that is not an EpType. */
const char *ep_type_name(EpType type);

#endif
