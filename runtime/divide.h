/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_DIVIDE_H
#define EP_RUNTIME_DIVIDE_H

/**
 * Division by a number that is known before a kernel starts: one multiplication, where the compiler
 * needs thirty instructions that depend on each other.
 *
 * With m = ceil(2^31 / d), (2n + 1) * m / 2^32 is (2n + 1) / 2d and an error below (2n + 1) / 2^32.
 * The former lies at least 1 / 2d below the next whole number, so the whole part is n / d as long
 * as 2d * (2n + 1) <= 2^32. Nothing is divided here of which that is not true by far.
 */

#include <stdint.h>

#ifdef __CUDACC__
#define EP_HOST_DEVICE __host__ __device__
#else
#define EP_HOST_DEVICE
#endif

typedef struct EpDivisor {
    int32_t by;
    uint32_t inverse;
} EpDivisor;

/** By d >= 1. */
EP_HOST_DEVICE static inline EpDivisor ep_divisor(int32_t d) {
    EpDivisor divisor = {d, (uint32_t)((0x80000000u + (uint32_t)d - 1) / (uint32_t)d)};
    return divisor;
}

/** n / d, of n >= 0 with n * d below 2^30 - d. */
EP_HOST_DEVICE static inline int32_t ep_quotient(int32_t n, EpDivisor d) {
    return (int32_t)((uint64_t)(2 * (uint32_t)n + 1) * d.inverse >> 32);
}

EP_HOST_DEVICE static inline int32_t ep_remainder(int32_t n, EpDivisor d) {
    return n - ep_quotient(n, d) * d.by;
}

#endif
