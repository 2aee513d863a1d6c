/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Masks of ranks, and errors found on the device. These groups have no masks of libep: a rank that
 * does not arrive in time fails the group. So all ranks count as active while the group lives, none
 * can be masked, and a failed group is made anew.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"

static int check(const char *call, ncclEpGroup_t group, const void *pointer) {
    NEP_TRY(nep_check_group(call, group));
    if (!group->config.enable_mask)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "ep_group: expected one created with enable_mask, got one without");
    if (pointer) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT, "expected a pointer, got NULL");
}

/* Returns NCCL_SUCCESS for errors of data, which do not fail the group. */
static int group_result(const char *call, ncclEpGroup_t group) {
    EpStatus status = ep_group_status(group->ep, NULL);
    if (status == EP_ERR_ROUTING || status == EP_ERR_OVERFLOW) {
        (void)nep_result(call, status);
        return NCCL_SUCCESS;
    }
    return nep_result(call, status);
}

/* Store 1 for each rank in device memory. The driver is there where a group is. */
int ncclEpMaskQuery(ncclEpGroup_t group, int *mask_status, void *stream) {
    const char *call = "ncclEpMaskQuery";
    int (*set_words)(uint64_t at, unsigned value, size_t words, void *stream) = NULL;
    NEP_TRY(check(call, group, mask_status));
    NEP_TRY(group_result(call, group));
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = driver ? dlsym(driver, "cuMemsetD32Async") : NULL;
    memcpy(&set_words, &symbol, sizeof(symbol));
    int error = set_words
                    ? set_words((uint64_t)(uintptr_t)mask_status, 1, (size_t)group->size, stream)
                    : -1;
    if (!error) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_SYSTEM_ERROR,
                    "mask_status: expected device memory of %d integers, got CUDA's error %d",
                    group->size, error);
}

int ncclEpMaskUpdate(ncclEpGroup_t group, const int *mask, void *stream) {
    const char *call = "ncclEpMaskUpdate";
    (void)stream;
    NEP_TRY(check(call, group, mask));
    for (int r = 0; r < group->size; r++)
        if (!mask[r])
            return nep_fail(call, NCCL_INVALID_USAGE,
                            "mask: expected 1 for every rank, since this group does not go on "
                            "without one, got 0 for rank %d",
                            r);
    return group_result(call, group);
}

int ncclEpMaskClean(ncclEpGroup_t group, void *stream) {
    const char *call = "ncclEpMaskClean";
    NEP_TRY(check(call, group, group));
    (void)stream;
    return group_result(call, group);
}

int ncclEpGetAsyncError(ncclEpGroup_t group, int *error) {
    const char *call = "ncclEpGetAsyncError";
    NEP_TRY(check(call, group, error));
    *error = group_result(call, group) != NCCL_SUCCESS;
    return NCCL_SUCCESS;
}

int ncclEpErrorClear(ncclEpGroup_t group) {
    const char *call = "ncclEpErrorClear";
    NEP_TRY(check(call, group, group));
    return group_result(call, group);
}
