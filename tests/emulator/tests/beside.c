/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that are gathered on one stream while rows travel on another. Emulated GPUs have no room
 * for both kernels; of libep's, two blocks get to run. On each rank one of the two comes first, so
 * that kernels that wait for each other would make a circle: ranks 0 and 1 of a group wait for the
 * gather's ranks 4 and 5, whose group waits for 6 and 7, which wait for 2 and 3. If the gather's
 * kernel took all places, dispatch would end at its deadline. */
#include "ep/ep_weight.h"
#include "tests/gpu/device_step.h"

enum { EXPERTS = 4, IN = 64, OUT = 32, ELEMENTS = IN * OUT };
enum { WAIT_US = 100000 }; /* then the kernel that comes first occupies its multiprocessors */

/* Kernels that move rows have four blocks, those that move weights two. */
static void set_up(void) {
    setenv("EMULATED_GPUS", "8", 0);
    setenv("EMULATED_PLACES", "4", 0);
    setenv("EMULATED_NCCL_BLOCKS", "2", 0);
}

TestSuite(gpu_beside, .init = set_up);

typedef struct Sharded {
    EpMeshComm *comm;
    EpWeight *weight;
    cudaStream_t stream;
    EpTensor shard, full;
} Sharded;

/* Element i of an expert's matrix is i; its shard is half of the rows. */
static void open_shard(Sharded *s, int half) {
    float values[ELEMENTS / 2];
    for (int i = 0; i < ELEMENTS / 2; i++)
        values[i] = (float)(half * ELEMENTS / 2 + i);
    s->shard = ep_tensor_3d(NULL, EP_TYPE_FP32, 1, IN / 2, OUT);
    s->full = ep_tensor_3d(NULL, EP_TYPE_FP32, 1, IN, OUT);
    REQUIRE_CUDA(cudaMalloc(&s->shard.data, sizeof(values)));
    REQUIRE_CUDA(cudaMalloc(&s->full.data, 2 * sizeof(values)));
    REQUIRE_CUDA(cudaMemcpy(s->shard.data, values, sizeof(values), cudaMemcpyHostToDevice));
    REQUIRE_CUDA(cudaDeviceSynchronize());
}

static void open_sharded(Sharded *s, const EpBootstrap *world, const EpMesh *mesh) {
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    EpWeightConfig weight = EP_WEIGHT_CONFIG_INIT;
    config.backend = EP_BACKEND_CUDA;
    weight.name = "w", weight.type = EP_TYPE_FP32, weight.grad_type = EP_TYPE_FP32;
    weight.shape[0] = EXPERTS, weight.shape[1] = IN, weight.shape[2] = OUT;
    REQUIRE_OK(ep_spec_parse(mesh, "expert,fsdp,_", &weight.spec));
    REQUIRE_OK(ep_mesh_comm_create(world, mesh, &config, &s->comm));
    REQUIRE_OK(ep_weight_create(s->comm, &weight, &s->weight));
    s->stream = new_stream();
    open_shard(s, world->rank / EXPERTS);
}

static void close_sharded(Sharded *s) {
    ep_mesh_comm_destroy(s->comm);
    CHECK_CUDA(cudaStreamDestroy(s->stream));
    CHECK_CUDA(cudaFree(s->shard.data));
    CHECK_CUDA(cudaFree(s->full.data));
}

static void gather(Sharded *s) {
    CHECK_OK(ep_weight_gather(s->weight, NULL, &s->shard, NULL, s->stream, &s->full, NULL));
}

static void check_gathered(Sharded *s) {
    float values[ELEMENTS];
    int wrong = 0;
    REQUIRE_CUDA(cudaStreamSynchronize(s->stream));
    REQUIRE_CUDA(cudaMemcpy(values, s->full.data, sizeof(values), cudaMemcpyDeviceToHost));
    for (int i = 0; i < ELEMENTS; i++)
        wrong += values[i] != (float)i;
    CHECK(wrong == 0, "%d elements of %d", wrong, ELEMENTS);
    REQUIRE_CUDA(cudaMemset(s->full.data, 0xff, sizeof(values)));
    REQUIRE_CUDA(cudaDeviceSynchronize());
}

/* One of the two has time to occupy its GPU before the other is called. */
static void run_beside(Sharded *s, DeviceStep *gpu, StepOp op, int gathers_first) {
    if (gathers_first) gather(s);
    if (!gathers_first) device_step_issue(gpu, op);
    usleep(WAIT_US);
    if (!gathers_first) gather(s);
    if (gathers_first) device_step_issue(gpu, op);
    REQUIRE_CUDA(cudaStreamSynchronize(gpu->stream));
    check_gathered(s);
}

static Case beside_case(void) {
    Case c = {.ranks = EXPERTS, .experts = EXPERTS, .top_k = 3, .hidden = 136, .max_tokens = 301};
    c.spread = SPREAD_FULL, c.weighted = 1, c.capacity = 4000;
    return case_complete(c);
}

static void beside(const EpBootstrap *world, const EpBootstrap *ep, const EpMesh *mesh) {
    static const StepOp ops[] = {STEP_DISPATCH, STEP_COMBINE, STEP_COMBINE_BACKWARD,
                                 STEP_DISPATCH_BACKWARD};
    const int gathers_first = world->rank / EXPERTS == ep->rank / 2;
    Case c = beside_case();
    EpGroupConfig config = case_group_config(&c);
    Sharded s = {NULL};
    DeviceStep gpu;
    config.num_sms = 4, config.timeout_seconds = 30;
    open_sharded(&s, world, mesh);
    EpGroup *group = open_group_with(ep, &config);
    device_step_new(&gpu, group, &c, ep->rank);
    device_step_draw(&gpu, &c);
    gather(&s); /* NCCL connects the ranks */
    check_gathered(&s);
    device_step_issue(&gpu, STEP_PREPARE);
    CHECK_CUDA(cudaStreamSynchronize(gpu.stream));
    for (int i = 0; i < 4; i++) {
        CHECK_OK(world->barrier(world->context, 60));
        run_beside(&s, &gpu, ops[i], gathers_first);
    }
    device_step_check(&gpu);
    CHECK_OK(ep_group_status(group, NULL));
    device_step_close(&gpu);
    ep_group_destroy(group);
    close_sharded(&s);
}

ThreadTest(gpu_beside, gathers_8, 8) {
    EpMesh mesh = EP_MESH_INIT;
    EpAxes axes;
    EpBootstrap ep = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_mesh_parse("fsdp=2,expert=4", &mesh));
    REQUIRE_OK(ep_mesh_role_axes(&mesh, EP_AXIS_EXPERT, &axes));
    REQUIRE_OK(ep_bootstrap_mesh(bootstrap, &mesh, &axes, &ep));
    beside(bootstrap, &ep, &mesh);
    ep_bootstrap_destroy(&ep);
}
