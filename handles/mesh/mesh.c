/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/mesh/mesh.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_MESH EP_FIRST_SIZE(EpMesh, grid)

/* ---- checks -------------------------------------------------------------------------------- */

const char *ep_axis_role_name(EpAxisRole role) {
    static const char *const names[] = {NULL, "other", "data", "fsdp", "expert"};
    return role >= EP_AXIS_OTHER && role <= EP_AXIS_EXPERT ? names[role] : NULL;
}

static int is_name(const char name[EP_AXIS_NAME_BYTES]) {
    size_t length = strnlen(name, EP_AXIS_NAME_BYTES);
    if (!length || length == EP_AXIS_NAME_BYTES || strcmp(name, "_") == 0) return 0;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '_') return 0;
    return 1;
}

static EpStatus check_axis(const EpCall *call, const EpMesh *mesh, int32_t at) {
    const EpAxis *axis = &mesh->axes[at];
    if (!is_name(axis->name))
        return ep_refuse(call, EP_ERR_RANGE, "mesh",
                         "expected a name of 1 .. %d letters, digits and '_' for axis %d, got "
                         "\"%.*s\"",
                         EP_AXIS_NAME_BYTES - 1, at, EP_AXIS_NAME_BYTES, axis->name);
    if (axis->size < 1)
        return ep_refuse(call, EP_ERR_RANGE, "mesh", "expected a size of at least 1 for %s, got %d",
                         axis->name, axis->size);
    if (!ep_axis_role_name(axis->role))
        return ep_refuse(call, EP_ERR_RANGE, "mesh", "expected an EpAxisRole for %s, got %d",
                         axis->name, (int)axis->role);
    for (int32_t other = 0; other < at; other++)
        if (strcmp(mesh->axes[other].name, axis->name) == 0)
            return ep_refuse(call, EP_ERR_RANGE, "mesh", "expected each name once, got %s twice",
                             axis->name);
    return EP_OK;
}

static EpStatus check_product(const EpCall *call, const EpMesh *mesh) {
    int64_t ranks = 1;
    for (int32_t i = 0; i < mesh->num_axes; i++)
        if ((ranks *= mesh->axes[i].size) > INT32_MAX)
            return ep_refuse(call, EP_ERR_RANGE, "mesh", "expected at most %d ranks, got more",
                             INT32_MAX);
    return EP_OK;
}

static EpStatus check_grid(const EpCall *call, const EpMesh *mesh) {
    if (!mesh->grid) return EP_OK;
    EpMesh row_major = *mesh;
    int32_t ranks;
    row_major.grid = NULL;
    EP_TRY(ep_mesh_ranks(&row_major, &ranks));
    char *seen = calloc((size_t)ranks, 1);
    if (!seen) return ep_refuse(call, EP_ERR_NO_MEMORY, "mesh.grid", "out of memory");
    EpStatus status = EP_OK;
    for (int32_t at = 0; at < ranks && status == EP_OK; at++) {
        int32_t rank = mesh->grid[at];
        if (rank < 0 || rank >= ranks)
            status =
                ep_refuse(call, EP_ERR_RANGE, "mesh.grid",
                          "expected ranks 0 .. %d, got %d at position %d", ranks - 1, rank, at);
        else if (seen[rank]++)
            status = ep_refuse(call, EP_ERR_RANGE, "mesh.grid",
                               "expected each rank once, got %d again at position %d", rank, at);
    }
    free(seen);
    return status;
}

EpStatus ep_mesh_read(const EpCall *call, const EpMesh *given, EpMesh *out) {
    EpMesh mesh = EP_MESH_INIT;
    EP_TRY(ep_read_struct(call, "mesh", given, FIRST_MESH, &mesh));
    if (mesh.num_axes < 1 || mesh.num_axes > EP_MESH_MAX_AXES)
        return ep_refuse(call, EP_ERR_RANGE, "mesh", "expected 1 .. %d axes, got %d",
                         EP_MESH_MAX_AXES, mesh.num_axes);
    for (int32_t i = 0; i < mesh.num_axes; i++)
        EP_TRY(check_axis(call, &mesh, i));
    EP_TRY(check_product(call, &mesh));
    EP_TRY(check_grid(call, &mesh));
    *out = mesh;
    return EP_OK;
}

int ep_axes_have(const EpAxes *axes, int32_t axis) {
    for (int32_t i = 0; i < axes->num; i++)
        if (axes->axis[i] == axis) return 1;
    return 0;
}

void ep_axes_add(EpAxes *axes, int32_t axis) {
    axes->axis[axes->num++] = axis;
}

EpStatus ep_axes_check(const EpCall *call, const EpMesh *mesh, const char *argument,
                       const EpAxes *axes) {
    EpAxes seen = {.num = 0};
    if (!axes) return ep_refuse(call, EP_ERR_NULL, argument, "expected a pointer, got NULL");
    if (axes->num < 0 || axes->num > EP_MESH_MAX_AXES)
        return ep_refuse(call, EP_ERR_RANGE, argument, "expected 0 .. %d axes, got %d",
                         EP_MESH_MAX_AXES, axes->num);
    for (int32_t i = 0; i < axes->num; i++) {
        int32_t axis = axes->axis[i];
        if (axis < 0 || axis >= mesh->num_axes)
            return ep_refuse(call, EP_ERR_RANGE, argument,
                             "expected axes of the mesh, 0 .. %d, got %d", mesh->num_axes - 1,
                             axis);
        if (ep_axes_have(&seen, axis))
            return ep_refuse(call, EP_ERR_RANGE, argument, "expected each axis once, got %s twice",
                             mesh->axes[axis].name);
        ep_axes_add(&seen, axis);
    }
    return EP_OK;
}

EpStatus ep_spec_read(const EpCall *call, const EpMesh *mesh, const char *tensor,
                      const EpSpec *given, EpSpec *out) {
    EpSpec spec = EP_SPEC_INIT;
    int32_t dimension_of[EP_MESH_MAX_AXES];
    EP_TRY(ep_read_struct(call, tensor, given, EP_FIRST_SIZE(EpSpec, dims), &spec));
    if (spec.ndim < 1 || spec.ndim > EP_SPEC_MAX_DIMS)
        return ep_refuse(call, EP_ERR_NDIM, tensor, "expected 1 .. %d dimensions, got %d",
                         EP_SPEC_MAX_DIMS, spec.ndim);
    for (int32_t i = 0; i < mesh->num_axes; i++)
        dimension_of[i] = -1;
    for (int32_t d = 0; d < spec.ndim; d++) {
        EP_TRY(ep_axes_check(call, mesh, tensor, &spec.dims[d]));
        for (int32_t i = 0; i < spec.dims[d].num; i++) {
            int32_t axis = spec.dims[d].axis[i];
            if (dimension_of[axis] >= 0)
                return ep_refuse(call, EP_ERR_RANGE, tensor,
                                 "expected each axis once, got %s in dimensions %d and %d",
                                 mesh->axes[axis].name, dimension_of[axis], d);
            dimension_of[axis] = d;
        }
    }
    *out = spec;
    return EP_OK;
}

/* ---- places -------------------------------------------------------------------------------- */

int32_t ep_axes_ranks(const EpMesh *mesh, const EpAxes *axes) {
    int32_t ranks = 1;
    for (int32_t i = 0; i < axes->num; i++)
        ranks *= mesh->axes[axes->axis[i]].size;
    return ranks;
}

int32_t ep_axes_place(const EpMesh *mesh, const EpAxes *axes, const int32_t *coordinates) {
    int32_t place = 0;
    for (int32_t i = 0; i < axes->num; i++)
        place = place * mesh->axes[axes->axis[i]].size + coordinates[axes->axis[i]];
    return place;
}

static EpAxes all_axes(const EpMesh *mesh) {
    EpAxes all = {.num = 0};
    for (int32_t i = 0; i < mesh->num_axes; i++)
        ep_axes_add(&all, i);
    return all;
}

/* Set the coordinates along `axes` to those of the place. */
static void set_place(const EpMesh *mesh, const EpAxes *axes, int32_t place, int32_t *coordinates) {
    for (int32_t i = axes->num - 1; i >= 0; i--) {
        int32_t size = mesh->axes[axes->axis[i]].size;
        coordinates[axes->axis[i]] = place % size;
        place /= size;
    }
}

void ep_mesh_locate(const EpMesh *mesh, int32_t rank, int32_t *coordinates) {
    EpAxes all = all_axes(mesh);
    int32_t position = rank;
    for (int32_t at = 0; mesh->grid && at < ep_axes_ranks(mesh, &all); at++)
        if (mesh->grid[at] == rank) position = at;
    set_place(mesh, &all, position, coordinates);
}

static EpStatus check_rank(const EpCall *call, const EpMesh *mesh, int32_t rank) {
    EpAxes all = all_axes(mesh);
    int32_t ranks = ep_axes_ranks(mesh, &all);
    if (rank >= 0 && rank < ranks) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "rank", "expected 0 .. %d, got %d", ranks - 1, rank);
}

/* ---- calls --------------------------------------------------------------------------------- */

static EpStatus expect_output(const EpCall *call, const char *argument, const void *out) {
    if (out) return EP_OK;
    return ep_refuse(call, EP_ERR_NULL, argument, "expected a pointer, got NULL");
}

EpStatus ep_mesh_ranks(const EpMesh *given, int32_t *ranks) {
    EpCall call = {"ep_mesh_ranks", -1};
    EpMesh mesh;
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(expect_output(&call, "ranks", ranks));
    EpAxes all = all_axes(&mesh);
    *ranks = ep_axes_ranks(&mesh, &all);
    return EP_OK;
}

EpStatus ep_mesh_role_axes(const EpMesh *given, EpAxisRole role, EpAxes *out) {
    EpCall call = {"ep_mesh_role_axes", -1};
    EpMesh mesh;
    EpAxes axes = {.num = 0};
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(expect_output(&call, "out", out));
    if (!ep_axis_role_name(role))
        return ep_refuse(&call, EP_ERR_RANGE, "role", "expected an EpAxisRole, got %d", (int)role);
    for (int32_t i = 0; i < mesh.num_axes; i++)
        if (mesh.axes[i].role == role) ep_axes_add(&axes, i);
    *out = axes;
    return EP_OK;
}

EpStatus ep_mesh_coordinates(const EpMesh *given, int32_t rank, int32_t *coordinates) {
    EpCall call = {"ep_mesh_coordinates", -1};
    EpMesh mesh;
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(check_rank(&call, &mesh, rank));
    EP_TRY(expect_output(&call, "coordinates", coordinates));
    ep_mesh_locate(&mesh, rank, coordinates);
    return EP_OK;
}

EpStatus ep_mesh_group(const EpMesh *given, const EpAxes *axes, int32_t rank, int32_t *size,
                       int32_t *place, int32_t *ranks) {
    EpCall call = {"ep_mesh_group", -1};
    EpMesh mesh;
    int32_t coordinates[EP_MESH_MAX_AXES];
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(ep_axes_check(&call, &mesh, "axes", axes));
    EP_TRY(check_rank(&call, &mesh, rank));
    EpAxes all = all_axes(&mesh);
    int32_t count = ep_axes_ranks(&mesh, axes);
    ep_mesh_locate(&mesh, rank, coordinates);
    if (size) *size = count;
    if (place) *place = ep_axes_place(&mesh, axes, coordinates);
    for (int32_t at = 0; ranks && at < count; at++) {
        set_place(&mesh, axes, at, coordinates);
        int32_t position = ep_axes_place(&mesh, &all, coordinates);
        ranks[at] = mesh.grid ? mesh.grid[position] : position;
    }
    return EP_OK;
}
