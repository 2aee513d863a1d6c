/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_INFO_PLAN_H
#define TOOLS_INFO_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "tools/common/world.h"

/** A plan computes what a group would take, of more ranks than groups may have. */
#define PLAN_MAX_RANKS 4096

/** The options of ep_info about a plan; NULL or 0 where not given. */
typedef struct PlanOptions {
    const char *routing; /**< uniform, zipf[:s] or a trace file of ep_bench */
    const char *network; /**< GB/s of a rank, nvlink or sockets */
    int64_t ranks, nodes, tokens, top_k, experts, row_bytes, capacity, node_rows, sets;
} PlanOptions;

/** Print time, bytes, memory and odds of overflow. False, with a message. */
bool print_plan(World *world, const PlanOptions *o);

#endif
