/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_error.h"
#include "bench_options.h"
#include "bench_world.h"

/* A decoding step has few tokens, as many on every rank, and wants slabs of a fixed shape; a
 * training step has many, and wants them packed. */
void options_complete(Options *o) {
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

static bool validate_sweep(const Options *o) {
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
    bool batched = o->layout == EP_LAYOUT_BATCHED;
    if (o->rows_per_expert && !batched)
        return bench_refuse("--rows-per-expert: expected --layout batched, got --layout %s",
                            options_layout_name(o->layout));
    if (o->capacity && batched)
        return bench_refuse("--capacity: expected --layout expert or flat, got --layout batched "
                            "(use --rows-per-expert)");
    if (o->baseline && o->threads)
        return bench_refuse("--baseline: expected MPI ranks (mpirun), got --threads %lld",
                            (long long)o->threads);
    if (o->baseline && (o->mode != EP_MODE_THROUGHPUT || o->quant != EP_QUANT_NONE))
        return bench_refuse("--baseline: expected --mode throughput and --quant none, got %s and "
                            "%s",
                            options_mode_name(o->mode), options_quant_name(o->quant));
    if (o->baseline && o->layout != EP_LAYOUT_EXPERT_MAJOR)
        return bench_refuse("--baseline: expected --layout expert, got --layout %s",
                            options_layout_name(o->layout));
    if (o->baseline && o->capacity)
        return bench_refuse("--baseline: expected exact sizing (--capacity 0), got --capacity %lld",
                            (long long)o->capacity);
    if (o->chain > 1 && o->mode != EP_MODE_LATENCY && !o->graphs)
        return bench_refuse("--chain: expected --graphs or --mode latency, got neither");
    if (o->halves && o->mode != EP_MODE_LATENCY)
        return bench_refuse("--halves: expected --mode latency, got --mode %s",
                            options_mode_name(o->mode));
    if (o->quant != EP_QUANT_NONE && o->scale_bytes)
        return bench_refuse("--scales: expected 0 with --quant %s, which makes its own, got %lld",
                            options_quant_name(o->quant), (long long)o->scale_bytes);
    if (o->quant != EP_QUANT_NONE && o->hidden % 16)
        return bench_refuse("--hidden: expected a multiple of 16 with --quant %s, got %lld",
                            options_quant_name(o->quant), (long long)o->hidden);
    if (o->threads && world_launched())
        return bench_refuse("--threads: expected a start without mpirun, got one under mpirun");
    return true;
}

bool options_validate(const Options *o) {
    return validate_sweep(o) && validate_shape(o) && validate_together(o);
}
