/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/dtype.h"
#include "runtime/host/rowmath.h"
#include "runtime/quant.h"

#define MOST_BLOCK 128

static inline float load(EpType type, const void *from, int64_t at) {
    if (type == EP_TYPE_FP32) return ((const float *)from)[at];
    uint16_t half = ((const uint16_t *)from)[at];
    return type == EP_TYPE_FP16 ? ep_float_from_fp16(half) : ep_float_from_bf16(half);
}

/* Convert a block's elements to floats, which is exact. */
static inline void load_block(EpType type, const void *row, int64_t first, int64_t step,
                              int64_t count, float *x) {
    for (int64_t i = 0; i < count; i++)
        x[i] = load(type, row, first + i * step);
}

static uint32_t find_amax(const float *x, int64_t count) {
    uint32_t amax = EP_QUANT_LEAST_BITS;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = ep_quant_magnitude(x[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

/* Store the codes of `count` numbers; of E2M1, which has two in a byte, an even number. */
static void encode(EpQuantFormat format, const float *x, int64_t count, float inverse,
                   uint8_t *out) {
    for (int64_t i = 0; format.code == EP_CODE_E4M3 && i < count; i++)
        out[i] = ep_e4m3_from_float(x[i] * inverse);
    for (int64_t i = 0; format.code == EP_CODE_E2M1 && i < count; i += 2)
        out[i / 2] = (uint8_t)(ep_e2m1_from_float(x[i] * inverse) |
                               ep_e2m1_from_float(x[i + 1] * inverse) << 4);
}

void ep_quantise(EpQuantFormat format, float global, EpType type, const void *row, int64_t n,
                 uint8_t *out, void *scales) {
    int64_t block = format.block;
    float x[MOST_BLOCK];
    for (int64_t first = 0, b = 0; first < n; first += block, b++) {
        int64_t count = n - first < block ? n - first : block;
        load_block(type, row, first, 1, count, x);
        uint32_t amax = find_amax(x, count);
        EpQuantScale scale = format.scaling == EP_SCALE_GLOBAL ? ep_quant_global(global, amax)
                                                               : ep_quant_scale(format, amax);
        encode(format, x, count, scale.inverse, out + ep_quant_bytes(format, first));
        ep_store_scale(format, scales, b, scale.stored);
    }
}

void ep_store_scale(EpQuantFormat format, void *scales, int64_t at, uint32_t stored) {
    if (ep_quant_scale_type(format) == EP_TYPE_FP32)
        ((uint32_t *)scales)[at] = stored;
    else
        ((uint8_t *)scales)[at] = (uint8_t)stored;
}

uint32_t ep_block_amax(const EpQuantBlock *b) {
    uint32_t amax = EP_QUANT_LEAST_BITS;
    for (int64_t i = 0; i < b->rows; i++)
        for (int64_t j = 0; j < b->columns; j++) {
            float x = load(b->type, b->from, i * b->row_step + j * b->step);
            uint32_t magnitude = ep_quant_magnitude(x);
            amax = magnitude > amax ? magnitude : amax;
        }
    return amax;
}

void ep_block_convert(EpQuantFormat format, const EpQuantBlock *b, float inverse) {
    float x[MOST_BLOCK];
    for (int64_t i = 0; i < b->rows; i++) {
        load_block(b->type, b->from, i * b->row_step, b->step, b->columns, x);
        encode(format, x, b->columns, inverse, b->out + i * b->out_step);
    }
}
