/* SPDX-License-Identifier: Apache-2.0 */

/** Filling and comparing tensors on CPUs. On GPUs contents.cu does: layers have more elements than
 *  one core makes in reasonable time. */

#include <string.h>

#include "tools/moe/host_rows.h"

enum { PIECE = 512 }; /* elements, so that no scratch memory is needed */

bool host_fill(MoeDevice *d, const Contents *contents, const Part *part, const EpTensor *out) {
    const size_t unit = ep_type_bytes(out->type);
    const int64_t width = part->shape[2];
    float values[PIECE];
    (void)d;
    for (int64_t line = 0; line < part->shape[0] * part->shape[1]; line++) {
        for (int64_t k = 0; k < width; k += PIECE) {
            const int64_t piece = width - k < PIECE ? width - k : PIECE;
            contents_floats(contents, part_at(part, line) + k, piece, values);
            data_from_float(out->type, values,
                            (char *)out->data + (size_t)(line * width + k) * unit, piece);
        }
    }
    return true;
}

bool host_differ(MoeDevice *d, const EpTensor *got, const EpTensor *want, Difference *out) {
    const int64_t count = tensor_elements(got);
    const size_t unit = ep_type_bytes(got->type);
    *out = (Difference){.elements = 0};
    (void)d;
    for (int64_t i = 0; i < count; i += PIECE) {
        const int64_t piece = count - i < PIECE ? count - i : PIECE;
        const char *a = (const char *)got->data + (size_t)i * unit;
        const char *b = (const char *)want->data + (size_t)i * unit;
        float x[PIECE], y[PIECE];
        data_to_float(got->type, a, x, piece);
        data_to_float(got->type, b, y, piece);
        for (int64_t j = 0; j < piece; j++) {
            const double norm = (double)y[j], difference = (double)x[j] - norm;
            out->squares += difference * difference, out->norm += norm * norm;
            out->elements += memcmp(a + (size_t)j * unit, b + (size_t)j * unit, unit) != 0;
        }
    }
    return true;
}
