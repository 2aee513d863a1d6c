/* SPDX-License-Identifier: Apache-2.0 */

/** What quantising does to a whole weight, written from docs/semantics.md alone. */

#include <math.h>

#include "tools/common/data.h"
#include "tools/moe/reference.h"

#define LARGEST 448.0

/* The nearest number of e4m3, ties to even: 3 bits after the leading one, steps of at least 2^-9.
 */
static double round_e4m3(double x) {
    const double magnitude = fmin(fabs(x), LARGEST);
    const int exponent = magnitude < 0x1p-6 ? -6 : ilogb(magnitude);
    const double step = ldexp(1, exponent - 3);
    return copysign(nearbyint(magnitude / step) * step, x);
}

/* The scale of a block, and the number by which it multiplies before it rounds. */
static float scale_of(EpQuant quant, double amax, float *inverse) {
    const float scale = (float)(amax / LARGEST);
    if (!quant_format(quant)->is_power) {
        *inverse = (float)(LARGEST / amax);
        return scale;
    }
    const float power = ldexpf(1, (int)ceil(log2((double)scale)));
    *inverse = 1 / power;
    return power;
}

/* A block of rows x columns at `in`, with `stride` elements from row to row. */
static void quantise_block(EpQuant quant, const float *in, int64_t rows, int64_t columns,
                           int64_t stride, float *out) {
    double amax = 0x1p-100;
    float inverse;
    for (int64_t i = 0; i < rows * columns; i++)
        amax = fmax(amax, fabs((double)in[i / columns * stride + i % columns]));
    const float scale = scale_of(quant, amax, &inverse);
    for (int64_t i = 0; i < rows * columns; i++) {
        const int64_t at = i / columns * stride + i % columns;
        const float scaled = in[at] * inverse;
        out[at] = (float)round_e4m3((double)scaled) * scale;
    }
}

static int64_t at_most(int64_t count, int64_t limit) {
    return count < limit ? count : limit;
}

/* Blocks of a row lie along the dimension over which the product sums: the first of [in, out]
 * forward, the second backward. */
void reference_quantise(const MoeOptions *options, bool forward, const int64_t shape[3],
                        const float *in, float *out) {
    const EpQuant quant = (EpQuant)options->quant;
    const int64_t length = quant_format(quant)->block;
    const bool tiles = options->blocks == EP_BLOCKS_TILES;
    const int64_t height = tiles || forward ? length : 1, width = tiles || !forward ? length : 1;
    for (int64_t e = 0; e < shape[0]; e++) {
        for (int64_t i = 0; i < shape[1]; i += height) {
            for (int64_t j = 0; j < shape[2]; j += width) {
                const int64_t at = (e * shape[1] + i) * shape[2] + j;
                quantise_block(quant, in + at, at_most(shape[1] - i, height),
                               at_most(shape[2] - j, width), shape[2], out + at);
            }
        }
    }
}
