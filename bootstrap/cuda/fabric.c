/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out which NVLink fabric a GPU belongs to: one that joins several machines, if any. */
#include <dlfcn.h>
#include <string.h>

#include "bootstrap/cuda/setup.h"

#define FABRIC_COMPLETE 3 /* NVML_GPU_FABRIC_STATE_COMPLETED */

/* nvmlGpuFabricInfo_t. */
typedef struct FabricInfo {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
} FabricInfo;

/* Functions of NVML, which is a part of the driver. They return 0 on success. */
typedef struct Nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_bus)(const char *bus, void **device);
    int (*fabric)(void *device, FabricInfo *out);
} Nvml;

static int ask(const Nvml *nvml, const char *bus, FabricInfo *out) {
    void *device;
    if (nvml->init()) return 0;
    int known = !nvml->by_bus(bus, &device) && !nvml->fabric(device, out) &&
                out->state == FABRIC_COMPLETE && !out->status;
    nvml->shutdown();
    return known;
}

/* Machines without such a fabric, and old drivers, have none: the GPU's stays zero. */
void ep_cuda_find_fabric(EpGpu *gpu) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    void *const symbols[] = {dlsym(library, "nvmlInit_v2"), dlsym(library, "nvmlShutdown"),
                             dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"),
                             dlsym(library, "nvmlDeviceGetGpuFabricInfo")};
    Nvml nvml;
    FabricInfo info = {.state = 0};
    _Static_assert(sizeof(nvml) == sizeof(symbols), "pointers to functions and to data");
    memcpy(&nvml, symbols, sizeof(nvml));
    if (symbols[0] && symbols[1] && symbols[2] && symbols[3] && ask(&nvml, gpu->bus, &info)) {
        memcpy(gpu->fabric, info.cluster, sizeof(gpu->fabric));
        gpu->clique = (int32_t)info.clique;
    }
    dlclose(library);
}
