/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_PREPARE_HOST_COUNT_H
#define EP_HANDLES_PREPARE_HOST_COUNT_H

#include "handles/prepare/count.h"

EpStatus ep_host_count_routing(const EpCall *call, const EpRoutingCount *count);

#endif
