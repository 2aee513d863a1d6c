/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_COMM_H
#define EP_BOOTSTRAP_CUDA_COMM_H

/**
 * A group's communicator of NCCL's, its own or one that it borrows. NCCL sets up what it is asked
 * for in a thread of its own, while the rank watches a deadline: a rank that does not come is an
 * error there. A borrowed communicator may block instead, and then waits as long as NCCL does.
 */

#include "runtime/cuda_host.h"

/** Collective: create the group's, whose unique id travels over the bootstrap, or look at the
 *  borrowed one. */
EpStatus ep_cuda_comm_open(EpGroup *group);

/** `together`: all ranks do so. Else it is torn down alone. */
void ep_cuda_comm_close(EpGroup *group, int together);

/** ep_group_agree behind what NCCL has done: a rank that failed at once waits for those that NCCL
 * has kept waiting. */
EpStatus ep_cuda_comm_agree(EpGroup *group, const EpCall *call, EpStatus mine);

/** Wait for what `call` has started in the group's communicator, of which it returned `result`. */
EpStatus ep_cuda_comm_settle(const EpGroup *group, const char *call, ncclResult_t result);

#endif
