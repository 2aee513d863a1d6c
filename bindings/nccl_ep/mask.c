/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Masks of ranks, and errors found on the device. A low-latency group with enable_mask has libep's
 * masks: a rank that is late is cut. In other groups a rank that does not arrive in time fails the
 * group. There all ranks count as active while the group lives, and none can be masked.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"

enum { MASK_WORDS = EP_MAX_RANKS / 32 };

static int has(const uint32_t *ranks, int rank) {
    return (int)(ranks[rank / 32] >> rank % 32 & 1);
}

static int check(const char *call, ncclEpGroup_t group, const void *pointer) {
    NEP_TRY(nep_check_group(call, group));
    if (!group->config.enable_mask)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "ep_group: expected one created with enable_mask, got one without");
    if (pointer) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT, "expected a pointer, got NULL");
}

EpStatus nep_poll(ncclEpGroup_t group) {
    EpStatus status = ep_group_status(group->ep, NULL);
    if (status != EP_ERR_MASKED) return status;
    group->has_lost_ranks = 1;
    return EP_OK;
}

/* Returns NCCL_SUCCESS for errors of data, which do not fail the group. */
static int group_result(const char *call, ncclEpGroup_t group) {
    EpStatus status = nep_poll(group);
    if (status == EP_ERR_ROUTING || status == EP_ERR_OVERFLOW) {
        (void)nep_result(call, status);
        return NCCL_SUCCESS;
    }
    return nep_result(call, status);
}

/* ---- the driver, which is there where a group is --------------------------------------------- */

static void find(void *function, const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = driver ? dlsym(driver, name) : NULL;
    memcpy(function, &symbol, sizeof(symbol));
}

/* Operations that are enqueued may mask ranks. */
static int await(const char *call, void *stream) {
    int (*is_capturing)(void *stream, int *status) = NULL, (*synchronize)(void *stream) = NULL;
    int captures = 0;
    find(&is_capturing, "cuStreamIsCapturing"), find(&synchronize, "cuStreamSynchronize");
    if (is_capturing && !is_capturing(stream, &captures) && captures)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "stream: expected one that is not captured, since the call waits for it");
    int error = synchronize ? synchronize(stream) : -1;
    if (!error) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_SYSTEM_ERROR, "stream: got CUDA's error %d", error);
}

/* Store 1 for each of these ranks in device memory, and 0 for the others. The values are arguments
 * of the driver's calls, so no memory of this function is read later. */
static int store(const char *call, const ncclEpGroup_t group, const uint32_t *ranks, int *out,
                 void *stream) {
    int (*set_words)(uint64_t at, unsigned value, size_t words, void *stream) = NULL;
    find(&set_words, "cuMemsetD32Async");
    int error = set_words ? 0 : -1;
    for (int begin = 0, end; begin < group->size && !error; begin = end) {
        for (end = begin + 1; end < group->size && has(ranks, end) == has(ranks, begin);)
            end++;
        error = set_words((uint64_t)(uintptr_t)(out + begin), (unsigned)has(ranks, begin),
                          (size_t)(end - begin), stream);
    }
    if (!error) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_SYSTEM_ERROR,
                    "mask_status: expected device memory of %d integers, got CUDA's error %d",
                    group->size, error);
}

/* ---- masks --------------------------------------------------------------------------------- */

int ncclEpMaskQuery(ncclEpGroup_t group, int *mask_status, void *stream) {
    const char *call = "ncclEpMaskQuery";
    uint32_t alive[MASK_WORDS];
    NEP_TRY(check(call, group, mask_status));
    if (group->has_masks) NEP_TRY(await(call, stream));
    NEP_TRY(group_result(call, group));
    NEP_TRY(nep_result(call, ep_group_alive(group->ep, alive)));
    return store(call, group, alive, mask_status, stream);
}

/* Checks all ranks before it changes anything. */
static int check_mask(const char *call, const ncclEpGroup_t group, const int *mask,
                      const uint32_t *alive) {
    for (int r = 0; r < group->size; r++) {
        if (!mask[r] && !group->has_masks)
            return nep_fail(call, NCCL_INVALID_USAGE,
                            "mask: expected 1 for every rank, since this group does not go on "
                            "without one, got 0 for rank %d",
                            r);
        if (!mask[r] && r == group->rank)
            return nep_fail(call, NCCL_INVALID_USAGE, "mask: expected 1 for this rank, %d, got 0",
                            r);
        if (mask[r] && !has(alive, r))
            return nep_fail(call, NCCL_INVALID_USAGE,
                            "mask: expected 0 for rank %d, which is masked, got 1: all ranks come "
                            "back together, by ncclEpMaskClean",
                            r);
    }
    return NCCL_SUCCESS;
}

int ncclEpMaskUpdate(ncclEpGroup_t group, const int *mask, void *stream) {
    const char *call = "ncclEpMaskUpdate";
    uint32_t alive[MASK_WORDS];
    NEP_TRY(check(call, group, mask));
    NEP_TRY(group_result(call, group));
    NEP_TRY(nep_result(call, ep_group_alive(group->ep, alive)));
    NEP_TRY(check_mask(call, group, mask, alive));
    for (int r = 0; r < group->size; r++)
        if (!mask[r] && has(alive, r))
            NEP_TRY(nep_result(call, ep_group_cut(group->ep, r, stream)));
    return NCCL_SUCCESS;
}

/* Take the rank that has made ep_group_mask fail from the set. Returns 0 if there is none: a rank
 * that did not come, or one that another rank has left out. */
static int leave_out(const ncclEpGroup_t group, EpStatus failed, uint32_t *ranks) {
    EpFinding found = EP_FINDING_INIT;
    (void)ep_group_status(group->ep, &found);
    int64_t rank = failed == EP_ERR_TIMEOUT ? found.peer : found.expected;
    if (failed == EP_ERR_ORDER && rank < 0) return 1; /* the other rank does it */
    if (rank < 0 || rank >= group->size || rank == group->rank) return 0;
    ranks[rank / 32] &= ~(1u << rank % 32);
    return 1;
}

/* All ranks come back. Those that do not call it within the deadline stay masked, after another
 * attempt without them. */
int ncclEpMaskClean(ncclEpGroup_t group, void *stream) {
    const char *call = "ncclEpMaskClean";
    uint32_t ranks[MASK_WORDS] = {0};
    NEP_TRY(check(call, group, group));
    if (!group->has_masks) return group_result(call, group);
    for (int r = 0; r < group->size; r++)
        ranks[r / 32] |= 1u << r % 32;
    (void)nep_poll(group); /* notes ranks that were cut: the rendezvous forgets them */
    EpStatus status = ep_group_mask(group->ep, ranks, stream);
    while (status == EP_ERR_TIMEOUT || status == EP_ERR_ORDER) {
        if (!leave_out(group, status, ranks)) break;
        status = ep_group_mask(group->ep, ranks, stream);
    }
    return nep_result(call, status);
}

/* ---- errors -------------------------------------------------------------------------------- */

int ncclEpGetAsyncError(ncclEpGroup_t group, int *error) {
    const char *call = "ncclEpGetAsyncError";
    NEP_TRY(check(call, group, error));
    *error = group_result(call, group) != NCCL_SUCCESS || group->has_lost_ranks;
    return NCCL_SUCCESS;
}

int ncclEpErrorClear(ncclEpGroup_t group) {
    const char *call = "ncclEpErrorClear";
    NEP_TRY(check(call, group, group));
    int result = group_result(call, group);
    group->has_lost_ranks = 0;
    return result;
}
