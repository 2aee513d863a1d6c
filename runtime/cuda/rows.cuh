/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_ROWS_CUH
#define EP_RUNTIME_CUDA_ROWS_CUH

/**
 * The elements of rows: as floats, as quantised codes, and as words that a warp copies. Floats are
 * rounded to nearest even: the same bits as runtime/dtype.h.
 */

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "runtime/cuda/ptx.cuh"
#include "runtime/quant.h"

__device__ __forceinline__ float ep_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ __forceinline__ float ep_float(__half x) {
    return __half2float(x);
}
__device__ __forceinline__ float ep_float(float x) {
    return x;
}

/** 16 bytes of a row, as floats. */
template <typename T> struct EpVector {
    static constexpr int SIZE = 16 / sizeof(T);
    float at[SIZE];
};

template <typename T> __device__ __forceinline__ EpVector<T> ep_unpack(const uint4 &x) {
    EpVector<T> v;
    const T *from = (const T *)&x;
#pragma unroll
    for (int i = 0; i < EpVector<T>::SIZE; i++)
        v.at[i] = ep_float(from[i]);
    return v;
}

/** A bf16 element is the upper half of its float: one instruction each. */
template <>
__device__ __forceinline__ EpVector<__nv_bfloat16> ep_unpack<__nv_bfloat16>(const uint4 &x) {
    const uint32_t words[] = {x.x, x.y, x.z, x.w};
    EpVector<__nv_bfloat16> v;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v.at[2 * i] = __uint_as_float(words[i] << 16);
        v.at[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return v;
}

__device__ __forceinline__ uint4 ep_pack(const EpVector<__nv_bfloat16> &v) {
    uint4 x;
    __nv_bfloat162 *to = (__nv_bfloat162 *)&x;
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = __floats2bfloat162_rn(v.at[2 * i], v.at[2 * i + 1]);
    return x;
}
__device__ __forceinline__ uint4 ep_pack(const EpVector<__half> &v) {
    uint4 x;
    __half2 *to = (__half2 *)&x;
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = __floats2half2_rn(v.at[2 * i], v.at[2 * i + 1]);
    return x;
}
__device__ __forceinline__ uint4 ep_pack(const EpVector<float> &v) {
    return make_uint4(__float_as_uint(v.at[0]), __float_as_uint(v.at[1]), __float_as_uint(v.at[2]),
                      __float_as_uint(v.at[3]));
}

/** Add a weighted term to a sum, one fused multiply-add per element. Every weighted sum of the
 *  library uses this function, so that the bits are those that the API specifies. */
template <typename T>
__device__ __forceinline__ void ep_add_weighted(EpVector<T> *sum, float weight,
                                                const EpVector<T> &term) {
#pragma unroll
    for (int e = 0; e < EpVector<T>::SIZE; e++)
        sum->at[e] = fmaf(weight, term.at[e], sum->at[e]);
}

/** Add a vector to a sum. */
template <typename T>
__device__ __forceinline__ void ep_add(EpVector<T> *sum, const EpVector<T> &x) {
#pragma unroll
    for (int e = 0; e < EpVector<T>::SIZE; e++)
        sum->at[e] += x.at[e];
}

/* ---- quantising ---------------------------------------------------------------------------- */

/*
 * Quantise one row by a group of threads, with the same bits as ep_quantise (runtime/quant.h).
 *
 * A thread takes a unit at a time: 16 elements become 2 bytes for each bit of a code. The lanes
 * that have the units of a block, 8 or 2 neighbours of one warp, find its amax together, and each
 * computes the scale.
 *
 * NVFP4 has a type of its own in place of EpQuantFormat, and kernels have instances for it. So code
 * for other formats knows nothing of it.
 */

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
    if (format.scaling != EP_SCALE_EXPONENT)
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

/* ---- NVFP4 --------------------------------------------------------------------------------- */

/** EP_QUANT_NVFP4 with the call's global scale. A block is a unit: a thread has it alone. */
typedef struct EpNvfp4 {
    float global;
} EpNvfp4;

/** Returns how a call quantises: an EpNvfp4, or `format` itself. That lies among the kernel's
 *  arguments, and a copy would take registers. */
template <int IS_NVFP4>
__device__ __forceinline__ decltype(auto) ep_format_of(const EpQuantFormat &format,
                                                       const float *global_scale) {
    if constexpr (IS_NVFP4)
        return EpNvfp4{*global_scale};
    else
        return (format);
}

/* The e2m1 of two floats, that of `low` in the lower bits. */
__device__ __forceinline__ uint32_t ep_e2m1_pair(float low, float high) {
#if EP_CONVERTS_E2M1
    return ep_convert_e2m1x2(low, high);
#else
    return ep_e2m1_from_float(low) | (uint32_t)ep_e2m1_from_float(high) << 4;
#endif
}

/** See ep_quantise_unit above. The codes lie in the first two words. */
template <typename T>
__device__ __forceinline__ uint4 ep_quantise_unit(EpNvfp4 format, const EpUnit<T> &x, int valid,
                                                  EpQuantScale *scale) {
    uint32_t largest = valid ? ep_unit_most(x) : 0, word[2] = {0, 0};
    uint32_t amax = largest < EP_QUANT_INFINITY_BITS ? largest : ep_unit_largest(x, 1);
    *scale = ep_quant_global(format.global, max(amax, EP_QUANT_LEAST_BITS));
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++) {
        EpVector<T> v = ep_unpack<T>(x.part[i]);
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e += 2) {
            int at = i * EpVector<T>::SIZE + e;
            float low = v.at[e] * scale->inverse, high = v.at[e + 1] * scale->inverse;
            word[at / 8] |= ep_e2m1_pair(low, high) << at % 8 * 4;
        }
    }
    return make_uint4(word[0], word[1], 0, 0);
}

__device__ __forceinline__ void ep_store_codes(EpNvfp4, void *row, int unit, const uint4 &codes) {
    ((uint2 *)row)[unit] = make_uint2(codes.x, codes.y);
}

__device__ __forceinline__ void ep_store_shared_codes(EpNvfp4, uint32_t row, int unit,
                                                      const uint4 &codes) {
    ep_store_shared(row + unit * (uint32_t)sizeof(uint2), make_uint2(codes.x, codes.y));
}

__device__ __forceinline__ void ep_store_scale_of(EpNvfp4, void *scales, int unit,
                                                  const EpQuantScale &scale) {
    ((uint8_t *)scales)[unit] = (uint8_t)scale.stored;
}

/* ---- rows ---------------------------------------------------------------------------------- */

template <typename T, typename Format>
__device__ __forceinline__ void ep_quantise_as(Format format, const void *row, int n, uint8_t *out,
                                               void *scales, int thread, int threads) {
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
 * Quantise a row of `n` elements of BF16, FP16 or FP32, n a multiple of 16 (EpNvfp4: 32). Format is
 * EpQuantFormat or EpNvfp4. By threads 0 ..
 * `threads` - 1 of a group, all with the same arguments; this one is `thread`. The group is whole
 * warps, with thread % 32 the lane. `row` is global memory that is not written during the launch;
 * `out` [ep_quant_bytes] and `scales` [ep_quant_scales] are global or shared, row and out 16-byte
 * aligned, scales aligned to its elements. There is no barrier: other threads see the result after
 * a barrier of their own, and bulk copies after a fence besides.
 */
template <typename Format>
__device__ __forceinline__ void ep_quantise_row(Format format, int type, const void *row, int n,
                                                uint8_t *out, void *scales, int thread,
                                                int threads) {
    if (type == EP_TYPE_BF16)
        ep_quantise_as<__nv_bfloat16>(format, row, n, out, scales, thread, threads);
    else if (type == EP_TYPE_FP16)
        ep_quantise_as<__half>(format, row, n, out, scales, thread, threads);
    else
        ep_quantise_as<float>(format, row, n, out, scales, thread, threads);
}

/* ---- copying words ------------------------------------------------------------------------- */

/* Copy words to the target `to` of each lane where that is not NULL. Word i is word_of(i) and goes
 * offset_of(i) bytes behind a target. By a warp. */
template <typename Word, typename Source, typename Offset>
__device__ __forceinline__ void spread_each(char *to, int words, Source word_of, Offset offset_of) {
    int lane = threadIdx.x % 32;
    unsigned targets = __ballot_sync(~0u, to != NULL);
    for (int base = 0; base < words; base += 32) {
        int at = base + lane, valid = at < words;
        Word word;
        if (valid) word = word_of(at);
        for (unsigned left = targets; left; left &= left - 1) {
            char *out = (char *)__shfl_sync(~0u, (unsigned long long)to, __ffs(left) - 1);
            if (valid) *(Word *)(out + offset_of(at)) = word;
        }
    }
}

/* The same for a row of scales. */
template <typename Word, typename Offset>
__device__ __forceinline__ void spread_words(char *to, const char *from, int words,
                                             Offset offset_of) {
    spread_each<Word>(
        to, words, [=](int i) { return __ldcg((const Word *)from + i); }, offset_of);
}

template <typename Word>
__device__ __forceinline__ void spread_row(char *to, const char *from, int64_t bytes) {
    spread_words<Word>(to, from, (int)(bytes / sizeof(Word)),
                       [](int i) { return i * (int64_t)sizeof(Word); });
}

/* Copy a row of scales to rows, in words as large as all addresses allow: bytes where a row has an
 * odd number of UE8M0. By a warp. */
__device__ __forceinline__ void spread_scales(char *to, const char *from, int64_t bytes) {
    uintptr_t all = (uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes;
    if (!__any_sync(~0u, all % sizeof(uint4) != 0))
        spread_row<uint4>(to, from, bytes);
    else if (!__any_sync(~0u, all % sizeof(uint32_t) != 0))
        spread_row<uint32_t>(to, from, bytes);
    else
        spread_row<uint8_t>(to, from, bytes);
}

#endif
