/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_NVTX_H
#define EMULATOR_NVTX_H

/** Ranges do nothing: there is no profiler for emulated GPUs. */

static inline int nvtxRangePushA(const char *name) {
    (void)name;
    return 0;
}

static inline int nvtxRangePop(void) {
    return 0;
}

#endif
