/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_MOVED_H
#define TESTS_GPU_MOVED_H

/**
 * Tensors that GPUs cannot reach, moved to the arena for a call. Inner part of on_gpu.c.
 *
 * In latency mode ep_prepare only records its arguments, and dispatches read and write their data
 * later on. So what it was given stays in the arena, kept with the handle: it is brought up to date
 * before a dispatch, and outputs are brought home after it.
 */

#include "ep/ep.h"

/** The tensors of one call, as they are passed. */
typedef struct Moved {
    EpTensor tensor[8];
    void *home[8];
    int is_output[8];
    int count;
} Moved;

/** What to pass for a tensor: a copy in the arena, or, where there is no need of one, the same. */
const EpTensor *moved_input(Moved *m, const EpTensor *t);
const EpTensor *moved_output(Moved *m, const EpTensor *t);

/** Outputs to where they belong; then the copies go. */
void moved_home(const Moved *m);
void moved_release(Moved *m);

/** Keep what a latency handle has recorded, in place of what it had before. */
void moved_keep(const EpHandle *handle, const Moved *m);
/** Copy what a handle has recorded to the arena again: it may have changed there. */
void moved_refresh(const EpHandle *handle);
/** Bring the recorded outputs home. */
void moved_deliver(const EpHandle *handle);
/** The handle, or all handles of the group, are about to go. */
void moved_forget(const EpHandle *handle);
void moved_forget_all(const EpGroup *group);

#endif
