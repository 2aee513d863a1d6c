/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_PTX_CUH
#define MOE_PTX_CUH

/** One instruction each: copies into shared memory, mbarriers, and the matrix units of sm_90a. */

#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- copies: a thread waits for those that it has started ---- */

/** Copy 16 bytes, of which the first `bytes` are read and the others become 0. */
__device__ __forceinline__ void copy_16(uint32_t to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

/** Likewise of 4 bytes. */
__device__ __forceinline__ void copy_4(uint32_t to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copies_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/** Wait for all groups of copies but the `YOUNGEST` ones. */
template <int YOUNGEST> __device__ __forceinline__ void copies_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGEST) : "memory");
}

/** What the thread has written to shared memory is visible to matrix units. */
__device__ __forceinline__ void fence_matrix_units(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- mbarriers ---- */

__device__ __forceinline__ void arrival_init(uint64_t *arrival, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(arrival)),
                 "r"(count)
                 : "memory");
}

__device__ __forceinline__ void arrival_arrive(uint64_t *arrival) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(arrival))
                 : "memory");
}

__device__ __forceinline__ uint32_t arrival_test(uint64_t *arrival, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(shared_address(arrival)), "r"(parity)
                 : "memory");
    return done;
}

/* ---- registers and matrix units, by all threads of a warpgroup ---- */

template <int COUNT> __device__ __forceinline__ void registers_give(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void registers_take(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/** Registers that the thread has written are ready for products. */
__device__ __forceinline__ void products_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/** Wait for all products: their sums can be read, and their operands overwritten. */
__device__ __forceinline__ void products_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/** The compiler keeps a sum in its register, and moves no use of it across this. */
__device__ __forceinline__ void keep_register(float &x) {
    asm volatile("" : "+f"(x)::"memory");
}

#define MOE_SUMS_8(i)                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])

/** d[64 x 128] = a[64, 32] * b[128, 32]^T, or += with `add`; e4m3. `a` and `b` describe matrices in
 *  shared memory. A thread has elements of rows l / 4 and l / 4 + 8 of its warp's 16, l its lane:
 *  d[4 j + 2 r + c] is in the r-th of them, and in column 8 j + l % 4 * 2 + c. */
__device__ __forceinline__ void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1;\n"
                 "}"
                 : MOE_SUMS_8(0), MOE_SUMS_8(8), MOE_SUMS_8(16), MOE_SUMS_8(24), MOE_SUMS_8(32),
                   MOE_SUMS_8(40), MOE_SUMS_8(48), MOE_SUMS_8(56)
                 : "l"(a), "l"(b), "r"(add));
}

#undef MOE_SUMS_8

#endif
