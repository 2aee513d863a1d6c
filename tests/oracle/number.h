/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_NUMBER_H
#define TESTS_ORACLE_NUMBER_H

/**
 * BF16, FP16 and FP32 elements, from their definition: sign, exponent, mantissa.
 */

#include <stdint.h>

#include "ep/ep.h"

/** Returns element `i` of an array of `type`. */
float number_get(const void *array, EpType type, int64_t i);

/** Store a value, rounded to nearest even. */
void number_set(void *array, EpType type, int64_t i, float value);

/** Returns the value that storing and loading would give. */
float number_round(EpType type, float value);

/** Returns random bits of moderate size: exponents -8 .. 3, sometimes a zero of either sign. */
uint32_t number_bits(EpType type, uint64_t random);

#endif
