/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_ORACLE_QUANT_H
#define TESTS_ORACLE_QUANT_H

/**
 * Quantised rows, computed in double precision from the definition in docs/semantics.md.
 */

#include <stdint.h>

#include "ep/ep.h"

/** How numbers are quantised: one line each in quant.c. */
typedef struct QuantForm {
    EpType type; /**< of a tensor of codes, one byte each */
    EpType scale_type;
    int bits;       /**< of a code; 0: nothing is quantised */
    int block;      /**< elements that share a scale */
    double largest; /**< that a code stands for */
    int is_power;   /**< scales are rounded up to powers of two */
    int is_global;  /**< scales are e4m3, and a global scale multiplies them */
    uint8_t (*encode)(double value);
} QuantForm;

const QuantForm *quant_form(EpQuant quant);

/** Number of scales of a row, bytes of its codes, and bytes of one scale. */
int quant_scales(EpQuant quant, int elements);
int quant_bytes(EpQuant quant, int elements);
int quant_scale_bytes(EpQuant quant);

/** Quantise a row of BF16, FP16 or FP32. `global`: the global scale, where the form has one. */
void quant_row(EpQuant quant, float global, EpType type, const void *row, int elements,
               uint8_t *out, uint8_t *scales);

/** Quantise `n` elements that share a scale. */
void quant_block(EpQuant quant, float global, const float *x, int n, uint8_t *out, uint8_t *scale);

/** Replace floats, a row that is quantised as EP_QUANT_FP8, by what a receiver makes of it. */
void quant_travel(float *row, int elements);

/** The value of an e4m3 code, and the code nearest to a value. */
double quant_decode(uint8_t code);
uint8_t quant_encode(double value);

/** The magnitudes of e2m1 codes, and the code nearest to a value. */
extern const double quant_e2m1[8];
uint8_t quant_encode_e2m1(double value);

#endif
