/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_LINES_H
#define BENCH_LINES_H

/** The cases of --case and --nccl-ep, and their results: a line for each figure, and the same as
 *  JSON. */

#include "tools/bench/options.h"
#include "tools/common/time.h"
#include "tools/common/util.h"
#include "tools/common/world.h"

/** A figure: its name, its unit, its value as quantiles. */
typedef struct Line {
    char name[64];
    const char *unit;
    Quantiles value;
    double host_us; /**< of the host; negative: not measured, or all of the value */
    double ratio;   /**< to the value that the case compares with; 0: none */
} Line;

enum { MAX_LINES = 40 };

typedef struct Lines {
    World *world;
    const Options *options;
    Line lines[MAX_LINES];
    int count;
} Lines;

/** Collective: begin the report: `about` says what is measured. False, with a message, if the JSON
 *  cannot be written. */
bool lines_begin(Lines *lines, World *world, const Options *options, const char *about);

void lines_add(Lines *lines, const char *name, const char *unit, Quantiles value, double host_us,
               double ratio);

/** Collective: end the report, and write the JSON, if one is asked for. */
bool lines_end(Lines *lines);

/** Collective: the cases. False, with a message. */
bool calls_case(World *world, const Options *options);  /**< calls.c */
bool sums_case(World *world, const Options *options);   /**< sums.c */
bool decode_case(World *world, const Options *options); /**< decode.c */
#if EP_WITH_CUDA
bool weights_case(World *world, const Options *options); /**< weights.c */
bool nccl_ep_case(World *world, const Options *options); /**< nccl_ep.c */
#else
static inline bool no_case(World *world, const Options *options) {
    (void)world, (void)options;
    return bench_refuse("--case weights, --nccl-ep: expected a build with CUDA, got one without");
}
#define weights_case no_case
#define nccl_ep_case no_case
#endif

#endif
