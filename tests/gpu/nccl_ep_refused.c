/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of NCCL EP that are refused, and what is refused to libep: memory, masks, low latency on
 * nodes. */
#include "bindings/nccl_ep/adapter.h"
#include "handles/handle.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/nccl_ep_step.h"
#include "tests/harness/ranked.h"

#define TRAINING nccl_ep_training_case(bootstrap->size, "")
#define DECODING(layout) nccl_ep_decoding_case(bootstrap->size, EP_LAYOUT_##layout)

/* ---- memory --------------------------------------------------------------------------------- */

typedef struct Allocations {
    int made, freed;
} Allocations;

static int count_alloc(void **memory, size_t bytes, void *context) {
    ((Allocations *)context)->made++;
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
static void allocate(const EpBootstrap *bootstrap, int fails) {
    NcclEpRank rank;
    NcclEpStep s;
    Allocations counted = {0, 0};
    Case c = TRAINING;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 1);
    config.alloc = (ncclEpAllocConfig_t){fails ? fail_alloc : count_alloc, count_free, &counted};
    nccl_ep_open(&rank, bootstrap, &config);
    nccl_ep_step_open(&s, &rank, &c, 1, NULL, 0);
    if (fails) {
        CHECK(nccl_ep_init(&s, c.top_k) == NCCL_SYSTEM_ERROR && !s.handle, "without memory");
    } else {
        CHECK_NCCL(nccl_ep_create(&s));
        CHECK(counted.made == 1 && !counted.freed, "%d made", counted.made);
        nccl_ep_run(&s);
        CHECK_NCCL(ncclEpHandleDestroy(s.handle));
        s.handle = NULL;
        CHECK(counted.freed == 1, "%d freed", counted.freed);
    }
    nccl_ep_end(&rank, &s);
}

ThreadTest(gpu_nccl_ep, caller_allocates, 2) {
    allocate(bootstrap, 0);
    allocate(bootstrap, 1);
}

/* ---- masks --------------------------------------------------------------------------------- */

/* So late no rank may be that only waits for a CPU. */
#define LATE_NS (TESTS_SANITIZED ? 3000000000ull : 1000000000ull)

static void open_masks(NcclEpRank *rank, const EpBootstrap *bootstrap, const Case *c) {
    ncclEpGroupConfig_t config = nccl_ep_config(c, c->mode != EP_MODE_LATENCY);
    config.enable_mask = 1;
    if (c->mode == EP_MODE_LATENCY) config.timeout_ns = LATE_NS;
    nccl_ep_open(rank, bootstrap, &config);
}

/* `masked`: ranks, as in a case; "": none. */
static void check_masks(NcclEpRank *rank, const char *masked, int is_error) {
    enum { RANKS = 3 };
    int *device = NULL, got[RANKS] = {7, 7, 7}, error = 7, ranks = rank->group->size;
    REQUIRE_CUDA(cudaMalloc((void **)&device, sizeof(got)));
    CHECK_NCCL(ncclEpMaskQuery(rank->group, device, rank->rank.stream));
    CHECK_CUDA(cudaStreamSynchronize(rank->rank.stream));
    CHECK_CUDA(cudaMemcpy(got, device, (size_t)ranks * sizeof(int), cudaMemcpyDefault));
    for (int r = 0; r < ranks; r++)
        CHECK(got[r] == (masked[0] && masked[r] == '1' ? 0 : 1), "rank %d: %d", r, got[r]);
    CHECK_NCCL(ncclEpGetAsyncError(rank->group, &error));
    CHECK(error == is_error, "error %d", error);
    CHECK_NCCL(ncclEpErrorClear(rank->group));
    CHECK_NCCL(ncclEpGetAsyncError(rank->group, &error));
    CHECK(error == 0, "error %d", error);
    CHECK_CUDA(cudaFree(device));
}

static void update(NcclEpRank *rank, const char *mask, int result) {
    int words[3] = {0};
    for (int r = 0; mask[r]; r++)
        words[r] = mask[r] - '0';
    int got = ncclEpMaskUpdate(rank->group, words, rank->rank.stream);
    CHECK(got == result, "%s: %d", mask, got);
}

/* `is_lost`: the masked ranks are masked by this step. Others find that at different times, so they
 * meet before one waits for the next of them. */
static void step_without(NcclEpRank *rank, Case c, const char *masked, int number, int is_lost) {
    NcclEpStep s;
    check_note("step %d without %s", number, masked);
    snprintf(c.masked, sizeof(c.masked), "%s", masked);
    nccl_ep_step_open(&s, rank, &c, number, NULL, 0);
    s.send_only = number % 2;
    CHECK_NCCL(nccl_ep_create(&s));
    if (is_lost) {
        CHECK_NCCL(nccl_ep_dispatch(&s));
        CHECK_NCCL(nccl_ep_complete(&s));
        CHECK_CUDA(cudaStreamSynchronize(rank->rank.stream));
        nccl_rank_meet(&rank->rank);
        CHECK_NCCL(nccl_ep_combine(&s));
        CHECK_NCCL(nccl_ep_complete(&s));
        nccl_ep_step_check(&s);
    } else {
        nccl_ep_run(&s);
    }
    nccl_ep_step_close(&s);
}

/* As NCCL EP's own test does it: the last rank misses a step, and the others go on without it. They
 * ask for all ranks, and it does not come. Then all come back, and mask each other by hand. */
static void lose_a_rank(const EpBootstrap *bootstrap, Case c) {
    NcclEpRank rank;
    open_masks(&rank, bootstrap, &c);
    int skips = 3 - c.ranks, leaves = bootstrap->rank == c.ranks - 1;
    const char *all = &"111"[skips], *first = &"110"[skips], *last = &"001"[skips];
    const char *others = leaves ? first : last;
    step_without(&rank, c, "", 0, 0);
    check_masks(&rank, "", 0);
    update(&rank, all, NCCL_SUCCESS);
    if (leaves) nccl_rank_meet(&rank.rank);
    for (int i = 0; i < 2 && !leaves; i++) {
        step_without(&rank, c, others, 1, i == 0);
        check_masks(&rank, others, i == 0);
        step_without(&rank, c, others, 2, 0);
        update(&rank, all, NCCL_INVALID_USAGE); /* no rank comes back alone */
        update(&rank, first, NCCL_SUCCESS);
        if (i == 0) CHECK_NCCL(ncclEpMaskClean(rank.group, rank.rank.stream));
    }
    nccl_rank_meet(&rank.rank);
    CHECK_NCCL(ncclEpMaskClean(rank.group, rank.rank.stream));
    check_masks(&rank, "", 0);
    nccl_rank_meet(&rank.rank);
    step_without(&rank, c, "", 3, 0);
    update(&rank, others, NCCL_INVALID_USAGE); /* this rank */
    check_masks(&rank, "", 0);
    update(&rank, leaves ? last : first, NCCL_SUCCESS);
    check_masks(&rank, others, 0);
    step_without(&rank, c, others, 4, 0);
    nccl_rank_meet(&rank.rank);
    CHECK_NCCL(ncclEpMaskClean(rank.group, rank.rank.stream));
    nccl_rank_meet(&rank.rank);
    step_without(&rank, c, "", 5, 0);
    nccl_ep_close(&rank);
}

LatencyTest(gpu_nccl_ep, masks_2, 2, lose_a_rank(bootstrap, DECODING(BATCHED)));
LatencyTest(gpu_nccl_ep, masks_3, 3, lose_a_rank(bootstrap, DECODING(BATCHED)));

/* High throughput, and nodes: no rank is masked, and none can be. */
static void no_masks(const EpBootstrap *bootstrap, Case c, const char *topology) {
    NcclEpRank rank;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", topology);
    open_masks(&rank, bootstrap, &c);
    check_masks(&rank, "", 0);
    update(&rank, "111", NCCL_SUCCESS);
    update(&rank, "000", NCCL_INVALID_USAGE);
    CHECK_NCCL(ncclEpMaskClean(rank.group, rank.rank.stream));
    nccl_ep_close(&rank);
}

LatencyTest(gpu_nccl_ep, no_masks_on_nodes, 2, no_masks(bootstrap, DECODING(BATCHED), "0,1"));
ThreadTest(gpu_nccl_ep, no_masks, 2) {
    no_masks(bootstrap, TRAINING, "");
}

/* ---- several nodes --------------------------------------------------------------------------- */

/* What is printed to stderr meanwhile. */
typedef struct Printed {
    FILE *before, *file;
    char text[4096];
} Printed;

static void print_apart(Printed *p) {
    p->before = stderr, stderr = p->file = tmpfile();
}

static const char *read_printed(Printed *p) {
    stderr = p->before;
    rewind(p->file);
    p->text[fread(p->text, 1, sizeof(p->text) - 1, p->file)] = 0;
    fclose(p->file);
    return p->text;
}

/* Low latency is refused when the group is made, on all ranks; the communicator then serves a group
 * of high throughput. */
ThreadTest(gpu_nccl_ep, no_low_latency_on_unequal_nodes, 4) {
    Case c = DECODING(BATCHED);
    Printed printed;
    NcclEpRank rank = {.group = NULL};
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 0);
    /* Ranks that are threads print to one file, which rank 0 reads; processes each to their own. */
    int is_process = gpu_shares(bootstrap->size), prints = bootstrap->rank == 0 || is_process;
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "0,1,1,1");
    nccl_rank_open(&rank.rank, bootstrap, 1);
    if (prints) print_apart(&printed);
    nccl_rank_meet(&rank.rank);
    CHECK(ncclEpCreateGroup(&rank.group, rank.rank.comm, &config) == NCCL_INVALID_USAGE, "a group");
    CHECK(!rank.group, "a group was made");
    nccl_rank_meet(&rank.rank);
    const char *text = prints ? read_printed(&printed) : "";
    for (int r = 0; r < bootstrap->size && prints; r++) {
        char expected[256];
        if (is_process && r != bootstrap->rank) continue;
        snprintf(
            expected, sizeof(expected),
            "libnccl_ep: ncclEpCreateGroup: rank %d: config.algorithm: expected 1 (high "
            "throughput) on 2 nodes, got 0 (low latency): rank %d: ep_handle_cost: config.mode: "
            "expected throughput mode or AUTO, since nodes of GPUs have different numbers",
            r, r);
        CHECK(strstr(text, expected), "no \"%s\" in: %s", expected, text);
    }
    c = TRAINING;
    config = nccl_ep_config(&c, 1);
    CHECK_NCCL(ncclEpCreateGroup(&rank.group, rank.rank.comm, &config));
    nccl_ep_close(&rank);
}

/* ---- misuse -------------------------------------------------------------------------------- */

/* Each of these is refused at once, nothing is written, and a right call still works. */
ThreadTest(gpu_nccl_ep, wrong_calls, 2) {
    NcclEpRank rank;
    NcclEpStep s;
    int error;
    Case c = TRAINING;
    ncclEpGroupConfig_t config = nccl_ep_config(&c, 1);
    nccl_ep_open(&rank, bootstrap, &config);
    nccl_ep_step_open(&s, &rank, &c, 2, NULL, 0);
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_ARGUMENT, "no handle");
    CHECK(nccl_ep_init(&s, 33) == NCCL_INVALID_ARGUMENT && !s.handle, "too many experts");
    CHECK_NCCL(nccl_ep_init(&s, -1));
    CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_USAGE, "a number of experts is not known");
    /* A refused routing does not set it either. */
    size_t one[] = {1}, shape[] = {3, 2};
    ncclEpTensor_t counts = nccl_ep_vector(s.numbers, one), idx = counts;
    ncclEpLayoutInfo_t info = {.size = sizeof(info), .magic = NCCL_EP_MAGIC};
    idx.ndim = 2, idx.sizes = shape, info.expert_counters = &counts;
    CHECK(ncclEpUpdateHandle(s.handle, &idx, &info, rank.rank.stream) == NCCL_INVALID_ARGUMENT,
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
    CHECK(ncclEpUpdateHandle(s.handle, NULL, NULL, rank.rank.stream) == NCCL_INVALID_ARGUMENT,
          "no idx");
    s.dispatched.issued = 0;
    nccl_ep_step_check(&s);
    nccl_ep_run(&s);
    nccl_ep_end(&rank, &s);
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
    cudaStream_t stream = s->rank->rank.stream;
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
static void run_unwritten(const EpBootstrap *bootstrap, Case c, const Unwritten *u, int count) {
    enum { BYTES = 4096 };
    static const char poison[BYTES]; /* zero */
    static _Thread_local char got[BYTES];
    NcclEpRank rank;
    NcclEpStep s;
    void *memory;
    size_t sizes[] = {BYTES / 4}, shape[] = {3, (size_t)c.top_k};
    nccl_ep_begin(&rank, &s, bootstrap, &c);
    REQUIRE_CUDA(cudaMalloc(&memory, BYTES));
    CHECK_CUDA(cudaMemset(memory, 0, BYTES));
    ncclEpTensor_t tensor = nccl_ep_vector(memory, sizes), idx = tensor;
    idx.ndim = 2, idx.sizes = shape;
    for (int i = 0; i < count && bootstrap->rank == 0; i++) {
        Printed printed;
        print_apart(&printed);
        int result = call_with(&s, &u[i], &tensor, &idx);
        const char *text = read_printed(&printed);
        CHECK(result == NCCL_INVALID_ARGUMENT && strstr(text, u[i].name), "%d, \"%s\", not \"%s\"",
              result, text, u[i].name);
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(got, memory, BYTES, cudaMemcpyDefault));
    CHECK(!memcmp(got, poison, BYTES), "a refused call has written");
    nccl_ep_run(&s);
    CHECK_CUDA(cudaFree(memory));
    nccl_ep_end(&rank, &s);
}

#define UNWRITTEN(c, list) run_unwritten(bootstrap, c, list, LENGTH(list))

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
    UNWRITTEN(TRAINING, slabs);
    UNWRITTEN(nccl_ep_training_case(bootstrap->size, NCCL_EP_FLAT "ids"), flat);
}

static void unwritten_outputs_of_decoding(const EpBootstrap *bootstrap) {
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
    UNWRITTEN(DECODING(BATCHED), by_expert);
    UNWRITTEN(DECODING(RANK_MAJOR), by_rank);
}

LatencyTest(gpu_nccl_ep, unwritten_outputs_of_decoding, 2,
            unwritten_outputs_of_decoding(bootstrap));

/* A forward combine of high throughput leaves the backward pass's output alone, as NCCL EP
 * does, whose benchmark passes it. */
ThreadTest(gpu_nccl_ep, weights_of_the_backward_pass, 2) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = TRAINING;
    nccl_ep_begin(&rank, &s, bootstrap, &c);
    s.passes_weights = 1;
    CHECK_NCCL(nccl_ep_combine(&s));
    nccl_ep_step_check(&s);
    nccl_ep_end(&rank, &s);
}

/* With exact sizes, where one rank receives nothing: a kernel would find these differences, and
 * fail the group. All ranks are refused, and right calls follow. */
static void run_refused_rows(const EpBootstrap *bootstrap, const char *changes) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = nccl_ep_training_case(bootstrap->size, changes);
    nccl_ep_begin(&rank, &s, bootstrap, &c);
    CHECK_CUDA(
        cudaStreamSynchronize(rank.rank.stream)); /* then the host knows how many rows arrive */
    for (int wrong = NCCL_EP_EMPTY_WEIGHTS; wrong <= NCCL_EP_FEWER_ROWS; wrong++) {
        if (wrong == NCCL_EP_FEWER_ROWS && !device_step_rank(&s.dispatched)->recv_rows) continue;
        if (wrong == NCCL_EP_FEWER_ROWS && !nccl_ep_is_on_one_node(&rank)) continue;
        s.wrong = wrong;
        CHECK(nccl_ep_dispatch(&s) == NCCL_INVALID_ARGUMENT, "a wrong dispatch (%d)", wrong);
        CHECK(nccl_ep_dispatch_backward(&s) == NCCL_INVALID_ARGUMENT, "a wrong combine");
    }
    s.wrong = NCCL_EP_RIGHT;
    s.dispatched.issued = 0;
    nccl_ep_step_check(&s);
    nccl_ep_run(&s);
    nccl_ep_end(&rank, &s);
}

ThreadTest(gpu_nccl_ep, refused_rows_fail_no_group, 2) {
    run_refused_rows(bootstrap, "capacity=0 routing=one-rank");
    run_refused_rows(bootstrap, NCCL_EP_FLAT "keep capacity=0 routing=one-rank");
}

/* Handles may outlive their group, and then do nothing. */
ThreadTest(gpu_nccl_ep, group_goes_first, 2) {
    NcclEpRank rank;
    NcclEpStep s;
    Case c = TRAINING;
    nccl_ep_begin(&rank, &s, bootstrap, &c);
    nccl_ep_run(&s);
    CHECK_NCCL(ncclEpGroupDestroy(rank.group));
    CHECK(nccl_ep_combine(&s) == NCCL_INVALID_USAGE, "a group that is gone");
    CHECK(nccl_ep_update(&s) == NCCL_INVALID_USAGE, "a group that is gone");
    nccl_ep_step_close(&s);
    CHECK_CUDA(cudaStreamDestroy(rank.rank.stream));
    CHECK(rank.rank.nccl.destroy(rank.rank.comm) == ncclSuccess, "ncclCommDestroy");
}
