/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_CUDA_RUNTIME_H
#define EMULATOR_CUDA_RUNTIME_H

/**
 * CUDA C++ for a C++ compiler, after kernel.sed has rewritten launches and shared arrays. Included
 * before every kernel's source. A block runs in one OS thread, so its shared variables are
 * thread-local.
 */

#include <algorithm>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "tests/emulator/block.h"
#include "tests/emulator/launch.h"

using std::max;
using std::min;

#define __CUDACC__ 1 /* enables the device functions of headers that host code includes too */
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static __thread
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct __align__(8) int2 {
    int32_t x, y;
};
struct __align__(8) uint2 {
    uint32_t x, y;
};
struct float2 {
    float x, y;
};
struct __align__(16) int4 {
    int32_t x, y, z, w;
};
struct __align__(16) uint4 {
    uint32_t x, y, z, w;
};
struct __align__(16) ulonglong2 {
    unsigned long long x, y;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return {x, y, z, w};
}

/* ---- the runtime's templates ---- */

template <typename T> cudaError_t cudaMalloc(T **out, size_t bytes) {
    return cudaMalloc((void **)out, bytes);
}

template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

#define __CUDA_ARCH_LIST__ 800, 900 /* one kernel serves both: see EMULATED_CAPABILITY */

/* Static shared memory is not counted here. */
template <typename... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*)(P...)) {
    attributes->sharedSizeBytes = 0;
    return cudaSuccess;
}

/* ---- launches ---- */

static inline EmulatedGrid emulated_grid(int blocks, int threads, size_t shared = 0,
                                         cudaStream_t stream = NULL) {
    return {(unsigned)blocks, (unsigned)threads, shared, stream};
}

template <typename F> static void emulated_call(const void *arguments) {
    (*(const F *)arguments)();
}

/* Enqueue a call with copies of the arguments. They are copied as bytes, as on GPUs. */
template <typename F> static void emulated_enqueue(const EmulatedGrid &grid, const F &call) {
    emulated_enqueue_kernel(&grid, emulated_call<F>, &call, sizeof(call));
}

template <typename... P, typename... A>
static void emulated_launch(const EmulatedGrid &grid, void (*kernel)(P...), const A &...arguments) {
    emulated_enqueue(grid, [kernel, arguments...] { kernel(arguments...); });
}

struct dim3 {
    unsigned x;
    dim3() : x(1) {}
    explicit dim3(unsigned count) : x(count) {}
};

/* For kernels with one argument. */
template <typename A>
static cudaError_t cudaLaunchKernel(void (*kernel)(const A &), dim3 blocks, dim3 threads,
                                    void **arguments, size_t shared, cudaStream_t stream) {
    if (!blocks.x || !threads.x) return cudaErrorInvalidValue;
    emulated_launch({blocks.x, threads.x, shared, stream}, kernel, *(const A *)arguments[0]);
    return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

template <typename A>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(const A &),
                                      const A &argument) {
    emulated_need_bulk("an early launch");
    if (!config->gridDim.x || !config->blockDim.x) return cudaErrorInvalidValue;
    emulated_launch(
        {config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes, config->stream}, kernel,
        argument);
    return cudaSuccess;
}

/* ---- warps ---- */

template <typename T> static inline uint64_t *emulated_give(int instruction, T value) {
    uint64_t bits = 0;
    static_assert(sizeof(value) <= sizeof(bits), "one register or two");
    memcpy(&bits, &value, sizeof(value));
    return emulated_exchange(instruction, bits);
}

template <typename T> static inline T emulated_take(const uint64_t *lanes, int lane) {
    T value;
    memcpy(&value, &lanes[lane & 31], sizeof(value));
    return value;
}

enum {
    EMULATED_SYNC = 1,
    EMULATED_VOTE,
    EMULATED_MATCH,
    EMULATED_ADD,
    EMULATED_OR,
    EMULATED_MINMAX,
    EMULATED_SHUFFLE
};

static inline int emulated_lane(void) {
    return (int)(threadIdx.x % 32);
}

static inline void __syncwarp(void) {
    emulated_give(EMULATED_SYNC, 0);
}

static inline unsigned __ballot_sync(unsigned, int is) {
    return emulated_vote(EMULATED_VOTE, is);
}

static inline int __any_sync(unsigned mask, int is) {
    return __ballot_sync(mask, is) != 0;
}

static inline int __all_sync(unsigned mask, int is) {
    return __ballot_sync(mask, is) == ~0u;
}

static inline unsigned __match_any_sync(unsigned, int key) {
    const uint64_t *lanes = emulated_give(EMULATED_MATCH, key);
    unsigned same = 0;
    for (int i = 0; i < 32; i++)
        same |= (unsigned)(emulated_take<int>(lanes, i) == key) << i;
    return same;
}

static inline int __reduce_add_sync(unsigned, int value) {
    const uint64_t *lanes = emulated_give(EMULATED_ADD, value);
    unsigned sum = 0;
    for (int i = 0; i < 32; i++)
        sum += (unsigned)lanes[i];
    return (int)sum;
}

static inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    const uint64_t *lanes = emulated_give(EMULATED_OR, value);
    for (int i = 0; i < 32; i++)
        value |= (unsigned)lanes[i];
    return value;
}

template <typename T> static inline T __reduce_max_sync(unsigned, T value) {
    const uint64_t *lanes = emulated_give(EMULATED_MINMAX, value);
    for (int i = 0; i < 32; i++)
        value = max(value, emulated_take<T>(lanes, i));
    return value;
}

template <typename T> static inline T __reduce_or_sync(unsigned, T value) {
    const uint64_t *lanes = emulated_give(EMULATED_MINMAX, value);
    for (int i = 0; i < 32; i++)
        value |= emulated_take<T>(lanes, i);
    return value;
}

template <typename T> static inline T __reduce_min_sync(unsigned, T value) {
    const uint64_t *lanes = emulated_give(EMULATED_MINMAX, value);
    for (int i = 0; i < 32; i++)
        value = min(value, emulated_take<T>(lanes, i));
    return value;
}

template <typename T> static inline T __shfl_sync(unsigned, T value, int lane) {
    return emulated_take<T>(emulated_give(EMULATED_SHUFFLE, value), lane);
}

template <typename T> static inline T __shfl_up_sync(unsigned, T value, unsigned by) {
    const uint64_t *lanes = emulated_give(EMULATED_SHUFFLE, value);
    int from = emulated_lane() - (int)by;
    return from < 0 ? value : emulated_take<T>(lanes, from);
}

template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int by) {
    return emulated_take<T>(emulated_give(EMULATED_SHUFFLE, value), emulated_lane() ^ by);
}

/* ---- blocks ---- */

static inline void __syncthreads(void) {
    emulated_barrier(0, (int)blockDim.x);
}

static inline int __syncthreads_and(int is) {
    return emulated_barrier_and(is);
}

/* ---- words ---- */

static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}

static inline int __ffs(unsigned x) {
    return __builtin_ffs((int)x);
}

static inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}

static inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
    for (int i = 0; i < 32; i += 8)
        sum += (a >> i & 255) * (b >> i & 255);
    return sum;
}

static inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

template <typename T> static inline T __ldg(const T *address) {
    return *address;
}

/* A load that bypasses the first-level cache, for memory that other blocks and devices write. */
template <typename T> static inline T __ldcg(const T *address) {
    T value;
    asm volatile("" ::: "memory");
    memcpy(&value, address, sizeof(value));
    return value;
}
template <typename T> static inline void __stcs(T *address, T value) {
    *address = value;
}

/* ---- atomics ---- */

template <typename T, typename V> static inline T atomicAdd(T *address, V value) {
    return __atomic_fetch_add(address, (T)value, __ATOMIC_RELAXED);
}

template <typename T, typename V> static inline T atomicAdd_system(T *address, V value) {
    return atomicAdd(address, value);
}

template <typename T> static inline T atomicMax(T *address, T value) {
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, false,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

template <typename T> static inline T atomicOr(T *address, T value) {
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}

template <typename T> static inline T atomicAnd(T *address, T value) {
    return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}

static inline unsigned atomicCAS(unsigned *address, unsigned expected, unsigned value) {
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}

static inline void __threadfence(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline void __threadfence_system(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#endif
