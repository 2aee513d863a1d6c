/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_DEVICE_H
#define BENCH_DEVICE_H

/**
 * Where the library runs on GPUs, its tensors are in device memory: a shadow of the host's buffers,
 * in which inputs are made and outputs are checked. In builds without CUDA no case has a device.
 */

#include "bench_baseline.h"
#include "bench_case.h"
#include "bench_time.h"

typedef struct Chains Chains;
typedef struct Peers Peers;

struct Device {
    Buffers buffers;  /**< in device memory, all in one piece */
    char *memory;     /**< that piece */
    Chains *graphs;   /**< the phases and the step as captured, or NULL */
    Peers *flags;     /**< words that all ranks reach, see bench_cuda.h; or NULL */
    uint32_t epoch;   /**< barriers passed */
    char reason[256]; /**< why there are no flags, and so no wire floor */
};

/** Whether this build has anything of CUDA. */
bool device_built(void);

/** Collective, before a group exists: take the GPU of this rank's place on its node, if any. */
bool device_select(World *world, const Options *options);

/** Name of the GPU taken, or "". */
void device_name(char *out, size_t bytes);

/** Collective: after the group and the host's buffers. Points the tensors to device memory, with
 *  the inputs in it. Nothing to do where the host backend serves the case. */
bool device_create(Case *c);
void device_destroy(Case *c);

/** As phase_poison and before a look at the host's buffers; fetch waits for the stream. */
bool device_poison(Case *c, PhaseId phase);
bool device_fetch(Case *c, PhaseId phase);

/** Collective: capture the phases and the step, each options->chain times over; from then on
 *  phase_run and phase_run_step replay that. */
bool device_capture(Case *c);
bool graph_run(Case *c, PhaseId phase);
bool graph_run_step(Case *c);

/**
 * Collective: time_calls with the GPU's clock. issue_us[i], if not NULL, is the median of the
 * host's time to issue call i.
 */
bool device_time_calls(Case *c, int64_t iterations, TimedCall call, void *context, int count,
                       Quantiles *out, double *issue_us);

/** Collective, in latency mode: what a node of a graph takes that does nothing, and a word on its
 *  way from one GPU to another; negative where not measured. */
bool signal_measure(Case *c, double *empty_node_us, double *flag_us);

/** Collective: what plain copies of the same bytes take; negative where not measured. */
bool wire_measure(Case *c, double floor_us[NUM_PHASES]);

/** Collective: baseline_measure on GPUs, see bench_baseline_nccl.c. */
bool nccl_measure(Case *c, Check *check, BaselineResult *out);

#endif
