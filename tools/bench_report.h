/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

#include "bench_machine.h"
#include "bench_options.h"
#include "bench_result.h"

/** What the run was, for the head of the report. */
typedef struct Report {
    const Options *options;
    const World *world;
    Machine machine;
    EpGroupMemory memory; /**< backend and reason */
    char device[256];     /**< the GPU of rank 0, or "" */
} Report;

/** The text report on stdout, in the manner of nccl-tests: '#' lines and one table. */
void report_header(const Report *report);
void report_size(const SizeResult *result);
void report_footer(const Report *report, int64_t wrong);

/** Write the results as JSON; the last size's are also at the top level. */
bool json_write(const Report *report, const SizeResult *results, int count);

#endif
