/* SPDX-License-Identifier: Apache-2.0 */
/* Specs and shardings: shards compared with a count of every element's owners; what is gathered and
 * summed, with the rules of docs/mesh.md. */
#include "tests/cases/meshes.h"
#include "tests/harness/check.h"
#include "tests/harness/random.h"

/* ---- text ---------------------------------------------------------------------------------- */

SoloTest(handles_sharding, text_of_specs) {
    static const char *const specs[][2] = {
        {"_", "_"},
        {"expert", "expert"},
        {"(expert),(fsdp),()", "expert,fsdp,_"},
        {" ( fsdp , expert ) , _ ,_", "(fsdp,expert),_,_"},
        {"_,_,_,_,_,_,_,(data,fsdp,expert)", "_,_,_,_,_,_,_,(data,fsdp,expert)"}};
    EpMesh mesh = mesh_of("data=2,fsdp=2,expert=4");
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        EpSpec spec = spec_of(&mesh, specs[i][0]);
        char text[128] = "";
        CHECK_OK(ep_spec_format(&mesh, &spec, text, strlen(specs[i][1]) + 1));
        CHECK(strcmp(text, specs[i][1]) == 0, "'%s' and not '%s'", text, specs[i][1]);
        strcpy(text, "x");
        CHECK_REFUSED(ep_spec_format(&mesh, &spec, text, strlen(specs[i][1])), EP_ERR_BUFFER_SIZE,
                      "bytes", "expected at least");
        CHECK(strcmp(text, "x") == 0, "a refused call has changed the output");
    }
}

static void check_text_refused(const EpMesh *mesh, const char *text, const char *part) {
    EpSpec spec = EP_SPEC_INIT;
    spec.ndim = 77;
    CHECK_REFUSED(ep_spec_parse(mesh, text, &spec), EP_ERR_RANGE, "ep_spec_parse", part);
    CHECK(spec.ndim == 77, "\"%s\" has changed the output", text);
}

SoloTest(handles_sharding, refuses_text) {
    EpMesh mesh = mesh_of("data=2,fsdp=2,expert=4");
    check_text_refused(&mesh, "", "a name");
    check_text_refused(&mesh, "(fsd,expert),_", "(data, fsdp, expert), got \"fsd,expert),_\"");
    check_text_refused(&mesh, "fsdp,fsdp", "each axis once, got \"fsdp\" in \"fsdp,fsdp\"");
    check_text_refused(&mesh, "(fsdp,fsdp)", "each axis once");
    check_text_refused(&mesh, "fsdp,", "a name");
    check_text_refused(&mesh, "(fsdp", "',' or ')'");
    check_text_refused(&mesh, "_ _", "',' or the end");
    check_text_refused(&mesh, "_,_,_,_,_,_,_,_,_", "at most 8 dimensions");
    CHECK_REFUSED(ep_spec_parse(&mesh, NULL, &(EpSpec)EP_SPEC_INIT), EP_ERR_NULL, "text");
    CHECK_REFUSED(ep_spec_parse(&mesh, "_", NULL), EP_ERR_NULL, "out");
}

/* ---- shards -------------------------------------------------------------------------------- */

enum { DIMS = 3, MOST_RANKS = 64, MOST_ELEMENTS = 1 << 15 };

typedef struct Trial {
    EpMesh mesh;
    EpSpec spec;
    int32_t ranks, copies;
    int64_t shape[DIMS];
} Trial;

/* Deal the mesh's axes to the dimensions at random; some shard nothing. */
static void random_trial(Random *random, Trial *t) {
    *t = (Trial){.mesh = EP_MESH_INIT, .spec = EP_SPEC_INIT, .ranks = 1, .copies = 1};
    t->mesh.num_axes = 1 + (int32_t)random_below(random, 5);
    t->spec.ndim = DIMS;
    for (int d = 0; d < DIMS; d++)
        t->shape[d] = 1 + random_below(random, 3);
    for (int32_t i = 0; i < t->mesh.num_axes; i++) {
        EpAxis *axis = &t->mesh.axes[i];
        snprintf(axis->name, sizeof(axis->name), "a%d", i);
        axis->size = 1 + (int32_t)random_below(random, 4);
        if (t->ranks * axis->size > MOST_RANKS) axis->size = 1;
        axis->role = (EpAxisRole)(1 + random_below(random, 4));
        t->ranks *= axis->size;
        int64_t d = random_below(random, DIMS + 1);
        if (d == DIMS) {
            t->copies *= axis->size;
            continue;
        }
        t->spec.dims[d].axis[t->spec.dims[d].num++] = i;
        t->shape[d] *= axis->size;
    }
}

/* Count an owner of each element of a box. */
static void count_box(const int64_t *shape, const int64_t *begin, const int64_t *local,
                      uint8_t *owners) {
    for (int64_t x = begin[0]; x < begin[0] + local[0]; x++)
        for (int64_t y = begin[1]; y < begin[1] + local[1]; y++)
            for (int64_t z = begin[2]; z < begin[2] + local[2]; z++)
                owners[(x * shape[1] + y) * shape[2] + z]++;
}

SoloTest(handles_sharding, every_element_has_its_owners) {
    enum { SEED = 77, TRIALS = 200 };
    uint8_t *owners = malloc(MOST_ELEMENTS);
    for (int i = 0; i < TRIALS; i++) {
        Random random = random_stream(SEED, (uint64_t)i, 0);
        Trial t;
        random_trial(&random, &t);
        check_note("seed %d, trial %d", SEED, i);
        int64_t elements = t.shape[0] * t.shape[1] * t.shape[2], begin[DIMS], local[DIMS];
        memset(owners, 0, MOST_ELEMENTS);
        for (int32_t rank = 0; rank < t.ranks; rank++) {
            CHECK_OK(ep_spec_shard(&t.mesh, &t.spec, "w", t.shape, rank, begin, local));
            count_box(t.shape, begin, local, owners);
        }
        for (int64_t e = 0; e < elements; e++)
            CHECK(owners[e] == t.copies, "element %lld has %d owners and not %d", (long long)e,
                  owners[e], t.copies);
    }
    free(owners);
}

/* Along a tuple, the first axis is the outermost. */
SoloTest(handles_sharding, order_of_shards) {
    EpMesh mesh = mesh_of("expert=2,fsdp=3");
    EpSpec spec = spec_of(&mesh, "(fsdp,expert),_");
    static const int64_t shape[] = {12, 5}, expected[] = {0, 4, 8, 2, 6, 10}; /* by rank */
    for (int rank = 0; rank < 6; rank++) {
        int64_t begin[2], local[2];
        CHECK_OK(ep_spec_shard(&mesh, &spec, "w", shape, rank, begin, local));
        CHECK(begin[0] == expected[rank] && local[0] == 2 && begin[1] == 0 && local[1] == 5,
              "rank %d has %lld", rank, (long long)begin[0]);
    }
    CHECK_OK(ep_spec_shard(&mesh, &spec, NULL, shape, 5, NULL, NULL));
}

/* ---- what happens to a tensor -------------------------------------------------------------- */

static void check_words(const char *mesh_text, const char *spec_text, EpTensorKind kind,
                        const int64_t *shape, const char *expected) {
    EpMesh mesh = mesh_of(mesh_text);
    EpSpec spec = spec_of(&mesh, spec_text);
    EpSharding sharding = EP_SHARDING_INIT;
    char words[4096] = "";
    check_note("%s on %s", spec_text, mesh_text);
    CHECK_OK(ep_sharding(&mesh, &spec, kind, "w1", shape, &sharding));
    CHECK_OK(ep_sharding_format(&mesh, &sharding, words, sizeof(words)));
    CHECK(strcmp(words, expected) == 0, "got\n%s", words);
}

SoloTest(handles_sharding, expert_weights) {
    static const int64_t shape[] = {256, 7168, 2048};
    check_words("expert=8", "expert,_,_", EP_TENSOR_EXPERT_WEIGHT, shape,
                "stored          [32, 7168, 2048], dimension 0 sharded by expert (8)\n"
                "used            [32, 7168, 2048], dimension 0 still sharded by expert (8)\n"
                "gradient        not scattered\n"
                "                not summed over replicas\n"
                "amax            max over expert, 8 ranks\n"
                "amax per expert local\n");
    check_words("data=2,fsdp=2,expert=4", "expert,fsdp,_", EP_TENSOR_EXPERT_WEIGHT, shape,
                "stored          [64, 3584, 2048], dimension 0 sharded by expert (4), dimension 1 "
                "sharded by fsdp (2)\n"
                "used            [64, 7168, 2048], dimension 1 gathered over fsdp (2), dimension 0 "
                "still sharded by expert (4)\n"
                "gradient        reduce-scattered over fsdp, 2 ranks\n"
                "                summed over data, 2 ranks\n"
                "amax            max over (expert,fsdp,data), 16 ranks\n"
                "amax per expert max over (fsdp,data), 4 ranks\n");
    check_words("data=2,fsdp=2,expert=4", "expert,_,_", EP_TENSOR_EXPERT_WEIGHT, shape,
                "stored          [64, 7168, 2048], dimension 0 sharded by expert (4)\n"
                "used            [64, 7168, 2048], dimension 0 still sharded by expert (4)\n"
                "gradient        not scattered\n"
                "                summed over (data,fsdp), 4 ranks\n"
                "amax            max over (expert,data), 8 ranks\n"
                "amax per expert max over data, 2 ranks\n");
    check_words("fsdp=4,expert=8", "(expert,fsdp),_,_", EP_TENSOR_EXPERT_WEIGHT, shape,
                "stored          [8, 7168, 2048], dimension 0 sharded by expert (8), dimension 0 "
                "sharded by fsdp (4)\n"
                "used            [32, 7168, 2048], dimension 0 gathered over fsdp (4), dimension 0 "
                "still sharded by expert (8)\n"
                "gradient        reduce-scattered over fsdp, 4 ranks\n"
                "                not summed over replicas\n"
                "amax            max over (expert,fsdp), 32 ranks\n"
                "amax per expert local\n");
}

SoloTest(handles_sharding, other_tensors) {
    static const int64_t shape[] = {4096, 512};
    check_words("data=2,fsdp=2,expert=4", "(fsdp,expert),_", EP_TENSOR_WEIGHT, shape,
                "stored          [512, 512], dimension 0 sharded by (fsdp,expert) (8)\n"
                "used            [4096, 512], dimension 0 gathered over (fsdp,expert) (8)\n"
                "gradient        reduce-scattered over (fsdp,expert), 8 ranks\n"
                "                summed over data, 2 ranks\n"
                "amax            max over (fsdp,expert,data), 16 ranks\n");
    check_words("data=2,fsdp=2,expert=4", "_,_", EP_TENSOR_WEIGHT, shape,
                "stored          [4096, 512]\nused            [4096, 512]\n"
                "gradient        not scattered\n"
                "                summed over (data,fsdp,expert), 16 ranks\n"
                "amax            max over data, 2 ranks\n");
    check_words("fsdp=2,tensor=2", "fsdp,tensor", EP_TENSOR_WEIGHT, shape,
                "stored          [2048, 256], dimension 1 sharded by tensor (2), dimension 0 "
                "sharded by fsdp (2)\n"
                "used            [4096, 256], dimension 0 gathered over fsdp (2), dimension 1 "
                "still sharded by tensor (2)\n"
                "gradient        reduce-scattered over fsdp, 2 ranks\n"
                "                not summed over replicas\n"
                "amax            max over (fsdp,tensor), 4 ranks\n");
    check_words("data=2,fsdp=2,expert=4", "(data,fsdp,expert),_", EP_TENSOR_ACTIVATION, shape,
                "stored          [256, 512], dimension 0 sharded by (data,fsdp,expert) (16)\n"
                "used            [256, 512], dimension 0 still sharded by (data,fsdp,expert) (16)\n"
                "gradient        not scattered\n"
                "                not summed over replicas\n"
                "amax            max over (data,fsdp,expert), 16 ranks\n");
}

/* An fsdp axis of size 1 is one like any other, so a program need not know the sizes. */
SoloTest(handles_sharding, axes_of_size_one) {
    EpMesh mesh = mesh_of("fsdp=1,expert=4");
    EpSpec spec = spec_of(&mesh, "(fsdp,expert),_");
    EpSharding s = EP_SHARDING_INIT;
    CHECK_OK(ep_sharding(&mesh, &spec, EP_TENSOR_WEIGHT, "w", (const int64_t[]){64, 3}, &s));
    CHECK(s.gathered[0].num == 2 && s.kept[0].num == 0, "%d gathered", s.gathered[0].num);
    CHECK(s.stored[0] == 16 && s.used[0] == 64 && s.used[1] == 3, "%lld", (long long)s.stored[0]);
}

/* ---- bad input ----------------------------------------------------------------------------- */

static void check_unsupported(const char *spec_text, EpTensorKind kind, const char *what) {
    EpMesh mesh = mesh_of("data=2,fsdp=2,expert=2,slice:expert=2,tensor=2");
    EpSpec spec = spec_of(&mesh, spec_text);
    EpSharding s = EP_SHARDING_INIT;
    s.ndim = 77;
    check_note("%s", spec_text);
    CHECK_REFUSED(ep_sharding(&mesh, &spec, kind, "layer.w1", (const int64_t[]){64, 64, 64}, &s),
                  EP_ERR_UNSUPPORTED, "ep_sharding: layer.w1: expected dimension", what);
    CHECK(s.ndim == 77, "a refused call has changed the output");
}

SoloTest(handles_sharding, refuses_axes_of_kinds) {
    const EpTensorKind expert = EP_TENSOR_EXPERT_WEIGHT, weight = EP_TENSOR_WEIGHT;
    check_unsupported("(fsdp,expert,slice),_,_", expert,
                      "0 to have all expert axes first, in the mesh's order, got "
                      "(fsdp,expert,slice): a rank's experts are contiguous");
    check_unsupported("(slice,expert),_,_", expert, "got (slice,expert)");
    check_unsupported("expert,_,_", expert,
                      "all expert axes first, in the mesh's order, got expert");
    check_unsupported("_,expert,_", expert, "got _");
    check_unsupported("(expert,slice,data),_,_", expert, "expert axes and then fsdp axes");
    check_unsupported("(expert,slice,tensor),_,_", expert, "expert axes and then fsdp axes");
    check_unsupported("(expert,slice),data,_", expert, "1 to have no data axes, got data");
    check_unsupported("(expert,slice),(fsdp,tensor),_", expert,
                      "1 to have fsdp axes without axes of role other, got (fsdp,tensor)");
    check_unsupported("_,_,(tensor,fsdp)", weight,
                      "2 to have fsdp axes without axes of role other");
    check_unsupported("data,_,_", weight, "no data axes without an fsdp axis, got data");
}

SoloTest(handles_sharding, refuses_sizes) {
    EpMesh mesh = mesh_of("fsdp=2,expert=4");
    EpSpec spec = spec_of(&mesh, "(fsdp,expert),_");
    EpSharding s = EP_SHARDING_INIT;
    int64_t begin[2] = {-5, -5}, shape[2] = {68, 10};
    s.ndim = 77;
    CHECK_REFUSED(ep_sharding(&mesh, &spec, EP_TENSOR_WEIGHT, "w1", shape, &s), EP_ERR_SHAPE,
                  "w1: expected a multiple of the 8 ranks of (fsdp,expert) in dimension 0, got 68");
    CHECK_REFUSED(ep_spec_shard(&mesh, &spec, "w1", shape, 0, begin, begin), EP_ERR_SHAPE, "w1",
                  "got 68");
    shape[0] = -8;
    CHECK_REFUSED(ep_spec_shard(&mesh, &spec, "w1", shape, 0, begin, begin), EP_ERR_RANGE, "w1",
                  "at least 0 elements in dimension 0, got -8");
    shape[0] = 64;
    CHECK_REFUSED(ep_spec_shard(&mesh, &spec, "w1", shape, 8, begin, begin), EP_ERR_RANGE, "rank",
                  "0 .. 7, got 8");
    CHECK_REFUSED(ep_spec_shard(&mesh, &spec, "w1", NULL, 0, begin, begin), EP_ERR_NULL, "shape");
    CHECK_REFUSED(ep_sharding(&mesh, &spec, 0, "w1", shape, &s), EP_ERR_RANGE, "kind", "got 0");
    CHECK_REFUSED(ep_sharding(&mesh, &spec, 4, "w1", shape, &s), EP_ERR_RANGE, "kind", "got 4");
    CHECK_REFUSED(ep_sharding(&mesh, &spec, 1, "w1", shape, NULL), EP_ERR_NULL, "out");
    CHECK_REFUSED(ep_sharding(&mesh, NULL, 1, "w1", shape, &s), EP_ERR_NULL, "w1");
    CHECK(s.ndim == 77 && begin[0] == -5, "a refused call has changed an output");
}

SoloTest(handles_sharding, refuses_specs) {
    EpMesh mesh = mesh_of("fsdp=2,expert=4");
    EpSpec spec = spec_of(&mesh, "fsdp,expert");
    EpSharding s = EP_SHARDING_INIT;
    char text[8] = "x";
    spec.dims[1].axis[0] = 0;
    CHECK_REFUSED(ep_sharding(&mesh, &spec, 1, "w1", (const int64_t[]){8, 8}, &s), EP_ERR_RANGE,
                  "w1", "each axis once, got fsdp in dimensions 0 and 1");
    spec.dims[1].axis[0] = 2;
    CHECK_REFUSED(ep_spec_format(&mesh, &spec, text, 8), EP_ERR_RANGE, "spec", "0 .. 1, got 2");
    spec.ndim = 0;
    CHECK_REFUSED(ep_spec_format(&mesh, &spec, text, 8), EP_ERR_NDIM, "spec", "got 0");
    spec.ndim = 9;
    CHECK_REFUSED(ep_spec_format(&mesh, &spec, text, 8), EP_ERR_NDIM, "spec", "got 9");
    CHECK_REFUSED(ep_sharding_format(&mesh, &s, text, 8), EP_ERR_NDIM, "sharding", "got 0");
    s.ndim = 3;
    for (int d = 0; d < 3; d++)
        s.kept[d] = (EpAxes){1, {1}};
    CHECK_REFUSED(ep_sharding_format(&mesh, &s, text, 8), EP_ERR_RANGE, "sharding", "got 3");
    CHECK(strcmp(text, "x") == 0, "a refused call has changed the output");
}
