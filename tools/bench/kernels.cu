/* SPDX-License-Identifier: Apache-2.0 */

/**
 * ep_bench's own kernels: they align the ranks' streams, and measure what a word, a graph node and
 * plain copies take. Every wait has a timeout, after which *late holds the missing rank plus 1.
 */

#include "tools/bench/kernels.h"
#include "tools/common/ptx.cuh"

/* ---- aligning the streams ------------------------------------------------------------------ */

static __global__ void hold(uint64_t nanoseconds) {
    uint64_t begin = ep_global_timer();
    while (ep_global_timer() - begin < nanoseconds)
        __nanosleep(100);
}

cudaError_t kernel_hold(double us, cudaStream_t stream) {
    hold<<<1, 1, 0, stream>>>((uint64_t)(us * 1e3));
    return cudaGetLastError();
}

/*
 * Thread p signals rank p, by a release store into rank p's flags, that this rank's stream has
 * arrived, and waits with acquire loads for rank p's word in its own flags. After a timeout no
 * later barrier waits. Only this stream's barriers access *passed; all threads read it before the
 * block's barrier, after which one writes it.
 */
static __global__ void barrier(const __grid_constant__ BarrierArgs args, uint32_t epoch) {
    uint64_t begin = args.first ? ep_global_timer() : *args.passed;
    store_release(args.flags[threadIdx.x] + args.rank, epoch);
    const uint32_t *flag = args.flags[args.rank] + threadIdx.x;
    bool waits = !ep_load_relaxed_sys32(args.late);
    while (waits && (int32_t)(load_acquire(flag) - epoch) < 0) {
        if (ep_global_timer() - begin < args.timeout_ns) continue;
        ep_store_relaxed_sys32(args.late, threadIdx.x + 1);
        waits = false;
    }
    __syncthreads();
    if (threadIdx.x == 0) *args.passed = ep_global_timer();
}

cudaError_t kernel_barrier(const BarrierArgs *args, uint32_t epoch, cudaStream_t stream) {
    barrier<<<1, args->size, 0, stream>>>(*args, epoch);
    return cudaGetLastError();
}

/* ---- latency of a graph node and of a word ------------------------------------------------- */

static __global__ void empty(void) {}

cudaError_t kernel_empty(cudaStream_t stream) {
    empty<<<1, 1, 0, stream>>>();
    return cudaGetLastError();
}

/* False on timeout. The clock is slow to read, so this reads it once per 1024 polls. */
__device__ static bool wait_for(const PingArgs &args, uint32_t word, uint64_t begin) {
    for (uint32_t polls = 1; (int32_t)(ep_load_relaxed_sys32(args.in) - word) < 0; polls++) {
        if (polls % 1024 || ep_global_timer() - begin < args.timeout_ns) continue;
        ep_store_relaxed_sys32(args.late, (uint32_t)args.peer + 1);
        return false;
    }
    return true;
}

/*
 * One thread on each of two GPUs. The one that begins stores a word into the other's memory and
 * waits for the same word in its own memory; the other one waits first and then answers. The word
 * increases by one in each of `rounds` rounds, starting from `last`. It guards no data, so relaxed
 * order suffices.
 */
static __global__ void ping(const __grid_constant__ PingArgs args, uint32_t last, int rounds) {
    const uint64_t begin = ep_global_timer();
    if (ep_load_relaxed_sys32(args.late)) return;
    for (int i = 1; i <= rounds; i++) {
        if (args.begins) ep_store_relaxed_sys32(args.out, last + i);
        if (!wait_for(args, last + i, begin)) return;
        if (!args.begins) ep_store_relaxed_sys32(args.out, last + i);
    }
}

cudaError_t kernel_ping(const PingArgs *args, uint32_t last, int rounds, cudaStream_t stream) {
    ping<<<1, 1, 0, stream>>>(*args, last, rounds);
    return cudaGetLastError();
}

/* ---- bulk copies --------------------------------------------------------------------------- */

struct Chunk {
    const char *from;
    char *to;
    uint32_t bytes; /* 0: no chunks left */
};

/* This block's next chunk. Chunks rotate over the targets, so that all links are busy. */
[[maybe_unused]] __device__ static Chunk next_chunk(const PushArgs &args, int *item) {
    for (; *item < args.items; *item += gridDim.x) {
        int target = *item % args.count, number = *item / args.count;
        int64_t at = (int64_t)number * PUSH_CHUNK, rest = args.bytes[target] - at;
        if (rest <= 0) continue;
        *item += gridDim.x;
        return {args.source + (int64_t)(number % args.source_chunks) * PUSH_CHUNK,
                args.to[target] + at, (uint32_t)(rest < PUSH_CHUNK ? rest : (int64_t)PUSH_CHUNK)};
    }
    return {nullptr, nullptr, 0};
}

[[maybe_unused]] __device__ static void load_chunk(Chunk chunk, char *stage, uint64_t *arrival) {
    ep_mbarrier_expect(arrival, chunk.bytes);
    ep_bulk_load(ep_smem(stage), chunk.from, chunk.bytes, ep_smem(arrival));
}

/*
 * Moves chunks from global to shared to global memory, mostly a peer's, with bulk copies. One
 * thread issues all of them. LAG stages are being stored while the others are being loaded. The
 * arrival barrier of a stage completes when its load does. Before the next load into a stage, the
 * store that read the stage, LAG stores ago, must have finished reading. The kernel ends when all
 * bytes have arrived.
 */
template <int STAGES>
static __global__ void __launch_bounds__(32) push(const __grid_constant__ PushArgs args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    constexpr int LAG = STAGES / 2;
    extern __shared__ __align__(128) char stages[];
    __shared__ uint64_t arrivals[STAGES];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < STAGES; s++)
        ep_mbarrier_init(&arrivals[s], 1);
    ep_fence_mbarrier_init();
    ep_fence_proxy_shared();
    int load_item = blockIdx.x, store_item = blockIdx.x, loaded = 0;
    for (; loaded < STAGES - LAG; loaded++) {
        Chunk chunk = next_chunk(args, &load_item);
        if (!chunk.bytes) break;
        load_chunk(chunk, stages + loaded * PUSH_CHUNK, &arrivals[loaded]);
    }
    for (int i = 0;; i++) {
        Chunk chunk = next_chunk(args, &store_item);
        if (!chunk.bytes) break;
        while (!ep_mbarrier_try_wait(&arrivals[i % STAGES], i / STAGES & 1))
            ;
        ep_bulk_store(chunk.to, ep_smem(stages + i % STAGES * PUSH_CHUNK), chunk.bytes);
        ep_bulk_commit();
        chunk = next_chunk(args, &load_item);
        if (!chunk.bytes) continue;
        if (loaded >= STAGES) ep_bulk_wait_read<LAG>();
        load_chunk(chunk, stages + loaded % STAGES * PUSH_CHUNK, &arrivals[loaded % STAGES]);
        loaded++;
    }
    ep_bulk_wait<0>();
#endif
}

template <int STAGES>
static cudaError_t launch_push(const PushArgs &args, int blocks, cudaStream_t stream) {
    const int bytes = STAGES * PUSH_CHUNK;
    cudaError_t status =
        cudaFuncSetAttribute(push<STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
    push<STAGES><<<blocks, 32, bytes, stream>>>(args);
    return cudaGetLastError();
}

/* Number of targets times the pieces of the longest transfer. */
static int32_t count_items(const PushArgs *args, int piece) {
    int64_t longest = 0;
    for (int i = 0; i < args->count; i++)
        longest = args->bytes[i] > longest ? args->bytes[i] : longest;
    return (int32_t)((longest + piece - 1) / piece) * args->count;
}

static bool has_bulk_copies(void) {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           major >= 9;
}

cudaError_t kernel_push(const PushArgs *args, int blocks, int stages, cudaStream_t stream) {
    if (!has_bulk_copies()) return kernel_store(args, blocks, stream);
    PushArgs full = *args;
    full.items = count_items(args, PUSH_CHUNK);
    if (stages == 8) return launch_push<8>(full, blocks, stream);
    if (stages == 15) return launch_push<15>(full, blocks, stream);
    return cudaErrorInvalidValue;
}

/* ---- plain stores -------------------------------------------------------------------------- */

enum { STORE_THREADS = 512, STORE_AHEAD = 4, STORE_PIECE = STORE_THREADS * (int)sizeof(int4) };

/*
 * Moves pieces of 16 bytes per thread, mostly to a peer. For few rows this is faster than bulk
 * copies, which take longer to start. Consecutive pieces go to different targets. A thread issues
 * STORE_AHEAD loads before it stores. No thread waits for another; the kernel ends when its stores
 * are complete.
 */
static __global__ void __launch_bounds__(STORE_THREADS)
    store(const __grid_constant__ PushArgs args, int source_pieces) {
    const int within = (int)threadIdx.x * (int)sizeof(int4);
    for (int first = blockIdx.x; first < args.items; first += gridDim.x * STORE_AHEAD) {
        int4 unit[STORE_AHEAD];
        char *to[STORE_AHEAD];
#pragma unroll
        for (int i = 0; i < STORE_AHEAD; i++) {
            const int item = first + i * (int)gridDim.x, target = item % args.count;
            const int number = item / args.count;
            const int64_t at = (int64_t)number * STORE_PIECE + within;
            const int64_t from = (int64_t)(number % source_pieces) * STORE_PIECE + within;
            const bool valid = item < args.items && at < args.bytes[target];
            to[i] = valid ? args.to[target] + at : nullptr;
            unit[i] = valid ? *(const int4 *)(args.source + from) : int4{};
        }
#pragma unroll
        for (int i = 0; i < STORE_AHEAD; i++)
            if (to[i]) *(int4 *)to[i] = unit[i];
    }
}

cudaError_t kernel_store(const PushArgs *args, int blocks, cudaStream_t stream) {
    PushArgs full = *args;
    full.items = count_items(args, STORE_PIECE);
    int pieces = (int)((int64_t)args->source_chunks * PUSH_CHUNK / STORE_PIECE);
    store<<<blocks, STORE_THREADS, 0, stream>>>(full, pieces);
    return cudaGetLastError();
}
