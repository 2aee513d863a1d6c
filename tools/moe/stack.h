/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_STACK_H
#define MOE_STACK_H

/** Layers one above the other, each with weights of its own, and memory for those of two. */

#include "tools/moe/measure.h"

typedef struct StackResult {
    int64_t layers;
    bool overlaps;              /**< weights travel while other layers compute */
    Quantiles step;             /**< as above; else like apart */
    Quantiles apart;            /**< each layer gathers and reduces by itself, on one stream */
    Quantiles weights;          /**< all that travels, alone */
    double compute_us, wire_us; /**< sums of the layers' floors: of what travels, and of the rest */
    int64_t promised_bytes, taken_bytes; /**< of what is gathered, gradients, workspaces */
    int64_t elements, wrong;             /**< compared; wrong: negative if not checked */
} StackResult;

/** Collective: create the layers, compare the step with that of layers apart, and time both. */
bool moe_stack_run(World *world, const MoeOptions *options, const MoeMesh *mesh, MoeReport *report);

/** How much of what travels does not add to the step's time: 1 if the step takes no longer than
 *  its computing alone. NAN where nothing travels beside a layer. */
double moe_stack_hidden(const StackResult *result);

/** The text report, and JSON as moe_json_write. */
void moe_report_stack(const StackResult *result);
bool moe_json_write_stack(const MoeReport *report, const StackResult *result, const char *path);

#endif
