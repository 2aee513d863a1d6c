/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/cuda_links.h"

#include <dlfcn.h>
#include <string.h>

#include "bootstrap/meet.h"
#include "runtime/cuda_host.h"
#include "runtime/log.h"

/* GPUs that NVLink connects have atomics on each other's memory, others do not. Of GPUs that this
 * process does not see, this says nothing. */
static int reaches_atomically(int device) {
    int count = 0, found = 0;
    (void)cudaGetDeviceCount(&count);
    for (int other = 0; other < count && !found; other++)
        if (other != device)
            (void)cudaDeviceGetP2PAttribute(&found, cudaDevP2PAttrNativeAtomicSupported, device,
                                            other);
    (void)cudaGetLastError();
    return found;
}

/* NVML, which comes with the driver; its functions return 0 for success. */
typedef struct Nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_bus)(const char *bus, void **device);
    int (*link_state)(void *device, unsigned link, int *active);
} Nvml;

#define MOST_LINKS 18

static int count_links(const Nvml *nvml, const char *bus) {
    void *device;
    int links = 0;
    if (nvml->init()) return 0;
    for (unsigned link = 0; link < MOST_LINKS && !nvml->by_bus(bus, &device); link++) {
        int active = 0;
        links += !nvml->link_state(device, link, &active) && active;
    }
    nvml->shutdown();
    return links;
}

static int has_links(const char *bus) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return 0;
    void *const symbols[] = {dlsym(library, "nvmlInit_v2"), dlsym(library, "nvmlShutdown"),
                             dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"),
                             dlsym(library, "nvmlDeviceGetNvLinkState")};
    Nvml nvml;
    int complete = symbols[0] && symbols[1] && symbols[2] && symbols[3];
    _Static_assert(sizeof(nvml) == sizeof(symbols), "pointers to functions and to data");
    memcpy(&nvml, symbols, sizeof(nvml));
    int links = complete ? count_links(&nvml, bus) : 0;
    dlclose(library);
    return links > 0;
}

EpStatus ep_cuda_choose_lines(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    EpLines wish = group->settings.lines;
    int32_t mine = wish == EP_LINES_WHOLE, all[EP_CUDA_MAX_RANKS];
    /* Between ranks on one GPU there is no link. */
    if (wish == EP_LINES_AUTO && !group->choice.shared)
        mine = reaches_atomically(cuda->ordinal) || has_links(group->choice.bus);
    EpStatus status = ep_group_gather(group, &mine, all, sizeof(mine));
    cuda->whole_lines = status == EP_OK;
    for (int32_t r = 0; r < group->size; r++)
        cuda->whole_lines = cuda->whole_lines && all[r];
    EP_DEBUG("lines of latency mode: %s", cuda->whole_lines ? "whole" : "fenced");
    return status;
}
