/* SPDX-License-Identifier: Apache-2.0 */
/* What sharded weights refuse: statuses, sentences, untouched outputs; ranks that disagree, leave
 * or abort. */
#include "tests/cases/meshes.h"
#include "tests/cases/refusals.h"
#include "tests/harness/threads.h"

static EpMeshComm *connect(const EpBootstrap *world, const char *text, double seconds) {
    EpMesh mesh = mesh_of(text);
    return connect_mesh(world, &mesh, seconds);
}

/* w1 [4, 6, 8] of bf16. */
static EpWeightConfig weight_config(const EpMesh *mesh, const char *spec) {
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    config.name = "w1";
    config.shape[0] = 4, config.shape[1] = 6, config.shape[2] = 8;
    config.spec = spec_of(mesh, spec);
    return config;
}

static const char MESH[] = "fsdp=2,expert=1";

/* ---- communicators ------------------------------------------------------------------------- */

/* Rank 1 alone is wrong; rank 0 learns of it. */
ThreadTest(handles_weight_arguments, communicators, 2) {
    int wrong = bootstrap->rank == 1;
    EpMesh mesh = mesh_of(MESH), large = mesh_of("fsdp=3"), other = mesh_of("zero:fsdp=2,expert=1");
    EpMeshCommConfig config = comm_config(30), odd = comm_config(-3), big = config;
    EpMeshComm *const untouched = (EpMeshComm *)&config, *comm = untouched;
    big.struct_size = 1000;
    const struct {
        const EpMesh *mesh;
        const EpMeshCommConfig *config;
        EpMeshComm **out;
        EpStatus status;
        const char *sentence;
    } wrongs[] = {{&large, &config, &comm, EP_ERR_RANGE,
                   "mesh: expected a mesh of the 2 ranks of world, got 3"},
                  {NULL, &config, &comm, EP_ERR_NULL, "mesh: expected a pointer, got NULL"},
                  {&mesh, &odd, &comm, EP_ERR_RANGE,
                   "config.timeout_seconds: expected seconds > 0 or EP_DEFAULT, got -3"},
                  {&mesh, &big, &comm, EP_ERR_STRUCT_SIZE, "got 1000"},
                  {&mesh, &config, NULL, EP_ERR_NULL, "out: expected a pointer, got NULL"}};
    for (int i = 0; i < LENGTH(wrongs); i++)
        CHECK_REFUSED(
            ep_mesh_comm_create(bootstrap, wrong ? wrongs[i].mesh : &mesh,
                                wrong ? wrongs[i].config : &config, wrong ? wrongs[i].out : &comm),
            wrong ? wrongs[i].status : EP_ERR_PEER, "ep_mesh_comm_create", wrongs[i].sentence);
    CHECK_REFUSED(ep_mesh_comm_create(bootstrap, wrong ? &other : &mesh, &config, &comm),
                  EP_ERR_MISMATCH, "mesh.axes", "fsdp=2 on rank 0 and zero=2 on rank 1");
    CHECK_REFUSED(ep_mesh_comm_create(NULL, &mesh, &config, &comm), EP_ERR_NULL, "bootstrap");
    CHECK(comm == untouched, "a refused call has changed the output");
    ep_mesh_comm_destroy(NULL);
}

/* ---- weights ------------------------------------------------------------------------------- */

static const TextField config_fields[] = {TEXT_FIELD(EpWeightConfig, struct_size, NULL),
                                          TEXT_FIELD(EpWeightConfig, name, NULL),
                                          TEXT_FIELD(EpWeightConfig, kind, NULL),
                                          TEXT_FIELD(EpWeightConfig, shape[0], NULL),
                                          TEXT_FIELD(EpWeightConfig, shape[1], NULL),
                                          TEXT_FIELD(EpWeightConfig, shape[2], NULL),
                                          TEXT_FIELD(EpWeightConfig, type, TEXT_TYPES),
                                          TEXT_FIELD(EpWeightConfig, grad_type, TEXT_TYPES),
                                          TEXT_FIELD(EpWeightConfig, reduced_type, TEXT_TYPES)};

typedef struct Configured {
    EpMeshComm *comm;
    EpWeightConfig config;
    EpWeight *out;
} Configured;

static EpStatus create_configured(void *context, const char *call) {
    Configured *c = context;
    (void)call;
    return ep_weight_create(c->comm, &c->config, &c->out);
}

/* Specs, which refusals.def cannot say. */
static void check_spec_refused(EpMeshComm *comm, int wrong, const char *spec, EpStatus expected,
                               const char *how) {
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, wrong ? spec : "expert,fsdp,_");
    EpWeight *weight = NULL;
    config.shape[3] = 2;
    CHECK_REFUSED(ep_weight_create(comm, &config, &weight), wrong ? expected : EP_ERR_PEER, "w1",
                  how);
    CHECK(!weight, "a refused call has changed the output");
}

ThreadTest(handles_weight_arguments, configurations, 2) {
    int wrong = bootstrap->rank == 1;
    EpMesh mesh = mesh_of(MESH);
    Configured c = {connect(bootstrap, MESH, 30), weight_config(&mesh, "expert,fsdp,_"), NULL};
    const Member members[] = {MEMBER("", config_fields, Configured, config)};
    check_refusals("weight_config",
                   &(Subject){members, 1, sizeof(c), create_configured, .is_bystander = !wrong},
                   &c);
    check_spec_refused(c.comm, wrong, "(fsdp,expert),_,_", EP_ERR_UNSUPPORTED, "(fsdp,expert)");
    check_spec_refused(c.comm, wrong, "expert,fsdp,_,_", EP_ERR_NDIM,
                       "at most 3 dimensions, got 4");
    CHECK_REFUSED(ep_weight_create(c.comm, &c.config, wrong ? NULL : &c.out),
                  wrong ? EP_ERR_NULL : EP_ERR_PEER, "out");
    CHECK_REFUSED(ep_weight_create(NULL, &c.config, &c.out), EP_ERR_NULL, "comm");
    ep_mesh_comm_destroy(c.comm);
}

static void check_mismatch(EpMeshComm *comm, const EpWeightConfig *config, const char *field,
                           const char *how) {
    EpWeight *weight = NULL;
    CHECK_REFUSED(ep_weight_create(comm, config, &weight), EP_ERR_MISMATCH, field, how);
    CHECK(!weight, "a refused call has changed the output");
}

/* The largest weights have sizes in all forms. */
ThreadTest(handles_weight_arguments, largest_weights, 2) {
    static const int64_t shapes[][3] = {{2, (int64_t)1 << 45, 4},
                                        {2, 4, (int64_t)1 << 45},
                                        {(int64_t)1 << 46, 2, 2},
                                        {0, (int64_t)1 << 47, 2}};
    EpMesh mesh = mesh_of(MESH);
    EpMeshComm *comm = connect(bootstrap, MESH, 30);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        for (int form = 0; form < 4; form++) {
            EpWeightConfig config =
                weight_config(&mesh, form & 1 ? "expert,_,fsdp" : "expert,fsdp,_");
            EpWeight *weight = NULL;
            EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
            EpWeightForm f = EP_WEIGHT_FORM_INIT;
            f.quant = EP_QUANT_FP8, f.transposed = form >> 1;
            memcpy(config.shape, shapes[i], sizeof(shapes[i]));
            CHECK_OK(ep_weight_create(comm, &config, &weight));
            CHECK_OK(ep_weight_sizes(weight, form ? &f : NULL, &sizes));
            CHECK(sizes.gather_workspace >= 0 && sizes.reduce_workspace >= 0 &&
                      sizes.shape[0] == shapes[i][0],
                  "shape %zu, form %d: %lld, %lld", i, form, (long long)sizes.gather_workspace,
                  (long long)sizes.reduce_workspace);
            ep_weight_destroy(weight);
        }
    ep_mesh_comm_destroy(comm);
}

ThreadTest(handles_weight_arguments, ranks_disagree, 2) {
    int other = bootstrap->rank == 1;
    EpMesh mesh = mesh_of(MESH);
    EpMeshComm *comm = connect(bootstrap, MESH, 30);
    EpWeightConfig good = weight_config(&mesh, "expert,fsdp,_"), mine = good;
    if (other) mine.name = "w2";
    check_mismatch(comm, &mine, "config.name", "got w1 on rank 0 and w2 on rank 1");
    mine = good;
    if (other) mine.shape[2] = 16;
    check_mismatch(comm, &mine, "config.shape[2]", "got 8 on rank 0 and 16 on rank 1");
    mine = other ? weight_config(&mesh, "expert,_,fsdp") : good;
    check_mismatch(comm, &mine, "config.spec, dimension 1", "got fsdp on rank 0 and _ on rank 1");
    mine = good;
    if (other) mine.spec.ndim = 2;
    check_mismatch(comm, &mine, "config.spec", "got 3 on rank 0 and 2 on rank 1");
    mine = good;
    if (other) mine.kind = EP_TENSOR_WEIGHT, mine.spec.dims[0].num = 0;
    check_mismatch(comm, &mine, "config.spec, dimension 0", "got expert on rank 0 and _ on rank 1");
    mine = good;
    if (other) mine.grad_type = EP_TYPE_FP32;
    check_mismatch(comm, &mine, "config.grad_type", "got bf16 on rank 0 and fp32 on rank 1");
    ep_mesh_comm_destroy(comm);
}

/* ---- operations ---------------------------------------------------------------------------- */

static const TextField form_fields[] = {
    TEXT_FIELD(EpWeightForm, struct_size, NULL), TEXT_FIELD(EpWeightForm, quant, TEXT_QUANTS),
    TEXT_FIELD(EpWeightForm, blocks, "|rows|tiles"), TEXT_FIELD(EpWeightForm, transposed, NULL),
    TEXT_FIELD(EpWeightForm, by_rank, NULL)};

enum { TENSORS = 5, FULL = 384 };
typedef enum Which { SHARD, GRAD, WORKSPACE, OUT, SCALES } Which;

/* A communicator with a weight, and the arguments of its calls, on each rank. */
typedef struct Arguments {
    EpMeshComm *comm;
    EpWeight *weight;
    EpWeightForm form;
    EpTensor tensor[TENSORS];
    const EpTensor *given[TENSORS];
    int32_t accumulate;
    _Alignas(64) char shard[192], full[FULL], scales[FULL], workspace[4096];
} Arguments;

static const TextField argument_fields[] = {{"accumulate", NULL, 0, sizeof(int32_t), 0}};

/* A plain gather, one that quantises and transposes, where a row of 6 lies in two shards, so that
 * it needs a workspace; a reduce. */
typedef enum Kind { GATHERS, QUANTISES, REDUCES } Kind;

static void reset_arguments(Arguments *a, Kind kind) {
    EpTensor *t = a->tensor;
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    int quantised = kind == QUANTISES;
    a->form = (EpWeightForm)EP_WEIGHT_FORM_INIT, a->accumulate = 0;
    if (quantised) a->form.quant = EP_QUANT_FP8, a->form.transposed = 1;
    CHECK_OK(ep_weight_sizes(a->weight, &a->form, &sizes));
    int64_t workspace[] = {sizeof(a->workspace), sizes.gather_workspace, sizes.reduce_workspace};
    t[SHARD] = ep_tensor_3d(a->shard, EP_TYPE_BF16, 4, 3, 8);
    t[GRAD] = ep_tensor_3d(a->full, EP_TYPE_BF16, 4, 6, 8);
    t[WORKSPACE] = ep_tensor_1d(a->workspace, EP_TYPE_UINT8, workspace[kind]);
    t[OUT] = ep_tensor_3d(a->full, sizes.type, 4, sizes.shape[1], sizes.shape[2]);
    t[SCALES] = ep_tensor_3d(a->scales, EP_TYPE_FP32, 4, 8, 1);
    if (kind == REDUCES) t[OUT] = ep_tensor_3d(a->scales, EP_TYPE_FP32, 4, 3, 8);
    for (int i = 0; i < TENSORS; i++)
        a->given[i] = &t[i];
    if (!quantised) a->given[SCALES] = NULL;
}

static EpStatus gather(const Arguments *a) {
    return ep_weight_gather(a->weight, &a->form, a->given[SHARD], a->given[WORKSPACE], NULL,
                            a->given[OUT], a->given[SCALES]);
}

static EpStatus call_weight(void *context, const char *call) {
    const Arguments *a = context;
    if (strcmp(call, "ep_weight_reduce")) return gather(a);
    return ep_weight_reduce(a->weight, a->given[GRAD], a->accumulate, a->given[WORKSPACE], NULL,
                            a->given[OUT]);
}

static Arguments *open_arguments(const EpBootstrap *world) {
    Arguments *a = aligned_alloc(64, (sizeof(*a) + 63) / 64 * 64);
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, "expert,fsdp,_");
    memset(a, 0, sizeof(*a));
    a->comm = connect(world, MESH, 30);
    CHECK_OK(ep_weight_create(a->comm, &config, &a->weight));
    if (a->weight) reset_arguments(a, GATHERS);
    return a;
}

static void close_arguments(Arguments *a) {
    ep_mesh_comm_destroy(a->comm);
    free(a);
}

ThreadTest(handles_weight_arguments, gathers_and_reduces, 2) {
#define EACH(name, i) \
    { name, NULL, 0, offsetof(Arguments, tensor[i]), offsetof(Arguments, given[i]) }
    static const Member members[] = {MEMBER("form", form_fields, Arguments, form),
                                     MEMBER("", argument_fields, Arguments, accumulate),
                                     EACH("shard", SHARD),
                                     EACH("grad", GRAD),
                                     EACH("workspace", WORKSPACE),
                                     EACH("out", OUT),
                                     EACH("scales", SCALES)};
    static const Subject subject = {members, LENGTH(members), sizeof(Arguments), call_weight};
    Arguments *a = open_arguments(bootstrap);
    check_refusals("weight_gather", &subject, a);
    reset_arguments(a, REDUCES);
    check_refusals("weight_reduce", &subject, a);
    reset_arguments(a, QUANTISES);
    check_refusals("weight_quantised", &subject, a);
    reset_arguments(a, GATHERS);
    CHECK_OK(gather(a));
    ep_weight_destroy(a->weight);
    CHECK_REFUSED(gather(a), EP_ERR_DESTROYED, "weight");
    a->weight = NULL;
    CHECK_REFUSED(gather(a), EP_ERR_NULL, "weight");
    ep_mesh_comm_destroy(a->comm);
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    CHECK_REFUSED(ep_weight_create(a->comm, &config, &a->weight), EP_ERR_DESTROYED, "comm");
    CHECK_REFUSED(ep_mesh_comm_abort(a->comm, "too late"), EP_ERR_DESTROYED, "comm");
    CHECK_REFUSED(ep_mesh_comm_status(a->comm), EP_ERR_DESTROYED, "comm");
    free(a);
}

ThreadTest(handles_weight_arguments, amaxes, 2) {
    Arguments *a = open_arguments(bootstrap);
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, "_,fsdp,_");
    EpWeight *outside = NULL;
    float numbers[4] = {1, 2, 3, 4};
    config.kind = EP_TENSOR_WEIGHT, config.name = "w2";
    CHECK_OK(ep_weight_create(a->comm, &config, &outside));
    EpTensor amax = ep_tensor_1d(numbers, EP_TYPE_FP32, 4), one = amax, odd = amax;
    one.shape[0] = odd.shape[0] = 1, odd.type = EP_TYPE_INT32;
    const struct {
        EpWeight *weight;
        EpAmaxScope scope;
        const EpTensor *amax;
        EpStatus status;
        const char *sentence;
    } wrongs[] = {
        {a->weight, (EpAmaxScope)0, &amax, EP_ERR_RANGE, "w1: scope: expected an EpAmaxScope"},
        {a->weight, EP_AMAX_TENSOR, &amax, EP_ERR_SHAPE, "size = 1 in dimension 0, got 4"},
        {a->weight, EP_AMAX_EXPERT, &one, EP_ERR_SHAPE, "size = 4 in dimension 0, got 1"},
        {a->weight, EP_AMAX_TENSOR, &odd, EP_ERR_TYPE, "amax: expected fp32, got int32"},
        {outside, EP_AMAX_EXPERT, &amax, EP_ERR_UNSUPPORTED,
         "w2: scope: expected EP_AMAX_TENSOR for a weight outside the experts, got "
         "EP_AMAX_EXPERT"}};
    for (int i = 0; i < LENGTH(wrongs); i++)
        CHECK_REFUSED(ep_weight_amax(wrongs[i].weight, wrongs[i].scope, NULL, wrongs[i].amax),
                      wrongs[i].status, "ep_weight_amax: ", wrongs[i].sentence);
    CHECK(numbers[0] == 1 && numbers[3] == 4, "a refused call has changed the output");
    close_arguments(a);
}

/* ---- ranks in different calls, and gone ---------------------------------------------------- */

/* Returns how a call has ended, of which `status` is known: on GPUs it may fail later. */
static EpStatus finish(EpMeshComm *comm, EpStatus status) {
    return status == EP_OK ? ep_mesh_comm_status(comm) : status;
}

/* The form is an argument of the call, not a configuration. */
ThreadTest(handles_weight_arguments, forms_differ, 2) {
    int other = bootstrap->rank == 1;
    Arguments *a = open_arguments(bootstrap);
    a->form.quant = EP_QUANT_FP8, a->form.transposed = other;
    a->tensor[OUT] = ep_tensor_3d(a->full, EP_TYPE_FP8_E4M3, 4, other ? 8 : 6, other ? 6 : 8);
    a->tensor[SCALES] = ep_tensor_3d(a->scales + 4, EP_TYPE_FP32, 4, other ? 8 : 6, 1);
    a->given[SCALES] = &a->tensor[SCALES];
    EpStatus status = finish(a->comm, gather(a));
    if (TESTS_ON_GPU)
        CHECK_REFUSED(status, EP_ERR_ORDER, "weight gather", "the same arguments on all ranks");
    else
        CHECK_REFUSED(status, EP_ERR_ORDER, "weight gather: form differs",
                      "rank 0 has EP_QUANT_FP8, EP_BLOCKS_ROWS",
                      "rank 1 has EP_QUANT_FP8, EP_BLOCKS_ROWS, transposed");
    close_arguments(a);
}

ThreadTest(handles_weight_arguments, order, 2) {
    Arguments *a = open_arguments(bootstrap);
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, "expert,fsdp,_");
    EpWeight *first = a->weight, *second = NULL;
    config.name = "w2";
    CHECK_OK(ep_weight_create(a->comm, &config, &second));
    CHECK_OK(ep_mesh_comm_status(a->comm));
    if (bootstrap->rank) a->weight = second;
    CHECK_REFUSED(finish(a->comm, gather(a)), EP_ERR_ORDER, "weight gather", "weight differs");
    CHECK_REFUSED(ep_mesh_comm_status(a->comm), EP_ERR_ORDER, "weight gather", "weight differs");
    a->weight = first;
    CHECK_STATUS(gather(a), EP_ERR_ORDER);
    close_arguments(a);
}

/* Rank 1 does not take part: its call is refused, and then it waits or `goes`. */
static void absent(const EpBootstrap *bootstrap, int refused, int goes) {
    EpMesh mesh = mesh_of(MESH);
    EpWeightConfig config = weight_config(&mesh, "expert,fsdp,_");
    Arguments *a = open_arguments(bootstrap);
    ep_mesh_comm_destroy(a->comm);
    a->comm = connect(bootstrap, MESH, goes ? 60 : 1.5);
    CHECK_OK(ep_weight_create(a->comm, &config, &a->weight));
    if (bootstrap->rank && refused) {
        a->given[SHARD] = NULL;
        CHECK_REFUSED(gather(a), EP_ERR_NULL, "shard: expected a tensor, got NULL");
    }
    if (bootstrap->rank == 0) {
        const char *quoted = refused ? "its last call was refused: rank 1: ep_weight_gather: " : "";
        if (goes)
            CHECK_REFUSED(finish(a->comm, gather(a)), EP_ERR_PEER, "it has destroyed the group; ",
                          quoted, "shard: expected a tensor, got NULL");
        else
            CHECK_TIMEOUT(finish(a->comm, gather(a)), 1.5,
                          "rank 0: weight gather: rank 1 did not arrive within 1.5 s", quoted);
    }
    if (!goes) CHECK_OK(bootstrap->barrier(bootstrap->context, 30));
    close_arguments(a);
}

RankTest(handles_weight_arguments, absent_rank, 2, absent(bootstrap, 0, 0));
RankTest(handles_weight_arguments, refused_rank, 2, absent(bootstrap, 1, 0));
RankTest(handles_weight_arguments, refused_rank_goes, 2, absent(bootstrap, 1, 1));

/* Rank 3 of a mesh is absent from a gather or a reduce. A group numbers its own ranks, so its
 * sentences say which ranks of the mesh they are. */
static void absent_from_a_part(const EpBootstrap *bootstrap, int reduces) {
    EpMesh mesh = mesh_of("data=2,fsdp=2");
    EpWeightConfig config = weight_config(&mesh, "_,fsdp,_");
    EpWeight *weight = NULL;
    static _Thread_local _Alignas(64) char shard[192], full[FULL], reduced[FULL], space[8192];
    config.kind = EP_TENSOR_WEIGHT;
    EpMeshComm *comm = connect(bootstrap, "data=2,fsdp=2", 1.5);
    CHECK_OK(ep_weight_create(comm, &config, &weight));
    EpTensor in = ep_tensor_3d(shard, EP_TYPE_BF16, 4, 3, 8);
    EpTensor whole = ep_tensor_3d(full, EP_TYPE_BF16, 4, 6, 8);
    EpTensor sums = ep_tensor_3d(reduced, EP_TYPE_FP32, 4, 3, 8);
    EpTensor workspace = ep_tensor_1d(space, EP_TYPE_UINT8, sizeof(space));
    EpStatus status = EP_OK;
    for (int i = 0; i < 2 && bootstrap->rank != 3; i++) {
        EpStatus again = finish(
            comm, reduces ? ep_weight_reduce(weight, &whole, 0, &workspace, NULL, &sums)
                          : ep_weight_gather(weight, NULL, &in, &workspace, NULL, &whole, NULL));
        CHECK(!i || again == status, "status %d, then %d", (int)status, (int)again);
        status = again;
        const char *said = status == EP_OK ? "" : ep_last_error();
        if (reduces)
            CHECK(strstr(said, "rank 3") || strstr(said, "are 1, 3 of the mesh"), "%s", said);
        else if (bootstrap->rank == 2)
            CHECK_REFUSED(status, EP_ERR_TIMEOUT, "rank 0: weight gather: rank 1 did not arrive",
                          "its ranks, along fsdp, are 2, 3 of the mesh");
        else
            CHECK_OK(status);
    }
    if (reduces && bootstrap->rank != 3)
        CHECK(status == EP_ERR_TIMEOUT || status == EP_ERR_PEER, "status %d", (int)status);
    CHECK_OK(bootstrap->barrier(bootstrap->context, 30));
    ep_mesh_comm_destroy(comm);
}

RankTest(handles_weight_arguments, absent_from_a_part_of_the_mesh, 4,
         absent_from_a_part(bootstrap, 0));
/* Ranks that keep the same shard divide its sum. All others name the absent rank, also those that
 * only wait for sums. */
RankTest(handles_weight_arguments, absent_from_a_divided_sum, 4, absent_from_a_part(bootstrap, 1));

ThreadTest(handles_weight_arguments, abort, 2) {
    Arguments *a = open_arguments(bootstrap);
    CHECK_REFUSED(ep_mesh_comm_abort(a->comm, NULL), EP_ERR_NULL, "sentence");
    if (bootstrap->rank == 1) CHECK_OK(ep_mesh_comm_abort(a->comm, "the optimizer ran out"));
    CHECK_REFUSED(finish(a->comm, gather(a)), bootstrap->rank ? EP_ERR_ABORTED : EP_ERR_PEER,
                  "the optimizer ran out");
    close_arguments(a);
}
