/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_NOTES_H
#define EP_RUNTIME_CUDA_NOTES_H

/**
 * How an abort reaches kernels that wait, on all ranks. The caller's streams are busy with these
 * kernels, and a kernel that waits must not poll the host's memory. So a copy on a stream of the
 * group's own stores into the windows; see EpWindowLayout.aborted. The same stream reads the own
 * window's word where the host waits. The sentence of a refused call takes the same way.
 */

#include <cuda_runtime_api.h>

#include "runtime/cuda/device.h"
#include "runtime/group.h"

/** What is copied to windows and from the own one. */
typedef struct EpCudaNote {
    uint64_t word; /**< 1 + rank on this node; masks: incarnation */
    char why[EP_ABORT_BYTES];
    EpArrival arrivals[2 * EP_CUDA_MAX_RANKS];
    uint64_t parted[2]; /**< of a ballot */
} EpCudaNote;

typedef struct EpCudaNotes {
    cudaStream_t stream;
    EpCudaNote *out, *in; /**< pinned */
} EpCudaNotes;

EpStatus ep_cuda_notes_open(const EpGroup *group, EpCudaNotes *notes);
void ep_cuda_notes_close(EpCudaNotes *notes);

/** Entries of the backend's table; see EpBackendOps. */
int ep_cuda_abort(EpGroup *group, const char *sentence, int leaving);
int32_t ep_cuda_find_failed(EpGroup *group, int32_t *blamed, char why[EP_ABORT_BYTES]);

/** Tell the peers of the abort again, if there was one: some windows were not mapped before. The
 *  caller holds the abort. */
void ep_cuda_repeat_abort(EpGroup *group);

/** Store the sentence of this rank into the peers' windows, where no word names the rank: of a
 *  refused call, "": of none. Get that of a rank of this node; "" if it has none, or that cannot be
 *  read soon. */
void ep_cuda_tell_refusal(EpGroup *group, const char *text);
void ep_cuda_find_refusal(const EpGroup *group, int32_t rank, char text[EP_ABORT_BYTES]);
/** Wait, not for long, until what was enqueued on the stream of notes is done. */
void ep_cuda_settle_notes(EpGroup *group);

#endif
