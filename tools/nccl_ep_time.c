/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times what the drop-in library itself adds to libep's calls, on any machine: it is linked with
 * functions that do nothing in the place of libep's.
 *
 *     cc -O3 -std=c11 -D_GNU_SOURCE -Iinclude -Ibindings/nccl_ep tools/nccl_ep_time.c \
 *        bindings/nccl_ep/?*.c -pthread -ldl -o build/nccl_ep_time && build/nccl_ep_time
 *
 * Prints microseconds per call, the fastest of several runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <nccl_ep.h>
#include "ep/ep.h"

enum { CALLS = 200000, RUNS = 7, TOKENS = 128, HIDDEN = 7168, TOP_K = 8, EXPERTS = 64 };

/* ---- in libep's place ---------------------------------------------------------------------- */

static char something[256];
static EpStatus answer = EP_OK; /* not a constant, so that callers look at it */

EpStatus ep_bootstrap_nccl(struct ncclComm *comm, EpBootstrap *out);

EpStatus ep_bootstrap_nccl(struct ncclComm *comm, EpBootstrap *out) {
    (void)comm, (void)out;
    return answer;
}
void ep_bootstrap_destroy(EpBootstrap *bootstrap) {
    (void)bootstrap;
}
EpStatus ep_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpGroup **out) {
    (void)bootstrap, (void)config;
    *out = (EpGroup *)something;
    return answer;
}
void ep_group_destroy(EpGroup *group) {
    (void)group;
}
EpStatus ep_group_query(const EpGroup *group, EpGroupInfo *out) {
    (void)group;
    out->rank = 0, out->size = 1, out->num_nodes = 1, out->num_local_experts = EXPERTS;
    return answer;
}
EpStatus ep_group_status(EpGroup *group, EpFinding *finding) {
    (void)group, (void)finding;
    return answer;
}
EpStatus ep_handle_create(EpGroup *group, const EpHandleConfig *config, EpHandle **out) {
    (void)group, (void)config;
    *out = (EpHandle *)something;
    return answer;
}
void ep_handle_destroy(EpHandle *handle) {
    (void)handle;
}
EpStatus ep_handle_memory(const EpGroup *group, const EpHandleConfig *config, size_t *bytes) {
    (void)group, (void)config;
    *bytes = sizeof(something);
    return answer;
}
EpStatus ep_handle_plan(const EpHandle *handle, EpTensor *plan) {
    (void)handle;
    *plan = ep_tensor_1d(something, EP_TYPE_UINT8, sizeof(something));
    return answer;
}
EpStatus ep_prepare(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                    const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *outputs) {
    (void)handle, (void)plan, (void)topk_idx, (void)num_tokens, (void)stream, (void)outputs;
    return answer;
}
EpStatus ep_dispatch(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                     const EpTensor *tokens, const EpTensor *topk_weights, const EpTensor *scales,
                     EpStream stream, const EpTensor *recv_tokens,
                     const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                     const EpTensor *recv_topk_idx) {
    (void)handle, (void)plan, (void)prepare, (void)tokens, (void)topk_weights, (void)scales;
    (void)stream, (void)recv_tokens, (void)recv_topk_weights, (void)recv_scales;
    (void)recv_topk_idx;
    return answer;
}
EpStatus ep_combine(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                    const EpTensor *slot_weights, const EpTensor *topk_weights, EpStream stream,
                    const EpTensor *out) {
    (void)handle, (void)plan, (void)expert_out, (void)slot_weights, (void)topk_weights;
    (void)stream, (void)out;
    return answer;
}
/* In the place of all others, which these steps do not call. */
void not_called(void);
void not_called(void) {
    abort();
}
#define NOT_CALLED(name) __asm__(".globl " #name "\n.set " #name ", not_called\n")
NOT_CALLED(ep_dispatch_send);
NOT_CALLED(ep_dispatch_wait);
NOT_CALLED(ep_combine_send);
NOT_CALLED(ep_combine_wait);
NOT_CALLED(ep_dispatch_backward);
NOT_CALLED(ep_handle_info);
NOT_CALLED(ep_window_adopt);
NOT_CALLED(ep_window_locate);
NOT_CALLED(ep_window_release);
const char *ep_last_error(void) {
    return "";
}
int ep_version(void) {
    return 0;
}
EpStatus ep_settings(void (*visit)(const EpSetting *setting, void *context), void *context) {
    (void)visit, (void)context;
    return answer;
}
size_t ep_type_bytes(EpType type) {
    return type == EP_TYPE_INT64 ? 8 : type == EP_TYPE_BF16 ? 2 : type == EP_TYPE_UINT8 ? 1 : 4;
}

/* ---- times --------------------------------------------------------------------------------- */

static void must(int result, const char *what) {
    if (result == 0) return;
    fprintf(stderr, "%s: %d\n", what, result);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

typedef struct Step {
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclEpTensor_t tensor[8];
    size_t sizes[8][3];
    int count, layout;
    ncclEpTensor_t *idx;
    ncclEpLayoutInfo_t info, *update_info, *dispatch_info;
    ncclEpHandleConfig_t config;
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpCombineInputs_t combine_in;
    ncclEpCombineOutputs_t combine_out;
} Step;

static ncclEpTensor_t *make(Step *s, int type, size_t a, size_t b, size_t c) {
    int i = s->count++;
    memcpy(s->sizes[i], (size_t[]){a, b, c}, sizeof(s->sizes[i]));
    s->tensor[i] = (ncclEpTensor_t){.size = sizeof(s->tensor[i]),
                                    .magic = NCCL_EP_TENSOR_MAGIC,
                                    .ndim = 1 + (b > 0) + (c > 0),
                                    .datatype = type,
                                    .data = something,
                                    .sizes = s->sizes[i]};
    return &s->tensor[i];
}

static void recreate(Step *s) {
    must(ncclEpHandleDestroy(s->handle), "ncclEpHandleDestroy");
    must(ncclEpCreateHandle(&s->handle, s->group, s->layout, s->idx, s->update_info, &s->config,
                            NULL),
         "ncclEpCreateHandle");
}
static void update(Step *s) {
    must(ncclEpUpdateHandle(s->handle, s->idx, s->update_info, NULL), "ncclEpUpdateHandle");
}
static void dispatch(Step *s) {
    must(ncclEpDispatch(s->handle, &s->in, &s->out, s->dispatch_info, NULL, NULL),
         "ncclEpDispatch");
}
static void combine(Step *s) {
    must(ncclEpCombine(s->handle, &s->combine_in, &s->combine_out, NULL, NULL), "ncclEpCombine");
}

static double fastest(Step *s, void (*call)(Step *)) {
    double best = 1e9;
    for (int run = 0; run < RUNS; run++) {
        double begin = now();
        for (int i = 0; i < CALLS; i++)
            call(s);
        double each = (now() - begin) / CALLS;
        best = each < best ? each : best;
    }
    return best;
}

#define INIT(field) (field).size = sizeof(field), (field).magic = NCCL_EP_MAGIC

static void time_calls(int algorithm, const char *name) {
    int low_latency = algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    ncclEpGroupConfig_t config = {0};
    Step s = {.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR};
    INIT(config), INIT(s.info), INIT(s.in), INIT(s.out), INIT(s.combine_in), INIT(s.combine_out);
    s.config = (ncclEpHandleConfig_t){sizeof(s.config), NCCL_EP_MAGIC, 128};
    config.algorithm = algorithm, config.num_experts = EXPERTS;
    config.max_dispatch_tokens_per_rank = TOKENS, config.max_token_bytes = 2 * HIDDEN;
    config.max_recv_tokens_per_rank = low_latency ? 0 : TOKENS * TOP_K + EXPERTS * 128;
    config.num_topk = TOP_K;
    must(ncclEpCreateGroup(&s.group, (struct ncclComm *)something, &config), "ncclEpCreateGroup");
    s.idx = make(&s, NCCL_INT64, TOKENS, TOP_K, 0);
    s.info.expert_counters = make(&s, NCCL_INT32, EXPERTS, 0, 0);
    *(low_latency ? &s.dispatch_info : &s.update_info) = &s.info;
    s.in.tokens = make(&s, NCCL_BFLOAT16, TOKENS, HIDDEN, 0);
    s.combine_out.tokens = s.in.tokens;
    ncclEpTensor_t *weights = make(&s, NCCL_FLOAT32, TOKENS, TOP_K, 0);
    if (low_latency) {
        s.combine_out.topk_weights = weights;
        s.out.tokens = make(&s, NCCL_BFLOAT16, EXPERTS, TOKENS, HIDDEN);
    } else {
        size_t rows = config.max_recv_tokens_per_rank;
        s.in.topk_weights = weights;
        s.out.tokens = make(&s, NCCL_BFLOAT16, rows, HIDDEN, 0);
        s.out.topk_weights = make(&s, NCCL_FLOAT32, rows, 0, 0);
    }
    s.combine_in.tokens = s.out.tokens;
    recreate(&s);
    printf("%-16s %8.3f %8.3f %8.3f %8.3f\n", name, fastest(&s, recreate), fastest(&s, update),
           fastest(&s, dispatch), fastest(&s, combine));
    must(ncclEpHandleDestroy(s.handle), "ncclEpHandleDestroy");
    must(ncclEpGroupDestroy(s.group), "ncclEpGroupDestroy");
}

int main(void) {
    printf("%-16s %8s %8s %8s %8s\n", "# us per call", "handle", "update", "dispatch", "combine");
    time_calls(NCCL_EP_ALGO_HIGH_THROUGHPUT, "high throughput");
    time_calls(NCCL_EP_ALGO_LOW_LATENCY, "low latency");
    return 0;
}
