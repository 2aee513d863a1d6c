/* SPDX-License-Identifier: Apache-2.0 */
/* Sharded weights: in CUDA graphs, replayed with other shards and gradients, on two streams, and
 * without a rank; and so large that they are gathered and reduced in slices, while kernels put
 * others into place. tests/handles/weights.c has what the operations compute. */
#include "ep/ep_weight.h"
#include "tests/gpu/device_step.h"

enum { REPLAYS = 12, WARM_UP = 1000 /* a step */ };

/* Small weights, and large ones: 400 MB on real GPUs. */
static const int64_t small[] = {3, 10, 24};
#ifdef TESTS_EMULATED
static const int64_t large[] = {7, 60, 64};
#else
static const int64_t large[] = {7, 2048, 7168};
#endif

/** w [experts, rows, columns] of fp32, halved along `dim` by two ranks; device memory. */
typedef struct Layer {
    EpMeshComm *comm;
    EpWeight *weight;
    int rank, dim;
    int64_t whole[3], part[3];
    float *host; /* of all elements */
    EpTensor shard, full, grad, reduced, workspace;
    cudaStream_t stream;
} Layer;

static size_t bytes_of(const int64_t shape[3]) {
    return (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float);
}

static EpTensor tensor_new(const int64_t shape[3]) {
    EpTensor t = ep_tensor_3d(NULL, EP_TYPE_FP32, shape[0], shape[1], shape[2]);
    CHECK_CUDA(cudaMalloc(&t.data, bytes_of(shape)));
    return t;
}

static void open_layer(const EpBootstrap *world, const int64_t shape[3], int dim, double seconds,
                       Layer *l) {
    EpMesh mesh = EP_MESH_INIT;
    EpMeshCommConfig comm = EP_MESH_COMM_CONFIG_INIT;
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    *l = (Layer){.rank = world->rank, .dim = dim, .stream = new_stream()};
    comm.backend = EP_BACKEND_CUDA, comm.timeout_seconds = seconds;
    config.name = "w", config.type = config.grad_type = EP_TYPE_FP32;
    for (int d = 0; d < 3; d++)
        config.shape[d] = l->whole[d] = shape[d], l->part[d] = shape[d] / (d == dim ? 2 : 1);
    REQUIRE_OK(ep_mesh_parse("fsdp=2", &mesh));
    REQUIRE_OK(ep_spec_parse(&mesh, dim == 1 ? "_,fsdp,_" : "_,_,fsdp", &config.spec));
    REQUIRE_OK(ep_mesh_comm_create(world, &mesh, &comm, &l->comm));
    REQUIRE_OK(ep_weight_create(l->comm, &config, &l->weight));
    REQUIRE_OK(ep_weight_sizes(l->weight, NULL, &sizes));
    int64_t bytes = sizes.reduce_workspace > sizes.gather_workspace ? sizes.reduce_workspace
                                                                    : sizes.gather_workspace;
    l->workspace = ep_tensor_1d(NULL, EP_TYPE_UINT8, bytes);
    REQUIRE_CUDA(cudaMalloc(&l->workspace.data, (size_t)bytes));
    l->host = malloc(bytes_of(shape));
    REQUIRE(l->host, "out of memory");
    l->shard = tensor_new(l->part), l->reduced = tensor_new(l->part);
    l->full = tensor_new(shape), l->grad = tensor_new(shape);
}

static void close_layer(Layer *l) {
    EpTensor *all[] = {&l->shard, &l->full, &l->grad, &l->reduced, &l->workspace};
    ep_mesh_comm_destroy(l->comm);
    for (int i = 0; i < 5; i++)
        CHECK_CUDA(cudaFree(all[i]->data));
    free(l->host);
    CHECK_CUDA(cudaStreamDestroy(l->stream));
}

/* ---- values: small integers, whose sums are exact ------------------------------------------ */

static int store(float *at, float value) {
    *at = value;
    return 0;
}

static int differs(float *at, float value) {
    return *at != value;
}

/* Call `each` for each element of this rank's shard, or of the whole: its place in host memory, and
 * `times` its value in a step. Returns the sum of what it returns. */
static int visit(const Layer *l, int step, int is_whole, int times, int (*each)(float *, float)) {
    const int64_t *shape = is_whole ? l->whole : l->part;
    int64_t begin[3] = {0}, at = 0;
    int sum = 0;
    if (!is_whole) begin[l->dim] = l->rank * l->part[l->dim];
    for (int64_t e = begin[0]; e < begin[0] + shape[0]; e++)
        for (int64_t i = begin[1]; i < begin[1] + shape[1]; i++)
            for (int64_t j = begin[2]; j < begin[2] + shape[2]; j++) {
                int64_t value = (131 * (step + e) + 37 * i + 11 * j) % 1009;
                sum += each(&l->host[at++], (float)(times * value));
            }
    return sum;
}

static void put(const Layer *l, int step, const EpTensor *to, int is_whole, int times) {
    visit(l, step, is_whole, times, store);
    CHECK_CUDA(cudaMemcpy(to->data, l->host, bytes_of(to->shape), cudaMemcpyDefault));
}

static void check(const Layer *l, int step, const EpTensor *from, int is_whole, int times) {
    CHECK_CUDA(cudaMemcpy(l->host, from->data, bytes_of(from->shape), cudaMemcpyDefault));
    int wrong = visit(l, step, is_whole, times, differs);
    CHECK(wrong == 0, "step %d: %d wrong numbers", step, wrong);
}

/* Rank 1's gradient is twice rank 0's. */
static void load(const Layer *l, int step) {
    put(l, step, &l->shard, 0, 1);
    put(l, step, &l->grad, 1, 1 + l->rank);
    CHECK_CUDA(cudaMemset(l->full.data, 0xff, bytes_of(l->whole)));
    CHECK_CUDA(cudaMemset(l->reduced.data, 0xff, bytes_of(l->part)));
    CHECK_CUDA(cudaDeviceSynchronize());
}

static void check_step(const Layer *l, int step) {
    CHECK_CUDA(cudaStreamSynchronize(l->stream));
    check(l, step, &l->full, 1, 1);
    check(l, step, &l->reduced, 0, 3);
}

/* ---- the operations ------------------------------------------------------------------------ */

static void gather(const Layer *l, cudaStream_t stream) {
    CHECK_OK(ep_weight_gather(l->weight, NULL, &l->shard, &l->workspace, stream, &l->full, NULL));
}

static void reduce(const Layer *l, cudaStream_t stream) {
    CHECK_OK(ep_weight_reduce(l->weight, &l->grad, 0, &l->workspace, stream, &l->reduced));
}

static void call(const Layer *l, int step) {
    load(l, step);
    gather(l, l->stream);
    reduce(l, l->stream);
    check_step(l, step);
}

/* NCCL connects the ranks in its first calls, which precede the capture. */
static cudaGraphExec_t capture(const Layer *l) {
    call(l, WARM_UP);
    graph_begin(l->stream);
    gather(l, l->stream);
    reduce(l, l->stream);
    return graph_end(l->stream);
}

/* Every fourth step makes the calls without the graph, on two streams. */
ThreadTest(gpu_weights, replayed_2, 2) {
    Layer l;
    cudaStream_t other = new_stream();
    open_layer(bootstrap, small, 1, 60, &l);
    cudaGraphExec_t exec = capture(&l);
    for (int step = 0; step < REPLAYS && !check_failure()[0]; step++) {
        load(&l, step);
        if (step % 4 < 3) {
            CHECK_CUDA(cudaGraphLaunch(exec, l.stream));
        } else {
            gather(&l, other);
            reduce(&l, l.stream);
        }
        CHECK_CUDA(cudaStreamSynchronize(other));
        check_step(&l, step);
    }
    CHECK_OK(ep_mesh_comm_status(l.comm));
    CHECK_CUDA(cudaStreamDestroy(other));
    close_layer(&l);
    CHECK_CUDA(cudaGraphExecDestroy(exec)); /* the communicator must not wait for that */
}

ThreadTest(gpu_weights, absent_from_a_replay_2, 2) {
    Layer l;
    open_layer(bootstrap, small, 1, 3, &l);
    cudaGraphExec_t exec = capture(&l);
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

static void in_slices(const EpBootstrap *bootstrap, int dim) {
    Layer l;
    open_layer(bootstrap, large, dim, 60, &l);
    for (int step = 0; step < 2; step++)
        call(&l, step);
    CHECK_OK(ep_mesh_comm_status(l.comm));
    close_layer(&l);
}

RankTest(gpu_weight_slices, rows_2, 2, in_slices(bootstrap, 1));
RankTest(gpu_weight_slices, columns_2, 2, in_slices(bootstrap, 2));
