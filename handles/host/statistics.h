/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HOST_STATISTICS_H
#define EP_HANDLES_HOST_STATISTICS_H

/** What the host backend counts for its caller: see EpStatistics. */

#include "runtime/host/host.h"
#include "runtime/movement.h"

/** Begin to measure the waits of an operation, if they are asked for. waited: [size], space that
 *  lives until ep_host_count_waits. */
void ep_host_measure_waits(const EpGroup *group, const EpStatistics *stats, double *waited);

/** End that, and add the waits of an operation that has not failed. */
void ep_host_count_waits(const EpGroup *group, const EpStatistics *stats, const double *waited,
                         EpStatus status);

/** Add begin[r + 1] - begin[r] rows for each rank r. */
void ep_host_count_rows(const EpGroup *group, const EpStatistics *stats, const int32_t *begin);

/** Add the slots of each local expert. */
void ep_host_count_experts(const EpStatistics *stats, const int32_t *counts, int32_t num_local);

#endif
