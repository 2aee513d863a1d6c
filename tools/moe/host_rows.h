/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_HOST_ROWS_H
#define MOE_HOST_ROWS_H

/** The layer's arithmetic on CPUs, row by row. See MoeDevice. */

#include "tools/moe/device.h"

bool host_fill(MoeDevice *d, const Contents *contents, const Part *part, const EpTensor *out);
bool host_differ(MoeDevice *d, const EpTensor *got, const EpTensor *want, Difference *out);
bool host_choose(MoeDevice *d, const EpTensor *p, const EpTensor *idx, const EpTensor *weights);
bool host_choose_backward(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                          const EpTensor *grad_weights, const EpTensor *grad);
/** out += in, of `count` elements, rounded to the type of `out`. */
void host_add(const float *in, int64_t count, EpType type, void *out);
bool host_activate(MoeDevice *d, const Groups *groups, const EpTensor *z, const EpTensor *w,
                   const EpTensor *a);
bool host_activate_backward(MoeDevice *d, const Groups *groups, const EpTensor *z,
                            const EpTensor *w, const EpTensor *grad_a, const EpTensor *grad_z,
                            const EpTensor *grad_w);
bool host_dequantise(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                     int64_t columns, const EpTensor *out);

#endif
