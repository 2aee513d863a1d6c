/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_WATCH_H
#define EP_BOOTSTRAP_CUDA_WATCH_H

/**
 * The watcher of a group whose data NCCL moves, between nodes or as weights: a thread of each rank.
 * NCCL has no deadline, and the words by which ranks of a node learn of each other do not cross the
 * network. So the watchers of ranks on different nodes, for weights of all ranks, are connected by
 * TCP (bootstrap/sockets.h), and tell each other
 *
 *     what they are in   each second: how many operations the rank has begun, and the latest one
 *     that a rank fails  at once: whom it blames and, if it was aborted, why
 *     a refused call     its sentence, which they quote when they give up because of that rank
 *     that a rank ends   the connection closes: its process has ended, or was killed
 *
 * A watcher also sees how far this rank's own exchanges have come: kernels store that into pinned
 * memory (EpWatchMark), in replayed graphs, too. An exchange that has not moved for the group's
 * timeout is late. The rank to blame is the one that has begun fewer operations, or of which
 * nothing was heard. Ranks in different operations would send each other messages of different
 * sizes, which NCCL does not find out: the watchers compare the digests of operations of the same
 * number.
 *
 * Once something is lost, the watcher ends this rank's part: kernels leave, the communicator of the
 * network is aborted, which ends its kernels. What was lost waits here until the group's thread
 * takes it (ep_cuda_poll).
 */

#include "bootstrap/cuda/mark.h"
#include "runtime/cuda/cuda.h"

/** Collective, where NCCL moves data: connect the watchers. Then start this rank's. */
EpStatus ep_cuda_watch_open(EpGroup *group);

/** Stop the watcher. `together`: the others do so now, and are not to take it for a loss. */
void ep_cuda_watch_close(EpGroup *group, int together);

/** Stop the watcher where the device may be busy for ever, and leave its memory and the
 *  communicator. */
void ep_cuda_watch_abandon(EpGroup *group);

/** Bring a loss into the group. */
void ep_cuda_watch_poll(EpGroup *group);

/** Returns whether the watcher knows of a loss that ep_cuda_watch_poll brings. Gives it time to
 * hear of one: call it when an exchange has ended without its data. */
int ep_cuda_watch_explains(const EpGroup *group);

/** Returns the rank whose loss has ended the group, perhaps this one, with the reason, or -1: see
 *  EpBackendOps.find_failed. */
int32_t ep_cuda_watch_find(const EpGroup *group, int32_t *blamed, char why[EP_ABORT_BYTES]);

/** Have the others told why the last call was refused, "": it was not, or (`departs`) that the rank
 *  goes because of that. The caller holds the mutex of aborts. */
void ep_cuda_watch_refuse(EpGroup *group, const char *text, int departs);

/**
 * Surround calls of NCCL on the communicator of all ranks, which the watcher may abort at any other
 * time, and after the timeout even then. `stream`: the operation's. If `enter` fails, something is
 * lost, and neither the communicator nor `settle` is to be called. `settle` waits until NCCL has
 * enqueued what the call `what` started with this result, and leaves. `leave` does so with the
 * status of what was done. If that is a failure, the group fails, since ranks are out of step: by
 * what the watcher has found, or else by this.
 */
EpStatus ep_cuda_network_enter(EpGroup *group, const EpCudaStream *stream);
EpStatus ep_cuda_network_settle(EpGroup *group, const char *what, ncclResult_t result);
EpStatus ep_cuda_network_leave(EpGroup *group, const char *what, EpStatus status);

/** Fail the group by what the watcher has found or, if that is nothing, by `status` in `phase`.
 *  Returns the group's failure. */
EpStatus ep_cuda_network_give_up(EpGroup *group, const char *phase, EpStatus status);

/** Set the watcher's part of the arguments of the kernels that tell it how far this rank is; in a
 *  group of weights also where stamps are, own and all ranks'. */
void ep_cuda_watch_describe(const EpGroup *group, EpMarkArgs *args);

#endif
