/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_MOVED_H
#define TESTS_GPU_MOVED_H

/**
 * Copies in the pinned buffer of tensors that GPUs cannot reach. Internal to on_gpu.c.
 *
 * In latency mode ep_prepare defers routing: dispatches read and write its tensors later. So the
 * copies of its tensors are kept with the handle. They are refreshed before each dispatch, and
 * outputs are copied back after it.
 */

#include "ep/ep.h"

/** The copied tensors of one call. */
typedef struct Moved {
    EpTensor tensor[16];
    void *home[16];
    int is_output[16];
    int count;
} Moved;

/** Returns the tensor to pass: a copy in the pinned buffer, or `t` itself if it needs none. */
const EpTensor *moved_input(Moved *m, const EpTensor *t);
const EpTensor *moved_output(Moved *m, const EpTensor *t);

/** Copy the outputs back to the caller's memory. */
void moved_home(const Moved *m);
/** Free the copies. */
void moved_release(Moved *m);

/** Keep the tensors of a handle's deferred routing, in place of earlier ones. */
void moved_keep(const EpHandle *handle, const Moved *m);
/** Copy the kept tensors from the caller's memory again: their content may have changed. */
void moved_refresh(const EpHandle *handle);
/** Copy the kept outputs back to the caller's memory. */
void moved_deliver(const EpHandle *handle);
/** Drop what is kept for a handle, or for all handles of a group, before it is destroyed. */
void moved_forget(const EpHandle *handle);
void moved_forget_all(const EpGroup *group);

#endif
