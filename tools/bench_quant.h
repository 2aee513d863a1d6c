/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_QUANT_H
#define BENCH_QUANT_H

/** Quantised rows as the contract defines them; the bench's own arithmetic, as in bench_data.h. */

#include <stdint.h>

#include "ep/ep.h"

/** Scales of a row, and their type. */
int64_t quant_scales(EpQuant quant, int64_t elements);
EpType quant_scale_type(EpQuant quant);

/** Quantise `count` finite numbers: a byte of e4m3 for each, and the scales. */
void quant_row(EpQuant quant, const float *row, int64_t count, void *out, void *scales);

#endif
