/* SPDX-License-Identifier: Apache-2.0 */

/**
 * --case calls: what the calls of meshes and weights take the host, on any machine. Those of meshes
 * are for 512 ranks, none of which is started. Those of weights are one rank's, whose weight has 8
 * elements: there is nearly nothing to move, and the rest is the call's own.
 */

#include "ep/ep_weight.h"
#include "tools/bench/lines.h"
#include "tools/common/util.h"

enum { CALLS = 20000, RANKS = 512, MOST_BYTES = 64 };

typedef struct Calls {
    EpMesh mesh;
    EpAxes axes;
    EpSpec spec;
    EpBootstrap alone;
    EpMeshComm *comm;
    EpWeight *weight;
    EpTensor shard, full, result;
    double memory[3][MOST_BYTES];
} Calls;

/* ---- calls --------------------------------------------------------------------------------- */

static EpStatus parse_mesh(Calls *c) {
    return ep_mesh_parse("data=8,fsdp=8,expert=8", &c->mesh);
}

static EpStatus find_group(Calls *c) {
    int32_t ranks[RANKS];
    return ep_mesh_group(&c->mesh, &c->axes, 77, NULL, NULL, ranks);
}

static EpStatus parse_spec(Calls *c) {
    return ep_spec_parse(&c->mesh, "expert,fsdp,_", &c->spec);
}

static EpStatus plan_tensor(Calls *c) {
    static const int64_t shape[] = {256, 7168, 2048};
    EpSharding sharding = EP_SHARDING_INIT;
    return ep_sharding(&c->mesh, &c->spec, EP_TENSOR_EXPERT_WEIGHT, "w1", shape, &sharding);
}

static EpStatus make_weight(const Calls *c, EpWeight **out) {
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    config.name = "w", config.shape[0] = config.shape[1] = config.shape[2] = 2;
    EpStatus status = ep_spec_parse(&c->mesh, "expert,fsdp,_", &config.spec);
    return status == EP_OK ? ep_weight_create(c->comm, &config, out) : status;
}

static EpStatus create_weight(Calls *c) {
    EpWeight *made = NULL;
    EpStatus status = make_weight(c, &made);
    ep_weight_destroy(made);
    return status;
}

static EpStatus ask_sizes(Calls *c) {
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    return ep_weight_sizes(c->weight, NULL, &sizes);
}

static EpStatus gather(Calls *c) {
    return ep_weight_gather(c->weight, NULL, &c->shard, NULL, NULL, &c->full, NULL);
}

static EpStatus reduce(Calls *c) {
    return ep_weight_reduce(c->weight, &c->full, 0, NULL, NULL, &c->result);
}

/* In this order: calls of weights need what open_weight makes. */
enum { FIRST_OF_WEIGHTS = 4, NUM_CALLS = 8 };

static const struct {
    const char *name;
    EpStatus (*call)(Calls *c);
} calls[NUM_CALLS] = {
    {"ep_mesh_parse", parse_mesh},
    {"ep_mesh_group, 64 of 512 ranks", find_group},
    {"ep_spec_parse", parse_spec},
    {"ep_sharding", plan_tensor},
    {"ep_weight_create and _destroy, 1 rank", create_weight},
    {"ep_weight_sizes", ask_sizes},
    {"ep_weight_gather, 1 rank", gather},
    {"ep_weight_reduce, 1 rank", reduce},
};

/* ---- timing -------------------------------------------------------------------------------- */

typedef struct Repeated {
    Calls *calls;
    int which;
} Repeated;

static bool repeat(void *context, int unused) {
    const Repeated *r = context;
    EpStatus status = EP_OK;
    (void)unused;
    for (int i = 0; status == EP_OK && i < CALLS; i++)
        status = calls[r->which].call(r->calls);
    return bench_ok(status, calls[r->which].name);
}

static bool open_mesh(Calls *c) {
    return bench_ok(parse_mesh(c), "ep_mesh_parse") &&
           bench_ok(ep_mesh_axes(&c->mesh, "(fsdp,expert)", &c->axes), "ep_mesh_axes") &&
           bench_ok(parse_spec(c), "ep_spec_parse");
}

static bool open_weight(Calls *c) {
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    config.backend = EP_BACKEND_HOST;
    c->shard = ep_tensor_3d(c->memory[0], EP_TYPE_BF16, 2, 2, 2);
    c->full = ep_tensor_3d(c->memory[1], EP_TYPE_BF16, 2, 2, 2);
    c->result = ep_tensor_3d(c->memory[2], EP_TYPE_FP32, 2, 2, 2);
    return bench_ok(ep_mesh_parse("fsdp=1,expert=1", &c->mesh), "ep_mesh_parse") &&
           bench_ok(ep_bootstrap_local(1, &c->alone), "ep_bootstrap_local") &&
           bench_ok(ep_mesh_comm_create(&c->alone, &c->mesh, &config, &c->comm),
                    "ep_mesh_comm_create") &&
           bench_ok(make_weight(c, &c->weight), "ep_weight_create");
}

static bool time_all(Calls *c, Lines *lines) {
    const RunOptions *o = &lines->options->run;
    for (int i = 0; i < NUM_CALLS; i++) {
        Repeated repeated = {c, i};
        Quantiles time;
        bool ok = i == 0 ? open_mesh(c) : i != FIRST_OF_WEIGHTS || open_weight(c);
        if (!world_all(lines->world, ok) ||
            !time_calls(lines->world, o->warmup, o->iterations, repeat, &repeated, 1, &time))
            return false;
        time_divide(&time, 1, CALLS);
        lines_add(lines, calls[i].name, "us", time, -1, 0);
    }
    return true;
}

bool calls_case(World *world, const Options *options) {
    Lines lines;
    Calls c = {.mesh = EP_MESH_INIT, .spec = EP_SPEC_INIT, .alone = EP_BOOTSTRAP_INIT};
    bool ok =
        lines_begin(&lines, world, options, "the host's time of calls of meshes and weights") &&
        time_all(&c, &lines) && lines_end(&lines);
    ep_weight_destroy(c.weight);
    ep_mesh_comm_destroy(c.comm);
    ep_bootstrap_destroy(&c.alone);
    return ok;
}
