/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in memory that the rank's GPU cannot reach are refused before anything is enqueued. */
#include <cuda_runtime_api.h>

#include "tests/cases/fixture.h"
#include "tests/gpu/device_step.h"

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

/** Tensors of an operation: from one to another one, in the fixture's order. */
static const struct {
    Op op;
    Arg first, last;
} uses[] = {{OP_PREPARE, TOPK_IDX, SOURCE_ROWS},
            {OP_DISPATCH, TOKENS, RECV_TOPK_IDX},
            {OP_DISPATCH, GLOBAL_SCALE, GLOBAL_SCALE},
            {OP_COMBINE, EXPERT_OUT, OUT},
            {OP_DISPATCH_BACKWARD, GRAD_RECV_TOKENS, GRAD_TOPK_WEIGHTS},
            {OP_COMBINE_BACKWARD, GRAD_OUT, GRAD_SLOT_WEIGHTS},
            {OP_COMBINE_BACKWARD, EXPERT_OUT, SLOT_WEIGHTS}};
enum { USES = sizeof(uses) / sizeof(uses[0]) };

/* fixture_call with the tensors unchanged. */
static EpStatus call(Fixture *fixture, Op op) {
    gpu_copy_tensors(0);
    EpStatus status = fixture_call(fixture, op);
    gpu_copy_tensors(1);
    return status;
}

/* Put each tensor of each operation in `memory` once, all others in valid memory. */
static void check_each(Fixture *fixture, void *memory, const char *kind) {
    for (int i = 0; i < USES; i++)
        for (int arg = uses[i].first; arg <= (int)uses[i].last; arg++) {
            const char *op = op_names[uses[i].op];
            check_note("%s, %s in %s", op, names[arg], kind);
            fixture_reset(fixture);
            if (!fixture->arg[arg]) continue;
            fixture->tensor[arg].data = memory;
            CHECK_REFUSED(call(fixture, uses[i].op), EP_ERR_ADDRESS, "rank 0", op, names[arg],
                          kind);
            CHECK_CUDA(cudaDeviceSynchronize());
            fixture_check_untouched(fixture);
        }
}

static void check_layout(EpLayout layout, EpQuant quant, void *memory, const char *kind) {
    Fixture fixture;
    Case c = fixture_case(layout);
    c.quant = quant, c = case_complete(c);
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
        check_layout((EpLayout)layout, EP_QUANT_NONE, plain, "plain host memory");
    check_layout(EP_LAYOUT_FLAT, EP_QUANT_NVFP4, plain, "plain host memory");
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
    check_layout(EP_LAYOUT_FLAT, EP_QUANT_NONE, memory, kind);
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
    config.backend = EP_BACKEND_HOST;
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    EpGroup *group = open_group_with(&bootstrap, &config);
    EpHandle *handle = open_handle_with(group, NULL);
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
    for (int i = 0; i < 2; i++)
        for (int arg = uses[i].first; arg <= (int)uses[i].last; arg++) {
            EpTensor *tensor = &fixture.tensor[arg], kept = *tensor;
            if (!host.arg[arg]) continue;
            tensor->data = memory;
            check_note("%s", names[arg]);
            CHECK_REFUSED(call(&host, uses[i].op), EP_ERR_ADDRESS, "host backend", kind,
                          names[arg]);
            *tensor = kept;
        }
    CHECK_OK(call(&host, OP_DISPATCH));
    ep_group_destroy(group);
    ep_bootstrap_destroy(&bootstrap);
    CHECK_CUDA(cudaFree(memory));
    fixture_close(&fixture);
}
