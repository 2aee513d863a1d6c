/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_MARK_H
#define EP_BOOTSTRAP_CUDA_MARK_H

/** The kernel that tells the watcher how far this rank's exchanges have come. */

#include <stdint.h>

/** In pinned memory. One store each, so their order does not matter. */
typedef struct EpWatchMarks {
    uint64_t begun; /**< operations that cross the network << 32 | digest of the latest one */
    uint64_t moved; /**< marks so far << 1 | whether an operation is under way */
} EpWatchMarks;

typedef struct EpMarkArgs {
    EpWatchMarks *marks;
    uint64_t *counts; /**< device [2]: operations, marks */
    uint32_t digest;
    int32_t begins, last;
} EpMarkArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_mark(void);
int ep_cuda_launch_mark(const EpMarkArgs *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif
