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

/** Arrays of an operation, in ranges. */
static const struct {
    StepOp op;
    const char *name;
    int first, last;
} uses[] = {
    {STEP_PREPARE, "ep_prepare", IN_INDEX, IN_COUNT},
    {STEP_PREPARE, "ep_prepare", OUT_COUNTS, OUT_SOURCES},
    {STEP_DISPATCH, "ep_dispatch", IN_TOKENS, IN_GLOBAL_SCALE},
    {STEP_DISPATCH, "ep_dispatch", OUT_TOKENS, OUT_INDEX},
    {STEP_DISPATCH, "ep_dispatch", EXPERT_TOKENS, LONGEST_WAIT},
    {STEP_COMBINE, "ep_combine", IN_EXPERT_OUT, IN_COMBINE_WEIGHTS},
    {STEP_COMBINE, "ep_combine", OUT_SUMS, OUT_SUMS},
    {STEP_DISPATCH_BACKWARD, "ep_dispatch_backward", IN_GRAD_SLOT_WEIGHTS, IN_GRAD_SLOT_WEIGHTS},
    {STEP_DISPATCH_BACKWARD, "ep_dispatch_backward", OUT_GRAD_TOKENS, OUT_GRAD_WEIGHTS},
    {STEP_COMBINE_BACKWARD, "ep_combine_backward", IN_GRAD_OUT, IN_GRAD_OUT},
    {STEP_COMBINE_BACKWARD, "ep_combine_backward", IN_EXPERT_OUT, IN_SLOT_WEIGHTS},
    {STEP_COMBINE_BACKWARD, "ep_combine_backward", OUT_GRAD_ROWS, OUT_GRAD_SLOTS}};
enum { USES = sizeof(uses) / sizeof(uses[0]) };

/* fixture_call with the tensors unchanged. */
static EpStatus call(Fixture *fixture, StepOp op) {
    gpu_copy_tensors(0);
    EpStatus status = fixture_call(fixture, op);
    gpu_copy_tensors(1);
    return status;
}

/* Put each tensor of each operation in `memory` once, all others in valid memory. */
static void check_each(Fixture *fixture, void *memory, const char *kind) {
    for (int i = 0; i < USES; i++)
        for (int arg = uses[i].first; arg <= uses[i].last; arg++) {
            const char *op = uses[i].name;
            check_note("%s, %s in %s", op, step_array_name(arg), kind);
            fixture_reset(fixture);
            if (arg >= EXPERT_TOKENS) fixture->arg[arg] = &fixture->tensor[arg];
            if (!fixture->arg[arg]) continue;
            fixture->tensor[arg].data = memory;
            CHECK_REFUSED(call(fixture, uses[i].op), EP_ERR_ADDRESS, "rank 0", op,
                          step_array_name(arg), kind);
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
    CHECK_OK(call(&host, STEP_PREPARE));
    CHECK_OK(call(&host, STEP_DISPATCH));
    for (int i = 0; i < 4; i++)
        for (int arg = uses[i].first; arg <= uses[i].last; arg++) {
            EpTensor *tensor = &fixture.tensor[arg], kept = *tensor;
            if (!host.arg[arg]) continue;
            tensor->data = memory;
            check_note("%s", step_array_name(arg));
            CHECK_REFUSED(call(&host, uses[i].op), EP_ERR_ADDRESS, "host backend", kind,
                          step_array_name(arg));
            *tensor = kept;
        }
    CHECK_OK(call(&host, STEP_DISPATCH));
    ep_group_destroy(group);
    ep_bootstrap_destroy(&bootstrap);
    CHECK_CUDA(cudaFree(memory));
    fixture_close(&fixture);
}
