/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_BOOTSTRAP_H
#define EP_BOOTSTRAP_BOOTSTRAP_H

/**
 * How ranks find each other and become a group.
 *
 *     local.c, mpi.c     make bootstraps: threads of one process; MPI (in libep_mpi); see also
 *                        cuda/nccl_bootstrap.c
 *     topology.c         where this rank runs; ranks that share a node
 *     hello.c            what each rank says first, and the comparison of all hellos
 *     choose.c, gpus.c   which backend serves the group, and which GPU each rank uses (gpus.h)
 *     bind.c             binding a rank to the CPUs near its GPU
 *     rendezvous.c       how the ranks of a group agree later
 *     group_create.c     creates a group from all of these, lets ranks join, and destroys it
 *     places.c           a bootstrap of a group's places, some of them empty (places.h)
 *     subset.c           a bootstrap of some of another one's ranks, for meshes (subset.h)
 *     host/, cuda/       what each backend sets up with the peers
 *     memory/            memory that peers reach: windows and shared segments
 *     network/           messages over TCP; NCCL's communicators and the watcher
 */

#include "runtime/group.h"

/** Seconds to wait for the peers where neither a configuration nor the settings can be read. */
#define EP_FALLBACK_TIMEOUT 100

/** Refuse a bootstrap that lacks a required part. */
EpStatus ep_bootstrap_check(const EpCall *call, const EpBootstrap *bootstrap);

/** What ranks that meet call. All call the same, but for newcomers and those that admit them. */
typedef enum EpEntrance {
    EP_ENTER_CREATE,
    EP_ENTER_JOIN,
    EP_ENTER_ADMIT,
    EP_ENTER_MESH,
    EP_ENTER_COMM
} EpEntrance;

/** Returns the call's name. */
const char *ep_entrance_name(EpEntrance entrance);

/** ep_group_create, for a purpose. */
EpStatus ep_group_open(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpPurpose purpose,
                       EpGroup **out);

/** The group is about to be destroyed: wait for this rank's operations, and let peers go that wait
 * for a refused call of it. Returns whether the group has not failed. Before any of several groups
 * is destroyed, since each waits there for the peers. */
int ep_group_end(EpGroup *group);

/* ---- topology ------------------------------------------------------------------------------ */

/**
 * Where a rank runs. Linux reports it, or LIBEP_TOPOLOGY pretends it (with a machine that hwloc
 * makes up), so that "2 nodes of 8 cores" runs on a laptop. A pretended node never joins ranks of
 * different machines.
 */
typedef struct EpLocation {
    char machine[104]; /**< host name and boot id: equal on all ranks of one machine */
    int32_t pretended; /**< node by LIBEP_TOPOLOGY, else 0 */
    int32_t numa;      /**< NUMA node; -1 if its CPUs span several */
    int32_t cpus;      /**< number of CPUs that it may run on */
} EpLocation;

/** Describe this rank. EP_ERR_SETTING if LIBEP_TOPOLOGY is malformed or lists another number of
 *  ranks, EP_ERR_SYSTEM if the machine does not say its name. */
EpStatus ep_location_find(const EpSettingTopology *topology, int32_t rank, int32_t size,
                          EpLocation *out);

/** The rank, and the number of ranks, that LIBEP_TOPOLOGY speaks of: the bootstrap's own, or those
 *  of the world where it is of a group of a mesh. So all groups of a mesh have the same nodes. */
void ep_bootstrap_place(const EpBootstrap *bootstrap, int32_t *rank, int32_t *size);

int ep_location_same_node(const EpLocation *a, const EpLocation *b);

/* ---- hello --------------------------------------------------------------------------------- */

#define EP_HELLO_FIELDS 28

/**
 * What each rank sends to all others when a group is created, or a rank joins it. Every rank
 * compares all hellos by the same rules, so all ranks come to the same result without a leader.
 */
typedef struct EpHello {
    EpStatus status;                /**< of this rank's own checks */
    int32_t place;                  /**< its number in the group */
    int64_t field[EP_HELLO_FIELDS]; /**< values that must be equal */
    uint64_t id;    /**< rank 0's becomes the group's; of a group that exists: its */
    int32_t admits; /**< whether it has the group already */
    EpMask alive;   /**< then: the ranks that take part, as it sees them */
    EpLocation location;
    uint64_t topology_hash; /**< of LIBEP_TOPOLOGY, which must be equal too */
    char topology[72];      /**< its start */
    char sentence[200];     /**< of a failed check */
} EpHello;

/** Fill in the fields that must be equal. */
void ep_hello_describe(EpHello *mine, const EpBootstrap *bootstrap, const EpGroupConfig *config,
                       const EpSettings *settings);

/** Terminate the strings of hellos that came from other ranks. */
void ep_hello_terminate(EpHello *all, int32_t size);

/** Number the nodes of `count` ranks in the order of their first rank: nodes[size], of all places.
 *  An empty place is on the node of the rank before it, or of the first one. */
void ep_hello_nodes(const EpHello *all, int32_t count, int32_t size, int32_t *nodes);

/** Of ranks that join and admit: find the lowest of those that are alive, all of which are here.
 *  Newcomers have other places. */
EpStatus ep_hello_living(const EpCall *call, const EpHello *all, int32_t count,
                         const EpHello **living);

/** EP_OK if all ranks passed their checks and agree. `places`: of the group. */
EpStatus ep_hello_compare(const EpCall *call, const EpBootstrap *bootstrap, int32_t places,
                          const EpHello *all);

/* ---- rendezvous ---------------------------------------------------------------------------- */

/* After a step that may fail on one rank alone, ranks gather their statuses before any rank goes
 * on. So all ranks come to the same result, and no rank waits for one that has given up. */

/**
 * Gather `bytes` bytes of every rank into all[size] through the bootstrap's allgather. Returns
 * EP_ERR_BOOTSTRAP if this rank's own bytes are not in their place afterwards. Bytes of other ranks
 * may be anything: terminate their strings and check their values before use.
 */
EpStatus ep_bootstrap_gather(const EpBootstrap *bootstrap, const void *mine, void *all,
                             size_t bytes, double timeout);

/**
 * Gather, on the stack, what each rank calls, with which version of the library, and whether it has
 * the memory for the rendezvous that follow. One that has not could not take part in them, and its
 * peers would wait for it. What ranks gather here is the same in all versions. EP_ERR_NO_MEMORY on
 * a rank without memory, EP_ERR_PEER on the others; EP_ERR_MISMATCH, EP_ERR_ORDER.
 */
EpStatus ep_bootstrap_enter(const EpCall *call, const EpBootstrap *bootstrap, EpEntrance entrance,
                            int has_memory, double timeout);

/** Bytes of a rank that the bootstrap of a group of a mesh can gather without new memory. A
 *  rendezvous must not fail for want of memory, since the peers would wait. */
#define EP_RESERVED_BYTES 1024

/** Change EP_RESERVED_BYTES to `bytes` in a mesh's bootstrap. Returns 0 when out of memory. Other
 *  bootstraps see to their own memory: returns 1. */
int ep_bootstrap_reserve(const EpBootstrap *bootstrap, size_t bytes);

/**
 * After a gathering of bytes that begin with an EpStatus, or another word that is 0 where nothing
 * has failed: find a rank of another group that has
 * failed. Groups of a mesh whose world has no messages gather together: if one goes on where
 * another has stopped, they are out of step. Returns what that rank contributed and *rank, its
 * number in the world, or NULL.
 */
const void *ep_bootstrap_elsewhere(const EpBootstrap *bootstrap, size_t stride, int32_t *rank);

/** A rank's status, with the reason if it failed. Every descriptor that ranks gather begins with
 *  it. */
typedef struct EpRankStatus {
    EpStatus status;
    char sentence[200];
} EpRankStatus;

/** Returns `status`, with the calling thread's last sentence if it is an error. */
EpRankStatus ep_rank_status(EpStatus status);

/** Gather `bytes` bytes of every rank into all[size]. A failure marks the group as lost: its ranks
 *  may be out of step from then on. */
EpStatus ep_group_gather(EpGroup *group, const void *mine, void *all, size_t bytes);

/** Meet all ranks in the bootstrap's barrier. A failure marks the group as lost. */
EpStatus ep_group_meet(EpGroup *group);

/**
 * Check what was gathered: `stride` bytes for each rank, beginning with its EpRankStatus. Returns
 * this rank's own error with its sentence, EP_ERR_PEER with the sentence of another rank that
 * failed, or EP_OK.
 */
EpStatus ep_rank_status_check(const EpCall *call, const EpBootstrap *bootstrap, const void *all,
                              size_t stride);

/** Collective: return EP_OK if all ranks succeeded, else what ep_rank_status_check returns. A rank
 *  that failed in a lost group returns its own status without waiting. */
EpStatus ep_group_agree(EpGroup *group, const EpCall *call, EpStatus mine);

/** ep_group_agree with a timeout of its own. */
EpStatus ep_group_agree_within(EpGroup *group, const EpCall *call, EpStatus mine, double seconds);

/** Fail the group in a call that is no operation; `status` is the call's, with its sentence.
 * Returns `status`. */
EpStatus ep_group_break(EpGroup *group, const EpCall *call, EpStatus status);

/* ---- binding ------------------------------------------------------------------------------- */

/** Write the path of the file that lists the CPUs near the PCI device with bus id `bus`. */
void ep_bind_list_path(const char *bus, char *path, size_t path_bytes);

/**
 * Bind the process, or the calling thread alone, to those CPUs of the list in file `path`, as in
 * "0-27,56-83", that it may use. If it is already bound to some of these, it keeps to those.
 * Returns 1 if bound. Writes to `said` what it did, or why it did nothing.
 */
int ep_bind_to_list(const char *path, int whole_process, char *said, size_t said_bytes);

#endif
