/* SPDX-License-Identifier: Apache-2.0 */
/* Weights so large that they are gathered and reduced in slices, while kernels put others into
 * place: 400 MB on real GPUs. tests/handles/weights.c has what the operations compute. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "ep/ep_weight.h"
#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"

#ifdef TESTS_EMULATED
enum { EXPERTS = 7, ROWS = 12, COLUMNS = 32 };
#else
enum { EXPERTS = 7, ROWS = 2048, COLUMNS = 7168 };
#endif
#define ELEMENTS ((size_t)EXPERTS * ROWS * COLUMNS)

/* w [EXPERTS, ROWS, COLUMNS] of fp32, halved along `dim` by two ranks. */
typedef struct Large {
    EpMeshComm *comm;
    EpWeight *weight;
    int rank, dim;
    int64_t part[3]; /* of a shard */
    float *host;     /* of ELEMENTS */
    float *shard, *full;
    void *workspace;
    int64_t workspace_bytes;
} Large;

static void open_large(const EpBootstrap *world, int dim, Large *l) {
    EpMesh mesh = EP_MESH_INIT;
    EpMeshCommConfig comm = EP_MESH_COMM_CONFIG_INIT;
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    *l = (Large){.rank = world->rank, .dim = dim, .part = {EXPERTS, ROWS, COLUMNS}};
    l->part[dim] /= 2;
    comm.backend = EP_BACKEND_CUDA, config.name = "w";
    config.type = config.grad_type = EP_TYPE_FP32;
    config.shape[0] = EXPERTS, config.shape[1] = ROWS, config.shape[2] = COLUMNS;
    REQUIRE_OK(ep_mesh_parse("fsdp=2", &mesh));
    REQUIRE_OK(ep_spec_parse(&mesh, dim == 1 ? "_,fsdp,_" : "_,_,fsdp", &config.spec));
    REQUIRE_OK(ep_mesh_comm_create(world, &mesh, &comm, &l->comm));
    REQUIRE_OK(ep_weight_create(l->comm, &config, &l->weight));
    REQUIRE_OK(ep_weight_sizes(l->weight, NULL, &sizes));
    l->workspace_bytes = sizes.reduce_workspace > sizes.gather_workspace ? sizes.reduce_workspace
                                                                         : sizes.gather_workspace;
    l->host = malloc(ELEMENTS * sizeof(float));
    REQUIRE(l->host, "out of memory");
    REQUIRE_CUDA(cudaMalloc((void **)&l->shard, ELEMENTS / 2 * sizeof(float)));
    REQUIRE_CUDA(cudaMalloc((void **)&l->full, ELEMENTS * sizeof(float)));
    REQUIRE_CUDA(cudaMalloc(&l->workspace, (size_t)l->workspace_bytes));
}

static void close_large(Large *l) {
    ep_mesh_comm_destroy(l->comm);
    free(l->host);
    CHECK_CUDA(cudaFree(l->shard));
    CHECK_CUDA(cudaFree(l->full));
    CHECK_CUDA(cudaFree(l->workspace));
}

/* ---- values: small integers, whose sums are exact ---- */

static float value_of(int64_t e, int64_t i, int64_t j) {
    return (float)((131 * e + 37 * i + 11 * j) % 1009);
}

/* Call `visit` for each element of this rank's shard, or of the whole: its place, and its value. */
static int visit(const Large *l, int whole, int (*each)(float *at, float value)) {
    int64_t part[3] = {EXPERTS, ROWS, COLUMNS}, begin[3] = {0}, at = 0;
    int wrong = 0;
    for (int d = 0; d < 3 && !whole; d++)
        part[d] = l->part[d];
    if (!whole) begin[l->dim] = l->rank * l->part[l->dim];
    for (int64_t e = 0; e < part[0]; e++)
        for (int64_t i = 0; i < part[1]; i++)
            for (int64_t j = 0; j < part[2]; j++)
                wrong += each(&l->host[at++], value_of(begin[0] + e, begin[1] + i, begin[2] + j));
    return wrong;
}

static int store(float *at, float value) {
    *at = value;
    return 0;
}

static int differs(float *at, float value) {
    return *at != value;
}

static int differs_from_twice(float *at, float value) {
    return *at != 2 * value;
}

static void put(const Large *l, float *to, int whole) {
    visit(l, whole, store);
    CHECK_CUDA(cudaMemcpy(to, l->host, ELEMENTS / (whole ? 1 : 2) * sizeof(float),
                          cudaMemcpyHostToDevice));
}

static void check(const Large *l, const float *from, int whole, int (*each)(float *, float)) {
    CHECK_CUDA(cudaMemcpy(l->host, from, ELEMENTS / (whole ? 1 : 2) * sizeof(float),
                          cudaMemcpyDeviceToHost));
    CHECK(visit(l, whole, each) == 0, "%d wrong numbers", visit(l, whole, each));
}

/* ---- the operations, twice ---- */

static void gather_and_reduce(const EpBootstrap *bootstrap, int dim) {
    Large l;
    cudaStream_t stream = new_stream();
    open_large(bootstrap, dim, &l);
    if (check_failure()[0]) return;
    EpTensor shard = ep_tensor_3d(l.shard, EP_TYPE_FP32, l.part[0], l.part[1], l.part[2]);
    EpTensor full = ep_tensor_3d(l.full, EP_TYPE_FP32, EXPERTS, ROWS, COLUMNS);
    EpTensor workspace = ep_tensor_1d(l.workspace, EP_TYPE_UINT8, l.workspace_bytes);
    for (int i = 0; i < 2; i++) {
        put(&l, l.shard, 0);
        CHECK_CUDA(cudaMemset(l.full, 0xff, ELEMENTS * sizeof(float)));
        CHECK_CUDA(cudaDeviceSynchronize());
        CHECK_OK(ep_weight_gather(l.weight, NULL, &shard, &workspace, stream, &full, NULL));
        CHECK_CUDA(cudaMemsetAsync(l.shard, 0xff, ELEMENTS / 2 * sizeof(float), stream));
        CHECK_OK(ep_weight_reduce(l.weight, &full, 0, &workspace, stream, &shard));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        check(&l, l.full, 1, differs);
        check(&l, l.shard, 0, differs_from_twice);
    }
    CHECK_OK(ep_mesh_comm_status(l.comm));
    close_large(&l);
    CHECK_CUDA(cudaStreamDestroy(stream));
}

ThreadTest(gpu_weight_slices, rows_2, 2) {
    gather_and_reduce(bootstrap, 1);
}
ThreadTest(gpu_weight_slices, columns_2, 2) {
    gather_and_reduce(bootstrap, 2);
}
