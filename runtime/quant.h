/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_QUANT_H
#define EP_RUNTIME_QUANT_H

/**
 * Arithmetic of quantising rows before they travel, for host code and kernels alike.
 * docs/semantics.md defines it; this header implements it.
 *
 * Every compiler gives the same bits: each value results from one operation that IEEE 754 rounds
 * correctly, to nearest even, and no two operations can be fused:
 *
 *     amax         comparisons of the numbers' bits as integers, in any order
 *     amax / 448   one division  } kernels: __fdiv_rn, or plain / without -use_fast_math and with
 *     448 / amax   one division  } -prec-div=true, its default; never a reciprocal
 *     x * inverse  one multiplication: __fmul_rn, or plain * with -fmad=false
 *     e4m3         one rounding, of integers below; cvt.rn.satfinite.e4m3x2.f32 gives the same,
 *                  but for the sign of a NaN's code: see runtime/cuda/rows.cuh
 *     e2m1         likewise; cvt.rn.satfinite.e2m1x2.f32 gives the same
 *
 * Powers of two need only the first division; the rest is arithmetic on exponents. Scales that are
 * e4m3 take three more operations: see ep_quant_global. The only subnormal values are products
 * that e4m3 or e2m1 rounds to zero in any case, so flushing them changes nothing.
 */

#include <stdint.h>
#include <string.h>

#include "ep/ep.h"
#include "runtime/layout.h"

/* ---- the table ----------------------------------------------------------------------------- */

/** The codes of elements. ep_encode (runtime/host/rowmath.h) and ep_unit_codes
 *  (runtime/cuda/rows.cuh) make them. */
typedef enum EpCode { EP_CODE_E4M3 = 1, EP_CODE_E2M1 = 2 } EpCode;

/** How a block's scale is stored. */
typedef enum EpScaling {
    EP_SCALE_QUOTIENT, /**< FP32: amax / largest */
    EP_SCALE_POWER,    /**< FP32: that, rounded up to a power of two */
    EP_SCALE_EXPONENT, /**< UINT8: this power's exponent, UE8M0 */
    EP_SCALE_GLOBAL    /**< UINT8: amax / largest times the call's global scale, as e4m3 */
} EpScaling;

/** What else a format serves besides dispatch. */
typedef enum EpQuantUses {
    EP_FOR_SUMS = 1,  /**< partial sums on their way */
    EP_FOR_TILES = 2, /**< EP_BLOCKS_TILES */
    EP_FOR_GRADS = 4  /**< rows of combine_backward */
} EpQuantUses;

/**
 * All ways in which numbers are quantised: the names of their EpQuant, the type of the tensor that
 * holds codes, the code, bits of a code, elements of a block, which share a scale, and uses.
 */
#define EP_QUANT_MAP(X)                                                                         \
    X(FP8, EP_TYPE_FP8_E4M3, E4M3, 8, 128, QUOTIENT, EP_FOR_SUMS | EP_FOR_TILES | EP_FOR_GRADS) \
    X(FP8_UE8M0, EP_TYPE_FP8_E4M3, E4M3, 8, 128, EXPONENT, EP_FOR_TILES | EP_FOR_GRADS)         \
    X(MXFP8, EP_TYPE_FP8_E4M3, E4M3, 8, 32, EXPONENT, EP_FOR_GRADS)                             \
    X(FP8_POW2, EP_TYPE_FP8_E4M3, E4M3, 8, 128, POWER, EP_FOR_TILES | EP_FOR_GRADS)             \
    X(NVFP4, EP_TYPE_UINT8, E2M1, 4, 16, GLOBAL, 0)

/** A line of the table. Kernels get it by value among their arguments. */
typedef struct EpQuantFormat {
    EpQuant quant;
    EpType type;  /**< of a tensor of codes */
    int32_t code; /**< an EpCode */
    int32_t bits; /**< of a code; 0: nothing is quantised */
    int32_t block;
    int32_t scaling; /**< an EpScaling */
    int32_t uses;    /**< of EpQuantUses */
} EpQuantFormat;

/** Returns the line of `quant`; with 0 bits for EP_QUANT_NONE and what is no EpQuant. */
EP_HOST_DEVICE static inline EpQuantFormat ep_quant_format(EpQuant quant) {
    EpQuantFormat format = {quant, EP_TYPE_UINT8, 0, 0, 1, 0, 0};
#define EP_QUANT_LINE(name, type, code, bits, block, scaling, uses)                               \
    case EP_QUANT_##name: {                                                                       \
        const EpQuantFormat line = {quant, type, EP_CODE_##code, bits, block, EP_SCALE_##scaling, \
                                    uses};                                                        \
        return line;                                                                              \
    }
    switch (quant) {
        EP_QUANT_MAP(EP_QUANT_LINE)
    default:
        return format;
    }
#undef EP_QUANT_LINE
}

/** Partial sums travel in this format; only it has EP_FOR_SUMS. */
#define EP_SUM_QUANT EP_QUANT_FP8

/** Returns the bytes of `elements` codes. */
EP_HOST_DEVICE static inline int64_t ep_quant_bytes(EpQuantFormat format, int64_t elements) {
    return elements * format.bits / 8;
}

/** Returns the elements of a tensor that hold the codes of `elements` numbers. All types of codes
 *  have one byte. */
EP_HOST_DEVICE static inline int64_t ep_quant_width(EpQuantFormat format, int64_t elements) {
    return ep_quant_bytes(format, elements);
}

/** Returns the number of elements whose codes are 16 bytes: rows are multiples of it. */
EP_HOST_DEVICE static inline int32_t ep_quant_unit(EpQuantFormat format) {
    return 16 * 8 / format.bits;
}

EP_HOST_DEVICE static inline int64_t ep_quant_scales(EpQuantFormat format, int64_t elements) {
    return (elements + format.block - 1) / format.block;
}

EP_HOST_DEVICE static inline EpType ep_quant_scale_type(EpQuantFormat format) {
    return format.scaling >= EP_SCALE_EXPONENT ? EP_TYPE_UINT8 : EP_TYPE_FP32;
}

/* ---- scales -------------------------------------------------------------------------------- */

/** The least amax is 2^-100, so that no quotient over- or underflows. */
#define EP_QUANT_LEAST_BITS 0x0d800000u
#define EP_QUANT_INFINITY_BITS 0x7f800000u

/** Returns the largest number that an element of a format stands for, where scales are not
 *  EP_SCALE_GLOBAL: there E4M3 is the only code. */
EP_HOST_DEVICE static inline float ep_code_largest(int32_t code) {
    (void)code;
    return 448.0f;
}

EP_HOST_DEVICE static inline uint32_t ep_quant_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

EP_HOST_DEVICE static inline float ep_quant_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/** Returns the bits of an element's magnitude, or 0 if it is infinite or NaN. A block's amax is the
 *  largest of these and EP_QUANT_LEAST_BITS. */
EP_HOST_DEVICE static inline uint32_t ep_quant_magnitude(float value) {
    uint32_t magnitude = ep_quant_bits(value) & 0x7fffffffu;
    return magnitude < EP_QUANT_INFINITY_BITS ? magnitude : 0;
}

/** A block's scale. */
typedef struct EpQuantScale {
    uint32_t stored; /**< FP32 bits, or the byte of UE8M0 or e4m3 */
    float inverse;   /**< elements are multiplied by it */
} EpQuantScale;

/** Returns the scale of a block of a format other than EP_SCALE_GLOBAL. */
EP_HOST_DEVICE static inline EpQuantScale ep_quant_scale(EpQuantFormat format, uint32_t amax_bits) {
    float amax = ep_quant_float(amax_bits);
    float largest = ep_code_largest(format.code);
    uint32_t bits = ep_quant_bits(amax / largest);
    EpQuantScale scale = {bits, 0};
    if (format.scaling == EP_SCALE_QUOTIENT) {
        scale.inverse = largest / amax;
        return scale;
    }
    /* The exponent, rounded up: 18 .. 247, so its inverse is normal, too. */
    uint32_t exponent = (bits + 0x7fffffu) >> 23;
    scale.stored = format.scaling == EP_SCALE_POWER ? exponent << 23 : exponent;
    scale.inverse = ep_quant_float((254u - exponent) << 23);
    return scale;
}

/* ---- codes --------------------------------------------------------------------------------- */

/**
 * Returns the e4m3 of a float, rounded to nearest even. Magnitudes beyond 448, infinity included,
 * become 448; every NaN becomes 0x7f. Below the smallest normal, 2^-6, steps are 2^-9, which is the
 * last place of floats of 2^14: so adding 16384 rounds to them.
 */
EP_HOST_DEVICE static inline uint8_t ep_e4m3_from_float(float value) {
    uint32_t bits = ep_quant_bits(value), magnitude = bits & 0x7fffffffu;
    uint32_t small = ep_quant_bits(ep_quant_float(magnitude) + 16384.0f) - 0x46800000u;
    uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    uint32_t code = magnitude < (121u << 23) ? small : normal;
    code = code > 0x7eu ? 0x7eu : code;
    return (uint8_t)(magnitude > EP_QUANT_INFINITY_BITS ? 0x7fu : code | (bits >> 24 & 0x80u));
}

/** Returns the value of an e4m3, exactly; 0x7f and 0xff are NaN. Codes below 8 count steps of 2^-9.
 *  No subnormal float occurs on the way. */
EP_HOST_DEVICE static inline float ep_float_from_e4m3(uint8_t code) {
    uint32_t magnitude = code & 0x7fu, sign = (uint32_t)(code & 0x80u) << 24;
    uint32_t small = ep_quant_bits((float)(int32_t)magnitude * (1.0f / 512));
    uint32_t normal = magnitude == 0x7fu ? 0x7fc00000u : (magnitude << 20) + (120u << 23);
    return ep_quant_float(sign | (magnitude < 8 ? small : normal));
}

/**
 * Returns the e2m1 of a float, rounded to nearest even: 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with its sign.
 * Magnitudes beyond 6, infinity included, become 6; every NaN becomes 0x7, as the instruction has
 * it. Below 1 steps are 0.5, which is the last place of floats of 2^22: so adding 4194304 rounds to
 * them.
 */
EP_HOST_DEVICE static inline uint8_t ep_e2m1_from_float(float value) {
    uint32_t bits = ep_quant_bits(value), magnitude = bits & 0x7fffffffu;
    uint32_t small = ep_quant_bits(ep_quant_float(magnitude) + 4194304.0f) - 0x4a800000u;
    uint32_t normal = (magnitude - (126u << 23) + 0x1fffffu + (magnitude >> 22 & 1u)) >> 22;
    uint32_t code = magnitude < (127u << 23) ? small : normal;
    code = code > 7u ? 7u : code;
    return (uint8_t)(magnitude > EP_QUANT_INFINITY_BITS ? 7u : code | (bits >> 28 & 8u));
}

/* ---- a global scale ------------------------------------------------------------------------ */

/** A global scale is 2^-64 to 2^64, so that both reciprocals below are normal. */
#define EP_GLOBAL_LEAST_BITS 0x1f800000u
#define EP_GLOBAL_MOST_BITS 0x5f800000u

/** Returns whether a number is a global scale; NaN and negative numbers are none. */
EP_HOST_DEVICE static inline int ep_is_global_scale(float value) {
    return ep_quant_bits(value) - EP_GLOBAL_LEAST_BITS <=
           EP_GLOBAL_MOST_BITS - EP_GLOBAL_LEAST_BITS;
}

/** Returns the scale of a block of EP_SCALE_GLOBAL, each operation rounded by itself. A scale that
 *  rounds to 0 stands for a block of zeros. */
EP_HOST_DEVICE static inline EpQuantScale ep_quant_global(float global, uint32_t amax_bits) {
    uint8_t code = ep_e4m3_from_float(global * (ep_quant_float(amax_bits) * (1.0f / 6.0f)));
    float step = ep_float_from_e4m3(code) * (1.0f / global);
    EpQuantScale scale = {code, code ? 1.0f / step : 0.0f};
    return scale;
}

#endif
