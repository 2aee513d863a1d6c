/* SPDX-License-Identifier: Apache-2.0 */

/**
 * What the wire can do: kernels that only copy, through the bulk copy engine or by plain stores.
 */

#include "bench_kernels.h"

/* ---- one instruction each ------------------------------------------------------------------ */

__device__ static uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ static void arrival_init(uint64_t *arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival))
                 : "memory");
}

/* The copy engine sees the barriers that were initialised. */
__device__ static void arrival_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ static void arrival_expect(uint64_t *arrival, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)),
        "r"(bytes)
        : "memory");
}

__device__ static uint32_t arrival_test(uint64_t *arrival, uint32_t parity) {
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

__device__ static void bulk_load(char *stage, const char *from, uint32_t bytes, uint64_t *arrival) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(stage)),
                 "l"(from), "r"(bytes), "r"(shared_address(arrival))
                 : "memory");
}

__device__ static void bulk_store(char *to, const char *stage, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(stage)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* At most PENDING of the latest stores still read their stages. */
template <int PENDING> __device__ static void bulk_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ static void bulk_wait_all(void) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- bulk copies --------------------------------------------------------------------------- */

struct Chunk {
    const char *from;
    char *to;
    uint32_t bytes; /* 0: there are no more */
};

/* This block's next chunk; chunks take turns among the places, so that all links are busy. */
__device__ static Chunk next_chunk(const PushArgs &args, int *item) {
    for (; *item < args.items; *item += gridDim.x) {
        int place = *item % args.count, number = *item / args.count;
        int64_t at = (int64_t)number * PUSH_CHUNK, rest = args.bytes[place] - at;
        if (rest <= 0) continue;
        *item += gridDim.x;
        return {args.source + (int64_t)(number % args.source_chunks) * PUSH_CHUNK,
                args.to[place] + at, (uint32_t)(rest < PUSH_CHUNK ? rest : PUSH_CHUNK)};
    }
    return {nullptr, nullptr, 0};
}

__device__ static void load_chunk(Chunk chunk, char *stage, uint64_t *arrival) {
    arrival_expect(arrival, chunk.bytes);
    bulk_load(stage, chunk.from, chunk.bytes, arrival);
}

/*
 * Moves chunks global -> shared -> global, mostly a peer's, through the bulk copy engine: one
 * thread issues everything. LAG stages are being stored while the others are being loaded. The
 * arrival barrier of a stage says that its load is complete; before it is loaded again, the store
 * that read it has to be done with it, LAG stores ago. The kernel ends when all bytes have arrived.
 */
template <int STAGES>
static __global__ void __launch_bounds__(32) push(const __grid_constant__ PushArgs args) {
    constexpr int LAG = STAGES / 2;
    extern __shared__ __align__(128) char stages[];
    __shared__ uint64_t arrivals[STAGES];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < STAGES; s++)
        arrival_init(&arrivals[s]);
    arrival_fence();
    int load_item = blockIdx.x, store_item = blockIdx.x, loaded = 0;
    for (; loaded < STAGES - LAG; loaded++) {
        Chunk chunk = next_chunk(args, &load_item);
        if (!chunk.bytes) break;
        load_chunk(chunk, stages + loaded * PUSH_CHUNK, &arrivals[loaded]);
    }
    for (int i = 0;; i++) {
        Chunk chunk = next_chunk(args, &store_item);
        if (!chunk.bytes) break;
        while (!arrival_test(&arrivals[i % STAGES], i / STAGES & 1))
            ;
        bulk_store(chunk.to, stages + i % STAGES * PUSH_CHUNK, chunk.bytes);
        chunk = next_chunk(args, &load_item);
        if (!chunk.bytes) continue;
        if (loaded >= STAGES) bulk_wait_read<LAG>();
        load_chunk(chunk, stages + loaded % STAGES * PUSH_CHUNK, &arrivals[loaded % STAGES]);
        loaded++;
    }
    bulk_wait_all();
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

/* Places times the pieces of the longest. */
static int32_t count_items(const PushArgs *args, int piece) {
    int64_t longest = 0;
    for (int i = 0; i < args->count; i++)
        longest = args->bytes[i] > longest ? args->bytes[i] : longest;
    return (int32_t)((longest + piece - 1) / piece) * args->count;
}

cudaError_t kernel_push(const PushArgs *args, int blocks, int stages, cudaStream_t stream) {
    PushArgs full = *args;
    full.items = count_items(args, PUSH_CHUNK);
    if (stages == 8) return launch_push<8>(full, blocks, stream);
    if (stages == 15) return launch_push<15>(full, blocks, stream);
    return cudaErrorInvalidValue;
}

/* ---- plain stores -------------------------------------------------------------------------- */

enum { STORE_THREADS = 512, STORE_AHEAD = 4, STORE_PIECE = STORE_THREADS * (int)sizeof(int4) };

/*
 * Moves pieces of 16 bytes a thread, mostly to a peer: what few rows take, which are gone before a
 * bulk copy is under way. Pieces take turns among the places. A thread has STORE_AHEAD loads under
 * way before it stores. Nobody waits for anybody; the kernel ends when its stores have.
 */
static __global__ void __launch_bounds__(STORE_THREADS)
    store(const __grid_constant__ PushArgs args, int source_pieces) {
    const int within = (int)threadIdx.x * (int)sizeof(int4);
    for (int first = blockIdx.x; first < args.items; first += gridDim.x * STORE_AHEAD) {
        int4 unit[STORE_AHEAD];
        char *to[STORE_AHEAD];
#pragma unroll
        for (int i = 0; i < STORE_AHEAD; i++) {
            const int item = first + i * (int)gridDim.x, place = item % args.count;
            const int number = item / args.count;
            const int64_t at = (int64_t)number * STORE_PIECE + within;
            const int64_t from = (int64_t)(number % source_pieces) * STORE_PIECE + within;
            const bool there = item < args.items && at < args.bytes[place];
            to[i] = there ? args.to[place] + at : nullptr;
            unit[i] = there ? *(const int4 *)(args.source + from) : int4{};
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
