/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_HAS_H
#define TESTS_GPU_HAS_H

/**
 * What on_gpu.h says that the CUDA backend has, for the tests of gpu/, which use nothing else of
 * it.
 */

#include "tests/harness/check.h"

int gpu_has_latency(void);
int gpu_has_quant(void);

/** First in the body of a test in gpu/ of latency mode: NEEDS_LATENCY there. */
#define GPU_NEEDS_LATENCY()                                     \
    do {                                                        \
        if (!gpu_has_latency()) {                               \
            check_left_out("this backend has no latency mode"); \
            return;                                             \
        }                                                       \
    } while (0)

#endif
