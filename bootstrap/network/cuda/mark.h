/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_NETWORK_CUDA_MARK_H
#define EP_BOOTSTRAP_NETWORK_CUDA_MARK_H

/**
 * What kernels do at the ends of an operation that crosses the network. They tell the watcher how
 * far this rank has come. And they compare what ranks are in: a stamp goes with each message, and
 * is compared before anything reads the rows. Ranks of a node compare their operations themselves,
 * so no two ranks of the group differ unnoticed. A rank that has failed still sends messages, which
 * others wait for, but their rows are not what they should be, as the kernels that fill them let
 * the stamp say (mark.cuh).
 */

#include "runtime/cuda/device.h"

/** In pinned memory. One store each, so their order does not matter. */
typedef struct EpWatchMarks {
    uint64_t begun; /**< operations that cross the network << 32 | digest of the latest one */
    uint64_t moved; /**< marks so far << 1 | whether an operation is under way */
} EpWatchMarks;

/** What a rank says of the operation that it has entered. */
typedef struct EpStamp {
    uint32_t digest, number; /**< as in EpWatchMarks.begun; EP_OP_GONE: the rank has failed */
    uint32_t generation;     /**< of the plan that it reads; 0: none */
    uint32_t blamed; /**< EP_OP_GONE: 1 + the rank of the group because of which; 0: itself */
} EpStamp;

/** What kernels at an operation's begin, at an exchange or after one need for these. */
typedef struct EpMarks {
    EpWatchMarks *watch;
    uint64_t *counts;      /**< device [2]: operations, marks */
    EpStamp *own;          /**< device: this rank's stamp */
    const EpStamp *theirs; /**< device [num_peers]: those that have come */
    const int32_t *peers;  /**< device [num_peers]: their ranks in the group; NULL: 0, 1 .. */
    int32_t num_peers;
    int32_t last; /**< whether the operation has no further exchange */
} EpMarks;

typedef struct EpMarkArgs {
    EpCudaGroup group; /**< begin: with the operation's digest */
    EpMarks marks;
} EpMarkArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_mark(void);

/** An operation that reads no plan begins: write this rank's stamp. */
int ep_cuda_launch_begin(const EpMarkArgs *args, void *stream);

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
