/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_MODELS_H
#define BENCH_MODELS_H

/**
 * The file of models for --models: a line for each model with its name, hidden size, experts per
 * token and experts, separated by blanks. # begins a comment; empty lines are skipped.
 */

#include <stdbool.h>
#include <stdint.h>

#include "tools/bench/world.h"

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

/**
 * Collective: rank 0 reads `path` and every rank gets the models. With `path` NULL it is the file
 * that make install puts beside the program, ../share/libep/models.txt, or the source tree's. False
 * on every rank, with a message that names file and line, if the file is missing or invalid.
 */
bool models_load(World *world, const char *path, ModelList *out);
void models_free(ModelList *list);

#endif
