/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_LATENCY_PACKED_CUH
#define EP_COMBINE_CUDA_LATENCY_PACKED_CUH

/**
 * What a lane has of a step in latency mode's combine: a 16-byte unit of a sum in the rows' type,
 * or where sums are quantised (PACKED) 16 elements, which are several such units.
 *
 * A receiving warp has a step's 28 units of codes in the order of its lanes; the last four have
 * none. A sending warp quantises whole blocks, four of them, with eight neighbours to a block. So
 * an even step also sums the four units behind its own, and an odd one those before it: the other
 * half of the block that both share, of which each finds the same scale. Steps stay independent of
 * each other.
 *
 * Lines want a step's units in another order (handles/cuda/lines.cuh), so codes move between lanes
 * on both sides.
 */

#include "combine/cuda/latency_gather.h"
#include "handles/cuda/lines.cuh"
#include "runtime/cuda/quantise.cuh"

/* Units of a row, in the rows' type, that a lane has of a step. */
template <typename T, int PACKED> struct StepParts {
    static constexpr int COUNT = PACKED ? EpUnit<T>::PARTS : 1;
};

/* Returns how many units before a packed step's own its first block begins. */
__device__ __forceinline__ int units_before(int step) {
    return step % 2 * 4;
}

/* Returns unit `part` of those that this lane has of a step, -1: none. `sends`: where the warp's
 * own sums are packed, and not added to what arrives. */
template <typename T, int PACKED>
__device__ __forceinline__ int own_unit(int row_units, int step, int part, int sends) {
    int lane = threadIdx.x % 32, unit = step * EP_STEP_UNITS + step_unit(), has = step_unit() >= 0;
    if (PACKED) {
        int first = step * EP_PACKED_STEP_UNITS - (sends ? units_before(step) : 0);
        unit = (first + lane) * StepParts<T, PACKED>::COUNT + part;
        has = sends || lane < EP_PACKED_STEP_UNITS;
    }
    return has && unit < row_units ? unit : -1;
}

/* ---- packing ------------------------------------------------------------------------------- */

/* Returns the 16 bytes of lane `from` % 32. By a warp. */
__device__ __forceinline__ uint4 take_unit(const uint4 &own, int from) {
    uint4 x;
    x.x = __shfl_sync(~0u, own.x, from & 31), x.y = __shfl_sync(~0u, own.y, from & 31);
    x.z = __shfl_sync(~0u, own.z, from & 31), x.w = __shfl_sync(~0u, own.w, from & 31);
    return x;
}

/* Returns this lane's unit of a step whose elements the warp has summed; those past the scales have
 * no meaning. By a warp; `valid`: this lane has elements. */
template <typename T>
__device__ __forceinline__ uint4 pack_step(const EpVector<T> sum[EpUnit<T>::PARTS], int step,
                                           int valid) {
    EpQuantScale scale;
    uint4 codes =
        ep_quantise_unit(ep_quant_format(EP_SUM_QUANT), ep_unit_of_floats<T>(sum), valid, &scale);
    uint4 unit = take_unit(codes, step_unit() + units_before(step)), scales;
    scales.x = __shfl_sync(~0u, scale.stored, 0), scales.y = __shfl_sync(~0u, scale.stored, 8);
    scales.z = __shfl_sync(~0u, scale.stored, 16), scales.w = __shfl_sync(~0u, scale.stored, 24);
    return step_unit() == EP_PACKED_STEP_UNITS ? scales : unit;
}

/* Returns this lane's unit of a step, from its sum: rounded, or packed. By a warp. */
template <typename T, int PACKED>
__device__ __forceinline__ uint4 step_sum(const EpVector<T> *sum, int step, int valid) {
    if constexpr (PACKED)
        return pack_step<T>(sum, step, valid);
    else
        return ep_pack(sum[0]);
}

/* ---- unpacking ----------------------------------------------------------------------------- */

/* Add this lane's unit of another rank's sum, as step_unpack returns it, to this lane's elements.
 * By a warp. */
template <typename T>
__device__ __forceinline__ void add_packed(EpVector<T> sum[EpUnit<T>::PARTS], int step,
                                           const uint4 &unit) {
    int lane = threadIdx.x % 32, block = (lane + units_before(step)) / 8;
    uint4 codes = take_unit(unit, lane_of_unit(lane));
    uint4 scales = take_unit(unit, lane_of_unit(EP_PACKED_STEP_UNITS));
    float scale = __uint_as_float(block < 2 ? (block ? scales.y : scales.x)
                                            : (block == 2 ? scales.z : scales.w));
#pragma unroll
    for (int p = 0; p < EpUnit<T>::PARTS; p++)
        ep_add(&sum[p], ep_dequantise<T>(codes, p, scale));
}

/* Add this lane's unit of another rank's sum to what it has summed. By a warp. */
template <typename T, int PACKED>
__device__ __forceinline__ void add_step(EpVector<T> *sum, int step, const uint4 &unit) {
    if constexpr (PACKED)
        add_packed<T>(sum, step, unit);
    else
        ep_add(&sum[0], ep_unpack<T>(unit));
}

#endif
