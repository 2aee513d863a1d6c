/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_GROUP_H
#define EP_RUNTIME_GROUP_H

/**
 * EpGroup, the library's view: the ranks, the backend that serves them, and what went wrong.
 * bootstrap/group_create.c creates and destroys groups.
 */

#include "runtime/abort.h"
#include "runtime/backend.h"
#include "runtime/config.h"
#include "runtime/nodes.h"
#include "runtime/object.h"

/** Most bytes that a rank contributes to a rendezvous of an existing group. */
#define EP_RENDEZVOUS_BYTES 256

/** Whose turn it is to use the sets of buffers of latency mode: see handles/pending.h. */
typedef struct EpTurns {
    uint32_t sent;                                       /* send phases so far */
    const struct EpHandle *pending[EP_MAX_LATENCY_SETS]; /* NULL: none; at most the group's sets */
} EpTurns;

/** What the ranks agreed on about the backend. */
typedef struct EpChoice {
    EpBackend backend;
    int32_t device;   /* this rank's CUDA device, -1 on the host backend */
    int32_t assigned; /* 1 if libep chose it and it was not current before */
    int32_t alone;    /* 1 if no other rank of the group is in this process */
    int32_t threads;  /* 1 if some process has several ranks */
    int32_t shared;   /* 1 if some ranks share a GPU, whose memory NCCL does not map */
    int32_t nccl;     /* 1 if NCCL can connect all ranks */
    int32_t code;     /* capability that the device's code was compiled for: see ep_cuda_code */
    int32_t shared_bytes; /* shared memory that a block on the device may have */
    int32_t sm;       /* the device's compute capability: 90 is 9.0 */
    char bus[20];     /* the device's PCI bus id, "" on the host backend */
    char gpu[64];     /* the device's name and bus id, "" on the host backend */
    char reason[256]; /* why this backend and not the other */
} EpChoice;

/** What a group moves. */
typedef enum EpPurpose {
    EP_FOR_TOKENS, /* rows of tokens: by libep's own kernels and messages */
    EP_FOR_WEIGHTS /* sharded weights: on GPUs by NCCL */
} EpPurpose;

struct EpGroup {
    EpObject object;
    EpBootstrap bootstrap;
    EpGroupConfig config;
    EpSettings settings; /* read at creation */
    int32_t rank, size;
    /* Of the places 0 .. size - 1, with config.max_ranks; else all of them, and none once it is
     * open. */
    EpMask members;   /* that are not empty */
    EpMask newcomers; /* whose ranks join in the call that is under way */
    const char *call; /* that opens the group, or lets ranks join */
    EpPlacement placement;
    int32_t first_expert, num_local;
    EpCopySetup copies; /* memory.of NULL: no placement. The backend's memory */
    EpNodes nodes;
    void *gathered; /* [size] of EP_RENDEZVOUS_BYTES; so a rendezvous allocates nothing */
    int32_t numa, cpus;
    EpChoice choice;
    EpPurpose purpose;
    int32_t bound; /* 1 if bound to the CPUs near its GPU */
    double timeout;
    uint64_t id;          /* identifies this group's handle memory */
    int32_t tag;          /* of this group's messages; the low bits of the id */
    EpOwned *handles;     /* live ones */
    int32_t latency_sets; /* sets of buffers; 0: no latency mode */
    EpTurns turns[2];     /* of plain calls, of captured ones */
    int64_t library_bytes;
    const EpBackendOps *backend;
    void *backend_state;
    EpWindow windows[EP_WINDOW_NUMBERS]; /* memory that peers reach, by number */
    EpFinding routing, overflow;         /* pending async errors; status EP_OK: none */
    int ends;                            /* 1 while it is destroyed */
    int lost;                            /* 1 if a rendezvous failed: ranks may be out of step */
    EpAbort abort;                       /* for any thread; all else is for one at a time */
    int32_t aborted_peer; /* whom to blame for what a wait in the bootstrap has found, or -1 */
    char peer_why[EP_ABORT_BYTES]; /* its reason, "": not known */
    EpStatus failed;               /* EP_OK, or why every call is refused */
    EpFinding failure;
    char failure_sentence[EP_SENTENCE_BYTES];
    EpMask alive;       /* the ranks that take part */
    EpMask cut;         /* those that this rank has cut since */
    EpFinding late;     /* pending: some of them, which ep_group_status has not reported */
    EpStatus suspended; /* EP_OK, or why operations are refused until ep_group_mask: `failure` */
    EpRecorder recorder;
};

/** Returns a group's private bytes without its backend's. */
static inline int64_t ep_group_own_bytes(int32_t num_ranks) {
    return (int64_t)sizeof(EpGroup) +
           num_ranks * (int64_t)(4 * sizeof(int32_t) + EP_RENDEZVOUS_BYTES);
}

/** Returns what the group's backend offers to it, whatever nodes it has after ranks have joined. */
static inline unsigned ep_group_offers(const EpGroup *group) {
    unsigned offers = ep_backend_offers(group->backend, &group->nodes.sizes);
    return ep_config_joins(&group->config) ? offers | EP_OFFERS_AUTO_LATENCY : offers;
}

/** Returns whether this rank and another one connect in the call that is under way. */
static inline int ep_group_connects(const EpGroup *group, int32_t rank) {
    if (rank == group->rank || !ep_mask_has(&group->members, rank)) return 0;
    return ep_mask_has(&group->newcomers, rank) || ep_mask_has(&group->newcomers, group->rank);
}

/** Returns the places where others stand, or nobody, after the call that is under way. */
static inline EpMask ep_group_changes(const EpGroup *group) {
    EpMask changed = {{0}};
    for (int32_t r = 0; r < group->size; r++)
        if (r != group->rank && (ep_group_connects(group, r) || !ep_mask_has(&group->members, r)))
            ep_mask_add(&changed, r);
    return changed;
}

/** ep_group_enter and ep_group_leave surround calls that use the backend; see EpBackendOps. */
static inline int ep_group_enter(const EpGroup *group, const char *call) {
    const EpActivity activity = {.call = call, .tokens = -1};
    return group->backend->enter ? group->backend->enter(group, &activity) : 0;
}

static inline void ep_group_leave(const EpGroup *group, int before) {
    if (group->backend->leave) group->backend->leave(group, before);
}

/** Mark the group as failed for good. Keeps the finding and this thread's last sentence; returns
 *  the finding's status. If the group was aborted before, that is the failure. */
EpStatus ep_group_fail(EpGroup *group, const EpFinding *finding);

/** The same of a group with masks, until ep_group_mask. Returns the finding's status. */
EpStatus ep_group_suspend(EpGroup *group, const EpFinding *finding);

/** Refuse operations of this rank, which is masked, until ep_group_mask. */
void ep_group_keep_out(EpGroup *group);

/** Record that this rank has cut these ranks, some of them before. */
void ep_group_record_cuts(EpGroup *group, const EpMask *cut, const char *phase);

/** Set the sentence of an aborted group, and return EP_ERR_ABORTED. `phase`: what waited, or "". */
EpStatus ep_group_fail_aborted(const EpGroup *group, const char *phase);

/** Returns EP_OK, or the status of the failure that ended the group, and sets its sentence. */
EpStatus ep_group_usable(EpGroup *group);

/**
 * Surround a call of the bootstrap that waits for peers: with the group before it, with NULL after
 * it. In between, ep_poll_abort on this thread speaks of that group. Returns what it returns at
 * once; the call is left out unless that is EP_OK.
 */
EpStatus ep_group_await(EpGroup *group);

/**
 * Refused calls. The peers of a rank whose call was refused wait for it to call again, up to their
 * deadline. ep_group_refuse leaves this thread's last sentence with the group: peers quote it where
 * they give up because of this rank. ep_group_accept takes it back, once a call's arguments are
 * right. ep_group_depart: this rank destroys the group instead.
 */
void ep_group_refuse(EpGroup *group);
void ep_group_accept(EpGroup *group);
void ep_group_depart(EpGroup *group);

/** Surround the backend's part of an operation whose arguments are right: ep_group_enter and
 *  ep_group_leave, the two of refused calls, and the recorder's. */
int ep_group_start(EpGroup *group, const EpActivity *activity);
void ep_group_stop(EpGroup *group, int before, EpStatus status);

/** Record an async error that does not fail the group. The first of a kind stays until it is read;
 *  counts add up. */
void ep_group_record(EpFinding *pending, const EpFinding *finding);

#endif
