/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_DEVICE_H
#define BENCH_DEVICE_H

/**
 * The GPU of a rank. If the CUDA backend serves a case, its tensors are in device memory: copies of
 * the host's buffers, where inputs are made and outputs are checked. In builds without CUDA no case
 * has a device.
 */

#include "tools/bench/case.h"
#include "tools/common/gpu.h"
#include "tools/common/time.h"

typedef struct Graphs Graphs;
typedef struct Peers Peers;

struct Device {
    Buffers buffers;  /**< in device memory, in one allocation */
    char *memory;     /**< that allocation */
    Graphs *graphs;   /**< the captured phases and step, or NULL */
    Peers *flags;     /**< words that all ranks can access, see device_words; or NULL */
    uint32_t epoch;   /**< number of barriers passed */
    char reason[256]; /**< why there are no flags, and so no floor */
};

#if EP_WITH_CUDA

#include <cuda_runtime_api.h>

#include "tools/bench/kernels.h"

/** Collective: a stream, and what aligns it with the other ranks' streams. It is enough for
 *  device_time_calls. */
bool device_open(Case *c);

/**
 * Collective, where the CUDA backend serves the case, after the group and the host's buffers exist.
 * Besides, allocates device memory, copies the inputs there and points the tensors to it.
 */
bool device_create(Case *c);
/** Of a case that has a device. */
void device_destroy(Case *c);

/** Copy the host's inputs to the device. */
bool device_upload(Case *c);

/** Poison what a phase writes. */
bool device_poison(Case *c, PhaseId phase);

/** Wait for the stream and copy what a phase wrote to the host's buffers. */
bool device_fetch(Case *c, PhaseId phase);

/** Collective: capture the phases and the step, each options->chain times. From then on phase_run
 *  and phase_run_step replay these graphs. */
bool device_capture(Case *c);
bool device_replay(Case *c, PhaseId phase);
bool device_replay_step(Case *c);

/** Calls that device_time_calls takes at most. */
enum { TIMED_CALLS = 9 };

/**
 * Collective: time_calls with the GPU's clock. issue_us[i], if not NULL, is the median of the
 * host's time to issue call i.
 */
bool device_time_calls(Case *c, int64_t iterations, TimedCall call, void *context, int count,
                       Quantiles *out, double *issue_us);

/** Wait for the case's stream. */
bool device_finish(Case *c);

/** Collective: time each call by capturing options->chain repetitions of it in a graph. */
bool device_time_graphs(Case *c, TimedCall call, void *context, int count, Quantiles *out);

/** Collective: time_chain with the GPU's clock. */
bool device_time_chain(Case *c, const Chain *chain, double *times);

/** Collective: capture calls 0 .. count - 1, which have run before, each `length` times in a graph
 *  of its own. On failure NULL with a message, on every rank. */
Graphs *graphs_open(Case *c, TimedCall call, void *context, int count, int64_t length);
/** A TimedCall with Graphs as its context: replay a graph. */
bool graphs_replay(void *graphs, int which);
/** Release captured graphs. */
void graphs_close(Graphs *graphs);

/** One allocation of every rank, to which all ranks' kernels can store. */
struct Peers {
    World *world;
    void *own;
    void **at; /**< [R] each rank's allocation as mapped here */
};

/** Collective. The memory is zeroed. On failure NULL with a message, on every rank. */
Peers *peers_open(World *world, size_t bytes);
void peers_close(Peers *peers);

/** Indices into device_words. The words before WORD_LATE are the barrier's flags. */
enum { WORD_LATE = 96, WORD_PING = 128, WORD_PASSED = 160, NUM_WORDS = 256 };
_Static_assert((int)WORD_LATE >= KERNEL_MAX_PEERS, "the barrier has a word for each rank");

/** A rank's words, which all ranks can access. NULL if they could not be allocated. */
uint32_t *device_words(const Case *c, int rank);

#else

/* In builds without CUDA no case has a device, and nothing calls these. */
#define device_create gpu_missing
#define device_destroy gpu_missing
#define device_upload gpu_missing
#define device_poison gpu_missing
#define device_fetch gpu_missing
#define device_capture gpu_missing
#define device_replay gpu_missing
#define device_replay_step gpu_missing
#define device_time_calls gpu_missing
#define device_time_chain gpu_missing
#define device_time_graphs gpu_missing
#define graphs_replay NULL
#define graphs_close gpu_missing
static inline Graphs *graphs_open(Case *c, TimedCall call, void *context, int count,
                                  int64_t length) {
    (void)call, (void)context, (void)count, (void)length;
    gpu_missing(c);
    return NULL;
}

#endif

#endif
