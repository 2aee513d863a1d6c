/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_MEASURE_H
#define MOE_MEASURE_H

/** The results of a run, and what measures and reports them. */

#include "tools/common/report.h"
#include "tools/common/time.h"
#include "tools/moe/check.h"
#include "tools/moe/compare.h"
#include "tools/moe/layer.h"
#include "tools/moe/phases.h"

typedef struct PhaseResult {
    bool exists;
    Quantiles time;       /**< the slowest rank's */
    int64_t flops, bytes; /**< of the rank that has most */
    int64_t remote;       /**< bytes that it sends to others, for weights */
    double floor_us;      /**< negative: not measured */
} PhaseResult;

/** Times of an overlap's phases: beside each other, and one after the other on one stream. */
typedef struct OverlapResult {
    bool exists;
    Quantiles together, apart;
} OverlapResult;

typedef struct MoeResult {
    PhaseResult phases[NUM_MOE_PHASES];
    OverlapResult overlaps[NUM_MOE_OVERLAPS];
    Quantiles step;
    Quantiles calls;                /**< of the step without its graph; 0: there is no graph */
    double floor_us;                /**< of the step: the sum of the phases'; negative: none */
    double gemm_flops;              /**< per second and rank, of a plain GEMM; 0: not measured */
    int gemm_size;                  /**< of that GEMM's matrices */
    int64_t tokens_min, tokens_max; /**< per rank */
    int64_t slots_min, slots_max;   /**< received, without padding */
    int64_t library_bytes;          /**< of the EP group and its plan, the largest rank's */
    int64_t promised_bytes;         /**< likewise, before they were allocated */
    int64_t gemm_calls;             /**< that multiply, in a step of rank 0 */
    int64_t workspace_bytes;        /**< that the weights' calls take, the largest rank's */
    bool checked;
    CheckResult checks[NUM_CHECKS];
    int64_t wrong;
    char first_wrong[256];
    MoeComparison comparison;
} MoeResult;

/** What the head of the report describes. */
typedef struct MoeReport {
    const MoeOptions *options;
    const World *world;
    const Layer *layer;
    Machine machine;
} MoeReport;

/** Collective: check the layer, time it, check it again. */
bool moe_measure(Layer *layer, MoeResult *out);

/** Collective: work and floors of the phases, from plain work of the same size. */
bool moe_measure_floor(Layer *layer, MoeResult *out);

/** The elements found wrong in what a phase writes; negative: it is not checked. */
int64_t moe_phase_wrong(const MoeResult *result, MoePhase phase);

/** How much of what the weights' calls add to their phase's time its overlap saves: 1 if the phase
 *  takes no longer with them than alone. NAN if they add nothing. */
double moe_overlap_hidden(const MoeResult *result, MoeOverlapId id);

/** The text report on stdout, in the manner of ep_bench's. */
void moe_report_header(const MoeReport *report);
void moe_report_result(const MoeResult *result);

/** Write the results as JSON. False, with a message. */
bool moe_json_write(const MoeReport *report, const MoeResult *result, const char *path);

#endif
