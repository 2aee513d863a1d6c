/* SPDX-License-Identifier: Apache-2.0 */
/* What surrounds the library's calls on a GPU: the current device, ranges for profilers, and
 * whether the GPU reaches the memory that it is given. */
#include <cuda.h>
#include <dlfcn.h>
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "runtime/cuda/cuda.h"

/* ---- the driver's own interface ------------------------------------------------------------ */

typedef CUresult (*PrimaryState)(CUdevice device, unsigned *flags, int *active);
typedef CUresult (*AddressRange)(CUdeviceptr *begin, size_t *bytes, CUdeviceptr address);
typedef CUresult (*PointerAttribute)(void *out, CUpointer_attribute what, CUdeviceptr address);
typedef CUresult (*RetainHandle)(CUmemGenericAllocationHandle *out, void *address);
typedef CUresult (*ReleaseHandle)(CUmemGenericAllocationHandle handle);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static PrimaryState primary_state;
static AddressRange address_range;
static PointerAttribute pointer_attribute;
static RetainHandle retain_handle;
static ReleaseHandle release_handle;
static int is_profiled; /* a profiler has set the variable that NVTX loads it by */

static void look_around(void) {
    is_profiled = getenv("NVTX_INJECTION64_PATH") != NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) return;
    primary_state = (PrimaryState)(uintptr_t)dlsym(driver, "cuDevicePrimaryCtxGetState");
    address_range = (AddressRange)(uintptr_t)dlsym(driver, "cuMemGetAddressRange_v2");
    pointer_attribute = (PointerAttribute)(uintptr_t)dlsym(driver, "cuPointerGetAttribute");
    retain_handle = (RetainHandle)(uintptr_t)dlsym(driver, "cuMemRetainAllocationHandle");
    release_handle = (ReleaseHandle)(uintptr_t)dlsym(driver, "cuMemRelease");
}

void *ep_cuda_allocation(const void *memory, int64_t *bytes) {
    CUdeviceptr begin = 0;
    size_t size = 0;
    pthread_once(&once, look_around);
    if (!address_range) return NULL;
    CUresult result = address_range(&begin, &size, (CUdeviceptr)(uintptr_t)memory);
    *bytes = (int64_t)size;
    return result == CUDA_SUCCESS ? (void *)(uintptr_t)begin : NULL;
}

/* The driver returns the handle with which the memory was mapped, so all mappings have the same. It
 * stays valid while it is compared: the mapping holds the allocation. */
EpCudaBacking ep_cuda_backing(const void *memory) {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr begin = 0, address = (CUdeviceptr)(uintptr_t)memory;
    size_t bytes = 0;
    pthread_once(&once, look_around);
    if (!address_range || !retain_handle || !release_handle ||
        address_range(&begin, &bytes, address) != CUDA_SUCCESS ||
        retain_handle(&handle, (void *)(uintptr_t)memory) != CUDA_SUCCESS)
        return (EpCudaBacking){0, 0, 0};
    (void)release_handle(handle);
    return (EpCudaBacking){handle, (int64_t)(address - begin), (int64_t)(begin + bytes - address)};
}

/* Asks the driver, since the runtime would create a context for that, which takes hundreds of
 * megabytes. The driver refuses plain memory, and all memory in a process that has not used CUDA.
 */
static int device_of(const void *data) {
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)data;
    unsigned type = 0;
    int managed = 0, device = 0;
    if (pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS ||
        type != CU_MEMORYTYPE_DEVICE)
        return -1;
    if (pointer_attribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) != CUDA_SUCCESS ||
        managed)
        return -1;
    (void)pointer_attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    return device;
}

EpDeviceOf ep_cuda_find_device_of(void) {
    pthread_once(&once, look_around);
    return pointer_attribute ? device_of : NULL;
}

/* ---- the current device -------------------------------------------------------------------- */

/* Returns whether a device has a context. Making another one current would create a context there,
 * which takes hundreds of megabytes. The driver and the runtime count devices alike. */
static int is_in_use(int device) {
    unsigned flags = 0;
    int active = 0;
    pthread_once(&once, look_around);
    return primary_state && primary_state(device, &flags, &active) == CUDA_SUCCESS && active;
}

int ep_cuda_switch(int device, int before) {
    int back = before >= 0 && is_in_use(before) ? before : EP_STAY;
    (void)cudaSetDevice(device);
    return back;
}

void ep_cuda_switch_back(int before) {
    (void)cudaSetDevice(before);
}

int ep_cuda_enter(const EpGroup *group, const EpActivity *activity) {
    char text[EP_ACTIVITY_BYTES];
    pthread_once(&once, look_around);
    (void)nvtxRangePushA(is_profiled ? ep_activity_text(activity, text) : activity->call);
    return ep_cuda_use(group->choice.device);
}

void ep_cuda_leave(const EpGroup *group, int before) {
    (void)group;
    ep_cuda_restore(before);
    (void)nvtxRangePop();
}

/* ---- tensors ------------------------------------------------------------------------------- */

static EpStatus refuse(const EpGroup *group, const EpCall *call, const char *argument,
                       const char *got, const void *data) {
    return ep_refuse(call, EP_ERR_ADDRESS, argument,
                     "expected memory of device %d or pinned host memory, got %s at %p",
                     ep_cuda(group)->ordinal, got, data);
}

static EpStatus check_attributes(const EpGroup *group, const EpCall *call, const char *argument,
                                 const void *data, const struct cudaPointerAttributes *a) {
    if (a->type == cudaMemoryTypeManaged) return EP_OK;
    if (a->type == cudaMemoryTypeUnregistered)
        return refuse(group, call, argument, "plain host memory", data);
    if (a->type == cudaMemoryTypeHost) {
        if (a->devicePointer == data) return EP_OK;
        return refuse(group, call, argument, "host memory that GPUs see at another address", data);
    }
    if (a->device == ep_cuda(group)->ordinal) return EP_OK;
    return ep_refuse(call, EP_ERR_ADDRESS, argument,
                     "expected memory of device %d or pinned host memory, got memory of device %d "
                     "at %p",
                     ep_cuda(group)->ordinal, a->device, data);
}

/* Returns the cache entry of an address. Tensors lie on multiples of 16 or more, often of large
 * powers of two: the upper bits of the product depend on all bits of the address. */
static const void **cache_entry(EpCuda *cuda, const void *data) {
    uint64_t hash = (uint64_t)(uintptr_t)data * 0x9e3779b97f4a7c15ull;
    return &cuda->validated[(hash >> 32) % EP_VALIDATED];
}

static EpStatus validate(const EpGroup *group, const EpCall *call, const char *argument,
                         const void *data) {
    struct cudaPointerAttributes attributes;
    int before = ep_cuda_use(ep_cuda(group)->ordinal);
    cudaError_t error = cudaPointerGetAttributes(&attributes, data);
    if (error != cudaSuccess) (void)cudaGetLastError();
    ep_cuda_restore(before);
    if (error != cudaSuccess) return refuse(group, call, argument, cudaGetErrorString(error), data);
    return check_attributes(group, call, argument, data, &attributes);
}

/* Ask the driver once for each address: that takes as long as half a launch. If other memory
 * appears later at the same address, an error may go undiagnosed, and nothing else is lost. */
EpStatus ep_cuda_check_pointer(const EpGroup *group, const EpCall *call, const char *argument,
                               const void *data) {
    EpCuda *cuda = ep_cuda(group);
    if (cuda->pageable) return EP_OK;
    const void **entry = cache_entry(cuda, data);
    if (*entry == data) return EP_OK;
    EP_TRY(validate(group, call, argument, data));
    *entry = data;
    return EP_OK;
}

/* ---- errors and copies --------------------------------------------------------------------- */

EpStatus ep_cuda_check(const EpGroup *group, const char *what, int error) {
    if (error == cudaSuccess) return EP_OK;
    (void)cudaGetLastError(); /* reported: do not leave it for the next call */
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_ERR_NO_MEMORY : EP_ERR_SYSTEM,
                   "rank %d: %s: %s", group->rank, what, cudaGetErrorString((cudaError_t)error));
}

EpStatus ep_cuda_put(const EpGroup *group, void *to, const void *from, size_t bytes) {
    cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    if (error == cudaSuccess) error = cudaStreamSynchronize(NULL);
    return ep_cuda_check(group, "cudaMemcpy", error);
}

EpStatus ep_cuda_open_stream(const EpGroup *group, int below, cudaStream_t *out) {
    int least = 0, greatest = 0; /* the number of a higher priority is lower */
    EP_TRY(ep_cuda_check(group, "cudaDeviceGetStreamPriorityRange",
                         cudaDeviceGetStreamPriorityRange(&least, &greatest)));
    int priority = greatest + below < least ? greatest + below : least;
    return ep_cuda_check(group, "cudaStreamCreateWithPriority",
                         cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, priority));
}

EpStatus ep_cuda_open_event(const EpGroup *group, cudaEvent_t *out) {
    return ep_cuda_check(group, "cudaEventCreate",
                         cudaEventCreateWithFlags(out, cudaEventDisableTiming));
}

EpStatus ep_cuda_record(const EpGroup *group, cudaEvent_t event, cudaStream_t stream) {
    return ep_cuda_check(group, "cudaEventRecord", cudaEventRecord(event, stream));
}

EpStatus ep_cuda_await(const EpGroup *group, cudaStream_t stream, cudaEvent_t event) {
    return ep_cuda_check(group, "cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event, 0));
}

EpStatus ep_cuda_captures(const EpGroup *group, EpStream stream, int32_t *captured) {
    EpCudaStream now;
    EP_TRY(ep_cuda_stream(group, stream, &now));
    *captured = now.captures;
    return EP_OK;
}

EpStatus ep_cuda_finish(EpGroup *group) {
    return ep_cuda_check(group, "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

/* ---- windows ------------------------------------------------------------------------------- */

#ifndef EP_RING_BYTES
#define EP_RING_BYTES (44 << 20) /* of all rings together, if that makes them deep enough */
#endif
/* A record of K rows holds a few of them, and as many rows are under way as in other groups. */
#define EP_ENTRIES_ROOM 4

/* NCCL's send and receive do not start beside a kernel that leaves fewer multiprocessors: they have
 * 16 blocks for a chunk, in clusters of four that must lie together. They would run after it, so
 * that nothing overlaps. */
#define NCCL_SMS 32

int32_t ep_cuda_multiprocessors(void) {
    int device = 0, sms = 2;
    if (cudaGetDevice(&device) == cudaSuccess)
        (void)cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    (void)cudaGetLastError();
    return sms;
}

int32_t ep_cuda_blocks(const EpGroupConfig *config, const EpNodeSizes *nodes,
                       const EpSettings *settings) {
    int sms = ep_cuda_multiprocessors();
    if (config->num_sms != EP_DEFAULT)
        sms = (int)ep_min(sms, config->num_sms);
    else if (settings->num_sms != EP_COUNT_AUTO)
        sms = (int)ep_min(sms, settings->num_sms);
    else if (nodes->nodes > 1)
        sms -= (int)ep_min(NCCL_SMS, sms / 4);
    return (int32_t)ep_max(2, sms);
}

int32_t ep_cuda_partitions(int32_t blocks) {
    return (int32_t)ep_min(EP_MAX_PARTITIONS, blocks / 2);
}

/* A ring has room for all rows of an operation, or for as many as its memory allows. */
EpWindowLayout ep_window_layout(const EpGroupConfig *config, const EpNodeSizes *nodes) {
    EpWindowLayout w = {.depth = 1, .max_tokens = config->max_tokens};
    int64_t ranks = nodes->ranks, rings = ep_max(1, ranks - 1), tokens = config->max_tokens;
    int64_t routed = nodes->nodes == 1 ? ranks : 0;
    int64_t most = ep_max(tokens, (int64_t)nodes->sources * nodes->message); /* of one launch */
    EpArena arena = {.unit = 128};
    w.record_bytes = ep_round_up(
        ep_record(config->max_row_bytes, config->max_top_k, config->max_scale_bytes).bytes,
        EP_RING_UNIT);
    int64_t depth = ep_max(EP_MIN_RING_DEPTH, EP_RING_BYTES / (rings * w.record_bytes));
    while (w.depth * 2 <= depth && w.depth < most)
        w.depth *= 2;
    int64_t ring_bytes = w.depth * w.record_bytes;
    if (config->sums == EP_SUMS_BY_ENTRY) {
        EpRecord entries = ep_entries_record(config->max_row_bytes, config->max_top_k, 1);
        int64_t bytes = ep_round_up(entries.bytes, EP_RING_UNIT);
        int64_t room = EP_ENTRIES_ROOM * (int64_t)EP_RING_BYTES / rings;
        w.entries_depth = w.depth, w.entries_bytes = (int32_t)bytes;
        while (w.entries_depth > EP_MIN_RING_DEPTH && w.entries_depth * bytes > room)
            w.entries_depth /= 2;
        ring_bytes = ep_max(ring_bytes, w.entries_depth * bytes);
    }
    w.peer_depth = w.depth, w.peer_lines = (int32_t)(ring_bytes / EP_RING_UNIT);
    w.arrival = ep_arena_offset(&arena, 2 * ranks * (int64_t)sizeof(EpArrival));
    w.sent = ep_arena_offset(&arena, ranks * EP_SENT_WORDS * 8);
    w.head = ep_arena_offset(&arena, ranks * w.depth * 8);
    w.credit = ep_arena_offset(&arena, ranks * w.depth * 8);
    int64_t words = EP_COUNT_WORDS(ep_physical_experts(config), ranks);
    w.counts = ep_arena_offset(&arena, 2 * routed * words * 8);
    w.begins = ep_arena_offset(&arena, 2 * routed * tokens * 8);
    w.routes = ep_arena_offset(&arena, 2 * routed * tokens * config->max_top_k * 4);
    int64_t ballots = config->masks ? ranks * (int64_t)sizeof(EpCudaBallot) : 0;
    w.aborted = ep_arena_offset(&arena, (1 + ranks) * EP_ABORT_BYTES + ballots);
    w.ring = ep_arena_offset(&arena, ranks > 1 ? rings * ring_bytes : 0);
    w.bytes = arena.bytes;
    return w;
}

int ep_cuda_window_find(const EpCuda *cuda, const void *data, int64_t bytes, int64_t *offset) {
    for (int i = 0; i < cuda->num_windows; i++) {
        const EpCudaWindow *w = &cuda->windows[i];
        uint64_t at = (uint64_t)(uintptr_t)data - (uint64_t)(uintptr_t)w->memory;
        if (at >= (uint64_t)w->bytes || (uint64_t)bytes > (uint64_t)w->bytes - at) continue;
        *offset = (int64_t)at + w->offset;
        return i;
    }
    return -1;
}

int ep_thread_start(pthread_t *out, void *(*body)(void *context), void *context) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the new thread inherits it */
    int error = pthread_create(out, NULL, body, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}
