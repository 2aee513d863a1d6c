/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/info/mesh.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep/ep_mesh.h"
#include "tools/common/util.h"

enum { SHOWN_RANKS = 16, SHARD = 128 };

static bool refuse(const char *option, const char *expected, const char *got) {
    bench_refuse("%s: expected %s, got \"%s\"", option, expected, got);
    return false;
}

/* What the library refuses in a mesh or a spec is a request of the user's. */
static bool accepted(EpStatus status) {
    return status == EP_OK || bench_refuse("%s", ep_last_error());
}

/* ---- options ------------------------------------------------------------------------------- */

/* Read a number that ends at `end`. Returns what follows it, or NULL. */
static const char *read_number(const char *text, char end, int64_t *out) {
    char *rest;
    errno = 0;
    *out = strtoll(text, &rest, 10);
    if (rest == text || errno || *out < 0 || (*rest && *rest != end)) return NULL;
    return rest;
}

static bool read_rank(const char *text, int64_t *rank) {
    *rank = 0;
    if (!text || (read_number(text, 0, rank) && *rank <= INT32_MAX)) return true;
    return refuse("--rank", "a rank of the mesh", text);
}

static bool read_kind(const char *text, EpTensorKind *kind, const char **words) {
    static const struct {
        const char *name;
        EpTensorKind kind;
        const char *words;
    } kinds[] = {{"weight", EP_TENSOR_WEIGHT, "a weight outside the experts"},
                 {"expert-weight", EP_TENSOR_EXPERT_WEIGHT, "a weight of the experts"},
                 {"activation", EP_TENSOR_ACTIVATION, "an activation"}};
    for (int i = 0; i < 3; i++) {
        if (text && strcmp(text, kinds[i].name) != 0) continue;
        *kind = kinds[i].kind, *words = kinds[i].words;
        return true;
    }
    return refuse("--kind", "weight, expert-weight or activation", text);
}

/* Without --shape, each shard has the same small size. */
static bool choose_shape(const EpMesh *mesh, const EpSpec *spec, int64_t *shape) {
    for (int d = 0; d < spec->ndim; d++) {
        int32_t ranks;
        if (!accepted(ep_mesh_group(mesh, &spec->dims[d], 0, &ranks, NULL, NULL))) return false;
        shape[d] = (int64_t)ranks * SHARD;
    }
    return true;
}

static bool read_shape(const char *text, int32_t ndim, int64_t *shape) {
    char expected[64];
    const char *at = text;
    int32_t d = 0;
    while (at && d < ndim && (at = read_number(at, ',', &shape[d])) != NULL) {
        d++;
        if (!*at) break;
        at++;
    }
    if (at && !*at && d == ndim) return true;
    snprintf(expected, sizeof(expected), "a number for each of the %d dimensions", ndim);
    return refuse("--shape", expected, text);
}

/* ---- the mesh ------------------------------------------------------------------------------ */

static const char *role_name(EpAxisRole role) {
    switch (role) {
    case EP_AXIS_EXPERT:
        return "expert";
    case EP_AXIS_FSDP:
        return "fsdp";
    case EP_AXIS_DATA:
        return "data";
    default:
        return "other";
    }
}

static bool print_group(const EpMesh *mesh, const EpAxes *axes, const char *what, int32_t rank) {
    int32_t size, place;
    if (!accepted(ep_mesh_group(mesh, axes, rank, &size, &place, NULL))) return false;
    int32_t *ranks = calloc((size_t)size, sizeof(*ranks));
    bool ok = ranks && accepted(ep_mesh_group(mesh, axes, rank, NULL, NULL, ranks));
    if (ok) printf("  %-24s %d of %d:", what, place, size);
    for (int32_t i = 0; ok && i < size && i < SHOWN_RANKS; i++)
        printf(" %d", ranks[i]);
    if (ok) printf("%s\n", size > SHOWN_RANKS ? " ..." : "");
    free(ranks);
    return ok;
}

static bool print_groups(const EpMesh *mesh, int32_t rank) {
    EpAxes expert;
    printf("\ngroups of rank %d: place, size and ranks\n", rank);
    for (int32_t i = 0; i < mesh->num_axes; i++) {
        EpAxes one = {1, {i}};
        if (!print_group(mesh, &one, mesh->axes[i].name, rank)) return false;
    }
    return accepted(ep_mesh_role_axes(mesh, EP_AXIS_EXPERT, &expert)) &&
           print_group(mesh, &expert, "the EP group", rank);
}

static bool print_axes(const EpMesh *mesh, int32_t rank) {
    int32_t ranks, at[EP_MESH_MAX_AXES];
    if (!accepted(ep_mesh_ranks(mesh, &ranks)) || !accepted(ep_mesh_coordinates(mesh, rank, at)))
        return false;
    printf("mesh: %d ranks\n  %-24s %-8s %8s %10s %d\n", ranks, "axis", "role", "size", "rank",
           rank);
    for (int32_t i = 0; i < mesh->num_axes; i++)
        printf("  %-24s %-8s %8d %12d\n", mesh->axes[i].name, role_name(mesh->axes[i].role),
               mesh->axes[i].size, at[i]);
    return true;
}

/* ---- a tensor ------------------------------------------------------------------------------ */

static bool print_tensor(const EpMesh *mesh, const MeshOptions *o) {
    EpSpec spec = EP_SPEC_INIT;
    EpSharding sharding = EP_SHARDING_INIT;
    EpTensorKind kind;
    int64_t shape[EP_SPEC_MAX_DIMS];
    char text[512], lines[4096];
    const char *words;
    bool ok =
        accepted(ep_spec_parse(mesh, o->spec, &spec)) && read_kind(o->kind, &kind, &words) &&
        (o->shape ? read_shape(o->shape, spec.ndim, shape) : choose_shape(mesh, &spec, shape)) &&
        accepted(ep_sharding(mesh, &spec, kind, "the tensor", shape, &sharding)) &&
        accepted(ep_spec_format(mesh, &spec, text, sizeof(text))) &&
        accepted(ep_sharding_format(mesh, &sharding, lines, sizeof(lines)));
    if (!ok) return false;
    printf("\n%s as %s, [", text, words);
    for (int32_t d = 0; d < spec.ndim; d++)
        printf("%s%lld", d ? ", " : "", (long long)shape[d]);
    printf("]\n");
    for (const char *line = strtok(lines, "\n"); line; line = strtok(NULL, "\n"))
        printf("  %s\n", line);
    return true;
}

bool print_mesh(const MeshOptions *o) {
    EpMesh mesh = EP_MESH_INIT;
    int64_t rank;
    if (!o->mesh) return refuse("--spec, --kind, --shape and --rank", "them with --mesh", "none");
    if (!o->spec && (o->kind || o->shape))
        return refuse("--kind and --shape", "them with --spec", "none");
    return read_rank(o->rank, &rank) && accepted(ep_mesh_parse(o->mesh, &mesh)) &&
           print_axes(&mesh, (int32_t)rank) && print_groups(&mesh, (int32_t)rank) &&
           (!o->spec || print_tensor(&mesh, o));
}
