/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/options.h"

#include "tools/common/data.h"
#include "tools/common/option.h"
#include "tools/common/util.h"
#include "tools/common/world.h"

#define MAX_COUNT (1 << 24)
#define NOT_GIVEN (-1)

static const Choice weights_at[] = {{"early", WEIGHTS_EARLY}, {"late", WEIGHTS_LATE}, {NULL, 0}};
static const Choice blocks[] = {{"rows", EP_BLOCKS_ROWS}, {"tiles", EP_BLOCKS_TILES}, {NULL, 0}};

#define AT(member) offsetof(MoeOptions, member)

static const Option options_of_moe[] = {
    {0, "mesh", "AXES", option_parse_text, AT(mesh), 0, 0, NULL,
     "axes of the ranks, as data=2,fsdp=2,expert=4 (default: fsdp=2,expert=R/2 for an even number "
     "R >= 4 of ranks, else expert=R)"},
    {0, "spec", "SPEC", option_parse_text, AT(spec), 0, 0, NULL,
     "axes that shard w1 and w2, as (expert,fsdp),_,_ (default: the expert axes shard the experts, "
     "the fsdp axes the second dimension)"},
    {0, "tokens", "N", option_parse_int, AT(tokens), 0, MAX_COUNT, NULL,
     "tokens per rank (default 128)"},
    {0, "uneven", NULL, option_parse_flag, AT(uneven), 0, 0, NULL,
     "rank 0 brings all tokens, the others between half and all"},
    {0, "idle", "N", option_parse_int, AT(idle), 0, EP_MAX_RANKS, NULL,
     "the last N ranks bring no tokens (default 0)"},
    {0, "hidden", "N", option_parse_int, AT(hidden), 1, MAX_COUNT, NULL,
     "elements of a token, H (default 256)"},
    {0, "ffn", "N", option_parse_int, AT(ffn), 1, MAX_COUNT, NULL,
     "elements between an expert's two matrices, F (default 256)"},
    {0, "experts", "N", option_parse_int, AT(experts), 1, 1 << 20, NULL,
     "experts of all ranks together, E (default: the multiple of the ranks from 16 on)"},
    {0, "top-k", "N", option_parse_int, AT(top_k), 1, EP_MAX_TOP_K, NULL,
     "experts per token, K (default 4)"},
    {0, "dtype", "bf16|fp16|fp32", option_parse_choice, AT(type), 0, 0, option_types,
     "element type of tokens and weights (default bf16)"},
    {0, "weights", "early|late", option_parse_choice, AT(weights_at), 0, 0, weights_at,
     "where a token's weights are applied: in the activation, or in combine (default late)"},
    {0, "quant", OPTION_QUANTS, option_parse_choice, AT(quant), 0, 0, option_quants,
     "quantise w1 and w2 before they are gathered (default none)"},
    {0, "blocks", "rows|tiles", option_parse_choice, AT(blocks), 0, 0, blocks,
     "what shares a scale: a row's 128 elements, with a gather for each direction, or 128 x 128 "
     "(default tiles; mxfp8: rows of 32)"},
    {0, "regather", "0|1", option_parse_int, AT(regather), 0, 1, NULL,
     "gather w1 and w2 again for backward, into the same memory (default 0; --blocks rows always "
     "gathers for each direction)"},
    {0, "align", "N", option_parse_int, AT(alignment), 1, 1 << 20, NULL,
     "slabs are padded to multiples of this power of two (default 1)"},
    {0, "backend", "auto|host|cuda", option_parse_choice, AT(backend), 0, 0, option_backends,
     "where the layer runs (default auto: the host)"},
    {0, "overlap", "0|1", option_parse_int, AT(overlap), 0, 1, NULL,
     "gather w1 and w2, and reduce their gradients, on a second stream while tokens travel "
     "(default "
     "1 with --backend cuda; on the host calls do not overlap, and 1 is refused)"},
    {'n', "iterations", "N", option_parse_int, AT(iterations), 1, 1000000, NULL,
     "timed iterations (default 20)"},
    {'w', "warmup", "N", option_parse_int, AT(warmup), 0, 1000000, NULL,
     "untimed iterations before them (default 3)"},
    {'c', "check", "0|1", option_parse_int, AT(check), 0, 1, NULL,
     "compare output and gradients with a dense reference, before and after the timing (default "
     "1)"},
    {0, "floor", "0|1", option_parse_int, AT(floor), 0, 1, NULL,
     "also measure plain copies of the same bytes and a plain GEMM (default 1)"},
    {'J', "json", "FILE", option_parse_text, AT(json_path), 0, 0, NULL,
     "also write the results as JSON"},
    {0, "seed", "N", option_parse_int, AT(seed), 0, INT64_MAX, NULL,
     "seed of all contents (default 1)"},
    {0, "gemm-threads", "N", option_parse_int, AT(gemm_threads), 1, 1024, NULL,
     "threads of each rank's GEMM (default: cores / ranks)"},
    {0, "threads", "N", option_parse_int, AT(threads), 1, EP_MAX_RANKS, NULL,
     "run N ranks as threads of this process, without mpirun"},
    {'h', "help", NULL, option_parse_flag, AT(help), 0, 0, NULL, "print this help"},
    {0, "version", NULL, option_parse_flag, AT(version), 0, 0, NULL, "print the version"},
};

static const OptionTable table = {
    "usage: mpirun -n RANKS ep_moe [options]\n"
    "       ep_moe --threads RANKS [options]\n\n"
    "Runs one MoE layer, forward and backward, on a mesh of ranks: router, dispatch, experts with\n"
    "sharded weights, combine. Times each phase, and checks the output and all gradients against\n"
    "a dense layer in double precision.\n\n",
    options_of_moe, sizeof(options_of_moe) / sizeof(options_of_moe[0])};

void moe_options_print_help(FILE *out) {
    option_print_help(&table, out);
}

const char *moe_weights_name(int64_t value) {
    return option_choice_name(weights_at, value);
}

const char *moe_blocks_name(int64_t value) {
    return option_choice_name(blocks, value);
}

static void set_defaults(MoeOptions *o) {
    *o = (MoeOptions){.tokens = 128, .hidden = 256, .ffn = 256, .top_k = 4};
    o->type = EP_TYPE_BF16, o->weights_at = WEIGHTS_LATE, o->quant = EP_QUANT_NONE;
    o->alignment = 1, o->backend = EP_BACKEND_AUTO, o->overlap = NOT_GIVEN;
    o->iterations = 20, o->warmup = 3, o->check = 1, o->floor = 1, o->seed = 1;
}

static bool validate_row(const char *option, int64_t elements, int64_t type) {
    long long bytes = (long long)elements * (long long)ep_type_bytes((EpType)type);
    if (bytes % 16 == 0 && bytes <= EP_MAX_ROW_BYTES) return true;
    return bench_refuse("--%s: expected rows of a multiple of 16 bytes up to %d, got %lld x %s = "
                        "%lld bytes",
                        option, EP_MAX_ROW_BYTES, (long long)elements,
                        option_choice_name(option_types, type), bytes);
}

static bool validate(const MoeOptions *o) {
    if (o->alignment & (o->alignment - 1))
        return bench_refuse("--align: expected a power of two, got %lld", (long long)o->alignment);
    if (o->blocks && !quant_format(o->quant)->bits)
        return bench_refuse("--blocks: expected --quant with it, got none");
    if (o->blocks == EP_BLOCKS_TILES && !quant_format(o->quant)->has_tiles)
        return bench_refuse("--blocks: expected rows with --quant %s, got tiles",
                            option_choice_name(option_quants, o->quant));
    if (o->overlap == 1 && o->backend != EP_BACKEND_CUDA)
        return bench_refuse(
            "--overlap: expected 0 on the host, whose calls have finished when they "
            "return, got 1");
    if (o->threads && world_launched())
        return bench_refuse("--threads: expected a start without mpirun, got one under mpirun");
    return validate_row("hidden", o->hidden, o->type);
}

bool moe_options_parse(MoeOptions *options, int argc, char **argv) {
    set_defaults(options);
    if (!option_parse(&table, argc, argv, options)) return false;
    if (options->help || options->version) return true;
    if (!validate(options)) return false;
    if (options->overlap == NOT_GIVEN) options->overlap = options->backend == EP_BACKEND_CUDA;
    const QuantFormat *format = quant_format(options->quant);
    bool rows = format->bits && !format->has_tiles;
    if (!options->blocks) options->blocks = rows ? EP_BLOCKS_ROWS : EP_BLOCKS_TILES;
    return true;
}

/* GEMM threads: a rank's share of the machine, so that ranks do not wait for each other's. */
bool moe_options_complete(MoeOptions *o, int ranks, int64_t cores) {
    if (!o->experts) o->experts = (16 + ranks - 1) / ranks * ranks;
    if (!o->gemm_threads) o->gemm_threads = cores > ranks ? cores / ranks : 1;
    if (o->idle > ranks)
        return bench_refuse("--idle: expected at most the %d ranks, got %lld", ranks,
                            (long long)o->idle);
    if (o->top_k <= o->experts) return true;
    return bench_refuse("--top-k: expected at most the %lld experts, got %lld",
                        (long long)o->experts, (long long)o->top_k);
}
