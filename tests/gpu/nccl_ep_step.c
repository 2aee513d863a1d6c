/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/nccl_ep_step.h"

#include "bindings/nccl_ep/adapter.h"
#include "tests/gpu/device_step.h"

/* ---- a rank -------------------------------------------------------------------------------- */

Case nccl_ep_training_case(int ranks, const char *changes) {
    return case_complete(
        case_of("ranks=%d experts=%d top_k=5 hidden=136 max_tokens=157 masked_percent=5 "
                "duplicates=1 merged=1 alignment=8 capacity=%d index_type=int64 %s",
                ranks, 4 * ranks + 3, 157 * 5 * ranks + 8 * 8, changes));
}

Case nccl_ep_decoding_case(int ranks, EpLayout layout) {
    Case c = {.ranks = ranks, .experts = 5 * ranks + 1, .top_k = 4, .hidden = 256};
    c.max_tokens = 19, c.masked_percent = 5, c.duplicates = 1, c.merged = 1, c.layout = layout;
    c.rows_per_expert = 19 * ranks, c.mode = EP_MODE_LATENCY;
    c.zero_tail = layout == EP_LAYOUT_RANK_MAJOR ? EP_TAIL_IDS : EP_TAIL_KEEP, c.all_weights = 1;
    c.weighted = 1;
    return case_complete(c);
}

ncclEpGroupConfig_t nccl_ep_config(const Case *c, int fixed) {
    size_t row = case_row_bytes(c) > case_sum_bytes(c) ? case_row_bytes(c) : case_sum_bytes(c);
    int decodes = c->mode == EP_MODE_LATENCY;
    return (ncclEpGroupConfig_t){
        .size = sizeof(ncclEpGroupConfig_t),
        .magic = NCCL_EP_MAGIC,
        .version = 2,
        .algorithm = decodes ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT,
        .num_experts = (unsigned)c->experts,
        .max_dispatch_tokens_per_rank = (unsigned)c->max_tokens,
        .max_recv_tokens_per_rank = fixed ? (unsigned)c->capacity : 0,
        .max_token_bytes = (unsigned)row + 4 * (unsigned)c->scale_bytes,
        .timeout_ns = 60ull * 1000 * 1000 * 1000,
        .overflow_policy =
            c->overflow == EP_OVERFLOW_DROP ? NCCL_EP_OVERFLOW_DROP : NCCL_EP_OVERFLOW_AUTO,
        .num_topk = fixed ? 0 : (unsigned)c->top_k};
}

void nccl_ep_open(NcclEpRank *r, const EpBootstrap *harness, const ncclEpGroupConfig_t *config) {
    r->group = NULL;
    nccl_rank_open(&r->rank, harness, 1);
    REQUIRE(ncclEpCreateGroup(&r->group, r->rank.comm, config) == NCCL_SUCCESS, "no group");
}

void nccl_ep_close(NcclEpRank *r) {
    CHECK_NCCL(ncclEpGroupDestroy(r->group));
    nccl_rank_close(&r->rank);
}

bool nccl_ep_is_on_one_node(const NcclEpRank *r) {
    EpGroupInfo info = group_info(r->group->ep);
    return info.num_nodes == 1;
}

/* ---- a step -------------------------------------------------------------------------------- */

int nccl_ep_layout(const Case *c) {
    return c->layout == EP_LAYOUT_FLAT         ? NCCL_EP_LAYOUT_FLAT
           : c->layout == EP_LAYOUT_RANK_MAJOR ? NCCL_EP_LAYOUT_RANK_MAJOR
                                               : NCCL_EP_LAYOUT_EXPERT_MAJOR;
}

static int is_low_latency(const NcclEpStep *s) {
    return s->c.mode == EP_MODE_LATENCY;
}

static size_t number_bytes(const NcclEpStep *s) {
    return s->c.index_type == EP_TYPE_INT64 ? 8 : 4;
}

/* Each vector has room for experts, ranks and a guard. */
static size_t vector_bytes(const NcclEpStep *s) {
    return (size_t)(s->c.experts + s->c.ranks + 1) * number_bytes(s);
}

static void open_half(NcclEpStep *s, int half, DeviceStep *gpu, int number, void *memory) {
    Case c = s->c;
    c.weighted = !half, c.weights_at_combine = c.mode == EP_MODE_LATENCY;
    c = case_complete(c);
    s->world[half] = device_step_world(&c, number);
    device_step_open(gpu, NULL, NULL, &c, s->rank->rank.harness->rank, s->rank->rank.stream,
                     memory);
    gpu->without_plan = 1;
    device_step_load(gpu, s->world[half]);
}

void nccl_ep_step_open(NcclEpStep *s, NcclEpRank *rank, const Case *c, int number,
                       const NcclWindow *window, size_t skipped) {
    *s = (NcclEpStep){.rank = rank, .c = *c, .window = window};
    void *memory = window ? window->memory + skipped : NULL;
    open_half(s, 0, &s->dispatched, number, memory);
    open_half(s, 1, &s->combined, number,
              window ? (char *)memory + (device_step_bytes(&s->dispatched.c) + 127) / 128 * 128
                     : NULL);
    const RankWorld *a = device_step_rank(&s->dispatched), *b = device_step_rank(&s->combined);
    CHECK(a->rows == b->rows && a->recv_rows == b->recv_rows, "the halves differ");
    REQUIRE_CUDA(cudaMalloc((void **)&s->numbers, NCCL_EP_VECTORS * vector_bytes(s)));
    CHECK_CUDA(
        cudaMemsetAsync(s->numbers, 0x5a, NCCL_EP_VECTORS * vector_bytes(s), rank->rank.stream));
}

static void reload_half(NcclEpStep *s, int half, DeviceStep *gpu, int number) {
    World *world = device_step_world(&gpu->c, number);
    CHECK(world->rank[gpu->step.rank].rows == device_step_rank(gpu)->rows, "other sizes");
    device_step_load(gpu, world);
    world_free(s->world[half]);
    s->world[half] = world;
}

void nccl_ep_step_reload(NcclEpStep *s, int number) {
    reload_half(s, 0, &s->dispatched, number);
    reload_half(s, 1, &s->combined, number);
    CHECK_CUDA(
        cudaMemsetAsync(s->numbers, 0x5a, NCCL_EP_VECTORS * vector_bytes(s), s->rank->rank.stream));
}

void nccl_ep_step_close(NcclEpStep *s) {
    CHECK_NCCL(ncclEpHandleDestroy(s->handle));
    CHECK_CUDA(cudaStreamSynchronize(s->rank->rank.stream));
    device_step_close(&s->dispatched);
    device_step_close(&s->combined);
    CHECK_CUDA(cudaFree(s->numbers));
    CHECK_CUDA(cudaFree(s->plan));
    world_free(s->world[0]);
    world_free(s->world[1]);
}

/* ---- tensors ------------------------------------------------------------------------------- */

/** A tensor for NCCL EP, with its sizes. */
typedef struct Tensor {
    ncclEpTensor_t nccl;
    size_t sizes[EP_MAX_DIMS];
} Tensor;

static int type_of(EpType type) {
    static const struct {
        EpType type;
        int nccl;
    } types[] = {{EP_TYPE_BF16, NCCL_BFLOAT16},        {EP_TYPE_FP16, NCCL_FLOAT16},
                 {EP_TYPE_FP32, NCCL_FLOAT32},         {EP_TYPE_FP8_E4M3, NCCL_FLOAT8_E4M3},
                 {EP_TYPE_FP8_E5M2, NCCL_FLOAT8_E5M2}, {EP_TYPE_INT32, NCCL_INT32},
                 {EP_TYPE_INT64, NCCL_INT64}};
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++)
        if (types[i].type == type) return types[i].nccl;
    return NCCL_UINT8;
}

ncclEpTensor_t nccl_ep_vector(void *data, size_t *size) {
    return (ncclEpTensor_t){.size = sizeof(ncclEpTensor_t),
                            .magic = NCCL_EP_TENSOR_MAGIC,
                            .ndim = 1,
                            .datatype = NCCL_INT32,
                            .data = data,
                            .sizes = size};
}

/* `window`: the tensor names it and an offset, and no address. */
static ncclEpTensor_t *describe(Tensor *out, EpTensor t, const NcclWindow *window) {
    out->nccl = nccl_ep_vector(t.data, out->sizes);
    out->nccl.ndim = (unsigned)t.ndim, out->nccl.datatype = type_of(t.type);
    for (int i = 0; i < t.ndim; i++)
        out->sizes[i] = (size_t)t.shape[i];
    if (!window) return &out->nccl;
    out->nccl.data = NULL;
    out->nccl.win_hdl = window->window;
    out->nccl.win_offset = (uint64_t)((char *)t.data - window->memory);
    return &out->nccl;
}

/* Returns a vector of a step's numbers. */
static ncclEpTensor_t *numbers(NcclEpStep *s, Tensor *out, int vector, int64_t count) {
    s->expected_numbers |= 1 << vector;
    return describe(
        out, ep_tensor_1d(s->numbers + (size_t)vector * vector_bytes(s), s->c.index_type, count),
        NULL);
}

/* Return an input or an output of a half of the step; rows in the step's window name it. */
static ncclEpTensor_t *from(const DeviceStep *gpu, Tensor *out, StepInput input) {
    return describe(out, device_step_from(gpu, input), NULL);
}

static ncclEpTensor_t *into(const DeviceStep *gpu, Tensor *out, StepOutput output,
                            const NcclWindow *window) {
    return describe(out, device_step_into(gpu, output), window);
}

static ncclEpTensor_t *routing(const NcclEpStep *s, Tensor *out) {
    return from(&s->dispatched, out, IN_INDEX);
}

/* ---- handles ------------------------------------------------------------------------------- */

static ncclEpHandleConfig_t handle_config(const NcclEpStep *s) {
    return (ncclEpHandleConfig_t){sizeof(ncclEpHandleConfig_t), NCCL_EP_MAGIC,
                                  (size_t)s->c.alignment};
}

int nccl_ep_init(NcclEpStep *s, int num_topk) {
    Tensor memory;
    ncclEpHandleConfig_t config = handle_config(s);
    if (s->plan)
        describe(&memory, ep_tensor_1d(s->plan, EP_TYPE_UINT8, (int64_t)s->plan_bytes), NULL);
    return ncclEpInitHandle(&s->handle, s->rank->group, nccl_ep_layout(&s->c), &config, num_topk,
                            s->plan ? &memory.nccl : NULL);
}

/** Layout information for prepare. */
typedef struct Info {
    Tensor counts, offsets, total, sources;
    ncclEpLayoutInfo_t info;
} Info;

static void begin_info(Info *i) {
    i->info = (ncclEpLayoutInfo_t){.size = sizeof(i->info), .magic = NCCL_EP_MAGIC};
}

static void ask_for_numbers(NcclEpStep *s, Info *i) {
    int64_t local = device_step_rank(&s->dispatched)->num_experts;
    i->info.expert_counters = numbers(s, &i->counts, NCCL_EP_COUNTS, local);
    i->info.recv_total_counter = numbers(s, &i->total, NCCL_EP_TOTAL, 1);
    if (s->c.layout == EP_LAYOUT_EXPERT_MAJOR)
        i->info.expert_offsets = numbers(s, &i->offsets, NCCL_EP_OFFSETS, local + 1);
}

static const ncclEpLayoutInfo_t *plan_info(NcclEpStep *s, Info *i) {
    if (is_low_latency(s) || s->counts_at_dispatch) return NULL;
    begin_info(i);
    ask_for_numbers(s, i);
    return &i->info;
}

int nccl_ep_update(NcclEpStep *s) {
    Tensor index;
    Info info;
    return ncclEpUpdateHandle(s->handle, routing(s, &index), plan_info(s, &info),
                              s->rank->rank.stream);
}

int nccl_ep_create(NcclEpStep *s) {
    Tensor index;
    Info info;
    ncclEpHandleConfig_t config = handle_config(s);
    return ncclEpCreateHandle(&s->handle, s->rank->group, nccl_ep_layout(&s->c), routing(s, &index),
                              plan_info(s, &info), &config, s->rank->rank.stream);
}

void nccl_ep_step_allocate(NcclEpStep *s) {
    ncclEpHandleConfig_t config = handle_config(s);
    CHECK_NCCL(ncclEpHandleMemSize(s->rank->group, nccl_ep_layout(&s->c), &config, &s->plan_bytes,
                                   s->c.top_k));
    REQUIRE_CUDA(cudaMalloc(&s->plan, s->plan_bytes));
    CHECK_CUDA(cudaMemsetAsync(s->plan, 0xa5, s->plan_bytes, s->rank->rank.stream));
}

void nccl_ep_step_move(NcclEpStep *s) {
    void *old = s->plan;
    cudaStream_t stream = s->rank->rank.stream;
    CHECK_NCCL(ncclEpHandleDestroy(s->handle));
    s->handle = NULL;
    REQUIRE_CUDA(cudaMalloc(&s->plan, s->plan_bytes));
    CHECK_CUDA(cudaMemcpyAsync(s->plan, old, s->plan_bytes, cudaMemcpyDefault, stream));
    CHECK_CUDA(cudaMemsetAsync(old, 0x3c, s->plan_bytes, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaFree(old));
    CHECK_NCCL(nccl_ep_init(s, s->c.top_k));
}

/* ---- movement ------------------------------------------------------------------------------ */

static ncclEpDispatchConfig_t dispatch_config(const NcclEpStep *s, int pass) {
    return (ncclEpDispatchConfig_t){.size = sizeof(ncclEpDispatchConfig_t),
                                    .magic = NCCL_EP_MAGIC,
                                    .send_only = (unsigned)s->send_only,
                                    .round_scales = (unsigned)s->round_scales,
                                    .pass_direction = pass,
                                    .quant_recipe = s->quant_recipe};
}

static const ncclEpLayoutInfo_t *dispatch_info(NcclEpStep *s, Info *i) {
    int64_t local = device_step_rank(&s->dispatched)->num_experts;
    begin_info(i);
    if (s->counts_at_dispatch) ask_for_numbers(s, i);
    i->info.recv_topk_idx_kind = s->c.global_ids ? NCCL_EP_EXPERT_ID_GLOBAL : 0;
    if (is_low_latency(s) && s->c.layout == EP_LAYOUT_RANK_MAJOR)
        i->info.src_rank_counters = numbers(s, &i->sources, NCCL_EP_SOURCES, s->c.ranks);
    else if (is_low_latency(s))
        i->info.expert_counters = numbers(s, &i->counts, NCCL_EP_COUNTS, local);
    return &i->info;
}

static void spoil(const NcclEpStep *s, Tensor *tokens, Tensor *rows, Tensor *weights) {
    if (s->wrong == NCCL_EP_FEWER_ROWS) rows->sizes[0]--;
    if (s->wrong == NCCL_EP_EMPTY_WEIGHTS) weights->sizes[0] = !weights->sizes[0];
    if (s->wrong == NCCL_EP_MORE_TOKENS) tokens->sizes[0]++;
}

int nccl_ep_dispatch(NcclEpStep *s) {
    DeviceStep *gpu = &s->dispatched;
    const Case *c = &gpu->c;
    Info info;
    Tensor t[7];
    ncclEpDispatchInputs_t in = {.size = sizeof(in), .magic = NCCL_EP_MAGIC};
    ncclEpDispatchOutputs_t out = {.size = sizeof(out), .magic = NCCL_EP_MAGIC};
    ncclEpDispatchConfig_t config = dispatch_config(s, NCCL_EP_FWD_PASS);
    in.tokens = from(gpu, t, IN_TOKENS);
    out.tokens = into(gpu, t + 1, OUT_TOKENS, s->window);
    if (c->weighted) {
        in.topk_weights = from(gpu, t + 2, IN_WEIGHTS);
        out.topk_weights = into(gpu, t + 3, OUT_WEIGHTS, s->window);
    }
    if (c->scale_bytes) in.scales = from(gpu, t + 4, IN_SCALES);
    if (case_scales(c)) out.scales = into(gpu, t + 5, OUT_SCALES, NULL);
    if (case_has_rows(c)) out.topk_idx = into(gpu, t + 6, OUT_INDEX, NULL);
    spoil(s, t, t + 1, t + 3);
    device_step_replayed(gpu, STEP_DISPATCH);
    return ncclEpDispatch(s->handle, &in, &out, dispatch_info(s, &info), &config,
                          s->rank->rank.stream);
}

int nccl_ep_combine_backward(NcclEpStep *s) {
    DeviceStep *gpu = &s->combined;
    Tensor t[2];
    ncclEpDispatchInputs_t in = {.size = sizeof(in), .magic = NCCL_EP_MAGIC};
    ncclEpDispatchOutputs_t out = {.size = sizeof(out), .magic = NCCL_EP_MAGIC};
    ncclEpDispatchConfig_t config = dispatch_config(s, NCCL_EP_BWD_PASS);
    in.tokens = from(gpu, t, IN_GRAD_OUT);
    out.tokens = into(gpu, t + 1, OUT_GRAD_ROWS, s->window);
    config.quant_recipe = NCCL_EP_DISP_QUANT_NONE;
    device_step_replayed(gpu, STEP_COMBINE_BACKWARD);
    return ncclEpDispatch(s->handle, &in, &out, NULL, &config, s->rank->rank.stream);
}

static int combine(NcclEpStep *s, DeviceStep *gpu, int pass) {
    int is_backward = pass == NCCL_EP_BWD_PASS;
    Tensor t[4];
    ncclEpCombineInputs_t in = {.size = sizeof(in), .magic = NCCL_EP_MAGIC};
    ncclEpCombineOutputs_t out = {.size = sizeof(out), .magic = NCCL_EP_MAGIC};
    ncclEpCombineConfig_t config = {.size = sizeof(config), .magic = NCCL_EP_MAGIC};
    config.pass_direction = pass, config.send_only = (unsigned)s->send_only;
    if (s->c.sum_quant == EP_QUANT_FP8) config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8;
    in.tokens = describe(t, device_step_from(gpu, IN_EXPERT_OUT), s->window);
    out.tokens = into(gpu, t + 1, is_backward ? OUT_GRAD_TOKENS : OUT_SUMS, NULL);
    if (is_backward) in.topk_weights = from(gpu, t + 2, IN_GRAD_SLOT_WEIGHTS);
    if (is_backward || s->passes_weights)
        out.topk_weights = into(gpu, t + 3, OUT_GRAD_WEIGHTS, NULL);
    else if (gpu->c.weights_at_combine)
        out.topk_weights = from(gpu, t + 3, IN_COMBINE_WEIGHTS);
    spoil(s, t + 1, t, t + 2);
    device_step_replayed(gpu, is_backward ? STEP_DISPATCH_BACKWARD : STEP_COMBINE);
    return ncclEpCombine(s->handle, &in, &out, &config, s->rank->rank.stream);
}

int nccl_ep_combine(NcclEpStep *s) {
    return combine(s, &s->combined, NCCL_EP_FWD_PASS);
}

int nccl_ep_dispatch_backward(NcclEpStep *s) {
    return combine(s, &s->dispatched, NCCL_EP_BWD_PASS);
}

int nccl_ep_complete(NcclEpStep *s) {
    return ncclEpComplete(s->handle, NULL, s->rank->rank.stream);
}

void nccl_ep_move(NcclEpStep *s) {
    CHECK_NCCL(nccl_ep_dispatch(s));
    if (s->send_only) CHECK_NCCL(nccl_ep_complete(s));
    CHECK_NCCL(nccl_ep_combine(s));
    if (s->send_only) CHECK_NCCL(nccl_ep_complete(s));
    if (is_low_latency(s)) return;
    CHECK_NCCL(nccl_ep_combine_backward(s));
    CHECK_NCCL(nccl_ep_dispatch_backward(s));
}

void nccl_ep_run(NcclEpStep *s) {
    nccl_ep_move(s);
    if (is_low_latency(s)) CHECK_NCCL(nccl_ep_complete(s)); /* nothing is pending: no error */
    nccl_ep_step_check(s);
}

void nccl_ep_begin(NcclEpRank *rank, NcclEpStep *s, const EpBootstrap *harness, const Case *c) {
    ncclEpGroupConfig_t config = nccl_ep_config(c, c->mode != EP_MODE_LATENCY && c->capacity > 0);
    nccl_ep_open(rank, harness, &config);
    nccl_ep_step_open(s, rank, c, 2, NULL, 0);
    CHECK_NCCL(nccl_ep_create(s));
}

void nccl_ep_end(NcclEpRank *rank, NcclEpStep *s) {
    nccl_ep_step_close(s);
    nccl_ep_close(rank);
}

/* ---- checking ------------------------------------------------------------------------------ */

static void check_vector(const NcclEpStep *s, const char *copy, int vector, const int64_t *expected,
                         int64_t count, const char *what) {
    size_t bytes = number_bytes(s);
    const char *at = copy + (size_t)vector * vector_bytes(s);
    int written = s->expected_numbers >> vector & 1;
    for (size_t i = 0; i < vector_bytes(s) / bytes; i++) {
        int64_t wide, untouched = bytes == 8 ? 0x5a5a5a5a5a5a5a5a : 0x5a5a5a5a;
        int32_t narrow;
        memcpy(bytes == 8 ? (void *)&wide : &narrow, at + i * bytes, bytes);
        int64_t got = bytes == 8 ? wide : narrow;
        int64_t wanted = written && (int64_t)i < count ? expected[i] : untouched;
        CHECK(got == wanted, "%s[%zu]: %lld instead of %lld", what, i, (long long)got,
              (long long)wanted);
    }
}

/* Expert-major counts are padded in high-throughput mode, and offsets have no end. */
static void check_numbers(const NcclEpStep *s) {
    size_t all = NCCL_EP_VECTORS * vector_bytes(s);
    const RankWorld *me = device_step_rank(&s->dispatched);
    int padded = s->c.layout == EP_LAYOUT_EXPERT_MAJOR;
    char *copy = malloc(all);
    CHECK_CUDA(cudaMemcpy(copy, s->numbers, all, cudaMemcpyDefault));
    check_vector(s, copy, NCCL_EP_COUNTS, padded ? me->padded : me->count, me->num_experts,
                 "expert_counters");
    check_vector(s, copy, NCCL_EP_OFFSETS, me->offset, me->num_experts, "expert_offsets");
    check_vector(s, copy, NCCL_EP_TOTAL, &me->needed_rows, 1, "recv_total_counter");
    check_vector(s, copy, NCCL_EP_SOURCES, me->from_rows, s->c.ranks, "src_rank_counters");
    free(copy);
}

void nccl_ep_step_check(NcclEpStep *s) {
    device_step_check(&s->dispatched);
    device_step_check(&s->combined);
    check_numbers(s);
}
