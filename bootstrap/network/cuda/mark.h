/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_NETWORK_CUDA_MARK_H
#define EP_BOOTSTRAP_NETWORK_CUDA_MARK_H

/**
 * The kernels that write and compare stamps where no other kernel does: see EpStamp.
 */

#include "runtime/cuda/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_mark(void);

/** An operation that reads no plan begins: write this rank's stamp. */
int ep_cuda_launch_begin(const EpMarkArgs *args, void *stream);

/** Likewise on one node, whose ranks reach each other's windows: tell them, wait until all of them
 * have begun, and compare. */
int ep_cuda_launch_meet(const EpMarkArgs *args, void *stream);

/** The peers' stamps are here: compare them with this rank's. An exchange is complete, too. */
int ep_cuda_launch_compare(const EpMarkArgs *args, void *stream);

/** An exchange is complete. */
int ep_cuda_launch_move(const EpMarkArgs *args, void *stream);

/** This rank joins no further operation, and its own have ended: let the ranks of its node know. */
int ep_cuda_launch_depart(const EpCudaGroup *group, void *stream);

#ifdef __cplusplus
}
#endif

#endif
