/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_NOTES_H
#define EP_RUNTIME_CUDA_NOTES_H

/**
 * How an abort reaches kernels that wait, on all ranks. The caller's streams are busy with these
 * kernels, and a kernel that waits must not poll the host's memory. So a copy on a stream of the
 * group's own stores into the windows; see EpWindowLayout.aborted. The same stream reads the own
 * window's word where the host waits.
 */

#include <cuda_runtime_api.h>

#include "runtime/group.h"

/** What is copied to windows and from the own one. */
typedef struct EpCudaNote {
    uint64_t word; /**< 1 + rank */
    char why[EP_ABORT_BYTES];
} EpCudaNote;

typedef struct EpCudaNotes {
    cudaStream_t stream;
    EpCudaNote *out, *in; /**< pinned */
} EpCudaNotes;

EpStatus ep_cuda_notes_open(const EpGroup *group, EpCudaNotes *notes);
void ep_cuda_notes_close(EpCudaNotes *notes);

/** Entries of the backend's table; see EpBackendOps. */
int ep_cuda_abort(EpGroup *group, const char *sentence, int leaving);
int32_t ep_cuda_find_aborted(EpGroup *group, char sentence[EP_ABORT_BYTES]);

#endif
