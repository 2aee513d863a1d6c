/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_SHARES_H
#define EP_DISPATCH_SHARES_H

/**
 * How the kernels that move rows (throughput mode) divide the work: blocks among those that send
 * and those that receive, tokens among blocks, and a block's shared memory among jobs. Numbers
 * alone, found by trying (docs/performance.md).
 */

#include "handles/plan_cuda.h"

/**
 * From what else the arguments say, fill in `receivers`, `chunk` and the shapes of pipes. Blocks
 * have `shared_bytes` of shared memory; tokens' rows go in pieces of multiples of `unit` bytes. 0:
 * shared memory is too small, which it is not in a group that could be created (cuda_limits.h).
 */
int ep_share_scatter(EpScatterArgs *args, int32_t shared_bytes, int64_t unit);
int ep_share_gather(EpGatherArgs *args, int32_t shared_bytes);

#endif
