/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_NVML_H
#define EP_BOOTSTRAP_CUDA_NVML_H

/**
 * The part of NVML that libep asks. NVML comes with the driver: it is loaded where it is needed,
 * and its header, which not every installation of CUDA has, is not. Its functions return 0 on
 * success.
 */

#define EP_NVML_LINKS 18          /**< NVML_NVLINK_MAX_LINKS */
#define EP_NVML_SWITCH 2          /**< NVML_NVLINK_DEVICE_TYPE_SWITCH */
#define EP_NVML_FABRIC_COMPLETE 3 /**< NVML_GPU_FABRIC_STATE_COMPLETED */

/** nvmlGpuFabricInfo_t. */
typedef struct EpNvmlFabric {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
} EpNvmlFabric;

/** NVML, open for one GPU. */
typedef struct EpNvml {
    void *library, *device;
    int (*shutdown)(void);
    int (*link_state)(void *device, unsigned link, int *active);
    int (*link_end)(void *device, unsigned link, int *type); /**< NULL in old drivers */
    int (*fabric)(void *device, EpNvmlFabric *out);          /**< likewise */
} EpNvml;

/** Load NVML for the GPU with this bus id. Returns 0 if there is no NVML, or it does not know the
 *  GPU; then there is nothing to close. */
int ep_nvml_open(const char *bus, EpNvml *out);
void ep_nvml_close(const EpNvml *nvml);

#endif
