/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_FLIGHT_H
#define EP_HANDLES_FLIGHT_H

/**
 * Latency mode: what flies between the two halves of an operation, as far as calls are concerned.
 * The bytes are the backend's business.
 */

#include "runtime/backend.h"

typedef enum EpFlying { EP_FLYING_NOTHING, EP_FLYING_DISPATCH, EP_FLYING_COMBINE } EpFlying;

typedef struct EpFlight {
    EpFlying what;
    EpStep step;       /**< by which the second half's arguments are checked */
    EpScatter scatter; /**< EP_FLYING_DISPATCH: without the inputs, which may be gone */
    EpGather gather;   /**< EP_FLYING_COMBINE, likewise */
} EpFlight;

/** Whether the handle's turn is as expected: `expected` flies. */
EpStatus ep_flight_check(const EpCall *call, const EpFlight *flight, EpFlying expected);

#endif
