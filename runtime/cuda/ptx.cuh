/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_PTX_CUH
#define EP_RUNTIME_CUDA_PTX_CUH

/**
 * One PTX instruction per function, and nothing else. Where code of capability 8.0 lacks one, the
 * function says what does the same there.
 */

#include <stdint.h>

#include "runtime/quant.h"

/** Whether code has what capability 9.0 added: bulk copies with the mbarriers that count their
 *  bytes, waits that suspend, early launches, conversions to and from e4m3. GPUs of capability 8.x
 *  run code of 8.0, which has none of these; all later ones run code that has them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define EP_HAS_BULK 0
#else
#define EP_HAS_BULK 1
#endif

__device__ __forceinline__ uint32_t ep_smem(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

template <typename T> __device__ __forceinline__ T *ep_shared(uint32_t address) {
    return (T *)__cvta_shared_to_generic(address);
}

/** Returns a variable in shared memory by an address that the compiler keeps in a register. An
 *  address that the compiler knows itself is recomputed at every use, which takes ten
 *  instructions. */
template <typename T> __device__ __forceinline__ T *ep_keep_shared(T *variable) {
    uint32_t address = ep_smem(variable);
    asm volatile("mov.u32 %0, %0;" : "+r"(address));
    return ep_shared<T>(address);
}

__device__ __forceinline__ uint4 ep_load_shared(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ float ep_load_shared_float(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

/** Load a word that other warps of the block change, in a loop that waits for them. */
__device__ __forceinline__ int32_t ep_poll_shared(const int32_t *word) {
    return *(const volatile int32_t *)word;
}

__device__ __forceinline__ void ep_store_shared(uint32_t address, const uint4 &x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ void ep_store_shared(uint32_t address, const uint2 &x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}

/** Returns the larger of each two 16-bit halves. */
__device__ __forceinline__ uint32_t ep_max_u16x2(uint32_t a, uint32_t b) {
    return __vmaxu2(a, b);
}

/** Returns e4m3 of two floats, that of `low` in the lower byte: rounded to nearest even, saturated
 *  at 448. */
__device__ __forceinline__ uint32_t ep_convert_e4m3x2(float low, float high) {
#if EP_HAS_BULK
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return ep_e4m3_from_float(low) | (uint32_t)ep_e4m3_from_float(high) << 8;
#endif
}

/* Whether the GPU converts to e2m1. */
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define EP_CONVERTS_E2M1 1
#else
#define EP_CONVERTS_E2M1 0
#endif

#if EP_CONVERTS_E2M1
/** Returns e2m1 of two floats, that of `low` in the lower bits: rounded to nearest even, saturated
 *  at 6, NaN 0x7. */
__device__ __forceinline__ uint32_t ep_convert_e2m1x2(float low, float high) {
    uint32_t codes;
    asm("{.reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2; cvt.u32.u8 %0, pair;}"
        : "=r"(codes)
        : "f"(high), "f"(low));
    return codes;
}
#endif

/** Returns the values of the two e4m3 in the lower half of `codes`, exactly: that of the lower byte
 *  first. */
__device__ __forceinline__ float2 ep_convert_from_e4m3x2(uint32_t codes) {
#if EP_HAS_BULK
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)codes));
    float2 values;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(halves));
    return values;
#else
    return make_float2(ep_float_from_e4m3((uint8_t)codes), ep_float_from_e4m3(codes >> 8 & 0xff));
#endif
}

/** Load what does not change while the kernel runs. The load stays where the caller puts it: it is
 *  not moved to its use. */
__device__ __forceinline__ uint4 ep_load_unchanging(const void *address) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
    return x;
}

/** Load what another kernel may have stored, before the caller's acquire. */
__device__ __forceinline__ uint4 ep_load_global(const void *address) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ uint64_t ep_load_acquire_sys(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ep_load_relaxed_sys(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void ep_store_relaxed_sys(uint64_t *address, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/** Store behind all that the thread has written, or knows to have been written. */
__device__ __forceinline__ void ep_store_release_sys(uint64_t *address, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t ep_load_relaxed_gpu(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

/** Load two words, each of them whole. */
__device__ __forceinline__ ulonglong2 ep_load_relaxed_gpu_pair(const uint64_t *address) {
    ulonglong2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(x.x), "=l"(x.y)
                 : "l"(address)
                 : "memory");
    return x;
}

/** Load two words that other GPUs store, each of them whole. */
__device__ __forceinline__ ulonglong2 ep_load_relaxed_sys_pair(const void *address) {
    ulonglong2 x;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(x.x), "=l"(x.y)
                 : "l"(address)
                 : "memory");
    return x;
}

/** Store 16 bytes for each lane, with one instruction of the whole warp: the type is one scalar,
 *  which cannot be split as a vector can, and the barrier before it makes the lanes converge, with
 *  nothing in between. By all lanes of a warp. */
__device__ __forceinline__ void ep_store_warp_sys(void *address, const ulonglong2 &x) {
    asm volatile("{\n"
                 ".reg .b128 both;\n"
                 "mov.b128 both, {%1, %2};\n"
                 "bar.warp.sync 0xffffffff;\n"
                 "st.relaxed.sys.global.b128 [%0], both;\n"
                 "}" ::"l"(address),
                 "l"(x.x), "l"(x.y)
                 : "memory");
}

/** Store 16 bytes, in one or more pieces. */
__device__ __forceinline__ void ep_store_relaxed_sys_pair(void *address, const ulonglong2 &x) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(x.x), "l"(x.y)
                 : "memory");
}

__device__ __forceinline__ void ep_store_relaxed_gpu(uint64_t *address, uint64_t value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void ep_store_relaxed_gpu_pair(uint64_t *address, const ulonglong2 &x) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(x.x), "l"(x.y)
                 : "memory");
}

__device__ __forceinline__ uint32_t ep_load_relaxed_gpu32(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ep_load_relaxed_sys32(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void ep_store_relaxed_sys32(uint32_t *address, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void ep_store_relaxed_gpu32(uint32_t *address, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t ep_load_acquire_gpu32(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

/** Add behind all that the thread has written, or knows to have been written. Returns the sum. */
__device__ __forceinline__ uint64_t ep_add_release_gpu(uint64_t *address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(address), "l"(value)
                 : "memory");
    return before + value;
}

/** Increment and return the old value, in threads where `counts`; the others get 0. `inc` does not
 *  block until the result is used. An atomic addition does: the compiler shares it among the
 *  threads of a warp. */
__device__ __forceinline__ int32_t ep_count_up(int32_t *address, int counts) {
    int32_t before;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.s32 p, %2, 0;\n"
                 "mov.s32 %0, 0;\n"
                 "@p atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;\n"
                 "}"
                 : "=&r"(before)
                 : "l"(address), "r"(counts)
                 : "memory");
    return before;
}

__device__ __forceinline__ void ep_fence_sys(void) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ void ep_fence_gpu(void) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/** Wait until the kernels that this one's launch follows have ended. What they have written can be
 *  read afterwards. Code of 8.0 is never launched early (ep_launch_early), so they have ended. */
__device__ __forceinline__ void ep_grid_wait(void) {
#if EP_HAS_BULK
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** Let blocks of the next kernel start, if it is launched early, once all blocks of this one have
 *  called this or have ended. */
__device__ __forceinline__ void ep_grid_release(void) {
#if EP_HAS_BULK
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint64_t ep_global_timer(void) {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

/** Wait until `threads` threads of the block, in whole warps, have reached barrier `id`. */
__device__ __forceinline__ void ep_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void ep_mbarrier_init(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ep_smem(barrier)), "r"(count)
                 : "memory");
}

/** Order the initialisation before bulk copies. The block's next barrier orders all else. */
__device__ __forceinline__ void ep_fence_mbarrier_init(void) {
#if EP_HAS_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/** Arrive, and let the phase wait for so many bytes of bulk copies. */
__device__ __forceinline__ void ep_mbarrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ep_smem(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void ep_mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ep_smem(barrier)) : "memory");
}

/** Arrive `count` times at once. */
__device__ __forceinline__ void ep_mbarrier_arrive_for(uint64_t *barrier, uint32_t count) {
#if EP_HAS_BULK
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(ep_smem(barrier)), "r"(count)
                 : "memory");
#else
    while (count--)
        ep_mbarrier_arrive(barrier);
#endif
}

/** Returns at once whether the phase of this parity has completed. */
__device__ __forceinline__ uint32_t ep_mbarrier_test(uint64_t *barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(ep_smem(barrier)), "r"(parity)
                 : "memory");
    return done;
}

#define EP_POLL_NS 32 /* between looks of code of 8.0 at an mbarrier */

/** Returns whether the phase of this parity has completed. May suspend the thread for a while
 *  before it returns 0. */
__device__ __forceinline__ uint32_t ep_mbarrier_try_wait(uint64_t *barrier, uint32_t parity) {
#if EP_HAS_BULK
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(ep_smem(barrier)), "r"(parity)
                 : "memory");
    return done;
#else
    uint32_t done = ep_mbarrier_test(barrier, parity);
    if (!done) __nanosleep(EP_POLL_NS);
    return done;
#endif
}

/* ---- copies of code of 8.0 ----------------------------------------------------------------- */

/* They go through the same proxy as ordinary accesses. */

/** Load 16 bytes from global to shared memory, past the first cache. They are there once an
 *  mbarrier's phase has completed that waits for them: see ep_async_arrive. */
__device__ __forceinline__ void ep_async_load(uint32_t smem, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

/** Let an arrival that the mbarrier counts follow this thread's loads until now. It orders nothing
 *  else that the thread has done. */
__device__ __forceinline__ void ep_async_arrive(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(ep_smem(barrier))
                 : "memory");
}

/** Store 16 bytes. */
__device__ __forceinline__ void ep_store_global(void *address, const uint4 &x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

/* ---- bulk copies --------------------------------------------------------------------------- */

/* Bulk copies, where EP_HAS_BULK: addresses and bytes are multiples of 16. Shared memory is given
 * by its shared-space address: where copies are short, converting pointers costs time that counts.
 */

__device__ __forceinline__ void ep_bulk_load(uint32_t smem, const void *global, uint32_t bytes,
                                             uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void ep_bulk_store(void *global, uint32_t smem, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(smem), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void ep_bulk_commit(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/** Wait until all but the N youngest groups have been read from shared memory. */
template <int N> __device__ __forceinline__ void ep_bulk_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/** Wait until all but the N youngest groups have been written. */
template <int N> __device__ __forceinline__ void ep_bulk_wait(void) {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/* Proxy fences order ordinary accesses and bulk copies of the same memory. The form that covers all
 * memory costs more than a short copy. Without bulk copies nothing is left to order. */

__device__ __forceinline__ void ep_fence_proxy_shared(void) {
#if EP_HAS_BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void ep_fence_proxy_global(void) {
#if EP_HAS_BULK
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

#endif
