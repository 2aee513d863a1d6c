/* SPDX-License-Identifier: Apache-2.0 */

/** The layer's GEMMs on GPUs by cuBLAS, group by group or all groups in one call. It is loaded when
 * a layer runs on GPUs, so that ep_moe needs it nowhere else. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/gpu.h"
#include "tools/moe/cuda_state.h"

/* CUDA may be installed without it. */
#if EP_WITH_CUDA && __has_include(<cublas_v2.h>)

#include <cublas_v2.h>
#include <dlfcn.h>

/** Scratch for operands and products that cuBLAS cannot take or give as they are. */
typedef struct Scratch {
    void *data;
    size_t bytes;
} Scratch;

enum { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_PARTS, NUM_SCRATCH };

/* The products of all groups as one call takes them, each array [..., count]. */
typedef struct Batch {
    const void *a, *b, *c; /* of the first product */
    struct Batch *next;
    int count;
    int *numbers;                  /* m, n, k, the pitches of a and b, and 1 */
    float *factors;                /* 1 and 0 */
    cublasOperation_t *operations; /* on a and b */
    void **matrices;               /* addresses of a, b and c, in the GPU's memory */
} Batch;

enum { NUM_NUMBERS = 6, NUM_STREAMS = 4 };

/* A stream beside the device's, with a handle of its own: each has a workspace. */
typedef struct Beside {
    cublasHandle_t handle;
    cudaStream_t stream;
    cudaEvent_t done;
} Beside;

typedef struct Cublas {
    void *library;
    cublasHandle_t handle;
    Beside beside[NUM_STREAMS];
    cudaEvent_t begin; /* of what runs on these streams */
    __typeof__(&cublasCreate_v2) create;
    __typeof__(&cublasDestroy_v2) destroy;
    __typeof__(&cublasSetStream_v2) set_stream;
    __typeof__(&cublasGetVersion_v2) get_version;
    __typeof__(&cublasGemmEx) gemm;
    __typeof__(&cublasGemmStridedBatchedEx) batched;
    cublasStatus_t (*limit)(cublasHandle_t handle, int sms); /* NULL: it has none */
    __typeof__(&cublasGemmGroupedBatchedEx) grouped;         /* NULL: older than cuBLAS 12.5 */
    Scratch scratch[NUM_SCRATCH];
    Batch *batches; /* six for a layer */
} Cublas;

static bool cublas_ok(cublasStatus_t status, const char *call) {
    return status == CUBLAS_STATUS_SUCCESS || bench_fail("%s: status %d", call, (int)status);
}

/* Look up a function. memcpy, since ISO C has no cast from void * to a function pointer. */
static bool find(const Cublas *cublas, const char *name, void *function) {
    void *address = dlsym(cublas->library, name);
    memcpy(function, &address, sizeof(address));
    return address || bench_fail("cuBLAS has no %s", name);
}

static bool load(Cublas *c) {
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    for (int i = 0; i < 3 && !c->library; i++)
        c->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!c->library) return bench_fail("--backend cuda: expected cuBLAS, got: %s", dlerror());
    return find(c, "cublasCreate_v2", &c->create) && find(c, "cublasDestroy_v2", &c->destroy) &&
           find(c, "cublasSetStream_v2", &c->set_stream) &&
           find(c, "cublasGetVersion_v2", &c->get_version) && find(c, "cublasGemmEx", &c->gemm) &&
           find(c, "cublasGemmStridedBatchedEx", &c->batched);
}

/* Without it each group has a call of its own. */
static bool find_grouped(const MoeDevice *d, Cublas *c) {
    void *address = dlsym(c->library, "cublasGemmGroupedBatchedEx");
    memcpy(&c->grouped, &address, sizeof(address));
    return address || d->grouping != GROUPING_ONE ||
           bench_refuse("--gemms one: expected cuBLAS 12.5 or newer");
}

static void release_batches(Cublas *c) {
    for (Batch *b = c->batches, *next; b; b = next) {
        next = b->next;
        free(b->numbers);
        free(b->factors);
        free(b->operations);
        cudaFree((void *)b->matrices);
        free(b);
    }
}

static bool open_beside(const Cublas *c, Beside *out) {
    int least = 0, greatest = 0;
    return cuda_ok(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                   "cudaDeviceGetStreamPriorityRange") &&
           cuda_ok(cudaStreamCreateWithPriority(&out->stream, cudaStreamNonBlocking, least),
                   "cudaStreamCreateWithPriority") &&
           cuda_ok(cudaEventCreateWithFlags(&out->done, cudaEventDisableTiming),
                   "cudaEventCreateWithFlags") &&
           cublas_ok(c->create(&out->handle), "cublasCreate") &&
           cublas_ok(c->set_stream(out->handle, out->stream), "cublasSetStream");
}

static bool open_streams(Cublas *c) {
    bool ok = cuda_ok(cudaEventCreateWithFlags(&c->begin, cudaEventDisableTiming),
                      "cudaEventCreateWithFlags");
    for (int i = 0; ok && i < NUM_STREAMS; i++)
        ok = open_beside(c, &c->beside[i]);
    return ok;
}

bool cublas_limit(MoeDevice *d, int product_sms) {
    Cublas *c = cuda_state(d)->cublas;
    void *address = dlsym(c->library, "cublasSetSmCountTarget");
    memcpy(&c->limit, &address, sizeof(address));
    bool ok = !c->limit || cublas_ok(c->limit(c->handle, product_sms), "cublasSetSmCountTarget");
    for (int i = 0; ok && c->limit && i < NUM_STREAMS; i++)
        ok = cublas_ok(c->limit(c->beside[i].handle, product_sms), "cublasSetSmCountTarget");
    d->product_sms = product_sms;
    return ok;
}

static void close_streams(Cublas *c) {
    for (int i = 0; i < NUM_STREAMS; i++) {
        if (c->beside[i].handle) c->destroy(c->beside[i].handle);
        if (c->beside[i].done) cudaEventDestroy(c->beside[i].done);
        if (c->beside[i].stream) cudaStreamDestroy(c->beside[i].stream);
    }
    if (c->begin) cudaEventDestroy(c->begin);
}

/* The library stays loaded: its threads may outlive the handle. */
bool cublas_open(MoeDevice *d, char *name, size_t bytes) {
    int version = 0;
    Cublas *c = bench_alloc(1, sizeof(Cublas), "cuBLAS");
    cuda_state(d)->cublas = c;
    if (!c || !load(c) || !find_grouped(d, c) ||
        !cublas_ok(c->create(&c->handle), "cublasCreate") ||
        !cublas_ok(c->set_stream(c->handle, cuda_stream_of(d)), "cublasSetStream") ||
        !open_streams(c))
        return false;
    c->get_version(c->handle, &version);
    snprintf(name, bytes, "cuBLAS %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return true;
}

void cublas_close(MoeDevice *d) {
    Cublas *c = cuda_state(d)->cublas;
    for (int i = 0; c && i < NUM_SCRATCH; i++)
        cudaFree(c->scratch[i].data);
    if (c) release_batches(c);
    if (c) close_streams(c);
    if (c && c->handle) c->destroy(c->handle);
    free(c);
}

static cudaDataType type_of(EpType type) {
    return type == EP_TYPE_BF16 ? CUDA_R_16BF : type == EP_TYPE_FP16 ? CUDA_R_16F : CUDA_R_32F;
}

/** A matrix, row-major and contiguous. */
typedef struct Matrix {
    const void *data;
    EpType type;
    bool transposed;
} Matrix;

typedef struct Gemm {
    int64_t m, n, k;
    Matrix a, b, c;
    bool adds; /* to what is in c */
} Gemm;

static cublasOperation_t operation(Matrix matrix) {
    return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

/* c[m, n] = a * b: a is [m, k], or [k, m] transposed, and so is b. `a` and `b` have one type, `c`
 * that or FP32. Sums are in fp32. cuBLAS has columns where the layer has rows: it computes the
 * transposed product, b^T * a^T. */
static bool multiply_one(MoeDevice *d, cublasHandle_t handle, const Gemm *g) {
    const Cublas *cublas = cuda_state(d)->cublas;
    const float one = 1, before = g->adds ? 1 : 0;
    d->gemm_calls++;
    return cublas_ok(cublas->gemm(handle, operation(g->b), operation(g->a), (int)g->n, (int)g->m,
                                  (int)g->k, &one, g->b.data, type_of(g->b.type),
                                  (int)(g->b.transposed ? g->k : g->n), g->a.data,
                                  type_of(g->a.type), (int)(g->a.transposed ? g->m : g->k), &before,
                                  (void *)(uintptr_t)g->c.data, type_of(g->c.type), (int)g->n,
                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     "cublasGemmEx");
}

static bool multiply_each(MoeDevice *d, const Gemm *gemms, int count) {
    const Cublas *cublas = cuda_state(d)->cublas;
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = multiply_one(d, cublas->handle, &gemms[i]);
    return ok;
}

/* ---- each on one of several streams -------------------------------------------------------- */

static bool multiply_beside(MoeDevice *d, const Gemm *gemms, int count) {
    const Cublas *cublas = cuda_state(d)->cublas;
    const int used = count < NUM_STREAMS ? count : NUM_STREAMS;
    bool ok = cuda_ok(cudaEventRecord(cublas->begin, cuda_stream_of(d)), "cudaEventRecord");
    for (int i = 0; ok && i < used; i++)
        ok = cuda_ok(cudaStreamWaitEvent(cublas->beside[i].stream, cublas->begin, 0),
                     "cudaStreamWaitEvent");
    for (int i = 0; ok && i < count; i++)
        ok = multiply_one(d, cublas->beside[i % NUM_STREAMS].handle, &gemms[i]);
    for (int i = 0; ok && i < used; i++)
        ok = cuda_ok(cudaEventRecord(cublas->beside[i].done, cublas->beside[i].stream),
                     "cudaEventRecord") &&
             cuda_ok(cudaStreamWaitEvent(cuda_stream_of(d), cublas->beside[i].done, 0),
                     "cudaStreamWaitEvent");
    return ok;
}

/* ---- all groups in one call ---------------------------------------------------------------- */

static bool fill_batch(MoeDevice *d, const Gemm *gemms, int count, Batch *b) {
    const void **matrices = bench_alloc((size_t)count * 3, sizeof(void *), "addresses of matrices");
    for (int i = 0; matrices && i < count; i++) {
        const Gemm *g = &gemms[i];
        const int64_t numbers[NUM_NUMBERS] = {
            g->m, g->n, g->k, g->a.transposed ? g->m : g->k, g->b.transposed ? g->k : g->n, 1};
        for (int n = 0; n < NUM_NUMBERS; n++)
            b->numbers[n * count + i] = (int)numbers[n];
        b->factors[i] = 1, b->factors[count + i] = 0;
        b->operations[i] = operation(g->a), b->operations[count + i] = operation(g->b);
        matrices[i] = g->a.data, matrices[count + i] = g->b.data;
        matrices[2 * count + i] = g->c.data;
    }
    const size_t bytes = (size_t)count * 3 * sizeof(void *);
    bool ok = matrices && d->upload(d, (void *)b->matrices, matrices, bytes);
    free((void *)matrices);
    return ok;
}

/* It is made in the first step, which is not timed, and found again by its first product. */
static Batch *find_batch(MoeDevice *d, const Gemm *gemms, int count) {
    Cublas *cublas = cuda_state(d)->cublas;
    const size_t n = (size_t)count;
    for (Batch *b = cublas->batches; b; b = b->next)
        if (b->a == gemms->a.data && b->b == gemms->b.data && b->c == gemms->c.data &&
            b->count == count)
            return b;
    Batch *b = bench_alloc(1, sizeof(Batch), "a grouped product");
    if (!b) return NULL;
    *b = (Batch){.a = gemms->a.data, .b = gemms->b.data, .c = gemms->c.data, .count = count};
    b->next = cublas->batches, cublas->batches = b;
    b->numbers = bench_alloc(NUM_NUMBERS * n, sizeof(int), "sizes of products");
    b->factors = bench_alloc(2 * n, sizeof(float), "factors of products");
    b->operations = bench_alloc(2 * n, sizeof(*b->operations), "operations of products");
    b->matrices = d->alloc(d, 3 * n * sizeof(void *), "addresses of matrices");
    bool ok =
        b->numbers && b->factors && b->operations && b->matrices && fill_batch(d, gemms, count, b);
    return ok ? b : NULL;
}

static bool multiply_together(MoeDevice *d, const Gemm *gemms, int count) {
    const Cublas *cublas = cuda_state(d)->cublas;
    const Batch *b = find_batch(d, gemms, count);
    if (!b) return false;
    const int *m = b->numbers, *n = m + count, *k = n + count, *lda = k + count, *ldb = lda + count;
    const void *const *matrices = (const void *const *)b->matrices;
    d->gemm_calls++;
    return cublas_ok(cublas->grouped(cublas->handle, b->operations + count, b->operations, n, m, k,
                                     b->factors, matrices + count, type_of(gemms->b.type), ldb,
                                     matrices, type_of(gemms->a.type), lda, b->factors + count,
                                     b->matrices + 2 * count, type_of(gemms->c.type), n, count,
                                     ldb + count, CUBLAS_COMPUTE_32F),
                     "cublasGemmGroupedBatchedEx");
}

/* Rows begin on 16 bytes, as matrix units want them. */
static bool is_aligned(const Gemm *g) {
    const int64_t unit = (int64_t)ep_type_bytes(g->a.type);
    return unit * (g->a.transposed ? g->m : g->k) % 16 == 0 && unit * g->n % 16 == 0 &&
           unit * (g->b.transposed ? g->k : g->n) % 16 == 0;
}

/* A launch takes the host some 5 us, in which a GPU makes about 4 Gflop. Groups that have less in
 * the mean are multiplied in one call. It takes matrices of one type. */
static bool takes_one_call(const MoeDevice *d, const Gemm *gemms, int count) {
    const Cublas *cublas = cuda_state(d)->cublas;
    double flops = 0;
    if (count < 2 || gemms->adds || !cublas->grouped || gemms->c.type != gemms->a.type)
        return false;
    for (int i = 0; i < count; i++)
        flops += 2. * (double)gemms[i].m * (double)gemms[i].n * (double)gemms[i].k;
    return d->grouping == GROUPING_ONE ||
           (d->grouping == GROUPING_AUTO && is_aligned(gemms) && flops < 4e9 * count);
}

static bool multiply_all(MoeDevice *d, const Gemm *gemms, int count) {
    if (takes_one_call(d, gemms, count)) return multiply_together(d, gemms, count);
    if (count < 2 || d->grouping == GROUPING_EACH) return multiply_each(d, gemms, count);
    return multiply_beside(d, gemms, count);
}

/* ---- groups -------------------------------------------------------------------------------- */

/* It grows in the first step, which is not timed. */
static void *reserve(MoeDevice *d, int which, int64_t elements) {
    Scratch *scratch = &((Cublas *)cuda_state(d)->cublas)->scratch[which];
    const size_t bytes = (size_t)elements * sizeof(float);
    if (scratch->data && bytes <= scratch->bytes) return scratch->data;
    if (!d->finish(d)) return NULL;
    cudaFree(scratch->data);
    scratch->data = d->alloc(d, bytes, "operands of a GEMM");
    scratch->bytes = scratch->data ? bytes : 0;
    return scratch->data;
}

/* `t` in fp32: itself, or a copy. */
static bool widen(MoeDevice *d, int which, const EpTensor *t, bool filled, EpTensor *out) {
    *out = *t;
    if (t->type == EP_TYPE_FP32) return true;
    out->type = EP_TYPE_FP32;
    out->data = reserve(d, which, tensor_elements(t));
    return out->data && (!filled || cuda_convert(d, t, out));
}

typedef bool (*Product)(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                        bool transposed, const EpTensor *c);

static bool cublas_takes(const EpTensor *a, const EpTensor *b, const EpTensor *c) {
    return a->type == b->type && (c->type == a->type || c->type == EP_TYPE_FP32);
}

/* cuBLAS takes operands of one type. Others become fp32 first, and so does their product. */
static bool run_product(MoeDevice *d, Product product, const Groups *groups, const EpTensor *a,
                        const EpTensor *b, bool transposed, const EpTensor *c) {
    EpTensor wide_a, wide_b, wide_c;
    const Cublas *cublas = cuda_state(d)->cublas;
    if (!cublas_ok(cublas->set_stream(cublas->handle, cuda_stream_of(d)), "cublasSetStream"))
        return false;
    if (cublas_takes(a, b, c)) return product(d, groups, a, b, transposed, c);
    if (!widen(d, SCRATCH_A, a, true, &wide_a) || !widen(d, SCRATCH_B, b, true, &wide_b) ||
        !widen(d, SCRATCH_C, c, false, &wide_c) ||
        !product(d, groups, &wide_a, &wide_b, transposed, &wide_c))
        return false;
    return c->type == EP_TYPE_FP32 || cuda_convert(d, &wide_c, c);
}

static Matrix matrix(const EpTensor *t, int64_t at, bool transposed) {
    return (Matrix){(const char *)t->data + (size_t)at * ep_type_bytes(t->type), t->type,
                    transposed};
}

static bool add_groups(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                       bool transposed, const EpTensor *c, bool adds) {
    const int64_t k = a->shape[1], n = c->shape[1];
    Gemm *gemms = bench_alloc((size_t)groups->num, sizeof(Gemm), "products");
    int count = 0;
    for (int32_t g = 0; gemms && g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        if (rows > 0)
            gemms[count++] = (Gemm){rows,
                                    n,
                                    k,
                                    matrix(a, first * k, false),
                                    matrix(b, g * k * n, transposed),
                                    matrix(c, first * n, false),
                                    adds};
    }
    bool ok = gemms && multiply_all(d, gemms, count);
    free(gemms);
    return ok;
}

static bool multiply_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                            const EpTensor *b, bool transposed, const EpTensor *c) {
    return add_groups(d, groups, a, b, transposed, c, false);
}

static bool accumulate_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                              const EpTensor *b, bool transposed, const EpTensor *c) {
    return add_groups(d, groups, a, b, transposed, c, true);
}

/* A group without rows has a gradient of zero. */
static bool correlate_groups(MoeDevice *d, const Groups *groups, const EpTensor *a,
                             const EpTensor *b, bool transposed, const EpTensor *c) {
    const int64_t m = a->shape[1], n = b->shape[1];
    const size_t bytes = (size_t)(m * n) * ep_type_bytes(c->type);
    Gemm *gemms = bench_alloc((size_t)groups->num, sizeof(Gemm), "products");
    bool ok = gemms != NULL;
    int count = 0;
    (void)transposed;
    for (int32_t g = 0; ok && g < groups->num; g++) {
        const int64_t first = groups->first[g], rows = groups->count[g];
        const Matrix out = matrix(c, g * m * n, false);
        if (rows == 0)
            ok = cuda_ok(cudaMemsetAsync((void *)(uintptr_t)out.data, 0, bytes, cuda_stream_of(d)),
                         "cudaMemsetAsync");
        else
            gemms[count++] = (Gemm){
                m, n, rows, matrix(a, first * m, true), matrix(b, first * n, false), out, false};
    }
    ok = ok && multiply_all(d, gemms, count);
    free(gemms);
    return ok;
}

bool cuda_multiply(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                   bool transposed, const EpTensor *c) {
    return run_product(d, multiply_groups, groups, a, b, transposed, c);
}

/* ---- few columns --------------------------------------------------------------------------- */

/* A product with few columns has few tiles of 128 x 128. So k is cut into parts, until there are
 * tiles for most multiprocessors. */
static int choose_parts(const MoeDevice *d, int64_t rows, int64_t columns, int64_t k) {
    const int64_t tiles = ((rows + 127) / 128) * ((columns + 127) / 128);
    int parts = 1;
    while (parts < 32 && k % (16 * parts) == 0 && k / (2 * parts) >= 128 &&
           tiles * parts * 2 <= 2 * d->multiprocessors)
        parts *= 2;
    return parts;
}

/* One product for each part of k. */
bool cuda_multiply_narrow(MoeDevice *d, const EpTensor *a, const EpTensor *b, const EpTensor *c) {
    const Cublas *cublas = cuda_state(d)->cublas;
    const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
    const int parts = choose_parts(d, m, n, k);
    const float one = 1, zero = 0;
    if (m == 0) return true;
    void *sums = reserve(d, SCRATCH_PARTS, parts * m * n);
    d->gemm_calls++;
    return sums &&
           cublas_ok(cublas->set_stream(cublas->handle, cuda_stream_of(d)), "cublasSetStream") &&
           cublas_ok(cublas->batched(cublas->handle, CUBLAS_OP_N, CUBLAS_OP_N, (int)n, (int)m,
                                     (int)k / parts, &one, b->data, type_of(b->type), (int)n,
                                     k / parts * n, a->data, type_of(a->type), (int)k, k / parts,
                                     &zero, sums, CUDA_R_32F, (int)n, m * n, parts,
                                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     "cublasGemmStridedBatchedEx") &&
           cuda_add_parts(d, sums, parts, c);
}

/* Of operands and a result of one type. */
bool cuda_accumulate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                     bool transposed, const EpTensor *c) {
    return run_product(d, accumulate_groups, groups, a, b, transposed, c);
}

bool cuda_correlate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                    const EpTensor *c) {
    return run_product(d, correlate_groups, groups, a, b, false, c);
}

#elif EP_WITH_CUDA

bool cublas_open(MoeDevice *d, char *name, size_t bytes) {
    (void)d, (void)name, (void)bytes;
    return bench_refuse("--backend: expected host, got cuda, but this ep_moe was built without "
                        "cuBLAS");
}

void cublas_close(MoeDevice *d) {
    (void)d;
}

bool cublas_limit(MoeDevice *d, int product_sms) {
    d->product_sms = product_sms;
    return true;
}

bool cuda_multiply_narrow(MoeDevice *d, const EpTensor *a, const EpTensor *b, const EpTensor *c) {
    (void)a, (void)b, (void)c;
    return gpu_missing(d);
}

bool cuda_multiply(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                   bool transposed, const EpTensor *c) {
    (void)groups, (void)a, (void)b, (void)transposed, (void)c;
    return gpu_missing(d);
}

bool cuda_accumulate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                     bool transposed, const EpTensor *c) {
    return cuda_multiply(d, groups, a, b, transposed, c);
}

bool cuda_correlate(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                    const EpTensor *c) {
    return cuda_multiply(d, groups, a, b, false, c);
}

#endif
