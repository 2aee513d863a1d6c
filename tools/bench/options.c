/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/options.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "tools/bench/models.h"
#include "tools/bench/placement.h"
#include "tools/common/data.h"
#include "tools/common/layout.h"
#include "tools/common/util.h"

/* ---- parsers ------------------------------------------------------------------------------- */

static bool parse_shape(const Option *spec, const char *text, void *values) {
    Options *options = values;
    options->shape_given = spec->name;
    return option_parse_int(spec, text, options);
}

/* The file is optional. */
static bool parse_models(const Option *spec, const char *text, void *values) {
    Options *options = values;
    options->models = true;
    return !text || option_parse_text(spec, text, options);
}

static bool parse_tokens(const Option *spec, const char *text, void *values) {
    Options *options = values;
    options->tokens_given = true;
    return option_parse_int(spec, text, options);
}

static bool parse_both_tokens(const Option *spec, const char *text, void *values) {
    Options *options = values;
    if (!parse_tokens(spec, text, options)) return false;
    options->tokens_end = options->tokens_begin;
    return true;
}

static bool parse_share(const Option *spec, const char *text, void *values) {
    Options *options = values;
    double value;
    if (!option_read_real(text, 0, 1, &value))
        return bench_refuse("--%s: expected a share from 0 to 1, got \"%s\"", spec->name, text);
    *(double *)option_field(spec, options) = value;
    return true;
}

static bool parse_mode(const Option *spec, const char *text, void *values) {
    Options *options = values;
    options->mode_given = true;
    return option_parse_choice(spec, text, options);
}

static bool parse_nccl_ep(const Option *spec, const char *text, void *values) {
    Options *options = values;
    options->kind = CASE_NCCL_EP;
    return option_parse_text(spec, text, options);
}

static bool parse_mask(const Option *spec, const char *text, void *values) {
    Options *options = values;
    char *end;
    options->kind = CASE_DECODE;
    memset(options->mask, 0, sizeof(options->mask));
    for (const char *at = text;; at = end + 1) {
        long rank = *at >= '0' && *at <= '9' ? strtol(at, &end, 10) : -1;
        if (rank < 0 || rank >= EP_MAX_RANKS || (*end && *end != ','))
            return bench_refuse("--%s: expected ranks as \"1,3\", got \"%s\"", spec->name, text);
        options->mask[rank / 32] |= 1u << rank % 32;
        if (!*end) return true;
    }
}

static bool parse_kill(const Option *spec, const char *text, void *values) {
    Options *options = values;
    char digits[32];
    const char *colon = strchr(text, ':');
    double step, rank = -1;
    snprintf(digits, sizeof(digits), "%.*s", (int)(colon ? colon - text : 31), text);
    options->kind = CASE_DECODE;
    if (!option_read_real(digits, 1, 1e9, &step) || step != (int64_t)step ||
        (colon &&
         (!option_read_real(colon + 1, 0, EP_MAX_RANKS - 1, &rank) || rank != (int64_t)rank)))
        return bench_refuse("--%s: expected STEP or STEP:RANK, got \"%s\"", spec->name, text);
    options->kill_step = (int64_t)step, options->kill_rank = (int64_t)rank;
    return true;
}

static bool parse_join(const Option *spec, const char *text, void *values) {
    Options *options = values;
    options->kind = CASE_DECODE;
    return option_parse_int(spec, text, options);
}

static bool parse_placement(const Option *spec, const char *text, void *values) {
    Options *options = values;
    (void)spec;
    free(options->map);
    options->map = NULL;
    if (strncmp(text, "balance:", 8) != 0) return placement_read(text, options);
    double places;
    if (!option_read_real(text + 8, 1, EP_MAX_EXPERTS, &places) || places != (int64_t)places)
        return bench_refuse("--placement: expected balance:N with N places, got \"%s\"", text);
    options->physical = (int64_t)places;
    return true;
}

static bool parse_zipf(const char *text, Options *options) {
    options->routing = ROUTING_ZIPF;
    options->zipf_exponent = 1.0;
    if (text[4] == 0) return true;
    if (!option_read_real(text + 5, 0, 16, &options->zipf_exponent))
        return bench_refuse("--routing: expected zipf:s with s from 0 to 16, got \"%s\"", text);
    return true;
}

static bool parse_routing(const Option *spec, const char *text, void *values) {
    Options *options = values;
    options->routing_path = NULL;
    if (strcmp(text, "uniform") == 0) {
        options->routing = ROUTING_UNIFORM;
        return true;
    }
    if (strcmp(text, "one-hot") == 0) {
        options->routing = ROUTING_ONE_HOT;
        return true;
    }
    if (strcmp(text, "zipf") == 0 || strncmp(text, "zipf:", 5) == 0)
        return parse_zipf(text, options);
    if (strncmp(text, "file:", 5) == 0 && text[5]) {
        options->routing = ROUTING_FILE;
        options->routing_path = text + 5;
        return true;
    }
    return bench_refuse("--routing: expected %s, got \"%s\"", spec->argument, text);
}

/* ---- the table ----------------------------------------------------------------------------- */

static const Choice index_types[] = {{"int32", EP_TYPE_INT32}, {"int64", EP_TYPE_INT64}, {NULL, 0}};
static const Choice paddings[] = {{"zero", EP_PADDING_ZERO}, {"keep", EP_PADDING_KEEP}, {NULL, 0}};
static const Choice quants[] = {{"none", EP_QUANT_NONE},
                                {"fp8", EP_QUANT_FP8},
                                {"fp8-ue8m0", EP_QUANT_FP8_UE8M0},
                                {"mxfp8", EP_QUANT_MXFP8},
                                {"fp8-pow2", EP_QUANT_FP8_POW2},
                                {"nvfp4", EP_QUANT_NVFP4},
                                {NULL, 0}};
static const Choice sum_quants[] = {{"none", EP_QUANT_NONE}, {"fp8", EP_QUANT_FP8}, {NULL, 0}};
static const Choice sums[] = {{"rank", EP_SUMS_BY_RANK}, {"entry", EP_SUMS_BY_ENTRY}, {NULL, 0}};
static const Choice masks[] = {
    {"off", BENCH_MASKS_OFF}, {"on", BENCH_MASKS_ON}, {"late", BENCH_MASKS_LATE}, {NULL, 0}};
static const Choice choices[] = {{"near", EP_CHOICE_NEAR}, {"spread", EP_CHOICE_SPREAD}, {NULL, 0}};
static const Choice overflows[] = {
    {"error", EP_OVERFLOW_ERROR}, {"drop", EP_OVERFLOW_DROP}, {NULL, 0}};

static const Choice modes[] = {{"auto", EP_MODE_AUTO},
                               {"throughput", EP_MODE_THROUGHPUT},
                               {"latency", EP_MODE_LATENCY},
                               {NULL, 0}};

enum { NOT_GIVEN = -1 };
static const Choice cases[] = {{"step", CASE_STEP},     {"calls", CASE_CALLS},
                               {"sums", CASE_SUMS},     {"weights", CASE_WEIGHTS},
                               {"decode", CASE_DECODE}, {NULL, 0}};

#define AT(member) offsetof(Options, member)

static const Option specs[] = {
    {0, "case", "step|calls|sums|weights|decode", OPTION_CHOICE(kind, cases), NULL, CASE_STEP,
     "what is measured (default step: the calls of a step; calls: the host's time of calls of "
     "meshes "
     "and weights; sums: the error of sums that travel as fp8; weights: gathers and reductions "
     "against NCCL's; decode: decoding in a group with masks)"},
    {0, "nccl-ep", "LIBRARY", parse_nccl_ep, AT(nccl_ep), 0, 0, NULL, NULL, 0,
     "measure the calls of a library with NCCL EP's interface instead"},
    {'b', "begin", "N", parse_tokens, AT(tokens_begin), 0, OPTION_MAX_COUNT, NULL, NULL, NOT_GIVEN,
     "tokens per rank, first size of the sweep (default 512; with --mode latency 128)"},
    {'e', "end", "N", parse_tokens, AT(tokens_end), 0, OPTION_MAX_COUNT, NULL, NULL, NOT_GIVEN,
     "tokens per rank, last size of the sweep (default: as --begin)"},
    {'f', "factor", "N", OPTION_INT(tokens_factor, 1, OPTION_MAX_COUNT), NULL, 2,
     "each size is N times the one before (default 2; 0 is followed by 1)"},
    {0, "tokens", "N", parse_both_tokens, AT(tokens_begin), 0, OPTION_MAX_COUNT, NULL, NULL, 0,
     "one size: the same as -b N -e N"},
    {0, "uneven", NULL, OPTION_FLAG(uneven), "uneven", 0,
     "rank 0 brings all tokens, the others between half and all (default without -b, -e, "
     "--tokens, but not with --mode latency)"},
    OPTION_TIMING,
    {'c', "check", "0|1", OPTION_SWITCH(run.check), "check", 1,
     "check every byte, before and after the timing (default 1)"},
    {'G', "graphs", NULL, OPTION_FLAG(graphs), NULL, 0,
     "capture the calls in a graph (GPU backends)"},
    {0, "chain", "N", OPTION_INT(chain, 1, 1000), NULL, 0,
     "repetitions of a call in its graph, whose time is divided by them (default 1; with --mode "
     "latency 20)"},
    OPTION_JSON,
    {0, "hidden", "N", parse_shape, AT(hidden), 1, OPTION_MAX_COUNT, NULL, "hidden", 7168,
     "elements per row (default 7168); rows are multiples of 16 bytes"},
    {0, "top-k", "N", parse_shape, AT(top_k), 1, EP_MAX_TOP_K, NULL, "top_k", 8,
     "experts per token (default 8)"},
    {0, "experts", "N", parse_shape, AT(experts), 1, 1 << 20, NULL, "experts", 0,
     "experts of all ranks together (default 256; --case weights: 32, sums: 64)"},
    {0, "ffn", "N", OPTION_INT(ffn, 1, OPTION_MAX_COUNT), NULL, 4096,
     "last dimension of the weights of --case weights (default 4096)"},
    {0, "models", "[FILE]", parse_models, AT(models_path), 0, 0, NULL, NULL, 0,
     "the shapes of a file instead, in both modes, 128 to 8192 tokens, uniform routing (default: "
     "the installed models.txt)"},
    {0, "align", "N", OPTION_INT(alignment, 1, 1 << 20), "alignment", 0,
     "slabs are padded to multiples of this power of two (default 128; with --mode latency 1)"},
    {0, "padding", "zero|keep", OPTION_CHOICE(padding, paddings), "padding", EP_PADDING_ZERO,
     "what becomes of the rows that pad slabs (default zero)"},
    {0, "dtype", "bf16|fp16|fp32", OPTION_CHOICE(type, option_types), "dtype", EP_TYPE_BF16,
     "element type of the rows (default bf16)"},
    {0, "routing", "uniform|zipf[:s]|one-hot|file:PATH", parse_routing, AT(routing), 0, 0, NULL,
     NULL, 0, "how tokens choose experts (default zipf:1)"},
    {0, "save-routing", "PATH", OPTION_TEXT(save_path), NULL, 0,
     "write the routing as a trace file"},
    {0, "masked", "SHARE", parse_share, AT(masked), 0, 0, NULL, NULL, 0,
     "share of the entries that name no expert (default 0)"},
    {0, "capacity", "ROWS", OPTION_INT(capacity, 0, INT32_MAX), "capacity", 0,
     "static receive capacity (default 0: exact sizing; on GPUs what the routing needs)"},
    {0, "overflow", "error|drop", OPTION_CHOICE(overflow, overflows), "overflow", EP_OVERFLOW_ERROR,
     "what happens to rows past the capacity (default error)"},
    {0, "layout", OPTION_LAYOUTS, OPTION_CHOICE(layout, option_layouts), "layout", 0,
     "order of the slots in the receive buffer (default expert; with --mode latency batched)"},
    {0, "rows-per-expert", "N", OPTION_INT(rows_per_expert, 1, INT32_MAX), NULL, 0,
     "slab size of --layout batched (default: the largest slab of this routing)"},
    {0, "node-rows", "N", OPTION_INT(node_rows, 1, OPTION_MAX_COUNT), "node_rows", 0,
     "places of a rank's message to another node, where receive sizes are static (default: one for "
     "each token)"},
    {0, "weighted", "0|1", OPTION_SWITCH(weighted), "weighted", 1,
     "dispatch sends weights and combine uses them (default 1)"},
    {0, "scales", "BYTES", OPTION_INT(scale_bytes, 0, EP_MAX_ROW_BYTES), "scale_bytes", 0,
     "bytes of scales sent with each row (default 0)"},
    {0, "idx", "int32|int64", OPTION_CHOICE(index_type, index_types), "idx", EP_TYPE_INT32,
     "element type of the indices (default int32)"},
    {0, "backend", "auto|host|cuda", OPTION_CHOICE(backend, option_backends), NULL, EP_BACKEND_AUTO,
     "which backend moves the bytes (default auto)"},
    {0, "mode", "auto|throughput|latency", parse_mode, AT(mode), 0, 0, modes, "mode",
     EP_MODE_THROUGHPUT,
     "mode of the handle (default throughput); latency: no prepare, no backward"},
    {0, "split", NULL, OPTION_FLAG(split), "split", 0,
     "with --mode latency: dispatch and combine as send and wait calls"},
    {0, "quant", OPTION_QUANTS "|nvfp4", OPTION_CHOICE(quant, quants), "quant", EP_QUANT_NONE,
     "dispatch quantises (default none)"},
    {0, "sum-quant", "none|fp8", OPTION_CHOICE(sum_quant, sum_quants), "sum_quant", EP_QUANT_NONE,
     "how partial sums travel in combine and dispatch_backward (default none)"},
    {0, "sums", "rank|entry", OPTION_CHOICE(sums, sums), "sums", EP_SUMS_BY_RANK,
     "who adds a token's rows: each expert rank its own, or the token's rank all (default rank)"},
    {0, "masks", "off|on|late", OPTION_CHOICE(masks, masks), "masks", BENCH_MASKS_OFF,
     "whether ranks of the group may be masked; late: and late ones are cut (default off)"},
    {0, "placement", "balance:N|FILE", parse_placement, AT(physical), 0, 0, NULL, "placement", 0,
     "places that hold copies of experts: N, balanced by this routing's loads, or those of a file"},
    {0, "mask", "LIST", parse_mask, AT(mask), 0, 0, NULL, NULL, 0,
     "--case decode: ranks that are masked from the start, as 1,3"},
    {0, "kill-at", "STEP[:RANK]", parse_kill, AT(kill_step), 0, 0, NULL, NULL, 0,
     "--case decode: kill a rank in a step, from 1 (default: the last rank)"},
    {0, "join-at", "STEP", parse_join, AT(join_step), 1, OPTION_MAX_COUNT, NULL, NULL, 0,
     "--case decode: before this step another process takes the killed rank's place"},
    {0, "late-us", "N", OPTION_INT(late_us, 1, INT32_MAX), NULL, 100000,
     "--case decode, --masks late: microseconds after which a late rank is cut (default 100000)"},
    {0, "choice", "near|spread", OPTION_CHOICE(choice, choices), "choice", EP_CHOICE_NEAR,
     "which copy a token takes (default near)"},
    {0, "baseline", NULL, OPTION_FLAG(baseline), NULL, 0,
     "also measure the same work without libep, by MPI or NCCL"},
    {0, "pair", NULL, OPTION_FLAG(pair), NULL, 0,
     "also measure pairs of dispatch and combine in a row"},
    {0, "floor", "0|1", OPTION_SWITCH(run.floor), NULL, 1,
     "also measure plain copies of the same bytes (default 1)"},
    {0, "seed", "N", OPTION_INT(run.seed, 0, INT64_MAX), "seed", 1,
     "seed of routing and contents (default 1)"},
    {0, "num-sms", "N", OPTION_INT(num_sms, 1, 1024), NULL, 0,
     "multiprocessors that may be used (GPU backends)"},
    {0, "stats", NULL, OPTION_FLAG(stats), "stats", 0,
     "all calls count tokens, rows, bytes and waits on the device; print the totals"},
    {0, "zero-copy", NULL, OPTION_FLAG(zero_copy), "zero_copy", 0,
     "receive rows and expert outputs in peer-accessible memory"},
    OPTION_THREADS,
    OPTION_HELP,
};

const OptionTable options_table = {
    "usage: mpirun -n RANKS ep_bench [options]\n"
    "       ep_bench --threads RANKS [options]\n\n"
    "Times the calls of libep on the shape of a model and checks every byte.\n\n",
    specs, sizeof(specs) / sizeof(specs[0])};

const char *options_sums_name(const Options *options) {
    if (options->sums == EP_SUMS_BY_ENTRY) return "by entry";
    return options_name(options, quant_format(options->sum_quant)->bits ? "sum-quant" : "dtype");
}

void options_routing_name(const Options *options, char *out, size_t bytes) {
    if (options->routing == ROUTING_FILE)
        snprintf(out, bytes, "file:%s", options->routing_path);
    else if (options->routing == ROUTING_ZIPF)
        snprintf(out, bytes, "zipf:%g", options->zipf_exponent);
    else
        snprintf(out, bytes, "%s", options->routing == ROUTING_UNIFORM ? "uniform" : "one-hot");
}

/* ---- defaults and validation --------------------------------------------------------------- */

/* Fill in what the command line leaves open. A decoding step has few tokens, the same number on
 * every rank, in slabs of a fixed shape. A training step has many tokens, packed. */
static void fill_in(Options *o) {
    if (o->kind == CASE_DECODE && !o->mode_given) o->mode = EP_MODE_LATENCY;
    bool decodes = o->mode == EP_MODE_LATENCY;
    int64_t tokens = decodes ? 128 : o->kind == CASE_SUMS ? 256 : 512;
    EpLayout layout = decodes && !o->capacity ? EP_LAYOUT_BATCHED : EP_LAYOUT_EXPERT_MAJOR;
    bool steps = o->kind == CASE_STEP;
    if (!o->experts) o->experts = o->kind == CASE_WEIGHTS ? 32 : o->kind == CASE_SUMS ? 64 : 256;
    if (!o->routing) o->routing = steps ? ROUTING_ZIPF : ROUTING_UNIFORM, o->zipf_exponent = 1.0;
    if (steps && !o->tokens_given && o->routing != ROUTING_FILE && !decodes) o->uneven = true;
    if (o->tokens_begin < 0) o->tokens_begin = o->tokens_end >= 0 ? o->tokens_end : tokens;
    if (o->tokens_end < 0) o->tokens_end = o->tokens_begin;
    if (o->kill_step && o->kill_rank < 0) o->kill_rank = o->run.threads - 1;
    if (!o->alignment) o->alignment = decodes ? 1 : 128;
    if (!o->layout) o->layout = layout;
    if (!o->chain) o->chain = decodes ? 20 : 1;
}

bool options_check_sweep(const Options *o) {
    if (o->tokens_end < o->tokens_begin)
        return bench_refuse("--end: expected at least --begin (%lld), got %lld",
                            (long long)o->tokens_begin, (long long)o->tokens_end);
    if (o->tokens_factor < 2 && o->tokens_begin != o->tokens_end)
        return bench_refuse("--factor: expected at least 2 to get from %lld to %lld tokens, "
                            "got %lld",
                            (long long)o->tokens_begin, (long long)o->tokens_end,
                            (long long)o->tokens_factor);
    if (o->save_path && o->tokens_begin != o->tokens_end)
        return bench_refuse("--save-routing: expected one size (--tokens), got a sweep");
    if (o->routing == ROUTING_FILE && (o->tokens_given || o->uneven))
        return bench_refuse("--routing file: expected no -b, -e, --tokens or --uneven (the file "
                            "says how many tokens there are), got one");
    if (o->node_rows > o->tokens_begin && o->routing != ROUTING_FILE)
        return bench_refuse("--node-rows: expected at most the %lld tokens of a step, got %lld",
                            (long long)o->tokens_begin, (long long)o->node_rows);
    if (o->routing == ROUTING_FILE && o->masked > 0)
        return bench_refuse("--masked: expected 0 with --routing file, got %g", o->masked);
    return true;
}

static bool validate_shape(const Options *o) {
    if (!option_check_row("hidden", o->hidden, o->type) || !option_check_alignment(o->alignment))
        return false;
    if (o->scale_bytes % 4)
        return bench_refuse("--scales: expected a multiple of 4 bytes, got %lld",
                            (long long)o->scale_bytes);
    if (o->top_k > o->experts && (o->routing == ROUTING_UNIFORM || o->routing == ROUTING_ZIPF))
        return bench_refuse("--top-k: expected at most the %lld experts (a token names different "
                            "ones), got %lld",
                            (long long)o->experts, (long long)o->top_k);
    return true;
}

static bool is_masked(const Options *o, int64_t rank) {
    return o->mask[rank / 32] >> rank % 32 & 1;
}

/* Ranks are processes, and the step has a shape of its own. */
static bool validate_decode(const Options *o) {
    int64_t ranks = o->run.threads, living = 0;
    if (ranks < 2)
        return bench_refuse("--case decode: expected --threads N with N >= 2, the processes that "
                            "it starts, got %s",
                            ranks ? "1" : "none");
    if ((o->graphs && o->backend != EP_BACKEND_CUDA) || o->mode != EP_MODE_LATENCY || o->split ||
        o->layout != EP_LAYOUT_BATCHED || quant_format(o->quant)->bits || o->physical ||
        quant_format(o->sum_quant)->bits || o->sums != EP_SUMS_BY_RANK || o->zero_copy || o->stats)
        return bench_refuse("--case decode: expected plain rows in --mode latency and --layout "
                            "batched, and --graphs with --backend cuda alone, got another");
    if (o->routing != ROUTING_UNIFORM || o->masked > 0)
        return bench_refuse("--case decode: expected --routing uniform without --masked, got "
                            "another routing");
    if (o->masks != BENCH_MASKS_OFF)
        return bench_refuse("--case decode: expected no --masks, since its group has them and cuts "
                            "late ranks, got --masks %s",
                            options_name(o, "masks"));
    for (int64_t r = 0; r < EP_MAX_RANKS; r++) {
        if (r >= ranks && is_masked(o, r))
            return bench_refuse("--mask: expected some of %lld ranks, got rank %lld",
                                (long long)ranks, (long long)r);
        living += r < ranks && !is_masked(o, r);
    }
    if (living < (o->kill_step ? 2 : 1))
        return bench_refuse("--mask: expected a rank that goes on, got none");
    if (o->join_step && !o->kill_step)
        return bench_refuse("--join-at: expected --kill-at, got none");
    if (!o->kill_step) return true;
    if (o->kill_step < 2 || o->kill_step + MASK_AFTER > o->run.iterations)
        return bench_refuse("--kill-at: expected a step from 2 to %lld, %d before the last, got "
                            "%lld",
                            (long long)(o->run.iterations - MASK_AFTER), MASK_AFTER,
                            (long long)o->kill_step);
    if (o->kill_rank >= ranks || is_masked(o, o->kill_rank))
        return bench_refuse("--kill-at: expected one of %lld ranks that is not masked, got rank "
                            "%lld",
                            (long long)ranks, (long long)o->kill_rank);
    if (!o->join_step ||
        (o->join_step > o->kill_step + MASK_AFTER && o->join_step <= o->run.iterations))
        return true;
    return bench_refuse("--join-at: expected a step from %lld to %lld, got %lld",
                        (long long)(o->kill_step + MASK_AFTER + 1), (long long)o->run.iterations,
                        (long long)o->join_step);
}

/* What the other cases have no use for. */
static bool validate_case(const Options *o) {
    if (o->kind == CASE_STEP) return true;
    if (o->kind == CASE_DECODE && !validate_decode(o)) return false;
    if (o->tokens_begin != o->tokens_end || o->routing == ROUTING_FILE || o->uneven ||
        o->baseline || o->pair)
        return bench_refuse("--case and --nccl-ep: expected one size (--tokens) of even tokens, no "
                            "--routing file, --baseline and --pair, got one of them");
    if (o->kind == CASE_SUMS &&
        (o->type != EP_TYPE_BF16 || !o->weighted || o->mode != EP_MODE_THROUGHPUT ||
         o->layout != EP_LAYOUT_EXPERT_MAJOR || quant_format(o->quant)->bits || o->capacity))
        return bench_refuse("--case sums: expected weighted rows of bf16, --mode throughput, "
                            "--layout expert and no --quant or --capacity, got another");
    return true;
}

static bool validate_together(const Options *o) {
    const Layout *layout = tool_layout((EpLayout)o->layout);
    if (o->rows_per_expert && !layout->is_sized)
        return bench_refuse("--rows-per-expert: expected --layout batched, got --layout %s",
                            options_name(o, "layout"));
    if (o->capacity && layout->is_sized)
        return bench_refuse("--capacity: expected --layout expert or flat, got --layout batched "
                            "(use --rows-per-expert)");
    if (o->capacity && layout->is_fixed)
        return bench_refuse("--capacity: expected --layout expert or flat, got --layout %s, whose "
                            "size is fixed",
                            layout->name);
    if (o->baseline && quant_format(o->quant)->bits)
        return bench_refuse("--baseline: expected --quant none, got %s", options_name(o, "quant"));
    if (o->chain > 1 && o->mode != EP_MODE_LATENCY && !o->graphs)
        return bench_refuse("--chain: expected --graphs or --mode latency, got neither");
    if (o->split && o->mode != EP_MODE_LATENCY)
        return bench_refuse("--split: expected --mode latency, got --mode %s",
                            options_name(o, "mode"));
    if (quant_format(o->quant)->bits && o->scale_bytes)
        return bench_refuse("--scales: expected 0 with --quant %s, which makes its own, got %lld",
                            options_name(o, "quant"), (long long)o->scale_bytes);
    int64_t unit = o->quant == EP_QUANT_NVFP4 ? 32 : 16;
    if (quant_format(o->quant)->bits && o->hidden % unit)
        return bench_refuse("--hidden: expected a multiple of %lld with --quant %s, got %lld",
                            (long long)unit, options_name(o, "quant"), (long long)o->hidden);
    if (quant_format(o->sum_quant)->bits && o->hidden % 16)
        return bench_refuse("--hidden: expected a multiple of 16 with --sum-quant %s, got %lld",
                            options_name(o, "sum-quant"), (long long)o->hidden);
    if (o->physical && (o->kind != CASE_STEP || o->baseline || o->pair))
        return bench_refuse("--placement: expected --case step without --baseline and --pair, got "
                            "one of them");
    if (o->map && o->map_experts != o->experts && o->routing != ROUTING_FILE)
        return bench_refuse("--placement: expected a file for %lld experts, got one for %lld",
                            (long long)o->experts, (long long)o->map_experts);
    if (o->sums == EP_SUMS_BY_ENTRY && layout->has_rows)
        return bench_refuse("--sums entry: expected --layout expert or batched, got --layout %s",
                            layout->name);
    if (o->sums == EP_SUMS_BY_ENTRY && quant_format(o->sum_quant)->bits)
        return bench_refuse("--sums entry: expected --sum-quant none, got %s",
                            options_name(o, "sum-quant"));
    return option_check_threads(&o->run);
}

bool options_slots_baseline(const Options *o) {
    return o->baseline && !o->run.threads && o->mode == EP_MODE_THROUGHPUT &&
           o->layout == EP_LAYOUT_EXPERT_MAJOR && o->padding == EP_PADDING_ZERO && !o->capacity;
}

/* Ranks of this case are processes, which one thread starts. */
static void take_processes(Options *o) {
    if (o->kind != CASE_DECODE) return;
    o->processes = o->run.threads, o->run.threads = 1;
}

bool options_complete(Options *options) {
    fill_in(options);
    bool ok = options_check_sweep(options) && validate_shape(options) && validate_case(options) &&
              validate_together(options);
    if (ok) take_processes(options);
    return ok;
}
