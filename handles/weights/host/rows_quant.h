/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHTS_HOST_ROWS_QUANT_H
#define EP_HANDLES_WEIGHTS_HOST_ROWS_QUANT_H

#include "handles/weights/rows_quant.h"

EpStatus ep_host_quantise_rows(const EpRowsQuant *quant);

#endif
