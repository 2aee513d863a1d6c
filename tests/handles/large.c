/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors beyond 2^31 elements and 4 GiB, of which few rows are touched. Every rank's tokens of
 * even number go to all experts of rank 0, the others to those of rank 1. The experts return their
 * rows.
 */
#include <sys/mman.h>

#include "ep/ep_quant.h"
#include "tests/cases/run.h"
#include "tests/oracle/number.h"

#if TESTS_ON_GPU
#include <cuda_runtime_api.h>
#endif

enum { RANKS = 2, EACH = 3, TOKENS = 5, HIDDEN = 32768, FAR = 32768, MOST = FAR + 8 };
#define ROW_BYTES ((size_t)HIDDEN * 2)

/* ---- memory ---- */

/* Returns zeroed memory, of which pages are taken where they are touched. */
static char *open_memory(size_t bytes) {
    void *memory = NULL;
#if TESTS_ON_GPU
    REQUIRE(cudaMalloc(&memory, bytes) == cudaSuccess, "no room for %zu bytes", bytes);
#else
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                  -1, 0);
    REQUIRE(memory != MAP_FAILED, "no room for %zu bytes", bytes);
#endif
    return memory;
}

static void close_memory(char *memory, size_t bytes) {
#if TESTS_ON_GPU
    (void)bytes, cudaFree(memory);
#else
    munmap(memory, bytes);
#endif
}

/* Copy bytes, from or to memory of open_memory. */
static void copy(void *to, const void *from, size_t bytes) {
#if TESTS_ON_GPU
    CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess, "cudaMemcpy");
#else
    memcpy(to, from, bytes);
#endif
}

/* All elements of a row are one number. */
static void put_row(char *rows, int64_t row, float value) {
    static _Thread_local _Alignas(64) char copied[ROW_BYTES];
    for (int h = 0; h < HIDDEN; h++)
        number_set(copied, EP_TYPE_BF16, h, value);
    copy(rows + (size_t)row * ROW_BYTES, copied, ROW_BYTES);
}

static void check_row(const char *rows, int64_t row, float value, const char *what) {
    static _Thread_local _Alignas(64) char copied[ROW_BYTES];
    copy(copied, rows + (size_t)row * ROW_BYTES, ROW_BYTES);
    for (int h = 0; h < HIDDEN && !check_failure()[0]; h++) {
        float got = number_get(copied, EP_TYPE_BF16, h);
        CHECK(got == value, "%s: row %lld, element %d: %g instead of %g", what, (long long)row, h,
              (double)got, (double)value);
    }
}

/* ---- receive rows ---- */

static float value_of(int source, int token) {
    return (float)(1 + 8 * source + token);
}

/* Visit the receive rows of a rank: write those of its experts' outputs, or compare. */
static void each_row(const EpTensor *rows, int rank, EpLayout layout, const char *what) {
    int mine = (TOKENS + 1 - rank) / 2, is_by_rank = layout == EP_LAYOUT_RANK_MAJOR;
    int64_t block = layout == EP_LAYOUT_EXPERT_MAJOR ? FAR : rows->shape[1];
    for (int b = 0; b < (is_by_rank ? RANKS : EACH); b++)
        for (int i = 0; i < (is_by_rank ? mine : RANKS * mine); i++) {
            int source = is_by_rank ? b : i / mine, token = i % mine * 2 + rank;
            int64_t row = b * block + i;
            if (what)
                check_row(rows->data, row, value_of(source, token), what);
            else
                put_row(rows->data, row, -1);
        }
}

static void check_tokens(const char *rows, int rank, int times, const char *what) {
    for (int t = 0; t < TOKENS; t++)
        check_row(rows, t, (float)times * value_of(rank, t), what);
}

static void quantise(EpGroup *group, const EpTensor *rows, const EpTensor *counts) {
    EpRowsForm form = EP_ROWS_FORM_INIT;
    size_t bytes = (size_t)EACH * MOST * HIDDEN, scales = (size_t)EACH * MOST * (HIDDEN / 128) * 4;
    char *out = open_memory(bytes), *scale = open_memory(scales);
    EpTensor to = ep_tensor_3d(out, EP_TYPE_FP8_E4M3, EACH, MOST, HIDDEN);
    EpTensor by = ep_tensor_3d(scale, EP_TYPE_FP32, EACH, MOST, HIDDEN / 128);
    form.quant = EP_QUANT_FP8;
    for (int e = 0; e < EACH; e++)
        copy(out + ((size_t)e * MOST + MOST - 1) * HIDDEN, "", 1);
    CHECK_OK(ep_quantise_rows(group, &form, rows, counts, NULL, &to, &by));
    for (int e = 0; e < EACH; e++) { /* a slab's first row ends in 448, its last one is no slot */
        unsigned char code[2];
        copy(code, out + ((size_t)e * MOST + 1) * HIDDEN - 1, 1);
        copy(code + 1, out + ((size_t)e * MOST + MOST - 1) * HIDDEN, 1);
        CHECK(code[0] == 0x7e && !code[1], "expert %d: codes %02x, %02x", e, code[0], code[1]);
    }
    close_memory(out, bytes), close_memory(scale, scales);
}

static void run(const EpBootstrap *bootstrap, EpLayout layout, EpMode mode) {
    int rank = bootstrap->rank, times = layout == EP_LAYOUT_RANK_MAJOR ? 1 : EACH;
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = RANKS * EACH, config.max_top_k = EACH, config.max_row_bytes = ROW_BYTES;
    config.max_tokens = times == 1 ? 2 * MOST : TOKENS,
    config.latency_sets = mode == EP_MODE_LATENCY;
    config.backend = TEST_BACKEND, config.alignment = layout == EP_LAYOUT_EXPERT_MAJOR ? FAR : 1;
    EpHandleConfig form = EP_HANDLE_CONFIG_INIT;
    form.layout = layout, form.mode = mode, form.padding = EP_PADDING_KEEP;
    if (layout == EP_LAYOUT_BATCHED) form.rows_per_expert = MOST;
    if (layout == EP_LAYOUT_EXPERT_MAJOR) form.max_recv_rows = EACH * MOST;
    EpGroup *group = open_group_with(bootstrap, &config);
    EpHandle *handle = open_handle_with(group, &form);
    int64_t all = times == 1 ? RANKS * 2 * MOST : EACH * MOST;
    char *memory = open_memory((size_t)all * ROW_BYTES), *x = open_memory(2 * TOKENS * ROW_BYTES);
    char *small = open_memory(4096);
    int32_t index[TOKENS * EACH];
    for (int i = 0; i < TOKENS * EACH; i++)
        index[i] = i / EACH % 2 * EACH + i % EACH;
    copy(small, index, sizeof(index));
    for (int t = 0; t < TOKENS; t++)
        put_row(x, t, value_of(rank, t));
    EpTensor topk_idx = ep_tensor_2d(small, EP_TYPE_INT32, TOKENS, EACH);
    EpTensor counts = ep_tensor_1d(small + 1024, EP_TYPE_INT32, EACH);
    EpTensor tokens = ep_tensor_2d(x, EP_TYPE_BF16, TOKENS, HIDDEN), sums = tokens;
    sums.data = x + TOKENS * ROW_BYTES;
    EpTensor rows = ep_tensor_3d(memory, EP_TYPE_BF16, times == 1 ? RANKS : EACH,
                                 times == 1 ? 2 * MOST : MOST, HIDDEN);
    if (layout == EP_LAYOUT_EXPERT_MAJOR) rows = ep_tensor_2d(memory, EP_TYPE_BF16, all, HIDDEN);
    EpPlanTensors out = EP_PLAN_TENSORS_INIT;
    out.expert_counts = &counts;
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, &out));
    CHECK_OK(ep_dispatch(handle, NULL, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL));
    each_row(&rows, rank, layout, "recv_tokens");
    if (layout == EP_LAYOUT_BATCHED) quantise(group, &rows, &counts);
    CHECK_OK(ep_combine(handle, NULL, &rows, NULL, NULL, NULL, &sums));
    check_tokens(sums.data, rank, times, "out");
    if (mode != EP_MODE_LATENCY) {
        each_row(&rows, rank, layout, NULL);
        CHECK_OK(ep_combine_backward(handle, NULL, &tokens, NULL, NULL, NULL, &rows, NULL));
        each_row(&rows, rank, layout, "grad_expert_out");
        CHECK_OK(ep_dispatch_backward(handle, NULL, &rows, NULL, NULL, &sums, NULL));
        check_tokens(sums.data, rank, times, "grad_tokens");
    }
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
    close_memory(memory, (size_t)all * ROW_BYTES), close_memory(x, 2 * TOKENS * ROW_BYTES);
    close_memory(small, 4096);
}

#define LargeTest(name, layout, mode) \
    RankTest(handles_large, name, RANKS, run(bootstrap, EP_LAYOUT_##layout, EP_MODE_##mode))
LargeTest(expert_major, EXPERT_MAJOR, THROUGHPUT);
LargeTest(expert_major_latency, EXPERT_MAJOR, LATENCY);
LargeTest(batched, BATCHED, THROUGHPUT);
LargeTest(batched_latency, BATCHED, LATENCY);
LargeTest(rank_major, RANK_MAJOR, THROUGHPUT);

/* T · H beyond 4 GiB: of all tokens the last one is routed, and all sums are written. */
ThreadTest(handles_large, tokens, 1) {
    enum { T = 2 * MOST };
    if (!getenv("LIBEP_TEST_LARGE")) check_left_out("it writes 8 GiB: LIBEP_TEST_LARGE=1");
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = config.max_top_k = 1, config.max_row_bytes = ROW_BYTES;
    config.max_tokens = T, config.max_recv_rows = 1, config.backend = TEST_BACKEND;
    EpGroup *group = open_group_with(bootstrap, &config);
    EpHandle *handle = open_handle_with(group, NULL);
    char *x = open_memory(T * ROW_BYTES), *y = open_memory(T * ROW_BYTES);
    char *row = open_memory(ROW_BYTES), *at = open_memory(T * 4);
    static int32_t index[T];
    for (int t = 0; t < T; t++)
        index[t] = t == T - 1 ? 0 : -1;
    copy(at, index, sizeof(index));
    put_row(x, T - 1, 3);
    put_row(y, T - 2, 7);
    EpTensor topk_idx = ep_tensor_2d(at, EP_TYPE_INT32, T, 1);
    EpTensor tokens = ep_tensor_2d(x, EP_TYPE_BF16, T, HIDDEN), sums = tokens, rows = tokens;
    sums.data = y, rows.data = row, rows.shape[0] = 1;
    CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    CHECK_OK(ep_dispatch(handle, NULL, NULL, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL));
    check_row(row, 0, 3, "recv_tokens");
    CHECK_OK(ep_combine(handle, NULL, &rows, NULL, NULL, NULL, &sums));
    check_row(y, T - 1, 3, "out");
    check_row(y, T - 2, 0, "out");
    put_row(row, 0, -1);
    CHECK_OK(ep_combine_backward(handle, NULL, &tokens, NULL, NULL, NULL, &rows, NULL));
    check_row(row, 0, 3, "grad_expert_out");
    put_row(y, T - 1, 7);
    CHECK_OK(ep_dispatch_backward(handle, NULL, &rows, NULL, NULL, &sums, NULL));
    check_row(y, T - 1, 3, "grad_tokens");
    ep_group_destroy(group);
    close_memory(x, T * ROW_BYTES), close_memory(y, T * ROW_BYTES);
    close_memory(row, ROW_BYTES), close_memory(at, T * 4);
}
