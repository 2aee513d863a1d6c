/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_PTX_CUH
#define EP_RUNTIME_PTX_CUH

/**
 * One instruction per function, and nothing else.
 */

#include <stdint.h>

__device__ __forceinline__ uint32_t ep_smem(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

template <typename T> __device__ __forceinline__ T *ep_shared(uint32_t address) {
    return (T *)__cvta_shared_to_generic(address);
}

/** The same variable in shared memory, whose address compilers keep in a register. What they know
 * of it themselves they compute anew wherever it is used, which takes ten instructions. */
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

__device__ __forceinline__ void ep_store_shared(uint32_t address, const uint4 &x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

/** The larger of each two halves. */
__device__ __forceinline__ uint32_t ep_max_u16x2(uint32_t a, uint32_t b) {
    return __vmaxu2(a, b);
}

/** e4m3 of two floats, that of `low` in the lower byte: to nearest even, beyond 448 to 448. */
__device__ __forceinline__ uint32_t ep_convert_e4m3x2(float low, float high) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

/** Of what does not change while the kernel runs; from where the caller says, not where its use is.
 */
__device__ __forceinline__ uint4 ep_load_unchanging(const void *address) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
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

/** Behind all that the thread has written, or knows to have been. */
__device__ __forceinline__ void ep_store_release_sys(uint64_t *address, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t ep_load_relaxed_gpu(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

/** Two words, each whole by itself. */
__device__ __forceinline__ ulonglong2 ep_load_relaxed_gpu_pair(const uint64_t *address) {
    ulonglong2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(x.x), "=l"(x.y)
                 : "l"(address)
                 : "memory");
    return x;
}

/** The same of words that other GPUs store. */
__device__ __forceinline__ ulonglong2 ep_load_relaxed_sys_pair(const void *address) {
    ulonglong2 x;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(x.x), "=l"(x.y)
                 : "l"(address)
                 : "memory");
    return x;
}

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

__device__ __forceinline__ uint32_t ep_load_relaxed_sys32(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void ep_store_relaxed_sys32(uint32_t *address, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/** Count up by one and get what was there; by threads where `counts`, the others get 0. The result
 *  is not waited for before it is used, as that of an addition is, which is shared out among the
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

__device__ __forceinline__ uint64_t ep_global_timer(void) {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

/** Until `threads` threads of the block, whole warps, have come to barrier `id`. */
__device__ __forceinline__ void ep_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void ep_mbarrier_init(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ep_smem(barrier)), "r"(count)
                 : "memory");
}

__device__ __forceinline__ void ep_fence_mbarrier_init(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void ep_mbarrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ep_smem(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void ep_mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ep_smem(barrier)) : "memory");
}

/** For as many that would have come. */
__device__ __forceinline__ void ep_mbarrier_arrive_for(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(ep_smem(barrier)), "r"(count)
                 : "memory");
}

/** Has the phase of this parity ended? May sleep a little before it says no. */
__device__ __forceinline__ uint32_t ep_mbarrier_try_wait(uint64_t *barrier, uint32_t parity) {
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
}

/** The same, answered at once. */
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

/* Bulk copies: the address operands and bytes are multiples of 16. Shared memory is given by its
 * address there: where copies are short, turning pointers into such addresses counts. */

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

/** Until all but the N youngest groups have been read from shared memory. */
template <int N> __device__ __forceinline__ void ep_bulk_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/** Until all but the N youngest groups have been written. */
template <int N> __device__ __forceinline__ void ep_bulk_wait(void) {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/* Between ordinary accesses and bulk copies of the same memory. The form that covers all of memory
 * costs more than a short copy. */

__device__ __forceinline__ void ep_fence_proxy_shared(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void ep_fence_proxy_global(void) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif
