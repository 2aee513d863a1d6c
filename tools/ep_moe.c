/* SPDX-License-Identifier: Apache-2.0 */

/**
 * ep_moe: runs one MoE layer, forward and backward, on a mesh of ranks, times its phases, and
 * checks its output and all its gradients against a dense layer. The parts are in tools/moe; see
 * docs/benchmarking.md.
 */

#include <stdio.h>

#include "tools/common/util.h"
#include "tools/common/world.h"
#include "tools/moe/measure.h"

const char *const bench_program = "ep_moe";

/** The command line, parsed before the ranks exist; they report its error. */
typedef struct CommandLine {
    MoeOptions options;
    bool ok;
    char message[BENCH_MESSAGE_BYTES];
} CommandLine;

/* Rank 0 prints the message, which all ranks share; if the ranks cannot communicate, each rank
 * prints its own. Returns the exit status. */
static int print_error(const World *world) {
    if (world->rank == 0 || world->broken)
        fprintf(stderr, "%s: %s\n", bench_program, bench_error_message());
    return bench_error_exit_status();
}

/* Of the check, whose memory is by far the largest. */
static bool fits_memory(const MoeOptions *o, const MoeMesh *mesh, int ranks,
                        const Machine *machine) {
    const double bytes = (double)reference_bytes(o, mesh, ranks);
    if (!o->check || machine->memory <= 0 || bytes <= (double)machine->memory * 0.5) return true;
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
    if (world->rank == 0) moe_report_result(report, &result);
    bool written =
        world->rank != 0 || !o->json_path || moe_json_write(report, &result, o->json_path);
    if (!world_all(world, written)) return false;
    return result.wrong == 0 || bench_fail("%lld elements are wrong", (long long)result.wrong);
}

static bool run(World *world, const MoeOptions *given) {
    MoeOptions options = *given;
    MoeMesh mesh;
    Layer layer;
    MoeReport report = {.options = &options, .world = world, .layer = &layer};
    machine_describe(&report.machine);
    bool ok = moe_options_complete(&options, world->size, report.machine.cores) &&
              moe_mesh_choose(&options, world->size, &mesh) &&
              fits_memory(&options, &mesh, world->size, &report.machine) &&
              (world->rank != 0 || !options.json_path || output_probe(options.json_path));
    if (!world_all(world, ok)) return false;
    ok = layer_create(world, &options, &mesh, &layer) && run_layer(&report, &layer);
    /* Destroying may wait for the rank that is lost. The process ends now. */
    if (!world->broken) layer_destroy(&layer);
    return ok;
}

static int rank_main(World *world, void *argument) {
    const CommandLine *line = argument;
    const int version = ep_version();
    if (!line->ok) {
        bench_error_set(BENCH_EXIT_USAGE, line->message);
        return print_error(world);
    }
    if (line->options.help && world->rank == 0)
        moe_options_print_help(stdout);
    else if (line->options.version && world->rank == 0)
        printf("ep_moe %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
    if (line->options.help || line->options.version) return BENCH_EXIT_OK;
    return run(world, &line->options) ? BENCH_EXIT_OK : print_error(world);
}

int main(int argc, char **argv) {
    CommandLine line;
    line.ok = moe_options_parse(&line.options, argc, argv);
    snprintf(line.message, sizeof(line.message), "%s", bench_error_message());
    int threads = line.ok ? (int)line.options.threads : 0;
    /* Without mpirun, an error message needs no MPI. */
    if (!line.ok && !world_launched()) threads = 1;
    int result = world_run(threads, rank_main, &line);
    if (fflush(stdout) == 0 && !ferror(stdout)) return result;
    fprintf(stderr, "%s: not everything could be written to standard output\n", bench_program);
    return result ? result : 1;
}
