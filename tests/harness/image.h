/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_IMAGE_H
#define TESTS_HARNESS_IMAGE_H

/**
 * Buffers that show every byte written. Two images of equal size start with equal poison and have a
 * guard before and after the data. The library writes into one, the oracle into the other; equal
 * images mean that exactly the right bytes were written.
 */

#include <stddef.h>
#include <stdint.h>

#include "tests/harness/check.h"

typedef struct Image {
    size_t bytes;  /**< of the data */
    uint8_t *base; /**< the allocation: guard, data, guard */
    uint8_t *data; /**< aligned as ep.h requires, and no better */
} Image;

/** `align` is 4, 8 or 16; data is never aligned to twice that. */
Image image_new(size_t bytes, size_t align);
void image_free(Image *image);

/** An image in the caller's memory: 128-byte aligned, image_room bytes, not to be freed. image_over
 * leaves the contents; image_in fills in the poison of image_new. */
size_t image_room(size_t bytes);
Image image_over(void *memory, size_t bytes, size_t align);
Image image_in(void *memory, size_t bytes, size_t align);

/** Check that the images are equal, guards included. `row_bytes` is for the message only. */
bool image_check_equal(const Image *got, const Image *expected, size_t row_bytes, const char *what);

/** Check that nothing was written outside of the data. */
bool image_check_guards(const Image *image, const char *what);

/** Check that nothing was written. */
bool image_check_untouched(const Image *image, const char *what);

#endif
