/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_CUDA_H
#define BENCH_CUDA_H

/** For the files that call CUDA: compiled where EP_WITH_CUDA is set, and empty elsewhere. */

#include <cuda_runtime_api.h>

#include "bench_device.h"
#include "bench_kernels.h"

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

/** Places in the words that all ranks reach, of those that are not the barrier's flags. */
enum { WORD_LATE = 96, WORD_PING = 128, NUM_WORDS = 256 };
_Static_assert((int)WORD_LATE >= KERNEL_MAX_PEERS, "the barrier has a word for each rank");

/** A rank's words; NULL where there are none. */
uint32_t *device_words(const Case *c, int rank);

/** Line up the streams of all ranks: the work queued next begins everywhere at the same time. */
bool device_align(Case *c);

/** Keep the stream busy, so that all of an iteration is queued before any of it begins. */
bool device_hold(Case *c);

/** Calls 0 .. count - 1, each captured `length` times over in a graph of its own. */
struct Chains {
    Case *c;
    int count;
    cudaGraphExec_t *graph; /**< [count]; NULL: nothing was queued */
};

/** Collective. NULL with a sentence, everywhere, where they cannot be captured. */
Chains *chains_open(Case *c, TimedCall call, void *context, int count, int64_t length);
bool chains_run(const Chains *chains, int which);
void chains_close(Chains *chains);

/** Collective: device_time_calls of one call among options->chain of them in a graph. */
bool device_time_chains(Case *c, TimedCall call, void *context, int count, Quantiles *out);

#endif
