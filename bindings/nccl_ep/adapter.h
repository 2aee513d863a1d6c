/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BINDINGS_NCCL_EP_ADAPTER_H
#define BINDINGS_NCCL_EP_ADAPTER_H

/**
 * libnccl_ep.so.0 on libep: what its files share.
 *
 * - ncclEpGroup_t: one EpGroup over the caller's communicator, which is lent to it.
 * - ncclEpHandle_t: a plan, in the caller's memory or in its own, and an EpHandle that reads it.
 * - Handle memory: the plan. It may be moved, and opened again by another ncclEpHandle_t.
 * - Low latency: latency mode. Expert-major is BATCHED, rank-major RANK_MAJOR.
 * - High throughput: throughput mode, expert-major and FLAT.
 * - Backward dispatch: a dispatch without weights, the same rows to the same slots.
 * - Backward combine: ep_dispatch_backward.
 * - enable_mask, low latency on one node: masks, with EP_LATE_MASK after the caller's timeout.
 *
 * Quantisation and the kind of expert ids are arguments of each call there, and part of a handle's
 * configuration here. So is the number of multiprocessors, which dispatch and combine have each for
 * itself. All of them leave the plan as it is, and a handle that owns no plan is cheap, so the
 * EpHandle is replaced where they change.
 */

#include "bindings/nccl_ep/nccl_ep.h"
#include "ep/ep.h"

/* ---- errors: status.c ---------------------------------------------------------------------- */

/** Print "libnccl_ep: CALL: SENTENCE" to stderr, unless this thread has just printed the same, and
 *  return `result`. */
__attribute__((format(printf, 3, 4))) int nep_fail(const char *call, int result, const char *format,
                                                   ...);

/** Returns NCCL_SUCCESS for EP_OK. Otherwise prints libep's last sentence and returns what the
 *  status is among NCCL's results. */
int nep_result(const char *call, EpStatus status);

/** Return the result of `call` if it is not NCCL_SUCCESS. */
#define NEP_TRY(call)                                    \
    do {                                                 \
        int nep_tried = (call);                          \
        if (nep_tried != NCCL_SUCCESS) return nep_tried; \
    } while (0)

/* ---- the caller's structs: structs.c -------------------------------------------------------- */

/** Copy a caller's struct of at least `least` bytes into `out`, which has `bytes` bytes; fields
 * that the caller's lacks become 0. `given` may be NULL if it is `optional`: then all become 0. */
int nep_read(const char *call, const char *name, const void *given, int optional, size_t least,
             void *out, size_t bytes);

#define NEP_READ(call, given, optional, least, out) \
    nep_read(call, #given, given, optional, least, out, sizeof(*(out)))

/**
 * A window of the communicator that receive rows have come in. Callers of NCCL EP receive in the
 * same window on all ranks, so it is adopted as a paired one. They end windows without telling, and
 * a new window may get the handle, and the memory, of an old one. Then a peer's part lies
 * elsewhere.
 */
typedef struct NepWindow {
    struct ncclWindow_vidmem *window;
    char *memory;
    void *peer;   /**< where the next rank's part is mapped here */
    size_t bytes; /**< that peers write directly; 0: they do not, and rows are staged */
} NepWindow;

/** NCCL's ncclGetPeerDevicePointer. */
typedef int (*NepPeerPointer)(struct ncclWindow_vidmem *window, size_t offset, int peer,
                              void **out);

/** How a call uses a tensor. */
typedef enum NepUse {
    NEP_PLAIN, /**< an address is enough */
    NEP_ROWS   /**< peers write rows there directly if it lies in a window */
} NepUse;

/** Describe a caller's tensor for libep. `given` NULL: *out is not set, *at becomes NULL; else *at
 *  becomes `out`. */
int nep_tensor(const char *call, ncclEpGroup_t group, const char *name, const ncclEpTensor_t *given,
               NepUse use, EpTensor *out, const EpTensor **at);

/** The plan's numbers that a call delivers, as libep takes them. */
typedef struct NepNumbers {
    EpTensor tensor[3];
    EpPlanTensors out;
    int count; /**< of vectors in `out` */
} NepNumbers;

/** Describe the vectors of `info` that a handle's calls write, and refuse those that they do not.
 */
int nep_numbers(const char *call, ncclEpHandle_t handle, const ncclEpLayoutInfo_t *info,
                NepNumbers *out);

/* ---- groups: group.c ------------------------------------------------------------------------ */

struct ncclEpGroup {
    unsigned magic;
    EpBootstrap bootstrap;
    EpGroup *ep;
    ncclEpGroupConfig_t config;
    int32_t rank, size, num_local, num_nodes;
    int has_masks;               /**< libep's: late ranks are cut */
    int has_lost_ranks;          /**< some were cut since the last ncclEpErrorClear */
    ncclEpHandle_t handles;      /**< live ones */
    NepPeerPointer peer_pointer; /**< NULL before NCCL 2.30 */
    int num_windows;
    NepWindow windows[EP_MAX_ADOPTED_WINDOWS];
};

int nep_check_group(const char *call, ncclEpGroup_t group);

static inline int nep_is_low_latency(const struct ncclEpGroup *group) {
    return group->config.algorithm == NCCL_EP_ALGO_LOW_LATENCY;
}

/** Returns the multiprocessors of a kind of operation, of which `own` is the caller's number: see
 *  EpHandleConfig.num_sms. */
int32_t nep_num_sms(const struct ncclEpGroup *group, unsigned own);

/** As ep_group_status, but ranks that were cut are noted, and are no error: mask.c. */
EpStatus nep_poll(ncclEpGroup_t group);

/** Call after an operation was issued with `result`: if that is NCCL_SUCCESS, and the group has
 *  found an error in an earlier step, returns that. */
int nep_report(const char *call, ncclEpGroup_t group, int result);

/* ---- handles: handle.c ---------------------------------------------------------------------- */

/** An operation between its phases, with the outputs of the second one. */
typedef struct NepPending {
    enum { NEP_NOTHING, NEP_DISPATCH, NEP_COMBINE } kind;
    EpTensor tokens, weights, scales, idx;
    int has_weights, has_scales, has_idx;
} NepPending;

/** What an EpHandle has of a call's arguments. */
typedef struct NepReader {
    EpQuant quant, sum_quant;
    EpExpertIds ids;
    int32_t num_sms;
} NepReader;

struct ncclEpHandle {
    unsigned magic;
    ncclEpGroup_t group;
    ncclEpHandle_t previous, next;
    int layout, num_topk;
    size_t alignment;
    EpHandle *owner;  /**< has the plan; NULL: the caller has it */
    int64_t made;     /**< plans that `owner` had reported before the last routing */
    EpHandle *ep;     /**< reads the plan. NULL: num_topk is not known yet */
    NepReader reader; /**< of `ep` */
    EpTensor plan;
    void *allocated;   /**< plan.data, if it came from the caller's allocator */
    EpTensor topk_idx; /**< of the last ncclEpUpdateHandle; low latency: of the next dispatches */
    int has_routing;
    NepPending pending;
};

int nep_check_handle(const char *call, ncclEpHandle_t handle);

/** Free all that a handle has, and take it from its group, which is about to end; the handle itself
 *  stays. */
void nep_orphan(ncclEpHandle_t handle);

/** Returns the rows that the plan fills, if the host knows them without waiting, or -1. */
int64_t nep_known_rows(const struct ncclEpHandle *handle);

/** Refuse calls on a handle whose num_topk is not known yet. */
int nep_check_open(const char *call, const struct ncclEpHandle *handle);

/** Let `handle->ep` be one of this kind. No operation is pending. */
int nep_select(const char *call, ncclEpHandle_t handle, NepReader reader);

#endif
