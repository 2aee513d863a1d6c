/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out which NVLink fabric a GPU belongs to: one that joins several machines, if any. */
#include <string.h>

#include "bootstrap/cuda/nvml.h"
#include "bootstrap/cuda/setup.h"

/* Machines without such a fabric, and old drivers, have none: the GPU's stays zero. */
void ep_cuda_find_fabric(EpGpu *gpu) {
    EpNvml nvml;
    EpNvmlFabric info = {.state = 0};
    if (!ep_nvml_open(gpu->bus, &nvml)) return;
    if (nvml.fabric && !nvml.fabric(nvml.device, &info) && !info.status &&
        info.state == EP_NVML_FABRIC_COMPLETE) {
        memcpy(gpu->fabric, info.cluster, sizeof(gpu->fabric));
        gpu->clique = (int32_t)info.clique;
    }
    ep_nvml_close(&nvml);
}
