/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_QUANTISE_CUH
#define EP_RUNTIME_CUDA_QUANTISE_CUH

/**
 * Quantise one row by a group of threads, with the same bits as ep_quantise (runtime/quant.h).
 *
 * A thread takes a unit at a time: 16 elements become 2 bytes for each bit of a code. The lanes
 * that have the units of a block, 8 or 2 neighbours of one warp, find its amax together, and each
 * computes the scale.
 */

#include "runtime/cuda/ptx.cuh"
#include "runtime/cuda/rows.cuh"
#include "runtime/quant.h"

#define EP_QUANT_UNIT 16 /* elements that a thread takes at a time */

template <typename T> struct EpUnit {
    static constexpr int PARTS = sizeof(T); /* of 16 bytes */
    uint4 part[PARTS];
};

/** Load a unit from shared memory. */
template <typename T> __device__ __forceinline__ EpUnit<T> ep_load_unit(uint32_t address) {
    EpUnit<T> x;
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++)
        x.part[i] = ep_load_shared(address + i * 16);
    return x;
}

/** Returns the unit of floats that vectors of rows of type T have. */
template <typename T>
__device__ __forceinline__ EpUnit<float> ep_unit_of_floats(const EpVector<T> *vector) {
    constexpr int SIZE = EpVector<T>::SIZE;
    EpUnit<float> x;
#pragma unroll
    for (int i = 0; i < EpUnit<float>::PARTS; i++) {
        EpVector<float> v;
#pragma unroll
        for (int e = 0; e < 4; e++)
            v.at[e] = vector[(4 * i + e) / SIZE].at[(4 * i + e) % SIZE];
        x.part[i] = ep_pack(v);
    }
    return x;
}

/** Returns the largest magnitude of a unit as bits; with `finite`, of its finite elements alone. */
template <typename T>
__device__ __forceinline__ uint32_t ep_unit_largest(const EpUnit<T> &x, int finite) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++) {
        EpVector<T> v = ep_unpack<T>(x.part[i]);
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e++)
            largest = max(largest, finite ? ep_quant_magnitude(v.at[e])
                                          : ep_quant_bits(v.at[e]) & 0x7fffffffu);
    }
    return largest;
}

/** Returns the largest magnitude of a unit as bits of a float. Elements of two bytes have the order
 *  of their bits, with infinities and NaNs above all others, as floats have. */
template <typename T> __device__ __forceinline__ uint32_t ep_unit_most(const EpUnit<T> &x) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++) {
        const uint32_t word[4] = {x.part[i].x, x.part[i].y, x.part[i].z, x.part[i].w};
#pragma unroll
        for (int w = 0; w < 4; w++)
            most = ep_max_u16x2(most, word[w] & 0x7fff7fffu);
    }
    const uint16_t larger = (uint16_t)max(most & 0xffffu, most >> 16);
    T value;
    memcpy(&value, &larger, sizeof(larger));
    return ep_quant_bits(ep_float(value));
}

template <> __device__ __forceinline__ uint32_t ep_unit_most<float>(const EpUnit<float> &x) {
    return ep_unit_largest(x, 0);
}

/** Returns the codes of a unit, from its first bytes on. Each product is rounded by itself: kernels
 *  are compiled without contraction. E4M3 is the only code. */
template <typename T>
__device__ __forceinline__ uint4 ep_unit_codes(EpQuantFormat format, const EpUnit<T> &x,
                                               float inverse) {
    (void)format;
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++) {
        EpVector<T> v = ep_unpack<T>(x.part[i]);
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e += 2) {
            int at = i * EpVector<T>::SIZE + e;
            word[at / 4] |= ep_convert_e4m3x2(v.at[e] * inverse, v.at[e + 1] * inverse)
                            << at % 4 * 8;
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/** Returns the codes with that of every NaN set to 0x7f, whatever sign the instruction gives it. */
template <typename T>
__device__ __forceinline__ uint4 ep_unit_nan(const EpUnit<T> &x, const uint4 &codes) {
    uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++) {
        EpVector<T> v = ep_unpack<T>(x.part[i]);
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e++) {
            int at = i * EpVector<T>::SIZE + e;
            if (v.at[e] != v.at[e]) word[at / 4] &= ~(0x80u << at % 4 * 8);
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/** Store the codes of a unit of a row. */
__device__ __forceinline__ void ep_store_codes(EpQuantFormat format, void *row, int unit,
                                               const uint4 &codes) {
    (void)format;
    ((uint4 *)row)[unit] = codes;
}

/** The same in shared memory. */
__device__ __forceinline__ void ep_store_shared_codes(EpQuantFormat format, uint32_t row, int unit,
                                                      const uint4 &codes) {
    (void)format;
    ep_store_shared(row + unit * (uint32_t)sizeof(codes), codes);
}

template <typename Index>
__device__ __forceinline__ void ep_store_scale(EpQuantFormat format, void *scales, Index block,
                                               const EpQuantScale &scale) {
    if (ep_quant_scale_type(format) == EP_TYPE_FP32)
        ((uint32_t *)scales)[block] = scale.stored;
    else
        ((uint8_t *)scales)[block] = (uint8_t)scale.stored;
}

/** Returns the log2 of the number of units in a block. */
__device__ __forceinline__ int ep_quant_log(EpQuantFormat format) {
    return 31 - __clz(format.block / EP_QUANT_UNIT);
}

/** Returns the codes of a unit, and its block's scale. By a warp whose lanes have consecutive
 *  units; the result is void in a lane that has none (not `valid`). Infinities and NaNs are rare
 *  and handled apart. */
template <typename T>
__device__ __forceinline__ uint4 ep_quantise_unit(EpQuantFormat format, const EpUnit<T> &x,
                                                  int valid, EpQuantScale *scale) {
    uint32_t largest = valid ? ep_unit_most(x) : 0;
    uint32_t amax = largest < EP_QUANT_INFINITY_BITS ? largest : ep_unit_largest(x, 1);
    for (int d = 1; d < 1 << ep_quant_log(format); d *= 2)
        amax = max(amax, __shfl_xor_sync(~0u, amax, d));
    *scale = ep_quant_scale(format, max(amax, EP_QUANT_LEAST_BITS));
    uint4 codes = ep_unit_codes(format, x, scale->inverse);
    return largest > EP_QUANT_INFINITY_BITS ? ep_unit_nan(x, codes) : codes;
}

/** Store the scale of a unit's block, if this unit is the block's first. */
__device__ __forceinline__ void ep_store_scale_of(EpQuantFormat format, void *scales, int unit,
                                                  const EpQuantScale &scale) {
    int log = ep_quant_log(format);
    if ((unit & ((1 << log) - 1)) == 0) ep_store_scale(format, scales, unit >> log, scale);
}

/** Returns part `part` of the unit that 16 codes and their scale stand for in EP_SUM_QUANT: one
 *  product each. */
template <typename T>
__device__ __forceinline__ EpVector<T> ep_dequantise(const uint4 &codes, int part, float scale) {
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    EpVector<T> v;
#pragma unroll
    for (int e = 0; e < EpVector<T>::SIZE; e += 2) {
        int at = part * EpVector<T>::SIZE + e;
        float2 values = ep_convert_from_e4m3x2(word[at / 4] >> at % 4 * 8);
        v.at[e] = scale * values.x, v.at[e + 1] = scale * values.y;
    }
    return v;
}

template <typename T>
__device__ __forceinline__ void ep_quantise_as(EpQuantFormat format, const void *row, int n,
                                               uint8_t *out, void *scales, int thread,
                                               int threads) {
    int units = n / EP_QUANT_UNIT, lane = thread % 32;
    for (int base = thread - lane; base < units; base += threads) {
        int unit = base + lane, valid = unit < units;
        EpUnit<T> x = {};
        EpQuantScale scale;
        if (valid) x = ((const EpUnit<T> *)row)[unit];
        uint4 codes = ep_quantise_unit(format, x, valid, &scale);
        if (!valid) continue;
        ep_store_codes(format, out, unit, codes);
        ep_store_scale_of(format, scales, unit, scale);
    }
}

/**
 * Quantise a row of `n` elements of BF16, FP16 or FP32, n a multiple of 16. By threads 0 ..
 * `threads` - 1 of a group, all with the same arguments; this one is `thread`. The group is whole
 * warps, with thread % 32 the lane. `row` is global memory that is not written during the launch;
 * `out` [ep_quant_bytes] and `scales` [ep_quant_scales] are global or shared, row and out 16-byte
 * aligned, scales aligned to its elements. There is no barrier: other threads see the result after
 * a barrier of their own, and bulk copies after a fence besides.
 */
__device__ __forceinline__ void ep_quantise_row(EpQuantFormat format, int type, const void *row,
                                                int n, uint8_t *out, void *scales, int thread,
                                                int threads) {
    if (type == EP_TYPE_BF16)
        ep_quantise_as<__nv_bfloat16>(format, row, n, out, scales, thread, threads);
    else if (type == EP_TYPE_FP16)
        ep_quantise_as<__half>(format, row, n, out, scales, thread, threads);
    else
        ep_quantise_as<float>(format, row, n, out, scales, thread, threads);
}

#endif
