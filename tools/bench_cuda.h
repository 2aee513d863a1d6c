/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_CUDA_H
#define BENCH_CUDA_H

/** For the files that call CUDA: compiled where EP_WITH_CUDA is set, and empty elsewhere. */

#include <cuda_runtime_api.h>

#include "bench_device.h"

/** True for cudaSuccess; else a sentence that names the call. */
bool cuda_ok(cudaError_t status, const char *call);

/** Wait for the case's stream. */
bool device_finish(Case *c);

/** One piece of device memory of every rank, which all ranks' kernels can store to. */
struct Peers {
    World *world;
    void *own;
    void **at; /**< [R] each rank's piece as mapped here */
};

/** Collective; the memory is zeroed. NULL with a sentence, everywhere, where it cannot be had. */
Peers *peers_open(World *world, size_t bytes);
void peers_close(Peers *peers);

/** Line up the streams of all ranks: the work queued next begins everywhere at the same time. */
bool device_align(Case *c);

/** Keep the stream busy, so that all of an iteration is queued before any of it begins. */
bool device_hold(Case *c);

#endif
