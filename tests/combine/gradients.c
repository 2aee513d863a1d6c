/* SPDX-License-Identifier: Apache-2.0 */
/* The backward operations, chained, are the derivative of dispatch -> experts -> combine. They are
 * compared with finite differences of a loss. Experts are dense matrices, so the loss is linear in
 * each input alone and central differences are exact up to rounding. */
#include <math.h>

#include "tests/cases/run.h"
#include "tests/harness/random.h"

enum { H = 4, TOKENS = 3, K = 2, RANKS = 3, MAX_ROWS = 64 };

/* One rank's buffers. Rows are 16 bytes. */
typedef struct Model {
    const EpBootstrap *bootstrap;
    const World *world;
    EpHandle *handle;
    int weighted;
    _Alignas(16) float x[TOKENS * H], weight[TOKENS * K], out_grad[TOKENS * H], out[TOKENS * H];
    _Alignas(16) float recv[MAX_ROWS * H], y[MAX_ROWS * H], slot_weight[MAX_ROWS * K];
    _Alignas(16) float y_grad[MAX_ROWS * H], recv_grad[MAX_ROWS * H];
    _Alignas(16) float slot_grad[MAX_ROWS * K], x_grad[TOKENS * H], weight_grad[TOKENS * K];
} Model;

static const Case *case_for(const Model *m) {
    return &m->world->c;
}

static int is_flat(const Model *m) {
    return case_for(m)->layout == EP_LAYOUT_FLAT;
}

static const RankWorld *me(const Model *m) {
    return &m->world->rank[m->bootstrap->rank];
}

/* Element (i, j) of an expert's matrix. */
static float matrix(int64_t expert, int i, int j) {
    Random random = random_stream(99, (uint64_t)expert, (uint64_t)(i * H + j));
    return random_unit(&random);
}

/* to += factor * A x, or A^T x */
static void apply(int64_t expert, int transposed, float factor, const float *x, float *to) {
    for (int i = 0; i < H; i++)
        for (int j = 0; j < H; j++)
            to[i] += factor * x[j] * (transposed ? matrix(expert, j, i) : matrix(expert, i, j));
}

static Step step_of(const Model *m) {
    return (Step){NULL, m->handle, m->world, m->bootstrap->rank, NULL};
}

static EpTensor rows_tensor(const Model *m, const float *data, int columns) {
    Step step = step_of(m);
    EpTensor tensor = step_rows(&step, data, EP_TYPE_FP32, columns);
    if (columns == 1 && !is_flat(m)) tensor.ndim--;
    return tensor;
}

static EpTensor tokens_tensor(const Model *m, const float *data, int columns) {
    return ep_tensor_2d(data, EP_TYPE_FP32, me(m)->rows, columns);
}

/* Returns the expert that processes a row for entry k of its token, or -1. */
static int64_t expert_of(const Model *m, int64_t row, int k) {
    const Row *what = &me(m)->row[row];
    if (what->kind != ROW_FILLED || (!is_flat(m) && k != what->k)) return -1;
    if (!world_live(m->world, what->source, what->token, k)) return -1;
    int64_t expert = m->world->rank[what->source].index[what->token * K + k];
    return world_owner(case_for(m), expert) == m->bootstrap->rank ? expert : -1;
}

/* In FLAT the experts apply the weights themselves, so combine is unweighted. */
static void experts_forward(Model *m) {
    memset(m->y, 0, sizeof(m->y));
    for (int64_t row = 0; row < me(m)->buffer_rows; row++)
        for (int k = 0; k < K; k++) {
            int64_t e = expert_of(m, row, k);
            float factor = is_flat(m) && m->weighted ? m->slot_weight[row * K + k] : 1;
            if (e >= 0) apply(e, 0, factor, m->recv + row * H, m->y + row * H);
        }
}

static float dot_through(int64_t expert, const float *x, const float *grad) {
    float y[H] = {0}, sum = 0;
    apply(expert, 0, 1, x, y);
    for (int h = 0; h < H; h++)
        sum += y[h] * grad[h];
    return sum;
}

static void experts_backward(Model *m) {
    memset(m->recv_grad, 0, sizeof(m->recv_grad));
    for (int64_t row = 0; row < me(m)->buffer_rows; row++)
        for (int k = 0; k < K; k++) {
            int64_t e = expert_of(m, row, k), i = row * K + k;
            float factor = is_flat(m) && m->weighted ? m->slot_weight[i] : 1;
            if (e >= 0) apply(e, 1, factor, m->y_grad + row * H, m->recv_grad + row * H);
            if (is_flat(m))
                m->slot_grad[i] =
                    e < 0 ? 0 : dot_through(e, m->recv + row * H, m->y_grad + row * H);
        }
}

static void model_forward(Model *m) {
    EpTensor x = tokens_tensor(m, m->x, H), w = tokens_tensor(m, m->weight, K);
    EpTensor recv = rows_tensor(m, m->recv, H), y = rows_tensor(m, m->y, H);
    EpTensor slots = rows_tensor(m, m->slot_weight, is_flat(m) ? K : 1);
    EpTensor out = tokens_tensor(m, m->out, H);
    CHECK_OK(ep_dispatch(m->handle, NULL, NULL, &x, m->weighted ? &w : NULL, NULL, NULL, &recv,
                         m->weighted ? &slots : NULL, NULL, NULL));
    experts_forward(m);
    int weigh = m->weighted && !is_flat(m);
    CHECK_OK(ep_combine(m->handle, NULL, &y, weigh ? &slots : NULL, NULL, NULL, &out));
}

static void model_backward(Model *m) {
    EpTensor grad = tokens_tensor(m, m->out_grad, H), y = rows_tensor(m, m->y, H);
    EpTensor slots = rows_tensor(m, m->slot_weight, is_flat(m) ? K : 1);
    EpTensor slots_grad = rows_tensor(m, m->slot_grad, is_flat(m) ? K : 1);
    EpTensor y_grad = rows_tensor(m, m->y_grad, H), recv_grad = rows_tensor(m, m->recv_grad, H);
    EpTensor x_grad = tokens_tensor(m, m->x_grad, H), w_grad = tokens_tensor(m, m->weight_grad, K);
    int weigh = m->weighted && !is_flat(m);
    CHECK_OK(ep_combine_backward(m->handle, NULL, &grad, weigh ? &slots : NULL, weigh ? &y : NULL,
                                 NULL, &y_grad, weigh ? &slots_grad : NULL));
    experts_backward(m);
    CHECK_OK(ep_dispatch_backward(m->handle, NULL, &recv_grad, m->weighted ? &slots_grad : NULL,
                                  NULL, &x_grad, m->weighted ? &w_grad : NULL));
}

/* Returns the sum over all ranks of <out, out_grad>. */
static double loss(Model *m) {
    double all[RANKS], sum = 0, total = 0;
    model_forward(m);
    for (int i = 0; i < me(m)->rows * H; i++)
        sum += (double)m->out[i] * m->out_grad[i];
    CHECK_OK(m->bootstrap->allgather(m->bootstrap->context, &sum, all, sizeof(sum), 60));
    for (int r = 0; r < RANKS; r++)
        total += all[r];
    return total;
}

/* Returns the central difference of the loss. Collective: the rank that owns the parameter passes
 * it, the others pass NULL. */
static double difference(Model *m, float *parameter) {
    const float step = 0.25f;
    float before = parameter ? *parameter : 0;
    if (parameter) *parameter = before + step;
    double above = loss(m);
    if (parameter) *parameter = before - step;
    double below = loss(m);
    if (parameter) *parameter = before;
    return (above - below) / (2 * (double)step);
}

static void compare(Model *m, int owner, float *parameters, const float *gradient, int n) {
    for (int i = 0; i < n; i++) {
        int own = m->bootstrap->rank == owner;
        double slope = difference(m, own ? &parameters[i] : NULL);
        if (own)
            CHECK(fabs(slope - gradient[i]) < 2e-5, "parameter %d of rank %d: %.7g, not %.7g", i,
                  owner, (double)gradient[i], slope);
    }
}

static void fill(Model *m) {
    Random random = random_stream(5, (uint64_t)m->bootstrap->rank, 0);
    for (int i = 0; i < TOKENS * H; i++)
        m->x[i] = random_unit(&random);
    for (int i = 0; i < TOKENS * K; i++)
        m->weight[i] = random_unit(&random);
    for (int i = 0; i < TOKENS * H; i++)
        m->out_grad[i] = random_unit(&random);
}

static void check_model(Model *m) {
    Step step = step_of(m);
    step_prepare(&step);
    REQUIRE(me(m)->buffer_rows <= MAX_ROWS, "%lld rows", (long long)me(m)->buffer_rows);
    fill(m);
    model_forward(m);
    model_backward(m);
    for (int r = 0; r < RANKS; r++) {
        int rows = m->world->rank[r].rows;
        compare(m, r, m->x, m->x_grad, rows * H);
        if (m->weighted) compare(m, r, m->weight, m->weight_grad, rows * K);
    }
}

static void gradients_body(const EpBootstrap *bootstrap, void *arg) {
    Step step = open_step(bootstrap, arg);
    Model *m = aligned_alloc(64, (sizeof(*m) + 63) / 64 * 64);
    memset(m, 0, sizeof(*m));
    m->bootstrap = bootstrap, m->world = step.world, m->handle = step.handle;
    m->weighted = step.world->c.weighted;
    if (m->handle) check_model(m);
    close_step(&step);
    free(m);
}

static void check_gradients(EpLayout layout, int weighted) {
    Case c = case_of("ranks=%d experts=5 top_k=%d hidden=%d max_tokens=%d spread=full "
                     "row_type=fp32 sum_type=fp32 alignment=2 weighted=%d masked_percent=15 "
                     "duplicates=1 seed=21",
                     RANKS, K, H, TOKENS, weighted);
    c.layout = layout;
    run_ranks(RANKS, gradients_body, &c);
}

#define GRADIENTS(name, layout)                                  \
    Test(combine_gradients, name##_weighted, .timeout = 120) {   \
        check_gradients(layout, 1);                              \
    }                                                            \
    Test(combine_gradients, name##_unweighted, .timeout = 120) { \
        check_gradients(layout, 0);                              \
    }

GRADIENTS(expert_major, EP_LAYOUT_EXPERT_MAJOR)
GRADIENTS(flat, EP_LAYOUT_FLAT)
GRADIENTS(batched, EP_LAYOUT_BATCHED)
