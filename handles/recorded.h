/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_RECORDED_H
#define EP_HANDLES_RECORDED_H

/**
 * Latency mode: what ep_prepare has recorded of a step's routing for the dispatches that follow. It
 * has the caller's pointers to the data and its own copies of the tensors around them.
 */

#include "runtime/backend.h"

#define EP_PLAN_TENSORS 5

typedef struct EpRecorded {
    int given;   /**< whether there is a routing */
    int pending; /**< whether no dispatch has made a plan of it yet */
    EpRouting routing;
    EpPlanTensors out;
    EpTensor tensor[EP_PLAN_TENSORS]; /**< those of `out` */
} EpRecorded;

/** Keep a checked routing. */
void ep_recorded_keep(EpRecorded *recorded, const EpRouting *routing);

/** What argument checks need of a step that is yet to be planned. */
EpStep ep_recorded_step(const EpRecorded *recorded);

#endif
