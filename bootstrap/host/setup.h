/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_HOST_SETUP_H
#define EP_BOOTSTRAP_HOST_SETUP_H

/** What the host backend sets up with the peers: shared segments, and the exchange that uses them.
 */

#include "runtime/group.h"

/** Entries of the backend's table; see EpBackendOps. */
void ep_host_measure(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                     int64_t *shared_bytes, int64_t *private_bytes);
EpStatus ep_host_open(EpGroup *group);
EpStatus ep_host_reserve(EpGroup *group);
EpStatus ep_host_admit(EpGroup *group, const EpMask *alive);
void ep_host_close(EpGroup *group, int together);
void ep_host_describe(const EpGroup *group, EpGroupInfo *out);

#endif
