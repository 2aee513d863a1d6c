/* SPDX-License-Identifier: Apache-2.0 */
/* Emulated GPUs for programs in other languages, which load them as a library: see
 * tests/bindings/nccl_ep/client.py. A rank is a thread. */
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string.h>

void *emulated_communicator(int size, int rank, const char *name);
void *emulated_allocate(size_t bytes);
int emulated_free(void *memory);
int emulated_synchronize(void);
int emulated_destroy(void *communicator);

/* Join the communicator of this name, on the emulated GPU of the rank's number. */
void *emulated_communicator(int size, int rank, const char *name) {
    ncclUniqueId id = {{0}};
    ncclComm_t comm = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    strncpy(id.internal, name, sizeof(id.internal) - 1);
    if (cudaSetDevice(rank) != cudaSuccess) return NULL;
    return ncclCommInitRankConfig(&comm, size, id, rank, &config) == ncclSuccess ? comm : NULL;
}

void *emulated_allocate(size_t bytes) {
    void *memory = NULL;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}

int emulated_free(void *memory) {
    return (int)cudaFree(memory);
}

int emulated_synchronize(void) {
    return (int)cudaDeviceSynchronize();
}

int emulated_destroy(void *communicator) {
    return (int)ncclCommDestroy(communicator);
}
