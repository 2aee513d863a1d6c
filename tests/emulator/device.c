/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated GPUs of EMULATED_CAPABILITY (90: 9.0): EMULATED_GPUS of them (4), with EMULATED_SMS
 * multiprocessors each (4), whose blocks have EMULATED_SHARED bytes of shared memory. */
#include "tests/emulator/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/block.h"
#include "tests/emulator/launch.h"

#define VERSION CUDART_VERSION

static __thread int current;
static __thread cudaError_t last_error;
static int in_use[EMULATED_MAX_GPUS];

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static int count(void) {
    int gpus = setting("EMULATED_GPUS", 4);
    return gpus < 0 ? 0 : gpus > EMULATED_MAX_GPUS ? EMULATED_MAX_GPUS : gpus;
}

static int shared_bytes(void) {
    int bytes = setting("EMULATED_SHARED", EMULATED_SHARED_BYTES);
    return bytes < 0 || bytes > EMULATED_SHARED_BYTES ? EMULATED_SHARED_BYTES : bytes;
}

static int capability(void) {
    return setting("EMULATED_CAPABILITY", 90);
}

int emulated_has_bulk(void) {
    static int has_bulk = -1;
    if (has_bulk < 0) has_bulk = capability() >= 90;
    return has_bulk;
}

void emulated_need_bulk(const char *what) {
    if (!emulated_has_bulk()) emulated_die("%s in code of capability 8.0", what);
}

int emulated_device(void) {
    in_use[current] = 1;
    return current;
}

int emulated_is_in_use(int device) {
    return device >= 0 && device < EMULATED_MAX_GPUS && in_use[device];
}

/* ---- errors ---- */

cudaError_t emulated_error(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorNotSupported:
        return "operation not supported";
    default:
        return "another error";
    }
}

/* ---- devices ---- */

cudaError_t cudaDriverGetVersion(int *version) {
    *version = setting("EMULATED_DRIVER", VERSION);
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *out) {
    if (setting("EMULATED_DRIVER", VERSION) < VERSION)
        return emulated_error(cudaErrorInsufficientDriver);
    *out = count();
    return *out ? cudaSuccess : emulated_error(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= count()) return emulated_error(cudaErrorInvalidDevice);
    current = device;
    in_use[device] = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    if (device < 0 || device >= count()) return emulated_error(cudaErrorInvalidDevice);
    *out = (struct cudaDeviceProp){.major = capability() / 10, .minor = capability() % 10};
    snprintf(out->name, sizeof(out->name), "emulated GPU");
    snprintf(out->uuid.bytes, sizeof(out->uuid.bytes), "emulated %d", device);
    cudaDeviceGetAttribute(&out->multiProcessorCount, cudaDevAttrMultiProcessorCount, device);
    out->sharedMemPerBlockOptin = (size_t)shared_bytes();
    size_t left;
    return cudaMemGetInfo(&left, &out->totalGlobalMem);
}

/* No attributes: lanes store lines of 128 bytes one by one, as over the slowest link. */
cudaError_t cudaDeviceGetP2PAttribute(int *out, enum cudaDeviceP2PAttr attribute, int device,
                                      int peer) {
    (void)attribute, (void)device, (void)peer;
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= count()) return emulated_error(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *out = setting("EMULATED_SMS", 4);
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *out = capability() / 10;
        break;
    case cudaDevAttrPageableMemoryAccess:
        *out = 0;
        break;
    default:
        return emulated_error(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) {
    (void)device, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int bytes, int device) {
    snprintf(out, (size_t)bytes, "0000:%02X:00.0", 16 + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *bus) {
    unsigned slot = 0;
    if (sscanf(bus, "0000:%x:00.0", &slot) != 1) return emulated_error(cudaErrorInvalidValue);
    *device = (int)slot - 16;
    return *device < count() ? cudaSuccess : emulated_error(cudaErrorInvalidDevice);
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
    (void)kernel;
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value <= shared_bytes())
        return cudaSuccess;
    return emulated_error(cudaErrorInvalidValue);
}
