/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in memory that the rank's GPU cannot reach are refused before anything is enqueued. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/cases/fixture.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"

/* Have every tensor checked; by default small ones are not, to save time. */
static void check_all(void) {
    setenv("LIBEP_CHECK", "all", 1);
}

TestSuite(gpu_pointers, .init = check_all);

static const char *const names[] = {
#define ARG_NAME(constant, name, output) name,
    FIXTURE_TENSORS(ARG_NAME)
#undef ARG_NAME
};

static const char *const op_names[] = {"ep_prepare", "ep_dispatch", "ep_combine",
                                       "ep_dispatch_backward", "ep_combine_backward"};

static const struct {
    Op op;
    Arg arg;
} uses[] = {
    {OP_PREPARE, TOPK_IDX},
    {OP_PREPARE, NUM_TOKENS},
    {OP_PREPARE, EXPERT_COUNTS},
    {OP_PREPARE, EXPERT_PADDED},
    {OP_PREPARE, EXPERT_OFFSETS},
    {OP_PREPARE, TOTALS},
    {OP_PREPARE, RECV_ROWS},
    {OP_PREPARE, NEEDED_ROWS},
    {OP_PREPARE, DROPPED_SLOTS},
    {OP_PREPARE, SOURCE_ROWS},
    {OP_DISPATCH, TOKENS},
    {OP_DISPATCH, TOPK_WEIGHTS},
    {OP_DISPATCH, SCALES},
    {OP_DISPATCH, RECV_TOKENS},
    {OP_DISPATCH, RECV_TOPK_WEIGHTS},
    {OP_DISPATCH, RECV_SCALES},
    {OP_DISPATCH, RECV_TOPK_IDX},
    {OP_COMBINE, EXPERT_OUT},
    {OP_COMBINE, SLOT_WEIGHTS},
    {OP_COMBINE, OUT},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_TOKENS},
    {OP_DISPATCH_BACKWARD, GRAD_RECV_WEIGHTS},
    {OP_DISPATCH_BACKWARD, GRAD_TOKENS},
    {OP_DISPATCH_BACKWARD, GRAD_TOPK_WEIGHTS},
    {OP_COMBINE_BACKWARD, GRAD_OUT},
    {OP_COMBINE_BACKWARD, SLOT_WEIGHTS},
    {OP_COMBINE_BACKWARD, EXPERT_OUT},
    {OP_COMBINE_BACKWARD, GRAD_EXPERT_OUT},
    {OP_COMBINE_BACKWARD, GRAD_SLOT_WEIGHTS},
};

/* Like fixture_call, but passes the tensors unchanged: fixture_call copies plain memory to the
 * pinned buffer. */
static EpStatus call(const Fixture *fixture, Op op) {
    const EpTensor *const *a = fixture->arg;
    EpHandle *handle = fixture->handle;
    EpPlanTensors plan = {
        sizeof(plan), a[EXPERT_COUNTS], a[EXPERT_PADDED], a[EXPERT_OFFSETS], a[TOTALS],
        NULL,         a[RECV_ROWS],     a[NEEDED_ROWS],   a[DROPPED_SLOTS],  a[SOURCE_ROWS]};
    switch (op) {
    case OP_PREPARE:
        return ep_prepare(handle, NULL, a[TOPK_IDX], a[NUM_TOKENS], NULL, &plan);
    case OP_DISPATCH:
        return ep_dispatch(handle, NULL, NULL, a[TOKENS], a[TOPK_WEIGHTS], a[SCALES], NULL,
                           a[RECV_TOKENS], a[RECV_TOPK_WEIGHTS], a[RECV_SCALES], a[RECV_TOPK_IDX]);
    case OP_COMBINE:
        return ep_combine(handle, NULL, a[EXPERT_OUT], a[SLOT_WEIGHTS], NULL, NULL, a[OUT]);
    case OP_DISPATCH_BACKWARD:
        return ep_dispatch_backward(handle, NULL, a[GRAD_RECV_TOKENS], a[GRAD_RECV_WEIGHTS], NULL,
                                    a[GRAD_TOKENS], a[GRAD_TOPK_WEIGHTS]);
    default:
        return ep_combine_backward(handle, NULL, a[GRAD_OUT], a[SLOT_WEIGHTS], a[EXPERT_OUT], NULL,
                                   a[GRAD_EXPERT_OUT], a[GRAD_SLOT_WEIGHTS]);
    }
}

/* Put each tensor of each operation in `memory` once, all others in valid memory. */
static void check_each(Fixture *fixture, void *memory, const char *kind) {
    for (size_t i = 0; i < sizeof(uses) / sizeof(uses[0]); i++) {
        Op op = uses[i].op;
        Arg arg = uses[i].arg;
        check_note("%s, %s in %s", op_names[op], names[arg], kind);
        fixture_reset(fixture);
        if (!fixture->arg[arg]) continue; /* recv_topk_idx: only in FLAT */
        fixture->tensor[arg].data = memory;
        CHECK_REFUSED(call(fixture, op), EP_ERR_ADDRESS, "rank 0", op_names[op], names[arg], kind);
        CHECK_CUDA(cudaDeviceSynchronize());
        fixture_check_untouched(fixture);
    }
}

static void check_layout(EpLayout layout, void *memory, const char *kind) {
    Fixture fixture;
    Case c = fixture_case(layout);
    fixture_open(&fixture, &c);
    step_prepare(&fixture.step);
    check_each(&fixture, memory, kind);
    check_note("after all refusals");
    CHECK_OK(ep_group_status(fixture.group, NULL));
    step_all(&fixture.step);
    fixture_close(&fixture);
}

SoloTest(gpu_pointers, plain_memory_is_refused) {
    int device = 0, pageable = 0;
    gpu_take(0);
    REQUIRE_CUDA(cudaGetDevice(&device));
    REQUIRE_CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device));
    if (pageable) cr_skip_test("this GPU reads plain memory");
    void *plain = aligned_alloc(128, 1 << 20);
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_BATCHED; layout++)
        check_layout((EpLayout)layout, plain, "plain host memory");
    free(plain);
}

SoloTest(gpu_pointers, memory_of_another_gpu_is_refused) {
    int other = 0;
    void *memory = NULL;
    if (gpu_count() < 2) cr_skip_test("there is one GPU");
    gpu_take(1);
    REQUIRE_CUDA(cudaGetDevice(&other));
    REQUIRE_CUDA(cudaMalloc(&memory, 1 << 20));
    gpu_take(0);
    char kind[48];
    snprintf(kind, sizeof(kind), "memory of device %d", other);
    check_layout(EP_LAYOUT_FLAT, memory, kind);
    CHECK_CUDA(cudaFree(memory));
}

/* A program whose tensors are on GPUs gets the host backend: by mistake, or because AUTO cannot use
 * the GPUs. Its calls are refused before a CPU loads from that memory. */
SoloTest(gpu_pointers, device_memory_on_the_host_backend) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    fixture_open(&fixture, &c);
    EpGroupConfig config = case_group_config(&c);
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    EpGroup *group = NULL;
    EpHandle *handle = NULL;
    config.backend = EP_BACKEND_HOST;
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    REQUIRE_OK(ep_group_create(&bootstrap, &config, &group));
    REQUIRE_OK(ep_handle_create(group, NULL, &handle));
    Fixture host = fixture;
    host.handle = handle;
    char kind[48];
    int device = 0;
    void *memory = NULL;
    REQUIRE_CUDA(cudaGetDevice(&device));
    REQUIRE_CUDA(cudaMalloc(&memory, 1 << 20));
    snprintf(kind, sizeof(kind), "memory of device %d", device);
    /* The fixture's tensors are pinned or plain memory, which CPUs reach. */
    CHECK_OK(call(&host, OP_PREPARE));
    CHECK_OK(call(&host, OP_DISPATCH));
    for (int i = 0; i < (int)(sizeof(uses) / sizeof(uses[0])); i++) {
        if (uses[i].op > OP_DISPATCH || !host.arg[uses[i].arg]) continue;
        EpTensor *tensor = &fixture.tensor[uses[i].arg];
        EpTensor kept = *tensor;
        tensor->data = memory;
        check_note("%s", names[uses[i].arg]);
        CHECK_REFUSED(call(&host, uses[i].op), EP_ERR_ADDRESS, "host backend", kind,
                      names[uses[i].arg]);
        *tensor = kept;
    }
    CHECK_OK(call(&host, OP_DISPATCH));
    ep_group_destroy(group);
    ep_bootstrap_destroy(&bootstrap);
    CHECK_CUDA(cudaFree(memory));
    fixture_close(&fixture);
}
