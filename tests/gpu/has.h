/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_HAS_H
#define TESTS_GPU_HAS_H

/**
 * The features of the CUDA backend, as on_gpu.h defines them. The tests of gpu/ do not include
 * on_gpu.h.
 */

#include "tests/harness/check.h"

int gpu_has_latency(void);
int gpu_has_quant(void);

/** Skip a test of gpu/ without latency mode. Comes first in the body; elsewhere: NEEDS_LATENCY. */
#define GPU_NEEDS_LATENCY()                                     \
    do {                                                        \
        if (!gpu_has_latency()) {                               \
            check_left_out("this backend has no latency mode"); \
            return;                                             \
        }                                                       \
    } while (0)

#endif
