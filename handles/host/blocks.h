/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_HOST_BLOCKS_H
#define EP_HANDLES_HOST_BLOCKS_H

/**
 * The words of blocks of receive rows on the host backend: see EpRowBlocks.
 *
 * Memory order. A word of `ready` is stored with release after the block's rows, so who loads it
 * with acquire sees them. A word of `done` is loaded with acquire before the rows that its writer
 * has stored before it, with release.
 */

#include "handles/host/plan.h"

/** Returns the ranks that do not take part. */
EpMask ep_host_lost(const EpGroup *group);

/** Store the words of all blocks, whose rows are there. Rows of `lost` ranks are zero. */
void ep_host_set_ready(const EpPlanShape *shape, const EpPlan *plan, const EpMask *lost,
                       const EpRowBlocks *ready);

/** Wait for the words of all blocks that have rows, which another thread may store. Returns
 *  EP_ERR_TIMEOUT with the block, and the group stays usable. */
EpStatus ep_host_await_done(const EpHandle *handle, const EpCall *call, const EpPlan *plan,
                            const EpRowBlocks *done);

#endif
