/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_PTX_CUH
#define COMMON_PTX_CUH

/** Besides runtime/cuda/ptx.cuh, words of 32 bits that others look at, copies of a matrix,
 * clusters, and the matrix units of sm_90a: one instruction each, and on the host what they need.
 */

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>

#include "runtime/cuda/ptx.cuh"

/* ---- words ---- */

__device__ __forceinline__ void store_release(uint32_t *address, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

/** Add one and return the old value. Unlike atomicAdd, whose result the compiler shares among the
 *  threads of a warp, it does not block until that is used. */
__device__ __forceinline__ uint32_t count_up(uint32_t *address) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(address)
                 : "memory");
    return before;
}

/* ---- copies, which complete an mbarrier ---- */

/** Copy 4 bytes. */
__device__ __forceinline__ void copy_4(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/** Copy 16 bytes. */
__device__ __forceinline__ void copy_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/** Arrive when all copies that the thread has started are made. */
__device__ __forceinline__ void copies_arrive(uint64_t *arrival) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ep_smem(arrival))
                 : "memory");
}

/** A matrix of bytes in memory, of which a load takes a box of 128 columns. */
typedef CUtensorMap TensorMap;

/** Load a box at `column`, `row` into rows of 128 bytes, whose pieces of 16 change places as matrix
 *  units expect. What is beyond the matrix is 0. The bytes complete `arrival`. */
__device__ __forceinline__ void tensor_load(uint32_t to, const TensorMap *map, int column, int row,
                                            uint64_t *arrival) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(ep_smem(arrival)), "r"(column), "r"(row)
                 : "memory");
}

/** Likewise, to the same place in both blocks of the cluster. */
__device__ __forceinline__ void tensor_load_all(uint32_t to, const TensorMap *map, int column,
                                                int row, uint64_t *arrival) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(ep_smem(arrival)), "r"(column), "r"(row), "h"((uint16_t)3)
                 : "memory");
}

/** Describe a row-major matrix for loads of `box_rows` rows. `data` and `columns` are multiples of
 *  16. Returns false if the driver cannot. */
static inline bool tensor_map_make(const void *data, int64_t rows, int64_t columns, int box_rows,
                                   TensorMap *out) {
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                               const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                               const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static const Encode encode = (Encode)(uintptr_t)dlsym(
        dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "cuTensorMapEncodeTiled");
    const cuuint64_t shape[2] = {(cuuint64_t)(columns ? columns : 16),
                                 (cuuint64_t)(rows ? rows : 1)};
    const cuuint64_t pitch[1] = {shape[0]};
    const cuuint32_t box[2] = {128, (cuuint32_t)box_rows}, each[2] = {1, 1};
    return encode && encode(out, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void *)(uintptr_t)data, shape,
                            pitch, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* ---- mbarriers ---- */

/** Arrive at the mbarrier of that place in block `rank` of the cluster. */
__device__ __forceinline__ void arrival_arrive_at(uint64_t *arrival, uint32_t rank) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
                 "}" ::"r"(ep_smem(arrival)),
                 "r"(rank)
                 : "memory");
}

/** Store into the word of that place in block `rank` of the cluster. Its bytes complete the
 * mbarrier `arrival` there. */
__device__ __forceinline__ void arrival_store_at(uint32_t *word, uint32_t value, uint64_t *arrival,
                                                 uint32_t rank) {
    asm volatile("{\n"
                 ".reg .b32 to, there;\n"
                 "mapa.shared::cluster.u32 to, %0, %3;\n"
                 "mapa.shared::cluster.u32 there, %2, %3;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [there];\n"
                 "}" ::"r"(ep_smem(word)),
                 "r"(value), "r"(ep_smem(arrival)), "r"(rank)
                 : "memory");
}

/** A value that all lanes of the warp have, so that the compiler knows it. */
__device__ __forceinline__ int same_for_warp(int x) {
    return __shfl_sync(0xffffffffu, x, 0);
}

/* ---- clusters of two blocks ---- */

enum { CLUSTER = 2 };

__device__ __forceinline__ uint32_t cluster_rank(void) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_barrier(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/** By all threads, when mbarriers are initialised: both blocks may use them. */
__device__ __forceinline__ void cluster_begin(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    cluster_barrier();
}

/** By all threads: wait until both blocks are here. */
__device__ __forceinline__ void cluster_end(void) {
    __syncwarp();
    cluster_barrier();
}

/** Launch a kernel with one argument. */
template <typename Args>
static inline cudaError_t cluster_launch(void (*kernel)(Args), unsigned blocks, unsigned threads,
                                         int shared_bytes, cudaStream_t stream, const Args &args) {
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = CLUSTER;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(blocks), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = (size_t)shared_bytes, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args);
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

/** Wait for all groups of products but the `YOUNGEST` ones: their sums can be read, and their
 *  operands overwritten. */
template <int YOUNGEST> __device__ __forceinline__ void products_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(YOUNGEST) : "memory");
}

/** The compiler keeps a sum in its register, and moves no use of it across this. */
__device__ __forceinline__ void keep_register(float &x) {
    asm volatile("" : "+f"(x)::"memory");
}

#define SUMS_8(i)                                                                               \
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
                 : SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24), SUMS_8(32), SUMS_8(40), SUMS_8(48),
                   SUMS_8(56)
                 : "l"(a), "l"(b), "r"(add));
}

/** d[64 x 256] = a[64, 16] * b[256, 16]^T, or += with `add`; bf16. Elements are as above. */
__device__ __forceinline__ void multiply_bf16(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
                 "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                 "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                 "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
                 "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "
                 "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "
                 "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
                 "%120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, p, 1, 1, 0, 0;\n"
                 "}"
                 : SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24), SUMS_8(32), SUMS_8(40), SUMS_8(48),
                   SUMS_8(56), SUMS_8(64), SUMS_8(72), SUMS_8(80), SUMS_8(88), SUMS_8(96),
                   SUMS_8(104), SUMS_8(112), SUMS_8(120)
                 : "l"(a), "l"(b), "r"(add));
}

#undef SUMS_8

#endif
