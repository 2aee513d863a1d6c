/* SPDX-License-Identifier: Apache-2.0 */
/* Reports this process's GPUs without creating a context on any of them. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bootstrap/cuda/nvml.h"
#include "bootstrap/cuda/setup.h"
#include "runtime/cuda/code.h"

static void explain_driver(EpGpuReport *out) {
    int driver = 0, runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    out->present = driver > 0;
    if (!driver)
        snprintf(out->reason, sizeof(out->reason),
                 "expected a CUDA driver, got none (libcuda.so.1)");
    else
        snprintf(out->reason, sizeof(out->reason),
                 "expected a driver for CUDA %d.%d or newer, which this build was made with, got "
                 "one for CUDA %d.%d",
                 runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
}

static void explain(cudaError_t error, EpGpuReport *out) {
    (void)cudaGetLastError();
    out->present = error != cudaSuccess && error != cudaErrorNoDevice;
    if (error == cudaErrorInsufficientDriver)
        explain_driver(out);
    else if (error == cudaSuccess || error == cudaErrorNoDevice)
        snprintf(out->reason, sizeof(out->reason),
                 "expected a GPU, got none (CUDA_VISIBLE_DEVICES may hide them)");
    else
        snprintf(out->reason, sizeof(out->reason), "cudaGetDeviceCount: %s",
                 cudaGetErrorString(error));
}

/* Find the NVLink fabric that a GPU belongs to: one that joins several machines. Machines without
 * one, and old drivers, have none: the GPU's stays zero. */
static void find_fabric(EpGpu *gpu) {
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

static cudaError_t describe(int32_t device, int32_t count, EpGpu *out) {
    struct cudaDeviceProp p;
    cudaError_t error = cudaGetDeviceProperties(&p, device);
    if (error != cudaSuccess) return error;
    *out = (EpGpu){.capability = 0};
    memcpy(out->uuid, p.uuid.bytes, sizeof(out->uuid));
    snprintf(out->name, sizeof(out->name), "%.39s", p.name);
    out->capability = 10 * p.major + p.minor;
    out->code = (int16_t)ep_cuda_code(out->capability);
    out->masked_code = (int16_t)ep_cuda_code_masked(out->capability);
    out->num_sms = p.multiProcessorCount;
    out->shared_bytes = (int32_t)p.sharedMemPerBlockOptin;
    for (int32_t d = 0; d < count && error == cudaSuccess; d++) {
        int can = 0;
        if (d != device) error = cudaDeviceCanAccessPeer(&can, device, d);
        out->reaches |= (uint32_t)can << d;
    }
    if (error == cudaSuccess)
        error = cudaDeviceGetPCIBusId(out->bus, (int)sizeof(out->bus), device);
    if (error == cudaSuccess) find_fabric(out);
    return error;
}

/* Describe all devices. Each process asks once, for all of its ranks and groups: a query takes
 * milliseconds, and the devices that a process sees do not change. */
static cudaError_t describe_all(int32_t count, EpGpu *out) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static EpGpu known[EP_GPUS_LISTED];
    static int32_t num_known;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&mutex);
    if (num_known != count) {
        num_known = 0;
        for (int32_t d = 0; d < count && error == cudaSuccess; d++)
            error = describe(d, count, &known[d]);
        if (error == cudaSuccess) num_known = count;
    }
    memcpy(out, known, sizeof(known));
    pthread_mutex_unlock(&mutex);
    return error;
}

static int list_gpus(int32_t count, EpGpuReport *out) {
    cudaError_t error = describe_all(count, out->gpu);
    if (error == cudaSuccess) error = cudaGetDevice(&out->current);
    if (error == cudaSuccess) return 1;
    (void)cudaGetLastError();
    snprintf(out->reason, sizeof(out->reason), "looking at the GPUs: %s",
             cudaGetErrorString(error));
    return 0;
}

/* Make the communicator's device the rank's. Waits for a communicator that NCCL still initializes.
 * Returns 0, with the reason in the report, on failure. */
static int adopt_communicator(const EpNccl *nccl, const EpGroupConfig *config, EpGpuReport *out) {
    int device = -1;
    ncclResult_t result = ep_nccl_settle(nccl, config->nccl_comm, ncclSuccess, EP_NCCL_SECONDS);
    if (result == ncclSuccess) result = nccl->ncclCommCuDevice(config->nccl_comm, &device);
    if (result != ncclSuccess) {
        snprintf(out->reason, sizeof(out->reason), "config.nccl_comm: %s",
                 ep_nccl_explain(nccl, result));
        return 0;
    }
    if (out->wanted != EP_DEFAULT && out->wanted != device) {
        snprintf(out->reason, sizeof(out->reason),
                 "expected config.device to be that of config.nccl_comm, %d, got %d", device,
                 out->wanted);
        return 0;
    }
    out->wanted = device;
    return 1;
}

static int check_nccl(const EpGroupConfig *config, int32_t num_ranks, EpGpuReport *out) {
    if (num_ranks == 1 || ep_config_joins(config)) return 1;
    const EpNccl *nccl = ep_nccl_load(out->reason, sizeof(out->reason));
    if (!nccl) return 0;
    return !config->nccl_comm || adopt_communicator(nccl, config, out);
}

/* Returns a number of this process that no other one of the machine has: in containers processes
 * may have the same id. */
static int32_t process_number(void) {
    struct stat space;
    uint32_t number = (uint32_t)getpid();
    if (stat("/proc/self/ns/pid", &space) == 0) number ^= (uint32_t)space.st_ino * 0x9e3779b9u;
    return (int32_t)number;
}

void ep_cuda_find_gpus(const EpGroupConfig *config, int32_t num_ranks, EpGpuReport *out) {
    int count = 0;
    const char *host = getenv("NCCL_HOSTID");
    *out = (EpGpuReport){
        .wanted = config->device, .masks = config->masks, .process = process_number()};
    snprintf(out->nccl_host, sizeof(out->nccl_host), "%s", host ? host : "");
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        explain(error, out);
        return;
    }
    out->present = 1;
    count = (int)ep_min(count, EP_GPUS_LISTED);
    if (check_nccl(config, num_ranks, out) && list_gpus(count, out)) out->count = count;
}
