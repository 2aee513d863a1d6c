/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_GROUP_H
#define EP_RUNTIME_GROUP_H

/**
 * EpGroup as the library sees it. bootstrap/group_create.c makes and ends groups; here is what
 * everyone else needs of them: who we are, which backend serves us, and what went wrong.
 */

#include "runtime/backend.h"
#include "runtime/config.h"
#include "runtime/object.h"

/** What the ranks agreed on about the backend. */
typedef struct EpChoice {
    EpBackend backend;
    int32_t device;   /* this rank's CUDA device, -1 on the host backend */
    int32_t dealt;    /* 1 if nobody had made it current */
    int32_t alone;    /* 1 if no other rank of the group is in this process */
    int32_t shared;   /* 1 if some ranks share a GPU: then NCCL has no communicator for them */
    char bus[20];     /* the device's PCI bus id, "" on the host backend */
    char gpu[64];     /* its name and bus id, likewise */
    char reason[256]; /* why this backend and not the other */
} EpChoice;

struct EpGroup {
    EpObject object;
    EpBootstrap bootstrap;
    EpGroupConfig config;
    EpSettings settings; /* as they were at create */
    int32_t rank, size;
    EpPlacement placement;
    int32_t first_expert, num_local;
    int32_t *nodes; /* [size] node of each rank */
    int32_t num_nodes, numa, cpus;
    EpChoice choice;
    int32_t bound; /* whether to the CPUs near its GPU */
    double timeout;
    uint64_t id; /* tells this group's handle memory from another's */
    int32_t tag; /* of its messages: taken from the id, to tell groups apart */
    int32_t handles_created;
    struct EpHandle *handles; /* live ones */
    int64_t library_bytes;
    const EpBackendOps *backend;
    void *backend_state;
    EpWindow windows[EP_MAX_WINDOWS]; /* memory that peers reach; equally placed on all ranks */
    EpFinding routing, overflow;      /* pending findings; status EP_OK where none */
    int lost;                         /* a meeting over the bootstrap failed: out of step */
    EpStatus failed;                  /* EP_OK, or why every call is refused */
    EpFinding failure;
    char failure_sentence[EP_SENTENCE_BYTES];
};

/** Private bytes of a group, its backend's not included. */
static inline int64_t ep_group_own_bytes(int32_t num_ranks) {
    return (int64_t)sizeof(EpGroup) + num_ranks * (int64_t)sizeof(int32_t);
}

/** Around calls in which the backend takes part. */
static inline int ep_group_enter(const EpGroup *group, const char *call) {
    return group->backend->enter ? group->backend->enter(group, call) : 0;
}

static inline void ep_group_leave(const EpGroup *group, int before) {
    if (group->backend->leave) group->backend->leave(group, before);
}

/** The group has failed for good: keep the finding and this thread's last sentence. */
EpStatus ep_group_fail(EpGroup *group, const EpFinding *finding);

/** EP_OK, or the failure that ends all calls on this group, with its sentence. */
EpStatus ep_group_usable(const EpGroup *group);

/** Record a finding that is data rather than failure; the first of a kind stays until it is read,
 *  the counts add up. */
void ep_group_note(EpFinding *pending, const EpFinding *finding);

#endif
