/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_QUANTISED_H
#define EP_HANDLES_QUANTISED_H

/** Checks and descriptions of rows that a scatter quantises, and of the scales of receive rows. */

#include "handles/operation.h"

/** Describe rows of `t`, which have been checked and described as they are, as they travel in a
 *  format. Refuses types and lengths that cannot be quantised. */
EpStatus ep_describe_quantised(const EpOperation *o, const char *argument, const EpTensor *t,
                               EpQuantFormat format, EpScatterTensors *s);

/** Set how the scales of receive rows lie, in the handle's order, and their bytes. */
void ep_describe_scale_order(const EpOperation *o, EpScatterTensors *s);

/** Check and describe the tensor of receive scales, which is given exactly if there are scales.
 *  `cause` names what makes them. */
EpStatus ep_describe_recv_scales(const EpOperation *o, const char *argument, const EpTensor *t,
                                 const char *cause, EpScatterTensors *s);

#endif
