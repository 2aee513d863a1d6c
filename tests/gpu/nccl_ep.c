/* SPDX-License-Identifier: Apache-2.0 */
/* Frameworks' calls of NCCL EP, on libep: training, flat rows, decoding, windows, misuse. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"
#include "handles/handle.h"
#include "tests/gpu/device_step_layout.h"
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

/* As Transformer Engine's fused call does it: the numbers come with the dispatch. */
static void run_counts_at_dispatch(const EpBootstrap *bootstrap, Case c) {
    NcclEpRank rank;
    NcclEpStep s;
    c = case_complete(c);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, c.capacity > 0);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    for (int i = 0; i < 2; i++) {
        check_note("step %d of %s", i, case_describe(&c));
        nccl_ep_step_open(&s, &rank, &c, i + 2, NULL, 0);
        s.counts_at_dispatch = 1;
        nccl_ep_step_allocate(&s);
        CHECK_NCCL(nccl_ep_init(&s, c.top_k));
        CHECK_NCCL(nccl_ep_update(&s));
        if (i) nccl_ep_step_move(&s); /* another handle dispatches */
        check_all(&s);
        nccl_ep_step_close(&s);
        c.index_type = EP_TYPE_INT32;
    }
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep, counts_at_dispatch, 2) {
    Case c = training_case(bootstrap->size);
    run_counts_at_dispatch(bootstrap, c);
    c.overflow = EP_OVERFLOW_DROP, c.capacity = 200, c.zero_tail = EP_TAIL_ZERO;
    run_counts_at_dispatch(bootstrap, c);
    c = training_case(bootstrap->size);
    c.layout = EP_LAYOUT_FLAT, c.alignment = 1, c.capacity = 0;
    run_counts_at_dispatch(bootstrap, c);
}

/* Sums in fp8 have libep's form. */
ThreadTest(gpu_nccl_ep, quantised_sums, 2) {
    Case c = training_case(bootstrap->size);
    c.sum_quant = EP_QUANT_FP8;
    run_steps(bootstrap, &c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1, 2);
    c.layout = EP_LAYOUT_FLAT, c.alignment = 1, c.zero_tail = EP_TAIL_IDS;
    run_steps(bootstrap, &c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1, 2);
}

/* Check the multiprocessors of the group and of both kinds of operations. */
static void run_num_sms(const EpBootstrap *bootstrap, ncclEpGroupConfig_t given, int group,
                        int dispatch, int combine) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = training_case(bootstrap->size);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    config.size = given.size, config.max_num_sms = given.max_num_sms;
    config.dispatch_num_sms = given.dispatch_num_sms;
    config.combine_num_sms = given.combine_num_sms;
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&s));
    CHECK_NCCL(nccl_ep_dispatch(&s));
    int dispatch_sms = s.handle->ep->shape.num_sms;
    CHECK_NCCL(nccl_ep_combine(&s));
    int combine_sms = s.handle->ep->shape.num_sms;
    check_all(&s);
    CHECK(rank.group->ep->config.num_sms == group && dispatch_sms == dispatch &&
              combine_sms == combine,
          "%d, %d, %d multiprocessors", rank.group->ep->config.num_sms, dispatch_sms, combine_sms);
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep, num_sms, 2) {
    const unsigned v2 = NCCL_EP_GROUP_CONFIG_V2, v3 = sizeof(ncclEpGroupConfig_t);
    static const struct {
        unsigned max, dispatch, combine;
        int group, expected[2];
    } cases[] = {{0, 0, 0, EP_DEFAULT, {EP_DEFAULT, EP_DEFAULT}},
                 {3, 0, 0, 3, {3, 3}},
                 {3, 5, 0, 5, {5, 3}},
                 {0, 4, 0, EP_DEFAULT, {4, EP_DEFAULT}},
                 {8, 1, 6, 6, {2, 6}}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        run_num_sms(bootstrap,
                    (ncclEpGroupConfig_t){.size = v3,
                                          .max_num_sms = cases[i].max,
                                          .dispatch_num_sms = cases[i].dispatch,
                                          .combine_num_sms = cases[i].combine},
                    cases[i].group, cases[i].expected[0], cases[i].expected[1]);
    run_num_sms(
        bootstrap,
        (ncclEpGroupConfig_t){
            .size = v2, .max_num_sms = 4, .dispatch_num_sms = 7777, .combine_num_sms = 7777},
        4, 4, 4);
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
               .all_weights = 1,
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
    /* A refused routing does not set it either. */
    size_t one[] = {1}, shape[] = {3, 2};
    ncclEpTensor_t counts = {.size = sizeof(counts),
                             .magic = NCCL_EP_TENSOR_MAGIC,
                             .ndim = 1,
                             .datatype = NCCL_INT32,
                             .data = s.numbers,
                             .sizes = one};
    ncclEpTensor_t idx = counts;
    ncclEpLayoutInfo_t info = {.size = sizeof(info), .magic = NCCL_EP_MAGIC};
    idx.ndim = 2, idx.sizes = shape, info.expert_counters = &counts;
    CHECK(ncclEpUpdateHandle(s.handle, &idx, &info, rank.stream) == NCCL_INVALID_ARGUMENT,
          "counts without room");
    CHECK(s.handle->num_topk == 0 && !s.handle->ep, "a refused routing has opened the handle");
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

/* Call with one rank's stderr in a file, and check the result and the sentence. */
static void check_sentence(int got, int expected, FILE *printed, const char *sentence) {
    char text[2000] = "";
    rewind(printed);
    text[fread(text, 1, sizeof(text) - 1, printed)] = 0;
    fclose(printed);
    CHECK(got == expected && strstr(text, sentence), "%d, \"%s\" instead of %d, \"%s\"", got, text,
          expected, sentence);
}

/** A tensor that a call does not write. */
typedef struct Unwritten {
    enum { UPDATE, CREATE, DISPATCH, NUMBERS, BACKWARD, COMBINE, COMBINE_BACKWARD } call;
    size_t field;
    const char *name;
} Unwritten;

#define INFO(call, field) \
    { call, offsetof(ncclEpLayoutInfo_t, field), #field ": expected NULL in " }
#define DISPATCHED(call, field, text) \
    { call, offsetof(ncclEpDispatchOutputs_t, field), text }
#define COMBINED(call, field, text) \
    { call, offsetof(ncclEpCombineOutputs_t, field), text }

/* Only the tensor that must be NULL is a right one: the others are not looked at before. */
static int call_with(NcclEpStep *s, const Unwritten *u, ncclEpTensor_t *tensor,
                     ncclEpTensor_t *idx) {
    cudaStream_t stream = s->rank->stream;
    ncclEpLayoutInfo_t info = {.size = sizeof(info), .magic = NCCL_EP_MAGIC};
    ncclEpDispatchInputs_t in = {.size = sizeof(in), .magic = NCCL_EP_MAGIC};
    ncclEpDispatchOutputs_t out = {.size = sizeof(out), .magic = NCCL_EP_MAGIC};
    ncclEpCombineInputs_t sums_in = {.size = sizeof(sums_in), .magic = NCCL_EP_MAGIC};
    ncclEpCombineOutputs_t sums = {.size = sizeof(sums), .magic = NCCL_EP_MAGIC};
    ncclEpDispatchConfig_t config = {.size = sizeof(config), .magic = NCCL_EP_MAGIC};
    ncclEpCombineConfig_t sum_config = {.size = sizeof(sum_config), .magic = NCCL_EP_MAGIC};
    ncclEpHandle_t made = NULL;
    int layout = nccl_ep_layout(&s->c), is_number = u->call <= CREATE || u->call == NUMBERS;
    void *outputs = is_number ? (void *)&info : u->call < COMBINE ? (void *)&out : (void *)&sums;
    memcpy((char *)outputs + u->field, &tensor, sizeof(tensor));
    config.pass_direction = u->call == BACKWARD ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    sum_config.pass_direction = u->call == COMBINE_BACKWARD ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    if (u->call == UPDATE) return ncclEpUpdateHandle(s->handle, idx, &info, stream);
    if (u->call >= COMBINE) return ncclEpCombine(s->handle, &sums_in, &sums, &sum_config, stream);
    if (u->call != CREATE) return ncclEpDispatch(s->handle, &in, &out, &info, &config, stream);
    int result = ncclEpCreateHandle(&made, s->rank->group, layout, idx, &info, NULL, stream);
    CHECK(!made, "a refused call has made a handle");
    return result;
}

/* Each tensor is refused, and nothing is written to it; a right step follows. */
static void run_unwritten(const EpBootstrap *bootstrap, Case c, int algorithm, const Unwritten *u,
                          int count) {
    enum { BYTES = 4096 };
    static const char poison[BYTES]; /* zero */
    static _Thread_local char got[BYTES];
    NcclEpRank rank;
    NcclEpStep s;
    void *memory;
    size_t sizes[] = {BYTES / 4}, shape[] = {3, (size_t)c.top_k};
    ncclEpGroupConfig_t config = nccl_ep_config(&c, algorithm, c.capacity > 0);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&s));
    REQUIRE_CUDA(cudaMalloc(&memory, BYTES));
    CHECK_CUDA(cudaMemset(memory, 0, BYTES));
    ncclEpTensor_t tensor = {.size = sizeof(tensor),
                             .magic = NCCL_EP_TENSOR_MAGIC,
                             .ndim = 1,
                             .datatype = NCCL_INT32,
                             .data = memory,
                             .sizes = sizes};
    ncclEpTensor_t idx = tensor;
    idx.ndim = 2, idx.sizes = shape;
    for (int i = 0; i < count && bootstrap->rank == 0; i++) {
        FILE *before = stderr, *printed = stderr = tmpfile();
        int result = call_with(&s, &u[i], &tensor, &idx);
        stderr = before;
        check_sentence(result, NCCL_INVALID_ARGUMENT, printed, u[i].name);
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(got, memory, BYTES, cudaMemcpyDefault));
    CHECK(!memcmp(got, poison, BYTES), "a refused call has written");
    if (algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT)
        check_all(&s);
    else
        decode(&s);
    CHECK_CUDA(cudaFree(memory));
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

#define UNWRITTEN(c, algorithm, list) \
    run_unwritten(bootstrap, c, algorithm, list, (int)(sizeof(list) / sizeof(*(list))))

ThreadTest(gpu_nccl_ep, unwritten_outputs, 2) {
    static const Unwritten slabs[] = {
        INFO(UPDATE, src_rank_counters),
        INFO(CREATE, src_rank_counters),
        INFO(NUMBERS, src_rank_counters),
        DISPATCHED(DISPATCH, topk_idx, "outputs.topk_idx: "),
        DISPATCHED(DISPATCH, scales, "outputs.scales: expected NULL"),
        DISPATCHED(DISPATCH, topk_weights, "outputs.topk_weights: expected NULL without"),
        DISPATCHED(BACKWARD, topk_weights, "outputs.topk_weights: expected NULL in the backward"),
        DISPATCHED(BACKWARD, topk_idx, "outputs.topk_idx: expected NULL in the backward"),
        DISPATCHED(BACKWARD, scales, "outputs.scales: expected NULL"),
        COMBINED(COMBINE_BACKWARD, topk_weights, "outputs.topk_weights: expected NULL without")};
    static const Unwritten flat[] = {INFO(UPDATE, expert_offsets), INFO(CREATE, expert_offsets),
                                     INFO(NUMBERS, expert_offsets),
                                     INFO(NUMBERS, src_rank_counters)};
    Case c = training_case(bootstrap->size);
    UNWRITTEN(c, NCCL_EP_ALGO_HIGH_THROUGHPUT, slabs);
    c.layout = EP_LAYOUT_FLAT, c.alignment = 1, c.zero_tail = EP_TAIL_IDS;
    UNWRITTEN(c, NCCL_EP_ALGO_HIGH_THROUGHPUT, flat);
}

ThreadTest(gpu_nccl_ep, unwritten_outputs_of_decoding, 2) {
    GPU_NEEDS_LATENCY();
    static const Unwritten by_expert[] = {
        {UPDATE, offsetof(ncclEpLayoutInfo_t, expert_counters), "layout_info: expected NULL"},
        {CREATE, offsetof(ncclEpLayoutInfo_t, expert_counters), "layout_info: expected NULL"},
        INFO(NUMBERS, src_rank_counters),
        INFO(NUMBERS, expert_offsets),
        INFO(NUMBERS, recv_total_counter),
        DISPATCHED(DISPATCH, topk_idx, "outputs.topk_idx: "),
        DISPATCHED(DISPATCH, topk_weights, "outputs.topk_weights: expected NULL without"),
        DISPATCHED(DISPATCH, scales, "outputs.scales: expected NULL")};
    static const Unwritten by_rank[] = {
        INFO(NUMBERS, expert_counters), INFO(NUMBERS, expert_offsets),
        INFO(NUMBERS, recv_total_counter),
        COMBINED(COMBINE, topk_weights, "outputs.topk_weights: expected NULL in the rank-major")};
    UNWRITTEN(decoding_case(bootstrap->size, EP_LAYOUT_BATCHED), NCCL_EP_ALGO_LOW_LATENCY,
              by_expert);
    UNWRITTEN(decoding_case(bootstrap->size, EP_LAYOUT_RANK_MAJOR), NCCL_EP_ALGO_LOW_LATENCY,
              by_rank);
}

/* A forward combine of high throughput leaves the backward pass's output alone, as NCCL EP does,
 * whose benchmark passes it. */
ThreadTest(gpu_nccl_ep, weights_of_the_backward_pass, 2) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = training_case(bootstrap->size);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    s.passes_weights = 1;
    CHECK_NCCL(nccl_ep_create(&s));
    CHECK_NCCL(nccl_ep_combine(&s));
    nccl_ep_step_check(&s);
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

/* With exact sizes, where one rank receives nothing: a kernel would find these differences, and
 * fail the group. All ranks are refused, and right calls follow. */
static void run_refused_rows(const EpBootstrap *bootstrap, EpLayout layout) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = training_case(bootstrap->size);
    c.layout = layout, c.alignment = layout == EP_LAYOUT_FLAT ? 1 : 8;
    c.capacity = 0, c.routing = ROUTING_ONE_RANK, c = case_complete(c);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, NCCL_EP_ALGO_HIGH_THROUGHPUT, 0);
    if (!nccl_ep_open(&rank, bootstrap, &config)) return;
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&s));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream)); /* then the host knows how many rows arrive */
    for (int wrong = NCCL_EP_EMPTY_WEIGHTS; wrong <= NCCL_EP_FEWER_ROWS; wrong++) {
        if (wrong == NCCL_EP_FEWER_ROWS && !device_step_rank(&s.dispatched)->recv_rows) continue;
        if (wrong == NCCL_EP_FEWER_ROWS && !is_on_one_node(rank.group)) continue;
        s.wrong = wrong;
        CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_ARGUMENT, "a wrong dispatch (%d)", wrong);
        CHECK(nccl_ep_dispatch_backward(&s) == NCCL_INVALID_ARGUMENT, "a wrong combine");
    }
    s.wrong = NCCL_EP_RIGHT;
    s.dispatched.issued = 0;
    nccl_ep_step_check(&s);
    check_all(&s);
    nccl_ep_step_close(&s);
    nccl_ep_close(&rank);
}

ThreadTest(gpu_nccl_ep, refused_rows_fail_no_group, 2) {
    run_refused_rows(bootstrap, EP_LAYOUT_EXPERT_MAJOR);
    run_refused_rows(bootstrap, EP_LAYOUT_FLAT);
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
