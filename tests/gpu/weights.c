/* SPDX-License-Identifier: Apache-2.0 */
/* Sharded weights in CUDA graphs: replayed with other shards and gradients, on two streams, and
 * without a rank. tests/handles/weights.c has what the operations compute. */
#include <cuda_runtime_api.h>
#include <string.h>

#include "ep/ep_weight.h"
#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"

enum { EXPERTS = 3, ROWS = 10, COLUMNS = 24, ELEMENTS = EXPERTS * ROWS * COLUMNS, REPLAYS = 12 };

/* w [EXPERTS, ROWS, COLUMNS] of fp32, whose rows two ranks share out. */
typedef struct Layer {
    EpMeshComm *comm;
    EpWeight *weight;
    int rank;
    float *shard, *full, *grad, *reduced; /* pinned: halves and wholes */
    void *workspace;
    int64_t workspace_bytes;
    cudaStream_t stream;
} Layer;

static void open_layer(const EpBootstrap *world, double seconds, Layer *l) {
    EpMesh mesh = EP_MESH_INIT;
    EpMeshCommConfig comm = EP_MESH_COMM_CONFIG_INIT;
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    *l = (Layer){.rank = world->rank};
    comm.backend = EP_BACKEND_CUDA, comm.timeout_seconds = seconds;
    config.name = "w", config.type = config.grad_type = EP_TYPE_FP32;
    config.shape[0] = EXPERTS, config.shape[1] = ROWS, config.shape[2] = COLUMNS;
    CHECK_OK(ep_mesh_parse("fsdp=2", &mesh));
    CHECK_OK(ep_spec_parse(&mesh, "_,fsdp,_", &config.spec));
    CHECK_OK(ep_mesh_comm_create(world, &mesh, &comm, &l->comm));
    if (!l->comm) return;
    CHECK_OK(ep_weight_create(l->comm, &config, &l->weight));
    CHECK_OK(ep_weight_sizes(l->weight, NULL, &sizes));
    l->workspace_bytes = sizes.reduce_workspace > sizes.gather_workspace ? sizes.reduce_workspace
                                                                         : sizes.gather_workspace;
    l->workspace = gpu_allocate(64, (size_t)l->workspace_bytes);
    l->shard = gpu_allocate(64, ELEMENTS / 2 * sizeof(float));
    l->reduced = gpu_allocate(64, ELEMENTS / 2 * sizeof(float));
    l->full = gpu_allocate(64, ELEMENTS * sizeof(float));
    l->grad = gpu_allocate(64, ELEMENTS * sizeof(float));
    CHECK_CUDA(cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking));
}

static void close_layer(Layer *l) {
    ep_mesh_comm_destroy(l->comm);
    gpu_release(l->workspace);
    gpu_release(l->shard);
    gpu_release(l->reduced);
    gpu_release(l->full);
    gpu_release(l->grad);
    CHECK_CUDA(cudaStreamDestroy(l->stream));
}

/* ---- values: small integers, whose sums are exact ---- */

static float value_of(int step, int expert, int row, int column) {
    return (float)((131 * step + 37 * expert + 11 * row + column) % 1009);
}

/* Rank 1's gradient is twice rank 0's. */
static void load(Layer *l, int step) {
    int half = ROWS / 2, at = 0;
    for (int e = 0; e < EXPERTS; e++)
        for (int i = 0; i < half; i++)
            for (int j = 0; j < COLUMNS; j++)
                l->shard[at++] = value_of(step, e, l->rank * half + i, j);
    at = 0;
    for (int e = 0; e < EXPERTS; e++)
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLUMNS; j++)
                l->grad[at++] = (float)(1 + l->rank) * value_of(step, e, i, j);
    memset(l->full, 0xff, ELEMENTS * sizeof(float));
    memset(l->reduced, 0xff, ELEMENTS / 2 * sizeof(float));
}

static void check_values(const Layer *l, int step) {
    int half = ROWS / 2, wrong = 0, at = 0;
    for (int e = 0; e < EXPERTS; e++)
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLUMNS; j++)
                wrong += l->full[at++] != value_of(step, e, i, j);
    at = 0;
    for (int e = 0; e < EXPERTS; e++)
        for (int i = 0; i < half; i++)
            for (int j = 0; j < COLUMNS; j++)
                wrong += l->reduced[at++] != 3 * value_of(step, e, l->rank * half + i, j);
    CHECK(!wrong, "step %d: %d wrong numbers", step, wrong);
}

/* ---- the operations ---- */

static void gather(Layer *l, cudaStream_t stream) {
    EpTensor shard = ep_tensor_3d(l->shard, EP_TYPE_FP32, EXPERTS, ROWS / 2, COLUMNS);
    EpTensor full = ep_tensor_3d(l->full, EP_TYPE_FP32, EXPERTS, ROWS, COLUMNS);
    EpTensor workspace = ep_tensor_1d(l->workspace, EP_TYPE_UINT8, l->workspace_bytes);
    CHECK_OK(ep_weight_gather(l->weight, NULL, &shard, &workspace, stream, &full, NULL));
}

static void reduce(Layer *l, cudaStream_t stream) {
    EpTensor grad = ep_tensor_3d(l->grad, EP_TYPE_FP32, EXPERTS, ROWS, COLUMNS);
    EpTensor reduced = ep_tensor_3d(l->reduced, EP_TYPE_FP32, EXPERTS, ROWS / 2, COLUMNS);
    EpTensor workspace = ep_tensor_1d(l->workspace, EP_TYPE_UINT8, l->workspace_bytes);
    CHECK_OK(ep_weight_reduce(l->weight, &grad, 0, &workspace, stream, &reduced));
}

static cudaGraphExec_t capture(Layer *l) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_CUDA(cudaStreamBeginCapture(l->stream, cudaStreamCaptureModeThreadLocal));
    gather(l, l->stream);
    reduce(l, l->stream);
    CHECK_CUDA(cudaStreamEndCapture(l->stream, &graph));
    if (graph) CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    if (graph) CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* ---- tests ---- */

/* NCCL connects the ranks in its first calls, which precede the capture. */
static void warm_up(Layer *l) {
    load(l, 1000);
    gather(l, l->stream);
    reduce(l, l->stream);
    CHECK_CUDA(cudaStreamSynchronize(l->stream));
    check_values(l, 1000);
}

/* Every fourth step makes the calls without the graph, on two streams. */
ThreadTest(gpu_weights, replayed_2, 2) {
    Layer l;
    cudaStream_t other = NULL;
    open_layer(bootstrap, 60, &l);
    REQUIRE(l.weight, "no weight");
    warm_up(&l);
    cudaGraphExec_t exec = capture(&l);
    REQUIRE(exec, "no graph");
    CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int step = 0; step < REPLAYS && !check_failure()[0]; step++) {
        load(&l, step);
        if (step % 4 < 3) {
            CHECK_CUDA(cudaGraphLaunch(exec, l.stream));
        } else {
            gather(&l, other);
            reduce(&l, l.stream);
        }
        CHECK_CUDA(cudaStreamSynchronize(other));
        CHECK_CUDA(cudaStreamSynchronize(l.stream));
        check_values(&l, step);
    }
    CHECK_OK(ep_mesh_comm_status(l.comm));
    CHECK_CUDA(cudaStreamDestroy(other));
    close_layer(&l);
    CHECK_CUDA(cudaGraphExecDestroy(exec)); /* the communicator must not wait for that */
}

ThreadTest(gpu_weights, absent_from_a_replay_2, 2) {
    Layer l;
    open_layer(bootstrap, 3, &l);
    REQUIRE(l.weight, "no weight");
    warm_up(&l);
    cudaGraphExec_t exec = capture(&l);
    REQUIRE(exec, "no graph");
    if (bootstrap->rank == 0) {
        CHECK_CUDA(cudaGraphLaunch(exec, l.stream));
        CHECK_CUDA(cudaStreamSynchronize(l.stream));
        CHECK_REFUSED(ep_mesh_comm_status(l.comm), EP_ERR_TIMEOUT,
                      "rank 0: weight gather: rank 1 did not arrive within 3 s");
    }
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    close_layer(&l);
    CHECK_CUDA(cudaGraphExecDestroy(exec));
}
