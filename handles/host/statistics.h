/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HOST_STATISTICS_H
#define EP_HANDLES_HOST_STATISTICS_H

/** What the host backend counts for its caller: see EpStatistics. */

#include "runtime/host/host.h"
#include "runtime/movement.h"

/** An operation of the host backend. `call` describes it: EpRouting, EpScatter or EpGather. */
typedef EpStatus EpHostRun(EpHandle *handle, const void *call);

/** Run an operation. If its waits are asked for, measure them, and add them unless it fails. In
 *  latency mode it cuts ranks that are late, where the group says so. */
EpStatus ep_host_run(EpHandle *handle, const EpStatistics *stats, EpHostRun *run, const void *call,
                     const char *phase);

/** ep_refuse_cuts, and tell the others. */
EpStatus ep_host_refuse_cuts(EpGroup *group);

/** Add begin[r + 1] - begin[r] rows for each rank r. */
void ep_host_count_rows(const EpGroup *group, const EpStatistics *stats, const int32_t *begin);

/** Add the slots of each local expert. */
void ep_host_count_experts(const EpStatistics *stats, const int32_t *counts, int32_t num_local);

#endif
