/* SPDX-License-Identifier: Apache-2.0 */
/* What sharded weights refuse: statuses, sentences, untouched outputs; ranks that disagree, leave
 * or abort. */
#include <stdlib.h>
#include <string.h>

#include "ep/ep_weight.h"
#include "tests/harness/threads.h"

TestSuite(handles_weight_arguments);

static EpMesh mesh_of(const char *text) {
    EpMesh mesh = EP_MESH_INIT;
    CHECK_OK(ep_mesh_parse(text, &mesh));
    return mesh;
}

static EpMeshCommConfig comm_config(double seconds) {
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    config.backend = TEST_BACKEND, config.timeout_seconds = seconds;
    return config;
}

static EpMeshComm *connect(const EpBootstrap *world, const char *text, double seconds) {
    EpMesh mesh = mesh_of(text);
    EpMeshCommConfig config = comm_config(seconds);
    EpMeshComm *comm = NULL;
    CHECK_OK(ep_mesh_comm_create(world, &mesh, &config, &comm));
    return comm;
}

/* w1 [4, 6, 8] of bf16. */
static EpWeightConfig weight_config(const EpMesh *mesh, const char *spec) {
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    config.name = "w1";
    config.shape[0] = 4, config.shape[1] = 6, config.shape[2] = 8;
    CHECK_OK(ep_spec_parse(mesh, spec, &config.spec));
    return config;
}

static const char MESH[] = "fsdp=2,expert=1";

/* ---- communicators ------------------------------------------------------------------------- */

static void check_comm_refused(const EpBootstrap *world, const EpMesh *mesh,
                               const EpMeshCommConfig *config, EpStatus expected,
                               const char *argument, const char *how) {
    EpMeshComm *comm = (EpMeshComm *)&expected;
    CHECK_REFUSED(ep_mesh_comm_create(world, mesh, config, &comm), expected, "ep_mesh_comm_create",
                  argument, how);
    CHECK(comm == (EpMeshComm *)&expected, "a refused call has changed the output");
}

/* Rank 1 alone is wrong; rank 0 learns of it. */
ThreadTest(handles_weight_arguments, communicators, 2) {
    int wrong = bootstrap->rank == 1;
    EpMesh mesh = mesh_of(MESH), large = mesh_of("fsdp=3"), other = mesh_of("zero:fsdp=2,expert=1");
    EpMeshCommConfig config = comm_config(30), odd = comm_config(-3), big = config;
    big.struct_size = 1000;
    check_comm_refused(bootstrap, wrong ? &large : &mesh, &config,
                       wrong ? EP_ERR_RANGE : EP_ERR_PEER, "mesh",
                       "expected a mesh of the 2 ranks of world, got 3");
    check_comm_refused(bootstrap, wrong ? NULL : &mesh, &config, wrong ? EP_ERR_NULL : EP_ERR_PEER,
                       "mesh", "got NULL");
    check_comm_refused(bootstrap, &mesh, wrong ? &odd : &config, wrong ? EP_ERR_RANGE : EP_ERR_PEER,
                       "config.timeout_seconds", "expected more than 0");
    check_comm_refused(bootstrap, &mesh, wrong ? &big : &config,
                       wrong ? EP_ERR_STRUCT_SIZE : EP_ERR_PEER, "config", "got 1000");
    EpMeshComm *comm = NULL;
    CHECK_REFUSED(ep_mesh_comm_create(bootstrap, &mesh, &config, wrong ? NULL : &comm),
                  wrong ? EP_ERR_NULL : EP_ERR_PEER, "out: expected a pointer, got NULL");
    CHECK_REFUSED(ep_mesh_comm_create(bootstrap, wrong ? &other : &mesh, &config, &comm),
                  EP_ERR_MISMATCH, "mesh.axes", "fsdp=2 on rank 0 and zero=2 on rank 1");
    CHECK_REFUSED(ep_mesh_comm_create(NULL, &mesh, &config, &comm), EP_ERR_NULL, "bootstrap");
    CHECK(!comm, "a refused call has changed the output");
    ep_mesh_comm_destroy(NULL);
}

/* ---- weights ------------------------------------------------------------------------------- */

static void check_weight_refused(EpMeshComm *comm, int wrong, const EpWeightConfig *bad,
                                 EpStatus expected, const char *argument, const char *how) {
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig good = weight_config(&mesh, "expert,fsdp,_");
    EpWeight *weight = (EpWeight *)&good;
    CHECK_REFUSED(ep_weight_create(comm, wrong ? bad : &good, &weight),
                  wrong ? expected : EP_ERR_PEER, argument, how);
    CHECK(weight == (EpWeight *)&good, "a refused call has changed the output");
}

ThreadTest(handles_weight_arguments, configurations, 2) {
    int wrong = bootstrap->rank == 1;
    EpMesh mesh = mesh_of(MESH);
    EpMeshComm *comm = connect(bootstrap, MESH, 30);
    REQUIRE(comm, "no communicator");
    EpWeightConfig bad = weight_config(&mesh, "expert,fsdp,_"), good = bad;
    bad.name = NULL;
    check_weight_refused(comm, wrong, &bad, EP_ERR_NULL, "config.name", "got NULL");
    bad = good, bad.kind = EP_TENSOR_ACTIVATION;
    check_weight_refused(comm, wrong, &bad, EP_ERR_RANGE, "config.kind",
                         "EP_TENSOR_EXPERT_WEIGHT, got 3");
    bad = good, bad.type = EP_TYPE_INT32;
    check_weight_refused(comm, wrong, &bad, EP_ERR_TYPE, "config.type", "fp32, got int32");
    bad = good, bad.grad_type = EP_TYPE_UINT8;
    check_weight_refused(comm, wrong, &bad, EP_ERR_TYPE, "config.grad_type", "fp32, got uint8");
    bad = good, bad.reduced_type = EP_TYPE_FP16;
    check_weight_refused(comm, wrong, &bad, EP_ERR_TYPE, "config.reduced_type",
                         "expected fp32 or the type of grad_type, bf16, got fp16");
    bad = good, bad.shape[1] = 7;
    check_weight_refused(comm, wrong, &bad, EP_ERR_SHAPE, "w1",
                         "a multiple of the 2 ranks of fsdp in dimension 1, got 7");
    bad = weight_config(&mesh, "(fsdp,expert),_,_");
    check_weight_refused(comm, wrong, &bad, EP_ERR_UNSUPPORTED, "w1", "(fsdp,expert)");
    bad = weight_config(&mesh, "expert,fsdp,_,_"), bad.shape[3] = 2;
    check_weight_refused(comm, wrong, &bad, EP_ERR_NDIM, "w1", "at most 3 dimensions, got 4");
    bad = good, bad.struct_size = 8;
    check_weight_refused(comm, wrong, &bad, EP_ERR_STRUCT_SIZE, "config", "got 8");
    EpWeight *weight = NULL;
    CHECK_REFUSED(ep_weight_create(comm, &good, wrong ? NULL : &weight),
                  wrong ? EP_ERR_NULL : EP_ERR_PEER, "out");
    CHECK_REFUSED(ep_weight_create(NULL, &good, &weight), EP_ERR_NULL, "comm");
    ep_mesh_comm_destroy(comm);
}

static void check_mismatch(EpMeshComm *comm, const EpWeightConfig *config, const char *field,
                           const char *how) {
    EpWeight *weight = NULL;
    CHECK_REFUSED(ep_weight_create(comm, config, &weight), EP_ERR_MISMATCH, field, how);
    CHECK(!weight, "a refused call has changed the output");
}

ThreadTest(handles_weight_arguments, ranks_disagree, 2) {
    int other = bootstrap->rank == 1;
    EpMesh mesh = mesh_of(MESH);
    EpMeshComm *comm = connect(bootstrap, MESH, 30);
    REQUIRE(comm, "no communicator");
    EpWeightConfig good = weight_config(&mesh, "expert,fsdp,_"), mine = good;
    if (other) mine.name = "w2";
    check_mismatch(comm, &mine, "config.name", "got w1 on rank 0 and w2 on rank 1");
    mine = good;
    if (other) mine.shape[2] = 16;
    check_mismatch(comm, &mine, "config.shape[2]", "got 8 on rank 0 and 16 on rank 1");
    mine = other ? weight_config(&mesh, "expert,_,fsdp") : good;
    check_mismatch(comm, &mine, "config.spec, dimension 1", "on rank 1");
    mine = good;
    if (other) mine.grad_type = EP_TYPE_FP32;
    check_mismatch(comm, &mine, "config.grad_type", "got 1 on rank 0 and 3 on rank 1");
    ep_mesh_comm_destroy(comm);
}

/* ---- operations ---------------------------------------------------------------------------- */

typedef struct Fixture {
    EpMeshComm *comm;
    EpWeight *weight;
    _Alignas(64) char shard[192], full[384], scales[384], workspace[4096];
} Fixture;

static Fixture *open_fixture(const EpBootstrap *world) {
    Fixture *f = aligned_alloc(64, sizeof(*f));
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, "expert,fsdp,_");
    memset(f, 0x5a, sizeof(*f));
    f->weight = NULL;
    f->comm = connect(world, MESH, 30);
    CHECK_OK(ep_weight_create(f->comm, &config, &f->weight));
    return f;
}

static void close_fixture(Fixture *f) {
    ep_mesh_comm_destroy(f->comm);
    free(f);
}

typedef struct Arguments {
    EpWeightForm form;
    EpTensor shard, workspace, out, scales;
    const EpTensor *given_workspace, *given_scales;
} Arguments;

static Arguments good_arguments(Fixture *f) {
    Arguments a = {.form = EP_WEIGHT_FORM_INIT};
    a.shard = ep_tensor_3d(f->shard, EP_TYPE_BF16, 4, 3, 8);
    a.out = ep_tensor_3d(f->full, EP_TYPE_BF16, 4, 6, 8);
    a.scales = ep_tensor_3d(f->scales, EP_TYPE_FP32, 4, 6, 1);
    a.workspace = ep_tensor_1d(f->workspace, EP_TYPE_UINT8, sizeof(f->workspace));
    return a;
}

static void check_gather_refused(Fixture *f, const Arguments *a, EpStatus expected,
                                 const char *argument, const char *how) {
    CHECK_REFUSED(ep_weight_gather(f->weight, &a->form, &a->shard, a->given_workspace, NULL,
                                   &a->out, a->given_scales),
                  expected, "ep_weight_gather: w1", argument, how);
    for (size_t i = 0; i < sizeof(f->full); i++)
        CHECK(f->full[i] == 0x5a && f->scales[i] == 0x5a, "a refused call has changed an output");
}

static void check_bad_forms(Fixture *f, const Arguments *good) {
    Arguments a = *good;
    a.form.quant = (EpQuant)9;
    check_gather_refused(f, &a, EP_ERR_RANGE, "form.quant", "got 9");
    a = *good, a.form.blocks = (EpBlocks)0;
    check_gather_refused(f, &a, EP_ERR_RANGE, "form.blocks", "got 0");
    a = *good, a.form.transposed = 2;
    check_gather_refused(f, &a, EP_ERR_RANGE, "form.transposed", "expected 0 or 1, got 2");
    a = *good, a.form.transposed = 1;
    check_gather_refused(f, &a, EP_ERR_UNSUPPORTED, "form.transposed", "nothing is quantised");
    a = *good, a.form.by_rank = 1, a.form.quant = EP_QUANT_FP8;
    check_gather_refused(f, &a, EP_ERR_UNSUPPORTED, "form.by_rank", "quantised, got 1");
    a = *good, a.form.quant = EP_QUANT_MXFP8, a.form.blocks = EP_BLOCKS_TILES;
    check_gather_refused(f, &a, EP_ERR_UNSUPPORTED, "form.blocks", "EP_BLOCKS_ROWS");
    a = *good, a.form.struct_size = 3;
    check_gather_refused(f, &a, EP_ERR_STRUCT_SIZE, "form", "got 3");
}

static void check_bad_tensors(Fixture *f, const Arguments *good) {
    Arguments a = *good;
    a.shard.shape[1] = 6;
    check_gather_refused(f, &a, EP_ERR_SHAPE, "shard", "expected size = 3 in dimension 1, got 6");
    a = *good, a.shard.type = EP_TYPE_FP16;
    check_gather_refused(f, &a, EP_ERR_TYPE, "shard", "expected bf16, got fp16");
    a = *good, a.shard.data = NULL;
    check_gather_refused(f, &a, EP_ERR_NULL, "shard", "got NULL");
    a = *good, a.shard.data = f->shard + 2;
    check_gather_refused(f, &a, EP_ERR_ADDRESS, "shard", "on a multiple of 16");
    a = *good, a.out.ndim = 2;
    check_gather_refused(f, &a, EP_ERR_NDIM, "out", "expected 3 dimensions, got 2");
    a = *good, a.out.shape[2] = 4;
    check_gather_refused(f, &a, EP_ERR_SHAPE, "out", "expected size = 8 in dimension 2, got 4");
    a = *good, a.given_scales = &a.scales;
    check_gather_refused(f, &a, EP_ERR_UNSUPPORTED, "scales", "expected NULL");
}

/* Transposed, a row of 6 lies in two shards. So the gather needs a workspace. */
static void check_bad_quantised(Fixture *f, const Arguments *good) {
    Arguments a = *good;
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    a.form.quant = EP_QUANT_FP8, a.form.transposed = 1;
    CHECK_OK(ep_weight_sizes(f->weight, &a.form, &sizes));
    CHECK(sizes.shape[1] == 8 && sizes.shape[2] == 6 && sizes.scale_shape[2] == 1, "shape");
    a.out = ep_tensor_3d(f->full, EP_TYPE_FP8_E4M3, 4, 8, 6);
    a.scales.shape[1] = 8;
    a.given_scales = &a.scales, a.given_workspace = NULL;
    check_gather_refused(f, &a, EP_ERR_NULL, "workspace", "expected a tensor, got NULL");
    a.given_workspace = &a.workspace, a.workspace.shape[0] = sizes.gather_workspace - 1;
    check_gather_refused(f, &a, EP_ERR_BUFFER_SIZE, "workspace", "bytes, got");
    a.workspace.shape[0] = sizes.gather_workspace, a.workspace.data = f->workspace + 16;
    check_gather_refused(f, &a, EP_ERR_ADDRESS, "workspace", "on a multiple of 64");
    a.workspace.data = f->workspace, a.given_scales = NULL;
    check_gather_refused(f, &a, EP_ERR_NULL, "scales", "expected a tensor, got NULL");
    a.given_scales = &a.scales, a.scales.type = EP_TYPE_UINT8;
    check_gather_refused(f, &a, EP_ERR_TYPE, "scales", "expected fp32, got uint8");
}

ThreadTest(handles_weight_arguments, gathers, 2) {
    Fixture *f = open_fixture(bootstrap);
    REQUIRE(f->weight, "no weight");
    Arguments good = good_arguments(f);
    good.given_workspace = &good.workspace;
    check_bad_forms(f, &good);
    check_bad_tensors(f, &good);
    check_bad_quantised(f, &good);
    CHECK_OK(
        ep_weight_gather(f->weight, NULL, &good.shard, &good.workspace, NULL, &good.out, NULL));
    ep_weight_destroy(f->weight);
    CHECK_REFUSED(
        ep_weight_gather(f->weight, NULL, &good.shard, &good.workspace, NULL, &good.out, NULL),
        EP_ERR_DESTROYED, "weight");
    CHECK_REFUSED(ep_weight_gather(NULL, NULL, &good.shard, &good.workspace, NULL, &good.out, NULL),
                  EP_ERR_NULL, "weight");
    ep_mesh_comm_destroy(f->comm);
    EpWeight *weight = NULL;
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    CHECK_REFUSED(ep_weight_create(f->comm, &config, &weight), EP_ERR_DESTROYED, "comm");
    CHECK_REFUSED(ep_mesh_comm_abort(f->comm, "too late"), EP_ERR_DESTROYED, "comm");
    CHECK_REFUSED(ep_mesh_comm_status(f->comm), EP_ERR_DESTROYED, "comm");
    free(f);
}

ThreadTest(handles_weight_arguments, reduces_and_amaxes, 2) {
    Fixture *f = open_fixture(bootstrap);
    float numbers[4] = {1, 2, 3, 4};
    REQUIRE(f->weight, "no weight");
    EpTensor grad = ep_tensor_3d(f->full, EP_TYPE_BF16, 4, 6, 8), bad = grad;
    EpTensor out = ep_tensor_3d(f->scales, EP_TYPE_FP32, 4, 3, 8), half = out;
    EpTensor workspace = ep_tensor_1d(f->workspace, EP_TYPE_UINT8, sizeof(f->workspace));
    half.type = EP_TYPE_BF16, bad.shape[0] = 5;
    CHECK_REFUSED(ep_weight_reduce(f->weight, &bad, 0, &workspace, NULL, &out), EP_ERR_SHAPE,
                  "ep_weight_reduce: w1: grad", "expected size = 4 in dimension 0, got 5");
    CHECK_REFUSED(ep_weight_reduce(f->weight, &grad, 2, &workspace, NULL, &out), EP_ERR_RANGE,
                  "accumulate", "expected 0 or 1, got 2");
    CHECK_REFUSED(ep_weight_reduce(f->weight, &grad, 0, &workspace, NULL, &half), EP_ERR_TYPE,
                  "out", "expected fp32, got bf16");
    for (size_t i = 0; i < sizeof(f->scales); i++)
        CHECK(f->scales[i] == 0x5a, "a refused call has changed the output");
    EpTensor amax = ep_tensor_1d(numbers, EP_TYPE_FP32, 4), one = amax;
    one.shape[0] = 1;
    CHECK_REFUSED(ep_weight_amax(f->weight, (EpAmaxScope)0, NULL, &amax), EP_ERR_RANGE, "scope");
    CHECK_REFUSED(ep_weight_amax(f->weight, EP_AMAX_TENSOR, NULL, &amax), EP_ERR_SHAPE, "amax",
                  "expected size = 1 in dimension 0, got 4");
    CHECK_REFUSED(ep_weight_amax(f->weight, EP_AMAX_EXPERT, NULL, &one), EP_ERR_SHAPE, "amax",
                  "expected size = 4 in dimension 0, got 1");
    one.type = EP_TYPE_INT32;
    CHECK_REFUSED(ep_weight_amax(f->weight, EP_AMAX_TENSOR, NULL, &one), EP_ERR_TYPE, "amax");
    CHECK(numbers[0] == 1 && numbers[3] == 4, "a refused call has changed the output");
    close_fixture(f);
}

/* ---- ranks in different calls, and gone ---------------------------------------------------- */

/* Returns how a call has ended, of which `status` is known: on GPUs it may fail later. */
static EpStatus finish(EpMeshComm *comm, EpStatus status) {
    return status == EP_OK ? ep_mesh_comm_status(comm) : status;
}

ThreadTest(handles_weight_arguments, order, 2) {
    Fixture *f = open_fixture(bootstrap);
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, "expert,fsdp,_");
    EpWeight *second = NULL;
    config.name = "w2";
    CHECK_OK(ep_weight_create(f->comm, &config, &second));
    REQUIRE(second, "no weight");
    Arguments a = good_arguments(f);
    EpWeight *own = bootstrap->rank ? second : f->weight;
    CHECK_OK(ep_mesh_comm_status(f->comm));
    CHECK_REFUSED(
        finish(f->comm, ep_weight_gather(own, NULL, &a.shard, &a.workspace, NULL, &a.out, NULL)),
        EP_ERR_ORDER, "weight gather", "weight differs");
    CHECK_REFUSED(ep_mesh_comm_status(f->comm), EP_ERR_ORDER, "weight gather", "weight differs");
    CHECK_STATUS(ep_weight_gather(f->weight, NULL, &a.shard, &a.workspace, NULL, &a.out, NULL),
                 EP_ERR_ORDER);
    close_fixture(f);
}

/* Rank 1 does not take part: its call is refused, and then it waits or `goes`. */
static void absent(const EpBootstrap *bootstrap, int refused, int goes) {
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, "expert,fsdp,_");
    EpWeight *weight = NULL;
    _Alignas(64) char shard[192] = {0}, full[384], space[4096];
    EpMeshComm *comm = connect(bootstrap, MESH, goes ? 60 : 1.5);
    REQUIRE(comm, "no communicator");
    CHECK_OK(ep_weight_create(comm, &config, &weight));
    EpTensor in = ep_tensor_3d(shard, EP_TYPE_BF16, 4, 3, 8);
    EpTensor out = ep_tensor_3d(full, EP_TYPE_BF16, 4, 6, 8);
    EpTensor workspace = ep_tensor_1d(space, EP_TYPE_UINT8, sizeof(space));
    if (bootstrap->rank && refused)
        CHECK_REFUSED(ep_weight_gather(weight, NULL, NULL, &workspace, NULL, &out, NULL),
                      EP_ERR_NULL, "shard: expected a tensor, got NULL");
    if (bootstrap->rank == 0) {
        EpStatus status =
            finish(comm, ep_weight_gather(weight, NULL, &in, &workspace, NULL, &out, NULL));
        const char *quoted = refused ? "its last call was refused: rank 1: ep_weight_gather: " : "";
        if (goes)
            CHECK_REFUSED(status, EP_ERR_PEER, "it has destroyed the group; ", quoted,
                          "shard: expected a tensor, got NULL");
        else
            CHECK_REFUSED(status, EP_ERR_TIMEOUT,
                          "rank 0: weight gather: rank 1 did not arrive within 1.5 s", quoted);
    }
    if (!goes) CHECK_OK(bootstrap->barrier(bootstrap->context, 30));
    ep_mesh_comm_destroy(comm);
}

ThreadTest(handles_weight_arguments, absent_rank, 2) {
    absent(bootstrap, 0, 0);
}
ThreadTest(handles_weight_arguments, refused_rank, 2) {
    absent(bootstrap, 1, 0);
}
ThreadTest(handles_weight_arguments, refused_rank_goes, 2) {
    absent(bootstrap, 1, 1);
}

/* A group numbers its own ranks, so its sentences say which ranks of the mesh they are. */
ThreadTest(handles_weight_arguments, absent_from_a_part_of_the_mesh, 4) {
    EpMesh mesh = mesh_of("data=2,fsdp=2");
    EpWeightConfig config = weight_config(&mesh, "_,fsdp,_");
    EpWeight *weight = NULL;
    static _Thread_local _Alignas(64) char shard[192], full[384], space[4096];
    config.kind = EP_TENSOR_WEIGHT;
    EpMeshComm *comm = connect(bootstrap, "data=2,fsdp=2", 1.5);
    REQUIRE(comm, "no communicator");
    CHECK_OK(ep_weight_create(comm, &config, &weight));
    EpTensor in = ep_tensor_3d(shard, EP_TYPE_BF16, 4, 3, 8);
    EpTensor out = ep_tensor_3d(full, EP_TYPE_BF16, 4, 6, 8);
    EpTensor workspace = ep_tensor_1d(space, EP_TYPE_UINT8, sizeof(space));
    EpStatus status = EP_OK;
    if (bootstrap->rank != 3)
        status = finish(comm, ep_weight_gather(weight, NULL, &in, &workspace, NULL, &out, NULL));
    if (bootstrap->rank == 2) {
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 0: weight gather: rank 1 did not arrive",
                      "its ranks, along fsdp, are 2, 3 of the mesh");
        CHECK_REFUSED(ep_weight_gather(weight, NULL, &in, &workspace, NULL, &out, NULL),
                      EP_ERR_TIMEOUT, "rank 0: weight gather: rank 1 did not arrive",
                      "its ranks, along fsdp, are 2, 3 of the mesh");
    }
    CHECK(status == EP_OK || bootstrap->rank == 2, "%s", ep_last_error());
    CHECK_OK(bootstrap->barrier(bootstrap->context, 30));
    ep_mesh_comm_destroy(comm);
}

/* Ranks that keep the same shard divide its sum. A rank that is absent is missing in the first part
 * of that, and all others name it, also those that only wait for sums. */
ThreadTest(handles_weight_arguments, absent_from_a_divided_sum, 4) {
    EpMesh mesh = mesh_of("data=2,fsdp=2");
    EpWeightConfig config = weight_config(&mesh, "_,fsdp,_");
    EpWeight *weight = NULL;
    static _Thread_local _Alignas(64) char grad[384], reduced[384], space[8192];
    config.kind = EP_TENSOR_WEIGHT;
    EpMeshComm *comm = connect(bootstrap, "data=2,fsdp=2", 1.5);
    REQUIRE(comm, "no communicator");
    CHECK_OK(ep_weight_create(comm, &config, &weight));
    EpTensor in = ep_tensor_3d(grad, EP_TYPE_BF16, 4, 6, 8);
    EpTensor out = ep_tensor_3d(reduced, EP_TYPE_FP32, 4, 3, 8);
    EpTensor workspace = ep_tensor_1d(space, EP_TYPE_UINT8, sizeof(space));
    if (bootstrap->rank != 3) {
        EpStatus status = finish(comm, ep_weight_reduce(weight, &in, 0, &workspace, NULL, &out));
        CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "status %d", (int)status);
        CHECK(strstr(ep_last_error(), "rank 3") || strstr(ep_last_error(), "are 1, 3 of the mesh"),
              "%s", ep_last_error());
        CHECK_STATUS(ep_weight_reduce(weight, &in, 0, &workspace, NULL, &out), status);
    }
    CHECK_OK(bootstrap->barrier(bootstrap->context, 30));
    ep_mesh_comm_destroy(comm);
}

ThreadTest(handles_weight_arguments, abort, 2) {
    Fixture *f = open_fixture(bootstrap);
    REQUIRE(f->weight, "no weight");
    Arguments a = good_arguments(f);
    CHECK_REFUSED(ep_mesh_comm_abort(f->comm, NULL), EP_ERR_NULL, "sentence");
    if (bootstrap->rank == 1) CHECK_OK(ep_mesh_comm_abort(f->comm, "the optimizer ran out"));
    CHECK_REFUSED(finish(f->comm, ep_weight_gather(f->weight, NULL, &a.shard, &a.workspace, NULL,
                                                   &a.out, NULL)),
                  bootstrap->rank ? EP_ERR_ABORTED : EP_ERR_PEER, "the optimizer ran out");
    close_fixture(f);
}
