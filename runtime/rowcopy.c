/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "runtime/rowmath.h"

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

/* Streaming stores are weakly ordered: without a fence a later flag could overtake them. */
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

void ep_stream_fence(void) {}

#endif
