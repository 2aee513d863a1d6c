/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/dtype.h"
#include "runtime/host/rowmath.h"
#include "runtime/quant.h"

#define MOST_BLOCK 128

/* Convert a block's elements to floats, which is exact. */
static void load_block(EpType type, const void *row, int64_t first, int64_t count, float *x) {
    for (int64_t i = 0; i < count; i++) {
        if (type == EP_TYPE_FP32)
            x[i] = ((const float *)row)[first + i];
        else if (type == EP_TYPE_FP16)
            x[i] = ep_float_from_fp16(((const uint16_t *)row)[first + i]);
        else
            x[i] = ep_float_from_bf16(((const uint16_t *)row)[first + i]);
    }
}

static uint32_t find_amax(const float *x, int64_t count) {
    uint32_t amax = EP_QUANT_LEAST_BITS;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = ep_quant_magnitude(x[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

void ep_quantise(EpQuant quant, EpType type, const void *row, int64_t n, uint8_t *out,
                 void *scales) {
    int64_t block = ep_quant_block(quant);
    float x[MOST_BLOCK];
    for (int64_t first = 0, b = 0; first < n; first += block, b++) {
        int64_t count = n - first < block ? n - first : block;
        load_block(type, row, first, count, x);
        EpQuantScale scale = ep_quant_scale(quant, find_amax(x, count));
        for (int64_t i = 0; i < count; i++)
            out[first + i] = ep_e4m3_from_float(x[i] * scale.inverse);
        if (ep_quant_scale_type(quant) == EP_TYPE_FP32)
            ((uint32_t *)scales)[b] = scale.stored;
        else
            ((uint8_t *)scales)[b] = (uint8_t)scale.stored;
    }
}
