/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_NETWORK_CUDA_NETWORK_H
#define EP_BOOTSTRAP_NETWORK_CUDA_NETWORK_H

/**
 * What moves data by NCCL, between nodes and as weights, and what gives NCCL a deadline.
 *
 *     comm.c       makes and ends the communicators: of the ranks of a node, and of all ranks
 *     network.c    the group's thread: its calls of NCCL, and what it learns from the watcher
 *     exchange.h   the network as operations use it: messages that go at once (exchange.c)
 *     watch.c      the watcher, a thread of each rank; watch.h is what the two threads share
 *     mark.h       what kernels say at the ends of an exchange (mark.cu)
 *
 * NCCL waits for ever for a rank that is gone, and the words by which ranks of a node learn of each
 * other do not cross the network. So watchers do. Those of ranks on different nodes, for weights of
 * all ranks, are connected by TCP (bootstrap/network/sockets.h), and tell each other
 *
 *     what they are in   each second: how many operations the rank has begun, and the latest one
 *     that a rank fails  at once: whom it blames and, if it was aborted, why
 *     a refused call     its sentence, which they quote when they give up because of that rank
 *     that a rank ends   the connection closes: its process has ended, or was killed
 *
 * A watcher also sees how far this rank's own exchanges have come: kernels store that into pinned
 * memory (EpWatchMarks), in replayed graphs, too. An exchange that has not moved for the group's
 * timeout is late. The rank to blame is the one that has begun fewer operations, or of which
 * nothing was heard. Ranks in different operations would send each other messages of different
 * sizes, which NCCL does not find out: the watchers compare the digests of operations of the same
 * number.
 *
 * Once something is lost, the watcher ends this rank's part: kernels leave, and the communicator of
 * all ranks is aborted, which ends its kernels. The loss waits here until the group's thread takes
 * it (ep_cuda_watch_poll). That thread surrounds its calls of NCCL, so that the watcher does not
 * abort a communicator in use.
 */

#include "bootstrap/network/cuda/mark.h"
#include "runtime/cuda/cuda.h"

/* ---- communicators ------------------------------------------------------------------------- */

/* A communicator for windows alone does not block: NCCL works in a thread of its own while the rank
 * waits with a timeout, so a rank that stays away is an error. For that NCCL starts a thread for
 * each group of calls, which takes the host some 60 us. One that moves data blocks: each operation
 * has calls on it, which hold no thread for long once the ranks are connected. A thread of the
 * library's connects them (EpNcclCall). A borrowed communicator may be of either kind. */

/** Collective: create the group's communicators, from the borrowed one or from unique ids that
 *  travel over the bootstrap, or check the borrowed one. */
EpStatus ep_cuda_comm_open(EpGroup *group);

/** Collective: make the communicator of all ranks in a group of weights on one node. */
EpStatus ep_cuda_comm_open_network(EpGroup *group);

/** Returns whether NCCL moves data of the group, or may have to. The communicator of all ranks by
 *  which it does so is one of its own, which blocks: the watcher may abort it, and windows stay. */
static inline int ep_cuda_network_blocks(const EpGroup *group) {
    return group->purpose == EP_FOR_WEIGHTS || group->nodes.sizes.nodes > 1;
}

/** Blocks of a kernel of NCCL that moves weights on one node. With what NCCL takes by itself, 24 on
 *  two H100s, a gather is not bound by the wire, and takes a fifth longer. Ranks may differ in
 *  num_sms, but must not in this. */
#define EP_WEIGHT_CTAS 48
#define EP_MOST_CTAS 64 /* that NCCL has */

/** Likewise, or as many as the setting says. */
static inline int ep_cuda_weight_ctas(const EpGroup *group) {
    const int64_t sms = group->settings.weight_sms;
    if (sms == EP_COUNT_AUTO) return EP_WEIGHT_CTAS;
    return sms < 1 ? 1 : sms > EP_MOST_CTAS ? EP_MOST_CTAS : (int)sms;
}

/** Destroy the group's own communicators if all ranks do so (`together`), else abort them. */
void ep_cuda_comm_close(EpGroup *group, int together);

/** Destroy or abort a communicator. NCCL waits until the graphs are gone that its calls lie in:
 * then that is left to a thread of its own. */
void ep_cuda_comm_end(const EpCuda *cuda, ncclComm_t comm, int aborts);

/** ep_group_agree after a call of NCCL. Its timeout is longer, since NCCL may keep other ranks
 *  waiting where this rank failed at once. */
EpStatus ep_cuda_comm_agree(EpGroup *group, const EpCall *call, EpStatus mine);

/** Returns the seconds to wait for NCCL, which may need longer than the group's timeout. */
double ep_cuda_comm_timeout(const EpGroup *group);

/** Returns EP_OK if `call` has ended well, EP_ERR_SYSTEM if NCCL failed, another error if it has
 *  not answered (ncclInProgress): at the deadline, or because the group was aborted. */
EpStatus ep_cuda_comm_check(const EpGroup *group, const char *call, ncclResult_t result,
                            double seconds);

/** Wait until a communicator of the group has finished `call`, which returned `result`; see
 *  ep_cuda_comm_check. */
EpStatus ep_cuda_comm_settle(EpGroup *group, ncclComm_t comm, const char *call,
                             ncclResult_t result);

/* ---- the watcher --------------------------------------------------------------------------- */

/** Collective, where NCCL moves data: connect the watchers. Then start this rank's. */
EpStatus ep_cuda_watch_open(EpGroup *group);

/** Stop the watcher. `together`: the others do so now, and are not to take it for a loss. */
void ep_cuda_watch_close(EpGroup *group, int together);

/** Let the watcher look after the communicator of all ranks, which has been made since. */
void ep_cuda_watch_comm(EpGroup *group);

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

/** Set the watcher's part of the arguments of the kernels that tell it how far this rank is; in a
 *  group of weights also where stamps are, own and all ranks'. */
void ep_cuda_watch_describe(const EpGroup *group, EpMarkArgs *args);

/* ---- calls of NCCL ------------------------------------------------------------------------- */

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

/** Collective, when that is made: make a first call on the communicator of all ranks, which
 *  NCCL holds until they are connected, and wait until `wire` has run it. `call` is freed, unless
 *  NCCL still holds it at the deadline. */
EpStatus ep_cuda_network_connect(EpGroup *group, EpNcclCall *call, cudaStream_t wire);

/** Fail the group by what the watcher has found or, if that is nothing, by `status` in `phase`.
 *  Returns the group's failure. */
EpStatus ep_cuda_network_give_up(EpGroup *group, const char *phase, EpStatus status);

#endif
