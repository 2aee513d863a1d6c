/* SPDX-License-Identifier: Apache-2.0 */

/**
 * ep_moe: runs one MoE layer, forward and backward, on a mesh of ranks, times its phases, and
 * checks its output and all its gradients against a dense layer. The parts are in tools/moe; see
 * docs/benchmarking.md.
 */

#include <stdio.h>

#include "tools/common/tool.h"
#include "tools/common/util.h"
#include "tools/moe/measure.h"
#include "tools/moe/stack.h"

const char *const bench_program = "ep_moe";

/* Of the check, whose memory is by far the largest. */
static bool fits_memory(const MoeOptions *o, const MoeMesh *mesh, int ranks,
                        const Machine *machine) {
    const double bytes = (double)reference_bytes(o, mesh, ranks);
    if (!o->run.check || o->layers > 1 || machine->memory <= 0 ||
        bytes <= (double)machine->memory * 0.5)
        return true;
    return bench_refuse("--check: expected a dense layer within half of the %.1f GB of %s, got "
                        "%.1f GB; -c 0 leaves it out",
                        (double)machine->memory * 1e-9, machine->hostname, bytes * 1e-9);
}

static bool run_layer(MoeReport *report, Layer *layer) {
    const MoeOptions *o = report->options;
    MoeResult result;
    World *world = layer->world;
    if (world->rank == 0) moe_report_header(report);
    if (!moe_measure(layer, &result)) return false;
    if (world->rank == 0) moe_report_result(&result);
    bool written =
        world->rank != 0 || !o->run.json_path || moe_json_write(report, &result, o->run.json_path);
    if (!world_all(world, written)) return false;
    if (result.wrong) return bench_fail("%lld elements are wrong", (long long)result.wrong);
    return !result.comparison.first[0] || bench_fail("%s", result.comparison.first);
}

static bool run(World *world, const void *given) {
    MoeOptions options = *(const MoeOptions *)given;
    MoeMesh mesh;
    Layer layer;
    MoeReport report = {.options = &options, .world = world, .layer = &layer};
    options.fault = moe_fault_phase();
    machine_describe(&report.machine);
    bool ok = moe_options_complete(&options, world->size, report.machine.cores) &&
              moe_mesh_choose(&options, world->size, &mesh) &&
              fits_memory(&options, &mesh, world->size, &report.machine) &&
              (world->rank != 0 || !options.run.json_path || output_probe(options.run.json_path));
    if (!world_all(world, ok)) return false;
    if (options.layers > 1) return moe_stack_run(world, &options, &mesh, &report);
    ok = layer_create(world, &options, &mesh, NULL, NULL, &layer) && run_layer(&report, &layer);
    /* Destroying may wait for the rank that is lost. The process ends now. */
    if (!world->broken) layer_destroy(&layer);
    return ok;
}

int main(int argc, char **argv) {
    static const Tool tool = {"ep_moe", &moe_options_table, moe_options_check, run};
    MoeOptions options = {.mesh = NULL};
    return tool_main(&tool, argc, argv, &options);
}
