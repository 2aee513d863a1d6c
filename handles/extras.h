/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_EXTRAS_H
#define EP_HANDLES_EXTRAS_H

/** Checks of EpExtras, the optional tensors of the calls whose names end in _with. */

#include "handles/operation.h"

/** The members that a call takes. */
typedef enum EpTakes {
    EP_TAKES_BIAS = 1,
    EP_TAKES_EXPERTS = 2,
    EP_TAKES_ROWS = 4, /**< rows and bytes for each peer */
    EP_TAKES_WAITS = 8,
    EP_TAKES_GLOBAL_SCALE = 16,
    EP_TAKES_READY = 32,
    EP_TAKES_DONE = 64,
    EP_TAKES_GRAD_SCALES = 128
} EpTakes;

/** Copy the extras of a call (NULL: none), which may have the size of an earlier version. Refuses
 *  members that are not in `takes`. */
EpStatus ep_extras_read(const EpOperation *o, const EpExtras *given, unsigned takes, EpExtras *out);

/** Check the biases of the rows `out` [T, H], which have been checked, and describe them. */
EpStatus ep_extras_bias(EpOperation *o, const EpExtras *extras, const EpTensor *out,
                        EpGatherTensors *t);

/** Check the global scale, which a format of EP_SCALE_GLOBAL needs and no other one takes, and
 *  describe it. The backend checks its value. */
EpStatus ep_extras_global_scale(const EpOperation *o, const EpExtras *extras, EpScatterTensors *t);

/** Check the statistics, and describe them. `row_bytes`: of a row as it travels. */
EpStatus ep_extras_statistics(const EpOperation *o, const EpExtras *extras, int64_t row_bytes,
                              EpStatistics *out);

/** Check the words of ready (`takes` is EP_TAKES_READY) or done, which belong to the receive rows
 *  `rows`, and describe them. `rows` has been checked. */
EpStatus ep_extras_blocks(const EpOperation *o, const EpExtras *extras, unsigned takes,
                          const EpTensor *rows, EpRowBlocks *out);

#endif
