/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SCATTER_QUANTISE_CUH
#define EP_DISPATCH_SCATTER_QUANTISE_CUH

/**
 * The workers of a sending block that quantises: a token's e4m3 row in place of the token, and its
 * scales into the handle's workspace, from where the side warps take them.
 */

#include "dispatch/quantise.cuh"
#include "dispatch/scatter_row.cuh"

template <typename T> __device__ __forceinline__ EpUnit<T> load_unit(uint32_t address) {
    EpUnit<T> x;
#pragma unroll
    for (int i = 0; i < EpUnit<T>::PARTS; i++)
        x.part[i] = ep_load_shared(address + i * 16);
    return x;
}

/* One job. The codes of unit u go to where unit u / 2 or u / 4 is, of this round or an earlier one:
 * so all threads have read theirs first. */
template <typename T>
__device__ __forceinline__ void quantise_piece(EpQuant quant, uint32_t stage, int bytes,
                                               void *scales, int thread) {
    int units = bytes / (int)sizeof(EpUnit<T>);
    for (int base = 0; base < units; base += WORKERS) {
        int unit = base + thread, valid = unit < units;
        EpUnit<T> x = {};
        EpQuantScale scale;
        if (valid) x = load_unit<T>(stage + unit * (uint32_t)sizeof(x));
        uint4 codes = ep_quantise_unit(quant, x, valid, &scale);
        ep_barrier(1, WORKERS);
        if (!valid) continue;
        ep_store_shared(stage + unit * (uint32_t)sizeof(codes), codes);
        ep_store_scale_of(quant, scales, unit, scale);
    }
}

/* Pieces are of whole blocks. */
template <typename T> __device__ void quantise_rows(const EpScatterArgs &a, Pipe *p, int thread) {
    int blocks = p->shape.stage_bytes / (int)sizeof(T) / ep_quant_block(a.quant); /* of a piece */
    int scale_bytes = a.quant == EP_QUANT_FP8 ? (int)sizeof(float) : 1;
    for (uint32_t n = 0;; n++) {
        int j = n % JOBS;
        pipe_wait(p->barrier[FULL], n);
        PipeJob job = p->job[j];
        if (job.loads == PIPE_END) return;
        char *scales = a.made_scales + p->item[j] * a.scale_stride;
        quantise_piece<T>(a.quant, p->first[j], job.bytes,
                          scales + p->piece[j] * blocks * scale_bytes, thread);
        pipe_worked(p, n);
    }
}

__device__ __forceinline__ void quantise(const EpScatterArgs &a, Pipe *p, int thread) {
    if (a.source_type == EP_TYPE_BF16)
        quantise_rows<__nv_bfloat16>(a, p, thread);
    else if (a.source_type == EP_TYPE_FP16)
        quantise_rows<__half>(a, p, thread);
    else
        quantise_rows<float>(a, p, thread);
}

#endif
