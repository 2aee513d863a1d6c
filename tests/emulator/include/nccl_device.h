/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_NCCL_DEVICE_H
#define EMULATOR_NCCL_DEVICE_H

#include <nccl.h>

#ifdef __cplusplus
extern "C"
#endif
    void *
    ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer);

#endif
