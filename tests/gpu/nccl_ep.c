/* SPDX-License-Identifier: Apache-2.0 */
/* Frameworks' calls of NCCL EP, on libep: training, flat rows, decoding, windows, and calls that
 * are captured once and replayed with other routing, as decoding loops do. */
#include "bindings/nccl_ep/adapter.h"
#include "handles/handle.h"
#include "tests/gpu/nccl_ep_step.h"
#include "tests/harness/ranked.h"

#define TRAINING nccl_ep_training_case(bootstrap->size, "")

enum { PAGE = 4096, MICRO_BATCHES = 3, REPLAYS = 20 };
enum { FULL = 2 }; /* every eighth step from this one on has all its tokens */

/* Refusals are printed to stderr. NCCL tells where a window begins from 2.29 on, and where its
 * parts are from 2.30 on; the emulated one takes its version from the environment. */
static void set_up_old(void) {
    be_quiet();
    gpu_reserve((size_t)640 << 20);
}

static void set_up(void) {
    set_up_old();
    setenv("EMULATED_NCCL", "23000", 1);
}

TestSuite(gpu_nccl_ep, .init = set_up);
TestSuite(gpu_nccl_ep_graphs, .init = set_up_old);

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
    Case c = TRAINING;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 1);
    nccl_ep_open(&rank, bootstrap, &config);
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

RankTests(gpu_nccl_ep, train, train(bootstrap));

/* ---- a handle for each step ------------------------------------------------------------------ */

/** What steps do besides. */
typedef struct Steps {
    const char *changes; /* of the case */
    int count;
    int exact;              /* sizes, not static ones */
    int quantises;          /* dispatches carry scales */
    int counts_at_dispatch; /* as Transformer Engine's fused call does it */
    int moves;              /* another handle dispatches, from the second step on */
} Steps;

/* Run steps, each with a new handle: in memory of the caller's or of the library's, made by one
 * call or by two. */
static void run_steps(const EpBootstrap *bootstrap, Steps steps) {
    NcclEpRank rank;
    Case c = nccl_ep_training_case(bootstrap->size, steps.changes);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, !steps.exact);
    nccl_ep_open(&rank, bootstrap, &config);
    for (int i = 0; i < steps.count; i++) {
        NcclEpStep s;
        nccl_ep_step_open(&s, &rank, &c, steps.moves || steps.quantises ? i + 2 : i, NULL, 0);
        s.counts_at_dispatch = steps.counts_at_dispatch;
        if (steps.quantises) s.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
        if (steps.moves) nccl_ep_step_allocate(&s);
        if (i % 2 || steps.moves) {
            CHECK_NCCL(nccl_ep_init(&s, i % 4 == 1 && !steps.moves ? -1 : c.top_k));
            CHECK_NCCL(nccl_ep_update(&s));
        } else {
            CHECK_NCCL(nccl_ep_create(&s));
        }
        if (steps.moves && i) nccl_ep_step_move(&s);
        nccl_ep_run(&s);
        nccl_ep_step_close(&s);
    }
    nccl_ep_close(&rank);
}

static void run_each(const EpBootstrap *bootstrap, const Steps *steps) {
    for (; steps->changes; steps++)
        run_steps(bootstrap, *steps);
}

#define STEPS(name, ...) \
    RankTest(gpu_nccl_ep, name, 2, run_each(bootstrap, (const Steps[]){__VA_ARGS__, {NULL, 0}}))
#define FLAT NCCL_EP_FLAT
#define DROPS "overflow=drop zero_tail=zero capacity="
#define SCALED "scale_bytes=48 row_type=fp8_e4m3 hidden=144 "
#define LATE .counts_at_dispatch = 1, .moves = 1

STEPS(exact_sizes, {"", 4, .exact = 1});
STEPS(flat_local_ids, {FLAT "keep", 3, .exact = 1});
/* With static sizes a flat row that no token fills is told by its ids. */
STEPS(flat_global_ids_and_tail,
      {FLAT "ids global_ids=1 capacity=314 sum_type=fp32 row_type=fp16", 3});
/* Slots past the capacity are dropped, the total says how many rows it takes, and the rest is zero.
 */
STEPS(dropped_slots, {DROPS "200", 4}, {DROPS "90 " FLAT "ids", 4});
STEPS(rows_with_scales, {SCALED, 1, .quantises = 1}, {SCALED FLAT "ids", 1, .quantises = 1});
STEPS(counts_at_dispatch, {"", 2, LATE}, {"index_type=int32", 2, LATE}, {DROPS "200", 2, LATE},
      {FLAT "keep capacity=0", 2, .exact = 1, LATE});
/* Sums in fp8 have libep's form. */
STEPS(quantised_sums, {"sum_quant=fp8", 2}, {"sum_quant=fp8 " FLAT "ids", 2});

/** Given multiprocessors, and those of the group and of both kinds of operations. */
typedef struct Sms {
    unsigned version, max, dispatch, combine;
    int group, expected[2];
} Sms;

static void run_num_sms(const EpBootstrap *bootstrap, const Sms *sms) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = TRAINING;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 1);
    config.size = sms->version, config.max_num_sms = sms->max;
    config.dispatch_num_sms = sms->dispatch, config.combine_num_sms = sms->combine;
    nccl_ep_open(&rank, bootstrap, &config);
    nccl_ep_step_open(&s, &rank, &c, FULL, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&s));
    CHECK_NCCL(nccl_ep_dispatch(&s));
    int dispatch = s.handle->ep->shape.num_sms, group = rank.group->ep->config.num_sms;
    CHECK_NCCL(nccl_ep_combine(&s));
    int combine = s.handle->ep->shape.num_sms;
    nccl_ep_run(&s);
    CHECK(group == sms->group && dispatch == sms->expected[0] && combine == sms->expected[1],
          "%d, %d, %d multiprocessors", group, dispatch, combine);
    nccl_ep_end(&rank, &s);
}

ThreadTest(gpu_nccl_ep, num_sms, 2) {
    enum { V2 = NCCL_EP_GROUP_CONFIG_V2, V3 = sizeof(ncclEpGroupConfig_t) };
    static const Sms cases[] = {{V3, 0, 0, 0, EP_DEFAULT, {EP_DEFAULT, EP_DEFAULT}},
                                {V3, 3, 0, 0, 3, {3, 3}},
                                {V3, 3, 5, 0, 5, {5, 3}},
                                {V3, 0, 4, 0, EP_DEFAULT, {4, EP_DEFAULT}},
                                {V3, 8, 1, 6, 6, {2, 6}},
                                {V2, 4, 7777, 7777, 4, {4, 4}}};
    for (int i = 0; i < LENGTH(cases); i++)
        run_num_sms(bootstrap, &cases[i]);
}

/* Rows that the capacity loses are an error, told once, and the group goes on. A call that makes a
 * handle does not tell it: there would be none. */
ThreadTest(gpu_nccl_ep, overflow_is_reported, 2) {
    NcclEpRank rank;
    NcclEpStep s, later;
    Case c = TRAINING;
    c.capacity = 40;
    nccl_ep_begin(&rank, &s, bootstrap, &c);
    CHECK_CUDA(cudaStreamSynchronize(rank.rank.stream));
    c.max_tokens = 2, c.alignment = 1; /* which fit */
    nccl_ep_step_open(&later, &rank, &c, 3, NULL, 0);
    CHECK_NCCL(nccl_ep_create(&later));
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_USAGE, "the overflow is not reported");
    CHECK_NCCL(nccl_ep_combine(&s));
    nccl_ep_step_check(&s); /* the dispatch was carried out */
    nccl_ep_step_close(&later);
    nccl_ep_end(&rank, &s);
}

/* ---- decoding ------------------------------------------------------------------------------ */

/* Handles as FlashInfer makes them, one for each layer and step, and one in memory of the caller's;
 * both halves of the calls, and whole ones. */
static void run_decoding(const EpBootstrap *bootstrap, Case c) {
    NcclEpRank rank;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 0);
    nccl_ep_open(&rank, bootstrap, &config);
    for (int i = 0; i < 6; i++) {
        NcclEpStep s;
        c.index_type = EP_TYPE_INT32, c.global_ids = i % 2;
        nccl_ep_step_open(&s, &rank, &c, i, NULL, 0);
        s.send_only = i / 2 % 2;
        if (i == 3) nccl_ep_step_allocate(&s);
        if (i) {
            CHECK_NCCL(nccl_ep_init(&s, c.top_k));
            CHECK_NCCL(nccl_ep_update(&s));
        } else {
            CHECK_NCCL(nccl_ep_create(&s));
        }
        nccl_ep_run(&s);
        nccl_ep_step_close(&s);
    }
    nccl_ep_close(&rank);
}

#define DECODING(layout) nccl_ep_decoding_case(bootstrap->size, EP_LAYOUT_##layout)

LatencyTest(gpu_nccl_ep, decode_expert_major_1, 1, run_decoding(bootstrap, DECODING(BATCHED)));
LatencyTest(gpu_nccl_ep, decode_expert_major_2, 2, run_decoding(bootstrap, DECODING(BATCHED)));
LatencyTests24(gpu_nccl_ep, decode_rank_major, run_decoding(bootstrap, DECODING(RANK_MAJOR)));

/* On two nodes. */
static void decode_on_nodes(const EpBootstrap *bootstrap, Case c) {
    snprintf(c.nodes, sizeof(c.nodes), "0011");
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    run_decoding(bootstrap, c);
}

RankTest(gpu_nccl_ep, decode_on_nodes_4, 4, decode_on_nodes(bootstrap, DECODING(BATCHED)));
RankTest(gpu_nccl_ep, decode_rank_major_on_nodes_4, 4,
         decode_on_nodes(bootstrap, DECODING(RANK_MAJOR)));

/* LIBEP_SUMS=entry: NCCL EP's own order of summation in low latency, bit for bit. */
static void run_by_entry(const EpBootstrap *bootstrap, Case *decoding) {
    set_on_ranks(bootstrap, "LIBEP_SUMS", "entry");
    if (!decoding) return run_steps(bootstrap, (Steps){"by_entry=1", 2});
    decoding->by_entry = 1;
    run_decoding(bootstrap, *decoding);
}

RankTest(gpu_nccl_ep, sums_by_entry, 2, run_by_entry(bootstrap, NULL));
LatencyTest(gpu_nccl_ep, decode_by_entry_2, 2,
            run_by_entry(bootstrap, (Case[]){DECODING(BATCHED)}));

/* One handle, whose dispatches quantise in turn or do not; at last they carry scales. */
static void run_quantised(const EpBootstrap *bootstrap, Case c) {
    static const EpQuant quants[] = {EP_QUANT_FP8, EP_QUANT_NONE, EP_QUANT_FP8_POW2, EP_QUANT_FP8,
                                     EP_QUANT_NONE};
    NcclEpRank rank;
    ncclEpHandle_t handle = NULL;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 0);
    nccl_ep_open(&rank, bootstrap, &config);
    for (int i = 0; i < 5; i++) {
        NcclEpStep s;
        Case quantised = c;
        quantised.quant = quants[i];
        if (i == 4) quantised.row_type = EP_TYPE_UINT8, quantised.scale_bytes = 32;
        nccl_ep_step_open(&s, &rank, &quantised, i + 2, NULL, 0);
        if (quants[i] != EP_QUANT_NONE) s.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
        if (i == 4) s.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
        s.round_scales = quants[i] == EP_QUANT_FP8_POW2;
        s.send_only = i == 2, s.handle = handle;
        CHECK_NCCL(handle ? nccl_ep_update(&s) : nccl_ep_create(&s));
        nccl_ep_run(&s);
        handle = s.handle, s.handle = NULL;
        nccl_ep_step_close(&s);
    }
    CHECK_NCCL(ncclEpHandleDestroy(handle));
    nccl_ep_close(&rank);
}

LatencyTest(gpu_nccl_ep, quantised_expert_major, 2, run_quantised(bootstrap, DECODING(BATCHED)));
LatencyTest(gpu_nccl_ep, quantised_rank_major, 2, run_quantised(bootstrap, DECODING(RANK_MAJOR)));

/* Two layers, whose halves interleave. */
static void two_in_flight(const EpBootstrap *bootstrap) {
    NcclEpRank rank;
    NcclEpStep s[2];
    Case c = DECODING(BATCHED);
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 0);
    nccl_ep_open(&rank, bootstrap, &config);
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
    for (int i = 0; i < 2; i++) {
        CHECK_NCCL(nccl_ep_complete(&s[i]));
        CHECK_NCCL(nccl_ep_combine(&s[i]));
    }
    for (int i = 1; i >= 0; i--)
        CHECK_NCCL(nccl_ep_complete(&s[i]));
    for (int i = 0; i < 2; i++) {
        nccl_ep_step_check(&s[i]);
        nccl_ep_step_close(&s[i]);
    }
    nccl_ep_close(&rank);
}

LatencyTest(gpu_nccl_ep, two_in_flight, 2, two_in_flight(bootstrap));

/* ---- graphs ---------------------------------------------------------------------------------- */

/* In low-latency mode the routing is read when the dispatch runs. */
static void replay(const EpBootstrap *bootstrap, Case c, int send_only) {
    NcclEpRank rank;
    NcclEpStep s;
    int decodes = c.mode == EP_MODE_LATENCY;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, !decodes);
    nccl_ep_open(&rank, bootstrap, &config);
    nccl_ep_step_open(&s, &rank, &c, FULL, NULL, 0);
    s.send_only = send_only;
    nccl_ep_step_allocate(&s);
    CHECK_NCCL(nccl_ep_init(&s, c.top_k));
    if (decodes) CHECK_NCCL(nccl_ep_update(&s));
    graph_begin(rank.rank.stream);
    if (!decodes) CHECK_NCCL(nccl_ep_update(&s));
    nccl_ep_move(&s);
    cudaGraphExec_t exec = graph_end(rank.rank.stream);
    for (int i = 0; exec && i < REPLAYS; i++) {
        check_note("replay %d", i);
        nccl_ep_step_reload(&s, FULL + 8 * i);
        CHECK_CUDA(cudaGraphLaunch(exec, rank.rank.stream));
        device_step_replayed(&s.dispatched, STEP_DISPATCH | (decodes ? 0 : STEP_DISPATCH_BACKWARD));
        device_step_replayed(&s.combined, STEP_COMBINE | (decodes ? 0 : STEP_COMBINE_BACKWARD));
        nccl_ep_step_check(&s);
    }
    if (exec) CHECK_CUDA(cudaGraphExecDestroy(exec));
    nccl_ep_end(&rank, &s);
}

LatencyTests(gpu_nccl_ep_graphs, decode_expert_major, replay(bootstrap, DECODING(BATCHED), 0));
LatencyTest(gpu_nccl_ep_graphs, decode_rank_major_2, 2, replay(bootstrap, DECODING(RANK_MAJOR), 0));
LatencyTest(gpu_nccl_ep_graphs, decode_in_halves_2, 2, replay(bootstrap, DECODING(BATCHED), 1));
RankTests24(gpu_nccl_ep_graphs, train, replay(bootstrap, TRAINING, 0));

/* ---- windows --------------------------------------------------------------------------------- */

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

/* Run a step whose receive rows lie in the window, behind `skipped` bytes. `named`: the tensors
 * name the window and an offset, else their address. On several nodes rows are staged. */
static void step_in_window(NcclEpRank *rank, const Case *c, int step, const NcclWindow *window,
                           size_t skipped, int named) {
    NcclEpStep s;
    int expected = named && nccl_ep_is_on_one_node(rank);
    nccl_ep_step_open(&s, rank, c, step, window, skipped);
    if (!named) s.window = NULL;
    CHECK_NCCL(nccl_ep_create(&s));
    nccl_ep_run(&s);
    CHECK(count_windows(rank->group, window) == expected, "%d windows where rows arrive, not %d",
          count_windows(rank->group, window), expected);
    nccl_ep_step_close(&s);
}

/* Receive rows in a window. Then the framework ends the window and makes another one in the same or
 * in other memory. Libep is not told: so an address alone does not make memory a window. */
ThreadTest(gpu_nccl_ep, rows_in_windows, 2) {
    NcclEpRank rank;
    Case c = TRAINING;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 1);
    size_t bytes = (2 * device_step_bytes(&c) + 5 * PAGE) / PAGE * PAGE;
    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    nccl_maps(&rank.rank.nccl, bootstrap->size);
    if (!nccl_locates(&rank.rank.nccl))
        check_left_out("this NCCL does not tell where a window begins");
    nccl_ep_open(&rank, bootstrap, &config);
    for (int i = 0; i < 3; i++) {
        NcclWindow window = nccl_window_open(&rank.rank, bytes + (size_t)i * 8 * PAGE);
        for (int step = 0; step < 3; step++)
            step_in_window(&rank, &c, step, &window, (size_t)step * 128, 1);
        step_in_window(&rank, &c, 3, &window, 0, 0);
        step_in_window(&rank, &c, 4, &window, 128, 1);
        nccl_window_close(&rank.rank, &window);
    }
    nccl_ep_close(&rank);
}
