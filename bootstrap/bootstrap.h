/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_BOOTSTRAP_H
#define EP_BOOTSTRAP_BOOTSTRAP_H

/**
 * How ranks meet. mpi.c (in libep_mpi) and local.c make bootstraps, posix_share.c serves those that
 * bring no shared memory of their own, topology.c finds out who shares a node, agree.c compares
 * what ranks were told, group_create.c puts a group together from all of these, and meet.c is how
 * its ranks agree later.
 */

#include "runtime/status.h"

/** Refuse a bootstrap that lacks what every one must have. */
EpStatus ep_bootstrap_check(const EpCall *call, const EpBootstrap *bootstrap);

/** Can ranks on different nodes send each other messages? */
int ep_bootstrap_has_messages(const EpBootstrap *bootstrap);

/**
 * Shared memory through the bootstrap's own callback, or else through POSIX shared memory. See
 * EpBootstrap.share. `node` is this rank's, nodes[r] rank r's.
 */
EpStatus ep_bootstrap_share(const EpBootstrap *bootstrap, const int32_t *nodes, size_t bytes,
                            double timeout, void **segments, void **memory);
void ep_bootstrap_share_free(const EpBootstrap *bootstrap, void *memory, int together);

/** POSIX shared memory for bootstraps without `share`. */
EpStatus ep_posix_share(const EpBootstrap *bootstrap, const int32_t *nodes, size_t bytes,
                        double timeout, void **segments, void **memory);
void ep_posix_share_free(void *memory);

#endif
