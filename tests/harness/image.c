/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/image.h"

#define GUARD 256

static size_t total_bytes(const Image *image) {
    return (size_t)(image->data - image->base) + image->bytes + GUARD;
}

static uint8_t poison(size_t i) {
    return (uint8_t)(0xa5 ^ (i * 29) ^ (i >> 7));
}

size_t image_room(size_t bytes) {
    return (bytes + 2 * GUARD + 128 + 127) / 128 * 128;
}

Image image_over(void *memory, size_t bytes, size_t align) {
    Image image = {.bytes = bytes, .base = memory};
    image.data = image.base + GUARD + align;
    return image;
}

Image image_in(void *memory, size_t bytes, size_t align) {
    Image image = image_over(memory, bytes, align);
    for (size_t i = 0; i < total_bytes(&image); i++)
        image.base[i] = poison(i);
    return image;
}

Image image_new(size_t bytes, size_t align) {
    void *memory = aligned_alloc(128, image_room(bytes));
    cr_assert(memory != NULL, "no memory for a test's buffer");
    return image_in(memory, bytes, align);
}

void image_free(Image *image) {
    free(image->base);
    *image = (Image){0};
}

bool image_check_equal(const Image *got, const Image *expected, size_t row_bytes,
                       const char *what) {
    size_t bytes = total_bytes(expected);
    if (memcmp(got->base, expected->base, bytes) == 0) return true;
    size_t i = 0;
    while (got->base[i] == expected->base[i])
        i++;
    long offset = (long)i - (long)(expected->data - expected->base);
    return CHECK(false, "%s: byte %ld of %zu, in row %ld of %zu bytes, is %02x instead of %02x",
                 what, offset, expected->bytes, row_bytes ? offset / (long)row_bytes : 0, row_bytes,
                 got->base[i], expected->base[i]);
}

bool image_check_guards(const Image *image, const char *what) {
    size_t begin = (size_t)(image->data - image->base), i = 0;
    while (i < total_bytes(image) && image->base[i] == poison(i))
        i += i + 1 == begin ? 1 + image->bytes : 1;
    return CHECK(i >= total_bytes(image), "%s: byte %ld of %zu was written", what,
                 (long)i - (long)begin, image->bytes);
}

bool image_check_untouched(const Image *image, const char *what) {
    size_t i = 0;
    while (i < total_bytes(image) && image->base[i] == poison(i))
        i++;
    return CHECK(i == total_bytes(image), "%s: byte %ld was written", what,
                 (long)i - (long)(image->data - image->base));
}
