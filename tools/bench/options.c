/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/options.h"

#include <stddef.h>
#include <string.h>

#include "tools/bench/models.h"
#include "tools/common/data.h"
#include "tools/common/layout.h"
#include "tools/common/option.h"
#include "tools/common/util.h"
#include "tools/common/world.h"

/* Far above the size of any machine. Products of sizes still fit in 64 bits. */
#define MAX_COUNT (1 << 24)

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
    options->routing_given = true;
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
static const Choice sum_quants[] = {{"none", EP_QUANT_NONE}, {"fp8", EP_QUANT_FP8}, {NULL, 0}};
static const Choice overflows[] = {
    {"error", EP_OVERFLOW_ERROR}, {"drop", EP_OVERFLOW_DROP}, {NULL, 0}};

static const Choice modes[] = {{"auto", EP_MODE_AUTO},
                               {"throughput", EP_MODE_THROUGHPUT},
                               {"latency", EP_MODE_LATENCY},
                               {NULL, 0}};

#define AT(member) offsetof(Options, member)

static const Option specs[] = {
    {'b', "begin", "N", parse_tokens, AT(tokens_begin), 0, MAX_COUNT, NULL,
     "tokens per rank, first size of the sweep (default 512; with --mode latency 128)"},
    {'e', "end", "N", parse_tokens, AT(tokens_end), 0, MAX_COUNT, NULL,
     "tokens per rank, last size of the sweep (default: as --begin)"},
    {'f', "factor", "N", option_parse_int, AT(tokens_factor), 1, MAX_COUNT, NULL,
     "each size is N times the one before (default 2; 0 is followed by 1)"},
    {0, "tokens", "N", parse_both_tokens, AT(tokens_begin), 0, MAX_COUNT, NULL,
     "one size: the same as -b N -e N"},
    {0, "uneven", NULL, option_parse_flag, AT(uneven), 0, 0, NULL,
     "rank 0 brings all tokens, the others between half and all (default without -b, -e, "
     "--tokens, but not with --mode latency)"},
    {'n', "iterations", "N", option_parse_int, AT(iterations), 1, 1000000, NULL,
     "timed iterations (default 20)"},
    {'w', "warmup", "N", option_parse_int, AT(warmup), 0, 1000000, NULL,
     "untimed iterations before them (default 3)"},
    {'c', "check", "0|1", option_parse_int, AT(check), 0, 1, NULL,
     "check every byte, before and after the timing (default 1)"},
    {'G', "graphs", NULL, option_parse_flag, AT(graphs), 0, 0, NULL,
     "capture the calls in a graph (GPU backends)"},
    {0, "chain", "N", option_parse_int, AT(chain), 1, 1000, NULL,
     "repetitions of a call in its graph, whose time is divided by them (default 1; with --mode "
     "latency 20)"},
    {'J', "json", "FILE", option_parse_text, AT(json_path), 0, 0, NULL,
     "also write the results as JSON"},
    {0, "hidden", "N", parse_shape, AT(hidden), 1, MAX_COUNT, NULL,
     "elements per row (default 7168); rows are multiples of 16 bytes"},
    {0, "top-k", "N", parse_shape, AT(top_k), 1, EP_MAX_TOP_K, NULL,
     "experts per token (default 8)"},
    {0, "experts", "N", parse_shape, AT(experts), 1, 1 << 20, NULL,
     "experts of all ranks together (default 256)"},
    {0, "models", "[FILE]", parse_models, AT(models_path), 0, 0, NULL,
     "the shapes of a file instead, in both modes, 128 to 8192 tokens, uniform routing (default: "
     "the installed models.txt)"},
    {0, "align", "N", option_parse_int, AT(alignment), 1, 1 << 20, NULL,
     "slabs are padded to multiples of this power of two (default 128; with --mode latency 1)"},
    {0, "padding", "zero|keep", option_parse_choice, AT(padding), 0, 0, paddings,
     "what becomes of the rows that pad slabs (default zero)"},
    {0, "dtype", "bf16|fp16|fp32", option_parse_choice, AT(type), 0, 0, option_types,
     "element type of the rows (default bf16)"},
    {0, "routing", "uniform|zipf[:s]|one-hot|file:PATH", parse_routing, AT(routing), 0, 0, NULL,
     "how tokens choose experts (default zipf:1)"},
    {0, "save-routing", "PATH", option_parse_text, AT(save_path), 0, 0, NULL,
     "write the routing as a trace file"},
    {0, "masked", "SHARE", parse_share, AT(masked), 0, 0, NULL,
     "share of the entries that name no expert (default 0)"},
    {0, "capacity", "ROWS", option_parse_int, AT(capacity), 0, INT32_MAX, NULL,
     "static receive capacity (default 0: exact sizing; on GPUs what the routing needs)"},
    {0, "overflow", "error|drop", option_parse_choice, AT(overflow), 0, 0, overflows,
     "what happens to rows past the capacity (default error)"},
    {0, "layout", "expert[-major]|flat|batched|rank-major", option_parse_choice, AT(layout), 0, 0,
     option_layouts,
     "order of the slots in the receive buffer (default expert; with --mode latency batched)"},
    {0, "rows-per-expert", "N", option_parse_int, AT(rows_per_expert), 1, INT32_MAX, NULL,
     "slab size of --layout batched (default: the largest slab of this routing)"},
    {0, "weighted", "0|1", option_parse_int, AT(weighted), 0, 1, NULL,
     "dispatch sends weights and combine uses them (default 1)"},
    {0, "scales", "BYTES", option_parse_int, AT(scale_bytes), 0, EP_MAX_ROW_BYTES, NULL,
     "bytes of scales sent with each row (default 0)"},
    {0, "idx", "int32|int64", option_parse_choice, AT(index_type), 0, 0, index_types,
     "element type of the indices (default int32)"},
    {0, "backend", "auto|host|cuda", option_parse_choice, AT(backend), 0, 0, option_backends,
     "which backend moves the bytes (default auto)"},
    {0, "mode", "auto|throughput|latency", parse_mode, AT(mode), 0, 0, modes,
     "mode of the handle (default throughput); latency: no prepare, no backward"},
    {0, "split", NULL, option_parse_flag, AT(split), 0, 0, NULL,
     "with --mode latency: dispatch and combine as send and wait calls"},
    {0, "quant", OPTION_QUANTS, option_parse_choice, AT(quant), 0, 0, option_quants,
     "dispatch quantises (default none)"},
    {0, "sum-quant", "none|fp8", option_parse_choice, AT(sum_quant), 0, 0, sum_quants,
     "how partial sums travel in combine and dispatch_backward (default none)"},
    {0, "baseline", NULL, option_parse_flag, AT(baseline), 0, 0, NULL,
     "also measure packing, MPI or NCCL and unpacking without libep"},
    {0, "floor", "0|1", option_parse_int, AT(floor), 0, 1, NULL,
     "also measure plain copies of the same bytes (default 1)"},
    {0, "seed", "N", option_parse_int, AT(seed), 0, INT64_MAX, NULL,
     "seed of routing and contents (default 1)"},
    {0, "num-sms", "N", option_parse_int, AT(num_sms), 1, 1024, NULL,
     "multiprocessors that may be used (GPU backends)"},
    {0, "zero-copy", NULL, option_parse_flag, AT(zero_copy), 0, 0, NULL,
     "receive rows and expert outputs in peer-accessible memory"},
    {0, "threads", "N", option_parse_int, AT(threads), 1, EP_MAX_RANKS, NULL,
     "run N ranks as threads of this process, without mpirun"},
    {'h', "help", NULL, option_parse_flag, AT(help), 0, 0, NULL, "print this help"},
    {0, "version", NULL, option_parse_flag, AT(version), 0, 0, NULL, "print the version"},
};

const char *options_type_name(int64_t type) {
    return option_choice_name(type >= EP_TYPE_INT32 ? index_types : option_types, type);
}

const char *options_layout_name(int64_t layout) {
    return option_choice_name(option_layouts, layout);
}

const char *options_padding_name(int64_t padding) {
    return option_choice_name(paddings, padding);
}

const char *options_overflow_name(int64_t overflow) {
    return option_choice_name(overflows, overflow);
}

const char *options_backend_name(int64_t backend) {
    return option_choice_name(option_backends, backend);
}

const char *options_mode_name(int64_t mode) {
    return option_choice_name(modes, mode);
}

const char *options_quant_name(int64_t quant) {
    return option_choice_name(option_quants, quant);
}

const char *options_sums_name(const Options *options) {
    return !quant_format(options->sum_quant)->bits ? options_type_name(options->type)
                                                   : options_quant_name(options->sum_quant);
}

void options_routing_name(const Options *options, char *out, size_t bytes) {
    if (options->routing == ROUTING_FILE)
        snprintf(out, bytes, "file:%s", options->routing_path);
    else if (options->routing == ROUTING_ZIPF)
        snprintf(out, bytes, "zipf:%g", options->zipf_exponent);
    else
        snprintf(out, bytes, "%s", options->routing == ROUTING_UNIFORM ? "uniform" : "one-hot");
}

static const OptionTable table = {
    "usage: mpirun -n RANKS ep_bench [options]\n"
    "       ep_bench --threads RANKS [options]\n\n"
    "Times the calls of libep on the shape of a model and checks every byte.\n\n",
    specs, sizeof(specs) / sizeof(specs[0])};

void options_print_help(FILE *out) {
    option_print_help(&table, out);
}

/* ---- the command line ---------------------------------------------------------------------- */

static void set_defaults(Options *o) {
    *o = (Options){.tokens_begin = -1, .tokens_end = -1, .tokens_factor = 2};
    o->iterations = 20, o->warmup = 3;
    o->check = 1, o->floor = 1, o->weighted = 1;
    o->hidden = 7168, o->top_k = 8, o->experts = 256;
    o->type = EP_TYPE_BF16, o->index_type = EP_TYPE_INT32;
    o->routing = ROUTING_ZIPF, o->zipf_exponent = 1.0;
    o->overflow = EP_OVERFLOW_ERROR, o->padding = EP_PADDING_ZERO;
    o->backend = EP_BACKEND_AUTO;
    o->mode = EP_MODE_THROUGHPUT, o->quant = o->sum_quant = EP_QUANT_NONE;
    o->seed = 1;
}

/* ---- defaults and validation --------------------------------------------------------------- */

/* Fill in what the command line leaves open. A decoding step has few tokens, the same number on
 * every rank, in slabs of a fixed shape. A training step has many tokens, packed. */
static void fill_in(Options *o) {
    bool decodes = o->mode == EP_MODE_LATENCY;
    int64_t tokens = decodes ? 128 : 512;
    EpLayout layout = decodes && !o->capacity ? EP_LAYOUT_BATCHED : EP_LAYOUT_EXPERT_MAJOR;
    if (!o->tokens_given && o->routing != ROUTING_FILE && !decodes) o->uneven = true;
    if (o->tokens_begin < 0) o->tokens_begin = o->tokens_end >= 0 ? o->tokens_end : tokens;
    if (o->tokens_end < 0) o->tokens_end = o->tokens_begin;
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
    if (o->routing == ROUTING_FILE && o->masked > 0)
        return bench_refuse("--masked: expected 0 with --routing file, got %g", o->masked);
    return true;
}

static bool validate_shape(const Options *o) {
    long long row_bytes = (long long)o->hidden * (long long)ep_type_bytes((EpType)o->type);
    if (row_bytes % 16 || row_bytes > EP_MAX_ROW_BYTES)
        return bench_refuse("--hidden: expected rows of a multiple of 16 bytes up to %d, got %lld "
                            "x %s = %lld bytes",
                            EP_MAX_ROW_BYTES, (long long)o->hidden, options_type_name(o->type),
                            row_bytes);
    if (o->alignment & (o->alignment - 1))
        return bench_refuse("--align: expected a power of two, got %lld", (long long)o->alignment);
    if (o->scale_bytes % 4)
        return bench_refuse("--scales: expected a multiple of 4 bytes, got %lld",
                            (long long)o->scale_bytes);
    if (o->top_k > o->experts && (o->routing == ROUTING_UNIFORM || o->routing == ROUTING_ZIPF))
        return bench_refuse("--top-k: expected at most the %lld experts (a token names different "
                            "ones), got %lld",
                            (long long)o->experts, (long long)o->top_k);
    return true;
}

static bool validate_together(const Options *o) {
    const Layout *layout = tool_layout((EpLayout)o->layout);
    if (o->rows_per_expert && !layout->is_sized)
        return bench_refuse("--rows-per-expert: expected --layout batched, got --layout %s",
                            options_layout_name(o->layout));
    if (o->capacity && layout->is_sized)
        return bench_refuse("--capacity: expected --layout expert or flat, got --layout batched "
                            "(use --rows-per-expert)");
    if (o->capacity && layout->is_fixed)
        return bench_refuse("--capacity: expected --layout expert or flat, got --layout %s, whose "
                            "size is fixed",
                            layout->name);
    if (!layout->has_throughput && o->mode == EP_MODE_THROUGHPUT)
        return bench_refuse("--layout %s: expected --mode latency or auto, got --mode throughput",
                            layout->name);
    if (o->baseline && o->threads)
        return bench_refuse("--baseline: expected MPI ranks (mpirun), got --threads %lld",
                            (long long)o->threads);
    if (o->baseline && (o->mode != EP_MODE_THROUGHPUT || quant_format(o->quant)->bits))
        return bench_refuse("--baseline: expected --mode throughput and --quant none, got %s and "
                            "%s",
                            options_mode_name(o->mode), options_quant_name(o->quant));
    if (o->baseline && o->layout != EP_LAYOUT_EXPERT_MAJOR)
        return bench_refuse("--baseline: expected --layout expert, got --layout %s",
                            options_layout_name(o->layout));
    if (o->baseline && o->padding != EP_PADDING_ZERO)
        return bench_refuse("--baseline: expected --padding zero, got --padding %s",
                            options_padding_name(o->padding));
    if (o->baseline && o->capacity)
        return bench_refuse("--baseline: expected exact sizing (--capacity 0), got --capacity %lld",
                            (long long)o->capacity);
    if (o->chain > 1 && o->mode != EP_MODE_LATENCY && !o->graphs)
        return bench_refuse("--chain: expected --graphs or --mode latency, got neither");
    if (o->split && o->mode != EP_MODE_LATENCY)
        return bench_refuse("--split: expected --mode latency, got --mode %s",
                            options_mode_name(o->mode));
    if (quant_format(o->quant)->bits && o->scale_bytes)
        return bench_refuse("--scales: expected 0 with --quant %s, which makes its own, got %lld",
                            options_quant_name(o->quant), (long long)o->scale_bytes);
    if (quant_format(o->quant)->bits && o->hidden % 16)
        return bench_refuse("--hidden: expected a multiple of 16 with --quant %s, got %lld",
                            options_quant_name(o->quant), (long long)o->hidden);
    if (quant_format(o->sum_quant)->bits && o->hidden % 16)
        return bench_refuse("--hidden: expected a multiple of 16 with --sum-quant %s, got %lld",
                            options_quant_name(o->sum_quant), (long long)o->hidden);
    if (o->threads && world_launched())
        return bench_refuse("--threads: expected a start without mpirun, got one under mpirun");
    return true;
}

bool options_complete(Options *options) {
    fill_in(options);
    return options_check_sweep(options) && validate_shape(options) && validate_together(options);
}

bool options_parse(Options *options, int argc, char **argv) {
    set_defaults(options);
    if (!option_parse(&table, argc, argv, options)) return false;
    if (options->help || options->version) return true;
    return options->models ? models_complete(options) : options_complete(options);
}
