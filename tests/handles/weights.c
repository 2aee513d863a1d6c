/* SPDX-License-Identifier: Apache-2.0 */
/* Sharded weights against the oracle: gathered in all forms, gradients reduced, amaxes. */
#include "tests/cases/meshes.h"
#include "tests/harness/random.h"
#include "tests/harness/ranked.h"
#include "tests/oracle/number.h"
#include "tests/oracle/quant.h"
#include "tests/oracle/sharded.h"

enum { DEADLINE = 60, GUARD = 64 };

/* ---- one rank ------------------------------------------------------------------------------ */

typedef struct Rank {
    const EpBootstrap *world;
    const Sharded *s;
    EpMeshComm *comm;
    EpWeight *weight;
    ShardedBox stored, used;
    void *shard;
} Rank;

static EpTensor tensor_of(const void *data, EpType type, const int64_t *shape) {
    return ep_tensor_3d(data, type, shape[0], shape[1], shape[2]);
}

/* Memory on a multiple of 64, with a guard behind it, all bytes 0x5a. */
static char *guarded(int64_t bytes) {
    char *memory = aligned_alloc(64, (size_t)((bytes + GUARD + 63) / 64 * 64));
    memset(memory, 0x5a, (size_t)(bytes + GUARD));
    return memory;
}

static int guard_is_whole(const char *memory, int64_t bytes) {
    for (int i = 0; i < GUARD; i++)
        if (memory[bytes + i] != 0x5a) return 0;
    return 1;
}

static EpWeightConfig config_of(const Sharded *s) {
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    config.name = "layers.3.w1", config.kind = s->kind, config.spec = s->spec;
    memcpy(config.shape, s->shape, sizeof(s->shape));
    config.type = s->type, config.grad_type = s->grad_type, config.reduced_type = s->reduced_type;
    return config;
}

static Rank open_rank(const EpBootstrap *world, EpMeshComm *comm, const Sharded *s) {
    EpWeightConfig config = config_of(s);
    Rank r = {.world = world, .s = s, .comm = comm};
    REQUIRE_OK(ep_weight_create(comm, &config, &r.weight));
    r.stored = sharded_stored(s, world->rank);
    r.used = sharded_used(s, world->rank);
    r.shard = guarded(sharded_elements(&r.stored) * (int64_t)ep_type_bytes(s->type));
    sharded_fill(s, &r.stored, r.shard);
    return r;
}

static void close_rank(Rank *r) {
    ep_weight_destroy(r->weight);
    free(r->shard);
}

static void check_sharding(const Rank *r) {
    EpSharding sharding = EP_SHARDING_INIT;
    CHECK_OK(ep_weight_sharding(r->weight, &sharding));
    CHECK(memcmp(sharding.stored, r->stored.size, sizeof(r->stored.size)) == 0, "stored");
    CHECK(memcmp(sharding.used, r->used.size, sizeof(r->used.size)) == 0, "used");
}

/* ---- gather -------------------------------------------------------------------------------- */

static int64_t product(const int64_t *shape) {
    return shape[0] * shape[1] * shape[2];
}

typedef struct Gathered {
    EpWeightSizes sizes;
    char *out, *scale_memory, *scales, *workspace;
    int64_t bytes, scale_bytes;
} Gathered;

static Gathered gather(const Rank *r, const EpWeightForm *form) {
    Gathered g = {.sizes = EP_WEIGHT_SIZES_INIT};
    CHECK_OK(ep_weight_sizes(r->weight, form, &g.sizes));
    g.bytes = product(g.sizes.shape) * (int64_t)ep_type_bytes(g.sizes.type);
    g.scale_bytes = product(g.sizes.scale_shape) * (int64_t)ep_type_bytes(g.sizes.scale_type);
    g.out = guarded(g.bytes), g.scale_memory = guarded(g.scale_bytes + 4);
    g.scales = g.scale_memory + 4; /* they start on 4 bytes */
    g.workspace = guarded(g.sizes.gather_workspace);
    EpTensor shard = tensor_of(r->shard, r->s->type, r->stored.size);
    EpTensor out = tensor_of(g.out, g.sizes.type, g.sizes.shape);
    EpTensor scales = tensor_of(g.scales, g.sizes.scale_type, g.sizes.scale_shape);
    EpTensor workspace = ep_tensor_1d(g.workspace, EP_TYPE_UINT8, g.sizes.gather_workspace);
    int quantised = form && form->quant != EP_QUANT_NONE;
    CHECK_OK(ep_weight_gather(r->weight, form, &shard, g.sizes.gather_workspace ? &workspace : NULL,
                              NULL, &out, quantised ? &scales : NULL));
    CHECK(guard_is_whole(g.out, g.bytes), "bytes past the weight");
    CHECK(guard_is_whole(g.scales, g.scale_bytes), "bytes past the scales");
    CHECK(guard_is_whole(g.workspace, g.sizes.gather_workspace), "bytes past the workspace");
    return g;
}

static void free_gathered(Gathered *g) {
    free(g->out);
    free(g->scale_memory);
    free(g->workspace);
}

static void check_plain(const Rank *r) {
    Gathered g = gather(r, NULL);
    char *expected = guarded(g.bytes);
    CHECK(memcmp(g.sizes.shape, r->used.size, sizeof(r->used.size)) == 0, "shape");
    sharded_fill(r->s, &r->used, expected);
    CHECK(memcmp(g.out, expected, (size_t)g.bytes) == 0, "another weight");
    free(expected);
    free_gathered(&g);
}

/* The shards of the ranks that gather, one after the other. Those with the same box come once. */
static void check_by_rank(const Rank *r) {
    EpWeightForm form = EP_WEIGHT_FORM_INIT;
    form.by_rank = 1;
    Gathered g = gather(r, &form);
    int64_t each = sharded_elements(&r->stored) * (int64_t)ep_type_bytes(r->s->type);
    EpSharding sharding = EP_SHARDING_INIT;
    int32_t size = 0, ranks[64];
    CHECK_OK(ep_weight_sharding(r->weight, &sharding));
    CHECK_OK(ep_mesh_group(r->s->mesh, &sharding.scattered, r->world->rank, &size, NULL, ranks));
    CHECK(g.bytes == size * each, "%lld bytes", (long long)g.bytes);
    char *expected = guarded(each);
    for (int i = 0; i < size; i++) {
        ShardedBox box = sharded_stored(r->s, ranks[i]);
        sharded_fill(r->s, &box, expected);
        CHECK(memcmp(g.out + i * each, expected, (size_t)each) == 0, "another shard %d", i);
    }
    free(expected);
    free_gathered(&g);
}

static void check_form(const Rank *r, EpQuant quant, EpBlocks blocks, int transposed) {
    EpWeightForm form = EP_WEIGHT_FORM_INIT;
    form.quant = quant, form.blocks = blocks, form.transposed = transposed;
    Gathered g = gather(r, &form);
    int64_t expected_blocks[SHARDED_DIMS];
    uint8_t *out = (uint8_t *)guarded(g.bytes), *scales = (uint8_t *)guarded(g.scale_bytes);
    sharded_quantise(r->s, &r->used, &form, out, scales, expected_blocks);
    check_note("quant %d, blocks %d, transposed %d, workspace %lld", quant, blocks, transposed,
               (long long)g.sizes.gather_workspace);
    CHECK(memcmp(g.sizes.scale_shape, expected_blocks, sizeof(expected_blocks)) == 0, "scales");
    CHECK(g.sizes.shape[transposed ? 1 : 2] == r->used.size[2], "shape");
    CHECK(memcmp(g.out, out, (size_t)g.bytes) == 0, "other bytes");
    CHECK(memcmp(g.scales, scales, (size_t)g.scale_bytes) == 0, "other scales");
    free(out);
    free(scales);
    free_gathered(&g);
}

static void check_all_forms(const Rank *r) {
    for (int quant = EP_QUANT_FP8; quant <= EP_QUANT_FP8_POW2; quant++)
        for (int transposed = 0; transposed < 2; transposed++) {
            check_form(r, (EpQuant)quant, EP_BLOCKS_ROWS, transposed);
            if (quant != EP_QUANT_MXFP8) check_form(r, (EpQuant)quant, EP_BLOCKS_TILES, transposed);
        }
}

/* ---- reduce and amax ----------------------------------------------------------------------- */

static void check_reduce(const Rank *r, int step, int accumulate) {
    const Sharded *s = r->s;
    int64_t bytes = sharded_elements(&r->stored) * (int64_t)ep_type_bytes(s->reduced_type);
    char *grad = guarded(sharded_elements(&r->used) * (int64_t)ep_type_bytes(s->grad_type));
    char *out = guarded(bytes), *expected = guarded(bytes), *before = guarded(bytes);
    sharded_gradient(s, r->world->rank, step, grad);
    sharded_reduced(s, r->world->rank, step + 50, NULL, before);
    for (int64_t at = 0; at < sharded_elements(&r->stored); at++)
        if (number_get(before, s->reduced_type, at) == 0)
            number_set(before, s->reduced_type, at, -0.0f);
    memcpy(out, before, (size_t)bytes);
    sharded_reduced(s, r->world->rank, step, accumulate ? before : NULL, expected);
    EpTensor in = tensor_of(grad, s->grad_type, r->used.size);
    EpTensor reduced = tensor_of(out, s->reduced_type, r->stored.size);
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    CHECK_OK(ep_weight_sizes(r->weight, NULL, &sizes));
    char *memory = guarded(sizes.reduce_workspace);
    EpTensor workspace = ep_tensor_1d(memory, EP_TYPE_UINT8, sizes.reduce_workspace);
    CHECK_OK(ep_weight_reduce(r->weight, &in, accumulate,
                              sizes.reduce_workspace ? &workspace : NULL, NULL, &reduced));
    CHECK(guard_is_whole(memory, sizes.reduce_workspace), "bytes past the workspace");
    free(memory);
    CHECK(memcmp(out, expected, (size_t)bytes) == 0, "another sum, accumulate %d", accumulate);
    CHECK(guard_is_whole(out, bytes), "bytes past the shard");
    free(grad);
    free(out);
    free(expected);
    free(before);
}

static void check_amax(const Rank *r, EpAmaxScope scope) {
    int64_t count = scope == EP_AMAX_EXPERT ? r->stored.size[0] : 1;
    float *amax = malloc(sizeof(*amax) * (size_t)count);
    for (int i = 0; i < count; i++)
        amax[i] = sharded_amax(r->s, r->world->rank, i);
    EpTensor t = ep_tensor_1d(amax, EP_TYPE_FP32, count);
    CHECK_OK(ep_weight_amax(r->weight, scope, NULL, &t));
    for (int i = 0; i < count; i++)
        CHECK(amax[i] == sharded_largest(r->s, r->world->rank, scope, i), "scope %d: amax %d",
              scope, i);
    free(amax);
}

static void check_rest(const Rank *r) {
    check_sharding(r);
    check_plain(r);
    check_by_rank(r);
    check_reduce(r, 1, 0);
    check_reduce(r, 2, 1);
    check_amax(r, EP_AMAX_TENSOR);
    if (r->s->kind == EP_TENSOR_EXPERT_WEIGHT) check_amax(r, EP_AMAX_EXPERT);
}

/* ---- given meshes -------------------------------------------------------------------------- */

typedef struct Given {
    const char *mesh, *spec;
    EpTensorKind kind;
    int64_t shape[SHARDED_DIMS];
    EpType type, grad_type, reduced_type;
} Given;

static void check_given(const EpBootstrap *world, const Given *given, int nodes) {
    EpMesh mesh = EP_MESH_INIT;
    Sharded s = {.mesh = &mesh,
                 .kind = given->kind,
                 .spec = EP_SPEC_INIT,
                 .seed = 11,
                 .type = given->type,
                 .grad_type = given->grad_type,
                 .reduced_type = given->reduced_type,
                 .nodes = nodes};
    memcpy(s.shape, given->shape, sizeof(s.shape));
    CHECK_OK(ep_mesh_parse(given->mesh, &mesh));
    CHECK_OK(ep_spec_parse(&mesh, given->spec, &s.spec));
    EpMeshComm *comm = connect_mesh(world, &mesh, DEADLINE);
    Rank r = open_rank(world, comm, &s);
    check_note("%s, %s", given->mesh, given->spec);
    check_rest(&r);
    /* Nodes and messages in rounds change how rows travel, not what is made of them. */
    if (nodes == 1 && sharded_elements(&r.used) < 500000)
        check_all_forms(&r);
    else
        check_form(&r, EP_QUANT_FP8, EP_BLOCKS_TILES, 1);
    close_rank(&r);
    ep_mesh_comm_destroy(comm);
}

/* Each rank is on one of so many nodes. */
static void check_each(const EpBootstrap *world, const Given *given, int count, int nodes) {
    char topology[16];
    snprintf(topology, sizeof(topology), "%d", nodes);
    if (nodes > 1) set_on_ranks(world, "LIBEP_TOPOLOGY", topology);
    for (int i = 0; i < count; i++)
        check_given(world, &given[i], nodes);
}

#define EXPERTS EP_TENSOR_EXPERT_WEIGHT
#define BF16 EP_TYPE_BF16
#define FP32 EP_TYPE_FP32

/* Shards that begin within blocks, in either dimension; shards of less than a block. */
static const Given eight[] = {
    {"data=2,fsdp=2,expert=2", "expert,fsdp,_", EXPERTS, {4, 512, 200}, BF16, BF16, FP32},
    {"data=2,fsdp=2,expert=2", "expert,_,fsdp", EXPERTS, {2, 130, 320}, BF16, BF16, BF16},
    {"fsdp=4,expert=2", "(expert,fsdp),_,_", EXPERTS, {16, 33, 144}, FP32, FP32, FP32},
    {"fsdp=4,expert=2", "expert,fsdp,_", EXPERTS, {2, 168, 24}, EP_TYPE_FP16, EP_TYPE_FP16, FP32},
    {"fsdp=2,zero=2,expert=2", "expert,_,_", EXPERTS, {4, 20, 40}, BF16, FP32, FP32},
    {"fsdp=2,expert=4", "_,(fsdp,expert),_", EP_TENSOR_WEIGHT, {1, 1048, 60}, BF16, BF16, FP32},
    {"fsdp=2,more:fsdp=2,expert=2", "expert,fsdp,more", EXPERTS, {2, 260, 272}, BF16, BF16, FP32},
    {"data=4,expert=2", "expert,_,_", EXPERTS, {2, 70, 33}, BF16, BF16, FP32},
    {"data=2,more:data=4", "_,_,_", EP_TENSOR_WEIGHT, {1, 257, 3}, FP32, FP32, FP32},
    {"expert=8", "expert,_,_", EXPERTS, {8, 40, 128}, BF16, BF16, FP32}};

RankTest(handles_weights, on_eight_ranks, 8, check_each(bootstrap, eight, LENGTH(eight), 1));

/* The same on fewer ranks, for machines with as many GPUs. */
static const Given four[] = {
    {"data=2,fsdp=2,expert=1", "expert,fsdp,_", EXPERTS, {2, 512, 200}, BF16, BF16, FP32},
    {"data=4", "_,_,_", EP_TENSOR_WEIGHT, {1, 130, 33}, BF16, BF16, BF16},
    {"fsdp=2,expert=2", "expert,_,fsdp", EXPERTS, {2, 130, 320}, BF16, BF16, BF16},
    {"fsdp=4,expert=1", "(expert,fsdp),_,_", EXPERTS, {16, 33, 144}, FP32, FP32, FP32},
    {"fsdp=2,more:fsdp=2", "_,fsdp,more", EXPERTS, {2, 260, 272}, EP_TYPE_FP16, BF16, FP32},
    {"fsdp=2,expert=2", "_,(fsdp,expert),_", EP_TENSOR_WEIGHT, {1, 1048, 60}, BF16, BF16, FP32}};
static const Given two[] = {
    {"fsdp=2,expert=1", "expert,fsdp,_", EXPERTS, {3, 512, 208}, BF16, BF16, FP32},
    {"fsdp=2,expert=1", "expert,_,fsdp", EXPERTS, {2, 130, 320}, BF16, BF16, BF16},
    {"data=2,expert=1", "expert,_,_", EXPERTS, {2, 40, 128}, FP32, FP32, FP32},
    {"expert=2", "expert,_,_", EXPERTS, {4, 40, 128}, BF16, EP_TYPE_FP16, EP_TYPE_FP16},
    {"fsdp=2,expert=1", "expert,fsdp,_", EXPERTS, {3, 0, 128}, BF16, BF16, FP32},
    {"fsdp=2,expert=1", "expert,_,fsdp", EXPERTS, {0, 3, 40}, BF16, BF16, FP32},
    {"fsdp=2", "fsdp,_,_", EP_TENSOR_WEIGHT, {300, 7, 16}, FP32, BF16, FP32}};

RankTest(handles_weights, on_four_ranks, 4, check_each(bootstrap, four, LENGTH(four), 1));

RankTest(handles_weights, on_two_ranks, 2, check_each(bootstrap, two, LENGTH(two), 1));

static const Given alone[] = {
    {"expert=1,fsdp=1", "expert,fsdp,_", EXPERTS, {3, 130, 70}, BF16, BF16, FP32}};
RankTest(handles_weights, alone, 1, check_each(bootstrap, alone, 1, 1));

/* Every message takes several rounds. */
static const Given large[] = {
    {"fsdp=2,expert=2", "expert,_,fsdp", EXPERTS, {2, 600, 1160}, FP32, FP32, FP32}};
RankTest(handles_weights, beyond_the_stage, 4, check_each(bootstrap, large, 1, 1));

RankTest(handles_weights, on_two_nodes, 4, check_each(bootstrap, four, LENGTH(four), 2));

/* Sums of nodes; groups along fsdp lie on one node, those along data on two or four. */
RankTest(handles_weights, on_four_nodes, 8, check_each(bootstrap, eight, LENGTH(eight), 4));

HostRankedTest(mpi_weights, on_two_nodes, 8, 90, "GPUs have tests of their own") {
    check_each(bootstrap, eight, 3, 2);
}

/* ---- random meshes ------------------------------------------------------------------------- */

/* Deal axes to dimensions by the rules of each kind. */
static void random_sharded(Random *random, int most, EpMesh *mesh, Sharded *s) {
    static const EpType types[] = {EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32};
    int ranks = 1;
    *s = (Sharded){.mesh = mesh, .spec = EP_SPEC_INIT, .nodes = 1, .seed = random_next(random)};
    s->kind = random_percent(random, 70) ? EXPERTS : EP_TENSOR_WEIGHT;
    s->type = types[random_below(random, 3)], s->grad_type = types[random_below(random, 3)];
    s->reduced_type = random_percent(random, 50) ? FP32 : s->grad_type;
    s->spec.ndim = SHARDED_DIMS;
    for (int d = 0; d < SHARDED_DIMS; d++)
        s->shape[d] = 1 + random_below(random, d ? 60 : 3);
    mesh->num_axes = 1 + (int32_t)random_below(random, 4);
    for (int32_t i = 0; i < mesh->num_axes; i++) {
        EpAxis *axis = &mesh->axes[i];
        snprintf(axis->name, sizeof(axis->name), "a%d", i);
        axis->size = 1 + (int32_t)random_below(random, 3);
        if (most % (ranks * axis->size)) axis->size = 1;
        ranks *= axis->size;
        axis->role = i == 0 ? EP_AXIS_EXPERT : (EpAxisRole)(2 + random_below(random, 2));
        if (axis->role == EP_AXIS_DATA) continue;
        int d = (int)random_below(random, SHARDED_DIMS);
        if (axis->role == EP_AXIS_EXPERT) d = 0;
        s->spec.dims[d].axis[s->spec.dims[d].num++] = i;
        s->shape[d] *= axis->size;
    }
    if (mesh->num_axes > 1 && s->kind == EP_TENSOR_WEIGHT && random_percent(random, 50))
        s->shape[1] *= 8;
    for (; ranks < most && mesh->num_axes < EP_MESH_MAX_AXES; ranks *= 2)
        if (most % (ranks * 2) == 0)
            mesh->axes[mesh->num_axes++] =
                (EpAxis){{(char)('p' + mesh->num_axes)}, 2, EP_AXIS_DATA};
}

/* LIBEP_TEST_CASES, or few: on GPUs NCCL takes a second or two to make communicators. */
static int count_trials(void) {
    const char *given = getenv("LIBEP_TEST_CASES");
    return given ? atoi(given) : 15;
}

static void check_random(const EpBootstrap *bootstrap, uint64_t seed) {
    for (int i = 0; i < count_trials(); i++) {
        Random random = random_stream(seed, (uint64_t)i, 0);
        EpMesh mesh = EP_MESH_INIT;
        Sharded s;
        random_sharded(&random, bootstrap->size, &mesh, &s);
        if (sharded_ranks(&mesh) != bootstrap->size) continue;
        char text[256];
        CHECK_OK(ep_spec_format(&mesh, &s.spec, text, sizeof(text)));
        check_note("seed %llu, trial %d: %s", (unsigned long long)seed, i, text);
        EpMeshComm *comm = connect_mesh(bootstrap, &mesh, DEADLINE);
        Rank r = open_rank(bootstrap, comm, &s);
        check_rest(&r);
        check_form(&r, (EpQuant)(2 + random_below(&random, 4)), EP_BLOCKS_ROWS,
                   (int)random_below(&random, 2));
        check_form(&r, EP_QUANT_FP8, EP_BLOCKS_TILES, (int)random_below(&random, 2));
        close_rank(&r);
        ep_mesh_comm_destroy(comm);
    }
}

RankTest(handles_weights, random_meshes, 8, check_random(bootstrap, 4711));
RankTest(handles_weights, random_meshes_of_four, 4, check_random(bootstrap, 4712));

ThreadTest(handles_weights, random_meshes_with_a_tiny_stage, 8) {
    HOST_ONLY("no LIBEP_STAGE_BYTES on GPUs");
    set_on_ranks(bootstrap, "LIBEP_STAGE_BYTES", "3000");
    check_random(bootstrap, 815);
}
