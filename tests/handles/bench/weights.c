/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times sharded weights on GPUs against NCCL's own collectives of the same bytes.
 *
 *     mpirun -n 2 weight_bench [experts=32] [in=7168] [out=4096] [repeat=20]
 *
 * A weight [experts, in, out] of bf16 is sharded over all ranks. Each line has the time between
 * events on the stream and that of the call on the host, in us: the median of `repeat` calls of the
 * slowest rank. The GPU has other work until the host has enqueued the call, as it has in a step of
 * a model, so that the time on the stream is the GPU's alone. The ratio is to the line above it
 * that begins with "nccl", and for quantised rows to the time that a copy kernel needs for the same
 * bytes.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <mpi.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ep/ep_mpi.h"
#include "ep/ep_weight.h"

enum { WARM_UPS = 3, MOST_REPEATS = 1000 };
#define BUSY_BYTES ((size_t)8 << 30)

static int rank, size;
static int experts = 32, in = 7168, out = 4096, repeat = 20;
static cudaStream_t stream;
static ncclComm_t nccl_comm;
static double baseline; /* us */
static char *busy;      /* memory that nothing else needs while calls are timed */
static size_t busy_bytes;

static struct {
    __typeof__(&ncclGetUniqueId) unique_id;
    __typeof__(&ncclCommInitRank) init;
    __typeof__(&ncclAllGather) all_gather;
    __typeof__(&ncclReduceScatter) reduce_scatter;
} nccl;

static void die(const char *what, const char *why) {
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

#define MUST(call)                            \
    do {                                      \
        if ((int)(call)) die(#call, "fails"); \
    } while (0)
#define MUST_EP(call)                                     \
    do {                                                  \
        if ((call) != EP_OK) die(#call, ep_last_error()); \
    } while (0)

/* ---- NCCL ---------------------------------------------------------------------------------- */

static void *find(void *library, const char *name) {
    void *symbol = dlsym(library, name);
    if (!symbol) die(name, "is not there");
    return symbol;
}

static void open_nccl(void) {
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    ncclUniqueId id;
    if (!library) die("dlopen", dlerror());
    *(void **)&nccl.unique_id = find(library, "ncclGetUniqueId");
    *(void **)&nccl.init = find(library, "ncclCommInitRank");
    *(void **)&nccl.all_gather = find(library, "ncclAllGather");
    *(void **)&nccl.reduce_scatter = find(library, "ncclReduceScatter");
    if (rank == 0) MUST(nccl.unique_id(&id));
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    MUST(nccl.init(&nccl_comm, size, id, rank));
}

/* ---- times --------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times) {
    MPI_Allreduce(MPI_IN_PLACE, times, repeat, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(times, (size_t)repeat, sizeof(*times), compare);
    return times[repeat / 2];
}

/* Copies of some milliseconds. */
static void keep_busy(void) {
    for (size_t copied = 0; copied < BUSY_BYTES; copied += busy_bytes / 2)
        MUST(cudaMemcpyAsync(busy + busy_bytes / 2, busy, busy_bytes / 2, cudaMemcpyDeviceToDevice,
                             stream));
}

/* Time a call. `is_baseline`: later lines are compared with this one. */
static void time_call(const char *name, void (*call)(void *context), void *context,
                      int is_baseline) {
    static double device[MOST_REPEATS], host[MOST_REPEATS];
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = -WARM_UPS; i < repeat; i++) {
        float ms = 0;
        MUST(cudaStreamSynchronize(stream));
        MPI_Barrier(MPI_COMM_WORLD);
        keep_busy();
        MUST(cudaEventRecord(begin, stream));
        double started = now();
        call(context);
        double called = now() - started;
        MUST(cudaEventRecord(end, stream));
        MUST(cudaStreamSynchronize(stream));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 0) device[i] = 1e3 * (double)ms, host[i] = called;
    }
    double us = median(device), us_host = median(host);
    if (is_baseline) baseline = us;
    if (rank == 0)
        printf("%-36s %10.1f us  host %7.1f us  ratio %5.3f\n", name, us, us_host, us / baseline);
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
}

static void *allocate(size_t bytes) {
    void *memory = NULL;
    MUST(cudaMalloc(&memory, bytes + 64));
    MUST(cudaMemsetAsync(memory, 1, bytes, stream));
    return memory;
}

/* ---- gathers ------------------------------------------------------------------------------- */

typedef struct Gather {
    EpWeight *weight;
    EpWeightForm form;
    EpTensor shard, workspace, out, scales;
    size_t bytes; /* of the shard */
} Gather;

static void call_gather(void *context) {
    Gather *g = context;
    int quantised = g->form.quant != EP_QUANT_NONE;
    MUST_EP(ep_weight_gather(g->weight, &g->form, &g->shard,
                             g->workspace.shape[0] ? &g->workspace : NULL, stream, &g->out,
                             quantised ? &g->scales : NULL));
}

static void call_nccl_gather(void *context) {
    Gather *g = context;
    MUST(nccl.all_gather(g->shard.data, g->out.data, g->bytes, ncclUint8, nccl_comm, stream));
}

static EpWeight *make_weight(EpMeshComm *comm, const EpMesh *mesh, const char *spec,
                             EpType reduced) {
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    EpWeight *weight = NULL;
    config.name = spec, config.reduced_type = reduced;
    config.shape[0] = experts, config.shape[1] = in, config.shape[2] = out;
    MUST_EP(ep_spec_parse(mesh, spec, &config.spec));
    MUST_EP(ep_weight_create(comm, &config, &weight));
    return weight;
}

/* All memory is that of the largest form, bf16. */
static Gather make_gather(EpWeight *weight, void *shard, void *full, void *scales,
                          void *workspace) {
    EpSharding s = EP_SHARDING_INIT;
    Gather g = {.weight = weight, .form = EP_WEIGHT_FORM_INIT};
    MUST_EP(ep_weight_sharding(weight, &s));
    g.shard = ep_tensor_3d(shard, EP_TYPE_BF16, s.stored[0], s.stored[1], s.stored[2]);
    g.bytes = (size_t)(s.stored[0] * s.stored[1] * s.stored[2]) * 2;
    g.out.data = full, g.scales.data = scales, g.workspace.data = workspace;
    return g;
}

static void time_gather(Gather *g, const char *name, EpQuant quant, EpBlocks blocks, int transposed,
                        int by_rank) {
    EpWeightSizes z = EP_WEIGHT_SIZES_INIT;
    g->form.quant = quant, g->form.blocks = blocks;
    g->form.transposed = transposed, g->form.by_rank = by_rank;
    MUST_EP(ep_weight_sizes(g->weight, &g->form, &z));
    g->out = ep_tensor_3d(g->out.data, z.type, z.shape[0], z.shape[1], z.shape[2]);
    g->scales = ep_tensor_3d(g->scales.data, z.scale_type, z.scale_shape[0], z.scale_shape[1],
                             z.scale_shape[2]);
    g->workspace = ep_tensor_1d(g->workspace.data, EP_TYPE_UINT8, z.gather_workspace);
    time_call(name, call_gather, g, 0);
}

static void time_gathers(EpMeshComm *comm, const EpMesh *mesh, void *shard, void *full,
                         void *scales, void *workspace) {
    EpWeight *rows = make_weight(comm, mesh, "expert,fsdp,_", EP_TYPE_FP32);
    EpWeight *last = make_weight(comm, mesh, "expert,_,fsdp", EP_TYPE_FP32);
    Gather g = make_gather(rows, shard, full, scales, workspace);
    Gather h = make_gather(last, shard, full, scales, workspace);
    time_call("nccl all-gather, bf16", call_nccl_gather, &g, 1);
    time_gather(&g, "in sharded", EP_QUANT_NONE, EP_BLOCKS_ROWS, 0, 0);
    time_gather(&h, "out sharded", EP_QUANT_NONE, EP_BLOCKS_ROWS, 0, 0);
    time_gather(&h, "out sharded, by rank", EP_QUANT_NONE, EP_BLOCKS_ROWS, 0, 1);
    time_gather(&g, "in sharded, fp8 rows", EP_QUANT_FP8, EP_BLOCKS_ROWS, 0, 0);
    time_gather(&g, "in sharded, fp8 rows, transposed", EP_QUANT_FP8, EP_BLOCKS_ROWS, 1, 0);
    time_gather(&g, "in sharded, fp8 tiles", EP_QUANT_FP8, EP_BLOCKS_TILES, 0, 0);
    time_gather(&g, "in sharded, mxfp8 rows", EP_QUANT_MXFP8, EP_BLOCKS_ROWS, 0, 0);
    ep_weight_destroy(rows);
    ep_weight_destroy(last);
}

/* ---- reductions ---------------------------------------------------------------------------- */

typedef struct Reduce {
    EpWeight *weight;
    EpTensor grad, workspace, out;
    size_t elements; /* of a shard */
} Reduce;

/* What NCCL adds: as many elements of any type. */
typedef struct Plain {
    void *grad, *out;
    size_t elements;
    ncclDataType_t type;
} Plain;

static void call_reduce(void *context) {
    Reduce *r = context;
    MUST_EP(ep_weight_reduce(r->weight, &r->grad, 0, r->workspace.shape[0] ? &r->workspace : NULL,
                             stream, &r->out));
}

static void call_nccl_reduce(void *context) {
    Plain *p = context;
    MUST(nccl.reduce_scatter(p->grad, p->out, p->elements, p->type, ncclSum, nccl_comm, stream));
}

static void time_reduce(EpMeshComm *comm, const EpMesh *mesh, const char *spec, EpType type,
                        const char *name, void *full, void *shard, void *workspace) {
    EpSharding s = EP_SHARDING_INIT;
    EpWeightSizes z = EP_WEIGHT_SIZES_INIT;
    Reduce r = {.weight = make_weight(comm, mesh, spec, type)};
    MUST_EP(ep_weight_sharding(r.weight, &s));
    MUST_EP(ep_weight_sizes(r.weight, NULL, &z));
    r.elements = (size_t)(s.stored[0] * s.stored[1] * s.stored[2]);
    r.grad = ep_tensor_3d(full, EP_TYPE_BF16, s.used[0], s.used[1], s.used[2]);
    r.out = ep_tensor_3d(shard, type, s.stored[0], s.stored[1], s.stored[2]);
    r.workspace = ep_tensor_1d(workspace, EP_TYPE_UINT8, z.reduce_workspace);
    time_call(name, call_reduce, &r, 0);
    ep_weight_destroy(r.weight);
}

/* NCCL's sums have the type of what is added: for sums in fp32 it moves fp32. */
static void time_reduces(EpMeshComm *comm, const EpMesh *mesh, void *full, void *shard,
                         void *workspace) {
    size_t elements = (size_t)experts * (size_t)in * (size_t)out / (size_t)size;
    Plain p = {full, shard, elements, ncclBfloat16};
    time_call("nccl reduce-scatter, bf16", call_nccl_reduce, &p, 1);
    time_reduce(comm, mesh, "expert,fsdp,_", EP_TYPE_BF16, "in sharded, bf16", full, shard,
                workspace);
    time_reduce(comm, mesh, "expert,_,fsdp", EP_TYPE_BF16, "out sharded, bf16", full, shard,
                workspace);
    time_reduce(comm, mesh, "expert,fsdp,_", EP_TYPE_FP32, "in sharded, bf16 to fp32", full, shard,
                workspace);
    time_reduce(comm, mesh, "expert,_,fsdp", EP_TYPE_FP32, "out sharded, bf16 to fp32", full, shard,
                workspace);
    p.grad = workspace, p.type = ncclFloat32;
    time_call("nccl reduce-scatter, fp32", call_nccl_reduce, &p, 0);
}

/* ---- rows ---------------------------------------------------------------------------------- */

typedef struct Rows {
    EpGroup *group;
    EpRowsForm form;
    EpTensor rows, out, scales;
} Rows;

static void call_rows(void *context) {
    Rows *r = context;
    MUST_EP(ep_quantise_rows(r->group, &r->form, &r->rows, NULL, stream, &r->out, &r->scales));
}

/* A copy reads and writes 3/2 bytes for each of the 3 that quantising moves. */
static void call_copy(void *context) {
    Rows *r = context;
    size_t elements = (size_t)(r->rows.shape[0] * r->rows.shape[1]);
    MUST(cudaMemcpyAsync(r->out.data, r->rows.data, elements * 3 / 2, cudaMemcpyDeviceToDevice,
                         stream));
}

static void time_rows(const EpBootstrap *world, void *rows, void *result, void *scales) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    int64_t n = 65536, hidden = 7168;
    Rows r = {.form = EP_ROWS_FORM_INIT};
    config.num_experts = size, config.max_tokens = 1, config.max_top_k = 1;
    config.max_row_bytes = 16, config.alignment = 128, config.backend = EP_BACKEND_CUDA;
    MUST_EP(ep_group_create(world, &config, &r.group));
    r.rows = ep_tensor_2d(rows, EP_TYPE_BF16, n, hidden);
    r.out = ep_tensor_2d(result, EP_TYPE_FP8_E4M3, n, hidden);
    r.scales = ep_tensor_2d(scales, EP_TYPE_FP32, n, hidden / 128);
    time_call("copy of as many bytes", call_copy, &r, 1);
    time_call("rows to fp8", call_rows, &r, 0);
    r.form.blocks = EP_BLOCKS_TILES;
    r.scales = ep_tensor_2d(scales, EP_TYPE_FP32, n / 128, hidden / 128);
    time_call("rows to fp8, tiles", call_rows, &r, 0);
    r.form.blocks = EP_BLOCKS_ROWS, r.form.transposed = 1;
    r.out = ep_tensor_2d(result, EP_TYPE_FP8_E4M3, hidden, n);
    r.scales = ep_tensor_2d(scales, EP_TYPE_FP32, hidden, n / 128);
    time_call("rows to fp8, transposed", call_rows, &r, 0);
    ep_group_destroy(r.group);
}

/* ---- main ---------------------------------------------------------------------------------- */

static void read_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (sscanf(argv[i], "experts=%d", &experts) != 1 && sscanf(argv[i], "in=%d", &in) != 1 &&
            sscanf(argv[i], "out=%d", &out) != 1 && sscanf(argv[i], "repeat=%d", &repeat) != 1)
            die(argv[i], "is no option");
    if (repeat < 1 || repeat > MOST_REPEATS) die("repeat", "expected 1 .. 1000");
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    read_options(argc, argv);
    int gpus = 0;
    MUST(cudaGetDeviceCount(&gpus));
    MUST(cudaSetDevice(rank % gpus));
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    open_nccl();
    char text[64];
    EpMesh mesh = EP_MESH_INIT;
    EpBootstrap world = EP_BOOTSTRAP_INIT;
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    EpMeshComm *comm = NULL;
    config.backend = EP_BACKEND_CUDA;
    snprintf(text, sizeof(text), "fsdp=%d,expert=1", size);
    MUST_EP(ep_mesh_parse(text, &mesh));
    MUST_EP(ep_bootstrap_mpi(MPI_COMM_WORLD, &world));
    MUST_EP(ep_mesh_comm_create(&world, &mesh, &config, &comm));
    size_t full = (size_t)experts * (size_t)in * (size_t)out * 2, rows = (size_t)65536 * 7168 * 2;
    size_t most = full > rows ? full : rows;
    void *a = allocate(most), *b = allocate(most), *scales = allocate(most / 16);
    void *workspace = allocate(2 * most);
    busy_bytes = (size_t)1 << 30, busy = allocate(busy_bytes);
    if (rank == 0)
        printf("# %d ranks, [%d, %d, %d] bf16, %.2f GB gathered\n", size, experts, in, out,
               (double)full / 1e9);
    time_gathers(comm, &mesh, a, b, scales, workspace);
    time_reduces(comm, &mesh, b, a, workspace);
    time_rows(&world, a, b, scales);
    ep_mesh_comm_destroy(comm);
    ep_bootstrap_destroy(&world);
    MPI_Finalize();
    return 0;
}
