/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The error of combine where sums travel in bf16 and where they travel quantised, on CPUs.
 *
 *     sum_error [hidden=7168] [tokens=256] [top_k=8] [experts=64]
 *
 * Ranks are threads. Each token has random experts with softmax weights, and each of its slots an
 * expert's output of bf16. A line is a kind of outputs and a number of ranks: the error of `out`
 * against a sum in double precision, rms over all tokens, relative to the rms of that sum; and the
 * largest error of an element, relative to the largest element of its token. LIBEP_TOPOLOGY divides
 * the ranks into nodes.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep/ep.h"

enum { MOST_RANKS = 16 };

static int hidden = 7168, tokens = 256, top_k = 8, experts = 64;

typedef enum Kind { GAUSSIAN, OUTLIERS, HEAVY_TAILS, NUM_KINDS } Kind;

static const char *const kind_names[] = {"Gaussian", "outlier channels", "heavy tails"};

#define MUST(call)                                                              \
    do {                                                                        \
        if ((call) != EP_OK) fprintf(stderr, "%s\n", ep_last_error()), exit(1); \
    } while (0)

/* ---- data ---------------------------------------------------------------------------------- */

/* A random number of 64 bits that depends on all three. */
static uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t x = a * 0x9e3779b97f4a7c15u ^ b * 0xc2b2ae3d27d4eb4fu ^ c * 0x165667b19e3779f9u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static double uniform(uint64_t bits) {
    return ((double)(bits >> 11) + 0.5) * 0x1p-53;
}

static double gaussian(uint64_t a, uint64_t b, uint64_t c) {
    return sqrt(-2 * log(uniform(mix(a, b, c)))) * cos(6.283185307179586 * uniform(mix(c, a, b)));
}

/* What expert `e` makes of element h of a token: tokens differ in size by a factor of e^1/2.
 * Outlier channels: one of 200 is 20 times as large, in all tokens. Heavy tails: Student's t with
 * three degrees of freedom. */
static float output(Kind kind, uint64_t token, int e, int h) {
    uint64_t id = token << 20 | (uint64_t)e;
    double x = gaussian(id, (uint64_t)h, 1) * exp(0.5 * gaussian(token, 0, 2));
    if (kind == OUTLIERS && mix((uint64_t)h, 3, 3) % 200 == 0) x *= 20;
    if (kind == HEAVY_TAILS) {
        double sum = 0;
        for (uint64_t i = 0; i < 3; i++)
            sum += pow(gaussian(id, (uint64_t)h, 10 + i), 2);
        x /= sqrt(sum / 3);
    }
    return (float)x;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* A token's experts, all different, and their weights. */
static void route(uint64_t token, int32_t *index, float *weights) {
    double sum = 0;
    for (int k = 0; k < top_k; k++) {
        int fresh = 0;
        for (uint64_t draw = 0; !fresh; draw++) {
            index[k] = (int32_t)(mix(token, (uint64_t)k, 100 + draw) % (uint64_t)experts);
            fresh = 1;
            for (int i = 0; i < k; i++)
                fresh = fresh && index[i] != index[k];
        }
        weights[k] = (float)exp(gaussian(token, (uint64_t)k, 4));
        sum += (double)weights[k];
    }
    for (int k = 0; k < top_k; k++)
        weights[k] = (float)((double)weights[k] / sum);
}

/* ---- a rank -------------------------------------------------------------------------------- */

typedef struct Error {
    double squares, exact_squares, largest;
} Error;

typedef struct Rank {
    EpBootstrap bootstrap;
    Kind kind;
    EpQuant quant;
    Error error;
} Rank;

/* The tokens of a rank carry their number, so that their experts know whose output is asked for. */
static uint64_t token_id(int rank, int token) {
    return (uint64_t)(rank * tokens + token);
}

static void measure(const Rank *r, const uint16_t *out, Error *error) {
    int32_t index[EP_MAX_TOP_K];
    float weights[EP_MAX_TOP_K];
    for (int t = 0; t < tokens; t++) {
        uint64_t id = token_id(r->bootstrap.rank, t);
        double worst = 0, most = 0;
        route(id, index, weights);
        for (int h = 0; h < hidden; h++) {
            double exact = 0;
            for (int k = 0; k < top_k; k++)
                exact += (double)weights[k] *
                         (double)from_bf16(to_bf16(output(r->kind, id, index[k], h)));
            double off = fabs((double)from_bf16(out[(int64_t)t * hidden + h]) - exact);
            error->squares += off * off, error->exact_squares += exact * exact;
            worst = fmax(worst, off), most = fmax(most, fabs(exact));
        }
        error->largest = fmax(error->largest, worst / most);
    }
}

/* Dispatch tokens' numbers, in rows of 16 bytes, to learn which token and expert a slot is of. */
static void make_outputs(const Rank *r, EpHandle *handle, const float *weights, uint16_t *rows,
                         float *slot_weights, int64_t capacity) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    uint64_t *sent = calloc((size_t)tokens, 16), *received = calloc((size_t)capacity, 16);
    for (int t = 0; t < tokens; t++)
        sent[2 * t] = token_id(r->bootstrap.rank, t);
    EpTensor in = ep_tensor_2d(sent, EP_TYPE_UINT8, tokens, 16);
    EpTensor out = ep_tensor_2d(received, EP_TYPE_UINT8, capacity, 16);
    EpTensor w = ep_tensor_2d(weights, EP_TYPE_FP32, tokens, top_k);
    EpTensor s = ep_tensor_1d(slot_weights, EP_TYPE_FP32, capacity);
    MUST(ep_dispatch(handle, NULL, NULL, &in, &w, NULL, NULL, &out, &s, NULL, NULL));
    MUST(ep_handle_info(handle, &info));
    int first, count;
    MUST(ep_expert_range(experts, r->bootstrap.size, r->bootstrap.rank, &first, &count));
    for (int e = 0; e < count; e++)
        for (int64_t i = 0; i < info.expert_counts[e]; i++) {
            int64_t row = info.expert_offsets[e] + i;
            for (int h = 0; h < hidden; h++)
                rows[row * hidden + h] = to_bf16(output(r->kind, received[2 * row], first + e, h));
        }
    free(sent), free(received);
}

static EpGroup *open_group(const Rank *r, int64_t capacity) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpGroup *group;
    config.num_experts = experts, config.max_tokens = tokens, config.max_top_k = top_k;
    config.max_row_bytes = 2 * (int64_t)hidden, config.max_recv_rows = capacity;
    config.backend = EP_BACKEND_HOST;
    MUST(ep_group_create(&r->bootstrap, &config, &group));
    return group;
}

static void *run_rank(void *arg) {
    Rank *r = arg;
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpHandle *handle;
    int64_t capacity = (int64_t)r->bootstrap.size * tokens * top_k;
    int32_t *index = calloc((size_t)(tokens * top_k), sizeof(*index));
    float *weights = calloc((size_t)(tokens * top_k), sizeof(*weights));
    float *slot_weights = calloc((size_t)capacity, sizeof(*slot_weights));
    uint16_t *rows = aligned_alloc(64, (size_t)capacity * (size_t)hidden * 2);
    uint16_t *sums = aligned_alloc(64, (size_t)tokens * (size_t)hidden * 2);
    for (int t = 0; t < tokens; t++)
        route(token_id(r->bootstrap.rank, t), index + t * top_k, weights + t * top_k);
    EpGroup *group = open_group(r, capacity);
    config.sum_quant = r->quant;
    MUST(ep_handle_create(group, &config, &handle));
    EpTensor topk_idx = ep_tensor_2d(index, EP_TYPE_INT32, tokens, top_k);
    EpTensor expert_out = ep_tensor_2d(rows, EP_TYPE_BF16, capacity, hidden);
    EpTensor w = ep_tensor_1d(slot_weights, EP_TYPE_FP32, capacity);
    EpTensor out = ep_tensor_2d(sums, EP_TYPE_BF16, tokens, hidden);
    MUST(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    make_outputs(r, handle, weights, rows, slot_weights, capacity);
    MUST(ep_combine(handle, NULL, &expert_out, &w, NULL, NULL, &out));
    measure(r, sums, &r->error);
    ep_group_destroy(group);
    free(index), free(weights), free(slot_weights), free(rows), free(sums);
    return NULL;
}

/* ---- all ----------------------------------------------------------------------------------- */

static Error run(int ranks, Kind kind, EpQuant quant) {
    EpBootstrap bootstraps[MOST_RANKS] = {EP_BOOTSTRAP_INIT};
    Rank rank[MOST_RANKS];
    pthread_t thread[MOST_RANKS];
    Error all = {0, 0, 0};
    MUST(ep_bootstrap_local(ranks, bootstraps));
    for (int r = 0; r < ranks; r++) {
        rank[r] = (Rank){bootstraps[r], kind, quant, {0, 0, 0}};
        if (pthread_create(&thread[r], NULL, run_rank, &rank[r])) exit(1);
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(thread[r], NULL);
        all.squares += rank[r].error.squares, all.exact_squares += rank[r].error.exact_squares;
        all.largest = fmax(all.largest, rank[r].error.largest);
        ep_bootstrap_destroy(&bootstraps[r]);
    }
    return all;
}

static void print_line(int ranks, Kind kind) {
    Error plain = run(ranks, kind, EP_QUANT_NONE), fp8 = run(ranks, kind, EP_QUANT_FP8);
    printf("%-18s %5d   %9.2e %9.2e   %9.2e %9.2e\n", kind_names[kind], ranks,
           sqrt(plain.squares / plain.exact_squares), sqrt(fp8.squares / fp8.exact_squares),
           plain.largest, fp8.largest);
}

int main(int argc, char **argv) {
    int *const sizes[] = {&hidden, &tokens, &top_k, &experts};
    for (int i = 1; i < argc && i <= 4; i++)
        *sizes[i - 1] = atoi(argv[i]);
    if (hidden < 16 || hidden % 16 || tokens < 1 || top_k < 1 || top_k > EP_MAX_TOP_K ||
        experts < top_k)
        return fprintf(stderr, "usage: sum_error [hidden] [tokens] [top_k] [experts]\n"), 2;
    printf("# %d bf16, %d tokens on each rank, top-%d of %d experts\n", hidden, tokens, top_k,
           experts);
    printf("# outputs          ranks   rms: bf16       fp8     max: bf16       fp8\n");
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int ranks = 2; ranks <= 8; ranks *= 2)
            print_line(ranks, (Kind)kind);
    return 0;
}
