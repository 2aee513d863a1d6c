/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_QUANTISE_CUH
#define EP_DISPATCH_QUANTISE_CUH

/**
 * Quantising one row by a group of threads: the bits of ep_quantise (runtime/quant.h).
 *
 * A thread makes a unit at a time: 16 elements become 16 bytes. The lanes that have the units of a
 * block, 8 or 2 neighbours of one warp, find its amax together, and each computes the scale.
 */

#include "runtime/ptx.cuh"
#include "runtime/quant.h"
#include "runtime/rows.cuh"

#define EP_QUANT_UNIT 16 /* elements that a thread takes, and bytes that it makes of them */

/** The largest magnitude of a unit, as bits; see ep_quant_magnitude. */
template <typename T>
__device__ __forceinline__ uint32_t ep_unit_amax(const uint4 (&x)[sizeof(T)]) {
    uint32_t amax = EP_QUANT_LEAST_BITS;
#pragma unroll
    for (int i = 0; i < (int)sizeof(T); i++) {
        EpVector<T> v = ep_unpack<T>(x[i]);
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e++)
            amax = max(amax, ep_quant_magnitude(v.at[e]));
    }
    return amax;
}

/** e4m3 of two floats, that of `low` in the lower byte. What the instruction does with a NaN's sign
 *  does not matter; otherwise it gives what ep_e4m3_from_float does. */
__device__ __forceinline__ uint32_t ep_e4m3_of_two(float low, float high) {
    uint32_t codes = ep_convert_e4m3x2(low, high);
    if (low != low) codes = (codes & 0xff00u) | 0x7fu;
    if (high != high) codes = (codes & 0xffu) | 0x7f00u;
    return codes;
}

/** Kernels are compiled without contraction: each product is rounded by itself. */
template <typename T>
__device__ __forceinline__ uint4 ep_unit_codes(const uint4 (&x)[sizeof(T)], float inverse) {
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < (int)sizeof(T); i++) {
        EpVector<T> v = ep_unpack<T>(x[i]);
#pragma unroll
        for (int e = 0; e < EpVector<T>::SIZE; e += 2) {
            int at = i * EpVector<T>::SIZE + e;
            word[at / 4] |= ep_e4m3_of_two(v.at[e] * inverse, v.at[e + 1] * inverse) << at % 4 * 8;
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void ep_store_scale(EpQuant quant, void *scales, int block,
                                               const EpQuantScale &scale) {
    if (quant == EP_QUANT_FP8)
        ((uint32_t *)scales)[block] = scale.stored;
    else
        ((uint8_t *)scales)[block] = (uint8_t)scale.stored;
}

template <typename T>
__device__ __forceinline__ void ep_quantise_as(EpQuant quant, const void *row, int n, uint8_t *out,
                                               void *scales, int thread, int threads) {
    int lanes = ep_quant_block(quant) / EP_QUANT_UNIT, units = n / EP_QUANT_UNIT;
    int lane = thread % 32;
    for (int base = thread - lane; base < units; base += threads) {
        int unit = base + lane, valid = unit < units;
        uint4 x[sizeof(T)];
        uint32_t amax = EP_QUANT_LEAST_BITS;
#pragma unroll
        for (int i = 0; i < (int)sizeof(T); i++)
            if (valid) x[i] = ((const uint4 *)row)[unit * (int)sizeof(T) + i];
        if (valid) amax = ep_unit_amax<T>(x);
        for (int d = 1; d < lanes; d *= 2)
            amax = max(amax, __shfl_xor_sync(~0u, amax, d));
        if (!valid) continue;
        EpQuantScale scale = ep_quant_scale(quant, amax);
        ((uint4 *)out)[unit] = ep_unit_codes<T>(x, scale.inverse);
        if (unit % lanes == 0) ep_store_scale(quant, scales, unit / lanes, scale);
    }
}

/**
 * Quantise a row of `n` elements of BF16, FP16 or FP32, n a multiple of 16, as threads 0 ..
 * `threads` - 1 of a group, this one being `thread`. The group is whole warps, thread % 32 its
 * threads' lanes; all of them call, with the same arguments. `row` is global memory and not written
 * during the launch; `out` [n] and `scales` [ep_quant_scales] are global or shared, row and out
 * 16-byte aligned, scales aligned to its elements. Nobody waits: what the group has stored, others
 * see after a barrier of theirs, and bulk copies after a fence besides.
 */
__device__ __forceinline__ void ep_quantise_row(EpQuant quant, int type, const void *row, int n,
                                                uint8_t *out, void *scales, int thread,
                                                int threads) {
    if (type == EP_TYPE_BF16)
        ep_quantise_as<__nv_bfloat16>(quant, row, n, out, scales, thread, threads);
    else if (type == EP_TYPE_FP16)
        ep_quantise_as<__half>(quant, row, n, out, scales, thread, threads);
    else
        ep_quantise_as<float>(quant, row, n, out, scales, thread, threads);
}

#endif
