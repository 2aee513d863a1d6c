/* SPDX-License-Identifier: Apache-2.0 */
/* The bootstrap of a group of a mesh: its ranks, as the mesh gives them, of the bootstrap of all.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/subset.h"
#include "handles/mesh/mesh.h"

/* ---- agreement ----------------------------------------------------------------------------- */

/* What each rank tells all others. */
typedef struct MeshHello {
    EpRankStatus status;
    EpAxes along;
    int32_t num_axes;
    EpAxis axes[EP_MESH_MAX_AXES];
    uint64_t grid;  /* digest */
    int32_t number; /* of this bootstrap; rank 0's counts */
} MeshHello;

static uint64_t digest_grid(const EpMesh *mesh, int32_t ranks) {
    uint64_t digest = 0xcbf29ce484222325u;
    for (int32_t i = 0; i < ranks; i++)
        digest = (digest ^ (uint64_t)(mesh->grid ? mesh->grid[i] : i)) * 0x100000001b3u;
    return digest;
}

/* Check this rank's own arguments, and find its group. `self` is NULL when out of memory, which
 * ranks tell each other first. */
static EpStatus check_own(const EpCall *call, const EpBootstrap *world, const EpMesh *given,
                          const EpAxes *along, const EpBootstrap *out, EpMesh *mesh,
                          EpSubset *self) {
    int32_t ranks;
    EP_TRY(ep_mesh_read(call, given, mesh));
    EP_TRY(ep_axes_check(call, mesh, "axes", along));
    EP_TRY(ep_check_struct(call, "out", out, sizeof(*out)));
    EP_TRY(ep_mesh_ranks(mesh, &ranks));
    if (ranks != world->size)
        return ep_refuse(call, EP_ERR_RANGE, "mesh",
                         "expected a mesh of the %d ranks of world, got %d", world->size, ranks);
    if (!self) return EP_OK;
    return ep_mesh_group(mesh, along, world->rank, &self->size, &self->rank, self->ranks);
}

static MeshHello describe(EpStatus status, const EpMesh *mesh, const EpAxes *along) {
    static _Atomic int32_t made; /* relaxed: only the number counts */
    MeshHello hello;
    memset(&hello, 0, sizeof(hello));
    hello.status = ep_rank_status(status);
    hello.number = atomic_fetch_add_explicit(&made, 1, memory_order_relaxed);
    if (status != EP_OK) return hello;
    EpAxes none = {.num = 0};
    int32_t ranks = 1;
    hello.along = none, hello.num_axes = mesh->num_axes;
    for (int32_t i = 0; i < along->num; i++)
        ep_axes_add(&hello.along, along->axis[i]);
    for (int32_t i = 0; i < mesh->num_axes; i++) {
        strcpy(hello.axes[i].name, mesh->axes[i].name);
        hello.axes[i].size = mesh->axes[i].size, hello.axes[i].role = mesh->axes[i].role;
        ranks *= mesh->axes[i].size;
    }
    hello.grid = digest_grid(mesh, ranks);
    return hello;
}

static EpStatus mismatch(const EpCall *call, const char *what, int32_t rank) {
    return ep_refuse(call, EP_ERR_MISMATCH, what,
                     "expected the same on all ranks, got others on rank %d than on rank 0", rank);
}

static EpStatus compare_axes(const EpCall *call, const MeshHello *first, const MeshHello *other,
                             int32_t rank) {
    if (other->num_axes != first->num_axes)
        return ep_refuse(call, EP_ERR_MISMATCH, "mesh.num_axes",
                         "expected one value on all ranks, got %d on rank 0 and %d on rank %d",
                         first->num_axes, other->num_axes, rank);
    for (int32_t i = 0; i < first->num_axes; i++) {
        const EpAxis *a = &first->axes[i], *b = &other->axes[i];
        if (strncmp(a->name, b->name, sizeof(a->name)) == 0 && a->size == b->size &&
            a->role == b->role)
            continue;
        return ep_refuse(call, EP_ERR_MISMATCH, "mesh.axes",
                         "expected one axis %d on all ranks, got %s=%d on rank 0 and %.31s=%d on "
                         "rank %d%s",
                         i, a->name, a->size, b->name, b->size, rank,
                         a->role != b->role ? ", of another role" : "");
    }
    return EP_OK;
}

static EpStatus compare(const EpCall *call, const EpBootstrap *world, const MeshHello *all) {
    int32_t size = world->size;
    EP_TRY(ep_rank_status_check(call, world, all, sizeof(*all)));
    for (int32_t r = 1; r < size; r++) {
        EP_TRY(compare_axes(call, &all[0], &all[r], r));
        if (all[r].grid != all[0].grid) return mismatch(call, "mesh.grid", r);
        if (memcmp(&all[r].along, &all[0].along, sizeof(all->along)) != 0)
            return mismatch(call, "axes", r);
    }
    return EP_OK;
}

/* ---- making it ------------------------------------------------------------------------------ */

/* Gather the hellos, and compare them. */
static EpStatus agree(const EpCall *call, const EpBootstrap *world, const MeshHello *mine,
                      MeshHello *all, double timeout) {
    EP_TRY(ep_bootstrap_gather(world, mine, all, sizeof(*mine), timeout));
    for (int32_t r = 0; r < world->size; r++)
        all[r].status.sentence[sizeof(all->status.sentence) - 1] = 0;
    return compare(call, world, all);
}

/* Where a rank has what it needs before the ranks meet, nothing can fail on it alone afterwards. */
EpStatus ep_bootstrap_mesh_within(const EpBootstrap *world, const EpMesh *given, const EpAxes *axes,
                                  double timeout, EpBootstrap *out) {
    EpCall call = {"ep_bootstrap_mesh", -1};
    EpMesh mesh = EP_MESH_INIT;
    EpBootstrap made = EP_BOOTSTRAP_INIT;
    EP_TRY(ep_bootstrap_check(&call, world));
    call.rank = world->rank;
    EpSubset *self = ep_subset_create(world);
    MeshHello mine = describe(check_own(&call, world, given, axes, out, &mesh, self), &mesh, axes);
    MeshHello *all = calloc((size_t)world->size, sizeof(*all));
    int has_memory = all && self && ep_bootstrap_reserve(world, sizeof(*all)) &&
                     (mine.status.status != EP_OK || ep_subset_reserve(self, EP_RESERVED_BYTES));
    EpStatus status = ep_bootstrap_enter(&call, world, EP_ENTER_MESH, has_memory, timeout);
    if (status == EP_OK) status = agree(&call, world, &mine, all, timeout);
    if (status == EP_OK) made = ep_subset_bootstrap(self, all[0].number);
    free(all);
    (void)ep_bootstrap_reserve(world, EP_RESERVED_BYTES);
    if (status != EP_OK) {
        ep_subset_free(self);
        return status;
    }
    *out = made;
    return EP_OK;
}

EpStatus ep_bootstrap_mesh(const EpBootstrap *world, const EpMesh *mesh, const EpAxes *axes,
                           EpBootstrap *out) {
    EpSettings settings = {.timeout = EP_FALLBACK_TIMEOUT};
    (void)ep_settings_load(&settings);
    return ep_bootstrap_mesh_within(world, mesh, axes, settings.timeout, out);
}
