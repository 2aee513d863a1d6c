/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/flight.h"

static const char *const wholes[] = {"", "ep_dispatch", "ep_combine"};

EpStatus ep_flight_check(const EpCall *call, const EpFlight *flight, EpFlying expected) {
    if (flight->what == expected) return EP_OK;
    if (flight->what == EP_FLYING_NOTHING)
        return ep_refuse(call, EP_ERR_ORDER, "handle",
                         "expected %s_send before its second half, got none", wholes[expected]);
    return ep_refuse(call, EP_ERR_ORDER, "handle",
                     "expected %s_wait next, since %s_send has begun, got another call",
                     wholes[flight->what], wholes[flight->what]);
}
