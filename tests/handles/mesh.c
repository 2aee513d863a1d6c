/* SPDX-License-Identifier: Apache-2.0 */
/* Meshes: text, coordinates and groups, compared with a search through all ranks. */
#include "tests/cases/meshes.h"
#include "tests/harness/check.h"
#include "tests/harness/random.h"

/* ---- text ---------------------------------------------------------------------------------- */

SoloTest(handles_mesh, parses) {
    EpMesh mesh = mesh_of(" dp:data=2, fsdp = 3,ep_1:expert=4,tensor=1,expert:other=5");
    static const EpAxis expected[] = {{"dp", 2, EP_AXIS_DATA},
                                      {"fsdp", 3, EP_AXIS_FSDP},
                                      {"ep_1", 4, EP_AXIS_EXPERT},
                                      {"tensor", 1, EP_AXIS_OTHER},
                                      {"expert", 5, EP_AXIS_OTHER}};
    CHECK(mesh.num_axes == 5 && !mesh.grid, "%d axes", mesh.num_axes);
    for (int i = 0; i < 5; i++)
        CHECK(strcmp(mesh.axes[i].name, expected[i].name) == 0 &&
                  mesh.axes[i].size == expected[i].size && mesh.axes[i].role == expected[i].role,
              "axis %d is %s=%d, role %d", i, mesh.axes[i].name, mesh.axes[i].size,
              (int)mesh.axes[i].role);
    int32_t ranks = 0;
    CHECK_OK(ep_mesh_ranks(&mesh, &ranks));
    CHECK(ranks == 120, "%d", ranks);
}

static void check_text_refused(const char *text, const char *part) {
    EpMesh mesh = EP_MESH_INIT, before;
    memset(mesh.axes, 0x5a, sizeof(mesh.axes));
    memcpy(&before, &mesh, sizeof(mesh));
    CHECK_REFUSED(ep_mesh_parse(text, &mesh), EP_ERR_RANGE, "ep_mesh_parse", part);
    CHECK(memcmp(&mesh, &before, sizeof(mesh)) == 0, "\"%s\" has changed the output", text);
}

SoloTest(handles_mesh, refuses_text) {
    EpMesh mesh = EP_MESH_INIT;
    check_text_refused("", "a name");
    check_text_refused("data", "'=' and a size, got \"\" in \"data\"");
    check_text_refused("data=", "a size of 1 to 2147483647");
    check_text_refused("data=0", "a size of 1 to 2147483647, got \"0\"");
    check_text_refused("data=-2", "a size of 1 to 2147483647");
    check_text_refused("data=99999999999999999999", "a size of 1 to 2147483647");
    check_text_refused("data=2,", "a name");
    check_text_refused("data=2 3", "',' or the end, got \"3\"");
    check_text_refused("d-p=2", "'=' and a size, got \"-p=2\"");
    check_text_refused("_=2", "a name");
    check_text_refused("a=2,a=3", "each name once, got a twice");
    check_text_refused("a:experts=2", "a role (expert, fsdp, data or other), got \"experts=2\"");
    check_text_refused("a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1,j=1,k=1,l=1,m=1,n=1,o=1,p=1,q=1",
                       "at most 16 axes, got \"\" in \"a=1,");
    check_text_refused("a=65536,b=65536", "at most 2147483647 ranks");
    check_text_refused("abcdefghijklmnopqrstuvwxyzabcdef=2", "at most 31 letters");
    CHECK_REFUSED(ep_mesh_parse(NULL, &mesh), EP_ERR_NULL, "text");
    CHECK_REFUSED(ep_mesh_parse("a=1", NULL), EP_ERR_NULL, "out");
    mesh.struct_size = 8;
    CHECK_REFUSED(ep_mesh_parse("a=1", &mesh), EP_ERR_STRUCT_SIZE, "out");
}

SoloTest(handles_mesh, axes_from_text) {
    EpMesh mesh = mesh_of("data=2,fsdp=2,expert=4");
    EpAxes axes = {1, {7}};
    CHECK_OK(ep_mesh_axes(&mesh, "expert", &axes));
    CHECK(axes.num == 1 && axes.axis[0] == 2, "%d axes", axes.num);
    CHECK_OK(ep_mesh_axes(&mesh, " ( expert , data ) ", &axes));
    CHECK(axes.num == 2 && axes.axis[0] == 2 && axes.axis[1] == 0, "%d axes", axes.num);
    CHECK_OK(ep_mesh_axes(&mesh, "_", &axes));
    CHECK(axes.num == 0, "%d axes", axes.num);
    axes.num = 77;
    CHECK_OK(ep_mesh_axes(&mesh, " ( ) ", &axes));
    CHECK(axes.num == 0, "%d axes", axes.num);
    CHECK_OK(ep_mesh_role_axes(&mesh, EP_AXIS_FSDP, &axes));
    CHECK(axes.num == 1 && axes.axis[0] == 1, "%d axes", axes.num);
    CHECK_OK(ep_mesh_role_axes(&mesh, EP_AXIS_OTHER, &axes));
    CHECK(axes.num == 0, "%d axes", axes.num);
    axes.num = 77;
    CHECK_REFUSED(ep_mesh_axes(&mesh, "tensor", &axes), EP_ERR_RANGE, "ep_mesh_axes",
                  "an axis of the mesh (data, fsdp, expert), got \"tensor\"");
    CHECK_REFUSED(ep_mesh_axes(&mesh, "(data,data)", &axes), EP_ERR_RANGE, "each axis once");
    CHECK_REFUSED(ep_mesh_axes(&mesh, "(data", &axes), EP_ERR_RANGE, "',' or ')'");
    CHECK_REFUSED(ep_mesh_axes(&mesh, "data,fsdp", &axes), EP_ERR_RANGE, "the end");
    CHECK_REFUSED(ep_mesh_role_axes(&mesh, 0, &axes), EP_ERR_RANGE, "role", "got 0");
    CHECK_REFUSED(ep_mesh_role_axes(&mesh, EP_AXIS_DATA, NULL), EP_ERR_NULL, "out");
    CHECK(axes.num == 77, "a refused call has changed the output");
}

/* ---- coordinates and groups ---------------------------------------------------------------- */

enum { MOST_RANKS = 96 };

/* A mesh of up to 96 ranks, and the coordinates of each, by counting. */
typedef struct Whole {
    EpMesh mesh;
    int ranks;
    int32_t grid[MOST_RANKS];
    int32_t at[MOST_RANKS][EP_MESH_MAX_AXES]; /* by rank */
} Whole;

static void count(Whole *w) {
    int32_t digits[EP_MESH_MAX_AXES] = {0};
    for (int position = 0; position < w->ranks; position++) {
        int rank = w->mesh.grid ? w->grid[position] : position;
        memcpy(w->at[rank], digits, sizeof(digits));
        int i = w->mesh.num_axes;
        while (i-- > 0 && ++digits[i] == w->mesh.axes[i].size)
            digits[i] = 0;
    }
}

static void random_mesh(Random *random, Whole *w) {
    *w = (Whole){.mesh = EP_MESH_INIT, .ranks = 1};
    w->mesh.num_axes = 1 + (int32_t)random_below(random, EP_MESH_MAX_AXES);
    for (int i = 0; i < w->mesh.num_axes; i++) {
        EpAxis *axis = &w->mesh.axes[i];
        snprintf(axis->name, sizeof(axis->name), "axis%d", i);
        axis->size = 1 + (int32_t)random_below(random, 4);
        if (w->ranks * axis->size > MOST_RANKS) axis->size = 1;
        axis->role = (EpAxisRole)(1 + random_below(random, 4));
        w->ranks *= axis->size;
    }
    for (int i = 0; i < w->ranks; i++)
        w->grid[i] = i;
    for (int i = w->ranks - 1; i > 0; i--) {
        int j = (int)random_below(random, i + 1);
        int32_t other = w->grid[i];
        w->grid[i] = w->grid[j], w->grid[j] = other;
    }
    if (random_percent(random, 50)) w->mesh.grid = w->grid;
    count(w);
}

static EpAxes random_axes(Random *random, const EpMesh *mesh) {
    EpAxes axes = {0, {0}};
    int32_t from = (int32_t)random_below(random, mesh->num_axes);
    for (int32_t i = 0; i < mesh->num_axes; i++)
        if (random_percent(random, 50))
            axes.axis[axes.num++] = (from + i * (mesh->num_axes - 1)) % mesh->num_axes;
    /* A step of num_axes - 1 goes down by one: all distinct, in no order of the mesh. */
    return axes;
}

static int is_along(const EpAxes *axes, int axis) {
    for (int i = 0; i < axes->num; i++)
        if (axes->axis[i] == axis) return 1;
    return 0;
}

static int same_group(const Whole *w, const EpAxes *axes, int a, int b) {
    for (int i = 0; i < w->mesh.num_axes; i++)
        if (!is_along(axes, i) && w->at[a][i] != w->at[b][i]) return 0;
    return 1;
}

static int is_before(const Whole *w, const EpAxes *axes, int a, int b) {
    for (int i = 0; i < axes->num; i++)
        if (w->at[a][axes->axis[i]] != w->at[b][axes->axis[i]])
            return w->at[a][axes->axis[i]] < w->at[b][axes->axis[i]];
    return 0;
}

static void check_group(const Whole *w, const EpAxes *axes, int rank) {
    int32_t size = -1, place = -1, ranks[MOST_RANKS + 1], members = 0;
    ranks[MOST_RANKS] = -7;
    CHECK_OK(ep_mesh_group(&w->mesh, axes, rank, &size, &place, ranks));
    for (int other = 0; other < w->ranks; other++) {
        if (!same_group(w, axes, rank, other)) continue;
        int expected = 0; /* place of `other`: how many members precede it */
        for (int r = 0; r < w->ranks; r++)
            expected += same_group(w, axes, rank, r) && is_before(w, axes, r, other);
        members++;
        CHECK(ranks[expected] == other, "rank %d: place %d has %d and not %d", rank, expected,
              ranks[expected], other);
        if (other == rank) CHECK(place == expected, "place %d and not %d", place, expected);
    }
    CHECK(size == members && ranks[MOST_RANKS] == -7, "%d ranks and not %d", size, members);
}

SoloTest(handles_mesh, groups_of_random_meshes) {
    enum { SEED = 2011, MESHES = 60 };
    for (int i = 0; i < MESHES; i++) {
        Random random = random_stream(SEED, (uint64_t)i, 0);
        Whole w;
        random_mesh(&random, &w);
        check_note("seed %d, mesh %d of %d ranks", SEED, i, w.ranks);
        EpAxes axes = random_axes(&random, &w.mesh);
        for (int rank = 0; rank < w.ranks; rank++) {
            int32_t at[EP_MESH_MAX_AXES] = {0};
            CHECK_OK(ep_mesh_coordinates(&w.mesh, rank, at));
            CHECK(memcmp(at, w.at[rank], sizeof(at)) == 0, "coordinates of rank %d", rank);
            check_group(&w, &axes, rank);
        }
    }
}

SoloTest(handles_mesh, sizes_of_one) {
    EpMesh mesh = mesh_of("data=1,expert=4,fsdp=1");
    EpAxes axes;
    int32_t size, place, ranks[4] = {9, 9, 9, 9};
    CHECK_OK(ep_mesh_axes(&mesh, "(fsdp,data)", &axes));
    CHECK_OK(ep_mesh_group(&mesh, &axes, 3, &size, &place, ranks));
    CHECK(size == 1 && place == 0 && ranks[0] == 3 && ranks[1] == 9, "%d ranks", size);
    CHECK_OK(ep_mesh_axes(&mesh, "_", &axes));
    CHECK_OK(ep_mesh_group(&mesh, &axes, 2, &size, &place, NULL));
    CHECK(size == 1 && place == 0, "%d ranks", size);
    CHECK_OK(ep_mesh_group(&mesh, &axes, 2, NULL, NULL, NULL));
}

/* Millions of ranks need no memory. */
SoloTest(handles_mesh, large) {
    EpMesh mesh = mesh_of("data=1024,fsdp=1024,expert=1024");
    EpAxes expert;
    int32_t at[3], size, place, ranks[1024];
    CHECK_OK(ep_mesh_role_axes(&mesh, EP_AXIS_EXPERT, &expert));
    CHECK_OK(ep_mesh_coordinates(&mesh, (1 << 30) - 1, at));
    CHECK(at[0] == 1023 && at[1] == 1023 && at[2] == 1023, "%d %d %d", at[0], at[1], at[2]);
    CHECK_OK(ep_mesh_group(&mesh, &expert, (1 << 20) * 3 + 5, &size, &place, ranks));
    CHECK(size == 1024 && place == 5 && ranks[1023] == (1 << 20) * 3 + 1023, "%d", ranks[1023]);
}

/* ---- bad input ----------------------------------------------------------------------------- */

static void check_mesh_refused(const EpMesh *mesh, const char *part) {
    int32_t ranks = -5;
    CHECK_REFUSED(ep_mesh_ranks(mesh, &ranks), EP_ERR_RANGE, "ep_mesh_ranks: mesh", part);
    CHECK(ranks == -5, "a refused call has changed the output");
}

SoloTest(handles_mesh, refuses_meshes) {
    EpMesh good = mesh_of("data=2,expert=2"), mesh = good;
    int32_t grid[4] = {3, 1, 0, 3}, ranks = -5;
    mesh.num_axes = 0;
    check_mesh_refused(&mesh, "1 .. 16 axes, got 0");
    mesh.num_axes = 17;
    check_mesh_refused(&mesh, "got 17");
    mesh = good, mesh.axes[1].size = 0;
    check_mesh_refused(&mesh, "a size of at least 1 for expert, got 0");
    mesh = good, mesh.axes[1].role = 5;
    check_mesh_refused(&mesh, "an EpAxisRole for expert, got 5");
    mesh = good, memset(mesh.axes[0].name, 'x', sizeof(mesh.axes[0].name));
    check_mesh_refused(&mesh, "1 .. 31 letters");
    mesh = good, strcpy(mesh.axes[0].name, "a b");
    check_mesh_refused(&mesh, "got \"a b\"");
    mesh = good, mesh.grid = grid;
    check_mesh_refused(&mesh, "each rank once, got 3 again at position 3");
    grid[3] = 4;
    check_mesh_refused(&mesh, "ranks 0 .. 3, got 4 at position 3");
    grid[3] = -1;
    check_mesh_refused(&mesh, "got -1 at position 3");
    mesh = good, mesh.struct_size = 4;
    CHECK_REFUSED(ep_mesh_ranks(&mesh, &ranks), EP_ERR_STRUCT_SIZE, "mesh");
    CHECK_REFUSED(ep_mesh_ranks(NULL, &ranks), EP_ERR_NULL, "mesh");
    CHECK_REFUSED(ep_mesh_ranks(&good, NULL), EP_ERR_NULL, "ranks");
}

SoloTest(handles_mesh, refuses_axes_and_ranks) {
    EpMesh mesh = mesh_of("data=2,expert=2");
    int32_t out[2] = {-5, -5};
    const EpAxes unknown = {1, {2}}, twice = {2, {1, 1}}, many = {17, {0}}, none = {0, {0}};
    CHECK_REFUSED(ep_mesh_group(&mesh, &unknown, 0, out, out, out), EP_ERR_RANGE, "axes",
                  "0 .. 1, got 2");
    CHECK_REFUSED(ep_mesh_group(&mesh, &twice, 0, out, out, out), EP_ERR_RANGE, "axes",
                  "got expert twice");
    CHECK_REFUSED(ep_mesh_group(&mesh, &many, 0, out, out, out), EP_ERR_RANGE, "axes", "got 17");
    CHECK_REFUSED(ep_mesh_group(&mesh, NULL, 0, out, out, out), EP_ERR_NULL, "axes");
    CHECK_REFUSED(ep_mesh_group(&mesh, &none, 4, out, out, out), EP_ERR_RANGE, "rank",
                  "0 .. 3, got 4");
    CHECK_REFUSED(ep_mesh_coordinates(&mesh, -1, out), EP_ERR_RANGE, "rank", "got -1");
    CHECK_REFUSED(ep_mesh_coordinates(&mesh, 0, NULL), EP_ERR_NULL, "coordinates");
    CHECK(out[0] == -5 && out[1] == -5, "a refused call has changed an output");
}
