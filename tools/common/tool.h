/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_TOOL_H
#define COMMON_TOOL_H

/** What the programs share from main on: the command line, the ranks, help, version and errors. */

#include "tools/common/option.h"
#include "tools/common/world.h"

typedef struct Tool {
    const char *name; /**< of what has the version */
    const OptionTable *table;
    /** Fill in what the command line leaves open, and check it. False, with a message. */
    bool (*complete)(void *options);
    /** On every rank. False, with a message, which the program prints. */
    bool (*run)(World *world, const void *options);
} Tool;

/** Parse into `options`, which begins with RunOptions, and run. Returns the exit status. */
int tool_main(const Tool *tool, int argc, char **argv, void *options);

#endif
