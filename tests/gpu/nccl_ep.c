/* SPDX-License-Identifier: Apache-2.0 */
/* Frameworks' calls of NCCL EP, on libep: training, flat rows, decoding, windows, misuse. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/has.h"
#include "tests/gpu/nccl_ep_step.h"
#include "tests/harness/ranked.h"
#include "tests/harness/threads.h"

enum { PAGE = 4096, MICRO_BATCHES = 3 };

/* Refusals are printed to stderr. NCCL tells where a window begins from 2.29 on, and where its
 * parts are from 2.30 on; the emulated one takes its version from the environment. */
static void set_up(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
    setenv("EMULATED_NCCL", "23000", 1);
    gpu_reserve((size_t)640 << 20);
}

TestSuite(gpu_nccl_ep, .init = set_up);

/* Rows of several blocks, and none a multiple of anything. */
static Case training_case(int ranks) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 4 * ranks + 3,
                                .top_k = 5,
                                .hidden = 136,
                                .max_tokens = 157,
                                .masked_percent = 5,
                                .duplicates = 1,
                                .merged = 1,
                                .alignment = 8,
                                .capacity = 157 * 5 * ranks + 8 * 8,
                                .index_type = EP_TYPE_INT64});
}

static void check_all(NcclEpStep *s) {
    CHECK_NCCL(nccl_ep_dispatch(s));
    CHECK_NCCL(nccl_ep_combine(s));
    CHECK_NCCL(nccl_ep_combine_backward(s));
    CHECK_NCCL(nccl_ep_dispatch_backward(s));
    nccl_ep_step_check(s);
}

/* ---- training ------------------------------------------------------------------------------ */

static void forward(NcclEpStep *s) {
    CHECK_NCCL(nccl_ep_update(s));
    CHECK_NCCL(nccl_ep_dispatch(s));
    CHECK_NCCL(nccl_ep_combine(s));
}

/* Another handle reads the plan, at another place. */
static void backward(NcclEpStep *s) {
    nccl_ep_step_move(s);
    CHECK_NCCL(nccl_ep_combine_backward(s));
    CHECK_NCCL(nccl_ep_dispatch_backward(s));
    nccl_ep_step_check(s);
}

/* As Transformer Engine calls it: memory for each micro-batch, of the size that the library says;
 * the pipeline F0 F1 B0 F2 B1 B2; handles go before the group. */
static void train(const EpBootstrap *bootstrap) {
    NcclEpRank rank;
    NcclEpStep s[MICRO_BATCHES];
    Case c = training_case(bootstrap->size);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < MICRO_BATCHES; i++) {
        nccl_ep_step_open(&s[i], &rank, &c, i, NULL, 0);
        nccl_ep_step_allocate(&s[i]);
        CHECK_NCCL(nccl_ep_init(&s[i], c.top_k));
    }
    forward(&s[0]);
    forward(&s[1]);
    backward(&s[0]);
    forward(&s[2]);
    backward(&s[1]);
    backward(&s[2]);
    for (int i = 0; i < MICRO_BATCHES; i++)
        nccl_ep_step_close(&s[i]);
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep, train_1, 1) {
    train(bootstrap);
}
ThreadTest(gpu_nccl_ep, train_2, 2) {
    train(bootstrap);
}
ThreadTest(gpu_nccl_ep, train_4, 4) {
    train(bootstrap);
}

/* ---- a handle for each step ----------------------------------------------------------------- */

/* Run steps, each with a new handle in the library's memory. */
static void run_steps(const EpBootstrap *bootstrap, const Case *shape, int algorithm, int fixed,
                      int steps) {
    NcclEpRank rank;
    Case c = case_complete(*shape);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, algorithm, fixed);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < steps; i++) {
        NcclEpStep s;
        check_note("step %d of %s", i, case_describe(&c));
        nccl_ep_step_open(&s, &rank, &c, i, NULL, 0);
        if (i % 2) {
            CHECK_NCCL(nccl_ep_init(&s, i % 4 == 1 ? -1 : c.top_k));
            CHECK_NCCL(nccl_ep_update(&s));
        } else {
            CHECK_NCCL(nccl_ep_create(&s));
        }
        check_all(&s);
        nccl_ep_step_close(&s);
    }
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep, exact_sizes, 2) {
    Case c = training_case(bootstrap->size);
    run_steps(bootstrap, &c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 0, 4);
}

ThreadTest(gpu_nccl_ep, flat_local_ids, 2) {
    Case c = training_case(bootstrap->size);
    c.layout = EP_LAYOUT_FLAT, c.alignment = 1;
    run_steps(bootstrap, &c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 0, 3);
}

/* With static sizes a flat row that no token fills is told by its ids. */
ThreadTest(gpu_nccl_ep, flat_global_ids_and_tail, 2) {
    Case c = training_case(bootstrap->size);
    c.layout = EP_LAYOUT_FLAT, c.alignment = 1, c.global_ids = 1, c.zero_tail = EP_TAIL_IDS;
    c.capacity = 157 * bootstrap->size, c.sum_type = EP_TYPE_FP32, c.row_type = EP_TYPE_FP16;
    run_steps(bootstrap, &c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1, 3);
}

/* Slots past the capacity are dropped, the total says how many rows it takes, and the rest is zero.
 */
ThreadTest(gpu_nccl_ep, dropped_slots, 2) {
    Case c = training_case(bootstrap->size);
    c.overflow = EP_OVERFLOW_DROP, c.capacity = 200, c.zero_tail = EP_TAIL_ZERO;
    run_steps(bootstrap, &c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1, 4);
    c.layout = EP_LAYOUT_FLAT, c.alignment = 1, c.capacity = 90, c.zero_tail = EP_TAIL_IDS;
    run_steps(bootstrap, &c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1, 4);
}

ThreadTest(gpu_nccl_ep, rows_with_scales, 2) {
    NcclEpRank rank;
    Case c = training_case(bootstrap->size);
    c.scale_bytes = 48, c.row_type = EP_TYPE_FP8_E4M3, c.hidden = 144;
    c = case_complete(c);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < 2; i++) {
        NcclEpStep s;
        c.layout = i ? EP_LAYOUT_FLAT : EP_LAYOUT_EXPERT_MAJOR, c.alignment = i ? 1 : 8;
        c.zero_tail = i ? EP_TAIL_IDS : EP_TAIL_KEEP;
        nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
        s.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
        CHECK_NCCL(nccl_ep_create(&s));
        check_all(&s);
        nccl_ep_step_close(&s);
    }
    nccl_ep_close(&rank);
}

/* Rows that the capacity loses are an error, told once, and the group goes on. A call that makes a
 * handle does not tell it: there would be none. */
ThreadTest(gpu_nccl_ep, overflow_is_reported, 2) {
    NcclEpRank rank;
    NcclEpStep s, later;
    Case c = training_case(bootstrap->size);
    c.capacity = 40;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&s));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream));
    c.max_tokens = 2, c.alignment = 1; /* which fit */
    nccl_ep_step_open(&later, &rank, &c, 3, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&later));
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_USAGE, "the overflow is not reported");
    CHECK_NCCL(nccl_ep_combine(&s));
    nccl_ep_step_check(&s); /* the dispatch was carried out */
    nccl_ep_step_close(&later);
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

/* ---- decoding ------------------------------------------------------------------------------ */

static Case decoding_case(int ranks, EpLayout layout) {
    return case_complete(
        (Case){.ranks = ranks,
               .experts = 5 * ranks + 1,
               .top_k = 4,
               .hidden = 256,
               .max_tokens = 19,
               .masked_percent = 5,
               .duplicates = 1,
               .merged = 1,
               .layout = layout,
               .rows_per_expert = 19 * ranks,
               .mode = EP_MODE_LATENCY,
               .zero_tail = layout == EP_LAYOUT_RANK_MAJOR ? EP_TAIL_IDS : EP_TAIL_KEEP,
               .weighted = 1});
}

static void decode(NcclEpStep *s) {
    CHECK_NCCL(nccl_ep_dispatch(s));
    if (s->send_only) CHECK_NCCL(nccl_ep_complete(s));
    CHECK_NCCL(nccl_ep_combine(s));
    if (s->send_only) CHECK_NCCL(nccl_ep_complete(s));
    CHECK_NCCL(nccl_ep_complete(s)); /* nothing is pending: no error */
    nccl_ep_step_check(s);
}

/* Handles as FlashInfer makes them, one for each layer and step, and one that lives on; both halves
 * of the calls, and whole ones. */
static void run_decoding(const EpBootstrap *bootstrap, Case c) {
    NcclEpRank rank;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_LOW_LATENCY, 0);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < 6; i++) {
        NcclEpStep s;
        c.index_type = EP_TYPE_INT32, c.global_ids = i % 2;
        check_note("step %d of %s", i, case_describe(&c));
        nccl_ep_step_open(&s, &rank, &c, i, NULL, 0);
        s.send_only = i / 2 % 2;
        if (i == 3) nccl_ep_step_allocate(&s);
        if (i % 3) {
            CHECK_NCCL(nccl_ep_init(&s, c.top_k));
            CHECK_NCCL(nccl_ep_update(&s));
        } else if (!s.plan) {
            CHECK_NCCL(nccl_ep_create(&s));
        } else {
            CHECK_NCCL(nccl_ep_init(&s, c.top_k));
            CHECK_NCCL(nccl_ep_update(&s));
        }
        decode(&s);
        nccl_ep_step_close(&s);
    }
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep, decode_expert_major_1, 1) {
    run_decoding(bootstrap, decoding_case(bootstrap->size, EP_LAYOUT_BATCHED));
}
ThreadTest(gpu_nccl_ep, decode_expert_major_2, 2) {
    GPU_NEEDS_LATENCY();
    run_decoding(bootstrap, decoding_case(bootstrap->size, EP_LAYOUT_BATCHED));
}
ThreadTest(gpu_nccl_ep, decode_rank_major_2, 2) {
    GPU_NEEDS_LATENCY();
    run_decoding(bootstrap, decoding_case(bootstrap->size, EP_LAYOUT_RANK_MAJOR));
}
ThreadTest(gpu_nccl_ep, decode_rank_major_4, 4) {
    GPU_NEEDS_LATENCY();
    run_decoding(bootstrap, decoding_case(bootstrap->size, EP_LAYOUT_RANK_MAJOR));
}

/* One handle, whose dispatches quantise in turn or do not. */
static void run_quantised(const EpBootstrap *bootstrap, EpLayout layout) {
    static const EpQuant quants[] = {EP_QUANT_FP8, EP_QUANT_NONE, EP_QUANT_FP8_POW2};
    NcclEpRank rank;
    ncclEpHandle_t handle = NULL;
    Case c = decoding_case(bootstrap->size, layout);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_LOW_LATENCY, 0);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < 5; i++) {
        NcclEpStep s;
        Case quantised = c;
        quantised.quant = quants[i % 3];
        quantised.scale_bytes = i == 4 ? 32 : 0;
        if (i == 4) quantised.row_type = EP_TYPE_UINT8, quantised.quant = EP_QUANT_NONE;
        check_note("step %d of %s", i, case_describe(&quantised));
        nccl_ep_step_open(&s, &rank, &quantised, i + 2, NULL, 0);
        s.quant_recipe = i == 4                             ? NCCL_EP_DISP_QUANT_FWD
                         : quantised.quant == EP_QUANT_NONE ? NCCL_EP_DISP_QUANT_NONE
                                                            : NCCL_EP_DISP_QUANT_DS_FP8E3M4;
        s.round_scales = quantised.quant == EP_QUANT_FP8_POW2;
        s.send_only = i == 2, s.handle = handle;
        CHECK_NCCL(handle ? nccl_ep_update(&s) : nccl_ep_create(&s));
        decode(&s);
        handle = s.handle, s.handle = NULL;
        nccl_ep_step_close(&s);
    }
    CHECK_NCCL(ncclEpHandleDestroy(handle));
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep, quantised_expert_major, 2) {
    GPU_NEEDS_LATENCY();
    run_quantised(bootstrap, EP_LAYOUT_BATCHED);
}
ThreadTest(gpu_nccl_ep, quantised_rank_major, 2) {
    GPU_NEEDS_LATENCY();
    run_quantised(bootstrap, EP_LAYOUT_RANK_MAJOR);
}

/* Two layers, whose halves interleave. */
ThreadTest(gpu_nccl_ep, two_in_flight, 2) {
    GPU_NEEDS_LATENCY();
    NcclEpRank rank;
    NcclEpStep s[2];
    Case c = decoding_case(bootstrap->size, EP_LAYOUT_BATCHED);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_LOW_LATENCY, 0);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < 2; i++) {
        nccl_ep_step_open(&s[i], &rank, &c, i + 1, NULL, 0);
        s[i].send_only = 1;
        CHECK_NCCL(nccl_ep_create(&s[i]));
    }
    CHECK_NCCL(nccl_ep_dispatch(&s[0]));
    CHECK_NCCL(nccl_ep_dispatch(&s[1]));
    CHECK(nccl_ep_dispatch(&s[1]) == NCCL_INVALID_USAGE, "a second dispatch");
    CHECK(nccl_ep_combine(&s[1]) == NCCL_INVALID_USAGE,
          "a combine before its dispatch is complete");
    CHECK_NCCL(nccl_ep_complete(&s[0]));
    CHECK_NCCL(nccl_ep_combine(&s[0]));
    CHECK_NCCL(nccl_ep_complete(&s[1]));
    CHECK_NCCL(nccl_ep_combine(&s[1]));
    CHECK_NCCL(nccl_ep_complete(&s[1]));
    CHECK_NCCL(nccl_ep_complete(&s[0]));
    for (int i = 0; i < 2; i++) {
        nccl_ep_step_check(&s[i]);
        nccl_ep_step_close(&s[i]);
    }
    nccl_ep_close(&rank);
}

/* ---- windows ------------------------------------------------------------------------------- */

/* Returns how many windows that peers write into overlap the memory. */
static int count_windows(const struct ncclEpGroup *group, const NcclWindow *window) {
    int count = 0;
    for (int i = 0; i < group->num_windows; i++) {
        const NepWindow *w = &group->windows[i];
        count += w->bytes > 0 && w->memory < window->memory + window->bytes &&
                 window->memory < w->memory + w->bytes;
    }
    return count;
}

static int is_on_one_node(const struct ncclEpGroup *group) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_query(group->ep, &info));
    return info.num_nodes == 1;
}

/* Run a step whose receive rows lie in the window, behind `skipped` bytes. `named`: the tensors
 * name the window and an offset, else their address. On several nodes rows are staged. */
static void step_in_window(NcclEpRank *rank, const Case *c, int step, const NcclWindow *window,
                           size_t skipped, int named) {
    NcclEpStep s;
    int expected = named && is_on_one_node(rank->group);
    nccl_ep_step_open(&s, rank, c, step, window, skipped);
    if (!named) s.window = NULL;
    CHECK_NCCL(nccl_ep_create(&s));
    check_all(&s);
    CHECK(count_windows(rank->group, window) == expected, "%d windows where rows arrive, not %d",
          count_windows(rank->group, window), expected);
    nccl_ep_step_close(&s);
}

/* Receive rows in a window. Then the framework ends the window and makes another one in the same or
 * in other memory. Libep is not told: so an address alone does not make memory a window. */
ThreadTest(gpu_nccl_ep, rows_in_windows, 2) {
    NcclEpRank rank;
    Case c = case_complete(training_case(bootstrap->size));
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    size_t bytes = (2 * device_step_bytes(&c) + 5 * PAGE) / PAGE * PAGE;
    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    if (!nccl_maps(&rank.nccl, bootstrap->size)) return;
    if (!nccl_locates(&rank.nccl)) {
        check_left_out("this NCCL does not tell where a window begins");
        return;
    }
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < 3; i++) {
        NcclWindow window = nccl_window_open(&rank.nccl, rank.comm, bytes + (size_t)i * 8 * PAGE);
        for (int step = 0; step < 3; step++)
            step_in_window(&rank, &c, step, &window, (size_t)step * 128, 1);
        step_in_window(&rank, &c, 3, &window, 0, 0);
        step_in_window(&rank, &c, 4, &window, 128, 1);
        nccl_window_close(&rank.nccl, rank.comm, &window);
    }
    nccl_ep_close(&rank);
}

/* ---- memory and masks ----------------------------------------------------------------------- */

typedef struct Allocations {
    int made, freed;
    size_t bytes;
} Allocations;

static int count_alloc(void **memory, size_t bytes, void *context) {
    Allocations *a = context;
    a->made++, a->bytes += bytes;
    return cudaMalloc(memory, bytes);
}

static int count_free(void *memory, void *context) {
    ((Allocations *)context)->freed++;
    return cudaFree(memory);
}

static int fail_alloc(void **memory, size_t bytes, void *context) {
    (void)memory, (void)bytes, (void)context;
    return 2;
}

/* Handle memory comes from the caller's allocator; that may fail. */
ThreadTest(gpu_nccl_ep, caller_allocates, 2) {
    NcclEpRank rank;
    NcclEpStep s;
    Allocations counted = {0, 0, 0};
    Case c = training_case(bootstrap->size);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    config.alloc = (ncclEpAllocConfig_t){count_alloc, count_free, &counted};
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 1, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&s));
    CHECK(counted.made == 1 && !counted.freed, "%d made", counted.made);
    check_all(&s);
    CHECK_NCCL(ncclEpHandleDestroy(s.handle));
    s.handle = NULL;
    CHECK(counted.freed == 1, "%d freed", counted.freed);
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
    config.alloc = (ncclEpAllocConfig_t){fail_alloc, count_free, &counted};
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 1, NULL, 0);
    CHECK(nccl_ep_init(&s, c.top_k) == NCCL_SYSTEM_ERROR && !s.handle, "a handle without memory");
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

/* No rank is masked, and none can be. */
ThreadTest(gpu_nccl_ep, masks, 2) {
    GPU_NEEDS_LATENCY();
    NcclEpRank rank;
    int *device = NULL, got[2] = {7, 7}, error = 7;
    const int all[] = {1, 1}, some[] = {1, 0};
    Case c = decoding_case(bootstrap->size, EP_LAYOUT_BATCHED);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_LOW_LATENCY, 0);
    config.enable_mask = 1;
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    REQUIRE_CUDA(cudaMalloc((void **)&device, sizeof(got)));
    CHECK_NCCL(ncclEpMaskQuery(rank.group, device, rank.stream));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream));
    CHECK_CUDA(cudaMemcpy(got, device, sizeof(got), cudaMemcpyDefault));
    CHECK(got[0] == 1 && got[1] == 1, "%d, %d", got[0], got[1]);
    CHECK_NCCL(ncclEpMaskUpdate(rank.group, all, rank.stream));
    CHECK(ncclEpMaskUpdate(rank.group, some, rank.stream) == NCCL_INVALID_USAGE, "a masked rank");
    CHECK_NCCL(ncclEpMaskClean(rank.group, rank.stream));
    CHECK_NCCL(ncclEpGetAsyncError(rank.group, &error));
    CHECK(error == 0, "error %d", error);
    CHECK_NCCL(ncclEpErrorClear(rank.group));
    CHECK_CUDA(cudaFree(device));
    nccl_ep_close(&rank);
}

/* ---- several nodes ------------------------------------------------------------------------- */

/* What was printed to stderr since then; rank 0 reads it, when all ranks have written. */
typedef struct Printed {
    FILE *before, *file;
} Printed;

/* Ranks that are threads print to one file, which rank 0 reads; processes each to their own. */
static int prints(const EpBootstrap *bootstrap) {
    return bootstrap->rank == 0 || gpu_shares(bootstrap->size);
}

static void print_apart(const EpBootstrap *bootstrap, Printed *p) {
    if (prints(bootstrap)) p->before = stderr, stderr = p->file = tmpfile();
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
}

static void read_printed(const EpBootstrap *bootstrap, Printed *p, char *text, size_t bytes) {
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    if (!prints(bootstrap)) return;
    stderr = p->before;
    rewind(p->file);
    text[fread(text, 1, bytes - 1, p->file)] = 0;
    fclose(p->file);
}

/* Low latency is refused when the group is made, on all ranks; the communicator then serves a group
 * of high throughput. */
ThreadTest(gpu_nccl_ep, no_low_latency_on_nodes, 4) {
    Case c = decoding_case(bootstrap->size, EP_LAYOUT_BATCHED);
    Printed printed = {NULL, NULL};
    char text[4096] = "";
    NcclEpRank rank = {.harness = bootstrap};
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_LOW_LATENCY, 0);
    if (!nccl_serves(&rank.nccl, bootstrap->size)) return;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    rank.comm = nccl_communicator(&rank.nccl, bootstrap, 1);
    rank.stream = new_stream();
    print_apart(bootstrap, &printed);
    CHECK(ncclEpCreateGroup(&rank.group, rank.comm, &config) == NCCL_INVALID_USAGE, "a group");
    CHECK(!rank.group, "a group was made");
    read_printed(bootstrap, &printed, text, sizeof(text));
    for (int r = 0; r < bootstrap->size && prints(bootstrap); r++) {
        char expected[160];
        if (gpu_shares(bootstrap->size) && r != bootstrap->rank) continue;
        snprintf(expected, sizeof(expected),
                 "libnccl_ep: ncclEpCreateGroup: rank %d: config.algorithm: expected 1 (high "
                 "throughput) on 2 nodes, since NCCL between nodes",
                 r);
        CHECK(strstr(text, expected), "no \"%s\" in: %s", expected, text);
    }
    c = training_case(bootstrap->size);
    config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    CHECK_NCCL(ncclEpCreateGroup(&rank.group, rank.comm, &config));
    nccl_ep_close(&rank);
}

/* ---- misuse -------------------------------------------------------------------------------- */

/* Each of these is refused at once, nothing is written, and a right call still works. */
ThreadTest(gpu_nccl_ep, wrong_calls, 2) {
    NcclEpRank rank;
    NcclEpStep s;
    int error;
    Case c = training_case(bootstrap->size);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_ARGUMENT, "no handle");
    CHECK(nccl_ep_init(&s, 33) == NCCL_INVALID_ARGUMENT && !s.handle, "too many experts");
    CHECK_NCCL(nccl_ep_init(&s, -1));
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_USAGE, "a number of experts is not known");
    CHECK_NCCL(ncclEpHandleDestroy(s.handle));
    CHECK_NCCL(nccl_ep_create(&s));
    s.send_only = 1;
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_USAGE, "phases in throughput mode");
    s.send_only = 0, s.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_ARGUMENT, "quantising in throughput mode");
    s.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_ARGUMENT, "no scales");
    s.quant_recipe = NCCL_EP_DISP_QUANT_NONE, s.round_scales = 1;
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_ARGUMENT, "scales of nobody");
    s.round_scales = 0;
    CHECK(ncclEpGetAsyncError(rank.group, &error) == NCCL_INVALID_USAGE, "no masks");
    CHECK(ncclEpUpdateHandle(s.handle, NULL, NULL, rank.stream) == NCCL_INVALID_ARGUMENT, "no idx");
    s.dispatched.issued = 0;
    nccl_ep_step_check(&s);
    check_all(&s);
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

/* Handles may outlive their group, and then do nothing. */
ThreadTest(gpu_nccl_ep, group_goes_first, 2) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = training_case(bootstrap->size);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&s));
    check_all(&s);
    CHECK_NCCL(ncclEpGroupDestroy(rank.group));
    CHECK(nccl_ep_combine(&s) == NCCL_INVALID_USAGE, "a group that is gone");
    CHECK(nccl_ep_update(&s) == NCCL_INVALID_USAGE, "a group that is gone");
    nccl_ep_step_close(&s);
    CHECK_CUDA(cudaStreamDestroy(rank.stream));
    CHECK(rank.nccl.destroy(rank.comm) == ncclSuccess, "ncclCommDestroy");
}
