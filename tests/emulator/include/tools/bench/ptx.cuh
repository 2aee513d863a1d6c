/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_PTX_CUH
#define BENCH_PTX_CUH

/**
 * Replaces tools/bench/ptx.cuh: the same instructions, emulated.
 */

#include "runtime/cuda/ptx.cuh"

static inline uint64_t global_timer(void) {
    emulated_poll();
    return ep_global_timer();
}

static inline void __nanosleep(unsigned) {}

static inline void store_release(uint32_t *address, uint32_t value) {
    emulated_store(address, value, __ATOMIC_RELEASE);
}

static inline uint32_t load_acquire(const uint32_t *address) {
    return emulated_load(address, __ATOMIC_ACQUIRE);
}

static inline void store_relaxed(uint32_t *address, uint32_t value) {
    emulated_store(address, value, __ATOMIC_RELAXED);
}

static inline uint32_t load_relaxed(const uint32_t *address) {
    return emulated_load(address, __ATOMIC_RELAXED);
}

static inline void arrival_init(uint64_t *arrival) {
    emulated_mbarrier_init(arrival, 1);
}

static inline void arrival_fence(void) {}

static inline void arrival_expect(uint64_t *arrival, uint32_t bytes) {
    emulated_mbarrier_arrive(arrival, bytes);
}

static inline uint32_t arrival_test(uint64_t *arrival, uint32_t parity) {
    return ep_mbarrier_try_wait(arrival, parity);
}

static inline void bulk_load(char *stage, const char *from, uint32_t bytes, uint64_t *arrival) {
    emulated_bulk_load(stage, from, bytes, arrival);
}

static inline void bulk_store(char *to, const char *stage, uint32_t bytes) {
    emulated_bulk_store(to, stage, bytes);
    emulated_bulk_commit();
}

template <int PENDING> static inline void bulk_wait_read(void) {
    emulated_bulk_wait(PENDING, 0);
}

static inline void bulk_wait_all(void) {
    emulated_bulk_wait(0, 1);
}

#endif
