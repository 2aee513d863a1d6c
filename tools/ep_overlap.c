/* SPDX-License-Identifier: Apache-2.0 */
/**
 * ep_overlap: a dispatch, two GEMMs of experts and a combine on GPUs, one after the other, and with
 * the GEMMs beside the operations: they wait for ready words of blocks of rows, and set done words.
 * Both ways alternate, with the same GEMM, and must give the same bits. See docs/overlap.md.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/gpu.h"
#include "tools/common/time.h"
#include "tools/common/tool.h"
#include "tools/overlap/gemm.h"

const char *const bench_program = "ep_overlap";

/* ---- options ------------------------------------------------------------------------------- */

enum { MOST_WAVES = 8, LEAST_PIECE = GEMM_ROWS / GEMM_PIECES };

enum { FIRST_GEMM, SECOND_GEMM, GEMMS };

/* Orders of tiles: apart, where nobody waits, and of either GEMM beside an operation. */
enum { APART, BESIDE_DISPATCH, BESIDE_COMBINE, ORDERS };

typedef struct OverlapOptions {
    RunOptions run;
    int64_t tokens, hidden, ffn, experts, top_k, mode;
    int64_t block_rows, num_sms, gemm_sms, waves, combine_at;
    int64_t timeout;
} OverlapOptions;

static const Choice modes[] = {
    {"throughput", EP_MODE_THROUGHPUT}, {"latency", EP_MODE_LATENCY}, {NULL, 0}};

#define AT(member) offsetof(OverlapOptions, member)
static const Option specs[] = {
    {0, "tokens", "N", OPTION_INT(tokens, 1, OPTION_MAX_COUNT), "tokens", 8192,
     "tokens per rank (default 8192)"},
    {0, "hidden", "N", OPTION_INT(hidden, 128, OPTION_MAX_COUNT), "hidden", 7168,
     "elements of a token, H: a multiple of 256 (default 7168)"},
    {0, "ffn", "N", OPTION_INT(ffn, 128, OPTION_MAX_COUNT), "ffn", 2048,
     "elements between an expert's two matrices, F: a multiple of 256 (default 2048)"},
    {0, "experts", "N", OPTION_INT(experts, 1, 1 << 20), "experts", 256,
     "experts of all ranks together, E (default 256)"},
    {0, "top-k", "N", OPTION_INT(top_k, 1, EP_MAX_TOP_K), "top_k", 8,
     "experts per token, K (default 8)"},
    {0, "mode", "throughput|latency", OPTION_CHOICE(mode, modes), "mode", EP_MODE_THROUGHPUT,
     "mode of the handles (default throughput)"},
    {0, "block-rows", "N", OPTION_INT(block_rows, 0, GEMM_ROWS), "block_rows", 0,
     "rows of a block: 32, 64 or 128 (default 0: all of them)"},
    {0, "num-sms", "N", OPTION_INT(num_sms, 0, 1024), "num_sms", 0,
     "multiprocessors of dispatch and combine beside the GEMMs (default 0: 16, 24 and 32; in "
     "latency mode 32, 64 and all)"},
    {0, "gemm-sms", "N", OPTION_INT(gemm_sms, 0, 1024), "gemm_sms", 0,
     "those of the GEMMs beside them (default 0: the rest, or all where the operations have all, "
     "too)"},
    {0, "waves", "N", OPTION_INT(waves, 0, MOST_WAVES), "waves", 0,
     "parts of an expert's tiles beside an operation, each twice the one before; see "
     "docs/overlap.md (default 0: 2 and 3; in latency mode 1)"},
    {0, "combine-at", "PERCENT", OPTION_INT(combine_at, 0, 100), "combine_at", 0,
     "the combine begins once this much of the second GEMM has begun (default 0: 75 and 85; in "
     "latency mode 100)"},
    {0, "timeout", "SECONDS", OPTION_INT(timeout, 1, 1000), NULL, 20,
     "deadline of every wait (default 20)"},
    OPTION_TIMING,
    {'c', "check", "0|1", OPTION_SWITCH(run.check), "check", 1,
     "compare the sums of both ways, bit by bit, and check samples of the GEMMs (default 1)"},
    OPTION_JSON,
    {0, "seed", "N", OPTION_INT(run.seed, 0, INT32_MAX), "seed", 1,
     "seed of all contents (default 1)"},
    OPTION_THREADS,
    OPTION_HELP,
};

static const OptionTable table = {"usage: mpirun -n RANKS ep_overlap [options]\n"
                                  "       ep_overlap --threads RANKS [options]\n\n"
                                  "Times dispatch, two GEMMs of experts and combine, one after the "
                                  "other and overlapped by words\n"
                                  "of blocks of rows. Ranks need a GPU each.\n\n",
                                  specs, sizeof(specs) / sizeof(specs[0])};

static bool complete(void *options) {
    const OverlapOptions *o = options;
    if (o->hidden % GEMM_COLUMNS || o->ffn % GEMM_COLUMNS)
        return bench_refuse("--hidden, --ffn: expected multiples of %d, got %lld and %lld",
                            GEMM_COLUMNS, (long long)o->hidden, (long long)o->ffn);
    if (o->block_rows && (GEMM_ROWS % o->block_rows || o->block_rows < LEAST_PIECE))
        return bench_refuse("--block-rows: expected %d, 64 or %d, got %lld", LEAST_PIECE, GEMM_ROWS,
                            (long long)o->block_rows);
    if (o->top_k > o->experts)
        return bench_refuse("--top-k: expected at most the %lld experts, got %lld",
                            (long long)o->experts, (long long)o->top_k);
    return option_check_threads(&o->run);
}

/* ---- a rank -------------------------------------------------------------------------------- */

enum { RESULTS = 64 };

/* What a step notes, apart: when each phase begins, and the end. */
enum { DISPATCH_PHASE, FIRST_PHASE, SECOND_PHASE, COMBINE_PHASE, PHASES };
/* Overlapped: since its dispatch begins, when dispatch and first GEMM end, the combine begins, the
 * second GEMM and the combine end. */
enum { BEGIN, DISPATCH_END, FIRST_END, COMBINE_BEGIN, SECOND_END, ALL_END, NOTES };

typedef struct Rank {
    const OverlapOptions *o;
    World *world;
    EpGroup *group;
    int sms, num_local;
    int64_t rows; /* of the receive buffers */
    void *blocks[32];
    int num_blocks;
    int32_t *topk_idx, *offsets, *source_counts, *late;
    int32_t *words, *taken, *ready, *done; /* words: all of the others */
    int64_t num_words;
    GemmTile *tiles[ORDERS];
    int num_tiles[ORDERS];
    float *topk_weights, *slot_weights;
    void *tokens, *recv, *middle, *expert_out, *w1, *w2, *out[2];
    unsigned long long *wrong, *times;
    cudaStream_t stream, side, helper;
    cudaEvent_t begin, end, fork, dispatched, helped, join;
    cudaEvent_t passed[NOTES];
    bool notes; /* whether a step records when its phases pass */
} Rank;

/* What is measured: both ways, with blocks of some size and some multiprocessors. */
typedef struct Setting {
    int block_rows, sms, gemm_sms, waves, combine_at;
    EpHandle *plain, *overlapped;
    Quantiles time[2]; /* one after the other, overlapped */
    double word_us;    /* from a block's last row to its word */
    int64_t wrong;
} Setting;

static void *device_memory(Rank *r, int64_t bytes) {
    void *memory = NULL;
    if (!cuda_ok(cudaMalloc(&memory, bytes ? (size_t)bytes : 1), "cudaMalloc")) return NULL;
    r->blocks[r->num_blocks++] = memory;
    return cuda_ok(cudaMemset(memory, 0, bytes ? (size_t)bytes : 1), "cudaMemset") ? memory : NULL;
}

static bool allocate(Rank *r) {
    const OverlapOptions *o = r->o;
    r->num_words = GEMMS + 2 * r->rows / LEAST_PIECE;
    const int64_t h = o->hidden, f = o->ffn, t = o->tokens, slots = r->rows, l = r->num_local;
    const int64_t tiles = slots / GEMM_ROWS * (int64_t)sizeof(GemmTile);
    void **all[] = {(void **)&r->topk_idx,
                    (void **)&r->topk_weights,
                    (void **)&r->offsets,
                    (void **)&r->source_counts,
                    (void **)&r->words,
                    (void **)&r->late,
                    (void **)&r->slot_weights,
                    &r->tokens,
                    &r->recv,
                    &r->middle,
                    &r->expert_out,
                    &r->w1,
                    &r->w2,
                    &r->out[0],
                    &r->out[1],
                    (void **)&r->wrong,
                    (void **)&r->times,
                    (void **)&r->tiles[APART],
                    (void **)&r->tiles[BESIDE_DISPATCH],
                    (void **)&r->tiles[BESIDE_COMBINE]};
    const int64_t bytes[] = {t * o->top_k * 4,
                             t * o->top_k * 4,
                             (l + 1) * 4,
                             l * r->world->size * 4,
                             r->num_words * 4,
                             4,
                             slots * 4,
                             t * h * 2,
                             slots * h * 2,
                             slots * f * 2,
                             slots * h * 2,
                             l * h * f * 2,
                             l * h * f * 2,
                             t * h * 2,
                             t * h * 2,
                             8,
                             16,
                             tiles,
                             tiles,
                             tiles};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        if (!(*all[i] = device_memory(r, bytes[i]))) return false;
    r->taken = r->words, r->ready = r->words + GEMMS, r->done = r->ready + slots / LEAST_PIECE;
    return cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

static bool fill(Rank *r) {
    const OverlapOptions *o = r->o;
    const uint64_t seed = (uint64_t)o->run.seed * 4096 + (uint64_t)r->world->rank * 8;
    const int64_t weights = r->num_local * o->hidden * o->ffn;
    return cuda_ok(overlap_fill(r->tokens, o->tokens * o->hidden, seed, r->stream), "fill") &&
           cuda_ok(overlap_fill(r->w1, weights, seed + 1, r->stream), "fill") &&
           cuda_ok(overlap_fill(r->w2, weights, seed + 2, r->stream), "fill") &&
           cuda_ok(overlap_route(r->topk_idx, r->topk_weights, o->tokens, (int)o->top_k,
                                 (int)o->experts, seed + 3, r->stream),
                   "route") &&
           cuda_ok(cudaStreamSynchronize(r->stream), "cudaStreamSynchronize");
}

static bool open_events(Rank *r) {
    cudaEvent_t *const all[] = {&r->fork, &r->dispatched, &r->helped, &r->join};
    bool ok = true;
    for (int i = 0; ok && i < 4; i++)
        ok = cuda_ok(cudaEventCreateWithFlags(all[i], cudaEventDisableTiming), "event");
    for (int i = 0; ok && i < NOTES; i++)
        ok = cuda_ok(cudaEventCreate(&r->passed[i]), "event");
    return ok;
}

static bool open_streams(Rank *r) {
    return cuda_ok(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking), "stream") &&
           cuda_ok(cudaStreamCreateWithFlags(&r->side, cudaStreamNonBlocking), "stream") &&
           cuda_ok(cudaStreamCreateWithFlags(&r->helper, cudaStreamNonBlocking), "stream") &&
           cuda_ok(cudaEventCreate(&r->begin), "event") &&
           cuda_ok(cudaEventCreate(&r->end), "event") && open_events(r) &&
           gpu_multiprocessors(&r->sms) &&
           (gpu_capability() == 90 ||
            bench_fail("the GEMM: expected a GPU of compute capability 9.0, got %d.%d",
                       gpu_capability() / 10, gpu_capability() % 10)) &&
           cuda_ok(overlap_open(), "overlap_open");
}

static bool open_group(Rank *r) {
    const OverlapOptions *o = r->o;
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    config.num_experts = (int32_t)o->experts;
    config.max_tokens = (int32_t)o->tokens;
    config.max_top_k = (int32_t)o->top_k;
    config.max_row_bytes = o->hidden * 2;
    config.alignment = GEMM_ROWS;
    config.backend = EP_BACKEND_CUDA;
    config.mode = (int32_t)o->mode;
    config.timeout_seconds = (double)o->timeout;
    bool ok = bench_ok(ep_group_create(&r->world->boot, &config, &r->group), "ep_group_create") &&
              bench_ok(ep_group_query(r->group, &info), "ep_group_query");
    if (!world_all(r->world, ok)) return false;
    r->num_local = info.num_local_experts;
    /* A quarter more than each rank gets on average. */
    r->rows = (o->tokens * o->top_k * 5 / 4 / GEMM_ROWS + 1 + r->num_local) * GEMM_ROWS;
    return true;
}

static void close_rank(Rank *r) {
    ep_group_destroy(r->group);
    for (int i = 0; i < r->num_blocks; i++)
        cudaFree(r->blocks[i]);
}

/* ---- a step -------------------------------------------------------------------------------- */

static EpTensor tensor(void *data, EpType type, int64_t rows, int64_t columns) {
    return columns ? ep_tensor_2d(data, type, rows, columns) : ep_tensor_1d(data, type, rows);
}

static bool prepare(Rank *r, EpHandle *handle) {
    const OverlapOptions *o = r->o;
    EpTensor idx = tensor(r->topk_idx, EP_TYPE_INT32, o->tokens, o->top_k);
    EpTensor offsets = tensor(r->offsets, EP_TYPE_INT32, r->num_local + 1, 0);
    EpTensor sources = tensor(r->source_counts, EP_TYPE_INT32, r->num_local, r->world->size);
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    out.expert_offsets = &offsets, out.source_counts = &sources;
    return bench_ok(ep_prepare(handle, NULL, &idx, NULL, r->stream, &out), "ep_prepare");
}

static bool dispatch(Rank *r, EpHandle *handle, int block_rows) {
    const OverlapOptions *o = r->o;
    EpTensor tokens = tensor(r->tokens, EP_TYPE_BF16, o->tokens, o->hidden);
    EpTensor weights = tensor(r->topk_weights, EP_TYPE_FP32, o->tokens, o->top_k);
    EpTensor recv = tensor(r->recv, EP_TYPE_BF16, r->rows, o->hidden);
    EpTensor slots = tensor(r->slot_weights, EP_TYPE_FP32, r->rows, 0);
    EpTensor ready = tensor(r->ready, EP_TYPE_INT32, r->rows / LEAST_PIECE, 0);
    EpExtras extras = EP_EXTRAS_INIT;
    if (block_rows) extras.ready = &ready, extras.block_rows = block_rows;
    return bench_ok(ep_dispatch_with(handle, NULL, NULL, &tokens, &weights, NULL, r->stream, &recv,
                                     &slots, NULL, NULL, &extras),
                    "ep_dispatch_with");
}

static bool combine(Rank *r, EpHandle *handle, int block_rows, void *to) {
    const OverlapOptions *o = r->o;
    EpTensor rows = tensor(r->expert_out, EP_TYPE_BF16, r->rows, o->hidden);
    EpTensor slots = tensor(r->slot_weights, EP_TYPE_FP32, r->rows, 0);
    EpTensor out = tensor(to, EP_TYPE_BF16, o->tokens, o->hidden);
    EpTensor done = tensor(r->done, EP_TYPE_INT32, r->rows / LEAST_PIECE, 0);
    EpExtras extras = EP_EXTRAS_INIT;
    if (block_rows) {
        extras.done = &done, extras.block_rows = block_rows;
        extras.expected = (int32_t)(o->hidden / GEMM_COLUMNS);
    }
    return bench_ok(ep_combine_with(handle, NULL, &rows, &slots, NULL, r->stream, &out, &extras),
                    "ep_combine_with");
}

/* A launch of a GEMM. `signals`: it waits for words, or sets them. In latency mode the dispatch
 * makes the plan, so offsets are there once a word is. */
static GemmArgs gemm_args(const Rank *r, int which, const Setting *s, bool signals) {
    int order = !signals ? APART : which == FIRST_GEMM ? BESIDE_DISPATCH : BESIDE_COMBINE;
    GemmArgs a = {.in = r->recv,
                  .weights = r->w1,
                  .out = r->middle,
                  .rows = r->rows,
                  .tiles = r->tiles[order],
                  .num_tiles = r->num_tiles[order],
                  .taken = r->taken + which,
                  .stay = INT32_MAX,
                  .experts = r->num_local,
                  .n = (int32_t)r->o->ffn,
                  .k = (int32_t)r->o->hidden,
                  .squares = 1,
                  .block_rows = s->block_rows,
                  .ready = signals ? r->ready : NULL,
                  .deadline_ns = (uint64_t)r->o->timeout * 1000000000u,
                  .late = r->late};
    if (which == FIRST_GEMM) return a;
    a.in = r->middle, a.weights = r->w2, a.out = r->expert_out, a.squares = 0;
    a.n = (int32_t)r->o->hidden, a.k = (int32_t)r->o->ffn;
    a.ready = NULL, a.done = signals ? r->done : NULL;
    if (!signals) return a;
    a.stay = s->gemm_sms;
    a.leave_at = (int32_t)((int64_t)s->combine_at * a.num_tiles * (a.n / GEMM_COLUMNS) / 100);
    return a;
}

static bool multiply(Rank *r, int which, const Setting *s, bool signals, int blocks,
                     cudaStream_t stream) {
    const GemmArgs a = gemm_args(r, which, s, signals);
    return cuda_ok(overlap_gemm(&a, blocks, stream), "GEMM");
}

static bool clear(Rank *r, int64_t words) {
    return cuda_ok(cudaMemsetAsync(r->words, 0, (size_t)words * sizeof(*r->words), r->stream),
                   "cudaMemsetAsync");
}

static bool note_on(const Rank *r, int phase, cudaStream_t stream) {
    return !r->notes || cuda_ok(cudaEventRecord(r->passed[phase], stream), "cudaEventRecord");
}

static bool note(const Rank *r, int phase) {
    return note_on(r, phase, r->stream);
}

static bool run_plain(Rank *r, const Setting *s) {
    return clear(r, GEMMS) && prepare(r, s->plain) && note(r, DISPATCH_PHASE) &&
           dispatch(r, s->plain, 0) && note(r, FIRST_PHASE) &&
           multiply(r, FIRST_GEMM, s, false, r->sms, r->stream) && note(r, SECOND_PHASE) &&
           multiply(r, SECOND_GEMM, s, false, r->sms, r->stream) && note(r, COMBINE_PHASE) &&
           combine(r, s->plain, 0, r->out[0]) && note(r, PHASES);
}

static bool follow(cudaStream_t before, cudaStream_t after, cudaEvent_t event) {
    return cuda_ok(cudaEventRecord(event, before), "cudaEventRecord") &&
           cuda_ok(cudaStreamWaitEvent(after, event, 0), "cudaStreamWaitEvent");
}

static bool hold(Rank *r, const int32_t *word, int least, cudaStream_t stream) {
    return cuda_ok(
        overlap_hold(word, least, (uint64_t)r->o->timeout * 1000000000u, r->late, stream), "hold");
}

/* The first GEMM beside the dispatch. Once that is done, blocks on its multiprocessors help. Where
 * it has all of them, blocks of the GEMM take its places as its blocks end: they come once a word
 * shows that the dispatch is under way. */
static bool run_first(Rank *r, const Setting *s) {
    bool all = s->sms == r->sms, crowded = !all && s->gemm_sms + s->sms > r->sms;
    bool ok = follow(r->stream, r->side, r->fork);
    ok = ok && (!crowded || multiply(r, FIRST_GEMM, s, true, s->gemm_sms, r->side)) &&
         dispatch(r, s->overlapped, s->block_rows);
    ok = ok && (!all || hold(r, r->ready, 1, r->side)) &&
         (crowded || multiply(r, FIRST_GEMM, s, true, s->gemm_sms, r->side));
    ok = ok && note(r, DISPATCH_END) &&
         (all || (follow(r->stream, r->helper, r->dispatched) &&
                  multiply(r, FIRST_GEMM, s, true, s->sms, r->helper) &&
                  follow(r->helper, r->side, r->helped)));
    return ok && note_on(r, FIRST_END, r->side);
}

/* The second GEMM. When enough of it has begun, all its blocks are resident, and those with numbers
 * from gemm_sms on leave for the combine. */
static bool run_second(Rank *r, const Setting *s) {
    const GemmArgs second = gemm_args(r, SECOND_GEMM, s, true);
    return multiply(r, SECOND_GEMM, s, true, r->sms, r->side) && note_on(r, SECOND_END, r->side) &&
           hold(r, second.taken, second.leave_at, r->stream) && note(r, COMBINE_BEGIN) &&
           combine(r, s->overlapped, s->block_rows, r->out[1]) &&
           follow(r->side, r->stream, r->join) && note(r, ALL_END);
}

/* The words are 0 before the operation and before the GEMMs. */
static bool run_overlapped(Rank *r, const Setting *s) {
    return clear(r, r->num_words) && prepare(r, s->overlapped) && note(r, BEGIN) &&
           run_first(r, s) && run_second(r, s);
}

/* ---- measuring ----------------------------------------------------------------------------- */

typedef struct Timed {
    Rank *r;
    Setting *s;
} Timed;

static bool finish(Rank *r) {
    int32_t late = 0;
    bool ok = cuda_ok(cudaStreamSynchronize(r->stream), "cudaStreamSynchronize") &&
              bench_ok(ep_group_status(r->group, NULL), "ep_group_status") &&
              cuda_ok(cudaMemcpy(&late, r->late, sizeof(late), cudaMemcpyDeviceToHost), "copy");
    return ok && (!late || bench_fail("the GEMM: a ready word did not come within %lld s",
                                      (long long)r->o->timeout));
}

enum { AHEAD_NS = 300000 };

/* Let the host enqueue a step while the stream is busy, and the ranks begin it together. Prepare is
 * where they meet; in latency mode it is the dispatch. */
static bool meet(Rank *r, const Setting *s) {
    return cuda_ok(overlap_spin(AHEAD_NS, r->stream), "spin") && prepare(r, s->plain) &&
           (r->o->mode != EP_MODE_LATENCY || dispatch(r, s->plain, 0));
}

static bool timed_call(void *context, int which) {
    Timed *t = context;
    Rank *r = t->r;
    return meet(r, t->s) && cuda_ok(cudaEventRecord(r->begin, r->stream), "cudaEventRecord") &&
           (which ? run_overlapped(r, t->s) : run_plain(r, t->s)) &&
           cuda_ok(cudaEventRecord(r->end, r->stream), "cudaEventRecord") && finish(r);
}

static double took_us(void *context) {
    float ms = 0;
    Rank *r = ((Timed *)context)->r;
    return cuda_ok(cudaEventElapsedTime(&ms, r->begin, r->end), "elapsed") ? (double)ms * 1e3 : 0;
}

enum { NOTED_STEPS = 10 };

/* Run noted steps. us[i]: from note from[i] to note i + 1, of the median rank. */
static bool time_notes(Rank *r, const Setting *s, bool (*step)(Rank *, const Setting *),
                       const int *from, int count, double *us) {
    double samples[NOTES][NOTED_STEPS];
    float ms = 0;
    bool ok = r->notes = true;
    for (int i = 0; i < NOTED_STEPS; i++) {
        if (!world_all(r->world, ok)) return false;
        ok = meet(r, s) && step(r, s) && finish(r);
        for (int n = 0; ok && n < count; n++) {
            ok =
                cuda_ok(cudaEventElapsedTime(&ms, r->passed[from[n]], r->passed[n + 1]), "elapsed");
            samples[n][i] = (double)ms * 1e3;
        }
    }
    r->notes = false;
    for (int n = 0; n < count; n++) {
        Quantiles q;
        if (!time_median_rank(r->world, ok, samples[n], NOTED_STEPS, &q)) return false;
        us[n] = q.median_us;
    }
    return true;
}

static bool report_phases(Rank *r, const Setting *s) {
    static const int before[] = {0, 1, 2, 3}, begin[] = {0, 0, 0, 0, 0};
    const double products =
        (double)r->num_tiles[APART] * GEMM_ROWS * (double)r->o->hidden * (double)r->o->ffn * 2e-6;
    double apart[PHASES], at[NOTES - 1];
    if (!time_notes(r, s, run_plain, before, PHASES, apart) ||
        !time_notes(r, s, run_overlapped, begin, NOTES - 1, at))
        return false;
    if (r->world->rank != 0) return true;
    printf("# apart: dispatch %.1f us, GEMMs %.1f and %.1f (%.0f and %.0f TFLOP/s), combine %.1f\n",
           apart[DISPATCH_PHASE], apart[FIRST_PHASE], apart[SECOND_PHASE],
           products / apart[FIRST_PHASE], products / apart[SECOND_PHASE], apart[COMBINE_PHASE]);
    printf("# overlapped: dispatch until %.1f us, first GEMM until %.1f, combine %.1f to %.1f, "
           "second GEMM until %.1f\n",
           at[DISPATCH_END - 1], at[FIRST_END - 1], at[COMBINE_BEGIN - 1], at[ALL_END - 1],
           at[SECOND_END - 1]);
    return true;
}

enum { SAMPLES = 10000 };

/* The last call was an overlapped one. */
static bool compare(Rank *r, Setting *s) {
    unsigned long long wrong = 0;
    const int64_t words = r->o->tokens * r->o->hidden / 2;
    const GemmArgs first = gemm_args(r, FIRST_GEMM, s, false);
    const GemmArgs second = gemm_args(r, SECOND_GEMM, s, false);
    bool ok =
        cuda_ok(cudaMemsetAsync(r->wrong, 0, sizeof(wrong), r->stream), "memset") &&
        cuda_ok(overlap_check(&first, SAMPLES, r->wrong, r->stream), "check") &&
        cuda_ok(overlap_check(&second, SAMPLES, r->wrong, r->stream), "check") &&
        cuda_ok(overlap_compare(r->out[0], r->out[1], words, r->wrong, r->stream), "compare") &&
        finish(r) &&
        cuda_ok(cudaMemcpy(&wrong, r->wrong, sizeof(wrong), cudaMemcpyDeviceToHost), "copy");
    s->wrong = (int64_t)wrong;
    return world_all(r->world, ok) && world_sum(r->world, &s->wrong, 1);
}

enum { POISON = 0x3a /* a small number, for rows that nobody writes */ };

/* Watch the first block of a dispatch: how long after its last row its word comes. */
static bool watch_block(Rank *r, const Setting *s, int rows) {
    WatchArgs a = {.rows = r->recv,
                   .row_words = (int32_t)r->o->hidden / 2,
                   .num_rows = rows,
                   .poison = POISON * 0x1010101u,
                   .word = r->ready,
                   .deadline_ns = (uint64_t)r->o->timeout * 1000000000u,
                   .times = r->times};
    size_t bytes = (size_t)s->block_rows * (size_t)r->o->hidden * 2;
    return clear(r, r->num_words) &&
           cuda_ok(cudaMemsetAsync(r->times, 0, 2 * sizeof(*r->times), r->stream), "memset") &&
           cuda_ok(cudaMemsetAsync(r->recv, POISON, bytes, r->stream), "memset") &&
           prepare(r, s->overlapped) && follow(r->stream, r->side, r->fork) &&
           cuda_ok(overlap_watch(&a, r->side), "watch") &&
           dispatch(r, s->overlapped, s->block_rows) && follow(r->side, r->stream, r->join) &&
           finish(r);
}

static bool measure_word(Rank *r, Setting *s) {
    double samples[100];
    int64_t count = r->o->run.iterations < 100 ? r->o->run.iterations : 100;
    int32_t word = 0;
    bool ok = cuda_ok(cudaMemcpy(&word, r->ready, sizeof(word), cudaMemcpyDeviceToHost), "copy");
    Quantiles q;
    for (int64_t i = 0; i < count; i++) {
        if (!world_all(r->world, ok)) return false;
        unsigned long long times[2] = {0, 0};
        ok = word < 2 ||
             (watch_block(r, s, word - 1) &&
              cuda_ok(cudaMemcpy(times, r->times, sizeof(times), cudaMemcpyDeviceToHost), "copy"));
        samples[i] = ((double)times[1] - (double)times[0]) * 1e-3;
    }
    if (!time_median_rank(r->world, ok, samples, count, &q)) return false;
    s->word_us = q.median_us;
    return true;
}

static bool open_handle(Rank *r, int num_sms, EpHandle **out) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    config.max_recv_rows = r->rows;
    config.padding = EP_PADDING_KEEP; /* which no tile needs */
    if (num_sms) config.num_sms = num_sms;
    return bench_ok(ep_handle_create(r->group, &config, out), "ep_handle_create");
}

static bool put_in_order(Rank *r, const Setting *s, const int32_t *offsets, const int32_t *counts,
                         GemmTile *tiles) {
    static const GemmOrder kind[ORDERS] = {ORDER_READY, ORDER_READY, ORDER_DONE};
    bool ok = true;
    for (int i = 0; ok && i < ORDERS; i++) {
        r->num_tiles[i] = overlap_order(offsets, counts, r->num_local, r->world->size,
                                        s->block_rows, i == APART ? 1 : s->waves, kind[i], tiles);
        ok = cuda_ok(cudaMemcpy(r->tiles[i], tiles, (size_t)r->num_tiles[i] * sizeof(*tiles),
                                cudaMemcpyHostToDevice),
                     "cudaMemcpy");
    }
    return ok;
}

/* The routing is the same in all steps, so tiles are put in order once. */
static bool order_tiles(Rank *r, const Setting *s) {
    const size_t experts = (size_t)r->num_local, counts = experts * (size_t)r->world->size;
    int32_t *numbers = bench_alloc(experts + 1 + counts, sizeof(*numbers), "numbers of a plan");
    GemmTile *tiles = bench_alloc((size_t)(r->rows / GEMM_ROWS), sizeof(*tiles), "tiles");
    bool ok = numbers && tiles && prepare(r, s->plain) && dispatch(r, s->plain, 0) && finish(r) &&
              cuda_ok(cudaMemcpy(numbers, r->offsets, (experts + 1) * sizeof(*numbers),
                                 cudaMemcpyDeviceToHost),
                      "cudaMemcpy") &&
              cuda_ok(cudaMemcpy(numbers + experts + 1, r->source_counts, counts * sizeof(*numbers),
                                 cudaMemcpyDeviceToHost),
                      "cudaMemcpy") &&
              put_in_order(r, s, numbers, numbers + experts + 1, tiles);
    free(numbers), free(tiles);
    return ok;
}

static bool measure(Rank *r, Setting *s, bool is_first) {
    const RunOptions *run = &r->o->run;
    Timed timed = {r, s};
    bool ok = open_handle(r, 0, &s->plain) && open_handle(r, s->sms, &s->overlapped);
    ok = world_all(r->world, ok) && world_all(r->world, order_tiles(r, s)) &&
         time_calls_by(r->world, run->warmup, run->iterations, timed_call, took_us, &timed, 2,
                       s->time) &&
         (!run->check || compare(r, s)) && measure_word(r, s) && (!is_first || report_phases(r, s));
    ep_handle_destroy(s->plain);
    ep_handle_destroy(s->overlapped);
    return ok;
}

/* ---- reports ------------------------------------------------------------------------------- */

static void report_header(const Rank *r, const Machine *machine) {
    const OverlapOptions *o = r->o;
    char gpu[128];
    gpu_name(gpu, sizeof(gpu));
    printf("# ep_overlap: libep " VERSION_FORMAT ": dispatch, two GEMMs, combine\n",
           VERSION_NUMBERS);
    report_machine(machine);
    printf("# ranks:   %d (%s), %s\n", r->world->size, r->world->threads ? "threads" : "MPI", gpu);
    printf("# config:  %lld tokens, hidden %lld, ffn %lld, top-%lld of %lld experts, bf16, %s\n",
           (long long)o->tokens, (long long)o->hidden, (long long)o->ffn, (long long)o->top_k,
           (long long)o->experts, option_choice_name(modes, o->mode));
    printf("# timing:  %lld iterations after %lld, slowest rank of each, CUDA events\n",
           (long long)o->run.iterations, (long long)o->run.warmup);
    printf("# ratio: overlapped over apart. word_us: from a block's last row to its ready word\n");
    printf("#%10s %8s %9s %5s %3s %11s %11s %11s %11s %7s %8s %7s\n", "block_rows", "num_sms",
           "gemm_sms", "waves", "at", "apart_us", "p99_us", "overlap_us", "p99_us", "ratio",
           "word_us", "#wrong");
}

static void report_setting(const Rank *r, const Setting *s) {
    printf(" %10d %8d %9d %5d %3d", s->block_rows, s->sms, s->gemm_sms, s->waves, s->combine_at);
    for (int i = 0; i < 2; i++)
        printf(" %11.1f %11.1f", s->time[i].median_us, s->time[i].p99_us);
    printf(" %7.3f %8.2f", s->time[1].median_us / s->time[0].median_us, s->word_us);
    report_wrong_cell(r->o->run.check ? s->wrong : -1);
    fflush(stdout);
}

static void put_setting(Json *j, const Setting *s) {
    json_begin(j, NULL, '{');
    json_put_int(j, "block_rows", s->block_rows);
    json_put_int(j, "num_sms", s->sms);
    json_put_int(j, "gemm_sms", s->gemm_sms);
    json_put_int(j, "waves", s->waves);
    json_put_int(j, "combine_at", s->combine_at);
    json_put_real(j, "apart_us", s->time[0].median_us);
    json_put_real(j, "apart_p99_us", s->time[0].p99_us);
    json_put_real(j, "overlapped_us", s->time[1].median_us);
    json_put_real(j, "overlapped_p99_us", s->time[1].p99_us);
    json_put_real(j, "word_us", s->word_us);
    json_put_count(j, "wrong", s->wrong);
    json_end(j, '}');
}

static bool write_json(const Rank *r, const Machine *machine, const Setting *settings, int count) {
    OutputFile file;
    if (!output_open(&file, r->o->run.json_path)) return false;
    Json j = json_open(file.stream, "ep_overlap 1");
    json_put_machine(&j, machine);
    json_put_ranks(&j, r->world->size, r->world->threads);
    json_begin(&j, "config", '{');
    option_put(&table, r->o, &j);
    json_end(&j, '}');
    json_begin(&j, "results", '[');
    for (int i = 0; i < count; i++)
        put_setting(&j, &settings[i]);
    json_end(&j, ']');
    json_close(&j);
    return output_commit(&file);
}

/* ---- all ----------------------------------------------------------------------------------- */

/* The values of one column: that of an option, or some. 0 ends a list. */
enum { VALUES = 4 };

static void list_values(int64_t given, const int some[VALUES], int out[VALUES]) {
    memcpy(out, some, VALUES * sizeof(*out));
    if (given) out[0] = (int)given, out[1] = 0;
}

static int list_settings(const Rank *r, Setting out[RESULTS]) {
    const OverlapOptions *o = r->o;
    const bool latency = o->mode == EP_MODE_LATENCY;
    int rows[VALUES], sms[VALUES], waves[VALUES], at[VALUES], count = 0;
    list_values(o->block_rows, (int[]){32, 64, 128, 0}, rows);
    list_values(o->num_sms, latency ? (int[]){32, 64, r->sms, 0} : (int[]){16, 24, 32, 0}, sms);
    list_values(o->waves, latency ? (int[]){1, 0, 0, 0} : (int[]){2, 3, 0, 0}, waves);
    list_values(o->combine_at, latency ? (int[]){100, 0, 0, 0} : (int[]){75, 85, 0, 0}, at);
    for (const int *b = rows; *b; b++)
        for (const int *m = sms; *m; m++)
            for (const int *w = waves; *w; w++)
                for (const int *c = at; *c && count < RESULTS; c++) {
                    Setting s = {.block_rows = *b, .sms = *m, .waves = *w, .combine_at = *c};
                    s.gemm_sms = *m == r->sms ? r->sms : r->sms - *m;
                    if (o->gemm_sms) s.gemm_sms = (int)o->gemm_sms;
                    if (s.gemm_sms > 0) out[count++] = s;
                }
    return count;
}

static bool run_settings(Rank *r, const Machine *machine) {
    Setting settings[RESULTS];
    int64_t wrong = 0;
    int count = list_settings(r, settings);
    if (r->world->rank == 0) report_header(r, machine);
    for (int i = 0; i < count; i++) {
        if (!measure(r, &settings[i], i == 0)) return false;
        if (r->world->rank == 0) report_setting(r, &settings[i]);
        wrong += settings[i].wrong;
    }
    if (r->world->rank == 0) report_wrong(r->o->run.check, wrong);
    bool written =
        r->world->rank != 0 || !r->o->run.json_path || write_json(r, machine, settings, count);
    if (!world_all(r->world, written)) return false;
    return !wrong || bench_fail("%lld words of sums differ", (long long)wrong);
}

static bool run(World *world, const void *options) {
    Rank r = {.o = options, .world = world};
    Machine machine;
    machine_describe(&machine);
    bool ok = gpu_select(world) && world_all(world, open_streams(&r)) && open_group(&r);
    ok = ok && world_all(world, allocate(&r) && fill(&r)) && run_settings(&r, &machine);
    if (!world->broken) close_rank(&r);
    return ok;
}

int main(int argc, char **argv) {
    static const Tool tool = {"ep_overlap", &table, complete, run};
    OverlapOptions options = {.tokens = 0};
    return tool_main(&tool, argc, argv, &options);
}
