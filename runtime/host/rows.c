/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "runtime/host/rowmath.h"

#ifdef __SSE2__
#include <emmintrin.h>

void ep_row_copy(void *out, const void *row, size_t bytes, int stream) {
    if (!stream) {
        memcpy(out, row, bytes);
        return;
    }
    __m128i *to = out;
    const __m128i *from = row;
    for (size_t i = 0; i < bytes / 16; i++)
        _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
}

void ep_row_zero(void *out, size_t bytes, int stream) {
    if (!stream) {
        memset(out, 0, bytes);
        return;
    }
    __m128i *to = out;
    for (size_t i = 0; i < bytes / 16; i++)
        _mm_stream_si128(to + i, _mm_setzero_si128());
}

/* Streaming stores are weakly ordered even here: without a fence, a later store of a flag could
 * become visible before them. */
void ep_stream_fence(void) {
    _mm_sfence();
}

#else

void ep_row_copy(void *out, const void *row, size_t bytes, int stream) {
    (void)stream;
    memcpy(out, row, bytes);
}

void ep_row_zero(void *out, size_t bytes, int stream) {
    (void)stream;
    memset(out, 0, bytes);
}

/* These are plain stores, which a release orders. */
void ep_stream_fence(void) {}

#endif

/* ---- choosing the instruction set ----------------------------------------------------------- */

extern const EpRowMath ep_rowmath_base, ep_rowmath_v3, ep_rowmath_v4;

const EpRowMath *ep_rowmath(void) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &ep_rowmath_v4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2"))
        return &ep_rowmath_v3;
#endif
    return &ep_rowmath_base;
}
