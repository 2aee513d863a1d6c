/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "handles/mesh/mesh.h"

/* ---- specs --------------------------------------------------------------------------------- */

/* Check that dimension d divides by its axes, and give a rank's part. */
static EpStatus divide(const EpCall *call, const EpMesh *mesh, const char *tensor,
                       const EpAxes *axes, int32_t d, int64_t elements, int64_t *part) {
    char names[EP_AXES_TEXT_BYTES];
    int32_t ranks = ep_axes_ranks(mesh, axes);
    if (elements < 0)
        return ep_refuse(call, EP_ERR_RANGE, tensor,
                         "expected at least 0 elements in dimension %d, got %lld", d,
                         (long long)elements);
    if (elements % ranks)
        return ep_refuse(call, EP_ERR_SHAPE, tensor,
                         "expected a multiple of the %d ranks of %s in dimension %d, got %lld",
                         ranks, ep_axes_text(mesh, axes, names), d, (long long)elements);
    *part = elements / ranks;
    return EP_OK;
}

static EpStatus divide_all(const EpCall *call, const EpMesh *mesh, const char *tensor,
                           const EpSpec *spec, const int64_t *shape, int64_t *parts) {
    if (!shape) return ep_refuse(call, EP_ERR_NULL, "shape", "expected a pointer, got NULL");
    for (int32_t d = 0; d < spec->ndim; d++)
        EP_TRY(divide(call, mesh, tensor, &spec->dims[d], d, shape[d], &parts[d]));
    return EP_OK;
}

EpStatus ep_spec_shard(const EpMesh *given, const EpSpec *given_spec, const char *tensor,
                       const int64_t *shape, int32_t rank, int64_t *begin, int64_t *local) {
    EpCall call = {"ep_spec_shard", -1};
    EpMesh mesh;
    EpSpec spec;
    int32_t coordinates[EP_MESH_MAX_AXES], ranks;
    int64_t parts[EP_SPEC_MAX_DIMS];
    if (!tensor) tensor = "spec";
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(ep_spec_read(&call, &mesh, tensor, given_spec, &spec));
    EP_TRY(divide_all(&call, &mesh, tensor, &spec, shape, parts));
    EP_TRY(ep_mesh_ranks(&mesh, &ranks));
    if (rank < 0 || rank >= ranks)
        return ep_refuse(&call, EP_ERR_RANGE, "rank", "expected 0 .. %d, got %d", ranks - 1, rank);
    ep_mesh_locate(&mesh, rank, coordinates);
    for (int32_t d = 0; d < spec.ndim; d++) {
        if (begin) begin[d] = ep_axes_place(&mesh, &spec.dims[d], coordinates) * parts[d];
        if (local) local[d] = parts[d];
    }
    return EP_OK;
}

/* ---- what may shard a dimension ------------------------------------------------------------ */

/* A dimension of a tensor, which the next functions check and divide. */
typedef struct Dimension {
    const EpCall *call;
    const EpMesh *mesh;
    const char *tensor;
    int32_t number;
    const EpAxes *axes;
    EpAxes *gathered, *kept;
} Dimension;

static EpAxisRole role_of(const Dimension *d, int32_t at) {
    return d->mesh->axes[d->axes->axis[at]].role;
}

static int has_role(const Dimension *d, EpAxisRole role) {
    for (int32_t i = 0; i < d->axes->num; i++)
        if (role_of(d, i) == role) return 1;
    return 0;
}

static EpStatus unsupported(const Dimension *d, const char *what, const char *why) {
    char names[EP_AXES_TEXT_BYTES];
    return ep_refuse(d->call, EP_ERR_UNSUPPORTED, d->tensor,
                     "expected dimension %d to have %s, got %s: %s", d->number, what,
                     ep_axes_text(d->mesh, d->axes, names), why);
}

static EpStatus refuse_mixed(const Dimension *d) {
    return unsupported(d, "fsdp axes without axes of role other",
                       "a dimension is gathered for use or stays sharded, not both");
}

/* Outside the experts: an fsdp axis makes all axes of its dimension serve as fsdp axes. */
static EpStatus divide_weight(const Dimension *d) {
    int gathers = has_role(d, EP_AXIS_FSDP);
    if (gathers && has_role(d, EP_AXIS_OTHER)) return refuse_mixed(d);
    if (!gathers && has_role(d, EP_AXIS_DATA))
        return unsupported(d, "no data axes without an fsdp axis",
                           "ranks of a data axis have the same weights");
    *(gathers ? d->gathered : d->kept) = *d->axes;
    return EP_OK;
}

/* The experts' dimension: all expert axes, in the mesh's order, which is that of the EP group; then
 * perhaps fsdp axes. */
static EpStatus divide_experts(const Dimension *d) {
    int32_t at = 0;
    for (int32_t axis = 0; axis < d->mesh->num_axes; axis++) {
        if (d->mesh->axes[axis].role != EP_AXIS_EXPERT) continue;
        if (at >= d->axes->num || d->axes->axis[at] != axis)
            return unsupported(d, "all expert axes first, in the mesh's order",
                               "a rank's experts are contiguous");
        ep_axes_add(d->kept, axis);
        at++;
    }
    for (; at < d->axes->num; at++) {
        if (role_of(d, at) != EP_AXIS_FSDP)
            return unsupported(d, "expert axes and then fsdp axes",
                               "other axes cannot shard the experts");
        ep_axes_add(d->gathered, d->axes->axis[at]);
    }
    return EP_OK;
}

static EpStatus divide_expert_weight(const Dimension *d) {
    if (d->number == 0) return divide_experts(d);
    if (has_role(d, EP_AXIS_EXPERT))
        return unsupported(d, "no expert axes", "they shard dimension 0, the experts");
    if (has_role(d, EP_AXIS_DATA))
        return unsupported(d, "no data axes", "ranks of a data axis have the same weights");
    if (has_role(d, EP_AXIS_FSDP) && has_role(d, EP_AXIS_OTHER)) return refuse_mixed(d);
    *(has_role(d, EP_AXIS_FSDP) ? d->gathered : d->kept) = *d->axes;
    return EP_OK;
}

static EpStatus divide_activation(const Dimension *d) {
    *d->kept = *d->axes;
    return EP_OK;
}

/* ---- what happens to the tensor ------------------------------------------------------------ */

static void add_unless_there(EpAxes *axes, int32_t axis) {
    if (!ep_axes_have(axes, axis)) ep_axes_add(axes, axis);
}

static EpAxes axes_of_spec(const EpSpec *spec) {
    EpAxes all = {.num = 0};
    for (int32_t d = 0; d < spec->ndim; d++)
        for (int32_t i = 0; i < spec->dims[d].num; i++)
            ep_axes_add(&all, spec->dims[d].axis[i]);
    return all;
}

/* Ranks along these axes have other tokens, so each of them has a part of the gradient's sum.
 * Tokens come to expert weights from all ranks of an expert axis: there dispatch has done that. */
static int adds_to_gradient(EpAxisRole role, EpTensorKind kind) {
    if (kind == EP_TENSOR_ACTIVATION) return 0;
    if (role == EP_AXIS_EXPERT) return kind == EP_TENSOR_WEIGHT;
    return role != EP_AXIS_OTHER;
}

static void describe_reductions(const EpMesh *mesh, const EpSpec *spec, EpTensorKind kind,
                                EpSharding *s) {
    EpAxes sharding = axes_of_spec(spec);
    for (int32_t d = 0; d < s->ndim; d++)
        for (int32_t i = 0; i < s->gathered[d].num; i++)
            ep_axes_add(&s->scattered, s->gathered[d].axis[i]);
    s->amax = sharding;
    for (int32_t axis = 0; axis < mesh->num_axes; axis++) {
        EpAxisRole role = mesh->axes[axis].role;
        if (adds_to_gradient(role, kind) && !ep_axes_have(&sharding, axis))
            ep_axes_add(&s->summed, axis);
        if (role == EP_AXIS_DATA) add_unless_there(&s->amax, axis);
    }
    for (int32_t i = 0; i < s->amax.num; i++)
        if (kind != EP_TENSOR_EXPERT_WEIGHT || !ep_axes_have(&spec->dims[0], s->amax.axis[i]))
            ep_axes_add(&s->amax_per_expert, s->amax.axis[i]);
}

EpStatus ep_sharding(const EpMesh *given, const EpSpec *given_spec, EpTensorKind kind,
                     const char *tensor, const int64_t *shape, EpSharding *out) {
    static EpStatus (*const divide_as[])(const Dimension *) = {
        [EP_TENSOR_WEIGHT] = divide_weight,
        [EP_TENSOR_EXPERT_WEIGHT] = divide_expert_weight,
        [EP_TENSOR_ACTIVATION] = divide_activation};
    EpCall call = {"ep_sharding", -1};
    EpMesh mesh;
    EpSpec spec;
    EpSharding s = EP_SHARDING_INIT;
    if (!tensor) tensor = "spec";
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(ep_spec_read(&call, &mesh, tensor, given_spec, &spec));
    if (kind < EP_TENSOR_WEIGHT || kind > EP_TENSOR_ACTIVATION)
        return ep_refuse(&call, EP_ERR_RANGE, "kind", "expected an EpTensorKind, got %d",
                         (int)kind);
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpSharding, amax_per_expert),
                                 sizeof(*out)));
    s.ndim = spec.ndim;
    for (int32_t d = 0; d < spec.ndim; d++)
        EP_TRY(divide_as[kind](
            &(Dimension){&call, &mesh, tensor, d, &spec.dims[d], &s.gathered[d], &s.kept[d]}));
    EP_TRY(divide_all(&call, &mesh, tensor, &spec, shape, s.stored));
    for (int32_t d = 0; d < spec.ndim; d++)
        s.used[d] = s.stored[d] * ep_axes_ranks(&mesh, &s.gathered[d]);
    describe_reductions(&mesh, &spec, kind, &s);
    ep_write_struct(out, &s);
    return EP_OK;
}

/* ---- in words ------------------------------------------------------------------------------ */

static void add_shape(EpText *text, const char *what, int32_t ndim, const int64_t *shape) {
    ep_text_add(text, "%-16s[", what);
    for (int32_t d = 0; d < ndim; d++)
        ep_text_add(text, "%s%lld", d ? ", " : "", (long long)shape[d]);
    ep_text_add(text, "]");
}

static void add_dimensions(EpText *text, const EpMesh *mesh, int32_t ndim, const EpAxes *axes,
                           const char *what) {
    for (int32_t d = 0; d < ndim; d++) {
        if (!axes[d].num) continue;
        ep_text_add(text, ", dimension %d %s ", d, what);
        ep_text_add_axes(text, mesh, &axes[d]);
        ep_text_add(text, " (%d)", ep_axes_ranks(mesh, &axes[d]));
    }
}

static void add_axes_line(EpText *text, const EpMesh *mesh, const char *what, const EpAxes *axes,
                          const char *done, const char *nothing) {
    ep_text_add(text, "%-16s", what);
    if (!axes->num || ep_axes_ranks(mesh, axes) == 1) {
        ep_text_add(text, "%s\n", nothing);
        return;
    }
    ep_text_add(text, "%s ", done);
    ep_text_add_axes(text, mesh, axes);
    ep_text_add(text, ", %d ranks\n", ep_axes_ranks(mesh, axes));
}

static void add_sharding(EpText *text, const EpMesh *mesh, const EpSharding *s) {
    add_shape(text, "stored", s->ndim, s->stored);
    add_dimensions(text, mesh, s->ndim, s->kept, "sharded by");
    add_dimensions(text, mesh, s->ndim, s->gathered, "sharded by");
    ep_text_add(text, "\n");
    add_shape(text, "used", s->ndim, s->used);
    add_dimensions(text, mesh, s->ndim, s->gathered, "gathered over");
    add_dimensions(text, mesh, s->ndim, s->kept, "still sharded by");
    ep_text_add(text, "\n");
    add_axes_line(text, mesh, "gradient", &s->scattered, "reduce-scattered over", "not scattered");
    add_axes_line(text, mesh, "", &s->summed, "summed over", "not summed over replicas");
    add_axes_line(text, mesh, "amax", &s->amax, "max over", "local");
    if (s->amax_per_expert.num != s->amax.num)
        add_axes_line(text, mesh, "amax per expert", &s->amax_per_expert, "max over", "local");
}

static EpStatus check_sharding(const EpCall *call, const EpMesh *mesh, const EpSharding *s) {
    if (s->ndim < 1 || s->ndim > EP_SPEC_MAX_DIMS)
        return ep_refuse(call, EP_ERR_NDIM, "sharding", "expected 1 .. %d dimensions, got %d",
                         EP_SPEC_MAX_DIMS, s->ndim);
    int32_t axes = 0;
    for (int32_t d = 0; d < s->ndim; d++) {
        EP_TRY(ep_axes_check(call, mesh, "sharding.gathered", &s->gathered[d]));
        EP_TRY(ep_axes_check(call, mesh, "sharding.kept", &s->kept[d]));
        axes += s->gathered[d].num + s->kept[d].num;
    }
    if (axes > mesh->num_axes)
        return ep_refuse(call, EP_ERR_RANGE, "sharding",
                         "expected the mesh's %d axes at most once each, got %d", mesh->num_axes,
                         axes);
    EP_TRY(ep_axes_check(call, mesh, "sharding.scattered", &s->scattered));
    EP_TRY(ep_axes_check(call, mesh, "sharding.summed", &s->summed));
    EP_TRY(ep_axes_check(call, mesh, "sharding.amax", &s->amax));
    return ep_axes_check(call, mesh, "sharding.amax_per_expert", &s->amax_per_expert);
}

EpStatus ep_sharding_format(const EpMesh *given, const EpSharding *sharding, char *out,
                            size_t bytes) {
    EpCall call = {"ep_sharding_format", -1};
    EpMesh mesh;
    EpSharding s = EP_SHARDING_INIT;
    char written[EP_TEXT_BYTES];
    EpText text = {written, sizeof(written), 0};
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(ep_read_struct(&call, "sharding", sharding, EP_FIRST_SIZE(EpSharding, amax_per_expert),
                          &s));
    EP_TRY(check_sharding(&call, &mesh, &s));
    add_sharding(&text, &mesh, &s);
    return ep_text_deliver(&call, &text, out, bytes);
}
