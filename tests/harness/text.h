/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_TEXT_H
#define TESTS_HARNESS_TEXT_H

/**
 * Structs as text, for tables of tests: "ranks=3 layout=flat". A value is a number, or a word of
 * those that the field has.
 */

#include <stddef.h>
#include <stdint.h>

typedef struct TextField {
    const char *name;
    const char *words; /**< those of 0, 1, 2 ..., separated by '|', or NULL */
    size_t at, bytes;  /**< in the struct */
    int is_real;       /**< a double */
} TextField;

#define TEXT_FIELD(type, field, words)                                       \
    {                                                                        \
#field, words, offsetof(type, field), sizeof(((type *)NULL)->field), \
            _Generic(((type *)NULL)->field, double : 1, default : 0)         \
    }

#define TEXT_TYPES "|bf16|fp16|fp32|fp8_e4m3|fp8_e5m2|uint8|int32|int64"
#define TEXT_QUANTS "|none|fp8|fp8-ue8m0|mxfp8|fp8-pow2|nvfp4"
#define TEXT_LAYOUTS "|expert-major|flat|batched|rank-major"
#define TEXT_MODES "|auto|throughput|latency"
#define TEXT_OVERFLOWS "|error|drop"
#define TEXT_TAILS "keep|zero|ids"
#define TEXT_ORDERS "|by-row|by-column|swizzled"

/** Set a field of a struct; ends the process if there is no such field or word. */
void text_set(void *object, const TextField *fields, int n, const char *name, const char *value);

/** Write the fields that are not zero; returns `text`. Arrays of char are texts. */
const char *text_of(const void *object, const TextField *fields, int n, char *text, size_t bytes);

#endif
