/* SPDX-License-Identifier: Apache-2.0 */

/**
 * What the wire can do: a kernel that only copies, and the two that line the ranks up before it.
 */

#include "bench_kernels.h"

/* ---- one instruction each ------------------------------------------------------------------ */

__device__ static uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

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
 * and waits for rank p's word in its own. A rank that does not come is not reported here: the
 * library's call that follows, or the host's own barrier, says so.
 */
static __global__ void barrier(const __grid_constant__ BarrierArgs args, uint32_t epoch) {
    const uint64_t deadline = 20ull * 1000 * 1000 * 1000;
    uint64_t begin = global_timer();
    store_release(args.flags[threadIdx.x] + args.rank, epoch);
    const uint32_t *flag = args.flags[args.rank] + threadIdx.x;
    while ((int32_t)(load_acquire(flag) - epoch) < 0 && global_timer() - begin < deadline)
        ;
}

cudaError_t kernel_barrier(const BarrierArgs *args, uint32_t epoch, cudaStream_t stream) {
    barrier<<<1, args->size, 0, stream>>>(*args, epoch);
    return cudaGetLastError();
}

/* ---- copying ------------------------------------------------------------------------------- */

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

cudaError_t kernel_push(const PushArgs *args, int blocks, int stages, cudaStream_t stream) {
    PushArgs full = *args;
    int64_t longest = 0;
    for (int i = 0; i < args->count; i++)
        longest = args->bytes[i] > longest ? args->bytes[i] : longest;
    full.items = (int32_t)((longest + PUSH_CHUNK - 1) / PUSH_CHUNK) * args->count;
    if (stages == 8) return launch_push<8>(full, blocks, stream);
    if (stages == 15) return launch_push<15>(full, blocks, stream);
    return cudaErrorInvalidValue;
}
