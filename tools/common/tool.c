/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/tool.h"

#include "tools/common/report.h"
#include "tools/common/util.h"

/** The command line, parsed before the ranks exist; they report its error. */
typedef struct CommandLine {
    const Tool *tool;
    const void *options;
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

static int rank_main(World *world, void *argument) {
    const CommandLine *line = argument;
    const RunOptions *o = line->options;
    if (!line->ok) {
        bench_error_set(BENCH_EXIT_USAGE, line->message);
        return print_error(world);
    }
    if (o->help && world->rank == 0)
        option_print_help(line->tool->table, stdout);
    else if (o->version && world->rank == 0)
        printf("%s " VERSION_FORMAT "\n", line->tool->name, VERSION_NUMBERS);
    if (o->help || o->version) return BENCH_EXIT_OK;
    return line->tool->run(world, o) ? BENCH_EXIT_OK : print_error(world);
}

int tool_main(const Tool *tool, int argc, char **argv, void *options) {
    const RunOptions *o = options;
    CommandLine line = {.tool = tool, .options = options};
    line.ok = option_parse(tool->table, argc, argv, options) &&
              (o->help || o->version || tool->complete(options));
    snprintf(line.message, sizeof(line.message), "%s", bench_error_message());
    int threads = line.ok ? (int)o->threads : 0;
    /* Without mpirun, an error message needs no MPI. */
    if (!line.ok && !world_launched()) threads = 1;
    int result = world_run(threads, rank_main, &line);
    if (fflush(stdout) == 0 && !ferror(stdout)) return result;
    fprintf(stderr, "%s: not everything could be written to standard output\n", bench_program);
    return result ? result : BENCH_EXIT_WRONG;
}
