/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_MASKS_CUDA_MASK_H
#define EP_HANDLES_MASKS_CUDA_MASK_H

/**
 * ep_group_mask on the CUDA backend: the rendezvous of living ranks, in a kernel.
 *
 * It needs no operation to be complete, since ranks may have given up in any. Before it, a rank
 * waits until its own kernels have ended: they store nothing any more. Then, as on the host
 * (runtime/host/exchange.h), each rank of the new set stores its ballot into the windows of the
 * others:
 *
 *     cast     A ticket of this call, the new set, and the numbers that its operations count.
 *     ready    It has seen a ballot of each other rank with the same set. So nobody stores into its
 *              window: it clears the words there, and then stores a digest of all tickets. It knows
 *              the numbers with which all go on: larger than those of any of them.
 *     done     All others are ready with the same digest, or one of them is done with it. It sets
 *              its numbers and the words that say who is alive, and takes part.
 *
 * A rank that gives up withdraws its ballot, and comes back with another ticket. Ranks that were
 * ready then stop being so. So whoever is done knows that all were ready for the same ballots.
 *
 * What a masked rank may still store. Every place in a window that a peer stores into is for that
 * peer alone: its arrivals, rings, credits, counts, routes, heads and records. Kernels of the
 * living do not look there. The exceptions are ballots. In them a vote counts only with the same
 * set, and an abort only if the voter is alive. Receive rows are staged. Once the rank is back, it
 * has waited for its kernels, and its ballot says so: what they stored is cleared, or has numbers
 * that no operation has any more.
 *
 * Numbers only grow: the epoch, and the operations of latency mode, exceed all that a rank has
 * reached. A set of buffers whose operations differ between ranks gets a larger number, too. Then
 * operations between their phases are dropped: some rank lacks them. So it is where a rank of the
 * new set was masked or cut for another one: the two have sent each other nothing.
 *
 * Memory order. A ballot's word is stored before its fields, with no state, and after them; fences
 * lie between. A reader loads it before and after the fields. A rank clears its window before the
 * release of "ready", and peers store there after they have acquired it.
 */

#include "runtime/cuda/latency.h"
#include "runtime/mask.h"

struct EpCudaStream;

/** How the rendezvous has ended. */
enum EpMaskEnd {
    EP_MASK_DONE = 1,
    EP_MASK_MISSING, /**< `rank` did not come in time */
    EP_MASK_GONE,    /**< `rank` was aborted */
    EP_MASK_DIFFERS, /**< `rank` has the set `theirs` */
    EP_MASK_ABORTED  /**< this rank was */
};

/** In pinned memory. */
typedef struct EpMaskResult {
    int32_t end; /**< EpMaskEnd */
    int32_t rank;
    int32_t drops; /**< whether operations between their phases were dropped */
    uint64_t theirs[EP_ALIVE_WORDS];
} EpMaskResult;

typedef struct EpMaskArgs {
    EpCudaGroup group;
    uint64_t alive[EP_ALIVE_WORDS]; /**< the new set */
    EpLatencyState *latency;        /**< NULL: no latency mode */
    int32_t sets;
    EpMaskResult *result;
} EpMaskArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. One block each: the rendezvous; a cut by hand of the ranks in
 *  `alive`. */
int ep_cuda_open_mask(int shared_bytes);
int ep_cuda_launch_mask(const void *args, int blocks, void *stream);
int ep_cuda_launch_cut(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

/** Allocate what a group with masks needs, and free it. */
EpStatus ep_cuda_open_masks(EpGroup *group);
void ep_cuda_close_masks(EpGroup *group);

/** See EpBackendOps. */
EpStatus ep_cuda_mask(EpGroup *group, const EpMask *alive, EpStream stream);
EpStatus ep_cuda_cut(EpGroup *group, int32_t rank, EpStream stream);

/** See EpBackendOps. */
EpStatus ep_cuda_admit(EpGroup *group, const EpMask *alive);

/** Make the table of copies, if there is one, from the map and from who is alive, and wait. */
EpStatus ep_cuda_choose_copies(EpGroup *group);

/** Make the table of copies anew, before an operation, if ranks were cut since. */
EpStatus ep_cuda_follow_cuts(EpGroup *group, const struct EpCudaStream *stream);

#endif
