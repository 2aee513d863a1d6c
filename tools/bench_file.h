/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_FILE_H
#define BENCH_FILE_H

/** Output files that appear whole or not at all. */

#include <stdbool.h>
#include <stdio.h>

typedef struct OutputFile {
    const char *path;
    char temporary[4096 + 32]; /**< "" where `path` is written directly */
    FILE *stream;
} OutputFile;

/** Open a temporary file beside `path`; `path` itself where it is a pipe or a device. */
bool output_open(OutputFile *file, const char *path);

/** Close it and give it its name. False, with a sentence, if anything failed to be written. */
bool output_commit(OutputFile *file);

/** Close it and leave nothing behind. */
void output_discard(OutputFile *file);

/** Whether `path` can be written, asked before hours of measuring. */
bool output_probe(const char *path);

#endif
