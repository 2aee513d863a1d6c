/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Words between GPUs: what lines the ranks up, and what it takes to send one. Every wait ends at a
 * deadline, and leaves the rank it waited for in *late.
 */

#include "bench_kernels.h"

/* ---- one instruction each ------------------------------------------------------------------ */

__device__ static uint64_t global_timer(void) {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ static void store_release(uint32_t *address, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ static uint32_t load_acquire(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ static void store_relaxed(uint32_t *address, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ static uint32_t load_relaxed(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

/* ---- lining up ----------------------------------------------------------------------------- */

static __global__ void hold(uint64_t nanoseconds) {
    uint64_t begin = global_timer();
    while (global_timer() - begin < nanoseconds)
        __nanosleep(100);
}

cudaError_t kernel_hold(double us, cudaStream_t stream) {
    hold<<<1, 1, 0, stream>>>((uint64_t)(us * 1e3));
    return cudaGetLastError();
}

/*
 * Thread p tells rank p, by a release store into its flags, that this rank's stream has come here,
 * and waits for rank p's word in its own. Once a rank has been late nobody is waited for again.
 */
static __global__ void barrier(const __grid_constant__ BarrierArgs args, uint32_t epoch) {
    uint64_t begin = global_timer();
    store_release(args.flags[threadIdx.x] + args.rank, epoch);
    const uint32_t *flag = args.flags[args.rank] + threadIdx.x;
    if (load_relaxed(args.late)) return;
    while ((int32_t)(load_acquire(flag) - epoch) < 0) {
        if (global_timer() - begin < args.timeout_ns) continue;
        store_relaxed(args.late, threadIdx.x + 1);
        return;
    }
}

cudaError_t kernel_barrier(const BarrierArgs *args, uint32_t epoch, cudaStream_t stream) {
    barrier<<<1, args->size, 0, stream>>>(*args, epoch);
    return cudaGetLastError();
}

/* ---- what a word and a node take ----------------------------------------------------------- */

static __global__ void empty(void) {}

cudaError_t kernel_empty(cudaStream_t stream) {
    empty<<<1, 1, 0, stream>>>();
    return cudaGetLastError();
}

/* The clock is slow to read: not after every look at the word. */
__device__ static bool wait_for(const PingArgs &args, uint32_t word, uint64_t begin) {
    for (uint32_t looks = 1; (int32_t)(load_relaxed(args.in) - word) < 0; looks++) {
        if (looks % 1024 || global_timer() - begin < args.timeout_ns) continue;
        store_relaxed(args.late, (uint32_t)args.peer + 1);
        return false;
    }
    return true;
}

/*
 * One thread on each of two GPUs. The one that begins stores a word into the other's memory and
 * waits for the same word in its own; the other one waits first, and answers. Words grow by one,
 * `rounds` times, from `last`; they carry nothing, so nothing needs an order.
 */
static __global__ void ping(const __grid_constant__ PingArgs args, uint32_t last, int rounds) {
    const uint64_t begin = global_timer();
    if (load_relaxed(args.late)) return;
    for (int i = 1; i <= rounds; i++) {
        if (args.begins) store_relaxed(args.out, last + i);
        if (!wait_for(args, last + i, begin)) return;
        if (!args.begins) store_relaxed(args.out, last + i);
    }
}

cudaError_t kernel_ping(const PingArgs *args, uint32_t last, int rounds, cudaStream_t stream) {
    ping<<<1, 1, 0, stream>>>(*args, last, rounds);
    return cudaGetLastError();
}
