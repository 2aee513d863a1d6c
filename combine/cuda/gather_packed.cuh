/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_COMBINE_CUDA_GATHER_PACKED_CUH
#define EP_COMBINE_CUDA_GATHER_PACKED_CUH

/**
 * The compute warps of gather.cu where partial sums travel as e4m3 with scales (packed.h): sending
 * blocks pack their sums; receiving blocks unpack those of other ranks and nodes and add them. What
 * they sum for another node they pack once more.
 *
 * Bytes, of a row of n bf16: a sender loads 2n for each slot and stores 1.03n instead of 2n, which
 * the wire and both memories then carry. A receiver loads 1.03n for each other rank and stores 2n.
 *
 * Rows are packed and unpacked in the stages that they are in, so an item holds no more stages than
 * one that is not packed. A sum takes the place of its last term, as in gather_sum.cuh. Threads
 * read and write at different places there, so all of them read a round's units before any of them
 * stores. That also keeps the units of later rounds:
 *
 *   - Packing: `r` rounds have stored no more bytes than they have read, since a packed unit is
 *     shorter.
 *   - Unpacking: packed terms lie at the ends of their stages. What is still to be read there is
 *     shorter than what is still to be stored, so it begins behind what has been stored.
 *
 * Eight lanes have the units of a block, so they find its scale among themselves.
 */

#include "combine/cuda/gather_sum.cuh"
#include "runtime/cuda/packed.h"
#include "runtime/cuda/quantise.cuh"

/* A unit of a sum: 16 floats, in vectors of the rows' type. */
template <typename T> struct SumUnit { EpVector<T> part[EpUnit<T>::PARTS]; };

/* Add the item's own terms, the run, to a unit. */
template <typename T>
__device__ __forceinline__ void add_slots(SumUnit<T> *sum, const Stages &s, const WorkItem &item,
                                          uint32_t first, uint32_t weights, int unit) {
#pragma unroll 1
    for (int i = item.run; i < item.run_end; i++) {
        float weight = ep_load_shared_float(weights + i * (int)sizeof(float));
        uint32_t stage = stage_of(s, first, i);
        EpUnit<T> x = ep_load_unit<T>(stage + unit * (uint32_t)sizeof(x));
#pragma unroll
        for (int p = 0; p < EpUnit<T>::PARTS; p++)
            ep_add_weighted(&sum->part[p], weight, ep_unpack<T>(x.part[p]));
    }
}

/* Add a unit of packed terms `begin` to before `end`: each element is scale * code, rounded, and
 * then added. */
template <typename T>
__device__ __forceinline__ void add_packed(SumUnit<T> *sum, const Stages &s, const WorkItem &item,
                                           uint32_t first, int begin, int end, int unit) {
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        uint32_t from = stage_of(s, first, i) + pipeline_packed_offset(item);
        uint4 codes = ep_load_shared(from + ep_packed_codes(unit));
        float scale = ep_load_shared_float(from + ep_packed_scale(unit));
#pragma unroll
        for (int p = 0; p < EpUnit<T>::PARTS; p++)
            ep_add(&sum->part[p], ep_dequantise<T>(codes, p, scale));
    }
}

/* Replace a unit by what its receiver makes of it. By a warp. */
template <typename T> __device__ __forceinline__ void requantise(SumUnit<T> *sum, int valid) {
    EpQuantScale scale;
    uint4 codes = ep_quantise_unit(ep_quant_format(EP_SUM_QUANT), ep_unit_of_floats<T>(sum->part),
                                   valid, &scale);
#pragma unroll
    for (int p = 0; p < EpUnit<T>::PARTS; p++)
        sum->part[p] = ep_dequantise<T>(codes, p, __uint_as_float(scale.stored));
}

/* Where an item's terms and its sum lie, in shared memory. */
typedef struct PackedItem {
    WorkItem item;
    uint32_t first, weights, to;
} PackedItem;

/* Returns a unit of an item's sum: the packed sums of lower ranks, this rank's own slots, and the
 * packed sums of higher ranks. `rounds`: its own sum is requantised. By a warp. */
template <typename T>
__device__ __forceinline__ SumUnit<T> sum_unit(const Stages &s, const PackedItem &x, int rounds,
                                               int unit, int valid) {
    const WorkItem &item = x.item;
    SumUnit<T> total = {}, own = {};
    if (valid) add_packed(&total, s, item, x.first, 0, item.run, unit);
    if (valid) add_slots(&own, s, item, x.first, x.weights, unit);
    if (rounds) requantise(&own, valid);
#pragma unroll
    for (int p = 0; p < EpUnit<T>::PARTS; p++)
        ep_add(&total.part[p], own.part[p]);
    if (valid) add_packed(&total, s, item, x.first, item.run_end, item.terms, unit);
    return total;
}

/* Store a unit of a sum, packed or in the rows' type, when all threads have read their terms. By
 * the compute warps. */
template <typename T>
__device__ __forceinline__ void store_unit(const SumUnit<T> &sum, uint32_t to, int packs, int unit,
                                           int valid) {
    EpQuantScale scale;
    uint4 codes;
    if (packs)
        codes = ep_quantise_unit(ep_quant_format(EP_SUM_QUANT), ep_unit_of_floats<T>(sum.part),
                                 valid, &scale);
    ep_barrier(1, COMPUTE_THREADS);
    if (valid && packs) {
        ep_store_shared(to + ep_packed_codes(unit), codes);
        if (unit % 8 == 0) *ep_shared<uint32_t>(to + ep_packed_scale(unit)) = scale.stored;
    }
#pragma unroll
    for (int i = 0; valid && !packs && i < EpUnit<T>::PARTS; i++)
        ep_store_shared(to + unit * (uint32_t)sizeof(EpUnit<T>) + i * 16, ep_pack(sum.part[i]));
}

/* Sum the terms of all work items. By the compute warps. */
template <typename T>
__device__ void sum_packed_rows(Pipeline *p, int rounds, int packs, int thread) {
    Stages s = pipeline_stages(p);
    uint32_t weights = ep_smem(p->weight.begin()), width = (uint32_t)p->shape.width;
    for (uint32_t n = 0;; n++) {
        int j = n % PIPELINE_ENTRIES;
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[j];
        if (item.loads == PIPELINE_END) return;
        PackedItem x = {item, p->first[j], weights + j * width * (uint32_t)sizeof(float),
                        stage_of(s, p->first[j], item.loads - 1)};
        int units = item.bytes / (int)sizeof(EpUnit<T>);
#pragma unroll 1
        for (int base = 0; base < units; base += COMPUTE_THREADS) {
            int unit = base + thread, valid = unit < units;
            SumUnit<T> sum = sum_unit<T>(s, x, rounds, unit, valid);
            store_unit(sum, x.to, packs, unit, valid);
        }
        pipeline_computed(p, n);
    }
}

/* `rounds`: this rank's own sums are requantised; `packs`: sums are packed. */
__device__ __forceinline__ void sum_packed(const EpGatherArgs &a, Pipeline *p, int rounds,
                                           int packs, int thread) {
    if (a.t.type == EP_TYPE_BF16)
        sum_packed_rows<__nv_bfloat16>(p, rounds, packs, thread);
    else if (a.t.type == EP_TYPE_FP16)
        sum_packed_rows<__half>(p, rounds, packs, thread);
    else
        sum_packed_rows<float>(p, rounds, packs, thread);
}

#endif
