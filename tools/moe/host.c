/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's arithmetic on CPUs: grouped GEMMs and memory. The rest is in host_rows.c. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/data.h"
#include "tools/common/time.h"
#include "tools/common/util.h"
#include "tools/moe/host_rows.h"

/* ---- products of fp32 matrices: OpenBLAS, or loops in builds without it -------------------- */

#if MOE_WITH_OPENBLAS

#include <cblas.h>
#include <pthread.h>

/* Ranks may be threads of one process, which has one number of threads for OpenBLAS. */
static void set_threads(int threads) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    openblas_set_num_threads(threads);
    pthread_mutex_unlock(&mutex);
}

/* Set the threads of each product, and say what multiplies. */
static void blas_start(int threads, char *name, size_t bytes) {
    /* "OpenBLAS 0.3.21 ...": the name and the version. */
    int version = 0, begin = 0;
    const char *config = openblas_get_config();
    sscanf(config, "OpenBLAS %n%*s%n", &begin, &version);
    set_threads(threads);
    snprintf(name, bytes, "OpenBLAS %.*s, %d thread%s", version - begin, config + begin, threads,
             threads == 1 ? "" : "s");
}

static void multiply(bool transposed_a, bool transposed_b, int64_t m, int64_t n, int64_t k,
                     const float *a, const float *b, float *c) {
    cblas_sgemm(CblasRowMajor, transposed_a ? CblasTrans : CblasNoTrans,
                transposed_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, 1, a,
                (int)(transposed_a ? m : k), b, (int)(transposed_b ? k : n), 0, c, (int)n);
}

#else

static void blas_start(int threads, char *name, size_t bytes) {
    (void)threads;
    snprintf(name, bytes, "built-in loops, since this build has no OpenBLAS, 1 thread");
}

static float dot(const float *a, int64_t stride, const float *b, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += a[i * stride] * b[i];
    return sum;
}

static void multiply(bool transposed_a, bool transposed_b, int64_t m, int64_t n, int64_t k,
                     const float *a, const float *b, float *c) {
    const int64_t row = transposed_a ? 1 : k, column = transposed_a ? m : 1;
    memset(c, 0, (size_t)(m * n) * sizeof(float));
    for (int64_t i = 0; i < m; i++) {
        for (int64_t p = 0; !transposed_b && p < k; p++)
            data_fma(c + i * n, a[i * row + p * column], b + p * n, n);
        for (int64_t j = 0; transposed_b && j < n; j++)
            c[i * n + j] = dot(a + i * row, column, b + j * k, k);
    }
}

#endif

/* c[m, n] = A * B, row-major and contiguous; A is a[m, k], or a[k, m] transposed, and so is B. */
static void blas_multiply(bool transposed_a, bool transposed_b, int64_t m, int64_t n, int64_t k,
                          const float *a, const float *b, float *c) {
    if (m == 0 || n == 0) return;
    if (k == 0)
        memset(c, 0, (size_t)(m * n) * sizeof(float));
    else
        multiply(transposed_a, transposed_b, m, n, k, a, b, c);
}

/* ---- groups -------------------------------------------------------------------------------- */

/* Scratch for operands that are not fp32. It grows to what the largest GEMM needs. */
typedef struct Scratch {
    float *data;
    int64_t elements;
} Scratch;

typedef struct HostState {
    Scratch a, b, c;
} HostState;

static float *reserve(Scratch *scratch, int64_t elements) {
    if (scratch->data && elements <= scratch->elements) return scratch->data;
    free(scratch->data);
    scratch->data = bench_alloc((size_t)elements, sizeof(float), "operands of a GEMM");
    scratch->elements = scratch->data ? elements : 0;
    return scratch->data;
}

static char *element(const EpTensor *t, int64_t at) {
    return (char *)t->data + (size_t)at * ep_type_bytes(t->type);
}

/* Elements at .. at + count - 1 as fp32: in place, or converted. NULL with a message. */
static const float *load(const EpTensor *t, int64_t at, int64_t count, Scratch *scratch) {
    if (t->type == EP_TYPE_FP32) return (const float *)(const void *)element(t, at);
    float *out = reserve(scratch, count);
    if (out) data_to_float(t->type, element(t, at), out, count);
    return out;
}

/* Where a product of fp32 goes before store brings it to its place. */
static float *target(const EpTensor *t, int64_t at, int64_t count, Scratch *scratch) {
    if (t->type == EP_TYPE_FP32) return (float *)(void *)element(t, at);
    return reserve(scratch, count);
}

static void store(const EpTensor *t, int64_t at, int64_t count, const float *product) {
    if (t->type != EP_TYPE_FP32) data_from_float(t->type, product, element(t, at), count);
}

static bool multiply_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                            const EpTensor *b, bool transposed, const EpTensor *c, bool adds) {
    HostState *s = d->state;
    const int64_t k = a->shape[1], n = c->shape[1];
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        if (rows == 0) continue;
        const float *left = load(a, first * k, rows * k, &s->a);
        const float *right = load(b, g * k * n, k * n, &s->b);
        float *product = adds ? reserve(&s->c, rows * n) : target(c, first * n, rows * n, &s->c);
        if (!left || !right || !product) return false;
        d->gemm_calls++;
        blas_multiply(false, transposed, rows, n, k, left, right, product);
        if (adds)
            host_add(product, rows * n, c->type, element(c, first * n));
        else
            store(c, first * n, rows * n, product);
    }
    return true;
}

static bool host_multiply(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                          bool transposed, const EpTensor *c) {
    return multiply_groups(d, groups, a, b, transposed, c, false);
}

static bool host_accumulate(MoeDevice *d, const Groups *groups, const EpTensor *a,
                            const EpTensor *b, bool transposed, const EpTensor *c) {
    return multiply_groups(d, groups, a, b, transposed, c, true);
}

static bool host_correlate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                           const EpTensor *c) {
    HostState *s = d->state;
    const int64_t m = a->shape[1], n = b->shape[1];
    for (int32_t g = 0; g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        const float *left = load(a, first * m, rows * m, &s->a);
        const float *right = load(b, first * n, rows * n, &s->b);
        float *product = target(c, g * m * n, m * n, &s->c);
        if (!left || !right || !product) return false;
        d->gemm_calls++;
        blas_multiply(true, false, m, n, rows, left, right, product);
        store(c, g * m * n, m * n, product);
    }
    return true;
}

/* ---- memory, streams and time -------------------------------------------------------------- */

static void *host_alloc(MoeDevice *d, size_t bytes, const char *what) {
    (void)d;
    return bench_alloc(1, bytes, what);
}

static int64_t host_room(MoeDevice *d) {
    (void)d;
    return (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

static void host_release(MoeDevice *d, void *memory) {
    (void)d;
    free(memory);
}

static bool host_copy(MoeDevice *d, void *to, const void *from, size_t bytes) {
    (void)d;
    memcpy(to, from, bytes);
    return true;
}

static bool host_set(MoeDevice *d, void *to, int byte, size_t bytes) {
    (void)d;
    memset(to, byte, bytes);
    return true;
}

/* finish, fork and join: what was called is over. */
static bool host_finish(MoeDevice *d) {
    (void)d;
    return true;
}

static bool host_point(MoeDevice *d, bool side, int point) {
    (void)d, (void)side, (void)point;
    return true;
}

static bool host_limit(MoeDevice *d, int product_sms) {
    (void)d, (void)product_sms;
    return true;
}

static bool host_multiply_narrow(MoeDevice *d, const EpTensor *a, const EpTensor *b,
                                 const EpTensor *c) {
    const int32_t rows[2] = {0, (int32_t)a->shape[0]};
    const Groups all = {1, &rows[0], &rows[1], NULL};
    return host_multiply(d, &all, a, b, false, c);
}

static void host_exchange(MoeDevice *d) {
    (void)d;
}

static bool host_start(MoeDevice *d) {
    d->took_us = -time_now_us();
    return true;
}

static bool host_stop(MoeDevice *d) {
    d->took_us += time_now_us();
    return true;
}

static void host_destroy(MoeDevice *d) {
    HostState *s = d->state;
    if (!s) return;
    free(s->a.data);
    free(s->b.data);
    free(s->c.data);
    free(s);
    d->state = NULL;
}

bool moe_host_create(MoeDevice *out, int threads) {
    *out = (MoeDevice){.name = "host",
                       .backend = EP_BACKEND_HOST,
                       .square = 384,
                       .alloc = host_alloc,
                       .release = host_release,
                       .upload = host_copy,
                       .download = host_copy,
                       .room = host_room,
                       .copy = host_copy,
                       .set = host_set,
                       .fill = host_fill,
                       .differ = host_differ,
                       .finish = host_finish,
                       .fork = host_finish,
                       .join = host_finish,
                       .start = host_start,
                       .stop = host_stop,
                       .mark = host_point,
                       .await = host_point,
                       .limit = host_limit,
                       .exchange = host_exchange,
                       .destroy = host_destroy,
                       .multiply = host_multiply,
                       .multiply_narrow = host_multiply_narrow,
                       .accumulate = host_accumulate,
                       .correlate = host_correlate,
                       .choose = host_choose,
                       .choose_backward = host_choose_backward,
                       .activate = host_activate,
                       .activate_backward = host_activate_backward,
                       .dequantise = host_dequantise};
    blas_start(threads, out->gemm, sizeof(out->gemm));
    out->state = bench_alloc(1, sizeof(HostState), "scratch");
    return out->state != NULL;
}
