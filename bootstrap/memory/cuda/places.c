/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/memory/cuda/places.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "bootstrap/memory/descriptors.h"

#define DRIVER(X)                    \
    X(cuMemGetAllocationGranularity) \
    X(cuMemAddressReserve)           \
    X(cuMemAddressFree)              \
    X(cuMemCreate)                   \
    X(cuMemRelease)                  \
    X(cuMemMap)                      \
    X(cuMemUnmap)                    \
    X(cuMemSetAccess)                \
    X(cuMemExportToShareableHandle)  \
    X(cuMemImportFromShareableHandle)

#define POINTER(name) __typeof__(&name) name;
static struct Driver { DRIVER(POINTER) } driver;
static int has_driver;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    has_driver = 1;
#define LOAD(name)                                                     \
    driver.name = (__typeof__(&name))(uintptr_t)dlsym(library, #name); \
    has_driver &= driver.name != NULL;
    DRIVER(LOAD)
}

typedef CUmemGenericAllocationHandle Memory;

struct EpCudaPlaces {
    int32_t size, place;
    int device;
    size_t stride;     /* bytes of a part */
    CUdeviceptr range; /* 0: none. A part for each place, then a spare one */
    Memory own;        /* this rank's */
    int descriptor;    /* by which others get it; -1: none */
    char *is_mapped;   /* [size] */
    Memory *found;     /* [size]; 0: none */
};

static CUdeviceptr part_of(const EpCudaPlaces *p, int32_t place) {
    return p->range + (CUdeviceptr)place * p->stride;
}

char *ep_cuda_places_part(const EpCudaPlaces *places, int32_t place) {
    return (char *)(uintptr_t)part_of(places, place);
}

/* What went wrong is this rank's to say: a driver without a function, or without memory. */
static EpStatus check(const EpCall *call, const char *function, CUresult result) {
    if (result == CUDA_SUCCESS) return EP_OK;
    return ep_refuse(call, result == CUDA_ERROR_OUT_OF_MEMORY ? EP_ERR_NO_MEMORY : EP_ERR_SYSTEM,
                     "window", "expected CUDA_SUCCESS of %s, got CUresult %d", function,
                     (int)result);
}
#define DRIVER_TRY(call, name, ...) EP_TRY(check(call, #name, driver.name(__VA_ARGS__)))

/* ---- one part ------------------------------------------------------------------------------ */

static void unmap(EpCudaPlaces *p, CUdeviceptr part) {
    (void)driver.cuMemUnmap(part, p->stride);
}

static EpStatus map(const EpCall *call, EpCudaPlaces *p, CUdeviceptr part, Memory memory) {
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = p->device},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    DRIVER_TRY(call, cuMemMap, part, p->stride, 0, memory, 0);
    EpStatus status =
        check(call, "cuMemSetAccess", driver.cuMemSetAccess(part, p->stride, &access, 1));
    if (status != EP_OK) unmap(p, part);
    return status;
}

static EpStatus map_place(const EpCall *call, EpCudaPlaces *p, int32_t place, Memory memory) {
    if (p->is_mapped[place]) unmap(p, part_of(p, place));
    p->is_mapped[place] = 0;
    if (!memory) return EP_OK;
    EP_TRY(map(call, p, part_of(p, place), memory));
    p->is_mapped[place] = 1;
    return EP_OK;
}

/* ---- the window ---------------------------------------------------------------------------- */

static EpStatus allocate(const EpCall *call, int64_t bytes, EpCudaPlaces *p) {
    const CUmemAllocationProp form = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = p->device}};
    size_t unit = 0;
    DRIVER_TRY(call, cuMemGetAllocationGranularity, &unit, &form,
               CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    p->stride = ((size_t)bytes + unit - 1) / unit * unit;
    DRIVER_TRY(call, cuMemAddressReserve, &p->range, (size_t)(p->size + 1) * p->stride, 0, 0, 0);
    DRIVER_TRY(call, cuMemCreate, &p->own, p->stride, &form, 0);
    DRIVER_TRY(call, cuMemExportToShareableHandle, &p->descriptor, p->own,
               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    return map_place(call, p, p->place, p->own);
}

EpStatus ep_cuda_places_open(const EpGroup *group, const EpCall *call, int64_t bytes,
                             EpCudaPlaces **out) {
    size_t size = (size_t)group->size;
    pthread_once(&once, load_driver);
    if (!has_driver)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "window",
                         "expected a driver that maps memory of other processes, got none");
    EpCudaPlaces *p = calloc(1, sizeof(*p));
    if (p) p->descriptor = -1;
    if (p) p->is_mapped = calloc(size, sizeof(*p->is_mapped));
    if (p) p->found = calloc(size, sizeof(*p->found));
    if (!p || !p->is_mapped || !p->found) {
        ep_cuda_places_close(p);
        return ep_refuse(call, EP_ERR_NO_MEMORY, "window", "out of memory");
    }
    p->size = group->size, p->place = group->rank, p->device = ep_cuda(group)->ordinal;
    EpStatus status = allocate(call, bytes, p);
    if (status == EP_OK)
        status = ep_cuda_check(group, "cudaMemset",
                               cudaMemset(ep_cuda_places_part(p, p->place), 0, p->stride));
    if (status == EP_OK)
        status = ep_cuda_check(group, "cudaDeviceSynchronize", cudaDeviceSynchronize());
    if (status == EP_OK)
        *out = p;
    else
        ep_cuda_places_close(p);
    return status;
}

static void drop_found(EpCudaPlaces *p) {
    for (int32_t r = 0; r < p->size; r++) {
        if (p->found[r]) (void)driver.cuMemRelease(p->found[r]);
        p->found[r] = 0;
    }
}

/* A mapping holds its memory, so a handle may go before. */
void ep_cuda_places_close(EpCudaPlaces *p) {
    if (!p) return;
    if (p->found) drop_found(p);
    for (int32_t r = 0; p->is_mapped && r < p->size; r++)
        if (p->is_mapped[r]) unmap(p, part_of(p, r));
    if (p->descriptor >= 0) close(p->descriptor);
    if (p->own) (void)driver.cuMemRelease(p->own);
    if (p->range) (void)driver.cuMemAddressFree(p->range, (size_t)(p->size + 1) * p->stride);
    free(p->is_mapped);
    free(p->found);
    free(p);
}

/* ---- the others' --------------------------------------------------------------------------- */

/* Import a rank's memory, and try it in the spare part: what can be mapped there can be mapped
 * into its own part later, where other memory may still be. */
static EpStatus import(const EpCall *call, EpCudaPlaces *p, int descriptor, Memory *out) {
    DRIVER_TRY(call, cuMemImportFromShareableHandle, out, (void *)(uintptr_t)descriptor,
               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    EP_TRY(map(call, p, part_of(p, p->size), *out));
    unmap(p, part_of(p, p->size));
    return EP_OK;
}

EpStatus ep_cuda_places_find(EpGroup *group, const EpCall *call, EpCudaPlaces *p) {
    int descriptors[EP_MAX_RANKS];
    drop_found(p);
    EpStatus status = ep_descriptors_exchange(group, call, EP_OK, p->descriptor, descriptors);
    for (int32_t r = 0; r < p->size; r++) {
        if (descriptors[r] < 0) continue;
        if (status == EP_OK) status = import(call, p, descriptors[r], &p->found[r]);
        close(descriptors[r]);
    }
    status = ep_group_agree(group, call, status);
    if (status != EP_OK) drop_found(p);
    return status;
}

EpStatus ep_cuda_places_adopt(const EpGroup *group, EpCudaPlaces *p, const EpMask *changed) {
    const EpCall call = {group->call, group->rank, NULL};
    EpStatus status = EP_OK;
    for (int32_t r = 0; r < p->size && status == EP_OK; r++)
        if (r != p->place && ep_mask_has(changed, r)) status = map_place(&call, p, r, p->found[r]);
    drop_found(p);
    return status;
}
