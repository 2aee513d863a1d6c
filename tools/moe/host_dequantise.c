/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "tools/moe/host_rows.h"

/* e4m3: 4 bits of exponent with bias 7, 3 of mantissa, no infinities; 0x7f is NaN. */
static float value_of(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value =
        exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if ((code & 0x7f) == 0x7f) value = NAN;
    return code & 0x80 ? -value : value;
}

static float scale_at(const EpTensor *scales, int64_t i) {
    if (scales->type == EP_TYPE_FP32) return ((const float *)scales->data)[i];
    return ldexpf(1, (int)((const uint8_t *)scales->data)[i] - 127);
}

bool host_dequantise(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                     int64_t columns, const EpTensor *out) {
    float values[256];
    (void)d;
    for (int code = 0; code < 256; code++)
        values[code] = value_of((uint8_t)code);
    const int64_t height = q->shape[1], width = q->shape[2];
    for (int64_t line = 0; line < q->shape[0] * height; line++) {
        const int64_t matrix = line / height, row = line % height / rows;
        const int64_t first = (matrix * scales->shape[1] + row) * scales->shape[2];
        const uint8_t *in = (const uint8_t *)q->data + line * width;
        float *to = (float *)out->data + line * width;
        for (int64_t begin = 0; begin < width; begin += columns) {
            const float scale = scale_at(scales, first + begin / columns);
            for (int64_t i = begin; i < width && i < begin + columns; i++)
                to[i] = values[in[i]] * scale;
        }
    }
    return true;
}
