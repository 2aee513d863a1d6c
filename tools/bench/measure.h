/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H

/** The results of a run, the functions that measure them, and those that report them. */

#include <stdbool.h>
#include <stdint.h>

#include "tools/bench/baseline.h"
#include "tools/bench/case.h"
#include "tools/bench/check.h"
#include "tools/bench/collectives.h"
#include "tools/bench/counters.h"
#include "tools/bench/models.h"
#include "tools/bench/pairs.h"
#include "tools/common/gpu.h"
#include "tools/common/report.h"
#include "tools/common/time.h"

/* ---- results ------------------------------------------------------------------------------- */

typedef struct PhaseResult {
    const char *name;
    bool absent;    /**< this mode has no such phase */
    Quantiles time; /**< of one call; with graphs, of one of options->chain calls in a graph */
    int64_t remote_bytes, local_bytes, useful_bytes; /**< per rank, mean over the ranks */
    int64_t zero_bytes;     /**< of padding, written as rows and scales; mean */
    int64_t memory_bytes;   /**< in the memory of a rank's GPU, mean; 0: not counted */
    double wire_us, mem_us; /**< two lower bounds, see Floor; negative: not measured */
    double issue_us;        /**< host's time to issue the call; negative: not measured */
    double plain_us;  /**< with graphs: median of a call outside graphs; negative: not measured */
    double launch_us; /**< with graphs: host's time to launch the phase's graph; likewise */
    int64_t wrong;    /**< on all ranks; negative: not checked */
} PhaseResult;

/** The larger of the phase's lower bounds; negative: none was measured. */
double phase_floor_us(const PhaseResult *phase);
/** Whether that is the wire's. */
bool phase_floor_is_wire(const PhaseResult *phase);

typedef struct SplitPhaseResult {
    Quantiles time;
    double issue_us; /**< negative: not measured */
} SplitPhaseResult;

/** What is measured besides the calls, as rows of the same table. */
enum {
    BASELINE_RESULTS = NUM_PHASES,
    COLLECTIVE_RESULTS = BASELINE_RESULTS + NUM_BASELINE_PHASES,
    PAIR_RESULTS = COLLECTIVE_RESULTS + NUM_COLLECTIVES,
    MAX_RESULTS = PAIR_RESULTS + NUM_PAIR_SIDES
};

typedef struct SizeResult {
    int64_t tokens, tokens_min;      /**< maximum and minimum over the ranks */
    int64_t slots_max, slots_min;    /**< live slots received, maximum and minimum */
    int64_t rows_max;                /**< rows received, padding included, maximum */
    int64_t dropped;                 /**< slots lost to the capacity, all ranks */
    int64_t library_bytes;           /**< ep_group_query, maximum over the ranks */
    int64_t promised_bytes;          /**< ep_group_memory */
    int64_t travelled_bytes;         /**< remote rows sent in dispatch, maximum over the ranks */
    PhaseResult phases[MAX_RESULTS]; /**< what was not measured is absent */
    Quantiles step;                  /**< all phases back to back; median 0: not measured */
    double step_issue_us;            /**< host's time to issue the step */
    bool has_split;
    SplitPhaseResult split[NUM_SPLIT_PHASES];
    double new_handle_us; /**< host's time of a step's beginning with a handle of its own */
    double destroy_us;    /**< host's time to destroy that handle */
    double empty_node_us; /**< latency mode: an empty kernel in a graph; negative: not measured */
    double flag_us;    /**< latency mode: a word from one GPU to another; negative: not measured */
    double network_us; /**< BaselineResult.network; 0: not measured */
    int64_t network_bytes;
    CountersResult counters; /**< with --stats */
    Placed placed;           /**< with --placement */
    char no_floor[256];      /**< why a floor was not measured, or "" */
    int64_t wrong;
    char first_wrong[CHECK_MESSAGE_BYTES];
} SizeResult;

/** A comparison with a baseline: the medians of `count` results each, added up. */
typedef struct Versus {
    const char *key;  /**< in the JSON */
    const char *what; /**< is compared */
    int ours, theirs, count;
    int first, end; /**< the results that belong to it */
} Versus;

enum { NUM_VERSUS = 3 };
extern const Versus versus[NUM_VERSUS];

/** The baseline's time, and how many times libep's it is; 0: it was not measured. */
double versus_us(const Versus *v, const SizeResult *r);
double versus_speedup(const Versus *v, const SizeResult *r);

/* ---- measuring (measure.c, memory.c, floor.c) ------------------------------------ */

/** Collective: create the case of one size, check it, time it, check it again. */
bool measure_size(World *world, const Options *options, int64_t size, SizeResult *out);

/** Rows and entries of this rank: of its own tokens, and of the slots that it owns. */
typedef struct Counts {
    int64_t tokens, sent_tokens;   /**< own tokens, and those of them with a slot somewhere */
    int64_t entries, far_entries;  /**< own tokens' live entries; those with an expert elsewhere */
    int64_t near_pairs, far_pairs; /**< (own token, rank) pairs: with this rank, with others */
    int64_t rows_in, shared_in;    /**< (others' token, this rank) pairs; with several slots */
    int64_t slots, slot_entries;   /**< slots here, and the entries that name them (flat: more) */
    int64_t padding;               /**< rows of zeros */
} Counts;

Counts count_all(const Case *c);

/** Bytes that each phase reads from and writes to the memory of this rank's GPU; 0 for prepare. */
void memory_count(const Case *c, int64_t bytes[NUM_PHASES]);

/** Two lower bounds for the time of each phase; negative: not measured. */
typedef struct Floor {
    double wire_us[NUM_PHASES]; /**< the remote bytes, stored into the peers' memory */
    double mem_us[NUM_PHASES];  /**< the memory's bytes, copied within this rank's memory */
} Floor;

/**
 * Collective: mem_us on the host backend. All ranks at once copy
 * with memcpy the bytes that the phase must move: each its own slots, row by row, from one private
 * buffer to another; for prepare its own indices. Overwrites slots_out.
 */
bool floor_measure_host(Case *c, Floor *out);

#if EP_WITH_CUDA

/** Collective: on GPUs, the times of plain copies to the peers and within each GPU. */
bool floor_measure_device(Case *c, Floor *out);

/** Collective, in latency mode on GPUs: the time of a graph node that does nothing, and of a word
 *  from one GPU to another; negative: not measured. */
bool floor_measure_signals(Case *c, double *empty_node_us, double *flag_us);

#else
#define floor_measure_device gpu_missing
#define floor_measure_signals gpu_missing
#endif

/* ---- reporting (report.c, json.c) ----------------------------------------------------------- */

/** What the head of the report describes. */
typedef struct Report {
    const Options *options;
    const World *world;
    Machine machine;
    EpGroupMemory memory; /**< backend and reason */
    char device[256];     /**< the GPU of rank 0, or "" */
} Report;

/** The sizes of one shape in one mode: the whole run, or with --models a part of it. */
typedef struct Run {
    char model[64]; /**< "" without --models */
    Options options;
    Report report;
    SizeResult *results; /**< [count] */
    int count;
} Run;

typedef struct RunList {
    ModelList models; /**< of no count without --models */
    Run *runs;
    int count;
} RunList;

/** The text report on stdout, in the manner of nccl-tests: '#' lines and one table. */
void report_header(const RunList *list);
void report_size(const Run *run, const SizeResult *result);
/** With --models, also all of them side by side, in lines that begin with '#'. */
void report_footer(const RunList *list, int64_t wrong);

/** Write the results as JSON to `path`. Of a single run, the last size's are at the top level. */
bool json_write(const RunList *list, const char *path);

#endif
