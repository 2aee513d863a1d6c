/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_NAMES_H
#define EP_RUNTIME_NAMES_H

/** How numbers that ranks compare are written in sentences: by the names of their enumerators. */

#include <stdint.h>

typedef enum EpNames {
    EP_NUMBERS,
    EP_NAMES_TYPE, /**< EpType, as in "bf16" */
    EP_NAMES_LAYOUT,
    EP_NAMES_QUANT,
    EP_NAMES_BLOCKS,
    EP_NAMES_BACKEND,
    EP_NAMES_MODE,
    EP_NAMES_OVERFLOW,
    EP_NAMES_DUPLICATES,
    EP_NAMES_SUMS,
    EP_NAMES_CHOICE,
    EP_NAMES_TENSOR_KIND,
    EP_NAMES_AMAX,
    EP_NAMES_FORM /**< what ep_form_code returns */
} EpNames;

#define EP_NAME_BYTES 80

/** Write a value's name, or its digits if it has none, into `out`. Returns `out`. */
const char *ep_name(EpNames names, int64_t value, char out[EP_NAME_BYTES]);

/** Returns a number for a form of a weight (EpWeightForm): forms that differ have different ones.
 */
static inline int64_t ep_form_code(int quant, int blocks, int transposed, int by_rank) {
    return quant << 3 | (blocks - 1) << 2 | transposed << 1 | by_rank;
}

#endif
