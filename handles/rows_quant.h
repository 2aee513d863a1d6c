/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_ROWS_QUANT_H
#define EP_HANDLES_ROWS_QUANT_H

/**
 * ep_quantise_rows (ep_quant.h), checked and described: rows_quant.c checks, the backends quantise.
 */

#include "ep/ep_quant.h"
#include "runtime/group.h"
#include "runtime/quant.h"

/** Dimensions are those of the result, [slabs, rows, columns]: with form.transposed, columns of the
 *  result are rows of the input. */
typedef struct EpRowsQuant {
    EpGroup *group;
    EpRowsForm form;
    EpQuantFormat format; /**< of form.quant */
    EpType type;
    int64_t size[3];
    int64_t block[3]; /**< elements of a block, by dimension */
    const void *rows;
    const void *num_rows; /**< [size[0]], or NULL */
    EpType num_rows_type;
    uint8_t *out;
    void *scales;
    int64_t scale_step[3]; /**< between the scales of blocks that follow each other, by dimension */
    EpStream stream;
} EpRowsQuant;

static inline int64_t ep_rows_blocks(const EpRowsQuant *q, int dim) {
    return (q->size[dim] + q->block[dim] - 1) / q->block[dim];
}

/** The dimension of the result that num_rows speaks of. */
static inline int ep_rows_dim(const EpRowsQuant *q) {
    return q->form.transposed ? 2 : 1;
}

#endif
