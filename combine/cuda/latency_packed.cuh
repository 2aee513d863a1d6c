/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_LATENCY_PACKED_CUH
#define EP_COMBINE_CUDA_LATENCY_PACKED_CUH

/**
 * What a lane has of a step in latency mode's combine: a 16-byte unit of a sum in the rows' type,
 * or where sums are quantised (PACKED) 16 elements, which are several such units.
 *
 * A warp sums elements in the order of its lanes: lane 8 b + i has elements 16 i .. 16 i + 15 of
 * the step's block b, so eight neighbours find a block's scale. Lines want the step's units in
 * another order (handles/cuda/lines.cuh), so codes move between lanes on both sides.
 */

#include "combine/cuda/latency_gather.h"
#include "handles/cuda/lines.cuh"
#include "runtime/cuda/quantise.cuh"

/* Units of a row, in the rows' type, that a lane has of a step. */
template <typename T, int PACKED> struct StepParts {
    static constexpr int COUNT = PACKED ? EpUnit<T>::PARTS : 1;
};

/* Returns unit `part` of those that this lane has of a step, -1: none. */
template <typename T, int PACKED>
__device__ __forceinline__ int own_unit(int row_units, int step, int part) {
    int lane = threadIdx.x % 32, unit = step * EP_STEP_UNITS + step_unit(), has = step_unit() >= 0;
    if (PACKED) {
        unit = (step * EP_PACKED_STEP_UNITS + lane) * StepParts<T, PACKED>::COUNT + part;
        has = lane < EP_PACKED_STEP_UNITS;
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

/* Returns this lane's unit of a step whose elements the warp has summed. By a warp; `valid`: this
 * lane has elements. */
template <typename T>
__device__ __forceinline__ uint4 pack_step(const EpVector<T> sum[EpUnit<T>::PARTS], int valid) {
    EpQuantScale scale;
    uint4 codes = ep_quantise_unit(EP_QUANT_FP8, ep_unit_of_floats<T>(sum), valid, &scale);
    uint4 unit = take_unit(codes, step_unit()); /* past the codes: of no meaning */
    uint32_t a = __shfl_sync(~0u, scale.stored, 0), b = __shfl_sync(~0u, scale.stored, 8);
    uint32_t c = __shfl_sync(~0u, scale.stored, 16);
    return step_unit() == EP_PACKED_STEP_UNITS ? make_uint4(a, b, c, 0) : unit;
}

/* Returns this lane's unit of a step, from its sum: rounded, or packed. By a warp. */
template <typename T, int PACKED>
__device__ __forceinline__ uint4 step_sum(const EpVector<T> *sum, int valid) {
    if constexpr (PACKED)
        return pack_step<T>(sum, valid);
    else
        return ep_pack(sum[0]);
}

/* ---- unpacking ----------------------------------------------------------------------------- */

/* Add this lane's unit of another rank's sum, as step_unpack returns it, to this lane's elements.
 * By a warp. */
template <typename T>
__device__ __forceinline__ void add_packed(EpVector<T> sum[EpUnit<T>::PARTS], const uint4 &unit) {
    int lane = threadIdx.x % 32, scales = lane_of_unit(EP_PACKED_STEP_UNITS);
    uint4 codes = take_unit(unit, lane_of_unit(lane));
    uint32_t a = __shfl_sync(~0u, unit.x, scales), b = __shfl_sync(~0u, unit.y, scales);
    uint32_t c = __shfl_sync(~0u, unit.z, scales);
    float scale = __uint_as_float(lane < 8 ? a : lane < 16 ? b : c);
#pragma unroll
    for (int p = 0; p < EpUnit<T>::PARTS; p++)
        ep_add(&sum[p], ep_dequantise<T>(codes, p, scale));
}

/* Add this lane's unit of another rank's sum to what it has summed. By a warp. */
template <typename T, int PACKED>
__device__ __forceinline__ void add_step(EpVector<T> *sum, const uint4 &unit) {
    if constexpr (PACKED)
        add_packed<T>(sum, unit);
    else
        ep_add(&sum[0], ep_unpack<T>(unit));
}

#endif
