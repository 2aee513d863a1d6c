/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_MODELS_H
#define BENCH_MODELS_H

/**
 * The file of models for --models: a line for each model with its name, hidden size, experts per
 * token and experts, separated by blanks. # begins a comment; empty lines are skipped.
 */

#include <stdbool.h>
#include <stdint.h>

#include "tools/bench/options.h"
#include "tools/common/world.h"

typedef struct Model {
    char name[64];
    int64_t hidden, top_k, experts;
    int64_t line; /**< its number in the file */
} Model;

typedef struct ModelList {
    char path[4096]; /**< rank 0's */
    Model *models;
    int64_t count;
} ModelList;

/** Complete the options of a run with --models: its sweep, and the rules for each mode. False, with
 * a message, if they are invalid. */
bool models_complete(Options *options);

/** The modes that --models runs: `out` has room for two. Returns their number. */
int models_list_modes(const Options *options, int64_t *out);

/** The options of one model and mode. False, with a message that names the model's line in `path`,
 *  if they are invalid. */
bool models_options(const Options *options, const char *path, const Model *model, int64_t mode,
                    Options *out);

/**
 * Collective: rank 0 reads `path` and every rank gets the models. With `path` NULL it is the file
 * that make install puts beside the program, ../share/libep/models.txt, or the source tree's. False
 * on every rank, with a message that names file and line, if the file is missing or invalid.
 */
bool models_load(World *world, const char *path, ModelList *out);
void models_free(ModelList *list);

#endif
