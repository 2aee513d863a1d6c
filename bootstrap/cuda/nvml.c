/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/cuda/nvml.h"

#include <dlfcn.h>
#include <string.h>

/* Set a pointer to a function. Returns 0 if the library does not have it. */
static int find(void *library, const char *name, void *out) {
    void *symbol = dlsym(library, name);
    memcpy(out, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static int open_device(const char *bus, EpNvml *n) {
    int (*init)(void), (*by_bus)(const char *bus, void **device);
    int complete = find(n->library, "nvmlInit_v2", &init) &&
                   find(n->library, "nvmlShutdown", &n->shutdown) &&
                   find(n->library, "nvmlDeviceGetHandleByPciBusId_v2", &by_bus) &&
                   find(n->library, "nvmlDeviceGetNvLinkState", &n->link_state);
    if (!complete || init()) return 0;
    (void)find(n->library, "nvmlDeviceGetNvLinkRemoteDeviceType", &n->link_end);
    (void)find(n->library, "nvmlDeviceGetGpuFabricInfo", &n->fabric);
    if (!by_bus(bus, &n->device)) return 1;
    n->shutdown();
    return 0;
}

int ep_nvml_open(const char *bus, EpNvml *out) {
    *out = (EpNvml){.library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (!out->library) return 0;
    if (open_device(bus, out)) return 1;
    dlclose(out->library);
    return 0;
}

void ep_nvml_close(const EpNvml *nvml) {
    nvml->shutdown();
    dlclose(nvml->library);
}
