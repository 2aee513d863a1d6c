/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/mesh.h"

#include <stdio.h>
#include <string.h>

#include "tools/common/util.h"

/* What the library refuses in a mesh or a spec is a request of the user's. */
static bool accepted(const char *option, EpStatus status) {
    return status == EP_OK || bench_refuse("%s: %s", option, ep_last_error());
}

static void choose_text(const char *given, int ranks, char *out, size_t bytes) {
    if (given)
        snprintf(out, bytes, "%s", given);
    else if (ranks >= 4 && ranks % 2 == 0)
        snprintf(out, bytes, "fsdp=2,expert=%d", ranks / 2);
    else
        snprintf(out, bytes, "expert=%d", ranks);
}

/* Tokens are sharded over all axes, so every axis must be one whose ranks have other tokens. */
static bool check_roles(const EpMesh *mesh) {
    for (int32_t i = 0; i < mesh->num_axes; i++) {
        if (mesh->axes[i].role == EP_AXIS_OTHER)
            return bench_refuse("--mesh: expected axes of the roles data, fsdp and expert, got %s",
                                mesh->axes[i].name);
    }
    return true;
}

static bool choose_mesh(const MoeOptions *o, int ranks, MoeMesh *out) {
    int32_t size;
    if (o->mesh && strlen(o->mesh) >= sizeof(out->text))
        return bench_refuse("--mesh: expected fewer than %zu characters, got %zu",
                            sizeof(out->text), strlen(o->mesh));
    choose_text(o->mesh, ranks, out->text, sizeof(out->text));
    out->mesh = (EpMesh)EP_MESH_INIT;
    if (!accepted("--mesh", ep_mesh_parse(out->text, &out->mesh)) || !check_roles(&out->mesh) ||
        !accepted("--mesh", ep_mesh_ranks(&out->mesh, &size)))
        return false;
    if (size != ranks)
        return bench_refuse("--mesh: expected a mesh of the %d ranks, got %s of %d", ranks,
                            out->text, size);
    return accepted("--mesh", ep_mesh_role_axes(&out->mesh, EP_AXIS_EXPERT, &out->expert)) &&
           accepted("--mesh",
                    ep_mesh_group(&out->mesh, &out->expert, 0, &out->ep_size, NULL, NULL));
}

/* The spec of w1 and w2: the user's, or experts by the expert axes, rows by the fsdp axes. */
static bool choose_spec(const MoeOptions *o, MoeMesh *out, EpSpec *spec) {
    *spec = (EpSpec)EP_SPEC_INIT;
    if (o->spec) {
        if (!accepted("--spec", ep_spec_parse(&out->mesh, o->spec, spec))) return false;
        if (spec->ndim != 3)
            return bench_refuse("--spec: expected 3 dimensions, [E, in, out], got \"%s\"", o->spec);
    } else {
        spec->ndim = 3;
        spec->dims[0] = out->expert;
        if (!accepted("--mesh", ep_mesh_role_axes(&out->mesh, EP_AXIS_FSDP, &spec->dims[1])))
            return false;
    }
    return accepted("--spec",
                    ep_spec_format(&out->mesh, spec, out->spec_text, sizeof(out->spec_text)));
}

/* Gradients of expert weights have the weights' type; the router's, which is small, is fp32. */
static void describe_weights(const MoeOptions *o, const EpSpec *spec, MoeMesh *out) {
    const int64_t shapes[NUM_WEIGHTS][3] = {{o->hidden, o->experts, 0},
                                            {o->experts, o->hidden, 2 * o->ffn},
                                            {o->experts, o->ffn, o->hidden}};
    static const char *const names[NUM_WEIGHTS] = {"router", "w1", "w2"};
    for (int i = 0; i < NUM_WEIGHTS; i++) {
        EpWeightConfig *config = &out->weights[i];
        *config = (EpWeightConfig)EP_WEIGHT_CONFIG_INIT;
        config->name = names[i];
        config->spec = *spec;
        memcpy(config->shape, shapes[i], sizeof(shapes[i]));
        config->type = config->grad_type = (EpType)o->type;
        config->reduced_type = EP_TYPE_FP32;
    }
    out->weights[WEIGHT_ROUTER].kind = EP_TENSOR_WEIGHT;
    out->weights[WEIGHT_ROUTER].grad_type = EP_TYPE_FP32;
    out->weights[WEIGHT_ROUTER].spec = (EpSpec)EP_SPEC_INIT;
    out->weights[WEIGHT_ROUTER].spec.ndim = 2;
}

bool moe_mesh_choose(const MoeOptions *options, int ranks, MoeMesh *out) {
    EpSpec spec;
    *out = (MoeMesh){.ep_size = 0};
    if (!choose_mesh(options, ranks, out) || !choose_spec(options, out, &spec)) return false;
    describe_weights(options, &spec, out);
    for (int i = 0; i < NUM_WEIGHTS; i++) {
        const EpWeightConfig *w = &out->weights[i];
        EpSharding sharding = EP_SHARDING_INIT;
        if (!accepted(options->spec ? "--spec" : "--mesh",
                      ep_sharding(&out->mesh, &w->spec, w->kind, w->name, w->shape, &sharding)))
            return false;
    }
    return true;
}

int64_t moe_weight_elements(const MoeMesh *mesh, WeightId id) {
    const EpWeightConfig *w = &mesh->weights[id];
    int64_t count = 1;
    for (int d = 0; d < w->spec.ndim; d++)
        count *= w->shape[d];
    return count;
}
