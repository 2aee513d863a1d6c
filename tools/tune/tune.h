/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_TUNE_H
#define TOOLS_TUNE_H

/**
 * The parts of ep_tune: tables of constants as text (table.c), and groups that run with them, whose
 * calls are timed (cells.c).
 */

#include "tools/common/gpu.h"
#include "tools/common/option.h"
#include "tools/common/util.h"
#include "tools/common/world.h"

typedef struct TuneOptions {
    RunOptions run;
    int64_t tokens, seconds, chain;
    const char *output;
} TuneOptions;

/* ---- tables -------------------------------------------------------------------------------- */

/** A table as LIBEP_TUNING reads it. */
typedef struct Table {
    char text[EP_TUNING_BYTES];
} Table;

/** Read or change a constant. False, with a message, if the table has none of this name. */
bool table_get(const Table *table, const char *name, double *value);
bool table_set(Table *table, const char *name, double value);

/** Write the table to a file, complete or not at all. */
bool table_write(const Table *table, const char *path);

/* ---- cells --------------------------------------------------------------------------------- */

typedef enum CellCall {
    CELL_DISPATCH,
    CELL_COMBINE,
    CELL_COMBINE_BACKWARD,
    NUM_CELL_CALLS
} CellCall;

/** A call that is timed: of a shape, with some of the multiprocessors. */
typedef struct Cell {
    CellCall call;
    int shape;
    int budget;   /**< index of TuneRank.budgets */
    bool staged;  /**< a dispatch whose rows pass through the staging buffer */
    bool latency; /**< in latency mode, of few tokens, with all multiprocessors */
} Cell;

enum { NUM_SHAPES = 4, MOST_BUDGETS = 6, MOST_CELLS = 96 };

/** Shapes of models: elements of a row, experts of a token. */
typedef struct Shape {
    int64_t hidden;
    int64_t top_k;
} Shape;
extern const Shape tune_shapes[NUM_SHAPES];

/** What a rank has besides groups: buffers that all of them use. */
typedef struct TuneRank {
    const TuneOptions *o;
    World *world;
    int sms;
    int budgets[MOST_BUDGETS]; /**< multiprocessors, ascending */
    int num_budgets;
    int64_t few_tokens; /**< of latency mode */
    void *blocks[16];   /**< device memory */
    int num_blocks;
    int32_t *topk_idx[NUM_SHAPES];
    float *slot_weights, *slot_grads;
    void *tokens, *out, *rows, *staged;
    cudaStream_t stream;
    cudaEvent_t begin, end;
} TuneRank;

/** Collective: the GPU, its buffers and the routing. tune_close frees what is there. */
bool tune_open(TuneRank *r);
void tune_close(TuneRank *r);

/** A group of a trial: of many tokens in throughput mode, or of few in latency mode. */
typedef struct TrialGroup {
    EpGroup *group; /**< NULL: no cell needs it */
    int64_t tokens;
    void *received; /**< memory that peers reach */
    EpHandle *handles[NUM_SHAPES][MOST_BUDGETS];
    int64_t recv_rows[NUM_SHAPES];
} TrialGroup;

/** Groups that run with a table, and their handles, which have been prepared. */
typedef struct Trial {
    TuneRank *r;
    TrialGroup of[2]; /**< of throughput mode, of latency mode */
} Trial;

/** Collective: create groups with the table, or with the settings as they are if it is NULL, and
 *  the handles that the cells need. *refused becomes whether libep refuses the table. */
bool trial_open(TuneRank *r, const Table *table, const Cell *cells, int count, bool *refused,
                Trial *out);
void trial_close(Trial *t);

/**
 * Collective: time each cell with both trials in turn, and compare. ratios[count]: the second's
 * time over the first's. us[count], if not NULL: the second's time. Equal on all ranks.
 */
bool trial_compare(Trial *first, Trial *second, const Cell *cells, int count, double *ratios,
                   double *us);

#endif
