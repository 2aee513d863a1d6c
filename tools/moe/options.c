/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/options.h"

#include <stdio.h>
#include <stdlib.h>

#include "tools/common/data.h"
#include "tools/common/util.h"
#include "tools/moe/device.h"

static const Choice weights_at[] = {{"early", WEIGHTS_EARLY}, {"late", WEIGHTS_LATE}, {NULL, 0}};
static const Choice wgrads[] = {{"fp8", MOE_WGRAD_FP8}, {"dtype", MOE_WGRAD_DTYPE}, {NULL, 0}};
static const Choice groupings[] = {{"auto", GROUPING_AUTO},
                                   {"each", GROUPING_EACH},
                                   {"one", GROUPING_ONE},
                                   {"streams", GROUPING_STREAMS},
                                   {NULL, 0}};
static const Choice blocks[] = {{"rows", EP_BLOCKS_ROWS}, {"tiles", EP_BLOCKS_TILES}, {NULL, 0}};

enum { NOT_GIVEN = -1 };
#define AT(member) offsetof(MoeOptions, member)

static const Option specs[] = {
    {0, "mesh", "AXES", OPTION_TEXT(mesh), NULL, 0,
     "axes of the ranks, as data=2,fsdp=2,expert=4 (default: fsdp=2,expert=R/2 for an even number "
     "R >= 4 of ranks, else expert=R)"},
    {0, "spec", "SPEC", OPTION_TEXT(spec), NULL, 0,
     "axes that shard w1 and w2, as (expert,fsdp),_,_ (default: the expert axes shard the experts, "
     "the fsdp axes the second dimension)"},
    {0, "tokens", "N", OPTION_INT(tokens, 0, OPTION_MAX_COUNT), "tokens", 128,
     "tokens per rank (default 128)"},
    {0, "uneven", NULL, OPTION_FLAG(uneven), "uneven", 0,
     "rank 0 brings all tokens, the others between half and all"},
    {0, "idle", "N", OPTION_INT(idle, 0, EP_MAX_RANKS), NULL, 0,
     "the last N ranks bring no tokens (default 0)"},
    {0, "hidden", "N", OPTION_INT(hidden, 1, OPTION_MAX_COUNT), "hidden", 256,
     "elements of a token, H (default 256)"},
    {0, "ffn", "N", OPTION_INT(ffn, 1, OPTION_MAX_COUNT), "ffn", 256,
     "elements between an expert's two matrices, F (default 256)"},
    {0, "experts", "N", OPTION_INT(experts, 1, 1 << 20), "experts", 0,
     "experts of all ranks together, E (default: the multiple of the ranks from 16 on)"},
    {0, "top-k", "N", OPTION_INT(top_k, 1, EP_MAX_TOP_K), "top_k", 4,
     "experts per token, K (default 4)"},
    {0, "dtype", "bf16|fp16|fp32", OPTION_CHOICE(type, option_types), "dtype", EP_TYPE_BF16,
     "element type of tokens and weights (default bf16)"},
    {0, "weights", "early|late", OPTION_CHOICE(weights_at, weights_at), "weights", WEIGHTS_LATE,
     "where a token's weights are applied: in the activation, or in combine (default late)"},
    {0, "quant", OPTION_QUANTS, OPTION_CHOICE(quant, option_quants), "quant", EP_QUANT_NONE,
     "quantise w1 and w2 before they are gathered (default none)"},
    {0, "blocks", "rows|tiles", OPTION_CHOICE(blocks, blocks), NULL, 0,
     "what shares a scale: a row's 128 elements, with a gather for each direction, or 128 x 128 "
     "(default tiles; mxfp8: rows of 32)"},
    {0, "wgrad", "fp8|dtype", OPTION_CHOICE(wgrad, wgrads), NULL, 0,
     "where GPUs multiply e4m3: what the products for gradients of w1 and w2 take, e4m3 or the "
     "type "
     "of --dtype (default fp8)"},
    {0, "compare", "0|1", OPTION_SWITCH(compare), NULL, NOT_GIVEN,
     "run the layer without --quant, too, and compare (default 1 with --quant)"},
    {0, "layers", "N", OPTION_INT(layers, 1, 1024), "layers", 1,
     "a stack of N layers: weights and gradients travel while other layers compute (default 1)"},
    {0, "forward", NULL, OPTION_FLAG(forward), "forward", 0,
     "forward alone, as in inference: weights are gathered before, dispatch quantises where "
     "products take e4m3, and GPUs replay the step as one graph"},
    {0, "shared", "N", OPTION_INT(shared, 0, OPTION_MAX_COUNT), "shared", 0,
     "with --forward, a shared expert of N inner elements, which takes all tokens (default 0: "
     "none)"},
    {0, "graph", "0|1", OPTION_SWITCH(graph), "graph", NOT_GIVEN,
     "on GPUs, replay the step as a graph (default 1 with --forward; on the host 1 is refused)"},
    {0, "weight-sms", "N", OPTION_INT(weight_sms, 0, 64), "weight_sms", 0,
     "on GPUs, most blocks of a kernel that moves weights (sets LIBEP_WEIGHT_SMS; default: 24 in a "
     "stack, whose products leave them free, else as libep likes)"},
    {0, "wire", "GB/S", OPTION_INT(wire, 1, 1 << 20), NULL, 350,
     "what a GPU sends to others, for the floors of calls of weights on GPUs (default 350)"},
    {0, "regather", "0|1", OPTION_SWITCH(regather), "regather", 0,
     "gather w1 and w2 again for backward, into the same memory, which layers i and i + 2 of a "
     "stack share (default 0; --blocks rows and products of e4m3 gather for each direction)"},
    {0, "align", "N", OPTION_INT(alignment, 1, 1 << 20), "alignment", 0,
     "slabs are padded to multiples of this power of two (default 1; 128 for --wgrad fp8)"},
    {0, "backend", "auto|host|cuda", OPTION_CHOICE(backend, option_backends), NULL, EP_BACKEND_AUTO,
     "where the layer runs (default auto: the host)"},
    {0, "overlap", "0|1", OPTION_SWITCH(overlap), NULL, NOT_GIVEN,
     "gather w1 and w2, and reduce their gradients, on a second stream while tokens travel "
     "(default 1 with --backend cuda; on the host calls do not overlap, and 1 is refused)"},
    OPTION_TIMING,
    {'c', "check", "0|1", OPTION_SWITCH(run.check), "check", 1,
     "compare output and gradients with a dense reference, before and after the timing (default "
     "1)"},
    {0, "floor", "0|1", OPTION_SWITCH(run.floor), NULL, 1,
     "also measure plain copies of the same bytes and a plain GEMM (default 1)"},
    OPTION_JSON,
    {0, "seed", "N", OPTION_INT(run.seed, 0, INT64_MAX), "seed", 1,
     "seed of all contents (default 1)"},
    {0, "gemms", "auto|each|one|streams", OPTION_CHOICE(grouping, groupings), NULL, GROUPING_AUTO,
     "on GPUs, a call of cuBLAS for each expert's product, on one stream or on several, or one for "
     "all (default auto: one where experts have few rows, else several streams)"},
    {0, "gemm-threads", "N", OPTION_INT(gemm_threads, 1, 1024), NULL, 0,
     "threads of each rank's GEMM (default: cores / ranks)"},
    OPTION_THREADS,
    OPTION_HELP,
};

const OptionTable moe_options_table = {
    "usage: mpirun -n RANKS ep_moe [options]\n"
    "       ep_moe --threads RANKS [options]\n\n"
    "Runs one MoE layer, forward and backward, on a mesh of ranks: router, dispatch, experts with\n"
    "sharded weights, combine. Times each phase, and checks the output and all gradients against\n"
    "a dense layer in double precision.\n\n",
    specs, sizeof(specs) / sizeof(specs[0])};

bool moe_multiplies_e4m3(const MoeOptions *o) {
    return quant_format(o->quant)->bits && o->backend == EP_BACKEND_CUDA;
}

/* What fp8.cu multiplies. Transposed rows are quantised in blocks of 128 rows. */
static bool validate_e4m3(const MoeOptions *o) {
    if (o->wgrad && !moe_multiplies_e4m3(o))
        return bench_refuse("--wgrad: expected --quant and --backend cuda with it");
    if (!moe_multiplies_e4m3(o)) return true;
    if (o->quant != EP_QUANT_FP8 && o->quant != EP_QUANT_FP8_POW2)
        return bench_refuse("--quant: expected fp8 or fp8-pow2 on GPUs, whose products take fp32 "
                            "scales of 128 elements, got %s",
                            option_choice_name(option_quants, o->quant));
    if (o->hidden % 16 || o->ffn % 16)
        return bench_refuse("--quant: expected multiples of 16 for --hidden and --ffn on GPUs, "
                            "got %lld and %lld",
                            (long long)o->hidden, (long long)o->ffn);
    if (!o->forward && o->wgrad != MOE_WGRAD_DTYPE && o->alignment && o->alignment % 128)
        return bench_refuse("--wgrad fp8: expected --align of a multiple of 128, got %lld",
                            (long long)o->alignment);
    return true;
}

static bool validate_forward(const MoeOptions *o) {
    if (o->shared && !o->forward)
        return bench_refuse("--shared: expected --forward with it, got none");
    if (o->shared && !option_check_row("shared", o->shared, o->type)) return false;
    if (!o->forward) return true;
    if (o->layers > 1)
        return bench_refuse("--forward: expected one layer with it, got --layers %lld",
                            (long long)o->layers);
    if (o->wgrad || o->regather)
        return bench_refuse("--forward: expected no %s with it, which is for backward",
                            o->wgrad ? "--wgrad" : "--regather 1");
    if (o->overlap == 1)
        return bench_refuse("--overlap: expected 0 with --forward, whose weights do not travel, "
                            "got 1");
    return true;
}

static bool validate(const MoeOptions *o) {
    if (o->compare == 1 && o->layers > 1)
        return bench_refuse("--compare: expected one layer with it, got --layers %lld",
                            (long long)o->layers);
    if (o->compare == 1 && !quant_format(o->quant)->bits)
        return bench_refuse("--compare: expected --quant with it, got none");
    if (o->blocks && !quant_format(o->quant)->bits)
        return bench_refuse("--blocks: expected --quant with it, got none");
    if (o->blocks == EP_BLOCKS_TILES && !quant_format(o->quant)->has_tiles)
        return bench_refuse("--blocks: expected rows with --quant %s, got tiles",
                            option_choice_name(option_quants, o->quant));
    if (o->overlap == 1 && o->backend != EP_BACKEND_CUDA)
        return bench_refuse(
            "--overlap: expected 0 on the host, whose calls have finished when they "
            "return, got 1");
    if (o->graph == 1 && o->backend != EP_BACKEND_CUDA)
        return bench_refuse("--graph: expected 0 on the host, got 1");
    return validate_forward(o) && validate_e4m3(o) &&
           (!o->alignment || option_check_alignment(o->alignment)) &&
           option_check_threads(&o->run) && option_check_row("hidden", o->hidden, o->type);
}

bool moe_options_check(void *options) {
    MoeOptions *o = options;
    char text[24];
    if (!validate(o)) return false;
    if (o->overlap == NOT_GIVEN) o->overlap = o->backend == EP_BACKEND_CUDA && !o->forward;
    if (o->layers > 1 && o->overlap && !o->weight_sms) o->weight_sms = 24;
    snprintf(text, sizeof(text), "%lld", (long long)o->weight_sms);
    if (o->weight_sms) setenv("LIBEP_WEIGHT_SMS", text, 1);
    const QuantFormat *format = quant_format(o->quant);
    bool rows = format->bits && !format->has_tiles;
    if (!o->blocks) o->blocks = rows ? EP_BLOCKS_ROWS : EP_BLOCKS_TILES;
    if (o->compare == NOT_GIVEN) o->compare = format->bits > 0 && o->layers == 1;
    if (o->graph == NOT_GIVEN) o->graph = o->backend == EP_BACKEND_CUDA && o->forward;
    if (!o->forward && !o->wgrad && moe_multiplies_e4m3(o)) o->wgrad = MOE_WGRAD_FP8;
    if (!o->alignment) o->alignment = o->wgrad == MOE_WGRAD_FP8 ? 128 : 1;
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
