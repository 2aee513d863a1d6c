/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_PTX_CUH
#define EP_RUNTIME_PTX_CUH

/**
 * Replaces runtime/cuda/ptx.cuh: the same instructions, emulated.
 */

#include <math.h>
#include <stdint.h>
#include <time.h>

#include "runtime/quant.h"
#include "tests/emulator/block.h"

#define EP_HAS_BULK emulated_has_bulk() /* kernels have both paths */

/* ---- shared memory: dynamic arrays and static variables are apart ---- */

#define EMULATED_DYNAMIC 0x1000000u
#define EMULATED_STATIC 0x40000000u

extern __thread char emulated_anchor;

static inline uint32_t ep_smem(const void *pointer) {
    uint64_t at = (uint64_t)((uintptr_t)pointer - (uintptr_t)emulated_shared());
    if (at < EMULATED_SHARED_BYTES) return EMULATED_DYNAMIC + (uint32_t)at;
    int64_t far = (int64_t)((uintptr_t)pointer - (uintptr_t)&emulated_anchor);
    if (far < -(1 << 28) || far >= 1 << 28) emulated_die("%p is not in shared memory", pointer);
    return EMULATED_STATIC + (uint32_t)(int32_t)far;
}

static inline void *emulated_generic(uint32_t address) {
    if (address - EMULATED_DYNAMIC < EMULATED_SHARED_BYTES)
        return (char *)emulated_shared() + (address - EMULATED_DYNAMIC);
    return &emulated_anchor + (int32_t)(address - EMULATED_STATIC);
}

template <typename T> static inline T *ep_shared(uint32_t address) {
    return (T *)emulated_generic(address);
}

template <typename T> static inline T *ep_keep_shared(T *variable) {
    return variable;
}

static inline uint32_t ep_max_u16x2(uint32_t a, uint32_t b) {
    uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
    return low | (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16;
}

static inline uint4 ep_load_shared(uint32_t address) {
    return *(const uint4 *)emulated_generic(address);
}

static inline float ep_load_shared_float(uint32_t address) {
    return *(const float *)emulated_generic(address);
}

static inline void ep_store_shared(uint32_t address, const uint4 &x) {
    *(uint4 *)emulated_generic(address) = x;
}

static inline void ep_store_shared(uint32_t address, const uint2 &x) {
    *(uint2 *)emulated_generic(address) = x;
}

/* ---- conversions ---- */

#define EP_CONVERTS_E2M1 0

/* Scales to multiples of the local step, which is exact, then rounds. A NaN keeps its sign, on
 * which no caller may rely. */
static inline uint32_t emulated_e4m3(float value) {
    uint32_t sign = signbit(value) ? 0x80 : 0;
    float size = fabsf(value);
    int exponent;
    if (isnan(value)) return sign | 0x7f;
    if (size >= 448) return sign | 0x7e;
    frexpf(size, &exponent);
    int step = exponent - 4 > -9 ? exponent - 4 : -9;
    uint32_t steps = (uint32_t)nearbyintf(ldexpf(size, -step)); /* may round up to a power of 2 */
    return sign | (steps + (size > 0 ? (uint32_t)(step + 9) << 3 : 0));
}

static inline uint32_t ep_convert_e4m3x2(float low, float high) {
    if (!EP_HAS_BULK) return ep_e4m3_from_float(low) | (uint32_t)ep_e4m3_from_float(high) << 8;
    return emulated_e4m3(low) | emulated_e4m3(high) << 8;
}

static inline float emulated_from_e4m3(uint32_t code) {
    int exponent = (int)(code >> 3 & 15), mantissa = (int)(code & 7);
    float value =
        exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if ((code & 0x7f) == 0x7f) value = NAN;
    return code & 0x80 ? -value : value;
}

static inline float2 ep_convert_from_e4m3x2(uint32_t codes) {
    uint8_t low = codes & 0xff, high = codes >> 8 & 0xff;
    if (!EP_HAS_BULK) return {ep_float_from_e4m3(low), ep_float_from_e4m3(high)};
    return {emulated_from_e4m3(low), emulated_from_e4m3(high)};
}

/* ---- words shared with other blocks and ranks ---- */

template <typename T> static inline T emulated_load(const T *address, int order) {
    emulated_poll();
    T value = __atomic_load_n(address, order);
    emulated_saw(address, (uint64_t)value);
    return value;
}

template <typename T> static inline void emulated_store(T *address, T value, int order) {
    __atomic_store_n(address, value, order);
    emulated_progress();
    if (emulated_one_in(8)) emulated_poll();
}

static inline int32_t ep_poll_shared(const int32_t *word) {
    return emulated_load(word, __ATOMIC_RELAXED);
}

static inline uint4 ep_load_unchanging(const void *address) {
    if ((uintptr_t)address % 16) emulated_die("a load of 16 bytes at %p", address);
    return *(const uint4 *)address;
}

static inline uint4 ep_load_global(const void *address) {
    return ep_load_unchanging(address);
}

static inline uint64_t ep_load_acquire_sys(const uint64_t *address) {
    return emulated_load(address, __ATOMIC_ACQUIRE);
}

static inline uint64_t ep_load_relaxed_sys(const uint64_t *address) {
    return emulated_load(address, __ATOMIC_RELAXED);
}

static inline void ep_store_relaxed_sys(uint64_t *address, uint64_t value) {
    emulated_store(address, value, __ATOMIC_RELAXED);
}

static inline void ep_store_release_sys(uint64_t *address, uint64_t value) {
    emulated_store(address, value, __ATOMIC_RELEASE);
}

static inline uint64_t ep_load_relaxed_gpu(const uint64_t *address) {
    return emulated_load(address, __ATOMIC_RELAXED);
}

static inline uint32_t ep_load_relaxed_gpu32(const uint32_t *address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}

static inline ulonglong2 ep_load_relaxed_gpu_pair(const uint64_t *address) {
    if ((uintptr_t)address % 16) emulated_die("a pair of words at %p", (const void *)address);
    unsigned long long first = emulated_load(address, __ATOMIC_RELAXED);
    return {first, emulated_load(address + 1, __ATOMIC_RELAXED)};
}

static inline ulonglong2 ep_load_relaxed_sys_pair(const void *address) {
    return ep_load_relaxed_gpu_pair((const uint64_t *)address);
}

static inline void ep_store_relaxed_sys_pair(void *address, const ulonglong2 &x) {
    if ((uintptr_t)address % 16) emulated_die("a pair of words at %p", (const void *)address);
    emulated_store((uint64_t *)address, (uint64_t)x.x, __ATOMIC_RELAXED);
    emulated_store((uint64_t *)address + 1, (uint64_t)x.y, __ATOMIC_RELAXED);
}

/* The lanes meet here: the emulator stops where some do not come. */
static inline void ep_store_warp_sys(void *address, const ulonglong2 &x) {
    __syncwarp();
    ep_store_relaxed_sys_pair(address, x);
}

static inline void ep_store_relaxed_gpu(uint64_t *address, uint64_t value) {
    emulated_store(address, value, __ATOMIC_RELAXED);
}

static inline void ep_store_relaxed_gpu_pair(uint64_t *address, const ulonglong2 &x) {
    ep_store_relaxed_sys_pair(address, x);
}

static inline uint32_t ep_load_relaxed_sys32(const uint32_t *address) {
    return emulated_load(address, __ATOMIC_RELAXED);
}

static inline void ep_store_relaxed_sys32(uint32_t *address, uint32_t value) {
    emulated_store(address, value, __ATOMIC_RELAXED);
}

static inline void ep_store_relaxed_gpu32(uint32_t *address, uint32_t value) {
    emulated_store(address, value, __ATOMIC_RELAXED);
}

static inline uint32_t ep_load_acquire_gpu32(const uint32_t *address) {
    return emulated_load(address, __ATOMIC_ACQUIRE);
}

static inline uint64_t ep_add_release_gpu(uint64_t *address, uint64_t value) {
    emulated_poll();
    return __atomic_add_fetch(address, value, __ATOMIC_RELEASE);
}

static inline void ep_fence_gpu(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline int32_t ep_count_up(int32_t *address, int counts) {
    return counts ? __atomic_fetch_add(address, 1, __ATOMIC_RELAXED) : 0;
}

static inline void ep_fence_sys(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline uint64_t ep_global_timer(void) {
    struct timespec t;
    emulated_poll();
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- barriers ---- */

/* Emulated kernels of a stream never overlap. */
static inline void ep_grid_wait(void) {}
static inline void ep_grid_release(void) {}

static inline void ep_barrier(int id, int threads) {
    emulated_barrier(id, threads);
}

static inline void ep_mbarrier_init(uint64_t *barrier, uint32_t count) {
    emulated_mbarrier_init(barrier, count);
}

static inline void ep_fence_mbarrier_init(void) {}

static inline void ep_mbarrier_expect(uint64_t *barrier, uint32_t bytes) {
    emulated_need_bulk("an mbarrier that counts bytes");
    emulated_mbarrier_arrive(barrier, bytes);
}

static inline void ep_mbarrier_arrive(uint64_t *barrier) {
    emulated_mbarrier_arrive(barrier, 0);
}

static inline void ep_mbarrier_arrive_for(uint64_t *barrier, uint32_t count) {
    while (count--)
        emulated_mbarrier_arrive(barrier, 0);
}

static inline uint32_t ep_mbarrier_try_wait(uint64_t *barrier, uint32_t parity) {
    if (!emulated_mbarrier_test(barrier, parity)) emulated_wait_for(barrier);
    return emulated_mbarrier_test(barrier, parity);
}

static inline uint32_t ep_mbarrier_test(uint64_t *barrier, uint32_t parity) {
    return emulated_mbarrier_test(barrier, parity);
}

/* ---- copies of code of 8.0 ---- */

static inline void ep_async_load(uint32_t smem, const void *global) {
    emulated_async_load(emulated_generic(smem), global);
}

static inline void ep_async_arrive(uint64_t *barrier) {
    emulated_async_arrive(barrier);
}

static inline void ep_store_global(void *address, const uint4 &x) {
    if ((uintptr_t)address % 16) emulated_die("a store of 16 bytes at %p", address);
    *(uint4 *)address = x;
}

/* ---- bulk copies ---- */

static inline void ep_bulk_load(uint32_t smem, const void *global, uint32_t bytes,
                                uint32_t barrier) {
    emulated_bulk_load(emulated_generic(smem), global, bytes,
                       (uint64_t *)emulated_generic(barrier));
}

static inline void ep_bulk_store(void *global, uint32_t smem, uint32_t bytes) {
    emulated_bulk_store(global, emulated_generic(smem), bytes);
}

static inline void ep_bulk_commit(void) {
    emulated_bulk_commit();
}

template <int N> static inline void ep_bulk_wait_read(void) {
    emulated_bulk_wait(N, 0);
}

template <int N> static inline void ep_bulk_wait(void) {
    emulated_bulk_wait(N, 1);
}

static inline void ep_fence_proxy_shared(void) {}

static inline void ep_fence_proxy_global(void) {}

#endif
