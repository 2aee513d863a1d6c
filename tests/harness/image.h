/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_IMAGE_H
#define TESTS_HARNESS_IMAGE_H

/**
 * Buffers that show every byte written. Two images of equal size begin as equal poison, with a
 * guard before and after the data. The library writes into one, the oracle into the other; equal
 * images then mean that all right bytes were written and no other.
 */

#include <stddef.h>
#include <stdint.h>

#include "tests/harness/check.h"

typedef struct Image {
    size_t bytes;  /**< of the data */
    uint8_t *base; /**< what was allocated: guard, data, guard */
    uint8_t *data; /**< aligned to what the header promises to accept, and to no more */
} Image;

/** `align`: 4, 8 or 16; data is never aligned to twice that. */
Image image_new(size_t bytes, size_t align);
void image_free(Image *image);

/** An image in memory of the caller's, 128-byte aligned, of image_room bytes: not to be freed. As
 *  the memory is, or (image_in) with the poison of image_new. */
size_t image_room(size_t bytes);
Image image_over(void *memory, size_t bytes, size_t align);
Image image_in(void *memory, size_t bytes, size_t align);

/** The images are equal, guards included. `row_bytes` only helps the message. */
bool image_check_equal(const Image *got, const Image *expected, size_t row_bytes, const char *what);

/** Nothing was written. */
bool image_check_untouched(const Image *image, const char *what);

#endif
